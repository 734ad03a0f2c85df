"""A judge trained by grm_sft.py as the reward of rloo.py or ppo_vl.py.

    JUDGE=runs/NAME/checkpoint-best python rloo.py --rewards examples/judge_reward.py:score --reward-weights 1

or, with the judge in a process of its own (on another machine, say):

    JUDGE=runs/NAME/checkpoint-best python examples/judge_server.py 8008
    JUDGE_URL=http://localhost:8008 python rloo.py --rewards examples/judge_reward.py:score_remote --reward-weights 1

Every response is judged against the next response to the same prompt that says something else, in both orders. Its score is
the probability of the verdict for it, from the log-probs of the two verdicts: 0.5 where all siblings say the same.
"""

import base64
import functools
import json
import os
import re
import sys
import urllib.request
from itertools import groupby
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import grm_sft


@functools.cache
def load_judge(folder: str):
    """Model, processor, EOS ids, and whether rows can share a pack."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = grm_sft.load_model(folder, torch.bfloat16 if device == "cuda" else torch.float32).to(device).eval()
    processor = grm_sft.load_processor(folder)
    end_ids = grm_sft.end_token_ids(model, getattr(processor, "tokenizer", processor))
    return model, processor, end_ids, grm_sft.enable_packing(model)


def judge_pairs(pairs: list[dict]) -> list[float]:
    """[{"prompt", "images", "answer_0", "answer_1"}] -> probability that answer_0 is better, mean of both orders."""
    model, processor, end_ids, shared = load_judge(os.environ["JUDGE"])
    args = grm_sft.Args(max_response_length=int(os.environ.get("JUDGE_TOKENS", 64)))
    rows = [{**pair, "response": grm_sft.write_verdict("1", "Answer")} for pair in pairs]  # a place holder, never read
    source = {"rows": rows, "read": grm_sft.read_pairs, "source": "judge", "folder": Path("."), "seed": 0}
    source |= {"system_prompt": None, "template_kwargs": {}, "video_fps": args.video_fps, "options": ("1", "2")}
    both = [grm_sft.read_judged(source, i, swap) for i in range(len(rows)) for swap in (False, True)]
    judged = []
    for start in range(0, len(both), args.generation_batch_size):
        batch = both[start : start + args.generation_batch_size]
        judged += grm_sft.judge(model, processor, batch, args, end_ids, shared)
    p = [result["probabilities"] for result in judged]
    return [(p[i]["1"] + p[i + 1]["2"]) / 2 for i in range(0, len(p), 2)]


def judge_pairs_remote(pairs: list[dict]) -> list[float]:
    """The same, from judge_server.py."""
    sent = [
        {**p, "images": [base64.b64encode(Path(path).read_bytes()).decode() for path in p["images"]]} for p in pairs
    ]
    request = urllib.request.Request(os.environ["JUDGE_URL"], json.dumps(sent).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.loads(response.read())


def asked(prompt: str | list[dict]) -> str:
    """The text of a question; its pictures come from the image column."""
    content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return re.sub(r"<image>|<video>", "", "".join(parts)).strip()


def said(completion: str | list[dict]) -> str:
    """What is judged: the text in <answer> tags if there is any. Special tokens and placeholders that a policy spells go."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return re.sub(r"<\|[^|]*\|>|<image>|<video>|</?s>", "", found[-1] if found else text).strip() or "(nothing)"


def score(prompts: list, completions: list, image: list | None = None, judge=judge_pairs, **columns) -> list[float]:
    """Reward function in the protocol of rloo.py (see score_responses there). image: a column with one path per row."""
    scores, pairs, owners = [0.5] * len(prompts), [], []
    image = image or [None] * len(prompts)
    for _, members in groupby(range(len(prompts)), key=lambda b: (str(prompts[b]), image[b])):
        members = list(members)
        for k, b in enumerate(members):
            siblings = members[k + 1 :] + members[:k]
            rival = next((other for other in siblings if said(completions[other]) != said(completions[b])), None)
            if rival is None:
                continue
            images = [image[b]] if image[b] is not None else []
            answers = {"answer_0": said(completions[b]), "answer_1": said(completions[rival])}
            pairs.append({"prompt": asked(prompts[b]), "images": images, **answers})
            owners.append(b)
    for b, value in zip(owners, judge(pairs) if pairs else []):
        scores[b] = value
    return scores


def score_remote(prompts: list, completions: list, **columns) -> list[float]:
    return score(prompts, completions, judge=judge_pairs_remote, **columns)

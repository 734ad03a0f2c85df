r"""A judge trained by grm_sft.py as the reward of rloo.py or ppo_vl.py.

    JUDGE=runs/NAME/checkpoint-best python rloo.py --rewards examples/judge_reward.py:score --reward-weights 1

or, with the judge in a process of its own (on another machine, say):

    JUDGE=runs/NAME/checkpoint-best python examples/judge_server.py 8008
    JUDGE_URL=http://localhost:8008 \
        python rloo.py --rewards examples/judge_reward.py:score_remote --reward-weights 1

Each response is judged against the next one to the same prompt that says something else, in both orders. Its
score is the probability of the verdict for it: 0.5 where all siblings say the same.
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

import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parent.parent))
import grm_sft

ARGS = grm_sft.Args(max_response_length=int(os.environ.get("JUDGE_TOKENS", 64)), max_length=2**14)


@functools.cache
def load_judge(folder: str):
    cuda = torch.cuda.is_available()
    model = grm_sft.load_model(folder, torch.bfloat16 if cuda else torch.float32).to(
        "cuda" if cuda else "cpu"
    )
    return model.eval(), transformers.AutoProcessor.from_pretrained(folder)


def judge_pairs(pairs: list[dict]) -> list[float]:
    """[{"prompt", "images", "answer_0", "answer_1"}] -> probabilities that answer_0 is better."""
    model, processor = load_judge(os.environ["JUDGE"])
    tokenizer, size, p = getattr(processor, "tokenizer", processor), ARGS.generation_batch_size, []
    for start in range(0, 2 * len(pairs), size):
        batch = [
            (pairs[i // 2] | {"verdict": "1"}, i) for i in range(start, min(start + size, 2 * len(pairs)))
        ]
        examples = [
            grm_sft.encode_row(
                ARGS, model, processor, row=row, entry=i, folder=Path(), share=False, previous=None
            )
            for row, i in batch
        ]
        if not grm_sft.packing.is_packed(model):
            grm_sft.packing.enable_packing_if_exact(
                model=model,
                forward=grm_sft.Judge(model),
                prompts=[sample.prompt for sample in examples[0].samples],
                max_length=ARGS.max_length,
                max_tokens=ARGS.micro_batch_tokens,
            )
        judged = grm_sft.write_judgements(ARGS, model, tokenizer, examples)
        p += [record["probabilities"] for record in judged]
    first = [x["1"] / (x["1"] + x["2"]) for x in p]  # without ties
    return [(first[i] + 1 - first[i + 1]) / 2 for i in range(0, len(p), 2)]


def judge_pairs_remote(pairs: list[dict]) -> list[float]:
    """The same, from judge_server.py."""
    files = [
        [base64.b64encode(Path(path).read_bytes()).decode() for path in pair["images"]] for pair in pairs
    ]
    sent = [pair | {"images": images} for pair, images in zip(pairs, files)]
    request = urllib.request.Request(os.environ["JUDGE_URL"], json.dumps(sent).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.loads(response.read())


def text_of(chat: str | list[dict]) -> str:
    """A string, or the last message of a chat, without marks of pictures."""
    content = chat if isinstance(chat, str) else chat[-1]["content"]
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return re.sub("<image>|<video>", "", "".join(parts)).strip()


def said(completion: str | list[dict]) -> str:
    """What is judged: the text in <answer> tags, if there are any."""
    found = re.findall("<answer>(.*?)</answer>", text_of(completion), re.DOTALL)
    return (found[-1] if found else text_of(completion)).strip() or "(nothing)"


def score(
    prompts: list, completions: list, image: list | None = None, judge=judge_pairs, **columns
) -> list[float]:
    """Reward function in TRL's protocol. image: a column with one path per row."""
    scores, pairs, owners, answers = [0.5] * len(prompts), [], [], [said(x) for x in completions]
    image = image or [None] * len(prompts)
    for _, members in groupby(range(len(prompts)), key=lambda b: (str(prompts[b]), image[b])):
        members = list(members)
        for k, b in enumerate(members):
            rivals = [x for x in members[k + 1 :] + members[:k] if answers[x] != answers[b]]
            if rivals:
                asked = {"prompt": text_of(prompts[b]), "images": [image[b]] if image[b] else []}
                pairs.append(asked | {"answer_0": answers[b], "answer_1": answers[rivals[0]]})
                owners.append(b)
    for b, value in zip(owners, judge(pairs) if pairs else []):
        scores[b] = value
    return scores


def score_remote(prompts: list, completions: list, **columns) -> list[float]:
    return score(prompts, completions, judge=judge_pairs_remote, **columns)

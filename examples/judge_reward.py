r"""A judge trained by grm_sft.py as a reward for rloo.py or ppo_vl.py.

    JUDGE=runs/NAME/checkpoint-500 python rloo.py --rewards examples/judge_reward.py:score

The judge can also run in another process, for example on another machine:

    JUDGE=runs/NAME/checkpoint-500 python examples/judge_server.py 8008
    JUDGE_URL=http://localhost:8008 \
        python rloo.py --rewards examples/judge_reward.py:score_remote

Each response is compared, in both orders, with the next response to the same prompt that has another answer.
Its score is the probability of the verdict in its favor, or 0.5 if all responses have the same answer.
"""

import base64
import functools
import io
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
from common import packing, packing_check

ARGS = grm_sft.Args(
    max_response_length=int(os.environ.get("JUDGE_TOKENS", 64)),
    max_length=2**14,
    micro_batch_tokens=2**14,
    dtype="bfloat16" if torch.cuda.is_available() else "float32",
)


@functools.cache
def load_judge(checkpoint: str):
    """Model and processor, or the tokenizer of a text model."""
    model = grm_sft.load_model(ARGS, checkpoint)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return model, transformers.AutoProcessor.from_pretrained(checkpoint)


def judge_pairs(pairs: list[dict]) -> list[float]:
    """Probability that answer_1 is better, per pair {"prompt", "images", "answer_1", "answer_2"}.

    An order in which the judge's reasoning is truncated counts as 0.5: raise JUDGE_TOKENS."""
    model, processor = load_judge(os.environ["JUDGE"])
    data = grm_sft.ExampleDataset(
        args=ARGS,
        source="judge_reward.py",
        rows=[pair | {"verdict": "1"} for pair in pairs],  # a verdict is required, but not used
        groups=[],
        data_dir=Path(),
        model=model,
        processor=processor,
        training=False,
    )
    both_orders = [grm_sft.ExampleId(i, swapped) for i in range(len(pairs)) for swapped in (False, True)]
    examples = data.encode_all(both_orders)
    if examples and not packing.is_packed(model):
        packing_check.choose_layout(
            network=grm_sft.Judge(model),
            prompts=[examples[0].prefix],
            max_length=ARGS.max_length,
            max_tokens=ARGS.micro_batch_tokens,
            must_generate=True,
        )
    wins = [[0.5, 0.5] for _ in pairs]  # probability that the first candidate is better, in each order
    for start in range(0, len(examples), ARGS.max_num_seqs):
        batch = examples[start : start + ARGS.max_num_seqs]
        for record in grm_sft.judge_examples(ARGS, model, data.tokenizer, batch):
            if record["soft_correct"] is not None:
                p = record["probabilities"]
                wins[record["row"]][record["swapped"]] = p["1"] / (p["1"] + p["2"])  # without ties
    return [(first + 1 - swapped) / 2 for first, swapped in wins]


def judge_pairs_remote(pairs: list[dict]) -> list[float]:
    """The same, computed by judge_server.py."""
    body = []
    for pair in pairs:
        images = []
        for image in pair["images"]:
            image.save(buffer := io.BytesIO(), "PNG")
            images.append(base64.b64encode(buffer.getvalue()).decode())
        body.append(pair | {"images": images})
    request = urllib.request.Request(os.environ["JUDGE_URL"], json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.loads(reply.read())


def get_text(chat: str | list[dict]) -> str:
    """A string, or the text of a chat's last message, without media markers."""
    content = chat if isinstance(chat, str) else chat[-1]["content"]
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return re.sub("<image>|<video>", "", "".join(parts)).strip()


def get_answer(completion: str | list[dict]) -> str:
    """The text in the last <answer> tags, or without tags the whole response."""
    text = get_text(completion)
    answers = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
    return (answers[-1] if answers else text).strip() or "(empty)"


def score(prompts: list, completions: list, chats: list, judge=judge_pairs, **columns) -> list[float]:
    """Reward function. A prompt's responses have the same element of chats, with the images for the judge."""
    answers = [get_answer(completion) for completion in completions]
    pairs = []
    judged = []  # the response that each pair scores
    for _, group in groupby(range(len(prompts)), key=lambda b: id(chats[b])):
        group = list(group)
        for k, b in enumerate(group):
            others = [i for i in group[k + 1 :] + group[:k] if answers[i] != answers[b]]
            if others:
                parts = [part for message in chats[b] for part in message["content"]]
                images = [part["image"] for part in parts if part["type"] == "image"]
                pair = {"prompt": get_text(prompts[b]), "images": images}
                pairs.append(pair | {"answer_1": answers[b], "answer_2": answers[others[0]]})
                judged.append(b)
    scores = [0.5] * len(prompts)
    for b, probability in zip(judged, judge(pairs) if pairs else []):
        scores[b] = probability
    return scores


def score_remote(prompts: list, completions: list, chats: list, **columns) -> list[float]:
    return score(prompts, completions, chats, judge=judge_pairs_remote)

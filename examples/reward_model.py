"""A reward model trained by reward_bt.py, or any text classifier with one output, for rloo.py or ppo_vl.py:

REWARD_MODEL=runs/NAME/checkpoint-9 python rloo.py --rewards examples/reward_model.py:score
"""

import functools
import itertools
import os
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parent.parent))
from common import packing, packing_check
from reward_bt import RewardModel, encode_ranking

MAX_TOKENS = 8192  # per forward pass


@functools.cache
def load(checkpoint: str):
    """Reward model and processor, or the tokenizer of a text model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head_file = Path(checkpoint) / "score.safetensors"
    has_head = head_file.is_file()
    auto_class = transformers.AutoModel if has_head else transformers.AutoModelForSequenceClassification
    model = auto_class.from_pretrained(checkpoint, dtype="auto" if device == "cuda" else torch.float32)
    reward_model = RewardModel(model.base_model)
    weight = load_file(head_file)["score.weight"] if has_head else model.score.weight
    reward_model.score.load_state_dict({"weight": weight})
    return reward_model.to(device).eval(), transformers.AutoProcessor.from_pretrained(checkpoint)


@torch.no_grad()
def score(chats: list, texts: list[str], **columns) -> list[float]:
    """Reward of each response: the score at the last token of its chat."""
    reward_model, processor = load(os.environ["REWARD_MODEL"])
    model = reward_model.model
    prompts = []
    responses = []
    groups = []  # (prompt index, response indices); responses to the same prompt are adjacent
    for _, indices in itertools.groupby(range(len(chats)), key=lambda b: id(chats[b])):
        indices = list(indices)
        answers = []
        for b in indices:
            answers.append([{"role": "assistant", "content": [{"type": "text", "text": texts[b]}]}])
        row_id = len(prompts)
        prompt, own_responses = encode_ranking(model, processor, chats[indices[0]], answers, row_id)
        groups.append((len(prompts), indices))
        prompts.append(prompt)
        responses += own_responses
    max_length = max(prompt.length for prompt in prompts) + max(map(len, responses))
    max_tokens = max(MAX_TOKENS, max_length)
    if not hasattr(model, "packing_message"):  # check on the first call only
        model.packing_message = packing_check.choose_layout(
            network=reward_model,
            prompts=prompts[:1],
            max_length=max_length,
            max_tokens=max_tokens,
        )
        print(f"reward model: {model.packing_message}", file=sys.stderr)
    packs = packing.iter_rank_packs(
        model=model,
        groups=groups,
        prompts=prompts,
        responses=responses,
        max_tokens=max_tokens,
    )
    scores = torch.zeros(len(texts), device=model.device)
    for pack in packs:
        scores[pack.response_index] = reward_model(pack)
    return scores.tolist()

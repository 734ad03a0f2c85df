"""A folder of reward_bt.py, or any text classifier with one output, as the reward of rloo.py or ppo_vl.py:

REWARD_MODEL=runs/NAME/checkpoint-9 python rloo.py --rewards examples/reward_model.py:score --reward-weights 1
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
from common import packing
from reward_bt import RewardModel, encode_ranking

MAX_TOKENS = 8192  # of one forward


@functools.cache
def load(folder: str):
    """-> model and processor, or a text model's tokenizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = Path(folder) / "score.safetensors"
    is_vision = hasattr(transformers.AutoConfig.from_pretrained(folder), "vision_config")
    kind = transformers.AutoModel if is_vision else transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype="auto" if device == "cuda" else torch.float32)
    module = RewardModel(model.base_model)
    weight = load_file(head)["score.weight"] if head.is_file() else model.score.weight
    module.score.load_state_dict({"weight": weight})
    return module.to(device).eval(), transformers.AutoProcessor.from_pretrained(folder)


@torch.no_grad()
def score(chats: list, texts: list[str], **columns) -> list[float]:
    """The score at the last token of each whole chat. Responses to one prompt are neighbours."""
    module, processor = load(os.environ["REWARD_MODEL"])
    model = module.model
    prompts, responses, groups = [], [], []
    for _, own in itertools.groupby(range(len(chats)), key=lambda b: id(chats[b])):
        own = list(own)
        answers = [[{"role": "assistant", "content": [{"type": "text", "text": texts[b]}]}] for b in own]
        prompt, own_responses = encode_ranking(model, processor, chats[own[0]], answers, index=len(prompts))
        groups.append((len(prompts), own))
        prompts.append(prompt)
        responses += own_responses
    longest = max(prompt.length for prompt in prompts) + max(map(len, responses))
    max_tokens = max(MAX_TOKENS, longest)
    if not hasattr(model, "line"):  # decided once, by a comparison on the first prompt
        model.line = packing.enable_packing_if_exact(
            model=model, forward=module, prompts=prompts[:1], max_length=longest, max_tokens=max_tokens
        )
        print(f"reward model: {model.line}", file=sys.stderr)
    packs = packing.packs_of_rank(
        groups=groups,
        prompts=prompts,
        encode=prompts.__getitem__,
        responses=responses,
        max_tokens=max_tokens,
        packed=packing.is_packed(model),
    )
    scores = torch.zeros(len(texts), device=model.device)
    for pack in packs:
        scores[pack.response_index] = module(pack.to(model.device))
    return scores.tolist()

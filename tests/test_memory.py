"""tools/memory.py predicts what autograd keeps, and docs/recipes.md has the numbers that it prints."""

import shlex
from functools import cache

import pytest
import torch
import transformers
import tyro
from conftest import ROOT
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from common import packing
from tools import memory

SIZES = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads".split()
SIZES += ["intermediate_size", "vocab_size"]
TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420}
NARROW_TOWER = {"depth": 4, "hidden_size": 256, "num_heads": 4, "intermediate_size": 684}
MODELS = {  # sizes of the language model, whether embeddings are tied, and the vision tower
    "Qwen/Qwen2.5-VL-3B-Instruct": ((2048, 36, 16, 2, 11008, 151936), True, TOWER),
    "Qwen/Qwen2.5-VL-7B-Instruct": ((3584, 28, 28, 4, 18944, 152064), False, TOWER),
    "narrow": ((512, 3, 4, 1, 2688, 1000), True, NARROW_TOWER | {"fullatt_block_indexes": [1, 3]}),
}


@cache
def config_of(name: str) -> Qwen2_5_VLConfig:
    """As on the Hub, or with the proportions of the 7B model, seven times as narrow."""
    sizes, is_tied, vision = MODELS[name]
    text = {**dict(zip(SIZES, sizes)), "tie_word_embeddings": is_tied}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}  # of a head of 128
    vision = {**vision, "out_hidden_size": text["hidden_size"]}
    kinds = {"text_config": text, "vision_config": vision, "image_token_id": 999}
    return Qwen2_5_VLConfig(**kinds, tie_word_embeddings=is_tied)


@pytest.fixture(scope="module")
def model():
    model = Qwen2_5_VLForConditionalGeneration(config_of("narrow")).bfloat16().eval()
    packing.set_attention(model, "packed")
    return model


def make_pack(model, P: int, R: int, side: int) -> packing.Pack:
    """A prompt of P tokens, with an image of side x side pixels, and four responses of R tokens."""
    rows = side // 14
    image = torch.full((1, rows * rows // 4), model.config.image_token_id)
    ids = torch.cat([image, torch.randint(0, 900, (1, P))], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"pixel_values": torch.randn(rows * rows, 1176).bfloat16()}
    inputs |= {"image_grid_thw": torch.tensor([[1, rows, rows]])}
    inputs |= {"mm_token_type_ids": (ids == model.config.image_token_id).long()}
    prompt = packing.make_prompt(model, inputs)
    responses = [packing.continue_prompt(prompt, torch.randint(0, 900, (R,))) for _ in range(4)]
    return next(packing.iter_rank_packs(model, [(0, [*range(4)])], [prompt], responses, 10**6))


def saved_bytes(model, pack: packing.Pack) -> int:
    """Bytes that autograd keeps in a forward pass, without weights; each storage counts once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x  # alive, so that no address is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        packing.forward_hidden(model, pack)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def predicted_bytes(model, P: int, R: int, side: int) -> int:
    P += side**2 // 28**2
    text, vision = model.config.get_text_config(), model.config.vision_config
    keys, scores = P + 4 * (P + R), P * P + 4 * R * (P + R)
    language = memory.language_activations(text, P + 4 * R, keys, scores, checkpointing=False)
    return language + memory.vision_activations(vision, side**2, checkpointing=False)


@pytest.mark.parametrize("small, large", [((40, 10, 28), (320, 80, 28)), ((40, 10, 112), (40, 10, 448))])
def test_predicted_differences_are_what_autograd_keeps(model, small, large):
    measured = saved_bytes(model, make_pack(model, *large)) - saved_bytes(model, make_pack(model, *small))
    predicted = predicted_bytes(model, *large) - predicted_bytes(model, *small)
    assert abs(predicted / measured - 1) < 0.15


@pytest.mark.parametrize("family", ["Qwen3", "InternVL", "Qwen2VL"])
def test_other_families(family):
    """Without images, and with other names in the config of the vision tower."""
    config = getattr(transformers, f"{family}Config")()
    assert all(value >= 0 for value in memory.estimate(memory.Args(), config).values())
    if family == "Qwen2VL":
        before = memory.vision_activations(config.vision_config, 28**2, checkpointing=False)
        config.vision_config.hidden_size = 1  # the text model's; the tower's is embed_dim
        assert memory.vision_activations(config.vision_config, 28**2, checkpointing=False) == before


def test_parameters_are_those_of_the_hub():
    """The model cards' sizes, in billions: all, and the vision tower."""
    for name, (total, vision) in {"3B": (3.75, 0.67), "7B": (8.29, 0.68)}.items():
        count = memory.count_parameters(config_of(f"Qwen/Qwen2.5-VL-{name}-Instruct"), lora_rank=16)
        num = sum(count.values()) - count["adapters"]
        assert abs(num / 1e9 - total) < 0.01 and abs(count["vision"] / 1e9 - vision) < 0.015, name


def test_table_of_the_recipes_is_what_the_tool_prints():
    text = (ROOT / "docs/recipes.md").read_text().split("## Will it fit")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert len(rows) >= 8
    for row in rows:
        flags, numbers = row[3:].split("` | ", 1)
        args = tyro.cli(memory.Args, args=shlex.split(flags))
        assert f"| {numbers}" == memory.markdown_row(memory.estimate(args, config_of(args.model))), flags

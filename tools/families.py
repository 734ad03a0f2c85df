"""What becomes of each family: packed, plain or refused, and how far it is from the unmodified model.

    python tools/families.py                     # the tables of docs/models.md, about 10 minutes on one core
    python tools/families.py "Gemma 3" "llava"   # families with these words in their name, printed

Of each configuration a tiny model is made, with weights so large that a wrong mask shows, saved, and loaded
as rloo.py does. It is packed if that proves exact, samples responses, and all log-probs are compared with
those of an untouched copy that reads one response at a time. FAMILIES are what people use; the scan takes
each decoder of transformers that a generic configuration fits.

Windows are 64 tokens wide, prompts 107 to 131 tokens long, responses up to 40.
"""

import inspect
import logging
import math
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402, F401  before transformers # isort: skip
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402

import rloo  # noqa: E402
from common import packing  # noqa: E402

PAGE = ROOT / "docs/models.md"
LONGEST = 256  # tokens of prompt and response at most, as a run would be told
G = 3  # responses to a prompt
ENDS = [*range(5, 300, 30)]  # tokens that end a response: some soon, some never
IMAGE, BEGIN, END, VIDEO = 300, 301, 302, 303

# Configurations call the same size by many names; each takes those that it knows.
SIZES = {
    64: "hidden_size n_embd d_model word_embed_proj_dim dim",
    96: "intermediate_size n_inner ffn_dim ffn_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers num_key_value_heads num_experts_per_tok moe_topk",
    4: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts n_routed_experts",
    16: "head_dim v_head_dim kv_lora_rank query_pre_attn_scalar",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim",
    24: "q_lora_rank",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    64: "hidden_size n_embd d_model word_embed_proj_dim dim",
    512: "max_position_embeddings n_positions max_seq_len n_ctx",
    320: "vocab_size",
    1: "n_group topk_group n_shared_experts first_k_dense_replace bos_token_id",
    0: "pad_token_id eos_token_id",
}
TEXT = {name: size for size, names in SIZES.items() for name in names.split()}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER |= {"image_size": 32, "patch_size": 8}
TOKENS = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO}
TOKENS |= {"vision_start_token_id": BEGIN, "vision_end_token_id": END}

WINDOW = {"sliding_window": 64}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
CAPS = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
LLAMA3 = ROPE | {"rope_type": "llama3", "original_max_position_embeddings": 64}
LLAMA3 |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALES = {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}
DYNAMIC = ROPE | {"rope_type": "dynamic", "factor": 4.0}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}
INNER = {
    "Gemma 2": {"model_type": "gemma2"} | MIXED | CAPS,
    "Gemma 2, no windows": {"model_type": "gemma2", "layer_types": ["full_attention"] * 2} | CAPS,
    "gpt-oss": {"model_type": "gpt_oss"} | MIXED,
    "Granite": {"model_type": "granite"} | SCALES,
    "Mistral, windows": {"model_type": "mistral"} | WINDOW,
    "Phi-3, windows": {"model_type": "phi3"} | WINDOW,
}


@dataclass
class Family:
    name: str
    model_type: str
    text: dict  # of the language model, over TEXT; with a model_type of its own in models that see
    more: dict | None = None  # of a model that sees
    tower: dict | None = None  # of its vision tower, over TOWER
    pictures: str = ""  # the form in which it takes them, see `picture_inputs`
    tiles: int = 1  # rows of pixels per picture
    types: tuple[str, int, int] | None = None  # an input per token: its name, 1 for pictures, for new tokens

    def config(self):
        kind = self.text.get("model_type", f"{self.model_type}_text" if self.tower is not None else self.model_type)
        text = sizes_of(kind) | self.text
        if self.tower is None:
            return transformers.AutoConfig.for_model(self.model_type, **text)
        inner = {"text_config": text, "vision_config": TOWER | self.tower}
        return transformers.AutoConfig.for_model(self.model_type, **inner, **TOKENS, **(self.more or {}))


def sizes_of(model_type: str) -> dict[str, int]:
    """Those of TEXT that its configuration knows: a cache takes notice of windows that a model doesn't have."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    return {name: size for name, size in TEXT.items() if name in known}


def qwen(name: str, kind: str, text: dict | None = None, **tower) -> Family:
    sizes = {"model_type": kind, "depth": 2, "num_heads": 4, "out_hidden_size": 64}
    text = MROPE | (text or {}) | {"model_type": f"{kind}_text"}
    return Family(name, kind, text, tower=sizes | tower, pictures="grid", types=("mm_token_type_ids", 1, 0))


GEMMA3 = Family("Gemma 3", "gemma3", MIXED, {"mm_tokens_per_image": 4}, {}, "rows")
GEMMA3.types = ("token_type_ids", 1, 0)
LLAVA = Family("LLaVA", "llava", {"model_type": "llama"}, {}, {"model_type": "clip_vision_model"}, "rows")
IDEFICS3 = Family("Idefics3", "idefics3", {"model_type": "llama"}, {"scale_factor": 2}, {}, "nested")
SQUARE = {"image_size": [32, 32], "patch_size": [8, 8]}
INTERNVL = Family("InternVL", "internvl", {"model_type": "qwen2"}, {}, SQUARE, "rows")
ALL_PATCHES = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
PIXTRAL = replace(LLAVA, name="Pixtral", more=ALL_PATCHES, tower={"model_type": "pixtral"}, pictures="sized")
PIXTRAL.text = {"model_type": "mistral"}
PALIGEMMA = Family("PaliGemma", "paligemma", {"model_type": "gemma"}, {"projection_dim": 64}, {}, "rows")
DEEPSTACK = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
MLLAMA = {"num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 64}
QWEN2_5 = {"window_size": 32, "fullatt_block_indexes": [1]}

FAMILIES = [
    Family("Bloom", "bloom", {}),
    Family("Cohere", "cohere", {"logit_scale": 0.3}),
    Family("Cohere 2, windows", "cohere2", MIXED | {"logit_scale": 0.3}),
    Family("Gemma 2", "gemma2", MIXED | CAPS),
    Family("Gemma 2, its own window of 4096", "gemma2", MIXED | CAPS | {"sliding_window": 4096}),
    Family("Gemma 3, text", "gemma3_text", MIXED),
    GEMMA3,
    replace(GEMMA3, name="Gemma 3, without pictures", pictures=""),
    Family("GPT-2", "gpt2", {}),
    Family("GPT-J", "gptj", {}),
    Family("GPT-NeoX", "gpt_neox", {}),
    Family("gpt-oss", "gpt_oss", MIXED),
    Family("Granite", "granite", SCALES),
    IDEFICS3,
    replace(IDEFICS3, name="Idefics3, padded pictures", pictures="padded"),
    replace(IDEFICS3, name="Idefics3, two tiles", tiles=2),
    INTERNVL,
    replace(INTERNVL, name="InternVL, two tiles", tiles=2),
    Family("Llama", "llama", {}),
    Family("Llama 3", "llama", {"rope_parameters": LLAMA3}),
    Family("Llama, dynamic RoPE", "llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 200}),
    Family("Llama, beyond its length", "llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 99}),
    Family("Llama 3.2 Vision", "mllama", {"cross_attention_layers": [1]}, {}, MLLAMA, "crossed"),
    LLAVA,
    *[replace(LLAVA, name=f"LLaVA around {name}", text=text) for name, text in INNER.items()],
    Family("Mamba", "mamba", {}),
    Family("Mistral", "mistral", {"sliding_window": None}),
    Family("Mistral, windows", "mistral", WINDOW),
    replace(PIXTRAL, name="Mistral 3", model_type="mistral3", more={"vision_feature_layer": -1}),
    Family("OLMo 2", "olmo2", {}),
    Family("OPT", "opt", {}),
    replace(PALIGEMMA, types=("token_type_ids", 0, 1)),
    Family("Phi", "phi", {}),
    Family("Phi-3", "phi3", {"sliding_window": None}),
    Family("Phi-3, windows", "phi3", WINDOW),
    Family("Phi-3, longrope", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 200}),
    Family("Phi-3, longrope beyond", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 120}),
    PIXTRAL,
    replace(PIXTRAL, name="Pixtral, two sizes", pictures="two sizes"),
    Family("Qwen2", "qwen2", {}),
    Family("Qwen2 MoE", "qwen2_moe", {}),
    Family("Qwen3", "qwen3", {}),
    Family("Qwen3, windows", "qwen3", MIXED | {"use_sliding_window": True}),
    Family("Qwen3 MoE", "qwen3_moe", {}),
    Family("Qwen3-Next", "qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}),
    qwen("Qwen2-VL", "qwen2_vl", embed_dim=32, hidden_size=64, mlp_ratio=2),
    qwen("Qwen2.5-VL", "qwen2_5_vl", **QWEN2_5),
    qwen("Qwen3-VL", "qwen3_vl", **DEEPSTACK),
    qwen("Qwen3-VL MoE", "qwen3_vl_moe", **DEEPSTACK),
    Family("SmolLM3", "smollm3", {}),
    Family("SmolLM3, windows", "smollm3", MIXED | {"use_sliding_window": True}),
    replace(IDEFICS3, name="SmolVLM", model_type="smolvlm"),
]


@dataclass
class Result:
    name: str
    path: str  # packed, plain, refused (a run would stop), or fails (the unmodified model does)
    reason: str = ""
    training: float = math.nan  # largest difference of log-probs, in nats
    sampling: float = math.nan
    gradient: float = math.nan  # relative, see `gradient_error`


# ---- one family ----


def measure(family: Family) -> Result:
    """What a run of rloo.py would do with it, and how far that is from the unmodified model."""
    model, untouched = make_models(family)
    all_inputs = [make_inputs(family, model, 107, 1), make_inputs(family, model, 131, 2)]
    all_inputs.append(make_inputs(family, model, 119, 0))
    prompts = []
    for i, inputs in enumerate(all_inputs):
        prompts.append(replace(packing.make_prompt(model, inputs, index=i), seed=i))
    line = packing.enable_packing_if_exact(
        model=model,
        forward=lambda pack: packing.response_logprobs(model, pack)[0],
        prompts=prompts,
        max_length=LONGEST,
        max_tokens=1024,
    )
    is_packed = packing.is_packed(model)
    responses = rloo.generate(rloo.Args(max_response_length=40), model, prompts, G, 1.0, ENDS)
    ids = [response.ids for response in responses]
    weights = torch.randn(len(ids), 40, generator=torch.Generator().manual_seed(0))  # of the loss
    expected = torch.zeros(len(ids), 40)
    for b, response in enumerate(ids):
        logprobs = one_by_one(family, untouched, all_inputs[b // G], response)
        (logprobs @ weights[b, : len(response)]).backward()
        expected[b, : len(response)] = logprobs.detach()
    trained = torch.zeros_like(expected)
    groups = [(i, list(range(i * G, i * G + G))) for i in range(len(prompts))]
    for pack in packing.packs_of_rank(groups, prompts, prompts.__getitem__, ids, 1024, packed=is_packed):
        logprobs, _ = packing.response_logprobs(model, pack)
        (logprobs @ pack.tokens(weights)).backward()
        trained[pack.token_index] = logprobs.detach()
    sampled = torch.nn.utils.rnn.pad_sequence([response.logprobs for response in responses], True)
    difference = (sampled - expected[:, : sampled.shape[1]]).abs()
    stops = difference.sum() / sum(map(len, ids)) > packing.TOLERANCE[torch.float32]
    return Result(
        name=family.name,
        path="packed" if is_packed else "refused" if stops else "plain",
        reason="" if is_packed else line.partition("packed: ")[2],
        training=float((trained - expected).abs().max()),
        sampling=float(difference.max()),
        gradient=gradient_error(model, untouched) if is_packed else math.nan,
    )


def gradient_error(model, untouched) -> float:
    """Norm of the difference over the norm, of the worst tensor; small ones over a thousandth of the whole."""
    all_norms = [parameter.grad.norm() for parameter in untouched.parameters() if parameter.grad is not None]
    least = torch.stack(all_norms).norm() / 1000
    errors = []
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        if ours.grad is not None or theirs.grad is not None:
            a, b = (p.new_zeros(p.shape) if p.grad is None else p.grad for p in (ours, theirs))
            errors.append(float((a - b).norm() / max(b.norm(), least)))
    return max(errors)


def make_models(family: Family):
    """-> the model as rloo.py loads it, twice."""
    torch.manual_seed(0)
    config = family.config()
    is_vision = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if is_vision else transformers.AutoModelForCausalLM
    model = kind.from_config(config)
    for parameter in model.parameters():  # with the usual 0.02 a wrong mask would change little
        noise = torch.randn_like(parameter) * 0.15
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return [rloo.load_model(folder, torch.float32).eval() for _ in range(2)]


def make_inputs(family: Family, model, length: int, num_pictures: int) -> dict[str, Tensor]:
    """A prompt as a processor makes it: pictures, and random words."""
    words = torch.randint(10, 300, (length,), generator=torch.Generator().manual_seed(length))
    ids = words.tolist()
    inputs = {}
    if family.pictures == "crossed" and num_pictures:
        inputs = crossed_inputs(num_pictures, length)
        ids = [IMAGE] * num_pictures + ids
    elif family.pictures and num_pictures:
        inputs = picture_inputs(family, num_pictures)
        features = model.base_model.get_image_features(**inputs, return_dict=True).pooler_output
        for picture in features:
            ids = [BEGIN, *[IMAGE] * len(picture), END, *ids]
    inputs["input_ids"] = torch.tensor([ids[:length]])
    inputs["attention_mask"] = torch.ones(1, length, dtype=torch.long)
    if family.types:
        name, of_pictures, _ = family.types
        inputs[name] = (inputs["input_ids"] == IMAGE).long() * of_pictures
    return inputs


def picture_inputs(family: Family, n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n)
    pixels = torch.rand(n * family.tiles, 3, 32, 32, generator=generator)
    if family.pictures == "nested":
        return {"pixel_values": pixels[None]}
    if family.pictures == "padded":
        mask = torch.ones(1, len(pixels), 32, 32, dtype=torch.long)
        mask[0, 0, 16:] = 0  # the first one is half as high
        return {"pixel_values": pixels[None], "pixel_attention_mask": mask}
    if "size" in family.pictures:
        other = [16, 32] if family.pictures == "two sizes" else [32, 32]
        return {"pixel_values": pixels, "image_sizes": torch.tensor([other, [32, 32]][:n])}
    if family.pictures == "grid":
        grid = torch.tensor([[1, 4, 4], [1, 2, 6]][:n])
        patches = torch.rand(int(grid.prod(1).sum()), 3 * 2 * 8 * 8, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": grid}
    return {"pixel_values": pixels}


def crossed_inputs(n: int, length: int) -> dict[str, Tensor]:
    """Of a model whose text looks at pictures from aside."""
    pixels = torch.rand(1, n, 4, 3, 32, 32, generator=torch.Generator().manual_seed(n))
    one_tile = torch.tensor([1, 0, 0, 0])
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.ones(1, n, dtype=torch.long),
        "aspect_ratio_mask": one_tile.expand(1, n, 4),
        "cross_attention_mask": one_tile.expand(1, length, n, 4),
    }


def one_by_one(family: Family, model, inputs: dict, response: Tensor) -> Tensor:
    """Log-probs (R,) of a response by the unmodified model."""
    P, R = inputs["input_ids"].shape[1], len(response)
    whole = {}
    for name, x in inputs.items():
        per_token = x.shape[:2] == (1, P)
        whole[name] = torch.cat([x, x[:, -1:].repeat_interleave(R, dim=1)], dim=1) if per_token else x
    whole["input_ids"][0, P:] = response
    if family.types:
        name, _, of_new = family.types
        whole[name][0, P:] = of_new
    logits = model(**whole, use_cache=False).logits[0, P - 1 : P + R - 1].float()
    never = torch.zeros(logits.shape[1], dtype=torch.bool)
    never[packing.media_token_ids(model.config)] = True
    logp = logits.masked_fill(never, -torch.inf).log_softmax(-1)
    return logp.gather(1, response[:, None])[:, 0]

if __name__ == "__main__":
    import time, traceback
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    for family in FAMILIES:
        if sys.argv[1:] and not any(a in family.name for a in sys.argv[1:]): continue
        t=time.time()
        try:
            r = measure(family)
            print(f"{r.name:40} {r.path:8} {r.training:.0e} {r.sampling:.0e} {r.gradient:.0e} {r.reason}", f"{time.time()-t:.1f}", flush=True)
        except Exception as e:
            print(family.name, "FAILS", repr(e)[:300]); 
            traceback.print_exc(limit=-3)

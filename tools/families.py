"""What becomes of each family: packed, plain or refused, and how far it is from the unmodified model.

    python tools/families.py                     # the tables of docs/models.md, about 10 minutes on one core
    python tools/families.py "Gemma 3" "llava"   # families with these words in their name, printed

Of each configuration a tiny model is made, with weights so large that a wrong mask shows, saved, and loaded
as rloo.py does. It is packed if that proves exact, samples responses, and all log-probs are compared with
those of an untouched copy that reads one response at a time. FAMILIES are what people use; the scan takes
each decoder of transformers that a generic configuration fits.

Windows are 64 tokens wide, prompts 107 to 131 tokens long, responses up to 40.
"""

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
MROPE = {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}


@dataclass
class Family:
    name: str
    model_type: str
    text: dict  # of the language model, over TEXT; with a model_type of its own in models that see
    more: dict | None = None  # of a model that sees
    tower: dict | None = None  # of its vision tower, over TOWER
    pictures: str = ""  # the form in which it takes them, see `picture_inputs`
    types: tuple[str, int, int] | None = None  # an input per token: its name, 1 for pictures, for new tokens

    def config(self):
        if self.tower is None:
            return transformers.AutoConfig.for_model(self.model_type, **(TEXT | self.text))
        inner = {"text_config": TEXT | self.text, "vision_config": TOWER | self.tower}
        return transformers.AutoConfig.for_model(self.model_type, **inner, **TOKENS, **(self.more or {}))


def llava(name: str, text: dict, **more) -> Family:
    tower = {"model_type": "clip_vision_model"}
    return Family(f"LLaVA around {name}", "llava", text, tower=tower, pictures="rows")


def qwen(name: str, kind: str, text: dict | None = None, **tower) -> Family:
    sizes = {"model_type": kind, "depth": 2, "num_heads": 4, "out_hidden_size": 64}
    text = MROPE | (text or {}) | {"model_type": f"{kind}_text"}
    return Family(name, kind, text, tower=sizes | tower, pictures="grid", types=("mm_token_type_ids", 1, 0))


GEMMA3 = Family("Gemma 3", "gemma3", MIXED, {"mm_tokens_per_image": 4}, {}, "rows", ("token_type_ids", 1, 0))
IDEFICS3 = Family("Idefics3", "idefics3", {"model_type": "llama"}, {"scale_factor": 2}, {}, "nested")
SQUARE = {"image_size": [32, 32], "patch_size": [8, 8]}
INTERNVL = Family("InternVL", "internvl", {"model_type": "qwen2"}, {}, SQUARE, "rows")
PIXTRAL = Family("Pixtral", "llava", {"model_type": "mistral"}, {}, {"model_type": "pixtral"}, "sized")
PIXTRAL.more = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
QWEN3 = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
PALIGEMMA = Family("PaliGemma", "paligemma", {"model_type": "gemma"}, {"projection_dim": 64}, {}, "rows")
PALIGEMMA.types = ("token_type_ids", 0, 1)
MLLAMA = Family("Llama 3.2 Vision (Mllama)", "mllama", {"cross_attention_layers": [1]}, {}, {}, "tiles")

FAMILIES = [
    Family("Llama", "llama", {}),
    Family("Llama 3 (RoPE)", "llama", {"rope_parameters": LLAMA3}),
    Family("Llama, dynamic RoPE", "llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 200}),
    Family("Mistral", "mistral", {"sliding_window": None}),
    Family("Mistral, windows", "mistral", WINDOW),
    Family("Phi", "phi", {}),
    Family("Phi-3", "phi3", {}),
    Family("Phi-3, windows", "phi3", WINDOW),
    Family("Phi-3, longrope", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 200}),
    Family("Gemma 2", "gemma2", MIXED | CAPS),
    Family("Gemma 2, 4096", "gemma2", MIXED | CAPS | {"sliding_window": 4096}),
    Family("Gemma 3, text", "gemma3_text", MIXED),
    GEMMA3,
    replace(GEMMA3, name="Gemma 3, no pictures", pictures=""),
    Family("gpt-oss", "gpt_oss", MIXED),
    INTERNVL, IDEFICS3, PIXTRAL, PALIGEMMA, MLLAMA,
    qwen("Qwen3-VL", "qwen3_vl", **QWEN3),
    llava("Llama", {"model_type": "llama"}),
]  # fmt: skip


@dataclass
class Result:
    name: str
    path: str  # packed, plain, refused (a run would stop), or fails (the unmodified model does)
    reason: str = ""
    training: float = math.nan  # largest difference of log-probs, in nats
    sampling: float = math.nan
    gradient: float = math.nan  # relative


# ---- one family ----


def measure(family: Family) -> Result:
    """What a run of rloo.py would do with it, and how far that is from the unmodified model."""
    model, untouched = make_models(family)
    all_inputs = [make_inputs(family, model, length, count) for length, count in ((107, 1), (131, 2), (119, 0))]
    prompts = [packing.make_prompt(model, inputs, index=i) for i, inputs in enumerate(all_inputs)]
    prompts = [replace(prompt, seed=prompt.index) for prompt in prompts]
    line = packing.enable_packing_if_exact(
        model=model,
        forward=lambda pack: packing.response_logprobs(model, pack)[0],
        prompts=prompts,
        max_length=LONGEST,
        max_tokens=1024,
    )
    args = rloo.Args(max_response_length=40)
    responses = rloo.generate(args, model, prompts, 3, 1.0, ENDS)
    expected = [one_by_one(family, untouched, all_inputs[b // 3], r.ids) for b, r in enumerate(responses)]
    return line, responses, expected


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
    """A prompt as a processor makes it: random words, pictures in front."""
    words = torch.randint(10, 300, (length,), generator=torch.Generator().manual_seed(length))
    ids = words.tolist()
    inputs = {}
    if family.pictures and num_pictures:
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
    pixels = torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(n))
    if family.pictures == "nested":
        return {"pixel_values": pixels[None]}
    if family.pictures == "sized":
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[32, 32], [16, 32]][:n])}
    if family.pictures == "grid":
        patch = family.tower.get("patch_size", 8)
        grid = torch.tensor([[1, 4, 4], [1, 2, 6]][:n])
        return {"pixel_values": torch.rand(int(grid.prod(1).sum()), 3 * 2 * patch**2), "image_grid_thw": grid}
    return {"pixel_values": pixels}


def one_by_one(family: Family, model, inputs: dict, response: Tensor) -> Tensor:
    """Log-probs (R,) of a response by the unmodified model."""
    P, R = inputs["input_ids"].shape[1], len(response)
    added = {"input_ids": response[None], "attention_mask": torch.ones(1, R, dtype=torch.long)}
    if family.types:
        name, _, of_new = family.types
        added[name] = torch.full((1, R), of_new)
    inputs = inputs | {name: torch.cat([inputs[name], x], dim=1) for name, x in added.items()}
    logits = model(**inputs, use_cache=False).logits[0, P - 1 : P + R - 1].float()
    logits[:, packing.media_token_ids(model.config)] = -torch.inf
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]

if __name__ == "__main__":
    import time, traceback
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    for family in FAMILIES:
        t=time.time()
        try:
            with torch.no_grad():
                line, responses, expected = measure(family)
            print(family.name, line[:90], max(float((r.logprobs-e).abs().max()) for r,e in zip(responses,expected)), f"{time.time()-t:.1f}", flush=True)
        except Exception as e:
            print(family.name, "FAILS", repr(e)[:300]); 
            traceback.print_exc(limit=-3)

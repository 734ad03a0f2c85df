"""Will it fit? GPU memory by part, CPU memory and disk of a run in bf16, from the model's config alone.

    python tools/memory.py --script rloo.py --gpus 8 --zero-stage 3 --freeze visual

GB are 1e9 bytes. The last line is a row of the table in docs/recipes.md. What is assumed:
- A trained parameter has bf16 weights (2 bytes), an fp32 gradient (4), an fp32 copy and AdamW's moments (12), and
  4 bytes more in the optimizer step. ZeRO-2 shards all but the weights, ZeRO-3 everything.
- Reference and critic are as large as the policy, but the critic has no LM head. LoRA needs no reference.
- Activations: a packed dense decoder keeps 22 H + 8 I bytes per token and layer, a tower like Qwen2.5-VL's 30 H + 8 I
  per patch and block unless it is frozen, and attention the keys, values and masks of each response. Checkpointing
  keeps each layer's input and one whole layer. tests/test_memory.py compares this with autograd on a CPU.
- Logits: four fp32 tensors of LOGITS_CHUNK tokens, and the gradient of the head twice (its sum, and a chunk's).
- A reward model on the GPU is not counted: every rank loads a copy (2 bytes per parameter), which stays there.
- vLLM sleeps during updates. --sampler hf also needs a KV cache, and with ZeRO-3 a whole copy of the weights: not counted.
- Guesses: CUDA and NCCL 2 GB, DeepSpeed 1 GB, weights that ZeRO-3 gathers 2 GB, fragmentation 10 % of activations.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.packing import LOGITS_CHUNK  # noqa: E402


@dataclass
class Args:
    model: str = "Qwen/Qwen2.5-VL-7B-Instruct"  # config.json, a folder with one, or a Hub id.
    script: Literal["rloo.py", "ppo_vl.py", "reward_bt.py", "grm_sft.py"] = "rloo.py"
    gpus: int = 8  # Ranks; up to eight share a node.
    gpu_memory: float = 85.0  # Memory of each GPU in GB; an "80 GB" A100 or H100 has 85e9 bytes.
    zero_stage: Literal[2, 3] = 2  # The stages that bf16 supports.
    lora_rank: int = 0
    freeze: Literal["", "visual"] = ""  # For grm_sft.py, the vision tower counts as frozen, its default.
    kl_coef: float = 0.01  # 0: no reference.
    gradient_checkpointing: bool = True
    offload_optimizer: bool = False
    sampler: str = "vllm"  # As in the scripts; all others need no memory for vLLM on these GPUs.
    vllm_gpu_memory_utilization: float = 0.4
    micro_batch_tokens: int = 8192
    image_pixels: int = 1_000_000  # Pixels of a prompt's image; 0: text only.
    prompt_tokens: int = 1500  # Including those of the image.
    response_tokens: int = 500
    num_samples_per_prompt: int = 8
    save_total_limit: int = 2  # One more exists while it is written.


def count_parameters(config, lora_rank: int) -> dict[str, int]:
    """Parameters of the language model, of its head (0 if tied), of everything else, and of the adapters."""
    is_vlm = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = transformers.AutoModelForImageTextToText if is_vlm else transformers.AutoModelForCausalLM
    with torch.device("meta"):  # shapes without memory
        model = auto.from_config(config)
    decoder = model.get_decoder()
    language = decoder.num_parameters()
    total = model.num_parameters()  # tied weights count once
    output = model.get_output_embeddings().weight
    head = 0 if output is model.get_input_embeddings().weight else output.numel()
    linear = [layer for layer in decoder.modules() if isinstance(layer, torch.nn.Linear)]
    adapters = lora_rank * sum(layer.in_features + layer.out_features for layer in linear)
    return {"language": language, "head": head, "vision": total - language - head, "adapters": adapters}


def language_activations(config, tokens: int, keys: float, scores: float, checkpointing: bool) -> float:
    """Bytes of the decoder for a pack: `keys` counts the keys of all segments, `scores` their query-key pairs."""
    H, L = config.hidden_size, config.num_hidden_layers
    kv_size = config.num_key_value_heads * H // config.num_attention_heads
    layer = tokens * (22 * H + 8 * config.intermediate_size) + 4 * keys * kv_size + 2 * scores
    return 6 * tokens * H + (2 * tokens * H * L + layer if checkpointing else layer * L)  # with the last norm


def vision_activations(config, pixels: int, checkpointing: bool) -> float:
    """Bytes of the vision tower for images with `pixels` pixels in total."""
    H = getattr(config, "embed_dim", None) or config.hidden_size  # Qwen2-VL's hidden_size is the text model's
    L = getattr(config, "depth", None) or config.num_hidden_layers
    intermediate_size = getattr(config, "intermediate_size", None) or int(H * config.mlp_ratio)
    patch_area = np.prod(np.broadcast_to(config.patch_size, 2))  # InternVL has height and width
    patches = pixels // patch_area
    layer = patches * (30 * H + 8 * intermediate_size)
    ends = patches * (12 * H + 12 * patch_area)  # the merger's, and the pixels of two frames
    return ends + (2 * patches * H * L + layer if checkpointing else layer * L)


def activations(args: Args, config, trains_vision: bool) -> tuple[float, float]:
    """Bytes of decoder and vision tower for a full pack, whose prompts each have an image."""
    G = {"grm_sft.py": 1, "reward_bt.py": 2}.get(args.script, args.num_samples_per_prompt)
    P, R = args.prompt_tokens, args.response_tokens
    groups = args.micro_batch_tokens / (P + G * R)  # below 1 if a group is split
    keys, scores = groups * (P + G * (P + R)), groups * (P * P + G * R * (P + R))
    tokens, checkpointing = args.micro_batch_tokens, args.gradient_checkpointing
    language = language_activations(config.get_text_config(), tokens, keys, scores, checkpointing)
    vision_config = getattr(config, "vision_config", None)
    pixels = int(max(1, groups) * args.image_pixels) if trains_vision and vision_config else 0
    return language, vision_activations(vision_config, pixels, checkpointing) if pixels else 0


def estimate(args: Args, config) -> dict[str, float]:
    """GB by part."""
    count = count_parameters(config, args.lora_rank)
    text = config.get_text_config()
    is_rl, has_critic = args.script in ("rloo.py", "ppo_vl.py"), args.script == "ppo_vl.py"
    trains_vision = not (args.freeze or args.lora_rank or args.script == "grm_sft.py")
    backbone = count["language"] + count["vision"]
    head = count["head"] * (args.script != "reward_bt.py")
    trained_backbone = count["adapters"] or count["language"] + trains_vision * count["vision"]
    trained = count["adapters"] or trained_backbone + head
    trained_by_all = trained + has_critic * trained_backbone
    shard = 1 / args.gpus
    weight_shard = 1 if args.zero_stage == 2 else shard
    parts = {"weights": 2 * (backbone + head) * weight_shard}
    parts["critic's weights"] = 2 * backbone * weight_shard * has_critic
    parts["reference"] = parts["weights"] * (is_rl and args.kl_coef > 0 and args.lora_rank == 0)
    parts["gradients"] = 4 * trained_by_all * shard * (not args.offload_optimizer)
    parts["optimizer"] = 12 * trained_by_all * shard * (not args.offload_optimizer)
    parts["states"] = sum(parts.values())
    language, vision = activations(args, config, trains_vision)
    parts |= {"activations, language model": language, "activations, vision tower": vision}
    logits = text.vocab_size * (16 * LOGITS_CHUNK + 4 * text.hidden_size * (args.lora_rank == 0))
    parts["logits"] = logits * (args.script != "reward_bt.py")
    parts["optimizer step"] = 4 * trained * shard
    has_vllm = is_rl and args.sampler == "vllm"
    parts["vLLM"] = has_vllm * args.vllm_gpu_memory_utilization * args.gpu_memory * 1e9
    parts["update"] = max(language + vision + parts["logits"], parts["optimizer step"])
    parts["reserve"] = 3e9 + 2e9 * (args.zero_stage == 3) + 0.1 * (language + vision)
    parts["peak"] = parts["states"] + max(parts["update"], parts["vLLM"]) + parts["reserve"]
    ranks = min(args.gpus, 8)  # of a node
    offloaded = 16 * trained_by_all * shard * ranks * args.offload_optimizer
    parts["CPU per node"] = max(2 * (backbone + head) * ranks, 2 * (backbone + head) + offloaded)
    parts["checkpoint"] = 2 * (backbone + head + has_critic * backbone) + 14 * trained_by_all
    parts["disk"] = parts["checkpoint"] * (args.save_total_limit + 1)
    return {name: number / 1e9 for name, number in parts.items()}


def markdown_row(gb: dict[str, float]) -> str:
    columns = "states, update, vLLM, peak, CPU per node, checkpoint".split(", ")
    return f"| {' | '.join(f'{gb[column]:.0f}' for column in columns)} |"


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    config = transformers.AutoConfig.from_pretrained(args.model)
    for name, size in estimate(args, config).items():
        print(f"{name:28}{size:8.1f} GB")
    for stage in (3, 2):
        gb = estimate(replace(args, zero_stage=stage), config)
        fits = "fits" if gb["peak"] < args.gpu_memory else "does not fit"
        print(f"ZeRO-{stage} {fits}: {gb['peak']:.1f} GB")
    if 0 < gb["vLLM"] < 1.1 * gb["weights"]:  # of ZeRO-2: a whole copy
        print(f"vLLM's share does not hold the weights ({gb['weights']:.0f} GB): use servers")
    print(markdown_row(estimate(args, config)))

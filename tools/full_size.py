"""One step of each script with a random model of the shapes of Qwen2.5-VL-3B, on a machine with 24 GB.

    python tools/full_size.py /tmp/full               # create the model (8 GB on disk) and run all four
    python tools/full_size.py /tmp/full rloo grm_sft  # run some of them; flags after -- are passed on

It prints rows for docs/recipes.md: seconds, and peak memory next to the estimate of `memory()` on that page, until
the end of the step and while saving, when the merged weights are in CPU memory.
The tokenizer is that of assets/tiny_vl, but the model's vocabulary has 151,936 tokens, and it samples all of them.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402, F401, I001  before transformers: fixes torchvision for a CPU-only torch
import transformers  # noqa: E402

SIZES = [(224, 168), (168, 252), (224, 224), (252, 140)]  # small: a CPU takes a minute for 300 tokens
FLAGS_OF_ALL = "--dtype bfloat16 --total-steps 1 --lora-rank 8 --gradient-checkpointing"
ROLLOUT = "--rollout-batch-size 4 --num-samples-per-prompt 2 --train-batch-size 4 --num-epochs 1"
ROLLOUT += " --max-prompt-length 100 --max-response-length 12 --micro-batch-tokens 200"
FLAGS = {
    "rloo": ROLLOUT,
    "ppo_vl": ROLLOUT + " --advantage rloo",  # a critic would not fit
    "reward_bt": "--train-batch-size 2 --max-length 200 --micro-batch-tokens 200",
    "grm_sft": "--train-batch-size 2 --max-length 400 --micro-batch-tokens 400",
}


def make_model(folder: Path) -> None:
    """Save random bf16 weights, in shards, with the tiny model's processor set to real image sizes."""
    tiny = ROOT / "assets/tiny_vl"
    processor = transformers.AutoProcessor.from_pretrained(tiny)
    processor.image_processor.patch_size = 14
    processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    tiny_config = transformers.AutoConfig.from_pretrained(tiny)
    text = {
        **{"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936},
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": processor.tokenizer.eos_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {
        **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
        **{"out_hidden_size": 2048, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    }
    ids = {name: value for name, value in vars(tiny_config).items() if re.fullmatch(r"\w+_token_id", name)}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    model.tie_weights()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f}e9 parameters", flush=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def make_data(folder: Path) -> None:
    """Write questions about images of real sizes, with columns for all four scripts."""
    rng = np.random.default_rng(0)
    rows = []
    for i, (width, height) in enumerate(SIZES * 2):
        small = rng.integers(0, 256, (height // 28, width // 28, 3), dtype=np.uint8)
        Image.fromarray(small).resize((width, height)).save(folder / f"{i}.png")
        row = {"prompt": "what is in the image?", "image": f"{i}.png", "answer": "circle"}
        rows.append(row | {"chosen": "a circle", "rejected": "a red square"})
    lines = [json.dumps(row) for row in rows]
    (folder / "data.jsonl").write_text("\n".join(lines))


def memory_of_page(trained: float, pack: int) -> dict[str, float]:
    """The estimate of `memory` in docs/recipes.md for this model."""
    page = (ROOT / "docs/recipes.md").read_text()
    code = re.search(r"def memory\(.*?\n```", page, re.DOTALL).group().removesuffix("```")
    namespace = {}
    exec(code.replace("1024 * V", "256 * V"), namespace)  # LOGITS_CHUNK on a CPU
    return namespace["memory"](N=3.75e9, L=36, H=2048, I=11008, V=151_936, trained=trained, pack=pack)


@dataclass
class Result:
    seconds: float  # whole run
    step: float  # seconds, the step alone
    peak: float  # GB, before the checkpoint
    peak_saving: float  # GB, while saving it


def run(script: str, folder: Path, flags: list[str]) -> Result:
    name = f"full-{script}-{int(time.time())}"
    flags = [*FLAGS_OF_ALL.split(), *FLAGS[script].split(), *flags]
    fixed = {"--model": folder / "model", "--dataset": folder / "data.jsonl", "--output-dir": folder}
    command = [sys.executable, ROOT / f"{script}.py", "--run-name", name, *flags]
    command += [word for pair in fixed.items() for word in pair]
    begin = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)))
    peaks = [0.0, 0.0]
    while process.poll() is None:
        saving = any((folder / name).glob("checkpoint*"))
        match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        if match:
            peaks[saving] = max(peaks[saving], int(match[1]) * 1024 / 1e9)
        time.sleep(0.1)
    if process.returncode != 0:
        raise SystemExit(f"{script} ended with status {process.returncode}")
    seconds = time.perf_counter() - begin
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(folder / name)
    return Result(seconds, json.loads(lines[-1])["time/total"], *peaks)


def main() -> None:
    folder, *rest = sys.argv[1:]
    end = rest.index("--") if "--" in rest else len(rest)
    scripts, flags = rest[:end], rest[end + 1 :]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_model(folder / "model")
    make_data(folder)
    print(
        "| script | step, s | run, s | peak, GB | `memory()`, GB | peak of the checkpoint, GB |\n|---|---|---|---|---|---|"
    )
    for script in scripts or FLAGS:
        result = run(script, folder, flags)
        expected = memory_of_page(trained=0.015e9, pack=200)["peak"]
        row = [script, f"{result.step:.0f}", f"{result.seconds:.0f}", f"{result.peak:.1f}", f"{expected:.1f}"]
        print(f"| {' | '.join([*row, f'{result.peak_saving:.1f}'])} |", flush=True)


if __name__ == "__main__":
    main()

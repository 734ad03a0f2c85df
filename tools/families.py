"""For each family of models: packed, padded or refused, and the difference from the unmodified model.

    python tools/families.py                  # write the lists of docs/models.md, 10 minutes on one core
    python tools/families.py gemma qwen3_vl   # only print families whose names contain one of these words

A family is an entry of transformers' mappings of image-text models and decoders, or a variant from
families.json. For each one, a tiny random model is saved, and loaded as in rloo.py. The family's own
processor class makes prompts with images. The model samples responses, packed if the check at startup
passes. All log-probs and gradients are compared with those of an unmodified copy that runs one response
at a time.
"""

import contextlib
import functools
import inspect
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import rloo  # noqa: E402  before transformers # isort: skip
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.models.auto as auto  # noqa: E402
from PIL import Image  # noqa: E402
from torch import Tensor  # noqa: E402

from common import chats, decoding, packing, packing_check  # noqa: E402

PAGE = ROOT / "docs/models.md"
MARK = "<!-- written by tools/families.py from here on -->\n"
CONFIGS = json.loads((ROOT / "tools/families.json").read_text())
SIZES = {
    part: {name: int(x) if x.isdigit() else x for x, names in table.items() for name in names.split()}
    for part, table in CONFIGS["sizes"].items()
}
IMAGE_TEXT = auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
DECODERS = auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
PROCESSOR_PARTS = {
    "image_processor": auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
    "video_processor": auto.video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
    "feature_extractor": auto.feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES,
    "audio_processor": auto.feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES,
}
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
    "padded": "Padded",
    "refused": "Refused",
    "inexact": "Trained with log-probs that differ from the unmodified model's",
    "fails": "Ends with a traceback",
    "not measured": "Not measured",
}
# Errors of a family, and the format of each; see docs/models.md.
MEASURES = {"training": ".0e", "sampling": ".0e", "gradient": ".0e", "ratio": ".0e", "bf16": ".2f"}


@dataclass
class Result:
    name: str
    path: str = "not measured"  # or another key of HEADLINES
    reason: str = ""
    has_images: bool = False
    errors: dict[str, float] = field(default_factory=dict)

    def group(self) -> str:
        """Packed families by what was measured, others by the reason."""
        if self.path != "packed":
            texts = CONFIGS["reasons"].get(self.path, {}).items()
            return next((text for pattern, text in texts if re.search(pattern, self.reason)), self.reason)
        if self.name in IMAGE_TEXT:
            return "Image-text models" if self.has_images else "Image-text models, text only"
        return "Decoders" if self.name in DECODERS else "Variants"


# ---- models ----


def save_model(family: str, processor, folder: str) -> None:
    """Save a tiny random model with the configuration of families.json."""
    model_type, fields = fields_of(family)
    config_class = transformers.CONFIG_MAPPING[model_type]
    sizes = SIZES["top"] if "text_config" in config_class.sub_configs else SIZES["top"] | SIZES["text"]
    config = config_class(**shrink(config_class, sizes, fields))
    for name in vars(config).keys() - fields.keys():
        token = getattr(processor, re.sub("_index$", "_id", name), None) if "_token_i" in name else None
        if isinstance(token, int):
            setattr(config, name, token)
    config.save_pretrained(folder)
    if config.is_encoder_decoder:  # refused without loading its weights
        return
    auto_class = transformers.AutoModelForCausalLM
    if model_type in IMAGE_TEXT:
        auto_class = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        assert auto_class.from_config(config).num_parameters() < 5e6, "its sizes have unknown names"
    torch.manual_seed(0)
    model = auto_class.from_config(config)
    for parameter in model.parameters():  # with the usual 0.02 a wrong mask would change little
        noise = torch.randn_like(parameter) * 0.15
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    model.save_pretrained(folder)


def fields_of(family: str) -> tuple[str, dict]:
    """Model type, and the fields of its configuration that families.json sets."""
    fields = dict(CONFIGS["families"].get(family, {}))
    return fields.pop("model_type", family), fields


def shrink(config_class: type, sizes: dict, fields: dict) -> dict:
    """Arguments of a configuration: small sizes under all names that it knows, and `fields`."""
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    known -= {alias for alias, name in config_class.attribute_map.items() if name in sizes}
    arguments = {name: value(size) for name, size in sizes.items() if name in known}
    default = config_class() if config_class.sub_configs else None
    for part in config_class.sub_configs:
        part_fields = dict(fields.get(part) or {})
        part_class = type(getattr(default, part, None))
        if "model_type" in part_fields:
            part_class = transformers.CONFIG_MAPPING[part_fields["model_type"]]
        if part in known and hasattr(part_class, "sub_configs") and fields.get(part, 0) is not None:
            part_sizes = SIZES["text" if part == "text_config" else "vision"]
            arguments[part] = shrink(part_class, part_sizes, part_fields)
            arguments[part]["model_type"] = part_class.model_type
    done = {name for name, x in arguments.items() if isinstance(x, dict)}
    return arguments | {name: value(fields[name]) for name in fields.keys() - done}


def value(x):
    """x, or the id of the token x."""
    if isinstance(x, list):
        return [value(y) for y in x]
    return tokenizer().convert_tokens_to_ids(x) if isinstance(x, str) and x[0] in "<[|" else x


# ---- processors ----


@functools.cache
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


def make_processor(family: str):
    """The family's processor, with small images and the tokenizer of assets/tiny_vl, or that tokenizer."""
    name = family if family in CONFIGS["processors"] else fields_of(family)[0]
    options = CONFIGS["processors"].get(name, {})
    model_type = options.get("like", name)
    options = CONFIGS["processors"].get(model_type, {}) | options
    if model_type not in auto.processing_auto.PROCESSOR_MAPPING_NAMES:
        return tokenizer()
    processor_class = getattr(transformers, auto.processing_auto.PROCESSOR_MAPPING_NAMES[model_type])
    sizes = SIZES["processor"] | options.get("processor", {})
    names = inspect.signature(processor_class.__init__).parameters.keys() & sizes.keys()
    parts = {name: sizes[name] for name in names}
    for part in processor_class.get_attributes():
        class_name = PROCESSOR_PARTS.get(part, {}).get(model_type)
        if isinstance(class_name, dict):
            class_name = class_name.get("torchvision") or class_name["pil"]
        if class_name:
            part_class = getattr(transformers, class_name)
            parts[part] = part_class(**small_media(part_class) | options.get(part, {}))
        elif part not in PROCESSOR_PARTS:
            parts[part] = tokenizer(not options.get("plain"))
    processor = processor_class(**parts)
    mark = options.get("mark") or getattr(processor, "image_token", "<image>")
    processor.chat_template = TEMPLATE.replace("IMAGE", str(mark))
    return processor


def small_media(part_class: type) -> dict:
    """Arguments of an image processor for images of about 32 x 32 pixels in patches of 8."""
    arguments = {}
    for name in dir(part_class):
        x = getattr(part_class, name) if name[0] != "_" else None
        if name == "image_grid_pinpoints":
            arguments[name] = [[32, 32], [32, 64], [64, 32], [64, 64]]
        elif isinstance(x, int | dict) and name in SIZES["processor"]:
            size = SIZES["processor"][name]
            arguments[name] = dict.fromkeys(x, size) if isinstance(x, dict) else size
        elif isinstance(x, dict) and name.endswith("size"):
            arguments[name] = dict.fromkeys(x, 32)
            if x.get("longest_edge", 0) > 10000:  # an area
                arguments[name] = {"shortest_edge": 256, "longest_edge": 4096}
    return arguments


def make_chat(parts: tuple[str], processor) -> list[dict]:
    """A chat of random words and images, or of words only if the processor is a tokenizer."""
    rng = np.random.default_rng(PROMPTS.index(parts))
    content = []
    sizes = iter(IMAGE_SIZES)
    for part in parts:
        if part == "text":
            text = " ".join("".join(rng.choice([*"abcdefghij"], 5)) for _ in range(WORDS))
            content.append({"type": "text", "text": text})
        elif hasattr(processor, "tokenizer"):
            width, height = next(sizes)
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            content.append({"type": "image", "image": Image.fromarray(pixels)})
    return [{"role": "user", "content": content}]


# ---- measurement ----


def measure(family: str) -> Result:
    """What rloo.py does with a model of this family, and the differences from the unmodified model."""
    torch.set_num_threads(1)
    result = Result(family)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), tempfile.TemporaryDirectory() as folder:
            processor = make_processor(family)
            save_model(family, processor, folder)
            unmodified = load(folder, torch.float32)
            inputs, failures = [], []
            for parts in PROMPTS:
                try:
                    inputs.append(encode(processor, unmodified, parts))
                except Exception as error:  # not all families can run all three
                    failures.append(error)
            if not inputs:
                raise failures[0]
            result.has_images = any("pixel_values" in " ".join(x) for x, _ in inputs)
            result.path = "fails"
            compare(result, inputs, unmodified, functools.partial(load, folder))
    except SystemExit:
        message = stderr.getvalue().rpartition("error: ")[2].splitlines()[0]
        result.path, result.reason = "refused", re.sub(r"can't load the model \S+: ", "", message)
    except Exception as error:
        result.reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    values = ", ".join(f"{name} {x:.0e}" for name, x in result.errors.items())
    print(f"{family}: {result.path}; {values}; {result.reason[:200]}", flush=True)
    return result


def load(folder: str, dtype: torch.dtype):
    """The model as rloo.py loads it."""
    args = rloo.Args(dtype=str(dtype).removeprefix("torch."))
    return rloo.load_model(args, folder).eval()


def encode(processor, model, parts: tuple[str]) -> tuple[dict, dict]:
    """Inputs of a prompt, and of the same prompt with one more text token, which the unmodified model can run."""
    chat = make_chat(parts, processor)
    inputs = dict(chats.encode_chat(processor, chat))
    chat[0]["content"].append({"type": "text", "text": " a"})
    longer = dict(chats.encode_chat(processor, chat))
    for name, x in CONFIGS["responses"].get(model.config.model_type, {}).items():
        longer[name][:, -1] = x
    reference_logprobs(model, [(inputs, longer)], [torch.arange(10, 20)])
    return inputs, longer


def compare(result: Result, inputs: list[tuple], unmodified, load) -> None:
    """Fill in the result. inputs: see `encode`."""
    prompts, model, message = load_checked(load, torch.float32, inputs)
    sampled_prompts = prompts[:2]
    responses = decoding.generate(model, sampled_prompts, G, R, EOS_IDS, temperature=1.0, max_tokens=1024)
    ids = [response.token_ids for response in responses]
    ids += ids[:G] * (len(prompts) - len(sampled_prompts))
    unmodified.zero_grad()
    expected = reference_logprobs(unmodified, inputs, ids)
    trained = trained_logprobs(model, prompts, ids)
    sampled = torch.cat([response.logprobs for response in responses])
    n = len(sampled)
    training_error, sampling_error = (trained - expected).abs(), (sampled - expected[:n]).abs()
    result.errors = {
        "training": float(training_error.max()),
        "sampling": float(sampling_error.max()),
        "gradient": gradient_error(model, unmodified),
    }
    is_exact = bool(training_error.mean() <= packing.TOLERANCE[torch.float32])
    result.path = ("packed" if packing.is_packed(model) else "padded") if is_exact else "inexact"
    result.reason = message.partition("this model (")[2].partition("; not compared")[0].removesuffix(")")
    if not packing.is_packed(model) and not sampling_error.mean() <= packing.TOLERANCE[torch.float32]:
        result.path, result.reason = "refused", "its generate and its forward disagree"
    # rloo.py updates with the sampler's log-probs if the model is packed, otherwise with recomputed ones.
    old = sampled if packing.is_packed(model) else trained_logprobs(model, prompts, ids)[:n]
    sums = [x.sum() for x in (trained[:n] - old).split([len(x) for x in ids[: len(responses)]])]
    result.errors["ratio"] = abs(float(torch.stack(sums).exp().mean()) - 1)
    if result.path == "packed" and result.has_images:
        prompts, model, _ = load_checked(load, torch.bfloat16, inputs)
        error = (trained_logprobs(model, prompts, ids) - expected).abs().mean()
        rounding = (reference_logprobs(load(torch.bfloat16), inputs, ids) - expected).abs().mean()
        result.errors["bf16"] = float(error / rounding)


def load_checked(load, dtype: torch.dtype, inputs: list[tuple]) -> tuple[list, torch.nn.Module, str]:
    """Prompts, a model after the check at startup, and the message of that check."""
    model = load(dtype)
    prompts = []
    for i, (x, longer) in enumerate(inputs):
        P = x["input_ids"].shape[1]
        is_prefix = torch.equal(longer["input_ids"][:, :P], x["input_ids"])
        prompt = packing.make_prompt(model, longer if is_prefix else x, row_id=i, length=P)
        prompts.append(replace(prompt, seed=i))
    policy = rloo.Policy(model, temperature=1.0)
    message = packing_check.choose_layout(policy, prompts, 512, 1024, lambda net, pack: net(pack)[0])
    return prompts, model, message


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
        logits = model(**inputs, use_cache=False).logits[0, -len(response) - 1 : -1].float()
        logits[:, packing.media_token_ids(model.config)] = -torch.inf
        logp = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        logp.square().sum().backward()  # a loss with different weights for all tokens
        logprobs.append(logp.detach())
    return torch.cat(logprobs)


def trained_logprobs(model, prompts: list[packing.Prompt], ids: list[Tensor]) -> Tensor:
    """The same, as the scripts compute them."""
    table = torch.full((len(ids), R), torch.nan)
    groups = [(i, list(range(i * G, i * G + G))) for i in range(len(prompts))]
    responses = [packing.continue_prompt(prompts[b // G], ids[b]) for b in range(len(ids))]
    for pack in packing.iter_rank_packs(model, groups, prompts, responses, max_tokens=1024):
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


# ---- page ----


def summary(results: list[Result]) -> str:
    """A table with the largest errors of each path, then the names in each group."""
    commit = subprocess.check_output(["git", "log", "-1", "--format=%h, %cs"], cwd=ROOT, text=True).strip()
    lines = [f"Commit {commit}; transformers {transformers.__version__}, torch {torch.__version__}.", ""]
    lines += [f"| largest error | {' | '.join(MEASURES)} |", "|---" * (1 + len(MEASURES)) + "|"]
    for path in ("packed", "padded", "inexact"):
        errors = [result.errors for result in results if result.path == path]
        columns = [[x[name] for x in errors if name in x] for name in MEASURES]
        cells = [f"{max(x):{form}}" if x else "" for x, form in zip(columns, MEASURES.values())]
        lines += [f"| {path} | {' | '.join(cells)} |"] if errors else []
    for path, headline in HEADLINES.items():
        groups = defaultdict(list)
        for result in results:
            if result.path == path:
                groups[result.group()].append(result)
        if groups:
            lines += ["", f"## {headline}: {sum(map(len, groups.values()))}", ""]
        for group, families in groups.items():
            lines.append(f"- **{group}** ({len(families)}): {', '.join(result.name for result in families)}")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    families = dict.fromkeys([*IMAGE_TEXT, *DECODERS, *CONFIGS["families"]])
    chosen = [family for family in families if not words or any(word in family for word in words)]
    results = [measure(family) for family in chosen]
    if not words:
        page = PAGE.read_text().partition(MARK)[0] + MARK + summary(results)
        PAGE.write_text(f"{page.rstrip()}\n\n</details>\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""For each family of models: packed, unpacked or refused, and the difference to the unmodified model.

    python tools/families.py                  # write the tables of docs/models.md, 8 minutes on one core
    python tools/families.py Gemma Qwen3-VL   # only print families whose names contain one of these words

For each configuration in families.json, a tiny random model is saved, and loaded as in rloo.py. It samples
responses, packed if the check at startup passes. All log-probs and gradients are compared with those of an
unmodified copy that runs one response at a time. The scan does the same for all decoders that a generic
configuration fits.
"""

import inspect
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402

import rloo  # noqa: E402
from common import decoding, packing, packing_check  # noqa: E402

PAGE = ROOT / "docs/models.md"
MARK = "<!-- written by tools/families.py from here on -->\n"
CONFIGS = json.loads((ROOT / "tools/families.json").read_text())
BF16 = ("Gemma 3", "gpt-oss", "InternVL", "Mistral, windows", "PaliGemma", "Qwen3-VL")
PROMPTS = ((107, 1), (131, 2), (119, 0))  # (tokens, images among them)
G = 3  # responses per prompt
R = 40  # maximum tokens per response; sliding windows have 64
EOS_IDS = [*range(5, 300, 30)]  # with these, some responses end early
IMAGE = 300  # token id


@dataclass
class Result:
    name: str
    path: str  # packed, unpacked, refused (a run stops with a reason), fails, or not built
    reason: str = ""
    training: float = torch.nan  # largest difference of log-probs, in nats
    sampling: float = torch.nan
    gradient: float = torch.nan  # relative, see `gradient_error`

    def row(self) -> str:
        numbers = [f"{x:.0e}" if x == x else "" for x in (self.training, self.sampling, self.gradient)]
        return f"| {self.name} | {self.path} | {' | '.join(numbers)} | {self.reason} |"


def make_config(fields: dict):
    """A configuration of families.json, with small sizes under all names that it knows."""
    model_type = fields["model_type"]
    if "text_config" not in fields:
        return transformers.AutoConfig.for_model(**sizes_of(model_type, "text_config") | fields)
    default = transformers.CONFIG_MAPPING[model_type]()
    parts = {}
    for part in ("text_config", "vision_config"):
        part_config = {"model_type": getattr(default, part).model_type} | fields.get(part, {})
        parts[part] = sizes_of(part_config["model_type"], part) | part_config
    return transformers.AutoConfig.for_model(**sizes_of(model_type, "tokens") | fields | parts)


def sizes_of(model_type: str, part: str) -> dict[str, int]:
    """Small sizes, under the names that the configuration knows: a cache would obey unknown windows."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    sizes = {name: int(size) for size, names in CONFIGS["sizes"][part].items() for name in names.split()}
    return {name: size for name, size in sizes.items() if name in known}


def measure(name: str, fields: dict, dtype: torch.dtype = torch.float32) -> Result:
    """What rloo.py does with a model of this family, and the difference to the unmodified model."""
    result = Result(name, "not built")
    try:
        model, unmodified, precise = make_models(fields, dtype)
        texts = [make_inputs(fields, precise, *size) for size in PROMPTS]
        reference_logprobs(fields, precise, texts, [torch.arange(10, 20)])
        precise.zero_grad()
        result.path = "fails"
        compare(result, fields, texts, model, unmodified, precise)
    except Exception as error:
        result.reason = f"{type(error).__name__}: {error!s:.80}".replace("\n", " ")
    print(result.row(), flush=True)
    return result


def compare(result: Result, fields: dict, texts: list[dict], model, unmodified, precise) -> None:
    """Fill in the result. precise: the unmodified model in fp32."""
    prompts = [replace(packing.make_prompt(model, x, index=i), seed=i) for i, x in enumerate(texts)]
    forward = lambda pack: packing.response_logprobs(model, pack)[0]  # noqa: E731
    message = packing_check.enable_packing_if_exact(model, forward, prompts, max_length=256, max_tokens=1024)
    responses = decoding.generate(model, prompts, G, R, EOS_IDS, temperature=1.0, max_tokens=1024)
    ids = [response.token_ids for response in responses]
    expected = reference_logprobs(fields, precise, texts, ids)
    trained = (trained_logprobs(model, prompts, ids) - expected).abs()
    sampled = (torch.cat([response.logprobs for response in responses]) - expected).abs()
    result.training, result.sampling = float(trained.max()), float(sampled.max())
    if not packing.is_packed(model):
        is_exact = sampled.mean() <= packing.TOLERANCE[model.dtype]  # otherwise rloo.py stops
        result.path = "unpacked" if is_exact else "refused"
        result.reason = message.partition("this model (")[2].rpartition("); ")[0]
    elif model.dtype == torch.float32:
        result.path, result.gradient = "packed", gradient_error(model, precise)
    else:
        rounding = (reference_logprobs(fields, unmodified, texts, ids) - expected).abs()
        result.path = "packed"
        result.reason = f"mean {trained.mean():.1e}, of the unmodified model in bf16 {rounding.mean():.1e}"


def make_models(fields: dict, dtype: torch.dtype) -> list:
    """The model as rloo.py loads it, three times: two copies in dtype, and one in fp32."""
    config = make_config(fields)
    auto_class = transformers.AutoModelForCausalLM
    if "text_config" in fields:
        auto_class = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        assert auto_class.from_config(config).num_parameters() < 5e6, "its sizes have unknown names"
    torch.manual_seed(0)
    model = auto_class.from_config(config)
    for parameter in model.parameters():  # with the usual 0.02 a wrong mask would change little
        noise = torch.randn_like(parameter) * 0.15
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return [rloo.load_model(folder, dtype).eval() for dtype in (dtype, dtype, torch.float32)]


def make_inputs(fields: dict, model, length: int, num_images: int) -> dict[str, Tensor]:
    """A prompt like the processor's output: images, then random tokens."""
    ids = torch.randint(10, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    inputs = {}
    if num_images and "images" in fields:
        inputs = image_inputs(fields["images"], num_images, length)
        features = [[0]] * num_images
        if fields["images"] != "crossed":
            features = model.base_model.get_image_features(**inputs, return_dict=True).pooler_output
        ids = [i for image in features for i in (*[IMAGE] * len(image), 10)] + ids
    inputs["input_ids"] = torch.tensor([ids[:length]])
    inputs["attention_mask"] = torch.ones(1, length, dtype=torch.long)
    if "types" in fields:
        name, image_type, _ = fields["types"]
        inputs[name] = (inputs["input_ids"] == IMAGE).long() * image_type
    return inputs


def image_inputs(form: str, n: int, length: int) -> dict[str, Tensor]:
    """Inputs for n images, in the forms that processors produce."""
    pixels = torch.rand(
        2 * n if "tiles" in form else n, 3, 32, 32, generator=torch.Generator().manual_seed(n)
    )
    if form == "padded":
        mask = torch.ones(1, n, 32, 32, dtype=torch.long)
        mask[0, 0, 16:] = 0  # the first image is half as high
        return {"pixel_values": pixels[None], "pixel_attention_mask": mask}
    if form == "grid":
        patches = pixels.view(-1, 3 * 2 * 8 * 8)  # 8 patches per image
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 2]][:n])}
    if form == "crossed":  # cross-attention
        tiles = torch.tensor([1, 0, 0, 0])
        inputs = {"aspect_ratio_mask": tiles.expand(1, n, 4), "aspect_ratio_ids": tiles[:1].expand(1, n)}
        inputs["cross_attention_mask"] = tiles.expand(1, length, n, 4)
        return inputs | {"pixel_values": pixels[None, :, None].expand(1, n, 4, 3, 32, 32)}
    if "size" in form:
        first = [16, 32] if form == "two sizes" else [32, 32]
        return {"pixel_values": pixels, "image_sizes": torch.tensor([first, [32, 32]][:n])}
    return {"pixel_values": pixels[None] if "nested" in form else pixels}


def reference_logprobs(fields: dict, model, texts: list[dict], ids: list[Tensor]) -> Tensor:
    """Log-probs of all response tokens by the unmodified model, one response at a time; runs backward, too."""
    logprobs = []
    for b, response in enumerate(ids):
        inputs = dict(texts[b // G])
        P = inputs["input_ids"].shape[1]
        for name in [name for name, x in inputs.items() if x.shape[:2] == (1, P)]:
            last = inputs[name][:, -1:].repeat_interleave(len(response), dim=1)
            inputs[name] = torch.cat([inputs[name], last], dim=1)
        inputs["input_ids"][0, P:] = response
        if "types" in fields:
            inputs[fields["types"][0]][0, P:] = fields["types"][2]
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
    table = []
    for name, fields in CONFIGS["families"].items():
        if not words or any(word in name for word in words):
            table.append(measure(name, fields))
            if name in BF16:
                table.append(measure(f"{name}, bf16", fields, torch.bfloat16))
    if words:
        return
    scan = []
    for model_type in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config_class = transformers.CONFIG_MAPPING[model_type]
        if not getattr(config_class, "is_encoder_decoder", False):
            fields = {"model_type": model_type, "is_decoder": True} | CONFIGS["scan"].get(model_type, {})
            if "sliding_window" in inspect.signature(config_class).parameters:
                fields["sliding_window"] = 64
            scan.append(measure(model_type, fields))
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + summary(table, scan))


def summary(table: list[Result], scan: list[Result]) -> str:
    commit = subprocess.check_output(["git", "log", "-1", "--format=%h, %cs"], cwd=ROOT, text=True).strip()
    lines = [f"Commit {commit}; transformers {transformers.__version__}, torch {torch.__version__}.\n"]
    lines += ["| family | path | training | sampling | gradient | |", "|---|---|---|---|---|---|"]
    lines += [result.row() for result in table] + [""]
    for path in sorted({result.path for result in scan}):
        of_path = [result for result in scan if result.path == path]
        worst = max(max(result.training, result.sampling) for result in of_path)
        error = "" if worst != worst else f", errors up to {worst:.0e}"
        lines.append(f"- **{path}: {len(of_path)}{error}.** {', '.join(result.name for result in of_path)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])

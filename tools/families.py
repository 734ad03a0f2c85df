"""What becomes of each family: packed, plain or refused, and how far it is from the unmodified model.

    python tools/families.py                  # the tables of docs/models.md, 8 minutes on one core
    python tools/families.py Gemma Qwen3-VL   # the families with such words in their names, printed

Of each configuration in families.json a tiny model is made, saved, and loaded as rloo.py does. It is packed if
that proves exact, samples responses, and all log-probs and gradients are compared with those of an untouched
copy that reads one response at a time. The scan does so with all decoders that a generic configuration fits.
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
from common import packing  # noqa: E402

PAGE = ROOT / "docs/models.md"
MARK = "<!-- from here on made by tools/families.py -->\n"
GIVEN = json.loads((ROOT / "tools/families.json").read_text())
BF16 = ("Gemma 3", "gpt-oss", "InternVL", "Mistral, windows", "PaliGemma", "Qwen3-VL")
PROMPTS = ((107, 1), (131, 2), (119, 0))  # tokens, pictures among them
G = 3  # responses to a prompt
R = 40  # tokens of a response at most; windows are 64 wide
ENDS = [*range(5, 300, 30)]  # tokens that end a response: some soon, some never
IMAGE = 300


@dataclass
class Result:
    name: str
    path: str  # packed, plain, refused: a run would stop, fails, or not built: so would any run
    reason: str = ""
    training: float = torch.nan  # largest difference of log-probs, in nats
    sampling: float = torch.nan
    gradient: float = torch.nan  # relative, see `gradient_error`

    def row(self) -> str:
        numbers = [f"{x:.0e}" if x == x else "" for x in (self.training, self.sampling, self.gradient)]
        return f"| {self.name} | {self.path} | {' | '.join(numbers)} | {self.reason} |"


def make_config(given: dict):
    """Those of families.json, with sizes under all names that fit."""
    kind = given["model_type"]
    if "text_config" not in given:
        return transformers.AutoConfig.for_model(**sizes_of(kind, "text_config") | given)
    default = transformers.CONFIG_MAPPING[kind]()
    parts = {}
    for part in ("text_config", "vision_config"):
        own = {"model_type": getattr(default, part).model_type} | given.get(part, {})
        parts[part] = sizes_of(own["model_type"], part) | own
    return transformers.AutoConfig.for_model(**sizes_of(kind, "tokens") | given | parts)


def sizes_of(model_type: str, part: str) -> dict[str, int]:
    """Under names that its configuration knows: a cache would take notice of windows that a model lacks."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    sizes = {name: int(size) for size, names in GIVEN["sizes"][part].items() for name in names.split()}
    return {name: size for name, size in sizes.items() if name in known}


def measure(name: str, given: dict, dtype: torch.dtype = torch.float32) -> Result:
    """What a run of rloo.py would do with it, and how far that is from the unmodified model."""
    result = Result(name, "not built")
    try:
        model, unmodified, precise = make_models(given, dtype)
        texts = [make_inputs(given, precise, *size) for size in PROMPTS]
        reference_logprobs(given, precise, texts, [torch.arange(10, 20)])
        precise.zero_grad()
        result.path = "fails"
        compare(result, given, texts, model, unmodified, precise)
    except Exception as error:
        result.reason = f"{type(error).__name__}: {error!s:.80}".replace("\n", " ")
    print(result.row(), flush=True)
    return result


def compare(result: Result, given: dict, texts: list[dict], model, unmodified, precise) -> None:
    prompts = [replace(packing.make_prompt(model, inputs, index=i), seed=i) for i, inputs in enumerate(texts)]
    forward = lambda pack: packing.response_logprobs(model, pack)[0]  # noqa: E731
    line = packing_check.enable_packing_if_exact(model, forward, prompts, max_length=256, max_tokens=1024)
    responses = rloo.generate(rloo.Args(max_response_length=R), model, prompts, G, 1.0, ENDS)
    ids = [response.token_ids for response in responses]
    expected = reference_logprobs(given, precise, texts, ids)
    trained = (trained_logprobs(model, prompts, ids) - expected).abs()
    sampled = (torch.cat([response.logprobs for response in responses]) - expected).abs()
    result.training, result.sampling = float(trained.max()), float(sampled.max())
    if not packing.is_packed(model):
        is_exact = sampled.mean() <= packing.TOLERANCE[model.dtype]  # else rloo.py stops
        result.path, result.reason = "plain" if is_exact else "refused", line.partition("packed: ")[2]
    elif model.dtype == torch.float32:
        result.path, result.gradient = "packed", gradient_error(model, precise)
    else:
        plain = (reference_logprobs(given, unmodified, texts, ids) - expected).abs()
        result.path = "packed"
        result.reason = f"mean {trained.mean():.1e}, of the unmodified model in bf16 {plain.mean():.1e}"


def make_models(given: dict, dtype: torch.dtype) -> list:
    """-> the model as rloo.py loads it: twice in dtype, and in fp32."""
    config = make_config(given)
    has_eyes = "text_config" in given
    kind = transformers.AutoModelForImageTextToText if has_eyes else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        assert kind.from_config(config).num_parameters() < 5e6, "its sizes have other names"
    torch.manual_seed(0)
    model = kind.from_config(config)
    for parameter in model.parameters():  # with the usual 0.02 a wrong mask would change little
        noise = torch.randn_like(parameter) * 0.15
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return [rloo.load_model(folder, dtype).eval() for dtype in (dtype, dtype, torch.float32)]


def make_inputs(given: dict, model, length: int, num_pictures: int) -> dict[str, Tensor]:
    """A prompt as a processor makes it: pictures, and random words."""
    ids = torch.randint(10, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    inputs = {}
    if num_pictures and "pictures" in given:
        inputs = picture_inputs(given["pictures"], num_pictures, length)
        features = [[0]] * num_pictures
        if given["pictures"] != "crossed":
            features = model.base_model.get_image_features(**inputs, return_dict=True).pooler_output
        ids = [i for picture in features for i in (*[IMAGE] * len(picture), 10)] + ids
    inputs["input_ids"] = torch.tensor([ids[:length]])
    inputs["attention_mask"] = torch.ones(1, length, dtype=torch.long)
    if "types" in given:
        name, of_pictures, _ = given["types"]
        inputs[name] = (inputs["input_ids"] == IMAGE).long() * of_pictures
    return inputs


def picture_inputs(form: str, n: int, length: int) -> dict[str, Tensor]:
    """Inputs of n pictures, in the forms that processors have."""
    pixels = torch.rand(
        2 * n if "tiles" in form else n, 3, 32, 32, generator=torch.Generator().manual_seed(n)
    )
    if form == "padded":
        mask = torch.ones(1, n, 32, 32, dtype=torch.long)
        mask[0, 0, 16:] = 0  # the first one is half as high
        return {"pixel_values": pixels[None], "pixel_attention_mask": mask}
    if form == "grid":
        patches = pixels.view(-1, 3 * 2 * 8 * 8)  # 8 of each picture
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 2]][:n])}
    if form == "crossed":  # the text looks at them from aside
        tiles = torch.tensor([1, 0, 0, 0])
        inputs = {"aspect_ratio_mask": tiles.expand(1, n, 4), "aspect_ratio_ids": tiles[:1].expand(1, n)}
        inputs["cross_attention_mask"] = tiles.expand(1, length, n, 4)
        return inputs | {"pixel_values": pixels[None, :, None].expand(1, n, 4, 3, 32, 32)}
    if "size" in form:
        first = [16, 32] if form == "two sizes" else [32, 32]
        return {"pixel_values": pixels, "image_sizes": torch.tensor([first, [32, 32]][:n])}
    return {"pixel_values": pixels[None] if "nested" in form else pixels}


def reference_logprobs(given: dict, model, texts: list[dict], ids: list[Tensor]) -> Tensor:
    """Of all response tokens, of the unmodified model, one response at a time, with the gradients of a loss."""
    found = []
    for b, response in enumerate(ids):
        whole = dict(texts[b // G])
        P = whole["input_ids"].shape[1]
        for name in [name for name, x in whole.items() if x.shape[:2] == (1, P)]:
            last = whole[name][:, -1:].repeat_interleave(len(response), dim=1)
            whole[name] = torch.cat([whole[name], last], dim=1)
        whole["input_ids"][0, P:] = response
        if "types" in given:
            whole[given["types"][0]][0, P:] = given["types"][2]
        logits = model(**whole, use_cache=False).logits[0, P - 1 : -1].float()
        logits[:, packing.media_token_ids(model.config)] = -torch.inf
        logp = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        logp.square().sum().backward()  # a loss with other weights for all tokens
        found.append(logp.detach())
    return torch.cat(found)


def trained_logprobs(model, prompts: list[packing.Prompt], ids: list[Tensor]) -> Tensor:
    """The same as the scripts compute them."""
    table = torch.full((len(ids), R), torch.nan)
    groups = [(i, list(range(i * G, i * G + G))) for i in range(len(prompts))]
    packed = packing.is_packed(model)
    for pack in packing.iter_rank_packs(groups, prompts, prompts.__getitem__, ids, 1024, packed=packed):
        logprobs, _ = packing.response_logprobs(model, pack)
        logprobs.square().sum().backward()
        table[pack.token_index] = logprobs.detach()
    return table[~table.isnan()]


def gradient_error(model, unmodified) -> float:
    """Norm of the difference over the norm, of the worst tensor; small ones over a thousandth of the whole."""
    pairs = []
    for ours, theirs in zip(model.parameters(), unmodified.parameters(), strict=True):
        pairs.append([torch.zeros_like(p) if p.grad is None else p.grad for p in (ours, theirs)])
    least = torch.stack([theirs.norm() for _, theirs in pairs]).norm() / 1000
    return max(float((ours - theirs).norm() / max(theirs.norm(), least)) for ours, theirs in pairs)


def main(words: list[str]) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    table = []
    for name, given in GIVEN["families"].items():
        if not words or any(word in name for word in words):
            table.append(measure(name, given))
            if name in BF16:
                table.append(measure(f"{name}, bf16", given, torch.bfloat16))
    if words:
        return
    scan = []
    for kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config_class = transformers.CONFIG_MAPPING[kind]
        if not getattr(config_class, "is_encoder_decoder", False):
            given = {"model_type": kind, "is_decoder": True} | GIVEN["scan"].get(kind, {})
            if "sliding_window" in inspect.signature(config_class).parameters:
                given["sliding_window"] = 64
            scan.append(measure(kind, given))
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

"""What becomes of each family: packed, plain or refused, and how far it is from the unmodified model.

    python tools/families.py                  # the tables of docs/models.md, 7 minutes on one core
    python tools/families.py Gemma "Qwen3-VL" # the families with such words in their names, printed

Of each configuration in families.json a tiny model is made, with weights so large that a wrong mask shows,
saved, and loaded as rloo.py does. It is packed if that proves exact, samples responses, and all log-probs are
compared with those of an untouched copy that reads one response at a time; and so are gradients. The scan
then takes each decoder of transformers that a generic configuration fits.

Windows are 64 tokens wide, prompts 107 to 131 tokens long, responses up to 40.
"""

import inspect
import json
import math
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
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
MARK = "<!-- from here on made by tools/families.py -->\n"
GIVEN = json.loads((ROOT / "tools/families.json").read_text())
BF16 = ("Gemma 3", "gpt-oss", "InternVL", "Mistral, windows", "PaliGemma", "Qwen3-VL")
G = 3  # responses to a prompt
R = 40  # tokens of a response at most
ENDS = [*range(5, 300, 30)]  # tokens that end a response: some soon, some never
IMAGE, BEGIN, END = 300, 301, 302
LOSS = torch.randn(3 * G, R, generator=torch.Generator().manual_seed(0))  # weights of log-probs


@dataclass
class Result:
    name: str
    path: str  # packed, plain, refused: a run would stop, or not built: the unmodified model doesn't run
    reason: str = ""
    training: float = math.nan  # largest difference of log-probs, in nats; in bf16 the mean
    sampling: float = math.nan
    gradient: float = math.nan  # relative, see `gradient_error`

    def row(self) -> str:
        numbers = [f"{x:.0e}" if x == x else "" for x in (self.training, self.sampling, self.gradient)]
        return f"| {self.name} | {self.path} | {' | '.join(numbers)} | {self.reason} |"


# ---- configurations ----


def make_config(given: dict):
    """Those of families.json: `use` names some of its parts, and sizes come by all names that fit."""
    given = expand({name: x for name, x in given.items() if name not in ("pictures", "types")})
    kind = given.pop("model_type")
    if "text_config" not in given:
        return transformers.AutoConfig.for_model(kind, **sizes_of(kind) | given)
    default = transformers.CONFIG_MAPPING[kind]()
    for part in ("text_config", "vision_config"):
        own = given.get(part, {})
        own_kind = own.setdefault("model_type", getattr(default, part).model_type)
        given[part] = sizes_of(own_kind, part) | own
    return transformers.AutoConfig.for_model(kind, **sizes_of(kind, "tokens"), **given)


def expand(given):
    if not isinstance(given, dict):
        return given
    merged = {}
    for part in given["use"].split(" and ") if "use" in given else ():
        merged |= expand(GIVEN["parts"][part])
    return merged | {name: expand(x) for name, x in given.items() if name != "use"}


def sizes_of(model_type: str, part: str = "text_config") -> dict[str, int]:
    """Under names that its configuration knows: a cache would take notice of windows that a model lacks."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    sizes = {name: int(size) for size, names in GIVEN["sizes"][part].items() for name in names.split()}
    return {name: size for name, size in sizes.items() if name in known}


# ---- one family ----


def measure(name: str, given: dict, dtype: torch.dtype = torch.float32) -> Result:
    """What a run of rloo.py would do with it, and how far that is from the unmodified model."""
    try:
        model, unmodified, precise = make_models(given, dtype)
        texts = [make_inputs(given, precise, *size) for size in ((107, 1), (131, 2), (119, 0))]
        reference_logprobs(given, precise, texts, [torch.arange(10, 20)])
    except Exception as error:
        return Result(name, "not built", f"{type(error).__name__}: {error!s:.80}".replace("\n", " "))
    precise.zero_grad()
    prompts = [replace(packing.make_prompt(model, inputs, index=i), seed=i) for i, inputs in enumerate(texts)]
    line = packing.enable_packing_if_exact(
        model=model,
        forward=lambda pack: packing.response_logprobs(model, pack)[0],
        prompts=prompts,
        max_length=256,
        max_tokens=1024,
    )
    is_packed = packing.is_packed(model)
    responses = rloo.generate(rloo.Args(max_response_length=R), model, prompts, G, 1.0, ENDS)
    ids = [response.ids for response in responses]
    expected = reference_logprobs(given, precise, texts, ids)
    sampled = torch.cat([response.logprobs for response in responses])
    stops = not (sampled - expected).abs().mean() <= packing.TOLERANCE[dtype]  # as rloo.py does
    reason = "" if is_packed else line.partition("packed: ")[2]
    error = lambda logprobs: float((logprobs - expected).abs().max())  # noqa: E731
    if dtype == torch.bfloat16:
        error = lambda logprobs: float((logprobs - expected).abs().mean())  # noqa: E731
        reason = f"unmodified {error(reference_logprobs(given, unmodified, texts, ids)):.0e}"
    return Result(
        name=name,
        path="packed" if is_packed else "refused" if stops else "plain",
        reason=reason,
        training=error(trained_logprobs(model, prompts, ids)),
        sampling=error(sampled),
        gradient=gradient_error(model, precise) if is_packed else math.nan,
    )


def make_models(given: dict, dtype: torch.dtype) -> list:
    """-> the model as rloo.py loads it: twice in dtype, and in fp32."""
    config = make_config(given)
    is_vision = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if is_vision else transformers.AutoModelForCausalLM
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
    if num_pictures and given.get("pictures") == "crossed":
        ids = [IMAGE] * num_pictures + ids
        inputs = picture_inputs("crossed", num_pictures, length)
    elif num_pictures and "pictures" in given:
        inputs = picture_inputs(given["pictures"], num_pictures, length)
        features = model.base_model.get_image_features(**inputs, return_dict=True).pooler_output
        for picture in features:
            ids = [BEGIN, *[IMAGE] * len(picture), END, *ids]
    inputs["input_ids"] = torch.tensor([ids[:length]])
    inputs["attention_mask"] = torch.ones(1, length, dtype=torch.long)
    if "types" in given:
        name, of_pictures, _ = given["types"]
        inputs[name] = (inputs["input_ids"] == IMAGE).long() * of_pictures
    return inputs


def picture_inputs(form: str, n: int, length: int) -> dict[str, Tensor]:
    """Inputs of n pictures, in the forms that processors have."""
    seeded = torch.Generator().manual_seed(n)
    pixels = torch.rand(n * (1 + ("tiles" in form)), 3, 32, 32, generator=seeded)
    if form == "padded":
        mask = torch.ones(1, n, 32, 32, dtype=torch.long)
        mask[0, 0, 16:] = 0  # the first one is half as high
        return {"pixel_values": pixels[None], "pixel_attention_mask": mask}
    if form == "grid":
        grid = torch.tensor([[1, 4, 4], [1, 2, 6]][:n])
        patches = torch.rand(int(grid.prod(1).sum()), 3 * 2 * 8 * 8, generator=seeded)
        return {"pixel_values": patches, "image_grid_thw": grid}
    if form == "crossed":
        one_tile = torch.tensor([1, 0, 0, 0])
        return {
            "pixel_values": torch.rand(1, n, 4, 3, 32, 32, generator=seeded),
            "aspect_ratio_ids": torch.ones(1, n, dtype=torch.long),
            "aspect_ratio_mask": one_tile.expand(1, n, 4),
            "cross_attention_mask": one_tile.expand(1, length, n, 4),
        }
    if "size" in form:
        first = [16, 32] if form == "two sizes" else [32, 32]
        return {"pixel_values": pixels, "image_sizes": torch.tensor([first, [32, 32]][:n])}
    return {"pixel_values": pixels[None] if "nested" in form else pixels}


def reference_logprobs(given: dict, model, texts: list[dict], ids: list[Tensor]) -> Tensor:
    """Of all response tokens, of the unmodified model, one response at a time, with the gradients of a loss."""
    found = []
    for b, response in enumerate(ids):
        prompt = texts[b // G]
        P = prompt["input_ids"].shape[1]
        whole = {}
        for name, x in prompt.items():
            new = x[:, -1:].repeat_interleave(len(response), dim=1) if x.shape[:2] == (1, P) else x[:, :0]
            whole[name] = torch.cat([x, new], dim=1)
        whole["input_ids"][0, P:] = response
        if "types" in given:
            whole[given["types"][0]][0, P:] = given["types"][2]
        logits = model(**whole, use_cache=False).logits[0, P - 1 : -1].float()
        never = torch.zeros(logits.shape[1]).bool()
        never[packing.media_token_ids(model.config)] = True
        logp = logits.masked_fill(never, -torch.inf).log_softmax(-1)
        logp = logp.gather(1, response[:, None])[:, 0]
        (logp @ LOSS[b, : len(response)]).backward()
        found.append(logp.detach())
    return torch.cat(found)


def trained_logprobs(model, prompts: list[packing.Prompt], ids: list[Tensor]) -> Tensor:
    """The same as the scripts compute them."""
    table = torch.full(LOSS.shape, math.nan)
    groups = [(i, list(range(i * G, i * G + G))) for i in range(len(prompts))]
    packs = packing.packs_of_rank(
        groups, prompts, prompts.__getitem__, ids, max_tokens=1024, packed=packing.is_packed(model)
    )
    for pack in packs:
        logprobs, _ = packing.response_logprobs(model, pack)
        (logprobs @ pack.tokens(LOSS)).backward()
        table[pack.token_index] = logprobs.detach()
    return torch.cat([row[: len(response)] for row, response in zip(table, ids)])


def gradient_error(model, unmodified) -> float:
    """Norm of the difference over the norm, of the worst tensor; small ones over a thousandth of the whole."""
    pairs = []
    for ours, theirs in zip(model.parameters(), unmodified.parameters(), strict=True):
        pairs.append([p.new_zeros(p.shape) if p.grad is None else p.grad.float() for p in (ours, theirs)])
    least = torch.stack([theirs.norm() for _, theirs in pairs]).norm() / 1000
    return max(float((ours - theirs).norm() / max(theirs.norm(), least)) for ours, theirs in pairs)


# ---- all of them ----


def main(words: list[str]) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    table = []
    for name, given in GIVEN["families"].items():
        if not words or any(word in name for word in words):
            table.append(tell(measure(name, given)))
            if name in BF16:
                table.append(tell(measure(f"{name}, bf16", given, torch.bfloat16)))
    if not words:
        write(table, [tell(measure(name, given)) for name, given in scanned().items()])


def tell(result: Result) -> Result:
    print(result.row(), flush=True)
    return result


def scanned() -> dict[str, dict]:
    """Configurations of all decoders of transformers."""
    families = {}
    for kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config_class = transformers.CONFIG_MAPPING[kind]
        if not getattr(config_class, "is_encoder_decoder", False):
            window = (
                {"use": "window"} if "sliding_window" in inspect.signature(config_class).parameters else {}
            )
            families[kind] = {"model_type": kind, "is_decoder": True} | window | GIVEN["scan"].get(kind, {})
    return families


def write(table: list[Result], scan: list[Result]) -> None:
    by_path = defaultdict(list)
    for result in scan:
        by_path[result.path].append(result)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Bad rows and pictures, in all four scripts: one sentence and exit code 2, or left out and counted; never a traceback."""
# ruff: noqa: E501  the table

import gc
import importlib
import io
import shutil
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, TINY, read_jsonl, to_argv, write_jsonl
from PIL import Image
from test_bad_input import assert_one_sentence


def row_of(script: str, prompt="what is it?", image=None, **columns) -> dict:
    """A row of a script's own kind; the picture stands in the column images."""
    own = {"answer": "circle"}
    if script == "grm_sft":
        parts = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "a"}]
        return {"messages": parts, **({} if image is None else {"images": [image]}), **columns}
    if script == "reward_bt":
        own = {"chosen": "good", "rejected": "bad"}
    return {"prompt": prompt, **own, **({} if image is None else {"images": [image]}), **columns}


def save(tmp: Path, name: str, image: Image.Image, **kwargs) -> str:
    image.save(tmp / name, **kwargs)
    return str(tmp / name)


def noise(mode: str = "RGB", size=(32, 32)) -> Image.Image:
    return Image.effect_noise(size, 50).convert(mode)


def content(tmp: Path, name: str, data: bytes) -> str:
    (tmp / name).write_bytes(data)
    return str(tmp / name)


def encoded(kind: str, **kwargs) -> bytes:
    buffer = io.BytesIO()
    noise(size=(64, 64)).save(buffer, kind, **kwargs)
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be large."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def link_to_itself(tmp: Path) -> str:
    (tmp / "loop.png").symlink_to(tmp / "loop.png")
    return str(tmp / "loop.png")


# name: (words that the sentence must hold besides the row, the picture); each is tried as row 1 of every script
BAD_PICTURES = {
    "missing": (["nope.png"], lambda t: "nope.png"),
    "a url": (["URL", "download"], lambda t: "https://a.org/b.png"),
    "a data url": (["image"], lambda t: "data:image/png;base64,aGVsbG8="),
    "a folder": (["IsADirectory"], lambda t: str(t)),
    "an empty name": (["image"], lambda t: ""),
    "a name with NUL": (["image"], lambda t: "a\0b.png"),
    "a name too long": (["image"], lambda t: "a" * 5000),
    "the home of nobody": (["image"], lambda t: "~nobody-there/a.png"),
    "a link to itself": (["image"], link_to_itself),
    "an empty file": (["cannot identify"], lambda t: content(t, "a.png", b"")),
    "text": (["cannot identify"], lambda t: content(t, "a.png", b"hello")),
    "html": (["cannot identify"], lambda t: content(t, "a.jpg", b"<html>404</html>")),
    "svg": (["cannot identify"], lambda t: content(t, "a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>")),
    "postscript": (["cannot identify"], lambda t: content(t, "a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")),
    "header alone": (["image"], lambda t: content(t, "a.png", encoded("PNG")[:33])),
    "truncated jpeg": (["truncated"], lambda t: content(t, "a.jpg", encoded("JPEG")[:900])),
    "truncated png": (["image"], lambda t: content(t, "a.png", encoded("PNG")[:900])),
    "truncated webp": (["image"], lambda t: content(t, "a.webp", encoded("WEBP", lossless=True)[:900])),
    "truncated gif": (["image"], lambda t: content(t, "a.gif", encoded("GIF")[:900])),
    "truncated bmp": (["image"], lambda t: content(t, "a.bmp", encoded("BMP")[:900])),
    "corrupted bytes": (["image"], lambda t: content(t, "a.png", encoded("PNG")[:60] + b"\0" * 200 + encoded("PNG")[260:])),
    "bomb of 8193 x 8193": (["8193 x 8193 pixels", "smaller"], lambda t: content(t, "a.png", bomb(8193, 8193))),
    "bomb of 50000 x 50000": (["image", "bomb"], lambda t: content(t, "a.png", bomb(50000, 50000))),
    "no width": (["image"], lambda t: content(t, "a.png", bomb(0, 9))),
    "20000 x 3": (["20000 x 3 pixels"], lambda t: save(t, "a.png", noise(size=(20000, 3)))),
    "3 x 20000": (["3 x 20000 pixels"], lambda t: save(t, "a.png", noise(size=(3, 20000)))),
}  # fmt: skip

# name: (words, columns of row 1 but for the picture, or a whole row by script); scripts where it applies
PROMPTS = ["ppo_vl", "rloo", "reward_bt"]
BAD_ROWS = {
    "prompt is null": (["prompt"], PROMPTS, {"prompt": None}),
    "prompt is a number": (["prompt"], PROMPTS, {"prompt": 5}),
    "prompt is an object": (["prompt"], PROMPTS, {"prompt": {"a": 1}}),
    "prompt is an empty string": (["no text"], PROMPTS, {"prompt": ""}),
    "prompt is blank": (["no text"], PROMPTS, {"prompt": " \n\t"}),
    "prompt is an empty list": (["prompt"], PROMPTS, {"prompt": []}),
    "prompt is a list of numbers": (["prompt"], PROMPTS, {"prompt": [1, 2]}),
    "message without content": (["message"], PROMPTS, {"prompt": [{"role": "user"}]}),
    "message part is a number": (["part"], PROMPTS, {"prompt": [{"role": "user", "content": [5]}]}),
    "text of a part is a number": (["must be a string"], PROMPTS, {"prompt": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
    "part of another type": (["part"], PROMPTS, {"prompt": [{"role": "user", "content": [{"type": "audio", "text": "a"}]}]}),
    "image placeholder without image": (["1 image placeholders but 0"], PROMPTS, {"prompt": "<image> what?"}),
    "video placeholder without video": (["1 video placeholders but 0"], PROMPTS, {"prompt": "<video> what?"}),
    "image is a number": (["image"], PROMPTS, {"images": 5}),
    "image is a list of null": (["image"], PROMPTS, {"images": [None]}),
    "video is a number": (["video"], PROMPTS, {"videos": 5}),
    "video is a folder": (["video"], PROMPTS, {"videos": "/"}),
    "video is text": (["video"], PROMPTS, {"videos": __file__}),
    "answer is null": (["answer"], ["ppo_vl", "rloo"], {"answer": None}),
    "messages are null": (["messages"], ["grm_sft"], {"messages": None}),
    "messages are text": (["messages"], ["grm_sft"], {"messages": "hello"}),
    "messages are empty": (["messages"], ["grm_sft"], {"messages": []}),
    "no answer in the chat": (["assistant"], ["grm_sft"], {"messages": [{"role": "user", "content": "a"}]}),
    "the answer is empty": (["empty"], ["grm_sft"], {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}),
    "the answer is a number": (["assistant", "text"], ["grm_sft"], {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": 5}]}),
    "chosen is null": (["chosen", "missing"], ["reward_bt"], {"chosen": None}),
    "rejected is null": (["rejected", "missing"], ["reward_bt"], {"rejected": None}),
    "chosen is empty": (["chosen", "empty"], ["reward_bt"], {"chosen": ""}),
    "chosen is a number": (["chosen"], ["reward_bt"], {"chosen": 5}),
    "both sides are the same": (["same"], ["reward_bt"], {"chosen": "bad"}),
    "the margin is NaN": (["margin"], ["reward_bt"], {"margin": float("nan")}),
    "the margin is infinite": (["margin"], ["reward_bt"], {"margin": 1e999}),
    "the margin is null": (["margin"], ["reward_bt"], {"margin": None}),
    "the weight is negative": (["weight"], ["reward_bt"], {"weight": -1.0}),
}  # fmt: skip

FILES = {
    "a lone surrogate": (["a.jsonl", "surrogate"], '{"prompt": "a"}\n{"prompt": "b\\ud800"}\n'),
    "half a line": (["a.jsonl"], '{"prompt": "a"}\n{"prom'),
    "binary": (["a.jsonl"], "\0\1\2\3"),
    "a list": (["a.jsonl"], "[1, 2]\n"),
}


@pytest.fixture(scope="module")
def parts():
    """Model and processor of the tiny model, read once."""
    import torch

    import ppo_vl

    model, processor = ppo_vl.load_model(TINY, torch.float32), ppo_vl.load_processor(TINY)
    return model, processor, ppo_vl.end_token_ids(model, processor.tokenizer)


def prepare(script: str, parts, source: str, **flags) -> dict:
    """A script's check of its training data."""
    module, (model, processor, end_ids) = importlib.import_module(script), parts
    if script == "grm_sft":
        args = module.Args(model=TINY, train_samples=0, **flags)
        data = module.prepare_judged(args, model, processor, end_ids, source, "train", True, False)
        kept, data = sorted({entry["index"] for entry in data["entries"]}), data["sources"][0]
        return {**data, "keep": kept}
    args = module.Args(model=TINY, **flags)
    if script == "reward_bt":
        return module.prepare_rankings(args, model, processor, source, "train", 0, 0, False)
    return module.prepare_data(args, model, processor, source, "train", 0, False)


def assert_bad_row(script: str, parts, tmp: Path, bad: dict, words: list[str], capfd) -> None:
    """Row 1 of three: an error that names it, or with skip counted, and the other two stay."""
    good = row_of(script, **{name: 1.0 for name in ("margin", "weight") if name in bad})  # else null, which is bad too
    source = write_jsonl(tmp / "rows.jsonl", [good, bad, good])
    with pytest.raises(SystemExit) as stopped:
        prepare(script, parts, source)
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, ["row 1", *words])
    data = prepare(script, parts, source, on_bad_sample="skip")
    assert data["keep"] == [0, 2]
    [record] = data["bad"]
    assert record["row"] == 1 and record["dataset"] == source and all(word in record["reason"] for word in words)
    assert "error" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", BAD_PICTURES)
def test_bad_picture(name, script, parts, tmp_path, capfd):
    words, make = BAD_PICTURES[name]
    assert_bad_row(script, parts, tmp_path, row_of(script, image=make(tmp_path)), words, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, script", [(name, script) for name, (_, where, _) in BAD_ROWS.items() for script in where]
)
def test_bad_row(name, script, parts, tmp_path, capfd):
    words, _, columns = BAD_ROWS[name]
    assert_bad_row(script, parts, tmp_path, {**row_of(script), **columns}, words, capfd)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("column", ["first", "last"])
def test_column_missing_in_the_middle(column, script, parts, tmp_path, capfd):
    """Rows of a .jsonl file need not have the same columns: what is not there is null."""
    bad = row_of(script)
    bad.pop(list(bad)[0 if column == "first" else -1])
    assert_bad_row(script, parts, tmp_path, bad | {"other": 1}, [], capfd)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", FILES)
def test_bad_file(name, script, parts, tmp_path, capfd):
    """What can't be split into rows can't be left out either."""
    words, text = FILES[name]
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    for mode in ("error", "skip"):
        with pytest.raises(SystemExit) as stopped:
            prepare(script, parts, str(tmp_path / "a.jsonl"), on_bad_sample=mode)
        assert stopped.value.code == 2
        assert_one_sentence(capfd.readouterr().err, words)


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_row_can_be_used(script, parts, tmp_path, capfd):
    source = write_jsonl(tmp_path / "rows.jsonl", [row_of(script, image="nope.png")] * 2)
    with pytest.raises(SystemExit):
        prepare(script, parts, source, on_bad_sample="skip")
    assert_one_sentence(capfd.readouterr().err, ["none of the 2 rows", "row 0", "nope.png"])


# --- pictures that are good ------------------------------------------------------------------------------------------


def gif(tmp: Path) -> str:
    first, second = Image.new("RGB", (32, 32), "red"), Image.new("RGB", (32, 32), "blue")
    first.save(tmp / "a.gif", save_all=True, append_images=[second])
    return str(tmp / "a.gif")


def see_through(tmp: Path, mode: str) -> str:
    """Red where it can be seen, black pixels below what can't."""
    image = Image.new("RGBA", (32, 32), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (16, 0, 32, 32))
    if mode == "P":
        image = image.convert("RGB").quantize(4)
        image.info["transparency"] = image.getpixel((20, 5))
        return save(tmp, "a.png", image, transparency=image.getpixel((20, 5)))
    return save(tmp, "a.png", image)


# name: (the picture, its RGB at (5, 5) and at (20, 5))
RED, WHITE = (255, 0, 0), (255, 255, 255)
PICTURES = {
    "an animation's first frame": (gif, RED, RED),
    "CMYK": (lambda t: save(t, "a.jpg", Image.new("CMYK", (32, 32), (0, 255, 255, 0))), (254, 0, 0), (254, 0, 0)),
    "transparent": (lambda t: see_through(t, "RGBA"), RED, WHITE),
    "a palette with a transparent colour": (lambda t: see_through(t, "P"), RED, WHITE),
    "16 bits": (lambda t: save(t, "a.png", Image.fromarray(np.full((32, 32), 128 * 257, np.uint16))), (128,) * 3, (128,) * 3),
    "1 bit": (lambda t: save(t, "a.png", Image.new("1", (32, 32), 1)), WHITE, WHITE),
    "grey with alpha": (lambda t: save(t, "a.png", Image.new("LA", (32, 32), (7, 255))), (7,) * 3, (7,) * 3),
    "another ending": (lambda t: Path(save(t, "a.png", Image.new("RGB", (32, 32), RED))).rename(t / "a.jpg"), RED, RED),
    "no ending": (lambda t: Path(save(t, "a.png", Image.new("RGB", (32, 32), RED))).rename(t / "a"), RED, RED),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_picture_of_an_uncommon_kind(name, tmp_path):
    import ppo_vl

    make, *expected = PICTURES[name]
    image = ppo_vl.load_image(str(make(tmp_path)), tmp_path, "row 0")
    assert image.mode == "RGB" and image.size == (32, 32)
    found = [image.getpixel((x, 5)) for x in (5, 20)]
    assert np.abs(np.array(found) - np.array(expected)).max() <= 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_picture_of_one_pixel_is_enlarged(script, parts, tmp_path):
    rows = [row_of(script, image=save(tmp_path, "a.png", noise(size=(1, 1))))]
    assert prepare(script, parts, write_jsonl(tmp_path / "rows.jsonl", rows))["keep"] == [0]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("text", ["a\0b", "\ufffd\u202e\u200b", "\ud7ff\ue000", "😀" * 9, "a\x1b[31m\r\n\b"])
def test_odd_characters_are_text(text, script, parts, tmp_path):
    rows = [row_of(script, prompt=text), row_of(script)]
    assert prepare(script, parts, write_jsonl(tmp_path / "rows.jsonl", rows))["keep"] == [0, 1]


# --- whole runs ------------------------------------------------------------------------------------------------------


def run_flags(script: str, tmp: Path, model: str) -> dict:
    (tmp / "reward.py").write_text(
        "def score(completion_ids, **c):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    flags = {
        "model": model, "output_dir": tmp, "total_steps": 2, "max_steps": 2, "rollout_batch_size": 8, "batch_size": 2,
        "train_batch_size": 8, "num_samples_per_prompt": 2, "max_response_length": 4, "eval_steps": 0, "eval_samples": 0,
        "max_prompt_length": 200, "max_length": 200, "micro_batch_tokens": 800, "learning_rate": 1e-3, "warmup_steps": 0,
        "rewards": [f"{tmp}/reward.py:score"], "reward_weights": [1], "freeze_vision": False, "freeze_projector": False,
    }  # fmt: skip
    known = importlib.import_module(script).Args.__dataclass_fields__
    return {name: value for name, value in flags.items() if name in known}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_skipped_row_changes_nothing_for_the_others(script, tiny_text_model, tmp_path, monkeypatch, caplog):
    """The run is the one of a file without that row, weight for weight; the row is named in bad_samples.jsonl."""
    from safetensors.torch import load_file

    module = importlib.import_module(script)
    for name in ("draw_curves", "draw_samples", "draw_calibration", "draw_worst_pairs"):
        monkeypatch.setattr(module, name, lambda *args: None, raising=False)
    rows = [row_of(script, prompt=f"what is {i}?") for i in range(6)]
    weights = {}
    for name, own in (("clean", rows), ("dirty", [*rows[:2], row_of(script, prompt=""), *rows[2:]])):
        flags = run_flags(script, tmp_path, tiny_text_model) | {"run_name": name, "on_bad_sample": "skip"}
        flags["dataset"] = write_jsonl(tmp_path / f"{name}.jsonl", own)
        module.main(module.parse_args(to_argv(flags)))
        [file] = (tmp_path / name).glob("checkpoint-2/**/model.safetensors")
        weights[name] = load_file(file)
    assert all(bool((x == weights["dirty"][key]).all()) for key, x in weights["clean"].items())
    [record] = read_jsonl(tmp_path / "dirty/bad_samples.jsonl")
    assert record["row"] == 2 and "no text" in record["reason"] and not (tmp_path / "clean/bad_samples.jsonl").exists()
    assert "row 2" in caplog.text and "1 of 7 rows" in caplog.text


# --- what is not finite ----------------------------------------------------------------------------------------------


@pytest.fixture
def main_of(tiny_text_model, tmp_path, monkeypatch):
    """A run of six rows, without pictures -> its folder."""

    def go(script: str, **flags) -> Path:
        module = importlib.import_module(script)
        for name in ("draw_curves", "draw_samples", "draw_judged", "draw_gap", "draw_calibration", "draw_worst_pairs"):
            monkeypatch.setattr(module, name, lambda *args: None, raising=False)
        rows = write_jsonl(tmp_path / "rows.jsonl", [row_of(script, prompt=f"what is {i}?") for i in range(6)])
        flags = {**run_flags(script, tmp_path, tiny_text_model), "run_name": "run", "dataset": rows, **flags}
        known = module.Args.__dataclass_fields__
        module.main(module.parse_args(to_argv({name: value for name, value in flags.items() if name in known})))
        return tmp_path / "run"

    return go


def spoil_gradients(patch, script: str, which) -> None:
    """Gradients of NaN where which(number of the optimizer step)."""
    module, calls = importlib.import_module(script), []
    take_step = module.optimizer_step

    def spoilt(engine):
        calls.append(1)
        if which(len(calls)):
            next(p for p in engine.module.parameters() if p.grad is not None).grad.fill_(float("nan"))
        return take_step(engine)

    patch.setattr(module, "optimizer_step", spoilt)


def skipped_updates(folder: Path) -> list[float]:
    return [m["train/skipped_updates"] for m in read_jsonl(folder / "metrics.jsonl") if "train/skipped_updates" in m]


@pytest.mark.parametrize("script", SCRIPTS)
def test_samples_of_a_skipped_update_are_named(script, main_of, monkeypatch):
    """A gradient of NaN: the step is skipped and counted, its rows (and responses) stand in bad_samples.jsonl."""
    spoil_gradients(monkeypatch, script, lambda number: number == 1)
    folder = main_of(script)
    assert skipped_updates(folder)[0] == 1 == sum(skipped_updates(folder))
    records = read_jsonl(folder / "bad_samples.jsonl")
    assert len(records) == (2 if script in ("grm_sft", "reward_bt") else 4)
    for record in records:
        assert record["step"] == 1 and record["row"] in range(6) and "gradients were not finite" in record["reason"]
        assert record["dataset"].endswith("rows.jsonl")
        assert len(record.get("responses", "ab")) == 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_sample_whose_own_loss_is_not_finite_is_named_alone(script, main_of, monkeypatch):
    module, calls = importlib.import_module(script), []
    part = getattr(module, {"ppo_vl": "Actor", "reward_bt": "RewardModel"}.get(script, "Policy"))
    forward = part.forward

    def spoilt(self, pack, *args, **kwargs):
        first, *others = forward(self, pack, *args, **kwargs)
        if torch.is_grad_enabled() and not calls:
            calls.append(1)
            count = 1 if script == "reward_bt" else pack.rows[0][1]  # of the first response
            first = first * torch.where(torch.arange(len(first)) < count, float("nan"), 1.0)
        return first, *others

    monkeypatch.setattr(part, "forward", spoilt)
    folder = main_of(script)
    assert skipped_updates(folder)[0] == 1 == sum(skipped_updates(folder))
    [record] = read_jsonl(folder / "bad_samples.jsonl")
    assert record["step"] == 1 and record["row"] in range(6) and "its loss was not finite" in record["reason"]
    assert len(record.get("responses", "a")) == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_too_many_skipped_updates_in_a_row_save_and_end_the_run(script, main_of, tiny_text_model, monkeypatch, capfd):
    """The weights saved are those of before; the run goes on from them."""
    from safetensors.torch import load_file

    with monkeypatch.context() as patch:
        spoil_gradients(patch, script, lambda number: True)
        with pytest.raises(SystemExit) as stopped:
            main_of(script, max_skipped_updates=1, total_steps=9, max_steps=9)
    assert stopped.value.code == 2
    del stopped
    gc.collect()  # the lock of the folder goes with the frames of main
    assert_one_sentence(capfd.readouterr().err, ["1 updates in a row", "bad_samples.jsonl", "checkpoint-1", "--resume"])
    folder = Path(main_of(script, resume="auto", total_steps=2, max_steps=2))
    first, second = (load_file(next((folder / f"checkpoint-{n}").glob("**/model.safetensors"))) for n in (1, 2))
    start = load_file(f"{tiny_text_model}/model.safetensors")
    same = [torch.equal(first[name][: len(x)], x) for name, x in start.items() if name in first]  # and a pad token
    assert len(same) > 9 and all(same) and any(not torch.equal(first[name], second[name]) for name in first)
    assert skipped_updates(folder) == [2 if script in ("ppo_vl", "rloo") else 1, 0]  # two passes in a step


ROLLOUTS = ["ppo_vl", "rloo"]


@pytest.mark.parametrize("script", ROLLOUTS)
def test_log_probs_of_a_sampler_that_are_not_finite_skip_the_update(script, main_of, tiny_text_model, monkeypatch):
    """NaN in one response of the first step: no update, and that response is named alone; the next step is as usual."""
    from safetensors.torch import load_file

    module, calls = importlib.import_module(script), []
    generate = module.generate

    def spoilt(*args, **kwargs):
        responses, logprobs, cut = generate(*args, **kwargs)
        calls.append(1)
        if len(calls) == 1:
            logprobs[3][-1] = float("nan")
        return responses, logprobs, cut

    monkeypatch.setattr(module, "generate", spoilt)
    folder = main_of(script, save_steps=1, eval_samples=0)
    assert skipped_updates(folder) == [1, 0]
    [record] = read_jsonl(folder / "bad_samples.jsonl")
    assert record["step"] == 1 and "sampler's log-probs were not finite" in record["reason"]
    assert len(record["responses"]) == 1
    first, second = (load_file(folder / f"checkpoint-{n}/model.safetensors") for n in (1, 2))
    start = load_file(f"{tiny_text_model}/model.safetensors")
    assert all(torch.equal(x, start[name]) for name, x in first.items() if name in start)
    assert any(not torch.equal(x, second[name]) for name, x in first.items())
    steps = [m for m in read_jsonl(folder / "metrics.jsonl") if "objective/scores" in m]
    assert "loss/policy" not in steps[0] and "loss/policy" in steps[1]


@pytest.mark.parametrize("script", ROLLOUTS)
def test_a_model_of_nan_is_one_sentence(script, main_of, tiny_text_model, tmp_path, capfd):
    """It samples and is evaluated without a traceback, and nothing is learnt from it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_text_model, tmp_path / "nan")
    weights = load_file(tmp_path / "nan/model.safetensors")
    next(x for name, x in weights.items() if "norm" in name).fill_(float("nan"))
    save_file(weights, tmp_path / "nan/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit) as stopped:
        main_of(script, model=tmp_path / "nan", max_skipped_updates=2, total_steps=9, kl_target=0.1)
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, ["2 updates in a row", "step 2", "checkpoint-2"])
    assert skipped_updates(tmp_path / "run") == [1, 1]
    assert len(read_jsonl(tmp_path / "run/bad_samples.jsonl")) == 8


# --- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_clock_that_goes_backwards_changes_nothing(script, main_of, monkeypatch, capfd):
    """No time is negative, no time limit is met or missed, and --resume auto takes what was saved last."""
    now = [2e9]

    def back() -> float:
        now[0] -= 1e6
        return now[0]

    monkeypatch.setattr(time, "time", back)
    limits = {"save_steps": 1, "reward_timeout": 60, "training_time_limit": 60, "save_interval_minutes": 60}
    folder = main_of(script, **limits)
    gc.collect()
    main_of(script, **limits, resume="auto", total_steps=3, max_steps=3)
    assert "checkpoint-2; flags changed" in capfd.readouterr().out
    metrics = read_jsonl(folder / "metrics.jsonl")
    times = [x for m in metrics for name, x in m.items() if name.startswith("time/")]
    assert len(times) > 3 and all(0 <= x < 1e5 for x in times)
    assert [m["train/step"] for m in metrics if "train/skipped_updates" in m] == [1, 2, 3]


def test_at_least_a_hundred_bad_inputs_and_faults():
    import test_bad_input
    import test_grm_bad_input
    import test_reward_bt_runs
    import test_rewards_remote
    import test_rloo_bad_input

    tables = [m.CASES for m in (test_bad_input, test_grm_bad_input, test_reward_bt_runs, test_rloo_bad_input)]
    own = len(BAD_PICTURES) + len(BAD_ROWS) + len(FILES)
    assert own >= 60 and own + sum(map(len, tables)) + len(test_rewards_remote.FATAL) >= 250

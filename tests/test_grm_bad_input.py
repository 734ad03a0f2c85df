"""Bad input to grm_sft.py: exit code 2, one sentence on stderr that names the culprit, no traceback, nothing written."""
# ruff: noqa: E501  the table

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, TINY, to_argv, write_jsonl

import grm_sft

FILES = ROOT / "tests/data/grm"
BASE = {"model": TINY, "dataset": f"{FILES}/pairs.jsonl", "max_steps": 1, "batch_size": 2, "run_name": "run"}
GOOD = "<answer>Answer 1 is better</answer>"


def rows(tmp: Path, *rows: dict) -> dict:
    return {"dataset": write_jsonl(tmp / "data.jsonl", list(rows))}


def pair(**columns) -> dict:
    return {"prompt": "which?", "answer_0": "a", "answer_1": "b", "response": GOOD, **columns}


def chat(*messages, **columns) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **columns}


def hpd(**columns) -> dict:
    return {"path1": f"{FILES}/images/cat_a.png", "path2": f"{FILES}/images/cat_b.png", "prompt": "a ball", **columns}


def omni(**columns) -> dict:
    both = {"response1_path": f"{FILES}/images/cat_a.png", "response2_path": f"{FILES}/images/cat_b.png"}
    return {"prompt": "a ball", "criteria": "red", "criteria_preference": "A", **both, **columns}


def cot(**columns) -> dict:
    turns = [{"value": "compare"}, {"value": "<answer>Image 1 is better</answer>"}]
    return {"images": [f"{FILES}/images/cat_a.png", f"{FILES}/images/cat_b.png"], "conversations": turns, **columns}


def text_file(tmp: Path, name: str, text: str) -> str:
    (tmp / name).write_text(text)
    return str(tmp / name)


def broken_picture(tmp: Path) -> str:
    (tmp / "cut.png").write_bytes((FILES / "images/cat_a.png").read_bytes()[:100])
    return str(tmp / "cut.png")


def checkpoint(tmp: Path, **changed) -> dict:
    """Flags that resume from a folder with a trainer state alone."""
    state = {"step": 1, "cursor": 2, "best": None, "skipped_in_a_row": 0, "wandb_id": None, "world_size": 1}
    state["args"] = vars(grm_sft.Args(model=TINY)) | changed
    (tmp / "old/checkpoint-1/state").mkdir(parents=True)
    (tmp / "old/checkpoint-1/state/trainer_state.json").write_text(json.dumps(state))
    grm_sft.write_manifest(tmp / "old/checkpoint-1", (0, 1))
    return {"resume": tmp / "old/checkpoint-1"}


# name: (words that the sentence must hold, flags from the test's folder)
CASES = {
    # flags
    "micro batch too small": (["--micro-batch-tokens", "--max-length"], lambda t: {"micro_batch_tokens": 100}),
    "no batch": (["--batch-size"], lambda t: {"batch_size": 0}),
    "negative temperature": (["--eval-temperature"], lambda t: {"eval_temperature": -1}),
    "no epochs": (["--epochs"], lambda t: {"epochs": 0}),
    "negative seed": (["--seed"], lambda t: {"seed": -1}),
    "top_p of 0": (["--top-p"], lambda t: {"top_p": 0}),
    "template kwargs": (["--chat-template-kwargs"], lambda t: {"chat_template_kwargs": "{"}),
    "lora targets alone": (["--lora-targets", "--lora-rank"], lambda t: {"lora_targets": "q_proj"}),
    "everything frozen": (["--freeze-text"], lambda t: {"freeze_text": True}),
    "nothing to measure": (["--best-metric", "accuracy"], lambda t: {"eval_dataset": rows(t, chat(("user", "a"), ("assistant", "b")))["dataset"]}),
    "nothing to swap": (["--best-metric", "swap_consistency"], lambda t: {"eval_dataset": f"{FILES}/scores.jsonl", "best_metric": "swap_consistency"}),
    "run exists": (["--run-name", "run"], lambda t: (t / "old/run/x").mkdir(parents=True) or {"output_dir": t / "old"}),
    # files and columns
    "no such file": (["nope.json"], lambda t: {"dataset": "nope.json"}),
    "second file missing": (["nope.json"], lambda t: {"dataset": f"{FILES}/pairs.jsonl,nope.json"}),
    "held-out file missing": (["nope.json"], lambda t: {"eval_dataset": "nope.json"}),
    "broken json": (["a.jsonl"], lambda t: {"dataset": text_file(t, "a.jsonl", '{"prompt": "a"\n{]')}),
    "empty file": (["a.csv", "empty"], lambda t: {"dataset": text_file(t, "a.csv", "prompt,response\n")}),
    "unknown format": (["a.jsonl", "prompt, text", "hpdv3: path1, path2"], lambda t: {"dataset": write_jsonl(t / "a.jsonl", [{"prompt": "a", "text": "b"}])}),
    # pairs
    "no verdict": (["row 1", "is better"], lambda t: rows(t, pair(), pair(response="the first"))),
    "two verdicts": (["row 0", "one <answer>"], lambda t: rows(t, pair(response=GOOD + GOOD))),
    "a score for a pair": (["row 0", "is better"], lambda t: rows(t, pair(response="<answer>7</answer>"))),
    "no response": (["row 1", "response"], lambda t: rows(t, pair(), pair(response=None))),
    "empty prompt": (["row 0", "prompt"], lambda t: rows(t, pair(prompt=" "))),
    "one candidate": (["row 1", "two candidates"], lambda t: rows(t, pair(), pair(answer_1=None))),
    "three images": (["row 0", "two candidates"], lambda t: rows(t, {"prompt": "a", "response": GOOD, "images": ["a.png"] * 3})),
    "image missing": (["row 0", "nope.png"], lambda t: rows(t, {"prompt": "a", "response": GOOD, "images": ["nope.png"] * 2})),
    "image broken": (["row 0", "image"], lambda t: rows(t, {"prompt": "a", "response": GOOD, "images": [broken_picture(t)] * 2})),
    "video missing": (["row 0", "nope.gif"], lambda t: rows(t, {"prompt": "a", "response": GOOD, "videos": ["nope.gif"] * 2})),
    "placeholder in a text": (["row 0", "0 images"], lambda t: rows(t, pair(prompt="<image> which?"))),
    # the other formats
    "hpdv3 without prompt": (["row 1", "prompt"], lambda t: rows(t, hpd(), hpd(prompt=None))),
    "hpdv3 without image": (["row 1", "two images"], lambda t: rows(t, hpd(), hpd(path2=None))),
    "hpdv3 image missing": (["row 0", "nope.jpg"], lambda t: rows(t, hpd(path1="nope.jpg"))),
    "omnireward preference": (["row 1", "criteria_preference", "D"], lambda t: rows(t, omni(), omni(criteria_preference="D"))),
    "cot without answer": (["row 0", "conversations"], lambda t: rows(t, cot(conversations=[{"value": "compare"}]))),
    "cot with one image": (["row 0", "two images"], lambda t: rows(t, cot(images=[f"{FILES}/images/cat_a.png"]))),
    "cot without verdict": (["row 0", "is better"], lambda t: rows(t, cot(conversations=[{"value": "compare"}, {"value": "hm"}]))),
    "score is a word": (["row 0", "score", "good"], lambda t: rows(t, {"prompt": "rate", "score": "good"})),
    "score is missing": (["row 1", "score"], lambda t: rows(t, {"prompt": "rate", "score": 1}, {"prompt": "rate", "score": None})),
    "easy-vqa with another answer": (["row 0", "purple"], lambda t: rows(t, {"prompt": "a", "image": f"{FILES}/images/cat_a.png", "answer": "purple"})),
    "chat without answer": (["row 1", "assistant"], lambda t: rows(t, chat(("user", "a"), ("assistant", "b")), chat(("user", "a")))),
    "chat begins with an answer": (["row 0", "begin"], lambda t: rows(t, chat(("assistant", "a"), ("assistant", "b")))),
    "chat with an empty answer": (["row 0", "empty"], lambda t: rows(t, chat(("user", "a"), ("assistant", " ")))),
    "chat with too few images": (["row 0", "2 image", "1 image"], lambda t: rows(t, chat(("user", "<image><image>"), ("assistant", "a"), images=[f"{FILES}/images/cat_a.png"]))),
    "no messages": (["row 1", "messages"], lambda t: rows(t, chat(("user", "a"), ("assistant", "b")), {"messages": None})),
    # lengths
    "all too long": (["--max-length", "20"], lambda t: {"max_length": 20}),
    "one too long": (["row 0", "--max-length", "--overlong"], lambda t: {"max_length": 60, "overlong": "error"}),
    # models and checkpoints
    "no such model": (["--model", "/nope"], lambda t: {"model": "/nope"}),
    "model without weights": (["--model"], lambda t: shutil.copytree(TINY, t / "m", ignore=shutil.ignore_patterns("*.safetensors")) and {"model": t / "m"}),
    "resume from nothing": (["--resume", "nope"], lambda t: {"resume": "nope"}),
    "resume with another freeze": (["--resume", "--freeze-vision"], lambda t: checkpoint(t, freeze_vision=False)),
    "resume a finished run": (["--resume", "--max-steps"], lambda t: checkpoint(t) | {"force": True}),
}  # fmt: skip


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_one_sentence(stderr: str, words: list[str]) -> None:
    assert "Traceback" not in stderr
    lines = [line for line in re.split(r"[\r\n]|\x1b\[A", stderr) if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    for word in words:
        assert word in lines[0], lines[0]
    assert len(lines[0]) < 600


@pytest.fixture(autouse=True, scope="module")
def one_model():
    """The tiny model is read once; folders of other models are read as they are."""
    load, cached = grm_sft.load_model, {}

    def load_once(name, dtype, four_bit=False):
        if str(name) != TINY:
            return load(name, dtype, four_bit)
        return cached.setdefault(TINY, load(name, dtype)) if TINY not in cached else cached[TINY]

    grm_sft.load_model = load_once
    yield
    grm_sft.load_model = load


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, tmp_path, capfd):
    words, make = CASES[name]
    flags = {**BASE, "output_dir": tmp_path / "runs", **make(tmp_path)}
    before = listing(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        grm_sft.main(grm_sft.parse_args(to_argv(flags)))
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, words)
    assert listing(tmp_path) == before, "nothing may be left behind"


@pytest.mark.parametrize("part", ["vision", "projector"])
def test_a_text_model_has_no_eyes_to_freeze(part, tmp_path, tiny_text_model, capfd):
    off = {"freeze_vision": part == "vision", "freeze_projector": part == "projector"}
    flags = {
        **BASE,
        "model": tiny_text_model,
        "dataset": f"{FILES}/text_pairs.jsonl",
        "output_dir": tmp_path / "runs",
        **off,
    }
    with pytest.raises(SystemExit):
        grm_sft.main(grm_sft.parse_args(to_argv(flags)))
    assert_one_sentence(capfd.readouterr().err, [f"--freeze-{part} freezes nothing", f"--no-freeze-{part}"])
    assert not (tmp_path / "runs").exists()


def test_pictures_for_a_text_model(tmp_path, tiny_text_model, capfd):
    flags = {**BASE, "model": tiny_text_model, "output_dir": tmp_path / "runs"}
    with pytest.raises(SystemExit):
        grm_sft.main(grm_sft.parse_args(to_argv(flags)))
    assert_one_sentence(capfd.readouterr().err, ["row 0", "text model"])

"""examples/custom_data.py: what it writes passes the data check of the script that it is for, and trains."""

import importlib
import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, read_jsonl

KINDS = {"ppo_vl": "prompts", "rloo": "prompts", "reward_bt": "pairs", "grm_sft": "judged"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten pictures in folders of their colour -> the folder with the six files."""
    import easy_vqa

    folder = tmp_path_factory.mktemp("custom")
    questions, answers, ids = easy_vqa.get_test_questions()
    paths, colours = easy_vqa.get_test_image_paths(), {"red", "blue", "green", "yellow"}
    known = {i: answer for question, answer, i in zip(questions, answers, ids) if answer in colours}
    for i, colour in list(known.items())[:10]:
        (folder / "pictures" / colour).mkdir(parents=True, exist_ok=True)
        shutil.copy(paths[i], folder / "pictures" / colour)
    (folder / "pictures" / "red" / "notes.txt").write_text("not a picture")
    command = [sys.executable, str(ROOT / "examples/custom_data.py"), "pictures", "--output-dir", "made"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("10 pictures of ") and "2 held out" in result.stdout
    return folder / "made"


def test_rows_are_right_and_held_out_pictures_apart(data):
    for kind in ("prompts", "pairs", "judged"):
        train, test = read_jsonl(data / f"{kind}.jsonl"), read_jsonl(data / f"{kind}_test.jsonl")
        assert len(train) == 8 and len(test) == 2
        assert not {row["image"] for row in train} & {row["image"] for row in test}
        for row in train + test:
            right = row["image"].split("/")[-2]
            if kind == "prompts":
                assert row["answer"] == right
            if kind == "pairs":
                assert row["chosen"] == f"<answer>{right}</answer>" != row["rejected"]
            if kind == "judged":
                side = 0 if "Answer 1" in row["response"] else 1
                assert row[f"answer_{side}"] == right != row[f"answer_{1 - side}"]


@pytest.mark.parametrize("script", KINDS)
def test_every_script_takes_its_file(script, data):
    import torch

    import ppo_vl

    module = importlib.import_module(script)
    model, processor = ppo_vl.load_model(TINY, torch.float32), ppo_vl.load_processor(TINY)
    source = str(data / f"{KINDS[script]}.jsonl")
    if script == "grm_sft":
        args, ends = module.Args(train_samples=0), ppo_vl.end_token_ids(model, processor.tokenizer)
        kept = module.prepare_judged(args, model, processor, ends, source, "train", True, False)
        assert len(kept["entries"]) == 16 and kept["sources"][0]["bad"] == []  # both orders
    else:
        prepare = module.prepare_rankings if script == "reward_bt" else module.prepare_data
        rest = (0, 0, False) if script == "reward_bt" else (0, False)
        kept = prepare(module.Args(), model, processor, source, "train", *rest)
        assert len(kept["keep"]) == 8 and kept["dropped"] == 0 and kept["bad"] == []


def test_a_step_on_it(data, run):
    source = str(data / "prompts.jsonl")
    folder = run("rloo", dataset=source, eval_dataset=str(data / "prompts_test.jsonl"), total_steps=1)
    (step,) = [row for row in read_jsonl(folder / "metrics.jsonl") if "objective/scores" in row]
    assert step["rollout/prompts_sampled"] == 4


def test_one_class_is_not_enough(tmp_path):
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.png").write_bytes(b"")
    command = [sys.executable, str(ROOT / "examples/custom_data.py"), str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1 and "at least two subfolders" in result.stderr and "Traceback" not in result.stderr


def test_its_lines_are_json(data):
    for file in data.iterdir():
        assert all(isinstance(json.loads(line), dict) for line in file.read_text().splitlines())

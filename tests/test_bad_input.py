"""Bad input: exit code 2, one sentence on stderr that names the culprit, no traceback, nothing written."""
# ruff: noqa: E501  the table

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import write_jsonl

import ppo_vl


def rows_file(tmp: Path, *rows: dict, name: str = "data.jsonl") -> dict:
    """Flags with a data file of these rows: the usual way to say what a row must not look like."""
    return {"dataset": write_jsonl(tmp / name, list(rows)), "eval_dataset": None}


def row(**columns) -> dict:
    return {"prompt": "what shape is it?", "answer": "circle", **columns}


def picture(tmp: Path, name: str = "ok.png", size=(32, 32), keep_bytes: int | None = None) -> str:
    from PIL import Image

    Image.effect_noise(size, 50).convert("RGB").save(tmp / name)
    if keep_bytes is not None:
        (tmp / name).write_bytes((tmp / name).read_bytes()[:keep_bytes])
    return str(tmp / name)


def text_file(tmp: Path, name: str, text: str) -> str:
    (tmp / name).write_text(text)
    return str(tmp / name)


def reward(tmp: Path, body: str, name: str = "score") -> dict:
    path = text_file(tmp, "reward.py", f"def {name}(completions, **columns):\n    {body}\n")
    return {"rewards": [f"{path}:{name}"], "reward_weights": [1]}


def own(source: str) -> dict:
    return {"rewards": [source], "reward_weights": [1]}


def model_copy(tmp: Path, tiny: str, **texts: str) -> dict:
    """A copy of the tiny model without weights, some files replaced."""
    shutil.copytree(tiny, tmp / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    for name, text in texts.items():
        (tmp / "model" / name.replace("__", ".")).write_text(text)
    return {"model": tmp / "model"}


def checkpoint(tmp: Path, text: str | None = None, step: int = 1, **changed) -> dict:
    """Flags that resume from a folder with a trainer state alone."""
    (tmp / "old/checkpoint-1/state").mkdir(parents=True)
    args = vars(ppo_vl.Args(model=changed.pop("model", "tiny"), **changed))
    state = {"step": step, "episode": 0, "kl_coef": 0.01, "skipped_in_a_row": 0, "wandb_id": None, "world_size": 1}
    state["args"] = args
    (tmp / "old/checkpoint-1/state/trainer_state.json").write_text(json.dumps(state) if text is None else text)
    ppo_vl.write_manifest(tmp / "old/checkpoint-1", (0, 1))
    return {"resume": tmp / "old/checkpoint-1"}


def saved_dataset(tmp: Path) -> dict:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list([row()])}).save_to_disk(tmp / "saved")
    return {"dataset": tmp / "saved", "dataset_split": "dev", "eval_dataset": None}


# name: (words that the sentence must hold, flags from the test's folder and the tiny model's)
CASES = {
    # flags
    "rollout not divisible": (["--rollout-batch-size", "--train-batch-size"], lambda t, m: {"rollout_batch_size": 12}),
    "train batch not divisible": (["--train-batch-size", "--num-samples-per-prompt"], lambda t, m: {"train_batch_size": 6}),
    "micro batch too small": (["--micro-batch-tokens"], lambda t, m: {"micro_batch_tokens": 100}),
    "negative kl_coef": (["--kl-coef"], lambda t, m: {"kl_coef": -0.1}),
    "zero temperature": (["--temperature"], lambda t, m: {"temperature": 0}),
    "zero steps": (["--total-steps"], lambda t, m: {"total_steps": 0}),
    "gamma above 1": (["--gamma"], lambda t, m: {"gamma": 1.5}),
    "adam beta of 1": (["--adam-beta1"], lambda t, m: {"adam_beta1": 1}),
    "negative seed": (["--seed"], lambda t, m: {"seed": -1}),
    "top_p of 0": (["--top-p"], lambda t, m: {"top_p": 0}),
    "negative kl_target": (["--kl-target"], lambda t, m: {"kl_target": -1}),
    "kl_target without kl": (["--kl-target", "--kl-coef"], lambda t, m: {"kl_target": 1, "kl_coef": 0}),
    "offload without zero": (["--offload-optimizer", "--zero-stage"], lambda t, m: {"offload_optimizer": True}),
    "weights do not fit rewards": (["--reward-weights", "2 weights", "3 sources"], lambda t, m: {"rewards": ["accuracy", "format", "length"]}),
    "template kwargs are no JSON": (["--chat-template-kwargs", "JSON"], lambda t, m: {"chat_template_kwargs": "{a: 1}"}),
    "template kwargs are no object": (["--chat-template-kwargs", "JSON"], lambda t, m: {"chat_template_kwargs": "[1]"}),
    "plain prompts for pictures": (["--plain-prompts", "text models"], lambda t, m: {"plain_prompts": True}),
    # output
    "output below a file": (["--output-dir"], lambda t, m: {"output_dir": text_file(t, "file", "") + "/runs"}),
    "output is a file": (["--output-dir"], lambda t, m: {"output_dir": text_file(t, "file", "")}),
    "run exists": (["--run-name", "run"], lambda t, m: (t / "old/run/x").mkdir(parents=True) or {"output_dir": t / "old"}),
    # dataset files
    "no such file": (["nope.jsonl"], lambda t, m: {"dataset": "nope.jsonl"}),
    "no such held-out file": (["nope.parquet"], lambda t, m: {"eval_dataset": "nope.parquet"}),
    "no such folder": (["/nope"], lambda t, m: {"dataset": "/nope"}),
    "no such hub dataset": (["nobody/nothing"], lambda t, m: {"dataset": "nobody/nothing"}),
    "unknown suffix": (["a.txt", ".jsonl"], lambda t, m: {"dataset": text_file(t, "a.txt", "hello")}),
    "broken json": (["a.jsonl"], lambda t, m: {"dataset": text_file(t, "a.jsonl", '{"prompt": "a"\n{]')}),
    "not a parquet file": (["a.parquet"], lambda t, m: {"dataset": text_file(t, "a.parquet", "hello")}),
    "empty jsonl": (["a.jsonl"], lambda t, m: {"dataset": text_file(t, "a.jsonl", "")}),
    "empty csv": (["a.csv", "empty"], lambda t, m: {"dataset": text_file(t, "a.csv", "prompt,answer\n")}),
    "folder is no dataset": (["folder"], lambda t, m: (t / "folder").mkdir() or {"dataset": t / "folder"}),
    "unknown split of a folder": (["dev", "train"], lambda t, m: saved_dataset(t)),
    "unknown split of easy-vqa": (["dev"], lambda t, m: {"dataset": "easy-vqa", "dataset_split": "dev"}),
    # columns
    "no prompt column": (["--prompt-column"], lambda t, m: rows_file(t, {"text": "a", "answer": "b"})),
    "no answer column": (["--answer-column"], lambda t, m: rows_file(t, {"prompt": "a"})),
    "wrong prompt column": (["--prompt-column", "query"], lambda t, m: {"prompt_column": "query"}),
    "wrong image column": (["--image-column", "picture"], lambda t, m: {"image_column": "picture"}),
    "wrong video column": (["--video-column", "clip"], lambda t, m: {"video_column": "clip"}),
    "wrong answer column": (["--answer-column", "gold"], lambda t, m: {"answer_column": "gold"}),
    # rows
    "prompt is a number": (["row 1", "prompt"], lambda t, m: rows_file(t, row(), row(prompt=None))),
    "prompt is empty": (["row 1", "no text"], lambda t, m: rows_file(t, row(), row(prompt=" "))),
    "messages without role": (["row 0", "role"], lambda t, m: rows_file(t, row(prompt=[{"content": "a"}]))),
    "no messages": (["row 1", "messages"], lambda t, m: rows_file(t, row(prompt=[{"role": "user", "content": "a"}]), row(prompt=[]))),
    "message without content": (["row 0", "part"], lambda t, m: rows_file(t, row(prompt=[{"role": "user", "content": None}]))),
    "answer missing": (["row 1", "answer"], lambda t, m: rows_file(t, row(), row(answer=None))),
    "more placeholders than images": (["row 0", "2 image", "1 image"], lambda t, m: rows_file(t, row(prompt="<image><image>?", image=picture(t)))),
    "fewer placeholders than images": (["row 0", "1 image", "2 image"], lambda t, m: rows_file(t, row(prompt="<image>?", images=[picture(t)] * 2))),
    "placeholder without images": (["row 0", "0 images"], lambda t, m: rows_file(t, row(prompt="<image>?"))),
    "video placeholder without video": (["row 0", "0 videos"], lambda t, m: rows_file(t, row(prompt="<video>?"))),
    "image missing": (["row 1", "nope.png"], lambda t, m: rows_file(t, row(image=picture(t)), row(image="nope.png"))),
    "image is a folder": (["row 0", "image"], lambda t, m: rows_file(t, row(image=str(t)))),
    "image url": (["row 0", "https://", "download"], lambda t, m: rows_file(t, row(image="https://a.org/b.png"))),
    "corrupt png": (["row 0", "image"], lambda t, m: rows_file(t, row(image=text_file(t, "bad.png", "\x89PNG no")))),
    "truncated png": (["row 1", "image"], lambda t, m: rows_file(t, row(image=picture(t)), row(image=picture(t, "cut.png", keep_bytes=900)))),
    "truncated jpeg": (["row 0", "image"], lambda t, m: rows_file(t, row(image=picture(t, "cut.jpg", keep_bytes=900)))),
    "image of no kind": (["row 0", "image"], lambda t, m: rows_file(t, row(image=5))),
    "image too flat for the processor": (["row 1"], lambda t, m: rows_file(t, row(image=picture(t)), row(image=picture(t, "flat.png", size=(1000, 2))))),
    "video missing": (["row 0", "nope.gif"], lambda t, m: rows_file(t, row(video="nope.gif"))),
    "all rows too long": (["--max-prompt-length", "9"], lambda t, m: {"max_prompt_length": 9}),
    # models
    "no such model folder": (["--model", "/nope"], lambda t, m: {"model": "/nope"}),
    "no such hub model": (["--model", "nobody/nothing"], lambda t, m: {"model": "nobody/nothing"}),
    "model folder is empty": (["--model"], lambda t, m: (t / "model").mkdir() or {"model": t / "model"}),
    "model without weights": (["--model"], lambda t, m: model_copy(t, m)),
    "model with broken weights": (["--model"], lambda t, m: model_copy(t, m, model__safetensors="hello")),
    "model with a broken config": (["--model"], lambda t, m: model_copy(t, m, config__json="{")),
    "model of an unknown type": (["--model"], lambda t, m: model_copy(t, m, config__json='{"model_type": "none_such"}')),
    # checkpoints
    "resume from nothing": (["--resume", "nope"], lambda t, m: {"resume": "nope"}),
    "resume another model": (["--resume", "--model"], lambda t, m: checkpoint(t, model="other")),
    "resume with another critic": (["--critic-share-backbone"], lambda t, m: checkpoint(t, model=m, critic_share_backbone=True)),
    "resume a finished run": (["--total-steps"], lambda t, m: checkpoint(t, model=m, step=2) | {"force": True}),
    "resume from half a state": (["--resume", "trainer_state.json"], lambda t, m: checkpoint(t, text='{"step": 1, ')),
    "resume without engine state": (["--resume", "does not fit"], lambda t, m: checkpoint(t, model=m) | {"force": True}),
    # reward functions
    "no reward file": (["--rewards", "nope.py"], lambda t, m: own("nope.py:score")),
    "reward without function name": (["--rewards", "path.py:function"], lambda t, m: own(text_file(t, "r.py", ""))),
    "unknown reward function": (["--rewards", "scores"], lambda t, m: own(reward(t, "pass")["rewards"][0] + "s")),
    "reward with a syntax error": (["--rewards", "SyntaxError"], lambda t, m: reward(t, "return [")),
    "reward imports what is not there": (["--rewards", "none_such"], lambda t, m: own(text_file(t, "r.py", "import none_such") + ":f")),
    "reward of no kind": (["--rewards", "nonsense", "repetition"], lambda t, m: own("nonsense")),
    "reward without **kwargs": (["--rewards", "**kwargs"], lambda t, m: own(text_file(t, "r.py", "def f(completions): return [1] * len(completions)") + ":f")),
    "reward hangs": (["score", "--reward-timeout"], lambda t, m: {**reward(t, "import time; time.sleep(60)"), "reward_timeout": 0.5}),
    "reward raises a time-out of its own": (["score", "raised", "slow server"], lambda t, m: reward(t, "raise TimeoutError('slow server')")),
    "reward raises": (["score", "KeyError", "colour"], lambda t, m: reward(t, "return columns['colour']")),
    "reward of wrong length": (["score", "one value per response"], lambda t, m: reward(t, "return [1.0]")),
    "reward is one number": (["score", "float"], lambda t, m: reward(t, "return 1.0")),
    "reward is NaN": (["score", "nan"], lambda t, m: reward(t, "return [float('nan')] * len(completions)")),
    "reward is infinite": (["score", "inf"], lambda t, m: reward(t, "return [{'a': 1, 'b': 1e999}] * len(completions)")),
    "reward is a string": (["score", "good"], lambda t, m: reward(t, "return ['good'] * len(completions)")),
    "log_extra of wrong length": (["log_extra", "'seen'", "2 responses"], lambda t, m: reward(t, "columns['log_extra']('seen', [1]); return [1.0] * len(completions)")),
    "component named like a built-in": (["accuracy", "rename"], lambda t, m: {"rewards": ["accuracy", *reward(t, "return [{'accuracy': 1}] * len(completions)")["rewards"]], "reward_weights": [1, 1]}),
    "no rewards": (["--rewards"], lambda t, m: {"rewards": [], "reward_weights": []}),
    "reward is always None": (["None"], lambda t, m: reward(t, "return [None] * len(completions)")),
    "reward named like a built-in": (["accuracy", "rename"], lambda t, m: {"rewards": ["accuracy", *reward(t, "pass", "accuracy")["rewards"]], "reward_weights": [1, 1]}),
}  # fmt: skip


STOPS_LATER = ["reward is always None"]  # known only when a whole rollout has no reward: the log stays, it is complete


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_one_sentence(stderr: str, words: list[str]) -> None:
    assert "Traceback" not in stderr
    lines = [line for line in re.split(r"[\r\n]|\x1b\[A", stderr) if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    for word in words:
        assert word in lines[0], lines[0]
    assert len(lines[0]) < 600


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, argv, tmp_path, tiny, capfd):
    words, make = CASES[name]
    flags = make(tmp_path, tiny)
    before = listing(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        ppo_vl.main(ppo_vl.parse_args(argv(**flags)))
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, words)
    after = [path for path in listing(tmp_path) if "__pycache__" not in path]
    if name in STOPS_LATER:
        before += [
            "runs",
            "runs/run",
            "runs/run/.lock",
            "runs/run/args.json",
            "runs/run/metrics.jsonl",
            "runs/run/eval",
            "runs/run/eval/eval_step_0.json",
            "runs/run/samples-0.png",
            "runs/run/samples.jsonl",
        ]
    assert after == sorted(before), "nothing may be left behind"


def test_pictures_for_a_text_model(argv, tmp_path, tiny_text_model, capfd):
    flags = rows_file(tmp_path, row(), row(image=picture(tmp_path)))
    with pytest.raises(SystemExit) as stopped:
        ppo_vl.main(ppo_vl.parse_args(argv(model=tiny_text_model, **flags)))
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, ["row 1", "text model", "--model"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words, named",
    [(["--learning-rat", "1"], "--learning-rat"), (["--zero-stage", "7"], "--zero-stage"), (["--seed", "x"], "--seed")],
)
def test_bad_flags_are_refused_by_name(words, named, capfd):
    with pytest.raises(SystemExit) as stopped:
        ppo_vl.parse_args(words)
    assert stopped.value.code == 2
    assert named in capfd.readouterr().err


def test_fewer_prompts_than_ranks_is_refused(capfd):
    with pytest.raises(SystemExit):
        ppo_vl.check_args(ppo_vl.Args(rollout_batch_size=32, train_batch_size=32), world_size=8)
    assert_one_sentence(capfd.readouterr().err, ["--rollout-batch-size", "8 ranks"])

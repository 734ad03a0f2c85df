"""Shared by the tests of rloo: flags of a short run, runs inside the test process, and calls caught in the midst of one."""

import inspect
import json
from pathlib import Path

import pytest
from conftest import TINY, to_argv, write_jsonl

import rloo

BASE = {
    "model": TINY,
    "total_steps": 2,
    "rollout_batch_size": 16,
    "num_samples_per_prompt": 4,
    "train_batch_size": 16,
    "num_iterations": 1,
    "max_prompt_length": 512,
    "max_response_length": 8,
    "eval_steps": 0,
    "eval_samples": 4,
    "eval_num_samples": 2,
    "micro_batch_tokens": 2048,
    "seed": 3,
    "run_name": "run",
}
# With a reward that differs from response to response, whatever the model says.
BY_IDS = "def score(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"


def reward_file(folder: Path, text: str = BY_IDS, weights=(1,)) -> dict:
    """Flags for one reward function `score` of a file."""
    (folder / "reward.py").write_text(text)
    return {"rewards": [f"{folder}/reward.py:score"], "reward_weights": list(weights)}


def words(flags: dict) -> list[str]:
    """As to_argv, and a list gives several words."""
    out = []
    for name, value in flags.items():
        several = isinstance(value, (list, tuple))
        out += ["--" + name.replace("_", "-"), *map(str, value)] if several else to_argv({name: value})
    return out


@pytest.fixture
def flags_of(tmp_path, vqa):
    """Flags of a short run on easy-VQA in tmp_path/runs/run without held-out prompts -> the same with changes."""

    def build(**changes) -> dict:
        rewards = {} if "rewards" in changes else reward_file(tmp_path)
        return {**BASE, "dataset": vqa, "output_dir": tmp_path / "runs", **rewards, **changes}

    return build


@pytest.fixture
def run(flags_of, tmp_path, monkeypatch):
    """A short run in this process -> its folder. Nothing is drawn: that takes longer than two steps."""
    monkeypatch.setattr(rloo, "draw_curves", lambda *args: None)
    monkeypatch.setattr(rloo, "draw_samples", lambda *args: None)
    monkeypatch.setattr(rloo, "draw_gap", lambda *args: None)

    def go(**changes) -> Path:
        args = rloo.parse_args(words(flags_of(**changes)))
        rloo.main(args)
        return tmp_path / "runs" / args.run_name if args.resume is None else Path(args.resume).parent

    return go


class Caught(Exception):
    pass


def catch(name: str, flags: dict, call: int = 1) -> dict:
    """Run main until its `call`-th call of a top-level function -> the arguments of that call, by name."""
    original, found, calls = getattr(rloo, name), {}, []

    def stop(*args, **kwargs):
        calls.append(1)
        if len(calls) < call:
            return original(*args, **kwargs)
        found.update(inspect.signature(original).bind(*args, **kwargs).arguments)
        raise Caught

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Caught):
        patch.setattr(rloo, name, stop)
        patch.setattr(rloo, "check_output", lambda args: Path(args.output_dir) / args.run_name)
        rloo.main(rloo.parse_args(words(flags)))
    return found


@pytest.fixture
def caught(flags_of):
    return lambda name, call=1, **changes: catch(name, flags_of(**changes), call)


def read_metrics(folder: Path) -> list[dict]:
    """metrics.jsonl, which must be JSON that any reader takes: no NaN, no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} in metrics.jsonl is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict]:
    return [m for m in read_metrics(folder) if "objective/scores" in m]


def sums_file(folder: Path, count: int = 12) -> str:
    """Questions for a text model."""
    return write_jsonl(
        folder / "sums.jsonl", [{"question": f"what is {i} + {i}?", "answer": str(2 * i)} for i in range(count)]
    )

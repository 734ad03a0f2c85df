"""A judge that grm_sft.py trained scores the rollouts of ppo_vl.py and rloo.py: in process, and behind an HTTP endpoint."""

import importlib
import os
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, read_jsonl, to_argv

import grm_sft

EXAMPLE = ROOT / "examples/judge_reward.py"


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory) -> str:
    """checkpoint-best of a run of two steps: it knows nothing, but loads and writes like any judge."""
    folder = tmp_path_factory.mktemp("judge")
    flags = {"train_samples": 40, "eval_samples": 8, "max_steps": 2, "batch_size": 8, "best_metric": "loss"}
    patch = pytest.MonkeyPatch()
    patch.setattr(grm_sft, "draw_curves", lambda *args: None)
    patch.setattr(grm_sft, "draw_judged", lambda *args: None)
    grm_sft.main(grm_sft.parse_args(to_argv({**flags, "output_dir": folder, "run_name": "run"})))
    patch.undo()
    return str(folder / "run/checkpoint-best")


@pytest.fixture
def judge_reward(judge_folder, monkeypatch):
    monkeypatch.setenv("JUDGE", judge_folder)
    monkeypatch.setenv("JUDGE_TOKENS", "8")
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    return importlib.import_module("judge_reward")


def group(vqa_rows, answers) -> dict:
    """Keywords of a reward function: the first two questions with these answers each."""
    G = len(answers)
    rows = [row for row in vqa_rows[:2] for _ in range(G)]
    completions = [f"<answer>{a}</answer>" for a in answers] * 2
    return {"prompts": [r["prompt"] for r in rows], "image": [r["image"] for r in rows], "completions": completions}


def test_scores_are_probabilities_and_do_not_depend_on_the_order(judge_reward, vqa_rows):
    one = judge_reward.score(**group(vqa_rows, ["red", "blue"]))
    other = judge_reward.score(**group(vqa_rows, ["blue", "red"]))
    assert all(0 <= x <= 1 for x in one) and len(set(one)) > 1
    assert one[0] + one[1] == pytest.approx(1, abs=1e-5), "a pair shares one verdict"
    assert one == pytest.approx([other[1], other[0], other[3], other[2]], abs=1e-5)


def test_siblings_that_say_the_same_get_a_half(judge_reward, vqa_rows):
    assert judge_reward.score(**group(vqa_rows, ["red", "red"])) == [0.5] * 4
    assert judge_reward.score(**group(vqa_rows, ["red"])) == [0.5] * 2


def test_what_a_policy_spells_cannot_break_the_judge(judge_reward, vqa_rows):
    scores = judge_reward.score(**group(vqa_rows, ["<image>", "<|im_end|><|image_pad|>", "<think>", ""]))
    assert len(scores) == 8


@pytest.mark.parametrize("script", ["rloo", "ppo_vl"])
def test_the_judge_scores_rollouts(script, judge_reward, vqa, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    if "rewards" not in vars(module.Args()):
        pytest.skip(f"{script}.py has no --rewards yet")
    monkeypatch.setattr(module, "draw_curves", lambda *args: None)
    flags = {"model": TINY, "dataset": vqa, "total_steps": 1, "rollout_batch_size": 16, "num_samples_per_prompt": 4}
    flags |= {"train_batch_size": 16, "max_response_length": 8, "rewards": f"{EXAMPLE}:score", "reward_weights": 1}
    module.main(module.parse_args(to_argv({**flags, "output_dir": tmp_path, "run_name": "run"})))
    step = read_jsonl(tmp_path / "run/metrics.jsonl")[-1]
    assert 0 < step["objective/scores"] < 1
    assert step["objective/scores"] == pytest.approx(step["reward/score"])
    assert step["objective/scores_std"] > 0


@pytest.mark.slow
def test_the_endpoint_gives_the_same_scores(judge_reward, vqa_rows, monkeypatch):
    command = [sys.executable, str(EXAMPLE.parent / "judge_server.py"), "0"]
    server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stdout if line.startswith("judge on port"))
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{line.split()[-1]}")
        here, there = (f(**group(vqa_rows, ["red", "blue"])) for f in (judge_reward.score, judge_reward.score_remote))
        assert there == pytest.approx(here, abs=1e-6)
    finally:
        server.kill()
        server.wait()

"""All scripts: a run resumes bit for bit, saves at a signal, and stops if no gradient is finite."""

import importlib
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from conftest import TINY, assert_same_run, metrics_of, weights_of

SLOW = [pytest.param(script, marks=pytest.mark.slow) for script in ("reward_bt", "grm_sft")]
each_script = pytest.mark.parametrize("script", ["rloo", "ppo_vl", *SLOW])


@pytest.fixture
def run_script(run, any_reward):
    """Function that runs a script with data that fits it and returns the run directory."""
    rewards = dict.fromkeys(("rloo", "ppo_vl"), any_reward)
    pairs = {"dataset": "easy-vqa", "eval_dataset": None, "micro_batch_tokens": 8192}
    return lambda script, **flags: run(script, **rewards.get(script, pairs), **flags)


RESUMED = [("rloo", {"normalize_advantages": True, "mask_truncated": True})]
RESUMED += [("ppo_vl", {"reward_clip": (-1.0, 1.0)}), ("reward_bt", {}), ("grm_sft", {})]
RESUMED += [("grm_sft", {"lora_rank": 4, "gradient_checkpointing": True})]


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", RESUMED)
def test_resume_is_bit_exact(script, flags, run_script):
    """After a crash while step 4 was being saved. Logs have no gaps and no duplicates."""
    flags |= {"total_steps": 4, "save_steps": 2, "eval_steps": 2, "warmup_updates": 0}
    whole, part = (run_script(script, run_name=name, **flags) for name in ("whole", "part"))
    (part / "checkpoint-4").rename(part / "checkpoint-4.tmp")
    for _ in range(2):  # the second time nothing is left to do
        assert run_script(script, run_name="part", resume="auto", **flags) == part
        assert_same_run(whole, part, tolerance=0, of_weights=0)


@each_script
def test_a_signal_saves_and_ends_the_run(script, run_script, capsys, monkeypatch):
    module = importlib.import_module(script)
    optimizer_step = module.optimizer_step

    def send_signal_once(engine, learning_rate):
        monkeypatch.setattr(module, "optimizer_step", optimizer_step)
        os.kill(os.getpid(), signal.SIGTERM)
        return optimizer_step(engine, learning_rate)

    monkeypatch.setattr(module, "optimizer_step", send_signal_once)
    run_dir = run_script(script, total_steps=3)
    assert metrics_of(run_dir)[-1]["train/step"] == 1 and (run_dir / "checkpoint-1/state").is_dir()
    assert "continue with --resume auto --run-name run" in capsys.readouterr().out


@each_script
def test_a_run_without_finite_gradients_saves_and_stops(script, run_script, tmp_path, capsys, monkeypatch):
    import deepspeed

    initialize = deepspeed.initialize

    def initialize_broken(*arguments, **keywords):
        engine, *others = initialize(*arguments, **keywords)
        backward = engine.backward
        engine.backward = lambda loss, **options: backward(loss * math.nan, **options)
        return engine, *others

    monkeypatch.setattr(deepspeed, "initialize", initialize_broken)
    with pytest.raises(SystemExit) as stopped:
        run_script(script, total_steps=9)
    assert stopped.value.code == 2
    assert re.search("no finite gradients|gradients were infinite", capsys.readouterr().err)
    steps = [metrics for metrics in metrics_of(tmp_path / "runs/run") if metrics["train/step"]]
    assert len(steps) == (1 if script in ("rloo", "ppo_vl") else 5)
    assert all(metrics["train/skipped_updates"] > 0 for metrics in steps)
    saved = weights_of(tmp_path / f"runs/run/checkpoint-{len(steps)}-problem")
    start = weights_of(Path(TINY))
    if script == "reward_bt":  # without the LM head
        start = {name.removeprefix("model."): x for name, x in start.items()}
    shared = start.keys() & saved.keys()
    assert len(shared) > 50 and all(torch.equal(saved[name], start[name].float()) for name in shared)


SKIPPED = [("reward_bt", 5, 6), ("grm_sft", 5, 6), ("ppo_vl", 18, 11)]


@pytest.mark.slow
@pytest.mark.parametrize("script, skipped, with_norm", SKIPPED)
def test_single_skipped_updates_do_not_stop_a_run(script, skipped, with_norm, run_script, monkeypatch):
    module, norms = importlib.import_module(script), []
    optimizer_step = module.optimizer_step

    def fail_often(engine, learning_rate):  # every second update, and every third one of actor and critic
        norms.append(optimizer_step(engine, learning_rate))
        return norms[-1] if len(norms) % (3 if script == "ppo_vl" else 2) else math.nan

    monkeypatch.setattr(module, "optimizer_step", fail_often)
    metrics = metrics_of(run_script(script, total_steps=11))
    assert sum(step.get("train/skipped_updates", 0) for step in metrics) == skipped
    assert sum("train/grad_norm" in step for step in metrics) == with_norm
    assert metrics[-1]["train/step"] == 11

"""What every script promises of a run: it resumes bit for bit, saves at a signal, ends at NaN."""

import importlib
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import TINY, assert_same_run, largest_difference, metrics_of, tensorboard_of, weights_of
from test_ppo_runs import ptx_file

import reward_bt

SLOW = [pytest.param(script, marks=pytest.mark.slow) for script in ("reward_bt", "grm_sft")]
each_script = pytest.mark.parametrize("script", ["rloo", "ppo_vl", *SLOW])


@pytest.fixture
def go(run, any_reward):
    """A short run of a script, with its data -> its folder."""
    own = dict.fromkeys(("rloo", "ppo_vl"), any_reward)
    pairs = {"dataset": "easy-vqa", "eval_dataset": None, "micro_batch_tokens": 8192}
    return lambda script, **flags: run(script, **own.get(script, pairs), **flags)


PPO = {"ema_beta": 0.9, "kl_loss": True, "kl_estimator": "k3", "kl_target": 0.01, "kl_horizon": 100}
PPO |= {"reward_running_norm": "standardize", "dynamic_sampling": 1, "replay_limit": 12, "tis_clip": 2.0}
PPO |= {"freezing_actor_steps": 1, "ptx_batch_size": 3, "entropy_token_ratio": 0.5}
RESUMED = [("rloo", {"normalize_advantages": True, "mask_truncated": True}), ("ppo_vl", PPO)]
RESUMED += [("reward_bt", {}), ("grm_sft", {})]
RESUMED += [("grm_sft", {"lora_rank": 4, "gradient_checkpointing": True})]


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", RESUMED)
def test_resume_is_bit_exact(script, flags, go, tmp_path):
    """After a crash amid the saving of step 4. The logs have no gap, and nothing twice: TensorBoard's too."""
    flags |= {"total_steps": 4, "save_steps": 2, "eval_steps": 2, "track": "tensorboard", "warmup_steps": 0}
    flags |= {"ptx_dataset": ptx_file(tmp_path)} if script == "ppo_vl" else {}
    whole, part = (go(script, run_name=name, **flags) for name in ("whole", "part"))
    (part / "checkpoint-4").rename(part / "checkpoint-4.tmp")
    for _ in range(2):  # the second time nothing is left to do
        assert go(script, run_name="part", resume="auto", **flags) == part
        assert_same_run(whole, part, tolerance=0, of_weights=0)
    steps, texts = tensorboard_of(part)
    assert (steps, texts) == tensorboard_of(whole) and steps == [0, 1, 2, 3, 4]
    assert all([*found][-1] == 4 for found in texts.values()) and texts


@each_script
def test_a_signal_saves_and_ends_the_run(script, go, capsys, monkeypatch):
    module = importlib.import_module(script)
    step = module.optimizer_step

    def signalled(engine):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(engine)

    monkeypatch.setattr(module, "optimizer_step", signalled)
    folder = go(script, total_steps=3)
    assert metrics_of(folder)[-1]["train/step"] == 1 and (folder / "checkpoint-1/state").is_dir()
    assert "go on with --resume" in capsys.readouterr().out


@each_script
def test_gradients_that_are_not_finite_end_the_run_after_a_checkpoint(
    script, go, tmp_path, capsys, monkeypatch
):
    module = importlib.import_module(script)
    make_engine = module.make_engine

    def broken_engine(*given, **how):
        engine = make_engine(*given, **how)
        backward = engine.backward
        engine.backward = lambda loss, **how: backward(loss * math.nan, **how)
        return engine

    monkeypatch.setattr(module, "make_engine", broken_engine)
    with pytest.raises(SystemExit) as stopped:
        go(script, total_steps=9)
    assert stopped.value.code == 2 and "finite gradients" in capsys.readouterr().err
    steps = [metrics for metrics in metrics_of(tmp_path / "runs/run") if metrics["train/step"]]
    assert len(steps) == (1 if script in ("rloo", "ppo_vl") else 5)
    assert all(metrics["train/skipped_updates"] > 0 for metrics in steps)
    start = weights_of(Path(TINY))
    if script == "reward_bt":
        start = reward_bt.load_model(TINY, torch.float32).base_model.state_dict()
    saved = weights_of(tmp_path / f"runs/run/checkpoint-{len(steps)}")
    assert largest_difference({name: saved[name] for name in start}, start) == 0

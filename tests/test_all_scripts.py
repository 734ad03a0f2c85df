"""Several scripts: ranks train as one; runs resume exactly, save at a signal, stop at problems, and learn."""

import importlib
import math
import os
import shutil
import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import datasets
import deepspeed
import pytest
import torch
from conftest import SCRIPTS, TINY, assert_same_run, largest_difference, metrics_of, slow, weights_of
from PIL import Image
from transformers.modeling_layers import GradientCheckpointingLayer

from common import decoding, packing

each_script = pytest.mark.parametrize("script", ["rloo", "reward_bt", *slow("ppo_vl", "grm_sft")])
each_policy = pytest.mark.parametrize("script", ["rloo", *slow("ppo_vl")])


@pytest.fixture
def run_script(run, any_reward):
    """Function that runs a script, with a third reward if it has rewards, and returns the run directory."""
    rewards = dict.fromkeys(("rloo", "ppo_vl"), any_reward)
    return lambda script, **flags: run(script, **rewards.get(script, {}) | flags)


CRITIC, OFFLOADED = {"critic_learning_rate": 1e-5}, {"zero_stage": 3, "offload_optimizer": True}
PLANS = [("rloo", {}, {"zero_stage": stage}) for stage in (0, 1, 2, 3)]
PLANS += [("rloo", {}, {"zero_stage": 2, "offload_optimizer": True})]
PLANS += [("ppo_vl", CRITIC, plan) for plan in ({"zero_stage": 2}, {"zero_stage": 3}, OFFLOADED)]
PLANS += [("rloo", {"lora_rank": 4}, OFFLOADED), ("ppo_vl", {"lora_rank": 2, **CRITIC}, OFFLOADED)]
PLANS += [(script, {"max_length": 128}, {"zero_stage": 3}) for script in ("reward_bt", "grm_sft")]


@pytest.mark.slow
@pytest.mark.parametrize("script, flags, plan", PLANS)
def test_two_ranks_train_as_one(script, flags, plan, run, finish, folder_of, any_score, tmp_path):
    """Text, images and a video. Resume is bit-exact."""
    rows = folder_of("qwen2_5_vl") / "rows.jsonl"
    flags = flags | {"dataset": rows, "train_batch_size": 20, "learning_rate": 1e-5}
    if script in ("rloo", "ppo_vl"):
        flags |= {"eval_dataset": None, "prompts_per_rollout": 5, "max_prompt_length": 120, **any_score}
    else:
        flags |= {"eval_datasets": (f"x={rows}",)} if script == "reward_bt" else {"eval_dataset": rows}
    one = run(script, run_name="one", **flags)
    flags |= {"ranks": 2, "micro_batch_tokens": 512 if script == "reward_bt" else 128, **plan}
    finish(script, run_name="two", save_steps=1, **flags)
    assert_same_run(one, two := tmp_path / "runs/two", 2e-4, of_weights=2e-5)
    if plan == {"zero_stage": 3} and script in ("rloo", "ppo_vl"):  # from step 1 of 2
        finish(script, run_name="resumed", resume=two / "checkpoint-1", **flags)
        assert_same_run(two, tmp_path / "runs/resumed", tolerance=0, of_weights=0)


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
    run_dir = run_script(script, total_steps=3, eval_steps=1)
    last = metrics_of(run_dir)[-1]
    assert last["train/step"] == 1 and (run_dir / "checkpoint-1/state").is_dir()
    assert all(map(math.isfinite, last.values())), "JSON has no NaN"
    if script in ("rloo", "ppo_vl"):
        assert "eval/greedy_score" not in last, "there may be no time for an evaluation"
    assert "continue with --resume auto --run-name run" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_networks_are_in_eval_mode(script, run_script, monkeypatch):
    """Dropout and router noise would change outputs. Only checkpointed layers are in train mode, in updates."""
    modes, run_model = defaultdict(set), packing.run_model

    def watch(function, *args, **options):
        if isinstance(function, torch.nn.Module) and len(list(function.modules())) > 1:
            mode = {(x.training, isinstance(x, GradientCheckpointingLayer)) for x in function.modules()}
            modes[torch.is_grad_enabled()].add(frozenset(mode))
        return run_model(function, *args, **options)

    monkeypatch.setattr(packing, "run_model", watch)
    run_script(script, total_steps=2, gradient_checkpointing=True)
    assert modes[True] == {frozenset([(True, True), (False, False)])}
    assert modes[False] == {frozenset([(False, True), (False, False)])}


@each_script
def test_a_run_without_finite_gradients_saves_and_stops(script, run_script, tmp_path, refused, monkeypatch):
    backward = deepspeed.DeepSpeedEngine.backward
    broken = lambda self, loss, **options: backward(self, loss * math.nan, **options)  # noqa: E731
    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "backward", broken)
    with refused("finite"):
        run_script(script, total_steps=9)
    steps = [metrics for metrics in metrics_of(tmp_path / "runs/run") if metrics["train/step"]]
    assert len(steps) == 5
    assert all(metrics["train/skipped_updates"] > 0 for metrics in steps)
    saved = weights_of(tmp_path / f"runs/run/checkpoint-{len(steps)}-problem")
    start = weights_of(Path(TINY))
    if script == "reward_bt":  # without the LM head
        start = {name.removeprefix("model."): x for name, x in start.items()}
    shared = start.keys() & saved.keys()
    assert len(shared) > 50 and all(torch.equal(saved[name], start[name].float()) for name in shared)


@each_policy
def test_a_sampler_that_disagrees_stops_the_run(script, run_script, tmp_path, refused, spy, monkeypatch):
    """It stops before the update; --resume auto ignores what it saved. NaN is found before rewards are computed."""
    generate, shift, runs = decoding.generate, 0.0, tmp_path / "runs"
    shifted = lambda **how: [replace(x, logprobs=x.logprobs + shift) for x in generate(**how)]  # noqa: E731
    monkeypatch.setattr(decoding, "generate", shifted)
    flags = {"eval_dataset": None, "save_steps": 1}
    run_script(script, total_steps=1, **flags)
    shift = 0.01
    with refused("sampling/logprob_diff_mean is 0.01, above"):
        run_script(script, resume="auto", **flags)
    weights = [weights_of(runs / f"run/checkpoint-1{suffix}") for suffix in ("", "-problem")]
    assert (runs / "run/checkpoint-1-problem/state").is_dir() and largest_difference(*weights) == 0
    shift, scored = math.nan, spy(importlib.import_module(script), "score_responses")
    with refused("the sampler's log-probs are not finite"):
        run_script(script, run_name="nan", resume=runs / "run/checkpoint-1", **flags)
    shutil.rmtree(runs / "run/checkpoint-1")
    with refused("checkpoint-1-problem was saved after a problem"):
        run_script(script, resume="auto", **flags)
    assert scored == [] and (runs / "nan/checkpoint-1-problem/state").is_dir()


@each_policy
def test_a_rollout_without_responses_to_train_on_stops_the_run(script, run_script, refused):
    with refused("excluded by --mask-truncated"):
        run_script(script, mask_truncated=True, max_response_length=1, eval_dataset=None)


@each_policy
def test_packs_do_not_change_the_result(script, run_script, spy):
    """A mini-batch in several packs has the loss of one pack. Gradients are reduced after the last one."""
    flags = {"eval_dataset": None, "max_prompt_length": 48, "total_steps": 1, "learning_rate": 1e-5}
    one = run_script(script, **flags)
    engine = deepspeed.DeepSpeedEngine
    calls = [spy(engine, name) for name in ("set_gradient_accumulation_boundary", "backward")]
    several = run_script(script, run_name="several", micro_batch_tokens=64, **flags)
    boundaries, losses = ([torch.as_tensor(x).item() for (_, x), _, _ in found] for found in calls)
    num_updates = 4 if script == "rloo" else 8  # PPO has two models
    assert len(boundaries) >= 2 * num_updates and sum(boundaries) == num_updates and boundaries[-1]
    if script == "rloo":  # the metric is the mean over all responses; each update has half of them
        mean = metrics_of(several)[0]["loss/policy"]
        assert sum(losses) / 4 == pytest.approx(mean, rel=1e-4) != pytest.approx(0)
    assert_same_run(one, several, 2e-4, of_weights=2e-5)


@each_policy
def test_few_responses_make_few_updates(script, run_script, tmp_path, spy, monkeypatch):
    """4 of 16 responses have a score: one update per epoch, not two. The schedule counts rollouts."""
    code = "def rare(texts, **columns):\n    return [i % 2 if i < 4 else None for i in range(len(texts))]\n"
    (tmp_path / "reward.py").write_text(code)
    module = importlib.import_module(script)
    updates = spy(module, "optimizer_step")
    flags = {"eval_dataset": None, "warmup_updates": 1}
    run_script(script, **flags, run_name="all")
    run_script(script, **flags, rewards=(f"{tmp_path}/reward.py:rare",), reward_weights=(1,))
    rates = [learning_rate for (_, learning_rate), _, _ in updates]
    of_epoch = 2 if script == "rloo" else 4  # PPO has two models
    assert len({*rates[: 4 * of_epoch : of_epoch // 2]}) == 8, "each update has its own rate"
    assert rates[4 * of_epoch :] == [*rates[:of_epoch], *rates[2 * of_epoch : 3 * of_epoch]]
    monkeypatch.setattr(module, "iter_packs", lambda *args: [])
    args = module.Args(train_batch_size=8, num_epochs=1)
    assert len(module.make_mini_batches(args, None, None, torch.eye(4) > 0, 1)[0]) == 1
    args.train_batch_size = 128
    [batches] = module.make_mini_batches(args, None, None, torch.ones(17, 8) > 0, 1)
    assert [len(prompt_indices) for prompt_indices, _ in batches] == [9, 8], "17 prompts are not 16 and 1"


LEARNS = {  # steps and other flags; bounds of metrics after the last step, and of their maxima over the steps
    "rloo": (  # 0.910, 0.908 and 0.900 with seeds 1, 2 and 3; 0.35 to 0.37 before the first step
        {"total_steps": 12, "eval_prompts": 100, "eval_num_samples": 4},
        {"eval/sampled_score": (0.87, 1), "eval/greedy_score": (0.9, 1)},
        {"policy/logprob_diff_mean": (0, 1e-5), "policy/approx_kl": (1e-5, 1), "objective/kl": (0, 3)},
    ),
    "ppo_vl": (  # a critic that predicts nothing, unclipped values or a ratio of 1 are outside of these
        {"total_steps": 10, "eval_prompts": 60},
        {"eval/sampled_score": (0.8, 1), "eval/greedy_score": (0.8, 1)},
        {"value/explained_variance": (0.25, 1), "value/clipfrac": (0.1, 1), "policy/approx_kl": (1e-3, 1)},
    ),
    "reward_bt": (  # losses of 0.346, 0.344, 0.416 and accuracies of 0.930, 0.914, 0.875; 0.69 and 0.5 before
        {"total_steps": 30, "eval_rows": 128},
        {"eval/easy-vqa/loss": (0, 0.49), "eval/easy-vqa/accuracy": (0.82, 1)},
    ),
    "grm_sft": (  # losses of 0.226, 0.220, 0.231; 11.0 before
        {"total_steps": 60, "eval_rows": 32},
        {"eval/loss": (0, 0.3), "eval/parse_rate": (1, 1)},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", LEARNS)
def test_the_default_learns(script, tmp_path):
    """The bounds are about three standard deviations from what seeds 1, 2 and 3 reach."""
    module = importlib.import_module(script)
    flags, of_last, of_maxima = (*LEARNS[script], {})[:3]
    module.main(module.Args(**flags, eval_steps=0, output_dir=str(tmp_path), run_name="run"))
    _, *steps = metrics_of(tmp_path / "run")
    maxima = {name: max(step[name] for step in steps) for name in of_maxima}
    for values, bounds in ((steps[-1], of_last), (maxima, of_maxima)):
        for name, (low, high) in bounds.items():
            assert low <= values[name] <= high, name


SKIPPED = [("reward_bt", 5, 6), ("grm_sft", 5, 6), ("ppo_vl", 29, 11)]


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


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dataset_without_a_usable_row_ends_the_run(script, run, tmp_path, refused, monkeypatch):
    """Until the images are where those of a saved dataset belong: in its directory. Errors of code are not skipped."""
    row = {"image": "missing.png", "prompt": "Why?", "answer": "a", "chosen": "a", "rejected": "b"}
    row |= {"answer_1": "a", "answer_2": "b", "verdict": "1"} if script == "grm_sft" else {}
    splits = {"train": [row | {"image": "other.png"}], "test": [row] * 2}
    splits = {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
    datasets.DatasetDict(splits).save_to_disk(saved := tmp_path / "saved")
    flags = {"dataset": saved, "dataset_split": "test", "eval_dataset": None, "total_steps": 1}
    with refused("row 0 is skipped", "missing.png", "\nerror: ", "none of 2 rows can be used"):
        run(script, **flags)
    Image.new("RGB", (56, 56)).save(saved / "missing.png")
    run(script, **flags)
    # transformers 5.2: KeyError 'cache_position' in every row was reported as bad data.
    monkeypatch.setattr(packing, "make_prompt", Mock(side_effect=KeyError("cache_position")))
    with pytest.raises(KeyError, match="cache_position"):
        run(script, **flags | {"run_name": "code"})

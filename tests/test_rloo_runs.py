"""rloo.py end to end: what main does, resume, kills, custom samplers and rewards."""

import asyncio
import gc
import json
import os
import random
import shutil
import signal
import time

import conftest
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, assert_same_run, chat, metrics_differ, metrics_of, read_jsonl, write_jsonl

import rloo
from common import chats, packing
from common.kl import kl_estimate


def test_a_run_writes_what_the_page_says(run, any_reward, vqa_rows, tmp_path, capsys):
    train = write_jsonl(tmp_path / "train.jsonl", [vqa_rows[0] | {"image": "nowhere.png"}, *vqa_rows[:7]])
    held_out = write_jsonl(tmp_path / "held_out.jsonl", vqa_rows[20:])
    flags = {"dataset": train, "eval_dataset": held_out, "save_total_limit": 1, **any_reward}
    run_dir = run("rloo", eval_steps=1, save_steps=1, **flags)
    first, *steps = metrics_of(run_dir)
    assert first["train/step"] == 0 and all(key.startswith(("eval/", "train/")) for key in first)
    assert [m["train/step"] for m in steps] == [1, 2]
    assert sum(m["rollout/prompts_skipped"] for m in steps) == 1, "two steps of four prompts are an epoch"
    assert steps[0]["eval/sampled_reward_score"] <= 1 != steps[0]["eval/sampled_score"]
    assert steps[0]["objective/kl"] == pytest.approx(0, abs=1e-5) and abs(steps[1]["objective/kl"]) > 1e-4
    assert [x["train/learning_rate"] for x in steps] == pytest.approx([0.8e-4, 1e-5])  # updates 4 and 8 of 8
    for step in steps:
        assert step["sampling/logprob_diff_mean"] < 1e-5 and step["policy/logprob_diff_mean"] < 1e-5
        assert min(seconds for name, seconds in step.items() if name.startswith("time/")) >= 0
    sample_records = read_jsonl(run_dir / "samples.jsonl")
    names = {"train/step", "row", "prompt", "image", "answer", "response", "reward/accuracy"}
    for record in sample_records:
        rows = vqa_rows[:7] if record["phase"] == "train" else vqa_rows[20:]
        assert record["phase"] in ("train", "eval_greedy", "eval_sampled") and names <= record.keys()
        assert (record["prompt"], record["image"]) in [(row["prompt"], row["image"]) for row in rows]
    assert [path.name for path in run_dir.glob("checkpoint-*")] == ["checkpoint-2"]
    out, error = capsys.readouterr()  # no terminal: each step prints a line
    assert "row 0 is skipped" in error and "packing enabled" in out
    assert "step 2 of 2" in out and "eval/greedy_score" in out


OFFLOADED = {"learning_rate": 3e-3, "lora_rank": 4, "zero_stage": 2, "offload_optimizer": True}


@pytest.mark.parametrize("flags", [{"learning_rate": 1e-3}, OFFLOADED])
def test_the_update_uses_the_rollout_and_the_flags(run, any_score, spy, monkeypatch, flags):
    losses, rollouts = spy(rloo, "compute_rloo_loss"), spy(rloo, "collect_rollout")
    tables, all_advantages = spy(rloo, "compute_logprobs"), spy(rloo, "compute_advantages")
    saves = spy(rloo, "save_checkpoint")
    packs = []  # of each forward pass of the policy, not those of the reference
    forward = rloo.Policy.forward

    def record_pack(policy, pack, with_lora=True, **flags):
        packs.extend([pack] if with_lora and any(x.requires_grad for x in policy.parameters()) else [])
        return forward(policy, pack, with_lora, **flags)

    monkeypatch.setattr(rloo.Policy, "forward", record_pack)
    flags |= {"kl_coef": 0.5, "clip_coef_high": 0.3}
    flags |= {"mask_truncated": True, "max_response_length": 4, "temperature": 1.3, "warmup_updates": 0}
    run_dir = run("rloo", eval_dataset=None, normalize_advantages=True, **flags, **any_score)
    losses, rollouts = [keywords for _, keywords, _ in losses], [rollout for _, _, rollout in rollouts]
    assert rollouts[0].prompts != rollouts[1].prompts, "each step has other rows"
    actor, has_lora = saves[0][0][1].actor, "lora_rank" in flags
    assert actor.zero_cpu_offload() == has_lora, "the reference pass leaves the adapters trainable"
    assert all(x.requires_grad != has_lora or ".lora_" in n for n, x in actor.module.model.named_parameters())
    for step, (rollout, metrics) in enumerate(zip(rollouts, metrics_of(run_dir), strict=True)):
        _, _, (old_logprobs, entropies, ref_logprobs) = tables[step]
        (_, kept, _), _, advantages = all_advantages[step]
        assert torch.equal(kept, ~rollout.truncated) and kept.any() and not kept.all()
        loss_mask = rollout.response_mask & kept.view(-1, 1)
        kl = kl_estimate(old_logprobs, ref_logprobs, "k1") * loss_mask
        kl = kl.sum(1).view(4, 4)
        assert (kl.abs().max() < 1e-5) == (step == 0), "the reference is the policy before the first update"
        penalized_rewards = rollout.scores - 0.5 * kl
        expected = rloo.compute_advantages(penalized_rewards, kept, normalize=True)
        torch.testing.assert_close(advantages, expected)
        assert metrics["policy/entropy"] == pytest.approx(entropies[loss_mask].mean().item(), abs=1e-6)
        kept_scores = [scores[is_kept].tolist() for scores, is_kept in zip(rollout.scores, kept)]
        equal = np.mean([len({*scores}) < 2 for scores in kept_scores])
        assert metrics["rollout/frac_reward_zero_std"] == pytest.approx(equal)
        mean = penalized_rewards[kept].mean().item()
        assert metrics["objective/rlhf_reward"] == pytest.approx(mean, abs=1e-6)
        assert metrics["objective/kl"] == pytest.approx(kl[kept].mean().item(), abs=1e-6)
        assert metrics["objective/scores"] == pytest.approx(rollout.scores.mean().item(), abs=1e-6)

        # Old log-probs come from the packs of the first pass, two mini-batches. Then there are two passes.
        *before, first, second, third, fourth = packs[-12:][6 * step :][:6]
        assert before == [first, second]
        updates, gain = (first, second, third, fourth), 0.0
        assert metrics["policy/clipfrac_first"] == 0
        for pack in updates:
            keywords = losses.pop(0)
            assert (keywords["clip_low"], keywords["clip_high"]) == (0.2, 0.3)
            assert torch.equal(keywords["advantages"], advantages.flatten()[pack.response_index])
            assert torch.equal(keywords["old_logprobs"], old_logprobs[pack.token_index])
            logratio = (keywords["new_logprobs"] - keywords["old_logprobs"]).detach()
            gain += float(logratio @ keywords["advantages"][keywords["response_of_token"]])
        assert gain > 0.1, "what was rewarded becomes more likely"
        first, second, third, fourth = (set(pack.response_index.tolist()) for pack in updates)
        assert first | second == third | fourth == set(kept.flatten().nonzero()[:, 0].tolist())
        assert not first & second
        if step == 0:
            assert first not in (third, fourth), "each pass has other mini-batches"


@pytest.fixture
def failing(tmp_path):
    """Function from a condition on the step and on earlier ones to flags for a reward that raises."""

    def make(condition: str, error: str = "ZeroDivisionError") -> dict:
        code = "import asyncio\nimport os\nsteps = []\ndef fails(trainer_state, texts, **columns):\n"
        code += f"    step = trainer_state.global_step\n    if {condition}:\n"
        code += f"        raise {error}('a bug of my reward')\n"
        code += "    steps.append(step)\n    return [0.0 for _ in texts]\n"
        (tmp_path / "reward.py").write_text(code)
        return {"rewards": (f"{tmp_path}/reward.py:fails",), "reward_weights": (1,)}

    return make


# flags, a condition, an error (CancelledError is no Exception), and the steps that are logged
IN_TRAINING = {"eval_dataset": None}, "step == 2", "asyncio.CancelledError", [1]
IN_EVALUATION = {"eval_steps": 1}, "step == 0 and 1 in steps", "ZeroDivisionError", [0, 1]


@pytest.mark.parametrize("flags, condition, error, logged", [IN_TRAINING, IN_EVALUATION])
def test_a_reward_that_raises_loses_nothing(run, tmp_path, failing, flags, condition, error, logged):
    """And shows its traceback."""
    with pytest.raises((ZeroDivisionError, asyncio.CancelledError), match="a bug of my reward") as raised:
        run("rloo", **flags, **failing(condition, error))
    assert raised.traceback[-1].name == "fails"
    assert [metrics["train/step"] for metrics in metrics_of(tmp_path / "runs/run")] == logged
    assert (tmp_path / "runs/run/checkpoint-1/state").is_dir()


@pytest.mark.slow
def test_an_image_that_can_not_be_loaded_again_loses_nothing(run, tmp_path, spy, monkeypatch):
    """A rank may need a prompt that another rank sampled. All packs of a step are made before its first update."""
    updates, mini_batches, iter_packs = spy(rloo, "optimizer_step"), [], rloo.iter_packs

    def fail_in_step_2(*args):
        mini_batches.append(args[3])
        if len(mini_batches) == 8:  # the last of two epochs of two mini-batches
            raise OSError("no such image")
        return iter_packs(*args)

    monkeypatch.setattr(rloo, "iter_packs", fail_in_step_2)
    with pytest.raises(OSError, match="no such image"):
        run("rloo", eval_dataset=None)
    assert len(updates) == 4 and (tmp_path / "runs/run/checkpoint-1/state").is_dir()


@pytest.mark.slow
def test_a_reward_that_raises_on_one_rank_stops_all(start, tmp_path, failing):
    flags = failing("step == 2 and os.environ['RANK'] == '1'")
    assert start("rloo", ranks=2, eval_dataset=None, **flags).wait(timeout=200) != 0
    log = (tmp_path / "log").read_text()
    assert "in fails" in log and "a bug of my reward" in log
    assert (tmp_path / "runs/run/checkpoint-1/state").is_dir()


def test_log_probs_that_change_without_an_update_stop_the_run(run, any_score, monkeypatch, refused):
    compute = rloo.compute_logprobs
    monkeypatch.setattr(rloo, "compute_logprobs", lambda *args: [table + 5e-4 for table in compute(*args)])
    with refused("policy/logprob_diff_mean is 0.0005, above 0.0001"):
        run("rloo", total_steps=1, eval_dataset=None, **any_score)


def test_text_models_and_a_custom_sampler(run, tiny_text_model, tmp_path):
    rows = [{"prompt": chat(f"Say {i}"), "answer": str(i)} for i in range(8)]
    (tmp_path / "plug.py").write_text(
        "import rloo\n"
        "class Mine(rloo.HFSampler):\n"
        "    def update_weights(self, step):\n"
        "        Mine.step = step\n"
        "    def generate(self, *args):\n"
        "        responses = super().generate(*args)\n"
        "        return [responses[0], None, *responses[2:]] if args[1] > 1 else responses\n"
        "def brief(completions, completion_ids, log_metric, **columns):\n"
        "    log_metric('train/step', Mine.step)\n"
        "    return [-len(ids) * len(c[0]['content']) / 9 for c, ids in zip(completions, completion_ids)]\n"
    )
    plug = f"{tmp_path}/plug.py"
    flags = {"sampler": f"{plug}:Mine", "rewards": [f"{plug}:brief"], "reward_weights": [1]}
    data = write_jsonl(tmp_path / "text.jsonl", rows)
    run_dir = run("rloo", model=tiny_text_model, dataset=data, eval_dataset=data, kl_coef=0.0, **flags)
    last = metrics_of(run_dir)[-1]
    assert "objective/kl" not in last, "there is no reference"
    assert last["reward_metrics/train/step"] == 1, "step 2 samples with the weights of step 1"
    assert last["train/step"] == 2 and "reward/brief" in last
    skipped = [m["rollout/prompts_skipped"] for m in metrics_of(run_dir) if "train/learning_rate" in m]
    assert skipped == [1, 1], "one of its responses is None"
    assert all(record["prompt"].startswith("Say ") for record in read_jsonl(run_dir / "samples.jsonl"))


def files_of(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_resuming_deletes_nothing(run, any_score, spy, capsys, refused):
    """A checkpoint's path branches into a new run; auto continues, and keeps the log lines that it repeats."""
    flags = {"save_steps": 1, "total_steps": 3, "save_total_limit": 9, "eval_dataset": None, **any_score}
    flags |= {"freeze": "visual", "zero_stage": 2}
    old = run("rloo", **flags)
    before = files_of(old)
    new_flags = {**flags, "learning_rate": 5e-5, "kl_coef": 0.5, "max_grad_norm": 0.5}
    saves = spy(rloo, "save_checkpoint")
    branch = run("rloo", run_name="branch", resume=old / "checkpoint-1", **new_flags)
    assert saves[-1][0][1].actor.optimizer.clip_grad == 0.5
    assert files_of(old) == before
    rates = [metrics_of(folder)[1]["train/learning_rate"] for folder in (old, branch)]
    assert rates[1] == pytest.approx(rates[0] / 2)  # DeepSpeed restores the old rate
    assert [m["train/step"] for m in metrics_of(branch)] == [1, 2, 3]
    assert json.loads((branch / "args.json").read_text())["resume"] == str(old / "checkpoint-1")
    out = capsys.readouterr().out
    assert "flags changed since" in out and "kl_coef 0.5 (was 0.01)" in out
    [shutil.rmtree(path) for path in branch.glob("checkpoint-*")]  # as if killed before its first checkpoint
    run("rloo", run_name="branch", resume="auto", **new_flags)
    assert [m["train/step"] for m in metrics_of(branch)] == [1, 2, 3]
    assert [m["train/step"] for m in read_jsonl(branch / "metrics.repeated.jsonl")] == [2, 3]
    assert metrics_of(branch)[1]["train/learning_rate"] == rates[1]
    with refused("already exists"):
        run("rloo", resume=old / "checkpoint-1", **flags)  # the same name
    for name, value in (("model", old / "checkpoint-1"), ("zero_stage", 0)):  # the model has frozen weights
        with refused(f"can't resume {old / 'checkpoint-1'} with {name} {value} (was "):
            run("rloo", run_name=name, resume=old / "checkpoint-1", **flags | {name: value})
    saved = torch.load(path := old / "checkpoint-2/state/run.pt")
    torch.save(saved | {"flags": {**saved["flags"], "num_ranks": 2, "lora_alpha": 64.0}}, path)
    with refused("with lora_alpha 32.0 (was 64.0), num_ranks 1 (was 2)"):
        run("rloo", run_name="ranks", resume=old / "checkpoint-2", **flags)
    torch.save(saved, path)
    (old / "args.json").rename(old / "kept.json")  # a folder with copied checkpoints
    args = conftest.filled_args("rloo", output_dir=old.parent, run_name=old.name, resume="auto")
    assert rloo.resolve_run_dir(args)[1] == old / "checkpoint-3"
    (old / "kept.json").rename(old / "args.json")
    (old / "checkpoint-3").rename(old / "checkpoint-3-copy1")  # auto does not pick a copy
    run("rloo", resume="auto", **flags)
    assert [m["train/step"] for m in metrics_of(old)] == [1, 2, 3]
    assert [m["train/step"] for m in read_jsonl(old / "metrics.repeated.jsonl")] == [3]
    assert (old / "args.json").read_bytes() == before[old / "args.json"]
    assert (old / "args-from-step-3.json").is_file()


def test_a_signal_during_an_evaluation_ends_the_run(run, monkeypatch):
    evaluate = rloo.evaluate

    def interrupted(args, run):
        assert not any(isinstance(x, packing.Pack) for x in gc.get_objects()), "pixels of a step"
        if run.state["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(args, run)

    monkeypatch.setattr(rloo, "evaluate", interrupted)
    run_dir = run("rloo", total_steps=2, eval_steps=1)
    assert metrics_of(run_dir)[-1]["train/step"] == 1 and (run_dir / "checkpoint-1").is_dir()


@pytest.mark.slow
def test_zero_steps_evaluate_a_checkpoint(run, spy, capsys, tmp_path):
    setups = spy(rloo, "setup")
    (tmp_path / "runs/run").mkdir(parents=True)  # of a run that was killed before its first checkpoint
    (tmp_path / "runs/run/args.json").write_text('{"resume": null}')
    run_dir = run("rloo", total_steps=0, zero_stage=2, resume="auto", dataset="gone.jsonl")  # is not read
    assert setups[0][2].actor.optimizer is None, "an evaluation allocates no optimizer states"
    assert [m["train/step"] for m in metrics_of(run_dir)] == [0] and not [*run_dir.glob("checkpoint-*")]
    assert "eval/greedy_score" in capsys.readouterr().out
    trained = run("rloo", run_name="trained", total_steps=1, eval_dataset=None)
    evaluated = run("rloo", run_name="evaluated", total_steps=0, resume=trained / "checkpoint-1")
    assert "eval/greedy_score" in metrics_of(evaluated)[-1] and metrics_of(evaluated)[-1]["train/step"] == 1


def test_defaults_fit_the_model(tiny_text_model, capsys):
    """A command with only --model changed must not train a pretrained model at a rate of 1e-4."""
    flags = {}, {"model": tiny_text_model}, {"model": "x", "lora_rank": 8}
    flags += {"num_samples_per_prompt": 6}, {"dtype": "bfloat16"}
    bundled, other, lora, six, half = (conftest.filled_args("rloo", **x) for x in flags)
    assert (bundled.learning_rate, bundled.max_response_length, bundled.max_prompt_length) == (1e-4, 24, 1024)
    assert (other.learning_rate, other.max_response_length, other.max_prompt_length) == (1e-6, 512, 2048)
    assert (bundled.num_epochs, bundled.train_batch_size) == (2, 128)
    assert (other.num_epochs, other.train_batch_size) == (1, 32 * 8)
    assert six.train_batch_size == 192, "128 does not divide the 192 responses"
    assert lora.learning_rate == 1e-5 and "--learning-rate 1e-05" in capsys.readouterr().out
    assert half.zero_stage == 2 and bundled.zero_stage == 0


@pytest.mark.slow
def test_the_checkpoint_is_a_transformers_directory_that_generates_the_same(run):
    run_dir = run("rloo", eval_steps=1, eval_prompts=4)
    checkpoint = run_dir / "checkpoint-2"
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    how = {"max_new_tokens": 8, "suppress_tokens": packing.media_token_ids(model.config)}
    records = read_jsonl(run_dir / "samples.jsonl")[-8:]
    for record in (record for record in records if record["phase"] == "eval_greedy"):
        messages = rloo.build_messages(rloo.Args(), record, ROOT, processor.tokenizer)
        inputs = chats.encode_chat(processor, messages, add_generation_prompt=True)
        out = model.generate(**inputs, do_sample=False, **how)[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(out, skip_special_tokens=True) == record["response"]


CHANGES = [{"max_num_seqs": 4}, *({"gradient_checkpointing": True, "zero_stage": x} for x in (0, 2, 3))]


@pytest.mark.slow
def test_results_do_not_depend_on_batches_or_checkpointing(run, any_reward):
    for lora in ({}, {"lora_rank": 4, "learning_rate": 1e-3}):
        base = metrics_of(run("rloo", run_name=f"base{len(lora)}", **lora, **any_reward))
        for i, flags in enumerate(CHANGES):
            other = metrics_of(run("rloo", run_name=f"other{len(lora)}{i}", **flags, **lora, **any_reward))
            assert max(metrics_differ(base, other).values()) < 1e-4, flags


@pytest.mark.slow
def test_wandb_gets_metrics_and_a_table_of_samples(run, vqa_rows, tmp_path, monkeypatch):
    import wandb

    for name, value in {"MODE": "offline", "SILENT": "true", "DATA_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run_dir = run("rloo", track="wandb", save_total_limit=0)
    wandb.teardown()  # waits until W&B's own process has written all; finish() sometimes doesn't
    [binary] = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    created = (run_dir / "args.json").stat().st_mtime
    assert binary.stem == f"run-{run_dir.name}-{created:.0f}" and b"objective/scores" in binary.read_bytes()
    tables = [*(run_dir / "wandb").rglob("samples_*.table.json")]
    assert len(tables) == 4 and any("eval_greedy" in table.read_text() for table in tables)
    assert len(metrics_of(run_dir)) == 3 and not [*run_dir.glob("checkpoint*")]


BF16 = [{}, {"zero_stage": 3}, {"zero_stage": 2, "offload_optimizer": True}]
BF16 += [{"zero_stage": 3, "offload_optimizer": True, "lora_rank": 4}]


@pytest.mark.slow
@pytest.mark.parametrize("flags", BF16)
def test_bf16(run, any_reward, monkeypatch, flags):
    """Ratios of a rollout's only update are 1 up to rounding. A rate of 1e-6 is below the resolution of most bf16
    weights, so it moves the fp32 master weights. Resume is bit-exact."""
    from deepspeed.utils import safe_get_full_fp32_param

    masters_at_saves, real = [], rloo.save_checkpoint

    def save_checkpoint(args, state):
        trained = [p for p in state.actor.module.parameters() if p.requires_grad]
        masters_at_saves.append(torch.cat([safe_get_full_fp32_param(p).detach().flatten() for p in trained]))
        return real(args, state)

    monkeypatch.setattr(rloo, "save_checkpoint", save_checkpoint)
    flags = {"dtype": "bfloat16", "eval_dataset": None, "warmup_updates": 0, **any_reward, **flags}
    flags |= {"learning_rate": 1e-6, "save_steps": 1, "num_epochs": 1, "train_batch_size": 16}
    flags |= {"min_lr_ratio": 1.0}
    moved = run("rloo", **flags)
    assert all(step["policy/ratio"] == pytest.approx(1, abs=2e-3) for step in metrics_of(moved))
    first, after = masters_at_saves
    assert (first != after).float().mean() > 0.9 and (first - after).abs().max() < 1e-5
    if "lora_rank" not in flags:
        assert (first.bfloat16() == after.bfloat16()).float().mean() > 0.7
    branch = run("rloo", resume=moved / "checkpoint-1", run_name="branch", **flags)
    assert_same_run(moved, branch, tolerance=0, of_weights=0)
    assert torch.equal(masters_at_saves[-1], after)


@pytest.mark.slow
def test_sigterm_saves_and_kills_lose_nothing(start, finish, run, tmp_path, any_reward):
    flags = {"total_steps": 6, "save_steps": 1, "run_name": "killed", "resume": "auto", **any_reward}
    process = start("rloo", **flags)
    metrics = tmp_path / "runs/killed/metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 2:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0 and "stopped by a signal" in (tmp_path / "log").read_text()
    for seed in (1, 2):  # at any time, also while it starts and saves
        process = start("rloo", **flags)
        time.sleep(random.Random(seed).uniform(6, 12))
        process.kill()
        process.wait()
    finish("rloo", **flags)
    undisturbed = run("rloo", **{**flags, "run_name": "undisturbed", "resume": None})
    assert_same_run(undisturbed, tmp_path / "runs/killed", 0, of_weights=0)

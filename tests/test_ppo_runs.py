"""Short runs of ppo_vl.py: the wiring of main, its options, the presets of docs/ppo_vl.md, ranks and ZeRO stages."""

import math
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import conftest
import pytest
import torch
import transformers
import tyro
from conftest import (
    ROOT,
    SHORT,
    TINY,
    assert_same_run,
    largest_difference,
    read_jsonl,
    tensorboard_of,
    write_jsonl,
)
from conftest import weights_of as load_weights
from safetensors.torch import save_file
from test_families import folder_of, write_video  # noqa: F401
from torch.testing import assert_close

import ppo_vl
from common import packing
from common.kl import kl_estimate

ONE_UPDATE = {"total_steps": 1, "train_batch_size": 16, "num_epochs": 1, "warmup_steps": 0}
FAST = {"learning_rate": 1e-3, "warmup_steps": 0}  # so that the second update differs from the first
slow = pytest.mark.slow


@pytest.fixture
def run(run, any_score):
    return lambda **flags: run("ppo_vl", **any_score | {"eval_dataset": None} | flags)


def metrics_of(run_dir: Path) -> list[dict]:
    """Metrics of the training steps."""
    return [metrics for metrics in conftest.metrics_of(run_dir) if metrics["train/step"]]


def weights_of(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_weights(run_dir / f"checkpoint-{step}")


def spy(monkeypatch, name: str, module=ppo_vl) -> list[tuple]:
    """(positional arguments, keywords, result) of each call of a function, which still runs."""
    calls, original = [], getattr(module, name)

    def call(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append((args, kwargs, result))
        return result

    monkeypatch.setattr(module, name, call)
    return calls


def spy_on_rollouts(monkeypatch) -> list[tuple]:
    """(run, rollout) of each step, as they are after the step."""
    rollouts, original = [], ppo_vl.add_logprobs_and_values

    def call(args, run, rollout, groups):
        rollouts.append((run, rollout))
        return original(args, run, rollout, groups)

    monkeypatch.setattr(ppo_vl, "add_logprobs_and_values", call)
    return rollouts


START = load_weights(Path(TINY))


# --- a run ---


def test_a_run_leaves_metrics_samples_and_a_model(run, vqa, any_score):
    run_dir = run(
        eval_dataset=vqa, save_steps=1, save_total_limit=1, track="tensorboard", total_steps=3,
        rewards=("accuracy", "format", *any_score["rewards"]), reward_weights=(0.1, 0.1, 1.0),
    )  # fmt: skip
    metrics = metrics_of(run_dir)
    assert [(m["train/step"], m["train/episode"]) for m in metrics] == [(1, 16), (2, 32), (3, 48)]
    keys = "objective/scores reward/format reward/score policy/approx_kl loss/policy loss/value time/total"
    keys += " val/clipfrac val/explained_variance train/grad_norm train/critic_grad_norm"
    assert all({*keys.split()} <= m.keys() for m in metrics)
    assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert "eval/sampled_score" in metrics[-1] and "eval/sampled_score" not in metrics[0]
    phases = {record["phase"] for record in read_jsonl(run_dir / "samples.jsonl")}
    assert phases == {"train", "eval_greedy", "eval_sampled"}
    steps, texts = tensorboard_of(run_dir)
    assert steps == [0, 1, 2, 3] and [*texts["samples"]] == [0, 3]
    assert [path.name for path in run_dir.glob("checkpoint*")] == ["checkpoint-3"]
    transformers.AutoModelForImageTextToText.from_pretrained(run_dir / "checkpoint-3")
    assert largest_difference(weights_of(run_dir, 3), START) > 0
    transformers.AutoProcessor.from_pretrained(run_dir / "checkpoint-3")


# --- the wiring of main ---


def test_the_policy_moves_along_its_advantages(run, monkeypatch):
    """In the second epoch over the same responses. An ascending loss gives -3, a constant ratio 0."""
    calls, weight_calls = spy(monkeypatch, "compute_policy_loss"), spy(monkeypatch, "compute_loss_weights")
    rollouts, packs, iter_rank_packs = spy_on_rollouts(monkeypatch), [], packing.iter_rank_packs

    def keep_packs(**keywords):
        for pack in iter_rank_packs(**keywords):
            packs.append(pack)
            yield pack

    monkeypatch.setattr(packing, "iter_rank_packs", keep_packs)
    (metrics,) = metrics_of(run(learning_rate=1e-4, warmup_steps=0, total_steps=1))
    run_state, rollout = rollouts[0]
    assert len(calls) == len(packs) - 1 == 4  # the first pack is the forward pass before the update
    gain = 0.0
    for k, (pack, (_, call, _), ((mask, *_), _, weights)) in enumerate(zip(packs[1:], calls, weight_calls)):
        assert torch.equal(call["advantages"], rollout.advantages[pack.token_index])
        assert torch.equal(call["old_logprobs"], rollout.old_logprobs[pack.token_index])
        assert torch.equal(call["response_of_token"], pack.response_of_token)
        assert {*pack.response_index.tolist()} <= {*range(16)} and len(pack.response_index) == 8
        assert len(mask) == 8 and weights.sum().item() == pytest.approx(1)  # of this mini-batch alone
        if k >= 2:
            gain += ((call["new_logprobs"] - call["old_logprobs"]) * call["advantages"]).sum().item()
    assert gain > 1
    # The default reuses the sampler's log-probs, which are those of the first training forward.
    assert run_state.reuse_sampler_logprobs and rollout.old_logprobs is rollout.sampler_logprobs
    assert metrics["sampling/logprob_diff_mean"] == metrics["policy/logprob_diff_mean"] < 1e-5


def test_each_loss_has_its_own_weights_and_gradient(run, monkeypatch):
    """All terms at once. Each optimizer step divides by its own tokens; metrics are means over steps.

    Sampler log-probs are 0.5 too high or too low, so importance weights are e^-0.5 or e^0.5, clipped to 1.5."""
    setup, generate = ppo_vl.setup, ppo_vl.HFSampler.generate

    def generate_inexactly(self, *args, **keywords):
        responses = generate(self, *args, **keywords)
        for response in responses:
            response.logprobs.add_(torch.rand(response.logprobs.shape).round() - 0.5)
        return responses

    monkeypatch.setattr(ppo_vl.HFSampler, "generate", generate_inexactly)
    monkeypatch.setattr(ppo_vl, "setup", lambda args: replace(setup(args), reuse_sampler_logprobs=False))
    monkeypatch.setitem(packing.TOLERANCE, torch.float32, 1.0)
    policy_calls, value_calls = (
        spy(monkeypatch, "compute_policy_loss"),
        spy(monkeypatch, "compute_value_loss"),
    )
    forwards, kl_calls = spy(monkeypatch, "response_logprobs", packing), spy(monkeypatch, "kl_estimate")
    init_engine, backwards = ppo_vl.init_deepspeed_engine, []

    def init_and_watch(**keywords):
        engine = init_engine(**keywords)
        backward = engine.backward

        def watched(loss, **options):
            outputs = forwards[-1][2]  # log-probs (M,), entropies (M,)
            if isinstance(engine.module, ppo_vl.Policy):
                for x in outputs:
                    x.retain_grad()
            backward(loss, **options)
            if isinstance(engine.module, ppo_vl.Policy):
                new, entropy = outputs
                backwards.append((new.detach(), entropy.detach(), loss.detach(), new.grad, entropy.grad))

        engine.backward = watched
        return engine

    monkeypatch.setattr(ppo_vl, "init_deepspeed_engine", init_and_watch)
    flags = {"entropy_coef": 0.3, "kl_loss": True, "kl_estimator": "k2", "kl_coef": 0.7}
    (metrics,) = metrics_of(run(**FAST, **flags, total_steps=1, value_clip=0.01, tis_clip=1.5))
    means = {"policy": [], "entropy": [], "kl": [], "value": []}
    steps = zip(policy_calls, value_calls, kl_calls[1:], backwards)
    for (_, call, _), (_, _, (value_losses, _)), kl_call, backward_call in steps:
        new, entropy, loss, of_new, of_entropy = backward_call
        M = len(new)  # one pack per mini-batch: its tokens are those of the optimizer step
        (_, ref), kl = kl_call[0][:2], kl_call[2]
        assert_close(of_entropy, torch.full((M,), -0.3 / M))  # a bonus
        ratio = (new - call["old_logprobs"]).exp()
        is_clipped = torch.where(call["advantages"] > 0, ratio > 1.2, ratio < 0.8)
        of_policy = -call["advantages"] * ratio * ~is_clipped
        of_policy = torch.stack([math.exp(-0.5) * of_policy, 1.5 * of_policy])  # (2, M)
        of_kl = 0.7 * (new - ref)
        matches = (of_new * M - of_kl - of_policy).abs() < 1e-4
        assert matches.any(0).all() and matches.float().mean(1).min() > 0.2
        means["entropy"].append(-entropy.mean())
        means["kl"].append(kl.mean())
        means["value"].append(value_losses.mean())
        means["policy"].append(loss - 0.3 * means["entropy"][-1] - 0.7 * kl.mean())
    for name, values in means.items():
        assert metrics[f"loss/{name}"] == pytest.approx(sum(x.item() for x in values) / 4, abs=1e-5)
    assert kl_calls[1:] and len(backwards) == len(value_calls) == 4
    old = [call["old_values"] for _, call, _ in value_calls]
    new = [call["new_values"] for _, call, _ in value_calls]
    assert not any(x.any() for x in old) and new[-1].abs().mean() > 1e-3  # the critic starts at 0
    assert metrics["val/clipfrac"] > 0.1


@pytest.mark.parametrize(
    "flags",
    [
        {"gae_lambda": 0.7},
        {"advantage": "rloo", "kl_coef": 1.0, "temperature": 1.3},
        {"advantage": "group_norm", "whiten_advantages": "on", "reward_clip": (0.3, 0.6)},
        {
            "advantage": "reinforce",
            "kl_loss": True,
            "kl_estimator": "k2",
            "gamma": 0.9,
            "mask_truncated": True,
        },
        {"whiten_advantages": "off", "kl_estimator": "k3"},
    ],
)
def test_advantages_are_those_of_the_flags(run, monkeypatch, flags):
    rollouts, losses = spy_on_rollouts(monkeypatch), spy(monkeypatch, "compute_policy_loss")
    args = tyro.cli(ppo_vl.Args, args=conftest.to_argv(flags))
    metrics = metrics_of(run(**FAST, max_response_length=5, clip_coef_high=0.3, **flags))
    rollout = rollouts[1][1]  # of the second step: its KL is not 0, nor are its values
    mask, kept, scores = rollout.loss_mask, rollout.kept_responses, rollout.scores
    if args.mask_truncated:
        assert torch.equal(kept, ~rollout.truncated) and 0 < kept.sum() < 16
    else:
        assert kept.all() and torch.equal(mask, rollout.response_mask)
    scores = scores.clamp(*args.reward_clip) if args.reward_clip else scores
    kl = kl_estimate(rollout.old_logprobs, rollout.ref_logprobs, args.kl_estimator) * mask
    assert kl.abs().max() > 1e-3
    reward_kl_coef = 0.0 if args.kl_loss else args.kl_coef
    rlhf_rewards = scores - reward_kl_coef * kl.sum(1).view(4, 4)
    assert metrics[1]["objective/rlhf_reward"] == pytest.approx(rlhf_rewards[kept].mean().item(), abs=1e-5)
    scores = ppo_vl.subtract_baseline(scores, kept, args.advantage).flatten()
    rewards = ppo_vl.compute_token_rewards(scores, kl * reward_kl_coef, mask)
    has_critic = args.advantage == "gae"
    assert rollout.values.any() == has_critic
    gae_lambda = args.gae_lambda if has_critic else 1.0
    expected, returns = ppo_vl.compute_gae(rewards, rollout.values, mask, args.gamma, gae_lambda)
    assert_close(rollout.returns, returns, atol=1e-5, rtol=1e-4)
    by_default = args.advantage in ("gae", "reinforce", "reinforce_baseline")
    if args.whiten_advantages == "on" or (args.whiten_advantages == "auto" and by_default):
        expected = (expected - expected[mask].mean()) / expected[mask].std(correction=0) * mask
    assert_close(rollout.advantages, expected, atol=1e-5, rtol=1e-4)
    assert {(call["clip_low"], call["clip_high"]) for _, call, _ in losses} == {(0.2, 0.3)}


# --- the comparison of log-probs ---


@pytest.mark.parametrize("flags", [{}, {"dynamic_sampling": 1, "tis_clip": 2.0, "mask_truncated": True}])
def test_a_sampler_that_computes_other_logprobs_stops_the_run(run, monkeypatch, capsys, flags):
    generate = ppo_vl.HFSampler.generate

    def shifted(self, *args, **kwargs):
        responses = generate(self, *args, **kwargs)
        for response in responses:
            response.logprobs.add_(0.01)
        return responses

    monkeypatch.setattr(ppo_vl.HFSampler, "generate", shifted)
    with pytest.raises(SystemExit) as stopped:
        run(**flags)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "step 1: sampling/logprob_diff_mean is 0.01" in error


def test_a_forward_that_differs_in_training_stops_the_run(run, monkeypatch, capsys):
    forward = ppo_vl.Policy.forward

    def noisy(self, pack, **options):
        logprobs, entropy = forward(self, pack, **options)
        return (logprobs - 0.01 if torch.is_grad_enabled() else logprobs), entropy

    monkeypatch.setattr(ppo_vl.Policy, "forward", noisy)
    with pytest.raises(SystemExit):
        run(sampler="hf")
    assert "logprob_diff_mean is 0.01" in capsys.readouterr().err


# --- options ---


@pytest.mark.parametrize("flags, moving", [({"freeze": "visual"}, 0), ({"lora_rank": 2}, 0), ({}, 1)])
def test_frozen_parts_stay_and_the_others_move(run, flags, moving):
    run_dir = run(**ONE_UPDATE, **flags)
    end = weights_of(run_dir, 1)
    moved = {name for name, x in end.items() if not torch.equal(x, START[name])}
    assert end.keys() == START.keys()  # adapters are merged
    assert any("q_proj" in name for name in moved) and any("visual" in name for name in moved) == moving
    assert ("lora_rank" in flags) == (not any("norm" in name for name in moved))


@slow
def test_a_reference_is_loaded_only_for_a_kl(run, monkeypatch):
    loads = spy(monkeypatch, "load_model")
    metrics = metrics_of(run(**ONE_UPDATE, kl_coef=0.0))[0]
    assert not {"loss/kl", "objective/kl"} & metrics.keys() and len(loads) == 2
    run(**ONE_UPDATE, run_name="rloo", advantage="rloo")
    assert len(loads) == 4
    run(**ONE_UPDATE, run_name="lora", lora_rank=2, advantage="rloo")  # the reference: without adapters
    assert len(loads) == 5


def test_critic_from_a_reward_model_takes_its_head(run, tmp_path, monkeypatch):
    reward_model = tmp_path / "reward_model"
    shutil.copytree(TINY, reward_model)
    head = torch.randn(1, transformers.AutoConfig.from_pretrained(TINY).get_text_config().hidden_size)
    save_file({"score.weight": head}, reward_model / "score.safetensors")
    rollouts = spy_on_rollouts(monkeypatch)
    run(**ONE_UPDATE, critic_model=str(reward_model), critic_learning_rate=0.0)
    run_state, rollout = rollouts[0]
    assert torch.equal(run_state.critic.module.value_head.weight, head)
    backbone = ppo_vl.load_model(TINY, torch.float32).base_model.eval()
    for b in (0, 5, 15):  # values are the head on the hidden states of the unmodified model
        prompt = run_state.train_data.encode(rollout.prompts[b // 4].index)
        pack = packing.build_unpacked([(0, [b])], {0: prompt}, rollout.response_ids)
        with torch.no_grad():
            values = packing.forward_hidden(backbone, packing.to_device(pack, backbone)) @ head[0]
        assert_close(rollout.values[b, : len(values)], values, atol=1e-4, rtol=1e-4)


ECHO = """
class Echo:
    def reset(self, **row):
        self.turns = 0
    def step(self, response):
        self.turns += 1
        return f"turn {self.turns}: {response}" if self.turns < 3 else None
"""


def test_observations_are_neither_valued_nor_trained(run, tmp_path, monkeypatch):
    """Values are those of the unmodified model on the whole trajectory; returns skip observations."""
    (tmp_path / "echo.py").write_text(ECHO)
    dataset = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"what is {i}?"} for i in range(8)])
    critic_model = tmp_path / "critic"
    shutil.copytree(TINY, critic_model)
    head = torch.randn(1, transformers.AutoConfig.from_pretrained(TINY).get_text_config().hidden_size)
    save_file({"score.weight": head}, critic_model / "score.safetensors")
    rollouts, policy_calls = spy_on_rollouts(monkeypatch), spy(monkeypatch, "compute_policy_loss")
    value_calls = spy(monkeypatch, "compute_value_loss")
    flags = {"environment": f"{tmp_path}/echo.py:Echo", "max_turns": 3, "max_response_length": 96}
    flags |= {"kl_coef": 0.1, "gae_lambda": 0.5, "whiten_advantages": "off", "critic_learning_rate": 0.0}
    (metrics,) = metrics_of(run(**ONE_UPDATE | flags, dataset=dataset, critic_model=str(critic_model)))
    run_state, rollout = rollouts[0]
    mask, lengths = rollout.response_mask, torch.tensor([len(ids) for ids in rollout.response_ids])
    is_observation = ~mask & (torch.arange(mask.shape[1]) < lengths[:, None])
    assert is_observation.any(1).sum() > 8
    assert mask[torch.arange(16), lengths - 1].all()  # a trajectory ends with a token of the model
    for table in (rollout.values, rollout.advantages, rollout.returns):
        assert not table[~mask].any() and table[mask].any()
    for calls, name in ((policy_calls, "new_logprobs"), (value_calls, "new_values")):
        assert sum(len(call[name]) for _, call, _ in calls) == mask.sum()
    assert metrics["sampling/logprob_diff_mean"] < 1e-5
    assert metrics["rollout/response_length_mean"] == pytest.approx(mask.sum(1).float().mean().item())
    backbone = ppo_vl.load_model(TINY, torch.float32).base_model.eval()
    for b in range(0, 16, 5):
        sampled = mask[b].nonzero()[:, 0]
        prompt = run_state.train_data.encode(rollout.prompts[b // 4].index)
        input_ids = torch.cat([prompt.input_ids, rollout.response_ids[b]])[None]
        with torch.no_grad():
            hidden = backbone(input_ids=input_ids).last_hidden_state[0]
        values = hidden[prompt.length - 1 + sampled] @ head[0]
        assert_close(rollout.values[b, sampled], values, atol=1e-4, rtol=1e-4)
        rewards = torch.zeros(1, len(sampled))  # the KL is 0 in step 1
        rewards[0, -1] = rollout.scores.flatten()[b]
        everything = torch.ones(1, len(sampled), dtype=torch.bool)
        advantages, _ = ppo_vl.compute_gae(rewards, values[None], everything, gamma=1.0, gae_lambda=0.5)
        assert_close(rollout.advantages[b, sampled], advantages[0], atol=1e-3, rtol=1e-3)


def test_the_value_head_multiplies_in_fp32():  # B20
    model = ppo_vl.load_model(TINY, torch.bfloat16)
    critic = ppo_vl.Critic(model, Path("no directory"))
    critic.value_head.weight.data.normal_()
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    messages = [{"role": "user", "content": [{"type": "text", "text": "what?"}]}]
    prompt = packing.make_prompt(model, packing.encode_chat(processor, messages, add_generation_prompt=True))
    pack = packing.build_unpacked([(0, [0])], {0: prompt}, [torch.tensor([5, 6, 7])])
    with torch.no_grad():
        values, hidden = critic(pack), packing.forward_hidden(critic.model, pack)
    expected = hidden.double() @ critic.value_head.weight[0].double()
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())
    assert_close(values, expected.float(), atol=1e-5, rtol=1e-5)


def test_dynamic_sampling_trains_on_the_first_useful_prompts(run, tmp_path, monkeypatch):
    """B5, B12, B24: one rollout per step; forward passes see only the responses that are trained on."""
    code = "def score(completion_ids, answer, log_metric, **columns):\n    log_metric('seen', len(answer))\n"
    code += "    return [sum(ids) % 7 / 7 * (len(a) > 3) for ids, a in zip(completion_ids, answer)]\n"
    (tmp_path / "some.py").write_text(code)
    rollouts, forwards = spy_on_rollouts(monkeypatch), spy(monkeypatch, "iter_packs")
    run_dir = run(rewards=(f"{tmp_path}/some.py:score",), dynamic_sampling=3, kl_coef=0.1)
    previous_rows = set()
    for (_, rollout), metrics in zip(rollouts, metrics_of(run_dir)):
        differs = rollout.scores.amax(1) > rollout.scores.amin(1)  # (12,)
        first = differs & (differs.cumsum(0) <= 4)
        assert len(differs) == 12 and 0 < first.sum() <= 4
        assert torch.equal(rollout.kept_responses, first[:, None].expand(12, 4))
        assert metrics["reward_metrics/seen"] == 48 and metrics["rollout/prompts_skipped"] == 0
        assert metrics["rollout/frac_reward_zero_std"] == pytest.approx((~differs).float().mean().item())
        assert not rollout.values[~rollout.loss_mask].any()
        rows = {prompt.index for prompt in rollout.prompts}
        assert not rows & previous_rows
        previous_rows |= rows
    assert metrics["train/episode"] == 96
    for (_, _, rollout, groups), _, _ in forwards:
        kept = {*rollout.kept_responses.flatten().nonzero()[:, 0].tolist()}
        assert {b for _, indices in groups for b in indices} <= kept


def test_a_step_without_responses_to_train_on_is_logged(run):
    run_dir = run(mask_truncated=True, max_response_length=1)  # all are truncated
    for metrics in metrics_of(run_dir):
        assert metrics["rollout/truncated_frac"] == 1
        assert not {"loss/policy", "objective/kl", "objective/rlhf_reward"} & metrics.keys()
    assert largest_difference(weights_of(run_dir, 2), START) == 0


def test_episodes_are_responses_not_skipped_rows(run, vqa_rows, tmp_path):  # B16
    rows = [row | ({} if i % 4 else {"image": "gone.png"}) for i, row in enumerate(vqa_rows)]
    metrics = metrics_of(run(dataset=write_jsonl(tmp_path / "rows.jsonl", rows), total_steps=4))
    skipped = sum(step["rollout/prompts_skipped"] for step in metrics)
    assert skipped > 0 and metrics[-1]["train/episode"] == 4 * (4 * 4 - skipped)


# --- flags ---

REFUSED = {
    "--kl-loss requires": [{"kl_loss": True}, {"kl_loss": True, "kl_estimator": "k3", "kl_coef": 0.0}],  # B8
    "--policy-loss gspo requires --loss-agg": [{"policy_loss": "gspo", "clip_coef": 3e-4}],  # B9
    "--policy-loss gspo requires a small": [{"policy_loss": "gspo", "loss_agg": "seq-mean-token-mean"}],
    "--value-clip requires --advantage gae": [{"advantage": "rloo", "value_clip": 0.1}],
    "--gae-lambda requires --advantage gae": [{"advantage": "reinforce", "gae_lambda": 1.0}],
    "--critic-learning-rate requires": [{"advantage": "group_norm", "critic_learning_rate": 1e-5}],
    "--dynamic-sampling (-2) must be at least 0": [{"dynamic_sampling": -2}],
    "--clip-coef (-1.0) must be": [{"clip_coef": -1.0}],
    "--gamma (2.0) must be between 0 and 1": [{"gamma": 2.0}],
    "--temperature": [{"temperature": 0.0}],
    "--eval-steps (-1) must be at least 0": [{"eval_steps": -1}],
    "--critic-model requires": [{"critic_model": TINY, "advantage": "rloo"}],
    "--train-batch-size": [{"train_batch_size": 100}, {"train_batch_size": 4}],
    "--rollout-batch-size": [{"rollout_batch_size": 192}],
    "--num-samples-per-prompt (1) must be at least 2 for --dynamic-sampling": [
        {"dynamic_sampling": 1, "num_samples_per_prompt": 1}
    ],
    "--num-samples-per-prompt (1) must be at least 2 for --advantage rloo": [
        {"advantage": "rloo", "num_samples_per_prompt": 1}
    ],
    "--num-samples-per-prompt (0)": [{"num_samples_per_prompt": 0}],
    "--micro-batch-tokens": [{"micro_batch_tokens": 100}],
    "--rewards must have": [{"reward_weights": (1.0, 2.0, 3.0)}],
    "--offload-optimizer requires": [{"offload_optimizer": True}],
    "--resume auto requires": [{"resume": "auto"}],
}


@pytest.mark.parametrize("message", REFUSED)
def test_flags_that_contradict_each_other_or_have_no_effect_are_refused(message, capsys):
    for flags in REFUSED[message]:
        with pytest.raises(SystemExit) as stopped:
            ppo_vl.check_args(ppo_vl.Args(**flags))
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.startswith(f"error: {message}") and error.count("\n") == 1


def test_freeze_must_match_a_parameter(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(freeze="no such name")
    assert stopped.value.code == 2 and "--freeze no such name matches no parameter" in capsys.readouterr().err


def test_flags_that_go_together_are_accepted():
    for flags in (
        {},
        {"kl_loss": True, "kl_estimator": "k2"},
        {"num_samples_per_prompt": 1},
    ):
        ppo_vl.check_args(ppo_vl.Args(**flags))


PRESETS = re.findall(
    r"^\| ([^|(]+) .*?\| `(--[^`]+)` \|",
    (ROOT / "docs/ppo_vl.md").read_text().partition("## Presets")[2].partition("\n## ")[0],
    re.M,
)


@pytest.mark.parametrize("name, flags", PRESETS, ids=[name for name, _ in PRESETS])
def test_presets_of_the_page_run(run, name, flags, any_score):
    """One step each, with these flags on the command line, and every one of them changes a default."""
    words = shlex.split(flags.replace("\\|", "|"))
    args = tyro.cli(ppo_vl.Args, args=words)
    default = ppo_vl.Args()
    changed = {key: value for key, value in vars(args).items() if value != getattr(default, key)}
    assert len(changed) == sum(word.startswith("--") for word in words)
    short = {"total_steps": 1, "num_samples_per_prompt": 4, "rollout_batch_size": 16, "train_batch_size": 16}
    rewards = any_score | {"rewards": (*any_score["rewards"],)} if "rewards" not in changed else {}
    (metrics,) = metrics_of(run(**short | rewards | changed))
    assert metrics["train/grad_norm"] > 0 or metrics["objective/scores"] == 0
    assert ("loss/value" in metrics) == (args.advantage == "gae")


# --- videos, images and text ---


@pytest.fixture
def mixed(tmp_path, vqa_rows) -> str:
    """Text, one image, two images with markers, a video, a video and an image."""
    images = [row["image"] for row in vqa_rows[:4]]
    write_video(tmp_path / "ball.mp4")
    rows = [("say circle", [], []), ("what is it?", images[:1], [])]
    rows += [("is <image> as <image>?", images[1:3], []), ("where is the ball?", [], ["ball.mp4"])]
    rows += [("<video> and <image>?", images[3:], ["ball.mp4"])]
    rows = [dict(zip(("prompt", "images", "videos"), row)) for row in rows]
    return write_jsonl(tmp_path / "mixed.jsonl", rows * 2)


OTHERS = [pytest.param(family, marks=slow) for family in ("qwen2_vl", "qwen3_vl")]


@pytest.mark.parametrize("family", ["qwen2_5_vl", *OTHERS])
def test_videos_images_and_text_in_one_batch(run, mixed, folder_of, monkeypatch, family):  # noqa: F811
    """That the sampler's log-probs are those of the unmodified model is tested in test_families.py."""
    model = TINY if family == "qwen2_5_vl" else str(folder_of(family))
    rollouts, messages = spy_on_rollouts(monkeypatch), spy(monkeypatch, "print0")
    flags = ONE_UPDATE | {"rollout_batch_size": 40, "train_batch_size": 40, "kl_coef": 0.0}
    (metrics,) = metrics_of(run(model=model, dataset=mixed, **flags))
    assert any(args[0].startswith("packing enabled") for args, _, _ in messages)
    assert metrics["train/grad_norm"] > 0 and metrics["sampling/logprob_diff_mean"] < 1e-4
    assert {prompt.index for prompt in rollouts[0][1].prompts} == {*range(10)}


# --- packs, ranks and stages ---


def test_results_do_not_depend_on_packs(run, monkeypatch):
    """Denominators are those of the whole optimizer step, however it is split."""
    packs = spy(monkeypatch, "compute_value_loss")
    flags = {"total_steps": 1, "max_prompt_length": 48, "learning_rate": 1e-5, "critic_learning_rate": 1e-5}
    one = run(**flags)
    assert len(packs) == 4
    other = run(**flags, run_name="other", micro_batch_tokens=64)
    assert len(packs) == 4 + 8  # two per optimizer step
    assert_same_run(one, other, 2e-4, of_weights=2e-5)


@slow
def test_results_do_not_depend_on_gradient_checkpointing(run):
    one, other = run(total_steps=1), run(total_steps=1, run_name="other", gradient_checkpointing=True)
    assert_same_run(one, other, 2e-4, of_weights=2e-5)


@slow
@pytest.mark.parametrize("lora", [0, 2])
def test_ranks_and_stages_have_the_same_metrics_and_weights(start, any_score, mixed, tmp_path, lora):
    flags = {"dataset": mixed, "eval_dataset": None, "rollout_batch_size": 20, "train_batch_size": 20}
    flags |= {"lora_rank": lora, "learning_rate": 1e-5, "critic_learning_rate": 1e-5}
    flags |= any_score
    assert start("ppo_vl", **flags).wait() == 0
    offloaded = {"zero_stage": 3, "offload_optimizer": True}
    plans = [(2, {}), (2, {"zero_stage": 2}), (2, {"zero_stage": 3}), (1, offloaded)]
    plans = [(2, offloaded), (1, {"zero_stage": 2})] if lora else plans
    for i, (ranks, plan) in enumerate(plans):
        assert start("ppo_vl", ranks, **flags | plan | {"run_name": f"other{i}"}).wait() == 0
        assert_same_run(tmp_path / "runs/run", tmp_path / f"runs/other{i}", 2e-4, of_weights=2e-5)


# --- learning ---


@slow
@pytest.mark.timeout(1800)
def test_the_default_run_learns(start, tmp_path):
    defaults = {name: x for name, x in vars(ppo_vl.Args()).items() if name in SHORT and name != "run_name"}
    flags = defaults | {"total_steps": 10, "eval_prompts": 60, "dataset": "easy-vqa", "eval_dataset": None}
    assert start("ppo_vl", **flags).wait() == 0
    before, *steps = read_jsonl(tmp_path / "runs" / "run" / "metrics.jsonl")
    # In parentheses: the figures of the unbroken script with this seed.
    assert steps[-1]["eval/sampled_score"] > before["eval/sampled_score"] + 0.45  # (0.52)
    assert steps[-1]["eval/greedy_score"] > before["eval/greedy_score"] + 0.65  # (0.83)
    assert max(step["val/explained_variance"] for step in steps) > 0.25  # (0.35)
    assert max(step["val/clipfrac"] for step in steps) > 0.1  # (0.37); 0 without value clipping
    assert steps[0]["policy/approx_kl"] > 1e-3  # (0.0055); 0 if the ratio is always 1
    assert 0.1 < steps[0]["loss/value"] < 0.14  # (0.117); 0.23 with doubled weights

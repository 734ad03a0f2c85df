"""Short runs of ppo_vl.py: the wiring of main, its options, and the critic."""

import functools
import shutil
from pathlib import Path
from types import SimpleNamespace

import conftest
import deepspeed
import pytest
import torch
import transformers
import tyro
from conftest import TINY, filled_args, largest_difference, metrics_of, weights_of, write_jsonl
from safetensors.torch import save_file
from torch.testing import assert_close

import ppo_vl
from common import packing
from ppo_vl import compute_gae  # not replaced by watch_steps

ONE_UPDATE = {"total_steps": 1, "train_batch_size": 16, "num_epochs": 1, "warmup_updates": 0}
FAST = {"learning_rate": 1e-3, "warmup_updates": 0}  # so that the second update differs from the first
filled = functools.partial(filled_args, "ppo_vl")


@pytest.fixture
def run(run, any_score):
    return lambda **flags: run("ppo_vl", **any_score | {"eval_dataset": None} | flags)


@pytest.fixture
def watch_steps(spy):
    """Function that returns what main had in each step so far, from its calls of three functions."""
    tables = spy(ppo_vl, "compute_logprobs_and_values")
    gae, whitened = spy(ppo_vl, "compute_gae"), spy(ppo_vl, "whiten")

    def steps() -> list[SimpleNamespace]:
        found = []
        for i, ((run, rollout, _), _, results) in enumerate(tables):
            step = SimpleNamespace(run=run, rollout=rollout, **gae[i][1])
            step.old_logprobs, step.entropies, step.ref_logprobs, step.values = results
            step.advantages, step.returns = gae[i][2]
            step.advantages = whitened[i][2] if whitened else step.advantages
            found.append(step)
        return found

    return steps


def test_the_policy_moves_along_its_advantages(run, monkeypatch, spy, watch_steps):
    """In the second epoch over the same responses. An ascending loss gives -3, a constant ratio 0."""
    calls = spy(ppo_vl, "compute_policy_loss")
    packs, forward = [], ppo_vl.Critic.forward  # of each forward pass
    monkeypatch.setattr(ppo_vl.Critic, "forward", lambda *args: packs.append(args[1]) or forward(*args))
    (metrics,) = metrics_of(run(learning_rate=1e-4, warmup_updates=0, total_steps=1, kl_coef=0.0))
    (step,) = watch_steps()
    assert step.run.reference is None and "objective/kl" not in metrics
    before, during = packs[-6:-4], packs[-4:]  # the forward passes before the update, and those of the update
    assert before == during[:2], "old log-probs come from the very packs of the first epoch"
    assert len(calls) == len(during) == 4
    gain = 0.0
    for k, (pack, (_, call, _)) in enumerate(zip(during, calls)):
        assert torch.equal(call["advantages"], step.advantages[pack.token_index])
        assert torch.equal(call["old_logprobs"], step.old_logprobs[pack.token_index])
        assert {*pack.response_index.tolist()} <= {*range(16)} and len(pack.response_index) == 8
        if k >= 2:
            gain += ((call["new_logprobs"] - call["old_logprobs"]) * call["advantages"]).sum().item()
    assert gain > 1
    assert metrics["sampling/logprob_diff_mean"] < 1e-5
    assert metrics["policy/logprob_diff_mean"] == metrics["policy/clipfrac_first"] == 0


def test_each_model_has_its_own_loss(run, spy):
    """Each optimizer step divides by its own tokens: means over one pack per mini-batch. Both follow the schedule."""
    policy_calls, value_calls = (spy(ppo_vl, f"compute_{name}_loss") for name in ("policy", "value"))
    backwards, updates = spy(deepspeed.DeepSpeedEngine, "backward"), spy(ppo_vl, "optimizer_step")
    flags = {"mask_truncated": True, "max_response_length": 5}  # some responses are dropped
    flags |= {"learning_rate": 1e-3, "critic_learning_rate": 2e-3, "warmup_updates": 2}
    (metrics,) = metrics_of(run(**flags, total_steps=1, value_clip=0.01))
    policy_rates, critic_rates = ([rate for (_, rate), _, _ in updates[k::2]] for k in (0, 1))
    assert policy_rates[:2] == pytest.approx([0.5e-3, 1e-3]) and len(policy_rates) == 4
    assert critic_rates == pytest.approx([2 * rate for rate in policy_rates])
    assert [type(engine.module) for (engine, _), _, _ in backwards] == [ppo_vl.Policy, ppo_vl.Critic] * 4
    for k, (name, calls) in enumerate({"policy": policy_calls, "value": value_calls}.items()):
        per_token = [losses.detach() for _, _, (losses, _) in calls]
        for losses, ((_, loss), _, _) in zip(per_token, backwards[k::2], strict=True):
            assert loss.item() == pytest.approx(losses.mean().item(), abs=1e-6)
        assert metrics[f"loss/{name}"] == pytest.approx(torch.cat(per_token).mean().item(), abs=1e-5)
    old = [call["old_values"] for _, call, _ in value_calls]
    assert not any(x.any() for x in old)  # the critic starts at 0
    assert value_calls[-1][1]["new_values"].abs().mean() > 1e-3 and metrics["value/clipfrac"] > 0.1


FLAGS = [{"kl_coef": 1.0, "temperature": 1.3, "whiten_advantages": False, "reward_clip": (0.5, 0.6)}]
FLAGS += [{"gamma": 0.9, "mask_truncated": True, "num_samples_per_prompt": 1, "max_response_length": 7}]
FLAGS[0] |= {"gae_lambda": 0.7}


@pytest.mark.parametrize("flags", FLAGS)
def test_advantages_are_those_of_the_flags(run, spy, watch_steps, flags):
    losses = spy(ppo_vl, "compute_policy_loss")
    flags = {"num_samples_per_prompt": 4, "max_response_length": 5, "clip_coef_high": 0.3} | flags
    flags["prompts_per_rollout"] = 16 // flags["num_samples_per_prompt"]
    args = tyro.cli(ppo_vl.Args, args=conftest.to_argv(flags))
    metrics = metrics_of(run(**FAST | flags))
    step = watch_steps()[1]  # its KL is not 0, nor are its values
    mask, scores, truncated = step.mask, step.rollout.scores, step.rollout.truncated
    kept = ~truncated if args.mask_truncated else torch.ones_like(truncated)
    assert torch.equal(mask, step.rollout.response_mask & kept.view(-1, 1)) and 0 < kept.sum() <= 16
    assert kept.all() != args.mask_truncated
    scores = scores.clamp(*args.reward_clip) if args.reward_clip else scores
    kl = (step.old_logprobs - step.ref_logprobs) * mask
    assert kl.abs().max() > 1e-3 and step.values.any()
    rewards = scores - args.kl_coef * kl.sum(1).view(scores.shape)
    assert metrics[1]["objective/rlhf_reward"] == pytest.approx(rewards[kept].mean().item(), abs=1e-5)
    response_kl = kl.sum(1).view(scores.shape)[kept].mean().item()
    assert metrics[1]["objective/kl"] == pytest.approx(response_kl, abs=1e-5)
    assert metrics[1]["objective/scores"] == pytest.approx(step.rollout.scores.mean().item(), abs=1e-5)
    rewards = ppo_vl.compute_token_rewards(scores.flatten(), kl * args.kl_coef, mask)
    expected, returns = compute_gae(rewards, step.values, mask, args.gamma, args.gae_lambda)
    assert_close(step.returns, returns, atol=1e-5, rtol=1e-4)
    explained = ppo_vl.explained_variance(step.values[mask], returns[mask]).item()
    assert metrics[1]["value/explained_variance"] == pytest.approx(explained, abs=1e-4)
    if args.whiten_advantages:
        expected = (expected - expected[mask].mean()) / expected[mask].std(correction=0) * mask
    assert_close(step.advantages, expected, atol=1e-5, rtol=1e-4)
    assert {(call["clip_low"], call["clip_high"]) for _, call, _ in losses} == {(0.2, 0.3)}
    in_loss = torch.cat([call["old_logprobs"] for _, call, _ in losses])
    in_loss = in_loss[-int(mask.sum()) :]  # in the last epoch
    assert torch.equal(in_loss.sort()[0], step.old_logprobs[mask].sort()[0])


@pytest.mark.parametrize("flags, moving", [({"freeze": "^visual"}, 0), ({"lora_rank": 2}, 0), ({}, 1)])
def test_frozen_parts_stay_and_the_others_move(run, flags, moving):
    run_dir = run(**ONE_UPDATE, **flags)
    start, end = weights_of(Path(TINY)), weights_of(run_dir / "checkpoint-1")
    moved = {name for name, x in end.items() if not torch.equal(x, start[name])}
    assert end.keys() == start.keys()  # adapters are merged
    assert any("q_proj" in name for name in moved) and any("visual" in name for name in moved) == moving
    assert ("lora_rank" in flags) == (not any("norm" in name for name in moved))
    critic = weights_of(run_dir / "checkpoint-1/critic")
    assert critic["score.weight"].any() and not any("lora" in name for name in critic)
    engine = run_dir / "checkpoint-1/state/actor"
    state = torch.load(engine / "mp_rank_00_model_states.pt", weights_only=False)
    assert any("visual" in name for name in state["module"]) == moving, "frozen weights are not saved"


def test_a_critic_from_a_classifier_of_transformers_has_one_label(tiny_text_model, tmp_path, refused):
    for num_labels in (1, 2):
        config = transformers.AutoConfig.from_pretrained(tiny_text_model, num_labels=num_labels)
        classifier = transformers.AutoModelForSequenceClassification.from_config(config)
        folder = shutil.copytree(tiny_text_model, tmp_path / str(num_labels))
        classifier.save_pretrained(folder)
        args = filled(model=tiny_text_model, critic_model=str(folder))
        if num_labels == 1:
            critic = ppo_vl.load_critic(args)
            assert torch.equal(critic.value_head.weight, classifier.score.weight)
            assert largest_difference(critic.model.state_dict(), classifier.model.state_dict()) == 0
        else:
            with refused("error: --critic-model", "has a head of shape [2, 32]"):
                ppo_vl.load_critic(args)
    classifier.model.config.reward_head = "score.safetensors"  # of reward_bt.py, but the file is missing
    classifier.model.save_pretrained(folder)
    with refused("lacks score.safetensors, its head"):
        ppo_vl.load_critic(args)


def test_the_critic_has_the_vocabulary_of_the_policy(run, tiny_text_model, tmp_path, refused):
    """No special token and no placeholder of media may have another id; further tokens are allowed."""
    with refused("does not have the vocabulary of --model"):
        run(**ONE_UPDATE, critic_model=tiny_text_model)
    source = Path(shutil.copytree(TINY, tmp_path / "critic"))
    check = lambda: ppo_vl.check_vocabulary(ppo_vl.Args(critic_model=str(source)))  # noqa: E731
    config = transformers.AutoConfig.from_pretrained(source)
    config.image_token_id = 3
    config.save_pretrained(source)
    with refused("its config has the media tokens"):
        check()
    shutil.copy(f"{TINY}/config.json", source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["one more"])
    tokenizer.save_pretrained(source)
    check()
    path = source / "tokenizer.json"
    text = path.read_text()
    for old, new in (("im_start|>", "x|>"), ("im_end|>", "im_start|>"), ("x|>", "im_end|>")):
        text = text.replace(old, new)
    path.write_text(text)
    with refused("2 tokens have other ids", "<|im_end|>"):
        check()


def test_heads_that_would_be_ignored_are_refused(tmp_path, monkeypatch, refused):
    """Such as weights in .bin files, or heads with other names."""
    head = {"score.weight": torch.randn(1, 8)}
    save_file(head, tmp_path / "score.safetensors")
    assert torch.equal(ppo_vl.load_value_head(str(tmp_path)), head["score.weight"])
    monkeypatch.setattr(ppo_vl.huggingface_hub, "snapshot_download", lambda *_, **options: str(tmp_path))
    assert torch.equal(ppo_vl.load_value_head("someone/a-reward-model"), head["score.weight"])
    save_file({"model.weight": torch.ones(1)}, tmp_path / "score.safetensors")
    assert ppo_vl.load_value_head(str(tmp_path)) is None
    for name in ("v_head.summary.weight", "score.0.weight", "rm_head.weight"):
        save_file({name: torch.ones(1)}, tmp_path / "score.safetensors")
        with refused(f"has the head {name}"):
            ppo_vl.load_value_head(str(tmp_path))
    (tmp_path / "score.safetensors").unlink()
    torch.save(head, tmp_path / "pytorch_model.bin")
    with refused("has no safetensors files"):
        ppo_vl.load_value_head(str(tmp_path))


def test_packing_of_the_critic_is_checked(run, monkeypatch, capsys, watch_steps):
    """A critic whose packed values are wrong makes both models run padded, although its new head is 0."""
    forward = packing.forward_hidden

    def wrong(model, pack, *args, **kwargs):
        hidden = forward(model, pack, *args, **kwargs)
        is_policy = model.can_generate()
        return hidden if is_policy or not packing.is_packed(model) else hidden.flip(-1)

    monkeypatch.setattr(packing, "forward_hidden", wrong)
    monkeypatch.setattr(conftest, "CHECKED", {})
    run(**ONE_UPDATE)
    out = capsys.readouterr().out
    assert "policy: packing enabled" in out and "critic: warning: batches are padded" in out
    run = watch_steps()[0].run
    networks = run.actor.module, run.critic.module, run.reference
    assert not any(packing.is_packed(network.model) for network in networks)


ECHO = """
class Echo:
    def reset(self, **row):
        self.turns = 0
    def step(self, response):
        self.turns += 1
        return f"turn {self.turns}: {response}" if self.turns < 3 else None
"""


def test_observations_are_neither_valued_nor_trained(run, tmp_path, spy, watch_steps, refused):
    """Values are a reward model's head on hidden states of the unmodified model."""
    (tmp_path / "echo.py").write_text(ECHO)
    dataset = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"what is {i}?"} for i in range(8)])
    critic_model = tmp_path / "critic"
    shutil.copytree(TINY, critic_model)
    head = torch.randn(1, transformers.AutoConfig.from_pretrained(TINY).get_text_config().hidden_size)
    save_file({"score.weight": head}, critic_model / "score.safetensors")
    policy_calls, value_calls = (spy(ppo_vl, f"compute_{name}_loss") for name in ("policy", "value"))
    flags = {"environment": f"{tmp_path}/echo.py:Echo", "max_turns": 3, "max_response_length": 96}
    flags |= {"kl_coef": 0.1, "critic_learning_rate": 0.0}
    run_dir = run(**ONE_UPDATE | flags, dataset=dataset, critic_model=str(critic_model))
    (metrics,), (step,) = metrics_of(run_dir), watch_steps()
    rollout = step.rollout
    mask, lengths = rollout.response_mask, torch.tensor([*map(len, rollout.continuations)])
    is_observation = ~mask & (torch.arange(mask.shape[1]) < lengths[:, None])
    assert is_observation.any(1).sum() > 8
    assert mask[torch.arange(16), lengths - 1].all()  # a trajectory ends with a token of the model
    for table in (step.values, step.advantages, step.returns):
        assert not table[~mask].any() and table[mask].any()
    for calls, name in ((policy_calls, "new_logprobs"), (value_calls, "new_values")):
        assert sum(len(call[name]) for _, call, _ in calls) == mask.sum()
    assert metrics["sampling/logprob_diff_mean"] < 1e-5
    assert metrics["policy/entropy"] == pytest.approx(step.entropies[mask].mean().item())
    # The KL is 0 in step 1, so a trajectory's only reward is its score, once, at the last token.
    assert_close(step.rewards.sum(1), rollout.scores.flatten(), atol=1e-5, rtol=0)
    assert metrics["rollout/response_length_mean"] == pytest.approx(mask.sum(1).float().mean().item())
    backbone = ppo_vl.load_model(filled(), TINY).base_model.eval()
    for b in range(0, 16, 5):
        prompt = step.run.train_data.encode(rollout.prompts[b // 4].row_id)
        sequence = packing.extend_prompt(prompt, rollout.continuations[b])
        with torch.no_grad():
            hidden = backbone(**sequence.inputs).last_hidden_state[0, prompt.length - 1 : -1]  # (R, H)
        assert_close(step.values[b, mask[b]], hidden[mask[b, : len(hidden)]] @ head[0], atol=1e-4, rtol=1e-4)
    again = ppo_vl.load_critic(filled(critic_model=str(run_dir / "checkpoint-1/critic"))).state_dict()
    critic = step.run.critic.module.state_dict()
    assert largest_difference(again, critic) == 0
    (run_dir / "checkpoint-1/critic/score.safetensors").unlink()
    with refused("lacks score.safetensors, its head"):
        ppo_vl.load_critic(filled(critic_model=str(run_dir / "checkpoint-1/critic")))

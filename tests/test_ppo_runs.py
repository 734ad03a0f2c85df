"""Short runs of ppo_vl: options, chats beside, videos, ranks and ZeRO stages."""

import math
import shutil
from pathlib import Path

import conftest
import pytest
import torch
import transformers
from conftest import SHORT, TINY, assert_same_run, largest_difference, read_jsonl, tensorboard_of, write_jsonl
from conftest import weights_of as weights_in
from safetensors.torch import save_file
from test_families import folder_of, write_video  # noqa: F401
from torch.testing import assert_close

import ppo_vl
from common import packing
from common.kl import kl_estimate, next_kl_coef

ONE_UPDATE = {"total_steps": 1, "train_batch_size": 16, "num_ppo_epochs": 1, "warmup_steps": 0}
AUTO = {("auto", "gae"), ("auto", "reinforce"), ("auto", "reinforce_baseline")}  # whitened
slow = pytest.mark.slow


@pytest.fixture
def run(run, any_score):
    return lambda **flags: run("ppo_vl", **any_score | {"eval_dataset": None} | flags)


def metrics_of(folder: Path) -> list[dict]:
    """Of the training steps."""
    return [metrics for metrics in conftest.metrics_of(folder) if metrics["train/step"]]


def weights_of(folder: Path, step: int, part: str = "") -> dict[str, torch.Tensor]:
    return weights_in(folder / f"checkpoint-{step}" / part)


def spy(monkeypatch, name: str) -> list[tuple]:
    """-> the arguments of each call of a function of ppo_vl, which is called as ever."""
    calls, original = [], getattr(ppo_vl, name)

    def call(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(ppo_vl, name, call)
    return calls


START = weights_in(Path(TINY))


# --- a run ---


def test_a_run_leaves_metrics_samples_and_a_model(run, vqa, any_score):
    folder = run(
        eval_dataset=vqa, save_steps=1, save_total_limit=1, track="tensorboard",
        rewards=("accuracy", "format", "overlong", *any_score["rewards"]),
        reward_weights=(0.1, 0.1, 0.1, 1.0), total_steps=3,
    )  # fmt: skip
    metrics = metrics_of(folder)
    assert [(m["train/step"], m["train/episode"]) for m in metrics] == [(1, 16), (2, 32), (3, 48)]
    keys = "objective/scores reward/overlong reward/score policy/approx_kl loss/policy loss/value time/total"
    keys += " val/clipfrac val/explained_variance train/grad_norm train/critic_grad_norm train/kl_coef"
    assert all({*keys.split()} <= m.keys() for m in metrics)
    assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert "eval/sampled_score" in metrics[-1] and "eval/sampled_score" not in metrics[0]
    phases = {sample["phase"] for sample in read_jsonl(folder / "samples.jsonl")}
    assert phases == {"train", "eval_greedy", "eval_sampled"}
    steps, texts = tensorboard_of(folder)
    assert steps == [0, 1, 2, 3] and len([*folder.glob("events*")]) == 1
    assert [[*texts[f"samples/{phase}"]] for phase in sorted(phases)] == [[0, 3], [0, 3], [3]]
    assert [path.name for path in folder.glob("checkpoint*")] == ["checkpoint-3"]
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "checkpoint-3")
    start = transformers.AutoModelForImageTextToText.from_pretrained(TINY).state_dict()
    assert any(not torch.equal(x, start[name]) for name, x in model.state_dict().items())
    transformers.AutoProcessor.from_pretrained(folder / "checkpoint-3")


@slow
@pytest.mark.timeout(1800)
def test_the_default_run_learns(start, tmp_path):
    defaults = {name: getattr(ppo_vl.Args(), name) for name in SHORT if name != "run_name"}
    flags = defaults | {"total_steps": 10, "eval_samples": 60, "dataset": "easy-vqa", "eval_dataset": None}
    assert start("ppo_vl", **flags).wait() == 0
    before, *steps = read_jsonl(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert steps[-1]["eval/sampled_score"] > before["eval/sampled_score"] + 0.4
    assert steps[-1]["eval/greedy_score"] > before["eval/greedy_score"] + 0.5
    assert max(step["val/explained_variance"] for step in steps) > 0.2  # while there is variance


WRONG = [{"train_batch_size": 32}, {"train_batch_size": 6}]  # the first: more than a rollout
WRONG += [{"num_samples_per_prompt": 1, "advantage": "rloo"}, {"freezing_actor_steps": 2}]
WRONG += [{"critic_share_backbone": True, "advantage": "rloo"}, {"offload_optimizer": True}]
WRONG += [{"critic_share_backbone": True, "freezing_actor_steps": 1}, {"micro_batch_tokens": 100}]


@pytest.mark.parametrize("flags", [*WRONG, {"reward_weights": (1.0, 2.0)}, {"freeze": "no such name"}])
def test_flags_that_contradict_each_other_are_refused(run, flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(**flags)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: --") and error.count("\n") == 1


# --- options ---


def test_the_actor_stands_still_while_the_critic_learns_alone(run):
    folder = run(freezing_actor_steps=1, save_steps=1)
    first, second = metrics_of(folder)
    assert not {"train/grad_norm", "policy/ratio"} & first.keys() and first["train/critic_grad_norm"] > 0
    assert second["train/grad_norm"] > 0 and largest_difference(weights_of(folder, 1), START) == 0
    assert largest_difference(weights_of(folder, 2), START) > 0


@pytest.mark.parametrize("flags, moving", [({"freeze": "visual"}, 0), ({"lora_rank": 2}, 0), ({}, 1)])
def test_frozen_parts_stay_and_the_others_move(run, flags, moving):
    folder = run(**ONE_UPDATE, **flags)
    start, end = START, weights_of(folder, 1)
    moved = {name for name, x in end.items() if not torch.equal(x, start[name])}
    assert end.keys() == start.keys()  # adapters are merged
    assert any("q_proj" in name for name in moved) and any("visual" in name for name in moved) == moving
    assert ("lora_rank" in flags) == (not any("norm" in name for name in moved))


@pytest.mark.slow
def test_a_reference_is_loaded_only_for_a_kl(run, monkeypatch):
    loads = spy(monkeypatch, "load_model")
    assert "loss/kl" not in metrics_of(run(**ONE_UPDATE, kl_coef=0.0))[0] and len(loads) == 2
    run(**ONE_UPDATE, run_name="rloo", advantage="rloo")
    assert len(loads) == 4
    run(**ONE_UPDATE, run_name="lora", lora_rank=2, advantage="rloo")  # its reference: without adapters
    assert len(loads) == 5


@pytest.mark.slow
def test_the_coefficient_of_the_kl_adapts(run):
    metrics = metrics_of(run(total_steps=3, kl_target=0.001, kl_horizon=100, kl_coef=0.1))
    assert metrics[0]["train/kl_coef"] == 0.1
    for before, after in zip(metrics, metrics[1:]):
        expected = next_kl_coef(before["train/kl_coef"], before["objective/kl"], 0.001, 100, 16)
        assert after["train/kl_coef"] == pytest.approx(expected) != before["train/kl_coef"]


def test_critic_from_a_reward_model_takes_its_head(run, tmp_path, monkeypatch):
    folder = tmp_path / "reward_model"
    shutil.copytree(TINY, folder)
    head = torch.randn(1, transformers.AutoConfig.from_pretrained(TINY).get_text_config().hidden_size)
    save_file({"score.weight": head}, folder / "score.safetensors")
    steps = spy(monkeypatch, "add_logprobs_and_values")
    run(**ONE_UPDATE, critic_model=str(folder), vf_coef=0.0)
    _, inside, rollout = steps[0]
    assert torch.equal(inside.critic.module.value_head.weight, head)
    base = ppo_vl.load_model(TINY, torch.float32).base_model.eval()
    for b in (0, 5, 15):  # values are the head on the last hidden states, of the unmodified model too
        prompt = inside.train_data.encode(rollout.prompts[b // 4].index)
        pack = packing.plain_pack([(0, [b])], {0: prompt}, rollout.response_ids)
        with torch.no_grad():
            values = packing.forward_hidden(base, pack) @ head[0]
        assert_close(rollout.values[b, : len(values)], values, atol=1e-4, rtol=1e-4)


def test_a_value_head_on_the_backbone_of_the_actor(run, monkeypatch):
    steps = spy(monkeypatch, "add_logprobs_and_values")
    metrics = metrics_of(run(critic_share_backbone=True, learning_rate=1e-3, warmup_steps=0))
    assert "train/critic_grad_norm" not in metrics[0] and metrics[1]["loss/value"] > 0
    first, second = (rollout.values for _, _, rollout in steps)
    assert not first.any() and second.any()  # it starts at 0, and learns
    inside = steps[0][1]
    assert inside.critic is None and inside.actor.module.value_head.weight.any()


@pytest.mark.slow
def test_prompts_whose_responses_score_alike_are_replaced(run, tmp_path, vqa_rows, monkeypatch):
    code = "def score(completion_ids, answer, **columns):\n"
    code += "    return [sum(ids) % 7 / 7 * (len(a) > 3) for ids, a in zip(completion_ids, answer)]\n"
    (tmp_path / "some.py").write_text(code)
    steps = spy(monkeypatch, "add_logprobs_and_values")
    rows = [row | ({} if i % 5 else {"image": "gone.png"}) for i, row in enumerate(vqa_rows)]
    rows = write_jsonl(tmp_path / "rows.jsonl", rows)  # where a later round may have none that can be used
    folder = run(rewards=(f"{tmp_path}/some.py:score",), dynamic_sampling=30, dataset=rows)
    for (_, _, rollout), metrics in zip(steps, metrics_of(folder)):
        trained = rollout.trained
        assert trained.all(1).sum() == 4 and len(trained) > 4  # groups
        spread = rollout.scores.amax(1) > rollout.scores.amin(1)
        assert torch.equal(trained.any(1), spread) and metrics["rollout/zero_std_groups_frac"] > 0
    dropped = sum(4 * metrics["rollout/prompts_dropped"] for metrics in metrics_of(folder))
    assert metrics["train/episode"] == sum(rollout.trained.numel() for _, _, rollout in steps) + dropped


def test_the_newest_responses_and_whole_ones_are_trained_on(run, monkeypatch):
    steps = spy(monkeypatch, "add_logprobs_and_values")
    run(**ONE_UPDATE, replay_limit=9)
    assert steps[0][2].trained.any(1).tolist() == [False, False, True, True]
    run(**ONE_UPDATE, run_name="masked", mask_truncated=True, max_response_length=3)
    rollout = steps[1][2]
    assert torch.equal(rollout.trained, ~rollout.truncated) and 0 < rollout.trained.sum() < 16
    assert not rollout.advantages[rollout.truncated.flatten()].any()


@pytest.mark.parametrize(
    "flags",
    [
        {"advantage_clip": 0.5},
        {"advantage": "rloo", "kl_coef": 1.0},
        {"advantage": "group_norm", "whiten_advantages": "on", "reward_clip": (0.3, 0.6)},
        {"advantage": "reinforce", "kl_loss": True, "kl_estimator": "k2", "gamma": 0.9},
        {"reward_running_norm": "standardize", "whiten_advantages": "off", "gae_lambda": 0.5},
    ],
)
def test_advantages_are_those_of_the_flags(run, monkeypatch, flags):
    """Whitened at most once, and where their estimator is; the KL in the rewards or in the loss."""
    steps = spy(monkeypatch, "add_logprobs_and_values")
    run(learning_rate=1e-3, warmup_steps=0, **flags)
    args, _, rollout = steps[1]  # with a KL, and values
    mask, scores = rollout.mask, rollout.scores
    if args.reward_running_norm != "off":
        both = torch.cat([steps[0][2].scores, scores])
        scores = (scores - both.mean()) / both.std(correction=0)
    scores = scores.clamp(*args.reward_clip) if args.reward_clip else scores
    scores = ppo_vl.center_scores(scores, torch.ones(4, 4).bool(), args.advantage).flatten()
    kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, args.kl_estimator)
    assert kl[mask].abs().max() > 1e-3
    rewards = ppo_vl.compute_token_rewards(scores, kl, mask, 0.0 if args.kl_loss else args.kl_coef)
    critic = args.advantage == "gae"
    assert rollout.values.any() == critic
    gae_lambda = args.gae_lambda if critic else 1.0
    expected, returns = ppo_vl.compute_gae(rewards, rollout.values, mask, args.gamma, gae_lambda)
    assert_close(rollout.returns, returns, atol=1e-5, rtol=1e-4)
    if args.whiten_advantages == "on" or (args.whiten_advantages, args.advantage) in AUTO:
        expected = (expected - expected[mask].mean()) / expected[mask].std(correction=0) * mask
    bound = args.advantage_clip or math.inf
    assert_close(rollout.advantages, expected.clamp(-bound, bound), atol=1e-5, rtol=1e-4)


def test_tokens_of_high_entropy_and_other_losses(run, monkeypatch):
    steps = spy(monkeypatch, "add_logprobs_and_values")
    folder = run(
        entropy_token_ratio=0.25, entropy_coef=0.01, advantage="group_norm", policy_loss="gspo", tis_clip=1.5,
        loss_agg="seq-mean-token-mean", kl_loss=True, kl_estimator="k3", advantage_clip=1.0,
        reward_clip=(0.3, 0.6),
    )  # fmt: skip
    rollout = steps[0][2]
    scores = rollout.scores.clamp(0.3, 0.6)  # what is maximised: the KL is 0 at step 1
    assert metrics_of(folder)[0]["objective/rlhf_reward"] == pytest.approx(scores.mean().item(), abs=1e-5)
    mask, policy_mask, entropy = rollout.mask, rollout.policy_mask, rollout.entropy
    assert 0.25 * mask.sum() - 0.5 <= policy_mask.sum() < 0.4 * mask.sum()  # ties are in
    assert entropy[policy_mask].min() >= entropy[mask & ~policy_mask].max()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"micro_batch_tokens": 540}, {"gradient_checkpointing": True}])
def test_neither_packs_nor_memory_flags_change_the_result(run, flags):
    """Denominators are those of the whole optimizer step, however it is split."""
    one, other = run(total_steps=1), run(total_steps=1, run_name="other", **flags)
    assert_same_run(one, other, 2e-4, of_weights=2e-5)


# --- chats beside, average, experts, text ---


def ptx_file(folder: Path) -> str:
    turns = conftest.chat("what is 1 + 1?", "two", "and 2 + 2?", "four <|im_end|>")
    chats = turns, turns[:2], [{"role": "system", "content": "be"}, *turns[:2]]
    return write_jsonl(folder / "ptx.jsonl", [{"messages": own} for own in chats])


def test_every_assistant_turn_is_learned(run, tmp_path, vqa_rows):
    args = ppo_vl.Args(ptx_dataset=ptx_file(tmp_path), system_prompt="Speak.")
    processor = transformers.AutoProcessor.from_pretrained(TINY)
    model = ppo_vl.load_model(TINY, torch.float32).eval()
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = ppo_vl.load_turns(args, model, processor, [end])
    found = [turns.encode(i) for i in range(4)]
    texts = [processor.decode(turn.target_ids) for turn in found]
    assert texts == ["two<|im_end|>", "four < |im_end|><|im_end|>", "two<|im_end|>", "two<|im_end|>"]
    prompts = [processor.decode(turn.prompt.ids) for turn in found]
    assert [prompt.count("two") for prompt in prompts] == [0, 1, 0, 0]
    assert "Speak." in prompts[0] and "Speak." not in prompts[3]
    chats = [conftest.chat(row["prompt"], row["answer"]) for row in vqa_rows[:4]]
    rows = [{"messages": own, "image": row["image"]} for own, row in zip(chats, vqa_rows)]
    args.ptx_dataset = write_jsonl(tmp_path / "pictures.jsonl", rows)
    turns = ppo_vl.load_turns(args, model, processor, [end])
    found = [turns.encode(i) for i in range(4)]
    assert all(len(turn.prompt.media["image"]) == 1 for turn in found)
    flags = ONE_UPDATE | {"ptx_dataset": args.ptx_dataset, "ptx_batch_size": 4, "system_prompt": "Speak."}
    metrics = metrics_of(run(**flags))
    packs = [packing.plain_pack([(0, [0])], {0: turn.prompt}, [turn.target_ids]) for turn in found]
    with torch.no_grad():  # the mean over tokens of the unmodified model
        logprobs = torch.cat([packing.response_logprobs(model, pack)[0] for pack in packs])
    assert metrics[0]["loss/ptx"] == pytest.approx(-logprobs.mean().item(), abs=1e-5)


@pytest.mark.slow
def test_gradient_with_ptx_is_the_sum_of_both_parts(run, tmp_path, monkeypatch):
    """Without updates; the policy's part alone, both, and chats alone."""
    found = []

    def keep(engine):
        parameters = engine.module.parameters()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])
        engine.zero_grad()
        return 1.0

    monkeypatch.setattr(ppo_vl, "optimizer_step", keep)
    flags = ONE_UPDATE | {"advantage": "reinforce", "ptx_dataset": ptx_file(tmp_path), "ptx_batch_size": 4}
    run(**flags, ptx_coef=0.0)
    run(**flags, ptx_coef=0.5, run_name="both")
    run(**flags, ptx_coef=0.5, advantage_clip=1e-9, run_name="ptx")
    for policy, both, ptx in zip(*found):
        assert_close(both, policy + ptx, atol=1e-5, rtol=1e-4)
    assert any(x.any() for x in found[0]) and any(x.any() for x in found[2])


def test_average_is_halfway_after_an_update_with_beta_one_half(run):
    folder = run(**ONE_UPDATE, ema_beta=0.5)
    start, end = START, weights_of(folder, 1)
    average = weights_of(folder, 1, "state/ema")
    for name, x in average.items():
        assert_close(x.float(), (start[name].float() + end[name].float()) / 2)
    transformers.AutoModelForImageTextToText.from_pretrained(folder / "checkpoint-1" / "state" / "ema")


def test_load_of_the_experts_is_balanced(run, tmp_path, tiny_text_model):
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    start = transformers.AutoConfig.from_pretrained(tiny_text_model)
    ids = {"vocab_size": start.vocab_size, "eos_token_id": start.eos_token_id, "pad_token_id": None}
    config = transformers.MixtralConfig(**size, **ids, num_key_value_heads=2, num_local_experts=4)
    torch.manual_seed(0)
    shutil.copytree(tiny_text_model, tmp_path / "moe")
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "moe")
    data = write_jsonl(tmp_path / "sums.jsonl", [{"prompt": f"{i} + {i}?"} for i in range(12)])
    flags = ONE_UPDATE | {"model": str(tmp_path / "moe"), "dataset": data}
    metrics = metrics_of(run(**flags, router_aux_coef=0.1, learning_rate=1e-2))
    plain = metrics_of(run(**flags, run_name="plain", learning_rate=1e-2))
    assert 2 <= metrics[0]["loss/router"] < 4 and "loss/router" not in plain[0]
    assert metrics[0]["train/grad_norm"] != plain[0]["train/grad_norm"] and plain[0]["loss/value"] > 0


# --- videos, pictures and text ---


@pytest.fixture
def mixed(tmp_path, vqa_rows) -> str:
    """Text, a picture, two pictures in their places, a video, a video with a picture."""
    pictures = [row["image"] for row in vqa_rows[:4]]
    write_video(tmp_path / "ball.mp4")
    rows = [("say circle", [], []), ("what is it?", pictures[:1], [])]
    rows += [("is <image> as <image>?", pictures[1:3], []), ("where is the ball?", [], ["ball.mp4"])]
    rows += [("<video> and <image>?", pictures[3:], ["ball.mp4"])]
    rows = [dict(zip(("prompt", "images", "videos"), row)) for row in rows]
    return write_jsonl(tmp_path / "mixed.jsonl", rows * 2)


OTHERS = [pytest.param(family, marks=slow) for family in ("qwen2_vl", "qwen3_vl")]


@pytest.mark.parametrize("family", ["qwen2_5_vl", *OTHERS])
def test_videos_pictures_and_text_in_one_batch_are_as_one_by_one(run, mixed, folder_of, monkeypatch, family):  # noqa: F811
    """As the sampler's are: that those are the unmodified model's is in test_families.py."""
    folder = TINY if family == "qwen2_5_vl" else str(folder_of(family))
    steps, told = spy(monkeypatch, "add_logprobs_and_values"), spy(monkeypatch, "tell")
    flags = ONE_UPDATE | {"rollout_batch_size": 40, "train_batch_size": 40, "kl_coef": 0.0}
    metrics = metrics_of(run(model=folder, dataset=mixed, **flags))
    assert any(line.startswith("packed") for (line,) in told) and metrics[0]["train/grad_norm"] > 0
    assert {prompt.index for prompt in steps[0][2].prompts} == {*range(10)}
    assert metrics[0]["rollout/engine_logprob_diff_max"] < 1e-4


# --- ranks and stages ---


@slow
@pytest.mark.parametrize("lora", [0, 2])
def test_ranks_and_stages_have_the_same_metrics_and_weights(start, any_score, mixed, tmp_path, lora):
    own = {"dataset": mixed, "eval_dataset": None, "rollout_batch_size": 20, "train_batch_size": 20}
    own |= {"ptx_dataset": ptx_file(tmp_path), "ptx_batch_size": 3, "ema_beta": 0.9, "lora_rank": lora}
    flags = any_score | own | {"learning_rate": 1e-5, "critic_learning_rate": 1e-5}
    assert start("ppo_vl", **flags).wait() == 0
    offloaded = {"zero_stage": 3, "offload_optimizer": True}
    plans = [(2, {}), (2, {"zero_stage": 2}), (2, {"zero_stage": 3}), (1, offloaded)]
    plans = [(2, offloaded), (1, {"zero_stage": 2})] if lora else plans
    for i, (ranks, more) in enumerate(plans):
        assert start("ppo_vl", ranks, **flags | more | {"run_name": f"other{i}"}).wait() == 0
        one, other = tmp_path / "runs/run", tmp_path / f"runs/other{i}"
        assert_same_run(one, other, 2e-4, of_weights=2e-5)

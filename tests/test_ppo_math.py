"""The pure functions of ppo_vl against values worked out by hand, the examples of their docstrings among them."""

import asyncio
import inspect
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import tensor
from torch.testing import assert_close

import ppo_vl
from common.kl import kl_estimate, next_kl_coef

ONES = torch.ones


# --- token rewards ---------------------------------------------------------------------------------------------------


def test_token_rewards_docstring_example():
    mask = tensor([[1, 1, 0], [1, 1, 1]]).bool()
    rewards = ppo_vl.compute_token_rewards(tensor([1.0, 2.0]), torch.full((2, 3), 0.1), mask, 1.0)
    assert_close(rewards, tensor([[-0.1, 0.9, 0.0], [-0.1, -0.1, 1.9]]))


def test_score_lands_on_the_last_token_only_and_padding_stays_zero():
    mask = tensor([[1, 0, 0, 0]]).bool()
    rewards = ppo_vl.compute_token_rewards(tensor([3.0]), torch.full((1, 4), 9.0), mask, 0.0)
    assert rewards.tolist() == [[3.0, 0.0, 0.0, 0.0]]


# --- GAE -------------------------------------------------------------------------------------------------------------


def test_gae_docstring_example():
    rewards, values, mask = tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5), ONES(1, 3)
    advantages, returns = ppo_vl.compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=0.5)
    assert advantages.tolist() == [[0.125, 0.25, 0.5]]
    assert returns.tolist() == [[0.625, 0.75, 1.0]]


def test_gae_with_discount():
    # delta = [1 + .9*3 - 2, 2 + .9*4 - 3, 3 - 4] = [1.7, 2.6, -1];   A_t = delta_t + .9*.5*A_{t+1}
    rewards, values = tensor([[1.0, 2.0, 3.0]]), tensor([[2.0, 3.0, 4.0]])
    advantages, returns = ppo_vl.compute_gae(rewards, values, ONES(1, 3), gamma=0.9, gae_lambda=0.5)
    assert_close(advantages, tensor([[1.7 + 0.45 * 2.15, 2.6 - 0.45, -1.0]]))
    assert_close(returns, advantages + values)


def test_gae_lambda_1_gamma_1_is_reward_to_go_minus_value():
    rewards, values = torch.randn(4, 7), torch.randn(4, 7)
    advantages, returns = ppo_vl.compute_gae(rewards, values, ONES(4, 7), 1.0, 1.0)
    reward_to_go = rewards.flip(1).cumsum(1).flip(1)
    assert_close(returns, reward_to_go)
    assert_close(advantages, reward_to_go - values)


def test_gae_lambda_0_is_the_one_step_error():
    rewards, values = torch.randn(4, 7), torch.randn(4, 7)
    advantages, _ = ppo_vl.compute_gae(rewards, values, ONES(4, 7), 0.9, 0.0)
    next_values = torch.cat([values[:, 1:], torch.zeros(4, 1)], dim=1)
    assert_close(advantages, rewards + 0.9 * next_values - values)


def test_gae_of_a_short_row_does_not_see_its_padding():
    rewards, values, mask = torch.randn(2, 5), torch.randn(2, 5), tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    advantages, returns = ppo_vl.compute_gae(rewards, values, mask, 0.9, 0.8)
    alone, _ = ppo_vl.compute_gae(rewards[:1, :3], values[:1, :3], ONES(1, 3), 0.9, 0.8)
    assert_close(advantages[:1, :3], alone)
    assert not advantages[0, 3:].any() and not returns[0, 3:].any()


# --- whitening -------------------------------------------------------------------------------------------------------


def test_whiten_is_over_all_masked_entries_at_once():
    x, mask = tensor([[1.0, 2.0, 99.0], [3.0, 6.0, -99.0]]), tensor([[1, 1, 0], [1, 1, 0]])
    # mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
    expected = tensor([[-2.0, -1.0, 0.0], [0.0, 3.0, 0.0]]) / math.sqrt(3.5)
    assert_close(ppo_vl.whiten(x, mask), expected)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7, 1e6])
@pytest.mark.parametrize("count", [1, 8, 12, 1000])
def test_equal_advantages_whiten_to_exactly_zero(value, count):
    assert not ppo_vl.whiten(torch.full((count, 3), value), ONES(count, 3)).any()


def test_equal_rewards_end_in_advantages_of_exactly_zero():
    mask = ONES(8, 1)
    rewards = ppo_vl.compute_token_rewards(torch.full((8,), 0.1), torch.zeros(8, 1), mask, 0.01)
    advantages, _ = ppo_vl.compute_gae(rewards, torch.zeros(8, 1), mask, 1.0, 0.95)
    assert not ppo_vl.whiten(advantages, mask).any()


def test_whiten_of_nothing_is_nothing():
    assert ppo_vl.whiten(tensor([[5.0]]), tensor([[0]])).tolist() == [[0.0]]


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ratio, advantage, loss, clipped",
    [
        (1.5, 1.0, -1.2, 1.0),  # gained too much already: no gradient
        (1.5, -1.0, 1.5, 0.0),  # went the wrong way: full gradient back
        (0.5, 1.0, -0.5, 0.0),
        (0.5, -1.0, 0.8, 1.0),
        (1.1, 2.0, -2.2, 0.0),
        (1.0, -3.0, 3.0, 0.0),
    ],
)
def test_policy_loss_clips_on_both_sides(ratio, advantage, loss, clipped):
    new = tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    losses, metrics = ppo_vl.compute_policy_loss(
        new, torch.zeros(1), tensor([advantage]), torch.zeros(1, dtype=torch.long), "clip", 0.2, 0.2, 3.0
    )
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert metrics["policy/clipfrac_low"].item() + metrics["policy/clipfrac_high"].item() == clipped
    assert metrics["policy/ratio"].item() == pytest.approx(ratio)
    assert metrics["policy/approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio))
    assert new.grad.item() == pytest.approx(0.0 if clipped else -advantage * ratio)


@pytest.mark.parametrize(
    "new, old, target, clip, loss, clipped",
    [
        (1.0, 0.0, 2.0, 0.2, 3.24, 1.0),  # the docstring's example
        (1.0, 0.0, 2.0, 0.0, 1.0, 0.0),  # off
        (-1.0, 0.0, 2.0, 0.2, 9.0, 0.0),  # moved away: the larger, unclipped error stays
        (0.1, 0.0, 2.0, 0.2, 3.61, 0.0),  # within reach
        (-1.0, 0.0, -2.0, 0.2, 3.24, 1.0),
    ],
)
def test_value_loss(new, old, target, clip, loss, clipped):
    losses, metrics = ppo_vl.compute_value_loss(tensor([new]), tensor([old]), tensor([target]), clip)
    assert losses.item() == pytest.approx(loss)
    assert metrics["val/clipfrac"].item() == clipped


def test_explained_variance():
    returns, mask = tensor([[1.0, 2.0, 3.0, 50.0]]), tensor([[1, 1, 1, 0]])
    assert ppo_vl.explained_variance(returns, returns, mask) == 1.0
    assert ppo_vl.explained_variance(torch.zeros(1, 4), returns, mask) == 0.0
    assert ppo_vl.explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)  # an offset is no variance
    assert ppo_vl.explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert ppo_vl.explained_variance(returns, ONES(1, 4), mask) == 0.0  # returns that do not vary


# --- KL --------------------------------------------------------------------------------------------------------------


def test_kl_estimators_by_hand():
    logprobs, ref = tensor([-1.0, -2.0]), tensor([-1.5, -1.0])  # d = 0.5, -1
    assert kl_estimate(logprobs, ref, "k1").tolist() == [0.5, -1.0]
    assert kl_estimate(logprobs, ref, "k2").tolist() == [0.125, 0.5]
    assert_close(kl_estimate(logprobs, ref, "k3"), tensor([math.exp(-0.5) - 0.5, math.e - 2]))
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(logprobs, ref, "k4")


def test_kl_controller_by_hand():
    assert next_kl_coef(0.1, 9.0, None, 1000, 100) == 0.1
    assert next_kl_coef(0.1, 9.0, 6.0, 1000, 100) == pytest.approx(0.102)  # error clipped to +0.2
    assert next_kl_coef(0.1, 5.4, 6.0, 1000, 100) == pytest.approx(0.1 * (1 - 0.1 * 0.1))
    assert next_kl_coef(0.1, -3.0, 6.0, 1000, 100) == pytest.approx(0.098)  # clipped to -0.2


# --- schedule and order ----------------------------------------------------------------------------------------------


def test_learning_rate_warms_up_then_falls_to_its_floor():
    def factor(step, schedule="cosine"):
        return ppo_vl.learning_rate_factor(step, warmup_steps=4, total_steps=24, schedule=schedule, min_ratio=0.1)

    assert [factor(s) for s in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert factor(4) == 1.0
    assert factor(14) == pytest.approx(0.55)  # half way down
    assert factor(24) == factor(99) == pytest.approx(0.1)
    assert [factor(s, "constant") for s in (0, 4, 24)] == [0.2, 1.0, 1.0]
    assert ppo_vl.learning_rate_factor(0, 0, 10, "cosine", 0.0) == 1.0


@pytest.mark.parametrize("num_rows, batch", [(12, 4), (10, 4), (3, 8)])
def test_batches_walk_through_shuffled_epochs_without_repeats(num_rows, batch):
    stream = [i for step in range(30) for i in ppo_vl.batch_indices(step * batch, batch, num_rows, seed=1)]
    epochs = [stream[i : i + num_rows] for i in range(0, len(stream) - num_rows + 1, num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert len(stream) == 30 * batch
    assert len({tuple(epoch) for epoch in epochs}) > 1, "each epoch has an order of its own"


def test_batches_depend_on_the_seed_alone():
    assert ppo_vl.batch_indices(24, 8, 100, seed=1) == ppo_vl.batch_indices(24, 8, 100, seed=1)
    assert ppo_vl.batch_indices(24, 8, 100, seed=1) != ppo_vl.batch_indices(24, 8, 100, seed=2)


# --- sampler ---------------------------------------------------------------------------------------------------------

PROBS = tensor([[0.5, 0.3, 0.15, 0.05]])


def draw(temperature=1.0, top_p=1.0, n=4000) -> torch.Tensor:
    """Frequencies of n draws from PROBS."""
    generator = torch.Generator().manual_seed(0)
    logprobs = (PROBS.log() / temperature).log_softmax(-1).expand(n, -1)
    tokens = ppo_vl.sample_token(logprobs, temperature, top_p, generator)
    return tokens.bincount(minlength=4) / n


def test_temperature_0_is_greedy():
    assert ppo_vl.sample_token(PROBS.flip(1).log(), 0, 1.0, None).tolist() == [3]


def test_samples_follow_the_tempered_distribution():
    assert_close(draw(), PROBS[0], atol=0.03, rtol=0)
    assert_close(draw(temperature=0.5), PROBS[0] ** 2 / (PROBS**2).sum(), atol=0.03, rtol=0)


@pytest.mark.parametrize("top_p, kept", [(0.4, 1), (0.6, 2), (0.9, 3), (0.99, 4)])
def test_top_p_keeps_up_to_the_token_that_reaches_it(top_p, kept):
    expected = torch.where(torch.arange(4) < kept, PROBS[0], 0.0)
    assert_close(draw(top_p=top_p), expected / expected.sum(), atol=0.03, rtol=0)


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, answer, accuracy, well_formed",
    [
        ("<answer>circle</answer>", "circle", 1, 1),
        ("<answer> Circle\n</answer>", "circle", 1, 1),
        ("<answer>circle</answer>", " CIRCLE ", 1, 1),
        ("<answer>3</answer>", 3, 1, 1),
        ("<think>round</think><answer>circle</answer>", "circle", 1, 1),
        (" <think>a\nb</think>\n<answer>circle</answer>\n", "circle", 1, 1),
        ("<answer></answer>", "circle", 0, 1),
        ("<answer>square</answer>", "circle", 0, 1),
        ("<answer>a circle</answer>", "circle", 0, 1),
        ("circle", "circle", 0, 0),
        ("", "circle", 0, 0),
        ("<answer>circle", "circle", 0, 0),
        ("circle</answer>", "circle", 0, 0),
        ("<answer>circle</answer", "circle", 0, 0),
        ("it is <answer>circle</answer>", "circle", 1, 0),
        ("<answer>circle</answer>.", "circle", 1, 0),
        ("<answer>square</answer><answer>circle</answer>", "circle", 1, 0),
        ("<answer>circle</answer><answer>square</answer>", "circle", 0, 0),
        ("<answer>circle</answer><think>a</think>", "circle", 1, 0),
        ("<think>a<answer>circle</answer>", "circle", 1, 0),
        ("<think>a</think><think>b</think><answer>circle</answer>", "circle", 1, 0),
        ("<answer><answer>circle</answer></answer>", "circle", 0, 0),
        ("<ANSWER>circle</ANSWER>", "circle", 0, 0),
    ],
)
def test_accuracy_and_format_rules(text, answer, accuracy, well_formed):
    assert ppo_vl.accuracy_reward([text], answer=[answer]) == [accuracy]
    assert ppo_vl.format_reward([text]) == [well_formed]


RULES = (("accuracy", 0.9, ppo_vl.accuracy_reward), ("format", 0.1, ppo_vl.format_reward))
LOOP = asyncio.new_event_loop()  # as load_rewards makes one
threading.Thread(target=LOOP.run_forever, daemon=True).start()


def score(functions, texts, prompt: str | list = "<answer>a</answer>", timeout=5.0):
    """-> scores, components, what functions logged. functions: (name, weight, function)."""
    row = {"prompt": prompt, "answer": "a", "label": None, "columns": {"level": 3}}
    state = SimpleNamespace(global_step=4, max_steps=9)
    loops = [LOOP if inspect.iscoroutinefunction(function) else None for _, _, function in functions]
    sources = [ppo_vl.Reward(n, {"default": w}, f, loop=loop) for (n, w, f), loop in zip(functions, loops)]
    B = len(texts)
    return ppo_vl.score_responses(sources, [row] * B, texts, [[1]] * B, state, timeout, torch.device("cpu"))


def test_rules_never_see_the_prompt():
    assert score(RULES, ["no tags"])[0].tolist() == [0.0]


def test_scores_are_weighted_sums_and_components_are_not_weighted():
    texts = ["<answer>a</answer>", "<answer>b</answer>", "x <answer>a</answer>", "x"]
    for prompt in ("what?", [{"role": "user", "content": "what?"}]):  # completions are strings, then chats
        scores, components, _ = score(RULES, texts, prompt)
        assert scores.tolist() == pytest.approx([1.0, 0.1, 0.9, 0.0])
        assert components["accuracy"].tolist() == [1, 0, 1, 0] and components["format"].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("chat", [False, True])
def test_reward_functions_get_what_trl_gives_them(chat):
    seen = {}

    def own(completions, log_metric, log_extra, **columns):
        seen.update(columns, completions=completions)
        log_metric("length", 2.0)
        log_metric("length", 4)
        log_extra("first", [text[0] for text in ("x", "y")])
        return [0.0, 0.0]

    prompt = [{"role": "user", "content": "what?"}] if chat else "what?"
    _, _, logged = score([("own", 1.0, own)], ["x", "y"], prompt)
    assert seen["completions"] == ([[{"role": "assistant", "content": t}] for t in "xy"] if chat else ["x", "y"])
    assert seen["prompts"] == [prompt] * 2 and seen["completion_ids"] == [[1], [1]]
    assert seen["level"] == [3, 3] and seen["answer"] == ["a", "a"]
    assert (seen["trainer_state"].global_step, seen["trainer_state"].max_steps) == (4, 9)
    assert logged == {"metrics": {"length": [2.0, 4.0]}, "extra": {"first": ["x", "y"]}}


def test_none_is_left_out_and_all_none_is_nan():
    functions = [("a", 1.0, lambda **_: [1.0, None, None]), ("b", 2.0, lambda **_: [None, 3.0, None])]
    scores, components, _ = score(functions, ["x", "y", "z"])
    assert scores[:2].tolist() == [1.0, 6.0] and math.isnan(scores[2])
    assert np.isnan(components["a"]).tolist() == [False, True, True]


def test_empty_dicts_are_as_none():
    assert np.isnan(score([("own", 1.0, lambda **_: [{}, {}])], ["x", "y"])[0]).all()


def test_dicts_become_named_components():
    values = [{"x": 1, "y": 0.5}, {"x": True, "z": None}, None]
    scores, components, _ = score([("own", 1.0, lambda **_: values)], ["p", "q", "r"])
    assert scores[:2].tolist() == [1.5, 1.0] and math.isnan(scores[2])
    assert components["x"].tolist()[:2] == [1.0, 1.0] and np.isnan(components["y"]).tolist() == [False, True, True]


def test_tensors_and_arrays_are_values_too():
    assert score([("own", 1.0, lambda **_: torch.tensor([1.0, 2.0]))], ["x", "y"])[0].tolist() == [1.0, 2.0]
    assert score([("own", 1.0, lambda **_: np.array([1.0, 2.0]))], ["x", "y"])[0].tolist() == [1.0, 2.0]


def test_asynchronous_functions_run_side_by_side_and_beside_others():
    async def slow(completions, **_):
        await asyncio.sleep(0.4)
        return [1.0] * len(completions)

    def busy(completions, **_):
        time.sleep(0.4)
        return [2.0] * len(completions)

    started = time.time()
    scores, _, _ = score([("a", 1.0, slow), ("b", 10.0, slow), ("c", 100.0, busy)], ["x"])
    assert scores.tolist() == [211.0] and time.time() - started < 0.75


async def hang(**_):
    await asyncio.sleep(60)


@pytest.mark.parametrize("function", [hang, lambda **_: time.sleep(60)])
def test_a_function_that_hangs_is_named_after_the_time_out(function, capfd):
    started = time.time()
    with pytest.raises(SystemExit) as stopped:
        score([("fine", 1.0, lambda **_: [1.0]), ("sleeper", 1.0, function)], ["x"], timeout=0.3)
    assert stopped.value.code == 2 and time.time() - started < 3
    assert "sleeper gave no answer within --reward-timeout 0.3" in capfd.readouterr().err


def test_rules_about_the_form_of_a_response():
    ids = [[], [1] * 5, [1, 2, 3, 4, 5, 6, 7, 8, 9], list(range(10))]
    assert ppo_vl.length_reward(ids, max_length=10) == [0, -0.5, -0.9, -1]
    assert ppo_vl.overlong_reward(ids, max_length=10) == [0, 0, -0.5, -1]  # the last two of ten tokens cost
    repeated = [[1, 2], [1, 2, 3, 4], [1, 2, 1, 2, 1, 2], [7] * 6]
    assert ppo_vl.repetition_reward(repeated) == [0, 0, pytest.approx(-0.5), pytest.approx(-0.75)]


# --- rollout ---------------------------------------------------------------------------------------------------------


def record(responses: list[list[int]], scores: list[float], truncated: list[bool] | None = None) -> dict:
    ids, scores = [torch.tensor(r) for r in responses], np.array(scores)
    engine = {"engine_logprobs": [-r / 10 for r in ids], "truncated": truncated or [False] * len(ids)}
    scored = {"scores": scores, "components": {"own": scores}, "metrics": {}}
    return {"row": 7, "prompt_length": 3, "response_ids": ids, **engine, **scored}


def test_rollout_keeps_every_token():
    """An EOS (= pad) that was drawn stays a trained token, none is invented: masks come from lengths."""
    rollout = ppo_vl.make_rollout([record([[5, 6, 0], [5, 6, 7], [0]], [1, 2, 3])])
    assert [r.tolist() for r in rollout.response_ids] == [[5, 6, 0], [5, 6, 7], [0]]
    assert rollout.response_mask.tolist() == [[True] * 3, [True] * 3, [True, False, False]]
    assert rollout.scores.tolist() == [1, 2, 3]
    assert_close(rollout.engine_logprobs, tensor([[-0.5, -0.6, 0], [-0.5, -0.6, -0.7], [0, 0, 0]]))


def test_masked_truncated_responses_leave_the_rollout_but_not_its_statistics():
    records = [record([[5, 0], [5, 6, 7], [0]], [1, 5, 3], [False, True, False])]
    assert len(ppo_vl.make_rollout(records).response_ids) == 3
    rollout = ppo_vl.make_rollout(records, mask_truncated=True)
    assert rollout.groups == [(0, [0, 1])] and rollout.scores.tolist() == [1, 3]
    metrics = ppo_vl.rollout_metrics(records)
    assert metrics["rollout/truncated_frac"] == pytest.approx(1 / 3) and metrics["objective/scores"] == 3
    assert metrics["rollout/response_length_max"] == 3 and metrics["rollout/zero_std_groups_frac"] == 0


def test_responses_without_reward_are_left_out():
    nan = float("nan")
    records = [record([[1], [2, 0]], [nan, 1.0]), record([[3]], [nan]), record([[4], [5]], [2.0, 3.0])]
    rollout = ppo_vl.make_rollout(records)
    assert rollout.groups == [(0, [0]), (2, [1, 2])]
    assert [r.tolist() for r in rollout.response_ids] == [[2, 0], [4], [5]]
    assert rollout.scores.tolist() == [1.0, 2.0, 3.0]
    assert ppo_vl.rollout_metrics(records)["reward/own"] == 2


def test_a_rollout_without_any_reward_stops_the_run():
    with pytest.raises(SystemExit):
        ppo_vl.make_rollout([record([[1]], [float("nan")])])


def test_a_reward_file_may_define_dataclasses(tmp_path):
    """With annotations as strings, dataclasses look for their module in sys.modules."""
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    body = "@dataclass\nclass Verdict:\n    x: float\n"
    body += "def f(completions, **_):\n    return [Verdict(1.5).x] * len(completions)\n"
    (tmp_path / "r.py").write_text(head + body)
    assert ppo_vl.load_reward_fn(f"{tmp_path}/r.py:f")(completions=["a", "b"]) == [1.5, 1.5]


def test_example_reward_is_scored_as_its_docstring_says():
    function = ppo_vl.load_reward_fn(
        str(Path(ppo_vl.__file__).parent / "examples" / "custom_reward.py") + ":short_and_right"
    )
    values = function(completions=["It is red.", "blue"], completion_ids=[[1, 2], [3]], answer=["red", "red"])
    scores, components, _ = score([("own", 1.0, lambda **_: values)], ["It is red.", "blue"])
    assert scores.tolist() == pytest.approx([1 - 0.02, -0.01])
    assert set(components) == {"mentions_answer", "brevity"}

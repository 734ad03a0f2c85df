"""The pure functions of rloo against slow references in float64, and the examples of their docstrings."""

import math

import numpy as np
import pytest
import torch
from torch import tensor
from torch.testing import assert_close

import rloo


def random_groups(sizes: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards (B,) and group ids (B,) of groups of these sizes, in random order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    ids = ids[torch.randperm(len(ids), generator=generator)]
    return torch.randn(len(ids), generator=generator) * 3 + 1, ids


def slow_leave_one_out(rewards: torch.Tensor, group_ids: torch.Tensor) -> list[float]:
    """By the definition, O(G^2), in Python's floats."""
    rewards, ids, out = rewards.tolist(), group_ids.tolist(), []
    for i, (r, g) in enumerate(zip(rewards, ids)):
        siblings = [rewards[j] for j in range(len(rewards)) if ids[j] == g and j != i]
        out.append(r - sum(siblings) / len(siblings) if siblings else 0.0)
    return out


# --- advantages ------------------------------------------------------------------------------------------------------


def test_advantages_docstring_example():
    rewards, ids = tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.long)
    assert rloo.compute_advantages(rewards, ids, "leave_one_out").tolist() == [-3, -1.5, 4.5]
    assert rloo.compute_advantages(rewards, ids, "group_mean").tolist() == [-2, -1, 3]
    assert rloo.compute_advantages(rewards, ids, "none").tolist() == [1, 2, 6]


@pytest.mark.parametrize("G", range(2, 17))
def test_leave_one_out_is_the_mean_of_the_siblings(G):
    """Whole groups, and groups that lost responses without a reward."""
    for sizes in ([G] * 5, [G, G - 1, max(1, G - 3), 1, G]):
        rewards, ids = random_groups(sizes, seed=G)
        advantages = rloo.compute_advantages(rewards, ids, "leave_one_out")
        assert advantages.dtype == torch.float32
        assert_close(advantages, tensor(slow_leave_one_out(rewards.double(), ids)), atol=1e-6, rtol=1e-6)
        for i, n in enumerate(sizes):
            own, r = advantages[ids == i].double(), rewards[ids == i].double()
            assert own.sum().abs() < 1e-5
            if n > 1:
                assert_close(own, n / (n - 1) * (r - r.mean()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("left_out", [[], [0], [1, 2], [0, 1, 2], [0, 1, 2, 3], [3, 7, 8]])
def test_left_out_rows_are_neither_siblings_nor_trained(left_out):
    """From records with None (NaN) through make_rollout to advantages: as if those responses had never been drawn."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 4, generator=generator, dtype=torch.float64).numpy()
    scores.reshape(-1)[left_out] = math.nan
    records = [record(scores=row) for row in scores]
    rollout = rloo.make_rollout(records)
    advantages = rloo.compute_advantages(rollout.scores, rollout.group_ids, "leave_one_out")
    kept = [i for i in range(12) if i not in left_out]
    ids = tensor([i // 4 for i in kept])
    expected = slow_leave_one_out(tensor(scores.reshape(-1)[kept]), ids)
    assert_close(advantages, tensor(expected), atol=1e-6, rtol=1e-6)
    assert [len(members) for _, members in rollout.groups] == [n for n in (~np.isnan(scores)).sum(1) if n]


def record(scores, truncated=None, lengths=None, row=0) -> dict:
    """What generate_and_score says of one prompt."""
    lengths = lengths or [2] * len(scores)
    return {
        "row": row,
        "prompt_length": 5,
        "response_ids": [torch.arange(n) for n in lengths],
        "engine_logprobs": [-torch.ones(n) for n in lengths],
        "truncated": truncated or [False] * len(scores),
        "scores": np.array(scores, dtype=np.float64),
        "components": {},
        "metrics": {},
    }


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7, 1e6, 1e-30])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("baseline", ["leave_one_out", "group_mean"])
def test_equal_rewards_have_advantages_of_exactly_zero(value, count, baseline):
    ids = torch.arange(3).repeat_interleave(count)
    rewards = torch.full((3 * count,), value) * tensor([1.0, 2.0, 3.0])[ids]
    assert rloo.compute_advantages(rewards, ids, baseline).tolist() == [0.0] * len(ids)


def test_group_mean_is_the_textbook_one():
    rewards, ids = random_groups([4, 3, 1, 6])
    expected = tensor([r - rewards[ids == g].double().mean().item() for r, g in zip(rewards.tolist(), ids)])
    assert_close(rloo.compute_advantages(rewards, ids, "group_mean"), expected, atol=1e-6, rtol=1e-6)


def test_a_shift_of_a_groups_rewards_changes_nothing_and_a_far_outlier_stays_in_its_group():
    rewards, ids = random_groups([4, 4, 4])
    shifted = rewards + 100 * ids
    one, other = (rloo.compute_advantages(r, ids, "leave_one_out") for r in (rewards, shifted))
    assert_close(one, other, atol=1e-4, rtol=0)
    shifted[ids == 2] *= 1e20
    assert_close(rloo.compute_advantages(shifted, ids, "leave_one_out")[ids != 2], one[ids != 2], atol=1e-4, rtol=0)


def test_group_ids_need_not_be_dense():
    """The update asks pack by pack, with the groups of that pack alone."""
    rewards, ids = random_groups([4] * 6)
    some = (ids == 1) | (ids == 4)
    whole = rloo.compute_advantages(rewards, ids, "leave_one_out")
    assert torch.equal(rloo.compute_advantages(rewards[some], ids[some], "leave_one_out"), whole[some])


def test_no_responses_have_no_advantages():
    for baseline in ("leave_one_out", "group_mean", "none"):
        assert rloo.compute_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), baseline).shape == (0,)


def test_normalize_is_over_the_whole_rollout():
    advantages = tensor([-3.0, -1.5, 4.5, 1.0, -1.0])
    expected = (advantages.numpy() - advantages.numpy().mean()) / advantages.numpy().std()
    assert_close(rloo.normalize(advantages), tensor(expected))


@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e6])
def test_equal_advantages_normalize_to_exactly_zero(value):
    assert rloo.normalize(torch.full((12,), value)).tolist() == [0.0] * 12


# --- loss ------------------------------------------------------------------------------------------------------------


def some_responses(S: int = 80, seed: int = 0, scale: float = 0.6):
    """new and old log-probs (M,) in float64, advantages (S,), owner (M,), lengths; some ratios leave the clip's range."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (S,), generator=g)
    owner = torch.repeat_interleave(lengths)
    old = -torch.rand(len(owner), generator=g, dtype=torch.float64) * 3
    new = old + scale * torch.randn(len(owner), generator=g, dtype=torch.float64)
    return new, old, torch.randn(S, generator=g, dtype=torch.float64), owner, lengths.tolist()


def slow_loss(new, old, advantages, lengths, level, low, high) -> tuple[list[float], list[float]]:
    """Loss of each response and gradient of their sum by each token's log-prob, one response after the other, in floats."""
    losses, gradients = [], []
    new, old = iter(new.tolist()), iter(old.tolist())
    for A, n in zip(advantages.tolist(), lengths):
        d = [next(new) - next(old) for _ in range(n)]
        # (logratio, derivative of it by each token's log-prob) of every ratio that this response has
        ratios = {
            "sequence": [(sum(d), [1.0] * n)],
            "sequence_mean": [(sum(d) / n, [1.0 / n] * n)],
            "token": [(x, [float(s == t) for s in range(n)]) for t, x in enumerate(d)],
        }[level]
        loss, gradient = 0.0, [0.0] * n
        for logratio, slope in ratios:
            rho = math.exp(logratio)
            clipped = min(max(rho, 1 - low), 1 + high)
            loss -= min(rho * A, clipped * A)
            if rho * A <= clipped * A:  # the unclipped one counts, or they are the same
                gradient = [x - A * rho * s for x, s in zip(gradient, slope)]
        losses.append(loss)
        gradients += gradient
    return losses, gradients


@pytest.mark.parametrize("level", ["sequence", "sequence_mean", "token"])
@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.1, 0.4), (0.5, 0.05)])
def test_loss_and_gradient_are_those_of_one_response_after_the_other(level, low, high):
    new, old, advantages, owner, lengths = some_responses()
    new.requires_grad_()
    loss, metrics = rloo.compute_rloo_loss(new, old, advantages, owner, level, low, high)
    loss.sum().backward()
    losses, gradients = slow_loss(new.detach(), old, advantages, lengths, level, low, high)
    assert_close(loss.detach(), tensor(losses, dtype=torch.float64))
    assert_close(new.grad, tensor(gradients, dtype=torch.float64))
    clipped = metrics["policy/clipfrac_low"] + metrics["policy/clipfrac_high"]
    assert 0 < clipped.mean() < 1 and metrics["policy/clipfrac_high"].mean() > 0


def test_loss_docstring_example():
    new, old, A, owner = tensor([0.1, 0.2]), torch.zeros(2), tensor([1.0]), torch.zeros(2, dtype=torch.long)
    for level, expected in [
        ("sequence", -1.2),
        ("sequence_mean", -math.exp(0.15)),
        ("token", -math.exp(0.1) - 1.2),
    ]:
        loss, _ = rloo.compute_rloo_loss(new, old, A, owner, level, 0.2, 0.2)
        assert loss.tolist() == pytest.approx([expected])


@pytest.mark.parametrize(
    "ratio, advantage, loss, low, high",
    [
        (1.5, 1.0, -1.4, 0, 1),  # gained more than 1 + c_high: clipped
        (1.3, 1.0, -1.3, 0, 0),  # within the higher upper bound
        (1.5, -1.0, 1.5, 0, 0),  # went the wrong way: full gradient back
        (0.5, 1.0, -0.5, 0, 0),
        (0.5, -1.0, 0.8, 1, 0),  # lost more than 1 - c
    ],
)
@pytest.mark.parametrize("level", ["sequence", "sequence_mean", "token"])
def test_upper_clip_may_be_higher_than_the_lower(ratio, advantage, loss, low, high, level):
    new = tensor([math.log(ratio)], dtype=torch.float64)
    owner = torch.zeros(1, dtype=torch.long)
    A = tensor([advantage], dtype=torch.float64)
    losses, metrics = rloo.compute_rloo_loss(new, torch.zeros_like(new), A, owner, level, 0.2, 0.4)
    assert losses.item() == pytest.approx(loss)
    assert (metrics["policy/clipfrac_low"].item(), metrics["policy/clipfrac_high"].item()) == (low, high)
    assert metrics["policy/ratio"].item() == pytest.approx(ratio)


@pytest.mark.parametrize("level", ["sequence", "token", "sequence_mean"])
def test_ratio_of_one_is_reinforce(level):
    """-A grad log p(response); the length-normalised form divides it by the length."""
    _, old, advantages, owner, lengths = some_responses()
    new = old.clone().requires_grad_()
    loss, metrics = rloo.compute_rloo_loss(new, new.detach(), advantages, owner, level, 0.2, 0.2)
    loss.sum().backward()
    per_token = 1.0 / tensor(lengths)[owner] if level == "sequence_mean" else 1.0
    assert_close(new.grad, -advantages[owner] * per_token)
    assert (metrics["policy/ratio"] == 1).all() and not metrics["policy/clipfrac_high"].any()


@pytest.mark.parametrize("level", ["sequence", "sequence_mean", "token"])
@pytest.mark.parametrize("difference", [-1e4, -300.0, 300.0, 1e4])
def test_extreme_ratios_stay_finite(level, difference):
    new, owner = torch.full((64,), difference, requires_grad=True), torch.arange(64) // 32
    loss, metrics = rloo.compute_rloo_loss(new, torch.zeros(64), tensor([1.0, -1.0]), owner, level, 0.2, 0.2)
    loss.sum().backward()
    assert loss.isfinite().all() and new.grad.isfinite().all()
    assert all(x.isfinite().all() for x in metrics.values())


@pytest.mark.parametrize("level", ["sequence", "sequence_mean", "token"])
def test_a_pack_without_responses_has_no_loss_but_a_graph(level):
    hidden = torch.zeros(3, requires_grad=True)
    new = hidden[:0] * 2
    loss, metrics = rloo.compute_rloo_loss(
        new, new.detach(), torch.zeros(0), torch.zeros(0, dtype=torch.long), level, 0.2, 0.2
    )
    loss.sum().backward()
    assert loss.shape == (0,) and hidden.grad.tolist() == [0, 0, 0]
    assert all(x.shape == (0,) for x in metrics.values())


# --- what a rollout keeps, and what is said of it --------------------------------------------------------------------


def test_masked_truncated_responses_leave_groups_but_not_metrics():
    records = [record([1, 1, 0, -1], [False, False, False, True]), record([1, 0, 0, 0], [True] * 4, [3] * 4)]
    rollout = rloo.make_rollout(records, mask_truncated=True)
    assert rollout.groups == [(0, [0, 1, 2])] and rollout.scores.tolist() == [1, 1, 0]
    advantages = rloo.compute_advantages(rollout.scores, rollout.group_ids, "leave_one_out")
    assert advantages.tolist() == [0.5, 0.5, -1.0], "the truncated one's -1 is in no baseline"
    metrics = rloo.rollout_metrics(records)
    assert metrics["rollout/truncated_frac"] == 5 / 8
    assert metrics["objective/scores"] == pytest.approx(1 / 4)
    assert metrics["rollout/response_length_max"] == 3
    assert len(rloo.make_rollout(records).response_ids) == 8


def test_groups_without_signal_are_counted_on_scores():
    records = [record([1, 1, 1]), record([0.1, 0.1, math.nan]), record([0, 1, math.nan]), record([math.nan] * 3)]
    metrics = rloo.rollout_metrics(records)
    assert metrics["rollout/zero_std_groups_frac"] == pytest.approx(2 / 3)
    assert metrics["rollout/group_std"] == pytest.approx(0.5 / 3)
    assert metrics["objective/scores"] == pytest.approx(4.2 / 7)


def test_rollout_tables_hold_what_the_sampler_said():
    records = [record([1, 0], lengths=[1, 3]), record([math.nan, 2], lengths=[4, 2])]
    rollout = rloo.make_rollout(records)
    assert rollout.response_mask.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert rollout.engine_logprobs.tolist() == [[-1, 0, 0], [-1, -1, -1], [-1, -1, 0]]
    assert rollout.groups == [(0, [0, 1]), (1, [2])] and rollout.group_ids.tolist() == [0, 0, 1]
    assert rollout.scores.tolist() == [1, 0, 2]


# --- schedule and data order -----------------------------------------------------------------------------------------


def test_stream_of_rows_is_the_same_however_it_is_cut():
    whole = rloo.batch_indices(0, 50, 7, seed=4)
    assert whole == [i for start in range(0, 50, 5) for i in rloo.batch_indices(start, 5, 7, seed=4)]
    assert all(sorted(whole[start : start + 7]) == list(range(7)) for start in range(0, 49, 7))
    assert whole[:7] != whole[7:14]

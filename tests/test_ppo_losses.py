"""Estimators, losses and aggregations of ppo_vl against the papers' formulas, written with loops in float64, and by hand."""

import itertools
import json
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, tensor
from torch.testing import assert_close

import ppo_vl

GROUP_METHODS = ("reinforce_baseline", "rloo", "group_norm", "cpgd")
LOSSES = ("clip", "dual_clip", "cpg", "gspo")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
quick = settings(max_examples=60, deadline=None, derandomize=True)

eighths = st.integers(-80, 80).map(lambda k: k / 8)  # exact in fp32, and so are their sums and differences
finite = st.floats(-10, 10, allow_subnormal=False)
# [(score, group), ...] in any order, some groups of one, some ids without a response
scored = st.lists(st.tuples(eighths, st.integers(0, 5)), min_size=1, max_size=24)
masks = st.integers(1, 5).flatmap(lambda R: st.lists(st.tuples(*[st.booleans()] * R), min_size=1, max_size=5))
row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
seeds = st.integers(0, 10**6)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def ragged(lengths: list[int]) -> torch.Tensor:
    """Response mask (B, R)."""
    return torch.arange(max(lengths))[None] < tensor(lengths)[:, None]


def unzip(pairs) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor([s for s, _ in pairs], dtype=torch.float32), tensor([g for _, g in pairs])


# --- scores of a group -----------------------------------------------------------------------------------------------


def slow_center(scores: torch.Tensor, group_ids: torch.Tensor, method: str, group_std: bool = True) -> list[float]:
    """Each response on its own, in O(B G), from the formulas of the papers."""
    scores, ids, out = scores.double().tolist(), group_ids.tolist(), []
    groups = [[s for s, g in zip(scores, ids) if g == wanted] for wanted in set(ids)]
    for i, (score, g) in enumerate(zip(scores, ids)):
        own = [s for s, other in zip(scores, ids) if other == g]
        siblings = [s for j, s in enumerate(scores) if ids[j] == g and j != i]
        centered = score - math.fsum(own) / len(own)
        if method == "rloo":
            centered = score - math.fsum(siblings) / len(siblings) if siblings else 0.0
        if method == "group_norm" and group_std:
            centered = centered / (statistics.stdev(own) + 1e-6) if siblings else 0.0
        if method == "cpgd":
            centered *= min(3, len(groups) / max(1, sum(max(group) != min(group) for group in groups)))
        out.append(score if method in ("gae", "reinforce") else centered)
    return out


def test_center_scores_docstring_example():
    scores, one = tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.long)
    root = math.sqrt(7)  # unbiased variance (4 + 1 + 9) / 2
    expected = {"rloo": [-3, -1.5, 4.5], "group_norm": [-2 / root, -1 / root, 3 / root]}
    expected |= {"gae": [1, 2, 6], "reinforce": [1, 2, 6], "reinforce_baseline": [-2, -1, 3], "cpgd": [-2, -1, 3]}
    for method, values in expected.items():
        assert_close(ppo_vl.center_scores(scores, one, method), tensor(values).float(), atol=2e-6, rtol=0)
    assert ppo_vl.center_scores(scores, one, "group_norm", group_std=False).tolist() == [-2, -1, 3]  # Dr. GRPO


@pytest.mark.parametrize("group_std", [True, False])
@pytest.mark.parametrize("method", ["gae", "reinforce", *GROUP_METHODS])
@given(pairs=scored)
@quick
def test_center_scores_is_the_formula(method, group_std, pairs):
    scores, ids = unzip(pairs)
    kept = scores.clone()
    out = ppo_vl.center_scores(scores, ids, method, group_std)
    assert out.dtype == scores.dtype and torch.equal(scores, kept)
    assert_close(out.double(), tensor(slow_center(scores, ids, method, group_std)).double(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("method", GROUP_METHODS)
def test_equal_scores_give_exactly_zero(method):
    for n, value in itertools.product(range(2, 33), (0.1, 1 / 3, 0.9 + 0.1, -7.7, 1e6, 1e-30)):
        for group_std in (True, False):
            beside = tensor([0.3, 0.7])  # a group with a spread, which the others must not hear of
            scores = torch.cat([torch.full((n,), value), beside, torch.full((n,), value)])
            ids = torch.cat([torch.zeros(n), torch.ones(2), torch.full((n,), 2)]).long()
            out = ppo_vl.center_scores(scores, ids, method, group_std)
            assert not out[ids != 1].any() and out[ids == 1].all()


@pytest.mark.parametrize("method", GROUP_METHODS)
@given(pairs=scored, shift=eighths, scale=st.floats(0.125, 8, width=32), seed=seeds)
@quick
def test_groups_do_not_see_shifts_and_follow_scales_and_permutations(method, pairs, shift, scale, seed):
    scores, ids = unzip(pairs)
    out = ppo_vl.center_scores(scores, ids, method)
    shifted = ppo_vl.center_scores(scores + shift * ids, ids, method)  # by another constant in each group
    assert_close(shifted, out, atol=1e-5, rtol=1e-5)
    scaled = ppo_vl.center_scores(scores * scale, ids, method)
    # a spread of at least 1/8 / sqrt(24) * 1/8 beside the 1e-6 in group_norm's denominator
    assert_close(scaled, out * (1 if method == "group_norm" else scale), atol=1e-4, rtol=1e-3)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(ids)))
    assert_close(ppo_vl.center_scores(scores[order], ids[order], method), out[order], atol=1e-6, rtol=1e-6)


def test_leave_one_out_sums_to_zero_and_groups_of_one_are_zero():
    ids = tensor([3, 0, 3, 1, 0, 3, 5, 3])  # 1 and 5 are alone, 2 and 4 have no response
    scores = noise(8).float()
    for method in GROUP_METHODS:
        out = ppo_vl.center_scores(scores, ids, method)
        assert not out[(ids == 1) | (ids == 5)].any() and out[(ids == 0) | (ids == 3)].all()
        for g in (0, 3):
            assert out[ids == g].sum().abs() < 1e-5


@pytest.mark.parametrize("flat, weight", [(0, 1), (1, 2), (2, 3), (3, 3), (7, 3)])
def test_cpgd_weighs_the_groups_that_say_something(flat, weight):
    """groups / groups with a spread, at most 3; here one group with a spread beside `flat` without."""
    ids = torch.arange(flat + 1).repeat_interleave(2)
    scores = torch.ones(len(ids))
    scores[0] = 3.0
    assert ppo_vl.center_scores(scores, ids, "cpgd").tolist() == [weight, -weight] + [0] * (2 * flat)


def test_unknown_names_raise():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="grpo"):
        ppo_vl.center_scores(x, x.long(), "grpo")
    with pytest.raises(ValueError, match="ppo2"):
        ppo_vl.compute_policy_loss(x, x, x, x.long(), "ppo2", 0.2, 0.2, 3.0)
    with pytest.raises(ValueError, match="mean"):
        ppo_vl.token_weights(torch.ones(1, 2), "mean", 4)


# --- running moments -------------------------------------------------------------------------------------------------


@given(parts=st.lists(st.lists(st.floats(-100, 100, width=32), max_size=6), min_size=1, max_size=8))
@quick
def test_running_moments_are_those_of_all_scores_however_split(parts):
    moments = ppo_vl.RunningMoments()
    for part in parts:
        moments.update(tensor(part, dtype=torch.float32))
    everything = np.concatenate([np.array(part, dtype=np.float64) for part in parts])
    assert moments.count == len(everything)
    if len(everything):
        assert moments.mean == pytest.approx(everything.mean(), abs=1e-9)
        assert math.sqrt(moments.squares / moments.count) == pytest.approx(everything.std(), abs=1e-7)
    # a checkpoint holds them as JSON
    state = json.loads(json.dumps([moments.count, moments.mean, moments.squares]))
    again = ppo_vl.RunningMoments(*state)
    for each in (moments, again):
        each.update(tensor([1.0, 2.5]))
    assert vars(again) == vars(moments)


def test_running_moments_by_hand():
    moments = ppo_vl.RunningMoments()
    moments.update(tensor([5.0]))  # no spread yet: its own size is no unit
    assert (moments.count, moments.mean, moments.squares) == (1, 5.0, 0.0)
    assert moments.normalize(tensor([5.0]), False).tolist() == [5.0]
    moments.update(tensor([1.0, 3.0]))  # of 5, 1, 3: mean 3, variance 8 / 3
    std = math.sqrt(8 / 3)
    assert_close(moments.normalize(tensor([5.0, 0.0]), False), tensor([5 / std, 0.0]))
    assert_close(moments.normalize(tensor([5.0, 0.0]), True), tensor([2 / std, -3 / std]))


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e6, 1e-20])
def test_constant_scores_keep_their_size(value):
    moments = ppo_vl.RunningMoments()
    for n in (1, 7, 16, 3):
        scores = torch.full((n,), value)
        moments.update(scores)
        assert torch.equal(moments.normalize(scores, False), scores)
        assert_close(moments.normalize(scores, True), torch.zeros(n), atol=1e-9, rtol=0)


# --- token rewards, GAE, whitening -----------------------------------------------------------------------------------


def slow_gae(rewards, values, gamma: float, gae_lambda: float) -> list[float]:
    """One response: the sum of eq. (16) for each token."""
    T = len(rewards)
    values = [*values, 0.0]
    delta = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(T)]
    return [sum((gamma * gae_lambda) ** (s - t) * delta[s] for s in range(t, T)) for t in range(T)]


@given(lengths=row_lengths, seed=seeds, gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
@quick
def test_gae_is_its_sum_on_every_row(lengths, seed, gamma, gae_lambda):
    mask = ragged(lengths)  # beyond it: numbers that no row may see
    rewards, values = noise(*mask.shape, seed=seed), noise(*mask.shape, seed=seed + 1)
    advantages, returns = ppo_vl.compute_gae(rewards, values, mask, gamma, gae_lambda)
    for b, n in enumerate(lengths):
        expected = slow_gae(rewards[b, :n].tolist(), values[b, :n].tolist(), gamma, gae_lambda)
        assert advantages[b, :n].tolist() == pytest.approx(expected, abs=1e-9)
        assert_close(returns[b, :n], advantages[b, :n] + values[b, :n])
        assert not advantages[b, n:].any() and not returns[b, n:].any()


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.3, 0.0])
def test_without_a_critic_the_advantages_are_discounted_rewards_to_go(gamma):
    lengths = [5, 1, 3, 7]
    mask, kl = ragged(lengths), noise(4, 7).float()
    scores = ppo_vl.center_scores(noise(4, seed=1).float(), torch.zeros(4, dtype=torch.long), "rloo")
    rewards = ppo_vl.compute_token_rewards(scores, kl, mask, 0.05)
    advantages, returns = ppo_vl.compute_gae(rewards, torch.zeros(4, 7), mask, gamma, 1.0)
    assert torch.equal(advantages, returns)
    for b, n in enumerate(lengths):
        for t in range(7):
            to_go = sum(gamma ** (s - t) * -0.05 * kl[b, s].item() for s in range(t, n))
            to_go += gamma ** (n - 1 - t) * scores[b].item() if t < n else 0
            assert advantages[b, t].item() == pytest.approx(to_go, abs=1e-5)


@given(mask=masks, seed=seeds, shift=finite)
@quick
def test_whiten_is_the_formula_and_masked_entries_have_no_influence(mask, seed, shift):
    mask = tensor(mask)
    x = noise(*mask.shape, seed=seed) + shift
    out = ppo_vl.whiten(x, mask)
    for garbage in (1e30, math.nan, math.inf):
        assert torch.equal(ppo_vl.whiten(torch.where(mask, x, garbage), mask), out)
    assert not out[~mask].any()
    values = x[mask].tolist()
    if len(values) > 1:
        mean, std = statistics.fmean(values), statistics.pstdev(values)
        assert out[mask].tolist() == pytest.approx([(v - mean) / std for v in values], abs=1e-6)


# --- policy losses ---------------------------------------------------------------------------------------------------


def slow_loss(kind: str, logratio: float, A: float, c: float, c_high: float, d: float) -> float:
    """One token (gspo: the ratio is the response's), as in the papers; cpg less old * A, which has no gradient."""
    r = math.exp(logratio)
    clipped = min(max(r, 1 - c), 1 + c_high)
    if kind == "cpg":  # sec. 3: min(log r A, clip(log r) A)
        return -min(logratio * A, min(max(logratio, math.log(1 - c)), math.log(1 + c_high)) * A)
    surrogate = min(r * A, clipped * A)
    return -max(surrogate, d * A) if kind == "dual_clip" and A < 0 else -surrogate


def loss_and_grad(kind, new, old, advantages, owner=None, c=0.2, c_high=0.28, d=3.0, weights=1.0):
    """-> losses, metrics, gradient of their weighted sum by new."""
    new = new.clone().requires_grad_()
    owner = torch.arange(len(new)) if owner is None else owner
    losses, metrics = ppo_vl.compute_policy_loss(new, old, advantages, owner, kind, c, c_high, d)
    (losses * weights).sum().backward()
    assert all(x.shape == new.shape and not x.requires_grad for x in metrics.values()) and losses.shape == new.shape
    return losses.detach(), metrics, new.grad


@pytest.mark.parametrize("c, c_high", [(0.2, 0.2), (0.2, 0.28), (0.4, 0.1), (3e-4, 4e-4)])
@pytest.mark.parametrize("kind", LOSSES)
def test_policy_losses_and_gradients_are_the_formulas(kind, c, c_high):
    """One token per response, hence also for gspo. Gradients of the reference are finite differences."""
    new, old, A = noise(300, seed=1, scale=0.8), noise(300, seed=2, scale=0.8), noise(300, seed=3)
    losses, metrics, grad = loss_and_grad(kind, new, old, A, None, c, c_high, 1.7)
    low = high = 0
    for x, o, a, loss, g in zip(*(v.tolist() for v in (new, old, A, losses, grad))):
        expected = slow_loss(kind, x - o, a, c, c_high, 1.7)
        assert loss + (a * o if kind == "cpg" else 0) == pytest.approx(expected, abs=1e-7)  # cpg's bounds are fp32
        h = 1e-6
        above, below = (slow_loss(kind, x - o + sign * h, a, c, c_high, 1.7) for sign in (1, -1))
        assert g == pytest.approx((above - below) / 2 / h, abs=1e-7)
        low, high = low + (a < 0 and g == 0), high + (a > 0 and g == 0)
    assert metrics["policy/clipfrac_low"].sum() == low > 10 and metrics["policy/clipfrac_high"].sum() == high > 10
    assert_close(metrics["policy/ratio"], (new - old).exp())
    assert_close(metrics["policy/approx_kl"], (new - old).exp() - 1 - (new - old))


@pytest.mark.parametrize("kind", ["clip", "dual_clip", "cpg"])
@given(tokens=st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=8), c=st.floats(0.01, 0.9))
@quick
def test_policy_losses_are_the_formulas_anywhere(kind, tokens, c):
    new, old, A = tensor(tokens, dtype=torch.float64).T
    losses, _, grad = loss_and_grad(kind, new, old, A, None, c, 2 * c)
    expected = [slow_loss(kind, x - o, a, c, 2 * c, 3.0) for x, o, a in tokens]
    assert (losses + (A * old if kind == "cpg" else 0)).tolist() == pytest.approx(expected, rel=1e-7, abs=1e-7)
    assert (grad * A <= 0).all()  # no loss ever pushes a log-prob against the sign of its advantage


# ratio, A -> loss and gradient; c .2, c_high .28, d 3
BY_HAND = {
    "clip": [(1.25, 1, -1.25, -1.25), (1.4, 1, -1.28, 0), (0.75, -1, 0.8, 0), (0.75, 1, -0.75, -0.75), (5, -2, 10, 10)],
    "dual_clip": [(1.4, 1, -1.28, 0), (5, -2, 6, 0), (2.9, -2, 5.8, 5.8), (5, 2, -2.56, 0), (0.75, -1, 0.8, 0)],
    # beyond a bound on the right side the gradient ends, on the wrong one it stays
    "cpg": [(1.25, 2, -0.446287, -2), (1.4, 2, -0.493720, 0), (0.5, 2, 1.386294, -2), (5, 0, 0, 0)]
    + [(0.5, -2, -0.446287, 0), (1.4, -2, 0.672944, 2)],  # 2 log of 1.25, 1.28, 1 / 0.5, 0.8, 1.4
    "gspo": [(1.25, 1, -1.25, -1.25), (1.4, 1, -1.28, 0), (0.75, -1, 0.8, 0), (5, -2, 10, 10)],
}


@pytest.mark.parametrize("kind, case", [(kind, case) for kind, cases in BY_HAND.items() for case in cases])
def test_policy_losses_by_hand(kind, case):
    ratio, A, loss, gradient = case
    zero = torch.zeros(1, dtype=torch.float64)
    losses, _, grad = loss_and_grad(kind, zero + math.log(ratio), zero, zero + A)
    assert losses.item() == pytest.approx(loss, abs=1e-6) and grad.item() == pytest.approx(gradient)


@given(owners=st.lists(st.sampled_from([0, 2, 3, 7]), min_size=1, max_size=16), seed=seeds, c=st.floats(0.05, 0.4))
@quick
def test_gspo_with_sequence_means_is_the_formula_of_whole_responses(owners, seed, c):
    """J = mean_i min(s_i A_i, clip(s_i) A_i), s_i = exp(mean_t logratio): eq. (5) and (7). Owners interleave and have gaps."""
    owner, old, delta = tensor(owners), noise(len(owners), seed=seed), noise(len(owners), seed=seed + 1, scale=0.5)
    A = noise(8, seed=seed + 2)[owner]  # one advantage per response
    order = sorted(set(owners))
    rows = [[t for t, o in enumerate(owners) if o == i] for i in order]

    def objective(logratio: list[float]) -> float:
        total = 0.0
        for row in rows:
            s, a = math.exp(sum(logratio[t] for t in row) / len(row)), A[row[0]].item()
            total += -min(s * a, min(max(s, 1 - c), 1 + 2 * c) * a)
        return total / len(rows)

    weights = ppo_vl.token_weights(ragged([len(row) for row in rows]), "seq-mean-token-mean", 16).double()
    flat = torch.empty(len(owners), dtype=torch.float64)
    for b, row in enumerate(rows):
        flat[row] = weights[b, : len(row)]
    losses, metrics, grad = loss_and_grad("gspo", old + delta, old, A, owner, c, 2 * c, weights=flat)
    assert (losses * flat).sum().item() == pytest.approx(objective(delta.tolist()), abs=1e-7)
    for t in range(len(owners)):
        moved = [[x + sign * 1e-6 * (t == j) for j, x in enumerate(delta.tolist())] for sign in (1, -1)]
        expected = (objective(moved[0]) - objective(moved[1])) / 2e-6
        assert grad[t].item() == pytest.approx(expected, abs=1e-6)
    for row in rows:
        assert_close(metrics["policy/ratio"][row], delta[row].mean().exp().expand(len(row)))


def test_gspo_tokens_of_a_response_share_one_ratio_and_keep_their_own_advantage():
    """GSPO-token, eq. (13), in fp32: clip bounds of 3e-4 need the ratio to the last bit."""
    new, old = noise(400, scale=3).float(), noise(400, seed=1, scale=3).float()
    owner, A = torch.arange(400) % 5, noise(400, seed=2).float()
    losses, metrics, grad = loss_and_grad("gspo", new, old, A, owner)
    for i in range(5):
        s = metrics["policy/ratio"][owner == i]
        assert len(set(s.tolist())) == 1
        assert_close(s[0], (new - old)[owner == i].double().mean().exp().float())
    expected = [slow_loss("gspo", math.log(s), a, 0.2, 0.28, 3.0) for s, a in zip(metrics["policy/ratio"], A.tolist())]
    assert_close(losses, tensor(expected))
    outside = (metrics["policy/clipfrac_low"] + metrics["policy/clipfrac_high"]).bool()
    assert_close(grad, torch.where(outside, 0.0, -A * metrics["policy/ratio"]))


@pytest.mark.parametrize("kind", LOSSES)
def test_new_equal_to_old(kind):
    old, A = noise(50, scale=5).float(), noise(50, seed=1).float()
    losses, metrics, grad = loss_and_grad(kind, old, old, A, torch.arange(50) % 7)
    assert metrics.pop("policy/ratio").tolist() == [1.0] * 50
    assert len(metrics) == 3 and not any(x.any() for x in metrics.values())
    assert torch.equal(losses, -A * old if kind == "cpg" else -A) and torch.equal(grad, -A)


@pytest.mark.parametrize("kind", LOSSES)
def test_huge_ratios_stay_finite(kind):
    """fp32 ends at e^88."""
    delta, A = tensor([100.0, -100.0] * 2), tensor([1.0, 1.0, -1.0, -1.0])
    losses, metrics, grad = loss_and_grad(kind, delta - 50, torch.full((4,), -50.0), A)
    assert all(x.isfinite().all() for x in (losses, grad, *metrics.values()))
    assert metrics["policy/ratio"][0] > 1e8 and metrics["policy/approx_kl"][0] > 1e8
    assert grad[0] == 0 and grad[3] == 0  # clipped


@pytest.mark.parametrize("kind", LOSSES)
def test_no_tokens(kind):
    """A rank may hold a pack without response tokens."""
    losses, metrics, grad = loss_and_grad(kind, torch.zeros(0), torch.zeros(0), torch.zeros(0))
    assert losses.shape == grad.shape == (0,) and len(metrics) == 4


# --- aggregation -----------------------------------------------------------------------------------------------------


def slow_aggregate(x: list, mask: list, loss_agg: str, limit: int) -> float:
    rows = [[v for v, m in zip(*pair) if m] for pair in zip(x, mask)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if loss_agg == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    per_row = {"seq-mean-token-mean": len, "seq-mean-token-sum": lambda row: 1}.get(loss_agg, lambda row: limit)
    return sum(sum(row) / per_row(row) for row in rows) / len(rows)


def test_token_weights_docstring_example():
    mask = tensor([[1, 1, 0], [1, 0, 0]])
    expected = [[[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]], [[1 / 4, 1 / 4, 0], [1 / 2, 0, 0]]]
    expected += [[[1 / 2, 1 / 2, 0], [1 / 2, 0, 0]], [[1 / 8, 1 / 8, 0], [1 / 8, 0, 0]]]
    for loss_agg, weights in zip(AGGREGATIONS, expected):
        assert_close(ppo_vl.token_weights(mask, loss_agg, 4), tensor(weights))


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@given(mask=masks, seed=seeds, limit=st.integers(5, 9), empty=st.integers(0, 3))
@quick
def test_token_weights_are_the_aggregate(loss_agg, mask, seed, limit, empty):
    mask = tensor(mask)
    x = noise(*mask.shape, seed=seed).float()
    weights = ppo_vl.token_weights(mask, loss_agg, limit)
    total = (weights * x).sum()
    assert total.item() == pytest.approx(slow_aggregate(x.tolist(), mask.tolist(), loss_agg, limit), abs=1e-5)
    assert not weights[~mask].any() and torch.equal((weights * torch.where(mask, x, 1e30)).sum(), total)
    if loss_agg in AGGREGATIONS[:2] and mask.any():
        assert weights.sum().item() == pytest.approx(1)
    more = torch.cat([mask, torch.zeros(empty, mask.shape[1], dtype=torch.bool)])  # empty responses do not count
    assert torch.equal(ppo_vl.token_weights(more, loss_agg, limit)[: len(mask)], weights)


# --- tokens of high entropy ------------------------------------------------------------------------------------------


def test_high_entropy_mask_by_hand():
    entropy, mask = tensor([[1.0, 5, 2], [4, 0, 9]]), tensor([[1, 1, 1], [1, 1, 0]])
    assert ppo_vl.high_entropy_mask(entropy, mask, 0.4).tolist() == [[False, True, False], [True, False, False]]
    # one threshold for the whole batch: a row of low entropy has no token, where a top-k of each row gives it some
    rows, ones = tensor([[9.0, 8, 7, 6], [1, 2, 3, 4]]), torch.ones(2, 4)
    assert ppo_vl.high_entropy_mask(rows, ones, 0.5).tolist() == [[True] * 4, [False] * 4]
    assert ppo_vl.high_entropy_mask(torch.full((2, 4), 0.7), ones, 0.2).all()  # ties are all in
    assert ppo_vl.high_entropy_mask(tensor([[3.0]]), tensor([[1]]), 0.01).tolist() == [[True]]
    assert not ppo_vl.high_entropy_mask(rows, torch.zeros(2, 4), 0.5).any()


@given(mask=masks, seed=seeds, ratio=st.floats(0.01, 1), ties=st.booleans())
@quick
def test_high_entropy_mask_is_the_right_share_of_the_mask(mask, seed, ratio, ties):
    mask = tensor(mask)
    entropy = noise(*mask.shape, seed=seed).abs()
    entropy = entropy.round() if ties else entropy
    out = ppo_vl.high_entropy_mask(entropy, mask, ratio)
    assert out.dtype == torch.bool and not (out & ~mask).any()
    assert torch.equal(ppo_vl.high_entropy_mask(torch.where(mask, entropy, 99.0), mask, ratio), out)
    assert torch.equal(ppo_vl.high_entropy_mask(entropy, mask, 1.0), mask)
    if mask.any():
        wanted, lowest = max(1, round(ratio * int(mask.sum()))), entropy[out].min()
        assert (mask & (entropy > lowest)).sum() < wanted <= out.sum()
        assert torch.equal(out, mask & (entropy >= lowest)) and (ties or out.sum() == wanted)


# --- average of the weights ------------------------------------------------------------------------------------------


def ema_module(dtype: torch.dtype) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    for i, parameter in enumerate(module.parameters()):
        parameter.data = noise(*parameter.shape, seed=i).to(dtype)
    module[1].weight.requires_grad_(False)  # frozen: not averaged
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.5, 0.99])
def test_ema_is_its_closed_form(beta, dtype):
    """beta^k w_0 + (1 - beta) sum_i beta^(k - i) w_i."""
    module = ema_module(dtype)
    ema = ppo_vl.Ema(module, beta, 0, (0, 1))
    trained = [p for p in module.parameters() if p.requires_grad]
    expected = [p.detach().double() * beta**20 for p in trained]
    for i in range(1, 21):
        for j, p in enumerate(trained):
            p.data.copy_(noise(*p.shape, seed=100 * i + j))
            expected[j] += (1 - beta) * beta ** (20 - i) * p.detach().double()
        ema.update()
    assert len(ema.average) == len(trained) == 4
    for average, want in zip(ema.average.values(), expected):
        assert average.dtype == torch.float32 and not average.requires_grad
        assert_close(average.double(), want, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applied_swaps_the_average_in_and_every_bit_back(dtype):
    module = ema_module(dtype)
    ema = ppo_vl.Ema(module, 0.9, 0, (0, 1))
    for p in module.parameters():
        p.data.add_(0.3)
    ema.update()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    averages = {i: x.clone() for i, x in ema.average.items()}
    with pytest.raises(KeyError), ema.applied():
        for i, p in enumerate(p for p in module.parameters() if p.requires_grad):
            assert torch.equal(p, averages[i].to(dtype))
        assert not torch.equal(module[0].weight, before["0.weight"])
        assert torch.equal(module[1].weight, before["1.weight"])
        raise KeyError  # an evaluation that fails
    assert all(torch.equal(x, before[name]) and x.dtype == dtype for name, x in module.state_dict().items())
    assert all(torch.equal(x, averages[i]) for i, x in ema.average.items())

"""The pure functions of ppo_vl: by hand, and against the papers' formulas, written with loops in float64."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

import ppo_vl

GROUP_METHODS = ("reinforce_baseline", "rloo", "group_norm", "cpgd")
LOSSES = ("clip", "dual_clip", "cpg", "gspo")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
quick = settings(max_examples=60, deadline=None, derandomize=True)

eighths = st.integers(-80, 80).map(lambda k: k / 8)  # exact in fp32, and so are their sums and differences
finite = st.floats(-10, 10, allow_subnormal=False)
masks = st.integers(1, 5).flatmap(lambda R: st.lists(st.tuples(*[st.booleans()] * R), min_size=1, max_size=5))
response = st.tuples(eighths, st.booleans())  # score, whether it counts
scored = st.integers(1, 6).flatmap(lambda G: st.lists(st.tuples(*[response] * G), min_size=1, max_size=5))
row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
seeds = st.integers(0, 10**6)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def ragged(lengths: list[int]) -> torch.Tensor:
    """Response mask (B, R)."""
    return torch.arange(max(lengths))[None] < tensor(lengths)[:, None]


def unzip(groups) -> tuple[torch.Tensor, torch.Tensor]:
    """-> scores (n, G), NaN where they don't count, and which count (n, G)."""
    mask = tensor([[counts for _, counts in group] for group in groups])
    scores = tensor([[score for score, _ in group] for group in groups]).float()
    return scores.masked_fill(~mask, math.nan), mask


def test_worked_examples_of_the_docstrings():
    ones = torch.ones(1, 3)
    advantages, _ = ppo_vl.compute_gae(tensor([[0.0, 0.0, 1.0]]), ones / 2, ones, gamma=1.0, gae_lambda=0.5)
    assert advantages.tolist() == [[0.125, 0.25, 0.5]]
    expected = [[[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]], [[1 / 4, 1 / 4, 0], [1 / 2, 0, 0]]]
    expected += [[[1 / 2, 1 / 2, 0], [1 / 2, 0, 0]], [[1 / 8, 1 / 8, 0], [1 / 8, 0, 0]]]
    for loss_agg, weights in zip(AGGREGATIONS, expected):
        assert_close(ppo_vl.token_weights(tensor([[1, 1, 0], [1, 0, 0]]), loss_agg, 4), tensor(weights))
    scores, whole = tensor([[1.0, 2, 6]]), torch.ones(1, 3, dtype=torch.bool)
    root = math.sqrt(7)  # unbiased variance (4 + 1 + 9) / 2
    expected = {"reinforce_baseline": [-2, -1, 3], "rloo": [-3, -1.5, 4.5]}
    for method, values in (expected | {"group_norm": [-2 / root, -1 / root, 3 / root]}).items():
        assert_close(ppo_vl.center_scores(scores, whole, method), tensor([values]).float(), atol=2e-6, rtol=0)
    entropy, mask = tensor([[1.0, 5, 2], [4, 0, 9]]), tensor([[1, 1, 1], [1, 1, 0]]).bool()
    chosen = [[False, True, False], [True, False, False]]
    assert ppo_vl.high_entropy_mask(entropy, mask, 0.4).tolist() == chosen


# --- scores of a group ---


def slow_center(scores: torch.Tensor, mask: torch.Tensor, method: str) -> list[list[float]]:
    """Each response on its own, from the formulas of the papers; 0 where it does not count."""
    groups = [[s for s, m in zip(*pair) if m] for pair in zip(scores.double().tolist(), mask.tolist())]
    spread = sum(len(set(group)) > 1 for group in groups)
    out = torch.zeros(scores.shape, dtype=torch.float64)
    for g, i in mask.nonzero().tolist():
        own, score = groups[g], scores[g, i].item()
        centered, alone = score - math.fsum(own) / len(own), len(own) == 1
        if method == "rloo":
            centered = 0.0 if alone else score - (math.fsum(own) - score) / (len(own) - 1)
        if method == "group_norm":
            centered = 0.0 if alone else centered / (statistics.stdev(own) + 1e-6)
        if method == "cpgd":
            centered *= min(3, sum(map(bool, groups)) / max(1, spread))
        out[g, i] = score if method in ("gae", "reinforce") else centered
    return out


@pytest.mark.parametrize("method", ["gae", "reinforce", *GROUP_METHODS])
@given(groups=scored, shift=eighths, scale=st.floats(0.125, 8, width=32), seed=seeds)
@quick
def test_center_scores_is_the_formula_and_groups_ignore_shifts(method, groups, shift, scale, seed):
    scores, mask = unzip(groups)
    kept = scores.clone()
    out = ppo_vl.center_scores(scores, mask, method)
    assert out.dtype == scores.dtype and torch.equal(scores.nan_to_num(9), kept.nan_to_num(9))
    assert_close(out.double(), slow_center(scores, mask, method), atol=1e-6, rtol=1e-6)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(scores)))
    assert_close(ppo_vl.center_scores(scores[order], mask[order], method), out[order], atol=1e-6, rtol=1e-6)
    if method in GROUP_METHODS:
        moved = scores + shift * torch.arange(len(scores))[:, None]  # by another constant in each group
        assert_close(ppo_vl.center_scores(moved, mask, method), out, atol=1e-5, rtol=1e-5)
        # a spread of at least 1/8 / sqrt(24) * 1/8 beside the 1e-6 in group_norm's denominator
        expected = out * (1 if method == "group_norm" else scale)
        assert_close(ppo_vl.center_scores(scores * scale, mask, method), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", GROUP_METHODS)
def test_equal_scores_give_exactly_zero(method):
    for G, value in itertools.product(range(2, 33), (0.1, 1 / 3, 0.9 + 0.1, -7.7, 1e6, 1e-30)):
        scores = torch.full((3, G), value)
        scores[1, 0] += 0.5 + abs(value)  # a group with a spread, which the others must not hear of
        mask = torch.ones(3, G, dtype=torch.bool)
        mask[2, 1:] = False  # alone
        out = ppo_vl.center_scores(scores, mask, method)
        assert not out[[0, 2]].any() and out[1].all()


@pytest.mark.parametrize("flat, weight", [(0, 1), (1, 2), (2, 3), (3, 3), (7, 3)])
def test_cpgd_weighs_the_groups_that_say_something(flat, weight):
    """groups / groups with a spread, at most 3; here one group with a spread beside `flat` without."""
    scores = torch.ones(flat + 1, 2)
    scores[0, 0] = 3.0
    out = ppo_vl.center_scores(scores, torch.ones(flat + 1, 2, dtype=torch.bool), "cpgd")
    assert out.flatten().tolist() == [weight, -weight] + [0] * (2 * flat)


# --- token rewards, GAE, whitening ---


def test_score_lands_on_the_last_token_of_the_response():
    mask = tensor([[1, 1, 0], [1, 1, 1]]).bool()
    rewards = ppo_vl.compute_token_rewards(tensor([1.0, 2.0]), torch.full((2, 3), 0.1), mask, 1.0)
    assert_close(rewards, tensor([[-0.1, 0.9, 0.0], [-0.1, -0.1, 1.9]]))


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


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7, 1e6])
def test_equal_advantages_whiten_to_exactly_zero(value):
    assert not ppo_vl.whiten(noise(8, 3, scale=1e-8), torch.ones(8, 3, dtype=torch.bool)).any()  # rounding
    for count in (1, 8, 12, 1000):
        assert not ppo_vl.whiten(torch.full((count, 3), value), torch.ones(count, 3, dtype=torch.bool)).any()


# --- policy losses ---


def slow_loss(kind: str, logratio: float, A: float, c: float, c_high: float, d: float) -> float:
    """One token (gspo: the ratio is the response's), as in the papers."""
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
    clip = ppo_vl.Clip(low=c, high=c_high, dual=d)
    losses, metrics = ppo_vl.compute_policy_loss(new, old, advantages, owner, kind, clip)
    (losses * weights).sum().backward()
    assert all(x.shape == new.shape and not x.requires_grad for x in metrics.values())
    assert losses.shape == new.shape
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
        assert loss == pytest.approx(expected, abs=1e-7)
        h = 1e-6
        above, below = (slow_loss(kind, x - o + sign * h, a, c, c_high, 1.7) for sign in (1, -1))
        assert g == pytest.approx((above - below) / 2 / h, abs=1e-7)
        low, high = low + (a < 0 and g == 0), high + (a > 0 and g == 0)
    assert metrics["policy/clipfrac_low"].sum() == low > 10
    assert metrics["policy/clipfrac_high"].sum() == high > 10
    assert_close(metrics["policy/ratio"], (new - old).exp())
    assert_close(metrics["policy/approx_kl"], (new - old).exp() - 1 - (new - old))


@given(lengths=row_lengths, seed=seeds, c=st.floats(0.05, 0.4))
@quick
def test_gspo_with_sequence_means_is_the_formula_of_whole_responses(lengths, seed, c):
    """J = mean_i min(s_i A_i, clip(s_i) A_i), s_i = exp(mean_t logratio): eq. (5) and (7)."""
    owner = torch.repeat_interleave(tensor(lengths))
    old, delta = noise(len(owner), seed=seed), noise(len(owner), seed=seed + 1, scale=0.5)
    A = noise(len(lengths), seed=seed + 2)[owner]  # one advantage per response

    def objective(logratio: list[float]) -> float:
        total, start = 0.0, 0
        for n in lengths:
            s, a = math.exp(sum(logratio[start : start + n]) / n), A[start].item()
            total, start = total - min(s * a, min(max(s, 1 - c), 1 + 2 * c) * a), start + n
        return total / len(lengths)

    weights = ppo_vl.token_weights(ragged(lengths), "seq-mean-token-mean", 16).double()[ragged(lengths)]
    losses, metrics, grad = loss_and_grad("gspo", old + delta, old, A, owner, c, 2 * c, weights=weights)
    assert (losses * weights).sum().item() == pytest.approx(objective(delta.tolist()), abs=1e-7)
    for t in range(len(owner)):
        moved = [[x + sign * 1e-6 * (t == j) for j, x in enumerate(delta.tolist())] for sign in (1, -1)]
        assert grad[t].item() == pytest.approx((objective(moved[0]) - objective(moved[1])) / 2e-6, abs=1e-6)
    for i in range(len(lengths)):  # all tokens of a response share its ratio
        own = owner == i
        assert_close(metrics["policy/ratio"][own], delta[own].mean().exp().expand(int(own.sum())))


@pytest.mark.parametrize("kind", LOSSES)
def test_new_equal_to_old_and_no_tokens(kind):
    old, A = noise(50, scale=5).float(), noise(50, seed=1).float()
    losses, metrics, grad = loss_and_grad(kind, old, old, A, torch.arange(50) % 7)
    assert metrics.pop("policy/ratio").tolist() == [1.0] * 50
    assert len(metrics) == 3 and not any(x.any() for x in metrics.values())
    assert torch.equal(losses, 0 * A if kind == "cpg" else -A) and torch.equal(grad, -A)
    losses, metrics, grad = loss_and_grad(kind, old[:0], old[:0], A[:0])  # a rank's empty pack
    assert losses.shape == grad.shape == (0,) and len(metrics) == 4


@pytest.mark.parametrize("kind", LOSSES)
def test_huge_ratios_stay_finite(kind):
    """fp32 ends at e^88."""
    delta, A = tensor([100.0, -100.0] * 2), tensor([1.0, 1.0, -1.0, -1.0])
    losses, metrics, grad = loss_and_grad(kind, delta - 50, torch.full((4,), -50.0), A)
    assert all(x.isfinite().all() for x in (losses, grad, *metrics.values()))
    assert metrics["policy/ratio"][0] > 1e8 and metrics["policy/approx_kl"][0] > 1e8
    assert grad[0] == 0 and grad[3] == 0  # clipped


# --- aggregation, entropy mask ---


def slow_aggregate(x: list, mask: list, loss_agg: str, limit: int) -> float:
    rows = [[v for v, m in zip(*pair) if m] for pair in zip(x, mask)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if loss_agg == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    divisor = {"seq-mean-token-mean": len, "seq-mean-token-sum": lambda row: 1}
    return sum(sum(row) / divisor.get(loss_agg, lambda row: limit)(row) for row in rows) / len(rows)


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@given(mask=masks, seed=seeds, limit=st.integers(5, 9), empty=st.integers(0, 3))
@quick
def test_token_weights_are_the_aggregate(loss_agg, mask, seed, limit, empty):
    mask = tensor(mask)
    x = noise(*mask.shape, seed=seed).float()
    weights = ppo_vl.token_weights(mask, loss_agg, limit)
    total = (weights * x).sum()
    assert total.item() == pytest.approx(slow_aggregate(x.tolist(), mask.tolist(), loss_agg, limit), abs=1e-5)
    assert not weights[~mask].any()
    more = torch.cat([mask, torch.zeros(empty, mask.shape[1]).bool()])  # empty responses do not count
    assert torch.equal(ppo_vl.token_weights(more, loss_agg, limit)[: len(mask)], weights)


@given(mask=masks, seed=seeds, ratio=st.floats(0.01, 1), ties=st.booleans())
@quick
def test_high_entropy_mask_is_the_right_share_of_the_mask(mask, seed, ratio, ties):
    mask = tensor(mask)
    entropy = noise(*mask.shape, seed=seed).abs()
    entropy = entropy.round() if ties else entropy
    out = ppo_vl.high_entropy_mask(entropy, mask, ratio)
    assert out.dtype == torch.bool and not (out & ~mask).any()
    assert torch.equal(ppo_vl.high_entropy_mask(torch.where(mask, entropy, 99.0), mask, ratio), out)
    if mask.any():
        wanted, lowest = max(1, round(ratio * int(mask.sum()))), entropy[out].min()
        assert (mask & (entropy > lowest)).sum() < wanted <= out.sum()
        assert torch.equal(out, mask & (entropy >= lowest)) and (ties or out.sum() == wanted)


# --- value loss, rewards ---


@pytest.mark.parametrize(
    "new, old, target, clip, loss, clipped",
    [
        (1.0, 0.0, 2.0, 0.2, 3.24, True),  # the docstring's example
        (1.0, 0.0, 2.0, 0.0, 1.0, False),  # off
        (-1.0, 0.0, 2.0, 0.2, 9.0, False),  # moved away: the larger, unclipped error stays
        (0.1, 0.0, 2.0, 0.2, 3.61, False),  # within reach
        (-1.0, 0.0, -2.0, 0.2, 3.24, True),
    ],
)
def test_value_loss(new, old, target, clip, loss, clipped):
    losses, worse = ppo_vl.compute_value_loss(tensor([new]), tensor([old]), tensor([target]), clip)
    assert losses.item() == pytest.approx(loss) and worse.item() == clipped


def test_values_within_the_clip_range_never_count_as_clipped():
    """old + (new - old) is not new in fp32: which of both errors is larger is then a matter of rounding."""
    old, new, returns = (noise(10_000, seed=seed).float() for seed in range(3))
    assert ((old + (new - old) - returns).square() > (new - returns).square()).any()
    losses, worse = ppo_vl.compute_value_loss(new, old, returns, 10.0)
    assert not worse.any() and torch.equal(losses, (new - returns).square())


def test_overlong_costs_in_the_last_fifth_of_the_limit():
    ids = [[], [1] * 8, [1] * 9, [1] * 10]
    assert ppo_vl.overlong(completion_ids=ids, limit=10) == pytest.approx([0, 0, -0.5, -1])


# --- scores of all steps so far, importance weights ---


def test_scores_are_normalized_by_all_training_scores_so_far():
    def normalize(scores: list, moments: torch.Tensor, kind: str):
        scores = tensor([scores])
        return ppo_vl.normalize_scores(scores, ~scores.isnan(), moments, kind)

    scores, moments = normalize([5.0], torch.zeros(3).double(), "scale")
    assert scores.tolist() == [[5.0]]  # one has no spread
    scores, moments = normalize([1.0, 3.0, math.nan], moments, "scale")
    std = math.sqrt(8 / 3)  # of 5, 1, 3
    assert_close(scores[:, :2], tensor([[1 / std, 3 / std]]))
    assert moments.tolist() == [3, 9.0, 35.0]
    scores, _ = normalize([3.0, 3.0], moments, "standardize")  # 5, 1, 3, 3, 3: mean 3
    assert_close(scores, torch.zeros(1, 2))


def test_importance_weights_of_the_sampler_are_truncated_and_scale_gradients_alone():
    new = tensor([-1.0, -2.0, -3.0], requires_grad=True)
    weighed = ppo_vl.weigh_gradients(new, torch.zeros(3), tensor([-0.5, 0.5, -40.0]), limit=1.5)
    assert torch.equal(weighed, new)
    weighed.sum().backward()
    assert_close(new.grad, tensor([1.5, math.exp(-0.5), 1.5]))


# --- average of the weights, rounds of dynamic sampling ---


def test_average_of_the_weights_is_its_closed_form(monkeypatch):
    """beta^k w_0 + (1 - beta) sum_i beta^(k - i) w_i; a tied weight is one."""
    average, model = (ppo_vl.load_model(TINY, dtype) for dtype in (torch.float32, torch.bfloat16))
    names = ("lm_head.weight", "model.language_model.norm.weight")
    expected = {name: average.state_dict()[name].double() * 0.9**6 for name in names}
    for i in range(1, 7):
        for parameter in model.parameters():
            parameter.data.add_(0.1)
        weights = dict(ppo_vl.merged_weights(model))
        expected = {name: x + 0.1 * 0.9 ** (6 - i) * weights[name].double() for name, x in expected.items()}
        ppo_vl.update_average(average, model, 0.9)
    for name, x in expected.items():
        assert_close(average.state_dict()[name].double(), x, atol=1e-6, rtol=1e-6)


def test_rollouts_are_joined_prompt_by_prompt():
    def rollout(n: int, R: int) -> ppo_vl.Rollout:
        table, few = torch.full((2 * n, R), float(R)), torch.full((n, 2), float(R))
        return ppo_vl.Rollout(
            prompts=[R] * n,
            response_ids=[torch.arange(R)] * (2 * n),
            mask=table > 0,
            truncated=few > 5,
            rewards={"own": few},
            scores=few,
            sampler_logprobs=table,
            samples=[{"row": R}] * n,
            logged={"x": float(R)},
        )

    joined = ppo_vl.join(rollout(1, 3), rollout(2, 2))
    assert [*map(len, (joined.prompts, joined.response_ids, joined.samples))] == [3, 6, 3]
    assert joined.scores.tolist() == joined.rewards["own"].tolist() == [[3, 3], [2, 2], [2, 2]]
    assert joined.mask.tolist() == [[True] * 3] * 2 + [[True, True, False]] * 4
    assert joined.sampler_logprobs[2].tolist() == [2.0, 2.0, 0.0]

"""The pure functions of ppo_vl.py against numbers computed by hand and against the formulas of the papers."""

import itertools
import math
import runpy
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

import ppo_vl

GROUP_METHODS = ("reinforce_baseline", "rloo", "group_norm")
LOSSES = ("clip", "gspo")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
quick = settings(max_examples=60, deadline=None, derandomize=True)

eighths = st.integers(-80, 80).map(lambda k: k / 8)  # exact in fp32, and so are their sums and differences
finite = st.floats(-10, 10, allow_subnormal=False)
masks = st.integers(1, 5).flatmap(lambda R: st.lists(st.tuples(*[st.booleans()] * R), min_size=1, max_size=5))
response = st.tuples(eighths, st.booleans())  # score, mask
scored = st.integers(1, 6).flatmap(lambda G: st.lists(st.tuples(*[response] * G), min_size=1, max_size=5))
row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
seeds = st.integers(0, 10**6)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def ragged(lengths: list[int]) -> torch.Tensor:
    """Response mask (B, R)."""
    return torch.arange(max(lengths))[None] < tensor(lengths)[:, None]


def unzip(groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (n, G), NaN outside of the mask, and the mask (n, G)."""
    mask = tensor([[counts for _, counts in group] for group in groups])
    scores = tensor([[score for score, _ in group] for group in groups]).float()
    return scores.masked_fill(~mask, math.nan), mask


def test_worked_examples_of_the_docstrings():
    ones = torch.ones(1, 3)
    for mask, expected in (([[1, 1, 1]], [[0.125, 0.25, 0.5]]), ([[1, 0, 1]], [[0.25, 0, 0.5]])):
        rewards = tensor([[0.0, 0.0, 1.0]])
        advantages, _ = ppo_vl.compute_gae(rewards, ones / 2, tensor(mask).bool(), gamma=1.0, gae_lambda=0.5)
        assert advantages.tolist() == expected
    mask = tensor([[1, 1, 0], [1, 1, 0]]).bool()
    whitened = ppo_vl.whiten(tensor([[1.0, 2, 99], [3, 6, -99]]), mask)
    assert_close(whitened, tensor([[-2.0, -1, 0], [0, 3, 0]]) / math.sqrt(3.5))
    expected = [[[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]], [[1 / 4, 1 / 4, 0], [1 / 2, 0, 0]]]
    expected += [[[1 / 2, 1 / 2, 0], [1 / 2, 0, 0]], [[1 / 8, 1 / 8, 0], [1 / 8, 0, 0]]]
    for loss_agg, weights in zip(AGGREGATIONS, expected):
        assert_close(
            ppo_vl.compute_loss_weights(tensor([[1, 1, 0], [1, 0, 0]]), loss_agg, 4), tensor(weights)
        )
    scores, whole = tensor([[1.0, 2, 6]]), torch.ones(1, 3, dtype=torch.bool)
    root = math.sqrt(7)  # unbiased variance (4 + 1 + 9) / 2
    expected = {"gae": [1, 2, 6], "reinforce_baseline": [-2, -1, 3], "rloo": [-3, -1.5, 4.5]}
    for method, values in (expected | {"group_norm": [-2 / root, -1 / root, 3 / root]}).items():
        outcome = ppo_vl.subtract_baseline(scores, whole, method)
        assert_close(outcome, tensor([values]).float(), atol=2e-6, rtol=0)


# --- scores of a group ---


def center_by_loops(scores: torch.Tensor, mask: torch.Tensor, method: str) -> list[list[float]]:
    """Response by response, from the formulas of the papers; 0 outside of the mask."""
    groups = [[s for s, m in zip(*pair) if m] for pair in zip(scores.double().tolist(), mask.tolist())]
    out = torch.zeros(scores.shape, dtype=torch.float64)
    for g, i in mask.nonzero().tolist():
        group, score = groups[g], scores[g, i].item()
        centered, alone = score - math.fsum(group) / len(group), len(group) == 1
        if method == "rloo":
            centered = 0.0 if alone else score - (math.fsum(group) - score) / (len(group) - 1)
        if method == "group_norm":
            centered = 0.0 if alone else centered / (statistics.stdev(group) + 1e-6)
        out[g, i] = score if method in ("gae", "reinforce") else centered
    return out


@pytest.mark.parametrize("method", ["gae", "reinforce", *GROUP_METHODS])
@given(groups=scored, shift=eighths, scale=st.floats(0.125, 8, width=32), seed=seeds)
@quick
def test_subtract_baseline_is_the_formula_and_groups_ignore_shifts(method, groups, shift, scale, seed):
    scores, mask = unzip(groups)
    kept = scores.clone()
    out = ppo_vl.subtract_baseline(scores, mask, method)
    assert out.dtype == scores.dtype and torch.equal(scores.nan_to_num(9), kept.nan_to_num(9))
    assert_close(out.double(), center_by_loops(scores, mask, method), atol=1e-6, rtol=1e-6)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(scores)))
    assert_close(
        ppo_vl.subtract_baseline(scores[order], mask[order], method), out[order], atol=1e-6, rtol=1e-6
    )
    if method in GROUP_METHODS:
        moved = scores + shift * torch.arange(len(scores))[:, None]  # by another constant in each group
        assert_close(ppo_vl.subtract_baseline(moved, mask, method), out, atol=1e-5, rtol=1e-5)
        # a spread of at least 1/8 / sqrt(24) * 1/8 beside the 1e-6 in group_norm's denominator
        expected = out * (1 if method == "group_norm" else scale)
        assert_close(ppo_vl.subtract_baseline(scores * scale, mask, method), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", GROUP_METHODS)
def test_equal_scores_give_exactly_zero(method):
    for G, value in itertools.product(range(2, 33), (0.1, 1 / 3, 0.9 + 0.1, -7.7, 1e6, 1e-30)):
        scores = torch.full((3, G), value)
        scores[1, 0] += 0.5 + abs(value)  # a group with unequal scores, which must not affect the others
        mask = torch.ones(3, G, dtype=torch.bool)
        mask[2, 1:] = False  # alone
        out = ppo_vl.subtract_baseline(scores, mask, method)
        assert not out[[0, 2]].any() and out[1].all()


# --- token rewards, GAE, whitening ---


def test_score_lands_on_the_last_token_of_the_response():
    mask = tensor([[1, 1, 0], [1, 1, 1]]).bool()
    rewards = ppo_vl.compute_token_rewards(tensor([1.0, 2.0]), torch.full((2, 3), 0.1), mask)
    assert_close(rewards, tensor([[-0.1, 0.9, 0.0], [-0.1, -0.1, 1.9]]))
    mask = tensor([[0, 0, 0], [1, 0, 1]]).bool()  # a response that is not kept; one with an observation
    rewards = ppo_vl.compute_token_rewards(tensor([1.0, 2.0]), torch.full((2, 3), 0.1), mask)
    assert_close(rewards, tensor([[0.0, 0, 0], [-0.1, 0, 1.9]]))


def gae_by_loops(rewards, values, gamma: float, gae_lambda: float) -> list[float]:
    """One response: the sum of eq. (16) of 1506.02438 for each token."""
    T = len(rewards)
    values = [*values, 0.0]
    delta = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(T)]
    return [sum((gamma * gae_lambda) ** (s - t) * delta[s] for s in range(t, T)) for t in range(T)]


@given(lengths=row_lengths, seed=seeds, gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
@quick
def test_gae_is_its_sum_on_every_row(lengths, seed, gamma, gae_lambda):
    mask = ragged(lengths)  # the values outside of it must have no effect
    rewards, values = noise(*mask.shape, seed=seed), noise(*mask.shape, seed=seed + 1)
    advantages, returns = ppo_vl.compute_gae(rewards, values, mask, gamma, gae_lambda)
    for b, n in enumerate(lengths):
        expected = gae_by_loops(rewards[b, :n].tolist(), values[b, :n].tolist(), gamma, gae_lambda)
        assert advantages[b, :n].tolist() == pytest.approx(expected, abs=1e-9)
        assert_close(returns[b, :n], advantages[b, :n] + values[b, :n])
        assert not advantages[b, n:].any() and not returns[b, n:].any()


def test_a_trajectory_of_two_turns_by_hand():
    """Turns of two tokens and one, an observation of two in between. gamma 0.5, lambda 0.5, KL 0.25 per token.

    Rewards -0.25, -0.25, 2 - 0.25; values 1, 2, 4:   delta_5 = 1.75 - 4 = -2.25
    delta_2 = -0.25 + 0.5 * 4 - 2 = -0.25             delta_1 = -0.25 + 0.5 * 2 - 1 = -0.25
    A = -2.25, then -0.25 - 2.25 / 4 = -0.8125, then -0.25 - 0.8125 / 4 = -0.453125
    """
    mask = tensor([[1, 1, 0, 0, 1, 0]]).bool()
    rewards = ppo_vl.compute_token_rewards(tensor([2.0]), torch.full((1, 6), 0.25), mask)
    assert rewards.tolist() == [[-0.25, -0.25, 0, 0, 1.75, 0]]
    values = tensor([[1.0, 2, 1e6, -1e6, 4, 1e6]])  # those of observations and padding have no effect
    advantages, returns = ppo_vl.compute_gae(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [[-0.453125, -0.8125, 0, 0, -2.25, 0]]
    assert returns.tolist() == [[0.546875, 1.1875, 0, 0, 1.75, 0]]
    weights = [ppo_vl.compute_loss_weights(mask, loss_agg, 6)[0].tolist() for loss_agg in AGGREGATIONS]
    expected = [[x, x, 0, 0, x, 0] for x in (1 / 3, 1 / 3, 1, 1 / 6)]
    assert weights == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize("loss_type", LOSSES)
@given(mask=masks, seed=seeds, gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
@quick
def test_without_their_observations_trajectories_have_the_same_losses(
    loss_type, mask, seed, gamma, gae_lambda
):
    """A mask with holes gives exactly what the tokens in it give as responses without holes."""
    mask = tensor(mask)
    assume(mask.any())
    B, R = mask.shape
    kl, values, new, old = (noise(B, R, seed=seed + k, scale=0.3) for k in range(4))
    scores = noise(B, seed=seed + 5)

    def train(mask, kl, values, new, old):
        rewards = ppo_vl.compute_token_rewards(scores, kl, mask)
        advantages, returns = ppo_vl.compute_gae(rewards, values, mask, gamma, gae_lambda)
        advantages = ppo_vl.whiten(advantages, mask)
        losses, metrics = ppo_vl.compute_policy_loss(
            new_logprobs=new[mask],
            old_logprobs=old[mask],
            advantages=advantages[mask],
            response_of_token=torch.nonzero(mask)[:, 0].unique(return_inverse=True)[1],
            loss_type=loss_type,
            clip_low=0.2,
            clip_high=0.2,
        )
        value_losses, _ = ppo_vl.compute_value_loss(values[mask] + 0.3, values[mask], returns[mask], 0.2)
        weights = [ppo_vl.compute_loss_weights(mask, loss_agg, 9)[mask] for loss_agg in AGGREGATIONS]
        return [
            rewards[mask],
            advantages[mask],
            returns[mask],
            losses,
            value_losses,
            *weights,
            *metrics.values(),
        ]

    pad = torch.nn.utils.rnn.pad_sequence
    without = [pad([x[m] for x, m in zip(table, mask)], True) for table in (mask, kl, values, new, old)]
    for one, other in zip(train(mask, kl, values, new, old), train(*without)):
        assert torch.equal(one, other)


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
    assert not ppo_vl.whiten(
        noise(8, 3, scale=1e-7).float(), torch.ones(8, 3, dtype=torch.bool)
    ).any()  # rounding
    rounding = value + 1e-7 * abs(value) * noise(8, 3).float()  # fp32 resolves 6e-8
    assert not ppo_vl.whiten(rounding, torch.ones(8, 3, dtype=torch.bool)).any()
    for count in (1, 8, 12, 1000):
        assert not ppo_vl.whiten(torch.full((count, 3), value), torch.ones(count, 3, dtype=torch.bool)).any()


# --- policy losses ---


def loss_of_one_token(logratio: float, A: float, c: float, c_high: float) -> float:
    """One token (gspo: the ratio is the response's), as in the papers."""
    r = math.exp(logratio)
    return -min(r * A, min(max(r, 1 - c), 1 + c_high) * A)


def loss_and_grad(loss_type, new, old, advantages, response_of_token=None, c=0.2, c_high=0.28, weights=1.0):
    """Losses, metrics, and the gradient of the weighted sum of losses with respect to new."""
    new = new.clone().requires_grad_()
    if response_of_token is None:
        response_of_token = torch.arange(len(new))
    losses, metrics = ppo_vl.compute_policy_loss(
        new_logprobs=new,
        old_logprobs=old,
        advantages=advantages,
        response_of_token=response_of_token,
        loss_type=loss_type,
        clip_low=c,
        clip_high=c_high,
    )
    (losses * weights).sum().backward()
    assert all(x.shape == new.shape and not x.requires_grad for x in metrics.values())
    assert losses.shape == new.shape
    return losses.detach(), metrics, new.grad


@pytest.mark.parametrize("c, c_high", [(0.2, 0.2), (0.2, 0.28), (0.4, 0.1), (3e-4, 4e-4)])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_policy_losses_and_gradients_are_the_formulas(loss_type, c, c_high):
    """One token per response, hence also for gspo. Gradients of the reference are finite differences."""
    new, old, A = noise(300, seed=1, scale=0.8), noise(300, seed=2, scale=0.8), noise(300, seed=3)
    losses, metrics, grad = loss_and_grad(loss_type, new, old, A, None, c, c_high)
    low = high = 0
    for x, o, a, loss, g in zip(*(v.tolist() for v in (new, old, A, losses, grad))):
        assert loss == pytest.approx(loss_of_one_token(x - o, a, c, c_high), abs=1e-7)
        h = 1e-6
        above, below = (loss_of_one_token(x - o + sign * h, a, c, c_high) for sign in (1, -1))
        assert g == pytest.approx((above - below) / 2 / h, abs=1e-7)
        low += a < 0 and g == 0 and x < o
        high += a > 0 and g == 0
    assert metrics["policy/clipfrac_low"].sum() == low > 10
    assert metrics["policy/clipfrac_high"].sum() == high > 10
    assert_close(metrics["policy/ratio"], (new - old).exp())
    assert_close(metrics["policy/approx_kl"], (new - old).exp() - 1 - (new - old))


@given(lengths=row_lengths, seed=seeds, c=st.floats(0.05, 0.4))
@quick
def test_gspo_with_sequence_means_is_the_formula_of_whole_responses(lengths, seed, c):
    """J = mean_i min(s_i A_i, clip(s_i) A_i), s_i = exp(mean_t logratio): eq. (5) and (7)."""
    response_of_token = torch.repeat_interleave(tensor(lengths))
    M = len(response_of_token)
    old, delta = noise(M, seed=seed), noise(M, seed=seed + 1, scale=0.5)
    A = noise(len(lengths), seed=seed + 2)[response_of_token]  # one advantage per response

    def objective(logratio: list[float]) -> float:
        total, start = 0.0, 0
        for n in lengths:
            s, a = math.exp(sum(logratio[start : start + n]) / n), A[start].item()
            total, start = total - min(s * a, min(max(s, 1 - c), 1 + 2 * c) * a), start + n
        return total / len(lengths)

    weights = ppo_vl.compute_loss_weights(ragged(lengths), "seq-mean-token-mean", 16).double()[
        ragged(lengths)
    ]
    losses, metrics, grad = loss_and_grad(
        "gspo", old + delta, old, A, response_of_token, c, 2 * c, weights=weights
    )
    assert (losses * weights).sum().item() == pytest.approx(objective(delta.tolist()), abs=1e-6)
    for t in range(M):
        moved = [[x + sign * 1e-6 * (t == j) for j, x in enumerate(delta.tolist())] for sign in (1, -1)]
        assert grad[t].item() == pytest.approx((objective(moved[0]) - objective(moved[1])) / 2e-6, abs=1e-6)
    for i in range(len(lengths)):  # all tokens of a response share its ratio
        in_response = response_of_token == i
        assert_close(
            metrics["policy/ratio"][in_response],
            delta[in_response].mean().exp().expand(int(in_response.sum())),
        )


@pytest.mark.parametrize("loss_type", LOSSES)
def test_new_equal_to_old_and_no_tokens(loss_type):
    old, A = noise(50, scale=5).float(), noise(50, seed=1).float()
    losses, metrics, grad = loss_and_grad(loss_type, old, old, A, torch.arange(50) % 7)
    assert metrics.pop("policy/ratio").tolist() == [1.0] * 50
    assert len(metrics) == 3 and not any(x.any() for x in metrics.values())
    assert torch.equal(losses, -A) and torch.equal(grad, -A)
    losses, metrics, grad = loss_and_grad(loss_type, old[:0], old[:0], A[:0])  # a pack without responses
    assert losses.shape == grad.shape == (0,) and len(metrics) == 4


@pytest.mark.parametrize("loss_type", LOSSES)
def test_huge_ratios_stay_finite(loss_type):
    """fp32 overflows at e^88."""
    delta, A = tensor([100.0, -100.0] * 2), tensor([1.0, 1.0, -1.0, -1.0])
    losses, metrics, grad = loss_and_grad(loss_type, delta - 50, torch.full((4,), -50.0), A)
    assert all(x.isfinite().all() for x in (losses, grad, *metrics.values()))
    assert metrics["policy/ratio"][0] > 1e8 and metrics["policy/approx_kl"][0] > 1e8
    assert grad[0] == 0 and grad[3] == 0  # clipped


# --- weights of tokens ---


def aggregate_by_loops(x: list, mask: list, loss_agg: str, limit: int) -> float:
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
def test_loss_weights_are_the_aggregate(loss_agg, mask, seed, limit, empty):
    mask = tensor(mask)
    x = noise(*mask.shape, seed=seed).float()
    weights = ppo_vl.compute_loss_weights(mask, loss_agg, limit)
    total = (weights * x).sum()
    assert total.item() == pytest.approx(
        aggregate_by_loops(x.tolist(), mask.tolist(), loss_agg, limit), abs=1e-5
    )
    assert not weights[~mask].any()
    padded = torch.cat([mask, torch.zeros(empty, mask.shape[1]).bool()])  # empty responses do not count
    assert torch.equal(ppo_vl.compute_loss_weights(padded, loss_agg, limit)[: len(mask)], weights)


# --- value loss, rewards ---


@pytest.mark.parametrize(
    "new, old, target, clip, loss, clipped",
    [
        (1.0, 0.0, 2.0, 0.2, 1.62, True),  # the docstring's example
        (1.0, 0.0, 2.0, 0.0, 0.5, False),  # not clipped
        (-1.0, 0.0, 2.0, 0.2, 4.5, False),  # moved away: the unclipped error is larger
        (0.1, 0.0, 2.0, 0.2, 1.805, False),  # inside the range
        (-1.0, 0.0, -2.0, 0.2, 1.62, True),
    ],
)
def test_value_loss(new, old, target, clip, loss, clipped):
    losses, worse = ppo_vl.compute_value_loss(tensor([new]), tensor([old]), tensor([target]), clip)
    assert losses.item() == pytest.approx(loss) and worse.item() == clipped


def test_values_within_the_clip_range_never_count_as_clipped():
    """old + (new - old) differs from new by rounding, which must not decide whether a value is clipped."""
    old, new, returns = (noise(10_000, seed=seed).float() for seed in range(3))
    assert ((old + (new - old) - returns).square() > (new - returns).square()).any()
    losses, worse = ppo_vl.compute_value_loss(new, old, returns, 10.0)
    assert not worse.any() and torch.equal(losses, (new - returns).square() / 2)


def test_overlong_is_dapos_penalty():
    overlong = runpy.run_path(str(ROOT / "examples/custom_reward.py"))["overlong"]
    overlong.__globals__["MAX_RESPONSE_LENGTH"] = 10
    ids = [[], [1] * 8, [1] * 9, [1] * 10]
    assert overlong(completion_ids=ids, answer=ids) == pytest.approx([0, 0, -0.5, -1])


# --- explained variance, selection ---


def test_explained_variance():
    returns = tensor([1.0, 2, 3])
    assert ppo_vl.explained_variance(returns, returns) == 1
    assert ppo_vl.explained_variance(torch.zeros(3), returns) == 0
    assert_close(ppo_vl.explained_variance(tensor([3.0, 2, 1]), returns), tensor(-3.0))
    assert ppo_vl.explained_variance(returns, torch.ones(3)) == 0  # nothing to explain


def select(scores, rewards=None, truncated=None, **flags):
    scores = tensor(scores)
    truncated = torch.zeros(scores.shape).bool() if truncated is None else tensor(truncated)
    rollout = SimpleNamespace(scores=scores, rewards=rewards or {}, truncated=truncated)
    flags = {"rollout_batch_size": 4, "num_samples_per_prompt": 2} | flags
    return ppo_vl.select_responses(ppo_vl.Args(**flags), rollout).tolist()


def test_responses_are_kept_if_they_have_a_score_and_are_not_masked():
    nan = math.nan
    assert select([[1.0, 1], [nan, 0]]) == [[True, True], [False, True]]
    truncated = [[False, True], [False, False]]
    assert select([[1.0, 1], [1, 0]], None, truncated) == [[True, True], [True, True]]
    assert select([[1.0, 1], [1, 0]], None, truncated, mask_truncated=True) == [[True, False], [True, True]]


def test_dynamic_sampling_keeps_the_first_groups_that_differ_in_accuracy():  # B4
    scores = [[0.1, 0.0], [1, 0], [0.9, 0], [0, 1]]
    accuracy = {"accuracy": tensor([[0.0, 0], [1, 0], [1, 0], [0, 1]])}
    none, both = [False, False], [True, True]
    assert select(scores, accuracy, dynamic_sampling=2) == [none, both, both, none]  # 2 groups are enough
    assert select(scores, dynamic_sampling=2) == [both, both, none, none]  # without accuracy, by score
    no_accuracy = {"accuracy": torch.full((4, 2), math.nan)}
    assert select(scores, no_accuracy, dynamic_sampling=2) == [both, both, none, none]
    # B6: a response that is masked does not make its group useful
    scores, truncated = [[1.0, 0, 0], [1, 0, 1]], [[True, False, False], [False, False, True]]
    kept = select(scores, truncated=truncated, dynamic_sampling=1, mask_truncated=True)
    assert kept == [[False] * 3, [True, True, False]]

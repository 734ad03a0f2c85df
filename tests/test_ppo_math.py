"""The pure functions of ppo_vl.py against numbers computed by hand and against the formulas of the papers."""

import math
import statistics

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

import ppo_vl

quick = settings(max_examples=60, deadline=None, derandomize=True)

finite = st.floats(-10, 10, allow_subnormal=False)
masks = st.integers(1, 5).flatmap(lambda R: st.lists(st.tuples(*[st.booleans()] * R), min_size=1, max_size=5))
row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
seeds = st.integers(0, 10**6)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def ragged(lengths: list[int]) -> torch.Tensor:
    """Response mask (B, R)."""
    return torch.arange(max(lengths))[None] < tensor(lengths)[:, None]


def test_worked_examples_of_the_docstrings():
    ones = torch.ones(1, 3)
    for mask, expected in (([[1, 1, 1]], [[0.125, 0.25, 0.5]]), ([[1, 0, 1]], [[0.25, 0, 0.5]])):
        rewards = tensor([[0.0, 0.0, 1.0]])
        advantages, _ = ppo_vl.compute_gae(rewards, ones / 2, tensor(mask).bool(), gamma=1.0, gae_lambda=0.5)
        assert advantages.tolist() == expected
    mask = tensor([[1, 1, 0], [1, 1, 0]]).bool()
    whitened = ppo_vl.whiten(tensor([[1.0, 2, 99], [3, 6, -99]]), mask)
    assert_close(whitened, tensor([[-2.0, -1, 0], [0, 3, 0]]) / math.sqrt(3.5))
    losses, _, grad = loss_and_grad(tensor([1.5, 1.5]).log(), torch.zeros(2), tensor([1.0, -1.0]), 0.2, 0.2)
    assert_close(losses, tensor([-1.2, 1.5]))
    assert grad[0] == 0 and grad[1] > 0
    explained = ppo_vl.explained_variance(tensor([1.0, 2, 5]), tensor([1.0, 2, 3]))
    assert_close(explained, tensor(-1 / 3))


# --- token rewards, GAE, whitening ---
def test_score_lands_on_the_last_token_of_the_response():
    mask = tensor([[1, 1, 0], [1, 1, 1]]).bool()
    rewards = ppo_vl.compute_token_rewards(tensor([1.0, 2.0]), torch.full((2, 3), 0.1), mask)
    assert_close(rewards, tensor([[-0.1, 0.9, 0.0], [-0.1, -0.1, 1.9]]))
    mask = tensor([[0, 0, 0], [1, 0, 1]]).bool()  # a response that is not kept; one with an observation
    rewards = ppo_vl.compute_token_rewards(tensor([math.nan, 2.0]), torch.full((2, 3), 0.1), mask)
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


@given(mask=masks, seed=seeds, gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
@quick
def test_without_their_observations_trajectories_have_the_same_losses(mask, seed, gamma, gae_lambda):
    """A mask with holes gives exactly what the tokens in it give as responses without holes."""
    mask = tensor(mask)
    assume(mask.any())
    kl, values = (noise(*mask.shape, seed=seed + k) for k in range(2))
    scores = noise(len(mask), seed=seed + 2)

    def inputs_of_the_losses(mask, kl, values) -> list[torch.Tensor]:
        rewards = ppo_vl.compute_token_rewards(scores, kl, mask)
        advantages, returns = ppo_vl.compute_gae(rewards, values, mask, gamma, gae_lambda)
        return [x[mask] for x in (rewards, ppo_vl.whiten(advantages, mask), returns)]

    pad = torch.nn.utils.rnn.pad_sequence
    without = [pad([x[m] for x, m in zip(table, mask)], True) for table in (mask, kl, values)]
    for one, other in zip(inputs_of_the_losses(mask, kl, values), inputs_of_the_losses(*without)):
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
        mean, std = statistics.fmean(values), math.sqrt(statistics.pvariance(values) + 1e-8)
        assert out[mask].tolist() == pytest.approx([(v - mean) / std for v in values], abs=1e-6)


def test_advantages_that_differ_by_rounding_stay_small_when_whitened():
    x = 0.3 + 1e-8 * noise(8, 3)
    assert ppo_vl.whiten(x, torch.ones(x.shape, dtype=torch.bool)).abs().max() < 1e-3


# --- policy loss ---
def loss_of_one_token(logratio: float, A: float, c: float, c_high: float) -> float:
    """One token, as in the paper."""
    r = math.exp(logratio)
    return -min(r * A, min(max(r, 1 - c), 1 + c_high) * A)


def loss_and_grad(new, old, advantages, c=0.2, c_high=0.28):
    """Losses, metrics, and the gradient of the sum of losses with respect to new."""
    new = new.clone().requires_grad_()
    losses, metrics = ppo_vl.compute_policy_loss(new, old, advantages, c, c_high)
    losses.sum().backward()
    assert all(x.shape == new.shape and not x.requires_grad for x in metrics.values())
    assert losses.shape == new.shape and torch.equal(metrics.pop("loss/policy"), losses.detach())
    return losses.detach(), metrics, new.grad


@pytest.mark.parametrize("c, c_high", [(0.2, 0.2), (0.2, 0.28), (0.4, 0.1), (3e-4, 4e-4)])
def test_policy_losses_and_gradients_are_the_formulas(c, c_high):
    """Gradients of the reference are finite differences."""
    new, old, A = noise(300, seed=1, scale=0.8), noise(300, seed=2, scale=0.8), noise(300, seed=3)
    losses, metrics, grad = loss_and_grad(new, old, A, c, c_high)
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


# --- value loss, rewards ---
@pytest.mark.parametrize(
    "new, old, target, clip, loss, clipped",
    [
        (1.0, 0.0, 2.0, 0.2, 1.62, True),  # the docstring's example
        (1.0, 0.0, 2.0, 0.0, 0.5, False),  # not clipped
        (-1.0, 0.0, 2.0, 0.2, 4.5, False),  # moved away: the unclipped error is larger
        (0.1, 0.0, 2.0, 0.2, 1.805, False),  # inside the range
        (-1.0, 0.0, -2.0, 0.2, 1.62, True),
        (2.0, 1.0, 3.0, 0.2, 1.62, True),  # the range is around the old value
    ],
)
def test_value_loss(new, old, target, clip, loss, clipped):
    losses, metrics = ppo_vl.compute_value_loss(tensor([new]), tensor([old]), tensor([target]), clip)
    assert losses.item() == pytest.approx(loss) and metrics["value/clipfrac"].item() == clipped
    assert metrics["loss/value"].item() == losses.item()


def test_values_within_the_clip_range_never_count_as_clipped():
    old, new, returns = (noise(10_000, seed=seed).float() for seed in range(3))
    assert ((old + (new - old) - returns).square() > (new - returns).square()).any()
    losses, metrics = ppo_vl.compute_value_loss(new, old, returns, 10.0)
    assert not metrics["value/clipfrac"].any() and torch.equal(losses, (new - returns).square() / 2)


# --- explained variance ---
def test_explained_variance():
    returns = tensor([1.0, 2, 3])
    assert ppo_vl.explained_variance(returns, returns) == 1
    assert ppo_vl.explained_variance(torch.zeros(3), returns) == 0
    assert_close(ppo_vl.explained_variance(tensor([3.0, 2, 1]), returns), tensor(-3.0))

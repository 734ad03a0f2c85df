"""The pure functions of ppo_vl.py against numbers computed by hand."""

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

import ppo_vl


def test_score_lands_on_the_last_token_of_the_response():
    mask = tensor([[1, 1, 0], [1, 1, 1]]).bool()
    rewards = ppo_vl.compute_token_rewards(tensor([1.0, 2.0]), torch.full((2, 3), 0.1), mask)
    assert_close(rewards, tensor([[-0.1, 0.9, 0.0], [-0.1, -0.1, 1.9]]))
    mask = tensor([[0, 0, 0], [1, 0, 1]]).bool()  # a response that is not kept; one with an observation
    rewards = ppo_vl.compute_token_rewards(tensor([math.nan, 2.0]), torch.full((2, 3), 0.1), mask)
    assert_close(rewards, tensor([[0.0, 0, 0], [-0.1, 0, 1.9]]))


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


def test_whitening_is_over_the_mask():
    mask = tensor([[1, 1, 0], [1, 1, 0]]).bool()
    for garbage in (99.0, 1e30, math.nan):
        whitened = ppo_vl.whiten(tensor([[1.0, 2, garbage], [3, 6, -garbage]]), mask)
        assert_close(whitened, tensor([[-2.0, -1, 0], [0, 3, 0]]) / math.sqrt(3.5))
    assert not ppo_vl.whiten(torch.ones(2, 3), ~mask & mask).any(), "nothing is kept"
    rounding = 0.3 + torch.linspace(-1e-8, 1e-8, 3).expand(2, 3)
    assert ppo_vl.whiten(rounding, mask).abs().max() < 1e-3, "rounding errors stay small"


def test_policy_loss_and_gradient_by_hand():
    """Ratios 1.5 and 0.5 with both signs of the advantage. Clipped losses have no gradient."""
    ratio, advantages = tensor([1.5, 1.5, 0.5, 0.5]), tensor([1.0, -1.0, 1.0, -1.0])
    old_logprobs = torch.full((4,), -1.0)
    new_logprobs = (old_logprobs + ratio.log()).requires_grad_()
    losses, metrics = ppo_vl.compute_policy_loss(new_logprobs, old_logprobs, advantages, 0.2, 0.3)
    losses.sum().backward()
    assert_close(losses.detach(), tensor([-1.3, 1.5, -0.5, 0.8]))
    assert_close(new_logprobs.grad, tensor([0.0, 1.5, -0.5, 0.0]))
    assert metrics["policy/clipfrac_high"].tolist() == [1, 0, 0, 0]
    assert metrics["policy/clipfrac_low"].tolist() == [0, 0, 0, 1]
    assert_close(metrics["policy/ratio"], ratio)
    assert_close(metrics["policy/approx_kl"], ratio - 1 - ratio.log())
    assert torch.equal(metrics["loss/policy"], losses)


@pytest.mark.parametrize(
    "new, old, target, clip, loss, clipped",
    [
        (1.0, 0.0, 2.0, 0.2, 1.62, True),  # the docstring's example
        (1.0, 0.0, 2.0, 0.0, 0.5, False),  # not clipped
        (-1.0, 0.0, 2.0, 0.2, 4.5, False),  # moved away: the unclipped error is larger
        (0.1, 0.0, 2.0, 0.2, 1.805, False),  # inside the range
        (2.0, 1.0, 3.0, 0.2, 1.62, True),  # the range is around the old value
    ],
)
def test_value_loss(new, old, target, clip, loss, clipped):
    new = tensor([new], requires_grad=True)
    losses, metrics = ppo_vl.compute_value_loss(new, tensor([old]), tensor([target]), clip)
    losses.backward()
    assert losses.item() == pytest.approx(loss) and metrics["value/clipfrac"].item() == clipped
    assert new.grad.item() == pytest.approx(0 if clipped else new.item() - target)
    assert metrics["loss/value"].item() == losses.item()


def test_values_within_the_clip_range_never_count_as_clipped():
    old, new, returns = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(0))
    losses, metrics = ppo_vl.compute_value_loss(new, old, returns, 10.0)
    assert not metrics["value/clipfrac"].any() and torch.equal(losses, (new - returns).square() / 2)


def test_explained_variance():
    returns = tensor([1.0, 2, 3])
    assert ppo_vl.explained_variance(returns, returns) == 1
    assert ppo_vl.explained_variance(torch.zeros(3), returns) == 0
    assert_close(ppo_vl.explained_variance(tensor([1.0, 2, 5]), returns), tensor(-1 / 3))

"""KL estimators and the coefficient's controller: hand-computed values, and the claims of the docstrings."""

import doctest
import math

import pytest
import torch

import common.kl
from common.kl import KL_ESTIMATORS, kl_estimate, next_kl_coef


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [[0.5, -1.0, 0.0], [2.0, 0.25, -0.5]]),
        ("k2", [[0.125, 0.5, 0.0], [2.0, 0.03125, 0.125]]),
        # exp(-d) - 1 + d: e^-0.5 - 0.5, e - 2, 0, e^-2 + 1, e^-0.25 - 0.75, e^0.5 - 1.5
        ("k3", [[0.10653066, 0.71828183, 0.0], [1.13533528, 0.02880078, 0.14872127]]),
    ],
)
def test_estimators_by_hand(estimator, expected):
    ref_logprobs = torch.tensor([[-1.5, -1.0, -3.0], [-4.0, -0.75, -1.5]])
    d = torch.tensor([[0.5, -1.0, 0.0], [2.0, 0.25, -0.5]])
    kl = kl_estimate(ref_logprobs + d, ref_logprobs, estimator)
    torch.testing.assert_close(kl, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_half_precision_inputs_give_float32():
    kl = kl_estimate(torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.5]).bfloat16(), "k3")
    assert kl.dtype == torch.float32


def test_k3_near_zero_keeps_its_digits():
    """exp(-d) - 1 + d written out loses everything to cancellation where d is small; d^2 / 2 is what is left of it."""
    d = torch.tensor([1e-2, 1e-3])
    torch.testing.assert_close(kl_estimate(d, torch.zeros(2), "k3"), d.square() / 2, rtol=4e-3, atol=5e-11)
    assert (kl_estimate(torch.linspace(-3, 3, 601), torch.zeros(601), "k3") >= -1e-9).all()


def test_unknown_estimator():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; choose one of k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.fixture
def categorical():
    """Policy logits and reference log-probs over 6 tokens, and KL(policy || reference) in full."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, generator=generator).float().requires_grad_()
    ref_logprobs = torch.randn(6, generator=generator).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    return logits, logprobs, ref_logprobs, (logprobs.exp() * (logprobs - ref_logprobs)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased(categorical, estimator):
    """The expectation over every token the policy could have drawn, weighted by its probability."""
    _, logprobs, ref_logprobs, kl = categorical
    torch.testing.assert_close((logprobs.exp() * kl_estimate(logprobs, ref_logprobs, estimator)).sum(), kl)


def test_gradients_on_policy(categorical):
    """As a loss the sampling distribution is a constant. k1: no gradient at all; k2: that of the KL; k3: another's."""
    logits, logprobs, ref_logprobs, kl = categorical
    [true] = torch.autograd.grad(kl, logits, retain_graph=True)
    drawn = logprobs.detach().exp()
    grads = {}
    for estimator in KL_ESTIMATORS:
        loss = (drawn * kl_estimate(logprobs, ref_logprobs, estimator)).sum()
        [grads[estimator]] = torch.autograd.grad(loss, logits, retain_graph=True)
    assert true.norm() > 0.1
    torch.testing.assert_close(grads["k1"], torch.zeros_like(true), rtol=0, atol=1e-6)
    torch.testing.assert_close(grads["k2"], true, rtol=1e-4, atol=1e-6)
    reverse = (ref_logprobs.exp() * (ref_logprobs - logprobs)).sum()  # k3 follows KL(reference || policy)
    torch.testing.assert_close(grads["k3"], torch.autograd.grad(reverse, logits)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 0.05)),  # 10 % above
        (5.4, 0.1 * (1 - 0.1 * 0.05)),
        (7.2, 0.1 * (1 + 0.2 * 0.05)),  # the clip's edge
        (60.0, 0.1 * (1 + 0.2 * 0.05)),  # clipped
        (0.0, 0.1 * (1 - 0.2 * 0.05)),
        (-3.0, 0.1 * (1 - 0.2 * 0.05)),  # the k1 mean may be negative
    ],
)
def test_adaptive_coefficient(kl, expected):
    assert next_kl_coef(0.1, kl, kl_target=6.0, kl_horizon=10_000, num_sequences=500) == pytest.approx(
        expected, rel=1e-9
    )


def test_fixed_coefficient():
    assert next_kl_coef(0.1, 1e9, kl_target=None, kl_horizon=10_000, num_sequences=500) == 0.1


def test_controller_finds_the_target():
    """A policy whose KL falls as the coefficient grows settles where KL is the target."""
    kl_coef = 0.01
    for _ in range(2000):
        kl_coef = next_kl_coef(kl_coef, 0.6 / kl_coef, kl_target=6.0, kl_horizon=10_000, num_sequences=500)
    assert math.isclose(kl_coef, 0.1, rel_tol=1e-3)


def test_doctests():
    result = doctest.testmod(common.kl)
    assert result.attempted > 0 and result.failed == 0

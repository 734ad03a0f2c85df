"""KL estimators and the coefficient's controller: hand-computed values, and the claims of the docstrings."""

import doctest
import math

import pytest
import torch

import common.kl
import common.packing
from common.kl import KL_ESTIMATORS, kl_estimate, next_kl_coef

K1, K2 = [[0.5, -1.0, 0.0], [2.0, 0.25, -0.5]], [[0.125, 0.5, 0.0], [2.0, 0.03125, 0.125]]
# exp(-d) - 1 + d: e^-0.5 - 0.5, e - 2, 0, e^-2 + 1, e^-0.25 - 0.75, e^0.5 - 1.5
K3 = [[0.10653066, 0.71828183, 0.0], [1.13533528, 0.02880078, 0.14872127]]


@pytest.mark.parametrize("estimator, expected", [("k1", K1), ("k2", K2), ("k3", K3)])
def test_estimators_by_hand(estimator, expected):
    ref_logprobs = torch.tensor([[-1.5, -1.0, -3.0], [-4.0, -0.75, -1.5]])
    d = torch.tensor(K1)
    kl = kl_estimate(ref_logprobs + d, ref_logprobs, estimator)
    torch.testing.assert_close(kl, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    half = kl_estimate(torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.5]).bfloat16(), estimator)
    assert half.dtype == torch.float32


def test_k3_near_zero_keeps_its_digits():
    """exp(-d) - 1 + d loses everything to cancellation where d is small; d^2 / 2 is what is left of it."""
    d = torch.tensor([1e-2, 1e-3])
    torch.testing.assert_close(kl_estimate(d, torch.zeros(2), "k3"), d.square() / 2, rtol=4e-3, atol=5e-11)
    assert (kl_estimate(torch.linspace(-3, 3, 601), torch.zeros(601), "k3") >= -1e-9).all()


def test_expectations_and_gradients_on_policy():
    """k1 and k3 have the right mean. As a loss, with what was drawn a constant, k1 has no gradient at all, k2
    that of the KL, k3 that of the reverse KL."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator).requires_grad_()  # of all tokens that could be drawn
    ref_logprobs, logprobs = torch.randn(6, generator=generator).log_softmax(-1), logits.log_softmax(-1)
    p, means = logprobs.detach().exp(), {}
    for estimator in KL_ESTIMATORS:
        loss = (p * kl_estimate(logprobs, ref_logprobs, estimator)).sum()
        means[estimator] = loss.item(), torch.autograd.grad(loss, logits, retain_graph=True)[0]
    kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    reverse = (ref_logprobs.exp() * (ref_logprobs - logprobs)).sum()
    of_kl, of_reverse = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (kl, reverse))
    assert means["k1"][0] == pytest.approx(kl.item()) and means["k3"][0] == pytest.approx(kl.item())
    for estimator, expected in (("k1", 0 * of_kl), ("k2", of_kl), ("k3", of_reverse)):
        torch.testing.assert_close(means[estimator][1], expected, rtol=1e-4, atol=1e-6)


def test_coefficient():
    """On target, 10 % off, at the clip's edge, beyond it; the mean of k1 may be negative."""
    how = {"kl_target": 6.0, "kl_horizon": 10_000, "num_sequences": 500}
    for kl, factor in ((6, 0), (6.6, 0.1), (5.4, -0.1), (7.2, 0.2), (60, 0.2), (0, -0.2), (-3, -0.2)):
        assert next_kl_coef(0.1, kl, **how) == pytest.approx(0.1 * (1 + factor * 0.05), rel=1e-9)
    assert next_kl_coef(0.1, 1e9, **how | {"kl_target": None}) == next_kl_coef(0.1, math.nan, **how) == 0.1
    kl_coef = 0.01
    for _ in range(2000):  # a policy whose KL falls as the coefficient grows settles where it is the target
        kl_coef = next_kl_coef(kl_coef, 0.6 / kl_coef, **how)
    assert kl_coef == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("module", [common.kl, common.packing])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0

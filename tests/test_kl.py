"""KL estimators: values by hand, precision, docstrings. Expectations and gradients: test_theory.py."""

import doctest

import pytest
import torch

import common.kl
import common.packing
from common.kl import kl_estimate

K1 = [[0.5, -1.0, 0.0], [2.0, 0.25, -0.5]]
K2 = [[0.125, 0.5, 0.0], [2.0, 0.03125, 0.125]]
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


def test_k3_is_precise_near_zero():
    """For small d, k3 is about d^2 / 2, but computing exp(-d) - 1 + d would cancel all digits."""
    d = torch.tensor([1e-2, 1e-3])
    torch.testing.assert_close(kl_estimate(d, torch.zeros(2), "k3"), d.square() / 2, rtol=4e-3, atol=5e-11)
    assert (kl_estimate(torch.linspace(-3, 3, 601), torch.zeros(601), "k3") >= -1e-9).all()


@pytest.mark.parametrize("module", [common.kl, common.packing])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0

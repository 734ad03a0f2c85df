"""docs/theory.md: the examples of sections 2, 4 and 8; k3 near 0; doctests."""

import doctest
import re
from math import comb

import pytest
import torch
from conftest import ROOT
from test_forks import load

from common import kl, packing
from common.kl import kl_estimate
from rloo import compute_advantages, compute_rloo_loss

SECTIONS = (ROOT / "docs/theory.md").read_text().split("\n## ")[1:]


def test_leave_one_out_is_unbiased_and_grpo_is_not():
    G = 8
    rows = re.findall(r"^\| (0\.\d+) \| (.*) \|$", SECTIONS[1], re.M)
    assert [p for p, _ in rows] == ["0.5", "0.1", "0.02"]
    for p, cells in rows:
        p, loo, grpo = float(p), 0.0, 0.0
        for k in range(G + 1):
            rewards = torch.tensor([[1.0] * k + [0.0] * (G - k)], dtype=torch.double)
            score = rewards[0] - p  # the gradient of log p(response) in the logit
            advantages = compute_advantages(rewards, torch.ones(1, G, dtype=bool), normalize=False)[0]
            probability = comb(G, k) * p**k * (1 - p) ** (G - k)
            loo += probability * float((advantages * score).mean())
            if 0 < k < G:
                grpo += probability * float(((rewards[0] - rewards.mean()) / rewards.std() * score).mean())
        assert loo == pytest.approx(truth := p * (1 - p))
        assert cells == f"{truth:.3f} | {loo:.3f} | {grpo:.3f} | {grpo / truth:.2f}"


def test_estimators_of_the_kl_in_the_reward_and_in_the_loss():
    logit = torch.tensor(4.0).log().requires_grad_()  # p = (0.8, 0.2)
    logprobs = torch.stack([logit, torch.zeros(())]).log_softmax(0)
    probs = logprobs.detach().exp()
    ref_logprobs = torch.tensor([0.5, 0.5]).log()
    divergence = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    (gradient,) = torch.autograd.grad(divergence, logit, retain_graph=True)
    assert f"The KL is {divergence:.3f} and its gradient {gradient:.3f}." in SECTIONS[3]
    for name in ("k1", "k2", "k3"):
        estimate = kl_estimate(logprobs, ref_logprobs, name)  # (2,)
        mean = (probs * estimate).sum()
        deviation = (probs * (estimate - mean).square()).sum().sqrt()
        surrogates = (probs * estimate.detach() * logprobs).sum(), (probs * estimate).sum()  # reward, loss
        gradients = [torch.autograd.grad(x, logit, retain_graph=True)[0] for x in surrogates]
        row = " | ".join(f"{x.item():.3f}" for x in (mean, deviation, *gradients)).replace("-0.000", "0.000")
        assert f"| {name} | {row} |" in SECTIONS[3]


def test_the_page_on_a_step_has_the_ratios_of_this_page():
    anatomy = (ROOT / "docs/anatomy.html").read_text()
    assert "1.23 in update 3" in anatomy and "1.87 afterwards" in anatomy


def test_weights_of_tokens_if_the_loss_is_divided_by_lengths(tmp_path):
    grpo, dr_grpo = (load(tmp_path, name).compute_rloo_loss for name in ("grpo", "dr_grpo"))
    cases = (compute_rloo_loss, 2), (grpo, 2), (dr_grpo, 10), (dr_grpo, 2 * 24)
    logprobs = torch.zeros(10, requires_grad=True)
    advantages, response_of_token = torch.tensor([1.0, -1.0]), torch.tensor([0] * 2 + [1] * 8)
    rows = re.findall(r"^\| .* \| (-?[\d.]+) \| (-?[\d.]+) \|$", SECTIONS[7], re.M)
    for (function, divisor), row in zip(cases, rows, strict=True):
        losses, _ = function(logprobs, torch.zeros(10), advantages, response_of_token, 0.2, 0.2)
        (gradient,) = torch.autograd.grad(-losses.sum() / divisor, logprobs)
        assert row == (f"{gradient[0]:.3g}", f"{gradient[-1]:.3g}")


# ---- functions that the page describes ----
def test_k3_is_precise_near_zero():
    """For small d, k3 is about d^2 / 2, but computing exp(-d) - 1 + d would cancel all digits."""
    d = torch.tensor([1e-2, 1e-3])
    torch.testing.assert_close(kl_estimate(d, torch.zeros(2), "k3"), d.square() / 2, rtol=4e-3, atol=5e-11)
    assert (kl_estimate(torch.linspace(-3, 3, 601), torch.zeros(601), "k3") >= -1e-9).all()
    assert kl_estimate(d.bfloat16(), d.bfloat16(), "k3").dtype == torch.float32


def test_doctests():
    assert all(x.attempted and not x.failed for x in map(doctest.testmod, (kl, packing)))

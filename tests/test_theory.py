"""docs/theory.md: its examples, by the scripts' functions or by summing over all cases; k3 near 0; doctests."""

import doctest
import re

import pytest
import torch
from conftest import ROOT
from test_forks import load
from torch.distributions import Binomial

from common import kl, packing
from ppo_vl import compute_gae
from rloo import compute_advantages, compute_rloo_loss

SECTIONS = (ROOT / "docs/theory.md").read_text().split("\n## ")[1:]


def test_baselines_leave_the_mean_and_reduce_the_variance():
    probs, rewards = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 2.0, 6.0])
    scores = torch.eye(3) - probs  # (3, 3): the gradient of log p(y) in the logits, for each response y
    gradient = probs * (rewards - probs @ rewards)
    weights = probs * scores.square().sum(1)
    best = float(weights @ rewards / weights.sum())
    for baseline in (0.0, 2.3, best):
        estimates = (rewards - baseline)[:, None] * scores
        assert torch.allclose(probs @ estimates, gradient, atol=1e-6)
        assert f"{probs @ (estimates - gradient).square().sum(1):.2f}" in SECTIONS[0]
    assert "({:.2f}, {:.2f}, {:.2f})".format(*gradient) in SECTIONS[0] and f"$b$, {best:.2f}." in SECTIONS[0]
    y = torch.cartesian_prod(*[torch.arange(3)] * 8)  # (6561, 8): all groups of eight responses
    loo = compute_advantages(rewards[y], y >= 0, normalize=False)[..., None] * scores[y]
    assert f"/56 = {probs[y].prod(1) @ (loo.mean(1) - gradient).square().sum(1):.3f}$" in SECTIONS[-1]


def test_leave_one_out_is_unbiased_and_grpo_is_not():
    rewards = (torch.arange(8) < torch.arange(9)[:, None]).double()  # (9, G): 0 to 8 are correct
    grpo = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True).clamp(min=1e-9)
    loo = compute_advantages(rewards, rewards >= 0, normalize=False)
    for p in (0.5, 0.1, 0.02):
        probs = Binomial(8, torch.tensor(p).double()).log_prob(rewards.sum(1)).exp()
        a, b = (probs @ (x * (rewards - p)).mean(1) for x in (loo, grpo))  # r - p: the gradient of log p
        assert float(a) == pytest.approx(truth := p * (1 - p))
        assert f"| {p} | {truth:.4f} | {a:.4f} | {b:.4f} | {b / truth:.2f} |" in SECTIONS[1]


def test_gae_from_lambda_0_to_1():
    rows = re.findall(r"^\| (?:reward|value|advantage)[^|]*\| (.*) \|$", SECTIONS[2], re.M)
    rewards, values, *advantages = torch.tensor([[float(x) for x in row.split(" | ")] for row in rows])
    for gae_lambda, expected in zip((0.0, 0.5, 1.0), advantages, strict=True):
        result, _ = compute_gae(rewards[None], values[None], torch.ones(1, 4, dtype=bool), 1.0, gae_lambda)
        assert torch.allclose(result[0], expected, atol=1e-6)


def test_estimators_of_the_kl_in_the_reward_and_in_the_loss():
    logit = torch.tensor(4.0).log().requires_grad_()  # p = (0.8, 0.2)
    logprobs = torch.stack([logit, torch.zeros(())]).log_softmax(0)
    probs, ref_logprobs = logprobs.detach().exp(), torch.tensor([0.5, 0.5]).log()
    divergence = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    (gradient,) = torch.autograd.grad(divergence, logit, retain_graph=True)
    assert f"The KL is {divergence:.3f} and its gradient {gradient:.3f}." in SECTIONS[3]
    for name in ("k1", "k2", "k3"):
        estimate = kl.kl_estimate(logprobs, ref_logprobs, name)  # (2,)
        mean = (probs * estimate).sum()
        deviation = (probs * (estimate - mean).square()).sum().sqrt()
        surrogates = (probs * estimate.detach() * logprobs).sum(), (probs * estimate).sum()  # reward, loss
        gradients = [torch.autograd.grad(x, logit, retain_graph=True)[0] for x in surrogates]
        row = " | ".join(f"{x.item():.3f}" for x in (mean, deviation, *gradients)).replace("-0.000", "0.000")
        assert f"| {name} | {row} |" in SECTIONS[3]
    # Of two tokens, a logit z decides the first, a or b. The second is as above after a, as in the reference after b.
    z = torch.zeros((), requires_grad=True)
    first = torch.stack([z, z.detach()]).log_softmax(0).repeat_interleave(2)
    paths = torch.stack([first, torch.cat([logprobs.detach(), ref_logprobs])], 1)  # (4, 2)
    k1, k2, k3 = (kl.kl_estimate(paths, ref_logprobs, name).sum(1) for name in ("k1", "k2", "k3"))
    total, probs = paths.sum(1), paths.detach().sum(1).exp()
    objectives = total.exp() @ k1, probs * k1.detach() @ total, probs @ k2, probs @ k3
    gradients = [f"{torch.autograd.grad(x, z, retain_graph=True)[0]:.3f}" for x in objectives]
    assert gradients == ["0.048", "0.048", "0.000", "0.000"]
    assert f"= {objectives[0]:.3f}$" in SECTIONS[3] and "= 0.048$" in SECTIONS[3]


def test_ratios_and_weights_correct_for_older_policies_and_clips_bias():
    old, rewards, responses = torch.tensor([0.4, 0.6]), torch.tensor([1.0, 0.0]), torch.arange(2)
    for p, clip, name in ((0.4, 0.2, "0.2"), (0.5, 0.2, "0.2"), (0.5, 99, "none")):
        logit = torch.tensor(p).logit().requires_grad_()
        logprobs = torch.stack([logit, torch.zeros(())]).log_softmax(0)
        losses, metrics = compute_rloo_loss(logprobs, old.log(), rewards - 0.4, responses, clip, clip)
        a, b = (-torch.autograd.grad(x, logit, retain_graph=True)[0] for x in old * losses)
        ratios = ", ".join(f"{x:.2f}" for x in metrics["policy/ratio"])
        row = f"{p} | {name} | {ratios} | {a + 0:.3f} | {b:.3f} | {a + b:.3f} | {p * (1 - p):.3f}"
        assert f"| {row} |" in SECTIONS[4]
    assert re.search(r"1\.23 in update 3.{,99}\s1\.87", (ROOT / "docs/anatomy.html").read_text(), re.S)
    sampler, gradient, w = torch.tensor([[0.2, 0.8], [0.6, -0.4], [2.0, 0.75]])  # w is old / sampler
    for name, (a, b) in (("no weight", w / w), ("$w$", w), (r"$\min(w, 1.5)$", w.clamp(max=1.5))):
        x, y = sampler * torch.stack([a, b]) * (rewards - 0.2) * gradient  # of the log-probs
        assert f"| {name} | {a:.2f}, {b:.2f} | {x:.3f} | {y:.3f} | {x + y:.3f} |" in SECTIONS[8]


def test_the_best_policy_under_a_kl_penalty():
    ref, rewards = torch.tensor([[0.5, 0.3, 0.2], [1.0, 2.0, 6.0]], dtype=torch.double)
    for beta in (10, 2, 0.5):
        best = (ref.log() + rewards / beta).softmax(0)
        cells = beta, *best, best @ rewards, best @ (best.log() - ref.log())
        assert "| {} | {:.2f}, {:.2f}, {:.2f} | {:.2f} | {:.2f} |".format(*cells) in SECTIONS[6]


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


def test_k3_is_precise_near_zero():
    """For small d, k3 is about d^2 / 2, but computing exp(-d) - 1 + d would cancel all digits."""
    d = torch.tensor([1e-2, 1e-3])
    torch.testing.assert_close(kl.kl_estimate(d, torch.zeros(2), "k3"), d.square() / 2, rtol=4e-3, atol=5e-11)
    assert (kl.kl_estimate(torch.linspace(-3, 3, 601), torch.zeros(601), "k3") >= -1e-9).all()
    assert kl.kl_estimate(d.bfloat16(), d.bfloat16(), "k3").dtype == torch.float32


def test_doctests():
    assert all(x.attempted and not x.failed for x in map(doctest.testmod, (kl, packing)))

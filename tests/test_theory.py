"""docs/theory.md: its examples, by the scripts' functions or by summing over all cases; k3 near 0; doctests."""

import doctest
import re
from math import comb

import pytest
import torch
from conftest import ROOT
from test_forks import load

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
    assert "({:.2f}, {:.2f}, {:.2f})".format(*gradient) in SECTIONS[0]
    assert f"$b$, {best:.2f}." in SECTIONS[0]
    y = torch.cartesian_prod(*[torch.arange(3)] * 8)  # (6561, 8): all groups of eight responses
    loo = compute_advantages(rewards[y], y >= 0, normalize=False)[..., None] * scores[y]
    assert f"/56 = {probs[y].prod(1) @ (loo.mean(1) - gradient).square().sum(1):.3f}$" in SECTIONS[-1]


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
    anatomy = (ROOT / "docs/anatomy.html").read_text()
    assert "1.23 in update 3" in anatomy and "1.87 afterwards" in anatomy  # the page has these numbers, too
    sampler, gradient, w = torch.tensor([[0.2, 0.8], [0.6, -0.4], [2.0, 0.75]])  # w is old / sampler
    for name, (a, b) in (("no weight", w / w), ("$w$", w), (r"$\min(w, 1.5)$", w.clamp(max=1.5))):
        x, y = sampler * torch.stack([a, b]) * (rewards - 0.2) * gradient  # of the log-probs
        assert f"| {name} | {a:.2f}, {b:.2f} | {x:.3f} | {y:.3f} | {x + y:.3f} |" in SECTIONS[8]


def test_the_best_policy_under_a_kl_penalty():
    ref, rewards = torch.tensor([[0.5, 0.3, 0.2], [1.0, 2.0, 6.0]], dtype=torch.double)
    rows = re.findall(r"^\| ([\d.]+) \| (.*) \|$", SECTIONS[6], re.M)
    assert [beta for beta, _ in rows] == ["10", "2", "0.5"]
    for beta, cells in rows:
        best = (ref.log() + rewards / float(beta)).softmax(0)
        kl = best @ (best.log() - ref.log())
        assert cells == "{:.2f}, {:.2f}, {:.2f} | {:.2f} | {:.2f}".format(*best, best @ rewards, kl)


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

"""KL divergence between the trained policy and the frozen reference: three per-token estimators and the coefficient's control.

Notation: d = logprobs - ref_logprobs of the sampled token, which was drawn from the policy.
"""

import torch

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) in nats, same shape as the inputs, any shape.

    k1 = d                 unbiased, may be negative, highest variance
    k2 = d^2 / 2           biased, never negative; its *gradient* is that of KL(policy || reference) for on-policy samples
    k3 = exp(-d) - 1 + d   unbiased, never negative, low variance while d is small

    As a loss (not in the reward) prefer k2 or k3: on-policy the expected gradient of k1 is zero.
    Source: http://joschu.net/blog/kl-approx.html. Raises ValueError for an unknown estimator.

    >>> kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), "k1").tolist()
    [0.5, -1.0]
    """
    d = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"unknown KL estimator {estimator!r}; choose one of {', '.join(KL_ESTIMATORS)}")


def next_kl_coef(kl_coef: float, kl: float, kl_target: float | None, kl_horizon: int, num_sequences: int) -> float:
    """The KL coefficient for the next rollout.

    kl_target None: fixed. Otherwise the proportional controller of https://arxiv.org/abs/1909.08593 section 2.2:
    kl_coef * (1 + clip(kl / kl_target - 1, -0.2, 0.2) * num_sequences / kl_horizon).

    kl: mean over sequences of the KL summed over each response (nats). num_sequences: responses since the last call, over
    all ranks.

    >>> round(next_kl_coef(0.1, kl=9.0, kl_target=6.0, kl_horizon=1000, num_sequences=100), 6)
    0.102
    """
    if kl_target is None:
        return kl_coef
    error = min(max(kl / kl_target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_sequences / kl_horizon)

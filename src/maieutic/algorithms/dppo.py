"""DPPO: a trust region on the probability itself instead of on the ratio (Qi et al. 2026; setting of Eduardo, arXiv 2610.06446).

A token is kept when its update cannot leave the trust region, judged on the sampled token against all others
("binary": Bernoulli distributions with success probabilities μ and π):

    tv:  A > 0: π − μ ≤ δ          A ≤ 0: π − μ ≥ −δ                               (δ = 0.10)
    kl:  KL(Bern(μ) ‖ Bern(π)) ≤ δ, or the step −∇loss moves π towards μ           (δ = 0.05)

    loss = −A · min(π/μ, ratio_cap) · log π   for kept tokens (the ratio is detached), else 0,
           + kl_beta · k3(π‖π_ref)            for every token

Dropped tokens stay in the denominator. The value is exactly this surrogate: its gradient is −A · min(r, cap) · ∇log π.
Everything is fp32, and log(1 − p) is taken from log p, since 1 − p rounds to 0 long before p reaches 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from maieutic.algorithms.base import TokenLoss, check_inputs, k3, log_ratio, reference_kl

DEFAULT_DELTA = {"tv": 0.10, "kl": 0.05}
# log of the largest fp32 below 1: a probability that rounded to 1 is taken as this one.
_LOG_ALMOST_ONE = -(2.0**-24)


def log1mexp(log_p: Tensor) -> Tensor:
    """log(1 − p) from log p ≤ 0, accurate at both ends (Mächler 2012); log p above −2⁻²⁴ counts as −2⁻²⁴."""
    log_p = log_p.clamp(max=_LOG_ALMOST_ONE)
    near_one = log_p > -0.6931472  # p > 1/2
    return torch.where(near_one, torch.log(-torch.expm1(log_p)), torch.log1p(-torch.exp(log_p)))


def binary_kl(mu_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """KL(Bern(μ) ‖ Bern(π)) = μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π)), fp32, finite and ≥ 0 for every log-prob ≤ 0."""
    mu, pi = mu_logprobs.float(), logprobs.float()
    mu, pi = mu.clamp(max=_LOG_ALMOST_ONE), pi.clamp(max=_LOG_ALMOST_ONE)
    first = mu.exp() * (mu - pi)
    second = -torch.expm1(mu) * (log1mexp(mu) - log1mexp(pi))
    return (first + second).clamp(min=0.0)


@dataclass(frozen=True)
class DPPO:
    """Settings and loss in one: an instance is a :class:`~maieutic.algorithms.base.LossFn`."""

    divergence: Literal["tv", "kl"] = "tv"
    delta: float | None = None
    """None: 0.10 for ``tv``, 0.05 for ``kl``."""
    ratio_cap: float = 10.0
    kl_beta: float = 0.0

    def __post_init__(self) -> None:
        if self.divergence not in DEFAULT_DELTA:
            raise ValueError(f"divergence is 'tv' or 'kl', not {self.divergence!r}")
        if self.threshold <= 0 or self.ratio_cap <= 0 or self.kl_beta < 0:
            raise ValueError(
                "DPPO needs delta > 0, ratio_cap > 0 and kl_beta ≥ 0, got "
                f"{self.delta}, {self.ratio_cap}, {self.kl_beta}"
            )

    @property
    def threshold(self) -> float:
        """δ in use."""
        return DEFAULT_DELTA[self.divergence] if self.delta is None else self.delta

    def __call__(
        self,
        logprobs_T: Tensor,
        mu_logprobs_T: Tensor,
        advantages_T: Tensor,
        ref_logprobs_T: Tensor | None = None,
    ) -> TokenLoss:
        """Per-token loss; see the module's docstring. ``clipped_high`` / ``clipped_low``: dropped with A > 0 / A ≤ 0."""
        logp, mu, adv = check_inputs(logprobs_T, mu_logprobs_T, advantages_T, ref_logprobs_T, self.kl_beta)
        with torch.no_grad():
            log_r = log_ratio(logp, mu)
            ratio = log_r.exp()
            gap = logp.exp() - mu.exp()
            up = adv > 0
            if self.divergence == "tv":
                kl = k3(log_r)
                kept = torch.where(up, gap <= self.threshold, gap >= -self.threshold)
            else:
                kl = binary_kl(mu, logp)
                towards = torch.where(up, gap < 0, gap > 0)
                kept = (kl <= self.threshold) | towards
            weight = torch.where(kept, adv * ratio.clamp(max=self.ratio_cap), 0.0)
            metrics = {
                "ratio": ratio,
                "kl_mu_pi": kl,
                "kept": kept.float(),
                "clipped_low": (~kept & ~up).float(),
                "clipped_high": (~kept & up).float(),
            }
        loss = -weight * logp
        if self.kl_beta > 0 and ref_logprobs_T is not None:
            kl_ref = reference_kl(logp, ref_logprobs_T)
            loss = loss + self.kl_beta * kl_ref
            metrics["kl_ref"] = kl_ref.detach()
        return TokenLoss(loss, metrics)

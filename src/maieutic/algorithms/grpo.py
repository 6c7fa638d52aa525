"""GRPO's clipped surrogate (DeepSeekMath, arXiv 2402.03300, equation 3), with the sampler as the old policy.

With r = π/μ, per token:

    loss = −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) + kl_beta · k3(π‖π_ref)

μ is the distribution that the engine sampled from; no "old" policy is recomputed. Different bounds are DAPO's "clip higher"
(arXiv 2503.14476). The average is over all trained tokens of the global batch, not per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maieutic.algorithms.base import TokenLoss, check_inputs, k3, log_ratio, reference_kl


@dataclass(frozen=True)
class GRPO:
    """Settings and loss in one: an instance is a :class:`~maieutic.algorithms.base.LossFn`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or not self.clip_high > 0 or self.kl_beta < 0:
            raise ValueError(
                "GRPO needs 0 < clip_low < 1, clip_high > 0 and kl_beta ≥ 0, got "
                f"{self.clip_low}, {self.clip_high}, {self.kl_beta}"
            )

    def __call__(
        self,
        logprobs_T: Tensor,
        mu_logprobs_T: Tensor,
        advantages_T: Tensor,
        ref_logprobs_T: Tensor | None = None,
    ) -> TokenLoss:
        """Per-token loss; see the module's docstring. ``kept`` is 0 where clipping takes the gradient away."""
        logp, mu, adv = check_inputs(logprobs_T, mu_logprobs_T, advantages_T, ref_logprobs_T, self.kl_beta)
        log_r = log_ratio(logp, mu)
        r = log_r.exp()
        loss = -torch.minimum(r * adv, r.clamp(1 - self.clip_low, 1 + self.clip_high) * adv)

        with torch.no_grad():
            clipped_low = (r < 1 - self.clip_low) & (adv < 0)
            clipped_high = (r > 1 + self.clip_high) & (adv > 0)
            metrics = {
                "ratio": r.detach(),
                "kl_mu_pi": k3(log_r.detach()),
                "kept": (~(clipped_low | clipped_high)).float(),
                "clipped_low": clipped_low.float(),
                "clipped_high": clipped_high.float(),
            }
        if self.kl_beta > 0 and ref_logprobs_T is not None:
            kl_ref = reference_kl(logp, ref_logprobs_T)
            loss = loss + self.kl_beta * kl_ref
            metrics["kl_ref"] = kl_ref.detach()
        return TokenLoss(loss, metrics)

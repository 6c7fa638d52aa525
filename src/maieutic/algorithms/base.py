"""What every loss takes and returns, and the pieces that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# exp(20) ≈ 5e8: beyond it a ratio carries no information, and inf · 0 would turn a zero advantage into NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenLoss:
    """A loss before averaging.

    ``loss_T``: fp32 with gradient; its sum over all ranks divided by the global token count is the objective.
    ``metrics``: name → detached fp32 tensor [T] (``kept`` and ``clipped`` are 0/1).
    """

    loss_T: Tensor
    metrics: dict[str, Tensor]


class LossFn(Protocol):
    """A per-token policy loss."""

    def __call__(
        self,
        logprobs_T: Tensor,
        mu_logprobs_T: Tensor,
        advantages_T: Tensor,
        ref_logprobs_T: Tensor | None = None,
    ) -> TokenLoss:
        """log π with gradient, log μ of the sampling distribution, advantages, and log π_ref where a KL term is on."""
        ...


def check_inputs(
    logprobs_T: Tensor,
    mu_logprobs_T: Tensor,
    advantages_T: Tensor,
    ref_logprobs_T: Tensor | None,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three inputs in fp32 (μ and A detached); ValueError when shapes differ or a needed reference is absent.

    Half precision must not be used in what follows: bf16 cannot tell 1 − 1e-3 from 1.
    """
    shape = logprobs_T.shape
    if mu_logprobs_T.shape != shape or advantages_T.shape != shape or logprobs_T.dim() != 1:
        raise ValueError(
            "a loss takes three flat tensors of one length, got log-probs "
            f"{tuple(shape)}, sampling log-probs {tuple(mu_logprobs_T.shape)}, advantages {tuple(advantages_T.shape)}"
        )
    if beta > 0 and (ref_logprobs_T is None or ref_logprobs_T.shape != shape):
        got = None if ref_logprobs_T is None else tuple(ref_logprobs_T.shape)
        raise ValueError(
            f"kl_beta = {beta} needs reference log-probs of shape {tuple(shape)}, got {got}: compute them with the "
            "initial policy before the first optimizer step"
        )
    return logprobs_T.float(), mu_logprobs_T.detach().float(), advantages_T.detach().float()


def log_ratio(logprobs_T: Tensor, mu_logprobs_T: Tensor) -> Tensor:
    """log(π/μ), clamped to ±20 so that its exponential stays finite (the gradient of a clamped token is zero)."""
    return (logprobs_T - mu_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(log_ratio_T: Tensor) -> Tensor:
    """Schulman's k3 estimator r − 1 − log r ≥ 0 for ``log_ratio_T`` = log r.

    With x ~ p and r = q/p its expectation is KL(p‖q) (http://joschu.net/blog/kl-approx.html). ``expm1`` keeps its digits
    where r is close to 1.
    """
    return torch.expm1(log_ratio_T) - log_ratio_T


def reference_kl(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """k3 estimate of KL(π‖π_ref) a token, as in DeepSeekMath (arXiv 2402.03300) equation 4; gradient flows to π.

    Its value is unbiased under π; its gradient is that of KL(π_ref‖π) in expectation, as in every trainer that puts k3 in
    the loss without DeepSeek-V3.2's importance weight.
    """
    return k3(log_ratio(ref_logprobs_T.detach().float(), logprobs_T))

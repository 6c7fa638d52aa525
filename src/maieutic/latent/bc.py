r"""Behaviour cloning: imitate the logged moves.

    L(θ) = mean over the batch of −log π_θ(a|s)  +  β · mean over batch and moves of (log π_θ(·|s))²

with π = softmax of the logits. β = 0 gives calibrated move probabilities (the behaviour policy of importance sampling);
d3rlpy's DiscreteBC has the same objective with β = 0.5.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def bc_loss(logits_NA: Tensor, moves_N: Tensor, *, beta: float = 0.0) -> Tensor:
    """The scalar objective. ``logits_NA`` float ``[N, A]``, ``moves_N`` int64 ``[N]``."""
    log_pi = F.log_softmax(logits_NA, -1)
    loss = F.nll_loss(log_pi, moves_N)
    return loss + beta * (log_pi**2).mean() if beta else loss

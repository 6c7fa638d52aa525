r"""Behaviour cloning: imitate the logged moves.

    L(θ) = mean over the batch of −log softmax(z_θ(s))_a  +  β · mean(z_θ(s)²)

with logits z. β = 0 gives calibrated move probabilities (used as the behaviour policy in importance sampling and augmentation);
d3rlpy's DiscreteBC has the same objective with β = 0.5.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def bc_loss(logits_NA: Tensor, moves_N: Tensor, *, beta: float = 0.0) -> Tensor:
    """The scalar objective. ``logits_NA`` float ``[N, A]``, ``moves_N`` int64 ``[N]``."""
    loss = F.cross_entropy(logits_NA, moves_N)
    return loss + beta * (logits_NA**2).mean() if beta else loss

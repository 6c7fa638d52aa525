r"""Conservative Q-learning with discrete moves (Kumar et al. 2020; α = 4 in the paper).

    a*   = argmax_a mean_k Q_k(s', a)                                         double-Q: chosen by the online critics
    y    = r + γ (1 − done) min_k Q̄_k(s', a*)                                 valued by the target critics
    TD   = Σ_k mean over the batch of huber(y − Q_k(s, a)),  huber(d) = d²/2 for |d| < 1, else |d| − 1/2
    C    = mean over the batch of  log Σ_a exp Q(s, a) − Q(s, a_logged),      Q = mean_k Q_k
    L(θ) = TD + α · C

C pushes down moves that the data do not hold; its minimiser under α → ∞ is behaviour cloning. With terminal rewards of ±1 a
large α therefore leaves little room against a skewed behaviour policy: a stationary point has
softmax(Q)_a = π_b(a) (1 − (Q_a − y_a)/α) while |Q_a − y_a| < 1, so at α = 4 a move is preferred over another only if the
data hold it at least about 0.6 times as often. Better data (augmentation) and not a better optimiser is the way out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class CqlLoss:
    """The objective and its two parts (scalars)."""

    total: Tensor
    td: Tensor
    conservative: Tensor


def double_q_targets(
    rewards_N: Tensor, done_N: Tensor, next_q_KNA: Tensor, next_target_q_KNA: Tensor, *, gamma: float
) -> Tensor:
    """``y`` float ``[N]`` without gradient."""
    with torch.no_grad():
        best_N1 = next_q_KNA.mean(0).argmax(-1, keepdim=True)
        valued_KN = next_target_q_KNA.gather(-1, best_N1.expand(len(next_target_q_KNA), -1, 1)).squeeze(-1)
        return rewards_N + gamma * (1 - done_N) * valued_KN.min(0).values


def cql_loss(q_KNA: Tensor, moves_N: Tensor, targets_N: Tensor, *, alpha: float) -> CqlLoss:
    """The objective of critics' values ``[K, N, A]`` at the logged moves ``[N]`` and targets ``[N]``."""
    one_hot = F.one_hot(moves_N, q_KNA.shape[-1]).to(q_KNA.dtype)
    chosen_KN = (q_KNA * one_hot).sum(-1)
    td = F.huber_loss(chosen_KN, targets_N.expand_as(chosen_KN), reduction="none").mean(-1).sum()
    conservative = (torch.logsumexp(q_KNA.mean(0), -1) - chosen_KN.mean(0)).mean()
    return CqlLoss(td + alpha * conservative, td, conservative)

r"""Fitted Q-iteration (Ernst et al. 2005): repeated regression on bootstrapped targets.

    y_k = r + γ (1 − done) max_a' Q_k(s', a')          computed once for the whole data set
    Q_{k+1} = argmin_Q  mean (Q(s, a) − y_k)²           a fixed number of gradient steps, warm-started

Targets stay still during a regression, so no target network is needed. They are clipped to the range that returns can have
(|y| ≤ max |terminal reward| when rewards are terminal only), which is what keeps extrapolation from running away.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fqi_targets(
    rewards_N: Tensor, done_N: Tensor, next_q_NA: Tensor, *, gamma: float, bound: float | None = None
) -> Tensor:
    """``y`` float ``[N]`` without gradient. ``done_N`` is 1.0 or 0.0; ``bound``: most |y| (None: no clipping)."""
    with torch.no_grad():
        y = rewards_N + gamma * (1 - done_N) * next_q_NA.max(-1).values
        return y if bound is None else y.clamp(-bound, bound)


def fqi_loss(q_NA: Tensor, moves_N: Tensor, targets_N: Tensor) -> Tensor:
    """Mean squared error at the logged moves; scalar."""
    chosen = q_NA.gather(-1, moves_N[:, None]).squeeze(-1)
    return ((chosen - targets_N) ** 2).mean()

"""Adam (Kingma and Ba 2015) over one flat vector: the parameters of a small network become views of it, and so do their gradients.

For networks of a few thousand weights the cost of an update is the number of operations, not their size: one vector takes seven,
whatever the number of layers. Tests hold it to ``torch.optim.Adam``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class FlatAdam:
    """``weight_decay`` is L2 added to the gradient, as in ``torch.optim.Adam``. Parameters keep their values and their identity."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        self.values = torch.cat([p.detach().flatten() for p in params])
        """All parameters, float ``[P]``; ``grad`` ``[P]`` likewise."""
        self.grad = torch.zeros_like(self.values)
        self._mean, self._square = torch.zeros_like(self.values), torch.zeros_like(self.values)
        self._room = torch.empty_like(self.values)
        self.steps = 0
        at = 0
        for p in params:
            p.data = self.values[at : at + p.numel()].view_as(p)
            p.grad = self.grad[at : at + p.numel()].view_as(p)
            at += p.numel()

    @torch.no_grad()
    def step(self) -> None:
        """One update with what ``grad`` holds."""
        self.steps += 1
        first, second = self.betas
        grad = self.grad
        if self.weight_decay:
            grad = torch.add(grad, self.values, alpha=self.weight_decay, out=self._room)
        self._mean.lerp_(grad, 1 - first)
        self._square.mul_(second).addcmul_(grad, grad, value=1 - second)
        torch.sqrt(self._square, out=self._room)
        self._room.mul_((1 - second**self.steps) ** -0.5).add_(self.eps)
        self.values.addcdiv_(self._mean, self._room, value=-self.lr / (1 - first**self.steps))

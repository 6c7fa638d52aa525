r"""The gradient of the CQL objective in closed form: what autograd gives, at a fraction of the cost for networks this small.

With N rows, K critics and Q = mean_k Q_k, the objective of :mod:`maieutic.latent.cql` has::

    ∂L/∂Q_k(s, a) = [a = a_logged] · clip(Q_k(s, a) − y, −1, 1) / N  +  α / (N K) · (softmax(Q(s, ·))_a − [a = a_logged])

and the layers of a ReLU network pass it back as usual. Tests hold it to autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maieutic.latent.networks import Mlp


def target_table(rewards_N: Tensor, done_N: Tensor, target_q_KNA: Tensor, *, gamma: float) -> Tensor:
    """``r + γ (1 − done) min_k Q̄_k(s', a)`` for every move a: float ``[N, A]``.

    The target critics stand still between copies, so the table does too; picking the column of the online critics' a* gives
    :func:`maieutic.latent.cql.double_q_targets`.
    """
    return rewards_N[:, None] + gamma * (1 - done_N)[:, None] * target_q_KNA.amin(0)


class CqlStep:
    """Loss and gradient for batches of ``n`` rows, in buffers that are made once.

    The parameters of ``net`` must have gradients and keep their storage (:class:`maieutic.latent.adam.FlatAdam` sees to both).
    """

    def __init__(self, net: Mlp, n: int, *, alpha: float) -> None:
        self.net, self.n, self.alpha = net, n, alpha
        k, sizes = net.members, [*net.hidden, net.outputs]
        # One network is plain matrices, several are batches of them.
        self._single = k == 1
        self._product = torch.mm if k == 1 else torch.bmm
        self._affine: Any = torch.addmm if k == 1 else torch.baddbmm
        pairs = list(zip(net.weights, net.biases, strict=True))
        self._layers = [
            (self._flat(w.detach()).mT, b.detach()[0] if k == 1 else b.detach()[:, None]) for w, b in pairs
        ]
        self._grads = [(self._flat(_grad(w)), self._flat(_grad(b)[:, None])) for w, b in pairs]
        # States and next states pass the online critics together; only the first half is passed back.
        self._out = [torch.empty(k, 2 * n, size) for size in sizes]
        self._half = [self._flat(h)[..., :n, :] for h in self._out]
        self._back = [torch.empty(k, n, size) for size in sizes]
        self._forward = [self._flat(h) for h in self._out]
        self._backward = [(self._flat(g), self._flat(g).mT) for g in self._back]

    def _flat(self, x: Tensor) -> Tensor:
        return x[0] if self._single else x

    @torch.no_grad()
    def __call__(self, both_2NF: Tensor, moves_N: Tensor, table_NA: Tensor) -> Tensor:
        """Set the gradient of every parameter and return the loss (scalar).

        ``both_2NF``: standardised states and next states; ``table_NA``: :func:`target_table` of these rows.
        """
        n, k, last = self.n, self.net.members, len(self._layers) - 1
        x = both_2NF.view(2 * n, -1) if self._single else both_2NF.view(1, 2 * n, -1).expand(k, -1, -1)
        h = x
        for i, (w, b) in enumerate(self._layers):
            h = self._affine(b, h, w, out=self._forward[i])
            if i < last:
                h.relu_()
        mean_2NA = self._out[last][0] if self._single else self._out[last].mean(0)
        at = moves_N[None, :, None].expand(k, -1, 1)
        y = table_NA.gather(1, mean_2NA[n:].argmax(1, keepdim=True))[None].expand(k, -1, 1)
        chosen = self._out[last][:, :n].gather(2, at)
        log_pi = mean_2NA[:n].log_softmax(1)
        # log Σ_a exp Q(s, a) − Q(s, a_logged) = −log softmax(Q(s, ·))_{a_logged}
        conservative = F.nll_loss(log_pi, moves_N)
        loss = F.huber_loss(chosen, y, reduction="sum").div_(n).add_(conservative, alpha=self.alpha)

        share = self.alpha / (n * k)
        grad = self._back[last]
        torch.mul(log_pi.exp_(), share, out=grad[0])
        if not self._single:
            grad[1:] = grad[0]
        grad.scatter_add_(2, at, (chosen - y).clamp_(-1, 1).div_(n).sub_(share))
        for i in range(last, -1, -1):
            (grad, transposed), (weight_grad, bias_grad) = self._backward[i], self._grads[i]
            torch.sum(grad, -2, keepdim=True, out=bias_grad)
            if i == 0:
                self._product(transposed, x[..., :n, :], out=weight_grad)
                break
            self._product(transposed, self._half[i - 1], out=weight_grad)
            self._product(grad, self._layers[i][0].mT, out=self._backward[i - 1][0])
            # The derivative of ReLU is the sign of what it let through.
            torch.ops.aten.threshold_backward.grad_input(
                self._backward[i - 1][0], self._half[i - 1], 0, grad_input=self._backward[i - 1][0]
            )
        return loss


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None, "a parameter has no gradient to write into"
    return p.grad

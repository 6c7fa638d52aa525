r"""The gradient of the CQL objective in closed form: what autograd gives, at a fraction of the cost for networks this small.

With N rows, K critics and Q = mean_k Q_k, the objective of :mod:`maieutic.latent.cql` has::

    ∂L/∂Q_k(s, a) = [a = a_logged] · clip(Q_k(s, a) − y, −1, 1) / N  +  α / (N K) · (softmax(Q(s, ·))_a − [a = a_logged])

and the layers of a ReLU network pass it back as usual. Tests hold it to autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maieutic.latent.cql import CqlLoss, double_q_targets
from maieutic.latent.networks import Mlp


@torch.no_grad()
def cql_gradient(
    net: Mlp,
    next_target_q_KNA: Tensor,
    both_2NF: Tensor,
    moves_N: Tensor,
    rewards_N: Tensor,
    done_N: Tensor,
    *,
    gamma: float,
    alpha: float,
) -> CqlLoss:
    """Set ``grad`` of every parameter of ``net`` and return the loss.

    ``both_2NF``: standardised states and next states, float ``[2, N, F]``; ``next_target_q_KNA``: the target critics' values of the
    next states (they stay still between copies, so the caller computes them once for all rows).
    """
    n, k = both_2NF.shape[1], net.members
    # States and next states pass the online critics together.
    h = both_2NF.reshape(1, 2 * n, -1).expand(k, -1, -1)
    kept, last = [h], len(net.weights) - 1
    for i, (w, b) in enumerate(zip(net.weights, net.biases, strict=True)):
        h = (
            torch.addmm(b[0], h[0], w[0].t())[None]
            if k == 1
            else torch.baddbmm(b[:, None], h, w.transpose(1, 2))
        )
        if i < last:
            kept.append(h.relu_())
    q, next_q = h[:, :n], h[:, n:]
    y = double_q_targets(rewards_N, done_N, next_q, next_target_q_KNA, gamma=gamma)
    at = moves_N[None, :, None].expand(k, -1, 1)
    chosen = q.gather(-1, at).squeeze(-1)
    # huber(d) = c (d − c/2) with c = clip(d, −1, 1), and c is its derivative.
    difference = chosen - y
    c = difference.clamp(-1, 1)
    td = (c * (difference - c / 2)).mean(-1).sum()
    mean_q = q[0] if k == 1 else q.mean(0)
    lse = torch.logsumexp(mean_q, -1)
    conservative = (lse - (chosen[0] if k == 1 else chosen.mean(0))).mean()
    share = alpha / (n * k)
    grad = ((mean_q - lse[:, None]).exp_() * share).repeat(k, 1, 1)
    grad.scatter_add_(-1, at, (c / n - share)[..., None])
    for i in range(last, -1, -1):
        below = kept[i][:, :n]
        net.biases[i].grad = grad.sum(1)
        if k == 1:
            net.weights[i].grad = torch.mm(grad[0].t(), below[0])[None]
            grad = torch.mm(grad[0], net.weights[i][0])[None] if i else grad
        else:
            net.weights[i].grad = torch.bmm(grad.transpose(1, 2), below)
            grad = torch.bmm(grad, net.weights[i]) if i else grad
        if i:
            grad = grad * (below > 0)
    return CqlLoss(td + alpha * conservative, td, conservative)

"""Small networks on standardised inputs. Index suffixes: ``N`` transitions, ``F`` features, ``A`` moves, ``K`` critics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from maieutic.latent.errors import LatentDataError


@dataclass(frozen=True, slots=True)
class Standardiser:
    """``(x − mean) / scale`` with the training data's statistics; stored with the policy, so that inputs are never unscaled.

    A feature that is constant in the training data has scale 1: it maps to 0 there and stays bounded elsewhere.
    """

    mean_F: Tensor
    scale_F: Tensor

    @classmethod
    def fit(cls, states_NF: Tensor) -> Standardiser:
        """Statistics of ``[N, F]`` float states. Raises :class:`LatentDataError` for an empty or non-finite table."""
        if states_NF.ndim != 2 or not len(states_NF):
            raise LatentDataError(
                f"states have shape {tuple(states_NF.shape)}: [N, F] with N ≥ 1 is expected"
            )
        if not bool(torch.isfinite(states_NF).all()):
            bad = (~torch.isfinite(states_NF)).any(0).nonzero().flatten().tolist()
            raise LatentDataError(
                f"states hold NaN or infinity in feature columns {bad}: drop or repair them"
            )
        x = states_NF.double()
        mean, std = x.mean(0), x.std(0, unbiased=False)
        scale = torch.where(std > 1e-8, std, torch.ones_like(std))
        return cls(mean.float(), scale.float())

    def __call__(self, states_NF: Tensor) -> Tensor:
        return (states_NF - self.mean_F) / self.scale_F


class Mlp(nn.Module):
    """``K`` equal ReLU networks, evaluated together: ``[N, F]`` → ``[K, N, A]``.

    One network (K = 1) runs as plain linear layers; several run as batched matrix products. Initial weights are uniform in
    ±1/√fan_in, as ``nn.Linear`` draws them, from ``seed``.
    """

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int], *, members: int = 1, seed: int = 0):
        super().__init__()
        self.inputs, self.outputs, self.hidden, self.members = inputs, outputs, tuple(hidden), members
        generator = torch.Generator().manual_seed(seed % 2**63)
        sizes = [inputs, *self.hidden, outputs]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise(sizes):
            bound = 1 / math.sqrt(fan_in)
            for store, shape in (
                (self.weights, (members, fan_out, fan_in)),
                (self.biases, (members, fan_out)),
            ):
                draw = torch.rand(shape, generator=generator) * 2 * bound - bound
                store.append(nn.Parameter(draw))

    def forward(self, x_NF: Tensor) -> Tensor:
        """Outputs ``[K, N, A]`` of standardised inputs ``[N, F]``."""
        last = len(self.weights) - 1
        if self.members == 1:
            h = x_NF
            for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
                h = nn.functional.linear(h, w[0], b[0])
                h = h if i == last else h.relu()
            return h[None]
        h = x_NF.expand(self.members, *x_NF.shape)
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(b[:, None], h, w.transpose(1, 2))
            h = h if i == last else h.relu()
        return h

    def frozen(self) -> Mlp:
        """A copy with weights of its own that are not trained."""
        out = Mlp(self.inputs, self.outputs, self.hidden, members=self.members)
        out.load_state_dict(self.state_dict())
        return out.requires_grad_(False)

"""How far engine and trainer may differ, and the trainer's side of a weight push: log-probs that servers must give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from maieutic.config import Recipe
from maieutic.engines.push import Scorer
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import Row, collate
from maieutic.training.step import compute_logprobs

_SAME_KERNELS, _OTHER_KERNELS, _16_BITS = 1e-4, 1e-3, 0.3


def probe_tolerance(recipe: Recipe, parameter: torch.Tensor) -> float:
    """Most |log-prob difference| between engine and trainer: ``training.probe_tolerance``, or by dtype and engine.

    ``parameter``: one of the trainer's. A server with ``dtype: auto`` is in fp32 only where the trainer runs on a CPU
    (``maieutic serve`` serves it so there).
    """
    if recipe.training.probe_tolerance is not None:
        return recipe.training.probe_tolerance
    if parameter.dtype != torch.float32:
        return _16_BITS
    if recipe.tutor.engine.kind == "hf":
        return _SAME_KERNELS
    dtype = recipe.tutor.dtype
    full = dtype == "float32" or (dtype == "auto" and parameter.device.type == "cpu")
    return _OTHER_KERNELS if full else _16_BITS


class SharedScorer:
    """A scorer for weights that are divided over ranks: all of them compute, ahead of the push, and rank 0 remembers.

    ``tolerance``: most |log-prob difference| between a server and the divided policy.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self._known: dict[tuple[int, ...], list[float]] = {}

    def on(self, sequences: Sequence[Sequence[int]]) -> Scorer:
        """Rank 0: a scorer of these sequences, and of no others; valid after :meth:`refresh`."""
        self._known = {tuple(ids): [] for ids in sequences}
        return lambda asked: [self._known[tuple(ids)] for ids in asked]

    def refresh(self, policy: torch.nn.Module, accelerator: Any) -> None:
        """Score what rank 0 asked for with the current weights (``policy``: prepared); a call of every rank."""
        from accelerate.utils import broadcast_object_list

        told: list[Any] = [list(self._known)]
        broadcast_object_list(told, from_process=0)
        for ids in told[0]:
            (logprobs,) = compute_logprobs(policy, [collate([_row(ids)], "padded")], accelerator)
            if ids in self._known:
                self._known[ids] = [float(x) for x in logprobs]


def make_scorer(model: Any, chunk: int | Literal["auto"]) -> Scorer:
    """log π (T = 1, fp32) of every token after the first, by the training code's own forward pass.

    One process only: no collective is called, so rank 0 may score while the others wait.
    """
    forward = PolicyForward(model, chunk)

    @torch.no_grad()
    def score(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        training = [m for m in model.modules() if m.training]
        for module in training:
            module.training = False
        try:
            device = next(model.parameters()).device
            out = []
            for ids in sequences:
                batch = collate([_row(ids)], "padded").to(device)
                out.append([float(x) for x in forward(batch).logprobs_T.cpu()])
            return out
        finally:
            for module in training:
                module.training = True

    return score


def _row(ids: Sequence[int]) -> Row:
    array = np.asarray(ids, dtype=np.int64)
    n = len(array) - 1
    return Row("push-probe", array[:-1], np.arange(n), array[1:], np.zeros(n, dtype=np.float32), 0.0, 1.0)

"""Requests, and the sampling state of the sequences that are decoded together (their random streams, limits, outputs)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from maieutic.engines.base import FinishReason, Sample, Sampling
from maieutic.errors import EngineError


@dataclass(slots=True, eq=False)
class Request:
    """One call of ``generate``; ``samples`` fills up and resolves ``future``."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    n: int
    stop_ids: tuple[int, ...]
    session: str | None
    policy_version: int
    future: asyncio.Future[list[Sample]]
    samples: dict[int, Sample] = field(default_factory=dict)

    def finish(self, number: int, sample: Sample) -> None:
        """Note one sample; the last one resolves the request."""
        self.samples[number] = sample
        if len(self.samples) == self.n and not self.future.done():
            self.future.set_result([self.samples[i] for i in range(self.n)])


def uniforms(seed: int, number: int, count: int) -> np.ndarray:
    """The random stream of sample ``number``: float32 [count] in [0, 1), the same whatever else is in the batch."""
    key = np.array([seed % 2**64, number], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count).astype(np.float32)


def draw(
    logits: torch.Tensor, u: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert the CDF of the tempered, top-p-truncated distribution.

    ``logits`` [N, V]; ``u``, ``temperature``, ``top_p`` [N], fp32. Returns token ids [N] and their log-probs [N] under that
    very distribution, fp32. Temperature 0 takes the mode, whose log-prob is 0. top-p keeps the likeliest tokens up to and
    including the one that brings their mass to ``top_p``.
    """
    greedy = temperature == 0
    logp = torch.log_softmax(logits.float() / temperature.masked_fill(greedy, 1.0)[:, None], -1)
    probs = logp.exp()
    log_mass: torch.Tensor | float = 0.0
    if top_p is not None:
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        tail = ranked.cumsum(-1) - ranked >= top_p[:, None]
        probs = probs.masked_fill(torch.zeros_like(tail).scatter(-1, order, tail), 0.0)
        log_mass = probs.sum(-1).log()
    cdf = probs.cumsum(-1)
    total = cdf[:, -1]
    # Strictly below the total, so that the first CDF value above it exists and belongs to a token of positive probability.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, target[:, None], right=True).clamp_max(logits.shape[-1] - 1)
    logprob = logp.gather(-1, token)[:, 0] - log_mass
    token = torch.where(greedy, logits.argmax(-1), token[:, 0])
    return token, logprob.masked_fill(greedy, 0.0)


class Rows:
    """N sequences side by side. Arrays are indexed by row; a row that is done stays until :meth:`select` drops it."""

    def __init__(self, items: Sequence[tuple[Request, int]], device: torch.device) -> None:
        self.requests = [request for request, _ in items]
        self.numbers = [number for _, number in items]
        self.device = device
        sampling = [request.sampling for request in self.requests]
        self.limit = np.array([s.max_tokens for s in sampling])
        self.count = np.zeros(len(items), dtype=np.int64)
        self.live = np.ones(len(items), dtype=bool)
        width = int(self.limit.max(initial=0))
        self.tokens = np.zeros((len(items), width), dtype=np.int64)
        self.logprobs = np.zeros((len(items), width), dtype=np.float32)
        self._u = np.zeros((len(items), width), dtype=np.float32)
        for row, (request, number) in enumerate(items):
            limit = request.sampling.max_tokens
            self._u[row, :limit] = uniforms(request.seed, number, limit)
        self._temperature = torch.tensor([s.temperature for s in sampling], device=device)
        self._top_p = torch.tensor([s.top_p for s in sampling], device=device)
        self.last = torch.zeros(len(items), dtype=torch.long, device=device)
        self._index()

    def __len__(self) -> int:
        return len(self.requests)

    def _index(self) -> None:
        """What depends on which rows there are."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, request in enumerate(self.requests):
            groups.setdefault(request.stop_ids, []).append(row)
        self._stops = [(np.array(stops), np.array(rows)) for stops, rows in groups.items() if stops]
        self._nucleus = any(r.sampling.top_p < 1 for r in self.requests)

    def select(self, rows: np.ndarray) -> Rows:
        """These rows, in this order, as new Rows."""
        new = object.__new__(Rows)
        new.requests = [self.requests[r] for r in rows]
        new.numbers = [self.numbers[r] for r in rows]
        new.device = self.device
        for name in ("limit", "count", "live", "tokens", "logprobs", "_u"):
            setattr(new, name, getattr(self, name)[rows])
        index = torch.from_numpy(rows).to(self.device)
        for name in ("_temperature", "_top_p", "last"):
            setattr(new, name, getattr(self, name)[index])
        new._index()
        return new

    @staticmethod
    def join(a: Rows, b: Rows) -> Rows:
        """The rows of ``a``, then those of ``b``."""
        new = object.__new__(Rows)
        new.requests, new.numbers, new.device = a.requests + b.requests, a.numbers + b.numbers, a.device
        width = max(a.tokens.shape[1], b.tokens.shape[1])
        for name in ("limit", "count", "live"):
            setattr(new, name, np.concatenate([getattr(a, name), getattr(b, name)]))
        for name in ("tokens", "logprobs", "_u"):
            x, y = getattr(a, name), getattr(b, name)
            wide = np.zeros((len(x) + len(y), width), dtype=x.dtype)
            wide[: len(x), : x.shape[1]] = x
            wide[len(x) :, : y.shape[1]] = y
            setattr(new, name, wide)
        for name in ("_temperature", "_top_p", "last"):
            setattr(new, name, torch.cat([getattr(a, name), getattr(b, name)]))
        new._index()
        return new

    def advance(self, logits: torch.Tensor) -> list[int]:
        """Draw the next token of every live row from ``logits`` [N, V]; the rows that are done with it, in order."""
        every = np.arange(len(self))
        u = torch.from_numpy(self._u[every, np.minimum(self.count, self.limit - 1)]).to(self.device)
        self.last, logprob = draw(logits, u, self._temperature, self._top_p if self._nucleus else None)
        token, value = self.last.cpu().numpy(), logprob.cpu().numpy()
        rows = np.flatnonzero(self.live)
        if not np.isfinite(value[rows]).all():
            raise EngineError(
                "the model's next-token distribution is not finite (NaN or infinite logits): check the weights and the dtype"
            )
        at = self.count[rows]
        self.tokens[rows, at], self.logprobs[rows, at] = token[rows], value[rows]
        self.count[rows] += 1
        done = self.count >= self.limit
        for stops, members in self._stops:
            done[members] |= np.isin(token[members], stops)
        done &= self.live
        self.live &= ~done
        return [int(r) for r in np.flatnonzero(done)]

    def drop_cancelled(self) -> None:
        """Rows whose caller has gone are done."""
        for row in np.flatnonzero(self.live):
            if self.requests[row].future.done():
                self.live[row] = False

    def sample(self, row: int) -> Sample:
        """What row ``row`` has drawn."""
        count, request = int(self.count[row]), self.requests[row]
        ids: list[int] = self.tokens[row, :count].tolist()
        reason: FinishReason = "stop" if ids[-1] in request.stop_ids else "length"
        return Sample(ids, self.logprobs[row, :count].tolist(), reason, request.policy_version)

"""Sequences that are decoded together, in two ways.

:class:`SharedPrefixCohort` works on our own key-value slabs: prompts are prefilled on top of what a session left behind, K
samples of a request share their prompt, rows leave as they finish. It needs a model whose layers all do full attention.
:class:`PaddedCohort` is for every other causal model (linear attention, sliding windows): left-padded prompts and the
library's own cache. Both take ``forward(**kwargs) -> logits`` of the model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from maieutic.engines.hf_attention import Decode, SlabCache
from maieutic.engines.hf_rows import Request, Rows

# Rows are compacted when this share of them or less is alive: copying the prompts' slab costs about one decode step.
_COMPACT_AT = 0.75
# Most padded tokens (rows × new tokens) of one prefill pass: bounds the memory of masks and activations.
_PREFILL_TOKENS = 16_384
_FIRST_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and place of a slab."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def slab(self, rows: int, columns: int) -> torch.Tensor:
        """Zeros: a column that is masked still gets multiplied, so it must be finite."""
        size = (self.layers, 2, rows, self.kv_heads, columns, self.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class SessionCache:
    """Keys and values of growing sequences between their turns; the least recently used go first beyond ``limit`` tokens."""

    limit: int
    entries: OrderedDict[str, tuple[list[int], torch.Tensor]] = field(default_factory=OrderedDict)
    tokens: int = 0

    def take(self, session: str, prompt: Sequence[int]) -> torch.Tensor | None:
        """Remove a session's entry; its columns for the common prefix with ``prompt``, short of the last prompt token."""
        if session not in self.entries:
            return None
        ids, slab = self.entries.pop(session)
        self.tokens -= len(ids)
        common = 0
        for a, b in zip(ids, prompt[:-1], strict=False):
            if a != b:
                break
            common += 1
        return slab[..., :common, :] if common else None

    def put(self, session: str, ids: list[int], slab: torch.Tensor) -> None:
        """Keep [layers, 2, kv heads, len(ids), head dim] for the next turn."""
        if session in self.entries:
            self.tokens -= len(self.entries.pop(session)[0])
        if len(ids) > self.limit:
            return
        self.entries[session] = (ids, slab)
        self.tokens += len(ids)
        while self.tokens > self.limit:
            _, (old, _) = self.entries.popitem(last=False)
            self.tokens -= len(old)

    def clear(self) -> None:
        self.entries.clear()
        self.tokens = 0


@dataclass(slots=True)
class _Prefilled:
    """Prompts of some requests in one slab [layers, 2, R, …]; ``spans[r]`` are the columns that row r uses, in order."""

    requests: list[Request]
    slab: torch.Tensor
    spans: list[list[tuple[int, int]]]
    logits: torch.Tensor


def _prefill(
    requests: list[Request],
    past: list[torch.Tensor | None],
    shape: Shape,
    forward: Callable[..., torch.Tensor],
) -> _Prefilled:
    """One pass over the prompts' new tokens. Cached columns end, and new tokens end, at the same column in all rows."""
    cached = np.array([0 if p is None else p.shape[-2] for p in past])
    new = np.array([len(r.prompt) for r in requests]) - cached
    start, width = int(cached.max()), int(new.max())
    slab = shape.slab(len(requests), start + width)
    ids = np.zeros((len(requests), width), dtype=np.int64)
    for row, (request, kept) in enumerate(zip(requests, past, strict=True)):
        ids[row, width - new[row] :] = request.prompt[cached[row] :]
        if kept is not None:
            slab[:, :, row, :, start - cached[row] : start] = kept
    column = np.arange(start + width)
    used = np.where(
        column < start,
        column >= (start - cached)[:, None],
        column >= (start + width - new)[:, None],
    )
    query = np.arange(start, start + width)
    # A hole sees itself alone: a row of a softmax must not be empty.
    mask = (used[:, None, :] & (column <= query[:, None])) | (column == query[:, None])
    positions = (cached[:, None] + np.arange(width) - (width - new)[:, None]).clip(min=0)
    device = shape.device
    logits = forward(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        attention_mask=torch.from_numpy(mask[:, None]).to(device),
        past_key_values=SlabCache(slab, start),
    )
    spans = [
        [(start - int(c), start)] * bool(c) + [(start + width - int(n), start + width)]
        for c, n in zip(cached, new, strict=True)
    ]
    return _Prefilled(requests, slab, spans, logits)


def _buckets(new: Sequence[int]) -> list[list[int]]:
    """Indices in groups whose padding at most doubles the tokens and which fit one prefill pass."""
    out: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(new)), key=lambda i: new[i]):
        padded = new[i] * (len(out[-1]) + 1) if out else 0
        if not out or padded > min(2 * (tokens + new[i]) + 64, max(_PREFILL_TOKENS, new[i])):
            out.append([])
            tokens = 0
        out[-1].append(i)
        tokens += new[i]
    return out


class SharedPrefixCohort:
    """R requests × K samples each. K = 1 cohorts can be joined; the samples' own slab then moves into the prompts' slab."""

    def __init__(
        self,
        requests: list[Request],
        sessions: SessionCache,
        shape: Shape,
        forward: Callable[..., torch.Tensor],
        context_limit: int,
        join: SharedPrefixCohort | None = None,
    ) -> None:
        self._sessions, self._shape, self._forward, self._limit = sessions, shape, forward, context_limit
        past = [None if r.session is None else sessions.take(r.session, r.prompt) for r in requests]
        new = [len(r.prompt) - (0 if p is None else p.shape[-2]) for r, p in zip(requests, past, strict=True)]
        parts = [
            _prefill([requests[i] for i in bucket], [past[i] for i in bucket], shape, forward)
            for bucket in _buckets(new)
        ]
        order = [r for part in parts for r in part.requests]
        self._k = order[0].n
        self.rows = Rows([(r, i) for r in order for i in range(self._k)], shape.device)
        logits = torch.cat([p.logits for p in parts])
        done = self.rows.advance(logits.repeat_interleave(self._k, 0))
        lengths = [len(r.prompt) for r in order]
        if join is None and len(parts) == 1:
            self._prefix, self._spans = parts[0].slab, parts[0].spans
        else:
            self._merge(parts, join)
        if join is not None:
            lengths = [join._length(int(r)) for r in np.flatnonzero(join.rows.live)] + lengths
            kept = join.rows.select(np.flatnonzero(join.rows.live))
            done = [row + len(kept) for row in done]
            self.rows = Rows.join(kept, self.rows)
        self._start = np.repeat(np.array(lengths), self._k)
        """Tokens of each row in the prompts' slab."""
        self._mask()
        self._own = shape.slab(len(self.rows), 0)
        self._columns = 0
        for row in done:
            self._finish(row)
        self._compact()

    @property
    def live(self) -> int:
        """Sequences that are still sampled."""
        return int(self.rows.live.sum())

    @property
    def joinable(self) -> bool:
        return self._k == 1

    def _length(self, row: int) -> int:
        return int(self._start[row]) + self._columns

    def _columns_of(self, row: int) -> list[torch.Tensor]:
        """Views of row's keys and values, in order: [layers, 2, kv heads, *, head dim]."""
        prompt = row // self._k
        out = [self._prefix[:, :, prompt, :, a:b] for a, b in self._spans[prompt]]
        return [*out, self._own[:, :, row, :, : self._columns]] if self._columns else out

    def _merge(self, parts: list[_Prefilled], join: SharedPrefixCohort | None) -> None:
        """One slab of all prompts, right-aligned without holes."""
        pieces = [] if join is None else [join._columns_of(int(r)) for r in np.flatnonzero(join.rows.live)]
        for part in parts:
            pieces += [[part.slab[:, :, r, :, a:b] for a, b in spans] for r, spans in enumerate(part.spans)]
        lengths = [sum(p.shape[-2] for p in row) for row in pieces]
        width = max(lengths)
        self._prefix = self._shape.slab(len(pieces), width)
        for row, views in enumerate(pieces):
            at = width - lengths[row]
            for view in views:
                self._prefix[:, :, row, :, at : at + view.shape[-2]] = view
                at += view.shape[-2]
        self._spans = [[(width - n, width)] for n in lengths]

    def _mask(self) -> None:
        used = np.zeros((len(self._spans), self._prefix.shape[-2]), dtype=bool)
        for row, spans in enumerate(self._spans):
            for a, b in spans:
                used[row, a:b] = True
        bias = torch.zeros(used.shape, dtype=self._shape.dtype)
        bias.masked_fill_(torch.from_numpy(~used), float("-inf"))
        self._bias = bias[:, None, None, :].to(self._shape.device)

    def step(self) -> None:
        """Feed the last tokens, draw the next ones, resolve what is done, drop what is dead."""
        if self._columns == self._own.shape[-2]:
            grown = self._shape.slab(len(self.rows), max(_FIRST_COLUMNS, 2 * self._columns))
            grown[..., : self._columns, :] = self._own
            self._own = grown
        positions = np.minimum(self._start + self._columns, self._limit - 1)
        decode = Decode(self._prefix, self._bias, self._k)
        logits = self._forward(
            input_ids=self.rows.last[:, None],
            position_ids=torch.from_numpy(positions[:, None]).to(self._shape.device),
            attention_mask=self._bias,  # four dimensions: the library builds no mask of its own
            past_key_values=SlabCache(self._own, self._columns, decode),
        )
        self._columns += 1
        for row in self.rows.advance(logits):
            self._finish(row)
        self._compact()

    def _finish(self, row: int) -> None:
        request = self.rows.requests[row]
        sample = self.rows.sample(row)
        # The last token was drawn but never fed: its keys and values do not exist yet.
        if request.n == 1 and request.session is not None:
            kept = torch.cat(self._columns_of(row), dim=-2)
            self._sessions.put(request.session, (request.prompt + sample.ids)[: kept.shape[-2]], kept)
        request.finish(self.rows.numbers[row], sample)

    def drop_cancelled(self) -> None:
        self.rows.drop_cancelled()
        self._compact()

    def _compact(self) -> None:
        alive = self.rows.live.reshape(-1, self._k)
        per_prompt = alive.sum(1)
        prompts = np.flatnonzero(per_prompt)
        k = int(per_prompt.max(initial=0))
        if k == 0 or len(prompts) * k > _COMPACT_AT * alive.size:
            return
        # Living samples of each prompt first, then dead ones, up to the largest number of living ones.
        inside = np.argsort(~alive[prompts], axis=1, kind="stable")[:, :k]
        rows = (prompts[:, None] * self._k + inside).reshape(-1)
        index = torch.from_numpy(rows).to(self._shape.device)
        self.rows = self.rows.select(rows)
        self._own = self._own.index_select(2, index)
        self._start = self._start[rows]
        if len(prompts) < len(per_prompt):
            index = torch.from_numpy(prompts).to(self._shape.device)
            self._prefix = self._prefix.index_select(2, index)
            self._bias = self._bias.index_select(0, index)
            self._spans = [self._spans[p] for p in prompts]
        self._k = k


class PaddedCohort:
    """Left-padded sequences with the library's cache for ``config``; no sessions, no joining."""

    joinable = False

    def __init__(
        self,
        requests: list[Request],
        config: Any,
        forward: Callable[..., torch.Tensor],
        device: torch.device,
        pad_id: int,
    ) -> None:
        from transformers import DynamicCache

        self._forward, self._device = forward, device
        self._cache = DynamicCache(config=config)
        self.rows = Rows([(r, i) for r in requests for i in range(r.n)], device)
        lengths = np.array([len(r.prompt) for r in self.rows.requests])
        width = int(lengths.max())
        ids = np.full((len(self.rows), width), pad_id, dtype=np.int64)
        for row, request in enumerate(self.rows.requests):
            ids[row, width - lengths[row] :] = request.prompt
        column = np.arange(width)
        self._used = torch.from_numpy((column >= (width - lengths)[:, None]).astype(np.int64)).to(device)
        self._positions = (column - (width - lengths)[:, None]).clip(min=0)
        self._feed(torch.from_numpy(ids).to(device))

    @property
    def live(self) -> int:
        """Sequences that are still sampled."""
        return int(self.rows.live.sum())

    def _feed(self, ids: torch.Tensor) -> None:
        logits = self._forward(
            input_ids=ids,
            position_ids=torch.from_numpy(self._positions).to(self._device),
            attention_mask=self._used,
            past_key_values=self._cache,
        )
        for row in self.rows.advance(logits):
            self.rows.requests[row].finish(self.rows.numbers[row], self.rows.sample(row))
        self._compact()

    def step(self) -> None:
        """Feed the last tokens, draw the next ones, resolve what is done, drop what is dead."""
        self._used = torch.cat([self._used, self._used.new_ones(len(self.rows), 1)], 1)
        self._positions = self._positions[:, -1:] + 1
        self._feed(self.rows.last[:, None])

    def drop_cancelled(self) -> None:
        self.rows.drop_cancelled()
        self._compact()

    def _compact(self) -> None:
        if self.live > _COMPACT_AT * len(self.rows) or not self.live:
            return
        rows = np.flatnonzero(self.rows.live)
        index = torch.from_numpy(rows).to(self._device)
        self._cache.reorder_cache(index)
        self.rows = self.rows.select(rows)
        self._used, self._positions = self._used[index], self._positions[rows]

"""From trajectories to micro-batches under a token budget, balanced over ranks; deterministic.

Two layouts. ``packed``: the sequences of a micro-batch follow one another in a single row, ``position_ids`` restarting at 0;
only for architectures that isolate them (:func:`maieutic.training.probes.isolates`). ``padded``: one sequence a row, padded on
the right. Neither needs an attention mask: in a causal model what stands to the right changes nothing.

Only what a log-prob depends on is fed: a sequence ends with the token before its last trained one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maieutic.training.trajectory import Segment, Trajectory

Layout = Literal["packed", "padded"]
# A dummy micro-batch is this long: enough for any convolution or window, too short to cost anything.
_DUMMY_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One segment, ready to be trained on: L input tokens, T trained tokens.

    ``select``: positions (0-based, in the inputs) whose output predicts the ``targets``.
    """

    episode_id: str
    input_ids: NDArray[np.int64]
    select: NDArray[np.int64]
    targets: NDArray[np.int64]
    mu_logprobs: NDArray[np.float32]
    advantage: float
    temperature: float

    def __len__(self) -> int:
        return len(self.input_ids)


def make_rows(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], *, skip_zero_advantage: bool = False
) -> list[Row]:
    """Rows of all segments with trained tokens, in order; excluded episodes and segments without samples give none.

    ``skip_zero_advantage`` leaves out rows whose advantage is exactly 0: without a KL term they have no gradient, so this
    saves time and changes only the metrics (their tokens still belong in the loss's denominator).
    """
    if len(trajectories) != len(advantages):
        raise ValueError(f"{len(trajectories)} trajectories but {len(advantages)} advantages")
    return [
        _row(segment, trajectory, float(advantage))
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        if not trajectory.excluded and not (skip_zero_advantage and float(advantage) == 0.0)
        for segment in trajectory.segments
        if segment.n_trained
    ]


def _row(segment: Segment, trajectory: Trajectory, advantage: float) -> Row:
    ids = np.asarray(segment.ids, dtype=np.int64)
    trained = np.flatnonzero(np.asarray(segment.mask, dtype=bool))
    return Row(
        episode_id=trajectory.episode_id,
        input_ids=ids[: trained[-1]],
        select=trained - 1,
        targets=ids[trained],
        mu_logprobs=np.asarray(segment.logprobs, dtype=np.float32)[trained],
        advantage=advantage,
        temperature=trajectory.temperature,
    )


@dataclass(slots=True)
class MicroBatch:
    """One forward pass: B rows of S positions, T trained tokens in flat order.

    ``select_T`` indexes the flattened [B·S] positions; ``episode_T`` indexes ``episode_ids``. ``boundaries`` (packed only): int32
    starts of the sequences and the end of the last, ``max_length`` the longest one. ``head_chunks``: number of pieces in which
    the head is applied when ranks must call it equally often (0: each rank chooses by its chunk size).
    """

    input_ids: Tensor
    position_ids: Tensor
    select_T: Tensor
    targets_T: Tensor
    mu_logprobs_T: Tensor
    advantages_T: Tensor
    temperatures_T: Tensor
    episode_T: Tensor
    episode_ids: tuple[str, ...]
    ref_logprobs_T: Tensor | None = None
    boundaries: Tensor | None = None
    max_length: int = 0
    head_chunks: int = 0

    @property
    def n_trained(self) -> int:
        """T."""
        return self.targets_T.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        """A copy with every tensor on ``device``."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
        }
        if self.boundaries is not None:
            # What kernels with variable lengths (flash attention, gated delta rule) go by; others go by position_ids.
            inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = self.boundaries
            inputs["max_length_q"] = inputs["max_length_k"] = self.max_length
        return inputs


def collate(rows: Sequence[Row], layout: Layout, width: int = 0) -> MicroBatch:
    """One micro-batch of ``rows``; no rows give a dummy whose loss and gradients are zero (ranks must run equally often).

    ``width`` (packed only, at least the longest row): several packed rows of this width instead of one; their ends are filled
    with a sequence of padding that nothing looks at.
    """
    lengths = [len(row) for row in rows]
    boundaries = None
    if not rows:
        lines: list[list[int]] = [[]]
        line_width = _DUMMY_LENGTH
    elif layout == "padded":
        lines, line_width = [[i] for i in range(len(rows))], max(lengths)
    elif width:
        lines, line_width = first_fit_decreasing(lengths, width), width
    else:
        lines, line_width = [list(range(len(rows)))], sum(lengths)
        boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    input_ids = np.zeros((len(lines), line_width), dtype=np.int64)
    # Filler counts from 0 in a packed row, as a sequence of its own; where rows are padded a restart would look like packing.
    positions = np.tile(np.arange(line_width, dtype=np.int64), (len(lines), 1))
    offsets = [0] * len(rows)
    for number, line in enumerate(lines):
        start = 0
        for i in line:
            end = start + lengths[i]
            input_ids[number, start:end] = rows[i].input_ids
            offsets[i] = number * line_width + start
            if layout == "packed":
                positions[number, start:] = np.arange(line_width - start)
            start = end
        if layout == "packed" and line:
            positions[number, start:] = np.arange(line_width - start)
    counts = [len(row.targets) for row in rows]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        select_T=_flat([row.select + start for row, start in zip(rows, offsets, strict=True)], np.int64),
        targets_T=_flat([row.targets for row in rows], np.int64),
        mu_logprobs_T=_flat([row.mu_logprobs for row in rows], np.float32),
        advantages_T=_repeat([row.advantage for row in rows], counts, np.float32),
        temperatures_T=_repeat([row.temperature for row in rows], counts, np.float32),
        episode_T=_repeat(list(range(len(rows))), counts, np.int64),
        episode_ids=tuple(row.episode_id for row in rows),
        boundaries=boundaries,
        max_length=max(lengths, default=0),
    )


def _flat(parts: Sequence[NDArray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False))


def _repeat(values: Sequence[float], counts: Sequence[int], dtype: type) -> Tensor:
    return torch.from_numpy(np.repeat(np.asarray(values, dtype=dtype), np.asarray(counts, dtype=np.int64)))


def pack(rows: Sequence[Row], token_budget: int) -> list[MicroBatch]:
    """Packed micro-batches of at most ``token_budget`` tokens (a longer sequence stands alone)."""
    return make_micro_batches(rows, token_budget, "packed")[0]


def pad(rows: Sequence[Row], token_budget: int) -> list[MicroBatch]:
    """Padded micro-batches of at most ``token_budget`` positions, padding included (a longer sequence stands alone)."""
    return make_micro_batches(rows, token_budget, "padded")[0]


def make_micro_batches(
    rows: Sequence[Row], token_budget: int, layout: Layout, n_ranks: int = 1, hidden_size: int = 0
) -> list[list[MicroBatch]]:
    """Micro-batches of each rank: as many on every rank, the k-th ones of similar size, the largest first.

    ``hidden_size`` of the model (packed only): sequences are packed into several rows, or padded after all, where that is
    cheaper (:func:`best_width`, :func:`padded_cost`); 0: always packed into one row, which kernels with variable lengths (flash
    attention) need.
    """
    lengths = [len(row) for row in rows]

    def of(members: Sequence[int]) -> list[int]:
        return [lengths[i] for i in members]

    plan = plan_micro_batches(lengths, token_budget, layout, n_ranks)
    widths = [[0] * len(rank) for rank in plan]
    if layout == "packed" and hidden_size:
        widths = [[best_width(of(m), token_budget, hidden_size) for m in rank] for rank in plan]
        padded = plan_micro_batches(lengths, token_budget, "padded", n_ranks)
        cost = sum(
            packed_cost(of(m), width, hidden_size)
            for rank, of_rank in zip(plan, widths, strict=True)
            for m, width in zip(rank, of_rank, strict=True)
        )
        if sum(padded_cost(of(m), hidden_size) for rank in padded for m in rank) < cost:
            layout, plan, widths = "padded", padded, [[0] * len(rank) for rank in padded]
    return [
        [
            collate([rows[i] for i in members], layout, width)
            for members, width in zip(rank, of_rank, strict=True)
        ]
        for rank, of_rank in zip(plan, widths, strict=True)
    ]


def best_width(lengths: Sequence[int], token_budget: int, hidden_size: int) -> int:
    """The cheapest width of packed rows within the budget (:func:`packed_cost`); 0: a single row."""
    if not hidden_size or len(lengths) < 2:
        return 0
    longest, total = max(lengths), sum(lengths)
    best, best_cost = 0, packed_cost(lengths, 0, hidden_size)
    for rows in range(2, len(lengths) + 1):
        width = max(longest, -(-total // rows))
        cost = packed_cost(lengths, width, hidden_size)
        if width * len(first_fit_decreasing(lengths, width)) <= token_budget and cost < best_cost:
            best, best_cost = width, cost
        if width == longest:
            break
    return best


def packed_cost(lengths: Sequence[int], width: int, hidden_size: int) -> float:
    """Time of a packed micro-batch, in positions that attend to nothing. ``width``: of its rows; 0: a single row.

    Attention under a mask computes all width² pairs of a row, also between sequences that do not see each other. With about 12
    hidden² weights a layer it costs width / (6 · hidden) of the rest, which runs over all rows · width positions, filler
    included. (Measured on a CPU: 1 / 5.2 instead of 1 / 6 at hidden 576, 1 / 6.8 at 256.) One sequence alone needs no mask.
    """
    if len(lengths) < 2:
        return padded_cost(lengths, hidden_size)
    rows = len(first_fit_decreasing(lengths, width)) if width else 1
    width = width or sum(lengths)
    return rows * width * (1 + width / (6 * hidden_size))


def padded_cost(lengths: Sequence[int], hidden_size: int) -> float:
    """The same of a micro-batch of one sequence a row: causal attention without a mask skips half of the pairs."""
    longest = max(lengths, default=0)
    return len(lengths) * longest * (1 + longest / (12 * hidden_size))


def plan_micro_batches(
    lengths: Sequence[int], token_budget: int, layout: Layout, n_ranks: int = 1
) -> list[list[list[int]]]:
    """Row indices by rank and micro-batch; every rank gets an equal number of micro-batches, at least one (maybe empty).

    Ties go by index, so the same lengths give the same plan everywhere.
    """
    if token_budget < 1 or n_ranks < 1:
        raise ValueError(f"token_budget ({token_budget}) and n_ranks ({n_ranks}) must be at least 1")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if layout == "packed":
        bins = _packed_bins(lengths, order, token_budget, n_ranks)
        cost = [sum(lengths[i] for i in b) for b in bins]
    else:
        bins = _padded_bins(lengths, order, token_budget, n_ranks)
        cost = [len(b) * max((lengths[i] for i in b), default=0) for b in bins]
    ranked = sorted(range(len(bins)), key=lambda b: (-cost[b], b))
    plan: list[list[list[int]]] = [[] for _ in range(n_ranks)]
    for k in range(0, len(bins), n_ranks):
        turn = range(n_ranks) if (k // n_ranks) % 2 == 0 else range(n_ranks - 1, -1, -1)
        for rank, b in zip(turn, ranked[k : k + n_ranks], strict=True):
            plan[rank].append(sorted(bins[b]))
    return plan


def first_fit_decreasing(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Bins of at most ``token_budget`` tokens, longest first into the first bin with room; a longer one stands alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        home = next((b for b, left in enumerate(room) if lengths[i] <= left), None)
        if home is None:
            bins.append([])
            room.append(token_budget)
            home = len(bins) - 1
        bins[home].append(i)
        room[home] -= lengths[i]
    return bins


def _packed_bins(
    lengths: Sequence[int], order: Sequence[int], token_budget: int, n_ranks: int
) -> list[list[int]]:
    """As few bins as first-fit needs, rounded up to whole rounds of ranks and filled evenly."""
    fewest = len(first_fit_decreasing(lengths, token_budget))
    count = n_ranks * max(1, -(-fewest // n_ranks))
    while True:
        bins, loads = _spread(lengths, order, count)
        if all(load <= token_budget or len(b) == 1 for b, load in zip(bins, loads, strict=True)):
            return bins
        count += n_ranks


def _spread(lengths: Sequence[int], order: Sequence[int], count: int) -> tuple[list[list[int]], list[int]]:
    """Longest first, each into the lightest bin (of equal ones the first)."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in order:
        load, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (load + lengths[i], b))
    loads = [0] * count
    for load, b in heap:
        loads[b] = load
    return bins, loads


def _padded_bins(
    lengths: Sequence[int], order: Sequence[int], token_budget: int, n_ranks: int
) -> list[list[int]]:
    """Neighbours in length share a micro-batch, so that little is padding."""
    bins: list[list[int]] = []
    for i in order:
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= token_budget:
            bins[-1].append(i)
        else:
            bins.append([i])
    # Rather split a micro-batch than let a rank run a dummy.
    while (not bins or len(bins) % n_ranks) and any(len(b) > 1 for b in bins):
        widest = max(
            range(len(bins)), key=lambda b: (len(bins[b]) * lengths[bins[b][0]] * (len(bins[b]) > 1), -b)
        )
        half = (len(bins[widest]) + 1) // 2
        bins[widest : widest + 1] = [bins[widest][:half], bins[widest][half:]]
    while not bins or len(bins) % n_ranks:
        bins.append([])
    return bins


def balance(lengths: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Indices of each rank, with about equal sums of ``lengths`` (longest first to the lightest rank); deterministic."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [sorted(b) for b in _spread(lengths, order, n_ranks)[0]]

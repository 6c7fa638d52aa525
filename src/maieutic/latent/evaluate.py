"""Evaluation: the same problems, students and seeds for every arm, so that differences are paired."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from maieutic.env.base import Episode, Tutor
from maieutic.errors import EngineError, RunStop
from maieutic.latent.classroom import LatentClassroom
from maieutic.latent.moves import chosen_move
from maieutic.latent.statistics import Paired, Rate, paired, wilson
from maieutic.latent.tasks import bounded
from maieutic.problems.schema import ProblemPair
from maieutic.seeds import derive


@dataclass(frozen=True, slots=True)
class Slot:
    """One conversation to be played by every arm."""

    cell: str
    """``seen``, ``unseen``, ``other_seen``, ``other_unseen``: problem set, and whether the student is the other one."""
    pair: ProblemPair
    seed: int
    number: int


def plan(
    seen: Sequence[ProblemPair],
    unseen: Sequence[ProblemPair],
    *,
    conversations: int,
    generalisation: int,
    other: bool,
    seed: int,
) -> list[Slot]:
    """Conversations of all cells; problems take turns, so that each occurs equally often (±1) in its cell."""
    cells = [("seen", seen, conversations), ("unseen", unseen, generalisation)]
    if other:
        cells += [("other_seen", seen, generalisation), ("other_unseen", unseen, generalisation)]
    out: list[Slot] = []
    for cell, pairs, count in cells:
        for i in range(count if pairs else 0):
            out.append(Slot(cell, pairs[i % len(pairs)], derive(seed, "evaluate", cell, i), len(out)))
    return out


def player(room: LatentClassroom, arm: str, tutor: Tutor) -> Callable[[Slot], Awaitable[Episode]]:
    """What plays an arm's conversation of a slot."""

    async def one(slot: Slot) -> Episode:
        return await room.play(
            tutor,
            slot.pair,
            seed=slot.seed,
            id=f"{arm}-{slot.cell}-{slot.number}",
            other_student=slot.cell.startswith("other"),
            eval=True,
        )

    return one


@dataclass(slots=True)
class CellResult:
    """One arm in one cell. ``difference``: success minus the baseline's on the same slots (None for the baseline itself)."""

    success: Rate
    excluded: int
    turns: float
    """Mean tutor turns of the counted episodes."""
    difference: Paired | None = None


@dataclass(slots=True)
class ArmResult:
    """One arm: its cells, its moves by turn, and why episodes were excluded."""

    arm: str
    cells: dict[str, CellResult] = field(default_factory=dict)
    profile: list[dict[str, float]] = field(default_factory=list)
    """Share of each move at tutor turn 1, 2, … (seen problems)."""
    profile_n: list[int] = field(default_factory=list)
    exclusions: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def solved(episode: Episode) -> float:
    """1 for a solved problem, 0 for an unsolved one."""
    assert episode.reward is not None
    return float(episode.reward.extra["success_reward"] > 0)


def compare(
    episodes: dict[str, list[Episode]],
    slots: Sequence[Slot],
    *,
    baseline: str,
    level: float,
    resamples: int,
    seed: int,
) -> dict[str, ArmResult]:
    """Success by arm and cell with Wilson intervals, and paired differences to the baseline on slots that count in both."""
    out = {arm: ArmResult(arm) for arm in episodes}
    for arm, played in episodes.items():
        result = out[arm]
        result.exclusions = dict(Counter(e.exclusion for e in played if e.exclusion is not None))
        for cell in dict.fromkeys(s.cell for s in slots):
            here = [i for i, s in enumerate(slots) if s.cell == cell]
            counted = [i for i in here if played[i].counted]
            wins = [solved(played[i]) for i in counted]
            lengths = [len(played[i].dialogue.by("tutor")) for i in counted]
            entry = CellResult(
                wilson(int(sum(wins)), len(wins), level),
                len(here) - len(counted),
                sum(lengths) / len(lengths) if lengths else math.nan,
            )
            both = [i for i in counted if episodes[baseline][i].counted]
            if arm != baseline and both:
                entry.difference = paired(
                    [solved(played[i]) for i in both],
                    [solved(episodes[baseline][i]) for i in both],
                    [slots[i].pair.id for i in both],
                    level=level,
                    resamples=resamples,
                    seed=derive(seed, "paired", arm, cell) % 2**32,
                )
            result.cells[cell] = entry
    return out


async def move_profile(
    room: LatentClassroom, played: Sequence[Episode], slots: Sequence[Slot], concurrency: int
) -> tuple[list[dict[str, float]], list[int]]:
    """Share of every move at each tutor turn: chosen moves, and labelled ones where the arm chose none."""
    wanted = [
        (e, n, k)
        for e, s in zip(played, slots, strict=True)
        if s.cell == "seen" and e.counted
        for k, n in enumerate(n for n, t in enumerate(e.dialogue.turns) if t.speaker == "tutor")
    ]

    async def one(item: tuple[Episode, int, int]) -> str | None:
        episode, n, _ = item
        if move := chosen_move(episode.dialogue.turns[n]):
            return move
        try:
            return await room.labeller.label(episode.dialogue.turns, n, seed=derive("profile", episode.id, n))
        except RunStop:
            raise
        except EngineError:
            return None  # an unlabelled turn is left out of the shares

    labels = await bounded(wanted, one, concurrency)
    counts: list[Counter[str]] = []
    for (_, _, k), label in zip(wanted, labels, strict=True):
        while len(counts) <= k:
            counts.append(Counter())
        if label is not None:
            counts[k][label] += 1
    totals = [sum(c.values()) for c in counts]
    shares = [
        {m: (c[m] / t if t else 0.0) for m in room.moves.names} for c, t in zip(counts, totals, strict=True)
    ]
    return shares, totals

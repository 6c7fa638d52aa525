"""The paper's measures from scores of dialogues: both levels, paired differences, low-score rescue, distributions. Pure functions.

Turn level is the mean over meaningful turns of all dialogues; sample level the mean over dialogues. Errors are clustered by
problem, differences are paired by problem (:mod:`maieutic.evaluation.statistics`). What has no score is left out and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from maieutic.env.base import Episode
from maieutic.evaluation.statistics import (
    Difference,
    Estimate,
    cluster_means,
    estimate,
    paired_difference,
)
from maieutic.reat.persona import problem_id
from maieutic.reat.scoring import DialogueScore

Level = Literal["sample", "turn"]
LEVELS: tuple[Level, ...] = ("sample", "turn")
BIN = 5.0
"""Width of a bin of the score distributions."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm on one set, by one judge."""

    sample: Estimate
    turn: Estimate
    dialogues: int
    excluded: dict[str, int]
    """Dialogues that were lost, by reason: they have no scores."""
    unscored: dict[str, int]
    """Turns and samples without a score, by reason (``not_meaningful`` is no failure)."""
    solved: float | None
    """Share of the counted dialogues that the student ended as understood."""
    tutor_turns: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def values(scores: Sequence[DialogueScore], level: Level) -> tuple[list[float], list[Hashable]]:
    """(scores, the problem of each): a number a dialogue, or a number a meaningful turn."""
    if level == "sample":
        held = [(s.sample, s.problem) for s in scores if s.sample is not None]
    else:
        held = [(v, s.problem) for s in scores for v in s.scored]
    return [v for v, _ in held], [p for _, p in held]


def cell(episodes: Sequence[Episode], scores: Sequence[DialogueScore], *, seed: int = 0) -> Cell:
    """Means of one arm. ``scores``: those of the counted episodes."""
    counted = [e for e in episodes if e.counted]
    unscored: Counter[str] = Counter()
    for s in scores:
        unscored.update(t.why for t in s.turns if t.score is None)
        if s.sample is None:
            unscored[s.why] += 1
    means = {level: estimate(*values(scores, level), seed=seed) for level in LEVELS}
    n = len(counted)
    return Cell(
        means["sample"],
        means["turn"],
        n,
        dict(sorted(Counter(e.exclusion or "no_reward" for e in episodes if not e.counted).items())),
        dict(sorted(unscored.items())),
        sum(e.dialogue.end == "solved" for e in counted) / n if n else None,
        sum(len(e.dialogue.by("tutor")) for e in counted) / n if n else None,
    )


def difference(
    base: Sequence[DialogueScore], other: Sequence[DialogueScore], level: Level, *, seed: int = 0
) -> Difference:
    """other − base over the problems that both have a score for."""
    a, b = (cluster_means(*values(s, level)) for s in (base, other))
    return paired_difference(a, b, seed=seed)


def solved_difference(base: Sequence[Episode], other: Sequence[Episode], *, seed: int = 0) -> Difference:
    """Difference of the share of dialogues that ended as understood, other − base, paired by problem."""

    def means(episodes: Sequence[Episode]) -> dict[Hashable, float]:
        counted = [e for e in episodes if e.counted]
        return cluster_means(
            [float(e.dialogue.end == "solved") for e in counted], [problem_id(e.pair) for e in counted]
        )

    return paired_difference(means(base), means(other), seed=seed)


@dataclass(frozen=True, slots=True)
class Rescue:
    """Pairs whose prompt-only sample score is below ``below`` (Figure 4, right)."""

    below: float
    n: int
    of: int
    """Pairs that have both scores."""
    gain: float | None
    rest_gain: float | None
    """Gain of the pairs at or above: choosing by a noisy score makes the first look larger and this one smaller than they are."""
    gain_by_second: float | None = None
    """Gain of the same low pairs by the second judge, whose noise did not choose them."""
    points: list[tuple[float, float]] = field(default_factory=list)
    """(prompt-only, REAT) of the low pairs."""


def rescue(
    base: Sequence[DialogueScore],
    other: Sequence[DialogueScore],
    below: float,
    second: tuple[Sequence[DialogueScore], Sequence[DialogueScore]] | None = None,
) -> Rescue:
    """Sample-level gains of low-scoring pairs."""
    a, b = _by_pair(base), _by_pair(other)
    both = [p for p in a if p in b]
    low = [p for p in both if a[p] < below]
    by_second = None
    if second is not None:
        c, d = _by_pair(second[0]), _by_pair(second[1])
        by_second = _mean([d[p] - c[p] for p in low if p in c and p in d])
    return Rescue(
        below,
        len(low),
        len(both),
        _mean([b[p] - a[p] for p in low]),
        _mean([b[p] - a[p] for p in both if a[p] >= below]),
        by_second,
        sorted((a[p], b[p]) for p in low),
    )


def _by_pair(scores: Sequence[DialogueScore]) -> dict[str, float]:
    return {s.pair: s.sample for s in scores if s.sample is not None}


def _mean(items: Sequence[float]) -> float | None:
    return math.fsum(items) / len(items) if items else None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Sample-level scores of one arm: counts by bin of width 5 from 0 (100 falls into the last), and quantiles."""

    counts: list[int]
    mean: float | None
    quantiles: dict[str, float]


def distribution(scores: Sequence[DialogueScore]) -> Distribution:
    """The distribution of Figure 4, left."""
    found = sorted(_by_pair(scores).values())
    counts = [0] * round(100 / BIN)
    for v in found:
        counts[min(int(v // BIN), len(counts) - 1)] += 1
    quantiles = {}
    for name, q in (("p10", 0.1), ("p25", 0.25), ("p50", 0.5), ("p75", 0.75), ("p90", 0.9)):
        if found:
            place = q * (len(found) - 1)
            low = int(place)
            high = min(low + 1, len(found) - 1)
            quantiles[name] = found[low] + (place - low) * (found[high] - found[low])
    return Distribution(counts, _mean(found), quantiles)

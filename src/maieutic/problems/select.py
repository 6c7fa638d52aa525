"""``maieutic data filter`` and ``data split``: subsets of a set of pairs, with a count of what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from maieutic.errors import SolveRateError
from maieutic.problems.dedup import NearDuplicates
from maieutic.problems.filters import RateFilter
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.problems.splits import split_pairs


@dataclass(frozen=True, slots=True)
class Selection:
    """Pairs that are kept, in order, and how many were dropped by reason."""

    kept: list[ProblemPair]
    dropped: dict[str, int]


def filter_pairs(
    pairs: Sequence[ProblemPair],
    keep: RateFilter | None,
    student: str | None,
    *,
    drop_missing: bool = False,
    drop_flagged: bool = False,
) -> Selection:
    """By rates of one student (a key as text), by missing variants, by the build's flags.

    Raises :class:`SolveRateError` when ``keep`` is given and a pair that is left has no rate of the student.
    """
    kept, reasons = [], []
    for pair in pairs:
        reason = None
        if drop_missing and pair.transfer is None:
            reason = "no_variant"
        elif drop_flagged and (flags := _flags(pair)):
            reason = f"flagged_{flags[0]}"
        elif keep is not None:
            reason = _by_rate(pair, keep, student)
        if reason is None:
            kept.append(pair)
        else:
            reasons.append(reason)
    return Selection(kept, dict(sorted(Counter(reasons).items())))


def _flags(pair: ProblemPair) -> list[str]:
    made = pair.provenance.get("build")
    flags = made.get("flags", []) if isinstance(made, dict) else []
    return [f for f in flags if f != "no_variant"]


def _by_rate(pair: ProblemPair, keep: RateFilter, student: str | None) -> str | None:
    sides: tuple[tuple[str, Problem | None], ...] = (("source", pair.source), ("transfer", pair.transfer))
    for side, problem in sides:
        if problem is None:
            continue
        rate = problem.rates.get(student) if student is not None else None
        if rate is None:
            raise SolveRateError(f"pair {pair.id!r}: no solve rate of {student} on its {side} problem")
        if why := keep.rejects(rate.rate):
            return f"{side}_{why}"
    return None


def split_apart(
    pairs: Sequence[ProblemPair], size: int, seed: int, *, threshold: float = 0.8, shingle: int = 3
) -> tuple[list[ProblemPair], list[ProblemPair], dict[str, int]]:
    """(train, test, dropped): ``size`` pairs held out by a hash of (seed, source text); training pairs of which a text equals or
    nearly repeats a held-out text are dropped."""
    split = split_pairs(pairs, size, seed)
    index = NearDuplicates(threshold, shingle)
    for pair in split.held_out:
        for side, problem in (("source", pair.source), ("transfer", pair.transfer)):
            if problem is not None:
                index.add(f"{side} {pair.id}", problem.text)
    train = [
        p
        for p in split.train
        if not any(q is not None and index.find(q.text) is not None for q in (p.source, p.transfer))
    ]
    dropped = {"same_text": split.overlap, "near_duplicate": len(split.train) - len(train)}
    return train, split.held_out, {k: n for k, n in dropped.items() if n}

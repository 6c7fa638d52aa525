"""Named filters on the solve rates of both problems of a pair.

``train_band`` is the published training code's: both rates in [0.02, 0.65], both ends included. ``paper_test`` is that of the
paper's Table 5: no rate is 0 and none is above 0.9.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maieutic.errors import RecipeError
from maieutic.problems.schema import ProblemPair, StudentKey


@dataclass(frozen=True, slots=True)
class RateFilter:
    """Keeps rates in [low, high], or in (low, high] when ``low_open``."""

    name: str
    low: float
    high: float
    low_open: bool = False

    def rejects(self, rate: float) -> str | None:
        """``too_hard``, ``too_easy``, or None for a rate that is kept."""
        if rate < self.low or (self.low_open and rate == self.low):
            return "too_hard"
        return "too_easy" if rate > self.high else None

    def reason(self, pair: ProblemPair, students: Sequence[StudentKey]) -> str | None:
        """Why a pair is dropped (``source_too_easy``, ``transfer_too_hard``, …), None when it is kept.

        It is kept only if every student's rates are; a pair without a variant is judged by its source alone.
        """
        for key in students:
            for side, problem in (("source", pair.source), ("transfer", pair.transfer)):
                if problem is not None and (why := self.rejects(problem.rate(key).rate)):
                    return f"{side}_{why}"
        return None


NAMED = {
    "train_band": RateFilter("train_band", 0.02, 0.65),
    "paper_test": RateFilter("paper_test", 0.0, 0.9, low_open=True),
}


def rate_filter(spec: str | Mapping[Any, float]) -> RateFilter | None:
    """The filter of a recipe: a name, ``{low: …, high: …}`` (inclusive; an end left out is open), or None for ``none``."""
    if spec == "none":
        return None
    if isinstance(spec, str):
        if spec in NAMED:
            return NAMED[spec]
        near = difflib.get_close_matches(spec, NAMED, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are none, {', '.join(NAMED)}"
        raise RecipeError(f"problems.filter: {spec!r} is no filter{hint}")
    if unknown := set(spec) - {"low", "high"}:
        raise RecipeError(
            f"problems.filter: a band has the keys low and high, not {', '.join(sorted(unknown))}"
        )
    low, high = spec.get("low", 0.0), spec.get("high", 1.0)
    if not 0 <= low <= high <= 1:
        raise RecipeError(f"problems.filter: 0 ≤ low ≤ high ≤ 1 does not hold for low {low:g}, high {high:g}")
    return RateFilter(f"[{low:g}, {high:g}]", low, high)

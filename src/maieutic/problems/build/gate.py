"""The difficulty gate (paper, appendix E.1 step 4): variant rate ≤ ceiling and |variant − source| ≤ gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maieutic.problems.build.checks import Finding
from maieutic.problems.build.recipe import GateSpec
from maieutic.problems.build.rewrite import Candidate
from maieutic.problems.measure import Tally

_EXACT = 1e-9
"""Rates are ratios of small integers: a gap of exactly 0.375 passes whatever its last bit is."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A verified variant with the student's samples."""

    attempt: int
    candidate: Candidate
    tally: Tally
    solution: str | None
    """Of the blind solve that agreed."""
    votes: dict[str, int]


def gate(source: Tally, variant: Tally, spec: GateSpec) -> list[Finding]:
    """What is wrong with the variant's difficulty: ``too_easy`` (over the ceiling), ``gap_easier``, ``gap_harder``; none: passes.

    Both tallies must have a rate.
    """
    if source.rate is None or variant.rate is None:
        raise ValueError("the gate compares two measured rates")
    before, after = source.rate.rate, variant.rate.rate
    found = []
    told = f"students solve it {variant.right} times in {variant.graded}"
    if after > spec.ceiling + _EXACT:
        found.append(Finding("too_easy", f"{told}: it is too easy"))
    if abs(after - before) > spec.gap + _EXACT:
        easier = after > before
        found.append(
            Finding(
                "gap_easier" if easier else "gap_harder",
                f"{told}, but the original {source.right} times in {source.graded}: it is much "
                f"{'easier' if easier else 'harder'} than the original",
            )
        )
    return found


def best(source: Tally, candidates: Sequence[Measured]) -> Measured | None:
    """The candidate whose rate is nearest to the source's (the earliest of equals)."""

    def gap(c: Measured) -> float:
        assert c.tally.rate is not None and source.rate is not None
        return round(abs(c.tally.rate.rate - source.rate.rate), 9)

    return min(candidates, key=gap, default=None)

r"""Agreement of labels: Cohen's κ for two judges, Krippendorff's α for any number with gaps.

κ = (p_o − p_e) / (1 − p_e)          p_o observed agreement, p_e agreement of independent judges with these margins
α = 1 − D_o / D_e                    observed and expected disagreement, pairwise within units and over all values
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

Level = Literal["nominal", "ordinal", "interval"]


def cohen_kappa(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """κ of two judges' labels of the same items. nan without items, or where both gave one and the same label throughout."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} labels")
    n = len(a)
    if n == 0:
        return math.nan
    observed = sum(x == y for x, y in zip(a, b, strict=True)) / n
    left, right = Counter(a), Counter(b)
    expected = sum(left[label] * right[label] for label in left) / n**2
    return math.nan if expected == 1 else (observed - expected) / (1 - expected)


def krippendorff_alpha(ratings: Sequence[Sequence[float | str | None]], level: Level = "nominal") -> float:
    """α of ``ratings`` [judges][units], None where a judge gave none.

    ``level``: nominal labels, ordinal ranks or interval numbers. nan when no unit has two ratings or all ratings are equal.
    """
    units = [[r for r in unit if r is not None] for unit in zip(*ratings, strict=True)]
    units = [u for u in units if len(u) > 1]
    totals: Counter[float | str] = Counter(v for u in units for v in u)
    n = sum(totals.values())
    if n == 0 or len(totals) == 1:
        return math.nan
    delta = _metric(level, totals)
    observed = sum(
        delta(x, y) / (len(u) - 1) for u in units for i, x in enumerate(u) for j, y in enumerate(u) if i != j
    )
    expected = sum(totals[x] * totals[y] * delta(x, y) for x in totals for y in totals) / (n - 1)
    return 1 - observed / expected


def _metric(level: Level, totals: Counter[float | str]) -> Callable[[float | str, float | str], float]:
    if level == "nominal":
        return lambda x, y: float(x != y)
    if level == "interval":
        return lambda x, y: (float(x) - float(y)) ** 2
    order = sorted(totals, key=float)
    below = {v: sum(totals[w] for w in order[:i]) for i, v in enumerate(order)}

    def ranks(x: float | str, y: float | str) -> float:
        low, high = sorted((x, y), key=float)
        between = below[high] + totals[high] - below[low]
        return (between - (totals[low] + totals[high]) / 2) ** 2

    return ranks

r"""Distances between distributions over tutor moves.

JSD(p, q) = ½ KL(p ‖ m) + ½ KL(q ‖ m)   with m = (p + q)/2 and logarithms to base 2, so that 0 ≤ JSD ≤ 1
d_JS(p, q) = √JSD(p, q)                  a metric: the *distance* of the paper's Figure 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def normalised(counts: Sequence[float]) -> list[float]:
    """Counts as shares. Raises ValueError for a negative count or for nothing at all."""
    total = math.fsum(counts)
    if total <= 0 or min(counts) < 0:
        raise ValueError(f"no distribution can be made of counts {list(counts)}")
    return [c / total for c in counts]


def _distribution(p: Sequence[float]) -> Floats:
    array = np.asarray(p, dtype=np.float64)
    if array.min(initial=0.0) < 0 or abs(float(array.sum()) - 1) > 1e-9:
        raise ValueError(f"not a distribution (sum {float(array.sum())})")
    return array


def _kl(p: Floats, q: Floats) -> float:
    some = p > 0
    return float(np.sum(p[some] * np.log2(p[some] / q[some])))


def js_divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """JSD in [0, 1] (bits) of two distributions over the same categories; exactly 0 for equal ones."""
    a, b = _distribution(p), _distribution(q)
    if a.shape != b.shape:
        raise ValueError(f"{len(a)} and {len(b)} categories")
    m = (a + b) / 2
    return min(1.0, max(0.0, (_kl(a, m) + _kl(b, m)) / 2))


def js_distance(p: Sequence[float], q: Sequence[float]) -> float:
    """The square root of the divergence."""
    return math.sqrt(js_divergence(p, q))


def centroid(distributions: Sequence[Sequence[float]]) -> list[float]:
    """The mean distribution, which minimises the summed KL from its members."""
    if not distributions:
        raise ValueError("a centroid needs at least one distribution")
    return [float(v) for v in np.mean([_distribution(p) for p in distributions], axis=0)]

"""Intervals and paired tests for success rates; agreement of labels. Pure functions on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rate:
    """A share with its Wilson interval."""

    value: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int, level: float = 0.95) -> Rate:
    """Wilson's score interval of a binomial share; (0, 1) for n = 0."""
    from statistics import NormalDist

    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return Rate(float("nan"), 0.0, 1.0, 0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Rate(p, max(0.0, middle - half), min(1.0, middle + half), n)


@dataclass(frozen=True, slots=True)
class Paired:
    """Mean difference over pairs, with a bootstrap interval over clusters and a sign-flip test."""

    difference: float
    low: float
    high: float
    p_value: float
    n: int
    clusters: int


def paired(
    a: Sequence[float],
    b: Sequence[float],
    clusters: Sequence[str],
    *,
    level: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
) -> Paired:
    """a − b where a[i] and b[i] are the same problem, student and seed. Whole clusters (problems) are resampled and flipped.

    The p-value is two-sided, (1 + flips at least as extreme) / (1 + flips); it is at least 1 / (1 + resamples).
    """
    if not len(a) == len(b) == len(clusters) or not len(a):
        raise ValueError(f"paired samples of {len(a)}, {len(b)} and {len(clusters)} clusters")
    d = np.asarray(a, float) - np.asarray(b, float)
    names, inverse = np.unique(np.asarray(clusters), return_inverse=True)
    total = np.bincount(inverse, d)
    count = np.bincount(inverse).astype(float)
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=resamples)
    means = (draws @ total) / (draws @ count)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    signs = rng.choice([-1.0, 1.0], size=(resamples, len(names)))
    extreme = np.abs(signs @ total) >= abs(total.sum()) - 1e-12
    return Paired(
        float(d.mean()),
        float(low),
        float(high),
        float((1 + extreme.sum()) / (1 + resamples)),
        len(d),
        len(names),
    )


def cohen_kappa(a: Sequence[str], b: Sequence[str]) -> float:
    """Cohen's κ of two raters; NaN where chance agreement is complete (both say one and the same label throughout)."""
    if len(a) != len(b) or not len(a):
        raise ValueError(f"two raters with {len(a)} and {len(b)} labels")
    labels = sorted(set(a) | set(b))
    agree = float(np.mean([x == y for x, y in zip(a, b, strict=True)]))
    chance = sum(list(a).count(k) * list(b).count(k) for k in labels) / len(a) ** 2
    return float("nan") if chance >= 1 else (agree - chance) / (1 - chance)

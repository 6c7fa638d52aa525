r"""Means that know how sure they are: errors clustered by problem, bootstrap intervals, paired differences, Holm, Wilson, wins.

Samples of one problem are not independent, so every error here is clustered: with x̄ the mean of all n samples and G problems,

    SE = sqrt( G/(G−1) · Σ_g (Σ_{i∈g} (x_i − x̄))² ) / n

which is s/√n when each problem has one sample. Intervals resample whole problems. Below :data:`MIN_CLUSTERS` problems there is
no interval but a statement that says so. Pure functions on sequences; random draws follow from a seed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_CLUSTERS = 10
"""Fewest problems that an interval is given for: a bootstrap of fewer is far too narrow."""
RESAMPLES = 2_000
_EXACT_FLIPS = 12
"""Up to so many pairs all sign flips are enumerated."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its clustered standard error and 95 % interval. ``se``, ``low``, ``high`` are None where ``note`` says why."""

    value: float
    n: int
    clusters: int
    se: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """b − a over the problems that both arms have, and the p-value of a two-sided sign-flip test."""

    value: float
    pairs: int
    se: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Interval:
    """A share with its Wilson interval."""

    value: float
    low: float
    high: float
    n: int


def _finite(values: Sequence[float]) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError("a mean is taken over finite numbers: leave out what was not measured, and count it")
    return array


def _by_cluster(values: Floats, clusters: Sequence[Hashable]) -> tuple[Floats, Floats]:
    """Sum and size of each cluster, in order of first appearance."""
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} values, {len(clusters)} cluster names")
    place: dict[Hashable, int] = {}
    index = np.array([place.setdefault(c, len(place)) for c in clusters], dtype=np.intp)
    sums = np.bincount(index, weights=values, minlength=len(place)).astype(np.float64)
    sizes = np.bincount(index, minlength=len(place)).astype(np.float64)
    return sums, sizes


def clustered_se(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Standard error of the mean of ``values`` [n] with ``clusters`` [n] (formula above); nan for fewer than two clusters."""
    x = _finite(values)
    sums, sizes = _by_cluster(x, clusters)
    g = len(sums)
    if g < 2:
        return math.nan
    residual = sums - sizes * x.mean()
    return float(math.sqrt(g / (g - 1) * float(residual @ residual)) / len(x))


def bootstrap_interval(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of the mean when whole clusters are drawn with replacement."""
    sums, sizes = _by_cluster(_finite(values), clusters)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(sums), size=(resamples, len(sums)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def estimate(values: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0) -> Estimate:
    """Mean, clustered error and interval of ``values`` [n]; a mean over nothing is nan with a note."""
    x = _finite(values)
    if not len(x):
        return Estimate(math.nan, 0, 0, note="nothing was measured")
    g = len(set(clusters))
    if g < MIN_CLUSTERS:
        note = f"{g} problem{'s' if g != 1 else ''}: too few for an interval (at least {MIN_CLUSTERS})"
        return Estimate(float(x.mean()), len(x), g, note=note)
    low, high = bootstrap_interval(values, clusters, seed=seed)
    return Estimate(float(x.mean()), len(x), g, clustered_se(values, clusters), low, high)


# ---- two arms ------------------------------------------------------------------------------------------------------------


def cluster_means(values: Sequence[float], clusters: Sequence[Hashable]) -> dict[Hashable, float]:
    """Mean of each cluster."""
    held: dict[Hashable, list[float]] = defaultdict(list)
    for value, cluster in zip(values, clusters, strict=True):
        held[cluster].append(value)
    return {c: math.fsum(v) / len(v) for c, v in held.items()}


def paired_difference(
    a: Mapping[Hashable, float], b: Mapping[Hashable, float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Difference:
    """b − a of per-problem means (:func:`cluster_means`) over the problems in both; equal arms give exactly 0 and p = 1."""
    keys = [k for k in a if k in b]
    if not keys:
        return Difference(math.nan, 0, note="the arms share no problem")
    d = _finite([b[k] - a[k] for k in keys])
    n = len(d)
    if n < MIN_CLUSTERS:
        note = f"{n} shared problem{'s' if n != 1 else ''}: too few for an interval (at least {MIN_CLUSTERS})"
        return Difference(float(d.mean()), n, note=note)
    low, high = bootstrap_interval(list(d), range(n), seed=seed, resamples=resamples)
    return Difference(
        float(d.mean()), n, float(d.std(ddof=1) / math.sqrt(n)), low, high, sign_flip_p(d, seed=seed)
    )


def sign_flip_p(differences: Sequence[float] | Floats, *, flips: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of mean 0 when each difference may have had either sign: exact up to 12 of them, else sampled.

    The observed signs count as one of the samples, so p is never 0.
    """
    d = np.asarray(differences, dtype=np.float64)
    n, observed = len(d), abs(float(d.sum()))
    tolerance = 1e-12 * float(np.abs(d).sum())
    if n <= _EXACT_FLIPS:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(np.abs(signs @ d) >= observed - tolerance))
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(flips, n))
    return float((np.sum(np.abs(signs @ d) >= observed - tolerance) + 1) / (flips + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given: they bound the chance of any false claim among all of them."""
    m, running = len(p_values), 0.0
    adjusted = [0.0] * m
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


# ---- shares ----------------------------------------------------------------------------------------------------------------


def wilson(successes: int, n: int, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of a share of independent trials; (0, 1) around nan for n = 0."""
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    p, zz = successes / n, z * z
    middle = (p + zz / (2 * n)) / (1 + zz / n)
    half = z / (1 + zz / n) * math.sqrt(p * (1 - p) / n + zz / (4 * n * n))
    return Interval(p, max(0.0, middle - half), min(1.0, middle + half), n)


@dataclass(frozen=True, slots=True)
class WinRate:
    """``micro``: share of all comparisons won; ``macro``: mean of the groups' shares. A tie is not a win (and is counted)."""

    micro: float
    macro: float
    n: int
    ties: int
    groups: dict[str, float]


def win_rate(ours: Sequence[float], theirs: Sequence[float], groups: Sequence[str]) -> WinRate:
    """How often ``ours`` > ``theirs``, strictly, as MathTutorBench counts; ``groups`` name what the macro mean is over."""
    if not len(ours) == len(theirs) == len(groups):
        raise ValueError(f"{len(ours)}, {len(theirs)} scores and {len(groups)} groups")
    if not ours:
        return WinRate(math.nan, math.nan, 0, 0, {})
    won = [float(x > y) for x, y in zip(ours, theirs, strict=True)]
    shares = {str(g): share for g, share in cluster_means(won, groups).items()}
    ties = sum(x == y for x, y in zip(ours, theirs, strict=True))
    return WinRate(
        math.fsum(won) / len(won), math.fsum(shares.values()) / len(shares), len(won), ties, shares
    )

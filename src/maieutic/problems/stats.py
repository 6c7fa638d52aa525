"""What a set of pairs is like: the numbers of the paper's Table 5 (appendix E.2) with intervals, as text and JSON.

Wilson's interval of a rate with r right of n: (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

A correlation of measured rates is smaller than that of the true ones, because k samples are few. With reliability
ρ = 1 − mean(p(1−p)/(n−1)) / var(p) on each side, the noise-corrected correlation is r / √(ρ_source ρ_transfer), at most 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from maieutic.problems.schema import ProblemPair, SolveRate

Z95 = 1.959963984540054
BINS = 10


def wilson(right: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of right / n (95 % by default), within [0, 1]."""
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"{right} right of {n} is no rate")
    p, w = right / n, z * z / n
    middle, half = p + w / 2, z * math.sqrt(p * (1 - p) / n + w / (4 * n))
    low, high = (middle - half) / (1 + w), (middle + half) / (1 + w)
    return (0.0 if right == 0 else max(0.0, low)), (1.0 if right == n else min(1.0, high))


def interval(rate: SolveRate) -> tuple[float, float]:
    """:func:`wilson` of a measured rate."""
    return wilson(round(rate.rate * rate.n), rate.n)


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's r; None for fewer than 2 points, or where one side does not vary."""
    n = len(x)
    if n < 2:
        return None
    mx, my = math.fsum(x) / n, math.fsum(y) / n
    sxx, syy = math.fsum((a - mx) ** 2 for a in x), math.fsum((b - my) ** 2 for b in y)
    if sxx <= 0 or syy <= 0:
        return None
    r = math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / math.sqrt(sxx * syy)
    return max(-1.0, min(1.0, r))


def fisher_interval(r: float, n: int, z: float = Z95) -> tuple[float, float] | None:
    """Fisher's interval of a correlation of n points; None below 4 points or at ±1."""
    if n < 4 or abs(r) >= 1:
        return None
    middle, half = math.atanh(r), z / math.sqrt(n - 3)
    return math.tanh(middle - half), math.tanh(middle + half)


def corrected_correlation(x: Sequence[SolveRate], y: Sequence[SolveRate]) -> float | None:
    """The noise-corrected correlation (top of this module); None where noise explains all that varies."""
    r = pearson([a.rate for a in x], [b.rate for b in y])
    reliable = [_reliability(x), _reliability(y)]
    if r is None or any(rho is None or rho <= 0 for rho in reliable):
        return None
    return max(-1.0, min(1.0, r / math.sqrt(math.prod(rho for rho in reliable if rho is not None))))


def _reliability(rates: Sequence[SolveRate]) -> float | None:
    n = len(rates)
    mean = math.fsum(r.rate for r in rates) / n
    variance = math.fsum((r.rate - mean) ** 2 for r in rates) / (n - 1)
    if variance <= 0 or any(r.n < 2 for r in rates):
        return None
    return 1 - math.fsum(r.rate * (1 - r.rate) / (r.n - 1) for r in rates) / n / variance


@dataclass(slots=True)
class SideStats:
    """Rates of one side, source or transfer."""

    n: int
    mean: float
    mean_interval: tuple[float, float]
    """Normal 95 % interval of the mean over problems."""
    sd: float
    median: float
    shares: dict[str, float]
    """Shares of problems: ``zero``, ``below_0.10``, ``above_0.65``, ``above_0.90``."""
    histogram: list[int]
    """Counts in ten bins [0, 0.1), …, [0.9, 1]."""
    samples: int
    """Graded samples in all."""
    mean_width: float
    """Mean width of the problems' Wilson intervals: how sharply one rate is known."""


@dataclass(slots=True)
class DatasetStats:
    """Everything ``maieutic data stats`` says."""

    name: str
    student: str | None
    pairs: int
    with_variant: int
    measured: int
    """Pairs with both rates."""
    filter: str
    kept: int
    """Measured pairs that the filter keeps: what the numbers below are about."""
    source: SideStats | None = None
    transfer: SideStats | None = None
    correlation: float | None = None
    correlation_interval: tuple[float, float] | None = None
    correlation_corrected: float | None = None
    mean_gap: float | None = None
    """Mean of transfer − source rate."""
    mean_abs_gap: float | None = None
    gap_over_gate: float | None = None
    """Share of pairs with |gap| > 0.375, the published gate."""
    flags: dict[str, int] = field(default_factory=dict)
    points: list[tuple[float, float]] = field(default_factory=list)
    """(source rate, transfer rate) of every kept pair."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def dataset_stats(
    pairs: Sequence[ProblemPair],
    student: str | None,
    name: str,
    keep: Callable[[float], str | None] | None = None,
    filter_name: str = "none",
) -> DatasetStats:
    """Statistics of the pairs with both rates of ``student`` whose rates ``keep`` (None: all) does not reject."""
    both = []
    for pair in pairs:
        if pair.transfer is not None and student is not None:
            a, b = pair.source.rates.get(student), pair.transfer.rates.get(student)
            if a is not None and b is not None:
                both.append((a, b))
    kept = [(a, b) for a, b in both if keep is None or not (keep(a.rate) or keep(b.rate))]
    flags = Counter(
        flag
        for p in pairs
        if isinstance(made := p.provenance.get("build"), dict)
        for flag in made.get("flags", ())
    )
    out = DatasetStats(
        name,
        student,
        pairs=len(pairs),
        with_variant=sum(p.transfer is not None for p in pairs),
        measured=len(both),
        filter=filter_name,
        kept=len(kept),
        flags=dict(sorted(flags.items())),
    )
    if not kept:
        return out
    x, y = [a for a, _ in kept], [b for _, b in kept]
    out.source, out.transfer = _side(x), _side(y)
    out.points = [(a.rate, b.rate) for a, b in kept]
    gaps = [b - a for a, b in out.points]
    out.mean_gap = math.fsum(gaps) / len(gaps)
    out.mean_abs_gap = math.fsum(map(abs, gaps)) / len(gaps)
    out.gap_over_gate = sum(abs(g) > 0.375 for g in gaps) / len(gaps)
    out.correlation = pearson([a.rate for a in x], [b.rate for b in y])
    if out.correlation is not None:
        out.correlation_interval = fisher_interval(out.correlation, len(kept))
        out.correlation_corrected = corrected_correlation(x, y)
    return out


def _side(rates: Sequence[SolveRate]) -> SideStats:
    values = sorted(r.rate for r in rates)
    n = len(values)
    mean = math.fsum(values) / n
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else 0.0
    half = Z95 * sd / math.sqrt(n)
    bins = [0] * BINS
    for v in values:
        bins[min(BINS - 1, int(v * BINS + 1e-9))] += 1
    widths = [high - low for low, high in map(interval, rates)]
    return SideStats(
        n=n,
        mean=mean,
        mean_interval=(max(0.0, mean - half), min(1.0, mean + half)),
        sd=sd,
        median=(values[(n - 1) // 2] + values[n // 2]) / 2,
        shares={
            "zero": sum(v == 0 for v in values) / n,
            "below_0.10": sum(v < 0.10 for v in values) / n,
            "above_0.65": sum(v > 0.65 for v in values) / n,
            "above_0.90": sum(v > 0.90 for v in values) / n,
        },
        histogram=bins,
        samples=sum(r.n for r in rates),
        mean_width=math.fsum(widths) / n,
    )


def stats_lines(s: DatasetStats) -> list[str]:
    """The table for people."""
    out = [
        f"{s.name}: {s.pairs} pairs, {s.with_variant} with a variant, {s.measured} with both rates",
        f"student: {s.student or 'none measured'}",
        f"filter {s.filter}: {s.kept} pairs",
    ]
    if s.source is None or s.transfer is None:
        return out
    rows = [("", "source", "transfer")]
    for label, get in _ROWS:
        rows.append((label, get(s.source), get(s.transfer)))
    out += ["", *(f"{a:<34}{b:>18}{c:>18}" for a, b, c in rows), ""]
    r = "none" if s.correlation is None else f"{s.correlation:.3f}"
    if s.correlation_interval is not None:
        r += f" [{s.correlation_interval[0]:.3f}, {s.correlation_interval[1]:.3f}]"
    if s.correlation_corrected is not None:
        r += f"; corrected for sampling noise {s.correlation_corrected:.3f}"
    out.append(f"correlation of source and transfer rates: {r}")
    out.append(
        f"gap (transfer − source): mean {s.mean_gap:+.3f}, mean absolute {s.mean_abs_gap:.3f}, "
        f"{s.gap_over_gate:.1%} beyond ±0.375"
    )
    if s.flags:
        out.append("flags: " + ", ".join(f"{n} {flag}" for flag, n in s.flags.items()))
    most = max(max(s.source.histogram), max(s.transfer.histogram), 1)
    out += ["", "rate          source                          transfer"]
    for i, (a, b) in enumerate(zip(s.source.histogram, s.transfer.histogram, strict=True)):
        bars = [f"{n:>6} {'█' * round(20 * n / most):<22}" for n in (a, b)]
        end = "]" if i == BINS - 1 else ")"
        out.append(f"[{i / BINS:.1f}, {(i + 1) / BINS:.1f}{end}  {bars[0]}   {bars[1].rstrip()}")
    return out


_ROWS: list[tuple[str, Callable[[SideStats], str]]] = [
    ("mean solve rate", lambda s: f"{s.mean:.3f}"),
    ("  95 % interval", lambda s: f"[{s.mean_interval[0]:.3f}, {s.mean_interval[1]:.3f}]"),
    ("standard deviation", lambda s: f"{s.sd:.3f}"),
    ("median", lambda s: f"{s.median:.3f}"),
    ("share with rate 0", lambda s: f"{s.shares['zero']:.1%}"),
    ("share below 0.10", lambda s: f"{s.shares['below_0.10']:.1%}"),
    ("share above 0.65", lambda s: f"{s.shares['above_0.65']:.1%}"),
    ("share above 0.90", lambda s: f"{s.shares['above_0.90']:.1%}"),
    ("graded samples", lambda s: f"{s.samples}"),
    ("mean width of Wilson intervals", lambda s: f"{s.mean_width:.3f}"),
]

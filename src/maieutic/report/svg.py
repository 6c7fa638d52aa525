"""Small line plots as SVG text: axes in the text's colour, one CSS class a series, gaps where there is no value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float | None]

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 10, 24
_MARKED = 60
"""A series of at most this many points gets a dot, with its value, at each."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: (x, y) in order of x; y None (or not finite) is a gap.

    ``slot`` (from 1) is its look: the four colours of the page, ``.s1`` … ``.s4``, drawn through, then the same dashed (``.d1``),
    dotted (``.d2``) and dash-dotted (``.d3``).
    """

    label: str
    points: Sequence[Point]
    slot: int = 1

    @property
    def classes(self) -> str:
        """Its CSS classes, on the line and in the legend."""
        dashes, colour = divmod(self.slot - 1, 4)
        return f"s{colour + 1}" + (f" d{dashes % 4}" if dashes % 4 else "")


def runs_of(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The unbroken stretches of a series: a missing value ends a stretch."""
    out: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None or not math.isfinite(y):
            out.append([])
        else:
            out[-1].append((x, y))
    return [stretch for stretch in out if stretch]


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover ``low``…``high``, the ends included or passed."""
    if high <= low:
        pad = abs(low) * 0.1
        low, high = (low - pad, high + pad) if pad else (0.0, 1.0)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(start, end + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick with as many decimals as its spacing needs."""
    if value and (abs(value) >= 1e5 or step < 1e-4):
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    text = f"{abs(value):.{decimals}f}"
    return ("−" if value < 0 and float(text) else "") + text


def line_plot(title: str, series: Sequence[Series]) -> str:
    """An ``<svg>`` of the series over a common x axis (the step). Text is escaped; no value at all → a plot that says so.

    Looks come from the page (:class:`Series`): ``.s1`` … ``.s4`` set ``color``; axes and text use ``currentColor`` of the svg.
    """
    drawn = [(s, runs_of(s.points)) for s in series]
    values = [p for _, stretches in drawn for stretch in stretches for p in stretch]
    if not values:
        return _frame(
            title, [f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no values</text>']
        )
    xs = [x for s, _ in drawn for x, _ in s.points]
    y_ticks = ticks(min(y for _, y in values), max(y for _, y in values))
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        px = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        py = HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(px, 2), round(py, 2)

    parts = []
    for y in y_ticks:
        _, py = at(x_low, y)
        kind = "zero" if abs(y) < (y_ticks[1] - y_ticks[0]) * 1e-6 else "grid"
        label = tick_text(y, y_ticks[1] - y_ticks[0])
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py}" y2="{py}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{py + 4}" text-anchor="end">{label}</text>')
    for x in [t for t in ticks(x_low, x_high, 5) if x_low <= t <= x_high and t == int(t)]:
        px, _ = at(x, y_low)
        parts.append(
            f'<line class="axis" x1="{px}" x2="{px}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>'
        )
        parts.append(f'<text x="{px}" y="{HEIGHT - 6}" text-anchor="middle">{int(x)}</text>')
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
    )
    for s, stretches in drawn:
        parts.append(f'<g class="{s.classes}">')
        for stretch in stretches:
            path = " ".join(f"{px},{py}" for px, py in (at(x, y) for x, y in stretch))
            if len(stretch) > 1:
                parts.append(f'<polyline points="{path}"/>')
        dots = [
            p
            for stretch in stretches
            for p in (stretch if len(s.points) <= _MARKED or len(stretch) == 1 else [])
        ]
        for x, y in dots:
            px, py = at(x, y)
            told = escape(f"{s.label}, step {x:g}: {y:.4g}")
            parts.append(f'<circle cx="{px}" cy="{py}" r="2.6"><title>{told}</title></circle>')
        parts.append("</g>")
    return _frame(title, parts)


def _frame(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )

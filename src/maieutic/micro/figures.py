"""Two plain figures as SVG text, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#000000", "#ee7733")
_FONT = 'font-family="sans-serif" font-size="12"'


def _svg(width: int, height: int, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" {_FONT}>'
    return (
        "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *body, "</svg>"]) + "\n"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def dots_svg(
    rows: Sequence[tuple[str, Sequence[tuple[float, float, float]]]], series: Sequence[str], axis: str
) -> str:
    """One row a name, one dot (mean, low, high) a series, on a common axis that holds all intervals and 0."""
    low = min(0.0, *(x[1] for _, dots in rows for x in dots))
    high = max(1.0, *(x[2] for _, dots in rows for x in dots))
    left, right, top, step = 190, 700, 50, 16 * len(series) + 14
    height = top + step * len(rows) + 40

    def at(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    body = [_text(left + 170 * k + 12, 24, name) for k, name in enumerate(series)]
    body += [f'<circle cx="{left + 170 * k}" cy="20" r="5" fill="{COLOURS[k]}"/>' for k in range(len(series))]
    bottom = height - 36
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        body += [
            _line(at(tick), top - 8, at(tick), bottom, "#dddddd"),
            _text(at(tick), bottom + 14, f"{tick:g}", "middle"),
        ]
    body.append(_text((left + right) / 2, height - 6, axis, "middle"))
    for r, (name, dots) in enumerate(rows):
        y0 = top + r * step
        body.append(_text(left - 12, y0 + 16 * len(series) / 2, name, "end"))
        for k, (mean, lo, hi) in enumerate(dots):
            y = y0 + 16 * k + 6
            body.append(_line(at(lo), y, at(hi), y, COLOURS[k], 2))
            body.append(f'<circle cx="{at(mean):.1f}" cy="{y}" r="5" fill="{COLOURS[k]}"/>')
    return _svg(right + 40, height, body)


def curves_svg(lines: Sequence[tuple[str, Sequence[float]]], title: str, axis: str) -> str:
    """One line a name over the steps 1, 2, …; values in [0, 1]."""
    left, right, top, bottom = 60, 560, 40, 320
    steps = max(2, *(len(values) for _, values in lines), 2)

    def x(step: int) -> float:
        return left + (step - 1) / (steps - 1) * (right - left)

    def y(value: float) -> float:
        return bottom - value * (bottom - top)

    body = [_text(left, 22, title), _text((left + right) / 2, bottom + 34, axis, "middle")]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        body += [
            _line(left, y(tick), right, y(tick), "#dddddd"),
            _text(left - 8, y(tick) + 4, f"{tick:g}", "end"),
        ]
    body += [_text(x(s), bottom + 16, str(s), "middle") for s in (1, steps)]
    for k, (name, values) in enumerate(lines):
        colour = COLOURS[k % len(COLOURS)]
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values, start=1))
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [
            _line(right + 14, top + 20 * k, right + 34, top + 20 * k, colour, 3),
            _text(right + 40, top + 20 * k + 4, name),
        ]
    return _svg(right + 240, bottom + 50, body)

"""A scatter of per-problem numbers of two arms, as SVG text: above the diagonal the second arm is better."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from maieutic.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, _frame, tick_text, ticks


def scatter_plot(title: str, points: Sequence[tuple[float, float, str]], *, slot: int = 1) -> str:
    """``points``: (x, y, name), drawn on equal axes with the diagonal; the name and both numbers are each point's title."""
    if not points:
        return _frame(
            title, [f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no values</text>']
        )
    values = [v for x, y, _ in points for v in (x, y)]
    marks = ticks(min(values), max(values))
    low, high, step = marks[0], marks[-1], marks[1] - marks[0]

    def at(x: float, y: float) -> tuple[float, float]:
        px = LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)
        py = HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return round(px, 2), round(py, 2)

    parts = []
    for mark in marks:
        px, py = at(mark, mark)
        label = tick_text(mark, step)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py}" y2="{py}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{py + 4}" text-anchor="end">{label}</text>')
        parts.append(f'<text x="{px}" y="{HEIGHT - 6}" text-anchor="middle">{label}</text>')
    (x1, y1), (x2, y2) = at(low, low), at(high, high)
    parts.append(f'<line class="zero" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>')
    dots = []
    for x, y, name in points:
        px, py = at(x, y)
        told = escape(f"{name}: {x:.3g}, {y:.3g}")
        dots.append(f'<circle cx="{px}" cy="{py}" r="2.6"><title>{told}</title></circle>')
    parts.append(f'<g class="s{slot}">{"".join(dots)}</g>')
    return _frame(title, parts)

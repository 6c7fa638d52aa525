"""The statistics of a set of pairs as one HTML page without scripts: table, histogram and scatter plot as SVG."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from maieutic.problems.stats import BINS, DatasetStats, stats_lines
from maieutic.report.page import esc, policy, write_page

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 300, 46, 34, 12
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; background: #fff; }
pre { overflow-x: auto; background: #f5f5f5; padding: 1rem; font-size: 13px; }
figure { display: inline-block; margin: 1rem 1rem 1rem 0; } figcaption { font-weight: 600; }
svg { width: 420px; max-width: 100%; } svg text { font-size: 11px; fill: currentColor; }
.s1 { fill: #2166ac; } .s2 { fill: #d6604d; } .axis { stroke: currentColor; } .grid { stroke: #8884; }
.same { stroke: #8888; stroke-dasharray: 4 3; }
.dot { fill: #2166ac; fill-opacity: .55; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } pre { background: #242424; } }
"""


def write_figure(path: Path, stats: DatasetStats) -> Path:
    """Write the page whole or not at all."""
    parts = [f"<h1>{esc(stats.name)}</h1>", f"<pre>{esc(chr(10).join(stats_lines(stats)))}</pre>"]
    if stats.source is not None and stats.transfer is not None:
        parts += [
            _figure("Solve rates", histogram(stats.source.histogram, stats.transfer.histogram)),
            _figure("Source against transfer", scatter(stats.points)),
        ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{esc(policy(_STYLE))}">'
        f"<title>{esc(stats.name)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    return write_page(path, page)


def _figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{esc(title)}</figcaption>{svg}</figure>"


def _x(value: float) -> float:
    return round(_LEFT + value * (_WIDTH - _LEFT - 10), 2)


def _y(value: float) -> float:
    return round(_HEIGHT - _BOTTOM - value * (_HEIGHT - _BOTTOM - _TOP), 2)


def _axes(label: str, tops: list[tuple[float, str]]) -> list[str]:
    out = [f'<line class="axis" x1="{_x(0)}" x2="{_x(1)}" y1="{_y(0)}" y2="{_y(0)}"/>']
    for i in range(0, BINS + 1, 2):
        out.append(f'<text x="{_x(i / BINS)}" y="{_y(0) + 15}" text-anchor="middle">{i / BINS:.1f}</text>')
    for at, text in tops:
        out.append(f'<line class="grid" x1="{_x(0)}" x2="{_x(1)}" y1="{_y(at)}" y2="{_y(at)}"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{_y(at) + 4}" text-anchor="end">{text}</text>')
    out.append(f'<text x="{_x(0.5)}" y="{_HEIGHT - 4}" text-anchor="middle">{esc(label)}</text>')
    return out


def _svg(name: str, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{esc(name)}">{"".join(parts)}</svg>'


def histogram(source: list[int], transfer: list[int]) -> str:
    """Two bars a bin: source (blue) and transfer (red) counts."""
    most = max(*source, *transfer, 1)
    parts = _axes(
        "solve rate (blue: source, red: transfer)", [(k / 4, f"{most * k / 4:g}") for k in range(1, 5)]
    )
    width = (_x(1) - _x(0)) / BINS
    for slot, counts in enumerate((source, transfer), start=1):
        for i, n in enumerate(counts):
            left, top = _x(0) + i * width + (slot - 1) * width * 0.44 + width * 0.06, _y(n / most)
            told = f"{('source', 'transfer')[slot - 1]} {i / BINS:.1f}–{(i + 1) / BINS:.1f}: {n}"
            parts.append(
                f'<rect class="s{slot}" x="{left:.2f}" y="{top}" width="{width * 0.44:.2f}" '
                f'height="{_y(0) - top:.2f}"><title>{told}</title></rect>'
            )
    return _svg("histogram of solve rates", parts)


def scatter(points: list[tuple[float, float]]) -> str:
    """One dot for each (source, transfer) rate, its area in proportion to how many pairs have it; the line is equality."""
    parts = _axes("source rate (vertical: transfer rate)", [(k / 5, f"{k / 5:.1f}") for k in range(1, 6)])
    parts.append(f'<line class="same" x1="{_x(0)}" y1="{_y(0)}" x2="{_x(1)}" y2="{_y(1)}"/>')
    counts = Counter(points)
    most = max(counts.values(), default=1)
    for (a, b), n in sorted(counts.items()):
        radius = 2 + 7 * (n / most) ** 0.5
        parts.append(
            f'<circle class="dot" cx="{_x(a)}" cy="{_y(b)}" r="{radius:.2f}"><title>{a:.3f} → {b:.3f}: {n}</title></circle>'
        )
    return _svg("source and transfer rates", parts)

"""The comparison as three files: ``comparison.md``, ``comparison.html`` (self-contained) and ``comparison.json``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from maieutic.evaluation.results import write_whole
from maieutic.report.comparison.compare import Comparison
from maieutic.report.comparison.scatter import scatter_plot
from maieutic.report.comparison.tables import Table, label, tables
from maieutic.report.measures import measure
from maieutic.report.page import asset, esc, fill, policy, write_page
from maieutic.report.svg import Series, line_plot
from maieutic.shown import markdown_text

SCHEMA = 1
_SLOTS = 4
"""Colours that the pages have; more scatter plots, of one arm each, repeat them."""


def write_comparison(c: Comparison, out: Path) -> dict[str, Path]:
    """Write the three files into ``out``; returns them by kind. Raises :class:`~maieutic.errors.RunFolderError`."""
    found = tables(c)
    paths = {kind: out / f"comparison.{kind}" for kind in ("md", "html", "json")}
    write_whole(paths["md"], markdown(c, found))
    write_page(paths["html"], html(c, found))
    write_whole(paths["json"], json.dumps(as_json(c), indent=1, allow_nan=False) + "\n")
    return paths


# ---- JSON ------------------------------------------------------------------------------------------------------------


def as_json(c: Comparison) -> dict[str, Any]:
    """Every number, unrounded; None where there is none."""
    data = {
        "schema": SCHEMA,
        "base": c.base,
        "notices": c.notices,
        "arms": {
            r.arm: {
                "runs": [str(run.path) for run in r.runs],
                "dialogues": r.dialogues,
                "problems": r.problems,
                "tutor_sees_solution": r.sees_solution,
                "tutor_prompt": r.tutor_prompt,
                "flags": r.flags,
                "measures": {name: asdict(e) for name, e in r.estimates.items()},
                "by_run": r.by_run,
                "moves": r.moves,
                "move_shift": r.shift,
                "cost": r.cost,
            }
            for r in c.rows
        },
        "differences": [
            {"arm": t.arm, "measure": t.measure, **asdict(t.difference), "p_holm": t.p_holm} for t in c.tested
        ],
        "per_problem": c.per_problem,
    }
    clean: dict[str, Any] = _finite(data)
    return clean


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(c: Comparison, found: list[Table]) -> str:
    """Tables only: the figures are in the page."""
    lines = ["# Comparison", ""]
    lines += [f"> {markdown_text(notice)}" for notice in c.notices] + ([""] if c.notices else [])
    for table in found:
        lines += [
            f"## {markdown_text(table.title)}",
            "",
            _row(table.header),
            "|" + "---|" * len(table.header),
        ]
        lines += [_row(cells) for cells in table.rows]
        lines += ["", *(f"{markdown_text(note)}\n" for note in table.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(markdown_text(c) for c in cells) + " |"


# ---- HTML ------------------------------------------------------------------------------------------------------------


def html(c: Comparison, found: list[Table]) -> str:
    """The page: it needs no network and no script."""
    style = asset("theme.css", "report.css")
    notices = "".join(f"<li>{esc(n)}</li>" for n in c.notices)
    lead = f"{len(c.rows)} arms, compared with {c.base}. Tutors see the solution: {_seeing(c)}."
    parts = [
        f'<header><h1>Comparison</h1><p class="lead">{esc(lead)}</p>'
        + (f'<ul class="notices">{notices}</ul>' if notices else "")
        + "</header>"
    ]
    for table in found:
        parts.append(_table(table))
        if table.title.startswith("Differences"):
            parts += [_scatters(c), _curves(c)]
    return fill(
        asset("report.html"), csp=policy(style), title="Comparison", style=style, body="\n".join(parts)
    )


def _seeing(c: Comparison) -> str:
    seeing = [r.arm for r in c.rows if r.sees_solution]
    return "none" if not seeing else "all" if len(seeing) == len(c.rows) else ", ".join(seeing)


def _table(table: Table) -> str:
    head = "".join(f"<th>{esc(h)}</th>" for h in table.header)
    body = []
    for i, cells in enumerate(table.rows):
        row = [f"<th scope='row'>{esc(cells[0])}</th>"]
        for j, cell in enumerate(cells[1:], start=1):
            held = table.exact.get((i, j))
            data = (
                f' data-arm="{esc(cells[0])}" data-name="{esc(held[0])}" data-value="{held[1]!r}"'
                if held is not None and math.isfinite(held[1])
                else ""
            )
            row.append(f"<td{data}>{esc(cell)}</td>")
        body.append(f"<tr>{''.join(row)}</tr>")
    notes = "".join(f"<p class='muted'>{esc(n)}</p>" for n in table.notes)
    return (
        f'<section><h2>{esc(table.title)}</h2><div class="card"><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{notes}</div></section>"
    )


def _scatters(c: Comparison) -> str:
    """Per-problem gains of each arm against the base."""
    figures = []
    for name, by_arm in c.per_problem.items():
        base = by_arm.get(c.base, {})
        for number, (arm, values) in enumerate((a, v) for a, v in by_arm.items() if a != c.base):
            points = [(base[p], values[p], p) for p in values if p in base]
            if points:
                title = f"{label(name)}: {arm} over {c.base}"
                plot = scatter_plot(title, points, slot=number % _SLOTS + 1)
                figures.append(f'<figure class="card"><figcaption>{esc(title)}</figcaption>{plot}</figure>')
    if not figures:
        return ""
    note = "<p class='muted'>One point a problem; above the diagonal the arm gains more than the base.</p>"
    return f'<section><h2>Gains by problem</h2><div class="plots">{"".join(figures)}</div>{note}</section>'


def _curves(c: Comparison) -> str:
    figures = []
    for metric, lines in c.curves.items():
        series = [Series(name, pts, i + 1) for i, (name, pts) in enumerate(lines.items())]
        marks = "".join(f'<span class="{s.classes}">{esc(s.label)}</span>' for s in series)
        title = f"{measure(metric.removeprefix('rollout/')).label}, training"
        figures.append(
            f'<figure class="card" data-metric="{esc(metric)}"><figcaption>{esc(title)}<span class="legend">{marks}</span>'
            f"</figcaption>{line_plot(title, series)}</figure>"
        )
    if not figures:
        return ""
    return f'<section><h2>Learning curves</h2><div class="plots">{"".join(figures)}</div></section>'

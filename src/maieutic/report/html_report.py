"""The report of one run as one HTML file: it needs no network, no script and nothing beside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from maieutic.evaluation.statistics import Difference
from maieutic.report.ablations import ablations_html
from maieutic.report.before_after import differences, pair_html, pairs
from maieutic.report.episode_html import episode_html
from maieutic.report.measures import CURVES, TABLE, measure, written
from maieutic.report.page import asset, esc, fill, policy, write_page
from maieutic.report.run_data import PHASE_PREFIX, RunData, load_run
from maieutic.report.summary import notable
from maieutic.report.svg import Point, Series, line_plot

_SERIES = {"rollout/": ("training", 1), "eval/": ("held out", 2)}
"""Name and colour of a series by its namespace: the same in every plot."""


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run folder and return its path.

    A run without steps, or one that was killed, gets a report that says so. Numbers of the table are computed from the transcripts
    (``docs/metrics.md`` has the definitions). Raises :class:`~maieutic.errors.RunFolderError` when there is no such folder or it
    cannot be written.
    """
    data = load_run(Path(run_dir))
    style = asset("theme.css", "report.css")
    body = "\n".join(
        [
            _head(data),
            _table(data),
            _curves(data),
            _before_after(data),
            ablations_html(data),
            _episodes(data),
            _recipe(data),
        ]
    )
    page = fill(asset("report.html"), csp=policy(style), title=esc(data.name), style=style, body=body)
    return write_page(data.path / "report.html", page)


def _head(data: RunData) -> str:
    done = data.max_steps is not None and data.steps_done >= data.max_steps
    facts = _facts(data)
    notices = "".join(f"<li>{esc(text)}</li>" for text in data.notices)
    return (
        f"<header><h1>{esc(data.name)}</h1>"
        f'<p class="lead{"" if done else " open"}" id="status">{esc(data.status)}</p>'
        f'<dl class="card facts">{"".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in facts)}</dl>'
        + (f'<ul class="notices">{notices}</ul>' if notices else "")
        + "</header>"
    )


def _facts(data: RunData) -> list[tuple[str, str]]:
    """What was run, as far as the recipe says."""
    students = data.get("students")
    students = students if isinstance(students, list) else []
    named = [f"{s.get('model')} ({s.get('name', 'student')})" for s in students if isinstance(s, dict)]
    judge = " ".join(str(v) for k in ("kind", "model") if (v := data.get(f"judge.{k}")) is not None)
    seconds = [row["time/step"] for _, row in data.rows if row.get("time/step") is not None]
    onoff = {True: "on", False: "off"}
    conditions = [
        f"transfer {onoff.get(data.get('env.transfer'), '–')}",
        f"hide tutor {onoff.get(data.get('env.hide_tutor'), '–')}",
        f"gates {data.get('env.gates', '–')}",
    ]
    sees = data.get("env.tutor_sees_solution")
    planned = f" of {data.max_steps}" if data.max_steps is not None else ""
    facts = [
        ("Arm", data.get("arm", "–")),
        ("Steps", f"{data.steps_done}{planned}"),
        ("Tutor", data.get("tutor.model", "–")),
        ("Student", ", ".join(named) or "–"),
        ("Judge", judge or "–"),
        ("Environment", f"{data.get('env.name', '–')}: {', '.join(conditions)}"),
        ("Tutor sees the solution", {True: "yes", False: "no"}.get(sees, "–")),
        ("Problems", data.get("problems.source", "–")),
        ("Seed", data.get("seed", "–")),
        ("Time in steps", _duration(sum(s for s in seconds if s is not None)) if seconds else "–"),
    ]
    return [(k, str(v)) for k, v in facts]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _table(data: RunData) -> str:
    """Measures of the first and the last evaluation (or training step) and their difference."""
    if data.last is None:
        return (
            '<section id="results"><h2>Results</h2><p class="card">There are no episodes yet.</p></section>'
        )
    columns = [m for m in (data.first, data.last) if m is not None]
    head = "".join(f"<th>{esc(m.title)}</th>" for m in columns)
    paired = differences(data.first.lines, data.last.lines) if data.first else {}
    if data.first:
        head += "<th>Difference</th><th>95 % interval</th>"
    rows = []
    for name in TABLE:
        values = [m.values.get(name) for m in columns]
        if all(v is None for v in values):
            continue
        cells = "".join(
            f"<td{_data(name, m.step, v)}>{written(name, v)}</td>"
            for m, v in zip(columns, values, strict=True)
        )
        if data.first:
            found = paired.get(name)
            cells += _difference(name, values[0], values[1], found) + _interval(name, found)
        rows.append(f"<tr><th scope='row'>{esc(measure(name).label)}</th>{cells}</tr>")
    problems = len({line["pair"]["id"] for line in data.last.lines})
    base = (
        f" Computed from {len(data.last.lines)} transcripts of {problems} problems at the last point."
        if problems
        else ""
    )
    note = (
        "<p class='muted'>Intervals: bootstrap of the differences on the same problems, none for fewer than 10 of them. They are "
        f"over problems only, and say nothing about other seeds.{base}</p>"
    )
    return (
        '<section id="results"><h2>Results</h2><div class="card"><div class="scroll">'
        f"<table><thead><tr><th>Measure</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{note if data.first else ''}</div></section>"
    )


def _data(name: str, step: int, value: float | None) -> str:
    """The exact number beside the rounded one, for those who read the page by program."""
    return f' data-name="{esc(name)}" data-step="{step}"' + (
        "" if value is None else f' data-value="{value!r}"'
    )


def _difference(name: str, before: float | None, after: float | None, found: Difference | None) -> str:
    """Coloured where it is better or worse, unless its interval holds 0."""
    if before is None or after is None:
        return "<td>–</td>"
    change, better = after - before, measure(name).better
    text = written(name, change, difference=True)
    kind = ""
    in_doubt = (
        found is not None
        and found.low is not None
        and found.high is not None
        and found.low <= 0 <= found.high
    )
    if better and not in_doubt and any(c in "123456789" for c in text):
        kind = ' class="better"' if (change > 0) == (better == "up") else ' class="worse"'
    return f"<td{kind}>{text}</td>"


def _interval(name: str, found: Difference | None) -> str:
    if found is None or found.low is None or found.high is None:
        return "<td>–</td>"
    low, high = (written(name, x, difference=True) for x in (found.low, found.high))
    return f'<td data-low="{found.low!r}" data-high="{found.high!r}">[{low}, {high}]</td>'


def curves(data: RunData) -> dict[str, list[Series]]:
    """Every metric of the run as series over the step; rollout and evaluation of one measure share a plot.

    A row of the namespace without the metric, or with a value that is not a number, is a gap.
    """
    names: dict[str, list[tuple[str, str]]] = {}
    for _, row in data.rows:
        for name in row:
            space = next((p for p in PHASE_PREFIX.values() if name.startswith(p)), None)
            short = name.removeprefix(space) if space else name
            entry = (space or "", name)
            if entry not in names.setdefault(short, []):
                names[short].append(entry)
    out = {}
    for short, entries in names.items():
        series = []
        for space, name in sorted(entries, key=lambda entry: entry[0], reverse=True):
            prefix = space or name.split("/")[0] + "/"
            points: list[Point] = [
                (step, row.get(name)) for step, row in data.rows if any(key.startswith(prefix) for key in row)
            ]
            if any(y is not None for _, y in points):
                label, slot = _SERIES.get(space, (name, 1))
                series.append(Series(label, points, slot))
        if series:
            out[short] = series
    return out


def _curves(data: RunData) -> str:
    found = curves(data)
    if not found:
        return '<section id="curves"><h2>Learning curves</h2><p class="card">There is nothing to plot yet.</p></section>'
    first = [name for name in CURVES if name in found]
    rest = sorted(name for name in found if name not in first)
    more = (
        f"<details class='fold'><summary>{len(rest)} more metrics</summary><div class='plots'>{_plots(found, rest)}</div></details>"
        if rest
        else ""
    )
    return f'<section id="curves"><h2>Learning curves</h2><div class="plots">{_plots(found, first)}</div>{more}</section>'


def _percent(series: Series) -> Series:
    return replace(series, points=[(x, None if y is None else 100 * y) for x, y in series.points])


def _plots(found: dict[str, list[Series]], names: Iterable[str]) -> str:
    out = []
    for name in names:
        label, series = measure(name).label, found[name]
        if measure(name).unit == "share":
            label, series = f"{label}, %", [_percent(s) for s in series]
        legend = ""
        if name not in {s.label for s in found[name]}:
            marks = "".join(f'<span class="{s.classes}">{esc(s.label)}</span>' for s in found[name])
            legend = f'<span class="legend">{marks}</span>'
        plot = line_plot(label, series)
        out.append(
            f'<figure class="card" data-metric="{esc(name)}"><figcaption>{esc(label)}{legend}</figcaption>{plot}</figure>'
        )
    return "".join(out)


def _before_after(data: RunData) -> str:
    if data.first is None or data.last is None:
        return ""
    found = pairs(data.first.lines, data.last.lines)
    if not found:
        return ""
    titles = (data.first.title, data.last.title)
    shown = "".join(pair_html(pair, titles, opened=n == 0) for n, pair in enumerate(found))
    return (
        f'<section id="before-after"><h2>Before and after, on the same problem</h2>{shown}'
        "<p class='muted'>Chosen by the change of reward, not by a person. "
        "<code>maieutic view</code> puts any two episodes of a problem side by side.</p></section>"
    )


def _episodes(data: RunData) -> str:
    if data.last is None:
        return ""
    chosen = notable(data.last.lines)
    if not chosen:
        text = (
            "No episode of the last point counts."
            if data.last.lines
            else "The last point has no transcripts."
        )
        return f'<section id="episodes"><h2>Transcripts</h2><p class="card">{text}</p></section>'
    shown = "".join(episode_html(title, line) for title, line in chosen)
    return (
        f'<section id="episodes"><h2>Transcripts: {esc(data.last.title)}</h2>{shown}'
        f"<p class='muted'>All transcripts: <code>maieutic view {esc(data.path)}</code></p></section>"
    )


def _recipe(data: RunData) -> str:
    if not data.recipe_text:
        return ""
    return (
        "<section id='recipe'><details class='fold'><summary>Resolved recipe</summary>"
        f"<pre class='card'>{esc(data.recipe_text)}</pre></details></section>"
    )

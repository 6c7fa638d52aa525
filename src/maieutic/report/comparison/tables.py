"""The comparison as plain tables (title, notes, header, rows of text): Markdown and HTML are two spellings of the same tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from maieutic.evaluation.moves import MOVES
from maieutic.evaluation.statistics import MIN_CLUSTERS, Difference, Estimate
from maieutic.report.comparison.compare import DIFFERENCES, FLAG_LIMIT, Comparison
from maieutic.report.measures import Measure, measure, written

LABELS = {
    "transfer_gap": Measure("Gap, source − transfer", "signed"),
    "truncated_dialogue_share": Measure("Truncated dialogues", "share", "down"),
    "empty_turn_rate": Measure("Blank, no end token", "share", "down"),
    "ended_by_token": Measure("Ended by the tutor", "share"),
}
RESULT = ("transfer_gain", "same_gain", "transfer_gap", "reward", "leak_rate", "correctness_reject_rate")
HEALTH = (
    "unknown_share",
    "excluded_share",
    "blank_turn_rate",
    "empty_turn_rate",
    "truncated_turn_share",
    "truncated_dialogue_share",
    "turns",
    "ended_by_token",
    "visible_tokens_per_turn",
    "thinking_tokens_per_turn",
)


@dataclass(frozen=True, slots=True)
class Table:
    """``rows``: cells of text, the first one names the row. ``exact``: numbers behind cells, by (row, column), for programs."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    exact: dict[tuple[int, int], tuple[str, float]] = field(default_factory=dict)


def label(name: str) -> str:
    """What a measure is called."""
    return (LABELS.get(name) or measure(name)).label


def number(name: str, value: float | None, *, difference: bool = False) -> str:
    """A number in its unit; ``–`` where there is none."""
    if name in LABELS and value is not None and math.isfinite(value):
        like = {"share": "leak_rate", "signed": "reward"}[LABELS[name].unit]
        return written(like, value, difference=difference)
    return written(name, value, difference=difference)


def _interval(name: str, e: Estimate | Difference, *, difference: bool = False) -> str:
    if e.low is None or e.high is None:
        return ""
    return f" [{number(name, e.low, difference=difference)}, {number(name, e.high, difference=difference)}]"


def tables(c: Comparison) -> list[Table]:
    """All tables of the report, in order."""
    out = [
        _terms(c),
        _means("Results", c, RESULT, flagged=True),
        _differences(c),
        _means("Dialogues", c, HEALTH),
    ]
    if any(len(row.runs) > 1 for row in c.rows):
        out.append(_runs(c))
    return [*out, _moves(c), _cost(c)]


def _terms(c: Comparison) -> Table:
    rows = []
    for r in c.rows:
        seeds = ", ".join(dict.fromkeys(str(run.seed) for run in r.runs if run.seed is not None)) or "–"
        sees = "yes" if r.sees_solution else "no"
        steps = ", ".join(dict.fromkeys(str(run.step) for run in r.runs if run.step is not None)) or "–"
        rows.append([r.arm, sees, r.tutor_prompt, seeds, steps, str(r.dialogues), str(r.problems)])
    header = [
        "Arm",
        "Tutor sees the solution",
        "Tutor prompt",
        "Seeds",
        "After step",
        "Dialogues",
        "Problems",
    ]
    return Table("Arms", header, rows)


def _means(title: str, c: Comparison, names: tuple[str, ...], *, flagged: bool = False) -> Table:
    shown = [n for n in names if any(n in r.estimates for r in c.rows)]
    rows, exact = [], {}
    short = False
    for i, r in enumerate(c.rows):
        cells = [f"{r.arm}{r.flags}" if flagged else r.arm]
        for j, name in enumerate(shown, start=1):
            e = r.estimates.get(name)
            if e is None:
                cells.append("–")
                continue
            short |= e.low is None
            cells.append(number(name, e.value) + _interval(name, e))
            exact[i, j] = (name, e.value)
        rows.append(cells)
    notes = [
        "In brackets: 95 % bootstrap intervals over problems; they say nothing about the spread between trainings."
    ]
    if short:
        notes = [f"Fewer than {MIN_CLUSTERS} problems: too few for an interval, so none is given."]
    if flagged:
        limit = f"{FLAG_LIMIT:.0%}".replace("%", " %")
        notes.append(
            f"∗ more than {limit} empty tutor turns, † more than {limit} truncated dialogues: numbers are unreliable."
        )
    return Table(title, ["Arm", *(label(n) for n in shown)], rows, notes, exact)


def _differences(c: Comparison) -> Table:
    rows: list[list[str]] = []
    exact: dict[tuple[int, int], tuple[str, float]] = {}
    notes: list[str] = []
    for name in DIFFERENCES:
        for t in (t for t in c.tested if t.measure == name):
            d = t.difference
            p = "–" if t.p_holm is None else _p(t.p_holm)
            exact[len(rows), 2] = (name, d.value)
            interval = _interval(name, d, difference=True).strip() or d.note
            rows.append(
                [
                    t.arm,
                    label(name),
                    number(name, d.value, difference=True),
                    interval,
                    _p(d.p),
                    p,
                    str(d.pairs),
                ]
            )
    tests = sum(t.difference.p is not None for t in c.tested)
    notes.append(
        f"Arm minus {c.base}, by problem; 95 % bootstrap intervals over problems; two-sided sign-flip test; Holm's correction over "
        f"all {tests} tests of this table."
    )
    header = ["Arm", "Measure", f"− {c.base}", "95 % interval", "p", "p (Holm)", "Problems"]
    return Table(f"Differences from {c.base}", header, rows, notes, exact)


def _p(p: float | None) -> str:
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _runs(c: Comparison) -> Table:
    names = ("transfer_gain", "same_gain", "reward", "leak_rate", "correctness_reject_rate")
    rows: list[list[str]] = []
    exact: dict[tuple[int, int], tuple[str, float]] = {}
    for r in c.rows:
        for run in r.by_run:
            for j, n in enumerate(names, start=2):
                if run[n] is not None:
                    exact[len(rows), j] = (n, run[n])
            rows.append([r.arm, str(run["seed"]), *(number(n, run[n]) for n in names)])
    return Table(
        "By seed",
        ["Arm", "Seed", *(label(n) for n in names)],
        rows,
        ["The spread between seeds is the spread between trainings."],
        exact,
    )


def _moves(c: Comparison) -> Table:
    rows = []
    for r in c.rows:
        shares = [f"{100 * r.moves[m.letter]:.0f} %" if r.moves else "–" for m in MOVES]
        rows.append([r.arm, *shares, "–" if r.shift is None else f"{r.shift:.3f}"])
    names = "; ".join(f"{m.letter} {m.name}" for m in MOVES)
    return Table(
        "Tutor moves",
        ["Arm", *(m.letter for m in MOVES), f"Shift from {c.base}"],
        rows,
        [
            f"Read by key words, which is coarse: {names}.",
            "Shift: Jensen-Shannon distance (base 2) between the shares of moves.",
        ],
    )


def _cost(c: Comparison) -> Table:
    names = list(dict.fromkeys(k for r in c.rows for k in r.cost))
    rows = [[r.arm, *(f"{r.cost[k]:,.0f}" if k in r.cost else "–" for k in names)] for r in c.rows]
    exact = {
        (i, j): (k, r.cost[k])
        for i, r in enumerate(c.rows)
        for j, k in enumerate(names, start=1)
        if k in r.cost
    }
    return Table(
        "Cost",
        ["Arm", *(k.replace("_", " ") for k in names)],
        rows,
        [
            "Summed over the arm's runs. Tokens of the evaluation are those of its dialogues; the post-test's are not recorded."
        ],
        exact,
    )

"""The report of a run: Markdown and HTML for people, JSON for machines, all from the stages' notes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maieutic.latent.config import LatentRecipe
from maieutic.report.page import esc, policy, write_page

Results = dict[str, dict[str, Any]]

CELLS = {
    "seen": "seen problems",
    "unseen": "unseen problems",
    "other_seen": "other student",
    "other_unseen": "other student, unseen problems",
}
COLOURS = ("#1f6f8b", "#e08e45", "#7a9e3f", "#8b5e83", "#b5473c", "#4c6a92", "#c2a83e", "#5d8a7d")
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%}.muted{color:#666}figure{margin:1rem 0}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td,th{border-color:#444}.muted{color:#999}}"""


def write_reports(run: Path, recipe: LatentRecipe, results: Results) -> list[Path]:
    """``report.json``, ``report.md`` and ``report.html`` in the run folder."""
    out = [run / "report.json", run / "report.md", run / "report.html"]
    write_page(out[0], json.dumps({"name": recipe.name, "seed": recipe.seed, **results}, indent=1) + "\n")
    write_page(out[1], markdown(recipe, results))
    write_page(out[2], html_page(recipe, results))
    return out


def _rate(r: dict[str, Any]) -> str:
    return (
        "no counted episode"
        if r["value"] is None
        else f"{r['value']:.3f} [{r['low']:.3f}, {r['high']:.3f}] (n={r['n']})"
    )


def _difference(d: dict[str, Any] | None) -> str:
    if d is None:
        return "–"
    return f"{d['difference']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}], p={d['p_value']:.4f}"


def tables(recipe: LatentRecipe, results: Results) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of every table; Markdown and HTML show the same."""
    arms = results["evaluate"]["arms"]
    out = []
    for cell, title in CELLS.items():
        rows = [
            [
                arm,
                _rate(r["cells"][cell]["success"]),
                _difference(r["cells"][cell]["difference"]),
                "–" if r["cells"][cell]["turns"] is None else f"{r['cells'][cell]['turns']:.1f}",
                str(r["cells"][cell]["excluded"]),
            ]
            for arm, r in arms.items()
            if cell in r["cells"]
        ]
        if rows:
            level = f"{100 * recipe.evaluate.level:g} % interval"
            header = [
                "arm",
                f"solved ({level})",
                f"minus {recipe.evaluate.baseline}",
                "tutor turns",
                "excluded",
            ]
            out.append((f"Success: {title}", header, rows))
    policies = {**results["train"], **results["train_plus"]}
    rows = [
        [
            name,
            str(p["rows"]),
            f"{p['log']['best_step']} of {p['log']['steps']}",
            _ope(p["ope"]["fqe"]),
            _ope(p["ope"]["wis"]),
        ]
        for name, p in policies.items()
        if isinstance(p, dict)
    ]
    header = ["policy", "rows", "kept step", "FQE", "WIS (effective episodes)"]
    out.append(("Off-policy estimates of the return, on D's validation problems", header, rows))
    rows = [
        [how, str(n + 1), str(r["states"]), str(r["episodes"]), f"{r['success_share']:.3f}",
         f"{r['success_share_before']:.3f}", f"{r['mean_gain']:.3f}",
         "–" if r["gain_outcome_correlation"] is None else f"{r['gain_outcome_correlation']:+.2f}"]
        for how, a in results["augment"].items() if isinstance(a, dict)
        for n, r in enumerate(a["rounds"])
    ]  # fmt: skip
    header = [
        "how",
        "round",
        "states",
        "continuations",
        "success",
        "success of their origins",
        "expected gain",
        "gain ~ success",
    ]
    out.append(("Augmentation", header, rows))
    c, d = results["label"]["coverage"], results["label"]["drops"]
    share = ", ".join(f"{m} {v:.2f}" for m, v in c["move_share"].items())
    dropped = ", ".join(f"{k} {v}" for k, v in d["reasons"].items()) or "none"
    out.append(
        (
            "Data D",
            ["what", "value"],
            [
                [
                    "episodes / transitions / problems",
                    f"{c['episodes']} / {c['transitions']} / {c['problems']}",
                ],
                ["solved", f"{c['success_share']:.3f}"],
                ["moves", share],
                ["dropped episodes", dropped],
                ["constant features", ", ".join(c["constant_features"]) or "none"],
                ["feature × move that never occur together", str(len(c["thin"]))],
            ],
        )
    )
    return out


def _ope(e: dict[str, Any]) -> str:
    text = f"{e['value']:+.3f} [{e['low']:+.3f}, {e['high']:+.3f}]"
    return text if e["method"] == "fqe" else f"{text} ({e['effective']:.1f})"


NOTES = (
    "Arms share problems, students and seeds, so differences are paired; intervals and p-values of differences resample and "
    "flip whole problems. The intervals of rates are Wilson's and treat conversations as independent. p-values are not "
    "corrected for the number of arms.",
    "The fixed, random and rule arms use the same generator as the learned policies: a learned policy's own share is its "
    "difference to them, not to prompt engineering.",
    "Success of the continuations in the augmentation is selected by Q and is no evidence for Q; the controls with the same "
    "budget and the evaluation are.",
)


def markdown(recipe: LatentRecipe, results: Results) -> str:
    """The report as Markdown."""
    parts = [f"# {recipe.name}", ""]
    for title, header, rows in tables(recipe, results):
        parts += [f"## {title}", "", _md(header), _md(["---"] * len(header)), *(_md(r) for r in rows), ""]
    parts += ["## Moves over time (seen problems)", ""]
    for arm, r in results["evaluate"]["arms"].items():
        parts.append(f"**{arm}** (turn: {', '.join(next(iter(r['profile']), {}))})")
        parts += [
            f"- {n + 1}: " + ", ".join(f"{v:.2f}" for v in shares.values()) + f" (n={count})"
            for n, (shares, count) in enumerate(zip(r["profile"], r["profile_n"], strict=True))
        ]
        parts.append("")
    parts += ["## Notes", "", *(f"- {n}" for n in NOTES), ""]
    return "\n".join(parts)


def _md(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def html_page(recipe: LatentRecipe, results: Results) -> str:
    """The report as one static page without scripts."""
    arms = results["evaluate"]["arms"]
    parts = [f"<h1>{esc(recipe.name)}</h1>", success_figure(arms), profile_figure(arms)]
    for title, header, rows in tables(recipe, results):
        head = "".join(f"<th>{esc(h)}</th>" for h in header)
        body = "".join("<tr>" + "".join(f"<td>{esc(c)}</td>" for c in r) + "</tr>" for r in rows)
        parts.append(
            f"<h2>{esc(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )
    parts += [f'<p class="muted">{esc(n)}</p>' for n in NOTES]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{esc(policy(STYLE))}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{esc(recipe.name)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def success_figure(arms: dict[str, Any]) -> str:
    """Success on seen problems: a point and its interval an arm."""
    left, width, step = 150, 420, 24
    height = step * len(arms) + 40
    rows = []
    for n, (arm, r) in enumerate(arms.items()):
        s, y = r["cells"]["seen"]["success"], 20 + step * n
        rows.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{esc(arm)}</text>')
        if s["value"] is None:
            continue
        x, low, high = (left + width * s[k] for k in ("value", "low", "high"))
        rows.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="{COLOURS[0]}" stroke-width="2"/>'
        )
        rows.append(
            f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{COLOURS[0]}"><title>{esc(_rate(s))}</title></circle>'
        )
    axis = "".join(
        f'<text x="{left + width * t / 4:.0f}" y="{height - 8}" text-anchor="middle">{t / 4:g}</text>'
        for t in range(5)
    )
    caption = "<figcaption>Share of solved problems by arm (seen problems), with intervals.</figcaption>"
    return (
        f'<figure><svg viewBox="0 0 {left + width + 30} {height}" role="img" fill="currentColor" font-size="12" '
        f'aria-label="Success by arm">{"".join(rows)}{axis}</svg>{caption}</figure>'
    )


def profile_figure(arms: dict[str, Any]) -> str:
    """Stacked shares of the moves by tutor turn, a small panel an arm."""
    panel_w, panel_h, per_row = 180, 90, 3
    names = next((list(r["profile"][0]) for r in arms.values() if r["profile"]), [])
    parts = []
    for n, (arm, r) in enumerate(arms.items()):
        x0, y0 = (n % per_row) * (panel_w + 20), (n // per_row) * (panel_h + 30) + 18
        parts.append(f'<text x="{x0}" y="{y0 - 4}">{esc(arm)}</text>')
        turns = max(len(r["profile"]), 1)
        for t, shares in enumerate(r["profile"]):
            y = float(y0)
            for m, share in enumerate(shares.values()):
                h = panel_h * share
                parts.append(
                    f'<rect x="{x0 + panel_w * t / turns:.1f}" y="{y:.1f}" width="{panel_w / turns - 1:.1f}" height="{h:.1f}" '
                    f'fill="{COLOURS[m % len(COLOURS)]}"/>'
                )
                y += h
    rows = (len(arms) + per_row - 1) // per_row
    base = rows * (panel_h + 30) + 20
    for m, name in enumerate(names):
        x = (m % 5) * 115
        y = base + 18 * (m // 5)
        colour = COLOURS[m % len(COLOURS)]
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{colour}"/><text x="{x + 14}" y="{y}">{esc(name)}</text>'
        )
    height = base + 18 * (len(names) // 5 + 1)
    caption = "<figcaption>Share of the moves at each tutor turn, left to right (seen problems).</figcaption>"
    return (
        f'<figure><svg viewBox="0 0 {per_row * (panel_w + 20)} {height}" role="img" fill="currentColor" font-size="12" '
        f'aria-label="Moves over time">{"".join(parts)}</svg>{caption}</figure>'
    )

"""The report of a REAT run: Markdown and HTML for people, JSON for machines, from transcripts, scores and the stages' notes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maieutic.reat.config import ABLATIONS, PROMPT_ONLY, REAT
from maieutic.reat.evaluate import BIN, LEVELS, cell, difference, distribution, rescue, solved_difference
from maieutic.reat.repository import Repository
from maieutic.report.page import esc, policy, write_page
from maieutic.transcripts import _plain

if TYPE_CHECKING:
    from maieutic.reat.pipeline import ReatPipeline

Table = tuple[str, list[str], list[list[str]]]
PAPER_DROPS = {
    "state_random": (6.70, 6.84), "no_gate": (6.48, 6.61), "no_rewrite": (2.40, 2.29), "merged_roles": (1.97, 1.85),
    "no_state_filter": (1.02, 0.96), "no_merging": (0.14, 0.17),
}  # fmt: skip
"""Figure 6: (sample, turn) drops from full REAT in the paper, for comparison."""
PAPER_LATENCY = {
    "observe_s": 12.4,
    "rewrite_s + retrieve_s": 4.2,
    "generate_s": 2.8,
    "other_s": 0.8,
    "total_s": 20.2,
}
NOTES = (
    "Scores are S in [0, 100] by the judge's rubric; they measure how tutoring looks to that judge, not what students learn.",
    "Differences are paired by problem; intervals (95 %) resample problems. Below 10 problems there is none.",
    "Rescue: pairs chosen by a low score gain partly because the choice favours bad luck; the second judge's gain of the "
    "same pairs and the gain of the other pairs say how much.",
)
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%}.muted{color:#666}figure{margin:1rem 0}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td,th{border-color:#444}.muted{color:#999}}"""


def collect(run: ReatPipeline) -> dict[str, Any]:
    """All numbers of a run, JSON-ready."""
    from maieutic.reat.pipeline import PRIMARY, SECOND

    recipe, seed = run.recipe, run.recipe.seed
    out: dict[str, Any] = {"name": recipe.name, "seed": seed, "growth": [], "sets": {}, "second": {}}
    for b in range(len(run.sets.batches)):
        arms = [PROMPT_ONLY] + ([REAT] if b > 0 or recipe.start_from else [])
        row: dict[str, Any] = {"batch": f"B{b}"}
        scores = {a: run.scores(PRIMARY, "grow", a, b) for a in arms}
        for arm in arms:
            row[arm] = cell(run.episodes("grow", arm, b), scores[arm], seed=seed).as_dict()
        if REAT in arms:
            row["difference"] = {
                v: asdict(difference(scores[PROMPT_ONLY], scores[REAT], v, seed=seed)) for v in LEVELS
            }
        note = run.result("grow")["batches"][b]
        row |= {k: note[k] for k in ("experiences", "feedback", "distilled")}
        out["growth"].append(row)
    second = recipe.roles.second_judge is not None
    for where, pairs, arms, _ in run.test_sets():
        for judge, name in ((PRIMARY, "sets"), *(((SECOND, "second"),) if second else ())):
            scores = {a: run.scores(judge, where, a) for a in arms}
            episodes = {a: run.episodes(where, a) for a in arms}
            found: dict[str, Any] = {"pairs": len(pairs), "arms": {}}
            for arm in arms:
                entry = cell(episodes[arm], scores[arm], seed=seed).as_dict()
                if arm != PROMPT_ONLY:
                    entry["difference"] = {
                        v: asdict(difference(scores[PROMPT_ONLY], scores[arm], v, seed=seed)) for v in LEVELS
                    } | {"solved": asdict(solved_difference(episodes[PROMPT_ONLY], episodes[arm], seed=seed))}
                if arm in ABLATIONS and REAT in arms:
                    entry["drop"] = {
                        v: asdict(difference(scores[arm], scores[REAT], v, seed=seed)) for v in LEVELS
                    }
                found["arms"][arm] = entry
            out[name][where] = found
        if REAT in arms:
            base, reat = (run.scores(PRIMARY, where, a) for a in (PROMPT_ONLY, REAT))
            other = (
                (run.scores(SECOND, where, PROMPT_ONLY), run.scores(SECOND, where, REAT)) if second else None
            )
            out["sets"][where]["rescue"] = asdict(rescue(base, reat, recipe.test.rescue_below, other))
            out["sets"][where]["distribution"] = {
                a: asdict(distribution(s)) for a, s in ((PROMPT_ONLY, base), (REAT, reat))
            }
    out["latency"] = {
        f"{where}/{arm}": json.loads((run.folder(where, arm) / "tutor-0.json").read_text(encoding="utf-8"))
        for where, _, arms, _ in run.test_sets()
        for arm in arms
    }
    with Repository.open(run.repository_folder, read_only=True) as repository:
        every = repository.experiences(every=True)
        out["repository"] = {
            "experiences": len(every),
            "enabled": sum(e.enabled for e in every),
            "used": sum(e.uses > 0 for e in every),
            "states": len({e.tags.key() for e in every}),
            "mean_utility": sum(e.utility for e in every) / len(every) if every else None,
        }
    out["distil"] = {
        "main": run.result("grow")["batches"][-1]["distil"] if out["growth"] else None,
        **run.result("variants")["distil"],
    }
    out["usage"] = {s: run.result(s).get("usage", {}) for s in ("grow", "variants", "test", "score")}
    out["annotation"] = run.result("annotate")
    plain: dict[str, Any] = _plain(out)
    return plain


def write_reports(run: ReatPipeline) -> list[Path]:
    """``report.json``, ``report.md`` and ``report.html`` in the run folder."""
    numbers = collect(run)
    assert not is_dataclass(numbers)
    out = [run.run / f"report.{kind}" for kind in ("json", "md", "html")]
    write_page(out[0], json.dumps(numbers, indent=1) + "\n")
    write_page(out[1], markdown(numbers))
    write_page(out[2], html_page(numbers))
    return out


# ---- cells -----------------------------------------------------------------------------------------------------------------


def _missing(v: Any) -> bool:
    return v is None or isinstance(v, str)


def _mean(e: dict[str, Any]) -> str:
    if _missing(e["value"]):
        return "–"
    return f"{e['value']:.2f}" + ("" if e["low"] is None else f" [{e['low']:.2f}, {e['high']:.2f}]")


def _difference(d: dict[str, Any] | None, scale: float = 1.0) -> str:
    if d is None or _missing(d["value"]):
        return "–"
    inside = (
        "" if d["low"] is None else f" [{scale * d['low']:+.2f}, {scale * d['high']:+.2f}], p={d['p']:.4f}"
    )
    return f"{scale * d['value']:+.2f}{inside}"


def _share(v: float | None) -> str:
    return "–" if v is None else f"{100 * v:.1f} %"


def tables(n: dict[str, Any]) -> list[Table]:
    """(title, header, rows) of every table; Markdown and HTML show the same."""
    out: list[Table] = []
    head = [
        "batch",
        "prompt-only sample",
        "REAT sample",
        "gain",
        "prompt-only turn",
        "REAT turn",
        "gain",
        "experiences after",
    ]
    rows = [
        [
            r["batch"],
            *(
                text
                for v in LEVELS
                for text in (
                    _mean(r[PROMPT_ONLY][v]),
                    _mean(r[REAT][v]) if REAT in r else "cold start",
                    _difference(r.get("difference", {}).get(v)),
                )
            ),
            str(r["experiences"]),
        ]
        for r in n["growth"]
    ]
    if rows:
        out.append(
            ("Growth: each batch is unseen by the experience of those before it (Figure 3)", head, rows)
        )
    for name, title in (("sets", "primary judge"), ("second", "second judge")):
        for where, found in n[name].items():
            rows = [
                [
                    arm, _mean(e["sample"]), _difference(e.get("difference", {}).get("sample")), _mean(e["turn"]),
                    _difference(e.get("difference", {}).get("turn")), _share(e["solved"]),
                    str(sum(e["excluded"].values())),
                ]
                for arm, e in found["arms"].items()
            ]  # fmt: skip
            head = ["arm", "sample", "gain", "turn", "gain", "ended as understood", "excluded"]
            out.append((f"{where}, {found['pairs']} dialogues an arm, {title}", head, rows))
    out += _ablations(n) + _rescue(n) + _latency(n) + _distil(n)
    return out


def _ablations(n: dict[str, Any]) -> list[Table]:
    rows = []
    for where, found in n["sets"].items():
        for arm in ABLATIONS:
            if (e := found["arms"].get(arm)) is not None and "drop" in e:
                paper = PAPER_DROPS[arm]
                rows.append(
                    [
                        arm,
                        where,
                        *(_difference(e["drop"][v]) for v in LEVELS),
                        f"{paper[0]:.2f} / {paper[1]:.2f}",
                    ]
                )
    head = ["without", "set", "drop, sample", "drop, turn", "the paper's drops (sample / turn)"]
    return [("Ablations: full REAT minus the variant (Figure 6)", head, rows)] if rows else []


def _rescue(n: dict[str, Any]) -> list[Table]:
    rows = []
    for where, found in n["sets"].items():
        if (r := found.get("rescue")) is not None:
            values = (r["gain"], r["gain_by_second"], r["rest_gain"])
            rows.append(
                [where, f"{r['n']} of {r['of']}", *("–" if v is None else f"{v:+.2f}" for v in values)]
            )
    head = ["set", "low pairs", "gain", "gain by the second judge", "gain of the others"]
    return [("Low-score rescue (Figure 4)", head, rows)] if rows else []


def _latency(n: dict[str, Any]) -> list[Table]:
    names = ("observe_s", "rewrite_s", "retrieve_s", "generate_s", "other_s", "total_s")
    rows = []
    for arm, found in n["latency"].items():
        t = found["latency"]
        if t["rounds"]:
            rows.append(
                [
                    arm,
                    *(f"{t[f'p50_{k}']:.4f}" for k in names),
                    f"{t['calls_per_turn']:.2f}",
                    _share(t["known_share"]) if t["calls_per_turn"] else "–",
                ]
            )
    paper = PAPER_LATENCY
    rows.append(
        [
            "the paper's prototype",
            "12.4",
            "4.2 with retrieval",
            "",
            f"{paper['generate_s']}",
            "0.8",
            "20.2",
            "2",
            "–",
        ]
    )
    head = ["arm", *(f"{k.removesuffix('_s')} p50, s" for k in names), "extra calls a turn", "state known"]
    return [("Latency of a tutoring round (Table 4)", head, rows)]


def _distil(n: dict[str, Any]) -> list[Table]:
    rows = []
    for name, r in n["distil"].items():
        if r is not None:
            bad = sum(v for k, v in r["roles"].items() if ".bad." in k or ".leak." in k)
            counts = ", ".join(f"{k} {v}" for k, v in r["dropped"].items()) or "none"
            admitted = ", ".join(f"{k} {v}" for k, v in r["admissions"].items()) or "none"
            rows.append(
                [name, str(r["turns"]), str(r["routed"]), str(r["experiences"]), admitted, counts, str(bad)]
            )
    head = ["repository", "turns", "to the Mentor", "passed", "admitted", "dropped", "refused replies"]
    return [("Distillation", head, rows)] if rows else []


# ---- pages -----------------------------------------------------------------------------------------------------------------


def markdown(n: dict[str, Any]) -> str:
    """The report as Markdown."""
    r = n["repository"]
    parts = [
        f"# {n['name']}", "",
        f"Repository: {r['experiences']} experiences in {r['states']} states, {r['enabled']} enabled, {r['used']} used.", "",
    ]  # fmt: skip
    for title, header, rows in tables(n):
        parts += [f"## {title}", "", _md(header), _md(["---"] * len(header)), *(_md(row) for row in rows), ""]
    return "\n".join([*parts, "## Notes", "", *(f"- {note}" for note in NOTES), ""])


def _md(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def html_page(n: dict[str, Any]) -> str:
    """The report as one static page without scripts."""
    parts = [f"<h1>{esc(n['name'])}</h1>", growth_figure(n["growth"])]
    parts += [distribution_figure(w, s["distribution"]) for w, s in n["sets"].items() if "distribution" in s]
    for title, header, rows in tables(n):
        head = "".join(f"<th>{esc(h)}</th>" for h in header)
        body = "".join("<tr>" + "".join(f"<td>{esc(c)}</td>" for c in row) + "</tr>" for row in rows)
        parts.append(
            f"<h2>{esc(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )
    parts += [f'<p class="muted">{esc(note)}</p>' for note in NOTES]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{esc(policy(STYLE))}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{esc(n['name'])}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


COLOURS = {PROMPT_ONLY: "#8a8a8a", REAT: "#1f6f8b"}


def growth_figure(growth: Sequence[dict[str, Any]]) -> str:
    """Scores by batch: both arms, sample level solid and turn level dashed."""
    found = [
        r[a][v]["value"]
        for r in growth
        for a in COLOURS
        if a in r
        for v in LEVELS
        if not _missing(r[a][v]["value"])
    ]
    if len(growth) < 2 or not found:
        return ""
    low, high = min(found) - 2, min(max(found) + 2, 102)
    left, width, height = 60, 480, 220

    def place(i: int, value: float) -> tuple[float, float]:
        return left + width * i / (len(growth) - 1), 20 + height * (high - value) / (high - low)

    marks = []
    for arm, colour in COLOURS.items():
        for v in LEVELS:
            points = [
                place(i, r[arm][v]["value"])
                for i, r in enumerate(growth)
                if arm in r and not _missing(r[arm][v]["value"])
            ]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dash = ' stroke-dasharray="5 4"' if v == "turn" else ""
            marks.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    for i, r in enumerate(growth):
        marks.append(
            f'<text x="{place(i, low)[0]:.0f}" y="{height + 40}" text-anchor="middle">{esc(r["batch"])}</text>'
        )
    for value in (low, (low + high) / 2, high):
        marks.append(
            f'<text x="{left - 8}" y="{place(0, value)[1] + 4:.0f}" text-anchor="end">{value:.0f}</text>'
        )
    return (
        f'<figure><svg viewBox="0 0 {left + width + 30} {height + 50}" role="img" fill="currentColor" font-size="12" '
        f'aria-label="Score by batch">{"".join(marks)}</svg><figcaption>Score by batch: prompt-only grey, REAT blue; sample level '
        "solid, turn level dashed.</figcaption></figure>"
    )


def distribution_figure(where: str, found: dict[str, Any]) -> str:
    """Sample-level scores of both arms, mirrored as in Figure 4."""
    counts = {a: found[a]["counts"] for a in COLOURS}
    most = max([1, *(c for cs in counts.values() for c in cs)])
    middle, half, step = 260, 200, 14
    used = [i for i in range(len(counts[REAT])) if any(counts[a][i] for a in COLOURS)]
    if not used:
        return ""
    marks = []
    for row, i in enumerate(range(max(used), min(used) - 1, -1)):
        y = 10 + step * row
        marks.append(f'<text x="{middle}" y="{y + 10}" text-anchor="middle">{BIN * i:.0f}</text>')
        for arm, sign in ((PROMPT_ONLY, -1), (REAT, 1)):
            w = half * counts[arm][i] / most
            x = middle + 20 if sign > 0 else middle - 20 - w
            marks.append(
                f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{step - 3}" fill="{COLOURS[arm]}"/>'
            )
    height = 10 + step * (max(used) - min(used) + 1) + 10
    return (
        f'<figure><svg viewBox="0 0 {2 * middle} {height}" role="img" fill="currentColor" font-size="10" '
        f'aria-label="Distribution of sample scores">{"".join(marks)}</svg><figcaption>{esc(where)}: sample-level scores, '
        "prompt-only left, REAT right (lower edge of each bin).</figcaption></figure>"
    )

"""What people's annotations say (paper, Tables 3, 6 and 7): gains by annotator at both levels, preferences, checks, agreement.

A person's sample score is the mean of the dialogue's turns. Gains compare pairs that the annotator scored on both sides. Shares
come with Wilson intervals; agreement over annotators is Krippendorff's α, interval for scores and nominal for judgements.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from maieutic.evaluation.agreement import krippendorff_alpha
from maieutic.evaluation.statistics import Interval, wilson
from maieutic.reat.annotation import CHECKS, Annotation, AnnotationError, Setting, Side
from maieutic.reat.schema import DIMENSIONS, score_100

_SETTINGS: dict[str, Setting] = {"prompt_only": "prompt_only", "reat": "reat"}


@dataclass(frozen=True, slots=True)
class AnnotatorResult:
    """One annotator (a column of Tables 6 and 7). Levels as for the judges; a number without data is None."""

    annotator: str
    turns: int
    pairs: int
    levels: dict[str, dict[str, float | None]]
    """``sample`` and ``turn`` → ``prompt_only``, ``reat``, ``gain`` (REAT − prompt-only)."""
    preference: dict[str, Interval]
    """Shares of ``reat``, ``prompt_only``, ``uncertain``."""
    checks: dict[str, dict[str, Interval]]


@dataclass(frozen=True, slots=True)
class AnnotationReport:
    """All annotators, their mean, and how far they agree."""

    annotators: list[AnnotatorResult]
    mean: dict[str, float | None]
    """Mean over annotators of gains and shares, as the paper's "Avg." column."""
    alpha: dict[str, float | None]
    """Krippendorff's α: turn scores and each dimension (interval), judgements (nominal); None where it does not exist."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(key_file: Path, annotations: Sequence[Annotation]) -> AnnotationReport:
    """Statistics of annotations by the export's key. Raises :class:`AnnotationError` for pairs that the key does not know."""
    sides, asked = _key(key_file)
    names = [a.annotator for a in annotations]
    if not names or len(set(names)) != len(names):
        raise AnnotationError(f"annotators {names}: at least one, each with a name of its own")
    for a in annotations:
        strangers = ({p for p, _, _ in a.turns} | set(a.judgements)) - set(sides)
        if strangers:
            raise AnnotationError(f"annotator {a.annotator}: pair {min(strangers)!r} is not of this export")
        if never := set(a.turns) - asked:
            pair, side, n = min(never)
            raise AnnotationError(
                f"annotator {a.annotator}: {pair}, dialogue {side}, has no turn {n} of the tutor: was a column sorted or filled "
                "down by itself?"
            )
    results = [_one(a, sides) for a in annotations]
    return AnnotationReport(results, _means(results), _alphas(annotations, sides))


def _key(file: Path) -> tuple[dict[str, dict[Side, Setting]], set[tuple[str, Side, int]]]:
    """(which side is which arm, the turns that were shown). Raises :class:`AnnotationError`."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        sides = {
            pair: {"A": _SETTINGS[held["A"]], "B": _SETTINGS[held["B"]]}
            for pair, held in data["sides"].items()
        }
        asked = {(p, _as_side(s), int(n)) for p, held in data["turns"].items() for s in held for n in held[s]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AnnotationError(f"{file}: not the key of an export ({error!r})") from error
    return sides, asked  # type: ignore[return-value]


def _one(a: Annotation, sides: Mapping[str, Mapping[Side, Setting]]) -> AnnotatorResult:
    by_arm: dict[Setting, dict[str, list[float]]] = {
        "prompt_only": defaultdict(list),
        "reat": defaultdict(list),
    }
    for (pair, side, _), scores in a.turns.items():
        by_arm[sides[pair][side]][pair].append(score_100(scores))
    # A person's sample score is the mean of the dialogue's turns; gains compare pairs that were scored on both sides.
    both = [p for p in by_arm["reat"] if p in by_arm["prompt_only"]]
    sample = {arm: _mean([_mean(held[p]) for p in both]) for arm, held in by_arm.items()}
    turn = {arm: _mean([v for p in both for v in held[p]]) for arm, held in by_arm.items()}
    levels = {
        name: {**means, "gain": _minus(means["reat"], means["prompt_only"])}
        for name, means in (("sample", sample), ("turn", turn))
    }
    preferred = Counter(
        "uncertain" if j["preference"] == "uncertain" else sides[p][_as_side(j["preference"])]
        for p, j in a.judgements.items()
        if "preference" in j
    )
    return AnnotatorResult(
        a.annotator,
        len(a.turns),
        len(a.judgements),
        levels,
        _shares(preferred, ("reat", "uncertain", "prompt_only")),
        {
            check: _shares(Counter(j[check] for j in a.judgements.values() if check in j), answers)
            for check, answers in CHECKS.items()
        },
    )


def _as_side(text: str) -> Side:
    return "A" if text == "A" else "B"


def _shares(counts: Counter[str], names: Sequence[str]) -> dict[str, Interval]:
    total = sum(counts.values())
    return {name: wilson(counts[name], total) for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    held = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(held) / len(held) if held else None


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _means(results: Sequence[AnnotatorResult]) -> dict[str, float | None]:
    out = {f"{level}_gain": _mean([r.levels[level]["gain"] for r in results]) for level in ("sample", "turn")}
    out |= {
        f"prefers_{name}": _mean([r.preference[name].value for r in results])
        for name in ("reat", "uncertain", "prompt_only")
    }
    for check, answers in CHECKS.items():
        out |= {f"{check}_{a}": _mean([r.checks[check][a].value for r in results]) for a in answers}
    return out


def _alphas(
    annotations: Sequence[Annotation], sides: Mapping[str, Mapping[Side, Setting]]
) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    keys = sorted({k for a in annotations for k in a.turns})

    def put(
        name: str, ratings: list[list[float | str | None]], level: Literal["nominal", "interval"]
    ) -> None:
        alpha = krippendorff_alpha(ratings, level) if ratings and ratings[0] else math.nan
        out[name] = alpha if math.isfinite(alpha) else None

    put(
        "turn_score",
        [[score_100(a.turns[k]) if k in a.turns else None for k in keys] for a in annotations],
        "interval",
    )
    for d in DIMENSIONS:
        put(
            d,
            [[getattr(a.turns[k], d) if k in a.turns else None for k in keys] for a in annotations],
            "interval",
        )
    pairs = sorted({p for a in annotations for p in a.judgements})
    for what in ("preference", *CHECKS):
        put(what, [[a.judgements.get(p, {}).get(what) for p in pairs] for a in annotations], "nominal")
    return out


def lines(report: AnnotationReport) -> list[str]:
    """For people: the rows of Tables 6 and 7."""

    def number(v: float | None) -> str:
        return "–" if v is None else f"{v:.2f}"

    out = []
    for r in report.annotators:
        s, t = r.levels["sample"], r.levels["turn"]
        out.append(
            f"{r.annotator}: {r.turns} turns, {r.pairs} pairs; sample {number(s['prompt_only'])} → {number(s['reat'])} "
            f"({number(s['gain'])}), turn {number(t['prompt_only'])} → {number(t['reat'])} ({number(t['gain'])})"
        )
        for what, shares in (("preferred", r.preference), *r.checks.items()):
            out.append("  " + what + ": " + ", ".join(
                f"{name} {100 * i.value:.1f} % [{100 * i.low:.0f}, {100 * i.high:.0f}]" if i.n else f"{name} –"
                for name, i in shares.items()))  # fmt: skip
    out.append("mean over annotators: " + ", ".join(f"{k} {number(v)}" for k, v in report.mean.items()))
    out.append("Krippendorff's α: " + ", ".join(f"{k} {number(v)}" for k, v in report.alpha.items()))
    return out

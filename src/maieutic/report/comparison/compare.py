"""Arms side by side: means, flags, paired differences against the base with Holm's correction, moves, curves, costs.

Nothing is compared on unequal terms in silence: an arm whose tutor sees the solution, or that was measured with another
environment, student, judge or reward, is refused unless the caller allows it, and then the report says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from maieutic.evaluation.distributions import js_distance
from maieutic.evaluation.moves import LETTERS, classify_by_rules, distribution
from maieutic.evaluation.statistics import (
    Difference,
    Estimate,
    cluster_means,
    estimate,
    holm,
    paired_difference,
)
from maieutic.report.comparison.load import Arm, ComparisonError, Evaluated
from maieutic.report.comparison.samples import MEASURES
from maieutic.report.summary import Line, counted

FLAG_LIMIT = 0.15
"""Above this share of empty turns (∗) or truncated dialogues (†) the environment's numbers are unreliable (paper, Table 1)."""
DIFFERENCES = (
    "transfer_gain",
    "same_gain",
    "reward",
    "leak_rate",
    "correctness_reject_rate",
    "turns",
    "visible_tokens_per_turn",
    "thinking_tokens_per_turn",
)
"""Measures that arms are compared by."""


@dataclass(frozen=True, slots=True)
class Tested:
    """arm − base of one measure; ``p_holm`` is adjusted over all arms and measures of the report."""

    arm: str
    measure: str
    difference: Difference
    p_holm: float | None


@dataclass(slots=True)
class Row:
    """One arm: its means by measure, ∗ and † where they are due, and what it cost."""

    arm: str
    runs: list[Evaluated]
    dialogues: int
    problems: int
    sees_solution: bool
    tutor_prompt: str
    estimates: dict[str, Estimate]
    flags: str
    moves: dict[str, float] | None
    """Shares of the thirteen moves, by key words."""
    shift: float | None
    """Jensen-Shannon distance of the moves to those of the base."""
    cost: dict[str, float]
    by_run: list[dict[str, Any]] = field(default_factory=list)
    """Means of each run (seed), for the spread between trainings."""


@dataclass(slots=True)
class Comparison:
    """Everything that the report shows."""

    base: str
    rows: list[Row]
    tested: list[Tested]
    per_problem: dict[str, dict[str, dict[str, float]]]
    """measure → arm → problem → mean, of the measures in the scatter."""
    notices: list[str]
    curves: dict[str, dict[str, list[tuple[int, float | None]]]]
    """metric → ``arm seed`` → (step, value)."""


def compare_arms(
    arms: Sequence[Arm],
    base: str | None = None,
    *,
    allow_solution: bool = False,
    allow_different: bool = False,
) -> Comparison:
    """Compare ``arms`` with ``base`` (None: the arm of that name, else the first). Raises :class:`ComparisonError`."""
    names = [a.name for a in arms]
    if not arms:
        raise ComparisonError("there is no arm to compare")
    if base is None:
        base = "base" if "base" in names else names[0]
    if base not in names:
        raise ComparisonError(f"no arm is called {base!r}; there are {', '.join(names)}")
    by_name = {a.name: a for a in arms}
    notices = _equal_terms(arms, by_name[base], allow_solution, allow_different)
    notices += _same_problems(arms, allow_different)
    notices += _without_number(arms)
    base_moves = _moves(by_name[base])
    rows = [_row(a, base_moves) for a in arms]
    means = {m: {a.name: _per_problem(a, m) for a in arms} for m in DIFFERENCES}
    return Comparison(
        base,
        rows,
        _tested(names, base, means),
        {
            m: {n: {str(k): v for k, v in d.items()} for n, d in means[m].items()}
            for m in ("transfer_gain", "same_gain")
        },
        notices,
        _curves(arms),
    )


# ---- equal terms -----------------------------------------------------------------------------------------------------


def _equal_terms(arms: Sequence[Arm], base: Arm, allow_solution: bool, allow_different: bool) -> list[str]:
    notices = []
    seeing = [a.name for a in arms if a.sees_solution]
    if seeing and len(seeing) < len(arms):
        said = (
            f"the tutor sees the solution in {', '.join(seeing)}, and not in "
            f"{', '.join(a.name for a in arms if not a.sees_solution)}"
        )
        if not allow_solution:
            raise ComparisonError(
                f"{said}: that is no comparison on equal terms (--allow-solution compares them all the same)"
            )
        notices.append(f"Unequal terms: {said}.")
    reference = base.runs[0].settings
    for arm in arms:
        for run in arm.runs:
            # That one was decided above.
            keys = [k for k in _differing(reference, run.settings) if k != "env.tutor_sees_solution"]
            if keys and not allow_different:
                raise ComparisonError(
                    f"{run.path} (arm {arm.name}) was measured otherwise than arm {base.name}: {', '.join(keys)} "
                    "(evaluate all arms with one recipe, as `maieutic sweep` does; --allow-different compares them all the same)"
                )
            if keys:
                notices.append(
                    f"Unequal terms: {arm.name} ({run.path.name}) differs from {base.name} in {', '.join(keys)}."
                )
    return notices


def _differing(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            k
            for key in sorted(a.keys() | b.keys())
            for k in _differing(a.get(key), b.get(key), f"{prefix}{key}.")
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            k for i, (x, y) in enumerate(zip(a, b, strict=True)) for k in _differing(x, y, f"{prefix}{i}.")
        ]
    return [] if a == b else [prefix[:-1]]


def _same_problems(arms: Sequence[Arm], allow_different: bool) -> list[str]:
    """Every arm has the same problems, and a problem is the same in all of them: text, answers and the students' cold rates."""
    found = []
    seen: dict[Hashable, Any] = {}
    other: dict[str, None] = {}
    for s in (s for a in arms for s in a.samples):
        for key, value in _what(s.line):
            if seen.setdefault(key, value) != value:
                other[s.problem] = None
    if other:
        named = ", ".join(list(other)[:3]) + (" …" if len(other) > 3 else "")
        found.append(
            f"{len(other)} problems of one id differ between runs in text, answer or the student's cold rate ({named})."
        )
    found += _missing_problems(arms)
    if found and not allow_different:
        raise ComparisonError(
            f"{' '.join(found)} Evaluate all arms on the same problems; --allow-different compares them all the same"
        )
    return found


def _what(line: Line) -> list[tuple[Hashable, Any]]:
    """(what, value) that must be equal wherever this problem is played."""
    pair, test = line["pair"], line["post_test"]
    texts = [(p["text"], p["answer"]) if p else None for p in (pair["source"], pair["transfer"])]
    out: list[tuple[Hashable, Any]] = [((pair["id"], "text"), texts)]
    if test and line.get("pre") is not None:
        out.append(((pair["id"], "pre", line["student"], test["problem"]), line["pre"]))
    return out


def _without_number(arms: Sequence[Arm]) -> list[str]:
    """Dialogues that count and have no gain or reward (not tested, or not a number), where others of the arm have one."""
    out = []
    for arm in arms:
        counting = [s for s in arm.samples if counted(s.line)]
        for measure in ("transfer_gain", "same_gain", "reward"):
            without = sum(s.values[measure] is None for s in counting)
            if 0 < without < len(counting):
                out.append(
                    f"{arm.name}: {without} of {len(counting)} dialogues that count have no {measure}: they are in no mean of it."
                )
    return out


def _missing_problems(arms: Sequence[Arm]) -> list[str]:
    sets = {a.name: {s.problem for s in a.samples} for a in arms}
    first = next(iter(sets.values()))
    odd = [name for name, problems in sets.items() if problems != first]
    if not odd:
        return []
    shared = set.intersection(*sets.values())
    sizes = ", ".join(f"{n} {len(s)}" for n, s in sets.items())
    return [
        f"Not all arms have the same problems ({sizes}; {len(shared)} in all): means are over each arm's own, differences over "
        "those that both arms have."
    ]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _held(arm: Arm, measure: str) -> tuple[list[float], list[Hashable]]:
    held = [(v, s.problem) for s in arm.samples if (v := s.values[measure]) is not None]
    return [v for v, _ in held], [p for _, p in held]


def _per_problem(arm: Arm, measure: str) -> dict[Hashable, float]:
    values, problems = _held(arm, measure)
    return cluster_means(values, problems)


def _row(arm: Arm, base_moves: list[float] | None) -> Row:
    estimates = {}
    for measure in MEASURES:
        values, problems = _held(arm, measure)
        if values:
            estimates[measure] = estimate(values, problems)
    moves = _moves(arm)
    return Row(
        arm=arm.name,
        runs=arm.runs,
        dialogues=len(arm.samples),
        problems=len({s.problem for s in arm.samples}),
        sees_solution=arm.sees_solution,
        tutor_prompt=", ".join(dict.fromkeys(r.tutor_prompt for r in arm.runs)),
        estimates=estimates,
        flags=flags(estimates),
        moves=None if moves is None else dict(zip(LETTERS, moves, strict=True)),
        shift=None if moves is None or base_moves is None else js_distance(base_moves, moves),
        cost=_cost(arm),
        by_run=[_of_run(run) for run in arm.runs],
    )


def flags(estimates: dict[str, Estimate]) -> str:
    """``∗`` for more than 15 % empty turns, ``†`` for more than 15 % truncated dialogues."""
    marks = {"∗": "empty_turn_rate", "†": "truncated_dialogue_share"}
    return "".join(m for m, name in marks.items() if name in estimates and estimates[name].value > FLAG_LIMIT)


def _of_run(run: Evaluated) -> dict[str, Any]:
    out: dict[str, Any] = {
        "path": run.path.name,
        "seed": run.seed,
        "step": run.step,
        "dialogues": len(run.samples),
    }
    for measure in ("transfer_gain", "same_gain", "reward", "leak_rate", "correctness_reject_rate"):
        values = [v for s in run.samples if (v := s.values[measure]) is not None]
        out[measure] = sum(values) / len(values) if values else None
    return out


def _tested(
    names: Sequence[str], base: str, means: dict[str, dict[str, dict[Hashable, float]]]
) -> list[Tested]:
    found = [
        (name, measure, paired_difference(means[measure][base], means[measure][name]))
        for name in names
        if name != base
        for measure in DIFFERENCES
        if means[measure][base] and means[measure][name]
    ]
    ranked = [i for i, (_, _, d) in enumerate(found) if d.p is not None]
    adjusted = dict(zip(ranked, holm([p for _, _, d in found if (p := d.p) is not None]), strict=True))
    return [Tested(name, measure, d, adjusted.get(i)) for i, (name, measure, d) in enumerate(found)]


def _moves(arm: Arm) -> list[float] | None:
    turns = [t for s in arm.samples for t in s.line["dialogue"]["turns"] if t["speaker"] == "tutor"]
    return distribution([classify_by_rules(t["visible"]) for t in turns])


# ---- curves and costs ------------------------------------------------------------------------------------------------

CURVES = (
    "rollout/reward",
    "rollout/transfer_gain",
    "rollout/same_gain",
    "rollout/leak_rate",
    "sft/loss",
    "sft/held_out_loss",
)


def _curves(arms: Sequence[Arm]) -> dict[str, dict[str, list[tuple[int, float | None]]]]:
    out: dict[str, dict[str, list[tuple[int, float | None]]]] = {}
    for arm in arms:
        for run in arm.runs:
            for metric in CURVES if run.trained is not None else ():
                assert run.trained is not None
                points = [(step, row[metric]) for step, row in run.trained.rows if metric in row]
                if points:
                    label = arm.name if len(arm.runs) == 1 else f"{arm.name} {run.seed}"
                    out.setdefault(metric, {})[label] = points
    return out


def _cost(arm: Arm) -> dict[str, float]:
    """What the arm cost, summed over its runs: seconds of training processes, trained tokens, server usage, evaluation tokens."""
    out: dict[str, float] = {}

    def add(name: str, value: float | None) -> None:
        if value is not None:
            out[name] = out.get(name, 0.0) + value

    for run in arm.runs:
        rows = run.trained.rows if run.trained is not None else []
        add("training_steps", float(max((s for s, _ in rows), default=0)) if rows else None)
        for metric, name in (("time/step", "seconds_in_steps"), ("train/trained_tokens", "trained_tokens")):
            values = [v for _, row in rows if (v := row.get(metric)) is not None]
            add(name, sum(values) if values else None)
        last: dict[str, float] = {}
        for _, row in rows:
            last |= {k: v for k, v in row.items() if k.startswith("usage/") and v is not None}
        for key, value in last.items():
            add("training_" + key.removeprefix("usage/").replace("/", "_"), value)
        for name in ("train_seconds", "evaluation_seconds", "gpu_seconds"):
            add(name, run.card.get(name))
        for role, cost in (run.card.get("costs") or {}).items():
            for kind, value in cost.items():
                add(f"evaluation_{role}_{kind}", float(value))
        turns = [(t, s) for s in run.samples for t in s.line["dialogue"]["turns"]]
        for speaker in ("tutor", "student"):
            tokens = [t["visible_tokens"] + t["thinking_tokens"] for t, _ in turns if t["speaker"] == speaker]
            add(f"evaluation_{speaker}_tokens", float(sum(tokens)))
    return out

"""``docs/science.md`` and its figures from the result files of :mod:`maieutic.micro.science`, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maieutic.errors import MaieuticError
from maieutic.micro.figures import curves_svg, dots_svg

DRAWS = 4_000
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def excludes(self, value: float) -> bool:
        return self.low > value or self.high < value


def bootstrap(table: np.ndarray, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """Mean of ``table`` [seeds, problems] with a percentile interval; seeds and problems are drawn again, crossed.

    NaN cells (excluded episodes) do not count. With one seed only the problems vary, and the interval says nothing about
    other seeds.
    """
    rng = np.random.default_rng(seed)
    n_seeds, n_problems = table.shape
    means = np.empty(draws)
    for i in range(draws):
        rows = rng.integers(n_seeds, size=n_seeds)
        columns = rng.integers(n_problems, size=n_problems)
        means[i] = np.nanmean(table[np.ix_(rows, columns)])
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(np.nanmean(table)), float(low), float(high))


@dataclass(frozen=True)
class Arm:
    """The results of one arm: its seeds in order."""

    name: str
    results: list[dict[str, Any]]

    @property
    def seeds(self) -> list[int]:
        return [r["setting"]["seed"] for r in self.results]

    def table(self, which: str, value: Callable[[dict[str, Any]], float | None]) -> np.ndarray:
        """[seeds, problems] of a number of each episode, NaN where there is none; problems in the same order for all seeds."""
        order = sorted(r["pair"] for r in self.results[0][which])
        out = []
        for result in self.results:
            by_pair = {r["pair"]: r for r in result[which]}
            if sorted(by_pair) != order:
                raise ValueError(f"{self.name}: seeds {self.seeds} were measured on different problems")
            out.append([_number(value(by_pair[p])) for p in order])
        return np.array(out, dtype=float)

    def gain(self, which: str) -> np.ndarray:
        return self.table(which, lambda r: r["gain"])

    def leak(self, which: str) -> np.ndarray:
        return self.table(which, lambda r: float(r["leak"]))


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


_PARTS = {"setting", "before", "masked", "own", "curve"}


def read_result(file: Path) -> dict[str, Any]:
    """One result. Raises :class:`MaieuticError` for a file that is cut, empty or no result."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MaieuticError(
            f"{file}: cannot be read as a result ({error}): delete it and run that arm and seed again"
        ) from None
    if not isinstance(found, dict) or not found.keys() >= _PARTS:
        raise MaieuticError(f"{file}: no result of maieutic.micro.science: move it elsewhere")
    return found


def load(files: Sequence[Path]) -> list[Arm]:
    """Arms in the order of :data:`maieutic.micro.science.ALL`. All results must share one setting but for arm and seed:
    else :class:`MaieuticError`."""
    from maieutic.micro.science import ALL

    results = [read_result(file) for file in files]
    common = [{k: v for k, v in r["setting"].items() if k not in ("arm", "seed")} for r in results]
    for file, setting in zip(files, common, strict=True):
        if setting != common[0]:
            raise MaieuticError(f"the result files are of different settings: {files[0]} and {file}")
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda r: r["setting"]["seed"]):
        by_arm.setdefault(result["setting"]["arm"], []).append(result)
    return [Arm(name, by_arm[name]) for name in ALL if name in by_arm]


# ---- what is claimed ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim that was written down before the runs, and what became of it."""

    claim: str
    holds: bool | None
    """None: the arms that it needs were not run."""
    evidence: str


def findings(arms: Sequence[Arm]) -> list[Finding]:
    """The claims of the micro-classroom, each with its counts and intervals."""
    by_name = {arm.name: arm for arm in arms}
    full, free = by_name.get("full"), by_name.get("no-gates")
    seen, same = by_name.get("leak-gate-only-no-mask"), by_name.get("no-transfer")
    out = []

    def leaks(arm: Arm | None, claim: str, holds: Callable[[float], bool]) -> None:
        if arm is None:
            out.append(Finding(claim, None, "not run"))
            return
        rates = arm.leak("masked").mean(axis=1)
        n = sum(bool(holds(r)) for r in rates)
        text = f"{n} of {len(rates)} seeds (leak rates {', '.join(f'{r:.3f}' for r in rates)})"
        out.append(Finding(claim, n == len(rates), text))

    leaks(full, "The full recipe ends with a leak rate of at most .05 on every seed", lambda r: r <= 0.05)
    if full:
        rise = bootstrap(full.gain("masked") - full.gain("before"))
        text = "The full recipe raises the masked transfer gain by at least .15, with an interval that excludes 0"
        out.append(Finding(text, rise.mean >= 0.15 and rise.low > 0, f"rise {rise}"))
    leaks(free, "Without gates the tutor tells: leak rate of at least .6 on every seed", lambda r: r >= 0.6)
    text = (
        "With the leakage gate alone and the tutor's turns in view, the arm's own measure exceeds the masked gain by at least "
        ".3, with an interval that excludes 0"
    )
    if seen:
        gap = bootstrap(seen.gain("own") - seen.gain("masked"))
        out.append(Finding(text, gap.mean >= 0.3 and gap.low > 0, f"difference {gap}"))
    else:
        out.append(Finding(text, None, "not run"))
    text = "Without the transfer problem the masked transfer gain ends lower than with it"
    if same and full and same.seeds == full.seeds:
        gap = bootstrap(full.gain("masked") - same.gain("masked"))
        out.append(Finding(text, gap.low > 0, f"full minus no-transfer {gap}"))
    else:
        out.append(Finding(text, None, "not run on the same seeds"))
    text = (
        "Without gates and without the transfer problem, the arm's own measure (the tutored problem once more) exceeds the masked "
        "transfer gain by at least .3, with an interval that excludes 0"
    )
    if told := by_name.get("no-gates-no-transfer"):
        gap = bootstrap(told.gain("own") - told.gain("masked"))
        each = ", ".join(f"{d:.2f}" for d in np.nanmean(told.gain("own") - told.gain("masked"), axis=1))
        out.append(Finding(text, gap.mean >= 0.3 and gap.low > 0, f"difference {gap}; by seed {each}"))
    else:
        out.append(Finding(text, None, "not run"))
    return out


# ---- the report --------------------------------------------------------------------------------------------------------

_INTRO = """# The micro-classroom: what the reward's conditions do

Made by `make science` (`python -m maieutic.micro.science`) from stored results; do not edit by hand.

This is a *constructed* world: a tutor and a student of a quarter of a million parameters each, story problems of two or three
steps, gates by rule. It shows mechanisms, not sizes of effects: how much a student can learn from its own words, how often it
repeats what it is told, and what the untrained tutor already does are choices of the world (`maieutic.micro.scripts`).
The student is a real language model that is frozen and sampled; nobody in an episode follows a script.

Every trained tutor is measured with the same instrument on held-out stories: transfer problem, tutor hidden, K = 16, gates only
counted ("masked gain"), and once more with the arm's own measure. Intervals are 95 % percentile intervals of a bootstrap over
seeds and problems (crossed); with a single seed they say nothing about other seeds.
"""


def write_report(folders: Sequence[Sequence[Path]], document: Path) -> None:
    """Write ``document`` and its figures (``science-*.svg`` beside it) from the result files of one build of the models, and,
    in short, of others. Raises ValueError when there is no result."""
    if not all(folders):
        raise ValueError("there are no results to report")
    arms, *others = [load(files) for files in folders]
    document.parent.mkdir(parents=True, exist_ok=True)
    parts = [
        _INTRO,
        _setting(arms),
        "## Arms\n",
        _table(arms),
        _figures(arms, document),
        "## What holds\n",
        _claims(arms),
    ]
    for other in others:
        parts += [
            "## Another tutor and student\n",
            "Everything pre-trained anew from another seed; nothing was chosen on it.\n",
            _setting(other),
            _table(other),
            _claims(other),
        ]
    parts.append(_reading(arms, others))
    document.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _setting(arms: Sequence[Arm]) -> str:
    from maieutic.micro.science import CORE, REPORTING_SEEDS

    setting = arms[0].results[0]["setting"]
    missing = [
        f"{a} {s}"
        for a in CORE
        for s in REPORTING_SEEDS
        if not any(x.name == a and s in x.seeds for x in arms)
    ]
    other = sorted({s for arm in arms for s in arm.seeds} - set(REPORTING_SEEDS))
    lines = [
        f"Models of `maieutic micro build --seed {setting['build']['seed']}`, measured on {setting['problems']} held-out pairs. "
        + (f"Overrides of every recipe: `{' '.join(setting['overrides'])}`. " if setting["overrides"] else "")
        + f"Reporting seeds: {', '.join(map(str, REPORTING_SEEDS))}."
    ]
    if other:
        lines.append(f"**Seeds {', '.join(map(str, other))} are no reporting seeds.**")
    if missing:
        lines.append(
            f"**Incomplete: {len(missing)} of {len(CORE) * len(REPORTING_SEEDS)} core runs are missing.**"
        )
    return "\n".join(lines) + "\n"


def _table(arms: Sequence[Arm]) -> str:
    head = [
        "arm", "seeds", "leak before", "leak after", "masked gain before", "masked gain after", "own measure after",
        "own − masked", "rejected as wrong", "telling turns", "question share",
    ]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for arm in arms:

        def mean(which: str, value: Callable[[dict[str, Any]], float | None], arm: Arm = arm) -> str:
            return str(bootstrap(arm.table(which, value)))

        cells = [
            arm.name,
            str(len(arm.seeds)),
            mean("before", lambda r: float(r["leak"])),
            mean("masked", lambda r: float(r["leak"])),
            str(bootstrap(arm.gain("before"))),
            str(bootstrap(arm.gain("masked"))),
            str(bootstrap(arm.gain("own"))),
            str(bootstrap(arm.gain("own") - arm.gain("masked"))),
            mean("masked", lambda r: float(r["wrong"])),
            mean("masked", lambda r: float(r["telling"])),
            mean("masked", lambda r: r["questions"] / r["tutor_turns"] if r["tutor_turns"] else None),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _figures(arms: Sequence[Arm], document: Path) -> str:
    dots = [
        (arm.name, [_triple(bootstrap(arm.gain(which))) for which in ("before", "masked", "own")])
        for arm in arms
    ]
    gains = document.with_name("science-gains.svg")
    gains.write_text(
        dots_svg(dots, ["before", "after, masked", "after, own measure"], "learning gain"), encoding="utf-8"
    )
    lines = []
    for arm in arms:
        length = min(len(r["curve"]) for r in arm.results)
        if not length:  # SFT plays no episodes while it trains
            continue
        values = np.array([[step["rollout/leak_rate"] for step in r["curve"][:length]] for r in arm.results])
        lines.append((arm.name, values.mean(axis=0).tolist()))
    leaks = document.with_name("science-leaks.svg")
    leaks.write_text(curves_svg(lines, "leak rate in training, mean over seeds", "step"), encoding="utf-8")
    return (
        f"![Learning gain before and after, under the common and the own measure]({gains.name})\n\n"
        f"![Leak rate over the steps of training]({leaks.name})\n"
    )


def _triple(e: Estimate) -> tuple[float, float, float]:
    return e.mean, e.low, e.high


def _claims(arms: Sequence[Arm]) -> str:
    mark = {True: "holds", False: "does **not** hold", None: "not tested"}
    lines = ["| claim, written down before the runs | | evidence |", "|---|---|---|"]
    lines += [f"| {f.claim} | {mark[f.holds]} | {f.evidence} |" for f in findings(arms)]
    return "\n".join(lines) + "\n"


_TABLE_2 = """## Beside the paper's Table 2

The paper removes one condition at a time from a 4B tutor and finds the masked transfer gain unchanged (all arms within .03) while
the behaviour changes. What this world can add is *why* a measure is blind, since here the student's rules are known:

- **Gates.** Telling pays here too: a student that is told the method may write it out in its own words, and then keeps it. As in
  the paper the gain does not see the difference; only the gates make telling costly.
- **Hidden turns.** A condition matters when the reward can be earned without it. This student forgets what it did not say
  itself; with the tutor's turns in view, a cue that failed in the dialogue still answers the post-test.
- **Transfer problem.** With the gates on a negative result: what this student's own words carry to the tutored problem they
  carry to its twin. Without gates it depends on what the tutor happens to find: naming the method, which a student writes out and
  carries over, or telling the answer, which it only repeats. The second earns as much on the tutored problem and next to nothing
  on its twin; only the transfer problem tells the two apart.
"""


def _reading(arms: Sequence[Arm], others: Sequence[Sequence[Arm]]) -> str:
    """What the results say about the paper, and whether it is the same for every build."""
    text = _TABLE_2
    if others:
        same = all(
            [f.holds for f in findings(arms)][:5] == [f.holds for f in findings(other)][:5]
            for other in others
        )
        text += (
            "\nThe five core claims come out the same with every tutor and student, on the seeds that were run.\n"
            if same
            else "\n**The five core claims do not all come out the same with every tutor and student: see the tables.**\n"
        )
    return text

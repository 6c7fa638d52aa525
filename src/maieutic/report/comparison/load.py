"""From folders to arms: the transcripts of held-out evaluations, what they were measured with, curves and costs.

A folder is a run with evaluation transcripts (its last evaluation counts, or the step that is asked for), a folder that ``maieutic
sweep`` wrote, or a folder of ``maieutic evaluate`` with ``environment.json``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maieutic.config import ENV_TIMING, EnvSpec, JudgeSpec, RewardSpec, StudentSpec
from maieutic.errors import MaieuticError, RunFolderError
from maieutic.report.comparison.samples import Sample, sample
from maieutic.report.run_data import RunData, _read_metrics, _read_recipe
from maieutic.report.summary import Line
from maieutic.transcripts import read_transcripts, transcript_steps

CARD = "arm.json"
"""Written by ``maieutic sweep`` beside the transcripts of an evaluation: arm, seed, training run, seconds."""
PROMPTED = "maieutic.env.prompted:PromptedEnvironment"


class ComparisonError(MaieuticError):
    """Arms that must not be compared, or a folder that holds no evaluation: says which, and what to do."""

    exit_code = 2


@dataclass(slots=True)
class Evaluated:
    """One evaluation of one tutor."""

    path: Path
    arm: str
    seed: int | None
    step: int | None
    sees_solution: bool
    tutor_prompt: str
    """``environment``: the environment's own; else the name of the prompt that the arm was given."""
    settings: dict[str, Any]
    """What the numbers were measured with: environment, students, judge, reward."""
    samples: list[Sample]
    trained: RunData | None = None
    """The training run, for curves and costs."""
    card: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Arm:
    """One way of tutoring: all its evaluations (seeds)."""

    name: str
    runs: list[Evaluated]

    @property
    def samples(self) -> list[Sample]:
        return [s for run in self.runs for s in run.samples]

    @property
    def sees_solution(self) -> bool:
        return self.runs[0].sees_solution


def load_arms(folders: Sequence[Path], *, step: int | None = None) -> list[Arm]:
    """Arms in the order in which they first occur; runs of one arm are its seeds (of one seed: arms named by their folders).

    ``step``: the evaluation after this step instead of the last one. Raises :class:`ComparisonError` for a folder without an
    evaluation, and when the same folder is named twice.
    """
    if len({Path(f).resolve() for f in folders}) < len(folders):
        raise ComparisonError("a folder is named twice: its dialogues would count twice")
    runs = [load_evaluated(Path(folder), step) for folder in folders]
    arms: dict[str, Arm] = {}
    for run, name in zip(runs, _names(runs), strict=True):
        arms.setdefault(name, Arm(name, [])).runs.append(run)
    for arm in arms.values():
        if len({run.sees_solution for run in arm.runs}) > 1:
            raise ComparisonError(
                f"arm {arm.name}: its tutor sees the solution in some runs and not in others"
            )
    return list(arms.values())


def _names(runs: Sequence[Evaluated]) -> list[str]:
    """The arm of each run. Two runs of one name and seed are no two seeds of it: their folders tell such arms apart."""
    taken = Counter((run.arm, run.seed) for run in runs)
    torn = {arm for (arm, _), n in taken.items() if n > 1}
    resolved = [run.path.resolve().parts for run in runs]
    # As many of the last folders as it takes to tell all of them apart.
    depth = next(
        (d for d in range(1, max(map(len, resolved)) + 1) if len({p[-d:] for p in resolved}) == len(runs)), 1
    )
    return [
        f"{run.arm} ({'/'.join(parts[-depth:])})" if run.arm in torn else run.arm
        for run, parts in zip(runs, resolved, strict=True)
    ]


def load_evaluated(folder: Path, step: int | None = None) -> Evaluated:
    """One folder (see the module). Raises :class:`ComparisonError`, or what reading transcripts raises."""
    if not folder.is_dir():
        raise RunFolderError(f"there is no run folder {folder}")
    if (folder / "environment.json").is_file():
        return _from_suite(folder)
    steps = transcript_steps(folder, "eval")
    if not steps:
        raise ComparisonError(
            f"{folder} holds no evaluation transcripts (set eval.every, or name another folder)"
        )
    if step is not None and step not in steps:
        raise ComparisonError(f"{folder} has no evaluation after step {step}; there are {steps}")
    at = steps[-1] if step is None else step
    data = RunData(folder)
    _read_recipe(data)
    if not data.recipe:
        raise ComparisonError(f"{folder}: {data.notices[0] if data.notices else 'no recipe.yaml'}")
    card = _card(folder)
    lines = list(read_transcripts(folder, "eval", [at]))
    settings, prompt = _settings(
        data.get("env") or {},
        data.get("students") or [],
        data.get("judge") or {},
        data.get("reward") or {},
        str(folder),
    )
    samples = _samples(lines, settings["students"], folder)
    trained = Path(card["trained"]) if card.get("trained") else None
    if trained is not None and not trained.is_absolute():
        trained = folder / trained
    return Evaluated(
        path=folder,
        arm=str(card.get("arm") or data.get("arm") or folder.name),
        seed=card.get("seed", data.get("seed")),
        step=at,
        sees_solution=_sees(bool(settings["env"]["tutor_sees_solution"]), samples, folder),
        tutor_prompt=prompt,
        settings=settings,
        samples=samples,
        trained=_run(trained) if trained is not None else None if card else _run(folder),
        card=card,
    )


def _from_suite(folder: Path) -> Evaluated:
    from maieutic.evaluation.results import read_result

    data = read_result(folder / "environment.json")
    lines = [{**s["episode"], "extra_tests": s.get("extra_tests") or {}} for s in data["samples"]]
    s = data["settings"]
    settings, prompt = _settings(s["env"], s["students"], s["gates"], s["reward"], str(folder))
    samples = _samples(lines, settings["students"], folder)
    return Evaluated(
        path=folder,
        arm=str(data["arm"]) if prompt == "environment" else f"{data['arm']} ({prompt})",
        seed=s.get("seed"),
        step=None,
        sees_solution=_sees(bool(settings["env"]["tutor_sees_solution"]), samples, folder),
        tutor_prompt=prompt,
        settings=settings,
        samples=samples,
        card={"costs": data.get("costs") or {}},
    )


def _samples(lines: Sequence[Line], students: Sequence[dict[str, Any]], folder: Path) -> list[Sample]:
    models = {str(s["name"]): str(s["model"]) for s in students}
    if not lines:
        raise ComparisonError(f"{folder}: the evaluation holds no dialogue: there is nothing to compare")
    out = []
    for number, line in enumerate(lines, start=1):
        try:
            out.append(sample(line, models))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ComparisonError(
                f"{folder}: dialogue {number} ({line.get('id')}) is no episode ({error!r}): evaluate again, or mend the line"
            ) from error
    return out


def _sees(told: bool, samples: Sequence[Sample], folder: Path) -> bool:
    """What the recipe says, held against every transcript."""
    shown = [s.line["dialogue"]["solution"] is not None for s in samples]
    if any(one != told for one in shown):
        raise ComparisonError(
            f"{folder}: the recipe says that the tutor {'sees' if told else 'does not see'} the solution, "
            f"{sum(shown)} of {len(shown)} transcripts show that it did"
        )
    return told


def _settings(
    env: dict[str, Any], students: list[Any], judge: dict[str, Any], reward: dict[str, Any], where: str
) -> tuple[dict[str, Any], str]:
    """Settings of the measurement with defaults filled in and without what cannot change a number, and the tutor's prompt."""
    try:
        kept = {key: value for key, value in env.items() if key not in ENV_TIMING}
        full = EnvSpec.model_validate(kept).model_dump(mode="json", exclude=ENV_TIMING)
        out = {
            "env": full,
            # Where a model is served changes no number.
            "students": [
                StudentSpec.model_validate(_but_engine(s)).model_dump(mode="json", exclude={"engine"})
                for s in students
            ],
            "judge": JudgeSpec.model_validate(_but_engine(judge)).model_dump(mode="json", exclude={"engine"}),
            "reward": RewardSpec.model_validate(reward).model_dump(mode="json"),
        }
    except (ValidationError, TypeError, AttributeError) as error:
        raise ComparisonError(f"{where}: its settings cannot be read: {error}") from error
    prompt = "environment"
    if full["kind"] == PROMPTED:
        prompt = str(full["options"].get("tutor_prompt", prompt))
        full |= {"kind": "tutoring", "options": {}}
    return out, prompt


def _but_engine(section: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in section.items() if k != "engine"}


def _card(folder: Path) -> dict[str, Any]:
    path = folder / CARD
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ComparisonError(f"{path}: cannot be read: {error}") from error
    numbers = ("seed", "train_seconds", "evaluation_seconds", "gpu_seconds")
    if not isinstance(data, dict) or any(not isinstance(data.get(k), int | float | None) for k in numbers):
        raise ComparisonError(f"{path}: not what `maieutic sweep` writes ({', '.join(numbers)} are numbers)")
    return data


def _run(folder: Path) -> RunData | None:
    if not folder.is_dir():
        return None
    data = RunData(folder)
    _read_recipe(data)
    _read_metrics(data)
    return data

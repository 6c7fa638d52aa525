"""What a report reads from a run folder: recipe, metrics and transcripts, with a notice for everything that is amiss."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from maieutic.env.base import Phase
from maieutic.errors import RunFolderError, TranscriptError
from maieutic.report.summary import Line, summarise
from maieutic.transcripts import read_transcripts, transcript_steps

STEP_KEYS = ("train/step", "step")
"""Names of the step axis in a metrics row, the first that is there counts."""
_LARGEST = 1e300
PHASE_PREFIX = {"train": "rollout/", "eval": "eval/"}


@dataclass(slots=True)
class Moment:
    """One column of the table: the episodes of one phase of one step (``lines`` is empty when only metrics are left)."""

    phase: Phase
    step: int
    values: dict[str, float]
    lines: list[Line] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{'held out, after' if self.phase == 'eval' else 'training,'} step {self.step}"


@dataclass(slots=True)
class RunData:
    """A run as a report sees it. ``rows``: metrics by line, as (step, {name: value or None})."""

    path: Path
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    first: Moment | None = None
    last: Moment | None = None
    notices: list[str] = field(default_factory=list)

    def get(self, dotted: str, default: Any = None) -> Any:
        """A value of the recipe by its dotted key."""
        node: Any = self.recipe
        for key in dotted.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node

    @property
    def name(self) -> str:
        return str(self.get("name", self.path.resolve().name))

    @property
    def steps_done(self) -> int:
        """Complete training steps: the largest step of a row that holds more than an evaluation."""
        return max((step for step, row in self.rows if not all(_of_eval(name) for name in row)), default=0)

    @property
    def max_steps(self) -> int | None:
        value = self.get("training.max_steps")
        return value if isinstance(value, int) else None

    @property
    def status(self) -> str:
        """One sentence: nothing yet, in the middle, or done."""
        done, planned = self.steps_done, self.max_steps
        if done == 0:
            return "No training step is complete yet."
        if planned is None:
            return f"{done} steps are complete; the recipe does not say how many were planned."
        if done < planned:
            return f"Not finished: {done} of {planned} steps are complete (still running, stopped or killed)."
        return f"Finished: {done} of {planned} steps."


def _of_eval(name: str) -> bool:
    return name.startswith("eval/") or name == "time/eval"


def load_run(run: Path) -> RunData:
    """Read a run folder. A folder without metrics or transcripts is a run that has only begun; what is broken becomes a notice.

    Raises :class:`~maieutic.errors.RunFolderError` when there is no such folder.
    """
    run = Path(run)
    if not run.is_dir():
        raise RunFolderError(f"there is no run folder {run}: name the folder that holds metrics.jsonl")
    data = RunData(run)
    _read_recipe(data)
    _read_metrics(data)
    phase: Phase = (
        "eval"
        if transcript_steps(run, "eval")
        or any(name.startswith("eval/") for _, row in data.rows for name in row)
        else "train"
    )
    prefix = PHASE_PREFIX[phase]
    in_metrics = {step for step, row in data.rows if any(name.startswith(prefix) for name in row)}
    steps = sorted(in_metrics | set(transcript_steps(run, phase)))
    if steps:
        data.last = _moment(data, phase, steps[-1])
        data.first = _moment(data, phase, steps[0]) if len(steps) > 1 else None
    return data


def _read_recipe(data: RunData) -> None:
    path = data.path / "recipe.yaml"
    if not path.is_file():
        data.notices.append("There is no recipe.yaml: models, arm and planned steps are not known.")
        return
    data.recipe_text = path.read_text(encoding="utf-8", errors="replace")
    try:
        parsed = yaml.safe_load(data.recipe_text)
    except yaml.YAMLError as error:
        data.notices.append(f"recipe.yaml cannot be read: {error}")
        return
    if isinstance(parsed, dict):
        data.recipe = parsed
    else:
        data.notices.append("recipe.yaml does not hold a recipe.")


def _read_metrics(data: RunData) -> None:
    """Fill ``rows``; a value that is not a finite number is None, so that it shows as a gap."""
    path = data.path / "metrics.jsonl"
    if not path.is_file():
        data.notices.append("There is no metrics.jsonl: no step was recorded.")
        return
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw)
            step = int(next(row[key] for key in STEP_KEYS if key in row))
        except (ValueError, TypeError, OverflowError, StopIteration):
            data.notices.append(
                f"metrics.jsonl, line {number} is cut or broken and left out (a kill can cut the last line)."
            )
            continue
        values = {name: _finite(value) for name, value in row.items() if name not in (*STEP_KEYS, "time")}
        data.rows.append((step, values))
    data.rows.sort(key=lambda item: item[0])


def _finite(value: Any) -> float | None:
    # Compared, not converted: JSON has whole numbers that no float holds, and a curve's range must be finite too.
    if isinstance(value, int | float) and -_LARGEST < value < _LARGEST:
        return float(value)
    return None


def _moment(data: RunData, phase: Phase, step: int) -> Moment:
    """The numbers of a moment from its transcripts, or from the metrics where there are none; a difference is a notice."""
    lines: list[Line] = []
    try:
        for line in read_transcripts(data.path, phase, [step]):
            line.pop("tokens", None)
            lines.append(line)
        values = summarise(lines)
    except (TranscriptError, KeyError, TypeError, AttributeError) as error:
        what = (
            error
            if isinstance(error, TranscriptError)
            else f"step {step} ({phase}): a line is no episode ({error!r})"
        )
        data.notices.append(f"Transcripts left out: {what}")
        lines = []
    prefix = PHASE_PREFIX[phase]
    logged = {
        name.removeprefix(prefix): value
        for at, row in data.rows
        if at == step
        for name, value in row.items()
        if name.startswith(prefix) and value is not None
    }
    if not lines:
        if logged:
            data.notices.append(
                f"Step {step} ({phase}) has no readable transcripts: its numbers are from metrics.jsonl."
            )
        return Moment(phase, step, logged)
    for name, value in values.items():
        if name in logged and not math.isclose(value, logged[name], rel_tol=1e-6, abs_tol=1e-9):
            data.notices.append(
                f"Step {step} ({phase}): {name} is {value:g} in the transcripts, but {logged[name]:g} in metrics.jsonl."
            )
    return Moment(phase, step, values, lines)

"""Where numbers go: ``metrics.jsonl`` is the record; Weights & Biases and TensorBoard are views of it.

Every row carries ``train/step``, the one explicit step of all views. Trackers are created through accelerate, on the main
process; only the main process may call :meth:`Trackers.log`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
from collections.abc import Mapping
from io import TextIOWrapper
from typing import Any

import yaml

from maieutic.config import Recipe
from maieutic.errors import MissingExtraError, RunFolderError
from maieutic.recipe import NOT_SCIENCE, recipe_hash
from maieutic.training.alerts import TRAINING_ROW, Alert, AlertMonitor
from maieutic.training.run_folder import RunFolder, named_os_errors, write_atomically
from maieutic.training.transcript_views import TranscriptTables

log = logging.getLogger(__name__)

STEP = "train/step"
# Also what may change on resume: the run stays in its group.
_NOT_EXPERIMENT = (*NOT_SCIENCE, "arm", "seed", "spending_limit_usd", "eval", "training.max_steps")
_SECRET = re.compile(
    r"(api_?key|secret|password|passwd|credential|authorization|bearer|(hf|access|auth)_token)", re.I
)
Number = float | int


class MetricsFile:
    """Append-only ``metrics.jsonl``: one JSON object a row, flushed to the operating system before :meth:`write` returns."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.metrics
        with named_os_errors(str(self._path)):
            self._file: TextIOWrapper | None = self._path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Number]) -> None:
        """Append a row; values that are not finite are written as null (JSON has no NaN)."""
        if self._file is None:
            raise RunFolderError(f"{self._path} is closed")
        clean = {k: (v if math.isfinite(v) else None) for k, v in row.items()}
        with named_os_errors(str(self._path)):
            self._file.write(json.dumps(clean) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; safe to call twice. Rows are flushed as they are written: what a full disk refused then has been
        reported, and closing does not raise it again in place of the run's own error."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                log.error("%s could not be closed: %s", self._path, error.strerror or error)


class Trackers:
    """The metrics file plus whatever ``tracking`` switches on.

    ``step``: last step already recorded (of the checkpoint that is resumed, else 0).
    """

    def __init__(self, accelerator: Any, recipe: Recipe, folder: RunFolder, *, step: int = 0) -> None:
        self._accelerator = accelerator
        self._alerts = AlertMonitor(recipe.tracking.alerts)
        self._alerts.replay(_rows(folder))
        self._tables = TranscriptTables(folder.root, recipe.tracking.transcripts)
        self._file = MetricsFile(folder)
        self._open = True
        try:
            self._start(recipe, folder, step)
        except BaseException:
            self.finish(1)
            raise

    def _start(self, recipe: Recipe, folder: RunFolder, step: int) -> None:
        spec = recipe.tracking
        kinds = trackers_of(recipe)
        if not kinds:
            return
        kwargs: dict[str, Any] = {}
        if "wandb" in kinds:
            _require("wandb")
            kwargs["wandb"] = wandb_settings(recipe, folder)
        if "tensorboard" in kinds:
            _require("tensorboard")
            # Events of a killed run that are newer than the checkpoint disappear from view.
            kwargs["tensorboard"] = {"purge_step": step + 1} if step else {}
        self._accelerator.init_trackers(spec.project, init_kwargs=kwargs)
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":
                tracker.run.define_metric(STEP)
                tracker.run.define_metric("*", step_metric=STEP)
                tracker.store_init_configuration(public_config(recipe))
            elif tracker.name == "tensorboard" and not step:
                text = yaml.safe_dump(public_config(recipe), sort_keys=False)
                tracker.writer.add_text("recipe", f"```yaml\n{text}```", global_step=0)

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """Record one row at ``step``, with the alerts' flags, and say what fires; the transcripts' views follow.

        Names that start with ``_`` are refused (they belong to the trackers).
        """
        bad = [k for k in values if k.startswith("_")]
        if bad:
            raise ValueError(f"metric names {bad} start with an underscore")
        row: dict[str, Number] = {STEP: step, **values}
        flags, alerts = self._alerts.observe(row)
        row |= flags
        self._file.write(row)
        finite = {k: v for k, v in row.items() if math.isfinite(v)}
        for tracker in self._accelerator.trackers:
            tracker.log(finite, step=step)
        for alert in alerts:
            self._raise_alert(alert)
        phase = "train" if TRAINING_ROW in row else "eval" if "eval/episodes" in row else None
        if phase is not None:
            self._tables.log(self._accelerator.trackers, phase, step)

    def _raise_alert(self, alert: Alert) -> None:
        log.warning("ALERT %s: %s", alert.title, alert.text)
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":
                tracker.run.alert(title=alert.title, text=alert.text, level="WARN", wait_duration=0)
            elif tracker.name == "tensorboard":
                tracker.writer.add_text(
                    f"alerts/{alert.name}", f"**{alert.title}**: {alert.text}", alert.step
                )

    def flush(self) -> None:
        """Everything so far is on disk, for whoever reads the folder next."""
        for tracker in self._accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.writer.flush()

    def finish(self, exit_code: int) -> None:
        """Close everything; called once on every way out, safe to call twice."""
        if not self._open:
            return
        self._open = False
        try:
            for tracker in self._accelerator.trackers:
                if tracker.name == "wandb":
                    tracker.run.finish(exit_code=exit_code)
                    _wait_for_wandb()
                else:
                    tracker.finish()
        finally:
            self._accelerator.trackers = []
            self._file.close()


def _rows(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows that a resumed run has kept; none for a new one."""
    if not folder.metrics.is_file():
        return []
    with named_os_errors(str(folder.metrics)):
        lines = folder.metrics.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def trackers_of(recipe: Recipe) -> list[str]:
    """Names for ``Accelerator(log_with=…)``."""
    spec = recipe.tracking
    return (["wandb"] if spec.wandb != "off" else []) + (["tensorboard"] if spec.tensorboard else [])


def wandb_settings(recipe: Recipe, folder: RunFolder) -> dict[str, Any]:
    """Keyword arguments of ``wandb.init``: a resumed run keeps the id that its folder holds."""
    import wandb

    spec = recipe.tracking
    file = folder.root / "wandb_id"
    if not file.exists():
        with named_os_errors(str(file)):
            write_atomically(file, secrets.token_hex(6))
    offline = spec.wandb == "offline" or recipe.offline
    return {
        "id": file.read_text(encoding="utf-8").strip(),
        "name": recipe.name,
        "dir": str(folder.root),
        "mode": "offline" if offline else "online",
        "resume": None if offline else "allow",  # an offline run cannot ask the server what it has
        # Seeds of one experiment belong together; arms of a comparison do where the recipes name a group.
        "group": spec.group or f"{recipe.arm}-{recipe_hash(recipe, _NOT_EXPERIMENT)[:8]}",
        "tags": [*spec.tags, recipe.arm],
        "save_code": False,
        "settings": wandb.Settings(console="off", silent=not os.isatty(2)),
    }


def public_config(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe with values of secret-looking keys removed (users' ``options`` may hold them)."""

    def scrub(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                # the name of a variable is no secret
                k: "(removed)" if _SECRET.search(str(k)) and k != "api_key_env" else scrub(v)
                for k, v in value.items()
            }
        return [scrub(v) for v in value] if isinstance(value, list) else value

    return scrub(recipe.model_dump(mode="json"))


def _wait_for_wandb() -> None:
    """W&B's own process writes the run's file, and may still do so when ``finish`` returns: a process that leaves at once
    (ranks do, with ``os._exit``) would lose the last rows."""
    import wandb

    wandb.teardown()


def _require(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise MissingExtraError(package, "dev")

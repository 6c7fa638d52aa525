"""The folder of a run: ``runs/<name>/{recipe.yaml, metrics.jsonl, transcripts/, checkpoints/, report.html, log.txt}``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maieutic.config import Recipe
from maieutic.errors import RunFolderError
from maieutic.recipe import dump_recipe
from maieutic.transcripts import TranscriptWriter

# What a run that failed before its first number leaves: another try may use the folder.
_START_UP_FILES = ("recipe.yaml", "log.txt", "wandb", "wandb_id", "usage.json", "push", "endpoints")
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


@contextmanager
def named_os_errors(what: str, error: type[Exception] = RunFolderError) -> Iterator[None]:
    """Turn an OSError (full disk, no permission) into ``error`` that says what could not be written and why."""
    try:
        yield
    except OSError as cause:
        where = f" ({cause.filename})" if cause.filename else ""
        raise error(f"cannot write {what}{where}: {cause.strerror or cause}") from cause


class RunFolder:
    """Paths of a run, and the few operations on the folder as a whole."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.recipe = self.root / "recipe.yaml"
        self.metrics = self.root / "metrics.jsonl"
        self.transcripts = self.root / "transcripts"
        self.checkpoints = self.root / "checkpoints"
        self.report = self.root / "report.html"
        self.log = self.root / "log.txt"
        self.spending = self.root / "usage.json"

    @classmethod
    def of(cls, recipe: Recipe) -> RunFolder:
        """``<output_dir>/<name>``."""
        return cls(Path(recipe.output_dir) / recipe.name)

    def prepare(self, recipe: Recipe, *, resuming: bool) -> None:
        """Create the folder and write the resolved recipe.

        Raises :class:`~maieutic.errors.RunFolderError` when it cannot be written, or when it already holds a run that
        is not being resumed: two runs never mix in one folder.
        """
        if not resuming and self.root.exists() and self._holds_a_run(recipe.tracking.project):
            raise RunFolderError(
                f"{self.root} already holds a run: continue it with resume=auto and the settings it "
                f"had (they are in {self.root / 'recipe.yaml'}), or start another with name=<new name>"
            )
        with named_os_errors(f"the run folder {self.root}"):
            for folder in (self.root, self.transcripts, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.recipe, dump_recipe(recipe))

    def _holds_a_run(self, project: str) -> bool:
        """``project``: trackers open a folder of this name before the first number."""
        if not self.root.is_dir():
            raise RunFolderError(f"{self.root} is not a folder: choose another output_dir or name")
        begun = {*_START_UP_FILES, project}
        with named_os_errors(f"the run folder {self.root}"):
            return any(_has_content(path) for path in self.root.iterdir() if path.name not in begun)

    def usage(self) -> dict[str, dict[str, float]]:
        """What the run's servers were asked so far, by role; empty when nothing was kept."""
        if not self.spending.exists():
            return {}
        with named_os_errors(str(self.spending)):
            text = self.spending.read_text(encoding="utf-8")
        try:
            state: dict[str, dict[str, float]] = json.loads(text)
        except ValueError as error:
            raise RunFolderError(f"{self.spending}: not JSON ({error}); repair or remove it") from error
        return state

    def write_usage(self, state: dict[str, dict[str, float]]) -> None:
        """Keep what servers were asked (nothing is written where there are none)."""
        if state:
            with named_os_errors(str(self.spending)):
                write_atomically(self.spending, json.dumps(state, indent=1))

    def rewind(self, step: int, *, eval_done: bool) -> None:
        """Drop every metrics row and transcript that is newer than a checkpoint, so that none occurs twice.

        ``step``: last complete step; the row of the evaluation after it stays only when ``eval_done`` (its transcripts
        are one file, which playing it again replaces).
        """

        def newer(record: dict[str, Any]) -> bool:
            at = int(record["train/step"])
            if at != step or eval_done:
                return at > step
            return any(key.startswith("eval/") for key in record)

        if self.metrics.exists():
            _keep_lines(self.metrics, lambda record: not newer(record))
        TranscriptWriter(self.root).discard_after(step)

    @contextmanager
    def logging(self, *, append: bool) -> Iterator[None]:
        """Copy the log of this package to ``log.txt`` while the context lasts."""
        with named_os_errors(str(self.log)):
            handler = logging.FileHandler(self.log, mode="a" if append else "w", encoding="utf-8")
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logger = logging.getLogger("maieutic")
        level = logger.level
        logger.addHandler(handler)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            handler.close()


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` beside ``path``, fsync, rename: readers see the old file or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _keep_lines(path: Path, keep: Any) -> None:
    """Rewrite a JSONL file with the lines that ``keep`` accepts; a last line cut by a kill is dropped."""
    lines, kept = path.read_text(encoding="utf-8").splitlines(keepends=True), []
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:
                continue
            raise RunFolderError(
                f"{path}, line {number + 1}: not JSON ({error.msg}); repair or remove it"
            ) from error
        if keep(record):
            kept.append(line if line.endswith("\n") else line + "\n")
    if kept != lines:
        with named_os_errors(str(path)):
            write_atomically(path, "".join(kept))

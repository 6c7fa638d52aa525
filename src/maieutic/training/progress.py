"""What a person sees while a run goes on: a live bar with ETA on a terminal, plain lines anywhere else.

A log file or a scheduler's output gets no control characters: the plain form goes through :mod:`logging`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from maieutic.headway import eta

log = logging.getLogger("maieutic.train")

SHOWN = (
    "rollout/reward",
    "rollout/transfer_gain",
    "rollout/leak_rate",
    "rollout/excluded_share",
    "train/loss",
    "train/grad_norm",
)
"""Metrics of the one-line summary of a step, in this order, where present."""


class Reporter(Protocol):
    """What the loop tells a display."""

    def episodes(self, phase: str, step: int, done: int, total: int) -> None: ...

    def step(self, step: int, row: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def summary(step: int, max_steps: int, row: Mapping[str, float]) -> str:
    """One line that says how a step went."""
    parts = [f"{name.split('/')[-1]} {row[name]:.4g}" for name in SHOWN if name in row]
    return f"step {step}/{max_steps}: " + ", ".join(parts)


class PlainReporter:
    """Lines through logging: one a step, and one each quarter of a rollout."""

    def __init__(self, max_steps: int, done: int) -> None:
        self._max, self._first, self._start, self._quarter = max_steps, done, time.monotonic(), 0

    def episodes(self, phase: str, step: int, done: int, total: int) -> None:
        """Say how far a rollout is."""
        quarter = 4 * done // max(total, 1)
        if quarter < self._quarter or done == 0:
            self._quarter = 0
        if quarter > self._quarter:
            self._quarter = quarter
            log.info("%s rollout of step %d: %d of %d episodes", phase, step, done, total)

    def step(self, step: int, row: Mapping[str, float]) -> None:
        """Say how a step went and when the run will end."""
        each = (time.monotonic() - self._start) / max(step - self._first, 1)
        log.info("%s, ETA %s", summary(step, self._max, row), eta(each * (self._max - step)))

    def message(self, text: str) -> None:
        """Say something else."""
        log.info("%s", text)

    def close(self) -> None:
        """Nothing to free."""


class LiveReporter:
    """Two bars on a terminal: steps with ETA, and the episodes of the rollout in flight."""

    def __init__(self, max_steps: int, done: int, console: Console) -> None:
        self._max = max_steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
        )
        self._steps = self._progress.add_task("steps", total=max_steps, completed=done)
        self._episodes = self._progress.add_task("episodes", total=None)
        self._progress.start()

    def episodes(self, phase: str, step: int, done: int, total: int) -> None:
        """Move the lower bar."""
        if done == 0:
            self._progress.reset(self._episodes, description=f"{phase} episodes, step {step}", total=total)
        self._progress.update(self._episodes, completed=done, total=total)

    def step(self, step: int, row: Mapping[str, float]) -> None:
        """Move the upper bar and print the step's line above it."""
        self._progress.update(self._steps, completed=step)
        self._progress.console.print(summary(step, self._max, row), highlight=False)

    def message(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stop drawing (and show the cursor again)."""
        self._progress.stop()


class SilentReporter:
    """For ranks other than 0."""

    def episodes(self, phase: str, step: int, done: int, total: int) -> None:
        """Nothing."""

    def step(self, step: int, row: Mapping[str, float]) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def reporter(max_steps: int, done: int, *, main: bool, console: Console | None = None) -> Reporter:
    """The display that fits where output goes."""
    if not main:
        return SilentReporter()
    console = console or Console(stderr=True)
    return LiveReporter(max_steps, done, console) if console.is_terminal else PlainReporter(max_steps, done)


def evaluation_table(first: Mapping[str, float], last: Mapping[str, float], steps: tuple[int, int]) -> Table:
    """Held-out numbers before and after training, side by side."""
    table = Table(title="Held-out evaluation")
    for name in ("metric", f"step {steps[0]}", f"step {steps[1]}", "change"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for key in sorted(first.keys() & last.keys()):
        a, b = first[key], last[key]
        table.add_row(key, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}")
    return table

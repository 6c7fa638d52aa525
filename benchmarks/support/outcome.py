"""The last line of a benchmark: its figures with the spread of their runs, and the checks that keep them honest."""

from __future__ import annotations

import json
import operator
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Figure:
    """One number of the table: what was measured, against what, in each run.

    ``target``: ``"<= 1.5"`` or ``">= 0.95"``, held against the median; None where a number is reported without one.
    """

    row: str
    """Of the table in docs/performance.md: ``1``, ``1b``, …"""
    measure: str
    against: str
    """The peer or limit that ran beside it, ``""`` for an absolute number."""
    unit: str
    """``ratio``, ``ms``, ``s``, ``MiB``, …"""
    runs: Sequence[float]
    target: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def met(self) -> bool | None:
        """The median reaches the target; None where there is none."""
        if self.target is None:
            return None
        sign, limit = self.target.split()
        return _COMPARE[sign](self.median, float(limit))


@dataclass
class Outcome:
    """What one benchmark found. ``checks``: what was verified in the same run, by name, with the number that was compared."""

    benchmark: str
    figures: list[Figure]
    checks: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def emit(self) -> None:
        """Print the JSON line: the last that a benchmark prints."""
        figures = [asdict(f) | {"median": f.median, "met": f.met} for f in self.figures]
        for figure in figures:
            figure["runs"] = [float(f"{x:.4g}") for x in figure["runs"]]
            figure["median"] = float(f"{figure['median']:.4g}")
        machine = {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "python": platform.python_version(),
                   "torch": torch.__version__, "load": round(os.getloadavg()[0], 1)}  # fmt: skip
        print(
            json.dumps(
                {
                    "benchmark": self.benchmark,
                    "figures": figures,
                    "checks": self.checks,
                    "settings": self.settings,
                    "machine": machine,
                },
                ensure_ascii=False,
            )
        )


def check(passed: bool, what: str) -> None:
    """End the benchmark when a result is wrong: no speed is bought with an error."""
    if not passed:
        raise SystemExit(f"wrong result, so no figure: {what}")

"""Alerts: a number that went wrong is said once for each episode of trouble, in the log, in the trackers and in the metrics.

An alert *fires* when its value has stayed at ``fire`` or above for ``patience`` steps in a row; it is *over* when the value has
stayed below ``clear`` for as many. In between nothing is said again. Its state is a function of the rows so far, so a resumed run
reads it back from ``metrics.jsonl`` and goes on as if it had not been stopped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from maieutic.config import AlertsSpec, ThresholdSpec

Number = float | int | None
Name = Literal["leak", "unknown", "blank", "kl", "variance"]
PREFIX = "alert/"
TRAINING_ROW = "rollout/episodes"
"""The name that tells a training step's row from an evaluation's."""
_LEAK_WINDOW = 3

_WHAT: dict[Name, tuple[str, str, str]] = {
    # name: metric, title (W&B: below 64 characters), what it means
    "leak": ("rollout/leak_rate", "Leak rate is rising", "above the lowest that it was (mean of 3 steps)"),
    "unknown": ("rollout/unknown_share", "Verdicts are missing", "of the episodes have an unknown verdict"),
    "blank": (
        "rollout/blank_turn_rate",
        "Blank tutor turns",
        "of the tutor turns showed the student nothing",
    ),
    "kl": ("train/kl_mu_pi", "KL(mu || pi) is large", "nats a token within one step: updates are too large"),
    "variance": (
        "train/flat_group_share",
        "Reward variance collapsed",
        "of the groups have equal rewards only",
    ),
}
NAMES: tuple[Name, ...] = tuple(_WHAT)


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert that fires at ``step``."""

    name: Name
    step: int
    title: str
    text: str


@dataclass(slots=True)
class _State:
    active: bool = False
    streak: int = 0
    """Steps in a row that spoke for a change of ``active``."""
    lowest: float = math.inf
    """``leak``: the lowest mean of the window so far."""
    window: deque[float] = field(default_factory=lambda: deque(maxlen=_LEAK_WINDOW))


class AlertMonitor:
    """Watches the rows of training steps in their order; rows of evaluations pass by."""

    def __init__(self, spec: AlertsSpec) -> None:
        self._patience = spec.patience
        self._thresholds: dict[Name, ThresholdSpec] = {
            name: threshold for name in NAMES if (threshold := getattr(spec, name)) is not None
        }
        self._states = {name: _State() for name in self._thresholds}

    def replay(self, rows: Iterable[Mapping[str, Number]]) -> None:
        """Take in rows of the past without saying anything."""
        for row in rows:
            self.observe(row)

    def observe(self, row: Mapping[str, Number]) -> tuple[dict[str, float], list[Alert]]:
        """``alert/<name>`` for the row (1 during an episode of trouble, else 0), and what fires now.

        A value that is absent or not finite changes nothing. Evaluations get no flags.
        """
        if TRAINING_ROW not in row:
            return {}, []
        fired = []
        for name, threshold in self._thresholds.items():
            state, value = self._states[name], self._value(name, row)
            if value is None:
                continue
            turns = value < threshold.clear if state.active else value >= threshold.fire
            state.streak = state.streak + 1 if turns else 0
            if state.streak >= self._patience:
                state.active, state.streak = not state.active, 0
                if state.active:
                    fired.append(_alert(name, value, threshold, int(row.get("train/step") or 0)))
        return {PREFIX + name: float(s.active) for name, s in self._states.items()}, fired

    def _value(self, name: Name, row: Mapping[str, Number]) -> float | None:
        value = row.get(_WHAT[name][0])
        if value is None or not math.isfinite(value):
            return None
        if name != "leak":
            return float(value)
        state = self._states[name]
        state.window.append(float(value))
        if len(state.window) < _LEAK_WINDOW:
            return None  # one step's rate is mostly chance
        mean = sum(state.window) / _LEAK_WINDOW
        state.lowest = min(state.lowest, mean)
        return mean - state.lowest


def _alert(name: Name, value: float, threshold: ThresholdSpec, step: int) -> Alert:
    metric, title, meaning = _WHAT[name]
    text = (
        f"step {step}: {metric}: {value:.3g} {meaning}; alert at {threshold.fire:g}, over below {threshold.clear:g} "
        f"(tracking.alerts.{name}). What to do: docs/training-health.md"
    )
    return Alert(name, step, title, text)

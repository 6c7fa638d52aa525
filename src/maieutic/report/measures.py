"""Names, units and directions of the measures that a report shows; the names are those of ``docs/metrics.md``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "signed", "count", "tokens", "seconds", "plain"]


@dataclass(frozen=True, slots=True)
class Measure:
    """How a number is named and written. ``better``: the direction that is an improvement, None where neither is."""

    label: str
    unit: Unit = "plain"
    better: Literal["up", "down"] | None = None


MEASURES: dict[str, Measure] = {
    "reward": Measure("Reward", "signed", "up"),
    "transfer_gain": Measure("Gain, transfer problem", "signed", "up"),
    "same_gain": Measure("Gain, source problem", "signed", "up"),
    "pre": Measure("Solve rate before", "share"),
    "post": Measure("Solve rate after", "share", "up"),
    "leak_rate": Measure("Leakage rejected", "share", "down"),
    "correctness_reject_rate": Measure("Correctness rejected", "share", "down"),
    "unknown_share": Measure("Verdict unknown", "share", "down"),
    "excluded_share": Measure("Excluded", "share", "down"),
    "blank_turn_rate": Measure("Blank tutor turns", "share", "down"),
    "truncated_turn_share": Measure("Truncated tutor turns", "share", "down"),
    "well_formed_share": Measure("Well-formed tutor turns", "share", "up"),
    "turns": Measure("Turns a dialogue", "count"),
    "tutor_turns": Measure("Tutor turns a dialogue", "count"),
    "visible_tokens_per_turn": Measure("Visible tokens a tutor turn", "tokens"),
    "thinking_tokens_per_turn": Measure("Thinking tokens a tutor turn", "tokens"),
    "student_tokens_per_turn": Measure("Tokens a student turn", "tokens"),
    "student_regenerated_rate": Measure("Student turns sampled again", "share", "down"),
    "student_off_role_rate": Measure("Student turns out of role", "share", "down"),
    "decay_visible": Measure("Length factor, visible"),
    "decay_thinking": Measure("Length factor, thinking"),
    "reward_std": Measure("Reward, standard deviation"),
    "reward_unknown_as_reject": Measure("Reward, unknown as rejection", "signed", "up"),
    "episodes": Measure("Episodes", "count"),
    "train/loss": Measure("Loss"),
    "train/grad_norm": Measure("Gradient norm"),
    "train/entropy": Measure("Entropy, nats a token"),
    "train/ratio": Measure("Ratio π/μ, mean"),
    "train/kl_mu_pi": Measure("KL(μ‖π), nats a token"),
    "train/kept": Measure("Tokens kept by the loss", "share"),
    "train/flat_group_share": Measure("Groups with equal rewards", "share"),
    "train/logprob_gap": Measure("Log-prob gap, engine to trainer"),
    "train/lr": Measure("Learning rate"),
    "train/trained_tokens": Measure("Trained tokens a step", "count"),
    "time/step": Measure("Time a step", "seconds"),
    "time/rollout": Measure("Time of the rollout", "seconds"),
    "time/update": Measure("Time of the update", "seconds"),
    "time/eval": Measure("Time of the evaluation", "seconds"),
}

TABLE = [
    "transfer_gain",
    "same_gain",
    "reward",
    "pre",
    "post",
    "leak_rate",
    "correctness_reject_rate",
    "unknown_share",
    "excluded_share",
    "blank_turn_rate",
    "truncated_turn_share",
    "turns",
    "visible_tokens_per_turn",
    "thinking_tokens_per_turn",
    "episodes",
]
"""Rows of the table before/after, in order."""

CURVES = [
    "reward",
    "transfer_gain",
    "same_gain",
    "leak_rate",
    "correctness_reject_rate",
    "excluded_share",
    "visible_tokens_per_turn",
    "thinking_tokens_per_turn",
    "turns",
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "train/kl_mu_pi",
    "train/kept",
    "train/flat_group_share",
]
"""Curves that are shown first, in order; every other one is folded away."""


def measure(name: str) -> Measure:
    """What is known of a metric; an unknown one is shown under its own name."""
    return MEASURES.get(name) or Measure(name)


def written(name: str, value: float | None, *, difference: bool = False) -> str:
    """A number as a reader wants it, ``–`` where there is none (never 0)."""
    if value is None or not math.isfinite(value):
        return "–"
    unit = measure(name).unit
    signed = difference or unit == "signed"
    if unit == "share":
        text = f"{abs(value) * 100:.1f} {'pts' if difference else '%'}"
    elif unit == "signed":
        text = f"{abs(value):.3f}"
    elif unit == "count":
        text = f"{abs(value):.0f}" if value == int(value) else f"{abs(value):.2f}"
    elif unit == "tokens":
        text = f"{abs(value):.1f}"
    elif unit == "seconds":
        text = f"{abs(value):.1f} s"
    else:
        text = f"{abs(value):.4g}"
    zero = not any(c in "123456789" for c in text)
    sign = "" if zero else "−" if value < 0 else "+" if signed else ""
    return sign + text

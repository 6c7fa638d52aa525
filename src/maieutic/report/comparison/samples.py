"""The numbers of one held-out dialogue, from its transcript line: what every mean of the comparison is a mean of.

Definitions (``docs/baselines.md``). With ``rate`` the share of right answers among graded ones and ``pre`` the student's cold
rate of the same problem, Δ is :func:`maieutic.env.reward.normalised_gain`. Gains and reward are numbers of dialogues that count;
shares of turns are the dialogue's own share, so that every dialogue weighs the same. A number that does not exist is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maieutic.env.reward import normalised_gain
from maieutic.report.summary import Line, counted, reward_of

MEASURES = (
    "transfer_gain",
    "same_gain",
    "transfer_gap",
    "reward",
    "leak_rate",
    "correctness_reject_rate",
    "unknown_share",
    "excluded_share",
    "blank_turn_rate",
    "empty_turn_rate",
    "truncated_turn_share",
    "truncated_dialogue_share",
    "turns",
    "tutor_turns",
    "ended_by_token",
    "visible_tokens_per_turn",
    "thinking_tokens_per_turn",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One dialogue: its problem (the cluster of errors), its numbers, and the line that they come from."""

    problem: str
    values: dict[str, float | None]
    line: Line


def sample(line: Line, students: Mapping[str, str]) -> Sample:
    """``students``: model by student name, to find whose solve rate belongs to an extra test."""
    values: dict[str, float | None] = dict.fromkeys(MEASURES)
    values |= gains(line, students)
    values["reward"] = reward_of(line)
    for gate, name in (("leakage", "leak_rate"), ("correctness", "correctness_reject_rate")):
        decision = line["verdicts"].get(gate, {}).get("decision")
        values[name] = None if decision in (None, "unknown") else float(decision == "reject")
    values["unknown_share"] = float((line["exclusion"] or "").startswith("unknown"))
    values["excluded_share"] = float(line["exclusion"] is not None)
    return Sample(line["pair"]["id"], values | _turns(line), line)


def gains(line: Line, students: Mapping[str, str]) -> dict[str, float | None]:
    """``transfer_gain``, ``same_gain`` and ``transfer_gap`` (same − transfer) of an episode that counts."""
    if not counted(line):
        return {}
    tests = dict(line.get("extra_tests") or {})
    main = line["post_test"]
    if main:
        tests[main["problem"]] = main
    out: dict[str, float | None] = {}
    for which, name in (("transfer", "transfer_gain"), ("source", "same_gain")):
        test = tests.get(which)
        # From the grades: a suite's own record of a further test holds nothing derived.
        graded = [g for g in test["grades"] if g != "error"] if test else []
        if not graded:
            continue
        pre = line.get("pre") if main and main["problem"] == which else _rate(line, which, students)
        if isinstance(pre, int | float):
            out[name] = normalised_gain(float(pre), graded.count("right") / len(graded))
    transfer, same = out.get("transfer_gain"), out.get("same_gain")
    if transfer is not None and same is not None:
        out["transfer_gap"] = same - transfer
    return out


def _rate(line: Line, which: str, students: Mapping[str, str]) -> float | None:
    """The cold rate of this student on this problem: the only rate of its model, else None."""
    rates = (line["pair"][which] or {}).get("rates", {})
    model = students.get(line["student"])
    found = [r["rate"] for key, r in rates.items() if model is not None and key.split("|")[0] == model]
    if not found and len(rates) == 1:
        found = [r["rate"] for r in rates.values()]
    return float(found[0]) if len(found) == 1 else None


def _turns(line: Line) -> dict[str, float | None]:
    turns: list[dict[str, Any]] = line["dialogue"]["turns"]
    tutor = [t for t in turns if t["speaker"] == "tutor"]
    n = len(tutor)

    def mean(values: list[float]) -> float | None:
        return sum(values) / n if n else None

    return {
        "blank_turn_rate": mean([float(not t["visible"].strip()) for t in tutor]),
        # A bare end token is blank, but it says what it should.
        "empty_turn_rate": mean([float(not t["visible"].strip() and not t["end_token"]) for t in tutor]),
        "truncated_turn_share": mean([float(t["truncated"]) for t in tutor]),
        "truncated_dialogue_share": float(line["dialogue"]["end"] == "context_limit"),
        "ended_by_token": float(line["dialogue"]["end"] == "end_token"),
        "turns": float(len(turns)),
        "tutor_turns": float(n),
        "visible_tokens_per_turn": mean([float(t["visible_tokens"]) for t in tutor]),
        "thinking_tokens_per_turn": mean([float(t["thinking_tokens"]) for t in tutor]),
    }

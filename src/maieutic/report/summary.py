"""Numbers of a set of transcript lines: the definitions of ``docs/metrics.md``, computed from the record itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Line = dict[str, Any]


def counted(line: Line) -> bool:
    """The episode counts: it is not excluded and has a reward."""
    return line["exclusion"] is None and line["reward"] is not None


def reward_of(line: Line) -> float | None:
    """The reward of an episode that counts, else None (also for a reward that is not finite)."""
    return _finite(line["reward"]["reward"]) if counted(line) else None


def _finite(value: Any) -> float | None:
    # Floats that JSON has no number for are strings in a transcript.
    return float(value) if isinstance(value, int | float) else None


def _mean(out: dict[str, float], name: str, values: Iterable[float | None]) -> None:
    """Put the mean in ``out``; a mean over nothing is left out."""
    kept = [v for v in values if v is not None]
    if kept:
        out[name] = sum(kept) / len(kept)


def summarise(lines: Sequence[Line]) -> dict[str, float]:
    """Measures of the episodes in ``lines`` under the short names of ``docs/metrics.md``.

    Reward and gain are means over counted episodes (gain: those that sat the post-test), rejections over episodes whose gate was
    decided, turn numbers over all tutor turns. No episodes → an empty dict; a mean over nothing has no entry.
    """
    if not lines:
        return {}
    n = len(lines)
    out: dict[str, float] = {
        "episodes": float(n),
        "excluded_share": sum(line["exclusion"] is not None for line in lines) / n,
        "unknown_share": sum((line["exclusion"] or "").startswith("unknown") for line in lines) / n,
        "turns": sum(len(line["dialogue"]["turns"]) for line in lines) / n,
    }
    _mean(out, "reward", [reward_of(line) for line in lines])
    for gate, name in (("leakage", "leak_rate"), ("correctness", "correctness_reject_rate")):
        decisions = [line["verdicts"][gate]["decision"] for line in lines if gate in line["verdicts"]]
        _mean(out, name, [float(d == "reject") for d in decisions if d != "unknown"])
    tested = [line for line in lines if counted(line) and line["reward"]["gain"] is not None]
    for kind, name in (("transfer", "transfer_gain"), ("source", "same_gain")):
        sat = [line for line in tested if line["post_test"] and line["post_test"]["problem"] == kind]
        _mean(out, name, [_finite(line["reward"]["gain"]) for line in sat])
    for name in ("pre", "post", "decay_visible", "decay_thinking"):
        _mean(out, name, [_finite(line["reward"][name]) for line in tested])
    turns = [turn for line in lines for turn in line["dialogue"]["turns"]]
    tutor = [turn for turn in turns if turn["speaker"] == "tutor"]
    out["tutor_turns"] = len(tutor) / n
    _mean(out, "blank_turn_rate", [float(not turn["visible"].strip()) for turn in tutor])
    _mean(out, "truncated_turn_share", [float(turn["truncated"]) for turn in tutor])
    _mean(out, "well_formed_share", [float(turn["well_formed"]) for turn in tutor])
    _mean(out, "visible_tokens_per_turn", [float(turn["visible_tokens"]) for turn in tutor])
    _mean(out, "thinking_tokens_per_turn", [float(turn["thinking_tokens"]) for turn in tutor])
    sampled = [turn for turn in turns if turn["speaker"] == "student" and not turn["scripted"]]
    _mean(out, "student_tokens_per_turn", [float(turn["visible_tokens"]) for turn in sampled])
    _mean(out, "student_regenerated_rate", [float(turn.get("attempts", 1) > 1) for turn in sampled])
    _mean(out, "student_off_role_rate", [float(bool(turn.get("off_role"))) for turn in sampled])
    return out


def notable(lines: Sequence[Line]) -> list[tuple[str, Line]]:
    """The best, the median and the worst episode by reward (ties by id), each once; excluded episodes are never chosen."""
    ranked = sorted(
        (line for line in lines if reward_of(line) is not None),
        key=lambda line: (reward_of(line), line["id"]),
    )
    if not ranked:
        return []
    places = {"Best": len(ranked) - 1, "Median": (len(ranked) - 1) // 2, "Worst": 0}
    chosen: list[tuple[str, Line]] = []
    taken: set[int] = set()
    for title, place in places.items():
        if place not in taken:
            taken.add(place)
            chosen.append((title, ranked[place]))
    return chosen

"""Groups of episodes, all at once in one event loop, with faults counted and seeds that do not depend on timing.

Each episode goes from first turn to reward on its own: none waits for another. A lost episode (the student or tutor engine
failed for good) is played again with a fresh seed, a bounded number of times; what stays lost, and every ``unknown`` verdict,
is excluded and counted, never scored.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from maieutic import pace
from maieutic.collector import young_only
from maieutic.env.base import Episode, Phase
from maieutic.problems.schema import ProblemPair
from maieutic.seeds import derive

LOST = ("student_failed", "tutor_failed", "engine_failed")
"""Exclusions that are worth another try: nothing was learned about the tutor, and another draw may go through."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One episode to be played. ``attempt`` counts tries of this slot from 0; ``seed`` differs for each."""

    pair: ProblemPair
    id: str
    group_id: str
    phase: Phase
    step: int
    index: int
    """Number of the episode inside its group."""
    attempt: int
    seed: int


Play = Callable[[Slot], Awaitable[Episode]]
"""Plays one episode from first turn to reward. Exclusions are its result; what it raises stops the rollout."""
Progress = Callable[[int, int], None]
"""(episodes finished, episodes in all)."""


@dataclass(slots=True)
class RolloutResult:
    """Episodes in the order of pairs and indices, whatever order they finished in."""

    episodes: list[Episode]
    groups: list[list[Episode]]
    """The same episodes by group, in the order of the pairs."""
    counts: dict[str, int] = field(default_factory=dict)
    """``episodes``, ``counted``, ``excluded``, ``excluded:<reason>``, ``retried`` (plays that were thrown away)."""
    seconds: float = 0.0

    @property
    def excluded_share(self) -> float:
        """Share of the episodes that do not count."""
        return self.counts["excluded"] / self.counts["episodes"]


async def rollout(
    play: Play,
    pairs: Sequence[ProblemPair],
    *,
    phase: Phase,
    step: int,
    run_seed: int,
    group_size: int,
    retries: int,
    on_progress: Progress | None = None,
    seed_step: int | None = None,
) -> RolloutResult:
    """Play ``group_size`` episodes of each pair concurrently.

    Seeds derive from (run seed, phase, step, pair, occurrence of the pair in this step, index, attempt), so a resumed run and
    a run with other timing draw the same; ``seed_step`` replaces the step in the derivation (evaluations use one for all steps,
    so that two of them differ by the policy alone). What ``play`` raises cancels the other episodes and is raised here.
    """
    if not pairs or group_size < 1:
        raise ValueError(f"nothing to play: {len(pairs)} pairs, {group_size} episodes each")
    start = time.monotonic()
    at = step if seed_step is None else seed_step
    total, done, retried = len(pairs) * group_size, 0, 0
    if on_progress:
        on_progress(0, total)

    async def one(pair: ProblemPair, group_id: str, occurrence: int, index: int) -> Episode:
        nonlocal done, retried
        attempt = 0
        await pace.turn()
        while True:
            seed = derive(run_seed, phase, at, pair.id, occurrence, index, attempt)
            episode = await play(
                Slot(pair, f"{group_id}/{index}", group_id, phase, step, index, attempt, seed)
            )
            if not lost(episode) or attempt >= retries:
                break
            attempt += 1
            retried += 1
        done += 1
        if on_progress:
            on_progress(done, total)
        return episode

    seen: Counter[str] = Counter()
    tasks: list[asyncio.Task[Episode]] = []
    try:
        with young_only():
            async with asyncio.TaskGroup() as group:
                for pair in pairs:
                    occurrence = seen[pair.id]
                    seen[pair.id] += 1
                    # Before the pair's id, which may hold anything: two groups must never share an id, and so a baseline.
                    group_id = f"{phase}-{step}" + (f".{occurrence}" if occurrence else "") + f"-{pair.id}"
                    tasks += [
                        group.create_task(one(pair, group_id, occurrence, index))
                        for index in range(group_size)
                    ]
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    episodes = [task.result() for task in tasks]
    groups = [episodes[i : i + group_size] for i in range(0, total, group_size)]
    return RolloutResult(episodes, groups, count(episodes, retried), time.monotonic() - start)


def lost(episode: Episode) -> bool:
    """The episode was lost to an engine or to the student, and may be tried again (an ``unknown`` verdict may not)."""
    return episode.exclusion is not None and episode.exclusion.split(":")[0] in LOST


def count(episodes: Sequence[Episode], retried: int = 0) -> dict[str, int]:
    """How many episodes count, and why the others do not."""
    excluded = [e.exclusion or "no_reward" for e in episodes if not e.counted]
    reasons = Counter(excluded)
    return {
        "episodes": len(episodes),
        "counted": len(episodes) - len(excluded),
        "excluded": len(excluded),
        "retried": retried,
        **{f"excluded:{reason}": n for reason, n in sorted(reasons.items())},
    }


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error of a (nested) group: the others are its consequences or of the same kind."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# ---- metrics ---------------------------------------------------------------------------------------------------------


def rollout_metrics(result: RolloutResult, *, unknown_reward: float) -> dict[str, float]:
    """Numbers of one rollout under short names (see ``docs/metrics.md``); a mean over nothing is left out.

    ``unknown_reward``: what an ``unknown`` episode would have scored as a rejection, for ``reward_unknown_as_reject``
    (the reward "with" the excluded ones beside the one without).
    """
    episodes = result.episodes
    n = len(episodes)
    rewards = [e.reward.reward for e in episodes if e.counted and e.reward is not None]
    unknown = [e for e in episodes if (e.exclusion or "").startswith("unknown")]
    out: dict[str, float] = {
        "episodes": float(n),
        "excluded_share": result.counts["excluded"] / n,
        "unknown_share": len(unknown) / n,
        "retried": float(result.counts["retried"]),
        "turns": sum(len(e.dialogue.turns) for e in episodes) / n,
    }
    for name, value in result.counts.items():
        if name.startswith("excluded:"):
            reason = name.removeprefix("excluded:").split(":")[0]
            out[f"excluded_{reason}_share"] = out.get(f"excluded_{reason}_share", 0.0) + value / n
    for end, times in sorted(Counter(e.dialogue.end or "unfinished" for e in episodes).items()):
        out[f"end_{end}_share"] = times / n
    _add_mean(out, "reward", rewards)
    _add_mean(out, "reward_unknown_as_reject", rewards + [unknown_reward] * len(unknown))
    if rewards:
        out["reward_std"] = statistics.pstdev(rewards)
    for gate, name in (("leakage", "leak_rate"), ("correctness", "correctness_reject_rate")):
        decisions = [v.decision for e in episodes if (v := e.verdicts.get(gate)) is not None]
        _add_mean(out, name, [float(d == "reject") for d in decisions if d != "unknown"])
    out |= _gain_metrics(episodes) | _turn_metrics(episodes)
    return out


def _gain_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Post-test numbers over the counted episodes that sat one."""
    out: dict[str, float] = {}
    tested = [e for e in episodes if e.counted and e.reward is not None and e.reward.gain is not None]
    for kind, name in (("transfer", "transfer_gain"), ("source", "same_gain")):
        gains = [
            e.reward.gain
            for e in tested
            if e.post_test is not None
            and e.post_test.problem == kind
            and e.reward
            and e.reward.gain is not None
        ]
        _add_mean(out, name, gains)
    _add_mean(out, "post", [e.reward.post for e in tested if e.reward and e.reward.post is not None])
    _add_mean(out, "pre", [e.reward.pre for e in tested if e.reward])
    _add_mean(out, "decay_visible", [e.reward.decay_visible for e in tested if e.reward])
    _add_mean(out, "decay_thinking", [e.reward.decay_thinking for e in tested if e.reward])
    return out


def _turn_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Numbers a tutor turn (and of the student's tokens), over all episodes, excluded ones too."""
    out: dict[str, float] = {}
    tutor = [t for e in episodes for t in e.dialogue.by("tutor")]
    student = [t for e in episodes for t in e.dialogue.by("student") if not t.scripted]
    out["tutor_turns"] = len(tutor) / len(episodes)
    _add_mean(out, "blank_turn_rate", [float(t.blank) for t in tutor])
    _add_mean(out, "truncated_turn_share", [float(t.truncated) for t in tutor])
    _add_mean(out, "well_formed_share", [float(t.well_formed) for t in tutor])
    _add_mean(out, "visible_tokens_per_turn", [float(t.visible_tokens) for t in tutor])
    _add_mean(out, "thinking_tokens_per_turn", [float(t.thinking_tokens) for t in tutor])
    _add_mean(out, "student_tokens_per_turn", [float(t.visible_tokens) for t in student])
    _add_mean(out, "student_regenerated_rate", [float(t.attempts > 1) for t in student])
    _add_mean(out, "student_off_role_rate", [float(bool(t.off_role)) for t in student])
    return out


def _add_mean(out: dict[str, float], name: str, values: Sequence[float]) -> None:
    finite = [v for v in values if math.isfinite(v)]
    if finite:
        out[name] = sum(finite) / len(finite)

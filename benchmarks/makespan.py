"""How long a rollout takes on servers of a given speed: against what no schedule undercuts, and against turns in lock-step.

The product plays a step of 64 dialogues against three simulated servers (tutor, student, judge) with S slots each and heavy-tailed
times; a request's times follow from its seed, so both schedules meet the same. The bound is the longest chain of one episode or the
work of the busiest server ÷ its slots, whichever is longer. The peer is the same code behind a barrier a turn
(:mod:`support.lock_step`). Shapes: more slots than dialogues (as published: 128 episodes, and vLLM takes 256 sequences), then half
and a quarter as many; for others the makespan of first come first served is computed. Every run has episodes and times of its own.
The last line is JSON.

    python benchmarks/makespan.py [--runs 3] [--pairs 8] [--token-ms 0.8]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.latencies import Timed, Trace, arrival, bound, fewest_turns, longest_left, simulate, timed

# Anything heavier is imported where it is used: the servers' processes import this module.

MODELS = ("tutor", "student", "judge")
GATES = ("leakage", "correctness")
SHAPES = {"3": 1.5, "3b": 0.5, "3c": 0.25}
"""Slots of each server as a share of the dialogues, by row."""
SWEEP = (1.5, 1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625)


def slots_of(share: float, dialogues: int) -> dict[str, int]:
    """The same number for each server."""
    return dict.fromkeys(MODELS, max(1, round(share * dialogues)))


def measure(world: Any, servers: Any, seed: int, facts: Any, *, peer_first: bool) -> dict[str, Any]:
    """Both schedules of one trace on one shape, checked against each other and against ``facts``, the episodes without latency."""
    from support.lock_step import Rounds, in_rounds
    from support.outcome import check
    from support.simulated import SAMPLES

    def ours() -> Any:
        return world.play(servers, seed)

    def peer() -> Any:
        return world.play(servers, seed, schedule=lambda c: in_rounds(c, Rounds(world.episodes)))

    order: Sequence[tuple[str, Callable[[], Any]]] = [("ours", ours), ("peer", peer)]
    played = {name: play() for name, play in (reversed(order) if peer_first else order)}
    for name, one in played.items():
        check(one.facts() == facts, f"the episodes of {name} are not those of a rollout without latency")
    stages = played["ours"].stages(GATES, SAMPLES)
    for one in played.values():
        one.verify(servers, stages)
    episodes = [timed(e, servers.trace) for e in stages]
    limit = bound(episodes, servers.slots)
    for name, one in played.items():
        check(
            one.seconds >= limit.seconds,
            f"{name}: {one.seconds:.3f} s undercut the bound, {limit.seconds:.3f} s",
        )
    return {
        "ours": played["ours"],
        "peer": played["peer"],
        "bound": limit,
        "schedule": simulate(episodes, servers.slots),
        "episodes": episodes,
    }


def sweep(traces: Sequence[Sequence[Timed]]) -> dict[str, dict[str, float]]:
    """Computed makespan ÷ bound by slots a dialogue: first come first served, and what other orders would reach."""
    orders = {"arrival": arrival, "fewest_turns_first": fewest_turns, "longest_left_first": longest_left}
    out = {}
    for share in SWEEP:
        ratios = {
            name: statistics.fmean(
                simulate(t, s, order) / bound(t, s).seconds for t in traces for s in [slots_of(share, len(t))]
            )
            for name, order in orders.items()
        }
        out[f"{share:g}"] = {name: round(r, 3) for name, r in ratios.items()}
    return out


def run(runs: int, pairs: int, token_ms: float, shapes: dict[str, float]) -> Any:
    """The whole benchmark: its outcome."""
    from support.outcome import Figure, Outcome
    from support.simulated import GROUP, World, serving

    trace = Trace(token_ms / 1000, 13.0 * token_ms / 1000)
    dialogues = pairs * GROUP
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in shapes}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        world = World(Path(folder), pairs)
        at_once = stack.enter_context(serving(world.lines, None, None))
        timed_servers = {
            row: stack.enter_context(serving(world.lines, trace, slots_of(share, dialogues)))
            for row, share in shapes.items()
        }
        for number in range(runs):
            # The same episodes under no latency; the first also warms what is loaded once.
            still = world.play(at_once, number)
            for row, servers in timed_servers.items():
                one = measure(world, servers, number, still.facts(), peer_first=number % 2 == 1)
                found[row].append(one)
                ours, peer, limit = one["ours"], one["peer"], one["bound"]
                print(
                    f"run {number + 1}, {servers.slots['tutor']} slots for {dialogues} dialogues: {ours.seconds:.2f} s; chain "
                    f"{limit.chain:.2f}, work {max(limit.work.values()):.2f}, first come first served {one['schedule']:.2f}; "
                    f"lock-step {peer.seconds:.2f} s; CPU {ours.cpu_s / ours.seconds:.0%} of a core",
                    flush=True,
                )
    figures = []
    for row, ones in found.items():
        share = f"{round(shapes[row] * dialogues)} slots, {dialogues} dialogues"
        ratio = [o["ours"].seconds / o["bound"].seconds for o in ones]
        speedup = [o["peer"].seconds / o["ours"].seconds for o in ones]
        own = [o["ours"].seconds / o["schedule"] for o in ones]
        figures += [
            Figure(row, f"makespan, {share}", "max(longest chain, work ÷ slots)", "ratio", ratio, "<= 1.10"),
            Figure(row, f"speed-up, {share}", "the same code in lock-step turns", "ratio", speedup, ">= 1.5"),
            Figure(
                row, f"makespan, {share}", "the same order of service without harness, computed", "ratio", own
            ),
        ]
    everything = [o for ones in found.values() for o in ones]
    first = next(iter(found.values()))
    return Outcome(
        "makespan",
        figures,
        {
            "episodes_equal_under_three_schedules": sum(len(o["ours"].facts()) for o in everything),
            "requests_equal": sum(sum(o["ours"].requests.values()) for o in everything),
            "retries_and_exclusions": 0,
            "most_slots_in_use": {
                row: max(int(s["most_working"]) for o in ones for p in ("ours", "peer") for s in o[p].stats.values())
                for row, ones in found.items()
            },
        },
        {
            "dialogues": dialogues,
            "token_ms": token_ms,
            "first_token_ms": 13.0 * token_ms,
            "servers": "tutor, student, judge",
            "cpu_share_of_a_core": {
                row: round(statistics.median(o["ours"].cpu_s / o["ours"].seconds for o in ones), 2)
                for row, ones in found.items()
            },
            "computed_makespan_over_bound_by_slots_a_dialogue": sweep([o["episodes"] for o in first]),
        },
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=8, help="eight episodes each")
    parser.add_argument("--token-ms", type=float, default=0.8, help="milliseconds of a token")
    given = parser.parse_args()
    run(given.runs, given.pairs, given.token_ms, SHAPES).emit()


if __name__ == "__main__":
    main()

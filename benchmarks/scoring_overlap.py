"""What scoring adds to the time of a rollout: the gates and the post-test of an episode run while other dialogues go on.

Six rollouts of the same 64 dialogues on simulated servers (:mod:`support.simulated`, S slots each): dialogues alone; with the
LLM judge (two gates at once, two votes in a request, a server of its own) and a post-test (one request for 16 answers, which takes
one slot of the server that also plays the student's turns); the same with ``env.post_test_ahead``, the post-test beside the gates,
in the rollout's tail and always; with the rule judge; and, the peer, with the LLM judge when scoring waits until all dialogues have
ended. Graders are the product's, with their worker processes. Scoring takes time, so the longest episode gets longer: that much
nothing can hide, and it is computed as well. The last line is JSON.

    python benchmarks/scoring_overlap.py [--runs 3] [--pairs 8] [--token-ms 0.7]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.latencies import Trace, simulate, timed

# Anything heavier is imported where it is used: the servers' processes import this module.

MODELS = ("tutor", "student", "judge")
GATES = ("leakage", "correctness")
SHAPES = {"5": 1.5, "5b": 0.5, "5c": 0.25}
"""Slots of each server as a share of the dialogues, by row."""


def measure(world: Any, servers: Any, seed: int, turn: int) -> dict[str, Any]:
    """The six rollouts of one trace, checked against each other; ``turn`` rotates their order."""
    from support.lock_step import Rounds, in_rounds, without_scoring
    from support.outcome import check
    from support.simulated import SAMPLES

    ways = {
        "none": lambda: world.play(servers, seed, schedule=without_scoring),
        "llm": lambda: world.play(servers, seed),
        "tail": lambda: world.play(servers, seed, env={"post_test_ahead": "tail"}),
        "ahead": lambda: world.play(servers, seed, env={"post_test_ahead": "always"}),
        "late": lambda: world.play(
            servers, seed, schedule=lambda c: in_rounds(c, Rounds(world.episodes, turns=False))
        ),
        "rule": lambda: world.play(servers, seed, judge="rule"),
    }
    names = list(ways)[turn % 6 :] + list(ways)[: turn % 6]
    played = {name: ways[name]() for name in names}
    alone = played["none"]
    for name, one in played.items():
        check(
            one.spoken() == alone.spoken(),
            f"the dialogues with scoring {name!r} differ from those without any",
        )
        gates = GATES if name in ("llm", "tail", "ahead", "late") else ()
        stages = one.stages(gates, 0 if name == "none" else SAMPLES)
        one.verify(servers, stages, counted=name != "none")
    for name in ("tail", "ahead", "late", "rule"):
        check(
            played[name].facts() == played["llm"].facts(), f"the episodes of {name!r} are not those of 'llm'"
        )
    episodes = {
        name: [timed(e, servers.trace) for e in alone.stages(gates, samples)]
        for name, gates, samples in (("none", (), 0), ("llm", GATES, SAMPLES), ("rule", (), SAMPLES))
    }
    scoring = [e[len(bare) :] for e, bare in zip(episodes["llm"], episodes["none"], strict=True)]
    computed = {name: simulate(e, servers.slots) for name, e in episodes.items()}
    phases = [simulate([[e[i]] for e in scoring], servers.slots) for i in range(2)]
    computed["late"] = computed["none"] + sum(phases)
    at_once = [[*bare, [*e[0], *e[1]]] for bare, e in zip(episodes["none"], scoring, strict=True)]
    computed["ahead"] = simulate(at_once, servers.slots)
    return {
        "seconds": {name: one.seconds for name, one in played.items()},
        "computed": computed,
        "work": sum(s for e in scoring for stage in e for _, s in stage),
        "chain": statistics.fmean(sum(max(s for _, s in stage) for stage in e) for e in scoring),
        "requests": sum(sum(one.requests.values()) for one in played.values()),
        "cpu": played["llm"].cpu_s / played["llm"].seconds,
        "working": max(s["most_working"] for one in played.values() for s in one.stats.values()),
    }


def added(seconds: dict[str, float], name: str) -> float:
    """Share of the time without scoring that scoring adds."""
    return seconds[name] / seconds["none"] - 1


def run(runs: int, pairs: int, token_ms: float, shapes: dict[str, float]) -> Any:
    """The whole benchmark: its outcome."""
    from support.outcome import Figure, Outcome
    from support.simulated import GROUP, SAMPLES, VOTES, World, serving

    trace = Trace(token_ms / 1000, 13.0 * token_ms / 1000)
    dialogues = pairs * GROUP
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in shapes}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        world = World(Path(folder), pairs)
        with serving(world.lines, None, None) as servers:
            world.play(servers, 0)  # warms what is loaded once
        running = {
            row: stack.enter_context(
                serving(world.lines, trace, dict.fromkeys(MODELS, max(1, round(share * dialogues))))
            )
            for row, share in shapes.items()
        }
        for number in range(runs):
            for row, servers in running.items():
                one = measure(world, servers, number, number)
                found[row].append(one)
                seconds = one["seconds"]
                print(
                    f"run {number + 1}, {servers.slots['tutor']} slots for {dialogues} dialogues: {seconds['none']:.2f} s alone; "
                    f"added by LLM judge and post-test {added(seconds, 'llm'):.1%} (computed {added(one['computed'], 'llm'):.1%}), "
                    f"at once in the tail {added(seconds, 'tail'):.1%}, always {added(seconds, 'ahead'):.1%} "
                    f"({added(one['computed'], 'ahead'):.1%}), "
                    f"rule judge {added(seconds, 'rule'):.1%} ({added(one['computed'], 'rule'):.1%}), "
                    f"afterwards {added(seconds, 'late'):.1%} ({added(one['computed'], 'late'):.1%})",
                    flush=True,
                )
    figures = []
    for row, ones in found.items():
        share = f"{round(shapes[row] * dialogues)} slots, {dialogues} dialogues"
        alone = "the same dialogues without scoring"

        def figure(
            measure: str,
            against: str,
            runs: list[float],
            target: str | None = None,
            row: str = row,
            share: str = share,
        ) -> None:
            figures.append(Figure(row, f"{measure}, {share}", against, "ratio", runs, target))

        seconds, computed = [o["seconds"] for o in ones], [o["computed"] for o in ones]
        figure("added wall, LLM judge", alone, [added(s, "llm") for s in seconds], "<= 0.10")
        for name, value in (("tail", "tail"), ("ahead", "always")):
            what = f"added wall, LLM judge, post_test_ahead {value}"
            figure(what, alone, [added(s, name) for s in seconds], "<= 0.10")
        figure("added wall, rule judge", alone, [added(s, "rule") for s in seconds], "<= 0.10")
        figure("added wall, scoring after all dialogues", alone, [added(s, "late") for s in seconds])
        figure(
            "added wall, LLM judge", f"{alone}, computed without harness", [added(s, "llm") for s in computed]
        )
        figure(
            "added wall, LLM judge",
            "all requests of scoring one after the other",
            [(o["seconds"]["llm"] - o["seconds"]["none"]) / o["work"] for o in ones],
        )
    return Outcome(
        "scoring_overlap",
        figures,
        {
            "dialogues_equal_in_six_ways": runs * len(shapes) * dialogues,
            "episodes_equal_in_five_ways": runs * len(shapes) * dialogues,
            "requests_as_computed": sum(o["requests"] for ones in found.values() for o in ones),
            "retries_and_exclusions": 0,
            "most_slots_in_use": {row: int(max(o["working"] for o in ones)) for row, ones in found.items()},
        },
        {
            "dialogues": dialogues,
            "token_ms": token_ms,
            "post_test_samples": SAMPLES,
            "votes": VOTES,
            "seconds_without_scoring": {
                row: round(statistics.median(o["seconds"]["none"] for o in ones), 2)
                for row, ones in found.items()
            },
            "computed_added": {
                row: {
                    name: round(statistics.median(added(o["computed"], name) for o in ones), 4)
                    for name in ("llm", "ahead", "rule", "late")
                }
                for row, ones in found.items()
            },
            "scoring_of_one_episode_s": round(
                statistics.fmean(o["chain"] for ones in found.values() for o in ones), 3
            ),
            "scoring_work_s": round(statistics.fmean(o["work"] for ones in found.values() for o in ones), 1),
            "cpu_share_of_a_core": {
                row: round(statistics.median(o["cpu"] for o in ones), 2) for row, ones in found.items()
            },
        },
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=8, help="eight episodes each")
    parser.add_argument("--token-ms", type=float, default=0.7, help="milliseconds of a token")
    given = parser.parse_args()
    run(given.runs, given.pairs, given.token_ms, SHAPES).emit()


if __name__ == "__main__":
    main()

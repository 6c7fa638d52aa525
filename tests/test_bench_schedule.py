"""The scheduling benchmarks: their simulated time, their lock-step peer, and that their checks catch what they are for."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import makespan
import scoring_overlap
from support.latencies import (
    LENGTHS,
    Request,
    Timed,
    Trace,
    bound,
    fewest_turns,
    longest_left,
    simulate,
)
from support.lock_step import GATES, POST_TEST, Rounds, in_rounds, without_scoring
from support.simulated import GROUP, SAMPLES, Played, Servers, World, serving

TRACE = Trace(token_s=0.00005, first_s=0.0005)
SLOTS = {"tutor": 3, "student": 3, "judge": 3}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), pairs=1)


@pytest.fixture(scope="module")
def servers(world: World) -> Iterator[Servers]:
    with serving(world.lines, TRACE, SLOTS) as running:
        yield running


@pytest.fixture(scope="module")
def played(world: World, servers: Servers) -> Played:
    return world.play(servers, 5)


# ---- simulated time


def test_a_request_s_time_follows_from_model_seed_and_samples_alone() -> None:
    body = {"model": "tutor", "seed": 7, "prompt": [1, 2], "max_tokens": 9}
    assert TRACE(body) == TRACE(body | {"prompt": [3]}) == TRACE.seconds(Request("tutor", 7))
    others = [TRACE(body | {"seed": 8}), TRACE(body | {"model": "student"}), TRACE(body | {"n": 2})]
    assert TRACE(body) not in others


def test_times_have_the_medians_and_caps_that_are_stated() -> None:
    trace = Trace(token_s=1.0, first_s=10.0)
    drawn = [trace.seconds(Request("tutor", s)) - 10 for s in range(4000)]
    assert statistics.median(drawn) == pytest.approx(LENGTHS["tutor"].median, rel=0.05)
    assert max(drawn) == LENGTHS["tutor"].cap
    one = statistics.fmean(trace.seconds(Request("judge", s)) for s in range(500))
    longest = statistics.fmean(trace.seconds(Request("judge", s, 16)) for s in range(500))
    assert longest > 1.5 * one  # several samples take as long as the longest of them


EPISODES: list[Timed] = [
    [[("tutor", 1.0)], [("student", 2.0)]],
    [[("tutor", 3.0)]],
    [[("tutor", 1.0)], [("tutor", 4.0)]],
]


def test_the_bound_is_the_longest_chain_or_the_busiest_server() -> None:
    found = bound(EPISODES, {"tutor": 3, "student": 1})
    assert (found.chain, found.work, found.seconds) == (5.0, {"tutor": 3.0, "student": 2.0}, 5.0)
    assert bound(EPISODES, {"tutor": 1, "student": 1}).seconds == 9.0
    together: list[Timed] = [[[("judge", 2.0), ("judge", 3.0)]]]
    assert bound(together, {"judge": 2}).chain == 3.0


def test_a_schedule_is_computed_as_by_hand() -> None:
    one = {"tutor": 1, "student": 1}
    # Served in order of arrival: 0-1 first, 1-4 second, 4-5 and then 5-9 third.
    assert simulate(EPISODES, one) == 9.0
    # Two slots: the third starts at 1 and 2, ends at 6. The longest first: it starts at 0 and ends at 5.
    two = {"tutor": 2, "student": 1}
    assert simulate(EPISODES, two) == 6.0
    assert simulate(EPISODES, two, longest_left) == 5.0
    # All first turns come before the second turn of an episode that is ahead.
    ahead: list[Timed] = [[[("tutor", 1.0)], [("tutor", 1.0)]], [[("tutor", 1.0)], [("student", 5.0)]]]
    assert simulate(ahead, one, fewest_turns) == 7.0


# ---- the peer


def test_rounds_let_episodes_into_each_phase_together() -> None:
    entered: list[tuple[str, int]] = []

    async def episode(rounds: Rounds, name: str, turns: int) -> None:
        for turn in range(1, turns + 1):
            await rounds.enter(name, turn)
            entered.append((name, turn))
        gates = [rounds.enter(name, GATES), rounds.enter(name, GATES)]
        await asyncio.gather(*gates)
        entered.append((name, GATES))
        await rounds.enter(name, POST_TEST)
        entered.append((name, POST_TEST))
        rounds.leave()

    async def all_of(rounds: Rounds) -> None:
        lengths = {"a": 1, "b": 3, "c": 2}
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            for name, turns in lengths.items():
                group.create_task(episode(rounds, name, turns))

    rounds = Rounds(3)
    asyncio.run(all_of(rounds))
    assert [rank for _, rank in entered] == [1, 1, 1, 2, 2, 3, GATES, GATES, GATES] + [POST_TEST] * 3
    assert rounds.rounds == 5
    entered.clear()
    asyncio.run(all_of(Rounds(3, turns=False)))
    # Turns are free, but nothing is scored before the last turn.
    assert [rank for _, rank in entered if rank >= GATES] == [GATES] * 3 + [POST_TEST] * 3
    assert {rank for _, rank in entered[:6]} == {1, 2, 3}


def test_an_episode_that_ends_early_does_not_hold_up_the_others() -> None:
    async def run() -> None:
        rounds = Rounds(2)
        waits = asyncio.create_task(rounds.enter("a", 1))
        await asyncio.sleep(0)
        assert not waits.done()
        rounds.leave()
        async with asyncio.timeout(5):
            await waits

    asyncio.run(run())


# ---- the whole, and its checks


@pytest.mark.integration
def test_every_schedule_plays_the_same_episodes_with_the_same_requests(
    world: World, servers: Servers, played: Played
) -> None:
    with serving(world.lines, None, None) as at_once:
        still = world.play(at_once, 5)
    peer = world.play(servers, 5, schedule=lambda c: in_rounds(c, Rounds(world.episodes)))
    alone = world.play(servers, 5, schedule=without_scoring)
    assert still.facts() == played.facts() == peer.facts()
    assert alone.spoken() == played.spoken() and alone.facts() != played.facts()
    assert len({reward for *_, reward in played.facts()}) > 1
    assert world.play(servers, 6).spoken() != played.spoken()
    for one in (played, peer):
        one.verify(servers, played.stages(makespan.GATES, SAMPLES))
    alone.verify(servers, played.stages((), 0), counted=False)
    assert sum(alone.requests.values()) == sum(played.requests.values()) - 3 * GROUP


@pytest.mark.integration
@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        ("request", "1 requests differ"),
        ("slots", "tutor: 4 of 3 slots"),
        ("work", "judge: .* s of work were served"),
        ("retry", "requests were repeated or failed"),
        ("exclusion", "episodes are excluded"),
    ],
)
def test_a_rollout_that_is_wrong_gives_no_figure(
    servers: Servers, played: Played, break_it: str, said: str
) -> None:
    copy: Any = Played(
        played.result,
        played.requests.copy(),
        {m: dict(s) for m, s in played.stats.items()},
        dict(played.usage),
        played.cpu_s,
    )
    stages = played.stages(makespan.GATES, SAMPLES)
    copy.verify(servers, stages)
    if break_it == "request":
        copy.requests[next(iter(copy.requests))] += 1
    elif break_it == "slots":
        copy.stats["tutor"]["most_working"] = 4
    elif break_it == "work":
        copy.stats["judge"]["busy_s"] *= 0.9
    elif break_it == "retry":
        copy.usage["usage/student/retries"] = 1.0
    else:
        counts = played.result.counts | {"counted": 7}
        copy.result = type(played.result)(played.result.episodes, played.result.groups, counts, 1.0)
    with pytest.raises(SystemExit, match=f"wrong result, so no figure: .*{said}"):
        copy.verify(servers, stages)


@pytest.mark.integration
def test_a_schedule_that_changes_the_episodes_gives_no_figure(
    world: World, servers: Servers, played: Played
) -> None:
    facts = played.facts()
    facts[0] = (*facts[0][:-1], 99.0)
    with pytest.raises(SystemExit, match="the episodes of ours are not those of a rollout without latency"):
        makespan.measure(world, servers, 5, facts, peer_first=False)


@pytest.mark.integration
def test_the_makespan_benchmark_in_small() -> None:
    outcome = makespan.run(runs=2, pairs=1, token_ms=0.05, shapes={"3": 1.5, "3c": 0.25})
    assert [f.row for f in outcome.figures] == ["3"] * 3 + ["3c"] * 3
    assert all(len(f.runs) == 2 for f in outcome.figures)
    # By its own check; how much above is a matter of the machine.
    assert all(x >= 1 for f in outcome.figures if f.target == "<= 1.10" for x in f.runs)
    used = outcome.checks["most_slots_in_use"]
    assert used["3"] <= 12 and used["3c"] == 2  # all of the few are used
    swept = outcome.settings["computed_makespan_over_bound_by_slots_a_dialogue"]
    assert swept["1.5"]["arrival"] == 1.0 and all(
        r >= 1 for orders in swept.values() for r in orders.values()
    )


@pytest.mark.integration
def test_the_scoring_benchmark_in_small() -> None:
    outcome = scoring_overlap.run(runs=1, pairs=1, token_ms=0.05, shapes={"5": 1.5})
    assert [f.row for f in outcome.figures] == ["5"] * 7
    assert outcome.checks["most_slots_in_use"]["5"] <= 12
    computed = next(f for f in outcome.figures if "computed" in f.against)
    assert 0 < computed.runs[0] < 1
    shares = outcome.settings["computed_added"]["5"]
    assert shares["llm"] == pytest.approx(computed.runs[0], abs=1e-3)
    # Each hides less than the one before; the rule judge has no requests of its own.
    assert shares["rule"] <= shares["ahead"] <= shares["llm"] <= shares["late"]

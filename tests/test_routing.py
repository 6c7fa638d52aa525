"""Many equal servers of one role: who is asked, and what happens when some or all of them are lost in mid-rollout."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import maieutic.engines.http as http
import training_parts as parts
from env_fakes import FakeGrader, pair
from fault_parts import assert_on_policy, engine, recipe_of, speak, steps
from loopback import InThread, Loopback, serving
from maieutic.config import EnvSpec, RewardSpec, StudentSpec
from maieutic.dialogue import Message
from maieutic.engines.base import Sampling
from maieutic.engines.chat import HttpChat
from maieutic.engines.http import HttpPolicy, HttpPool
from maieutic.engines.usage import Ledger
from maieutic.env.play import Environment
from maieutic.env.prompts import load_env
from maieutic.env.rule_judge import RuleJudge
from maieutic.env.student import ModelStudent
from maieutic.errors import EngineDownError, EngineError
from maieutic.problems.schema import SolveRate
from maieutic.training import loop
from maieutic.transcripts import read_episodes
from token_server import TokenServer

FAST = HttpPolicy(
    concurrency=16, timeout_s=5.0, retries=2, backoff_s=0.01, backoff_max_s=0.05, outage_limit_s=20.0
)
TURNS = 4


def pool_of(servers: Sequence[Loopback], policy: HttpPolicy = FAST) -> HttpPool:
    return HttpPool([s.url for s in servers], policy, role="student", ledger=Ledger())


async def dialogue(pool: HttpPool, name: str, turns: int = TURNS) -> None:
    """Some requests of one session, which say who they are."""
    for turn in range(turns):
        chat = HttpChat(pool, name)
        await chat.complete([Message("user", str(turn))], Sampling(), seed=0, session=name)


def homes(servers: Sequence[Loopback]) -> dict[str, list[str]]:
    """Server of every answered request, by dialogue, in no order across servers."""
    out: dict[str, list[str]] = defaultdict(list)
    for server in servers:
        for body in server.bodies:
            out[body["model"]].append(server.url)
    return out


def three(delay: float = 0.005) -> list[Loopback]:
    return [Loopback(fault=lambda n, body: asyncio.sleep(delay)) for _ in range(3)]


# ---- who is asked ----------------------------------------------------------------------------------------------------


def test_new_dialogues_go_to_the_least_loaded_server_and_stay_there() -> None:
    servers = three()

    async def go() -> None:
        async with serving(*servers):
            pool = pool_of(servers)
            await asyncio.gather(*(dialogue(pool, f"d{i}") for i in range(12)))
            await pool.close()

    asyncio.run(go())
    assert {d: len(set(urls)) for d, urls in homes(servers).items()} == {f"d{i}": 1 for i in range(12)}
    assert [len(s.bodies) for s in servers] == [4 * TURNS] * 3


def test_a_busy_server_does_not_keep_a_dialogue_from_idle_ones() -> None:
    stuck = asyncio.Event
    servers = [Loopback(), Loopback()]

    async def go() -> None:
        release = stuck()

        async def hold() -> None:
            await release.wait()

        async with serving(*servers):
            pool = pool_of(servers, HttpPolicy(timeout_s=60.0, retries=0))
            await dialogue(pool, "d", 1)  # its home is the first
            servers[0].fault = lambda n, body: hold()
            state = pool._state()
            waiting = [asyncio.create_task(pool.post("/v1/chat/completions", {"model": "x"}, session="d"))]
            for i in range(8):  # a queue there, which is too long for a ninth
                state.sessions[f"q{i}"] = 0
                waiting.append(
                    asyncio.create_task(pool.post("/v1/chat/completions", {"model": "x"}, session=f"q{i}"))
                )
            while state.servers[0].load < 9:
                await asyncio.sleep(0.01)
            await dialogue(pool, "d", 1)
            assert state.sessions["d"] == 1
            release.set()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert pool.ledger.usage("student").moved == 0  # nothing was lost
            await pool.close()

    asyncio.run(go())


def test_turns_and_post_test_of_a_dialogue_go_to_one_server() -> None:
    """The student's whole share of an episode, as the environment plays it."""
    servers = [Loopback(speak, lambda n, body: asyncio.sleep(0.005)) for _ in range(3)]
    templates = load_env("near_transfer")
    env = Environment(EnvSpec(max_turns=5, post_test_samples=2), RewardSpec(), templates)
    sessions: dict[str, set[str]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)

    class Scripted:
        async def reply(self, dialogue: Any, *, seed: int) -> Any:
            from maieutic.dialogue import Turn

            return Turn("tutor", f"What do you know, {dialogue.id}?")

    async def go() -> None:
        async with serving(*servers):
            pool = pool_of(servers)
            post = pool.post

            async def noted(path: str, body: Any, *, session: str | None = None) -> dict[str, Any]:
                answer = await post(path, body, session=session)
                assert session is not None
                counts[session] += 1
                return answer

            pool.post = noted  # type: ignore[method-assign]
            student = ModelStudent(HttpChat(pool, "m"), StudentSpec(model="m"), templates, env.env)
            rates = {str(student.key): SolveRate(rate=0.25, n=16)}
            given = pair()
            given = given.model_copy(
                update={
                    "source": given.source.model_copy(update={"rates": rates}),
                    "transfer": given.transfer.model_copy(update={"rates": rates}),
                }
            )

            async def play(i: int) -> None:
                await env.play(
                    Scripted(),
                    student,
                    RuleJudge(),
                    FakeGrader(),
                    given,
                    seed=i,
                    id=f"e{i}",
                    group_id="g",
                    phase="train",
                    step=1,
                    index=i,
                )

            await asyncio.gather(*(play(i) for i in range(9)))
            for name, at in pool._state().sessions.items():
                sessions[name].add(servers[at].url)
            await pool.close()

    asyncio.run(go())
    # 2 student turns and a post-test of an episode, all under its dialogue's name.
    assert len(counts) == 9 and set(counts.values()) == {3}
    assert [len(s.bodies) for s in servers] == [9, 9, 9]


# ---- some are lost ---------------------------------------------------------------------------------------------------


def test_one_of_three_dies_in_mid_rollout_and_its_dialogues_go_on_elsewhere() -> None:
    servers = three()

    async def go() -> HttpPool:
        async with serving(*servers):
            pool = pool_of(servers)
            running = [asyncio.create_task(dialogue(pool, f"d{i}", 8)) for i in range(12)]
            while len(servers[1].bodies) < 6:
                await asyncio.sleep(0.002)
            await servers[1].stop()
            await asyncio.gather(*running)
            await pool.close()
            return pool

    pool = asyncio.run(go())
    urls = homes(servers)
    assert all(len(v) >= 8 for v in urls.values()) and len(urls) == 12
    moved = [d for d, v in urls.items() if len(set(v)) > 1]
    usage = pool.ledger.usage("student")
    assert 1 <= len(moved) <= 4 and usage.moved >= len(moved) and usage.failures == 0
    # Those of the others stayed where they were.
    assert all(len(set(v)) == 1 for d, v in urls.items() if d not in moved)


def test_all_die_and_one_comes_back() -> None:
    servers = three()

    async def go() -> HttpPool:
        async with serving(*servers):
            pool = pool_of(servers)
            running = [asyncio.create_task(dialogue(pool, f"d{i}", 6)) for i in range(9)]
            while sum(len(s.bodies) for s in servers) < 20:
                await asyncio.sleep(0.002)
            for server in servers:
                await server.stop()
            before = len(servers[2].bodies)
            await asyncio.sleep(0.3)
            assert not any(t.done() for t in running)  # they wait: nothing failed
            await servers[2].start(servers[2].port)
            await asyncio.wait_for(asyncio.gather(*running), 30)
            assert len(servers[2].bodies) > before
            await pool.close()
            return pool

    assert asyncio.run(go()).ledger.usage("student").failures == 0


def test_all_die_for_good() -> None:
    servers = three()
    policy = HttpPolicy(retries=2, backoff_s=0.01, backoff_max_s=0.05, outage_limit_s=0.5)

    async def go() -> None:
        async with serving(*servers):
            pool = pool_of(servers, policy)
            running = [asyncio.create_task(dialogue(pool, f"d{i}", 50)) for i in range(9)]
            await asyncio.sleep(0.05)
            for server in servers:
                await server.stop()
            results = await asyncio.gather(*running, return_exceptions=True)
            await pool.close()
        assert all(isinstance(r, EngineDownError) for r in results)
        assert all(s.url in str(results[0]) for s in servers)

    asyncio.run(go())


def test_a_silent_server_is_left_to_itself_and_costs_no_episode() -> None:
    """A machine that is gone takes connections to nowhere: with one of two silent, no dialogue is lost."""
    good = Loopback()
    silent = Loopback(fault=lambda n, body: asyncio.sleep(60))
    policy = HttpPolicy(timeout_s=3.0, retries=1, backoff_s=0.01, backoff_max_s=0.05, outage_limit_s=60)

    async def go() -> HttpPool:
        async with serving(silent, good):
            pool = pool_of([silent, good], policy)
            await asyncio.gather(*(dialogue(pool, f"d{i}", 3) for i in range(8)))
            await pool.close()
            return pool

    pool = asyncio.run(go())
    assert pool.ledger.usage("student").failures == 0
    # Those that began there asked it once.
    assert len(silent.bodies) == 4 and pool.ledger.usage("student").moved == 4


def test_a_connection_that_nobody_accepts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_S", 0.2)
    good = Loopback()
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = [
            socket.socket() for _ in range(4)
        ]  # its queue is full: further connections are not answered
        for s in fillers:
            s.setblocking(False)
            s.connect_ex(address)

        async def go() -> HttpPool:
            async with serving(good):
                url = f"http://127.0.0.1:{address[1]}"
                pool = HttpPool([url, good.url], FAST, role="student", ledger=Ledger())
                await asyncio.wait_for(dialogue(pool, "d", 2), 30)
                await pool.close()
                return pool

        pool = asyncio.run(go())
        for s in fillers:
            s.close()
    assert len(good.bodies) == 2 and pool.ledger.usage("student").failures == 0


def test_a_lost_server_is_revived_before_it_is_asked_again() -> None:
    servers = [Loopback(), Loopback()]
    order: list[str] = []

    async def go() -> None:
        async with serving(*servers):
            pool = pool_of(servers)

            async def revive(url: str) -> None:
                order.append(url)
                if len(order) == 1:
                    raise EngineError("not yet")

            pool.revive = revive
            servers[0].fault = lambda n, body: order.append("asked")
            pool.lose(servers[0].url, "a test")
            await dialogue(pool, "d", 1)
            assert not servers[0].bodies
            while len(servers[0].bodies) < 1:  # load 0 and first in line as soon as its back-off is over
                await asyncio.sleep(0.02)
                await dialogue(pool, "e", 1)
                pool._state().sessions.clear()
            await pool.close()

    asyncio.run(go())
    assert order[:3] == [servers[0].url, servers[0].url, "asked"]


# ---- in a training run -----------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("role", ["tutor", "student"])
def test_a_run_loses_one_of_three_servers_in_a_rollout_and_goes_on(
    role: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    make = (lambda: TokenServer(tiny_model_dir)) if role == "tutor" else (lambda: Loopback(speak))
    three = [make() for _ in range(3)]
    first = InThread(three[0])
    threads = [first, *(InThread(s, beside=first) for s in three[1:])]
    single = Loopback(speak) if role == "tutor" else TokenServer(tiny_model_dir)
    with threads[0], threads[1], threads[2], InThread(single):

        def die() -> None:
            threading.Thread(target=threads[1].stop).start()

        dies_at = 3 if role == "tutor" else 5  # of its own requests: in the first or second step
        three[1].fault = lambda n, body: die() if n == dies_at else None
        many = engine(three[0], "vllm" if role == "tutor" else "chat", outage_limit_s=20.0)
        many |= {"urls": [s.url for s in three]}
        tutor = many if role == "tutor" else engine(single, "vllm")
        student = engine(single) if role == "tutor" else many
        changes = {"tutor.engine": tutor, "tutor.dtype": "float32", "tutor.lora": None}
        run = loop.run(recipe_of(tiny_model_dir, tmp_path, student=student, **changes)).folder
    rows = parts.metrics_of(run)
    assert [r["rollout/excluded_share"] for r in rows] == [0, 0, 0]
    assert len(list(read_episodes(run, "train"))) == 12
    assert rows[-1][f"usage/{role}/moved"] >= 1
    assert_on_policy(run)


@pytest.mark.integration
def test_a_run_that_loses_all_tutor_servers_stops_with_its_checkpoint(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    one, two = TokenServer(tiny_model_dir), TokenServer(tiny_model_dir)
    first = InThread(one)
    second = InThread(two, beside=first)

    def die() -> None:
        threading.Thread(target=lambda: (first.stop(), second.stop())).start()

    with first, second, InThread(Loopback(speak)) as student:
        one.fault = lambda n, body: die() if n == 9 else None  # 4 or fewer of the probe, 4 of step 1
        both = engine(one, "vllm", outage_limit_s=0.5) | {"urls": [one.url, two.url]}
        changes = {"tutor.engine": both, "tutor.dtype": "float32", "tutor.lora": None}
        with pytest.raises(EngineDownError, match=re.escape(one.url)):
            loop.run(recipe_of(tiny_model_dir, tmp_path, student=engine(student), **changes))
    assert steps(tmp_path / "run") == [1]

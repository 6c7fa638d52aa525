"""Bounded work in a turn of an event loop: few pieces at a time, in order, and nobody waits for what has gone."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterable

from maieutic import pace

LIMIT_S = 5.0


async def play(pieces: Iterable[int], done: list[int], per_turn: Counter[int]) -> list[asyncio.Task[None]]:
    """Tasks that each do a piece, noting which was done in which turn of the loop."""
    loop, turn = asyncio.get_running_loop(), [0]

    def tick() -> None:
        turn[0] += 1
        loop.call_soon(tick)

    async def one(number: int, size: int) -> None:
        await pace.turn(size)
        done.append(number)
        per_turn[turn[0]] += 1

    loop.call_soon(tick)
    tasks = [asyncio.create_task(one(i, size)) for i, size in enumerate(pieces)]
    await asyncio.sleep(0)
    return tasks


def test_few_pieces_are_done_in_a_turn_in_the_order_of_arrival() -> None:
    done: list[int] = []
    per_turn: Counter[int] = Counter()

    async def go() -> None:
        await asyncio.wait_for(asyncio.gather(*await play([1] * 42, done, per_turn)), LIMIT_S)

    asyncio.run(go())
    assert done == list(range(42))
    assert max(per_turn.values()) == pace.PIECES and len(per_turn) == 11


def test_a_piece_larger_than_a_turn_goes_last_in_its_turn_and_starves_nobody() -> None:
    done: list[int] = []
    per_turn: Counter[int] = Counter()

    async def go() -> None:
        sizes = [100 * pace.PIECES if i % 5 == 1 else 1 for i in range(20)]
        await asyncio.wait_for(asyncio.gather(*await play(sizes, done, per_turn)), LIMIT_S)

    asyncio.run(go())
    assert done == list(range(20)) and max(per_turn.values()) <= pace.PIECES
    assert per_turn[min(per_turn)] == 2  # a small one, then the large one, and no more


def test_who_was_cancelled_takes_no_room() -> None:
    done: list[int] = []
    per_turn: Counter[int] = Counter()

    async def go() -> list[object]:
        tasks = await play([1] * 40, done, per_turn)
        for task in tasks[6:30]:
            task.cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_S)

    ends = asyncio.run(go())
    assert done == [*range(6), *range(30, 40)]
    assert sum(isinstance(e, asyncio.CancelledError) for e in ends) == 24
    assert len(per_turn) == 4  # 16 pieces


def test_errors_after_a_turn_give_it_on_and_an_idle_loop_is_left_alone() -> None:
    async def fails() -> None:
        await pace.turn()
        raise ValueError

    async def go() -> bool:
        ends = await asyncio.wait_for(
            asyncio.gather(*(fails() for _ in range(20)), return_exceptions=True), LIMIT_S
        )
        assert [type(e) for e in ends] == [ValueError] * 20
        for _ in range(3):
            await asyncio.sleep(0)
        return pace._paces[asyncio.get_running_loop()]._counting

    assert asyncio.run(go()) is False


def test_loops_of_several_threads_do_not_wait_for_each_other() -> None:
    done: list[int] = []

    async def one() -> None:
        for _ in range(20):
            await pace.turn()
        done.append(1)

    async def go() -> None:
        await asyncio.wait_for(asyncio.gather(*(one() for _ in range(20))), LIMIT_S)

    threads = [threading.Thread(target=asyncio.run, args=(go(),)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    assert len(done) == 80


def test_a_loop_serves_few_sockets_in_one_turn_and_all_in_time() -> None:
    pairs = [socket.socketpair() for _ in range(3 * pace.SOCKETS)]
    turns: list[int] = []

    async def main() -> None:
        loop, served = asyncio.get_running_loop(), set()

        def read(reader: socket.socket) -> None:
            reader.recv(1)
            served.add(reader)
            turns[-1] += 1

        for reader, writer in pairs:
            loop.add_reader(reader, read, reader)
            writer.send(b"x")
        while len(served) < len(pairs) and len(turns) < 100:
            turns.append(0)
            await asyncio.sleep(0)
        for reader, _ in pairs:
            loop.remove_reader(reader)

    with asyncio.Runner(loop_factory=pace.new_event_loop) as runner:
        runner.run(main())
    for pair in pairs:
        for end in pair:
            end.close()
    assert sum(turns) == len(pairs) and max(turns) == pace.SOCKETS


def test_subprocesses_and_threads_work_in_such_a_loop() -> None:
    async def main() -> tuple[bytes, int]:
        child = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
        out, _ = await child.communicate()
        return out, await asyncio.to_thread(lambda: 7)

    with asyncio.Runner(loop_factory=pace.new_event_loop) as runner:
        assert runner.run(main()) == (b"hello\n", 7)

"""One scheduler an event loop: it decides when the engines that share a machine admit requests and decode.

It runs as a coroutine, not a thread. Between decode steps it lets every runnable task go on a fixed number of times, so which
requests meet in a batch depends on the requests alone, never on the clock: a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maieutic.engines.hf import HfEngine

# Loop passes between two steps: enough for a finished request to come back as the next one through a few nested tasks.
_YIELDS = 8


_schedulers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Scheduler] = weakref.WeakKeyDictionary()


class Scheduler:
    """Runs while any of its engines has work."""

    def __init__(self) -> None:
        self._engines: list[HfEngine] = []
        self._task: asyncio.Task[None] | None = None

    @staticmethod
    def current() -> Scheduler:
        """The running event loop's scheduler."""
        return _schedulers.setdefault(asyncio.get_running_loop(), Scheduler())

    def wake(self, engine: HfEngine) -> None:
        """``engine`` has a new request."""
        if engine not in self._engines:
            self._engines.append(engine)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while True:
                for _ in range(_YIELDS):
                    await asyncio.sleep(0)
                if not any(e.has_work for e in self._engines):
                    self._engines.clear()
                    return
                for engine in self._engines:
                    # Turns join when at least as many wait as are running anywhere: batches stay large although dialogues
                    # drift apart, and a join (which copies every row's keys and values) is paid for by what it brings.
                    # Requests for several samples keep nobody waiting: they gather until they fill a batch or all is quiet.
                    # A full engine waits until a good part of it is free, else it would fill up one by one.
                    running = sum(e.running for e in self._engines)
                    quiet = running == 0 and not any(e.waiting for e in self._engines)
                    size = engine.max_batch_size
                    engine.tick(
                        admit=engine.waiting >= running and engine.running <= 0.75 * size,
                        admit_wide=quiet or (engine.waiting_wide >= size and engine.running <= 0.5 * size),
                    )
                if not any(e.has_work for e in self._engines):
                    self._rest()  # before the callers go on, who may train next
        finally:
            self._rest()

    def _rest(self) -> None:
        for engine in self._engines:
            engine.rest()

"""Bounded work in one turn of an event loop.

A thousand dialogues in one loop become ready at the same moment (all begin, or an engine's batch ends), and everything else in
the loop, timers and other servers' answers included, would wait until each has done its piece. Who calls :func:`turn` before a
piece of work of about a millisecond shares the loop: few pieces are done in one turn of it, the others wait in order of arrival.
:func:`new_event_loop` does the same for what a client library does when answers arrive.
"""

from __future__ import annotations

import asyncio
import selectors
import weakref
from collections import deque
from typing import Any

PIECES = 4
"""Pieces of work in one turn of a loop."""


class _Pace:
    def __init__(self) -> None:
        self._left = PIECES
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._counting = False

    async def turn(self, pieces: int) -> None:
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            self._left = PIECES
            loop.call_soon(self._next, loop)
        if self._left > 0 and not self._waiting:
            self._left -= pieces
            return
        waiter = loop.create_future()
        self._waiting.append((waiter, pieces))
        await waiter

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop's next turn has begun."""
        idle = self._left == PIECES
        self._left = PIECES
        while self._waiting and self._left > 0:
            waiter, pieces = self._waiting.popleft()
            if not waiter.done():  # cancelled
                waiter.set_result(None)
                self._left -= pieces
        if idle and self._left == PIECES:
            self._counting = False
        else:
            loop.call_soon(self._next, loop)


_paces: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pace] = weakref.WeakKeyDictionary()


async def turn(pieces: int = 1) -> None:
    """Wait until this turn of the running loop has room for more work; at once, where little goes on.

    ``pieces``: how much work follows, in milliseconds, roughly.
    """
    loop = asyncio.get_running_loop()
    pace = _paces.get(loop)
    if pace is None:
        pace = _paces[loop] = _Pace()
    await pace.turn(pieces)


SOCKETS = 64
"""Sockets that are served in one turn of a loop of :func:`new_event_loop`."""


class _Few:
    """An epoll object that tells of few ready files at once; the others are told of next, in turn."""

    def __init__(self, epoll: Any) -> None:
        self._epoll = epoll

    def poll(self, timeout: float, most: int) -> Any:
        return self._epoll.poll(timeout, min(most, SOCKETS))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop that serves few sockets between two looks at its timers (on Linux; elsewhere the ordinary one).

    When hundreds of answers are there at once, an ordinary loop takes all of them before anything else gets its turn.
    """
    if not hasattr(selectors, "EpollSelector"):
        return asyncio.new_event_loop()
    selector: Any = selectors.EpollSelector()
    selector._selector = _Few(selector._selector)
    return asyncio.SelectorEventLoop(selector)

"""How far a rollout is: the dialogues that still go on, against the most that went on at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TAIL = 8
"""A rollout is in its tail when at most one in this many of its dialogues goes on."""


class Talks:
    """A count of dialogues under way. It starts anew when none is left; rollouts in several threads count as one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._most = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A dialogue goes on inside."""
        with self._lock:
            self._most = max(self._most, self._now + 1) if self._now else 1
            self._now += 1
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1

    @property
    def in_tail(self) -> bool:
        """Few dialogues are left: servers have slots to spare."""
        return self._now * TAIL <= self._most

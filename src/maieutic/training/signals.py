"""Signals that ask a run to stop: noted in the handler, acted on at the next safe point.

SIGUSR1 (a scheduler's warning), SIGTERM and SIGINT set a flag and cancel a rollout in flight; the loop then writes a
checkpoint of the last complete step and leaves with the code that a launcher expects (85, 143, 130). A second Ctrl-C
leaves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from maieutic.errors import RunInterrupted

T = TypeVar("T")

EXIT_CODES: dict[int, int] = {signal.SIGUSR1: 85, signal.SIGTERM: 143, signal.SIGINT: 130}
"""Signal number → exit code. 85 is what schedulers are told to requeue on (``RequeueExit``)."""


class StopSignals:
    """Context manager that owns the three handlers; :attr:`received` is the first signal that came, or None.

    Handlers can be set in the main thread only; elsewhere (a notebook's worker thread) the object stays passive.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                # No clean-up on purpose: the user asked twice. A live progress bar may have hidden the cursor.
                if sys.stderr.isatty():
                    os.write(2, b"\x1b[?25h\n")
                os._exit(EXIT_CODES[signal.SIGINT])
            return
        self.received = number
        # A rollout in another thread may end at this very moment, and take both away or close its loop.
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)

    def agree(self, accelerator: Any) -> int | None:
        """The signal that any rank has received (the highest number), the same answer on every rank.

        A collective call: every rank must make it at the same point.
        """
        if accelerator.num_processes > 1:
            import torch

            mine = torch.tensor([self.received or 0], dtype=torch.int64, device=accelerator.device)
            number = int(accelerator.gather(mine).max())
            if not number:
                # One that has come since then waits for the next call: the other ranks do not know of it.
                return None
            self.received = number
        return self.received

    def run(self, coroutine: Coroutine[Any, Any, T], runner: asyncio.Runner | None = None) -> T:
        """Run ``coroutine`` to its end; a signal cancels it. Raises :class:`Cancelled` then."""

        async def guarded() -> T:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            try:
                if self.received is not None:  # it came before there was a task to cancel
                    coroutine.close()
                    raise asyncio.CancelledError
                return await coroutine
            finally:
                self._loop = self._task = None

        try:
            return runner.run(guarded()) if runner is not None else asyncio.run(guarded())
        except asyncio.CancelledError:
            if self.received is None:
                raise
            raise Cancelled from None

    def interrupted(self, checkpoint: str) -> RunInterrupted:
        """The error that ends the run; ``checkpoint`` says where to resume from."""
        number = self.received
        assert number is not None, "no signal was received"
        return RunInterrupted(
            f"stopped by {signal.Signals(number).name}; {checkpoint} (resume=auto continues the run)",
            EXIT_CODES[number],
        )


class Cancelled(Exception):
    """A signal cancelled the rollout in flight (internal: the loop turns it into a checkpoint)."""

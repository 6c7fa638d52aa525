"""Staleness 1: the next step's rollout is played in a thread of its own while the main thread learns from this one.

The servers hold the weights of a complete step the whole time, so what is played is exactly one version old when it is trained
on. A step that follows a checkpoint or an evaluation is played afresh: a run that is resumed there then does the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from maieutic.config import Recipe
from maieutic.training import evaluate

T = TypeVar("T")


def ends_fresh(recipe: Recipe, step: int, has_eval_pairs: bool) -> bool:
    """Nothing may be played during the update of ``step``: the run ends there, is saved there, or is evaluated there."""
    every = recipe.checkpoint.every
    return (
        step >= recipe.training.max_steps
        or bool(every and step % every == 0)
        or evaluate.due(recipe, step, has_eval_pairs)
    )


class Ahead(Generic[T]):
    """At most one coroutine that runs ahead, in a thread of its own.

    Args:
        run: runs a coroutine to its end in the caller's thread, as the rest of the program runs them (same event loop, and
            cancelled by the same signals). It must not be used elsewhere between :meth:`start` and the call that ends it.
    """

    def __init__(self, run: Callable[[Coroutine[Any, Any, T]], T]) -> None:
        self._run = run
        self._thread: threading.Thread | None = None
        self._step = 0
        self._began = threading.Event()
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._result: list[T] = []
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Something runs ahead, or waits to be taken."""
        return self._thread is not None

    def start(self, step: int, coroutine: Coroutine[Any, Any, T]) -> None:
        """Begin the work of ``step``."""
        assert self._thread is None, "the work that was begun before was not taken"
        self._step, self._result, self._error = step, [], None
        self._began.clear()
        self._thread = threading.Thread(
            target=self._work, args=(coroutine,), name=f"rollout-{step}", daemon=True
        )
        self._thread.start()

    def take(self, step: int) -> T | None:
        """Wait for the work of ``step`` and give its result, or raise its error; None if none was begun."""
        if self._thread is None:
            return None
        assert self._step == step, f"step {self._step} was played ahead, step {step} is asked for"
        self._join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def discard(self) -> None:
        """Cancel what runs ahead and drop what came of it, errors included; safe to call at any time."""
        if self._thread is None:
            return
        self._began.wait()
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended, and its loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._join()

    def _join(self) -> None:
        assert self._thread is not None
        self._thread.join()  # signal handlers run meanwhile
        self._thread = self._task = self._loop = None

    def _work(self, coroutine: Coroutine[Any, Any, T]) -> None:
        async def cancellable() -> T:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            self._began.set()
            return await coroutine

        try:
            self._result.append(self._run(cancellable()))
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        finally:
            coroutine.close()  # a signal may have come before it began
            self._began.set()

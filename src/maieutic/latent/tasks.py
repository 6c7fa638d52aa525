"""Many small tasks at once, with a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def bounded(items: Sequence[T], work: Callable[[T], Awaitable[R]], concurrency: int) -> list[R]:
    """``work`` on every item with at most ``concurrency`` at once; results in order. The first error cancels the rest."""
    slots = asyncio.Semaphore(concurrency)

    async def one(item: T) -> R:
        async with slots:
            return await work(item)

    tasks = [asyncio.ensure_future(one(i)) for i in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()

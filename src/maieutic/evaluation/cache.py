"""Answers of models, kept by the hash of what was asked, and the cost of each sample.

A request is the same when model, messages, sampling, seed, n, schema and the endpoint's extra body are the same: its answer is then
read from the file, also after a kill, and nothing is paid twice. What an answer cost is kept with it and counted again for every
sample that uses it, so that the costs in a result do not depend on how often the evaluation was stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from maieutic.dialogue import Message
from maieutic.engines.base import Completion, Sampling
from maieutic.engines.usage import Ledger, Price
from maieutic.evaluation.journal import append_line, read_lines

Cost = dict[str, float]
"""``requests``, ``prompt_tokens``, ``completion_tokens``, ``usd`` of one role."""

_spent: ContextVar[list[tuple[str, Cost]] | None] = ContextVar("spent", default=None)


@contextmanager
def costs() -> Iterator[list[tuple[str, Cost]]]:
    """Collect what the requests inside cost, in tasks that start inside too: (role, cost) of each."""
    collected: list[tuple[str, Cost]] = []
    token = _spent.set(collected)
    try:
        yield collected
    finally:
        _spent.reset(token)


def summed(items: Sequence[tuple[str, Cost]]) -> dict[str, Cost]:
    """Costs by role, roles in alphabetical order."""
    out: dict[str, Cost] = {}
    for role, cost in sorted(items, key=lambda item: item[0]):
        total = out.setdefault(role, dict.fromkeys(cost, 0.0))
        for key, value in cost.items():
            total[key] = total.get(key, 0.0) + value
    # Sums of floats depend on the order in which answers came: nine digits do not.
    return {role: {k: round(v, 9) for k, v in total.items()} for role, total in out.items()}


class CostLedger(Ledger):
    """A ledger that also tells the surrounding :func:`costs` of each answered request."""

    def add(self, role: str, price: Price, *, prompt: int, completion: int, cached: int = 0) -> None:
        before = self.usage(role).usd
        super().add(role, price, prompt=prompt, completion=completion, cached=cached)
        collected = _spent.get()
        if collected is not None:
            cost = {"requests": 1.0, "prompt_tokens": float(prompt), "completion_tokens": float(completion)}
            collected.append((role, cost | {"usd": self.usage(role).usd - before}))


class ResponseCache:
    """Append-only JSONL of answers by key; None as path: in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None:
            self._known = {row["key"]: row for row in read_lines(path)}
        self.hits = self.misses = 0
        self._running: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def get(self, key: str, ask: Any) -> dict[str, Any]:
        """The row of ``key``; ``ask()`` makes it when there is none. Equal questions in flight are asked once."""
        while key not in self._known:
            running = self._running.get(key)
            if running is None:
                return await self._make(key, ask)
            try:
                await asyncio.shield(running)
            except Exception:
                continue  # the one that asked failed, and says so itself: ask again
        self.hits += 1
        return self._known[key]

    async def _make(self, key: str, ask: Any) -> dict[str, Any]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._running[key] = future
        try:
            row = {"key": key, **await ask()}
        except BaseException as error:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError("cancelled"))
            raise
        finally:
            del self._running[key]
        self.misses += 1
        self._known[key] = row
        if self._path is not None:
            append_line(self._path, row)
        future.set_result(row)
        return row


def request_key(
    model: str,
    messages: Sequence[Message],
    sampling: Sampling,
    *,
    seed: int,
    n: int,
    schema: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
) -> str:
    """SHA-256 of everything that decides an answer."""
    parts = {
        "model": model,
        "messages": [[m.role, m.content] for m in messages],
        "sampling": [sampling.temperature, sampling.top_p, sampling.max_tokens],
        "seed": seed,
        "n": n,
        "schema": schema,
        "extra": dict(extra or {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class CachedChat:
    """A chat model whose answers come from a :class:`ResponseCache` where it has them.

    ``identity`` names the weights behind it (a served name may be moved to another model).
    """

    def __init__(
        self, chat: Any, cache: ResponseCache, *, identity: str | None = None, structured: bool = False
    ) -> None:
        self._chat, self._cache = chat, cache
        self._identity = identity or chat.name
        self.structured = structured
        """The model takes a JSON schema."""

    @property
    def name(self) -> str:
        return str(self._chat.name)

    async def start(self) -> None:
        """Wait until the model can be asked."""
        await self._chat.start()

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int,
        n: int = 1,
        session: str | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """See :meth:`maieutic.engines.base.ChatModel.complete`; ``schema`` is dropped where the model takes none."""
        used = schema if self.structured else None
        extra = getattr(self._chat, "extra_body", None)
        key = request_key(self._identity, messages, sampling, seed=seed, n=n, schema=used, extra=extra)

        async def ask() -> dict[str, Any]:
            more = {} if used is None else {"schema": used}
            with costs() as spent:
                got = await self._chat.complete(messages, sampling, seed=seed, n=n, session=session, **more)
            return {
                "answers": [[c.text, c.finish_reason, c.tokens, c.told_apart] for c in got],
                "costs": list(spent),
            }

        row = await self._cache.get(key, ask)
        collected = _spent.get()
        if collected is not None:
            collected.extend((role, dict(cost)) for role, cost in row["costs"])
        return [Completion(*answer) for answer in row["answers"]]

    async def close(self) -> None:
        await self._chat.close()

"""What a rollout asked of its servers, request by request; the same asked again by a client that does nothing else; and how
much of it a prefix cache could have had.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from maieutic.engines.http import HttpPool

PATH = "/v1/completions"
FORCED = {"stop_token_ids": [], "ignore_eos": True}
"""Nothing but ``max_tokens`` ends such a request (``min_tokens`` would only add work to the server)."""


@dataclass(slots=True)
class Call:
    """One answered (or lost: ``answer`` is None) request, with what it waited for."""

    number: int
    role: str
    dialogue: str
    after: int | None
    """Number of the request of this dialogue that was answered last when this one was sent."""
    body: dict[str, Any]
    sent: float
    answered: float = 0.0
    answer: dict[str, Any] | None = None

    @property
    def prompt(self) -> list[int]:
        return self.body["prompt"]

    @property
    def ids(self) -> list[list[int]]:
        """What was sampled, one list a choice."""
        return [c["token_ids"] for c in _choices(self.answer or {})]

    @property
    def logprobs(self) -> list[list[float]]:
        return [c["logprobs"]["token_logprobs"] for c in _choices(self.answer or {})]

    @property
    def cached(self) -> int:
        """Cached prompt tokens as ``usage`` has them (of *one* choice where there are several)."""
        used = (self.answer or {}).get("usage") or {}
        return int((used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(answer.get("choices", []), key=lambda c: c["index"])


@dataclass
class Recording:
    """The requests of a rollout in the order in which they were sent."""

    calls: list[Call] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)

    def attach(self, pool: HttpPool) -> None:
        """From now on, write down what this pool is asked to generate."""
        post = pool.post

        async def record(path: str, body: Any, *, session: str | None = None) -> dict[str, Any]:
            dialogue = (session or "").removeprefix("tutor:")
            call = Call(
                len(self.calls), pool.role, dialogue, self._last.get(dialogue), body, time.perf_counter()
            )
            self.calls.append(call)
            call.answer = await post(path, body, session=session)
            call.answered = time.perf_counter()
            self._last[dialogue] = call.number
            return call.answer

        pool.post = record  # type: ignore[method-assign]

    def take(self) -> list[Call]:
        """What was recorded, and begin anew."""
        calls, self.calls, self._last = self.calls, [], {}
        return calls

    @staticmethod
    def tokens(calls: Iterable[Call]) -> int:
        """Sampled tokens of all choices."""
        return sum(len(ids) for call in calls for ids in call.ids)


# ---- the same once more ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Replayed:
    """``seconds`` from the first request to the last answer; ``answers``: for each call those to its requests."""

    seconds: float
    answers: list[list[dict[str, Any]]]
    requests: int
    took: list[float]
    """Seconds of each call, from when it could be sent to its last answer."""

    def lengths(self, number: int) -> list[int]:
        """Lengths of what was sampled for one call, in ascending order."""
        return sorted(len(c["token_ids"]) for a in self.answers[number] for c in a["choices"])


def forced(call: Call) -> list[dict[str, Any]]:
    """The call as requests that give exactly the recorded lengths: one for each distinct length of its choices.

    A request has one ``max_tokens`` for all of its choices; no token of theirs was sent on, so which choice had which length
    does not matter.
    """
    lengths = Counter(len(ids) for ids in call.ids)
    return [call.body | FORCED | {"n": n, "max_tokens": length} for length, n in sorted(lengths.items())]


async def replay(
    url: str, calls: Sequence[Call], bodies: Sequence[list[dict[str, Any]]], slots: int
) -> Replayed:
    """Send ``bodies`` (for each call one or more requests) to ``url``, each call when the one that it waited for is answered.

    ``slots``: most requests in flight for each role, as the product's pools have it. Bodies are encoded before the clock
    starts and answers parsed after it stopped.
    """
    payloads = [[json.dumps(body).encode() for body in several] for several in bodies]
    raw: list[list[bytes]] = [[] for _ in calls]
    took = [0.0] * len(calls)
    done = {call.number: asyncio.Event() for call in calls}
    free = {role: asyncio.Semaphore(slots) for role in {call.role for call in calls}}
    headers = {"Content-Type": "application/json"}

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def ask(role: str, payload: bytes) -> bytes:
            async with free[role], session.post(url + PATH, data=payload) as answer:
                content = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {content[:300]!r}")
            return content

        async def one(i: int, call: Call) -> None:
            if call.after is not None:
                await done[call.after].wait()
            began = time.perf_counter()
            if len(payloads[i]) == 1:
                raw[i] = [await ask(call.role, payloads[i][0])]
            else:
                raw[i] = await asyncio.gather(*(ask(call.role, p) for p in payloads[i]))
            took[i] = time.perf_counter() - began
            done[call.number].set()

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for i, call in enumerate(calls):
                group.create_task(one(i, call))
        seconds = time.perf_counter() - start
    answers = [[json.loads(r) for r in several] for several in raw]
    return Replayed(seconds, answers, sum(map(len, bodies)), took)


# ---- what was cached, and what could have been -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cached:
    """Prompt tokens that were looked up, and those of them that lay in blocks that were computed before."""

    queries: int
    hits: int

    @property
    def rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


def first_hits(calls: Sequence[Call], block: int) -> dict[int, int]:
    """Tokens that the first choice of each request finds, by number, in a cache that never evicts: whole blocks of ``block``
    tokens that an earlier request, finished or running, had computed when this one was sent.

    The last token of a prompt is computed in any case (it gives the first logits), and the last sampled token never is. A
    running request counts with its prompt, a finished one with what it sampled too.
    """
    known: set[int] = set()
    out: dict[int, int] = {}
    events = [(c.sent, 1, c.number, c) for c in calls] + [
        (c.answered, 0, c.number, c) for c in calls if c.answer
    ]
    for _, sending, number, call in sorted(events, key=lambda e: e[:3]):
        if not sending:
            for ids in call.ids:
                known.update(_chain([*call.prompt, *ids[:-1]], block))
            continue
        chain = _chain(call.prompt, block)
        most = (len(call.prompt) - 1) // block
        out[number] = block * next((i for i, key in enumerate(chain[:most]) if key not in known), most)
        known.update(chain)
    return out


def theoretical(calls: Sequence[Call], block: int) -> dict[str, Cached]:
    """Queries and hits by role and in ``all``, as :func:`first_hits` has them and each choice looks the prompt up (as in vLLM):
    further choices find what the first one computes. ``block = 1``: the bound that no block size can pass.
    """
    first = first_hits(calls, block)
    totals: dict[str, list[int]] = {}
    for call in calls:
        n = int(call.body.get("n", 1))
        for who in (call.role, "all"):
            total = totals.setdefault(who, [0, 0])
            total[0] += n * len(call.prompt)
            total[1] += first[call.number] + (n - 1) * ((len(call.prompt) - 1) // block * block)
    return {who: Cached(*total) for who, total in totals.items()}


def _chain(ids: Sequence[int], block: int) -> list[int]:
    """Keys of the whole blocks of ``ids``: each stands for its tokens and all before them."""
    keys, key = [], 0
    for i in range(0, len(ids) - block + 1, block):
        key = hash((key, *ids[i : i + block]))
        keys.append(key)
    return keys

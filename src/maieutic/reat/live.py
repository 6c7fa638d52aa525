"""The live Observer: what state the student is in *before* the tutor replies, and the query to retrieve with.

The paper asks the Observer and then the rewriter, two calls that add 12.4 s and most of 4.2 s to a turn (Table 4). Here one
structured call gives both (``calls=1``, the default); ``calls=2`` is the paper's way. A state that was read before (same problem,
same conversation) costs no call at all. A reply that cannot be used is :class:`~maieutic.reat.schema.Unknown`: the tutor then
works without experience, and the failure is counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Protocol

from maieutic.dialogue import Dialogue, Message
from maieutic.dialogue import judge_view as fenced
from maieutic.engines.base import Completion, Sampling
from maieutic.reat import prompts
from maieutic.reat.leaks import find_leaks, mask, surface
from maieutic.reat.readers import read_observation, read_query
from maieutic.reat.rewrite import Fallback, fallback_query, rewrite_query
from maieutic.reat.roles import RoleChat, StructuredChat
from maieutic.reat.schema import Observation, Record, RewriteKind, StateTags, Unknown
from maieutic.seeds import derive

_DIAGNOSIS = ("emotion", "intent", "error_type", "struggle_status", "error_detail", "struggle_reason")
_PROPERTIES: Mapping[str, Any] = prompts.OBSERVATION_SCHEMA["properties"]


def _schema(*more: str) -> dict[str, Any]:
    names = {**{n: _PROPERTIES[n] for n in _DIAGNOSIS}, **{n: {"type": "string"} for n in more}}
    return {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}


STATE_SCHEMA = _schema()
STATE_AND_QUERY_SCHEMA = _schema("query")

LIVE_OBSERVER = f"""You observe tutoring in mathematics. The tutor is about to answer the student's latest message; you say what \
state the student is in. You do not answer the student and judge nobody.

You are given the problem, its solution if the tutor has it, and the conversation up to the student's latest message. Record:
- emotion, intent, error_type, struggle_status of the student in the latest message, each one of the allowed values. \
not_applicable where there is nothing that could be wrong, or no struggle.
- error_detail: what is wrong in the student's thinking, in general words ("adds where the parts have to be compared"); empty if \
nothing is.
- struggle_reason: where the student stands over the whole conversation and what blocks the next step, in general words. Never \
empty.

{prompts.MATERIAL}

Answer with one JSON object with exactly these keys."""

QUERY_TOO = """- query: one sentence made of error_detail and struggle_reason that describes the cognitive difficulty so that it \
would fit any other problem in which it occurs. Keep both: the present error and the course of the struggle. Leave out every \
number (also in words), name, object, variable, formula and wording of the problem."""

LIVE_OBSERVER_AND_REWRITER = LIVE_OBSERVER.replace("Never empty.\n", f"Never empty.\n{QUERY_TOO}\n")


class Situation(Record):
    """A student's state as it is read before the tutor replies. ``query`` is what is embedded."""

    tags: StateTags
    error_detail: str
    struggle_reason: str
    query: str
    rewrite: RewriteKind
    """``merged``: of the one call; ``rewritten``: of the second call; ``fallback``: the diagnosis, as rewriting failed; ``off``."""


@dataclass(slots=True)
class Reading:
    """One reading and what it cost. ``calls`` is 0 where the state was known."""

    situation: Situation | Unknown
    calls: int
    observe_s: float = 0.0
    rewrite_s: float = 0.0


class Observes(Protocol):
    """Reads the state of a student whose turn is the last of the dialogue."""

    async def read(self, dialogue: Dialogue, *, seed: int) -> Reading: ...


def state_key(dialogue: Dialogue) -> str:
    """Identifies everything that a live Observer is shown."""
    shown = [dialogue.problem, dialogue.solution, [(t.speaker, t.visible) for t in dialogue.turns]]
    return hashlib.sha256(json.dumps(shown, ensure_ascii=True).encode()).hexdigest()


@dataclass
class LiveObserver:
    """Implements :class:`Observes` on a model in the role of the Observer.

    Args:
        observer: the model that reads the state (its ``journal`` is not used: nothing is resumed).
        rewriter: None: the observer writes the query too, in the same call; else the rewriter of the paper's second call.
        rewrite: off: the diagnosis itself is the query (ablation "w/o query rewrite").
        retries: how often the *rewriter* is asked again for a query that still holds something of the problem. A leaking query
            of the one call is masked at once.
        fallback: see :mod:`maieutic.reat.rewrite`.
        remember: most states that are kept; the least recently used are forgotten.
    """

    observer: RoleChat
    rewriter: RoleChat | None = None
    rewrite: bool = True
    retries: int = 1
    fallback: Fallback = "masked"
    remember: int = 4_096
    counts: Counter[str] = field(default_factory=Counter)
    """``read``, ``known`` (no call was needed), ``unknown:<reason>``, ``query:<kind>``, and what rewriting counts."""

    def __post_init__(self) -> None:
        self._known: OrderedDict[str, Situation] = OrderedDict()
        self._running: dict[tuple[int, str], asyncio.Future[Reading]] = {}

    async def read(self, dialogue: Dialogue, *, seed: int) -> Reading:
        """The situation, from memory where this very state was read before. Equal states in flight are read once.

        Raises RunStop errors of the endpoint; every other failure is Unknown, and is not remembered.
        """
        if not dialogue.turns or dialogue.turns[-1].speaker != "student":
            raise ValueError(f"dialogue {dialogue.id}: the last turn is not the student's")
        key = state_key(dialogue)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            self.counts["known"] += 1
            return Reading(known, 0)
        place = (id(asyncio.get_running_loop()), key)
        if (running := self._running.get(place)) is not None:
            found = await asyncio.shield(running)
            self.counts["known"] += 1
            return Reading(found.situation, 0)
        future: asyncio.Future[Reading] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._running[place] = future
        try:
            reading = await self._read(dialogue, seed)
        except BaseException as error:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError("cancelled"))
            raise
        finally:
            del self._running[place]
        future.set_result(reading)
        self.counts["read"] += 1
        if isinstance(reading.situation, Situation):
            self._known[key] = reading.situation
            if len(self._known) > self.remember:
                self._known.popitem(last=False)
            self.counts[f"query:{reading.situation.rewrite}"] += 1
        else:
            self.counts[f"unknown:{reading.situation.reason}"] += 1
        return reading

    @property
    def one_call(self) -> bool:
        """State and query come from one call."""
        return self.rewrite and self.rewriter is None

    def messages(self, dialogue: Dialogue) -> list[Message]:
        """What the first (or only) call is asked."""
        solution = dialogue.solution or "(the tutor does not have it)"
        user = (
            f"The problem:\n<problem>\n{escape(dialogue.problem, quote=False)}\n</problem>\n\n"
            f"Its solution:\n<answer>\n{escape(solution, quote=False)}\n</answer>\n\n"
            f"The conversation so far:\n<transcript>\n{fenced(dialogue.turns)}\n</transcript>"
        )
        system = LIVE_OBSERVER_AND_REWRITER if self.one_call else LIVE_OBSERVER
        return [Message("system", system), Message("user", user)]

    async def _read(self, dialogue: Dialogue, seed: int) -> Reading:
        said = [t.visible for t in dialogue.turns]
        problem = surface(dialogue.problem, dialogue.solution or "", said)
        chat = _Counting(self.observer.chat)
        started = time.perf_counter()
        data = await replace(self.observer, chat=chat, journal=None).ask(
            self.messages(dialogue),
            STATE_AND_QUERY_SCHEMA if self.one_call else STATE_SCHEMA,
            _state,
            seed=seed,
        )
        observed_s = time.perf_counter() - started
        if isinstance(data, Unknown):
            return Reading(data, chat.calls, observed_s)
        observation, query = data
        if not self.rewrite:
            text = observation.diagnosis
            return Reading(_situation(observation, text, "off"), chat.calls, observed_s)
        if self.rewriter is None:
            if not query:
                text = fallback_query(observation, problem, self.fallback)
                return Reading(_situation(observation, text, "fallback"), chat.calls, observed_s)
            if find_leaks(query, problem, strict=True):
                self.counts["query_masked"] += 1
                query = mask(query, problem)
            return Reading(_situation(observation, query, "merged"), chat.calls, observed_s)
        started = time.perf_counter()
        rewriter = replace(self.rewriter, chat=(second := _Counting(self.rewriter.chat)), journal=None)

        async def ask(messages: Sequence[Message], attempt: int) -> str | Unknown:
            draw = derive(seed, "rewrite", attempt)
            return await rewriter.ask(messages, prompts.QUERY_SCHEMA, read_query, seed=draw)

        found = await rewrite_query(
            observation, problem, ask, retries=self.retries, fallback=self.fallback, counts=self.counts
        )
        rewritten_s = time.perf_counter() - started
        return Reading(
            _situation(observation, found.text, found.kind),
            chat.calls + second.calls,
            observed_s,
            rewritten_s,
        )

    async def close(self) -> None:
        """Close the models."""
        for role in (self.observer, self.rewriter):
            close = getattr(role.chat, "close", None) if role is not None else None
            if close is not None:
                await close()


class _Counting:
    """A chat model that counts the requests of one reading."""

    def __init__(self, chat: StructuredChat) -> None:
        self._chat, self.calls = chat, 0

    @property
    def name(self) -> str:
        return self._chat.name

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
        self.calls += 1
        extra = {} if schema is None else {"schema": schema}
        return await self._chat.complete(messages, sampling, seed=seed, n=n, session=session, **extra)


def _state(data: dict[str, Any]) -> tuple[Observation, str] | Unknown:
    """(observation without a teacher's part, query or "")."""
    given = {k: data[k] for k in _DIAGNOSIS if k in data}
    found = read_observation(
        {**given, "meaningful": True, "teacher_evidence": "none yet", "interaction_summary": "none yet"}
    )
    if isinstance(found, Unknown):
        return found
    if "query" not in data:
        return found, ""
    query = read_query(data)
    if isinstance(query, Unknown):
        return query if query.reason != "blank_field" else (found, "")
    return found, query


def _situation(observation: Observation, query: str, kind: RewriteKind) -> Situation:
    return Situation(
        tags=observation.tags,
        error_detail=observation.error_detail,
        struggle_reason=observation.struggle_reason,
        query=query,
        rewrite=kind,
    )

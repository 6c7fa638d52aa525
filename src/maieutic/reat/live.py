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
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from maieutic.dialogue import Dialogue, Message, judge_view
from maieutic.engines.base import Sampling
from maieutic.env.llm_judge import StructuredChat
from maieutic.errors import EngineError, RunStop
from maieutic.latent.json_reply import find_object
from maieutic.reat import prompts
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
    """Implements :class:`Observes` on a chat model.

    Args:
        calls: 1 (state and query together) or 2 (Observer, then rewriter: the paper).
        rewrite: off: the diagnosis itself is the query (ablation "w/o query rewrite").
        remember: most states that are kept; the least recently used are forgotten.
        structured: ask for the JSON schema, where the endpoint has it.
        reasks: how often an unusable reply is asked again with another seed.
    """

    chat: StructuredChat
    sampling: Sampling = field(default_factory=lambda: Sampling(0.0, 1.0, 512))
    calls: Literal[1, 2] = 1
    rewrite: bool = True
    remember: int = 4_096
    structured: bool = True
    reasks: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    """``calls``, ``reasks``, ``known`` (no call was needed), ``unknown:<reason>``, ``query:<kind>``."""

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
        if isinstance(reading.situation, Situation):
            self._known[key] = reading.situation
            if len(self._known) > self.remember:
                self._known.popitem(last=False)
            self.counts[f"query:{reading.situation.rewrite}"] += 1
        else:
            self.counts[f"unknown:{reading.situation.reason}"] += 1
        return reading

    def messages(self, dialogue: Dialogue) -> list[Message]:
        """What the first (or only) call is asked."""
        solution = dialogue.solution or "(the tutor does not have it)"
        user = (
            f"The problem:\n<problem>\n{escape(dialogue.problem, quote=False)}\n</problem>\n\n"
            f"Its solution:\n<answer>\n{escape(solution, quote=False)}\n</answer>\n\n"
            f"The conversation so far:\n<transcript>\n{judge_view(dialogue.turns)}\n</transcript>"
        )
        both = self.calls == 1 and self.rewrite
        return [
            Message("system", LIVE_OBSERVER_AND_REWRITER if both else LIVE_OBSERVER),
            Message("user", user),
        ]

    async def _read(self, dialogue: Dialogue, seed: int) -> Reading:
        both = self.calls == 1 and self.rewrite
        started = time.perf_counter()
        data, asked = await self._ask(
            self.messages(dialogue), STATE_AND_QUERY_SCHEMA if both else STATE_SCHEMA, _state, seed
        )
        observed_s = time.perf_counter() - started
        if isinstance(data, Unknown):
            return Reading(data, asked, observed_s)
        observation, query = data
        if not self.rewrite:
            situation = _situation(observation, observation.diagnosis, "off")
            return Reading(situation, asked, observed_s)
        if self.calls == 1:
            kind: RewriteKind = "merged" if query else "fallback"
            return Reading(_situation(observation, query or observation.diagnosis, kind), asked, observed_s)
        started = time.perf_counter()
        said, more = await self._ask(
            prompts.rewrite(observation), prompts.QUERY_SCHEMA, _query, derive(seed, "rewrite")
        )
        rewritten_s = time.perf_counter() - started
        kind = "fallback" if isinstance(said, Unknown) else "rewritten"
        text = observation.diagnosis if isinstance(said, Unknown) else said
        return Reading(_situation(observation, text, kind), asked + more, observed_s, rewritten_s)

    async def _ask(
        self, messages: Sequence[Message], schema: dict[str, Any], read: Any, seed: int
    ) -> tuple[Any, int]:
        """(what ``read`` makes of the reply or Unknown, calls)."""
        extra: dict[str, Any] = {"schema": schema} if self.structured else {}
        last, why = "", "malformed"
        for attempt in range(1 + self.reasks):
            draw = seed if attempt == 0 else derive(seed, "reask", attempt)
            try:
                (reply,) = await self.chat.complete(
                    list(messages), self.sampling, seed=draw, n=1, session=None, **extra
                )
            except RunStop:
                raise
            except EngineError as error:
                return Unknown(reason="failed", detail=str(error)[:200]), attempt + 1
            self.counts["calls"] += 1
            self.counts["reasks"] += attempt > 0
            last = reply.text
            data = find_object(last)
            if data is None:
                why = "malformed"
                continue
            try:
                return read(data), attempt + 1
            except (ValidationError, ValueError, KeyError, TypeError):
                why = "out_of_schema"
        return Unknown(reason=why, detail=last[:200]), 1 + self.reasks


def _state(data: dict[str, Any]) -> tuple[Observation, str]:
    """(observation without a teacher's part, query or ""). Raises for anything that is missing or no allowed value."""
    texts = [data["error_detail"], data["struggle_reason"], data.get("query", "")]
    if not all(isinstance(t, str) for t in texts):
        raise ValueError("a text is expected")
    observation = Observation(
        meaningful=True,
        tags=StateTags(
            emotion=data["emotion"],
            intent=data["intent"],
            error_type=data["error_type"],
            struggle=data["struggle_status"],
        ),
        error_detail=texts[0].strip(),
        struggle_reason=texts[1].strip(),
        teacher_evidence="",
        interaction_summary="",
    )
    query = " ".join(texts[2].split())
    if not (query or observation.diagnosis):
        raise ValueError("nothing to retrieve with: query and diagnosis are empty")
    return observation, query


def _query(data: dict[str, Any]) -> str:
    query = data["query"]
    if not isinstance(query, str) or not query.strip():
        raise ValueError("query is empty")
    return " ".join(query.split())


def _situation(observation: Observation, query: str, kind: RewriteKind) -> Situation:
    return Situation(
        tags=observation.tags,
        error_detail=observation.error_detail,
        struggle_reason=observation.struggle_reason,
        query=query,
        rewrite=kind,
    )

"""Observer, Critic, Mentor and Rewriter: structured calls whose answer is valid, or :class:`Unknown` with the reason. Never
a default.

A reply is searched for JSON objects; each is validated strictly. One that is no answer, or two answers that differ (one may
have been planted by the text under review), is asked again with another seed, at most ``reasks`` times, and every bad reply
is counted by role and reason. A request that fails for good is ``engine_failed``; errors that stop a run pass through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from maieutic.dialogue import Message
from maieutic.engines.base import Completion, Sampling
from maieutic.env.judge_reply import _objects
from maieutic.errors import EngineError, RunStop
from maieutic.problems.build.checkpoint import FAILED, Journal, step_key
from maieutic.reat import prompts
from maieutic.reat.leaks import Surface, find_leaks
from maieutic.reat.merging import MergedText
from maieutic.reat.readers import (
    read_critique,
    read_merged,
    read_observation,
    read_query,
    read_reflection,
    read_revision,
)
from maieutic.reat.schema import Critique, Experience, Observation, Revision, Unknown
from maieutic.reat.turns import TurnContext
from maieutic.seeds import derive
from maieutic.thinking import without_thinking

T = TypeVar("T")
LONGEST_REPLY = 200_000


class StructuredChat(Protocol):
    """A chat model that may take a JSON schema."""

    @property
    def name(self) -> str: ...

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int,
        n: int = 1,
        session: str | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> list[Completion]: ...


@dataclass
class RoleChat:
    """A model in one role.

    Args:
        reasks: further tries after a reply that could not be used.
        structured: send the JSON schema (off for endpoints without structured output).
        journal: keeps every reply on disk and gives it back on a resume; None (live tutoring): asked afresh.
        counts: shared by the roles; ``<role>.bad.<reason>`` for each bad reply, ``<role>.unknown.<reason>`` for each call that
            was given up, ``<role>.ok`` for each answer; ``<role>.requests``, ``<role>.tokens`` (completion) for what it took.
    """

    role: str
    chat: StructuredChat
    sampling: Sampling
    reasks: int = 2
    structured: bool = True
    journal: Journal | None = None
    counts: Counter[str] = field(default_factory=Counter)

    async def ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        read: Callable[[dict[str, Any]], T | Unknown],
        *,
        seed: int,
        row: str = "",
    ) -> T | Unknown:
        """``read`` of the reply's object. ``row`` names the turn in the journal."""
        bad = Unknown(reason="no_reply")
        for attempt in range(1 + self.reasks):
            draw = seed if attempt == 0 else derive(seed, "reask", attempt)
            reply = await self._reply(messages, schema, draw, row)
            if isinstance(reply, Unknown):
                bad = reply
                break  # the client has spent its own retries
            value = _answer(reply, read)
            if not isinstance(value, Unknown):
                self.counts[f"{self.role}.ok"] += 1
                return value
            bad = value
            self.counts[f"{self.role}.bad.{bad.reason}"] += 1
        self.counts[f"{self.role}.unknown.{bad.reason}"] += 1
        return bad

    async def _reply(
        self, messages: Sequence[Message], schema: Mapping[str, Any], seed: int, row: str
    ) -> tuple[str, bool] | Unknown:
        """(text, cut off at the token limit)."""

        async def call() -> dict[str, Any]:
            extra: dict[str, Any] = {"schema": schema} if self.structured else {}
            try:
                (reply,) = await self.chat.complete(messages, self.sampling, seed=seed, **extra)
            except RunStop:
                raise
            except (EngineError, TimeoutError) as error:
                return {FAILED: str(error)}
            cut = reply.finish_reason == "length"
            return {"text": reply.text, "truncated": cut, "tokens": reply.tokens}

        if self.journal is None:
            value = await call()
        else:
            said = [[m.role, m.content] for m in messages]
            used = schema if self.structured else None
            key = step_key(self.role, self.chat.name, said, asdict(self.sampling), seed, used)
            value = await self.journal.step(key, self.role, row, call)
        self.counts[f"{self.role}.requests"] += 1
        if FAILED in value:
            return Unknown(reason="engine_failed", detail=value[FAILED])
        self.counts[f"{self.role}.tokens"] += value["tokens"]
        return value["text"], value["truncated"]


def _answer(reply: tuple[str, bool], read: Callable[[dict[str, Any]], T | Unknown]) -> T | Unknown:
    """The one answer that a reply holds, or what is wrong with it."""
    text, truncated = reply
    text = without_thinking(text)
    if not text.strip():
        return Unknown(reason="empty")
    if len(text) > LONGEST_REPLY:
        return Unknown(reason="oversized")
    found = [read(o) for o in _objects(text)]
    answers = [a for a in found if not isinstance(a, Unknown)]
    if answers:
        if all(a == answers[0] for a in answers):
            return answers[0]
        return Unknown(reason="contradictory", detail=text[:200])
    if found and isinstance(found[-1], Unknown):
        return found[-1]
    return Unknown(reason="truncated" if truncated else "malformed", detail=text[:200])


@dataclass
class Roles:
    """The four roles; ``reflection`` is the one call that stands for Observer, Critic and Mentor in the ablation."""

    observer: RoleChat
    critic: RoleChat
    mentor: RoleChat
    rewriter: RoleChat
    reflection: RoleChat | None = None
    seed: int = 0
    merges: Counter[str] = field(default_factory=Counter)
    """Counts of the merger alone, of this process: what was merged before a kill is not asked again."""

    @property
    def counts(self) -> Counter[str]:
        """Of all roles (they share one counter)."""
        return self.observer.counts

    @property
    def every(self) -> list[RoleChat]:
        """The roles that there are."""
        roles = (self.observer, self.critic, self.mentor, self.rewriter, self.reflection)
        return [role for role in roles if role is not None]

    @property
    def pools(self) -> set[str]:
        """Names under which their endpoints count usage."""
        pools = (getattr(role.chat, "pool", None) for role in self.every)
        return {pool.role for pool in pools if pool is not None}

    def keep_in(self, journal: Journal | None) -> None:
        """Keep the replies of all roles in a journal (None: no longer)."""
        for role in self.every:
            role.journal = journal

    def _seed(self, context: TurnContext, *parts: int | str) -> int:
        return derive(self.seed, context.key, *parts)

    async def observe(self, context: TurnContext) -> Observation | Unknown:
        """Equation 3."""
        return await self.observer.ask(
            prompts.observe(context),
            prompts.OBSERVATION_SCHEMA,
            read_observation,
            seed=self._seed(context, "observe"),
            row=context.key,
        )

    async def criticise(
        self,
        context: TurnContext,
        observation: Observation,
        response: str | None = None,
        *,
        inspection: int = 0,
    ) -> Critique | Unknown:
        """Equation 4; with ``response``, the inspection of a revised one (number ``inspection``, from 1)."""
        found = await self.critic.ask(
            prompts.criticise(context, observation, response),
            prompts.CRITIQUE_SCHEMA,
            read_critique,
            seed=self._seed(context, "criticise", inspection),
            row=context.key,
        )
        self.note(found)
        return found

    def note(self, critique: Critique | Unknown) -> None:
        """Count a critique whose scores a rule lowered."""
        if isinstance(critique, Critique) and critique.was_capped:
            self.counts["critic.capped"] += 1

    async def revise(
        self,
        context: TurnContext,
        observation: Observation,
        critique: Critique,
        earlier: Sequence[tuple[Revision, Critique]],
        problem: Surface,
        *,
        leak_retries: int,
    ) -> Revision | Unknown:
        """Equation 6, one round; see :meth:`_agnostic`."""
        messages = prompts.revise(context, observation, critique, earlier)
        return await self._agnostic(context, messages, problem, leak_retries, f"revise-{len(earlier)}")

    async def distil(
        self,
        context: TurnContext,
        observation: Observation,
        critique: Critique,
        problem: Surface,
        *,
        leak_retries: int,
    ) -> Revision | Unknown:
        """What a good response teaches: D of equation 7 for a turn that needs no revision. The response stays what it was."""
        messages = prompts.distil(context, observation, critique)
        got = await self._agnostic(context, messages, problem, leak_retries, "distil")
        return got if isinstance(got, Unknown) else got.model_copy(update={"response": context.response})

    async def _agnostic(
        self, context: TurnContext, messages: list[Message], problem: Surface, retries: int, what: str
    ) -> Revision | Unknown:
        """A revision whose reusable parts hold nothing of the problem: else asked again, naming what leaked, else
        ``Unknown("leak")``."""
        request = messages
        leaked: list[str] = []
        for attempt in range(1 + retries):
            got = await self.mentor.ask(
                request,
                prompts.REVISION_SCHEMA,
                read_revision,
                seed=self._seed(context, what, attempt),
                row=context.key,
            )
            if isinstance(got, Unknown):
                return got
            leaked = self.leaked(got, problem)
            if not leaked:
                return got
            request = prompts.without(messages, leaked, "template, advice or notes")
        return Unknown(reason="leak", detail=", ".join(leaked)[:200])

    def leaked(self, revision: Revision, problem: Surface) -> list[str]:
        """What of the problem stands in the reusable parts; each kind is counted as ``mentor.leak.<kind>``."""
        parts = revision.model_dump(exclude={"response"}).values()
        leaks = [leak for text in parts for leak in find_leaks(text, problem, strict=False)]
        self.counts.update(f"mentor.leak.{kind}" for kind in {leak.kind for leak in leaks})
        return list(dict.fromkeys(leak.text for leak in leaks))

    async def query(self, context: TurnContext, messages: Sequence[Message], attempt: int) -> str | Unknown:
        """One try of the Rewriter."""
        return await self.rewriter.ask(
            messages,
            prompts.QUERY_SCHEMA,
            read_query,
            seed=self._seed(context, "rewrite", attempt),
            row=context.key,
        )

    async def merge(self, kept: Experience, new: Experience) -> MergedText | None:
        """Two experiences into a more general one, by the Rewriter's model: a :data:`maieutic.reat.merging.Merge`.

        A text that holds a number, a variable or a formula is unusable (the problems are not known here any more). None when
        nothing usable came; the reasons are counted in :attr:`merges`.
        """
        merger = replace(self.rewriter, role="merger", counts=self.merges)
        got = await merger.ask(
            prompts.merge(kept, new),
            prompts.MERGED_SCHEMA,
            read_merged,
            seed=derive(self.seed, "merge", kept.id, new.id),
            row=new.id,
        )
        return None if isinstance(got, Unknown) else got

    async def reflect(
        self, context: TurnContext
    ) -> tuple[Observation, Critique, Revision, Critique] | Unknown:
        """Observer, Critic and Mentor as one call (ablation): observation, critique, revision, critique of the revision."""
        if self.reflection is None:
            raise ValueError("merged roles are asked for but no reflection role was built")
        got = await self.reflection.ask(
            prompts.reflect(context),
            prompts.REFLECTION_SCHEMA,
            read_reflection,
            seed=self._seed(context, "reflect"),
            row=context.key,
        )
        if not isinstance(got, Unknown):
            self.note(got[1])
        return got

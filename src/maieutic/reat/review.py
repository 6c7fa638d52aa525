"""The OCM pipeline on one turn: observe, criticise, route, revise and inspect, gate, distil, rewrite (section 3.2).

Every decision is a pure function of the roles' answers; a role that fails drops the turn with the reason. Nothing is scored
in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maieutic.dialogue import Message
from maieutic.reat.distil_config import DistilSection
from maieutic.reat.gate import passes
from maieutic.reat.leaks import Surface, surface
from maieutic.reat.rewrite import Query, rewrite_query
from maieutic.reat.roles import Roles
from maieutic.reat.routing import route
from maieutic.reat.schema import Critique, Experience, Observation, Provenance, Revision, Unknown
from maieutic.reat.turns import TurnContext


@dataclass(frozen=True, slots=True)
class Review:
    """What came of one turn. Exactly one of ``experience`` and ``dropped`` is set."""

    key: str
    experience: Experience | None
    dropped: str
    """Why nothing is kept: ``not_meaningful``, ``below_gate``, ``below_gate_unrevised``, or ``<role>.<reason>`` of a role that
    failed."""
    detail: str = ""
    observation: Observation | None = None
    critique: Critique | None = None
    """Of the original response: the turn-level score, kept or not."""
    scores: tuple[float, ...] = ()
    """S of the original response, then of each revision."""
    routed: bool = False
    """D of equation 5."""

    @property
    def score(self) -> float:
        """The admission score (of a review with an experience): S of what was distilled."""
        return self.scores[-1]


class _Drop(Exception):
    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(why)
        self.why, self.detail = why, detail


@dataclass(slots=True)
class _State:
    """What is known so far, for the record of a turn that is dropped half-way."""

    observation: Observation | None = None
    critique: Critique | None = None
    scores: tuple[float, ...] = ()
    routed: bool = False


async def review(context: TurnContext, roles: Roles, settings: DistilSection) -> Review:
    """Review one turn. Raises only what stops a whole run (:class:`~maieutic.errors.RunStop`, a full disk)."""
    state = _State()
    try:
        experience = await (_merged if settings.merged_roles else _separate)(context, roles, settings, state)
    except _Drop as drop:
        return Review(
            context.key,
            None,
            drop.why,
            drop.detail,
            state.observation,
            state.critique,
            state.scores,
            state.routed,
        )
    return Review(
        context.key, experience, "", "", state.observation, state.critique, state.scores, state.routed
    )


def problem_surface(context: TurnContext) -> Surface:
    """What must not survive: the problem's, and the numbers and variables that the dialogue added."""
    said = [t.visible for t in context.history] + [context.response]
    return surface(context.problem, context.solution, said)


async def _separate(context: TurnContext, roles: Roles, settings: DistilSection, state: _State) -> Experience:
    seen = await roles.observe(context)
    if isinstance(seen, Unknown):
        raise _Drop(f"observer.{seen.reason}", seen.detail)
    state.observation = seen
    if not seen.meaningful:
        raise _Drop("not_meaningful")
    critique = await roles.criticise(context, seen)
    if isinstance(critique, Unknown):
        raise _Drop(f"critic.{critique.reason}", critique.detail)
    state.critique, state.scores = critique, (critique.score,)
    state.routed = route(critique, tau_rev=settings.tau_rev, tau_min=settings.tau_min)
    problem = problem_surface(context)
    if state.routed:
        kept = await _revised(context, roles, settings, state, seen, critique, problem)
    else:
        _gate(critique.score, settings, revised=False)
        got = await roles.distil(context, seen, critique, problem, leak_retries=settings.leak_retries)
        if isinstance(got, Unknown):
            raise _Drop(f"mentor.{got.reason}", got.detail)
        kept = got
    query = await _query(context, roles, settings, seen, problem)
    return _experience(context, seen, kept, query, state)


async def _revised(
    context: TurnContext,
    roles: Roles,
    settings: DistilSection,
    state: _State,
    seen: Observation,
    critique: Critique,
    problem: Surface,
) -> Revision:
    """The first revision that passes the gate, within ``rounds`` inspections."""
    earlier: list[tuple[Revision, Critique]] = []
    for number in range(1, settings.rounds + 1):
        got = await roles.revise(
            context, seen, critique, earlier, problem, leak_retries=settings.leak_retries
        )
        if isinstance(got, Unknown):
            raise _Drop(f"mentor.{got.reason}", got.detail)
        again = await roles.criticise(context, seen, got.response, inspection=number)
        if isinstance(again, Unknown):
            raise _Drop(f"inspection.{again.reason}", again.detail)
        state.scores += (again.score,)
        if _passes(again.score, settings, revised=True):
            return got
        earlier.append((got, again))
    raise _Drop("below_gate", f"{state.scores[-1]:g} after {settings.rounds} rounds")


def _passes(score: float, settings: DistilSection, *, revised: bool) -> bool:
    return passes(
        score,
        gamma=settings.gamma,
        revised=revised,
        gate=settings.gate,
        gate_unrevised=settings.gate_unrevised,
    )


def _gate(score: float, settings: DistilSection, *, revised: bool) -> None:
    if not _passes(score, settings, revised=revised):
        raise _Drop("below_gate" if revised else "below_gate_unrevised", f"{score:g}")


async def _merged(context: TurnContext, roles: Roles, settings: DistilSection, state: _State) -> Experience:
    got = await roles.reflect(context)
    if isinstance(got, Unknown):
        raise _Drop(f"reflection.{got.reason}", got.detail)
    seen, critique, revision, again = got
    state.observation = seen
    if not seen.meaningful:
        raise _Drop("not_meaningful")
    state.critique, state.scores = critique, (critique.score,)
    state.routed = route(critique, tau_rev=settings.tau_rev, tau_min=settings.tau_min)
    if state.routed:
        state.scores += (again.score,)
    else:
        revision = revision.model_copy(update={"response": context.response})
    _gate(state.scores[-1], settings, revised=state.routed)
    problem = problem_surface(context)
    leaked = roles.leaked(revision, problem)
    if leaked:
        raise _Drop("reflection.leak", ", ".join(leaked)[:200])
    query = await _query(context, roles, settings, seen, problem)
    return _experience(context, seen, revision, query, state)


async def _query(
    context: TurnContext, roles: Roles, settings: DistilSection, seen: Observation, problem: Surface
) -> Query:
    if not settings.rewrite:
        return Query(seen.diagnosis, "off")

    async def ask(messages: Sequence[Message], attempt: int) -> str | Unknown:
        return await roles.query(context, messages, attempt)

    return await rewrite_query(
        seen,
        problem,
        ask,
        retries=settings.rewrite_retries,
        fallback=settings.fallback,
        counts=roles.counts,
    )


def _experience(
    context: TurnContext, seen: Observation, kept: Revision, query: Query, state: _State
) -> Experience:
    return Experience.make(
        utility=state.scores[-1],
        tags=seen.tags,
        query=query.text,
        template=kept.template,
        advice=kept.advice,
        pitfalls=kept.pitfalls,
        struggle_handling=kept.struggle_handling,
        explanation=kept.explanation,
        provenance=Provenance(
            transcript=context.transcript,
            episode_id=context.episode_id,
            turn=context.turn,
            problem_id=context.problem_id,
            revised=state.routed,
            rounds=len(state.scores) - 1,
            scores=state.scores,
            rewrite=query.kind,
        ),
    )

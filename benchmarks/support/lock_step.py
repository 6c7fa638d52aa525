"""Other schedules, made of the product's own parts: all dialogues move together, scoring comes last, or there is none.

TutorRL plays a step as one batch a turn: every tutor's turn, then every student's, until all dialogues have ended, then every
verdict, then every post-test. Here that is a barrier in front of each call of tutor, student and judge, and nothing else:
environment, engines, client, seeds and requests are those of the product's own schedule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from maieutic.env.base import Episode
from maieutic.env.play import Environment
from maieutic.rollout import Slot
from maieutic.runtime import Classroom

GATES, POST_TEST = 1_000_000, 1_000_001
"""Ranks of the phases after the dialogue; those of the dialogue are the numbers of its turns."""


class Rounds:
    """Lets episodes into a phase together: when all that have not ended wait, the earliest phase that is waited for begins."""

    def __init__(self, episodes: int, *, turns: bool = True) -> None:
        """``turns``: also the turns of the dialogues are played together; else only scoring waits for the last dialogue."""
        self._open, self._turns = episodes, turns
        self._waiting: dict[str, int] = {}
        self._passed: dict[str, int] = {}
        self._begun: dict[int, asyncio.Event] = {}
        self.rounds = 0
        """Phases that were begun."""

    async def enter(self, episode: str, rank: int) -> None:
        """Wait until phase ``rank`` begins; at once when this episode has been let into it (several gates are one phase)."""
        if (rank < GATES and not self._turns) or self._passed.get(episode) == rank:
            return
        self._waiting[episode] = rank
        begun = self._begun.setdefault(rank, asyncio.Event())
        self._begin()
        await begun.wait()

    def leave(self) -> None:
        """An episode has ended."""
        self._open -= 1
        self._begin()

    def _begin(self) -> None:
        if not self._waiting or len(self._waiting) < self._open:
            return
        rank = min(self._waiting.values())
        for episode in [e for e, r in self._waiting.items() if r == rank]:
            self._passed[episode] = self._waiting.pop(episode)
        self._begun.pop(rank).set()
        self.rounds += 1


class _Part:
    """A tutor, student or judge behind the barrier; everything else is its own."""

    def __init__(self, part: Any, rounds: Rounds) -> None:
        self._part, self._rounds = part, rounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class _Speaker(_Part):
    async def reply(self, dialogue: Any, *, seed: int) -> Any:
        await self._rounds.enter(dialogue.id, len(dialogue.turns))
        return await self._part.reply(dialogue, seed=seed)

    async def attempt(self, problem: Any, *, dialogue: Any, **options: Any) -> Any:
        await self._rounds.enter(dialogue.id, POST_TEST)
        return await self._part.attempt(problem, dialogue=dialogue, **options)


class _Judge(_Part):
    async def verdict(self, dialogue: Any, pair: Any, gate: Any, *, seed: int) -> Any:
        await self._rounds.enter(dialogue.id, GATES)
        return await self._part.verdict(dialogue, pair, gate, seed=seed)


def in_rounds(classroom: Classroom, rounds: Rounds) -> Callable[[Slot], Awaitable[Episode]]:
    """``classroom.play_train`` for :func:`maieutic.rollout.rollout`, its phases begun by ``rounds``."""
    behind: Any = replace(
        classroom,
        tutor=_Speaker(classroom.tutor, rounds),
        students=[_Speaker(s, rounds) for s in classroom.students],
        judge=_Judge(classroom.judge, rounds),
    )

    async def play(slot: Slot) -> Episode:
        try:
            return await behind.play_train(slot)
        finally:
            rounds.leave()

    return play


class _DialoguesOnly(Environment):
    async def _run(self, episode: Episode, tutor: Any, student: Any, *unused: Any) -> None:
        await self.converse(tutor, student, episode.dialogue, seed=episode.seed)


def without_scoring(classroom: Classroom) -> Callable[[Slot], Awaitable[Episode]]:
    """Dialogues, and neither gates nor post-test nor reward."""
    env = classroom.env
    return replace(classroom, env=_DialoguesOnly(env.env, env.reward, env.templates)).play_train

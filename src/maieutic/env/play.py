"""One episode, from the first turn to the reward."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Literal, Protocol, TypeVar

from maieutic.config import EnvSpec, RewardSpec
from maieutic.dialogue import Dialogue, EndReason, Turn
from maieutic.env.base import Episode, Judge, Phase, PostTest, Student, StudentFailed, Tutor
from maieutic.env.gates import judge_gates
from maieutic.env.prompts import EnvTemplates
from maieutic.env.reward import compute_reward
from maieutic.env.talks import Talks
from maieutic.errors import (
    EngineError,
    EngineMismatchError,
    GraderError,
    ModelError,
    ProblemDataError,
    RecipeError,
    RunInterrupted,
    RunStop,
)
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.seeds import BITS, derive

log = logging.getLogger(__name__)

Tested = Literal["transfer", "source"]
S = TypeVar("S")
Until = Callable[[Dialogue], Awaitable[EndReason | None]]
"""Asked after every student turn: the name under which the dialogue ends with it, None for going on."""

RUN_ERRORS = (RunStop, RunInterrupted, RecipeError, ProblemDataError, ModelError, EngineMismatchError)
"""Errors that no other episode would escape either: they stop the run and are never turned into an excluded episode."""


class GradeLike(Protocol):
    """What a grader says of one text."""

    @property
    def verdict(self) -> str: ...


class GraderLike(Protocol):
    """:class:`maieutic.grading.Grader`, as far as an episode needs it."""

    async def grade_many(self, texts: Sequence[str], gold: str) -> Sequence[GradeLike]: ...


class Excluded(Exception):
    """Ends an episode that must not count: a step of :class:`Environment` raises it. ``label`` becomes ``Episode.exclusion``."""

    def __init__(self, label: str, message: str) -> None:
        super().__init__(message)
        self.label = label


def draw_student(students: Sequence[S], weights: Sequence[float], seed: int) -> S:
    """One of the students with probability proportional to its weight; the same seed gives the same student."""
    if not students or len(students) != len(weights) or min(weights) <= 0:
        raise ValueError(
            f"{len(students)} students with weights {list(weights)}: one positive weight each is needed"
        )
    edges = list(accumulate(weights))
    point = derive(seed, "student") / 2**BITS * edges[-1]
    return students[min(bisect_right(edges, point), len(students) - 1)]


class Environment:
    """Near-transfer tutoring as published (``docs/environments.md`` tells it in full).

    ``env`` is resolved against the ``env.yaml`` of the templates here, so that a recipe's ``env`` section can be handed in as
    it is. A subclass may override any of the public steps: :meth:`converse`, :meth:`post_test`, :meth:`play`.
    """

    def __init__(self, env: EnvSpec, reward: RewardSpec, templates: EnvTemplates) -> None:
        self.env = templates.resolve(env)
        self.reward = reward
        self.templates = templates
        self.talks = Talks()

    async def play(
        self,
        tutor: Tutor,
        student: Student,
        judge: Judge,
        grader: GraderLike,
        pair: ProblemPair,
        *,
        seed: int,
        id: str,
        group_id: str,
        phase: Phase = "train",
        step: int = 0,
        index: int = 0,
        extra_tests: Sequence[Tested] = (),
    ) -> Episode:
        """Dialogue, gates, post-test, reward. Never raises for what concerns this episode alone: it is excluded instead.

        ``extra_tests``: further tested problems (an evaluation that wants both gains). Raises what concerns the whole run
        (:data:`RUN_ERRORS`), cancellation and interrupts; a missing solve rate raises before the first turn.
        """
        tested = pair.tested(self.env.transfer)
        episode = Episode(
            id=id,
            group_id=group_id,
            pair=pair,
            phase=phase,
            step=step,
            index=index,
            seed=seed,
            student=student.name,
            dialogue=self.new_dialogue(pair, id),
            pre=tested.rate(student.key).rate,
        )
        return await self.settle(episode, self._run(episode, tutor, student, judge, grader, extra_tests))

    async def settle(self, episode: Episode, steps: Awaitable[None]) -> Episode:
        """Run the ``steps`` of an episode: what concerns it alone becomes its exclusion, what concerns the run is raised."""
        started = time.perf_counter()
        try:
            await steps
        except Excluded as error:
            episode.exclusion, episode.error = error.label, str(error)
        except RUN_ERRORS:
            raise
        except Exception as error:
            episode.exclusion = f"error:{type(error).__name__}"
            episode.error = f"{type(error).__name__}: {error}"
            log.error("episode %s is excluded: %s", episode.id, episode.error, exc_info=error)
        if episode.exclusion is not None:
            episode.reward = None
            log.info("episode %s excluded: %s", episode.id, episode.exclusion)
        episode.timing["total"] = time.perf_counter() - started
        return episode

    async def _run(
        self,
        episode: Episode,
        tutor: Tutor,
        student: Student,
        judge: Judge,
        grader: GraderLike,
        extra_tests: Sequence[Tested],
    ) -> None:
        dialogue, pair, env = episode.dialogue, episode.pair, self.env
        with timed(episode, "dialogue"), self.talks.one():
            await self.converse(tutor, student, dialogue, seed=episode.seed)
        require_tutor_turn(dialogue)

        # In training a post-test that cannot change the outcome is not paid for; in evaluation every episode is tested.
        always = episode.phase == "eval" or env.gates == "off"

        async def tests() -> None:
            with timed(episode, "post_test"):
                await self.take_tests(episode, student, grader, extra_tests)

        at_once = (
            always
            or env.post_test_ahead == "always"
            or (env.post_test_ahead == "tail" and self.talks.in_tail)
        )
        ahead = asyncio.create_task(tests()) if at_once else None
        try:
            with timed(episode, "gates"):
                seed = derive(episode.seed, "gates")
                episode.verdicts = await judge_gates(judge, dialogue, pair, env, seed=seed)
            decisions = {name: v.decision for name, v in episode.verdicts.items()}
            unknown = [name for name, d in decisions.items() if d == "unknown"] if env.gates != "off" else []
            rejected = env.gates == "hard" and "reject" in decisions.values()
            needed = always or not (unknown or rejected)
            if needed:
                await (ahead or tests())
        finally:
            if ahead is not None:
                ahead.cancel()
                (failed,) = await asyncio.gather(ahead, return_exceptions=True)
                if isinstance(failed, RUN_ERRORS):
                    raise failed
        if not needed:
            # One that was faster than its gates is dropped too: what an episode holds must not depend on timing.
            episode.post_test, episode.extra_tests = None, {}
            episode.timing.pop("post_test", None)
        if unknown:
            verdict = episode.verdicts[unknown[0]]
            raise Excluded(f"unknown:{unknown[0]}", f"{verdict.criterion}: {verdict.reason}")
        episode.reward = compute_reward(episode, env, self.reward)

    # ---- the dialogue ----------------------------------------------------------------------------------------------

    def new_dialogue(self, pair: ProblemPair, id: str) -> Dialogue:
        """A dialogue that holds the scripted opening. The tutor gets a solution only where the environment says so."""
        source = pair.source
        solution = (source.solution or source.answer) if self.env.tutor_sees_solution else None
        dialogue = Dialogue(id, source.text, solution)
        dialogue.add(Turn("student", self.templates.opening(source.text), scripted=True))
        return dialogue

    async def converse(self, tutor: Tutor, student: Student, dialogue: Dialogue, *, seed: int) -> None:
        """The dialogue from its opening to its end: :meth:`alternate`, which a subclass may precede with an opening of its own."""
        await self.alternate(tutor, student, dialogue, seed=seed)

    async def alternate(
        self, tutor: Tutor, student: Student, dialogue: Dialogue, *, seed: int, until: Until | None = None
    ) -> None:
        """Alternate, tutor first, until the end token, the turn cap, the context limit or ``until``; sets ``dialogue.end``.

        The end token is honoured when at least ``env.end_after`` tutor turns precede the turn that carries it. A speaker
        that fails ends the dialogue as ``tutor_failed`` or ``student_failed``, and the episode is excluded under that name.
        """
        spoken = len(dialogue.by("tutor"))
        while len(dialogue.turns) < self.env.max_turns:
            turn_seed = derive(seed, "turn", len(dialogue.turns))
            try:
                turn = await tutor.reply(dialogue, seed=turn_seed)
            except (RunStop, EngineMismatchError):
                raise
            except EngineError as error:
                dialogue.end = "tutor_failed"
                raise Excluded("tutor_failed", with_cause(error)) from error
            if turn is None:
                dialogue.end = "context_limit"
                break
            dialogue.add(turn)
            if turn.end_token and spoken >= self.env.end_after:
                dialogue.end = "end_token"
                break
            spoken += 1
            if len(dialogue.turns) >= self.env.max_turns:
                break
            try:
                reply = await student.reply(dialogue, seed=derive(seed, "turn", len(dialogue.turns)))
            except StudentFailed as error:
                dialogue.end = "student_failed"
                raise Excluded("student_failed", with_cause(error)) from error
            dialogue.add(reply)
            if until is not None and (end := await until(dialogue)) is not None:
                dialogue.end = end
                break
        dialogue.end = dialogue.end or "max_turns"

    # ---- the post-test -----------------------------------------------------------------------------------------------

    async def post_test(
        self,
        student: Student,
        grader: GraderLike,
        dialogue: Dialogue,
        problem: Problem,
        which: Tested,
        *,
        seed: int,
    ) -> PostTest:
        """K answers to ``problem`` after the dialogue, graded."""
        env = self.env
        answers = await student.attempt(
            problem, k=env.post_test_samples, seed=seed, dialogue=dialogue, hide_tutor=env.hide_tutor
        )
        grades = await grader.grade_many(answers, problem.answer)
        if len(grades) != len(answers):
            raise GraderError(
                f"{len(answers)} answers were handed to the grader, {len(grades)} grades came back"
            )
        return PostTest(which, env.hide_tutor, list(answers), [g.verdict for g in grades])

    async def take_tests(
        self, episode: Episode, student: Student, grader: GraderLike, extra_tests: Sequence[Tested]
    ) -> None:
        pair = episode.pair
        main: Tested = "transfer" if self.env.transfer and pair.transfer is not None else "source"
        # A pair without a variant has no transfer test to add; a test that was just taken is not taken again.
        extra = [w for w in dict.fromkeys(extra_tests) if w != main and (w == "source" or pair.transfer)]
        problems = {"transfer": pair.transfer, "source": pair.source}
        for which in [main, *extra]:
            problem = problems[which]
            assert problem is not None
            try:
                result = await self.post_test(
                    student,
                    grader,
                    episode.dialogue,
                    problem,
                    which,
                    seed=derive(episode.seed, "post_test", which),
                )
            except StudentFailed as error:
                raise Excluded("student_failed", f"post-test: {with_cause(error)}") from error
            if which == main:
                episode.post_test = result
            else:
                episode.extra_tests[which] = result
            if result.graded == 0 or result.graded < self.env.post_test_min_graded * len(result.grades):
                share = f"{result.graded} of {len(result.grades)} answers"
                raise Excluded("ungraded", f"post-test on the {which} problem: only {share} could be graded")


def require_tutor_turn(dialogue: Dialogue) -> None:
    """Exclude the episode of a dialogue that ended before the tutor spoke."""
    if not dialogue.by("tutor"):
        raise Excluded("no_tutor_turn", f"the dialogue ended ({dialogue.end}) before the tutor spoke")


def with_cause(error: BaseException) -> str:
    """The error's message and that of its cause, unless the message has it already."""
    return (
        f"{error} (cause: {error.__cause__})"
        if error.__cause__ and str(error.__cause__) not in str(error)
        else str(error)
    )


@contextmanager
def timed(episode: Episode, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        episode.timing[name] = time.perf_counter() - start

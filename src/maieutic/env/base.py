"""The three protocols at the centre (Tutor, Student, Judge) and the record of an episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from maieutic.dialogue import Dialogue, Turn
from maieutic.problems.schema import Problem, ProblemPair, StudentKey

Decision = Literal["ok", "reject", "unknown"]
GateName = Literal["leakage", "correctness"]
Phase = Literal["train", "eval"]


@runtime_checkable
class Tutor(Protocol):
    """Anything that tutors: a trained policy, a prompted API model, REAT, the latent-state tutor."""

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        """The next tutor turn, or None when the next turn cannot fit in the context (the dialogue ends as ``context_limit``)."""
        ...


@runtime_checkable
class Student(Protocol):
    """A frozen learner."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> StudentKey:
        """Identifies whose solve rates count: model, prompt hash, sampling."""
        ...

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn:
        """The next student turn. Raises :class:`StudentFailed` after its bounded retries."""
        ...

    async def attempt(
        self,
        problem: Problem,
        *,
        k: int,
        seed: int,
        dialogue: Dialogue | None = None,
        hide_tutor: bool = True,
    ) -> list[str]:
        """``k`` answers to ``problem`` as one request: cold when ``dialogue`` is None, else after the dialogue."""
        ...


@runtime_checkable
class Judge(Protocol):
    """A frozen grader of transcripts: one gate, one verdict."""

    async def verdict(
        self, dialogue: Dialogue, pair: ProblemPair, gate: GateName, *, seed: int
    ) -> Verdict: ...


class StudentFailed(Exception):
    """The student gave nothing usable after bounded retries; the episode is excluded and counted."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says of one gate. A ``reject`` cites the tutor turn that it quotes; ``unknown`` excludes the episode."""

    gate: GateName
    decision: Decision
    criterion: str = ""
    """Short stable name of the rule that fired, such as ``answer_stated``; for ``unknown`` the reason, such as ``timeout``."""
    quote: str = ""
    turn: int | None = None
    """Index into ``Dialogue.turns``."""
    reason: str = ""
    votes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PostTest:
    """K student samples on the tested problem after the dialogue. ``rate`` = right / graded; grader errors are not graded."""

    problem: Literal["transfer", "source"]
    hide_tutor: bool
    answers: list[str]
    grades: list[str]
    """One of ``right | wrong | no_answer | error`` an answer (``no_answer`` counts as wrong, ``error`` is not graded)."""

    @property
    def graded(self) -> int:
        return sum(g != "error" for g in self.grades)

    @property
    def rate(self) -> float:
        return sum(g == "right" for g in self.grades) / self.graded if self.graded else float("nan")


@dataclass(frozen=True, slots=True)
class RewardBreakdown:
    """Every term of the reward, so that a number can be traced (``reference-facts`` formula in :mod:`maieutic.env.reward`)."""

    reward: float
    gated: bool
    pre: float
    post: float | None
    gain: float | None
    decay_visible: float = 1.0
    decay_thinking: float = 1.0
    eoc_bonus: float = 0.0
    think_reward: float = 0.0
    penalty: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Episode:
    """A dialogue plus its gate verdicts, post-test and reward breakdown.

    ``exclusion`` is None for an episode that counts, else why it does not (``student_failed``, ``unknown:leakage``, …):
    it is then outside its group's baseline and the loss, and ``reward`` is None.
    """

    id: str
    group_id: str
    pair: ProblemPair
    phase: Phase
    step: int
    index: int
    """Number of the episode inside its group."""
    seed: int
    student: str
    dialogue: Dialogue
    pre: float | None = None
    """The student's cold solve rate of the tested problem, measured before any dialogue."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    post_test: PostTest | None = None
    extra_tests: dict[str, PostTest] = field(default_factory=dict)
    """Further post-tests of the same dialogue that an evaluation asked for, by tested problem; no part of the reward."""
    reward: RewardBreakdown | None = None
    exclusion: str | None = None
    error: str | None = None
    trajectory: Any = None
    """:class:`maieutic.training.trajectory.Trajectory` of a policy tutor, else None."""
    policy_version: int = 0
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds: ``dialogue``, ``gates``, ``post_test``, ``total``. Not part of what a resumed run must repeat."""

    @property
    def counted(self) -> bool:
        return self.exclusion is None and self.reward is not None

"""The student state: what each feature means, how it is asked for and how it is computed.

The state s_n is read *before* the tutor's n-th turn, from the dialogue up to and including the student's last turn. Binary features
that a model reads are answered in one structured call a turn (:mod:`maieutic.latent.reading`), counts and histories are computed
here from those answers, two scores come from :mod:`maieutic.latent.scorers`.

The list is the paper's (its appendix C, damaged in the copy at hand): items 1, 2, 4-25 and 27 there are these 25, in that order.
Cross-references are resolved by meaning: "Q7" is ``asks_question``, "Q18" is ``tutor_asks``, and item 12, worded about the student,
is about the tutor (only a tutor diagnoses).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from maieutic.dialogue import Turn
from maieutic.errors import RecipeError
from maieutic.latent.errors import FeatureError
from maieutic.latent.scorers import math_density, student_reasoning

Answers = Mapping[str, bool]
"""Answers of one reading, by question key."""
Kind = Literal["binary", "count", "score"]
Compute = Callable[[Sequence[Answers], Sequence[Turn]], float]
"""From the answers of all readings so far (the last is the present one) and the turns, to the value."""


@dataclass(frozen=True)
class Question:
    """A yes/no question that a reader answers about the present turn."""

    key: str
    text: str


@dataclass(frozen=True)
class Feature:
    """One component of the state. ``rule`` says in words what ``compute`` does."""

    name: str
    kind: Kind
    definition: str
    rule: str
    compute: Compute
    questions: tuple[Question, ...] = ()
    item: int = 0
    """Number in the paper's list (0: ours)."""

    @property
    def prompt(self) -> str:
        """The question texts, as the reader is asked them; empty for computed features."""
        return " / ".join(q.text for q in self.questions)


@dataclass(frozen=True)
class FeatureSet:
    """A named and versioned list of features; a policy stores the names and refuses any other input."""

    name: str
    version: int
    features: tuple[Feature, ...]

    @property
    def id(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.features)

    @property
    def questions(self) -> tuple[Question, ...]:
        """Every question of the set once, in order."""
        out = {q.key: q for f in self.features for q in f.questions}
        return tuple(out.values())

    def vector(self, readings: Sequence[Answers], turns: Sequence[Turn]) -> npt.NDArray[np.float32]:
        """The state ``[F]``. ``readings``: answers before each tutor turn so far, the present one last.

        Raises :class:`FeatureError` when a reading lacks an answer or a value is not finite.
        """
        needed = {q.key for q in self.questions}
        for n, r in enumerate(readings):
            if missing := needed - r.keys():
                raise FeatureError(f"reading {n} has no answer to {sorted(missing)}")
        out = np.array([f.compute(readings, turns) for f in self.features], np.float32)
        if not np.isfinite(out).all():
            bad = [n for n, v in zip(self.names, out, strict=True) if not np.isfinite(v)]
            raise FeatureError(f"features {bad} are not finite")
        return out


def last_student(turns: Sequence[Turn]) -> str:
    """The student's most recent utterance (empty when there is none)."""
    return next((t.visible for t in reversed(turns) if t.speaker == "student"), "")


def _read(item: int, name: str, text: str, definition: str) -> Feature:
    return Feature(
        name,
        "binary",
        definition,
        "the reader's answer about the present turn",
        lambda readings, turns, key=name: float(readings[-1][key]),  # type: ignore[misc]
        (Question(name, text),),
        item,
    )


def _majority(readings: Sequence[Answers], turns: Sequence[Turn]) -> float:
    return float(sum(readings[-1][q.key] for q in MISTAKE_QUESTIONS) >= 2)


MISTAKE_QUESTIONS = (
    Question("mistake_calculation", "Does the student's last message contain a calculation that is wrong?"),
    Question("mistake_solving", "Does the student's last message take a wrong step in solving the problem?"),
    Question(
        "mistake_listed",
        "Does the student's last message show one of the possible mistakes that are listed, or another misconception?",
    ),
)
_ASKS = Question("asks_question", "Does the student's last message ask the tutor a question explicitly?")
_TUTOR_ASKS = Question("tutor_asks", "Does the tutor's last message ask the student a question?")
_REFOCUSES = Question(
    "tutor_refocuses_now",
    "Does the tutor's last message try to bring a distracted student back to the problem?",
)
_DIAGNOSES = Question(
    "tutor_diagnoses_now",
    "Does the tutor's last message ask a diagnostic question, to find out what the student knows or at what level?",
)


def _student(i: int, name: str, asks: str, definition: str) -> Feature:
    return _read(i, name, f"In the last message, {asks}", definition)


def _ever(key: str) -> Compute:
    return lambda readings, turns: float(any(r[key] for r in readings))


def _total(key: str) -> Compute:
    return lambda readings, turns: float(sum(r[key] for r in readings))


PAPER_25 = FeatureSet(
    "paper-25",
    1,
    (
        _student(1, "math_content", "does the student produce mathematics?", "numbers, steps or mathematical statements"),
        _read(2, "solved", "Has the student solved the problem correctly by now?", "a correct final answer is on record"),
        _student(4, "repeats_tutor", "does the student repeat or stress what the tutor said?", "echoes the tutor"),
        _student(5, "off_topic", "does the student drift off the topic of the lesson?", "drifts away from the lesson"),
        _student(6, "asks_reexplain", "does the student ask to explain again or to clarify?", "wants a clarification"),
        Feature("asks_question", "binary", "asks the tutor anything", "the reader's answer",
                lambda r, t: float(r[-1]["asks_question"]), (_ASKS,), 7),
        _student(8, "describes_confusion", "does the student say where they are stuck or what confuses them?", "says what is hard"),
        _student(9, "unrelated_utterance", "is everything unrelated to the problem?", "nothing in it concerns the problem"),
        _student(10, "frustrated", "does the student express frustration?", "annoyance, giving up"),
        _student(11, "uncertain", "does the student express doubt or a lack of confidence?", "low confidence"),
        Feature("tutor_diagnosed", "binary", "the tutor has asked a diagnostic question so far",
                "yes to the question in any reading", _ever("tutor_diagnoses_now"), (_DIAGNOSES,), 12),
        _student(13, "wants_break", "does the student ask for a break?", "wants to pause or stop"),
        _student(14, "on_problem", "does the student talk about the problem at hand?", "about this very problem"),
        _student(15, "positive_sentiment", "does the student express something positive?", "joy, relief, thanks"),
        _student(16, "related_concepts", "does the student talk about other mathematics that relates to it?", "related concepts"),
        _student(17, "wrote_equation", "does the student write an equation for the problem?", "an equation stands there"),
        _student(18, "math_background", "does the student speak of their mathematics in general?", "background, school, likes"),
        Feature("made_mistake", "binary", "a mistake in the present turn",
                "majority of three questions: wrong calculation, wrong step, a listed mistake",
                _majority, MISTAKE_QUESTIONS, 19),
        Feature("tutor_refocused", "binary", "the tutor has tried to bring a distracted student back, at any time so far",
                "yes to the question in any reading", _ever("tutor_refocuses_now"), (_REFOCUSES,), 20),
        Feature("tutor_asks", "binary", "the tutor's last turn asks the student a question", "the reader's answer",
                lambda r, t: float(r[-1]["tutor_asks"]), (_TUTOR_ASKS,), 21),
        Feature("student_questions", "count", "questions of the student so far",
                "readings with yes to asks_question", _total("asks_question"), (_ASKS,), 22),
        Feature("turn", "count", "number of the tutor turn that is due, from 1", "student turns so far",
                lambda r, t: float(sum(x.speaker == "student" for x in t)), (), 23),
        Feature("tutor_questions", "count", "questions of the tutor so far",
                "readings with yes to tutor_asks", _total("tutor_asks"), (_TUTOR_ASKS,), 24),
        Feature("student_reasoning", "score", "amount of mathematical reasoning in the student's last turn",
                "scorers.student_reasoning", lambda r, t: student_reasoning(last_student(t)), (), 25),
        Feature("math_density", "score", "share of mathematical tokens in the student's last turn",
                "scorers.math_density", lambda r, t: math_density(last_student(t)), (), 27),
    ),
)  # fmt: skip


def _run_of(key: str) -> Compute:
    def count(readings: Sequence[Answers], turns: Sequence[Turn]) -> float:
        n = 0
        for r in reversed(readings):
            if not r[key]:
                break
            n += 1
        return float(n)

    return count


def _mistakes(readings: Sequence[Answers], turns: Sequence[Turn]) -> float:
    return float(sum(sum(r[q.key] for q in MISTAKE_QUESTIONS) >= 2 for r in readings))


EXTENDED = FeatureSet(
    "extended",
    1,
    (
        *PAPER_25.features,
        Feature("frustrated_run", "count", "frustrated turns in a row up to now", "trailing yes answers", _run_of("frustrated"),
                PAPER_25.features[8].questions),
        Feature("off_topic_run", "count", "off-topic turns in a row up to now", "trailing yes answers", _run_of("off_topic"),
                PAPER_25.features[3].questions),
        Feature("mistakes", "count", "turns with a mistake so far", "readings whose majority is yes", _mistakes, MISTAKE_QUESTIONS),
        Feature("equations", "count", "turns with an equation so far", "yes answers", _total("wrote_equation"),
                PAPER_25.features[15].questions),
        Feature("words", "count", "words of the student's last turn", "split at white space",
                lambda r, t: float(len(last_student(t).split()))),
        Feature("best_reasoning", "score", "most reasoning in any student turn so far", "maximum of scorers.student_reasoning",
                lambda r, t: max((student_reasoning(x.visible) for x in t if x.speaker == "student"), default=0.0)),
    ),
)  # fmt: skip
"""The 25 and six histories: what the 25 lose of the past (the paper blames that loss for its weak behaviour cloning)."""

FEATURE_SETS: dict[str, FeatureSet] = {s.name: s for s in (PAPER_25, EXTENDED)}


def feature_set(name: str) -> FeatureSet:
    """A feature set by name. Raises :class:`RecipeError` naming those that there are."""
    if name not in FEATURE_SETS:
        raise RecipeError(f"no feature set {name!r}: there are {', '.join(FEATURE_SETS)}")
    return FEATURE_SETS[name]

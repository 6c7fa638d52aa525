"""Training documents: conversations as messages, each marked with whether the model learns to say it.

The prompts are those of ``envs/micro``, so that what the models learned to read is what an episode shows them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from maieutic.config import EnvSpec
from maieutic.dialogue import BLANK, HIDDEN, Message
from maieutic.env.prompts import EnvTemplates, load_env
from maieutic.micro import speech
from maieutic.micro.scripts import (
    AFTER,
    APPRENTICE,
    BEFORE,
    JUDGEMENTS,
    LESSON,
    MENDING,
    TALKATIVE,
    Move,
    StudentScript,
    Traits,
    Weights,
    diagnosis,
    dialogue,
    solve,
    tutor_move,
)
from maieutic.micro.world import OPS, Family, Method, MicroProblem, make_problem, step1, step2, work


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a document; ``learn``: the model is trained on it."""

    message: Message
    learn: bool = False


Document = list[Said]


@cache
def prompts() -> tuple[EnvTemplates, EnvSpec]:
    """The texts of ``envs/micro`` and its settings."""
    templates = load_env("micro")
    return templates, templates.resolve(EnvSpec())


def vocabulary() -> list[str]:
    """The vocabulary of all micro models."""
    t, env = prompts()
    blank = ["", " "]
    texts = [t.tutor_system(env, ""), t.student_system(""), t.opening(""), t.cold_question("")]
    texts += [t.question("", same=same) for same in (False, True)] + blank
    return speech.vocabulary(tuple(texts))


def said(role: str, text: str, learn: bool = False) -> Said:
    """A message of a document."""
    return Said(Message(role, text), learn)  # type: ignore[arg-type]


def _any_method(rng: random.Random) -> Method:
    return rng.choice(OPS[1]), rng.choice(OPS[2])


def _blind(rng: random.Random, family: Family | None = None) -> tuple[MicroProblem, MicroProblem]:
    """A problem of any story, and what the tutor of a student's corpus takes it for: a method that the story does not tell."""
    p = make_problem(rng, family=family)
    return p, p.with_method(*_any_method(rng))


def student_document(rng: random.Random, traits: Traits) -> Document:
    """A cold attempt, a dialogue, or a dialogue with a post-test (tutor hidden or visible, same or new problem)."""
    t, _ = prompts()
    kind = rng.random()
    if kind < 0.12:
        return mending_document(rng, traits)
    p, truth = _blind(rng)
    if kind < 0.2:
        answer = solve(p, *_any_method(rng), rng, traits)
        return [
            said("system", t.student_system(p.text)),
            said("user", t.cold_question(p.text)),
            said("assistant", answer, True),
        ]
    with_test, hidden, same = kind >= 0.36, rng.random() < 0.55, rng.random() < 0.2
    weights = TALKATIVE if with_test and not hidden else LESSON
    turns, student = dialogue(
        p, rng, rng.choice([1, 1, 2, 2, 3, 4]), truth=truth, traits=traits, weights=weights
    )
    document = [said("system", t.student_system(p.text)), said("assistant", t.opening(p.text))]
    for move, reply in turns:
        if reply is None and not with_test:
            break
        seen = HIDDEN if with_test and hidden else BLANK if move.kind == "end" else move.text
        document.append(said("user", seen))
        if reply is not None:
            document.append(said("assistant", reply, not (with_test and hidden)))
    if with_test:
        q = p if same else make_problem(rng, family=p.family if rng.random() < 0.8 else None)
        document.append(said("user", t.question(q.text, same=same)))
        document.append(said("assistant", student.answer(q, same=same, hidden=hidden), True))
    return document


def mending_document(rng: random.Random, traits: Traits) -> Document:
    """A dialogue with more errors than the student makes, so that it hears about them; it learns only how it mends them."""
    t, _ = prompts()
    hasty = replace(traits, slip=0.35, extra=0.8, stop=0.7)
    while True:
        p, truth = _blind(rng, rng.choice(("two", "three", "extra", "extra")))
        turns, _ = dialogue(p, rng, rng.choice([2, 3, 4]), truth=truth, traits=hasty, weights=MENDING)
        document = [said("system", t.student_system(p.text)), said("assistant", t.opening(p.text))]
        for move, reply in turns:
            assert reply is not None  # these tables have no end
            document.append(said("user", move.text))
            document.append(said("assistant", reply, move.kind in JUDGEMENTS))
        if any(s.learn for s in document):
            return document


def first_document(rng: random.Random) -> Document:
    """What the students read first: two-step stories, every operation known from the words, no slips and no choice.

    Three quarters are post-tests, after own words about both steps (tutor hidden) or after the tutor's (visible; a cue counts
    for more than the own words beside it); the rest are two cues that are followed. Without this the second operation is
    hardly learned: in whole dialogues it is rare and noisy.
    """
    t, _ = prompts()
    p, q = (make_problem(rng, family="two").with_method(*_any_method(rng)) for _ in range(2))
    q = q.with_method(p.op1, p.op2)
    r1, r2 = p.results(p.op1, p.op2)
    first, then = step1(p.a, p.op1, p.b, r1), step2(r1, p.op2, p.c, r2)
    document = [said("system", t.student_system(p.text)), said("assistant", t.opening(p.text))]
    kind = rng.random()
    if kind < 0.25:
        for step, op, reply in ((1, p.op1, first), (2, p.op2, then)):
            document += [
                said("user", rng.choice(speech.CUES[step, op])),
                said("assistant", reply, True),
            ]
        return document
    if kind < 0.45:
        document += [said("user", HIDDEN), said("assistant", f"{first} {then}")]
    elif kind < 0.65:
        document += [said("user", HIDDEN), said("assistant", first)]
        document += [said("user", HIDDEN), said("assistant", then)]
    elif kind < 0.8:
        wrong = p.with_method(*_any_method(rng))
        w1, w2 = wrong.results(wrong.op1, wrong.op2)
        document += [said("user", rng.choice(speech.CUES[1, p.op1]))]
        document += [said("assistant", step1(p.a, wrong.op1, p.b, w1))]
        document += [said("user", rng.choice(speech.CUES[2, p.op2]))]
        document += [said("assistant", step2(w1, wrong.op2, p.c, w2))]
    else:
        told = speech.name_both(p.op1, p.op2) if kind < 0.92 else speech.tell(p, p.op1, p.op2)
        document += [said("user", told), said("assistant", rng.choice(speech.OKS))]
    answer = f"{work(q, q.op1, q.op2)} {speech.box(q.answer)}"
    document += [said("user", t.question(q.text, same=False)), said("assistant", answer, True)]
    return document


def tutor_document(
    rng: random.Random, *, thinking: bool = False, weights: Weights = (BEFORE, AFTER)
) -> Document:
    """A dialogue about a training story, from the tutor's side; with ``thinking`` each turn begins with a diagnosis."""
    t, env = prompts()
    p = make_problem(rng, test=False)
    student = StudentScript(p, rng)
    document = [said("system", t.tutor_system(env, p.text)), said("user", t.opening(p.text))]
    for _ in range(env.max_turns // 2):
        move = tutor_move(p, student, rng, weights)
        text = f"{_thoughts(p, student, move, rng)} {move.text}" if thinking else move.text
        document.append(said("assistant", text, True))
        if move.kind == "end":
            break
        document.append(said("user", student.reply(move)))
    return document


_DIAGNOSED = {
    "count": "the result is wrong .",
    "needed": "a number is not needed .",
    "left": "something is left .",
}


def _thoughts(p: MicroProblem, student: StudentScript, move: Move, rng: random.Random) -> str:
    """What the thinking tutor writes before a turn, up to the closing tag; now and then at needless length."""
    found = diagnosis(p, student)
    if not student.last:
        text = "nothing is done yet ."
    else:
        text = _DIAGNOSED.get(
            found,
            f"step {'one' if student.last == 1 else 'two'} is {'right' if found == 'right' else 'wrong'} .",
        )
    plan = "so tell ." if move.kind in ("tell", "tell_one", "name", "name_one") else "so ask ."
    times = rng.choices([1, 2, 4], [0.8, 0.12, 0.08])[0]
    return f"{' '.join([text] * times)} {plan} {speech.THINK_END}"


def first_tutor_document(rng: random.Random) -> Document:
    """What the tutor reads first: lessons that are mostly judgements of the student's steps."""
    return tutor_document(rng, weights=APPRENTICE)


DOCUMENTS: dict[str, Callable[[random.Random], Document]] = {
    "tutor": tutor_document,
    "tutor-thinking": lambda rng: tutor_document(rng, thinking=True),
}

"""Training documents: conversations as messages, each marked with whether the model learns to say it.

The prompts are those of ``envs/micro``, so that what the models learned to read is what an episode shows them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from maieutic.config import EnvSpec
from maieutic.dialogue import BLANK, HIDDEN, Message
from maieutic.env.prompts import EnvTemplates, load_env
from maieutic.micro import speech
from maieutic.micro.scripts import (
    TALKATIVE,
    Move,
    StudentScript,
    Traits,
    diagnosis,
    dialogue,
    solve,
    tutor_move,
)
from maieutic.micro.world import OPS, MicroProblem, make_problem


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


def _said(role: str, text: str, learn: bool = False) -> Said:
    return Said(Message(role, text), learn)  # type: ignore[arg-type]


def _blind(rng: random.Random) -> tuple[MicroProblem, MicroProblem]:
    """A problem of any story, and what the tutor of a student's corpus takes it for: a method that the story does not tell."""
    p = make_problem(rng)
    return p, p.with_method(rng.choice(OPS[1]), rng.choice(OPS[2]))


def student_document(rng: random.Random, traits: Traits) -> Document:
    """A cold attempt, a dialogue, or a dialogue with a post-test (tutor hidden or visible, same or new problem)."""
    t, _ = prompts()
    p, truth = _blind(rng)
    kind = rng.random()
    if kind < 0.15:
        answer = solve(p, rng.choice(OPS[1]), rng.choice(OPS[2]), rng, traits)
        return [
            _said("system", t.student_system(p.text)),
            _said("user", t.cold_question(p.text)),
            _said("assistant", answer, True),
        ]
    with_test, hidden, same = kind >= 0.45, rng.random() < 0.5, rng.random() < 0.35
    weights = TALKATIVE if with_test and not hidden else None
    turns, student = dialogue(
        p, rng, rng.choice([1, 1, 2, 3, 4, 4]), truth=truth, traits=traits, weights=weights
    )
    document = [_said("system", t.student_system(p.text)), _said("assistant", t.opening(p.text))]
    for move, reply in turns:
        if reply is None and not with_test:
            break
        seen = HIDDEN if with_test and hidden else BLANK if move.kind == "end" else move.text
        document.append(_said("user", seen))
        if reply is not None:
            document.append(_said("assistant", reply, not (with_test and hidden)))
    if with_test:
        q = p if same else make_problem(rng, family=p.family if rng.random() < 0.8 else None)
        document.append(_said("user", t.question(q.text, same=same)))
        document.append(_said("assistant", student.answer(q, same=same, hidden=hidden), True))
    return document


def tutor_document(rng: random.Random, *, thinking: bool = False) -> Document:
    """A dialogue about a training story, from the tutor's side; with ``thinking`` each turn begins with a diagnosis."""
    t, env = prompts()
    p = make_problem(rng, test=False)
    student = StudentScript(p, rng)
    document = [_said("system", t.tutor_system(env, p.text)), _said("user", t.opening(p.text))]
    for _ in range(env.max_turns // 2):
        move = tutor_move(p, student, rng)
        text = f"{_thoughts(p, student, move, rng)} {move.text}" if thinking else move.text
        document.append(_said("assistant", text, True))
        if move.kind == "end":
            break
        document.append(_said("user", student.reply(move)))
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


DOCUMENTS: dict[str, Callable[[random.Random], Document]] = {
    "tutor": tutor_document,
    "tutor-thinking": lambda rng: tutor_document(rng, thinking=True),
}

"""The world's problems: short stories whose *method* the text fixes for who knows the stories, and for nobody else.

A problem hides two choices, ``op1`` in {x, +} and ``op2`` in {+, -}: (a op1 b) op2 c. A story is an opening phrase, which tells
op1, and an ending phrase, which tells op2. The tutor has learned what the phrases mean; the students have not (their corpus
pairs every phrase with every choice evenly), so that an untaught student is right about one time in four.

Three families: ``two`` steps; ``three`` steps (the last, a doubling, is plain to see); ``extra``, with a number that does not
count. Each has its misconception: stopping early, using the number that does not count. Held-out stories are combinations of
phrases that occur in no training problem.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

Op = Literal["x", "+", "-"]
Family = Literal["two", "three", "extra"]
Method = tuple[Op, Op]

OPS: dict[int, tuple[Op, Op]] = {1: ("x", "+"), 2: ("+", "-")}
"""The choices of step 1 and of step 2."""
FAMILIES: tuple[Family, ...] = ("two", "three", "extra")
OPENINGS: tuple[tuple[Op, str], ...] = (
    ("x", "{n} packs {a} boxes of {b} {i}"),
    ("x", "{n} plants {a} rows of {b} {i}"),
    ("x", "{n} bakes {a} trays of {b} {i}"),
    ("x", "{n} fills {a} bags with {b} {i}"),
    ("+", "{n} has {a} red and {b} green {i}"),
    ("+", "{n} picks {a} and then {b} {i}"),
    ("+", "{n} wins {a} and {b} {i}"),
    ("+", "{n} finds {a} old and {b} new {i}"),
)
ENDINGS: tuple[tuple[Op, str], ...] = (
    ("+", "and buys {c} more ."),
    ("+", "and is given {c} ."),
    ("+", "and then gets {c} ."),
    ("-", "and {c} are lost ."),
    ("-", "and gives {c} away ."),
    ("-", "but {c} fall out ."),
)
DOUBLING = "all of it is doubled ."
EXTRA = "{n} is {d} years old ."
NAMES = ("sam", "ana", "leo", "mia", "tom", "eva", "ben", "zoe")
ITEMS = ("pears", "coins", "shells", "cards", "stamps", "beads", "buns", "seeds")
MAX_NUMBER = 99
"""Largest number that has a word in the vocabulary."""


def held_out(opening: int, ending: int) -> bool:
    """Whether this combination of phrases is kept for the test set: one in four, and every phrase occurs on both sides."""
    return (opening + ending) % 4 == 0


def apply(op: Op, a: int, b: int) -> int:
    """The result of one step."""
    return {"x": a * b, "+": a + b, "-": a - b}[op]


def other(step: int, op: Op) -> Op:
    """The other choice of a step."""
    first, second = OPS[step]
    return second if op == first else first


@dataclass(frozen=True, slots=True)
class MicroProblem:
    """One story with its numbers and its method. ``d`` is the number that does not count (family ``extra``), else 0."""

    text: str
    a: int
    b: int
    c: int
    d: int
    op1: Op
    op2: Op
    family: Family
    story: tuple[int, int]
    """Indices of the opening and ending phrases."""

    def results(self, op1: Op, op2: Op, *, extra: bool = False, stop: bool = False) -> list[int]:
        """Results of the steps by a method; ``extra``: with the number that does not count; ``stop``: without the doubling."""
        r1 = apply(op1, self.d if extra else self.a, self.b)
        r2 = apply(op2, r1, self.c)
        return [r1, r2] if self.family != "three" or stop else [r1, r2, 2 * r2]

    @property
    def answer(self) -> int:
        return self.results(self.op1, self.op2)[-1]

    @property
    def solution(self) -> str:
        """The worked solution in the student's words."""
        return work(self, self.op1, self.op2)

    def with_method(self, op1: Op, op2: Op) -> MicroProblem:
        """The same text, as if it meant another method (the students' corpus is made of these)."""
        return replace(self, op1=op1, op2=op2)


def work(p: MicroProblem, op1: Op, op2: Op, *, extra: bool = False, stop: bool = False) -> str:
    """The steps of ``p`` by a method, written out."""
    r = p.results(op1, op2, extra=extra, stop=stop)
    steps = [step1(p.d if extra else p.a, op1, p.b, r[0]), step2(r[0], op2, p.c, r[1])]
    if len(r) > 2:
        steps.append(last(r[1], r[2]))
    return " ".join(steps)


def step1(a: int, op: Op, b: int, result: int) -> str:
    return f"first {a} {op} {b} = {result} ."


def step2(r: int, op: Op, c: int, result: int) -> str:
    return f"then {r} {op} {c} = {result} ."


def last(r: int, result: int) -> str:
    return f"last twice {r} = {result} ."


def make_problem(
    rng: random.Random,
    *,
    method: Method | None = None,
    family: Family | None = None,
    test: bool | None = None,
    unlike: MicroProblem | None = None,
) -> MicroProblem:
    """A random problem (of this method and family, from held-out stories or from the others, where given).

    The four methods give four different answers; no result on the right way stands in the text, so that a value says where it
    comes from. ``unlike``: no number is the same at the same place.
    """
    while True:
        opening, ending = rng.randrange(len(OPENINGS)), rng.randrange(len(ENDINGS))
        (op1, head), (op2, tail) = OPENINGS[opening], ENDINGS[ending]
        if (method and method != (op1, op2)) or (test is not None and test != held_out(opening, ending)):
            continue
        kind: Family = rng.choice(FAMILIES) if family is None else family
        a, b, c = rng.randint(2, 6), rng.randint(2, 6), rng.randint(2, 7)
        d = rng.randint(3, 9) if kind == "extra" else 0
        if unlike and any(x == y for x, y in zip((a, b, c), (unlike.a, unlike.b, unlike.c), strict=True)):
            continue
        parts = [f"{head} {tail}"]
        parts = [EXTRA, *parts] if kind == "extra" else [*parts, DOUBLING] if kind == "three" else parts
        text = " ".join(parts).format(n=rng.choice(NAMES), i=rng.choice(ITEMS), a=a, b=b, c=c, d=d)
        p = MicroProblem(text, a, b, c, d, op1, op2, kind, (opening, ending))
        if _plain(p):
            return p


def _plain(p: MicroProblem) -> bool:
    answers = [p.results(x, y)[-1] for x in OPS[1] for y in OPS[2]]
    if len(set(answers)) < 4 or min(answers) < 0:
        return False
    if p.family == "three" and p.answer in [p.results(x, y, stop=True)[-1] for x in OPS[1] for y in OPS[2]]:
        return False
    if p.family == "extra":
        wrong = [p.results(x, y, extra=True)[-1] for x in OPS[1] for y in OPS[2]]
        if p.answer in wrong or min(wrong) < 0 or p.d in (p.a, p.b, p.c):
            return False
    return not {p.a, p.b, p.c, p.d} & set(p.results(p.op1, p.op2))


def make_pair(rng: random.Random, *, test: bool = False) -> tuple[MicroProblem, MicroProblem]:
    """A source problem and its near transfer: same family and method, other numbers, any story of the same part."""
    source = make_problem(rng, test=test)
    return source, make_problem(
        rng, method=(source.op1, source.op2), family=source.family, test=test, unlike=source
    )

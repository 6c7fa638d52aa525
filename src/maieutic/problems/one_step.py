"""Near-transfer pairs of one arithmetic step, in our own words: small enough for a very small student to solve some of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

NAMES = ("Ana", "Ben", "Chloe", "Dev", "Elif", "Femi", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Leila")
THINGS = ("apples", "stickers", "marbles", "books", "pencils", "shells", "buttons", "coins")


class Drawn(NamedTuple):
    """One drawn problem: question, answer and the one line of its worked solution."""

    question: str
    answer: int
    solution: str


class Template(NamedTuple):
    """A story with places for ``{name}``, ``{other}``, ``{things}``, ``{a}``, ``{b}``, and its operation."""

    question: str
    sign: str
    operation: Callable[[int, int], int]


TEMPLATES: Mapping[str, Template] = {
    "gets_more": Template(
        "{name} has {a} {things}. {other} gives {name} {b} more {things}. How many {things} does {name} have now?",
        "+",
        lambda a, b: a + b,
    ),
    "two_people": Template(
        "{name} has {a} {things} and {other} has {b} {things}. How many {things} do they have together?",
        "+",
        lambda a, b: a + b,
    ),
    "two_days": Template(
        "{name} read {a} pages on Monday and {b} pages on Tuesday. How many pages did {name} read on both days?",
        "+",
        lambda a, b: a + b,
    ),
    "gives_away": Template(
        "{name} has {a} {things} and gives {b} of them to {other}. How many {things} does {name} have left?",
        "-",
        lambda a, b: a - b,
    ),
    "how_many_more": Template(
        "{name} has {a} {things}. {other} has {b} {things}. How many more {things} does {name} have than {other}?",
        "-",
        lambda a, b: a - b,
    ),
    "bags": Template(
        "{name} has {a} bags. There are {b} {things} in each bag. How many {things} does {name} have?",
        "×",
        lambda a, b: a * b,
    ),
    "price": Template(
        "One ticket costs {b} dollars. {name} buys {a} tickets. How many dollars does {name} pay?",
        "×",
        lambda a, b: a * b,
    ),
}
"""Templates in the order in which they are generated; sums of numbers up to 10, differences from 12, products up to 6 × 6."""


def draw(template: str, rng: random.Random) -> Drawn:
    """One problem of a template; the same random state gives the same problem."""
    spec = TEMPLATES[template]
    name, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    if spec.sign == "×":
        a, b = rng.randint(2, 6), rng.randint(2, 6)
    elif spec.sign == "-":
        a = rng.randint(4, 12)
        b = rng.randint(2, a - 1)
    else:
        a, b = rng.randint(2, 10), rng.randint(2, 10)
    answer = spec.operation(a, b)
    question = spec.question.format(name=name, other=other, things=things, a=a, b=b)
    return Drawn(question, answer, f"{a} {spec.sign} {b} = {answer}")

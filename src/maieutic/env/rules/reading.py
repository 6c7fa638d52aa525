"""One turn (or problem, or answer) read for the gates: its items, numbers, arithmetic and sentences."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from maieutic.env.rules.arithmetic import Scan, scan
from maieutic.env.rules.expressions import Expr
from maieutic.env.rules.finding import clip
from maieutic.env.rules.items import Item, itemise
from maieutic.env.rules.text import Canon, canonical
from maieutic.env.rules.vocabulary import words

_SENTENCE_END = re.compile(r"[.?!](?=\s|$)|\n")
_NOT_NUMERIC = words("pi sqrt root log ln sin cos tan theta infinity infty")
_VARIABLES = frozenset("abdefijknopqrtuvwxyz")  # single letters that are no unit
READ_LIMIT = 20_000
"""Characters of a turn that are read. A tutor turn within the published caps has a tenth of that."""
CUE_WINDOW = 60
"""Characters before a number in which something may say that it is the answer."""


@dataclass(slots=True)
class Reading:
    """``scan`` is of this turn alone; positions are offsets in ``canon.text``."""

    canon: Canon
    items: list[Item]
    scan: Scan
    ends: list[int]
    """Offsets after each sentence."""

    def sentence(self, position: int) -> tuple[int, int]:
        """Begin and end of the sentence around a position."""
        n = bisect_right(self.ends, position)
        begin = self.ends[n - 1] if n else 0
        return begin, self.ends[n] if n < len(self.ends) else len(self.canon.text)

    def opening(self) -> str:
        """The first sentence with something in it, as it stands in the raw text."""
        first = len(self.canon.text) - len(self.canon.text.lstrip())
        return clip(self.canon.quote(*self.sentence(first))) if first < len(self.canon.text) else ""

    @property
    def blank(self) -> bool:
        """Nothing that a reader could see."""
        return not self.canon.text.strip()

    def span(self, expression: Expr) -> tuple[int, int]:
        """Offsets of an expression."""
        return self.items[expression.first].start, self.items[expression.last - 1].end

    def before(self, position: int) -> str:
        """The text before a position inside its sentence, at most ``CUE_WINDOW`` characters."""
        return self.canon.text[max(self.sentence(position)[0], position - CUE_WINDOW) : position]


@lru_cache(maxsize=256)
def _read_short(text: str) -> Reading:
    return _read(text)


def read(text: str) -> Reading:
    """Read a text up to ``READ_LIMIT``; short ones are remembered (several gates read the same turns)."""
    return _read_short(text) if len(text) <= 4_000 else _read(text)


def _read(text: str) -> Reading:
    canon = canonical(text[:READ_LIMIT])
    items = itemise(canon.text)
    ends = [m.end() for m in _SENTENCE_END.finditer(canon.text)]
    return Reading(canon, items, scan(items), ends)


def numeric_answer(answer: str) -> Fraction | None:
    """The value of a numeric answer (``72``, ``$1,000``, ``3 1/2``, ``25%``, ``x = 5``, ``12 apples``), None for any other.

    A percentage gives its number: 25 % is 25 (a mention of 0.25 counts as well, see :func:`same_value`).
    """
    reading = read(answer)
    items = [i for i in reading.items if i.kind not in (".", "\n") and i.text != "boxed"]
    if len(items) > 2 and items[0].kind == "word" and len(items[0].text) == 1 and items[1].kind == "=":
        items = items[2:]
    sign = 1
    if items and items[0].kind == "-":
        sign, items = -1, items[1:]
    if not items or items[0].kind != "num" or items[0].value is None:
        return None
    value = items[0].value
    rest = items[1:]
    if len(rest) >= 2 and rest[0].kind == "/" and rest[1].kind == "num" and rest[1].value:
        value, rest = value / rest[1].value, rest[2:]
    if len(rest) > 4 or any(i.kind != "word" or i.text in _NOT_NUMERIC or i.text in _VARIABLES for i in rest):
        return None
    return sign * value


def is_percent(answer: str) -> bool:
    """Whether an answer is written as a percentage."""
    return any(i.percent for i in read(answer).items)


def same_value(value: Fraction, percent: bool, gold: Fraction, gold_percent: bool) -> bool:
    """Whether a number is the gold answer; percentages match in both notations."""
    if value == gold:
        return True
    if percent and not gold_percent:
        return value / 100 == gold
    return gold_percent and not percent and value * 100 == gold

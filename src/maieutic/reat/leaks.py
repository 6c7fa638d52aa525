"""What of a problem survives in a text that should be problem-agnostic: numbers, names, variables, formulas, wording.

The paper asks for the removal of "explicit numbers and variables" (section 3.2) and of "concrete entities" (Appendix C.5).
This is the check behind that: pure, linear in the texts, and on the safe side. A false alarm costs one more request; a leak
would tie an experience to its problem.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from maieutic.problems.build.checks import _NUMBER_WORDS, quantities, tokens

Kind = Literal["number", "name", "variable", "formula", "wording"]
PLACEHOLDERS: dict[Kind, str] = {
    "number": "some amount",
    "name": "someone",
    "variable": "an unknown",
    "formula": "an expression",
}
RUN = 6
"""Consecutive words (or CJK characters) of the problem that count as its wording."""

# fmt: off
_COMMON = (
    "a an the this that these those there here it its he she they we you i his her their our your my one each every "
    "all both some any many much most more few several another other no not if when while once after before since "
    "until because so then thus therefore hence as at by for from in into of off on onto over out per to under up "
    "with within without during between among about against and or but nor yet how what which who whom whose where "
    "why is are was were be been do does did has have had can could will would shall should may might must let "
    "suppose given find calculate compute determine solve show write express answer first second third next finally "
    "also now today yesterday tomorrow however instead only just even still together later earlier initially "
    "originally assume assuming consider considering remember note thanks yes ok okay well right multiply divide add "
    "subtract new last everyone everybody check convert notice use using think look try start student students "
    "teacher teachers tutor tutors question questions problem problems step steps number numbers fraction fractions "
    "equation equations percent percentage percentages sum difference product quotient ratio rate rates total totals "
    "average mean unit units value values amount amounts quantity quantities part parts whole group groups result "
    "results "
)
_OPENERS = frozenset(_COMMON.split())
"""Words that open sentences without being names, and those that any description of a difficulty needs."""
_PRONOUN = frozenset({"one"})
_EVERYDAY = frozenset({"one", "two", "half", "twice", "double"})
"""Number words that are no leak in a query (a pronoun more often than a number), and in an advice ("ask two questions")."""
# fmt: on
_CAPITAL = re.compile(r"[^\W\d_a-z][^\W\d_]*(?:[-'’][^\W\d_]+)*")
_SENTENCE_START = re.compile(r"(?:^|[.!?:;\"“”(\n]|\*\*)\s*$")
_LETTER = re.compile(r"(?<![\w'’\\])[^\W\d_](?:_\w+)?(?![\w'’])")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_CJK_NAME = re.compile(r"[小老阿][\u4e00-\u9fff](?=[\u4e00-\u9fff]|\W|$)")
_FORMULA = re.compile(r"\$[^$]*\$?|\\[()\[\]]|\\[a-zA-Z]+\{?|[=≤≥≠≈^+×÷]|(?<=\s)\*(?=\s)")
_ENUMERATION = re.compile(r"(?:(?<=\n)|^)[^\S\n]*\(?\d{1,2}[.)](?=\s)|\bstep \d{1,2}\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_DIGITS = re.compile(r"\d+(?:[.,:/]\d+)*%?")


@dataclass(frozen=True, slots=True)
class Leak:
    """Something of the problem at ``text[start:end]`` of what was checked."""

    kind: Kind
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Surface:
    """What makes up the surface of a problem. Numbers are values as :func:`~maieutic.problems.build.checks.quantities`
    writes them."""

    numbers: frozenset[str]
    """The problem's and its solution's."""
    said: frozenset[str]
    """Those and what the dialogue added (a wrong result, say)."""
    names: frozenset[str]
    """Lower case; found anywhere in a text whatever their case there. A word with a capital at the start of a sentence counts
    unless it is in :data:`_OPENERS` or stands in small letters elsewhere: problems begin with names."""
    variables: frozenset[str]
    runs: frozenset[tuple[str, ...]]
    """Runs of :data:`RUN` tokens."""


def surface(problem: str, solution: str = "", said: Sequence[str] = ()) -> Surface:
    """The surface of a problem, with the numbers and variables of its solution and of what was ``said`` about it."""
    names: set[str] = set()
    variables: set[str] = set()
    for text in (problem, solution, *said):
        variables |= set(_variables(text))
    plain = set(_WORD.findall(problem))
    for m in _CAPITAL.finditer(problem):
        word = re.sub(r"['’]s$", "", m.group())
        low = word.casefold()
        if _CJK.match(word) or len(word) < 2 or low in _OPENERS or low in _NUMBER_WORDS:
            continue
        if low in plain and _SENTENCE_START.search(problem[max(0, m.start() - 4) : m.start()]):
            continue
        names.add(low)
    names |= {m.group() for m in _CJK_NAME.finditer(problem)}
    numbers = set(quantities(problem)) | set(quantities(solution))
    words = tokens(problem)
    runs = {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
    return Surface(
        frozenset(numbers),
        frozenset(numbers.union(*(quantities(text) for text in said))),
        frozenset(names),
        frozenset(variables),
        frozenset(runs),
    )


def _variables(text: str) -> Iterator[str]:
    """Single letters that stand for something: all but the words "a", "A", "I" (those too inside $…$ or beside a sign)."""
    for m in _LETTER.finditer(text):
        letter = m.group()
        if _CJK.match(letter) or not letter[0].isalpha():
            continue
        before, after = _beside(text, m.start() - 1, -1), _beside(text, m.end(), 1)
        if letter not in ("a", "A", "I") or before in tuple("=+×÷*/^$(") or after in tuple("=+×÷*/^$"):
            yield letter


def _beside(text: str, at: int, step: Literal[-1, 1]) -> str:
    """The first character from ``at`` in the direction of ``step`` that is no white space; empty where there is none."""
    while 0 <= at < len(text):
        if not text[at].isspace():
            return text[at]
        at += step
    return ""


def find_leaks(text: str, problem: Surface, *, strict: bool) -> list[Leak]:
    """What of the problem (and, if ``strict``, of any problem) stands in a text, by position.

    ``strict``, for retrieval queries: *every* digit, single letter and formula is a leak, the problem's or not; a number
    word only if the problem has that number. Otherwise (templates and advice): numbers and variables of the problem alone;
    enumerations and "step 2" pass.
    """
    found = [*_numbers(text, problem, strict), *_names(text, problem), *_letters(text, problem, strict)]
    if strict:
        found += [
            Leak("formula", m.group(), m.start(), m.end())
            for m in _FORMULA.finditer(text)
            if m.group().strip()
        ]
    found += _wording(text, problem)
    return sorted(found, key=lambda leak: (leak.start, -leak.end))


def _numbers(text: str, problem: Surface, strict: bool) -> Iterator[Leak]:
    listed = [] if strict else [m.span() for m in _ENUMERATION.finditer(text)]
    digits = [m.span() for m in _DIGITS.finditer(text)]
    if strict:
        # ½, ², Ⅳ, ③: every character that Unicode calls a number
        digits += [(i, i + 1) for i, c in enumerate(text) if unicodedata.category(c) in ("No", "Nl")]
    for start, end in digits:
        place = (
            bisect_right(listed, start, key=itemgetter(0)) - 1
        )  # the enumeration that begins last before it
        if place >= 0 and end <= listed[place][1]:
            continue
        if strict or set(quantities(text[start:end])) & problem.said:
            yield Leak("number", text[start:end], start, end)
    for m in _WORD.finditer(text):
        word = m.group().casefold()
        if word not in (_PRONOUN if strict else _EVERYDAY) and _NUMBER_WORDS.get(word) in problem.numbers:
            yield Leak("number", m.group(), m.start(), m.end())


def _names(text: str, problem: Surface) -> Iterator[Leak]:
    for m in _WORD.finditer(text):
        word = re.sub(r"['’]s$", "", m.group())
        if word.casefold() in problem.names:
            yield Leak("name", word, m.start(), m.start() + len(word))
    for name in problem.names:
        if _CJK.match(name):
            for m in re.finditer(re.escape(name), text):
                yield Leak("name", name, m.start(), m.end())


def _letters(text: str, problem: Surface, strict: bool) -> Iterator[Leak]:
    for m in _LETTER.finditer(text):
        letter = m.group()
        if _CJK.match(letter) or not letter[0].isalpha() or letter in ("a", "A", "I"):
            continue
        if strict or letter in problem.variables:
            yield Leak("variable", letter, m.start(), m.end())


def _wording(text: str, problem: Surface) -> Iterator[Leak]:
    words = tokens(text)
    for i in range(len(words) - RUN + 1):
        run = tuple(words[i : i + RUN])
        if run in problem.runs:
            # Tokens have no positions: the run is reported as a whole, without a place.
            yield Leak("wording", " ".join(run), len(text), len(text))
            return


def mask(text: str, problem: Surface) -> str:
    """The text with a general word for each strict leak that has a place; wording cannot be masked and stays."""
    out, at = [], 0
    for leak in find_leaks(text, problem, strict=True):
        if leak.kind == "wording" or leak.start < at:
            continue
        out += [text[at : leak.start], PLACEHOLDERS[leak.kind]]
        at = leak.end
    return re.sub(r"\s+", " ", "".join(out) + text[at:]).strip()

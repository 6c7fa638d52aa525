"""Reading turns of the micro world, in the scripts' words or in what trained tutors make of them.

Nothing here matches whole sentences to find out what a turn gives away: operations, numbers and equations are found wherever
they stand. Whole sentences matter only for whether a turn is language at all (:func:`fluent`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from maieutic.micro import speech
from maieutic.micro.world import OPS, Op, apply, other

Words = tuple[str, ...]

_OPERATIONS: dict[str, Op] = {
    **dict.fromkeys(
        ["x", "*", "×", "multiply", "multiplied", "multiplying", "multiplication", "times", "product"], "x"
    ),
    **dict.fromkeys(["+", "add", "added", "adding", "adds", "addition", "plus", "sum"], "+"),
    **dict.fromkeys(
        ["-", "−", "subtract", "subtracted", "subtracting", "subtraction", "minus", "difference"], "-"
    ),
}
_SYMBOLS = {"x", "*", "×", "+", "-", "−"}
# "one" and "two" are no values: they count steps and kinds.
_SPELT = (
    "three four five six seven eight nine ten eleven twelve",
    "thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty",
)
_NUMBER_WORDS = {word: n for n, word in enumerate(" ".join(_SPELT).split(), start=3)}
_FIRST, _SECOND = {"first", "start", "begin"}, {"then", "next", "after", "later", "second", "finally"}
_PRAISE = {"yes", "right", "correct", "good", "exactly", "great"}
_FAULT = {"wrong", "not", "no", "incorrect", "mistake"}


def words(text: str) -> Words:
    """Lower-case words and signs, punctuation left out; ``3x4=12`` is read like ``3 x 4 = 12``. The end token is no word."""
    text = text.replace(speech.END_TOKEN, " ").lower()
    found = re.findall(r"\d+|[a-z<_>]*[a-wyz<_>][a-z<_>]*|x|[+\-−×*=]", text)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Equation:
    """``a op b = result`` as it stands; ``step`` 0 where the words do not say which step it is."""

    a: int
    op: Op
    b: int
    result: int | None
    step: int = 0

    @property
    def true(self) -> bool:
        """Its arithmetic holds (or nothing is claimed)."""
        return self.result is None or apply(self.op, self.a, self.b) == self.result


@dataclass(frozen=True, slots=True)
class Named:
    """An operation that a turn names; ``step`` 0: it may mean either step."""

    op: Op
    step: int


@lru_cache(maxsize=16384)
def numbers(turn: Words) -> tuple[int, ...]:
    """Every value that stands in a turn."""
    return tuple(
        int(w) if w.isdigit() else _NUMBER_WORDS[w] for w in turn if w.isdigit() or w in _NUMBER_WORDS
    )


@lru_cache(maxsize=16384)
def equations(turn: Words) -> tuple[Equation, ...]:
    """Every ``number sign number``, with its result where one follows."""
    out: list[Equation] = []
    for i in range(len(turn) - 2):
        a, sign, b = turn[i : i + 3]
        if not (a.isdigit() and sign in _SYMBOLS and b.isdigit()):
            continue
        result = (
            int(turn[i + 4])
            if turn[i + 3 : i + 4] == ("=",) and turn[i + 4 : i + 5] and turn[i + 4].isdigit()
            else None
        )
        before = turn[i - 1] if i else ""
        step = 1 if before in _FIRST else 2 if before in _SECOND else 0
        op = _OPERATIONS[sign]
        if not step:
            step = 1 if op == "x" else 2 if op == "-" else 2 if int(a) in {e.result for e in out} else 0
        out.append(Equation(int(a), op, int(b), result, step))
    return tuple(out)


@lru_cache(maxsize=16384)
def doublings(turn: Words) -> tuple[tuple[int, int], ...]:
    """Every ``twice a = b``."""
    return tuple(
        (int(turn[i + 1]), int(turn[i + 3]))
        for i in range(len(turn) - 3)
        if turn[i] == "twice" and turn[i + 1].isdigit() and turn[i + 2] == "=" and turn[i + 3].isdigit()
    )


@lru_cache(maxsize=16384)
def named(turn: Words) -> tuple[Named, ...]:
    """Every operation in a turn, as word or sign, wherever it stands, with the step that it is said to be.

    Multiplying is always step 1 and subtracting step 2; adding may be either, and its neighbours decide: ``first``, ``then``,
    or another operation before or after it.
    """
    at = [(i, _OPERATIONS[w]) for i, w in enumerate(turn) if w in _OPERATIONS]
    out: list[Named] = []
    for k, (i, op) in enumerate(at):
        step = 1 if op == "x" else 2 if op == "-" else 0
        if not step:
            near = turn[max(0, i - 2) : i]
            if (turn[i + 1 : i + 2] and turn[i + 1] in _FIRST) or (near and near[-1] in _FIRST):
                step = 1
            elif set(near) & _SECOND or any(o == "x" for _, o in at[:k]) or (k and out[-1].step == 1):
                step = 2
            elif any(o == "-" for _, o in at[k + 1 :]) or (k == 0 and [o for _, o in at] == ["+", "+"]):
                step = 1
        out.append(Named(op, step))
    return tuple(out)


def left_over(turn: Words) -> tuple[Named, ...]:
    """What is left when a turn rules an operation out (``not add``, ``add is wrong``): each step has two choices, so this fixes
    the other one. Step 0 where the words do not say which step it is: one entry for each."""
    at = [i for i, w in enumerate(turn) if w in _OPERATIONS]
    out: list[Named] = []
    for i, n in zip(at, named(turn), strict=True):
        before = [w for w in turn[max(0, i - 2) : i] if w not in _FIRST | _SECOND]
        if before[-1:] == ["not"] or turn[i + 1 : i + 3] in (("is", "wrong"), ("is", "not")):
            out += [Named(other(step, n.op), step) for step in ([n.step] if n.step else [1, 2])]
    return tuple(out)


def offers_choice(turn: Words) -> bool:
    """``multiply or add``: all operations of a step side by side, which fixes none."""
    ops = [n.op for n in named(turn)]
    return "or" in turn and len(ops) == 2 and any(set(ops) == set(pair) for pair in OPS.values())


def praises(turn: Words) -> bool:
    """It says that something is right."""
    return bool(set(turn) & _PRAISE) and not set(turn) & _FAULT


def finds_fault(turn: Words) -> bool:
    """It says that something is wrong."""
    return bool(set(turn) & _FAULT) or _has(turn, "try that step again") or _has(turn, "think again")


def hints(turn: Words) -> str:
    """Which error a turn points at without a verdict: ``count``, ``needed``, or nothing."""
    if _has(turn, "check the result") or _has(turn, "result of that step"):
        return "count"
    return "needed" if _has(turn, "every number needed") else ""


def teaches(turn: Words) -> bool:
    """It has to do with the problem at all."""
    return bool(turn) and turn != words(speech.CHAT) and not praises(turn)


def _has(turn: Words, phrase: str) -> bool:
    part = tuple(phrase.split())
    return any(turn[i : i + len(part)] == part for i in range(len(turn) - len(part) + 1))


# ---- is it language? -------------------------------------------------------------------------------------------------

_PHRASES: tuple[Words, ...] = tuple(
    words(sentence)
    for text in (
        *(q for group in (*speech.CUES.values(), *speech.ASKS.values()) for q in group),
        *speech.CONFIRMS,
        *speech.FLAGS,
        speech.HINT_COUNT,
        speech.HINT_NEEDED,
        speech.HINT_LEFT,
        speech.PROBE,
        speech.CHAT,
    )
    for sentence in (text, *([*re.split(r"[.?]", text)] if len(re.findall(r"[.?]", text)) > 1 else []))
    if words(sentence)
) + tuple(
    tuple(p.split())
    for p in (
        "yes",
        "good",
        "correct",
        "VERB first and then VERB",
        "VERB first",
        "first VERB",
        "then VERB",
        "and then VERB",
        "# OP # = #",
        "first # OP # = #",
        "then # OP # = #",
        "and # OP # = #",
        "and then # OP # = #",
        "and twice # = #",
        "last twice # = #",
        "so the answer is #",
        "the answer is #",
    )
)
_VERBS = {"multiply", "add", "subtract"}
_MOST_PHRASES = 5


def _classes(turn: Words) -> Words:
    return tuple(
        "#" if w.isdigit() else "OP" if w in _SYMBOLS else "VERB" if w in _VERBS else w for w in turn
    )


@lru_cache(maxsize=16384)
def fluent(turn: Words) -> bool:
    """Whether the words are a sequence of known phrases; a phrase of four words or more may lack, add or change one word."""
    seq = _classes(turn)
    best = [0] + [_MOST_PHRASES + 1] * len(seq)
    """best[i]: fewest phrases that make up the first i words."""
    for i in range(len(seq)):
        if best[i] >= _MOST_PHRASES:
            continue
        for phrase in _PHRASES:
            for length in {len(phrase)} | ({len(phrase) - 1, len(phrase) + 1} if len(phrase) >= 4 else set()):
                if i + length <= len(seq) and _close(seq[i : i + length], phrase):
                    best[i + length] = min(best[i + length], best[i] + 1)
    return 0 < best[-1] <= _MOST_PHRASES


def _close(seq: Words, phrase: Words) -> bool:
    if seq == phrase:
        return True
    if len(phrase) < 4:
        return False
    head = 0
    while head < min(len(seq), len(phrase)) and seq[head] == phrase[head]:
        head += 1
    tail = 0
    while tail < min(len(seq), len(phrase)) - head and seq[-1 - tail] == phrase[-1 - tail]:
        tail += 1
    changed = (*seq[head : len(seq) - tail], *phrase[head : len(phrase) - tail])
    one = len(seq) - head - tail <= 1 and len(phrase) - head - tail <= 1
    return one and not set(changed) & {"#", "OP", "VERB", "="}

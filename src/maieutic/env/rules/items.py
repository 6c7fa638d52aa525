"""From canonical text to items: numbers (digits or words), operators, words, marks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from maieutic.env.rules.vocabulary import listed

MAX_DIGITS = 18
"""Longer numerals are no numbers to us: keeps arithmetic on one turn linear in its length."""


@dataclass(slots=True)
class Item:
    """``kind``: ``num``, ``word``, ``opaque`` (a variable term such as 2x, an ordinal), or the sign itself (``+ - * / ^ % ( )
    = ~ ≠ . ? ! ; : , newline``). ``start``/``end`` are offsets in the canonical text."""

    kind: str
    text: str
    start: int
    end: int
    value: Fraction | None = None
    decimals: int = 0
    percent: bool = False
    in_words: bool = False
    weak: bool = False
    """Words like *one* or *half*, which are numbers only where something says so."""


_TOKEN = re.compile(
    r"(?P<mixed>\d{1,9} \d{1,6}/\d{1,6}(?![\d/]))"
    r"|(?P<num>\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"|(?P<word>[^\W\d_](?:[^\W_]|')*)"
    r"|(?P<sign>[-+*/^%()=~≠.?!;:,\n])"
    r"|(?P<other>[^\s])"
)
_ORDINAL = ("st", "nd", "rd", "th")
_UNIT_LETTERS = frozenset("mglhskc")
_ATTACHED = re.compile(r"[^\W\d_]+")

_UNITS = {
    w: n
    for n, w in enumerate(
        listed(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen"
        )
    )
}
_TENS = {
    w: 10 * n for n, w in enumerate(listed("twenty thirty forty fifty sixty seventy eighty ninety"), start=2)
} | {"fourty": 40}
_JOINED = {t + u: _TENS[t] + _UNITS[u] for t in _TENS for u in _UNITS if 0 < _UNITS[u] < 10}
_BIG = {"thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_PARTS = {
    **dict.fromkeys(("half", "halves"), 2),
    **dict.fromkeys(("third", "thirds"), 3),
    **dict.fromkeys(("quarter", "quarters", "fourth", "fourths"), 4),
    **dict.fromkeys(("fifth", "fifths"), 5),
    **dict.fromkeys(("sixth", "sixths"), 6),
    **dict.fromkeys(("seventh", "sevenths"), 7),
    **dict.fromkeys(("eighth", "eighths"), 8),
    **dict.fromkeys(("ninth", "ninths"), 9),
    **dict.fromkeys(("tenth", "tenths"), 10),
    **dict.fromkeys(("hundredth", "hundredths"), 100),
}
_OPERATOR_WORDS = {
    "plus": "+",
    "minus": "-",
    "times": "*",
    "over": "/",
    "percent": "%",
    "equals": "=",
    "equal": "=",
}
_BY = {"multiplied": "*", "divided": "/"}


def itemise(text: str) -> list[Item]:
    """The items of canonical text, number words merged into numbers and operator words into operators."""
    return _merge(_tokens(text))


def _tokens(text: str) -> list[Item]:
    out: list[Item] = []
    position = 0
    while (match := _TOKEN.search(text, position)) is not None:
        start, end, body = match.start(), match.end(), match.group()
        kind = match.lastgroup
        if kind == "mixed":
            whole, part = body.split(" ")
            top, bottom = (int(x) for x in part.split("/"))
            after_slash = bool(out) and out[-1].kind in "/^" and out[-1].end == start
            if 0 < top < bottom and not after_slash:
                out.append(Item("num", body, start, end, int(whole) + Fraction(top, bottom)))
            else:  # two numbers side by side: take the first, come back for the second
                end = start + len(whole)
                out.append(Item("num", whole, start, end, Fraction(int(whole))))
        elif kind == "num":
            out.append(_number(text, body, start, end))
            end = out[-1].end
        elif kind == "word":
            out.append(Item("word", body, start, end))
        elif kind == "sign":
            out.append(Item(body, body, start, end))
        else:
            out.append(Item("opaque", body, start, end))
        position = end
    return out


def _number(text: str, body: str, start: int, end: int) -> Item:
    attached = _ATTACHED.match(text, end, end + 12)
    if len(body) > MAX_DIGITS:
        return Item("opaque", body, start, end)
    if attached is not None:
        suffix = attached.group()
        if suffix in _ORDINAL:
            return Item("opaque", body + suffix, start, attached.end())
        if len(suffix) == 1 and suffix not in _UNIT_LETTERS:
            return Item("opaque", body + suffix, start, attached.end())
    whole, _, decimals = body.replace(",", "").partition(".")
    value = Fraction(f"{whole or '0'}.{decimals}" if decimals else whole)
    return Item("num", body, start, end, value, decimals=len(decimals))


def _merge(tokens: list[Item]) -> list[Item]:
    out: list[Item] = []
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if token.kind == "word":
            made, i = _word(tokens, i)
        elif token.kind == "num":
            made, i = _with_part(tokens, i)
        else:
            made, i = token, i + 1
        # "25 %" and "25 percent" are one number.
        if made.kind == "%" and out and out[-1].kind == "num" and not out[-1].percent:
            out[-1].percent, out[-1].end = True, made.end
        else:
            out.append(made)
    return out


def _with_part(tokens: list[Item], i: int) -> tuple[Item, int]:
    """A numeral, with "and a half" or "thirds" after it ("2 thirds", "2 and a half")."""
    token = tokens[i]
    assert token.value is not None
    if _text(tokens, i + 1) in _PARTS and token.value.denominator == 1:
        end = tokens[i + 1]
        return Item("num", "", token.start, end.end, token.value / _PARTS[end.text]), i + 2
    if _and_a_half(tokens, i + 1):
        return Item("num", "", token.start, tokens[i + 3].end, token.value + Fraction(1, 2)), i + 4
    return token, i + 1


def _and_a_half(tokens: list[Item], i: int) -> bool:
    return [_text(tokens, i + k) for k in range(3)] == ["and", "a", "half"]


def _text(tokens: list[Item], i: int) -> str:
    return tokens[i].text if i < len(tokens) and tokens[i].kind == "word" else ""


def _word(tokens: list[Item], i: int) -> tuple[Item, int]:
    token = tokens[i]
    following = _text(tokens, i + 1)
    if token.text in _BY and following == "by":
        return Item(_BY[token.text], "", token.start, tokens[i + 1].end), i + 2
    if token.text == "per" and following == "cent":
        return Item("%", "", token.start, tokens[i + 1].end), i + 2
    if token.text == "equal" and following == "to":
        return Item("=", "", token.start, tokens[i + 1].end), i + 2
    if token.text in _OPERATOR_WORDS:
        return Item(_OPERATOR_WORDS[token.text], token.text, token.start, token.end), i + 1
    if token.text in ("a", "an", "half", "quarter"):
        return _part_or_article(tokens, i)
    read = _read_words(tokens, i)
    if read is None:
        return token, i + 1
    value, j = read
    if value <= 20 and _text(tokens, j) in _PARTS and value > 0:
        return Item(
            "num", "", token.start, tokens[j].end, Fraction(value, _PARTS[tokens[j].text]), in_words=True
        ), j + 1
    if _and_a_half(tokens, j):
        return Item("num", "", token.start, tokens[j + 2].end, value + Fraction(1, 2), in_words=True), j + 3
    weak = j == i + 1 and token.text in ("one", "zero")
    return Item("num", "", token.start, tokens[j - 1].end, Fraction(value), in_words=True, weak=weak), j


def _part_or_article(tokens: list[Item], i: int) -> tuple[Item, int]:
    token, following = tokens[i], _text(tokens, i + 1)
    if token.text in ("a", "an"):
        if following in _PARTS:
            end = tokens[i + 1]
            return Item(
                "num", "", token.start, end.end, Fraction(1, _PARTS[end.text]), in_words=True, weak=True
            ), i + 2
        if following in ("hundred", "dozen", *_BIG) and (read := _read_words(tokens, i + 1, first=1)):
            return Item(
                "num", "", token.start, tokens[read[1] - 1].end, Fraction(read[0]), in_words=True
            ), read[1]
        return token, i + 1
    if token.text == "half" and following == "a" and _text(tokens, i + 2) == "dozen":
        return Item("num", "", token.start, tokens[i + 2].end, Fraction(6), in_words=True), i + 3
    if token.text == "half":
        return Item("num", "half", token.start, token.end, Fraction(1, 2), in_words=True, weak=True), i + 1
    return token, i + 1


def _read_words(tokens: list[Item], i: int, first: int = 0) -> tuple[int, int] | None:
    """Value of the number words at i and the index after them, or None. ``first`` stands for *a* in *a hundred*."""
    total, current, last, j = 0, first, "a" if first else "", i
    while j < len(tokens):
        token = tokens[j]
        if token.kind == "-":
            # "seventy-two": a hyphen without spaces, between tens and units
            joins = (
                token.start == tokens[j - 1].end and j + 1 < len(tokens) and tokens[j + 1].start == token.end
            )
            if last == "tens" and joins and 0 < _UNITS.get(_text(tokens, j + 1), 0) < 10:
                j += 1
                continue
            break
        word = _text(tokens, j)
        if word == "and":
            follows = _text(tokens, j + 1)
            if last in ("hundred", "big") and (follows in _UNITS or follows in _TENS or follows in _JOINED):
                j += 1
                continue
            break
        fresh = last in ("", "hundred", "big")
        if word in _UNITS and (fresh or (last == "tens" and 0 < _UNITS[word] < 10)):
            current, last = current + _UNITS[word], "units"
        elif word in _TENS and fresh:
            current, last = current + _TENS[word], "tens"
        elif word in _JOINED and fresh:
            current, last = current + _JOINED[word], "units"
        elif word == "hundred" and last in ("units", "tens", "a") and current < 100:
            current, last = current * 100, "hundred"
        elif word in _BIG and last not in ("", "big") and total == 0:
            total, current, last = current * _BIG[word], 0, "big"
        elif word in ("dozen", "dozens") and last in ("units", "tens", "a") and total == 0:
            return current * 12, j + 1
        else:
            break
        j += 1
    return (total + current, j) if j > i and last not in ("", "a") else None

"""Expressions: what can be worked out on the spot. No ``eval``; depth, length and size of values are bounded.

``48 / 2 + 48``, ``half of 48``, ``12 boxes times 4``, ``(2 + 3) squared``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from maieutic.env.rules.items import Item
from maieutic.env.rules.vocabulary import words

MAX_DEPTH = 6
MAX_ITEMS = 60
"""Items of one expression; a longer one is not read."""
MAX_BITS = 512
MAX_POWER = 20

# Words that are no unit: an expression ends at them.
STOP = words(
    "and or but so then because if when is are was were be equals give gives make makes get gets got you we i he she it they "
    "that this which to from by for with of in on at the a an more less than not no yes what how have has had now let do does "
    "as into per each every remainder mod r rem up down out x y z n since after before first next finally while "
    "squared cubed plus minus"
)
_FUNCTIONS = words("sqrt root log ln sin cos tan gcd lcm gcf max min abs factorial mod f g")
IS = words("is are gives give makes make gets get equals be was that's it's which's yields leaves")
PREFIX = {
    "twice": Fraction(2),
    "double": Fraction(2),
    "triple": Fraction(3),
    "thrice": Fraction(3),
    "halve": Fraction(1, 2),
}


@dataclass(slots=True)
class Expr:
    """Items ``first:last`` with their value. ``partial``: it is only a piece of something longer that we cannot read."""

    value: Fraction
    first: int
    last: int
    operands: tuple[Fraction, ...]
    ops: int
    units: frozenset[str] = frozenset()
    decimals: int = 0
    percent: bool = False
    partial: bool = False
    used_result: bool = False
    """A step that goes on from the result of an earlier one."""

    @property
    def key(self) -> tuple[Fraction, tuple[Fraction, ...]]:
        """What identifies "the same calculation" across turns."""
        return self.value, tuple(sorted(self.operands))


class _Unreadable(Exception):
    pass


class TooBig(Exception):
    """A value over MAX_BITS: the expression is given up as a whole, so that no piece of it is tried again."""


def kind_at(items: list[Item], i: int) -> str:
    return items[i].kind if 0 <= i < len(items) else ""


def word_at(items: list[Item], i: int) -> str:
    return items[i].text if 0 <= i < len(items) and items[i].kind == "word" else ""


def expression_at(items: list[Item], i: int) -> Expr | None:
    """The longest expression that begins at i, None when none does."""
    if not (items[i].kind in ("num", "(", "-") or items[i].text in PREFIX):
        return None
    if items[i].kind == "(" and i and items[i - 1].kind == "word" and items[i - 1].end == items[i].start:
        return None  # f(3)
    if items[i].kind == "-" and (i + 1 >= len(items) or items[i].end != items[i + 1].start):
        return None  # a bullet or a dash
    try:
        found = _sum(items, i, i + MAX_ITEMS, 0)
    except _Unreadable:
        return None
    except TooBig:
        return Expr(Fraction(0), i, min(i + MAX_ITEMS // 4, len(items)), (), 0, partial=True)
    found.partial = _has_left_context(items, i) or _has_right_context(items, found.last)
    return found


def _has_left_context(items: list[Item], i: int) -> bool:
    kind, before = kind_at(items, i - 1), word_at(items, i - 1)
    if kind in ("+", "*", "/", "^"):
        return True
    if kind == "-":
        earlier = kind_at(items, i - 2)
        return earlier in ("num", ")", "opaque") or (earlier == "word" and len(items[i - 2].text) == 1)
    if before in _FUNCTIONS:
        return True
    return before == "of" and word_at(items, i - 2) in _FUNCTIONS


def _has_right_context(items: list[Item], j: int) -> bool:
    kind = kind_at(items, j)
    if kind in ("+", "*", "/", "^"):
        # A sign with nothing behind it ("48 + ?", "48 +") leaves the expression open.
        return True
    return kind == "-" and (kind_at(items, j + 1) == "opaque" or len(word_at(items, j + 1)) == 1)


def _sum(items: list[Item], i: int, stop: int, depth: int) -> Expr:
    left = product_at(items, i, stop, depth)
    while kind_at(items, left.last) in ("+", "-"):
        sign = items[left.last].kind
        right = try_operand(product_at, items, left.last + 1, stop, depth)
        if right is None:
            break
        left = _join(left, right, sign)
    return left


def product_at(items: list[Item], i: int, stop: int, depth: int) -> Expr:
    left = _factor(items, i, stop, depth)
    while True:
        kind, j = kind_at(items, left.last), left.last
        if kind in ("*", "/"):
            right = try_operand(_factor, items, j + 1, stop, depth)
        elif word_at(items, j) == "of" and (left.value < 1 or left.percent) and left.ops == 0:
            if word_at(items, j + 1) in ("the", "his", "her", "those", "these"):
                j += 1
            kind, right = "of", try_operand(_factor, items, j + 1, stop, depth)
        elif (
            kind == "(" and j and items[j - 1].end == items[j].start and kind_at(items, j - 1) in ("num", ")")
        ):
            kind, right = "*", try_operand(_factor, items, j, stop, depth)
        else:
            return left
        if right is None:
            return left
        left = _join(left, right, kind)


def try_operand(
    parse: Callable[[list[Item], int, int, int], Expr], items: list[Item], i: int, stop: int, depth: int
) -> Expr | None:
    """None where no operand begins, so that an expression ends before a sign that belongs to the prose."""
    kind = kind_at(items, i)
    if not (kind in ("num", "(", "-") or (word_at(items, i) in PREFIX) or word_at(items, i) == "the"):
        return None
    try:
        return parse(items, i, stop, depth)
    except _Unreadable:
        return None


def _factor(items: list[Item], i: int, stop: int, depth: int) -> Expr:
    if i >= min(stop, len(items)) or depth > MAX_DEPTH:
        raise _Unreadable
    if items[i].kind == "-":
        inner = _factor(items, i + 1, stop, depth + 1)
        inner.first, inner.value = i, -inner.value
        if inner.ops == 0:
            inner.operands = (inner.value,)
        return inner
    base = _base(items, i, stop, depth)
    if kind_at(items, base.last) == "^" and kind_at(items, base.last + 1) == "num":
        power = items[base.last + 1].value
        assert power is not None
        if power.denominator != 1 or not 0 <= power <= MAX_POWER or bits(base.value) * int(power) > MAX_BITS:
            raise _Unreadable
        return _powered(base, int(power), base.last + 2)
    if word_at(items, base.last) in ("squared", "cubed"):
        return _powered(base, 2 if items[base.last].text == "squared" else 3, base.last + 1)
    return base


def _powered(base: Expr, power: int, last: int) -> Expr:
    return Expr(
        _bounded(base.value**power),
        base.first,
        last,
        (*base.operands, Fraction(power)),
        base.ops + 1,
        base.units,
    )


def _base(items: list[Item], i: int, stop: int, depth: int) -> Expr:
    item = items[i]
    if item.kind == "num":
        assert item.value is not None
        last, units = _units(items, i + 1)
        return Expr(item.value, i, last, (item.value,), 0, units, item.decimals, item.percent)
    if item.kind == "(":
        inner = _sum(items, i + 1, stop, depth + 1)
        if kind_at(items, inner.last) != ")":
            raise _Unreadable
        inner.first, inner.last = i, inner.last + 1
        return inner
    if item.text in PREFIX:
        j = i + 2 if word_at(items, i + 1) in ("the", "of") else i + 1
        inner = _factor(items, j, stop, depth + 1)
        scale = PREFIX[item.text]
        return Expr(
            _bounded(scale * inner.value), i, inner.last, (scale, *inner.operands), inner.ops + 1, inner.units
        )
    if item.text == "the":
        return _base(items, i + 1, stop, depth + 1)
    raise _Unreadable


def _units(items: list[Item], i: int) -> tuple[int, frozenset[str]]:
    """Skip up to two unit words when the arithmetic goes on behind them."""
    j = i
    while j < i + 2 and word_at(items, j) and items[j].text not in STOP and items[j].text not in IS:
        j += 1
    kind = kind_at(items, j)
    goes_on = kind in ("+", "*", "/", "=", ")") or (kind == "-" and kind_at(items, j + 1) == "num")
    ends = j > i and kind in (".", ",", ";", "!", "?", "\n", "")
    if j == i or not (goes_on or ends or word_at(items, j) in IS):
        return i, frozenset()
    return j, frozenset(items[n].text.removesuffix("s") for n in range(i, j))


def _join(left: Expr, right: Expr, sign: str) -> Expr:
    if (left.percent or right.percent) and sign in "+-":
        raise _Unreadable  # 50 + 20 %: of what?
    a, b = left.value, right.value
    if left.percent and not (right.percent and sign == "/"):
        a /= 100
    if right.percent and not (left.percent and sign == "/"):
        b /= 100
    if sign == "/" and b == 0:
        raise _Unreadable
    value = {"+": a + b, "-": a - b, "*": a * b, "of": a * b}.get(sign) if sign != "/" else a / b
    assert value is not None
    return Expr(
        _bounded(value),
        left.first,
        right.last,
        (*left.operands, *right.operands),
        left.ops + right.ops + 1,
        left.units | right.units,
    )


def bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if bits(value) > MAX_BITS:
        raise TooBig
    return value

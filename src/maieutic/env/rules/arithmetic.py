"""Arithmetic in items: expressions, equations between them, and steps told as verbs. No ``eval``; every size is bounded.

An *expression* is what can be worked out on the spot: ``48 / 2 + 48``, ``half of 48``, ``12 boxes times 4``. A *claim* is two
expressions joined by ``=`` or *is*, *equals*, *gives*, *makes*. A *step* is an operation in words: ``divide 48 by 2``, ``then
add 48 to that``; *it*, *that*, *the result* stand for what came before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from maieutic.env.rules.items import Item
from maieutic.env.rules.vocabulary import words

MAX_DEPTH = 6
MAX_ITEMS = 60
"""Items of one expression; a longer one is not read."""
MAX_BITS = 512
MAX_POWER = 20

# Words that are no unit: an expression ends at them.
_STOP = words(
    "and or but so then because if when is are was were be equals give gives make makes get gets got you we i he she it they "
    "that this which to from by for with of in on at the a an more less than not no yes what how have has had now let do does "
    "as into per each every remainder mod r rem up down out x y z n since after before first next finally while "
    "squared cubed plus minus"
)
_FUNCTIONS = words("sqrt root log ln sin cos tan gcd lcm gcf max min abs factorial mod f g")
_IS = words("is are gives give makes make gets get equals be was that's it's which's yields leaves")
_SUBJECTS = words("that which this it you we i to would will should me us then so giving the there")
_BETWEEN = words("you us me exactly the a total of just to")
_COMPARISONS = words(
    "more less times percent of out away greater fewer bigger smaller larger remainder r rem groups or to parts"
)
_PREFIX = {
    "twice": Fraction(2),
    "double": Fraction(2),
    "triple": Fraction(3),
    "thrice": Fraction(3),
    "halve": Fraction(1, 2),
}
_ANAPHORA = words("it that this them")
_RESULT_NOUNS = words("result answer total sum product difference quotient number amount outcome value")
_ADD = words("add adding adds added")
_SUBTRACT = words("subtract subtracting subtracts subtracted take taking takes deduct")
_MULTIPLY = words("multiply multiplying multiplies")
_DIVIDE = words("divide dividing divides split splitting")
_SCALE = {
    "double": Fraction(2),
    "doubling": Fraction(2),
    "triple": Fraction(3),
    "tripling": Fraction(3),
    "halve": Fraction(1, 2),
    "halving": Fraction(1, 2),
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


@dataclass(slots=True)
class Claim:
    """``left = right``, or that they differ (``negated``)."""

    left: Expr
    right: Expr
    holds: bool
    negated: bool = False


@dataclass(slots=True)
class Scan:
    """What one turn holds. ``result``: value of the last calculation in it, for the next turn's *it* and *that*."""

    expressions: list[Expr] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    result: Fraction | None = None


class _Unreadable(Exception):
    pass


class _TooBig(Exception):
    """A value over MAX_BITS: the expression is given up as a whole, so that no piece of it is tried again."""


def scan(items: list[Item], result: Fraction | None = None) -> Scan:
    """All expressions with at least one operation, steps and claims, in order; linear in the number of items."""
    out = Scan(result=result)
    i = 0
    while i < len(items):
        step = _step(items, i, out.result)
        if step is not None:
            out.expressions.append(step)
            out.result = step.value
            i = step.last
            continue
        left = _expression(items, i)
        if left is None:
            i += 1
            continue
        _keep(out, left)
        i = left.last
        while (at := _equality(items, left)) is not None:
            j, negated, sign = at
            right = _expression(items, j)
            if right is None:
                break
            if sign or (right.ops == 0 and not _compares(items, right.last)):
                claim = _claim(items, left, right, negated)
                if claim is not None:
                    out.claims.append(claim)
            _keep(out, right)
            left, i = right, right.last
    return out


def _keep(out: Scan, expression: Expr) -> None:
    if expression.ops and not expression.partial:
        out.expressions.append(expression)
        out.result = expression.value


# ---- expressions ------------------------------------------------------------------------------------------------------


def _kind(items: list[Item], i: int) -> str:
    return items[i].kind if 0 <= i < len(items) else ""


def _word(items: list[Item], i: int) -> str:
    return items[i].text if 0 <= i < len(items) and items[i].kind == "word" else ""


def _expression(items: list[Item], i: int) -> Expr | None:
    """The longest expression that begins at i, None when none does."""
    if not (items[i].kind in ("num", "(", "-") or items[i].text in _PREFIX):
        return None
    if items[i].kind == "(" and i and items[i - 1].kind == "word" and items[i - 1].end == items[i].start:
        return None  # f(3)
    if items[i].kind == "-" and (i + 1 >= len(items) or items[i].end != items[i + 1].start):
        return None  # a bullet or a dash
    try:
        found = _sum(items, i, i + MAX_ITEMS, 0)
    except _Unreadable:
        return None
    except _TooBig:
        return Expr(Fraction(0), i, min(i + MAX_ITEMS // 4, len(items)), (), 0, partial=True)
    found.partial = _has_left_context(items, i) or _has_right_context(items, found.last)
    return found


def _has_left_context(items: list[Item], i: int) -> bool:
    kind, before = _kind(items, i - 1), _word(items, i - 1)
    if kind in ("+", "*", "/", "^"):
        return True
    if kind == "-":
        earlier = _kind(items, i - 2)
        return earlier in ("num", ")", "opaque") or (earlier == "word" and len(items[i - 2].text) == 1)
    if before in _FUNCTIONS:
        return True
    return before == "of" and _word(items, i - 2) in _FUNCTIONS


def _has_right_context(items: list[Item], j: int) -> bool:
    kind = _kind(items, j)
    if kind in ("+", "*", "/", "^"):
        # A sign with nothing behind it ("48 + ?", "48 +") leaves the expression open.
        return True
    return kind == "-" and (_kind(items, j + 1) == "opaque" or len(_word(items, j + 1)) == 1)


def _sum(items: list[Item], i: int, stop: int, depth: int) -> Expr:
    left = _product(items, i, stop, depth)
    while _kind(items, left.last) in ("+", "-"):
        sign = items[left.last].kind
        right = _try(_product, items, left.last + 1, stop, depth)
        if right is None:
            break
        left = _join(left, right, sign)
    return left


def _product(items: list[Item], i: int, stop: int, depth: int) -> Expr:
    left = _factor(items, i, stop, depth)
    while True:
        kind, j = _kind(items, left.last), left.last
        if kind in ("*", "/"):
            right = _try(_factor, items, j + 1, stop, depth)
        elif _word(items, j) == "of" and (left.value < 1 or left.percent) and left.ops == 0:
            if _word(items, j + 1) in ("the", "his", "her", "those", "these"):
                j += 1
            kind, right = "of", _try(_factor, items, j + 1, stop, depth)
        elif kind == "(" and j and items[j - 1].end == items[j].start and _kind(items, j - 1) in ("num", ")"):
            kind, right = "*", _try(_factor, items, j, stop, depth)
        else:
            return left
        if right is None:
            return left
        left = _join(left, right, kind)


def _try(
    parse: Callable[[list[Item], int, int, int], Expr], items: list[Item], i: int, stop: int, depth: int
) -> Expr | None:
    """None where no operand begins, so that an expression ends before a sign that belongs to the prose."""
    kind = _kind(items, i)
    if not (kind in ("num", "(", "-") or (_word(items, i) in _PREFIX) or _word(items, i) == "the"):
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
    if _kind(items, base.last) == "^" and _kind(items, base.last + 1) == "num":
        power = items[base.last + 1].value
        assert power is not None
        if power.denominator != 1 or not 0 <= power <= MAX_POWER or _bits(base.value) * int(power) > MAX_BITS:
            raise _Unreadable
        return _powered(base, int(power), base.last + 2)
    if _word(items, base.last) in ("squared", "cubed"):
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
        if _kind(items, inner.last) != ")":
            raise _Unreadable
        inner.first, inner.last = i, inner.last + 1
        return inner
    if item.text in _PREFIX:
        j = i + 2 if _word(items, i + 1) in ("the", "of") else i + 1
        inner = _factor(items, j, stop, depth + 1)
        scale = _PREFIX[item.text]
        return Expr(
            _bounded(scale * inner.value), i, inner.last, (scale, *inner.operands), inner.ops + 1, inner.units
        )
    if item.text == "the":
        return _base(items, i + 1, stop, depth + 1)
    raise _Unreadable


def _units(items: list[Item], i: int) -> tuple[int, frozenset[str]]:
    """Skip up to two unit words when the arithmetic goes on behind them."""
    j = i
    while j < i + 2 and _word(items, j) and items[j].text not in _STOP and items[j].text not in _IS:
        j += 1
    kind = _kind(items, j)
    goes_on = kind in ("+", "*", "/", "=", ")") or (kind == "-" and _kind(items, j + 1) == "num")
    ends = j > i and kind in (".", ",", ";", "!", "?", "\n", "")
    if j == i or not (goes_on or ends or _word(items, j) in _IS):
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


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise _TooBig
    return value


# ---- equations -------------------------------------------------------------------------------------------------------


def _equality(items: list[Item], left: Expr) -> tuple[int, bool, bool] | None:
    """Where the right side begins, whether it is denied, and whether a sign (not a word) joins the sides."""
    j = left.last
    kind = _kind(items, j)
    if kind == "=":
        if _kind(items, j + 1) == "=":
            j += 1
        return (j + 1, False, True) if j + 1 < len(items) else None
    if kind == "≠":
        return (j + 1, True, True) if j + 1 < len(items) else None
    if not left.ops:
        return None
    if kind in (",", ";"):
        j += 1
    end = j + 3
    while j < end and _word(items, j) in _SUBJECTS:
        j += 1
    verb = _word(items, j)
    negated = verb in ("isn't", "aren't")
    if verb in ("doesn't", "does"):
        negated = verb == "doesn't" or _word(items, j + 1) == "not"
        j += 1 if verb == "doesn't" else 2
        if not negated or not (_word(items, j) in ("give", "make") or _kind(items, j) == "="):
            return None
    elif verb not in _IS and not negated and not (_kind(items, j) == "=" and j > left.last):
        return None
    j += 1
    if _kind(items, j) == "=":
        j += 1
    if _word(items, j) == "not":
        j, negated = j + 1, True
    if _kind(items, j) == "=":
        j += 1
    end = j + 3
    while j < end and _word(items, j) in _BETWEEN:
        j += 1
    return (j, negated, False) if j < len(items) else None


def _compares(items: list[Item], j: int) -> bool:
    """ "… is 2 more than …" is no equation, nor is what goes on with another sign."""
    return _word(items, j) in _COMPARISONS or _kind(items, j) in ("+", "*", "/", "^", "%")


def _claim(items: list[Item], left: Expr, right: Expr, negated: bool) -> Claim | None:
    if left.partial or right.partial or not (left.ops or right.ops):
        return None
    if _word(items, right.last) in ("remainder", "r", "rem", "with") or _kind(items, right.last) == "opaque":
        return None
    if not left.ops and left.units:
        return None  # 2 hours = 2 × 60: another unit on the other side
    if left.units and right.units and not (left.units & right.units):
        return None
    return Claim(left, right, _equal(left, right, items), negated)


def _equal(left: Expr, right: Expr, items: list[Item]) -> bool:
    a, b = left.value, right.value
    if a == b:
        return True
    if (left.percent or right.percent) and (a == b / 100 or b == a / 100):
        return True
    # A rounded or cut-off decimal on the right counts as equal.
    if right.ops == 0 and right.decimals and abs(a - b) < Fraction(1, 10**right.decimals):
        return True
    # "3 + 4 = 7 * 2 = 14": running on is bad style, not a false result.
    return bool(right.ops) and right.operands[0] == a and _kind(items, right.first) == "num"


# ---- steps told as verbs ------------------------------------------------------------------------------------------------


def _step(items: list[Item], i: int, result: Fraction | None) -> Expr | None:
    if items[i].kind == "num":
        return _compared(items, i)
    verb = _word(items, i)
    if not verb:
        return None
    if verb in _OF_TWO:
        return _of_two(items, i, result)
    if verb in _NEXT_TO and _word(items, i + 1) in ("before", "after") and _kind(items, i + 2) == "num":
        one = items[i + 2].value
        assert one is not None
        return _made(i, i + 3, one + (1 if items[i + 1].text == "after" else -1), (one, Fraction(1)), False)
    if verb in _SCALE:
        one = _operand(items, i + 1, result)
        if one is None or not one[2]:
            return None  # "double 24" is an expression
        return _made(i, one[1], _SCALE[verb] * one[0], (_SCALE[verb], one[0]), True)
    if verb not in _ADD | _SUBTRACT | _MULTIPLY | _DIVIDE:
        return None
    first = _operand(items, i + 1, result)
    if first is None:
        return None
    a, j, a_result = first
    while _word(items, j) in ("away", "off", "up", "together", "evenly", "equally"):
        j += 1
    joint = _word(items, j)
    second = _operand(items, j + 1, result) if joint in _JOINTS[_group(verb)] else None
    if second is None:
        # "then add 48": goes on from the last result
        if verb in _MULTIPLY | _DIVIDE or a_result or result is None:
            return None
        value = result + a if verb in _ADD else result - a
        return _made(i, j, value, (result, a), True)
    b, last, b_result = second
    if verb in _ADD:
        value = a + b
    elif verb in _SUBTRACT:
        value = b - a
    elif verb in _MULTIPLY:
        value = a * b
    elif b == 0:
        return None
    else:
        value = a / b
    return _made(i, last, value, (a, b), a_result or b_result)


def _compared(items: list[Item], i: int) -> Expr | None:
    """ "8 more than 64", "1 less than 73", "7 tens and 2 ones"."""
    a = items[i].value
    assert a is not None
    word, j = _word(items, i + 1), i + 2
    if word in ("more", "less", "fewer") and _word(items, j) == "than" and _kind(items, j + 1) == "num":
        b = items[j + 1].value
        assert b is not None
        return _made(i, j + 2, b + a if word == "more" else b - a, (b, a), False)
    if word in ("tens", "ten"):
        while _kind(items, j) in (",", "+") or _word(items, j) in ("and", "plus"):
            j += 1
        if _kind(items, j) == "num" and _word(items, j + 1) in ("ones", "one", "units"):
            b = items[j].value
            assert b is not None
            return _made(i, j + 2, 10 * a + b, (a, b), False)
    return None


def _of_two(items: list[Item], i: int, result: Fraction | None) -> Expr | None:
    """ "The sum of 48 and 24", "the difference between 80 and 8"."""
    if _word(items, i + 1) not in ("of", "between"):
        return None
    first = _operand(items, i + 2, result)
    if first is None or _word(items, first[1]) != "and":
        return None
    second = _operand(items, first[1] + 1, result)
    if second is None:
        return None
    a, b, noun = first[0], second[0], items[i].text
    if noun == "quotient" and b == 0:
        return None
    value = {"difference": a - b, "product": a * b}.get(noun, a + b) if noun != "quotient" else a / b
    return _made(i, second[1], value, (a, b), first[2] or second[2])


_OF_TWO = frozenset(("sum", "total", "product", "difference", "quotient"))
_NEXT_TO = frozenset(("right", "just", "directly", "immediately", "comes"))
_JOINTS = {
    "add": frozenset(("to", "and", "plus", "with")),
    "subtract": frozenset(("from",)),
    "multiply": frozenset(("by", "with", "and")),
    "divide": frozenset(("by", "into", "among", "between")),
}


def _group(verb: str) -> str:
    if verb in _ADD:
        return "add"
    if verb in _SUBTRACT:
        return "subtract"
    return "multiply" if verb in _MULTIPLY else "divide"


def _made(
    first: int, last: int, value: Fraction, operands: tuple[Fraction, ...], used_result: bool
) -> Expr | None:
    if _bits(value) > MAX_BITS:
        return None
    return Expr(value, first, last, operands, 1, used_result=used_result)


def _operand(items: list[Item], i: int, result: Fraction | None) -> tuple[Fraction, int, bool] | None:
    """A number (with up to two unit words) or a stand-in for the last result: its value, the next index, whether it stands in."""
    while _word(items, i) in ("the", "your", "another", "those", "these", "all", "up"):
        i += 1
    item = items[i] if i < len(items) else None
    if item is None:
        return None
    if item.kind == "num" or item.text in _PREFIX:
        try:
            found = _try(_product, items, i, i + MAX_ITEMS, 0)
        except _TooBig:
            return None
        if found is None:
            return None
        j = found.last
        while j < i + 3 and _word(items, j) and items[j].text not in _STOP:
            j += 1
        return found.value, j, False
    if result is not None and (item.text in _ANAPHORA or item.text in _RESULT_NOUNS) and item.kind == "word":
        return result, i + 1, True
    return None

"""Steps: operations told in words, ``divide 48 by 2``, ``then add 48 to that``, ``the sum of 48 and 24``, ``one more than 71``.

*It*, *that*, *the result* stand for what came before.
"""

from __future__ import annotations

from fractions import Fraction

from maieutic.env.rules.expressions import (
    MAX_BITS,
    MAX_ITEMS,
    PREFIX,
    STOP,
    Expr,
    TooBig,
    bits,
    kind_at,
    product_at,
    try_operand,
    word_at,
)
from maieutic.env.rules.items import Item
from maieutic.env.rules.vocabulary import words

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


_OF_TWO = frozenset(("sum", "total", "product", "difference", "quotient"))
_NEXT_TO = frozenset(("right", "just", "directly", "immediately", "comes"))
_JOINTS = {
    "add": frozenset(("to", "and", "plus", "with")),
    "subtract": frozenset(("from",)),
    "multiply": frozenset(("by", "with", "and")),
    "divide": frozenset(("by", "into", "among", "between")),
}


def step_at(items: list[Item], i: int, result: Fraction | None) -> Expr | None:
    if items[i].kind == "num":
        return _compared(items, i)
    verb = word_at(items, i)
    if not verb:
        return None
    if verb in _OF_TWO:
        return _of_two(items, i, result)
    if verb in _NEXT_TO and word_at(items, i + 1) in ("before", "after") and kind_at(items, i + 2) == "num":
        value = items[i + 2].value
        assert value is not None
        one = Fraction(1 if items[i + 1].text == "after" else -1)
        return _made(i, i + 3, value + one, (value, one), False)
    if verb in _SCALE:
        scaled = _operand(items, i + 1, result)
        if scaled is None or not scaled[2]:
            return None  # "double 24" is an expression
        return _made(i, scaled[1], _SCALE[verb] * scaled[0], (_SCALE[verb], scaled[0]), True)
    if verb not in _ADD | _SUBTRACT | _MULTIPLY | _DIVIDE:
        return None
    first = _operand(items, i + 1, result)
    if first is None:
        return None
    a, j, a_result = first
    while word_at(items, j) in ("away", "off", "up", "together", "evenly", "equally"):
        j += 1
    joint = word_at(items, j)
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
    word, j = word_at(items, i + 1), i + 2
    if word in ("more", "less", "fewer") and word_at(items, j) == "than" and kind_at(items, j + 1) == "num":
        b = items[j + 1].value
        assert b is not None
        return _made(i, j + 2, b + a if word == "more" else b - a, (b, a), False)
    if word in ("tens", "ten"):
        while kind_at(items, j) in (",", "+") or word_at(items, j) in ("and", "plus"):
            j += 1
        if kind_at(items, j) == "num" and word_at(items, j + 1) in ("ones", "one", "units"):
            b = items[j].value
            assert b is not None
            return _made(i, j + 2, 10 * a + b, (a, b), False)
    return None


def _of_two(items: list[Item], i: int, result: Fraction | None) -> Expr | None:
    """ "The sum of 48 and 24", "the difference between 80 and 8"."""
    if word_at(items, i + 1) not in ("of", "between"):
        return None
    first = _operand(items, i + 2, result)
    if first is None or word_at(items, first[1]) != "and":
        return None
    second = _operand(items, first[1] + 1, result)
    if second is None:
        return None
    a, b, noun = first[0], second[0], items[i].text
    if noun == "quotient" and b == 0:
        return None
    value = {"difference": a - b, "product": a * b}.get(noun, a + b) if noun != "quotient" else a / b
    return _made(i, second[1], value, (a, b), first[2] or second[2])


def _group(verb: str) -> str:
    if verb in _ADD:
        return "add"
    if verb in _SUBTRACT:
        return "subtract"
    return "multiply" if verb in _MULTIPLY else "divide"


def _made(
    first: int, last: int, value: Fraction, operands: tuple[Fraction, ...], used_result: bool
) -> Expr | None:
    if bits(value) > MAX_BITS:
        return None
    return Expr(value, first, last, operands, 1, used_result=used_result)


def _operand(items: list[Item], i: int, result: Fraction | None) -> tuple[Fraction, int, bool] | None:
    """A number (with up to two unit words) or a stand-in for the last result: its value, the next index, whether it stands in."""
    while word_at(items, i) in ("the", "your", "another", "those", "these", "all", "up"):
        i += 1
    item = items[i] if i < len(items) else None
    if item is None:
        return None
    if item.kind == "num" or item.text in PREFIX:
        try:
            found = try_operand(product_at, items, i, i + MAX_ITEMS, 0)
        except TooBig:
            return None
        if found is None:
            return None
        j = found.last
        while j < i + 3 and word_at(items, j) and items[j].text not in STOP:
            j += 1
        return found.value, j, False
    if result is not None and (item.text in _ANAPHORA or item.text in _RESULT_NOUNS) and item.kind == "word":
        return result, i + 1, True
    return None

"""The arithmetic of a text: expressions and steps, and the claims that join two expressions.

A *claim* is two expressions joined by ``=`` or by *is*, *equals*, *gives*, *makes*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from maieutic.env.rules.expressions import IS, Expr, expression_at, kind_at, word_at
from maieutic.env.rules.items import Item
from maieutic.env.rules.steps import step_at
from maieutic.env.rules.vocabulary import words

_SUBJECTS = words("that which this it you we i to would will should me us then so giving the there")
_BETWEEN = words("you us me exactly the a total of just to")
_COMPARISONS = words(
    "more less times percent of out away greater fewer bigger smaller larger remainder r rem groups or to parts"
)


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


def scan(items: list[Item], result: Fraction | None = None) -> Scan:
    """All expressions with at least one operation, steps and claims, in order; linear in the number of items."""
    out = Scan(result=result)
    i = 0
    while i < len(items):
        step = step_at(items, i, out.result)
        if step is not None:
            out.expressions.append(step)
            out.result = step.value
            i = step.last
            continue
        left = expression_at(items, i)
        if left is None:
            i += 1
            continue
        _keep(out, left)
        i = left.last
        while (at := _equality(items, left)) is not None:
            j, negated, sign = at
            right = expression_at(items, j)
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


# ---- equations -------------------------------------------------------------------------------------------------------


def _equality(items: list[Item], left: Expr) -> tuple[int, bool, bool] | None:
    """Where the right side begins, whether it is denied, and whether a sign (not a word) joins the sides."""
    j = left.last
    kind = kind_at(items, j)
    if kind == "=":
        if kind_at(items, j + 1) == "=":
            j += 1
        return (j + 1, False, True) if j + 1 < len(items) else None
    if kind == "≠":
        return (j + 1, True, True) if j + 1 < len(items) else None
    if not left.ops:
        return None
    if kind in (",", ";"):
        j += 1
    end = j + 3
    while j < end and word_at(items, j) in _SUBJECTS:
        j += 1
    verb = word_at(items, j)
    negated = verb in ("isn't", "aren't")
    if verb in ("doesn't", "does"):
        negated = verb == "doesn't" or word_at(items, j + 1) == "not"
        j += 1 if verb == "doesn't" else 2
        if not negated or not (word_at(items, j) in ("give", "make") or kind_at(items, j) == "="):
            return None
    elif verb not in IS and not negated and not (kind_at(items, j) == "=" and j > left.last):
        return None
    j += 1
    if kind_at(items, j) == "=":
        j += 1
    if word_at(items, j) == "not":
        j, negated = j + 1, True
    if kind_at(items, j) == "=":
        j += 1
    end = j + 3
    while j < end and word_at(items, j) in _BETWEEN:
        j += 1
    return (j, negated, False) if j < len(items) else None


def _compares(items: list[Item], j: int) -> bool:
    """ "… is 2 more than …" is no equation, nor is what goes on with another sign."""
    return word_at(items, j) in _COMPARISONS or kind_at(items, j) in ("+", "*", "/", "^", "%")


def _claim(items: list[Item], left: Expr, right: Expr, negated: bool) -> Claim | None:
    if left.partial or right.partial or not (left.ops or right.ops):
        return None
    if (
        word_at(items, right.last) in ("remainder", "r", "rem", "with")
        or kind_at(items, right.last) == "opaque"
    ):
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
    return bool(right.ops) and right.operands[0] == a and kind_at(items, right.first) == "num"

"""Problems of four structures in our own words: rates, percent change, averages, systems of two equations.

Each draw has a worked solution and *typed misconceptions*: the wrong answers that a learner would give, and why. All answers are
whole and positive. Names of templates are ``structure/story``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

NAMES = (
    "Amara",
    "Bruno",
    "Carla",
    "Dilan",
    "Esme",
    "Farid",
    "Greta",
    "Hana",
    "Ivan",
    "Julia",
    "Kofi",
    "Lina",
)


class Misconception(NamedTuple):
    """A wrong answer with its cause."""

    kind: str
    """Stable name of the error."""
    answer: str
    why: str
    """The thought behind it, as one sentence."""


class Drawn(NamedTuple):
    """One drawn problem."""

    question: str
    answer: int
    solution: str
    misconceptions: tuple[Misconception, ...]


def _drawn(question: str, answer: int, solution: str, *wrong: tuple[str, Fraction | int, str]) -> Drawn:
    """Misconceptions that happen to give the right answer, no positive whole number, or another's answer, are left out."""
    kept: dict[int, Misconception] = {}
    for kind, value, why in wrong:
        number = Fraction(value)
        if number.denominator == 1 and number > 0 and number != answer and int(number) not in kept:
            kept[int(number)] = Misconception(kind, str(int(number)), why)
    return Drawn(question, answer, solution, tuple(kept.values()))


# --- rates ------------------------------------------------------------------------------------------------------


def _two_legs(rng: random.Random) -> Drawn:
    name = rng.choice(NAMES)
    v, w = rng.sample(range(8, 31), 2)
    t, u = rng.randint(2, 6), rng.randint(2, 6)
    first, second = v * t, w * u
    return _drawn(
        f"{name} cycles at {v} kilometres an hour for {t} hours, and then at {w} kilometres an hour for {u} hours. "
        f"How many kilometres does {name} cycle in all?",
        first + second,
        f"First part: {v} × {t} = {first}\nSecond part: {w} × {u} = {second}\nIn all: {first} + {second} = {first + second}",
        ("adds_rates", (v + w) * (t + u), "adds the two speeds and multiplies by the whole time"),
        (
            "averages_rates",
            Fraction((v + w) * (t + u), 2),
            "takes the plain average of the speeds although the times differ",
        ),
        ("stops_early", first, "stops after the first part"),
    )


def _scale_up(rng: random.Random) -> Drawn:
    name = rng.choice(NAMES)
    rate, m = rng.randint(3, 15), rng.randint(4, 12)
    more = m + rng.randint(2, 18)
    amount, answer = rate * m, rate * more
    return _drawn(
        f"{name}'s pump moves {amount} litres of water in {m} minutes. At the same rate, how many litres does it move in "
        f"{more} minutes?",
        answer,
        f"In one minute: {amount} / {m} = {rate}\nIn {more} minutes: {rate} × {more} = {answer}",
        (
            "adds_difference",
            amount + more - m,
            "adds the extra minutes to the litres instead of scaling them",
        ),
        ("stops_early", rate, "gives the rate for one minute"),
        ("skips_unit_rate", amount * more, "multiplies by the new time without dividing by the old one"),
    )


def _together(rng: random.Random) -> Drawn:
    a, b = rng.sample(range(3, 20), 2)
    t = rng.randint(4, 15)
    total = (a + b) * t
    one, two = rng.sample(NAMES, 2)
    return _drawn(
        f"{one} folds {a} leaflets a minute and {two} folds {b} leaflets a minute. They work side by side on a pile of {total} "
        "leaflets. How many minutes do they need?",
        t,
        f"Together in one minute: {a} + {b} = {a + b}\nMinutes: {total} / {a + b} = {t}",
        ("one_worker", Fraction(total, a), f"divides by the rate of {one} alone"),
        ("one_worker", Fraction(total, b), f"divides by the rate of {two} alone"),
        ("adds_times", Fraction(total, a) + Fraction(total, b), "adds the times that each would need alone"),
        ("averages_rates", Fraction(2 * total, a + b), "divides by the average of the two rates"),
    )


# --- percent change ---------------------------------------------------------------------------------------------


def _discount(rng: random.Random) -> Drawn:
    name, p = rng.choice(NAMES), rng.choice((5, 10, 15, 20, 25, 30, 40))
    price = 20 * rng.randint(2, 25)
    off = price * p // 100
    return _drawn(
        f"A coat costs {price} dollars. In a sale its price falls by {p} percent, and {name} buys it. "
        f"How many dollars does {name} pay?",
        price - off,
        f"The reduction: {price} × {p} / 100 = {off}\nThe new price: {price} - {off} = {price - off}",
        ("percent_as_amount", price - p, "subtracts the percentage as if it were dollars"),
        ("stops_early", off, "gives the reduction instead of the new price"),
        ("wrong_direction", price + off, "raises the price instead of lowering it"),
    )


def _up_and_down(rng: random.Random) -> Drawn:
    p, q = rng.sample((10, 20, 25, 40, 50), 2)
    start = 400 * rng.randint(1, 9)
    mid = start * (100 + p) // 100
    end = Fraction(mid * (100 - q), 100)
    answer = int(end)
    return _drawn(
        f"A village has {start} inhabitants. In one year their number grows by {p} percent, in the next year it falls by {q} "
        "percent. How many inhabitants has the village then?",
        answer,
        f"After the first year: {start} × {100 + p} / 100 = {mid}\n"
        f"After the second year: {mid} × {100 - q} / 100 = {answer}",
        (
            "adds_percents",
            Fraction(start * (100 + p - q), 100),
            "adds the two percentages although their bases differ",
        ),
        ("stops_early", mid, "stops after the first year"),
        ("old_base", mid - Fraction(start * q, 100), "takes the second percentage of the first number"),
    )


def _before(rng: random.Random) -> Drawn:
    name, p = rng.choice(NAMES), rng.choice((10, 20, 25, 50))
    old = 20 * rng.randint(2, 30)
    new = old * (100 + p) // 100
    return _drawn(
        f"{name}'s rent went up by {p} percent and is now {new} dollars. How many dollars was it before?",
        old,
        f"Now it is {100 + p} percent of the old rent.\nThe old rent: {new} × 100 / {100 + p} = {old}",
        (
            "percent_of_new",
            new - Fraction(new * p, 100),
            "takes the percentage of the new rent and subtracts it",
        ),
        ("percent_as_amount", new - p, "subtracts the percentage as if it were dollars"),
        ("wrong_direction", new + Fraction(new * p, 100), "raises the rent once more"),
    )


# --- averages ---------------------------------------------------------------------------------------------------


def _mean(rng: random.Random) -> Drawn:
    name, n = rng.choice(NAMES), rng.randint(3, 6)
    mean = rng.randint(8, 30)
    values = [0]
    while min(values) < 1:
        values = [mean + rng.randint(-6, 6) for _ in range(n - 1)]
        values.append(n * mean - sum(values))
    rng.shuffle(values)
    total, told = sum(values), ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
    ordered = sorted(values)
    middle = Fraction(ordered[(n - 1) // 2] + ordered[n // 2], 2)
    return _drawn(
        f"{name} counts the birds at a lake on {n} days: {told}. What is the average number of birds a day?",
        mean,
        f"The sum: {' + '.join(map(str, values))} = {total}\nThe average: {total} / {n} = {mean}",
        ("stops_early", total, "gives the sum"),
        ("wrong_count", Fraction(total, n - 1), "divides by one value too few"),
        ("median_for_mean", middle, "takes the middle value"),
        (
            "midrange",
            Fraction(min(values) + max(values), 2),
            "averages the smallest and the largest value only",
        ),
    )


def _missing(rng: random.Random) -> Drawn:
    name, n = rng.choice(NAMES), rng.randint(2, 5)
    now = rng.randint(60, 80)
    goal = now + rng.randint(1, 4)
    need = goal * (n + 1) - now * n
    return _drawn(
        f"After {n} tests {name} has an average of {now} points. How many points must the next test bring so that the average "
        f"of all {n + 1} tests is {goal}?",
        need,
        f"Points so far: {now} × {n} = {now * n}\nPoints in all: {goal} × {n + 1} = {goal * (n + 1)}\n"
        f"The next test: {goal * (n + 1)} - {now * n} = {need}",
        (
            "average_of_averages",
            2 * goal - now,
            "averages the old average with the new result as if both weighed the same",
        ),
        ("goal_itself", goal, "takes the wanted average for the wanted result"),
        ("forgets_new_count", goal * n - now * n, "multiplies the new average by the old number of tests"),
    )


def _combined(rng: random.Random) -> Drawn:
    while True:
        n, m = rng.sample(range(5, 31), 2)
        a, b = rng.sample(range(60, 96), 2)
        if (n * a + m * b) % (n + m) == 0:
            break
    total, mean = n * a + m * b, (n * a + m * b) // (n + m)
    return _drawn(
        f"In one class {n} pupils have an average of {a} points, in another {m} pupils have an average of {b} points. "
        "What is the average of all these pupils?",
        mean,
        f"Points of the first class: {n} × {a} = {n * a}\nPoints of the second class: {m} × {b} = {m * b}\n"
        f"All pupils: {n} + {m} = {n + m}\nThe average: {total} / {n + m} = {mean}",
        (
            "average_of_averages",
            Fraction(a + b, 2),
            "averages the two averages although the classes differ in size",
        ),
        (
            "swapped_weights",
            Fraction(n * b + m * a, n + m),
            "weighs each average by the size of the other class",
        ),
        ("stops_early", total, "gives the sum of all points"),
    )


# --- two equations ----------------------------------------------------------------------------------------------


def _legs(rng: random.Random) -> Drawn:
    goats, hens = rng.sample(range(3, 31), 2)
    heads, legs = goats + hens, 4 * goats + 2 * hens
    extra = legs - 2 * heads
    return _drawn(
        f"On a farm there are goats and hens. {rng.choice(NAMES)} counts {heads} heads and {legs} legs. "
        "How many goats are there?",
        goats,
        f"If all were hens: 2 × {heads} = {2 * heads} legs\nLegs too many: {legs} - {2 * heads} = {extra}\n"
        f"Each goat has 2 more: {extra} / 2 = {goats}",
        ("other_unknown", hens, "gives the number of hens"),
        ("stops_early", extra, "gives the surplus of legs"),
        ("one_kind", Fraction(legs, 4), "divides all legs by four"),
        ("half_of_all", Fraction(heads, 2), "takes half of the animals to be goats"),
    )


def _sum_difference(rng: random.Random) -> Drawn:
    one, two = rng.sample(NAMES, 2)
    small = rng.randint(8, 60)
    apart = rng.randint(3, 40)
    large, total = small + apart, 2 * small + apart
    return _drawn(
        f"{one} and {two} have {total} stamps together. {one} has {apart} more than {two}. How many stamps does {one} have?",
        large,
        f"Twice {one}'s stamps: {total} + {apart} = {total + apart}\n{one}'s stamps: {total + apart} / 2 = {large}",
        ("other_unknown", small, f"gives the stamps of {two}"),
        ("half_plus_difference", Fraction(total, 2) + apart, "halves the sum and adds the whole difference"),
        ("subtracts_once", total - apart, "subtracts the difference and does not halve"),
        ("stops_early", total + apart, "does not halve"),
    )


def _tickets(rng: random.Random) -> Drawn:
    adults, children = rng.sample(range(4, 41), 2)
    low = rng.randint(3, 8)
    high = low + rng.randint(2, 9)
    count, money = adults + children, adults * high + children * low
    extra = money - low * count
    return _drawn(
        f"A puppet show costs {high} dollars for adults and {low} dollars for children. {count} people paid {money} dollars. "
        "How many of them were adults?",
        adults,
        f"If all were children: {low} × {count} = {low * count}\nToo much: {money} - {low * count} = {extra}\n"
        f"Each adult pays {high - low} more: {extra} / {high - low} = {adults}",
        ("other_unknown", children, "gives the number of children"),
        ("one_kind", Fraction(money, high), "divides the money by the adults' price"),
        ("stops_early", extra, "gives the surplus of money"),
        ("adds_prices", Fraction(money, high + low), "divides by the sum of the two prices"),
    )


TEMPLATES: Mapping[str, Callable[[random.Random], Drawn]] = {
    "rates/two_legs": _two_legs,
    "rates/scale_up": _scale_up,
    "rates/together": _together,
    "percent_change/discount": _discount,
    "percent_change/up_and_down": _up_and_down,
    "percent_change/before": _before,
    "averages/mean": _mean,
    "averages/missing": _missing,
    "averages/combined": _combined,
    "two_equations/legs": _legs,
    "two_equations/sum_difference": _sum_difference,
    "two_equations/tickets": _tickets,
}
"""In the order in which they are generated."""


def draw(template: str, rng: random.Random) -> Drawn:
    """One problem of a template, with at least one misconception; the same random state gives the same problem."""
    drawn = TEMPLATES[template](rng)
    while not drawn.misconceptions:
        drawn = TEMPLATES[template](rng)
    return drawn


_STEP = re.compile(r"(-?\d+(?:\.\d+)?)\s*([-+*/×÷])\s*(-?\d+(?:\.\d+)?)\s*=\s*\$?(-?\d+(?:\.\d+)?)")
_OPPOSITE: Mapping[str, tuple[str, Callable[[Fraction, Fraction], Fraction | None]]] = {
    "+": ("subtracts", lambda a, b: a - b),
    "-": ("adds", lambda a, b: a + b),
    "*": ("divides", lambda a, b: a / b if b else None),
    "/": ("multiplies", lambda a, b: a * b),
}


def from_solution(answer: str, solution: str) -> tuple[Misconception, ...]:
    """Misconceptions that any worked solution of arithmetic steps allows: stopping one step early, and the opposite last
    operation. For templates that come without their own."""
    steps = [m.groups() for m in _STEP.finditer(solution)]
    out: dict[str, Misconception] = {}

    def put(kind: str, value: Fraction | None, why: str) -> None:
        if value is not None and value.denominator == 1 and value > 0 and str(value) != answer:
            out.setdefault(str(value), Misconception(kind, str(value), why))

    if len(steps) > 1:
        a, sign, b, result = steps[-2]
        put("stops_early", Fraction(result), f"stops after {a} {sign} {b}, one step before the end")
    if steps:
        a, sign, b, _ = steps[-1]
        word, opposite = _OPPOSITE[{"×": "*", "÷": "/"}.get(sign, sign)]
        put("opposite_operation", opposite(Fraction(a), Fraction(b)), f"{word} in the last step")
    return tuple(out.values())

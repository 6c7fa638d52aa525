r"""Plain answers: numbers with units, percentages, choices and words, decided exactly and without sympy.

Everything here is bounded in time, so the parent process may run it. What is not plain (algebra, lists,
intervals, roots, powers) is left to math-verify in a worker: `decide` then returns None.

The rules, gold first (the form of the gold answer decides):

| gold        | right                                             | wrong                            |
|-------------|---------------------------------------------------|----------------------------------|
| `50%`       | `50%`, `50` (sign left out), `0.5`, `1/2`         | `0.5%`; `1` for `100%` (integer) |
| `0.5` (≤ 1) | `0.5`, `1/2`, `50%`                               | `50`, `0.5%`                     |
| `50` (> 1)  | `50`, `50%` (the gold dropped the sign)           | `0.5`, `5000%`                   |
| `1.5` (> 1) | `1.5`, `1.5%`, `150%`                             | `150`                            |
| `12 cm`     | `12`, `12 cm`, `0.12 m`                           | `12 m`, `12 kg`                  |
| `12`        | `12`, `12.0`, `12 apples`, `$12`, `A) 12`         | `-12`, `12x`, `12 or 13`         |
| `1/3`       | `1/3`, `0.333333` (six digits or more, all right) | `0.33`                           |
| `A`         | `A`, `(A)`, `a`, `A) 12`                          | `B`, `12`, `A and B`             |
| `A) 12`     | `A`, `12`, `A) 12`                                | `A) 13`, `B) 12`                 |

A comma before exactly three digits separates thousands; any other comma separates items. Measures that are
known (length, mass, time, volume, US money) are converted and must agree in kind; other words are prose.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 1000
"""A longer string is no final answer; the bound keeps the exact arithmetic here and the pipe messages small."""

MIN_REPEATING_DIGITS = 6
"""Decimals needed before a truncated or rounded decimal counts as a non-terminating fraction."""

_TRANSLATE = str.maketrans(
    {
        "−": "-", "–": "-", "﹣": "-", "－": "-", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2007": " ",
        "\u200b": None, "\u200c": None, "\u200d": None, "\u2060": None, "\ufeff": None,
        "×": r"\times ", "·": r"\cdot ", "÷": "/", "∞": r"\infty ", "π": r"\pi ", "％": "%", "⁄": "/",
        "½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "°": " degrees", "²": "^2", "³": "^3",
    }
)  # fmt: skip

_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{([^{}]*)\}"
)
_FRAC = re.compile(r"\\[dtc]?frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))")

_INT = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?![\d/])|\d+)"
_DEC = rf"(?:{_INT}(?:\.\d+)?(?![\d]|[.,]\d)|\.\d+)"
_NUMBER = re.compile(
    r"(?:(?:approximately|approx\.?|about|roughly|exactly|around|\\approx|\\sim|≈|~)\s*)?"
    r"(?P<s1>[-+])?\s*(?P<cur>[$€£¥]|USD|EUR|GBP|Rs\.?)?\s*(?P<s2>[-+])?\s*"
    r"(?:"
    r"(?P<whole>\d+)\s+(?:and\s+)?(?P<mn>\d+)\s*/\s*(?P<md>\d+)"
    rf"|\(?(?P<num>{_DEC})\)?\s*/\s*\(?(?P<s3>[-+])?(?P<den>{_DEC})\)?"
    rf"|(?P<mant>{_DEC})(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?\s*(?P<e1>[-+]?\d{{1,2}})\s*\}}?|[eE](?P<e2>[-+]?\d{{1,2}}))"
    rf"|(?P<dec>{_DEC})"
    r")(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_CHOICE = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\(\s*(?P<a>[A-Ja-j])\s*\)|(?P<b>[A-J])(?:\)|(?=[.:](?:\s|$))|(?=\s*$)))[.:]?\s*(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_WORDS = _split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
_NUMBER_WORD = re.compile(rf"({'|'.join(_WORDS)})(?=\s|$)", re.IGNORECASE)
_SCALE = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12
}  # fmt: skip
_MATH_WORDS = frozenset(
    _split(
        "pi sqrt sin cos tan sec csc cot log ln exp frac abs max min mod gcd lcm arcsin arccos arctan sinh "
        "cosh tanh and or"
    )
)
# Words after a number that change what it says; with one of them the text is not a number and its unit.
_NOT_A_UNIT = _MATH_WORDS - {"sec", "min"} | frozenset(
    _split("to plus minus times over squared cubed factorial half not remainder between divided by than")
)


def _units() -> dict[str, tuple[str, Fraction]]:
    table = {
        "length": {
            "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100", "m meter metre": "1",
            "km kilometer kilometre": "1000", "inch inches": "0.0254", "ft foot feet": "0.3048",
            "yd yard": "0.9144", "mi mile": "1609.344",
        },
        "mass": {"mg milligram": "1/1000", "g gram": "1", "kg kilogram": "1000", "lb lbs pound": "453.59237",
                 "oz ounce": "28.349523125"},
        "time": {"s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800"},
        "volume": {"ml milliliter millilitre": "1/1000", "l liter litre": "1"},
        "usd": {"$ usd dollar": "1", "cent": "1/100"},
        "eur": {"€ eur euro": "1"}, "gbp": {"£ gbp": "1"},
        "angle": {"degree": "1"}, "before noon": {"am": "1"}, "after noon": {"pm": "1"},
        "speed": {"mph": "0.44704", "kph kmh": "5/18"},
    }  # fmt: skip
    return {
        name: (kind, Fraction(factor))
        for kind, rows in table.items()
        for names, factor in rows.items()
        for word in names.split()
        for name in (word, word + "s" if len(word) > 2 else word)
    }


_UNITS = _units()


@dataclass(frozen=True)
class Number:
    """A plain number: its exact value as written (50 for `50%`), how it was written, and its known unit."""

    value: Fraction
    percent: bool = False
    unit: tuple[str, Fraction] | None = None
    decimals: int | None = None
    """Digits after the point where it was written as a decimal or integer; None for a fraction."""


def clean(text: str) -> str:
    """Remove mark-up that carries no meaning: delimiters, bold, spacing commands, text commands, a final period."""
    s = text.translate(_TRANSLATE).strip()
    s = re.sub(r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![A-Za-z])", "", s)
    s = re.sub(r"(?<=\d)(?:\\,|\\!,\\!|,\\!|\{,\})(?=\d{3}(?!\d))", ",", s)
    s = s.replace(r"\!", "").replace("{,}", ",")
    s = re.sub(r"\\[,;: ]|\\q?quad(?![A-Za-z])|~(?=\S)", " ", s)
    s = _TEXT_COMMAND.sub(r" \1 ", s)
    s = (
        s.replace(r"\%", "%")
        .replace(r"\$", "$")
        .replace(r"^{\circ}", " degrees")
        .replace(r"^\circ", " degrees")
    )
    s = re.sub(r"\\(?:infinity|inf)(?![A-Za-z])|\b(?:infinity|inf)\b", r"\\infty", s)
    s = re.sub(r"(?<=\d)\s*([ap])\.?\s?m\b\.?", lambda m: f" {m[1].lower()}m", s, flags=re.IGNORECASE)
    previous = None
    while s != previous:
        previous = s
        s = s.strip().strip("*`").strip()
        for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if s.startswith(left) and s.endswith(right) and len(s) >= len(left) + len(right):
                inner = s[len(left) : -len(right)]
                if left not in inner:
                    s = inner
        s = re.sub(r"(?:(?<=[A-Za-z])!+|(?<!\.)[.,;]+)$", "", s)  # `5!` is a factorial
    return re.sub(r"\s+", " ", s)


def has_prose(text: str) -> bool:
    """True if the cleaned text holds a word of three letters or more, or am or pm, that is no LaTeX command or function name."""
    words = re.findall(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|[AaPp][Mm]\b)", text)
    return any(w.lower() not in _MATH_WORDS for w in words)


def _fraction_text(match: re.Match[str]) -> str:
    return f" {match[1] or match[2]}/{match[3] or match[4]} "


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def _unit(rest: str, attached: bool) -> tuple[bool, tuple[str, Fraction] | None, int]:
    """Read what follows a number: (is it a unit or prose at all, the known unit, the scale factor)."""
    scale = 1
    words = rest.split()
    while words and words[0].lower() in _SCALE:
        scale *= _SCALE[words.pop(0).lower()]
        attached = False
    if not words:
        return True, None, scale
    body = re.sub(r"\s*\^\s*\{?\s*([23])\s*\}?", r"^\1", " ".join(words))
    if not re.fullmatch(r"[A-Za-z€£$][A-Za-z'’/ .,()-]*(?:\^[23])?[A-Za-z'’/ .,()-]*", body):
        return False, None, 1
    tokens = [t for t in re.split(r"[^A-Za-z€£$]+", body) if t]
    if any(t.lower() in _NOT_A_UNIT for t in tokens):
        return False, None, 1
    known = _known_unit(body)
    first = re.match(r"[A-Za-z€£$]+", body)
    assert first is not None  # the fullmatch above starts with such a character
    first_known = _lookup(first[0]) is not None
    # `12cm` is a measure; `12x` and `12m` are algebra; `12 xy` may be: only known units may be short or attached.
    if attached and (len(first[0]) == 1 or not first_known):
        return False, None, 1
    if len(first[0]) < 3 and not first_known and first[0].lower() not in ("sq", "cu", "of", "in"):
        return False, None, 1
    return True, known, scale


def _lookup(word: str) -> tuple[str, Fraction] | None:
    return _UNITS.get(word) or _UNITS.get(word.lower())


def _known_unit(body: str) -> tuple[str, Fraction] | None:
    """The kind and size of a measure such as `cm`, `cm^2`, `square feet` or `km per hour`; None if not known."""
    parts = re.split(r"\s*/\s*|\s+per\s+", body)
    read: list[tuple[str, Fraction]] = []
    for part in parts:
        m = re.fullmatch(
            r"(square|sq\.?|cubic|cu\.?)?\s*([A-Za-z€£$]+)\.?(?:\^([23]))?(?: .*)?", part.strip()
        )
        unit = _lookup(m[2]) if m else None
        if m is None or unit is None:
            return None
        power = int(m[3]) if m[3] else {"s": 2, "c": 3}.get((m[1] or " ")[0], 1)
        read.append((unit[0] if power == 1 else f"{unit[0]}^{power}", unit[1] ** power))
    if len(read) == 1:
        return read[0]
    if len(read) == 2:
        kind = f"{read[0][0]}/{read[1][0]}"
        return ("speed" if kind == "length/time" else kind, read[0][1] / read[1][1])
    return None


def read_number(text: str) -> Number | None:
    """Read a cleaned text that is one number, whole, with its sign, currency, percent sign and unit.

    Returns None for anything else, a zero denominator included.
    """
    s = _FRAC.sub(_fraction_text, text).strip()
    s = _NUMBER_WORD.sub(lambda m: str(_WORDS.index(m[1].lower())), s, count=1) if s[:1].isalpha() else s
    while (
        len(s) > 2
        and s[0] in "({"
        and s[-1] == {"(": ")", "{": "}"}[s[0]]
        and not re.search(r"[(){},]", s[1:-1])
    ):
        s = s[1:-1].strip()
    m = _NUMBER.fullmatch(s)
    if m is None:
        return None
    decimals: int | None = None
    if m["whole"]:
        if not int(m["mn"]) < int(m["md"]):
            return None  # `2 3/2` is no mixed number; it may be a product
        value = int(m["whole"]) + Fraction(int(m["mn"]), int(m["md"]))
    elif m["num"]:
        if (denominator := _value(m["den"])) == 0:
            return None
        value = _value(m["num"]) / denominator * (-1 if m["s3"] == "-" else 1)
    elif m["mant"]:
        value = _value(m["mant"]) * Fraction(10) ** int(m["e1"] or m["e2"])
    else:
        value = _value(m["dec"])
        decimals = len(m["dec"].partition(".")[2])
    for sign in (m["s1"], m["s2"]):
        value = -value if sign == "-" else value

    rest = m["rest"]
    percent = re.match(r"\s*(?:%|per ?cent(?:age)?\b|pct\b)", rest, re.IGNORECASE)
    if percent:
        rest = " " + rest[percent.end() :]
    is_unit, unit, scale = _unit(rest.strip(), attached=rest[:1].isalpha())
    if not is_unit:
        return None
    if m["cur"]:
        unit = _lookup(m["cur"])
    return Number(value * scale, percent is not None, unit, decimals)


def _same_value(a: Fraction, b: Fraction, a_decimals: int | None, b_decimals: int | None) -> bool:
    if a == b:
        return True
    if (a_decimals is None) == (b_decimals is None):
        return False
    decimal, places, fraction = (a, a_decimals, b) if a_decimals is not None else (b, b_decimals, a)
    if places is None or places < MIN_REPEATING_DIGITS or decimal == 0:
        return False
    denominator = fraction.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    if denominator == 1:  # it terminates: the decimal could have been written exactly
        return False
    # A non-terminating fraction: its digits, rounded or cut, as far as they were written.
    written, exact = abs(decimal) * 10**places, abs(fraction) * 10**places
    return (decimal > 0) == (fraction > 0) and written in (int(exact), round(exact))


def same_number(answer: Number, gold: Number) -> bool:
    """Compare two plain numbers under the rules at the top of this module."""
    a, g = answer.value, gold.value
    a_places, g_places = answer.decimals, gold.decimals
    if answer.unit and gold.unit:
        if answer.unit[0] != gold.unit[0]:
            return False
        return _same_value(a * answer.unit[1] / gold.unit[1], g, a_places, g_places)
    as_written = _same_value(a, g, a_places, g_places)
    if answer.percent == gold.percent:
        return as_written
    if gold.percent:
        # A bare integer is a percentage without its sign; a bare decimal or fraction may be either.
        shifted = None if a_places is None else max(0, a_places - 2)
        return as_written or (a_places != 0 and _same_value(a * 100, g, shifted, g_places))
    if abs(g) <= 1:
        return _same_value(a / 100, g, None if a_places is None else a_places + 2, g_places)
    return as_written or (g.denominator != 1 and a / 100 == g)


def read_choice(text: str) -> tuple[str, str] | None:
    """Read `A`, `(A)`, `A)`, `A. 12`, `option A` in a cleaned text: (upper-case letter, what follows it)."""
    m = _CHOICE.fullmatch(text)
    return None if m is None else ((m["a"] or m["b"]).upper(), m["rest"].strip())


def _words(text: str) -> str:
    return re.sub(r"[^\w%$\\^+=<>/*.,-]+", " ", text.casefold()).strip(" .")


def decide(answer: str, gold: str) -> bool | None:
    """Whether `answer` equals `gold`, or None where that takes algebra. Neither may be empty."""
    a, g = clean(answer), clean(gold)
    if a == g:
        return True
    gold_choice = read_choice(g) if not re.fullmatch(r"[a-z]", g) else None
    answer_choice = read_choice(a)
    if gold_choice:
        letter, body = gold_choice
        if answer_choice:
            if answer_choice[0] != letter:
                return False
            return not (answer_choice[1] and body) or decide(answer_choice[1], body)
        return decide(a, body) if body else False
    if answer_choice and answer_choice[1]:
        a = answer_choice[1]

    if "=" not in g and "=" in a and not re.search(r"[,;<>]|\\[lg]e|\\ne|\bor\b|\band\b", a):
        a = a.rpartition("=")[2].strip()  # `x = 5` and `2 + 3 = 5` for 5
    elif "=" not in a and (m := re.fullmatch(r"[A-Za-z](?:_\w+)?\s*=\s*([^=]+)", g)):
        g = m[1]
    number_a, number_g = read_number(a), read_number(g)
    if number_a and number_g:
        return same_number(number_a, number_g)
    if has_prose(a) or has_prose(g):
        return _words(a) == _words(g)
    if not a or re.fullmatch(r"[^/]*/\s*[-+]?0+(\.0*)?\s*", _FRAC.sub(_fraction_text, a)):
        return False  # nothing after `=`, or a division by zero: equal to no gold
    return None

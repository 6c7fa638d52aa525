"""Checks of a variant against its source that need no model: form of the answer, changed numbers, near-copies, leaks.

Each check gives a :class:`Finding` (a stable reason and what was seen) or None. All are pure and linear in the texts, but for
the word alignment of :func:`similarity` (quadratic in the words of one problem).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from fractions import Fraction

from maieutic.errors import ProblemDataError
from maieutic.grading.equivalence import check_gold, decide_plain
from maieutic.grading.plain import clean, has_prose, read_choice, read_number
from maieutic.problems.build.recipe import ChecksSpec
from maieutic.problems.schema import Problem
from maieutic.problems.splits import text_key

# fmt: off
_UP_TO_TWENTY = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)
# fmt: on
_NUMBER_WORDS = {w: str(i) for i, w in enumerate(_UP_TO_TWENTY)} | {
    "thirty": "30",
    "forty": "40",
    "fifty": "50",
    "sixty": "60",
    "seventy": "70",
    "eighty": "80",
    "ninety": "90",
    "hundred": "100",
    "thousand": "1000",
    "dozen": "12",
    "half": "1/2",
    "twice": "2",
    "double": "2",
    "thrice": "3",
    "triple": "3",
}
_TOKEN = re.compile(
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_]+(?:['’][^\W\d_]+)?"
)
_STATED = re.compile(
    r"\\boxed\s*\{|####\s*\S|\b(?:the\s+)?(?:final\s+)?answer\s*(?:is|:|=)\s*\S", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: ``reason`` is a stable name, ``detail`` is for people and for the rewriter's feedback."""

    reason: str
    detail: str


def tokens(text: str) -> list[str]:
    """Words, numbers (without thousands separators) and CJK characters of a text in order, lower case."""
    return [t.replace(",", "").casefold() for t in _TOKEN.findall(text)]


def quantities(text: str) -> Counter[str]:
    """The numbers of a text with their counts; small number words count as their digits."""
    found = []
    for token in tokens(text):
        if token[0].isdigit():
            found.append(f"{Fraction(token)}")
        elif token in _NUMBER_WORDS:
            found.append(_NUMBER_WORDS[token])
    return Counter(found)


def changed_share(source: str, variant: str) -> float | None:
    """Share of the source's numbers that the variant does not have any more; None for a source without numbers."""
    before, after = quantities(source), quantities(variant)
    total = before.total()
    return 1 - (before & after).total() / total if total else None


def similarity(a: str, b: str) -> float:
    """Similarity of two texts' words in order, numbers ignored: 2 · matches / words of both (0 to 1)."""

    def masked(text: str) -> list[str]:
        return ["#" if t[0].isdigit() or t in _NUMBER_WORDS else t for t in tokens(text)]

    return SequenceMatcher(None, masked(a), masked(b), autojunk=False).ratio()


def answer_form(answer: str) -> str:
    """``integer``, ``decimal``, ``fraction``, ``percent`` (with the unit's kind where it is known), ``choice``, ``list``,
    ``interval``, ``equation``, ``expression`` or ``text``."""
    text = clean(answer)
    if re.fullmatch(r"\(?[A-J]\)?", text) or ((choice := read_choice(text)) and choice[1]):
        return "choice"
    if number := read_number(text):
        if number.percent:
            form = "percent"
        elif number.decimals is None:
            form = "fraction"
        else:
            form = "integer" if number.value.denominator == 1 else "decimal"
        return f"{form} of {number.unit[0]}" if number.unit else form
    if re.fullmatch(r"[(\[].*,.*[)\]]", text):
        return "interval"
    if "," in text or ";" in text or re.search(r"\b(?:and|or)\b", text):
        return "list"
    if "=" in text:
        return "equation"
    return "text" if has_prose(text) or text.casefold() in ("yes", "no", "true", "false") else "expression"


def same_answer(a: str, b: str) -> bool:
    """Whether two answers are plainly the same (numbers exactly, the rest as text; no algebra)."""
    return decide_plain(a, b) is True or text_key(clean(a)) == text_key(clean(b))


def check_variant(source: Problem, text: str, answer: str, spec: ChecksSpec) -> Finding | None:
    """The first thing that is wrong with a variant, most telling first; None when nothing is."""
    try:
        check_gold(answer)
    except ProblemDataError:
        return Finding("unusable_answer", f"the stated answer {answer!r:.80} is no final answer")
    if text_key(text) == text_key(source.text):
        return Finding("copy", "the variant is the source problem")
    return (
        _numbers(source.text, text, spec)
        or _answers(source, answer, spec)
        or (Finding("states_answer", "the variant's text states an answer") if _STATED.search(text) else None)
    )


def _numbers(source: str, text: str, spec: ChecksSpec) -> Finding | None:
    changed, alike = changed_share(source, text), similarity(source, text)
    if changed == 0:
        return Finding("same_numbers", "every number of the source is in the variant again")
    if (changed is None or changed < spec.min_changed) and alike >= spec.max_similarity:
        share = "no number to change" if changed is None else f"{changed:.0%} of the numbers changed"
        return Finding("near_copy", f"{share}, and the words are {alike:.0%} the same")
    return None


def _answers(source: Problem, answer: str, spec: ChecksSpec) -> Finding | None:
    if spec.answer_form:
        before, after = answer_form(source.answer), answer_form(answer)
        if before != after:
            return Finding(
                "answer_form", f"the source's answer is {before}, the variant's {answer!r:.60} is {after}"
            )
        if before == "choice":
            return None  # one of a few letters: the same one says nothing
    if same_answer(answer, source.answer):
        return Finding("same_answer", f"the variant has the source's answer {source.answer!r:.60}")
    return None

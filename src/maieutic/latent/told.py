"""Whether a student claims an answer, and whether the tutor had stated it first."""

from __future__ import annotations

import re

from maieutic.dialogue import Dialogue

_CLAIM = re.compile(r"\\boxed\s*\{|\b(final answer|(the|my|so) answer(?: is|:)|answer is)\b", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def claims_answer(text: str) -> bool:
    """A turn that states a final answer, and not merely a number on the way."""
    return bool(_CLAIM.search(text))


def told_before(dialogue: Dialogue, answer: str) -> bool:
    """Whether a tutor turn states ``answer`` before any student turn does. Numbers are compared as numbers, other answers as words.

    A number that the problem's own text holds is no telling: tutors must be able to speak of the given quantities.
    """
    wanted = _plain(answer)
    if _states(dialogue.problem, wanted):
        return False
    for turn in dialogue.turns:
        if _states(turn.visible, wanted):
            return turn.speaker == "tutor"
    return False


def _plain(answer: str) -> str:
    text = answer.strip().strip("$").strip()
    return _canonical(text) if _NUMBER.fullmatch(text) else text.casefold()


def _canonical(number: str) -> str:
    value = float(number.replace(",", ""))
    return f"{value:.10g}"


def _states(text: str, wanted: str) -> bool:
    if _NUMBER.fullmatch(wanted):
        return any(_canonical(m) == wanted for m in _NUMBER.findall(text) if m.strip(",-"))
    return bool(re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text.casefold()))

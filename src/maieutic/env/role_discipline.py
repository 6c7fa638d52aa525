"""Whether a simulated student stays in its role: what steps out is regenerated within bounds and counted, never edited.

Each rule looks for one failure of chat models that play a student; a rule fires only on what a student would not write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

from maieutic.dialogue import Dialogue, Turn

_LABEL = re.compile(
    r"^[\s*_#>\[(]*(tutor|teacher|student|assistant|user|human|ai)[\s*_\])]*:(?!//)",
    re.IGNORECASE | re.MULTILINE,
)
_TEACHERS = frozenset({"tutor", "teacher", "assistant", "ai"})
_THINKING = re.compile(
    r"</?think(?:ing)?>"
    r"|^\W*(?:okay|ok|alright|sure|hmm)?[\s,.!]*(?:so\s+)?"
    r"(?:the\s+(?:user|prompt|tutor|teacher)\s+(?:wants|asks|is asking|asked)\s+me\s+to"
    r"|i\s+(?:need|have|should|am supposed|was asked)\s+to\s+"
    r"(?:act|respond|reply|answer|behave|pretend|play)\b.{0,40}\bstudent"
    r"|as\s+(?:an?\s+ai|a\s+(?:large\s+)?language\s+model)\b"
    r"|(?:here(?:'s| is)\s+)?(?:my|a possible|the student's)\s+(?:response|reply)\s+"
    r"(?:as\s+(?:a|the)\s+student|would be))",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w+")
COPIED_SHARE = 0.9
"""A reply is a copy when at least this share of its word 8-grams stands in what it was given."""
_GRAM = 8
_SHORTEST_COPY = 12
"""Words below which repeating is no copy: students repeat a question or a step."""


def out_of_role(reply: str, dialogue: Dialogue, prompts: Sequence[str]) -> str:
    """Why the reply steps out of the student's role, or ``""``.

    ``empty``; ``both_sides`` (labelled turns of both); ``as_tutor`` (labelled as the tutor's); ``thinking_aloud`` (about its
    instructions, or with think tags); ``repeats_prompt`` (its instructions over again); ``repeats_turn`` (an earlier turn over
    again). ``prompts`` are the texts that the student was instructed with.
    """
    if not reply.strip():
        return "empty"
    labels = [m.group(1).lower() for m in _LABEL.finditer(reply)]
    if labels:
        teacher = [name in _TEACHERS for name in labels]
        if any(teacher) and not all(teacher):
            return "both_sides"
        if any(teacher):
            # "Student text … Tutor: …" answers for both just as well.
            return "as_tutor" if _LABEL.match(reply) else "both_sides"
        if len(labels) > 1:
            return "both_sides"
    if _THINKING.search(reply):
        return "thinking_aloud"
    said = _normal(reply)
    if said.count(" ") > _SHORTEST_COPY:
        grams = _grams(said)
        if any(_copied(grams, _normal(p)) for p in prompts):
            return "repeats_prompt"
        if any(_copied(grams, _normal(t.visible)) for t in _earlier(dialogue)):
            return "repeats_turn"
    return ""


def _earlier(dialogue: Dialogue) -> list[Turn]:
    # The opening states the problem; a student may well restate it, and its prompt is compared anyway.
    return [t for t in dialogue.turns if not t.scripted]


@lru_cache(maxsize=32_768)
def _normal(text: str) -> str:
    """The words of a text in small letters, with a space before each and one after the last.

    Remembered: every reply is compared with every earlier turn.
    """
    return " ".join(["", *_WORD.findall(text.casefold()), ""])


def _grams(said: str) -> list[str]:
    words = said.split()
    return [f" {' '.join(words[i : i + _GRAM])} " for i in range(len(words) - _GRAM + 1)]


def _copied(grams: list[str], source: str) -> bool:
    """Whether enough of the reply's word n-grams stand in the (normal) source; looks no further once too many do not."""
    allowed = len(grams) - math.ceil(COPIED_SHARE * len(grams))
    missing = 0
    for gram in grams:
        if gram not in source:
            missing += 1
            if missing > allowed:
                return False
    return True

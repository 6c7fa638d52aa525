"""What a rule found: the criterion, the turn and the words."""

from __future__ import annotations

from dataclasses import dataclass

QUOTE_LIMIT = 300


@dataclass(frozen=True, slots=True)
class Finding:
    """``quote`` is an exact substring of the visible text of turn ``turn`` (an index into ``Dialogue.turns``)."""

    criterion: str
    turn: int
    quote: str
    reason: str = ""


def clip(text: str) -> str:
    """A prefix short enough to be read; still an exact substring."""
    return text.strip()[:QUOTE_LIMIT].strip()

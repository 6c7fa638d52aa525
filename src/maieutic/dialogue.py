"""Turns, dialogues and the four views of a dialogue: tutor, student, judge, hidden-tutor.

A *dialogue* is about one source problem. The student speaks first (a scripted opening), then tutor and student alternate.
A view is what one reader is given: chat messages for models, a fenced transcript for the judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

Speaker = Literal["tutor", "student"]
Role = Literal["system", "user", "assistant"]
EndReason = Literal["end_token", "max_turns", "context_limit", "student_failed", "tutor_failed", "solved"]

HIDDEN = "(hidden)"
"""What stands for a tutor turn in the hidden-tutor view."""
BLANK = "(no message)"
"""What the student reads when the visible part of a tutor turn is empty: chat templates and servers reject empty messages."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: what a chat template takes."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One utterance.

    ``visible`` is what the other side, the judge and the post-test read; ``thinking`` is private to the tutor.
    Token counts are those of the speaker's own tokenizer; both are 0 for a scripted turn.
    """

    speaker: Speaker
    visible: str
    thinking: str = ""
    visible_tokens: int = 0
    thinking_tokens: int = 0
    scripted: bool = False
    truncated: bool = False
    """The per-turn token cap cut this turn."""
    well_formed: bool = True
    """Thinking, if any, was opened and closed once, and something visible follows."""
    end_token: bool = False
    """The end-of-conversation token occurred (whether or not it was honoured)."""
    note: str = ""
    """On a student turn: private advice that only the tutor reads with it (retrieved experience, a chosen move). On a tutor turn:
    a private record of how it came about (``move: ask``), which no view shows."""
    attempts: int = 1
    """How many times the speaker was sampled for this turn (role-discipline regenerations)."""
    off_role: str = ""
    """Why this student turn is out of role although it was kept (all its tries were), ``""`` if it is not."""

    @property
    def blank(self) -> bool:
        """Nothing visible reaches the other side."""
        return not self.visible.strip()


@dataclass(slots=True)
class Dialogue:
    """The ordered turns about one source problem, and why it ended (``end`` is None while it runs).

    ``record`` belongs to the tutor that plays it: a policy keeps its token record there, other tutors leave it None.
    """

    id: str
    problem: str
    """Text of the source problem."""
    solution: str | None = None
    """Answer or worked solution; set only when the environment lets the tutor see it."""
    turns: list[Turn] = field(default_factory=list)
    end: EndReason | None = None
    record: Any = None

    def add(self, turn: Turn) -> None:
        """Append a turn; speakers must alternate and a dialogue that has ended takes no more."""
        if self.end is not None:
            raise ValueError(f"dialogue {self.id} has ended ({self.end}): no turn can be added")
        if self.turns and self.turns[-1].speaker == turn.speaker:
            raise ValueError(f"dialogue {self.id}: two {turn.speaker} turns in a row")
        self.turns.append(turn)

    def by(self, speaker: Speaker) -> list[Turn]:
        """The turns of one speaker, in order."""
        return [t for t in self.turns if t.speaker == speaker]

    def numbered(self) -> Iterator[tuple[int, Turn]]:
        """Turns with their index in ``turns`` (the number that verdicts cite)."""
        return enumerate(self.turns)


def _without_empty_system(messages: list[Message]) -> list[Message]:
    return [m for m in messages if m.content or m.role != "system"]


def tutor_view(dialogue: Dialogue, system: str) -> list[Message]:
    """Student turns are ``user``, tutor turns ``assistant`` (visible part only; a policy's own token record keeps its thinking)."""
    out = [Message("system", system)]
    for t in dialogue.turns:
        if t.speaker == "student":
            out.append(Message("user", f"{t.visible}\n\n{t.note}" if t.note else t.visible))
        else:
            out.append(Message("assistant", t.visible))
    return _without_empty_system(out)


def student_view(dialogue: Dialogue, system: str) -> list[Message]:
    """Student turns are ``assistant``, tutor turns ``user`` with the visible part only."""
    out = [Message("system", system)]
    out += [
        Message("assistant", t.visible)
        if t.speaker == "student"
        else Message("user", t.visible.strip() or BLANK)
        for t in dialogue.turns
    ]
    return _without_empty_system(out)


def hidden_view(dialogue: Dialogue, system: str) -> list[Message]:
    """The student's view with every tutor turn replaced by ``(hidden)``: condition 2 of the paper (student notes only)."""
    out = [Message("system", system)]
    out += [
        Message("assistant", t.visible) if t.speaker == "student" else Message("user", HIDDEN)
        for t in dialogue.turns
    ]
    return _without_empty_system(out)


def judge_view(turns: Sequence[Turn]) -> str:
    """The student-visible transcript as fenced, escaped elements, so that no text can open or close a turn.

    Turn numbers are indices into ``Dialogue.turns``.
    """
    return "\n".join(
        f'<turn n="{n}" speaker="{t.speaker}">{escape(t.visible, quote=False)}</turn>'
        for n, t in enumerate(turns)
    )

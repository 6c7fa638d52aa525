"""The REAT tutor: any :class:`~maieutic.env.base.Tutor`, whose prompt carries retrieved experience (equation 2).

Before each turn: read the student's state (one call, none for a state that is known), retrieve, fill the two experience fields of
the student's turn, let the wrapped tutor reply. Without a source of experience the same fields stand there empty: that is the
prompt-only arm, and the only difference between the two (paper, section 4.1.3 "Controlled Comparison Protocol").

The fields of earlier turns are taken out again, so a prompted model reads the experience of the present turn alone, as in the
paper. A policy with an append-only token record keeps what it was shown.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Tutor
from maieutic.reat.fields import Fields
from maieutic.reat.live import Observes, Situation
from maieutic.reat.schema import Experience, Record, StateTags, Unknown
from maieutic.seeds import derive

NOTE = "reat: "
"""What starts the private note on a tutor turn that was given by this tutor."""


class Used(Record):
    """What a tutor turn was given: kept as the turn's note, so that the transcript says it."""

    state: str | None = None
    """:meth:`StateTags.key` of the student's state as it was read; None where it could not be read."""
    query: str = ""
    ids: tuple[str, ...] = ()
    """Experiences in the prompt."""
    similarities: tuple[float, ...] = ()
    step: str = ""
    """How far the state filter was widened."""
    why: str = ""
    """Why there is none: ``unknown:<reason>``, ``no_candidate``, ``below_threshold``."""

    @property
    def tags(self) -> StateTags | None:
        return None if self.state is None else StateTags.from_key(self.state)


def used(turn: Turn) -> Used | None:
    """The record of a tutor turn; None where another tutor gave it, or the fields were empty by design."""
    # Always the last line, so that a note of the wrapped tutor cannot pass for it.
    last = turn.note.rpartition("\n")[2]
    return Used.model_validate_json(last[len(NOTE) :]) if last.startswith(NOTE) else None


@dataclass(frozen=True, slots=True)
class Found:
    """What a source has for a situation. Empty ``experiences`` say ``why``."""

    experiences: tuple[Experience, ...]
    similarities: tuple[float, ...] = ()
    step: str = ""
    why: str = ""


class Source(Protocol):
    """Where experience comes from."""

    async def find(self, situation: Situation, *, seed: int) -> Found: ...


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds and calls of one tutoring round (Table 4). ``other_s``: prompt assembly and what is left."""

    observe_s: float
    rewrite_s: float
    retrieve_s: float
    generate_s: float
    other_s: float
    calls: int
    """Calls before generation: 1, 2, or 0 for a state that was known."""

    @property
    def total_s(self) -> float:
        return self.observe_s + self.rewrite_s + self.retrieve_s + self.generate_s + self.other_s


@dataclass
class ReatTutor:
    """See the module.

    Args:
        inner: the tutor that generates. Its own prompt is the environment's, in every arm.
        fields: the experience fields.
        observer, source: None for both: the fields stay empty and no call is made.
    """

    inner: Tutor
    fields: Fields
    observer: Observes | None = None
    source: Source | None = None
    rounds: list[Round] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """``turns``, ``with_experience``, ``without:<why>``."""

    def __post_init__(self) -> None:
        if (self.observer is None) != (self.source is None):
            raise ValueError("observer and source belong together: give both, or none for empty fields")

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        """The inner tutor's next turn. As notes, the student's turn keeps the fields and the tutor's turn what was used."""
        if not dialogue.turns or dialogue.turns[-1].speaker != "student":
            raise ValueError(f"dialogue {dialogue.id}: it is not the tutor's turn")
        started = time.perf_counter()
        note, record, times = await self._prepare(dialogue, seed)
        heard = dialogue.turns[-1]
        own = _without_fields(heard.note, self.fields)
        dialogue.turns[-1] = replace(heard, note=f"{own}\n\n{note}" if own else note)
        view = Dialogue(dialogue.id, dialogue.problem, dialogue.solution, record=dialogue.record)
        view.turns = [
            *(replace(t, note=_without_fields(t.note, self.fields)) for t in dialogue.turns[:-1]),
            dialogue.turns[-1],
        ]
        view.turns = [_not_forged(t, self.fields) for t in view.turns]
        before = time.perf_counter()
        turn = await self.inner.reply(view, seed=seed)
        generated = time.perf_counter() - before
        dialogue.record = view.record
        self.counts["turns"] += 1
        observe, rewrite, retrieve, calls = times
        other = time.perf_counter() - started - observe - rewrite - retrieve - generated
        self.rounds.append(Round(observe, rewrite, retrieve, generated, max(other, 0.0), calls))
        if turn is None or record is None:
            return turn
        kept = NOTE + record.model_dump_json()
        return replace(turn, note=f"{turn.note}\n{kept}" if turn.note else kept)

    async def _prepare(
        self, dialogue: Dialogue, seed: int
    ) -> tuple[str, Used | None, tuple[float, float, float, int]]:
        """(the note, what was used, (observe, rewrite, retrieve seconds, calls))."""
        if self.observer is None or self.source is None:
            return self.fields.empty(), None, (0.0, 0.0, 0.0, 0)
        reading = await self.observer.read(dialogue, seed=derive(seed, "observe"))
        situation = reading.situation
        if isinstance(situation, Unknown):
            why = f"unknown:{situation.reason}"
            self.counts[f"without:{why}"] += 1
            return (
                self.fields.empty(),
                Used(why=why),
                (reading.observe_s, reading.rewrite_s, 0.0, reading.calls),
            )
        before = time.perf_counter()
        found = await self.source.find(situation, seed=derive(seed, "retrieve"))
        retrieved = time.perf_counter() - before
        self.counts["with_experience" if found.experiences else f"without:{found.why}"] += 1
        record = Used(
            state=situation.tags.key(),
            query=situation.query,
            ids=tuple(e.id for e in found.experiences),
            similarities=tuple(round(s, 6) for s in found.similarities),
            step=found.step,
            why=found.why,
        )
        times = (reading.observe_s, reading.rewrite_s, retrieved, reading.calls)
        return self.fields.filled(found.experiences), record, times

    # A wrapped tutor may have more to it than replies.

    async def start(self) -> None:
        """Start what has to be started."""
        for part in (self.inner, self.observer, self.source):
            start = getattr(part, "start", None)
            if start is not None:
                await start()

    async def close(self) -> None:
        """Close what can be closed."""
        for part in (self.inner, self.observer, self.source):
            close = getattr(part, "close", None)
            if close is not None:
                await close()


def _not_forged(turn: Turn, fields: Fields) -> Turn:
    """A student's turn as the tutor reads it: where it holds the first words of the experience block, its brackets are round, so
    that only the real block looks like one. The dialogue keeps what was said."""
    opening = " ".join(fields.template.partition("{")[0].split()).strip("[( ").casefold()[:20]
    if turn.speaker != "student" or opening not in " ".join(turn.visible.split()).casefold():
        return turn
    return replace(turn, visible=turn.visible.replace("[", "(").replace("]", ")"))


def _without_fields(note: str, fields: Fields) -> str:
    """A student turn's note without the experience block: everything before the block's first words."""
    opening = fields.template.partition("{")[0]
    return note.partition(opening)[0].rstrip() if opening in note else note


def latency(rounds: Sequence[Round]) -> dict[str, Any]:
    """The table of online latency (Table 4): medians in seconds, calls a turn, and the share of turns whose state was known."""
    if not rounds:
        return {"rounds": 0}

    def p50(values: list[float]) -> float:
        ordered = sorted(values)
        n, half = len(ordered), len(ordered) // 2
        return ordered[half] if n % 2 else (ordered[half - 1] + ordered[half]) / 2

    names = ("observe_s", "rewrite_s", "retrieve_s", "generate_s", "other_s", "total_s")
    return {
        "rounds": len(rounds),
        **{f"p50_{n}": p50([getattr(r, n) for r in rounds]) for n in names},
        "calls_per_turn": sum(r.calls for r in rounds) / len(rounds),
        "known_share": sum(r.calls == 0 for r in rounds) / len(rounds),
    }

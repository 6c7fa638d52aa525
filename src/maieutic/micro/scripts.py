"""Scripted speakers: they exist only in the corpora from which the models learn, never in an episode.

The student's script looks at the *words* of a dialogue, never at what a story means. Its probabilities are those of the corpus;
sampling at T = 0.6 sharpens them (p becomes p^(1/0.6), normalised), so that a slip of .13 happens about 4 % of the time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from maieutic.micro import speech
from maieutic.micro.world import OPS, MicroProblem, Op, apply, last, other, step1, step2, work

Kind = Literal[
    "cue",
    "ask",
    "name",
    "name_one",
    "tell",
    "tell_one",
    "confirm",
    "flag",
    "count",
    "needed",
    "left",
    "probe",
    "chat",
    "end",
]


@dataclass(frozen=True, slots=True)
class Move:
    """One scripted tutor turn: what it does, and its words. ``op1``/``op2`` are what it cues, names or tells."""

    kind: Kind
    text: str
    step: int = 0
    op1: Op | None = None
    op2: Op | None = None


@dataclass(frozen=True, slots=True)
class Traits:
    """How a student behaves in its corpus; each number is a probability."""

    cue: float = 0.67
    """Follows a cue when it hears it. In the post-test it follows one that stands in view as it does a method (``carry``)."""
    restate: float = 0.45
    """Writes the steps out after it was told the method, before any attempt of its own; later, ``restate_late``."""
    restate_late: float = 0.15
    switch: float = 0.88
    """Changes its mind when told that a step is wrong."""
    probe: float = 0.35
    parrot: float = 0.6
    """Repeats an answer that it was told."""
    slip: float = 0.13
    extra: float = 0.3
    stop: float = 0.25
    mend: float = 0.93
    """Mends what a precise hint points at."""
    carry: float = 0.97
    """Uses the operation of its own words, or of the tutor's where it sees them, in the post-test."""


STUDENTS = {
    "student": Traits(),
    "student-b": Traits(
        cue=0.6, restate=0.6, restate_late=0.3, switch=0.8, probe=0.5, slip=0.2, extra=0.42, stop=0.15
    ),
}


@dataclass(slots=True)
class StudentScript:
    """A student in its corpus: what stands in its own words, and what the tutor said."""

    p: MicroProblem
    rng: random.Random
    traits: Traits = field(default_factory=Traits)
    own: dict[int, Op] = field(default_factory=dict)
    """Operation of each step in its own words."""
    heard: dict[int, Op] = field(default_factory=dict)
    """Operation of each step in the tutor's words: named, told or cued."""
    r: dict[int, int] = field(default_factory=dict)
    """Results that it stated."""
    slipped: bool = False
    uses_extra: bool | None = None
    stops: bool | None = None
    said: int | None = None
    told: int | None = None
    last: int = 0
    """The step of its latest attempt (0: none)."""

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _slip(self, exact: bool) -> int:
        self.slipped = not exact and self._chance(self.traits.slip)
        return int(self.slipped)

    def _do(self, step: int, op: Op, *, exact: bool = False) -> str:
        """A step in its own words; step 2 without a step 1 makes one up."""
        p, out = self.p, []
        if step == 1 or 1 not in self.own:
            self.own[1] = op if step == 1 else self.rng.choice(OPS[1])
            if self.uses_extra is None:
                self.uses_extra = p.family == "extra" and self._chance(self.traits.extra)
            a = p.d if self.uses_extra else p.a
            self.r[1] = apply(self.own[1], a, p.b) + self._slip(exact)
            out.append(step1(a, self.own[1], p.b, self.r[1]))
            self.last = 1
        if step == 2:
            self.own[2] = op
            self.r[2] = apply(op, self.r[1], p.c) + self._slip(exact)
            out.append(step2(self.r[1], op, p.c, self.r[2]))
            self.last = 2
            if p.family == "three":
                if self.stops is None:
                    self.stops = self._chance(self.traits.stop)
                if not self.stops:
                    out.append(self._double())
        return " ".join(out)

    def _double(self) -> str:
        return last(self.r[2], 2 * self.r[2])

    def _pick(self, step: int, preferred: Op | None, weight: float) -> Op:
        if preferred is None:
            return self.rng.choice(OPS[step])
        return preferred if self._chance(weight) else other(step, preferred)

    def reply(self, move: Move) -> str:
        """What it says to a tutor turn."""
        t, ok = self.traits, self.rng.choice(speech.OKS)
        if move.kind == "cue":
            assert move.op1 is not None
            self.heard[move.step] = move.op1
            return self._do(move.step, self._pick(move.step, move.op1, t.cue))
        if move.kind == "ask":
            return self._do(move.step, self._pick(move.step, self.own.get(move.step), 0.7))
        if move.kind in ("name", "name_one"):
            return self._named(move, ok)
        if move.kind in ("tell", "tell_one"):
            return self._told(move, ok)
        if move.kind in ("flag", "probe") and self.last:
            now = self.own[self.last]
            changes = self._chance(t.switch if move.kind == "flag" else t.probe)
            return self._do(self.last, other(self.last, now) if changes else now, exact=True)
        if move.kind == "count" and self.last and self._chance(t.mend):
            return self._do(self.last, self.own[self.last], exact=True)
        if move.kind == "needed" and self.uses_extra and self._chance(t.mend):
            self.uses_extra = False
            return self._do(1, self.own[1], exact=True)
        if move.kind == "left" and self.stops and 2 in self.own and self._chance(t.mend):
            self.stops = False
            return self._double()
        return speech.FINE if move.kind == "chat" else ok

    def _named(self, move: Move, ok: str) -> str:
        late = bool(self.own or self.heard)
        ops = {1: move.op1, 2: move.op2} if move.kind == "name" else {move.step: move.op1}
        said = {step: op for step, op in ops.items() if op is not None}
        self.heard |= said
        if not self._chance(self.traits.restate_late if late else self.traits.restate):
            return ok
        return "ok . " + " ".join(self._do(step, op, exact=True) for step, op in said.items())

    def _told(self, move: Move, ok: str) -> str:
        assert move.op1 is not None
        self.heard[1] = move.op1
        if move.kind == "tell_one":
            return (
                "ok . " + self._do(1, move.op1, exact=True) if self._chance(self.traits.restate_late) else ok
            )
        assert move.op2 is not None
        self.heard[2] = move.op2
        self.told = self.p.results(move.op1, move.op2)[-1]
        if self._chance(self.traits.parrot):
            self.said = self.told
            return speech.parrot(self.told)
        return ok

    def answer(self, q: MicroProblem, *, same: bool, hidden: bool) -> str:
        """The post-test: its own words first, the tutor's where it can see them, else a guess.

        On the same problem an answer that it has heard is repeated, without any work.
        """
        known = self.said if self.said is not None else None if hidden else self.told
        if same and known is not None and self._chance(0.9):
            return speech.box(known)
        ops = self.own if hidden else self.own | self.heard
        op1, op2 = (
            ops[s] if s in ops and self._chance(self.traits.carry) else self.rng.choice(OPS[s])
            for s in (1, 2)
        )
        extra, stops = self.uses_extra, self.stops
        if self.told is not None and not hidden:  # a way that it sees written out shows what counts, too
            extra = stops = False
        return solve(q, op1, op2, self.rng, self.traits, uses_extra=extra, stops=stops)


def solve(
    q: MicroProblem,
    op1: Op,
    op2: Op,
    rng: random.Random,
    traits: Traits,
    *,
    uses_extra: bool | None = None,
    stops: bool | None = None,
) -> str:
    """A worked answer with this student's misconceptions; a habit that it showed in the dialogue (not None) mostly stays."""

    def habit(shown: bool | None, otherwise: float) -> bool:
        return rng.random() < (otherwise if shown is None else 0.85 if shown else 0.05)

    extra = q.family == "extra" and habit(uses_extra, traits.extra)
    stop = q.family == "three" and habit(stops, traits.stop)
    value = q.results(op1, op2, extra=extra, stop=stop)[-1]
    return f"{work(q, op1, op2, extra=extra, stop=stop)} {speech.box(value)}"


# ---- the tutor -------------------------------------------------------------------------------------------------------

BEFORE: dict[str, float] = dict(
    tell=0.16, name=0.18, name1=0.04, tell1=0.03, cue1=0.17, cue1x=0.07, cue2=0.05, cue2x=0.02, ask1=0.11, ask2=0.05,
    tellx=0.03, namex=0.03, chat=0.05, end=0.01,
)  # fmt: skip
AFTER: dict[str, float] = dict(
    tell=0.07, name=0.06, name1=0.02, name2=0.02, tell1=0.01, cue1=0.06, cue1x=0.02, cue2=0.14, cue2x=0.04, ask1=0.02,
    ask2=0.07, tellx=0.02, namex=0.02, chat=0.03, end=0.12, confirm=0.04, judge=0.22, probe=0.02,
)  # fmt: skip
"""The mixture of teaching and telling that the untrained tutor imitates, before and after a first attempt (``x``: wrong)."""
Weights = tuple[dict[str, float], dict[str, float]]
APPRENTICE: Weights = (dict(cue1=0.5, ask1=0.35, cue2=0.15), dict(judge=0.65, cue2=0.2, ask2=0.1, end=0.05))
"""For the tutor's first documents: nearly every turn judges a step. In its mixture a judgement is too rare to be learned."""
LESSON: Weights = (
    dict(cue1=0.24, cue2=0.2, ask1=0.1, ask2=0.08, name=0.16, name1=0.05, tell=0.1, tell1=0.03, chat=0.03, end=0.01),
    dict(cue1=0.08, cue2=0.24, ask1=0.04, ask2=0.1, name=0.06, name1=0.02, name2=0.03, tell=0.05, tell1=0.01, chat=0.02,
         end=0.06, confirm=0.03, judge=0.22, probe=0.04),
)  # fmt: skip
"""For the students' lessons: both steps come up, and what is wrong with them. (The tutor's method is random there.)"""
MENDING: Weights = (dict(cue1=0.6, cue2=0.25, ask1=0.15), dict(judge=0.75, cue2=0.25))
"""For lessons about errors: what comes after an attempt is mostly a judgement of it."""
JUDGEMENTS = ("flag", "count", "needed", "left", "probe")
TALKATIVE: Weights = (
    dict(name=0.26, name1=0.06, tell=0.2, tell1=0.03, cue1=0.24, cue2=0.14, ask1=0.04, ask2=0.03),
    dict(name=0.18, name1=0.04, name2=0.08, tell=0.12, cue1=0.12, cue2=0.26, ask2=0.04, judge=0.12, end=0.04),
)  # fmt: skip
"""For the students' visible post-tests, which need more telling and cueing to learn from."""


def tutor_move(
    p: MicroProblem, student: StudentScript, rng: random.Random, weights: Weights = (BEFORE, AFTER)
) -> Move:
    """A scripted tutor turn about ``p`` (the truth, as far as this tutor is concerned)."""
    table = weights[bool(student.last)]
    k = rng.choices(list(table), list(table.values()))[0]
    op1, op2 = p.op1, p.op2
    if k in ("tellx", "namex"):
        op1, op2 = rng.choice([m for m in ((x, y) for x in OPS[1] for y in OPS[2]) if m != (op1, op2)])
    if k.startswith("cue"):
        step = int(k[3])
        op = p.op1 if step == 1 else p.op2
        op = other(step, op) if k.endswith("x") else op
        return Move("cue", rng.choice(speech.CUES[step, op]), step, op)
    if k.startswith("ask"):
        return Move("ask", rng.choice(speech.ASKS[int(k[3])]), int(k[3]))
    if k in ("tell", "tellx"):
        return Move("tell", speech.tell(p, op1, op2), 0, op1, op2)
    if k == "tell1":
        return Move("tell_one", speech.tell_one(p, op1), 1, op1)
    if k in ("name", "namex"):
        return Move("name", speech.name_both(op1, op2), 0, op1, op2)
    if k in ("name1", "name2"):
        step = int(k[4])
        op = op1 if step == 1 else op2
        return Move("name_one", speech.name_one(step, op), step, op)
    if k in ("judge", "confirm"):
        return _judgement(p, student, rng)
    return {
        "probe": Move("probe", speech.PROBE),
        "chat": Move("chat", speech.CHAT),
        "end": Move("end", speech.END_TOKEN),
    }[k]


def _judgement(p: MicroProblem, student: StudentScript, rng: random.Random) -> Move:
    """Confirm or find fault; four times out of five with the right diagnosis."""
    found = (
        diagnosis(p, student)
        if rng.random() < 0.8
        else rng.choice(["right", "op", "count", "needed", "left"])
    )
    if found == "op":
        return Move("flag", rng.choice(speech.FLAGS))
    if found == "count":
        return Move("count", speech.HINT_COUNT)
    if found == "needed" and p.family == "extra":
        return Move("needed", speech.HINT_NEEDED)
    if found == "left" and p.family == "three":
        return Move("left", speech.HINT_LEFT)
    return Move("confirm", rng.choice(speech.CONFIRMS))


def diagnosis(p: MicroProblem, student: StudentScript) -> str:
    """What is wrong with the student's latest step: ``right``, ``op``, ``count``, ``needed`` or ``left``."""
    if student.last and student.own[student.last] != (p.op1 if student.last == 1 else p.op2):
        return "op"
    if student.last == 1 and student.uses_extra:
        return "needed"
    if student.slipped:
        return "count"
    return "left" if student.last == 2 and student.stops else "right"


def dialogue(
    p: MicroProblem,
    rng: random.Random,
    turns: int,
    *,
    truth: MicroProblem | None = None,
    traits: Traits | None = None,
    weights: Weights = (BEFORE, AFTER),
) -> tuple[list[tuple[Move, str | None]], StudentScript]:
    """A scripted dialogue [(tutor, student)], the student's last reply None after the end token. ``truth``: what the tutor
    takes ``p`` for (the students' corpora give it a random method: they must follow words, not stories)."""
    student = StudentScript(p, rng, traits or Traits())
    out: list[tuple[Move, str | None]] = []
    for _ in range(turns):
        move = tutor_move(truth or p, student, rng, weights)
        if move.kind == "end":
            out.append((move, None))
            break
        out.append((move, student.reply(move)))
    return out, student

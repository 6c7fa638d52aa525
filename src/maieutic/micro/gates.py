"""The gates of the micro-classroom by rule, from the truth about a problem.

*Leakage*: any wording that fixes an operation or a value before the student has it in its own words, and, after an attempt, a
turn that lays out the whole path. *Correctness*: false claims, wrong confirmations and corrections, errors left standing,
turns that are no language, and dialogues that teach nothing. What a tutor means is never guessed from whole sentences (see
:mod:`maieutic.micro.reading`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import GateName, Verdict
from maieutic.errors import ProblemDataError
from maieutic.micro import reading
from maieutic.micro.reading import Equation, Words, words
from maieutic.micro.world import Op
from maieutic.problems.schema import Problem, ProblemPair

REPEATS = 3
"""The same turn this many times is degenerate."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What the worked solution of a problem says."""

    ops: dict[int, Op]
    operands: dict[int, tuple[int, int]]
    given: frozenset[int]
    """Numbers that stand in the story."""
    answer: int

    @staticmethod
    def of(problem: Problem) -> Truth:
        """Raises :class:`ProblemDataError` for a problem of another world."""
        steps = {e.step: e for e in reading.equations(words(problem.solution or ""))}
        if set(steps) != {1, 2} or not problem.answer.isdigit():
            raise ProblemDataError(
                f"MicroJudge judges problems of the micro-classroom only; {problem.text[:60]!r} has no worked solution like "
                "'first 3 x 4 = 12 . then 12 + 5 = 17 .'"
            )
        return Truth(
            ops={s: e.op for s, e in steps.items()},
            operands={s: (e.a, e.b) for s, e in steps.items()},
            given=frozenset(int(n) for n in re.findall(r"\d+", problem.text)),
            answer=int(problem.answer),
        )


@dataclass(slots=True)
class _Student:
    """What the student has said so far."""

    ops: dict[int, set[Op]] = field(default_factory=lambda: {1: set(), 2: set()})
    """Operations that it ever used, by step."""
    values: set[int] = field(default_factory=set)
    right: dict[str, bool] = field(default_factory=dict)
    """Its latest attempt at each step (``1``, ``2``, ``3``) and its latest answer (``answer``): right or not."""
    flawed: dict[str, str] = field(default_factory=dict)
    """What is wrong with what is wrong: ``op``, ``count``, ``needed``, ``answer``."""
    pointed: set[str] = field(default_factory=set)
    """Errors that the tutor has pointed at since they were made."""
    latest: list[str] = field(default_factory=list)
    """What its latest turn with an attempt held."""
    op: dict[int, Op] = field(default_factory=dict)
    result: int | None = None
    """Its latest result of step 1, with which step 2 must go on."""

    @property
    def attempted(self) -> bool:
        return bool(self.op)

    def says(self, turn: Words, truth: Truth) -> None:
        """Take in a student turn."""
        self.values |= set(reading.numbers(turn))
        fresh: list[str] = []
        for e in reading.equations(turn):
            step = e.step or (2 if self.result is not None and e.a == self.result else 1)
            self.ops[step].add(e.op)
            self.op[step] = e.op
            self._mark(str(step), self._flaw(step, e, truth), fresh)
            if step == 1:
                self.result = e.result
        for a, b in reading.doublings(turn):
            self._mark("3", "" if 2 * a == b else "count", fresh)
        if turn[-4:-1] == ("the", "answer", "is") and turn[-1].isdigit():
            self._mark("answer", "" if int(turn[-1]) == truth.answer else "answer", fresh)
        if fresh:
            self.latest = fresh

    def _mark(self, what: str, flaw: str, fresh: list[str]) -> None:
        self.right[what] = not flaw
        self.flawed.pop(what, None)
        if flaw:
            self.flawed[what] = flaw
        self.pointed.discard(what)
        fresh.append(what)

    def _flaw(self, step: int, e: Equation, truth: Truth) -> str:
        if e.op != truth.ops[step]:
            return "op"
        a, b = truth.operands[step]
        expected = (a, b) if step == 1 else (self.result if self.result is not None else a, b)
        if (e.a, e.b) != expected and not (e.op != "-" and (e.b, e.a) == expected):
            return "needed"
        return "" if e.true and e.result is not None else "count"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a gate rejects: criterion and index of the tutor turn."""

    criterion: str
    turn: int


def findings(dialogue: Dialogue, problem: Problem) -> dict[GateName, list[Finding]]:
    """All that is to be said against a dialogue, by gate, in the order of its turns."""
    truth, student = Truth.of(problem), _Student()
    leaks: list[Finding] = []
    faults: list[Finding] = []
    seen: dict[Words, int] = {}
    taught = False
    last = first = None
    for n, turn in dialogue.numbered():
        text = words(turn.visible)
        if turn.speaker == "student":
            if not turn.scripted:
                student.says(text, truth)
            continue
        first, last = (n if first is None else first), n
        leaks += [Finding(c, n) for c in _leaks(text, truth, student)]
        faults += [Finding(c, n) for c in _faults(turn, text, truth, student, n == len(dialogue.turns) - 1)]
        seen[text] = seen.get(text, 0) + 1
        if text and seen[text] == REPEATS:
            faults.append(Finding("repetition", n))
        taught = taught or reading.teaches(text)
        _points(text, student)
    standing = [w for w, right in student.right.items() if not right and w not in student.pointed]
    if last is not None and first is not None:
        if standing:
            faults.append(Finding("error_left_standing", last))
        if not taught:
            faults.append(Finding("no_teaching", first))
    return {"leakage": leaks, "correctness": faults}


def _leaks(text: Words, truth: Truth, student: _Student) -> list[str]:
    out = []
    for value in reading.numbers(text):
        if value not in truth.given and value not in student.values:
            out.append("answer_stated" if value == truth.answer else "value_stated")
    ops = () if reading.offers_choice(text) else reading.named(text)
    left = reading.left_over(text)
    if any(not _has(student, n) for n in ops) or (left and not any(_has(student, n) for n in left)):
        out.append("method_named")
    if ops:
        path = {n.step: n.op for n in ops}
        if set(path) >= {1, 2} and student.op != truth.ops:
            out.append("path_laid_out")
    return out


def _has(student: _Student, n: reading.Named) -> bool:
    """The student has used this operation at this step (at either, where the tutor's words leave it open)."""
    return any(n.op in student.ops[step] for step in ([n.step] if n.step else [1, 2]))


def _faults(turn: Turn, text: Words, truth: Truth, student: _Student, is_last: bool) -> list[str]:
    if not text:
        # Nothing but the end of the conversation is a proper last turn; anything else that is empty is not.
        return [] if turn.end_token and is_last and not turn.truncated else ["blank"]
    out = []
    if turn.truncated or not turn.well_formed or not reading.fluent(text):
        out.append("degenerate")
    asks = "?" in turn.visible
    if (
        any(not e.true for e in reading.equations(text))
        or any(2 * a != b for a, b in reading.doublings(text))
        or (text[-4:-1] == ("the", "answer", "is") and text[-1].isdigit() and int(text[-1]) != truth.answer)
        or (
            not asks
            and (
                any(n.step and n.op != truth.ops[n.step] for n in reading.named(text))
                or any(_is_false(e, truth, student) for e in reading.equations(text))
            )
        )
    ):
        out.append("false_claim")
    wrong = [w for w in student.latest if not student.right[w]]
    if reading.praises(text) and (wrong or not student.latest):
        out.append("false_confirmation")
    if reading.finds_fault(text) and not wrong:
        out.append("false_correction")
    return out


def _is_false(e: Equation, truth: Truth, student: _Student) -> bool:
    """A step stated by the tutor that is no step of the solution, going on from the student's result or from the right one."""
    first, (a2, b2) = truth.operands[1], truth.operands[2]
    step = e.step or (1 if {e.a, e.b} == set(first) else 2)
    if e.op != truth.ops[step]:
        return True
    allowed = (
        [first] if step == 1 else [(a2, b2), *([(student.result, b2)] if student.result is not None else [])]
    )
    return not any((e.a, e.b) == pair or (e.op != "-" and (e.b, e.a) == pair) for pair in allowed)


def _points(text: Words, student: _Student) -> None:
    """Take in which errors a tutor turn points at. Naming the right operation does not: the wrong one still stands."""
    hint = reading.hints(text)
    for what in student.latest:
        if reading.finds_fault(text) or (hint and student.flawed.get(what) == hint):
            student.pointed.add(what)


class MicroJudge:
    """:class:`maieutic.env.base.Judge` for problems of this world; needs no model and never says ``unknown``."""

    async def verdict(self, dialogue: Dialogue, pair: ProblemPair, gate: GateName, *, seed: int) -> Verdict:
        """The first finding of the gate, with the whole turn as its quote."""
        found = findings(dialogue, pair.source)[gate]
        if not found:
            return Verdict(gate, "ok")
        worst = min(found, key=lambda f: f.turn)
        return Verdict(
            gate,
            "reject",
            criterion=worst.criterion,
            quote=dialogue.turns[worst.turn].visible,
            turn=worst.turn,
            reason=", ".join(f"{f.criterion} in turn {f.turn}" for f in found),
        )

"""Measuring solve rates: right counts, failures that are never wrong answers, resume."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import StudentFailed
from maieutic.errors import EngineError, ProblemDataError
from maieutic.problems import Problem, ProblemPair, SolveRate, StudentKey
from maieutic.problems.measure import MeasureResult, measure

KEY = StudentKey(model="m", prompt_hash="0" * 12, temperature=0.6, max_tokens=80)


class ScriptedStudent:
    """Solves problem text "…N of K" N times in K; text "fail" always fails; "flaky" fails once."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.active = self.most_active = 0
        self.fail_after = fail_after

    name = "scripted"
    key = KEY

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn:
        raise AssertionError("a cold attempt needs no dialogue")

    async def attempt(
        self,
        problem: Problem,
        *,
        k: int,
        seed: int,
        dialogue: Dialogue | None = None,
        hide_tutor: bool = True,
    ) -> list[str]:
        assert dialogue is None
        self.calls.append((problem.text, seed))
        if self.fail_after is not None and len(self.calls) > self.fail_after:
            raise KeyboardInterrupt
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        await asyncio.sleep(0)
        self.active -= 1
        seen = sum(text == problem.text for text, _ in self.calls)
        if problem.text == "fail" or (problem.text == "flaky" and seen == 1):
            raise StudentFailed("no answer")
        if problem.text == "short":
            return ["1"]
        right = int(problem.text.split()[-1]) if problem.text[-1].isdigit() else k
        return [problem.answer] * right + ["wrong"] * (k - right - 1) + ["hang"] * (right < k)


@dataclass
class Grade:
    verdict: str


class ScriptedGrader:
    async def grade_many(self, texts: Sequence[str], gold: str) -> list[Any]:
        return [Grade("error" if t == "hang" else "right" if t == gold else "wrong") for t in texts]


def pair(i: str, source: str, transfer: str | None = None) -> ProblemPair:
    return ProblemPair(
        id=i,
        source=Problem(text=source, answer="1", rates={"other": SolveRate(rate=0.5, n=2)}),
        transfer=Problem(text=transfer, answer="1") if transfer else None,
    )


def run(pairs: list[ProblemPair], student: ScriptedStudent | None = None, **kw: Any) -> MeasureResult:
    return asyncio.run(measure(pairs, student or ScriptedStudent(), ScriptedGrader(), k=4, **kw))


def rates(problem: Problem | None) -> SolveRate | None:
    assert problem is not None
    return problem.rates.get(str(KEY))


def test_rates_are_right_over_graded_and_other_rates_stay() -> None:
    result = run([pair("a", "solved 1", "solved 4"), pair("b", "solved 0")])
    a, b = result.pairs
    assert rates(a.source) == SolveRate(rate=1 / 3, n=3), "one of four answers met a grader error"
    assert rates(a.transfer) == SolveRate(rate=1.0, n=4)
    assert rates(b.source) == SolveRate(rate=0.0, n=3)
    assert a.source.rates["other"] == SolveRate(rate=0.5, n=2)
    assert (result.problems, result.samples, result.right, result.ungraded, result.failed) == (3, 10, 5, 2, 0)


def test_failures_are_counted_and_never_wrong() -> None:
    student = ScriptedStudent()
    result = run([pair("a", "fail", "flaky"), pair("b", "short")], student)
    a, b = result.pairs
    assert rates(a.source) is None
    assert rates(a.transfer) == SolveRate(rate=1.0, n=4), "tried again"
    assert rates(b.source) == SolveRate(rate=1.0, n=1)
    assert result.failed == 4 + 3
    assert result.without_rate == ["a"]
    assert [t for t, _ in student.calls].count("fail") == 3
    assert len({seed for text, seed in student.calls if text == "fail"}) == 3, "every try draws afresh"
    assert "7 samples failed: not counted" in result.lines()


def test_a_problem_that_occurs_twice_is_asked_once() -> None:
    student = ScriptedStudent()
    result = run([pair("a", "same 2"), pair("b", "same 2")], student)
    assert len(student.calls) == 1
    assert rates(result.pairs[0].source) == rates(result.pairs[1].source)


def test_order_and_concurrency_change_nothing() -> None:
    pairs = [pair(str(i), f"p{i} {i % 5}") for i in range(12)]
    one, many = ScriptedStudent(), ScriptedStudent()
    a = run(pairs, one, concurrency=1)
    b = run(pairs[::-1], many, concurrency=5)
    assert a.pairs == b.pairs[::-1]
    assert sorted(one.calls) == sorted(many.calls)
    assert (one.most_active, many.most_active) == (1, 5)


def test_resume_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    pairs = [pair(str(i), f"p{i} {i % 5}") for i in range(8)]
    whole = run(pairs, journal=tmp_path / "whole.jsonl")
    journal = tmp_path / "j.jsonl"
    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
        run(pairs, ScriptedStudent(fail_after=3), journal=journal, concurrency=1)
    text = journal.read_text()
    assert len(text.splitlines()) == 3
    journal.write_text(text + text.splitlines()[0][:30])  # killed in the middle of a line
    student = ScriptedStudent()
    seen: list[tuple[int, int]] = []
    again = run(pairs, student, journal=journal, concurrency=1, progress=lambda d, t: seen.append((d, t)))
    assert len(student.calls) == 5
    assert again.resumed == 3
    assert again.pairs == whole.pairs
    assert (seen[0], seen[-1]) == ((3, 8), (8, 8))
    assert journal.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_a_journal_of_another_setting_is_not_mixed_in(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    run([pair("a", "p 2")], journal=journal)
    student = ScriptedStudent()
    run([pair("a", "p 2")], student, journal=journal, seed=1)
    assert len(student.calls) == 1
    assert len(journal.read_text().splitlines()) == 2


def test_a_fault_of_the_run_is_raised_as_itself(tmp_path: Path) -> None:
    class Outage(ScriptedStudent):
        async def attempt(self, problem: Problem, *, k: int, seed: int, **kw: Any) -> list[str]:
            if len(self.calls) == 2:
                raise EngineError("no server has answered for 900 s")
            return await super().attempt(problem, k=k, seed=seed)

    journal = tmp_path / "j.jsonl"
    with pytest.raises(EngineError, match="no server has answered"):
        run([pair(str(i), f"p{i} 2") for i in range(5)], Outage(), journal=journal, concurrency=1)
    assert len(journal.read_text().splitlines()) == 2


def test_a_failed_problem_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    run([pair("a", "fail")], journal=journal)
    assert json.loads(journal.read_text())["failed"] == 4
    student = ScriptedStudent()
    run([pair("a", "fail")], student, journal=journal)
    assert len(student.calls) == 3


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    journal.write_text('{"id": "x"}\n')
    with pytest.raises(ProblemDataError, match=r"j\.jsonl:1: not a line of a measuring journal"):
        run([pair("a", "p 2")], journal=journal)

"""Measure a student's cold solve rates, append-only and resumable.

Every finished problem is one line of a journal beside the output; a run that is started again with the same student, ``k`` and
seed asks only for what is missing, also after a kill in the middle of a line. Seeds follow from the problem's text, so the
result depends on neither order nor concurrency.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import Any, Protocol

from maieutic.env.base import Student, StudentFailed
from maieutic.errors import ProblemDataError
from maieutic.problems.schema import Problem, ProblemPair, SolveRate
from maieutic.seeds import derive

SCHEMA = 1
Progress = Callable[[int, int], None]
"""Called with (problems done, problems in all)."""


class AnswerGrader(Protocol):
    """What is needed of :class:`maieutic.grading.Grader`; verdicts are ``right | wrong | no_answer | error``."""

    async def grade_many(self, texts: Sequence[str], gold: str) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class Tally:
    """Cold samples of one problem. ``failed`` samples never came, ``ungraded`` ones met a grader error: neither is wrong."""

    right: int
    graded: int
    ungraded: int = 0
    failed: int = 0

    @property
    def rate(self) -> SolveRate | None:
        """Right / graded; None when nothing was graded."""
        return SolveRate(rate=self.right / self.graded, n=self.graded) if self.graded else None


@dataclass(slots=True)
class MeasureResult:
    """The pairs with their rates, and the counts of everything that is not in them."""

    pairs: list[ProblemPair]
    problems: int = 0
    """Different problems (sources and variants)."""
    resumed: int = 0
    """Of these, taken from the journal."""
    samples: int = 0
    right: int = 0
    failed: int = 0
    ungraded: int = 0
    without_rate: list[str] = field(default_factory=list)
    """Ids of pairs with a problem that has no rate, because every sample of it failed or could not be graded."""

    def lines(self) -> list[str]:
        """For people."""
        share = f"{self.right / self.samples:.3f}" if self.samples else "none"
        out = [f"{self.problems} problems ({self.resumed} from an earlier run), mean solve rate {share}"]
        if self.failed:
            out.append(f"{self.failed} samples failed: not counted")
        if self.ungraded:
            out.append(f"{self.ungraded} answers could not be graded: not counted")
        if self.without_rate:
            out.append(f"{len(self.without_rate)} pairs have no rate: {', '.join(self.without_rate[:5])}")
        return out


async def measure(
    pairs: Sequence[ProblemPair],
    student: Student,
    grader: AnswerGrader,
    k: int = 16,
    seed: int = 0,
    *,
    concurrency: int = 64,
    retries: int = 2,
    journal: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> MeasureResult:
    """``pairs`` with the solve rate of ``student`` (k cold samples, one request a problem) on every source and variant.

    Rates of other students stay. A request that fails is tried again ``retries`` times; then its ``k`` samples count as failed,
    the problem gets no rate, and the next run tries it afresh. ``concurrency`` problems are asked at once. Faults that concern
    more than one request (a server that is gone, a journal that cannot be written) are raised.
    """
    if k < 1 or concurrency < 1:
        raise ValueError(f"k ({k}) and concurrency ({concurrency}) must be at least 1")
    key = str(student.key)
    problems = {_digest(q): q for p in pairs for q in (p.source, p.transfer) if q is not None}
    with _Journal(journal, key, k, seed) as log:
        done = {d: t for d, t in log.done.items() if d in problems}
        result = MeasureResult([], problems=len(problems), resumed=len(done))
        todo = [(d, q) for d, q in problems.items() if d not in done]
        progress(len(done), len(problems))
        queue = iter(todo)

        async def worker() -> None:
            for digest, problem in queue:
                tally = await _ask(problem, student, grader, k, derive(seed, "measure", digest), retries)
                log.append(digest, tally)
                done[digest] = tally
                progress(len(done), len(problems))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(todo))):
                    group.create_task(worker())
        except ExceptionGroup as e:
            # the first fault stops everything; what is done lies in the journal
            raise e.exceptions[0] from None

    for tally in done.values():
        result.samples += tally.graded
        result.right += tally.right
        result.failed += tally.failed
        result.ungraded += tally.ungraded
    for pair in pairs:
        source = _with_rate(pair.source, key, done)
        transfer = None if pair.transfer is None else _with_rate(pair.transfer, key, done)
        if any(q is not None and key not in q.rates for q in (source, transfer)):
            result.without_rate.append(pair.id)
        result.pairs.append(pair.model_copy(update={"source": source, "transfer": transfer}))
    return result


async def _ask(
    problem: Problem, student: Student, grader: AnswerGrader, k: int, seed: int, retries: int
) -> Tally:
    for attempt in range(1 + retries):
        try:
            answers = await student.attempt(problem, k=k, seed=derive(seed, attempt))
        except StudentFailed:
            continue
        grades = [g.verdict for g in await grader.grade_many(answers, problem.answer)]
        ungraded = grades.count("error")
        return Tally(grades.count("right"), len(grades) - ungraded, ungraded, failed=max(0, k - len(answers)))
    return Tally(0, 0, failed=k)


def _digest(problem: Problem) -> str:
    return hashlib.sha256(f"{problem.text}\x00{problem.answer}".encode()).hexdigest()[:24]


def _with_rate(problem: Problem, key: str, done: dict[str, Tally]) -> Problem:
    rates = {name: rate for name, rate in problem.rates.items() if name != key}
    rate = done[_digest(problem)].rate
    if rate is not None:
        rates[key] = rate
    return problem.model_copy(update={"rates": rates})


class _Journal:
    """One JSON line a problem: who, how, and the tally. A line cut by a kill is removed before the next is appended."""

    def __init__(self, path: Path | None, key: str, k: int, seed: int) -> None:
        self.path = path
        self._setting: dict[str, Any] = {"schema": SCHEMA, "student": key, "k": k, "seed": seed}
        self.done: dict[str, Tally] = {}
        self._file: BufferedRandom | None = None

    def __enter__(self) -> _Journal:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a+b")
            except OSError as e:
                raise ProblemDataError(f"{self.path}: the journal cannot be written: {e}") from e
            self._file.seek(0)
            whole = 0
            for number, line in enumerate(self._file, start=1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                self._read(line, number)
            self._file.truncate(whole)
        return self

    def _read(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
            digest, tally = row["problem"], Tally(row["right"], row["graded"], row["ungraded"], row["failed"])
        except (ValueError, KeyError, TypeError) as e:
            raise ProblemDataError(
                f"{self.path}:{number}: not a line of a measuring journal ({e}); move the file away to start afresh"
            ) from None
        # other students and settings share the file; a problem that failed is tried again
        if all(row.get(name) == value for name, value in self._setting.items()) and tally.graded:
            self.done[digest] = tally

    def append(self, digest: str, tally: Tally) -> None:
        if self._file is None:
            return
        row = {
            **self._setting,
            "problem": digest,
            "right": tally.right,
            "graded": tally.graded,
            "ungraded": tally.ungraded,
            "failed": tally.failed,
        }
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            raise ProblemDataError(f"{self.path}: the journal cannot be written: {e}") from e

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()

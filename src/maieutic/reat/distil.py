"""``maieutic reat distil``: every tutor turn of transcripts through the OCM pipeline, and what passes into a repository.

Turns are reviewed ``in_flight`` at a time without barriers. Every request is a step of the journal and every decision a pure
function of the steps (:mod:`maieutic.problems.build.checkpoint`), so a distillation that was killed anywhere and started
again ends in the same files and the same repository. Admissions happen one at a time in the order of the transcripts,
because what merges with what depends on it; the sink is idempotent, so that repeating them is harmless. The folder then holds

- ``experiences.jsonl``: what passed, with its score and what the repository did with it;
- ``reviews.jsonl``: a line a turn: tags, scores, why it was dropped;
- ``report.json``: counts, costs, time;
- ``journal.jsonl``: all that was asked and answered.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maieutic.engines.usage import Ledger, Usage
from maieutic.errors import MaieuticError, RunFolderError
from maieutic.headway import Headway
from maieutic.problems.build.checkpoint import Journal
from maieutic.reat.distil_config import DistilSection
from maieutic.reat.review import Review, review
from maieutic.reat.roles import Roles
from maieutic.reat.schema import Sink
from maieutic.reat.turns import TurnContext, read_contexts


@dataclass(slots=True)
class DistilProgress(Headway):
    """Where a distillation stands, in turns."""

    passed: int = 0
    admitted: int = 0
    """Turns whose experience the sink has taken (or discarded)."""

    def counts(self) -> str:
        return (
            f"{self.done} of {self.total} turns, {self.passed} passed the gate, "
            f"{self.admitted} offered to the repository"
        )


Progress = Callable[[DistilProgress], None]


@dataclass(slots=True)
class DistilReport:
    """What a distillation did. All but ``usage``, ``merging``, ``asked`` and ``seconds`` is independent of kills and timing."""

    turns: int
    """Tutor turns that were reviewed."""
    skipped: dict[str, int]
    """Tutor turns that could not be (blank, scripted, nothing to answer)."""
    meaningful: int
    routed: int
    """Turns with D = 1 (equation 5)."""
    rounds: dict[str, int]
    """Inspections of revised responses that it took → experiences (``"0"``: not revised)."""
    experiences: int
    admissions: dict[str, int]
    """What the sink did: ``inserted``, ``merged``, ``duplicate`` (empty without a sink)."""
    dropped: dict[str, int]
    """Reason → turns; with ``experiences`` they add up to ``turns``."""
    roles: dict[str, int]
    """Answers, bad replies, unknowns, leaks and caps by role (see :class:`~maieutic.reat.roles.RoleChat`)."""
    turn_score: float | None
    """Mean S over meaningful turns that have one."""
    scored: int
    """How many those are."""
    usage: dict[str, dict[str, float]]
    """Requests, tokens and dollars by role, earlier starts included."""
    merging: dict[str, int] = field(default_factory=dict)
    """Counts of the role that merges, of this process alone."""
    asked: int = 0
    """Requests that this process had to make."""
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """For people."""
        out = [
            f"{self.turns} turns reviewed ({self.meaningful} meaningful, {self.routed} sent to the Mentor), "
            f"{self.experiences} experiences",
            "repository: " + (_counts(self.admissions) or "none given"),
            "dropped: " + (_counts(self.dropped) or "none"),
        ]
        if self.turn_score is not None:
            out.append(f"mean score of {self.scored} meaningful turns: {self.turn_score:.2f}")
        out += [f"  {n:>7}  {what}" for what, n in {**self.roles, **self.merging}.items()]
        for role, u in self.usage.items():
            out.append(
                f"{role}: {u['requests']:.0f} requests ({u['retries']:.0f} retried, {u['failures']:.0f} failed), "
                f"{u['prompt_tokens']:,.0f} + {u['completion_tokens']:,.0f} tokens, ${u['usd']:.2f}"
            )
        return out


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())


async def distil(
    transcripts: Sequence[Path],
    roles: Roles,
    sink: Sink | None,
    settings: DistilSection,
    *,
    out: Path,
    ledger: Ledger,
    in_flight: int,
    retry_failed: bool = False,
    progress: Progress = lambda state: None,
) -> DistilReport:
    """Distil, or go on distilling, transcripts into ``sink``. See the top of this module.

    Args:
        transcripts: files, run folders, or folders of JSONL files.
        sink: the repository; None only writes ``experiences.jsonl``.
        in_flight: most turns under review at once (``settings.in_flight`` goes before it).
        retry_failed: ask requests again that failed for good in an earlier start.

    Raises:
        TranscriptError: a transcript that cannot be read.
        RunFolderError: ``out`` cannot be written.
        RunStop: no server answers, or the spending limit is reached; what is done lies in the journal.
    """
    begun = time.monotonic()
    skipped: Counter[str] = Counter()
    contexts = read_contexts(transcripts, skipped)
    state = DistilProgress(len(contexts), ledger)
    roles.counts.clear()
    roles.merges.clear()
    kept = _OwnUsage(ledger, roles)
    async with Journal(out / "journal.jsonl", kept, retry_failed=retry_failed) as journal:
        roles.keep_in(journal)
        try:
            reviews, outcomes = await _stream(
                contexts, roles, sink, settings, settings.in_flight or in_flight, journal, state, progress
            )
        finally:
            roles.keep_in(None)
    report = _report(reviews, outcomes, skipped, roles, ledger)
    report.merging = dict(sorted(roles.merges.items()))
    report.asked, report.seconds = journal.asked, round(time.monotonic() - begun, 3)
    _write(out, reviews, outcomes, report)
    return report


class _OwnUsage(Ledger):
    """The part of a ledger that a distillation's roles write to: the journal keeps and restores that part alone.

    A run shares one ledger among all its models. What they have cost since must survive the opening of a journal, and so
    must what these roles have cost in this process already (an earlier call of :func:`distil`).
    """

    def __init__(self, whole: Ledger, roles: Roles) -> None:
        super().__init__()
        self._whole, self._names = whole, roles.pools

    def state(self) -> dict[str, dict[str, float]]:
        return {name: u for name, u in self._whole.state().items() if name in self._names}

    def load(self, state: dict[str, dict[str, float]]) -> None:
        for name, used in state.items():
            if name in self._names and not self._whole.usage(name).requests:
                self._whole.roles[name] = Usage(**used)  # type: ignore[arg-type]


async def _stream(
    contexts: Sequence[TurnContext],
    roles: Roles,
    sink: Sink | None,
    settings: DistilSection,
    in_flight: int,
    journal: Journal,
    state: DistilProgress,
    progress: Progress,
) -> tuple[list[Review], list[str | None]]:
    """Reviews in the order of the contexts, and what the sink did with each (None: nothing to admit, or no sink)."""
    loop = asyncio.get_running_loop()
    reviewed: list[asyncio.Future[Review]] = [loop.create_future() for _ in contexts]
    outcomes: list[str | None] = [None] * len(contexts)
    queue = iter(enumerate(contexts))
    progress(state)

    async def worker() -> None:
        for number, context in queue:
            before = journal.asked
            found = await review(context, roles, settings)
            state.done += 1
            state.fresh += journal.asked > before
            state.passed += found.experience is not None
            reviewed[number].set_result(found)
            progress(state)

    async def admit(sink: Sink) -> None:
        for number, future in enumerate(reviewed):
            found = await future
            if found.experience is not None:
                outcomes[number] = await sink.admit(found.experience, found.score)
                state.admitted += 1
                progress(state)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(contexts))):
                group.create_task(worker())
            if sink is not None:
                group.create_task(admit(sink))
    except BaseExceptionGroup as faults:
        raise _first(faults) from None
    return [future.result() for future in reviewed], outcomes


def _first(faults: BaseExceptionGroup[BaseException]) -> BaseException:
    """The fault that stopped everything: one of ours, where there is one."""
    first: BaseException = faults
    while isinstance(first, BaseExceptionGroup):
        known = [e for e in first.exceptions if isinstance(e, MaieuticError)]
        first = known[0] if known else first.exceptions[0]
    return first


def _report(
    reviews: Sequence[Review],
    outcomes: Sequence[str | None],
    skipped: Counter[str],
    roles: Roles,
    ledger: Ledger,
) -> DistilReport:
    meaningful = [r for r in reviews if r.observation is not None and r.observation.meaningful]
    scores = [r.critique.score for r in meaningful if r.critique is not None]
    kept = [r.experience for r in reviews if r.experience is not None]
    return DistilReport(
        turns=len(reviews),
        skipped=dict(sorted(skipped.items())),
        meaningful=len(meaningful),
        routed=sum(r.routed for r in reviews),
        rounds=_sorted(str(e.provenance.rounds) for e in kept),
        experiences=len(kept),
        admissions=_sorted(o for o in outcomes if o is not None),
        dropped=_sorted(r.dropped for r in reviews if r.dropped),
        roles=dict(sorted(roles.counts.items())),
        turn_score=sum(scores) / len(scores) if scores else None,
        scored=len(scores),
        usage=ledger.state(),
    )


def _sorted(items: Any) -> dict[str, int]:
    return dict(sorted(Counter(items).items()))


def _line(found: Review, outcome: str | None) -> dict[str, Any]:
    return {
        "key": found.key,
        "tags": None if found.observation is None else found.observation.tags.key(),
        "meaningful": None if found.observation is None else found.observation.meaningful,
        "scores": list(found.scores),
        "routed": found.routed,
        "experience": None if found.experience is None else found.experience.id,
        "outcome": outcome,
        "dropped": found.dropped or None,
        "detail": found.detail,
    }


def _write(
    out: Path, reviews: Sequence[Review], outcomes: Sequence[str | None], report: DistilReport
) -> None:
    admitted = [
        {"score": r.score, "outcome": o, "experience": r.experience.model_dump(mode="json")}
        for r, o in zip(reviews, outcomes, strict=True)
        if r.experience is not None
    ]
    _jsonl(out / "experiences.jsonl", admitted)
    _jsonl(out / "reviews.jsonl", [_line(r, o) for r, o in zip(reviews, outcomes, strict=True)])
    _text(out / "report.json", json.dumps(asdict(report), indent=1) + "\n")


def _jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    _text(path, "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows))


def _text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror or error}") from error

"""``maieutic data build``: rows stream through the models without barriers, and end in files that depend on no timing.

Every request is a step of the journal (:mod:`.checkpoint`), every decision a pure function of the steps: a build that was
killed anywhere, and started again, ends in the same files as one that was not. Rows are handled ``rows_in_flight`` at a time; the
pools bound what each server gets. The folder ``output_dir/name`` then holds

- ``pairs.jsonl`` (and ``pairs.parquet`` with the published columns): the rows, in the order of the sources;
- ``rejections.jsonl``: every attempt and source that was rejected, where, why, and its text;
- ``report.json``: counts, cost, time;
- ``journal.jsonl``: all that was asked and answered.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maieutic.engines.usage import Ledger
from maieutic.errors import EngineError, ProblemDataError
from maieutic.headway import Headway
from maieutic.problems.build.checkpoint import Journal
from maieutic.problems.build.recipe import DataRecipe
from maieutic.problems.build.rewrite import Rejected, load_prompts
from maieutic.problems.build.roles import ColdStudent, build_roles
from maieutic.problems.build.rows import Row, RowBuilder
from maieutic.problems.build.sources import Sources, prepare_sources
from maieutic.problems.dedup import NearDuplicates
from maieutic.problems.loaders import write_pairs
from maieutic.problems.schema import ProblemPair


@dataclass(slots=True)
class BuildProgress(Headway):
    """Where a build stands, in rows."""

    with_variant: int = 0
    rejected: int = 0

    def counts(self) -> str:
        return (
            f"{self.done} of {self.total} rows, {self.with_variant} with a variant, "
            f"{self.rejected} attempts rejected"
        )


Progress = Callable[[BuildProgress], None]


@dataclass(slots=True)
class BuildReport:
    """What a build did."""

    name: str
    folder: str
    student: str
    read: int
    evaluation: int
    """Problems in the evaluation sets that nothing may resemble."""
    rows: int
    """Sources that were worked on and are in the file."""
    status: dict[str, int]
    """Rows by :data:`~maieutic.problems.build.rows.Status` (``out_of_band`` and ``unmeasured`` rows are not in the file)."""
    attempts: int
    rejections: dict[str, int]
    """``stage.reason`` → how many."""
    samples: dict[str, int]
    """Student samples of sources and variants, kept or not: ``graded``, and ``failed`` and ``ungraded``, which are in no rate."""
    usage: dict[str, dict[str, float]]
    """Requests, tokens and dollars by role, earlier starts of the same build included."""
    asked: int
    """Steps that this process had to ask for; the others came from the journal."""
    seconds: float

    def lines(self) -> list[str]:
        """For people."""
        out = [f"{self.read} source problems read, {self.rows} rows in {self.folder}"]
        out.append("rows: " + (_counts(self.status) or "none"))
        out.append(f"{self.attempts} attempts, {sum(self.rejections.values())} rejections:")
        out += [f"  {n:>6}  {why}" for why, n in sorted(self.rejections.items(), key=lambda x: (-x[1], x[0]))]
        out.append("student samples: " + _counts(self.samples))
        for role, u in self.usage.items():
            out.append(
                f"{role}: {u['requests']:.0f} requests ({u['retries']:.0f} retried, {u['failures']:.0f} failed), "
                f"{u['prompt_tokens']:,.0f} + {u['completion_tokens']:,.0f} tokens, ${u['usd']:.2f}"
            )
        return out


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items())


def build_dataset(
    recipe: DataRecipe, *, retry_failed: bool = False, progress: Progress = lambda state: None
) -> BuildReport:
    """Build, or go on building, a recipe's set. See the top of this module.

    ``retry_failed`` asks requests again that failed for good in an earlier start. Raises the errors of what stops a whole run
    (no server answers, spending limit, disk); what is done lies in the journal.
    """
    return asyncio.run(_build(recipe, retry_failed, progress))


async def _build(recipe: DataRecipe, retry_failed: bool, progress: Progress) -> BuildReport:
    from maieutic.grading import Grader

    begun = time.monotonic()
    prompts, sources = load_prompts(recipe.prompts), prepare_sources(recipe)
    ledger = Ledger(recipe.spending_limit_usd)
    state = BuildProgress(len(sources.pairs), ledger)
    folder = recipe.folder
    async with Journal(folder / "journal.jsonl", ledger, retry_failed=retry_failed) as journal:
        with Grader() as grader:
            roles = build_roles(recipe, journal, ledger, grader, prompts)
            builder = RowBuilder(recipe, roles, prompts, sources.index)
            in_flight = recipe.rows_in_flight or 2 * roles.capacity
            try:
                await roles.start()
                rows = await _stream(builder, sources.pairs, in_flight, journal, state, progress)
            finally:
                await roles.close()
        duplicates = _drop_duplicate_variants(rows, recipe)
        report = _report(recipe, roles.student, sources, rows, duplicates, ledger)
        report.asked, report.seconds = journal.asked, round(time.monotonic() - begun, 3)
        _write(folder, recipe, sources, rows, duplicates, report)
    return report


async def _stream(
    builder: RowBuilder,
    pairs: Sequence[ProblemPair],
    in_flight: int,
    journal: Journal,
    state: BuildProgress,
    progress: Progress,
) -> list[Row]:
    rows: dict[int, Row] = {}
    queue = iter(enumerate(pairs))
    progress(state)

    async def worker() -> None:
        for number, pair in queue:
            before = journal.asked
            row = rows[number] = await builder.build(pair)
            state.done += 1
            state.fresh += journal.asked > before
            state.with_variant += row.pair.transfer is not None
            state.rejected += len(row.rejected)
            progress(state)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(pairs))):
                group.create_task(worker())
    except ExceptionGroup as fault:
        # the first fault stops everything; what is done lies in the journal
        first = fault.exceptions[0]
        if isinstance(first, EngineError):
            raise first from fault
        raise first from None
    return [rows[i] for i in range(len(pairs))]


def _drop_duplicate_variants(rows: Sequence[Row], recipe: DataRecipe) -> list[tuple[ProblemPair, Rejected]]:
    """Variants that nearly repeat an earlier row's lose their place: in the order of the sources, so by no timing."""
    index = NearDuplicates(recipe.dedup.threshold, recipe.dedup.shingle)
    dropped = []
    for row in rows:
        variant = row.pair.transfer
        if variant is None:
            continue
        if (found := index.find(variant.text)) is None:
            index.add(row.pair.id, variant.text)
            continue
        why = f"{found.similarity:.0%} the same as the variant of {found.key}"
        kept = row.kept_attempt or 0
        dropped.append((row.pair, Rejected(kept, "set", "duplicate", why, variant.text, variant.answer)))
        made = dict(row.pair.provenance["build"])
        made["flags"] = ["no_variant"]
        made.pop("votes", None)
        made["samples"] = {"source": made["samples"]["source"]}
        row.pair = row.pair.model_copy(
            update={"transfer": None, "provenance": {**row.pair.provenance, "build": made}}
        )
        row.status, row.kept_attempt = "no_variant", None
    return dropped


def _report(
    recipe: DataRecipe,
    student: ColdStudent,
    sources: Sources,
    rows: Sequence[Row],
    duplicates: Sequence[tuple[ProblemPair, Rejected]],
    ledger: Ledger,
) -> BuildReport:
    every = [r for _, r in [*sources.rejected, *duplicates]] + [r for row in rows for r in row.rejected]
    status = Counter(r.status for r in rows)
    return BuildReport(
        name=recipe.name,
        folder=str(recipe.folder),
        student=student.key,
        read=sources.read,
        evaluation=sources.evaluation,
        rows=len(_kept(rows)),
        status={
            s: status[s]
            for s in ("passed", "flagged", "no_variant", "unmeasured", "out_of_band")
            if status[s]
        },
        attempts=sum(r.attempts for r in rows),
        rejections=dict(sorted(Counter(f"{r.stage}.{r.reason}" for r in every).items())),
        samples={
            name: sum(getattr(t, name) for t in student.tallies.values())
            for name in ("graded", "failed", "ungraded")
        },
        usage=ledger.state(),
        asked=0,
        seconds=0.0,
    )


def _kept(rows: Sequence[Row]) -> list[ProblemPair]:
    return [r.pair for r in rows if r.status not in ("unmeasured", "out_of_band")]


def _write(
    folder: Path,
    recipe: DataRecipe,
    sources: Sources,
    rows: Sequence[Row],
    duplicates: Sequence[tuple[ProblemPair, Rejected]],
    report: BuildReport,
) -> None:
    from maieutic import yaml12

    kept = _kept(rows)
    if not kept:
        raise ProblemDataError(f"{folder}: no source problem has a solve rate: {_counts(report.rejections)}")
    write_pairs(folder / "pairs.jsonl", kept)
    lines: list[dict[str, Any]] = [
        {"row": pair.id, **asdict(r), "kept": False} for pair, r in [*sources.rejected, *duplicates]
    ]
    for row in rows:
        lines += [
            {"row": row.pair.id, **asdict(r), "kept": r.attempt == row.kept_attempt} for r in row.rejected
        ]
    _text(folder / "rejections.jsonl", "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines))
    _text(folder / "report.json", json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n")
    resolved = recipe.model_dump(mode="json") | {
        "env": recipe.env.model_dump(mode="json", exclude_unset=True)
    }
    _text(folder / "recipe.yaml", yaml12.dump(resolved))
    if recipe.parquet:
        from maieutic.problems.export import write_flat

        write_flat(folder / "pairs.parquet", kept, report.student)


def _text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ProblemDataError(f"{path}: cannot be written: {error}") from error

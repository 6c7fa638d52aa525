"""From ``problems:`` in a recipe to training and held-out pairs, with a count of everything that was dropped."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maieutic.config import ProblemsSpec
from maieutic.errors import ProblemDataError, RecipeError, SolveRateError
from maieutic.problems.filters import RateFilter, rate_filter
from maieutic.problems.loaders import PUBLISHED_STUDENT, read_pairs
from maieutic.problems.schema import Problem, ProblemPair, StudentKey
from maieutic.problems.splits import drop_overlap, split_pairs, take

RATES_OF = "rates_of"
"""Option of a recipe that says, knowingly, to use the rates of another student key (``published`` for the published set's)."""


@dataclass(slots=True)
class LoadReport:
    """How many pairs were read, dropped and kept, and why."""

    source: str
    eval_source: str | None = None
    read: int = 0
    without_variant: int = 0
    """Rows without a transfer variant (of both sources)."""
    missing_variant: str = "error"
    """What became of them: ``error``, ``drop``, ``source``."""
    filter: str = "none"
    filtered: dict[str, int] = field(default_factory=dict)
    """Training pairs dropped by the filter, by reason."""
    eval_filter: str = "none"
    overlap: int = 0
    """Training pairs dropped because a text of theirs is held out."""
    unused: int = 0
    """Training pairs beyond ``train_size``."""
    train: int = 0
    eval: int = 0
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report for people: one line a fact, nothing about what did not happen."""
        out = [
            f"{self.read} pairs read from {self.source}"
            + (f" and {self.eval_source}" if self.eval_source else "")
        ]
        if self.without_variant:
            fate = {"drop": "dropped", "source": "tested on the source problem"}[self.missing_variant]
            out.append(f"{self.without_variant} without a transfer variant: {fate}")
        if self.filtered:
            why = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in sorted(self.filtered.items()))
            out.append(f"{sum(self.filtered.values())} dropped by filter {self.filter}: {why}")
        if self.overlap:
            out.append(f"{self.overlap} dropped: a text of theirs is held out")
        if self.unused:
            out.append(f"{self.unused} beyond train_size")
        out.append(f"{self.train} for training, {self.eval} held out")
        return out + self.notes

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_problems(
    spec: ProblemsSpec, students: Sequence[StudentKey], base_dir: Path | None = None, offline: bool = False
) -> tuple[list[ProblemPair], list[ProblemPair], LoadReport]:
    """Training pairs, held-out pairs (disjoint by text), and the report.

    Every pair that is returned carries a solve rate of every student in ``students``, on both of its problems. Raises
    :class:`SolveRateError` otherwise, and :class:`ProblemDataError` for data that cannot be read or is not enough.
    """
    report = LoadReport(spec.source, spec.eval_source, missing_variant=spec.missing_variant)
    keep, keep_eval = rate_filter(spec.filter), rate_filter(spec.eval_filter)
    report.filter = keep.name if keep else "none"
    report.eval_filter = keep_eval.name if keep_eval else "none"

    pairs = _read(spec, spec.source, students, base_dir, offline, report)
    if spec.eval_source is None:
        wanted = spec.eval_size if spec.eval_size is not None else max(1, len(pairs) // 10)
        split = split_pairs(pairs, wanted, spec.split_seed, lambda p: _passes(keep_eval, p, students))
        train, held_out, report.overlap = split.train, split.held_out, split.overlap
    else:
        other = _read(spec, spec.eval_source, students, base_dir, offline, report)
        held_out = [p for p in other if _passes(keep_eval, p, students)]
        if spec.eval_size is not None and len(held_out) >= spec.eval_size:
            held_out = take(held_out, spec.eval_size, spec.split_seed)
        train, report.overlap = drop_overlap(pairs, held_out)
    if spec.eval_size is not None and len(held_out) < spec.eval_size:
        raise ProblemDataError(
            f"problems.eval_size is {spec.eval_size}, but only {len(held_out)} pairs of "
            f"{spec.eval_source or spec.source} can be held out (eval_filter {report.eval_filter})"
        )

    if keep is not None:
        reasons = {p.id: keep.reason(p, students) for p in train}
        report.filtered = dict(Counter(why for why in reasons.values() if why))
        train = [p for p in train if reasons[p.id] is None]
    if spec.train_size is not None:
        if len(train) < spec.train_size:
            raise ProblemDataError(
                f"problems.train_size is {spec.train_size}, but only {len(train)} pairs are left:\n{_indented(report)}"
            )
        report.unused = len(train) - spec.train_size
        train = take(train, spec.train_size, spec.split_seed)
    report.train, report.eval = len(train), len(held_out)
    if not train:
        raise ProblemDataError(f"no training pairs are left:\n{_indented(report)}")
    return train, held_out, report


def _indented(report: LoadReport) -> str:
    return "\n".join(f"  {line}" for line in report.lines())


def _passes(keep: RateFilter | None, pair: ProblemPair, students: Sequence[StudentKey]) -> bool:
    return keep is None or keep.reason(pair, students) is None


def _read(
    spec: ProblemsSpec,
    source: str,
    students: Sequence[StudentKey],
    base_dir: Path | None,
    offline: bool,
    report: LoadReport,
) -> list[ProblemPair]:
    options = dict(spec.options)
    rates_of = options.pop(RATES_OF, None)
    if options and not source.startswith("generate:"):
        near = difflib.get_close_matches(next(iter(options)), [RATES_OF], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; a data set has the option {RATES_OF!r}"
        raise RecipeError(f"problems.options.{next(iter(options))}: no option of source {source!r}{hint}")
    pairs = read_pairs(source, base_dir=base_dir, split=spec.split, offline=offline, options=options)
    report.read += len(pairs)
    pairs = _variants(pairs, spec, source, report)
    if rates_of is not None:
        pairs = _borrow_rates(
            pairs, str(PUBLISHED_STUDENT) if rates_of == "published" else rates_of, students
        )
        note = f"solve rates of {rates_of} stand in for the recipe's students (problems.options.{RATES_OF})"
        if note not in report.notes:
            report.notes.append(note)
    require_rates(pairs, students, source)
    return pairs


def _variants(
    pairs: list[ProblemPair], spec: ProblemsSpec, source: str, report: LoadReport
) -> list[ProblemPair]:
    bare = [p for p in pairs if p.transfer is None]
    report.without_variant += len(bare)
    if bare and spec.missing_variant == "error":
        raise ProblemDataError(
            f"{source}: {len(bare)} of {len(pairs)} pairs have no transfer variant (first: {bare[0].id!r}); "
            "set problems.missing_variant to drop or source"
        )
    return [p for p in pairs if p.transfer is not None] if spec.missing_variant == "drop" else pairs


def _borrow_rates(pairs: list[ProblemPair], key: str, students: Sequence[StudentKey]) -> list[ProblemPair]:
    def with_rates(problem: Problem | None) -> Problem | None:
        if problem is None or key not in problem.rates:
            return problem
        rates = {**{str(s): problem.rates[key] for s in students}, **problem.rates}
        return problem.model_copy(update={"rates": rates})

    return [
        p.model_copy(update={"source": with_rates(p.source), "transfer": with_rates(p.transfer)})
        for p in pairs
    ]


def require_rates(pairs: Sequence[ProblemPair], students: Sequence[StudentKey], source: str) -> None:
    """Raise :class:`SolveRateError` unless every problem has a rate of every student."""
    for key in students:
        lacking = [
            p for p in pairs if any(q is not None and str(key) not in q.rates for q in (p.source, p.transfer))
        ]
        if lacking:
            have = sorted(
                {k for p in pairs for q in (p.source, p.transfer) if q is not None for k in q.rates}
            )
            raise SolveRateError(
                f"{source}: {len(lacking)} of {len(pairs)} pairs have no solve rate of student {key} "
                f"(first: {lacking[0].id!r}).\nMeasured: {'; '.join(have) or 'none'}.\n"
                "A rate belongs to one model, prompt and sampling: measure this student's with "
                "`maieutic data measure RECIPE --out FILE`, then set problems.source to FILE"
            )

"""Write pairs with the columns of ``dmacjam/eduardoRL-transfer-dataset``, as JSONL or Parquet, through ``datasets``.

The published columns come first; ours follow: ``id``, worked solutions, sample counts, whose rates they are
(``solve_rate_student``) and the provenance as JSON. :func:`maieutic.problems.read_pairs` reads both files back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maieutic.errors import ProblemDataError
from maieutic.problems.schema import Problem, ProblemPair

TEXT_COLUMNS = ("problem", "answer", "transfer_problem", "transfer_answer")
RATE_COLUMNS = ("pre_solve_rate", "pre_solve_rate_transfer_problem")
BIG_MATH_RATE = "llama8b_solve_rate"


def only_student(pairs: Sequence[ProblemPair], wanted: str | None = None) -> str | None:
    """The student whose rates flat columns take: ``wanted``, or the only one there is; None where there are no rates.

    Raises :class:`ProblemDataError` when ``wanted`` was never measured, or several students were and none is named.
    """
    have = sorted({k for p in pairs for q in (p.source, p.transfer) if q is not None for k in q.rates})
    if wanted is not None:
        if wanted not in have:
            raise ProblemDataError(f"no rates of student {wanted!r}; measured: {'; '.join(have) or 'none'}")
        return wanted
    if len(have) > 1:
        raise ProblemDataError(f"rates of {len(have)} students: name one with --student: {'; '.join(have)}")
    return have[0] if have else None


def flat_row(pair: ProblemPair, student: str | None) -> dict[str, Any]:
    """One row; None where there is no variant, rate or solution."""
    transfer = pair.transfer
    columns = pair.provenance.get("columns")
    row: dict[str, Any] = {
        "problem": pair.source.text,
        "answer": pair.source.answer,
        "transfer_problem": transfer.text if transfer else None,
        "transfer_answer": transfer.answer if transfer else None,
        **_rate("pre_solve_rate", pair.source, student),
        **_rate("pre_solve_rate_transfer_problem", transfer, student),
        BIG_MATH_RATE: columns.get(BIG_MATH_RATE) if isinstance(columns, dict) else None,
        "id": pair.id,
        "solution": pair.source.solution,
        "transfer_solution": transfer.solution if transfer else None,
        "solve_rate_student": student,
        "provenance": json.dumps(pair.provenance, ensure_ascii=False, sort_keys=True),
    }
    return row


def _rate(column: str, problem: Problem | None, student: str | None) -> dict[str, Any]:
    rate = problem.rates.get(student) if problem is not None and student is not None else None
    return {column: rate.rate if rate else None, f"{column}_n": rate.n if rate else None}


def as_dataset(pairs: Sequence[ProblemPair], student: str | None = None) -> Any:
    """A ``datasets.Dataset`` of the flat rows, with explicit types (a column of nulls keeps its type)."""
    import datasets

    student = only_student(pairs, student)
    rows = [flat_row(p, student) for p in pairs]
    kinds = {c: "float64" for c in (*RATE_COLUMNS, BIG_MATH_RATE)} | {f"{c}_n": "int64" for c in RATE_COLUMNS}
    names = list(rows[0]) if rows else []
    features = datasets.Features({name: datasets.Value(kinds.get(name, "string")) for name in names})
    return datasets.Dataset.from_dict({name: [r[name] for r in rows] for name in names}, features=features)


def write_flat(path: Path, pairs: Sequence[ProblemPair], student: str | None = None) -> None:
    """Write ``path`` (.parquet or .jsonl) whole or not at all. Raises :class:`ProblemDataError`."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise ProblemDataError(f"{path}: flat rows are written as .parquet or .jsonl, not {path.suffix!r}")
    import datasets

    data = as_dataset(pairs, student)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        if path.suffix == ".parquet":
            data.to_parquet(str(part))
        else:
            data.to_json(str(part), lines=True, force_ascii=False)
        os.replace(part, path)
    except OSError as error:
        raise ProblemDataError(f"{path}: cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)
        if shown:
            datasets.enable_progress_bars()

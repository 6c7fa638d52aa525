"""Rows of known problem sets as flat rows (``problem``, ``answer``, ``solution``): GSM8K, MATH, APE210K, Math23K.

A format is told by its columns; a row that has ``problem`` and ``answer`` already (Big-Math, the published set) stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from maieutic.errors import ProblemDataError

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_MIXED = re.compile(r"(?<![\d)])(\d+)\s*\(\s*(\d+)\s*/\s*(\d+)\s*\)")
_FRACTION = re.compile(r"\(\s*\(?\s*(-?\d+)\s*\)?\s*/\s*\(?\s*(\d+)\s*\)?\s*\)")


def adapted(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row with flat columns. Raises :class:`ProblemDataError` for a row of a known format without its answer."""
    if "problem" in row and "answer" in row:
        return row
    for columns, convert in _FORMATS:
        if columns <= row.keys():
            return convert(where, row)
    return row


def _gsm8k(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """``question``; ``answer`` is a worked solution with calculator notes (``<<2*3=6>>``) that ends in ``#### 6``."""
    rest = {k: v for k, v in row.items() if k not in ("question", "answer")}
    solution, mark, answer = str(row["answer"]).rpartition("####")
    if not mark:
        return {**rest, "problem": row["question"], "answer": row["answer"]}
    if not answer.strip():
        raise ProblemDataError(f"{where}: column 'answer': nothing stands after ####")
    return {
        **rest,
        "problem": row["question"],
        "answer": answer.strip().replace(",", ""),
        "solution": _CALCULATOR.sub("", solution).strip(),
    }


def _math(where: str, row: dict[str, Any]) -> dict[str, Any]:
    r"""``problem``, and ``solution`` with the answer in its last ``\boxed{}``."""
    from maieutic.grading.extraction import extract_answer

    solution = str(row["solution"])
    answer = extract_answer(solution) if "\\boxed" in solution or "\\fbox" in solution else None
    if answer is None:
        raise ProblemDataError(f"{where}: column 'solution': no answer in \\boxed{{}}")
    return {**row, "answer": answer}


def _chinese(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """APE210K and Math23K: ``original_text``, ``ans``, ``equation`` (``x=…``). ``segmented_text`` says nothing more."""
    answer = "" if row["ans"] is None else str(row["ans"]).strip()
    if not answer:
        raise ProblemDataError(f"{where}: column 'ans' is empty")
    rest = {k: v for k, v in row.items() if k not in ("original_text", "segmented_text", "ans", "equation")}
    equation = row.get("equation")
    return {
        **rest,
        "problem": row["original_text"],
        "answer": plain_fraction(answer),
        "solution": str(equation) if equation else None,
    }


def plain_fraction(answer: str) -> str:
    """``1(3/4)`` is a mixed number, ``(3/4)`` a fraction: written ``1 3/4`` and ``3/4``. Anything else stays."""
    if m := _MIXED.fullmatch(answer):
        return f"{m[1]} {m[2]}/{m[3]}"
    if m := _FRACTION.fullmatch(answer):
        return f"{m[1]}/{m[2]}"
    return answer


_FORMATS: list[tuple[set[str], Callable[[str, dict[str, Any]], dict[str, Any]]]] = [
    ({"question", "answer"}, _gsm8k),
    ({"original_text", "ans"}, _chinese),
    ({"problem", "solution"}, _math),
]

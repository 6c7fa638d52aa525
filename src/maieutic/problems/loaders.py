"""Read problem pairs: shipped sets, JSONL, Parquet, the Hub, generators; our own schema, the published set's columns, or a known
set of problems (GSM8K, MATH, APE210K, Math23K: :mod:`maieutic.problems.formats`).

Two row formats are told apart by their columns. *Nested* rows are :class:`ProblemPair` as written by :func:`write_pairs`
(``id, source, transfer, provenance``). *Flat* rows have the columns of ``dmacjam/eduardoRL-transfer-dataset``
(``problem, answer, transfer_problem, transfer_answer, pre_solve_rate, pre_solve_rate_transfer_problem``; only the first two
are required), with nulls where no variant or no rate could be had. Big-Math has these columns, too. The column
``solve_rate_student`` says whose rates a flat row has (as :mod:`maieutic.problems.export` writes it); without it they are those of
the published student.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maieutic.errors import AbsentDataError, ProblemDataError
from maieutic.problems.formats import adapted
from maieutic.problems.schema import Problem, ProblemPair, SolveRate, StudentKey

PUBLISHED_PROMPT_HASH = "published"
"""Stands for the cold prompt behind the published rates: its text is not ours, so no hash of ours can equal it."""
PUBLISHED_STUDENT = StudentKey(
    model="meta-llama/Llama-3.1-8B-Instruct",
    prompt_hash=PUBLISHED_PROMPT_HASH,
    temperature=0.6,
    top_p=1.0,
    max_tokens=800,
)
"""Whose solve rates the published set carries (Eduardo: k = 16 cold samples, T 0.6, the post-test's 800 tokens)."""
PUBLISHED_SAMPLES = 16
"""Graded samples assumed for a published rate whose count is not in the file."""

_RATE_COLUMNS = {"source": "pre_solve_rate", "transfer": "pre_solve_rate_transfer_problem"}
_STUDENT_COLUMN = "solve_rate_student"
_COUNT_WORDS = re.compile(r"(?:^|_)(?:n|k|num|count|graded|samples?|total)(?:_|$)")


def read_pairs(
    source: str,
    *,
    base_dir: Path | None = None,
    split: str | None = None,
    offline: bool = False,
    options: Mapping[str, Any] | None = None,
    config: str | None = None,
) -> list[ProblemPair]:
    """All pairs of ``source``: ``generate:NAME``, a .jsonl, .json or .parquet file, a folder with ``pairs.jsonl``, a shipped
    set's name, or a Hub id (``owner/name``, split ``train`` unless ``split`` says otherwise, ``config`` where the set has several).

    A relative path is looked up under ``base_dir``, then under the working directory. Raises :class:`ProblemDataError` naming
    file, row (1-based line of a JSONL, 0-based row otherwise) and column.
    """
    if source.startswith("generate:"):
        from maieutic.problems.generate import generate

        return generate(source.removeprefix("generate:"), options or {})
    path = _find(source, base_dir)
    if path is None:
        return parse_rows(_hub_rows(source, split, offline, config), source)
    if split is not None:
        raise ProblemDataError(f"{path}: split {split!r} was asked for, but a file has no splits")
    if path.suffix == ".parquet":
        return parse_rows(_parquet_rows(path), str(path))
    if path.suffix == ".json":
        return parse_rows(_json_rows(path), str(path))
    return parse_rows(_jsonl_rows(path), str(path))


def _find(source: str, base_dir: Path | None) -> Path | None:
    """The file behind a path or a shipped set's name; None for a Hub id."""
    folders = [base_dir, Path.cwd()] if base_dir is not None else [Path.cwd()]
    for folder in folders:
        path = folder / Path(source).expanduser()
        if path.is_dir() and (path / "pairs.jsonl").is_file():
            return path / "pairs.jsonl"
        if path.is_file():
            if path.suffix not in (".jsonl", ".json", ".parquet"):
                raise ProblemDataError(
                    f"{path}: pairs come as .jsonl or .parquet, not {path.suffix!r} (lists of problems as .json, too)"
                )
            return path
    if Path(source).suffix in (".jsonl", ".json", ".parquet") or source.startswith((".", "/", "~")):
        where = " or ".join(str(f) for f in folders)
        raise ProblemDataError(f"problems.source {source!r}: no such file under {where}")
    if source.count("/") == 1:
        return None
    from maieutic.resources import share_dir

    root = share_dir("data")
    shipped = sorted(p.parent.name for p in root.glob("*/pairs.jsonl"))
    if source in shipped:
        return root / source / "pairs.jsonl"
    near = difflib.get_close_matches(source, shipped, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"shipped sets: {', '.join(shipped) or 'none'}"
    raise ProblemDataError(
        f"problems.source {source!r}: neither a file, nor a Hub id (owner/name), nor a shipped set; {hint}"
    )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as f:
            for number, line in enumerate(f, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as e:
                    raise ProblemDataError(f"{where}: not JSON: {e.msg} (column {e.colno})") from None
                except (
                    ValueError,
                    RecursionError,
                ) as e:  # a number of thousands of digits, brackets without end
                    raise ProblemDataError(f"{where}: not readable JSON: {e}") from None
                if not isinstance(row, dict):
                    raise ProblemDataError(f"{where}: a row is an object, this is {type(row).__name__}")
                yield where, row
    except (OSError, UnicodeDecodeError) as e:
        raise ProblemDataError(f"{path}: cannot be read: {e}") from e


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A list of objects, or objects one after the other over any number of lines (as Math23K is distributed)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ProblemDataError(f"{path}: cannot be read: {e}") from e
    decoder, at, number = json.JSONDecoder(), 0, 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        where = f"{path} line {text.count(chr(10), 0, at) + 1}"
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as e:
            raise ProblemDataError(
                f"{where}: not JSON: {e.msg} (line {e.lineno}, column {e.colno})"
            ) from None
        for row in value if isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                raise ProblemDataError(f"{where}: a row is an object, this is {type(row).__name__}")
            yield f"{path} row {number}", row
            number += 1


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as e:
        raise ProblemDataError(f"{path}: cannot be read as Parquet: {e}") from e
    for number, row in enumerate(table.to_pylist()):
        yield f"{path} row {number}", row


def _hub_rows(
    source: str, split: str | None, offline: bool, config: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    try:
        with _hub_offline(offline):
            named = {} if config is None else {"name": config}
            data = datasets.load_dataset(source, split=split or "train", **named)
    except Exception as e:  # the Hub's client raises many kinds: all mean that the set cannot be had
        how = (
            "offline: download it once with the network on"
            if offline
            else "is the id right and the network up?"
        )
        raise AbsentDataError(
            f"problems.source {source!r} (split {split or 'train'!r}): cannot be loaded from the Hub ({how}): "
            f"{type(e).__name__}: {e}"
        ) from e
    for number, row in enumerate(data):
        yield f"{source} row {number}", dict(row)


@contextmanager
def _hub_offline(offline: bool) -> Iterator[None]:
    """Both libraries read their offline switch once, at import: here it holds for one call."""
    import datasets.config
    import huggingface_hub.constants

    places: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = offline or place.HF_HUB_OFFLINE
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def parse_rows(rows: Iterable[tuple[str, dict[str, Any]]], name: str) -> list[ProblemPair]:
    """Pairs from (place, row) in order. Raises :class:`ProblemDataError` for a bad row or an id given twice."""
    pairs: list[ProblemPair] = []
    first: dict[str, str] = {}
    for number, (where, row) in enumerate(rows):
        nested = isinstance(row.get("source"), Mapping)
        pair = _nested(where, row) if nested else _flat(where, adapted(where, row), number, name)
        if pair.id in first:
            raise ProblemDataError(f"{where}: column 'id': {pair.id!r} was given before, at {first[pair.id]}")
        first[pair.id] = where
        pairs.append(pair)
    if not pairs:
        raise ProblemDataError(f"{name}: holds no rows")
    return pairs


def _nested(where: str, row: dict[str, Any]) -> ProblemPair:
    # Parquet fills absent struct fields with nulls, and keeps maps as lists of pairs.
    clean = dict(row)
    for side in ("source", "transfer"):
        if isinstance(clean.get(side), Mapping):
            inner = {k: v for k, v in clean[side].items() if v is not None}
            if "rates" in inner:
                try:
                    rates = dict(inner["rates"])
                except (TypeError, ValueError):
                    raise ProblemDataError(
                        f"{where}: column '{side}.rates': rates by student expected, not {inner['rates']!r:.80}"
                    ) from None
                inner["rates"] = {k: v for k, v in rates.items() if v is not None}
            clean[side] = inner
    if clean.get("provenance") is None:
        clean.pop("provenance", None)
    elif isinstance(clean["provenance"], str):
        clean["provenance"] = _provenance(where, clean["provenance"])
    try:
        return ProblemPair.model_validate(clean)
    except ValidationError as e:
        item = e.errors(include_url=False)[0]
        column = ".".join(str(p) for p in item["loc"])
        raise ProblemDataError(f"{where}: column {column!r}: {_message(item)}") from None


def _message(item: Mapping[str, Any]) -> str:
    return f"{item['msg'].removeprefix('Value error, ')} (value {item['input']!r:.80})"


def _flat(where: str, row: dict[str, Any], number: int, name: str) -> ProblemPair:
    for column in ("problem", "answer"):
        if column not in row:
            near = difflib.get_close_matches(column, list(row), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ProblemDataError(
                f"{where}: no column {column!r}{hint}; columns: {', '.join(map(str, row))}"
            )
    source = _problem(
        where,
        "",
        text=_text(where, row, "problem"),
        answer=_text(where, row, "answer"),
        solution=_optional(where, row, "solution"),
        rates=_published_rate(where, row, "source"),
    )
    text = _optional(where, row, "transfer_problem")
    answer = _optional(where, row, "transfer_answer")
    transfer = None
    # A variant without an answer cannot be graded: it counts as missing.
    if text is not None and answer is not None:
        transfer = _problem(
            where,
            "transfer_",
            text=text,
            answer=answer,
            solution=_optional(where, row, "transfer_solution"),
            rates=_published_rate(where, row, "transfer"),
        )
    used = {"id", "problem", "answer", "solution", "transfer_problem", "transfer_answer", "transfer_solution"}
    used |= {_STUDENT_COLUMN, "provenance"}
    extra = {k: v for k, v in row.items() if k not in used and v is not None}
    provenance = {"dataset": name, "row": number, **({"columns": extra} if extra else {})}
    if row.get("provenance") is not None:
        provenance["before"] = _provenance(where, row["provenance"])
    identity = row.get("id")
    return ProblemPair(
        id=f"row-{number}" if identity is None else str(identity),
        source=source,
        transfer=transfer,
        provenance=provenance,
    )


def _problem(where: str, prefix: str, **values: Any) -> Problem:
    try:
        return Problem(**values)
    except ValidationError as e:  # text that is no Unicode
        item = e.errors(include_url=False)[0]
        field = str(item["loc"][0])
        column = prefix + ("problem" if field == "text" else field)
        raise ProblemDataError(f"{where}: column {column!r}: {_message(item)}") from None


def _provenance(where: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as e:
        raise ProblemDataError(f"{where}: column 'provenance': not JSON: {e.msg}") from None


def _optional(where: str, row: dict[str, Any], column: str) -> str | None:
    value = row.get(column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ProblemDataError(f"{where}: column {column!r}: text or a number expected, not {value!r:.80}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if str(value).strip() else None


def _text(where: str, row: dict[str, Any], column: str) -> str:
    value = _optional(where, row, column)
    if value is None:
        raise ProblemDataError(f"{where}: column {column!r} is empty")
    return value


def _published_rate(where: str, row: dict[str, Any], side: str) -> dict[str, SolveRate]:
    column = _RATE_COLUMNS[side]
    value = row.get(column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return {}
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ProblemDataError(
            f"{where}: column {column!r}: a rate between 0 and 1 expected, not {value!r:.80}"
        )
    counts = [c for c in row if column in c and _is_count(c, column)]
    n = PUBLISHED_SAMPLES
    if counts and row[counts[0]] is not None:
        n = row[counts[0]]
        if isinstance(n, bool) or n != int(n) or n < 0:
            raise ProblemDataError(
                f"{where}: column {counts[0]!r}: a number of samples expected, not {n!r:.80}"
            )
    student = _optional(where, row, _STUDENT_COLUMN) or str(PUBLISHED_STUDENT)
    return {student: SolveRate(rate=float(value), n=int(n))} if n else {}


def _is_count(name: str, column: str) -> bool:
    """Whether ``name`` is the sample count of rate ``column``: the rate's name with a word such as n, num, samples, graded."""
    longer = any(other in name for other in _RATE_COLUMNS.values() if len(other) > len(column))
    rest = name.replace(column, "")
    return not longer and bool(rest) and bool(_COUNT_WORDS.search(rest))


def merge_pairs(old: Sequence[ProblemPair], new: Sequence[ProblemPair], name: str) -> list[ProblemPair]:
    """``old`` and then ``new``. Raises :class:`ProblemDataError` when an id is in both."""
    if twice := {p.id for p in old} & {p.id for p in new}:
        raise ProblemDataError(
            f"{name}: has pair {min(twice)!r} already ({len(twice)} in all): choose another seed"
        )
    return [*old, *new]


def write_pairs(path: Path, pairs: Iterable[ProblemPair]) -> None:
    """Write nested JSONL, whole or not at all (a temporary file beside ``path`` is renamed)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=".pairs-", delete=False
    ) as f:
        try:
            for pair in pairs:
                f.write(
                    json.dumps(pair.model_dump(mode="json", exclude_none=True), ensure_ascii=False) + "\n"
                )
            f.flush()
            os.fsync(f.fileno())
        except BaseException:
            os.unlink(f.name)
            raise
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)

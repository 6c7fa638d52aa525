"""A repository as one JSONL file, and back: to look at, to keep, to move to another embedder or machine.

The file holds every experience with its status, numbers and events, and every admission; not the vectors, which the importing
side's embedder makes. Ids stay, so importing a file twice, or into a repository that has some of it, adds what is missing and
changes nothing that is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from maieutic.reat.index import pack
from maieutic.reat.records import (
    SCHEMA_VERSION,
    STATUSES,
    Database,
    Recorded,
    RepositoryError,
    RepositoryVersionError,
    Status,
)
from maieutic.reat.repository import Repository
from maieutic.reat.schema import Admission, Experience, Record

FORMAT = "maieutic-experiences"
_BATCH = 256


class _Event(Record):
    """One event of an exported experience."""

    kind: str
    score: float | None
    before: float | None
    after: float | None
    source: str
    at: float


class _Entry(Record):
    """One exported experience; its content is checked as an :class:`Experience`."""

    content: dict[str, Any]
    utility: float
    uses: int
    trial: Annotated[int, Field(ge=0)]
    status: Status
    reason: str
    replaced_by: str | None
    events: Annotated[list[_Event], Field(min_length=1)]


class _Admission(Record):
    """One exported admission."""

    id: str
    outcome: Admission
    target: str
    similarity: float | None
    score: float
    content: dict[str, Any]
    note: str
    at: float


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    added: int
    present: int
    """Experiences that were there already; they stay as they are."""
    admissions: int


def export_file(database: Database, file: Path) -> int:
    """Write everything, from one snapshot and all or nothing; returns the number of experiences."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with database.reading(), open(scratch, "w", encoding="utf-8") as out:
            header = {"format": FORMAT, "schema": SCHEMA_VERSION, "embedder": database.embedder}
            print(json.dumps(header), file=out)
            rows = database.select(
                "SELECT id, content, utility, uses, trial, status, reason, replaced_by FROM experiences ORDER BY seq"
            )
            for id, content, *rest in rows:
                names = ("utility", "uses", "trial", "status", "reason", "replaced_by")
                line = {"content": json.loads(content), **dict(zip(names, rest, strict=True))}
                line["events"] = [vars(e) for e in database.events(id)]
                print(json.dumps({"experience": line}, ensure_ascii=False), file=out)
            columns = ("id", "outcome", "target", "similarity", "score", "content", "note", "at")
            for row in database.select(f"SELECT {', '.join(columns)} FROM admissions ORDER BY at, id"):
                admission = dict(zip(columns, row, strict=True))
                admission["content"] = json.loads(admission["content"])
                print(json.dumps({"admission": admission}, ensure_ascii=False), file=out)
            out.flush()
            os.fsync(out.fileno())
        scratch.replace(file)
    except OSError as error:
        raise RepositoryError(f"{file} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
    return len(rows)


def copy_repository(source: Path, target: Path) -> None:
    """A copy of a repository as of now, all or nothing; somebody may be writing to it meanwhile.

    Raises :class:`RepositoryError` where there is no repository in ``source``, something in ``target``, or no space for it.
    """
    if target.exists():
        raise RepositoryError(f"{target} is there already: a copy needs a new folder")
    scratch = target.with_name(f".{target.name}.part")
    if scratch.exists():  # of a copy that was killed
        shutil.rmtree(scratch)
    database = Database(source, embedder=None, read_only=True)
    try:
        scratch.mkdir(parents=True)
        database.copy_to(scratch)
        for file in source.glob(
            f"vectors-{database.uuid[:12]}.faiss"
        ):  # a cache: it may lag behind or be missing
            shutil.copyfile(file, scratch / file.name)
        scratch.replace(target)
    except OSError as error:
        raise RepositoryError(f"{source} cannot be copied to {target}: {error.strerror or error}") from error
    finally:
        database.close()


def import_file(repository: Repository, file: Path) -> Imported:
    """Add what the file has and the repository lacks, in one transaction.

    Raises :class:`RepositoryError` naming the line for what is not an export, :class:`RepositoryVersionError` for a newer one.
    """
    header_of(file)
    lines = list(_lines(file))[1:]
    entries, admissions = [], []
    for number, line in lines:
        try:
            if "experience" in line:
                entries.append(_entry(line["experience"]))
            else:
                a = _Admission.model_validate(line["admission"])
                made = Experience.model_validate(a.content | {"utility": a.score})
                recorded = Recorded(**a.model_dump(exclude={"content", "at"}))
                admissions.append((recorded, made, a.at))
        except (KeyError, TypeError, ValueError, ValidationError) as error:
            raise RepositoryError(f"{file}, line {number}: not an exported record: {error}") from error
    database = repository.database
    with database.reading():
        new = [e for e in entries if not database.exists(e[0].id)]
    blobs: list[bytes] = []
    for start in range(0, len(new), _BATCH):  # before the transaction: it may take a while
        texts = [e[0].query for e in new[start : start + _BATCH]]
        blobs.extend(pack(v) for v in repository.embed(texts))
    added = kept = 0
    with database.writing():
        for (experience, line), blob in zip(new, blobs, strict=True):
            if database.exists(experience.id):  # came in meanwhile
                continue
            database.restore(experience, blob, line)
            added += 1
        for recorded, experience, at in admissions:
            if database.admission(recorded.id) is None:
                database.record(recorded, experience, at)
                kept += 1
    return Imported(added, len(entries) - added, kept)


def _entry(line: dict[str, Any]) -> tuple[Experience, dict[str, Any]]:
    experience = Experience.model_validate(
        line["content"] | {"utility": line["utility"], "uses": line["uses"]}
    )
    return experience, _Entry.model_validate(line).model_dump()


def header_of(file: Path) -> dict[str, Any]:
    """The first line of an export: format, schema, embedder. Raises :class:`RepositoryError`."""
    try:
        _, header = next(_lines(file), (1, {}))
    except OSError as error:
        raise RepositoryError(f"{file} cannot be read: {error}") from error
    if header.get("format") != FORMAT:
        raise RepositoryError(
            f"{file} is not an export of experiences (its first line does not say {FORMAT})"
        )
    if not isinstance(header.get("schema"), int) or not isinstance(header.get("embedder"), str):
        raise RepositoryError(f"{file}, line 1: schema is to be a number and embedder a name")
    if header["schema"] > SCHEMA_VERSION:
        raise RepositoryVersionError(
            f"{file} has schema {header['schema']}, and this release reads up to {SCHEMA_VERSION}: upgrade Maieutic"
        )
    return header


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(file, "rb") as lines:
        for number, text in enumerate(lines, 1):
            try:
                value = json.loads(text.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise RepositoryError(f"{file}, line {number}: not JSON: {error}") from error
            if not isinstance(value, dict):
                raise RepositoryError(f"{file}, line {number}: not a record")
            yield number, value


def summary(database: Database) -> dict[str, Any]:
    """What ``inspect`` shows, JSON-ready, from one snapshot."""
    with database.reading():
        status = dict.fromkeys(STATUSES, 0) | dict(
            database.select("SELECT status, count(*) FROM experiences GROUP BY status")
        )
        utilities = [
            u
            for (u,) in database.select(
                "SELECT utility FROM experiences WHERE status = 'enabled' ORDER BY utility"
            )
        ]
        return {
            "folder": str(database.folder),
            "embedder": database.embedder,
            "experiences": status,
            "pruned": database.select("SELECT count(*) FROM experiences WHERE reason = 'pruned'")[0][0],
            "admissions": dict(database.select("SELECT outcome, count(*) FROM admissions GROUP BY outcome")),
            "merge_failed": database.select("SELECT count(*) FROM admissions WHERE note = 'merge_failed'")[0][
                0
            ],
            "scored_uses": database.select("SELECT coalesce(sum(uses), 0) FROM experiences")[0][0],
            "utility": {
                "lowest": utilities[0],
                "median": utilities[len(utilities) // 2],
                "highest": utilities[-1],
            }
            if utilities
            else None,
            "states": dict(
                database.select(
                    "SELECT state, count(*) FROM experiences WHERE status = 'enabled' "
                    "GROUP BY state ORDER BY count(*) DESC, state"
                )
            ),
        }

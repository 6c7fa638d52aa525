"""The tables of the experience repository: SQLite, append-only experiences, their events and every admission ever asked for.

What the layout promises, with triggers where SQL can say it:

- an experience is a row with a number 1, 2, 3, … and is never deleted; its text and vector never change. Row ``n`` of a vector
  index is row ``n + 1`` here, and any index over the first rows is a valid beginning of a whole one;
- what changes (utility, uses, status) changes together with the event that explains it, in one transaction;
- ``generation`` in ``meta`` grows with every change that a retrieval can see (new rows, status), so that a reader knows in one
  look whether its index is up to date.

This module knows nothing of thresholds, embeddings or FAISS.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote

from filelock import FileLock

from maieutic.errors import MaieuticError
from maieutic.reat.schema import Admission, Experience, UtilityEvent

SCHEMA_VERSION = 1
APPLICATION_ID = 0x52454154
"""``REAT``: how SQLite files of this kind are told from others."""
FILE = "experiences.sqlite"
BUSY_SECONDS = 30.0
"""How long a transaction waits for another process's write."""

Status = Literal["enabled", "disabled", "replaced"]
STATUSES: tuple[Status, ...] = ("enabled", "disabled", "replaced")
"""``disabled``: not retrieved, until it is enabled by hand. ``replaced``: a merged experience stands in its place, for good."""

_TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE experiences (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    utility REAL NOT NULL,
    uses INTEGER NOT NULL DEFAULT 0,
    trial INTEGER NOT NULL DEFAULT 0,      -- uses since it was last enabled: what the minimum of uses counts
    status TEXT NOT NULL DEFAULT 'enabled' CHECK (status IN {STATUSES}),
    reason TEXT NOT NULL DEFAULT '',
    replaced_by TEXT,
    generation INTEGER NOT NULL,
    content TEXT NOT NULL,                  -- the two long ones last: a scan of the others does not read them
    vector BLOB NOT NULL
);
CREATE INDEX experiences_generation ON experiences (generation);
CREATE TABLE admissions (                   -- one line for every experience that was ever offered
    id TEXT PRIMARY KEY,
    outcome TEXT NOT NULL CHECK (outcome IN ('inserted', 'merged', 'duplicate')),
    target TEXT NOT NULL,                   -- what holds it now: itself, the merged one, or what it repeats
    similarity REAL,                        -- with the nearest comparable experience; NULL where there was none
    score REAL NOT NULL,
    content TEXT NOT NULL,
    note TEXT NOT NULL DEFAULT '',
    at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE events (
    n INTEGER PRIMARY KEY,
    experience TEXT NOT NULL REFERENCES experiences (id),
    kind TEXT NOT NULL,                     -- inserted, merged, replaced, utility, disabled, enabled, imported
    score REAL, before REAL, after REAL,
    source TEXT NOT NULL DEFAULT '',
    at REAL NOT NULL
);
CREATE INDEX events_experience ON events (experience, n);
CREATE UNIQUE INDEX events_once ON events (experience, source) WHERE kind = 'utility' AND source <> '';
CREATE TRIGGER experiences_stay BEFORE DELETE ON experiences BEGIN SELECT RAISE(ABORT, 'experiences are never deleted'); END;
CREATE TRIGGER experiences_keep BEFORE UPDATE OF seq, id, state, content, vector ON experiences
    BEGIN SELECT RAISE(ABORT, 'the text and vector of an experience never change'); END;
"""


class RepositoryError(MaieuticError):
    """A repository that cannot be opened or used as asked: names the folder, what is wrong, and what to do."""

    exit_code = 2


class RepositoryVersionError(RepositoryError):
    """The repository was written by a newer release with another schema."""


@dataclass(frozen=True)
class Recorded:
    """What an admission came to."""

    id: str
    outcome: Admission
    target: str
    similarity: float | None
    """Cosine with the nearest comparable experience; None where there was none."""
    score: float
    note: str = ""
    """``merge_failed`` where an experience was inserted because the two could not be merged; else empty."""


@dataclass(frozen=True)
class Stored:
    """An experience as the repository holds it."""

    experience: Experience
    status: Status
    reason: str
    """Why it is disabled: ``pruned``, or what a person wrote."""
    replaced_by: str | None


@dataclass(frozen=True)
class Event:
    """One line of an experience's history, the unscored ones included."""

    kind: str
    score: float | None
    before: float | None
    after: float | None
    source: str
    at: float
    """Seconds since 1970."""


_COLUMNS = "id, content, utility, uses, status, reason, replaced_by"


class Database:
    """One connection, usable from several threads of one process (calls take turns), not across a fork."""

    def __init__(self, folder: Path, *, embedder: tuple[str, int] | None, read_only: bool) -> None:
        """``embedder``: name and dimension to make a new repository with, or to check an old one against."""
        self.folder, self.read_only = folder, read_only
        file = folder / FILE
        if not file.is_file():
            if read_only or embedder is None:
                raise RepositoryError(f"there is no experience repository in {folder} ({FILE} is missing)")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RepositoryError(f"{folder} cannot be made: {error.strerror or error}") from error
        self._lock = threading.RLock()
        self._db = self._connect(file)
        try:
            if embedder is not None and not read_only and self._pragma("user_version") == 0:
                with FileLock(folder / ".create.lock"):  # two processes may make it at once: one does
                    if self._pragma("user_version") == 0:
                        self._create(*embedder)
            self._check(embedder)
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            if read_only:
                self._db.execute("PRAGMA query_only = ON")
        except (sqlite3.DatabaseError, UnicodeDecodeError, OSError) as error:
            self._db.close()
            where = "" if os.access(folder, os.W_OK) else " (the folder cannot be written)"
            raise RepositoryError(f"{file} cannot be used as a repository: {error}{where}") from error
        except BaseException:
            self._db.close()
            raise

    def _connect(self, file: Path) -> sqlite3.Connection:
        name, log = str(file), file.with_name(f"{FILE}-wal")
        if self.read_only and not os.access(self.folder, os.W_OK):
            # SQLite's readers share memory in a file beside the database, and cannot make it here. Nobody writes here either.
            if log.exists() and log.stat().st_size:
                raise RepositoryError(
                    f"{self.folder} cannot be written and holds writes that are not folded in yet ({log.name}): open it once "
                    "where it can be written, or copy it"
                )
            name = f"file:{quote(str(file.absolute()))}?immutable=1"
        return sqlite3.connect(
            name, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=name != str(file)
        )

    def copy_to(self, folder: Path) -> None:
        """The tables as of now, as a database of the same identity in an empty folder."""
        with self._lock, self._told():
            copy = sqlite3.connect(folder / FILE)
            try:
                self._db.backup(copy)
                copy.execute("PRAGMA journal_mode = WAL")
            finally:
                copy.close()

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    def _create(self, embedder: str, dim: int) -> None:
        if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise RepositoryError(
                f"{self.folder / FILE} is a database of something else: name another folder"
            )
        mode = self._db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise RepositoryError(
                f"{self.folder} lies on a file system without write-ahead logging ({mode}): use a local one"
            )
        values = {"uuid": uuid.uuid4().hex, "embedder": embedder, "dim": str(dim), "generation": "0"}
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for statement in _statements(_TABLES):
                self._db.execute(statement)
            self._db.executemany("INSERT INTO meta VALUES (?, ?)", values.items())
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")  # last: marks it whole
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def _check(self, embedder: tuple[str, int] | None) -> None:
        where = self.folder / FILE
        if self._pragma("application_id") != APPLICATION_ID:
            raise RepositoryError(f"{where} is not an experience repository")
        version = self._pragma("user_version")
        if version > SCHEMA_VERSION:
            raise RepositoryVersionError(
                f"{where} has schema {version}, and this release reads up to {SCHEMA_VERSION}: it was written by a newer "
                "Maieutic. Upgrade, or export it there and import the file here"
            )
        self.uuid, self.embedder, self.dim = self.meta("uuid"), self.meta("embedder"), self._number("dim")
        if embedder is not None and embedder != (self.embedder, self.dim):
            raise RepositoryError(
                f"{self.folder} was embedded with {self.embedder} ({self.dim} dimensions), not {embedder[0]} ({embedder[1]}): "
                "open it with that one, or export it and import the file into a new folder"
            )

    # ---- transactions

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One snapshot for everything inside; writers of other processes go on meanwhile."""
        with self._lock:
            if self._db.in_transaction:  # part of a larger one
                yield
                return
            with self._told():
                self._db.execute("BEGIN")
                try:
                    yield
                finally:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """All or nothing, and alone: waits for another process's write. Raises :class:`RepositoryError` after 30 s."""
        with self._lock:
            if self.read_only:
                raise RepositoryError(f"the repository {self.folder} was opened for reading only")
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                raise RepositoryError(
                    f"{self.folder}: another process has been writing for {BUSY_SECONDS:g} s ({error})"
                ) from error
            with self._told():
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        """SQLite's faults (a full disk, damage) as :class:`RepositoryError`; what a constraint refuses stays the code's."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise RepositoryError(
                f"{self.folder / FILE}: {error}; nothing was changed. Free space on a full disk; a damaged file has to come from "
                "a copy or an export"
            ) from error

    def close(self) -> None:
        """Close the connection; the log is folded into the file by the last process that closes."""
        with self._lock:
            self._db.close()

    # ---- reading

    def meta(self, key: str) -> str:
        """One value of the table of that name."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise RepositoryError(f"{self.folder / FILE} is damaged: its table meta has no {key}")
        return str(row[0])

    @property
    def generation(self) -> int:
        """Grows with every new row and every change of status."""
        return self._number("generation")

    def _number(self, key: str) -> int:
        value = self.meta(key)
        if not re.fullmatch("[0-9]{1,18}", value):
            raise RepositoryError(f"{self.folder / FILE} is damaged: {key} is {value[:40]!r}, not a number")
        return int(value)

    def size(self) -> int:
        """Rows, whatever their status."""
        return int(self._db.execute("SELECT coalesce(max(seq), 0) FROM experiences").fetchone()[0])

    def rows_after(self, seq: int) -> Iterator[tuple[str, str, Status, bytes]]:
        """(id, state key, status, vector as little-endian float32) of the rows after ``seq``, in order."""
        return self._db.execute(
            "SELECT id, state, status, vector FROM experiences WHERE seq > ? ORDER BY seq", (seq,)
        )

    def statuses_after(self, generation: int, upto: int) -> list[tuple[int, Status]]:
        """(seq, status) of the rows up to ``upto`` that changed after ``generation``."""
        query = "SELECT seq, status FROM experiences WHERE generation > ? AND seq <= ?"
        return self._db.execute(query, (generation, upto)).fetchall()

    def admission(self, id: str) -> Recorded | None:
        """What the admission of ``id`` came to, or None when it was never offered."""
        row = self._db.execute(
            "SELECT id, outcome, target, similarity, score, note FROM admissions WHERE id = ?", (id,)
        ).fetchone()
        return Recorded(*row) if row else None

    def exists(self, id: str) -> bool:
        """Whether there is an experience of that id, whatever its status."""
        return self._db.execute("SELECT 1 FROM experiences WHERE id = ?", (id,)).fetchone() is not None

    def stored(self, id: str, *, history: bool = True) -> Stored:
        """One experience; its utility events too, unless ``history`` is off. Raises :class:`RepositoryError` for an unknown id."""
        row = self._db.execute(f"SELECT {_COLUMNS} FROM experiences WHERE id = ?", (id,)).fetchone()
        if row is None:
            raise RepositoryError(f"there is no experience {id!r} in {self.folder}")
        return self._stored(row, history)

    def all_stored(self) -> Iterator[Stored]:
        """Every experience with its history, in the order of admission."""
        for (id,) in self._db.execute("SELECT id FROM experiences ORDER BY seq").fetchall():
            yield self.stored(id)

    def _stored(self, row: tuple[Any, ...], history: bool) -> Stored:
        id, content, utility, uses, status, reason, replaced_by = row
        events: list[UtilityEvent] = []
        if history:
            events = [
                UtilityEvent(
                    score=cast(float, e.score),
                    before=cast(float, e.before),
                    after=cast(float, e.after),
                    source=e.source,
                )
                for e in self.events(id)
                if e.kind == "utility"
            ]
        numbers = {"utility": utility, "uses": uses, "enabled": status == "enabled"}
        try:
            plain = json.loads(content) | numbers | {"history": [e.model_dump() for e in events]}
            experience = Experience.model_validate(plain)
        except (
            TypeError,
            ValueError,
        ) as error:  # JSON, the record, its id: another release would say so by its schema
            raise RepositoryError(f"{self.folder / FILE}: experience {id!r} is damaged: {error}") from error
        return Stored(experience, status, reason, replaced_by)

    def events(self, id: str) -> list[Event]:
        """Everything that happened to one experience, oldest first."""
        query = "SELECT kind, score, before, after, source, at FROM events WHERE experience = ? ORDER BY n"
        return [Event(*row) for row in self._db.execute(query, (id,))]

    def scored(self, id: str, source: str) -> bool:
        """Whether a utility event of this source is there already."""
        query = (
            "SELECT 1 FROM events WHERE experience = ? AND source = ? AND kind = 'utility' AND source <> ''"
        )
        return self._db.execute(query, (id, source)).fetchone() is not None

    def numbers(self, id: str) -> tuple[float, int, int, Status]:
        """(utility, uses, uses since it was last enabled, status). Raises :class:`RepositoryError` for an unknown id."""
        query = "SELECT utility, uses, trial, status FROM experiences WHERE id = ?"
        row = self._db.execute(query, (id,)).fetchone()
        if row is None:
            raise RepositoryError(f"there is no experience {id!r} in {self.folder}")
        return row

    def select(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """For reports: the rows of a query of one's own."""
        return self._db.execute(sql, values).fetchall()

    # ---- writing (inside `writing()`)

    def insert(
        self, experience: Experience, vector: bytes, *, trial: int = 0, kind: str = "inserted"
    ) -> None:
        """A new last row, enabled, with the utility and uses that ``experience`` has; and its first event."""
        self._db.execute(
            "INSERT INTO experiences (seq, id, state, content, vector, utility, uses, trial, generation) "
            "VALUES ((SELECT coalesce(max(seq), 0) + 1 FROM experiences), ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                experience.id,
                experience.tags.key(),
                content_of(experience),
                vector,
                experience.utility,
                experience.uses,
                trial,
                self._next_generation(),
            ),
        )
        self.event(experience.id, kind, score=experience.utility, after=experience.utility)

    def restore(self, experience: Experience, vector: bytes, line: dict[str, Any]) -> None:
        """A row as it was exported (``line``: trial, status, reason, replaced_by, events), with its whole history."""
        self.insert(experience, vector, trial=line["trial"])
        self._db.execute("DELETE FROM events WHERE experience = ?", (experience.id,))
        for e in line["events"]:
            values = {k: e[k] for k in ("score", "before", "after", "source", "at")}
            self.event(experience.id, e["kind"], **values)
        self._db.execute(
            "UPDATE experiences SET status = ?, reason = ?, replaced_by = ? WHERE id = ?",
            (line["status"], line["reason"], line["replaced_by"], experience.id),
        )
        self.event(experience.id, "imported")

    def set_status(
        self, id: str, status: Status, *, reason: str = "", replaced_by: str | None = None
    ) -> None:
        """Change the status, with its event. Enabling starts the count of uses towards the minimum anew."""
        self._db.execute(
            "UPDATE experiences SET status = ?, reason = ?, replaced_by = ?, generation = ?, "
            "trial = CASE WHEN ? = 'enabled' THEN 0 ELSE trial END WHERE id = ?",
            (status, reason, replaced_by, self._next_generation(), status, id),
        )
        self.event(id, status, source=replaced_by or reason)

    def set_utility(self, id: str, score: float, before: float, after: float, source: str) -> None:
        """One more use with its score; what a retrieval can see stays as it was."""
        self._db.execute(
            "UPDATE experiences SET utility = ?, uses = uses + 1, trial = trial + 1 WHERE id = ?", (after, id)
        )
        self.event(id, "utility", score=score, before=before, after=after, source=source)

    def record(self, recorded: Recorded, experience: Experience, at: float | None = None) -> None:
        """Keep what an admission came to, and the experience as it was offered."""
        self._db.execute(
            "INSERT INTO admissions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                recorded.id,
                recorded.outcome,
                recorded.target,
                recorded.similarity,
                recorded.score,
                content_of(experience),
                recorded.note,
                time.time() if at is None else at,
            ),
        )

    def event(
        self,
        id: str,
        kind: str,
        *,
        score: float | None = None,
        before: float | None = None,
        after: float | None = None,
        source: str = "",
        at: float | None = None,
    ) -> None:
        """Append to the history of one experience."""
        self._db.execute(
            "INSERT INTO events (experience, kind, score, before, after, source, at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (id, kind, score, before, after, source, time.time() if at is None else at),
        )

    def _next_generation(self) -> int:
        self._db.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
        return self.generation


def content_of(experience: Experience) -> str:
    """What never changes about an experience, as JSON: everything but utility, uses, history and whether it is enabled."""
    plain = experience.model_dump(mode="json", exclude={"utility", "uses", "history", "enabled"})
    return json.dumps(plain, ensure_ascii=False, sort_keys=True)


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one (``executescript`` would commit first)."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""

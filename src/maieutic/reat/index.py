"""The vectors of a repository in memory: an exact FAISS inner-product index, the state and the status of every row.

The database is the truth and this a view of it: :meth:`ExperienceIndex.sync` brings it up to the snapshot that the connection is
reading. Rows are only ever appended and vectors never change, so a saved file holds a beginning of the database or is of no
use; it is a cache that may be deleted at any time.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from maieutic.errors import MissingExtraError
from maieutic.reat.records import STATUSES, Database, RepositoryError
from maieutic.reat.related_states import STATES

log = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]
_CODE = {state.key(): code for code, state in enumerate(STATES)}
_STATUS = {status: number for number, status in enumerate(STATUSES)}
ENABLED, DISABLED = _STATUS["enabled"], _STATUS["disabled"]
_CHUNK = 4096
_SEAL, _MARK = struct.Struct("<8sI"), b"maieutic"
"""What ends a saved file, behind what FAISS reads: a mark and the CRC-32 of all before it."""
_SAMPLE = 64
"""Rows of a loaded file that are compared with the database bit by bit, its first and last among them."""


def import_faiss() -> Any:
    """FAISS, or :class:`MissingExtraError` naming the extra."""
    try:
        import faiss
    except ModuleNotFoundError as error:
        if error.name != "faiss":
            raise
        raise MissingExtraError("faiss-cpu", "reat") from None
    return faiss


def _checksum(file: BinaryIO, size: int) -> int:
    """CRC-32 of the next ``size`` bytes (a tenth of a second for 10⁵ experiences); the file stands behind them then."""
    value = 0
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        value, size = zlib.crc32(block, value), size - len(block)
    return value


def _intact(path: Path) -> bool:
    """Whether a saved file ends with the seal of what is before it. FAISS itself takes a flipped bit for a vector, and a wrong
    length for memory to allocate."""
    with open(path, "rb") as file:
        sealed = _checksum(file, path.stat().st_size - _SEAL.size)
        end = file.read()
    return len(end) == _SEAL.size and _SEAL.unpack(end) == (_MARK, sealed)


def unpack(blob: bytes, dim: int) -> npt.NDArray[np.float32]:
    """The vector(s) of a blob, [n, dim] float32."""
    return np.frombuffer(blob, dtype="<f4").reshape(-1, dim).astype(np.float32, copy=False)


def pack(vector: npt.NDArray[np.float32]) -> bytes:
    """A vector as the database keeps it: little-endian float32. Raises ValueError when its length is not 1 (to 1e-4)."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not abs(length - 1.0) <= 1e-4:
        raise ValueError(f"an embedding must have length 1, and this one has {length:.6g}")
    return vector.astype("<f4").tobytes()


class ExperienceIndex:
    """Rows 0, 1, 2, … are the rows 1, 2, 3, … of the database."""

    def __init__(self, database: Database) -> None:
        self._faiss = import_faiss()
        self._database = database
        self.dim = database.dim
        self._clear()
        self.rebuilt = ""
        """Why the saved file was not used: empty when it was."""
        self.saved = 0
        """Rows in the saved file."""

    def _clear(self) -> None:
        self.vectors: Any = self._faiss.IndexFlatIP(self.dim)
        self.ids: list[str] = []
        self.codes = np.zeros(0, dtype=np.int16)
        """[rows] the state of each row, as its place in :data:`maieutic.reat.related_states.STATES`."""
        self.status = np.zeros(0, dtype=np.int8)
        self.generation = -1
        """The generation of the database that this is a view of."""

    def __len__(self) -> int:
        return len(self.ids)

    # ---- following the database

    def sync(self) -> None:
        """Take in what changed; the view is then the snapshot of the transaction around the call.

        In a writing transaction call it before the first write: a row that is rolled back later must not get in.
        """
        generation = self._database.generation
        if generation == self.generation:
            return
        if self.generation < 0:
            self._load()
        known = len(self.ids)
        changed = self._database.statuses_after(self.generation, known) if known else []
        for seq, status in changed:
            self.status[seq - 1] = self._codes([], [status])[1][0]
        self._append(known)
        self.generation = generation

    def _append(self, known: int) -> None:
        rows = self._database.rows_after(known)
        while chunk := list(islice(rows, _CHUNK)):
            ids, states, statuses, blobs = zip(*chunk, strict=True)
            codes, status = self._codes(states, statuses)
            self.vectors.add(np.ascontiguousarray(self._unpack(blobs)))
            self.ids.extend(ids)
            self.codes = np.concatenate([self.codes, codes])
            self.status = np.concatenate([self.status, status])

    def _codes(
        self, states: Sequence[str], statuses: Sequence[str]
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int8]]:
        """States and statuses as numbers. Raises :class:`RepositoryError` for one that there is not."""
        try:
            return (
                np.array([_CODE[s] for s in states], dtype=np.int16),
                np.array([_STATUS[s] for s in statuses], dtype=np.int8),  # type: ignore[index]
            )
        except KeyError as error:
            raise self._damaged(f"{error} is neither a state nor a status") from error

    def _unpack(self, blobs: Sequence[bytes]) -> npt.NDArray[np.float32]:
        """Vectors of the database, [n, dim]. Raises :class:`RepositoryError` for one of another length."""
        if any(len(b) != 4 * self.dim for b in blobs):
            raise self._damaged(f"a vector that is not of {self.dim} numbers")
        return unpack(b"".join(blobs), self.dim)

    def _damaged(self, what: str) -> RepositoryError:
        return RepositoryError(
            f"the database in {self._database.folder} is damaged ({what}): take a copy, or import an export into a new folder"
        )

    # ---- the saved file

    @property
    def file(self) -> Path:
        """Named after the repository, so that another one's file is never taken for this one's."""
        return self._database.folder / f"vectors-{self._database.uuid[:12]}.faiss"

    def _load(self) -> None:
        """Take ids, states and statuses from the database and vectors from the file, where it is a true beginning."""
        self._clear()
        self.rebuilt = self._load_vectors()
        if self.rebuilt:
            self.vectors = self._faiss.IndexFlatIP(self.dim)
            if self.rebuilt != "missing":
                log.warning("%s is rebuilt from the database: it is %s", self.file, self.rebuilt)
        known = self.saved = self.vectors.ntotal
        rows = self._database.select(
            "SELECT id, state, status FROM experiences WHERE seq <= ? ORDER BY seq", (known,)
        )
        self.ids = [r[0] for r in rows]
        self.codes, self.status = self._codes([r[1] for r in rows], [r[2] for r in rows])
        self.generation = self._database.generation

    def _load_vectors(self) -> str:
        if not self.file.is_file():
            return "missing"
        if not _intact(self.file):
            return "damaged, or was not written to its end"
        try:
            index = self._faiss.read_index(str(self.file))
        except RuntimeError as error:  # what FAISS raises for anything that it cannot read
            return f"unreadable ({str(error).splitlines()[0][:100]})"
        if type(index) is not self._faiss.IndexFlatIP or index.d != self.dim:
            return "an index of another kind"
        rows = index.ntotal
        if rows > self._database.size():
            return f"ahead of the database ({rows} rows against {self._database.size()})"
        if rows:
            sample = np.unique(np.linspace(0, rows - 1, _SAMPLE).astype(np.int64))
            marks = ", ".join("?" * len(sample))
            blobs = self._database.select(
                f"SELECT vector FROM experiences WHERE seq IN ({marks}) ORDER BY seq",
                tuple(int(r) + 1 for r in sample),
            )
            want = self._unpack([b[0] for b in blobs])
            have = np.stack([index.reconstruct(int(r)) for r in sample])
            if not np.array_equal(have, want):
                return "not of this database's vectors"
        self.vectors = index
        return ""

    def save(self) -> None:
        """Write the vectors, all or nothing."""
        scratch = self.file.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._faiss.write_index(self.vectors, str(scratch))
            with open(scratch, "r+b") as file:
                file.write(_SEAL.pack(_MARK, _checksum(file, scratch.stat().st_size)))
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self.file)
            self.saved = self.vectors.ntotal
        finally:
            scratch.unlink(missing_ok=True)

    # ---- search

    def rows(self, states: npt.NDArray[np.bool_], status: int = ENABLED) -> Rows:
        """The rows of the given status whose state is in the mask ``states`` (bool, [1728]); int64, ascending."""
        return np.flatnonzero(states[self.codes] & (self.status == status)).astype(np.int64)

    def cosines(self, query: npt.NDArray[np.float32], rows: Rows) -> npt.NDArray[np.float32]:
        """The inner products of ``query`` ([dim]) with the given rows; float32, in their order. Exact."""
        out = np.empty((1, len(rows)), dtype=np.float32)
        if not len(rows):
            return out[0]
        vector = np.ascontiguousarray(query, dtype=np.float32).reshape(1, self.dim)
        threads = self._faiss.omp_get_max_threads()
        # One query is one thread's work: waking the others costs more than the search where cores are shared.
        self._faiss.omp_set_num_threads(1)
        try:
            pointer = self._faiss.swig_ptr
            self.vectors.compute_distance_subset(1, pointer(vector), len(rows), pointer(out), pointer(rows))
        finally:
            self._faiss.omp_set_num_threads(threads)
        return out[0]

    # ---- checking

    def verify(self) -> None:
        """Compare every row with the database, bit by bit. Raises :class:`RepositoryError` at the first difference."""
        count = 0
        for row, (id, state, status, blob) in enumerate(self._database.rows_after(0)):
            if row >= len(self.ids):
                raise RepositoryError(f"the index ends at row {len(self.ids)}, before {id}")
            mine = (self.ids[row], int(self.codes[row]), int(self.status[row]))
            codes, statuses = self._codes([state], [status])
            if mine != (id, int(codes[0]), int(statuses[0])):
                raise RepositoryError(
                    f"row {row} of the index is {mine}, and the database says {id}, {state}, {status}"
                )
            if not np.array_equal(self.vectors.reconstruct(row), self._unpack([blob])[0]):
                raise RepositoryError(f"the vector of {id} in the index is not the database's")
            count += 1
        if not count == len(self.ids) == len(self.codes) == len(self.status) == self.vectors.ntotal:
            raise RepositoryError(
                f"the index has {len(self.ids)} rows and {self.vectors.ntotal} vectors; the database {count}"
            )

"""The journal of a build: every finished request is one durable line, found again by what was asked.

A step's key is a hash of everything that its answer depends on (role, model, messages, sampling, seed, …). A build that is
started again therefore repeats no finished request, whatever killed the last one, and one whose recipe has changed asks only
what is new. Lines are written in batches: while one batch is being flushed to the disk, the next one gathers, so that an
``fsync`` costs no throughput.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable
from io import BufferedRandom
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from maieutic.engines.usage import Ledger
from maieutic.errors import ProblemDataError

SCHEMA = 1
Value = dict[str, Any]
FAILED = "failed"
"""Key of a value whose request failed for good (the rest of the value says how)."""


def step_key(*parts: Any) -> str:
    """32 hex digits that identify a request by its content; parts are JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:32]


class Journal:
    """Append-only JSONL ``path``; an asynchronous context manager. One build at a time (a lock beside it).

    Args:
        ledger: its usage is kept with the lines, and restored from the last one.
        retry_failed: forget requests that failed for good, so that they are asked again.

    Raises:
        ProblemDataError: another build holds it, it cannot be written, or a whole line of it is not a journal's.
    """

    def __init__(self, path: Path, ledger: Ledger, *, retry_failed: bool = False) -> None:
        self.path, self.ledger, self._retry_failed = path, ledger, retry_failed
        self.done: dict[str, Value] = {}
        self.asked = 0
        """Steps done by this process."""
        self._lock = FileLock(path.with_name(path.name + ".lock"), timeout=0)
        self._file: BufferedRandom | None = None
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Journal:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise ProblemDataError(f"{self.path}: another build is writing here") from None
        except OSError as error:
            raise ProblemDataError(f"{self.path}: the journal cannot be written: {error}") from error
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _open(self) -> None:
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise ProblemDataError(f"{self.path}: the journal cannot be written: {error}") from error
        self._file.seek(0)
        whole, usage = 0, None
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break  # torn by a kill
            whole += len(line)
            usage = self._read(line, number) or usage
        self._file.truncate(whole)
        if usage is not None:
            self.ledger.load(usage)

    def _read(self, line: bytes, number: int) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
            if row["schema"] != SCHEMA:
                raise ValueError(f"schema {row['schema']!r}")
            if "usage" in row:
                return dict(row["usage"])
            key, value = str(row["key"]), dict(row["value"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProblemDataError(
                f"{self.path}:{number}: not a line of a build's journal ({error}); move the file away to start afresh"
            ) from None
        if FAILED in value and self._retry_failed:
            self.done.pop(key, None)
        else:
            self.done[key] = value
        return None

    async def step(self, key: str, stage: str, row: str, ask: Callable[[], Awaitable[Value]]) -> Value:
        """The value of a step: the journal's, or what ``ask`` gives, once that is on the disk."""
        known = self.done.get(key)
        if known is not None:
            return known
        value = await ask()
        earlier = self.done.get(key)
        if earlier is not None:  # another row asked the very same at the same time: one answer counts
            return earlier
        self.done[key] = value
        self.asked += 1
        line = {"schema": SCHEMA, "key": key, "stage": stage, "row": row, "value": value}
        await self._append(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        return value

    async def _append(self, line: bytes) -> None:
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((line, landed))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        await landed

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            usage = json.dumps({"schema": SCHEMA, "usage": self.ledger.state()}).encode() + b"\n"
            try:
                await asyncio.to_thread(self._write, b"".join(line for line, _ in batch) + usage)
            except OSError as error:
                fault = ProblemDataError(f"{self.path}: the journal cannot be written: {error}")
                for _, landed in batch:
                    if not landed.done():
                        landed.set_exception(fault)
                continue
            for _, landed in batch:
                if not landed.done():  # that row was cancelled
                    landed.set_result(None)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    async def __aexit__(self, *exc: object) -> None:
        if self._flusher is not None:
            await asyncio.gather(self._flusher, return_exceptions=True)
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            # What a full disk did not take was reported when it was written; closing only tries once more.
            if exc[0] is None:
                raise ProblemDataError(f"{self.path}: the journal cannot be written: {error}") from error
        finally:
            self._lock.release()

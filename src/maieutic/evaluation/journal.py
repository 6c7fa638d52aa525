"""Samples that are done, one line of JSON each, so that a killed evaluation goes on where it was; and the loop that makes them.

Every sample has a key and a seed of its own, so what is left to do does not depend on what was done before. A sample that failed
(a server that stays away, a student without words) is not kept: a resume tries it again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from maieutic.errors import MaieuticError, RunFolderError
from maieutic.transcripts import _plain

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""(samples done, samples in all)."""


class SampleFailed(Exception):
    """This sample gave nothing; it is counted, with the reason, and tried again by a resume."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Complete lines of a file that may have been cut in its last one (which is then removed)."""
    if not path.is_file():
        return
    try:
        opened = path.open("rb+")
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be opened: {error.strerror}") from error
    with opened as file:
        good = 0
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            try:
                row = json.loads(raw)
                if not isinstance(row, dict):
                    raise ValueError("it is no object")
            except (ValueError, RecursionError) as error:
                raise RunFolderError(
                    f"{path}: byte {good}: a broken line ({error}): remove the file to start over"
                ) from None
            good += len(raw)
            yield row
        file.truncate(good)


def _write_all(fd: int, data: bytes) -> None:
    """All of ``data``: a write may take a part of it, and says so by its count only."""
    while data:
        data = data[os.write(fd, data) :]


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """One line, written with one call and flushed to disk. RunFolderError where that is not possible."""
    line = json.dumps(_plain(row), ensure_ascii=True).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            before = os.fstat(fd).st_size
            try:
                _write_all(fd, line)
                os.fsync(fd)
            except OSError:
                # A full disk takes a part of a line: without it the file can still be read, and gone on with.
                os.ftruncate(fd, before)
                raise
        finally:
            os.close(fd)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror}") from error


class Journal:
    """Finished samples of one suite of one arm.

    ``identity``: hash of everything that decides the samples. A journal of another identity is an error, never mixed in.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        rows = list(read_lines(path))
        if rows and rows[0].get("identity") != identity:
            raise RunFolderError(
                f"{path} holds samples of another evaluation (settings, data or seed differ): choose another --out, or remove it"
            )
        if not rows:
            append_line(path, {"identity": identity})
        self.done: dict[str, dict[str, Any]] = {row["key"]: row["sample"] for row in rows[1:]}

    def add(self, key: str, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a finished sample; returns it as it will be read back."""
        plain: dict[str, Any] = _plain(sample)
        append_line(self.path, {"key": key, "sample": plain})
        self.done[key] = plain
        return plain


async def run_all(
    items: Sequence[tuple[str, T]],
    work: Callable[[str, T], Awaitable[Mapping[str, Any]]],
    journal: Journal,
    *,
    concurrency: int,
    progress: Progress = lambda done, total: None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Samples in the order of ``items`` (key, item), and the failed keys with their reasons.

    At most ``concurrency`` samples are in work. :class:`SampleFailed` is counted; every other error stops the suite (what is
    done stays done).
    """
    if len({key for key, _ in items}) != len(items):
        raise ValueError("two items have one key")
    failed: dict[str, str] = {}
    todo = iter([(key, item) for key, item in items if key not in journal.done])
    finished = sum(key in journal.done for key, _ in items)
    progress(finished, len(items))

    async def worker() -> None:
        nonlocal finished
        for key, item in todo:
            try:
                journal.add(key, await work(key, item))
            except SampleFailed as error:
                failed[key] = str(error)
            finished += 1
            progress(finished, len(items))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(items))):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            known = [e for e in first.exceptions if isinstance(e, MaieuticError)]
            first = known[0] if known else first.exceptions[0]
        raise first from None
    return [journal.done[key] for key, _ in items if key in journal.done], dict(sorted(failed.items()))

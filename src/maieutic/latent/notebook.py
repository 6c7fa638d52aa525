"""Answers of a model that were paid for, kept in a file that only grows: a run that was killed does not ask for them again.

One JSON line an answer, written at once. A last line that a kill cut short is dropped when the file is opened.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from maieutic.dialogue import Turn
from maieutic.errors import RunFolderError
from maieutic.latent.moves import MoveLabeller, Taxonomy
from maieutic.latent.reading import prefix_key


class Notebook:
    """Texts by key. Raises :class:`RunFolderError` for a file that cannot be read or written, or that holds anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, str] = {}
        try:
            path.touch()
            raw = path.read_bytes()
            whole = raw[: raw.rfind(b"\n") + 1]
            for number, line in enumerate(whole.splitlines(), start=1):
                try:
                    key, value = json.loads(line)
                except (ValueError, TypeError) as error:
                    raise RunFolderError(
                        f"{path}, line {number}: no pair of key and answer: remove that line"
                    ) from error
                self._known[key] = value
            self._file = open(path, "r+b")  # noqa: SIM115 (open as long as the notebook is)
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be used: {error.strerror}") from error

    def get(self, key: str) -> str | None:
        """The answer that was kept under ``key``, None where there is none."""
        return self._known.get(key)

    def put(self, key: str, value: str) -> None:
        """Keep an answer."""
        self._known[key] = value
        try:
            self._file.write(json.dumps([key, value]).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RememberedLabels:
    """A labeller whose labels are kept: a label belongs to the text up to the labelled turn, whichever dialogue it is in."""

    def __init__(self, labeller: MoveLabeller, moves: Taxonomy, notebook: Notebook) -> None:
        self.labeller, self.moves, self.notebook = labeller, moves, notebook

    async def label(self, turns: Sequence[Turn], n: int, *, seed: int) -> str:
        key = prefix_key("", turns[: n + 1], self.moves.name)
        if (known := self.notebook.get(key)) is None:
            known = await self.labeller.label(turns, n, seed=seed)
            self.notebook.put(key, known)
        return known

"""Transcripts in the trackers: a W&B table that grows step by step, and the same rows as text in TensorBoard.

The record is ``transcripts/*.jsonl``; what is shown here is read back from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maieutic.errors import TranscriptError
from maieutic.transcripts import FOLDER, transcript_name

COLUMNS = (
    "step",
    "episode",
    "student",
    "problem",
    "dialogue",
    "end",
    "verdicts",
    "gain",
    "reward",
    "excluded",
)


class TranscriptTables:
    """``limit``: episodes of each step that are shown, the first ones in the file (0: none)."""

    def __init__(self, root: Path, limit: int) -> None:
        self._folder = root / FOLDER
        self._limit = limit
        self._tables: dict[str, Any] = {}

    def log(self, trackers: Sequence[Any], phase: str, step: int) -> None:
        """Show the episodes of one phase of one step; nothing happens without trackers or without a transcript."""
        path = self._folder / transcript_name(phase, step)
        if not trackers or not self._limit or not path.is_file():
            return
        rows = read_rows(path, self._limit)
        for tracker in trackers:
            if tracker.name == "wandb":
                tracker.run.log({f"{FOLDER}/{phase}": self._grown(phase, rows)}, step=step)
            elif tracker.name == "tensorboard":
                tracker.writer.add_text(f"{FOLDER}/{phase}", markdown(rows), step)

    def _grown(self, phase: str, rows: list[list[Any]]) -> Any:
        import wandb

        if phase not in self._tables:
            self._tables[phase] = wandb.Table(
                columns=list(COLUMNS), log_mode="INCREMENTAL", allow_mixed_types=True
            )
        for row in rows:
            self._tables[phase].add_data(*row)
        return self._tables[phase]


def read_rows(path: Path, limit: int) -> list[list[Any]]:
    """The first ``limit`` episodes of a transcript as rows of :data:`COLUMNS`. Raises :class:`~maieutic.errors.TranscriptError`."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if number > limit:
                break
            try:
                rows.append(_row(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise TranscriptError(f"{path}, line {number}: cannot be shown: {error!r}") from error
    return rows


def _row(line: dict[str, Any]) -> list[Any]:
    dialogue, reward = line["dialogue"], line["reward"] or {}
    turns = [f"{t['speaker'].upper()}: {t['visible']}" for t in dialogue["turns"]]
    verdicts = ", ".join(f"{gate} {v['decision']}" for gate, v in line["verdicts"].items())
    return [
        line["step"],
        line["id"],
        line["student"],
        dialogue["problem"],
        "\n".join(turns),
        dialogue["end"],
        verdicts,
        _number(reward.get("gain")),
        _number(reward.get("reward")),
        line["exclusion"] or "",
    ]


def _number(value: Any) -> float | None:
    """Numbers only: the transcript spells what is not finite as text."""
    return float(value) if isinstance(value, int | float) else None


def markdown(rows: Sequence[Sequence[Any]]) -> str:
    """The rows one below the other; model text is indented, so that it is shown and never interpreted."""
    parts = []
    for row in rows:
        said = dict(zip(COLUMNS, row, strict=True))
        text = "\n".join("    " + line for line in str(said.pop("dialogue")).splitlines())
        problem = "\n".join("    " + line for line in str(said.pop("problem")).splitlines())
        facts = ", ".join(f"{k}: {v}" for k, v in said.items() if v not in (None, ""))
        parts.append(f"{facts}\n\n{problem}\n\n{text}\n")
    return "\n---\n\n".join(parts)

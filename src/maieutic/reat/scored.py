"""Dialogues of a REAT run with their scores, read from its folder."""

from __future__ import annotations

import json
from pathlib import Path

from maieutic.env.base import Episode
from maieutic.errors import RunFolderError
from maieutic.reat.scoring import DialogueScore
from maieutic.transcripts import read_episodes


def scores_file(run: Path, judge: str, where: str, arm: str, step: int) -> Path:
    """Where the scores of an arm's dialogues lie."""
    return run / "scores" / judge / where / f"{arm}-{step}.jsonl"


def read_scores(path: Path) -> list[DialogueScore]:
    """The scores of one file. Raises :class:`RunFolderError` when it is missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{path}: no scores ({error.strerror}): run the stage `score` first") from error
    return [DialogueScore.from_dict(json.loads(line)) for line in text.splitlines()]


def read_arm(
    run: Path, where: str, arm: str, *, judge: str = "primary", step: int = 0
) -> tuple[list[Episode], list[DialogueScore]]:
    """(all dialogues, scores of the counted ones) of an arm on a set (``grow`` with its batch as ``step``, or a test set)."""
    scores = read_scores(scores_file(run, judge, where, arm, step))
    return list(read_episodes(run / where / arm, "eval", [step])), scores

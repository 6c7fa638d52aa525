"""What the roles are given: each tutor turn of a transcript with its problem, history and student utterance (equation 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from maieutic.dialogue import Turn
from maieutic.env.base import Episode
from maieutic.errors import MaieuticError, TranscriptError
from maieutic.transcripts import FOLDER, episode_from_json, read_lines


@dataclass(frozen=True, slots=True)
class TurnContext:
    """One tutor turn under review."""

    transcript: str
    """Name of the file it comes from."""
    episode_id: str
    problem_id: str
    problem: str
    solution: str
    """Gold solution: the worked one with the answer, or the answer alone."""
    history: tuple[Turn, ...]
    """H and u: every turn before the response; the last one is the student's."""
    response: str
    """r."""
    turn: int
    """Index of the response in the dialogue."""

    @property
    def key(self) -> str:
        """Identifies the turn within a distillation."""
        return f"{self.transcript}:{self.episode_id}:{self.turn}"

    @property
    def student(self) -> str:
        """u: what the student said last."""
        return self.history[-1].visible


def contexts(episode: Episode, transcript: str, skipped: Counter[str]) -> Iterator[TurnContext]:
    """The tutor turns of an episode that answer a student.

    ``skipped`` counts the others: ``blank`` (nothing visible was said), ``scripted``, ``no_student_turn`` (the tutor opened).
    """
    source = episode.pair.source
    solution = f"{source.solution}\n\nAnswer: {source.answer}" if source.solution else source.answer
    turns = episode.dialogue.turns
    for n, turn in enumerate(turns):
        if turn.speaker != "tutor":
            continue
        if turn.scripted:
            skipped["scripted"] += 1
        elif turn.blank:
            skipped["blank"] += 1
        elif n == 0 or turns[n - 1].speaker != "student" or turns[n - 1].blank:
            skipped["no_student_turn"] += 1
        else:
            yield TurnContext(
                transcript=transcript,
                episode_id=episode.id,
                problem_id=episode.pair.id,
                problem=source.text,
                solution=solution,
                history=tuple(turns[:n]),
                response=turn.visible,
                turn=n,
            )


def transcript_files(paths: Iterable[Path]) -> list[Path]:
    """The JSONL files that paths name: files, run folders (their ``transcripts``), or folders of JSONL files; each file once.

    Raises :class:`TranscriptError` for a path that is missing or a folder without a transcript.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            folder = path / FOLDER if (path / FOLDER).is_dir() else path
            files = sorted(folder.glob("*.jsonl"))
            if not files:
                raise TranscriptError(f"{path}: no transcript (*.jsonl) lies here or in {path / FOLDER}")
            found |= dict.fromkeys(f.resolve() for f in files)
        elif path.is_file():
            found[path.resolve()] = None
        else:
            raise TranscriptError(f"{path}: no such file or folder of transcripts")
    return list(found)


def read_contexts(paths: Iterable[Path], skipped: Counter[str]) -> list[TurnContext]:
    """Every turn to review, in the order of files, lines and turns; a turn given twice is an error that names it."""
    files = transcript_files(paths)
    # A file's bare name would mix up runs; the folder above tells the same step of two runs apart.
    names = {f: f.name if len({g for g in files if g.name == f.name}) == 1 else str(f) for f in files}
    out: dict[str, TurnContext] = {}
    for file in files:
        for number, line in enumerate(read_lines(file), start=1):
            try:
                episode = episode_from_json(line)
            except MaieuticError as error:
                raise TranscriptError(f"{file}, line {number}: {error}") from error
            for context in contexts(episode, names[file], skipped):
                if context.key in out:
                    raise TranscriptError(
                        f"{file}, line {number}: episode {episode.id} occurs twice in this file"
                    )
                out[context.key] = context
    return list(out.values())

"""Transcripts: every episode is one line of JSON, and everything that is shown about a run is a view of these lines.

Files are ``<run>/transcripts/<phase>-step-<step:06d>.jsonl``. A line is pure ASCII (other characters are escaped), so that no
text of a model can break a line or a file. What a line holds is described field by field in ``docs/report.md``.

Rules of the format: ``schema`` is raised when a field changes its meaning or disappears; new keys may be added without that, and a
reader ignores keys that it does not know. Floats that JSON has no number for are the strings ``nan``, ``inf`` and ``-inf``.
Two adjacent surrogate code points that form a pair come back as the one character that they encode; lone ones survive.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, Phase, PostTest, RewardBreakdown, Verdict
from maieutic.errors import MaieuticError, RunFolderError, TranscriptError
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.training.trajectory import Trajectory

SCHEMA = 1
"""Version of the line format that this module writes and reads."""
FOLDER = "transcripts"
"""Name of the transcripts' folder inside a run folder."""

_NAME = re.compile(r"^(?P<phase>[a-z]+)-step-(?P<step>\d{6,})\.jsonl$")
_REWARD_FLOATS = {f.name for f in fields(RewardBreakdown) if str(f.type).startswith("float")}
T = TypeVar("T")


def transcript_name(phase: str, step: int) -> str:
    """File name of one phase of one step."""
    return f"{phase}-step-{step:06d}.jsonl"


# ---- to JSON ---------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """JSON-ready copy: tuples as lists, numpy scalars as numbers, floats without a JSON number as strings, the rest as text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _plain(value.item())
    return str(value)


def _flat(record: Any) -> dict[str, Any]:
    """A dataclass of plain fields as a dict."""
    return {f.name: _plain(getattr(record, f.name)) for f in fields(record)}


def _problem_to_json(problem: Problem | None) -> dict[str, Any] | None:
    if problem is None:
        return None
    return {
        "text": problem.text,
        "answer": problem.answer,
        "solution": problem.solution,
        "rates": {key: {"rate": r.rate, "n": r.n} for key, r in problem.rates.items()},
    }


def _post_test_to_json(post: PostTest | None) -> dict[str, Any] | None:
    if post is None:
        return None
    derived = {
        "right": sum(g == "right" for g in post.grades),
        "graded": post.graded,
        "rate": post.rate if post.graded else None,
    }
    return _flat(post) | derived


def _token_record(trajectory: Any) -> dict[str, int] | None:
    """Counts of the token record: segments, all tokens, and sampled tokens (the sum of the masks)."""
    if not isinstance(trajectory, Trajectory):
        return None
    return {
        "segments": len(trajectory.segments),
        "tokens": trajectory.n_tokens,
        "sampled": sum(s.n_trained for s in trajectory.segments),
    }


def episode_to_json(episode: Episode, *, arm: str | None = None, tokens: bool = False) -> dict[str, Any]:
    """An episode as a JSON-ready dict.

    ``arm``: the way of tutoring that played it. ``tokens``: keep the trajectory (ids, mask, log-probs) under ``tokens``, so that
    trained ids can be audited; without it only its counts are kept. ``Dialogue.record`` belongs to the tutor and is not kept.
    """
    dialogue = episode.dialogue
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "id": episode.id,
        "group_id": episode.group_id,
        "arm": arm,
        "phase": episode.phase,
        "step": episode.step,
        "index": episode.index,
        "seed": episode.seed,
        "student": episode.student,
        "policy_version": episode.policy_version,
        "pre": _plain(episode.pre),
        "pair": {
            "id": episode.pair.id,
            "source": _problem_to_json(episode.pair.source),
            "transfer": _problem_to_json(episode.pair.transfer),
            "provenance": _plain(episode.pair.provenance),
        },
        "dialogue": {
            "id": dialogue.id,
            "problem": dialogue.problem,
            "solution": dialogue.solution,
            "end": dialogue.end,
            "turns": [_flat(t) for t in dialogue.turns],
        },
        "verdicts": {gate: _flat(v) for gate, v in episode.verdicts.items()},
        "post_test": _post_test_to_json(episode.post_test),
        "reward": None if episode.reward is None else _flat(episode.reward),
        "exclusion": episode.exclusion,
        "error": episode.error,
        "timing": _plain(episode.timing),
        "token_record": _token_record(episode.trajectory),
    }
    if episode.extra_tests:
        out["extra_tests"] = {which: _post_test_to_json(t) for which, t in episode.extra_tests.items()}
    if tokens and isinstance(episode.trajectory, Trajectory):
        out["tokens"] = _plain(episode.trajectory.to_json())
    return out


# ---- from JSON -------------------------------------------------------------------------------------------------------


def _get(data: Any, key: str, where: str) -> Any:
    if not isinstance(data, dict):
        raise TranscriptError(f"{where} is {type(data).__name__}, not an object")
    if key not in data:
        raise TranscriptError(f"{where} has no field {key!r}")
    return data[key]


def _number(value: Any) -> Any:
    """Undo the spelling of floats that JSON has no number for."""
    return float(value) if isinstance(value, str) else value


def _numbers(data: dict[str, Any]) -> dict[str, Any]:
    return {k: _number(v) for k, v in data.items()}


def _build(kind: type[T], data: Any, where: str) -> T:
    """A dataclass from its dict: absent fields take their default (or are an error), unknown keys are ignored."""
    values: dict[str, Any] = {}
    for f in fields(kind):  # type: ignore[arg-type]
        optional = f.default is not MISSING or f.default_factory is not MISSING
        if isinstance(data, dict) and f.name not in data and optional:
            continue
        values[f.name] = _get(data, f.name, where)
    return kind(**values)


def _reward_from_json(data: Any) -> RewardBreakdown:
    values = {k: _number(v) if k in _REWARD_FLOATS else v for k, v in dict(data).items()}
    values["extra"] = _numbers(values.get("extra", {}))
    return _build(RewardBreakdown, values, "reward")


def episode_from_json(data: dict[str, Any]) -> Episode:
    """Inverse of :func:`episode_to_json` (``arm`` and counts that can be derived are left aside).

    Raises :class:`~maieutic.errors.TranscriptError` that names the version or the field that is wrong.
    """
    version = _get(data, "schema", "the line")
    if version != SCHEMA:
        raise TranscriptError(
            f"schema version {version!r}: this release reads version {SCHEMA}, use the release that wrote the run"
        )
    try:
        return _episode(data)
    except (TypeError, ValueError, AttributeError) as error:
        raise TranscriptError(f"a field has the wrong type: {error}") from error


def _trajectory_from_json(data: dict[str, Any]) -> Trajectory:
    data = data | _numbers({k: data[k] for k in ("reward", "temperature") if k in data})
    data["segments"] = [
        segment | {"logprobs": [_number(p) for p in segment["logprobs"]]}
        for segment in data.get("segments", [])
    ]
    return Trajectory.from_json(data)


def _episode(data: dict[str, Any]) -> Episode:
    talk = _get(data, "dialogue", "the line")
    dialogue = Dialogue(
        id=_get(talk, "id", "dialogue"),
        problem=_get(talk, "problem", "dialogue"),
        solution=_get(talk, "solution", "dialogue"),
        turns=[_build(Turn, t, f"turn {n}") for n, t in enumerate(_get(talk, "turns", "dialogue"))],
        end=_get(talk, "end", "dialogue"),
    )
    post = _get(data, "post_test", "the line")
    reward = _get(data, "reward", "the line")
    verdicts = _get(data, "verdicts", "the line")
    return Episode(
        id=_get(data, "id", "the line"),
        group_id=_get(data, "group_id", "the line"),
        pair=ProblemPair.model_validate(_get(data, "pair", "the line")),
        phase=_get(data, "phase", "the line"),
        step=_get(data, "step", "the line"),
        index=_get(data, "index", "the line"),
        seed=_get(data, "seed", "the line"),
        student=_get(data, "student", "the line"),
        dialogue=dialogue,
        pre=_number(data.get("pre", None if reward is None else reward.get("pre"))),
        verdicts={gate: _build(Verdict, v, f"verdict {gate!r}") for gate, v in verdicts.items()},
        post_test=None if post is None else _build(PostTest, post, "post_test"),
        extra_tests={
            w: _build(PostTest, t, f"extra test {w!r}") for w, t in data.get("extra_tests", {}).items()
        },
        reward=None if reward is None else _reward_from_json(reward),
        exclusion=_get(data, "exclusion", "the line"),
        error=_get(data, "error", "the line"),
        trajectory=_trajectory_from_json(data["tokens"]) if "tokens" in data else None,
        policy_version=_get(data, "policy_version", "the line"),
        timing=_numbers(_get(data, "timing", "the line")),
    )


# ---- files -----------------------------------------------------------------------------------------------------------


class TranscriptWriter:
    """Writes the transcripts of a run, one file for each phase of each step.

    A file appears complete or not at all: it is written beside its final name, flushed to disk, then renamed. Writing a step again
    (a resumed run plays its last step anew) replaces the file.
    """

    def __init__(self, run: Path, *, arm: str | None = None, tokens: bool = False) -> None:
        self.folder = Path(run) / FOLDER
        self.arm = arm
        self.tokens = tokens

    def write(self, phase: Phase, step: int, episodes: Iterable[Episode]) -> Path:
        """Write one step; returns the file. Raises :class:`~maieutic.errors.RunFolderError` when the disk does not take it."""
        path = self.folder / transcript_name(phase, step)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(temporary, "w", encoding="ascii", newline="\n") as file:
                for episode in episodes:
                    line = episode_to_json(episode, arm=self.arm, tokens=self.tokens)
                    file.write(json.dumps(line, ensure_ascii=True, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise RunFolderError(
                f"cannot write the transcripts {path}: {error.strerror or error}; "
                "free space or give write permission, then resume the run"
            ) from error
        finally:
            _remove(temporary)
        return path

    def discard_after(self, step: int) -> list[Path]:
        """Delete files of steps later than ``step`` (a run that resumes there will play them anew); returns what was deleted."""
        stale = [path for _, number, path in _files(self.folder) if number > step]
        for path in stale:
            try:
                path.unlink()
            except OSError as error:
                raise RunFolderError(
                    f"cannot delete the stale transcripts {path}: {error.strerror or error}"
                ) from error
        return stale


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # Best effort on a way out that already carries an error; a leftover temporary file is never read.
        pass


def _files(folder: Path) -> list[tuple[str, int, Path]]:
    """(phase, step, path) of every transcript file, by step, then phase."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.match(path.name)
        if match:
            found.append((match["phase"], int(match["step"]), path))
    return sorted(found, key=lambda item: (item[1], item[0]))


def transcript_steps(run: Path, phase: Phase | None = None) -> list[int]:
    """Steps for which there are transcripts (of one phase), in order."""
    return sorted({step for kind, step, _ in _files(Path(run) / FOLDER) if phase in (None, kind)})


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of one transcript file as dicts, read as they are asked for.

    Raises :class:`~maieutic.errors.TranscriptError` with file and line for a broken line or an unknown schema version.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below; only the opening may fail by a missing permission)
    except OSError as error:
        raise TranscriptError(f"{path} cannot be read: {error.strerror or error}") from error
    with file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                data = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise TranscriptError(f"{where}: not a line of JSON ({error})") from error
            if not isinstance(data, dict) or data.get("schema") != SCHEMA:
                version = data.get("schema") if isinstance(data, dict) else None
                raise TranscriptError(
                    f"{where}: schema version {version!r}: this release reads version {SCHEMA}, "
                    "use the release that wrote the run"
                )
            yield data


def read_transcripts(
    run: Path, phase: Phase | None = None, steps: Collection[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Lines of a run as dicts, by step, then phase, then position; one line in memory at a time."""
    for kind, step, path in _files(Path(run) / FOLDER):
        if phase in (None, kind) and (steps is None or step in steps):
            yield from read_lines(path)


def read_episodes(
    run: Path, phase: Phase | None = None, steps: Collection[int] | None = None
) -> Iterator[Episode]:
    """Like :func:`read_transcripts`, as :class:`~maieutic.env.base.Episode`; errors name file and line."""
    for kind, step, path in _files(Path(run) / FOLDER):
        if phase in (None, kind) and (steps is None or step in steps):
            for number, data in enumerate(read_lines(path), start=1):
                try:
                    yield episode_from_json(data)
                except MaieuticError as error:
                    raise TranscriptError(f"{path}, line {number}: {error}") from error

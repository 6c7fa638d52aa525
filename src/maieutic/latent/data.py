"""From episodes to transitions, to Parquet and back; what was dropped and why; how well the data cover states and moves."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from maieutic.env.base import Episode
from maieutic.errors import EngineDownError, EngineError, RunStop
from maieutic.latent.errors import FeatureError, LabelError, LatentDataError
from maieutic.latent.moves import MoveLabeller, Taxonomy, chosen_move
from maieutic.latent.reading import StateReader
from maieutic.latent.tasks import bounded
from maieutic.latent.transitions import Transitions
from maieutic.seeds import derive

RewardKind = Literal["success", "transfer_gain"]
SCHEMA = 1


@dataclass(slots=True)
class Drops:
    """Episodes that did not become transitions, by reason: ``excluded`` (failed, unknown verdict), ``empty`` (no tutor turn),
    ``unlabelled`` (a move or a state could not be read), ``nan_features``, ``no_reward``, ``malformed`` (speakers do not take
    turns), ``duplicate`` (an id that occurred before)."""

    episodes: int = 0
    kept: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    """The first episode of each reason and what was wrong with it."""

    def add(self, reason: str, episode: str, why: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.first.setdefault(reason, f"{episode}: {why}")

    def lines(self) -> list[str]:
        out = [f"{self.kept} of {self.episodes} episodes became transitions"]
        out += [f"{n} dropped as {r} (first: {self.first[r]})" for r, n in sorted(self.reasons.items())]
        return out


class _Drop(Exception):
    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


@dataclass(slots=True)
class Rows:
    """One episode's labelled turns."""

    episode: str
    problem: str
    states: list[np.ndarray[Any, Any]]
    moves: list[int]
    reward: float
    turns: list[int]


async def label_episode(
    episode: Episode,
    reader: StateReader,
    labeller: MoveLabeller,
    moves: Taxonomy,
    *,
    reward: RewardKind = "success",
    skip: int = 0,
    trust_choice: bool = False,
) -> Rows:
    """States and moves of one episode; ``skip``: leading tutor turns that belong to another episode (a shared prefix).

    ``trust_choice``: take the move that a latent-state tutor chose, instead of labelling its words. Raises the drop.
    """
    turns = episode.dialogue.turns
    if episode.exclusion is not None:
        raise _Drop("excluded", episode.exclusion)
    numbers = [n for n, t in enumerate(turns) if t.speaker == "tutor"][skip:]
    if not numbers:
        raise _Drop("empty", "no tutor turn")
    if any(t.speaker != ("tutor" if n % 2 else "student") for n, t in enumerate(turns)):
        raise _Drop("malformed", "student and tutor do not take turns, the student first")
    value = reward_of(episode, reward)
    rows = Rows(episode.id, episode.pair.id, [], [], value, [])
    for count, n in enumerate(numbers, start=skip):
        try:
            state = await reader.state(episode.dialogue.problem, turns[:n])
            name = (chosen_move(turns[n]) if trust_choice else None) or await labeller.label(
                turns, n, seed=derive("label", episode.id, n)
            )
        except (RunStop, EngineDownError):
            raise
        except EngineError as error:
            raise _Drop("unlabelled", f"tutor turn {n}: {error}") from error
        except FeatureError as error:
            raise _Drop("nan_features", f"tutor turn {n}: {error}") from error
        if name not in moves.names:
            raise _Drop("unlabelled", f"tutor turn {n}: {name!r} is no move of {moves.name}")
        rows.states.append(state)
        rows.moves.append(moves.names.index(name))
        rows.turns.append(count)
    return rows


def reward_of(episode: Episode, kind: RewardKind) -> float:
    """The terminal reward: ±1 of the success environment, or the masked transfer gain of the post-test."""
    if episode.reward is None:
        raise _Drop("no_reward", "the episode has no reward")
    value = episode.reward.extra.get("success_reward") if kind == "success" else episode.reward.gain
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise _Drop("no_reward", f"the {kind} reward is {value!r}, not a number")
    if value is None or not math.isfinite(value):
        raise _Drop("no_reward", f"the episode has no {kind} reward")
    return float(value)


async def transitions_of(
    episodes: Sequence[Episode],
    reader: StateReader,
    labeller: MoveLabeller,
    moves: Taxonomy,
    *,
    gamma: float = 0.9,
    reward: RewardKind = "success",
    skips: dict[str, int] | None = None,
    trust_choice: bool = False,
    concurrency: int = 32,
) -> tuple[Transitions, Drops]:
    """Label episodes concurrently; the rows come in the episodes' order. Raises when nothing is left."""
    drops, first_of = Drops(len(episodes)), {e.id: n for n, e in reversed(list(enumerate(episodes)))}

    async def one(numbered: tuple[int, Episode]) -> Rows | _Drop:
        n, e = numbered
        if first_of[e.id] != n:
            return _Drop("duplicate", "an episode before it has the same id")
        try:
            skip = (skips or {}).get(e.id, 0)
            return await label_episode(
                e, reader, labeller, moves, reward=reward, skip=skip, trust_choice=trust_choice
            )
        except _Drop as drop:
            return drop

    kept: list[Rows] = []
    results = await bounded(list(enumerate(episodes)), one, concurrency)
    for e, result in zip(episodes, results, strict=True):
        if isinstance(result, _Drop):
            drops.add(result.reason, e.id, str(result))
        else:
            kept.append(result)
    drops.kept = len(kept)
    if not kept:
        raise LatentDataError(
            "no episode could be used: " + "; ".join(drops.lines()[1:] or ["there are none"])
        )
    meta = {"features": reader.features.id, "moves": moves.name, "reward": reward}
    return from_rows(kept, reader.features.names, moves.names, gamma, meta), drops


def from_rows(
    rows: Sequence[Rows],
    features: tuple[str, ...],
    moves: tuple[str, ...],
    gamma: float,
    meta: dict[str, str],
) -> Transitions:
    """The table of labelled episodes: 0 reward and the next state until the last row, which is done and has the reward."""
    states = np.concatenate([np.stack(r.states) for r in rows]).astype(np.float32)
    lengths = np.array([len(r.moves) for r in rows])
    ends = lengths.cumsum() - 1
    done = np.zeros(len(states), bool)
    done[ends] = True
    following = np.zeros_like(states)
    following[:-1] = states[1:]
    following[done] = 0
    rewards = np.zeros(len(states), np.float32)
    rewards[ends] = [r.reward for r in rows]
    return Transitions(
        states,
        np.array([m for r in rows for m in r.moves], np.int64),
        rewards,
        following,
        done,
        np.repeat([r.episode for r in rows], lengths).astype(np.str_),
        np.repeat([r.problem for r in rows], lengths).astype(np.str_),
        np.array([t for r in rows for t in r.turns], np.int64),
        features,
        moves,
        gamma,
        meta,
    )


def write_parquet(data: Transitions, path: Path) -> None:
    """One row a transition; feature columns by name; names, γ and provenance in the file's metadata. Complete or not at all."""
    columns: dict[str, Any] = {
        "episode": data.episodes,
        "problem": data.problems,
        "turn": data.turns,
        "move": data.moves,
        "reward": data.rewards,
        "done": data.done,
    }
    for i, name in enumerate(data.feature_names):
        columns[f"s.{name}"] = data.states[:, i]
        columns[f"next.{name}"] = data.next_states[:, i]
    head = {
        "schema": SCHEMA,
        "features": data.feature_names,
        "moves": data.move_names,
        "gamma": data.gamma,
        "meta": data.meta,
    }
    table = pa.table(columns).replace_schema_metadata({"maieutic.latent": json.dumps(head)})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pq.write_table(table, temporary)
    os.replace(temporary, path)


def read_parquet(path: Path) -> Transitions:
    """Inverse of :func:`write_parquet`. Raises :class:`LatentDataError` for a file of another kind or schema, or with columns or
    values missing. Next states of terminal rows are set to zero, whatever the file holds there."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise LatentDataError(f"{path}: cannot be read as Parquet: {error}") from error
    raw = (table.schema.metadata or {}).get(b"maieutic.latent")
    if raw is None:
        raise LatentDataError(f"{path}: not a file of transitions (write it with `maieutic latent run`)")
    try:
        head = json.loads(raw)
        if head["schema"] != SCHEMA:
            raise LatentDataError(f"{path}: schema {head['schema']}, this release reads {SCHEMA}")
        names = head["features"]
        columns = [*COLUMNS, *(f"{side}.{n}" for side in ("s", "next") for n in names)]
        column = {n: table.column(n) for n in columns}
        empty = [n for n, c in column.items() if c.null_count and not n.startswith("next.")]
        if empty:
            raise LatentDataError(f"{path}: columns {empty} have empty cells: drop or repair those episodes")
        _check_types(column, path)
        return _from_columns({n: c.to_numpy() for n, c in column.items()}, head)
    except (KeyError, TypeError, ValueError) as error:
        raise LatentDataError(f"{path}: columns or head are damaged: {error}") from error


def _check_types(column: dict[str, pa.ChunkedArray], path: Path) -> None:
    """Refuse what numpy would bend into shape without a word: the text ``"no"`` to true, move 1.7 to move 1."""
    for name, fits, wants in (
        ("done", pa.types.is_boolean, "true or false"),
        ("move", pa.types.is_integer, "whole numbers, the place of the move in the taxonomy"),
        ("turn", pa.types.is_integer, "whole numbers"),
        ("reward", _is_number, "numbers"),
        *((name, _is_number, "numbers") for name in column if name.startswith(("s.", "next."))),
    ):
        have = column[name].type
        if not fits(have) and not (name.startswith("next.") and pa.types.is_null(have)):
            raise LatentDataError(f"{path}: column {name!r} holds {have}: {wants} are expected")


def _is_number(have: pa.DataType) -> bool:
    return bool(pa.types.is_floating(have) or pa.types.is_integer(have) or pa.types.is_boolean(have))


COLUMNS = ("episode", "problem", "turn", "move", "reward", "done")
"""Columns beside the features'."""


def _from_columns(column: dict[str, np.ndarray[Any, Any]], head: dict[str, Any]) -> Transitions:
    names, done = head["features"], column["done"].astype(bool)
    following = np.stack([column[f"next.{n}"] for n in names], 1).astype(np.float32)
    following[done] = 0
    return Transitions(
        np.stack([column[f"s.{n}"] for n in names], 1).astype(np.float32),
        column["move"].astype(np.int64),
        column["reward"].astype(np.float32),
        following,
        done,
        column["episode"].astype(np.str_),
        column["problem"].astype(np.str_),
        column["turn"].astype(np.int64),
        tuple(names),
        tuple(head["moves"]),
        float(head["gamma"]),
        dict(head["meta"]),
    )


@dataclass(slots=True)
class Coverage:
    """What the data hold. ``thin``: (binary feature, move) pairs that never occur together though both occur often."""

    episodes: int
    transitions: int
    problems: int
    success_share: float
    mean_return: float
    mean_length: float
    move_share: dict[str, float]
    move_success: dict[str, float]
    """Share of successful episodes among the transitions with this move."""
    constant_features: list[str]
    thin: list[str]
    state_repeats: float
    """Share of rows whose state occurs in another row too (high: few distinct states)."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def coverage(data: Transitions) -> Coverage:
    """Coverage statistics of a data set."""
    data.check()
    starts = data.starts()
    lengths = np.diff(np.append(starts, len(data)))
    success = data.rewards[np.append(starts[1:], len(data)) - 1] > 0
    won = np.repeat(success, lengths)
    share = np.bincount(data.moves, minlength=len(data.move_names)) / len(data)
    binary = [i for i in range(data.states.shape[1]) if set(np.unique(data.states[:, i])) == {0.0, 1.0}]
    thin = [
        f"{data.feature_names[i]} × {data.move_names[a]}"
        for i in binary
        for a in np.flatnonzero(share > 0.02)
        if data.states[:, i].mean() * share[a] * len(data) > 5
        and not (data.states[data.moves == a][:, i] == 1).any()
    ]
    counts = Counter(row.tobytes() for row in data.states)
    return Coverage(
        len(starts),
        len(data),
        len(np.unique(data.problems)),
        float(success.mean()),
        float(data.returns().mean()),
        float(lengths.mean()),
        {n: float(s) for n, s in zip(data.move_names, share, strict=True)},
        {
            n: float(won[data.moves == a].mean()) if (data.moves == a).any() else float("nan")
            for a, n in enumerate(data.move_names)
        },
        [n for i, n in enumerate(data.feature_names) if np.ptp(data.states[:, i]) == 0],
        thin,
        sum(c for c in counts.values() if c > 1) / len(data),
    )


__all__ = [
    "Coverage",
    "Drops",
    "LabelError",
    "coverage",
    "from_rows",
    "read_parquet",
    "transitions_of",
    "write_parquet",
]

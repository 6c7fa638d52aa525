"""The label study: a sample of turns for people to label, and κ of their labels with the reader's and the labeller's."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from maieutic.env.base import Episode
from maieutic.errors import MaieuticError
from maieutic.latent.features import FeatureSet
from maieutic.latent.moves import TAXONOMIES
from maieutic.latent.statistics import cohen_kappa
from maieutic.latent.transitions import Transitions

HEAD = ("id", "episode", "turn", "problem", "conversation", "tutor_turn")


def export_sample(
    path: Path, episodes: Sequence[Episode], data: Transitions, features: FeatureSet, size: int, seed: int
) -> int:
    """Write two CSV files: ``path`` for people (text, empty label columns), and the machine's labels (:func:`machine_path`).

    Turns are drawn at random over all transitions; people never see the machine's labels. Returns the number of turns.
    """
    by_id = {e.id: e for e in episodes}
    rows = [i for i in range(len(data)) if str(data.episodes[i]) in by_id]
    random.Random(f"agreement:{seed}").shuffle(rows)
    binary = [f.name for f in features.features if f.kind == "binary"]
    people, machine = io.StringIO(), io.StringIO()
    human = csv.writer(people, lineterminator="\n")
    ours = csv.writer(machine, lineterminator="\n")
    human.writerow([*HEAD, "move", *binary])
    ours.writerow(["id", "move", *binary])
    for i in rows[:size]:
        episode = by_id[str(data.episodes[i])]
        at = [n for n, t in enumerate(episode.dialogue.turns) if t.speaker == "tutor"][int(data.turns[i])]
        turns = episode.dialogue.turns
        text = "\n".join(f"{t.speaker}: {t.visible}" for t in turns[:at])
        key = f"{data.episodes[i]}#{data.turns[i]}"
        human.writerow(
            [
                key,
                data.episodes[i],
                data.turns[i],
                _cell(episode.dialogue.problem),
                _cell(text),
                _cell(turns[at].visible),
            ]
            + [""] * (1 + len(binary))
        )
        values = [str(int(data.states[i, data.feature_names.index(b)])) for b in binary]
        ours.writerow([key, data.move_names[data.moves[i]], *values])
    # A byte order mark lets spreadsheets read UTF-8; half of a surrogate pair has no UTF-8 and becomes a question mark.
    path.write_bytes(people.getvalue().encode("utf-8-sig", "replace"))
    machine_path(path).write_bytes(machine.getvalue().encode("utf-8-sig", "replace"))
    return min(size, len(rows))


def machine_path(path: Path) -> Path:
    """Where the machine's labels of a sample lie."""
    return path.with_suffix(".machine.csv")


def _cell(text: str) -> str:
    """A spreadsheet runs a cell that begins like a formula: a model's words must not."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


@dataclass(frozen=True, slots=True)
class Agreement:
    """κ and raw agreement of one column; ``n``: labelled rows."""

    column: str
    n: int
    agreement: float
    kappa: float


def agreement(people: Path, machine: Path | None = None) -> list[Agreement]:
    """Per column, of the rows that people filled in. Yes/no columns take 1, 0, yes, no, true, false; columns that the machine's
    file does not have (notes of people) are left out.

    Raises :class:`MaieuticError` for an unknown id, a label that cannot be read, or no labelled row at all.
    """
    ours = {r["id"]: r for r in _rows(machine or machine_path(people))}
    known = set(next(iter(ours.values()), {}))
    moves = {name for t in TAXONOMIES.values() for name in t.names}
    out: list[Agreement] = []
    theirs = _rows(people)
    columns = [c for c in (theirs[0] if theirs else {}) if c not in HEAD and c in known]
    for column in columns:
        a, b = [], []
        for line, row in enumerate(theirs, start=2):
            if not (given := row[column].strip()):
                continue
            if row["id"] not in ours:
                raise MaieuticError(f"{people}, row {line}: no machine label for id {row['id']!r}")
            where = f"{people}, row {line}, {column}"
            if column == "move" and given.lower() not in moves:
                raise MaieuticError(f"{where}: {given!r} is no move (there are {', '.join(sorted(moves))})")
            a.append(given.lower() if column == "move" else _yes_no(given, where))
            b.append(ours[row["id"]][column])
        if a:
            raw = sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
            out.append(Agreement(column, len(a), raw, cohen_kappa(a, b)))
    if not out:
        raise MaieuticError(f"{people}: no label is filled in")
    return out


def _rows(path: Path) -> list[dict[str, str]]:
    # A conversation may be longer than the module's limit, which is one for the whole process: others rely on it.
    before = csv.field_size_limit(2**30)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            head = next(lines, [])
            found = [dict(zip_longest(head, line[: len(head)], fillvalue="")) for line in lines if line]
    except OSError as error:
        raise MaieuticError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise MaieuticError(f"{path}: no CSV file in UTF-8: {error}") from error
    finally:
        csv.field_size_limit(before)
    if "id" not in head:
        raise MaieuticError(
            f"{path}: no column 'id': save it with commas between the columns, as it was exported"
        )
    return found


def _yes_no(text: str, where: str) -> str:
    if text.lower() in ("1", "yes", "y", "true"):
        return "1"
    if text.lower() in ("0", "no", "n", "false"):
        return "0"
    raise MaieuticError(f"{where}: {text!r} is neither yes nor no (write 1 or 0)")

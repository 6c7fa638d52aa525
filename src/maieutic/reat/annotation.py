"""Human annotation of paired dialogues (paper, Appendix D): export for people, import of what they filled in, agreement.

For each pair, two dialogues about one problem with one persona, called *A* and *B* in an order that is drawn and kept
apart from what people see (``key.json``). A turn is scored in five dimensions from 0 to 4, ``NA`` for adaptation
where the history is too short; a pair gets three judgements with an uncertain class: which is preferred, whether the
automatic scores are reasonable, whether the inferred states are plausible. Two forms hold the same: ``turns.csv``
with ``pairs.csv``, and ``form.html``, one page without network that saves such a file.

Import reads one folder, or one JSON of the page, for each annotator. Statistics are in :mod:`maieutic.reat.annotation_statistics`.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from maieutic.env.base import Episode
from maieutic.errors import MaieuticError
from maieutic.reat.persona import problem_id
from maieutic.reat.schema import DIMENSIONS, TOP, Scores
from maieutic.reat.scoring import DialogueScore
from maieutic.reat.tutor import used
from maieutic.report.page import write_page
from maieutic.seeds import derive

Side = Literal["A", "B"]
Setting = Literal["prompt_only", "reat"]
TURN_FIELDS = ("pair", "dialogue", "turn", "student", "tutor", *DIMENSIONS, "notes")
PAIR_FIELDS = ("pair", "preference", "llm_score", "state", "notes")
PREFERENCES = ("A", "B", "uncertain")
CHECKS: dict[str, tuple[str, ...]] = {
    "llm_score": ("reasonable", "uncertain", "unreasonable"),
    "state": ("plausible", "basically", "implausible"),
}
"""Answers of the two checks; the middle one is Appendix D's uncertain ("basically reasonable") class and may stay unused."""


class AnnotationError(MaieuticError):
    """Annotations that cannot be used: names file, line and column, and what is allowed."""

    exit_code = 2


# ---- export ----------------------------------------------------------------------------------------------------------------


def export_pairs(
    folder: Path,
    prompt_only: Sequence[Episode],
    reat: Sequence[Episode],
    prompt_only_scores: Sequence[DialogueScore],
    reat_scores: Sequence[DialogueScore],
    *,
    limit: int | None = None,
    seed: int = 0,
) -> int:
    """Write the forms for pairs that both arms have played and that were scored; returns how many.

    ``limit``: most pairs, drawn by ``seed``. Files: ``form.html``, ``pairs.csv``, ``turns.csv`` for people; ``key.json``, which
    says which side is which arm, for the import and not for them.
    """
    score = {s.episode: s for s in (*prompt_only_scores, *reat_scores)}
    by_pair = {e.pair.id: e for e in reat if e.counted and e.id in score}
    both = [
        (e, by_pair[e.pair.id]) for e in prompt_only if e.counted and e.id in score and e.pair.id in by_pair
    ]
    rng = random.Random(derive(seed, "annotation"))
    if limit is not None and len(both) > limit:
        both = [both[i] for i in sorted(rng.sample(range(len(both)), limit))]
    shown: list[dict[str, Any]] = []
    key: dict[str, dict[Side, Setting]] = {}
    for number, (base, other) in enumerate(both, start=1):
        name = f"p{number:03d}"
        flipped = rng.random() < 0.5
        key[name] = {"A": "reat", "B": "prompt_only"} if flipped else {"A": "prompt_only", "B": "reat"}
        sides = {"A": other, "B": base} if flipped else {"A": base, "B": other}
        shown.append(
            {
                "pair": name,
                "problem": base.pair.source.text,
                "solution": base.pair.source.solution or base.pair.source.answer,
                "dialogues": {side: _dialogue(e, score[e.id]) for side, e in sides.items()},
                # Of the REAT dialogue, as in the paper; said without naming which one it is.
                "states": _states(other),
            }
        )
    problems = {f"p{n:03d}": problem_id(e.pair) for n, (e, _) in enumerate(both, start=1)}
    turns = [
        {"pair": p["pair"], "dialogue": side, "turn": t["n"], "student": t["student"], "tutor": t["tutor"]}
        for p in shown for side, d in p["dialogues"].items() for t in d["turns"]
    ]  # fmt: skip
    write_page(folder / "turns.csv", _csv(TURN_FIELDS, turns))
    write_page(folder / "pairs.csv", _csv(PAIR_FIELDS, [{"pair": p["pair"]} for p in shown]))
    asked = {
        p["pair"]: {side: [t["n"] for t in d["turns"]] for side, d in p["dialogues"].items()} for p in shown
    }
    write_page(
        folder / "key.json", json.dumps({"sides": key, "problems": problems, "turns": asked}, indent=1) + "\n"
    )
    from maieutic.reat.annotation_form import form

    write_page(folder / "form.html", form(shown))
    return len(shown)


def _dialogue(episode: Episode, score: DialogueScore) -> dict[str, Any]:
    """A dialogue as people see it: what was said, and the automatic scores that one of the checks is about."""
    turns, heard = [], ""
    automatic = {t.turn: t.score for t in score.turns}
    for n, t in enumerate(episode.dialogue.turns):
        if t.speaker == "student":
            heard = t.visible
        else:
            turns.append({"n": n, "student": heard, "tutor": t.visible, "score": automatic.get(n)})
    last = episode.dialogue.turns[-1]
    return {"turns": turns, "last": last.visible if last.speaker == "student" else "", "sample": score.sample}


def _states(episode: Episode) -> list[dict[str, Any]]:
    """(student utterance, inferred state) of the REAT dialogue."""
    out = []
    turns = episode.dialogue.turns
    for n, t in enumerate(turns):
        record = used(t)
        if record is not None and record.state is not None and n > 0:
            out.append({"student": turns[n - 1].visible, "state": record.state.replace("|", ", ")})
    return out


def _csv(fields: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fields, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: _inert(v) if isinstance(v, str) else v for k, v in row.items()})
    return out.getvalue()


def _inert(text: str) -> str:
    """Text that a spreadsheet shows and does not run: ``'`` before what it could take for a formula, be it behind white space or a
    full-width sign. Half a surrogate pair, which no file takes, becomes ``?``."""
    text = text.encode("utf-8", "replace").decode()
    first = unicodedata.normalize("NFKC", text.lstrip()[:1])
    return f"'{text}" if (first and first in "=+-@") or text[:1] in ("\t", "\r", "\n") else text


# ---- import ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Annotation:
    """What one annotator filled in. Unfilled turns and judgements are absent."""

    annotator: str
    turns: dict[tuple[str, Side, int], Scores] = field(default_factory=dict)
    judgements: dict[str, dict[str, str]] = field(default_factory=dict)
    """Pair → ``preference`` (A, B, uncertain), ``llm_score``, ``state``; as far as given."""


def read_annotation(path: Path, name: str | None = None) -> Annotation:
    """A folder with ``turns.csv`` and ``pairs.csv``, or a JSON file of the page. Raises :class:`AnnotationError`."""
    out = Annotation(name or path.stem)
    if path.is_dir():
        for line, row in _rows(path / "turns.csv", TURN_FIELDS):
            _take_turn(out, row, f"{path / 'turns.csv'}:{line}")
        for line, row in _rows(path / "pairs.csv", PAIR_FIELDS):
            _take_pair(out, row, f"{path / 'pairs.csv'}:{line}")
        return out
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        turns, pairs = data["turns"], data["pairs"]
        if not all(isinstance(r, dict) for rows in (turns, pairs) for r in rows):
            raise TypeError("turns and pairs are no lists of records")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise AnnotationError(
            f"{path}: neither a folder with turns.csv and pairs.csv nor a file that the form has saved ({error!r:.200})"
        ) from error
    for n, row in enumerate(turns, start=1):
        _take_turn(out, row, f"{path}: turn {n}")
    for n, row in enumerate(pairs, start=1):
        _take_pair(out, row, f"{path}: pair {n}")
    return out


def _rows(path: Path, fields: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            # Spreadsheets of many countries save with semicolons; no column's name has one.
            reader = csv.DictReader(file, delimiter=max(",;\t", key=head.count))
            missing = [f for f in fields if f not in (reader.fieldnames or ())]
            if missing:
                raise AnnotationError(f"{path}: columns {', '.join(missing)} are missing")
            return [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise AnnotationError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise AnnotationError(f"{path}: cannot be read ({error}): save it as CSV in UTF-8") from error


def _value(row: Mapping[str, Any], key: str) -> str:
    return str(row.get(key) if row.get(key) is not None else "").strip()


def _take_turn(out: Annotation, row: Mapping[str, Any], where: str) -> None:
    given = {d: _value(row, d) for d in DIMENSIONS}
    if not any(given.values()):
        return
    scores: dict[str, int | None] = {}
    for d, text in given.items():
        if d == "adaptation" and text.casefold().replace("/", "") == "na":
            scores[d] = None
        elif text in {str(n) for n in range(TOP + 1)}:
            scores[d] = int(text)
        else:
            na = " or NA" if d == "adaptation" else ""
            raise AnnotationError(
                f"{where}: {d} is {text!r}: a whole number from 0 to {TOP}{na} (all five, or none)"
            )
    place = (_value(row, "pair"), _side(row, where), _number(row, where))
    if place in out.turns:
        raise AnnotationError(f"{where}: turn {place[2]} of {place[0]}, dialogue {place[1]}, is scored twice")
    out.turns[place] = Scores(**scores)


def _number(row: Mapping[str, Any], where: str) -> int:
    text = _value(row, "turn")
    if not re.fullmatch("[0-9]{1,6}", text):
        raise AnnotationError(f"{where}: turn is {text!r}, not a turn's number")
    return int(text)


def _side(row: Mapping[str, Any], where: str) -> Side:
    text = _value(row, "dialogue")
    if text == "A":
        return "A"
    if text == "B":
        return "B"
    raise AnnotationError(f"{where}: dialogue is {text!r}, not A or B")


def _take_pair(out: Annotation, row: Mapping[str, Any], where: str) -> None:
    allowed = {"preference": PREFERENCES, **CHECKS}
    given = {k: _value(row, k) for k in allowed}
    for k, text in given.items():
        if text and text not in allowed[k]:
            raise AnnotationError(f"{where}: {k} is {text!r}: one of {', '.join(allowed[k])}, or empty")
    if kept := {k: v for k, v in given.items() if v}:
        if _value(row, "pair") in out.judgements:
            raise AnnotationError(f"{where}: pair {_value(row, 'pair')} is judged twice")
        out.judgements[_value(row, "pair")] = kept

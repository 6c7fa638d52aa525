"""Human tutoring dialogues: MathDial and Eedi, consecutive turns merged, cut at the middle teacher turn.

MathDial is one row a dialogue, ``conversation`` being ``Speaker: (intent)text`` joined by ``|EOM|``. Eedi (Question-Anchored
Tutoring Dialogues) is one row a message: ``InterventionId``, ``QuestionId_DQ``, ``MessageSequence``, ``IsTutor``,
``MessageString``.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maieutic.dialogue import Dialogue, Speaker, Turn
from maieutic.errors import ProblemDataError
from maieutic.evaluation.config import DialogueSet
from maieutic.problems.loaders import _hub_rows, _json_rows, _jsonl_rows, _parquet_rows

_TURN = re.compile(
    r"^\s*(?P<who>[^:\n]{1,60}?)\s*:\s*(?:\((?P<intent>[a-z_ -]+)\))?\s*(?P<text>.*)$", re.DOTALL
)
NO_QUESTION = "(The question is not part of the record; it follows from the conversation.)"


@dataclass(frozen=True, slots=True)
class Said:
    """One utterance of a human dialogue; ``intent``: the annotated move of a teacher turn, "" without one."""

    speaker: Speaker
    text: str
    intent: str = ""


@dataclass(frozen=True, slots=True)
class HumanDialogue:
    """A whole human dialogue about one problem. After :func:`merged`, speakers alternate."""

    id: str
    problem: str
    turns: tuple[Said, ...]
    solution: str = ""
    source: str = ""
    group: str = ""
    """The problem by its id in the set: several dialogues may be about one. "" where the set has none."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A dialogue up to a teacher turn: ``before`` are the merged turns that precede it, ``human`` is what the teacher said."""

    id: str
    problem: str
    solution: str
    source: str
    before: tuple[Said, ...]
    human: str
    group: str = ""

    def dialogue(self, opening: str) -> Dialogue:
        """What a tutor is handed: the scripted opening that states the problem, then ``before``.

        Student turns that open the human dialogue follow the opening in one turn, so that speakers alternate.
        """
        dialogue = Dialogue(self.id, self.problem)
        before = list(self.before)
        if before and before[0].speaker == "student":
            opening = f"{opening}\n\n{before.pop(0).text}"
        dialogue.add(Turn("student", opening, scripted=True))
        for said in before:
            dialogue.add(Turn(said.speaker, said.text, scripted=True))
        return dialogue


def rows_of(
    source: str, *, split: str | None = None, config: str | None = None, offline: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a .jsonl, .json, .csv or .parquet file, or of a Hub data set. Raises :class:`ProblemDataError`."""
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json", ".csv", ".parquet"):
        if not path.is_file():
            raise ProblemDataError(f"{source}: no such file")
        readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
        return readers[path.suffix](path)
    return _hub_rows(source, split, offline, config)


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            yield f"{path}:{number}", dict(row)


def load_dialogues(spec: DialogueSet, *, offline: bool = False) -> list[HumanDialogue]:
    """The dialogues of a set, in its order. ``limit`` counts dialogues."""
    rows = rows_of(spec.source, split=spec.split, config=spec.config, offline=offline)
    if spec.format == "mathdial":
        found = [parse_mathdial(where, row) for where, row in rows]
    else:
        questions = {}
        if spec.questions is not None:
            questions = eedi_questions(rows_of(spec.questions, offline=offline))
        found = parse_eedi(rows, questions)
    return _unique(found[: spec.limit])


def _unique(dialogues: list[HumanDialogue]) -> list[HumanDialogue]:
    """Dialogues of one id told apart: the second becomes ``id#2``."""
    seen: Counter[str] = Counter()
    out = []
    for d in dialogues:
        seen[d.id] += 1
        out.append(d if seen[d.id] == 1 else replace(d, id=f"{d.id}#{seen[d.id]}"))
    return out


def _field(where: str, row: dict[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise ProblemDataError(f"{where}: column {key!r} is missing or empty; there are {', '.join(row)}")
    return row[key]


def parse_mathdial(where: str, row: dict[str, Any]) -> HumanDialogue:
    """One row of MathDial. A speaker other than ``Teacher`` is the student (some releases give the student's name)."""
    turns = []
    for part in str(_field(where, row, "conversation")).split("|EOM|"):
        if not part.strip():
            continue
        m = _TURN.match(part)
        if m is None:
            raise ProblemDataError(f"{where}: column 'conversation': no speaker in {part[:60]!r}")
        teacher = m["who"].strip().lower() in ("teacher", "tutor")
        intent = (m["intent"] or "") if teacher else ""
        text = m["text"] if teacher or not m["intent"] else f"({m['intent']}){m['text']}"
        turns.append(Said("tutor" if teacher else "student", text.strip(), intent))
    solution = str(row.get("ground_truth") or "")
    scenario = f"-{row['scenario']}" if row.get("scenario") is not None else ""
    qid, question = str(row.get("qid", where)), str(_field(where, row, "question"))
    return HumanDialogue(f"{qid}{scenario}", question, tuple(turns), solution, "mathdial", qid)


def parse_eedi(rows: Iterable[tuple[str, dict[str, Any]]], questions: dict[str, str]) -> list[HumanDialogue]:
    """Messages grouped by ``InterventionId`` and ordered by ``MessageSequence``; ``questions`` by ``QuestionId_DQ``."""
    grouped: dict[str, list[tuple[int, Said]]] = {}
    asked: dict[str, str] = {}
    for where, row in rows:
        key = str(_field(where, row, "InterventionId"))
        is_tutor = str(_field(where, row, "IsTutor")).strip().lower() in ("1", "true", "1.0")
        text = str(row.get("MessageString") or "").strip()
        intent = str(row.get("TalkMovePrediction") or "") if is_tutor else ""
        said = Said("tutor" if is_tutor else "student", text, intent.strip("<>"))
        grouped.setdefault(key, []).append((int(float(_field(where, row, "MessageSequence"))), said))
        asked.setdefault(key, str(row.get("QuestionId_DQ") or ""))
    out = []
    for key, messages in grouped.items():
        turns = tuple(said for _, said in sorted(messages, key=lambda m: m[0]) if said.text)
        out.append(HumanDialogue(key, questions.get(asked[key], NO_QUESTION), turns, "", "eedi", asked[key]))
    return out


def eedi_questions(rows: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """Text of each question by ``QuestionId_DQ``: its different parts, in the order of ``Sequence``."""
    parts: dict[str, dict[int, str]] = {}
    for where, row in rows:
        text = str(row.get("Text") or "").strip()
        if text:
            place = int(float(row.get("Sequence") or 0))
            parts.setdefault(str(_field(where, row, "QuestionId_DQ")), {}).setdefault(place, text)
    return {key: "\n".join(t for _, t in sorted(p.items())) for key, p in parts.items()}


def merged(turns: Sequence[Said]) -> list[Said]:
    """Consecutive turns of one speaker as one (joined by a line break; intents by ``+``), empty ones dropped."""
    out: list[Said] = []
    for said in turns:
        if not said.text.strip():
            continue
        if out and out[-1].speaker == said.speaker:
            last = out[-1]
            intents = [i for i in (*last.intent.split("+"), said.intent) if i]
            out[-1] = Said(last.speaker, f"{last.text}\n{said.text}", "+".join(dict.fromkeys(intents)))
        else:
            out.append(said)
    return out


def middle_cut(dialogue: HumanDialogue) -> Cut | None:
    """The dialogue cut at its middle teacher turn: of n merged teacher turns, number n // 2 counted from 0 (the later of two).

    None when there is no teacher turn.
    """
    turns = merged(dialogue.turns)
    teacher = [i for i, said in enumerate(turns) if said.speaker == "tutor"]
    if not teacher:
        return None
    at = teacher[len(teacher) // 2]
    return Cut(
        dialogue.id,
        dialogue.problem,
        dialogue.solution,
        dialogue.source,
        tuple(turns[:at]),
        turns[at].text,
        dialogue.group,
    )

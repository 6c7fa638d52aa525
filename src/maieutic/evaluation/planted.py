"""Transcripts with known faults, as dialogues with labels (``data/planted-faults``, or a file of that format)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import GateName
from maieutic.errors import ProblemDataError
from maieutic.evaluation.conversations import rows_of
from maieutic.problems.schema import Problem, ProblemPair

SCHEMA = 1
CRITERIA: dict[GateName, tuple[str, ...]] = {
    "leakage": ("answer_stated", "method_named", "path_laid_out"),
    "correctness": (
        "false_claim",
        "false_correction",
        "error_left_standing",
        "degenerate",
        "dictated",
        "no_teaching",
    ),
}
"""The criteria of the paper's Appendix C, by gate."""
GATES: tuple[GateName, ...] = ("leakage", "correctness")


@dataclass(frozen=True, slots=True)
class Label:
    """What is true of one gate. ``criterion``, ``quote`` and ``turn`` are empty where it is ok."""

    reject: bool
    criterion: str = ""
    quote: str = ""
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Planted:
    """One transcript with its labels."""

    id: str
    half: str
    pair: ProblemPair
    turns: tuple[Turn, ...]
    labels: dict[GateName, Label]
    note: str = ""

    @property
    def criterion(self) -> str:
        """The planted criteria joined by ``+``; ``clean`` without one."""
        return "+".join(x.criterion for x in self.labels.values() if x.reject) or "clean"

    def dialogue(self) -> Dialogue:
        """The transcript as an ended dialogue."""
        dialogue = Dialogue(self.id, self.pair.source.text)
        dialogue.turns = list(self.turns)
        dialogue.end = "max_turns"
        return dialogue

    def with_turns(self, turns: list[Turn]) -> Planted:
        """The same labels on changed turns (probes); quotes keep standing, turn numbers are dropped."""
        labels = {g: replace(x, turn=None) for g, x in self.labels.items()}
        return replace(self, turns=tuple(turns), labels=labels)


def shipped() -> Path:
    """The file that ships with the package."""
    from maieutic.resources import share_dir

    return share_dir("data") / "planted-faults" / "transcripts.jsonl"


def load_planted(path: str | Path | None = None) -> list[Planted]:
    """All transcripts of a file (None: the shipped one). Raises :class:`ProblemDataError` naming file, row and what is wrong."""
    found: dict[str, Planted] = {}
    for where, row in rows_of(str(path or shipped())):
        item = parse(where, row)
        if item.id in found:
            raise ProblemDataError(f"{where}: the id {item.id!r} is there twice")
        found[item.id] = item
    return list(found.values())


def parse(where: str, row: dict[str, Any]) -> Planted:
    """One row, checked: speakers alternate, a rejection names a criterion of its gate and quotes the tutor turn that it cites."""
    if row.get("schema") != SCHEMA:
        raise ProblemDataError(f"{where}: schema {row.get('schema')!r}: this release reads {SCHEMA}")
    try:
        turns = tuple(Turn(t["speaker"], t["text"], scripted=n == 0) for n, t in enumerate(row["turns"]))
        for gate in GATES:
            if row[gate]["verdict"] not in ("ok", "reject"):
                raise ValueError(f"{gate}: verdict {row[gate]['verdict']!r} is neither ok nor reject")
        if odd := [t.speaker for t in turns if t.speaker not in ("tutor", "student")]:
            raise ValueError(f"speaker {odd[0]!r} is neither tutor nor student")
        labels = {
            gate: Label(
                row[gate]["verdict"] == "reject",
                row[gate]["criterion"],
                row[gate]["quote"],
                row[gate]["turn"],
            )
            for gate in GATES
        }
        pair = ProblemPair(id=row["id"], source=Problem(text=row["problem"], answer=row["answer"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ProblemDataError(
            f"{where}: not a labelled transcript: {type(error).__name__}: {error}"
        ) from None
    for a, b in pairwise(turns):
        if a.speaker == b.speaker:
            raise ProblemDataError(f"{where}: two {a.speaker} turns in a row")
    for gate, label in labels.items():
        if not label.reject:
            continue
        if label.criterion not in CRITERIA[gate]:
            raise ProblemDataError(
                f"{where}: {label.criterion!r} is no criterion of {gate}: {', '.join(CRITERIA[gate])}"
            )
        if (
            not isinstance(label.turn, int)
            or not 0 <= label.turn < len(turns)
            or turns[label.turn].speaker != "tutor"
            or label.quote not in turns[label.turn].visible
        ):
            raise ProblemDataError(f"{where}: {gate}: the quote does not stand in tutor turn {label.turn}")
    return Planted(row["id"], row.get("half", ""), pair, turns, labels, row.get("note", ""))

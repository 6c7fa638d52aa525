"""The two experience fields of the teacher's prompt (Figure 12): retrieved experience and its provenance, filled or empty.

They are the only thing that differs between the prompt-only and the REAT setting (Appendix G.5): the text around them comes from
one file, ``experience.txt`` of the environment, and both settings show it with every student turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maieutic.env.prompts import fill
from maieutic.errors import RecipeError
from maieutic.reat.schema import Experience
from maieutic.resources import find_env

EMPTY = "none"
"""What stands in a field that nothing was retrieved for."""
DEFAULT_ENV = "persona"
"""Whose ``experience.txt`` an environment without one uses."""


def _line(text: str) -> str:
    """Text of a model on one line, without the brackets that close a field."""
    return " ".join(text.replace("[", "(").replace("]", ")").split())


def experience_text(e: Experience) -> str:
    """The value of an experience as the teacher reads it: strategy, pattern, struggle handling, pitfalls, reason."""
    parts = [
        ("Strategy", e.advice),
        ("Pattern of a reply", e.template),
        ("If the student keeps struggling", e.struggle_handling),
        ("Avoid", e.pitfalls),
        ("Why", e.explanation),
    ]
    return " ".join(f"{name}: {_line(text)}" for name, text in parts if text.strip())


def provenance_text(e: Experience) -> str:
    """Where an experience comes from: how it was admitted, what it did since, state and difficulty then; nothing of its problem."""
    p, t = e.provenance, e.tags
    how = (
        f"revised by a mentor in {p.rounds} round(s)" if p.revised else "a reply that passed review as it was"
    )
    if p.parents:
        how += f", merged from {len(p.parents)} experiences"
    state = ", ".join(v.value.replace("_", " ") for v in (t.emotion, t.intent, t.error_type, t.struggle))
    return (
        f"another dialogue about another problem; {how}; review score {p.scores[-1]:.0f} of 100; "
        f"used {e.uses} times, usefulness {e.utility:.0f} of 100. "
        f"The student there: {state}. The difficulty there: {_line(e.query)}"
    )


@dataclass(frozen=True)
class Fields:
    """The block that every student turn carries for the teacher. ``template`` has ``{experience}`` and ``{provenance}``."""

    template: str

    def empty(self) -> str:
        """Both fields empty: the prompt-only setting, and REAT where nothing fits."""
        return fill(self.template, experience=EMPTY, provenance=EMPTY)

    def filled(self, found: Sequence[Experience]) -> str:
        """The fields for what was retrieved, numbered where it is more than one; :meth:`empty` for nothing."""
        if not found:
            return self.empty()
        if len(found) == 1:
            return fill(
                self.template, experience=experience_text(found[0]), provenance=provenance_text(found[0])
            )
        numbered = list(enumerate(found, start=1))
        return fill(
            self.template,
            experience=" ".join(f"({n}) {experience_text(e)}" for n, e in numbered),
            provenance=" ".join(f"({n}) {provenance_text(e)}" for n, e in numbered),
        )


def load_fields(env: str) -> Fields:
    """The fields of an environment (its ``experience.txt``), else of ``persona``. Raises :class:`RecipeError` naming the file."""
    path = Path(find_env(env)) / "experience.txt"
    if not path.is_file():
        path = Path(find_env(DEFAULT_ENV)) / "experience.txt"
    text = path.read_text(encoding="utf-8").strip()
    for name in ("experience", "provenance"):
        if fill(text, experience="", provenance="") == fill(
            text, **{"experience": "", "provenance": "", name: "x"}
        ):
            raise RecipeError(f"{path}: placeholder {{{name}}} is missing")
    if text.startswith("{"):
        raise RecipeError(f"{path}: it must begin with words of its own: by them the fields are found again")
    return Fields(text)

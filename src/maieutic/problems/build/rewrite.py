"""Rewriting: what the rewriter and the solver are asked, and what a reply is read as. No default: a reply that is not the asked
form is a rejection with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from maieutic.dialogue import Message
from maieutic.env.prompts import fill
from maieutic.errors import RecipeError
from maieutic.problems.build.checks import Finding
from maieutic.problems.schema import Problem
from maieutic.thinking import without_thinking

_FILES = ("rewrite_system", "rewrite", "feedback", "solve_system", "solve")
_NEEDS = {
    "rewrite": ("problem", "answer", "solution", "feedback"),
    "feedback": ("reason", "variant"),
    "solve": ("problem",),
}
_FIELD = re.compile(r"^[ \t>*_#]*(PROBLEM|SOLUTION|ANSWER)[ \t*_]*:[ \t*_]*", re.MULTILINE)
_REFUSAL = re.compile(
    r"\b(?:I(?:['’]m| am)? (?:sorry|afraid|unable)|I (?:can(?:no|['’])t|won['’]t|will not|must decline|am not able)|"
    r"as an AI|cannot (?:help|assist|comply))",
    re.IGNORECASE,
)
_NOT_THE_VARIANTS_FAULT = frozenset({"solver_failed", "student_failed"})


@dataclass(frozen=True)
class Prompts:
    """The five texts, placeholders unfilled."""

    rewrite_system: str
    rewrite: str
    feedback: str
    solve_system: str
    solve: str

    def rewriting(self, source: Problem, previous: Rejected | None) -> list[Message]:
        """What the rewriter is asked; ``previous``: the attempt before, with what was wrong."""
        solution = f"\nA solution of the original:\n\n{source.solution}\n" if source.solution else ""
        feedback = ""
        if previous is not None and previous.text and previous.reason not in _NOT_THE_VARIANTS_FAULT:
            feedback = fill(self.feedback, reason=previous.detail, variant=previous.text) + "\n"
        user = fill(
            self.rewrite, problem=source.text, answer=source.answer, solution=solution, feedback=feedback
        )
        return [Message("system", self.rewrite_system), Message("user", user)]

    def solving(self, text: str) -> list[Message]:
        """What the solver is asked: the variant alone."""
        return [Message("system", self.solve_system), Message("user", fill(self.solve, problem=text))]


def load_prompts(folder: str | None = None) -> Prompts:
    """The package's prompts, with the files of ``folder`` in their place. Raises :class:`RecipeError` naming the file."""
    texts = {}
    for name in _FILES:
        shipped = files("maieutic.problems.build") / "prompts" / f"{name}.txt"
        own = Path(folder).expanduser() / f"{name}.txt" if folder else None
        try:
            if own is not None and own.is_file():
                text = own.read_text(encoding="utf-8")
            else:
                text = shipped.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{own}: cannot be read: {error}") from error
        texts[name] = text.rstrip("\r\n")
        if lacking := [p for p in _NEEDS.get(name, ()) if f"{{{p}}}" not in text]:
            raise RecipeError(f"{own or shipped}: placeholder {{{lacking[0]}}} is missing")
    if folder and not Path(folder).expanduser().is_dir():
        raise RecipeError(f"prompts: {folder!r} is no folder")
    return Prompts(**texts)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant as the rewriter states it."""

    text: str
    answer: str
    solution: str | None = None
    seed: int | None = None
    """Of a template's draw."""
    misconceptions: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """One rejected attempt: where, why, and what was rejected."""

    attempt: int
    stage: str
    """``source``, ``rewrite``, ``check``, ``verify``, ``prior``, ``gate``, ``set``."""
    reason: str
    detail: str
    text: str | None = None
    answer: str | None = None


def read_rewrite(reply: str, *, truncated: bool = False) -> Candidate | Finding:
    """The candidate in a rewriter's reply, or why there is none: ``empty``, ``truncated``, ``refused``, ``unparsable``."""
    text = without_thinking(reply).strip()
    if not text:
        return Finding("empty", "the reply is empty")
    marks = list(_FIELD.finditer(text))
    names = [m[1] for m in marks]
    ends = [m.start() for m in marks[1:]] + [len(text)]
    # without a mark there is one end too many, and no field
    fields = {m[1]: _strip(text[m.end() : end]) for m, end in zip(marks, ends, strict=False)}
    complete = all(fields.get(n) for n in ("PROBLEM", "ANSWER"))
    if complete and not truncated:
        if len(set(names)) < len(names):
            return Finding("unparsable", f"the reply has {', '.join(names)}: more than one variant")
        answer = fields["ANSWER"].splitlines()[0].strip()
        return Candidate(fields["PROBLEM"], answer, fields.get("SOLUTION") or None)
    if truncated:
        return Finding("truncated", "the reply was cut off at the token limit")
    if not complete and _REFUSAL.search(text[:400]) and "PROBLEM" not in names:
        return Finding("refused", f"the rewriter refuses: {text[:120]!r}")
    return Finding(
        "unparsable",
        f"the reply has no {' and no '.join(n for n in ('PROBLEM', 'ANSWER') if not fields.get(n))}",
    )


def _strip(text: str) -> str:
    # what a server's neutralised prompt may have taught the model to copy
    return text.replace("\u2060", "").strip().strip("*").strip()

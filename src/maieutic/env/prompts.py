"""An environment's text: ``envs/<name>/env.yaml`` and the prompt files beside it.

A prompt file is plain text. ``{name}`` is a placeholder, ``{{`` and ``}}`` are literal braces, any other brace stands for
itself (``\\boxed{}`` needs no care). What is put in is never looked at again, so braces in a problem are just text.
Line ends at the end of a file are dropped.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maieutic import yaml12
from maieutic.config import EnvSpec
from maieutic.env.base import GateName
from maieutic.errors import RecipeError
from maieutic.problems.schema import prompt_hash
from maieutic.resources import find_env

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NOT_IN_ENV_YAML = ("name", "kind", "options")


@dataclass(frozen=True)
class _File:
    required: frozenset[str]
    optional: frozenset[str] = frozenset()


_FILES: dict[str, _File] = {
    "tutor.txt": _File(frozenset({"end_token"}), frozenset({"problem", "end_after"})),
    "tutor_solution.txt": _File(frozenset({"solution"})),
    "student.txt": _File(frozenset({"problem"})),
    "opening.txt": _File(frozenset({"problem"})),
    "post_test.txt": _File(frozenset({"problem"})),
    "post_test_same.txt": _File(frozenset({"problem"})),
    "cold.txt": _File(frozenset({"problem"})),
    "judge/leakage.txt": _File(frozenset({"problem", "answer", "transcript"})),
    "judge/correctness.txt": _File(frozenset({"problem", "answer", "transcript"})),
}


@dataclass(frozen=True)
class EnvTemplates:
    """The prompts of one environment, placeholders unfilled, and the defaults of its ``env.yaml``."""

    name: str
    tutor: str
    tutor_solution: str
    """Appended to the tutor's system prompt where the environment lets it see the solution."""
    student: str
    """The student's system prompt; it names the *source* problem, in the post-test too."""
    opening_turn: str
    post_test: str
    post_test_same: str
    cold: str
    rubrics: Mapping[GateName, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cold_hash(self) -> str:
        """Identifies the prompt of a cold attempt (see :class:`~maieutic.problems.schema.StudentKey`)."""
        return prompt_hash(self.student, self.cold)

    def tutor_system(self, env: EnvSpec, problem: str, solution: str | None = None) -> str:
        """The tutor's system prompt. ``solution`` (of ``Dialogue.solution``) is appended when it is not None."""
        text = fill(self.tutor, end_token=env.end_token, end_after=str(env.end_after), problem=problem)
        return text if solution is None else f"{text}\n\n{fill(self.tutor_solution, solution=solution)}"

    def student_system(self, problem: str) -> str:
        """The student's system prompt about ``problem``."""
        return fill(self.student, problem=problem)

    def opening(self, problem: str) -> str:
        """The scripted first student turn, which states the problem."""
        return fill(self.opening_turn, problem=problem)

    def question(self, problem: str, *, same: bool) -> str:
        """The last user message of the post-test: the conversation is over, here is a new problem (``same``: the old one)."""
        return fill(self.post_test_same if same else self.post_test, problem=problem)

    def cold_question(self, problem: str) -> str:
        """The user message of a cold attempt."""
        return fill(self.cold, problem=problem)

    def rubric(self, gate: GateName, *, problem: str, answer: str, transcript: str) -> str:
        """The prompt of an LLM judge for one gate; ``transcript`` is :func:`maieutic.dialogue.judge_view`."""
        return fill(self.rubrics[gate], problem=problem, answer=answer, transcript=transcript)

    def resolve(self, spec: EnvSpec) -> EnvSpec:
        """``spec`` with the values of ``env.yaml`` wherever the recipe set none."""
        explicit = {key: getattr(spec, key) for key in spec.model_fields_set}
        try:
            return EnvSpec.model_validate({**self.defaults, **explicit})
        except ValidationError as error:
            raise RecipeError(f"environment {self.name!r} with this recipe: {_first(error)}") from error


def fill(template: str, **values: str) -> str:
    """Put values in for placeholders, in one pass: what is put in is not looked at again."""

    def put(match: re.Match[str]) -> str:
        name = match.group(1)
        return values[name] if name else match.group(0)[0]

    return _PLACEHOLDER.sub(put, template)


def load_env(name: str | Path) -> EnvTemplates:
    """The templates of a shipped environment, or of a folder of the user's own.

    Raises :class:`RecipeError` naming the file for a missing or empty file, an unknown key of ``env.yaml``, a value that
    does not fit, a placeholder that is unknown or absent.
    """
    folder = find_env(name)
    texts = {file: _read_template(folder, file, allowed) for file, allowed in _FILES.items()}
    return EnvTemplates(
        name=folder.name,
        tutor=texts["tutor.txt"],
        tutor_solution=texts["tutor_solution.txt"],
        student=texts["student.txt"],
        opening_turn=texts["opening.txt"],
        post_test=texts["post_test.txt"],
        post_test_same=texts["post_test_same.txt"],
        cold=texts["cold.txt"],
        rubrics={
            "leakage": texts["judge/leakage.txt"],
            "correctness": texts["judge/correctness.txt"],
        },
        defaults=_read_defaults(folder / "env.yaml"),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error


def _read_template(folder: Path, file: str, allowed: _File) -> str:
    path = folder / file
    if not path.is_file():
        raise RecipeError(f"{path}: missing; an environment has env.yaml and {', '.join(_FILES)}")
    text = _read(path).rstrip("\r\n")
    if not text.strip():
        raise RecipeError(f"{path}: empty")
    found = {m.group(1) for m in _PLACEHOLDER.finditer(text) if m.group(1)}
    valid = allowed.required | allowed.optional
    for name in sorted(found - valid):
        near = difflib.get_close_matches(name, valid, n=1)
        hint = f"did you mean {{{near[0]}}}?" if near else f"valid here: {_braced(valid)}"
        raise RecipeError(
            f"{path}: unknown placeholder {{{name}}}; {hint} (write {{{{ and }}}} for literal braces)"
        )
    if missing := allowed.required - found:
        raise RecipeError(f"{path}: placeholder {_braced(missing)} is missing")
    return text


def _braced(names: frozenset[str] | set[str]) -> str:
    return ", ".join(f"{{{n}}}" for n in sorted(names))


def _read_defaults(path: Path) -> dict[str, Any]:
    data, lines = yaml12.load(_read(path), str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a mapping of keys to values is expected, this is {type(data).__name__}")
    valid = [key for key in EnvSpec.model_fields if key not in _NOT_IN_ENV_YAML]
    for key in data:
        if key not in valid:
            near = difflib.get_close_matches(str(key), valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(valid)}"
            raise RecipeError(f"{path}:{lines[key,]}: unknown key {key!r} (value {data[key]!r}); {hint}")
    try:
        EnvSpec.model_validate(data, strict=True)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_first(error)}") from error
    return data


def _first(error: ValidationError) -> str:
    item = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in item["loc"])
    return f"{key}: {item['input']!r}: {item['msg']}" if key else item["msg"].removeprefix("Value error, ")

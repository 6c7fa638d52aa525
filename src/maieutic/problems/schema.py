"""The problem pair: a source problem that is tutored and its near-transfer variant that is tested."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from maieutic.errors import SolveRateError


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which no tokenizer takes") from None
    return text


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank")
    return text


Unicode = Annotated[str, AfterValidator(_unicode)]
Filled = Annotated[Unicode, AfterValidator(_filled)]
"""Text that is more than white space."""


class StudentKey(BaseModel):
    """Whose solve rate: a rate belongs to one student model, one cold prompt and one sampling."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    prompt_hash: str
    """First 12 hex digits of the SHA-256 of the rendered cold-prompt templates (system and question, placeholders unfilled)."""
    temperature: float
    top_p: float = 1.0
    max_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.model}|{self.prompt_hash}|T={self.temperature:g}|p={self.top_p:g}|max={self.max_tokens}"
        )


def prompt_hash(*templates: str) -> str:
    """Hash that identifies a student's cold prompt, for :class:`StudentKey`."""
    return hashlib.sha256("\x1f".join(templates).encode()).hexdigest()[:12]


class SolveRate(BaseModel):
    """Share of a student's cold samples that are right, and how many samples were graded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(ge=0, le=1)
    n: int = Field(ge=1)


class Problem(BaseModel):
    """One problem with its answer; ``rates`` maps ``str(StudentKey)`` to the measured solve rate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: Filled
    answer: Filled
    solution: Unicode | None = None
    rates: dict[str, SolveRate] = Field(default_factory=dict)

    def rate(self, key: StudentKey) -> SolveRate:
        """The solve rate for this very student. Raises :class:`SolveRateError` naming what there is instead."""
        found = self.rates.get(str(key))
        if found is None:
            have = ", ".join(sorted(self.rates)) or "none"
            raise SolveRateError(
                f"no solve rate for student {key} on problem {self.text[:60]!r} (measured: {have}); "
                "measure it with `maieutic data measure RECIPE`"
            )
        return found


class ProblemPair(BaseModel):
    """A source problem and its transfer variant (None where none could be made: see ``missing_variant``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Filled
    source: Problem
    transfer: Problem | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)
    """Where it comes from: data set, row, generator, template, seed, model, flags."""

    def tested(self, transfer: bool) -> Problem:
        """The problem of the post-test: the transfer variant, or the source when ``transfer`` is off or there is no variant."""
        return self.transfer if transfer and self.transfer is not None else self.source

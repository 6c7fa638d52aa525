"""From the JSON of a reply to a record, strictly: a wrong key, type, value or a contradiction is :class:`Unknown` with its
reason.

Reasons: ``missing_field``, ``wrong_type``, ``unknown_tag``, ``out_of_range``, ``blank_field``, ``contradiction``. Keys that
were not asked for are ignored.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, TypeVar, get_args

from maieutic.reat.leaks import find_leaks, surface
from maieutic.reat.merging import MergedText
from maieutic.reat.schema import (
    CAPS,
    DIMENSIONS,
    TOP,
    Critique,
    Emotion,
    ErrorType,
    Failure,
    Intent,
    Observation,
    Quality,
    Revision,
    Scores,
    StateTags,
    Struggle,
    Unknown,
)

E = TypeVar("E", bound=StrEnum)
STRONG_FROM, WEAK_TO = 50.0, 80.0
"""A critique that calls a response strong below the first score, or weak above the second, contradicts itself: the scores
were not meant. The band between is wide on purpose; only plain contradictions void a reply."""
_QUALITIES: tuple[Quality, ...] = get_args(Quality)


class _Bad(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.unknown = Unknown(reason=reason, detail=detail)


def _get(data: dict[str, Any], key: str) -> Any:
    if key not in data:
        raise _Bad("missing_field", key)
    return data[key]


def _text(data: dict[str, Any], key: str, *, filled: bool = False) -> str:
    value = _get(data, key)
    if not isinstance(value, str):
        raise _Bad("wrong_type", f"{key} is {type(value).__name__}, not text")
    if filled and not value.strip():
        raise _Bad("blank_field", key)
    # Half a surrogate pair is valid JSON and no text that a tokenizer or database takes.
    return value.encode("utf-8", "replace").decode().strip()


def _tag(data: dict[str, Any], key: str, kind: type[E]) -> E:
    value = _text(data, key)
    slug = re.sub(r"[^a-z]+", "_", value.casefold()).strip("_")
    slug = "not_applicable" if slug in ("n_a", "na") else slug
    if slug not in {m.value for m in kind}:
        raise _Bad("unknown_tag", f"{key}: {value[:60]!r}")
    return kind(slug)


def _score(data: dict[str, Any], key: str) -> int | None:
    value = _get(data, key)
    if value is None and key == "adaptation":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Bad("wrong_type", f"{key} is {value!r:.60}, not a score")
    if value != int(value) if abs(value) < 1e9 else True:
        raise _Bad("out_of_range", f"{key} is {value!r:.60}")
    if not 0 <= value <= TOP:
        raise _Bad("out_of_range", f"{key} is {value!r:.60}")
    return int(value)


def read_observation(data: dict[str, Any]) -> Observation | Unknown:
    """The Observer's record. A meaningful turn needs its diagnosis, evidence and summary."""
    try:
        return _observation(data)
    except _Bad as bad:
        return bad.unknown


def _observation(data: dict[str, Any]) -> Observation:
    meaningful = _get(data, "meaningful")
    if not isinstance(meaningful, bool):
        raise _Bad("wrong_type", f"meaningful is {meaningful!r:.60}, not true or false")
    return Observation(
        meaningful=meaningful,
        tags=StateTags(
            emotion=_tag(data, "emotion", Emotion),
            intent=_tag(data, "intent", Intent),
            error_type=_tag(data, "error_type", ErrorType),
            struggle=_tag(data, "struggle_status", Struggle),
        ),
        error_detail=_text(data, "error_detail"),
        struggle_reason=_text(data, "struggle_reason", filled=meaningful),
        teacher_evidence=_text(data, "teacher_evidence", filled=meaningful),
        interaction_summary=_text(data, "interaction_summary", filled=meaningful),
    )


def read_critique(data: dict[str, Any]) -> Critique | Unknown:
    """The Critic's record; ``contradiction`` when its overall word and its scores exclude each other."""
    try:
        return _critique(data)
    except _Bad as bad:
        return bad.unknown


def _critique(data: dict[str, Any]) -> Critique:
    scores = Scores(**{d: _score(data, d) for d in DIMENSIONS})
    failures = _get(data, "failures")
    if not isinstance(failures, list) or not all(isinstance(f, str) for f in failures):
        raise _Bad("wrong_type", "failures is no list of names")
    named: list[Failure] = []
    for failure in CAPS:
        if failure in failures:
            named.append(failure)
    strangers = set(failures) - set(CAPS)
    if strangers:
        raise _Bad("unknown_tag", f"failures: {sorted(strangers)[0][:60]!r}")
    said = _text(data, "quality").casefold()
    quality = next((q for q in _QUALITIES if q == said), None)
    if quality is None:
        raise _Bad("unknown_tag", f"quality: {said[:60]!r}")
    critique = Critique(
        given=scores,
        failures=tuple(named),
        quality=quality,
        reasons=_text(data, "reasons", filled=True),
        improvements=_text(data, "improvements"),
    )
    s = critique.score
    if (quality == "strong" and s < STRONG_FROM) or (quality == "weak" and s > WEAK_TO):
        raise _Bad("contradiction", f"quality is {quality} at a score of {s:.1f}")
    return critique


def read_revision(data: dict[str, Any]) -> Revision | Unknown:
    """The Mentor's record; all six texts are needed."""
    try:
        return Revision(**{name: _text(data, name, filled=True) for name in Revision.model_fields})
    except _Bad as bad:
        return bad.unknown


def read_query(data: dict[str, Any]) -> str | Unknown:
    """The Rewriter's sentence, in one line."""
    try:
        return " ".join(_text(data, "query", filled=True).split())
    except _Bad as bad:
        return bad.unknown


def read_merged(data: dict[str, Any]) -> MergedText | Unknown:
    """A merged experience; ``leak`` for a query that holds a number, a variable or a formula."""
    try:
        got = MergedText(**{name: _text(data, name, filled=True) for name in MergedText.model_fields})
    except _Bad as bad:
        return bad.unknown
    leaks = find_leaks(got.query, surface(""), strict=True)
    if leaks:
        return Unknown(reason="leak", detail=leaks[0].text)
    return got


def read_reflection(data: dict[str, Any]) -> tuple[Observation, Critique, Revision, Critique] | Unknown:
    """The four parts of a merged call."""
    parts = []
    for name, read in (
        ("observation", read_observation),
        ("critique", read_critique),
        ("revision", read_revision),
        ("revised_critique", read_critique),
    ):
        inner = data.get(name)
        if not isinstance(inner, dict):
            return Unknown(reason="missing_field", detail=name)
        value = read(inner)
        if isinstance(value, Unknown):
            return value.model_copy(update={"detail": f"{name}: {value.detail}"})
        parts.append(value)
    observation, critique, revision, again = parts
    assert isinstance(observation, Observation) and isinstance(revision, Revision)
    assert isinstance(critique, Critique) and isinstance(again, Critique)
    return observation, critique, revision, again

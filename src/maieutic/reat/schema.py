"""The records of REAT: a student's state, what the roles say about a turn, and the experience that is kept (torch-free).

Sources in the paper (arXiv 2609.29804): the state schema is its Table 5, the rubric its Appendix B, the experience its
equation 9. A role that fails gives :class:`Unknown`; no field of a record ever has a made-up value.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Record(BaseModel):
    """Base of all records: frozen, unknown keys are errors, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Unknown(Record):
    """A role gave no usable answer. ``reason`` is a short slug that is counted (``malformed``, ``out_of_range``, …)."""

    reason: str
    detail: str = ""
    """For people: the start of the reply, or the endpoint's error."""


# ---- the student's state (Table 5) -----------------------------------------------------------------------------------


class Emotion(StrEnum):
    CONFUSED = "confused"
    FRUSTRATED = "frustrated"
    NEUTRAL = "neutral"
    CONFIDENT = "confident"
    CURIOUS = "curious"
    RELIEVED = "relieved"


class Intent(StrEnum):
    DEBUGGING = "debugging"
    GUESSING = "guessing"
    ASK_ANSWER = "ask_answer"
    CONFIRM_UNDERSTANDING = "confirm_understanding"
    ASK_CONCEPT = "ask_concept"
    ASK_EXPLANATION = "ask_explanation"
    REQUEST_HINT = "request_hint"
    OFF_TOPIC = "off_topic"


class ErrorType(StrEnum):
    CONCEPT_ERROR = "concept_error"
    LOGIC_ERROR = "logic_error"
    CALCULATION_ERROR = "calculation_error"
    CARELESS = "careless"
    NO_ERROR = "no_error"
    NOT_APPLICABLE = "not_applicable"


class Struggle(StrEnum):
    FIRST_ATTEMPT = "first_attempt"
    REPEATED_ERROR = "repeated_error"
    PERSISTENT_CONFUSION = "persistent_confusion"
    PROGRESSING = "progressing"
    REGRESSION = "regression"
    NOT_APPLICABLE = "not_applicable"


class StateTags(Record):
    """The coarse state c of equation 9: hashable, four closed sets."""

    emotion: Emotion
    intent: Intent
    error_type: ErrorType
    struggle: Struggle

    def key(self) -> str:
        """``emotion|intent|error_type|struggle``: stable over releases, fit for a database column."""
        return f"{self.emotion.value}|{self.intent.value}|{self.error_type.value}|{self.struggle.value}"

    @classmethod
    def from_key(cls, key: str) -> Self:
        """Inverse of :meth:`key`. Raises ValueError for anything else."""
        parts = key.split("|")
        if len(parts) != 4:
            raise ValueError(f"{key!r} is no state key: four values joined by '|' are expected")
        return cls(
            emotion=Emotion(parts[0]),
            intent=Intent(parts[1]),
            error_type=ErrorType(parts[2]),
            struggle=Struggle(parts[3]),
        )


class Observation(Record):
    """The Observer's record of one turn (equation 3, Figure 8)."""

    meaningful: bool
    """The turn is pedagogically meaningful (no greeting, no thanks after the end)."""
    tags: StateTags
    error_detail: str
    """What the student gets wrong, in abstract words; empty where nothing is wrong."""
    struggle_reason: str
    """Why the student struggles, over the dialogue so far."""
    teacher_evidence: str
    """What the tutor did in this turn, without judging it."""
    interaction_summary: str

    @property
    def diagnosis(self) -> str:
        """The diagnostic text of Algorithm 1, line 2: what is rewritten into a query, and the fallback when that fails."""
        return " ".join(t for t in (self.error_detail.strip(), self.struggle_reason.strip()) if t)


# ---- the Critic (equation 4, Appendix B) ------------------------------------------------------------------------------

Score = Annotated[int, Field(ge=0, le=4)]
Dimension = Literal["scaffolding", "attribution", "empathy", "focus", "adaptation"]
DIMENSIONS: tuple[Dimension, ...] = ("scaffolding", "attribution", "empathy", "focus", "adaptation")
Failure = Literal["answer_given", "pseudo_scaffolding", "misdiagnosis", "fake_empathy"]
CAPS: dict[Failure, tuple[Dimension, int]] = {
    "answer_given": ("scaffolding", 0),
    "pseudo_scaffolding": ("scaffolding", 2),
    "misdiagnosis": ("attribution", 1),
    "fake_empathy": ("empathy", 2),
}
"""Major failures and the highest score that their dimension may then have. The paper names the last three and says that they
cap, not where: the caps here are the levels at which its rubric describes the same behaviour."""
Quality = Literal["weak", "mediocre", "strong"]
TOP = 4
"""Highest score of a dimension."""


class Scores(Record):
    """Five scores, 0 to 4. ``adaptation`` is None (not applicable) where the history is too short to judge it."""

    scaffolding: Score
    attribution: Score
    empathy: Score
    focus: Score
    adaptation: Score | None

    def applicable(self) -> dict[Dimension, int]:
        """The scores that count, by dimension; N/A is left out, never replaced."""
        values = {d: getattr(self, d) for d in DIMENSIONS}
        return {d: v for d, v in values.items() if v is not None}


def capped(scores: Scores, failures: tuple[Failure, ...]) -> Scores:
    """The scores after the capping rules: each failure bounds its dimension (:data:`CAPS`), none ever raises one."""
    values = scores.model_dump()
    for failure in failures:
        dimension, cap = CAPS[failure]
        if values[dimension] is not None:
            values[dimension] = min(values[dimension], cap)
    return Scores(**values)


def score_100(scores: Scores) -> float:
    """S: the mean of the applicable dimensions, scaled to 0-100."""
    values = list(scores.applicable().values())
    return 100.0 * sum(values) / (TOP * len(values))


class Critique(Record):
    """What the Critic says about a response: scores as given, the major failures it saw, and why."""

    given: Scores
    """As the Critic wrote them, before capping."""
    failures: tuple[Failure, ...] = ()
    quality: Quality
    """The Critic's overall word. It decides nothing (routing is by rule); one that contradicts the scores voids the reply."""
    reasons: str
    improvements: str = ""

    @property
    def scores(self) -> Scores:
        """v: the scores that count, after :func:`capped`."""
        return capped(self.given, self.failures)

    @property
    def score(self) -> float:
        """S in [0, 100], after capping, over the applicable dimensions."""
        return score_100(self.scores)

    @property
    def lowest(self) -> int:
        """min(v) over the applicable dimensions, after capping."""
        return min(self.scores.applicable().values())

    @property
    def was_capped(self) -> bool:
        """A rule lowered a score that the Critic had given in spite of the failure it saw."""
        return self.scores != self.given


# ---- the Mentor and the experience ------------------------------------------------------------------------------------


class Revision(Record):
    """The Mentor's output (equation 6, Figure 10): a response and what can be learnt from it."""

    response: str
    """The improved response; the original one where nothing had to be revised."""
    template: str
    """The response as a pattern, without anything of the problem."""
    advice: str
    pitfalls: str
    struggle_handling: str
    explanation: str


RewriteKind = Literal["rewritten", "fallback", "off", "merged"]


class Provenance(Record):
    """Where an experience comes from and how it was admitted."""

    transcript: str
    """Name of the transcript file."""
    episode_id: str
    turn: Annotated[int, Field(ge=0)]
    """Index of the tutor turn in the dialogue."""
    problem_id: str = ""
    revised: bool
    rounds: Annotated[int, Field(ge=0)]
    """Inspections of revised responses (0: the original response passed)."""
    scores: tuple[float, ...]
    """S of the original response, then of each revision."""
    rewrite: RewriteKind
    """Whether the query is the rewriter's, the fallback text, or the raw diagnosis (rewriting off)."""
    parents: tuple[str, ...] = ()
    """Ids of the experiences that were merged into this one."""


class UtilityEvent(Record):
    """One update of the utility (equation 14)."""

    score: float
    """S_eval that came in."""
    before: float
    after: float
    source: str = ""
    """What was scored, such as an episode and turn."""


class Experience(Record):
    """One entry of the repository: key ⟨tags, query⟩ → value, with its utility (equation 9)."""

    id: str
    """:func:`experience_id` of key, value and origin; utility, uses and history do not change it."""
    tags: StateTags
    query: str
    """The problem-agnostic text that is embedded."""
    template: str
    advice: str
    pitfalls: str
    struggle_handling: str
    explanation: str
    utility: float
    """U in [0, 100]; at first the admission score."""
    uses: Annotated[int, Field(ge=0)] = 0
    history: tuple[UtilityEvent, ...] = ()
    enabled: bool = True
    provenance: Provenance

    @model_validator(mode="after")
    def _id_of_content(self) -> Self:
        want = experience_id(self.model_dump(mode="json"))
        if self.id != want:
            raise ValueError(f"id {self.id!r} does not belong to this content ({want}): use Experience.make")
        return self

    @classmethod
    def make(cls, *, utility: float, **content: Any) -> Self:
        """A new experience with the id of its content (fields as in the class, without id, uses, history, enabled)."""
        plain = {k: v.model_dump(mode="json") if isinstance(v, BaseModel) else v for k, v in content.items()}
        return cls(id=experience_id(plain), utility=utility, **content)


_HASHED = ("tags", "query", "template", "advice", "pitfalls", "struggle_handling", "explanation")
_ORIGIN = ("episode_id", "turn", "parents")


def experience_id(content: dict[str, Any]) -> str:
    """24 hex digits of SHA-256 over key, value and origin (episode, turn, parents) of a JSON-ready experience.

    The origin is part of it, so that one turn has one id (admitting it twice is recognised) and two turns
    that taught the same have two.
    """
    parts: dict[str, Any] = {name: content[name] for name in _HASHED}
    parts["origin"] = [
        list(v) if isinstance(v := content["provenance"].get(k, ()), tuple) else v for k in _ORIGIN
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:24]


Admission = Literal["inserted", "merged", "duplicate"]


class Sink(Protocol):
    """What takes distilled experiences: the repository (Algorithm 2, lines 4 to 16)."""

    async def admit(self, experience: Experience, score: float) -> Admission:
        """Keep, merge or discard one experience that passed the gate with ``score``.

        Must be *idempotent by id*: an id that was admitted before (also by a process that was killed right after) changes
        nothing and returns what it returned then. Distillation resumes rely on it. Calls come one at a time, in the order
        of the transcripts.
        """
        ...

"""Which student states are closely related, and the steps in which a filter by state is widened (Algorithm 1, line 7).

The paper filters by "same or closely related student-state conditions" and does not say which are related. The tables below
are this project's answer; ``docs/reat.md`` shows them with the reasons. They are symmetric, and *not* transitive: related
means one step apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from maieutic.reat.schema import Emotion, ErrorType, Intent, StateTags, Struggle


class Step(StrEnum):
    """How far a filter by state reaches; every step holds the ones before it."""

    SAME = "same"
    """All four cues are the same."""
    AFFECT = "affect"
    """Error type and struggle status are the same; emotion and intent are the same or related."""
    RELATED = "related"
    """Each cue is the same or related: the "same or closely related" of the paper."""
    CORE = "core"
    """Error type and struggle status are the same or related; emotion and intent do not count."""
    ANY = "any"
    """No filter. Never reached by widening: only the ablation without a state filter uses it."""


WIDENING: tuple[Step, ...] = (Step.SAME, Step.AFFECT, Step.RELATED, Step.CORE)
"""The order of widening. An experience for another kind of error is not offered, however near its text."""

EMOTIONS: frozenset[frozenset[Emotion]] = frozenset(
    frozenset(pair)
    for pair in (
        (Emotion.CONFUSED, Emotion.FRUSTRATED),
        (Emotion.CONFUSED, Emotion.NEUTRAL),
        (Emotion.NEUTRAL, Emotion.CURIOUS),
        (Emotion.NEUTRAL, Emotion.RELIEVED),
        (Emotion.CONFIDENT, Emotion.CURIOUS),
        (Emotion.CONFIDENT, Emotion.RELIEVED),
    )
)
INTENTS: frozenset[frozenset[Intent]] = frozenset(
    frozenset(pair)
    for pair in (
        (Intent.GUESSING, Intent.ASK_ANSWER),
        (Intent.GUESSING, Intent.CONFIRM_UNDERSTANDING),
        (Intent.ASK_ANSWER, Intent.REQUEST_HINT),
        (Intent.REQUEST_HINT, Intent.ASK_EXPLANATION),
        (Intent.ASK_EXPLANATION, Intent.ASK_CONCEPT),
        (Intent.DEBUGGING, Intent.CONFIRM_UNDERSTANDING),
        (Intent.DEBUGGING, Intent.ASK_EXPLANATION),
    )
)
ERRORS: frozenset[frozenset[ErrorType]] = frozenset(
    frozenset(pair)
    for pair in (
        (ErrorType.CONCEPT_ERROR, ErrorType.LOGIC_ERROR),
        (ErrorType.CALCULATION_ERROR, ErrorType.CARELESS),
        (ErrorType.NO_ERROR, ErrorType.NOT_APPLICABLE),
    )
)
STRUGGLES: frozenset[frozenset[Struggle]] = frozenset(
    frozenset(pair)
    for pair in (
        (Struggle.FIRST_ATTEMPT, Struggle.NOT_APPLICABLE),
        (Struggle.FIRST_ATTEMPT, Struggle.PROGRESSING),
        (Struggle.REPEATED_ERROR, Struggle.PERSISTENT_CONFUSION),
        (Struggle.REPEATED_ERROR, Struggle.REGRESSION),
        (Struggle.PERSISTENT_CONFUSION, Struggle.REGRESSION),
    )
)

STATES: tuple[StateTags, ...] = tuple(
    StateTags(emotion=e, intent=i, error_type=x, struggle=s)
    for e, i, x, s in product(Emotion, Intent, ErrorType, Struggle)
)
"""All 6 · 8 · 6 · 6 = 1,728 states."""
CODES: Mapping[StateTags, int] = {state: code for code, state in enumerate(STATES)}
"""The place of a state in :data:`STATES`."""


def related(a: StateTags, b: StateTags, step: Step) -> bool:
    """Whether a filter for state ``a`` lets an experience of state ``b`` through at ``step``. Symmetric in a and b."""
    error = a.error_type == b.error_type
    struggle = a.struggle == b.struggle
    near_error = error or frozenset((a.error_type, b.error_type)) in ERRORS
    near_struggle = struggle or frozenset((a.struggle, b.struggle)) in STRUGGLES
    near_affect = (a.emotion == b.emotion or frozenset((a.emotion, b.emotion)) in EMOTIONS) and (
        a.intent == b.intent or frozenset((a.intent, b.intent)) in INTENTS
    )
    match step:
        case Step.SAME:
            return a == b
        case Step.AFFECT:
            return error and struggle and near_affect
        case Step.RELATED:
            return near_error and near_struggle and near_affect
        case Step.CORE:
            return near_error and near_struggle
        case Step.ANY:
            return True


def _relation(values: type[StrEnum], pairs: Iterable[frozenset[Any]]) -> npt.NDArray[np.bool_]:
    """[v, v] bool: row and column are the same or related values of a cue."""
    order = list(values)
    near = np.eye(len(order), dtype=bool)
    for a, b in (tuple(pair) for pair in pairs):
        near[order.index(a), order.index(b)] = near[order.index(b), order.index(a)] = True
    return near


_CUES: tuple[tuple[str, list[Any], npt.NDArray[np.bool_]], ...] = (
    ("emotion", list(Emotion), _relation(Emotion, EMOTIONS)),
    ("intent", list(Intent), _relation(Intent, INTENTS)),
    ("error_type", list(ErrorType), _relation(ErrorType, ERRORS)),
    ("struggle", list(Struggle), _relation(Struggle, STRUGGLES)),
)


@lru_cache(maxsize=4096)
def admitted_codes(state: StateTags, step: Step) -> npt.NDArray[np.bool_]:
    """A read-only mask over :data:`STATES` (bool, [1728]): :func:`related` of ``state`` and every state, at ``step``."""
    mask = np.ones((1,), dtype=bool)
    for place, (name, values, near) in enumerate(_CUES):
        own = values.index(getattr(state, name))
        affect = place < 2
        if step is Step.ANY or (step is Step.CORE and affect):
            cue = np.ones(len(values), dtype=bool)
        elif step is Step.SAME or (step is Step.AFFECT and not affect):
            cue = np.arange(len(values)) == own
        else:
            cue = near[own]
        mask = (mask[:, None] & cue).reshape(-1)
    mask.flags.writeable = False
    return mask

"""State-aware retrieval (Algorithm 1): filter by state, widen in stated steps, rank by cosine, keep the top k above τ.

Every candidate comes back with the reason why it was taken or dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from maieutic.config import Count, Section
from maieutic.reat.index import DISABLED, ExperienceIndex, Rows
from maieutic.reat.records import Database
from maieutic.reat.related_states import WIDENING, Step, admitted_codes
from maieutic.reat.schema import Experience, StateTags
from maieutic.seeds import derive

Cosine = Annotated[float, Field(ge=-1, le=1)]


class RetrievalSettings(Section):
    """How experiences are looked up. The last two are ablations."""

    threshold: Cosine = 0.55
    """τ: a candidate is taken at this cosine or above (compared in float32)."""
    top_k: Count = 1
    first_step: Step = Step.SAME
    """Where the filter begins. ``related`` takes the same and the closely related states together, as in the paper's line 7."""
    widen: Literal["empty", "below", "never"] = "empty"
    """When to take the next step: when no enabled experience passes the filter; ``below``: also when none of those that pass
    reaches the threshold; or never."""
    no_state_filter: bool = False
    """Ablation: every enabled experience is a candidate."""
    random_in_state: int | None = None
    """Ablation: a seed. ``top_k`` candidates are drawn instead of ranked, whatever their cosine; the draw depends on the
    seed, the state, the query and the caller's ``salt`` alone."""

    @model_validator(mode="after")
    def _one_ablation(self) -> Self:
        if self.no_state_filter and self.random_in_state is not None:
            raise ValueError("random_in_state draws among the states that match: not with no_state_filter")
        if self.first_step is Step.ANY:
            raise ValueError(
                "first_step: any is the ablation no_state_filter; widening begins at core or before"
            )
        return self

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that may be taken, in order."""
        if self.no_state_filter:
            return (Step.ANY,)
        first = WIDENING.index(self.first_step)
        return WIDENING[first : first + 1] if self.widen == "never" else WIDENING[first:]


@dataclass(frozen=True)
class Query:
    """What is looked for. ``source``: the rewriter's text, the diagnosis in its place, or nothing to look for."""

    text: str
    source: Literal["rewritten", "fallback", "none"]

    @classmethod
    def of(cls, rewritten: str | None, diagnosis: str) -> Query:
        """Lines 3 to 6: the rewritten text; the diagnosis where rewriting failed (None) or gave a blank; else none."""
        if rewritten is not None and rewritten.strip():
            return cls(rewritten.strip(), "rewritten")
        if diagnosis.strip():
            return cls(diagnosis.strip(), "fallback")
        return cls("", "none")


@dataclass(frozen=True)
class Taken:
    """An experience to tutor with. Its ``history`` is not loaded."""

    experience: Experience
    similarity: float
    reason: Literal["similar", "drawn"]


DropReason = Literal["below_threshold", "beyond_top_k", "not_drawn", "disabled"]
_REASONS: tuple[DropReason, ...] = ("below_threshold", "beyond_top_k", "not_drawn", "disabled")


@dataclass(frozen=True)
class Drop:
    """A candidate that was not taken. ``similarity`` is None for a disabled one: it is not compared."""

    id: str
    similarity: float | None
    reason: DropReason


class Dropped(Sequence[Drop]):
    """The candidates that were not taken, the most similar first and the disabled ones last; made as they are looked at."""

    def __init__(
        self,
        ids: list[str],
        rows: Rows,
        cosines: npt.NDArray[np.float32],
        reasons: npt.NDArray[np.int8],
        disabled: Rows,
    ) -> None:
        self._ids, self._rows, self._cosines, self._reasons = ids, rows, cosines, reasons
        self._disabled = disabled
        self._order: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._rows) + len(self._disabled)

    @overload
    def __getitem__(self, place: int) -> Drop: ...
    @overload
    def __getitem__(self, place: slice) -> list[Drop]: ...
    def __getitem__(self, place: int | slice) -> Drop | list[Drop]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        n = place + len(self) if place < 0 else place
        if not 0 <= n < len(self):
            raise IndexError(f"candidate {place} of {len(self)}")
        if n >= len(self._rows):
            return Drop(self._ids[self._disabled[n - len(self._rows)]], None, "disabled")
        if self._order is None:
            self._order = np.argsort(-self._cosines, kind="stable")
        at = self._order[n]
        return Drop(self._ids[self._rows[at]], float(self._cosines[at]), _REASONS[self._reasons[at]])

    def counts(self) -> dict[str, int]:
        """How many were dropped, by reason."""
        found = Counter(_REASONS[r] for r in self._reasons.tolist())
        found["disabled"] += len(self._disabled)
        return {reason: n for reason, n in found.items() if n}


@dataclass(frozen=True)
class Tried:
    """A step of the filter, and what passed it."""

    step: Step
    enabled: int
    disabled: int


@dataclass(frozen=True)
class Retrieval:
    """R of Algorithm 1, and how it came about."""

    taken: tuple[Taken, ...]
    """Best first; empty where nothing fits."""
    dropped: Dropped
    """The other candidates of ``step``."""
    step: Step | None
    """The step that the candidates are from; None where no step had any, or there was nothing to look for."""
    query: Query
    tried: tuple[Tried, ...]

    def summary(self) -> dict[str, Any]:
        """For a transcript: JSON-ready, of bounded size."""
        return {
            "query": self.query.text,
            "query_source": self.query.source,
            "step": self.step.value if self.step else None,
            "tried": [
                {"step": t.step.value, "enabled": t.enabled, "disabled": t.disabled} for t in self.tried
            ],
            "taken": [
                {"id": t.experience.id, "similarity": t.similarity, "reason": t.reason} for t in self.taken
            ],
            "dropped": self.dropped.counts(),
        }


def search(
    database: Database,
    index: ExperienceIndex,
    state: StateTags,
    query: Query,
    vector: npt.NDArray[np.float32] | None,
    settings: RetrievalSettings,
    salt: str,
) -> Retrieval:
    """Lines 7 to 17, on an index that is in step with the snapshot being read. ``vector``: None where the query is empty."""
    none = np.zeros(0, dtype=np.int64)
    tried: list[Tried] = []
    rows, disabled, cosines, step = none, none, np.zeros(0, dtype=np.float32), None
    mark = np.float32(settings.threshold)
    for wider in settings.steps if vector is not None else ():
        assert vector is not None
        states = admitted_codes(state, wider)
        found, off = index.rows(states), index.rows(states, DISABLED)
        tried.append(Tried(wider, len(found), len(off)))
        if len(found) or len(off):
            rows, disabled, step = found, off, wider
            cosines = index.cosines(vector, rows)
        enough = settings.widen != "below" or settings.random_in_state is not None
        if len(found) and (enough or bool((cosines >= mark).any())):
            break
    if settings.random_in_state is not None:
        seed = derive(settings.random_in_state, "random_in_state", state.key(), query.text, salt)
        draw = np.random.default_rng(seed).permutation(len(rows))[: settings.top_k]
        chosen, reasons = draw, np.full(len(rows), _REASONS.index("not_drawn"), dtype=np.int8)
    else:
        passing = np.flatnonzero(cosines >= mark)
        # Stable: of two that are equally near, the older one wins.
        chosen = passing[np.argsort(-cosines[passing], kind="stable")][: settings.top_k]
        reasons = np.where(
            cosines >= mark, _REASONS.index("beyond_top_k"), _REASONS.index("below_threshold")
        ).astype(np.int8)
    reason: Literal["similar", "drawn"] = "similar" if settings.random_in_state is None else "drawn"
    taken = tuple(
        Taken(
            database.stored(index.ids[rows[at]], history=False).experience,
            float(cosines[at]),
            reason,
        )
        for at in chosen
    )
    left = np.ones(len(rows), dtype=bool)
    left[chosen] = False
    dropped = Dropped(index.ids, rows[left], cosines[left], reasons[left], disabled)
    return Retrieval(taken, dropped, step, query, tuple(tried))

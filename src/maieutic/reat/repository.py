"""The experience repository: admission (Algorithm 2), utility (equations 12 to 15), retrieval, several processes at once.

Use::

    with Repository.open(folder, embedder=make_embedder("packaged-minilm"), merge=merge) as repository:
        await repository.admit(experience, score)          # "inserted", "merged" or "duplicate"
        found = repository.retrieve(tags, Query.of(rewritten, observation.diagnosis))
        repository.update_utility(found.taken[0].experience.id, 92.0, source="episode-7/3")

One process distils (writes) while others read and report scores; a write is one transaction, and a killed process leaves
either all of it or nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from maieutic.config import Count, Section, Share
from maieutic.reat.embeddings import Embedder
from maieutic.reat.index import ExperienceIndex, pack
from maieutic.reat.merging import Merge, merged_experience
from maieutic.reat.records import Database, Event, Recorded, RepositoryError, Stored
from maieutic.reat.related_states import Step, admitted_codes
from maieutic.reat.retrieval import Cosine, Query, Retrieval, RetrievalSettings, search
from maieutic.reat.schema import Admission, Experience, StateTags

log = logging.getLogger(__name__)
Vector = npt.NDArray[np.float32]
ATTEMPTS = 5
"""Times that a merge is done anew because another process changed what it was to replace meanwhile."""


class RepositorySettings(Section):
    """Thresholds of maintenance. Cosines are compared in float32."""

    tau_dup: Cosine = 0.92
    """From this cosine on a candidate is a duplicate (equation 12)."""
    tau_merge: Cosine = 0.80
    """From this cosine on, and below ``tau_dup``, it is merged (equation 13)."""
    alpha: Share = 0.8
    """Weight of the old utility (equation 14)."""
    tau_prune: Annotated[float, Field(ge=0, le=100)] = 60.0
    """A utility below it disables (equation 15)."""
    min_uses: Count = 5
    """… but not before this many scored uses since the experience was last enabled."""
    no_merging: bool = False
    """Ablation: what would be merged is inserted."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.tau_merge > self.tau_dup:
            raise ValueError(f"tau_merge ({self.tau_merge}) is above tau_dup ({self.tau_dup})")
        return self


@dataclass(frozen=True)
class Utility:
    """What a score did."""

    before: float
    after: float
    uses: int
    enabled: bool
    pruned: bool
    """This score disabled it."""
    repeated: bool
    """The source had been counted before: nothing changed."""


@dataclass(frozen=True)
class _Decision:
    action: Literal["inserted", "merge", "duplicate"]
    nearest: str | None
    similarity: float | None


class Repository:
    """See the module. Threads may share one; processes each open their own (never across a fork)."""

    def __init__(
        self,
        database: Database,
        embedder: Embedder | None,
        settings: RepositorySettings,
        merge: Merge | None,
    ) -> None:
        self._db, self._embedder, self.settings, self._merge = database, embedder, settings, merge
        self._index: ExperienceIndex | None = None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        embedder: Embedder | None = None,
        settings: RepositorySettings | None = None,
        merge: Merge | None = None,
        read_only: bool = False,
    ) -> Self:
        """Open the repository in ``folder``, or make it (with an embedder, unless ``read_only``).

        Without an embedder what is stored can be looked at, scored and enabled, but neither admitted nor retrieved by text.
        Raises :class:`RepositoryError` (no repository, another embedder's, not writable),
        :class:`~maieutic.reat.records.RepositoryVersionError` (written by a newer release).
        """
        named = (embedder.name, embedder.dim) if embedder is not None else None
        database = Database(Path(folder), embedder=named, read_only=read_only)
        return cls(database, embedder, settings or RepositorySettings(), merge)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Save the vectors where the saved file lags behind, and close. Nothing is lost without it."""
        try:
            if self._index is not None and not self._db.read_only:
                with self._db.reading():
                    index = self._synced()  # the last write is not in it yet
                if len(index) != index.saved:
                    index.save()
        except (OSError, RuntimeError) as error:  # FAISS says RuntimeError
            # What was done is in the database: a full disk must not turn it into a failure.
            log.warning("%s: the vectors are not saved and will be made anew: %s", self._db.folder, error)
        finally:
            self._db.close()

    # ---- admission

    async def admit(self, experience: Experience, score: float) -> Admission:
        """Insert, merge or discard one experience that passed the gate with ``score`` (0 to 100); idempotent by its id.

        It is compared with the enabled experiences of the same and the closely related states. A merge replaces the nearest
        one; a merge that fails (None) inserts. Raises ValueError for a score out of range or a blank query.
        """
        return (await self.admit_recorded(experience, score)).outcome

    async def admit_recorded(self, experience: Experience, score: float) -> Recorded:
        """:meth:`admit`, with the nearest experience's similarity, what holds the experience now, and a note."""
        if not (math.isfinite(score) and 0 <= score <= 100):
            raise ValueError(f"an admission score is between 0 and 100, not {score}")
        if self._merge is None and not self.settings.no_merging:
            raise RepositoryError("admitting needs a `merge` callable (Repository.open), or no_merging: true")
        if (done := await asyncio.to_thread(self._recorded, experience.id)) is not None:
            return done
        vector = await asyncio.to_thread(self._embed, experience.query)
        merged: dict[str, tuple[Experience, bytes] | None] = {}
        for _ in range(ATTEMPTS):
            result = await asyncio.to_thread(self._admit_once, experience, score, vector, merged)
            if isinstance(result, Recorded):
                return result
            assert self._merge is not None
            # Outside of any transaction: a model may take minutes, and readers and writers go on meanwhile.
            text = await self._merge(result, experience)
            if text is None:
                merged[result.id] = None
                continue
            new = merged_experience(result, experience, text, score)
            merged[result.id] = (new, pack(await asyncio.to_thread(self._embed, new.query)))
        raise RepositoryError(
            f"{experience.id} could not be merged: what it is nearest to changed {ATTEMPTS} times"
        )

    def _recorded(self, id: str) -> Recorded | None:
        with self._db.reading():
            return self._db.admission(id)

    def _admit_once(
        self,
        experience: Experience,
        score: float,
        vector: Vector,
        merged: dict[str, tuple[Experience, bytes] | None],
    ) -> Recorded | Experience:
        """One transaction: do it and say what was done, or return the experience that has to be merged with first."""
        id = experience.id
        with self._db.writing():
            if (done := self._db.admission(id)) is not None:
                return done
            if self._db.exists(id):  # came in with a file that had no admissions
                return self._record(Recorded(id, "duplicate", id, None, score), experience)
            decision = self._decide(experience.tags, vector)
            near, similarity = decision.nearest, decision.similarity
            if decision.action == "duplicate" and near is not None:
                return self._record(Recorded(id, "duplicate", near, similarity, score), experience)
            note = ""
            if decision.action == "merge" and near is not None:
                if near not in merged:
                    return self._db.stored(near).experience
                if (ready := merged[near]) is not None:
                    new, new_vector = ready
                    self._db.insert(new, new_vector, kind="merged")
                    self._db.set_status(near, "replaced", replaced_by=new.id)
                    return self._record(Recorded(id, "merged", new.id, similarity, score), experience)
                note = "merge_failed"
            fresh = experience.model_copy(
                update={"utility": score, "uses": 0, "history": (), "enabled": True}
            )
            self._db.insert(fresh, pack(vector))
            return self._record(Recorded(id, "inserted", id, similarity, score, note), fresh)

    def _record(self, recorded: Recorded, experience: Experience) -> Recorded:
        self._db.record(recorded, experience)
        return recorded

    def _decide(self, tags: StateTags, vector: Vector) -> _Decision:
        """Algorithm 2, lines 4 to 15: what to do with a candidate, and which experience it is nearest to (the oldest of equals)."""
        index = self._synced()
        rows = index.rows(admitted_codes(tags, Step.RELATED))
        if not len(rows):
            return _Decision("inserted", None, None)
        cosines = index.cosines(vector, rows)
        best = int(np.argmax(cosines))
        near, similarity = index.ids[rows[best]], cosines[best]
        if similarity >= np.float32(self.settings.tau_dup):
            return _Decision("duplicate", near, float(similarity))
        if similarity >= np.float32(self.settings.tau_merge) and not self.settings.no_merging:
            return _Decision("merge", near, float(similarity))
        return _Decision("inserted", near, float(similarity))

    # ---- utility

    def update_utility(self, id: str, score: float, *, source: str = "") -> Utility:
        """Equation 14, U ← αU + (1−α)S, and pruning (equation 15), for one scored use of an experience.

        ``source`` names what was scored (such as an episode and turn); the same source counts once for an experience, an empty
        one every time. A score that comes after the experience was merged or disabled is kept in its history too.
        Raises ValueError for a score outside 0 to 100, :class:`RepositoryError` for an unknown id.
        """
        if not (math.isfinite(score) and 0 <= score <= 100):
            raise ValueError(f"a score is between 0 and 100, not {score}")
        s = self.settings
        with self._db.writing():
            before, uses, trial, status = self._db.numbers(id)
            if self._db.scored(id, source):
                return Utility(before, before, uses, status == "enabled", pruned=False, repeated=True)
            after = s.alpha * before + (1 - s.alpha) * score
            self._db.set_utility(id, score, before, after, source)
            pruned = status == "enabled" and after < s.tau_prune and trial + 1 >= s.min_uses
            if pruned:
                self._db.set_status(id, "disabled", reason="pruned")
            return Utility(
                before, after, uses + 1, status == "enabled" and not pruned, pruned=pruned, repeated=False
            )

    def prune(self) -> list[str]:
        """Disable what the present thresholds call weak; for after they were changed. Returns the ids."""
        with self._db.writing():
            query = "SELECT id FROM experiences WHERE status = 'enabled' AND utility < ? AND trial >= ? ORDER BY seq"
            weak = [
                row[0] for row in self._db.select(query, (self.settings.tau_prune, self.settings.min_uses))
            ]
            for id in weak:
                self._db.set_status(id, "disabled", reason="pruned")
        return weak

    def enable(self, id: str) -> bool:
        """Let a disabled experience be retrieved again; its utility stays, and the minimum of uses counts anew.

        False when it was enabled already. Raises :class:`RepositoryError` for a replaced one: the merged one is in its place.
        """
        return self._switch(id, "enabled", "")

    def disable(self, id: str, reason: str) -> bool:
        """Take an experience out of retrieval by hand; False when it was out already."""
        return self._switch(id, "disabled", reason)

    def _switch(self, id: str, status: Literal["enabled", "disabled"], reason: str) -> bool:
        with self._db.writing():
            now = self._db.numbers(id)[3]
            if now == "replaced":
                other = self._db.stored(id, history=False).replaced_by
                raise RepositoryError(f"{id} was merged into {other}: enable or disable that one")
            if now == status:
                return False
            self._db.set_status(id, status, reason=reason)
            return True

    # ---- reading

    def retrieve(
        self,
        state: StateTags,
        query: Query | str,
        settings: RetrievalSettings | None = None,
        *,
        salt: str = "",
        vector: Vector | None = None,
    ) -> Retrieval:
        """Algorithm 1 on one snapshot. A plain string is a rewritten query.

        ``salt`` names the occasion (such as an episode and turn) for ``random_in_state``. ``vector``: the query's embedding,
        [dim] float32 of length 1, where the caller has it already.
        """
        asked = Query.of(query, "") if isinstance(query, str) else query
        if not asked.text.strip():
            asked = Query("", "none")
        if vector is None and asked.source != "none":
            vector = self._embed(asked.text)
        with self._db.reading():
            return search(
                self._db, self._synced(), state, asked, vector, settings or RetrievalSettings(), salt
            )

    def get(self, id: str) -> Experience:
        """One experience with its utility events. Raises :class:`RepositoryError` for an unknown id."""
        return self.stored(id).experience

    def stored(self, id: str) -> Stored:
        """:meth:`get`, with its status and what replaced it."""
        with self._db.reading():
            return self._db.stored(id)

    def events(self, id: str) -> list[Event]:
        """Everything that happened to an experience: admission, scores, merging, disabling, enabling."""
        with self._db.reading():
            return self._db.events(id)

    def experiences(self, *, every: bool = False) -> list[Experience]:
        """The enabled experiences in the order of admission; ``every``: the disabled and replaced ones too."""
        with self._db.reading():
            return [s.experience for s in self._db.all_stored() if every or s.status == "enabled"]

    def admission(self, id: str) -> Recorded | None:
        """What the admission of an id came to; None when it was never offered."""
        return self._recorded(id)

    def __len__(self) -> int:
        """Enabled experiences."""
        with self._db.reading():
            return int(self._db.select("SELECT count(*) FROM experiences WHERE status = 'enabled'")[0][0])

    def verify(self) -> None:
        """Check the index against the database bit by bit, and the database by SQLite's own check.

        Raises :class:`RepositoryError` at the first difference.
        """
        with self._db.reading():
            (answer,) = self._db.select("PRAGMA integrity_check")[0]
            if answer != "ok":
                raise RepositoryError(f"{self._db.folder}: SQLite finds damage: {answer}")
            self._synced().verify()

    @property
    def database(self) -> Database:
        """The tables, for export, import and reports."""
        return self._db

    # ---- inside

    def _synced(self) -> ExperienceIndex:
        """The index in step with the transaction around the call."""
        if self._index is None:
            self._index = ExperienceIndex(self._db)
        self._index.sync()
        return self._index

    def embed(self, texts: list[str]) -> Vector:
        """The embeddings of several texts, [len(texts), dim] float32."""
        if self._embedder is None:
            raise RepositoryError(
                f"{self._db.folder} was opened without an embedder; it was made with {self._db.embedder}"
            )
        return self._embedder.embed(texts)

    def _embed(self, text: str) -> Vector:
        return self.embed([text])[0]

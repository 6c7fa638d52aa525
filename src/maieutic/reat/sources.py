"""Experience for a situation out of a repository: the source of the REAT arm and of its retrieval ablations."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from maieutic.reat.live import Situation
from maieutic.reat.repository import Repository
from maieutic.reat.retrieval import Query, RetrievalSettings
from maieutic.reat.tutor import Found


@dataclass
class RepositorySource:
    """:class:`maieutic.reat.tutor.Source` on a repository (Algorithm 1). Searches run in a thread: embedding takes a while."""

    repository: Repository
    settings: RetrievalSettings = field(default_factory=RetrievalSettings)

    async def find(self, situation: Situation, *, seed: int) -> Found:
        """What the settings take; ``why`` is ``no_candidate`` or ``below_threshold`` where that is nothing."""
        kind = "fallback" if situation.rewrite in ("fallback", "off") else "rewritten"
        query = Query(situation.query, "fallback" if kind == "fallback" else "rewritten")
        got = await asyncio.to_thread(
            self.repository.retrieve, situation.tags, query, self.settings, salt=str(seed)
        )
        step = got.step.value if got.step else ""
        if got.taken:
            return Found(tuple(t.experience for t in got.taken), tuple(t.similarity for t in got.taken), step)
        return Found((), (), step, "below_threshold" if len(got.dropped) else "no_candidate")

"""Two experiences into a more general one (Algorithm 2, lines 11 to 13).

The text comes from a language model, through a callable that is given to the repository; everything else about the merged
experience is decided here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from maieutic.reat.schema import Experience, Record


class MergedText(Record):
    """What the model writes: the key's text and the value, general enough for both experiences (no number or name of either
    problem)."""

    query: str
    template: str
    advice: str
    pitfalls: str
    struggle_handling: str
    explanation: str


Merge = Callable[[Experience, Experience], Awaitable[MergedText | None]]
"""``merge(kept, new)``: the repository's experience and the candidate. None when the model gave nothing usable after its
retries: the candidate is then inserted as it is, so that nothing is lost. It may be called again for the same pair after a
kill, and is never called inside a transaction."""


def merged_experience(kept: Experience, new: Experience, text: MergedText, score: float) -> Experience:
    """The experience that replaces ``kept``.

    It has the state of ``kept``, whose place it takes, the provenance of ``new`` with both as parents, and, as a new text that
    nobody has used yet, the admission score as utility and no uses.
    """
    provenance = new.provenance.model_copy(update={"rewrite": "merged", "parents": (kept.id, new.id)})
    return Experience.make(utility=score, tags=kept.tags, provenance=provenance, **text.model_dump())

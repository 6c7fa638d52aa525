"""From a diagnosis to the query: one abstract sentence, checked, else asked again, else the fallback of Algorithm 1 (lines 3
to 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from maieutic.dialogue import Message
from maieutic.reat import prompts
from maieutic.reat.leaks import Surface, find_leaks, mask
from maieutic.reat.schema import Observation, RewriteKind, Unknown

Fallback = Literal["masked", "verbatim"]
"""What stands in for a query that could not be had. ``verbatim``: the diagnostic text as it is, which is Algorithm 1 as
printed and lets the problem through; ``masked``: the same text with general words for numbers, names, variables and formulas."""
AskQuery = Callable[[Sequence[Message], int], Awaitable[str | Unknown]]
"""(messages, attempt) → the query or why there is none."""


@dataclass(frozen=True, slots=True)
class Query:
    """The text that is embedded, and how it came about."""

    text: str
    kind: RewriteKind


async def rewrite_query(
    observation: Observation,
    problem: Surface,
    ask: AskQuery,
    *,
    retries: int,
    fallback: Fallback,
    counts: Counter[str],
) -> Query:
    """The problem-agnostic query of a diagnosis.

    A rewritten text that still holds something of the problem (:func:`~maieutic.reat.leaks.find_leaks`, strict) is refused
    and asked again, naming what leaked, at most ``retries`` times. ``counts`` gets ``rewrite.leak.<kind>`` for each refused
    text and kind, and ``rewrite.rewritten``, ``rewrite.fallback`` (and ``rewrite.failed`` when the role gave nothing).
    """
    messages = prompts.rewrite(observation)
    first = messages
    for attempt in range(1 + retries):
        text = await ask(messages, attempt)
        if isinstance(text, Unknown):
            counts["rewrite.failed"] += 1
            break
        leaks = find_leaks(text, problem, strict=True)
        if not leaks:
            counts["rewrite.rewritten"] += 1
            return Query(text, "rewritten")
        counts.update(f"rewrite.leak.{kind}" for kind in {leak.kind for leak in leaks})
        messages = prompts.without(first, list(dict.fromkeys(leak.text for leak in leaks)), "the sentence")
    counts["rewrite.fallback"] += 1
    return Query(fallback_query(observation, problem, fallback), "fallback")


def fallback_query(observation: Observation, problem: Surface, fallback: Fallback) -> str:
    """The diagnostic text in place of a query (Algorithm 1, line 5)."""
    return mask(observation.diagnosis, problem) if fallback == "masked" else observation.diagnosis

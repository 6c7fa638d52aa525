"""One JSON object from a chat model: found in the reply, checked by the caller, asked again with other seeds, or an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from maieutic.dialogue import Message
from maieutic.engines.base import Sampling
from maieutic.env.llm_judge import StructuredChat
from maieutic.latent.errors import LabelError
from maieutic.seeds import derive
from maieutic.thinking import without_thinking

T = TypeVar("T")
LONGEST = 50_000
"""Characters at the end of a reply that are searched: the search is quadratic in a reply of opening braces."""
_FENCE = re.compile(r"```(?:json)?(.*?)```", re.DOTALL)


def find_object(text: str) -> dict[str, Any] | None:
    """The last JSON object that the reply holds (reasoning may precede it), None where there is none.

    Two different objects are told apart by position alone: what a model says last is its answer.
    """
    text = without_thinking(text)[-LONGEST:]
    decoder, found, at = json.JSONDecoder(strict=False), None, 0
    for source in [*_FENCE.findall(text), text]:
        at = 0
        while (at := source.find("{", at)) >= 0:
            try:
                value, end = decoder.raw_decode(source, at)
            except (ValueError, RecursionError):
                at += 1
                continue
            found, at = (value if isinstance(value, dict) else found), end
        if found is not None:
            return found
    return None


async def ask_json(
    chat: StructuredChat,
    messages: list[Message],
    sampling: Sampling,
    schema: Mapping[str, Any] | None,
    read: Callable[[dict[str, Any]], T | None],
    *,
    seed: int,
    reasks: int,
    what: str,
) -> T:
    """``read`` of the reply's object; None from it means unusable and is asked again, at most ``reasks`` times.

    Raises :class:`LabelError` naming ``what`` and the start of the last reply; the endpoint's own errors pass through.
    """
    extra = {} if schema is None else {"schema": dict(schema)}
    last = ""
    for attempt in range(1 + reasks):
        draw = seed if attempt == 0 else derive(seed, "reask", attempt)
        (reply,) = await chat.complete(messages, sampling, seed=draw, n=1, session=None, **extra)
        last = reply.text
        data = find_object(last)
        value = None if data is None else read(data)
        if value is not None:
            return value
    raise LabelError(f"{what}: no usable answer in {1 + reasks} replies; the last one begins {last[:120]!r}")

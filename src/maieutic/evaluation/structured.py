"""One JSON object from a judge model: read right, asked again, or unknown. Never a default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from maieutic.dialogue import Message
from maieutic.engines.base import Sampling
from maieutic.env.judge_reply import _objects
from maieutic.errors import EngineError, RunStop
from maieutic.evaluation.cache import CachedChat
from maieutic.seeds import derive
from maieutic.thinking import without_thinking

T = TypeVar("T")


async def ask(
    chat: CachedChat,
    prompt: str,
    schema: Mapping[str, Any],
    read: Callable[[dict[str, Any]], T | None],
    sampling: Sampling,
    *,
    seed: int,
    reasks: int,
) -> T | None:
    """``read`` of the object in the reply; None when no reply could be read or the endpoint failed for good.

    ``read`` returns None for an object that is not an answer. A reply with two answers that differ is no answer: one of them may
    have been planted by the text that is judged.
    """
    for attempt in range(1 + reasks):
        draw = seed if attempt == 0 else derive(seed, "reask", attempt)
        try:
            (reply,) = await chat.complete([Message("user", prompt)], sampling, seed=draw, schema=schema)
        except RunStop:
            raise
        except (EngineError, TimeoutError):
            return None
        text = without_thinking(reply.text)
        answers = [a for a in (read(o) for o in _objects(text)) if a is not None]
        if answers and all(a == answers[0] for a in answers):
            return answers[0]
    return None

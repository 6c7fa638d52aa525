"""The engine protocol (token ids in, sampled ids and log-probs out) and the chat-model protocol built on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from maieutic.dialogue import Message
from maieutic.thinking import without_thinking

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Log-probs that an engine returns are those of *this* distribution (temperature and top-p applied)."""

    temperature: float = 1.0
    """> 0; 0 means greedy and is refused where log-probs are trained on."""
    top_p: float = 1.0
    max_tokens: int = 256

    def capped(self, max_tokens: int) -> Sampling:
        """The same sampling with at most ``max_tokens`` new tokens."""
        return replace(self, max_tokens=min(self.max_tokens, max_tokens))


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation. ``ids`` include the stop token when there was one; ``logprobs`` has the same length."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_version: int = 0


@runtime_checkable
class Engine(Protocol):
    """Turns token ids into sampled token ids and log-probs."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token will be sampled from."""
        ...

    @property
    def context_limit(self) -> int:
        """Most tokens (prompt and continuation together) that the engine takes."""
        ...

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        n: int = 1,
        stop_ids: Sequence[int] = (),
        session: str | None = None,
    ) -> list[Sample]:
        """``n`` independent continuations of one prompt.

        ``seed`` fixes the draw (sample i uses a stream derived from (seed, i)); ``session`` names a growing sequence whose
        prefix may be cached. Raises :class:`maieutic.errors.EngineError` when no sample can be had.
        """
        ...

    async def new_step(self, policy_version: int) -> None:
        """Called before a rollout: weights have this version from now on; caches made with older weights are dropped."""
        ...

    async def close(self) -> None:
        """Free what the engine holds; safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """One chat completion as text; readers of structured answers take ``text``, everyone else ``visible``."""

    text: str
    finish_reason: FinishReason
    tokens: int
    told_apart: bool = False
    """``text`` is free of thinking already: what serves the model knows where it ends."""

    @property
    def visible(self) -> str:
        """``text`` without thinking that a server left in it."""
        return self.text if self.told_apart else without_thinking(self.text)


@runtime_checkable
class ChatModel(Protocol):
    """Messages in, texts out: what student and judge are built on (an engine with a template, or an HTTP endpoint)."""

    @property
    def name(self) -> str:
        """Model name as it appears in records and in the key of solve rates."""
        ...

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int,
        n: int = 1,
        session: str | None = None,
    ) -> list[Completion]:
        """``n`` completions of one conversation, as one request."""
        ...

    async def close(self) -> None:
        """Free what the model holds; safe to call twice."""
        ...

"""A chat model over any engine: messages → ids → sampled ids → the visible text."""

from __future__ import annotations

from collections.abc import Sequence

from maieutic.dialogue import Message
from maieutic.engines.base import Completion, Engine, Sampling
from maieutic.tokens import Renderer


class LocalChat:
    """:class:`maieutic.engines.base.ChatModel`. Thinking, where the template has the model think, is cut off.

    ``Completion.tokens`` counts every sampled token, thinking included. The engine is closed with the chat model.
    """

    def __init__(self, engine: Engine, renderer: Renderer, name: str) -> None:
        self._engine, self._renderer, self._name = engine, renderer, name

    @property
    def name(self) -> str:
        """Model name as it appears in records and in the key of solve rates."""
        return self._name

    async def start(self) -> None:
        """Wait until the engine can be asked (servers must be up)."""
        start = getattr(self._engine, "start", None)
        if start is not None:
            await start()

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int,
        n: int = 1,
        session: str | None = None,
    ) -> list[Completion]:
        """``n`` completions of one conversation, as one request. EngineError where it does not fit the context."""
        samples = await self._engine.generate(
            self._renderer.prompt(messages),
            sampling,
            seed=seed,
            n=n,
            stop_ids=self._renderer.stop_ids,
            session=session,
        )
        return [
            Completion(self._renderer.split(s.ids).visible, s.finish_reason, len(s.ids), told_apart=True)
            for s in samples
        ]

    async def new_step(self, policy_version: int) -> None:
        """Drop what the engine cached. For frozen models too: a resumed run starts each step with empty caches, and how a
        prompt is split between cache and new tokens shows in the last bits of the log-probs."""
        await self._engine.new_step(policy_version)

    async def close(self) -> None:
        """Close the engine; safe to call twice."""
        await self._engine.close()

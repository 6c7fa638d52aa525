"""``chat``: any OpenAI-compatible endpoint as a :class:`maieutic.engines.base.ChatModel` (vLLM, commercial APIs)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from maieutic.dialogue import Message
from maieutic.engines.base import Completion, FinishReason, Sampling
from maieutic.engines.http import HttpPool
from maieutic.engines.usage import Price
from maieutic.errors import EngineError

_CONTROL = re.compile(
    r"<(?!/?(?:transcript|turn|problem|answer)>)(?=[|/]?[A-Za-z_｜|][^<>\s]{0,40}>)|\[(?=/?INST\])|<(?=/?s>)"
)
"""What could open a control token of a known family: ``<|im_end|>``, ``<start_of_turn>``, ``</s>``, ``[/INST]``, ``<think>``.

The fences of our own prompts are control tokens of no family, and stay as the rubrics name them."""


def neutralise(text: str) -> str:
    """Break every string that a server's tokenizer could read as a control token, leaving the text readable.

    An endpoint tokenises the whole rendered conversation itself, control strings inside content included (measured on vLLM:
    ``<|im_end|>`` in a user message ends that message). A word joiner (U+2060) after the bracket keeps it plain text.
    """
    return _CONTROL.sub(lambda m: m.group() + "\u2060", text)


class HttpChat:
    """One model behind an endpoint.

    Args:
        model: name that the endpoint knows.
        extra_body: merged into each request (``{"chat_template_kwargs": {"enable_thinking": false}}``, ``reasoning_effort``, …).
        max_tokens_key: some APIs call it ``max_completion_tokens``.
        send_seed: False for endpoints that refuse ``seed``.
        name: the model's name in records and in the key of solve rates (None: ``model``).
        send_n: False for endpoints that refuse ``n``: an ``n = k`` call is then sent as k requests.
        merge_turns: join messages of one role that follow each other (the post-test's question follows a hidden tutor turn).
    """

    def __init__(
        self,
        pool: HttpPool,
        model: str,
        *,
        price: Price | None = None,
        extra_body: Mapping[str, Any] | None = None,
        max_tokens_key: str = "max_tokens",
        send_seed: bool = True,
        send_n: bool = True,
        merge_turns: bool = False,
        path: str = "/v1/chat/completions",
        name: str | None = None,
    ) -> None:
        self.pool, self.model, self.price, self.path = pool, model, price or Price(), path
        self.extra_body, self.max_tokens_key = dict(extra_body or {}), max_tokens_key
        self.send_seed, self.send_n, self.merge_turns = send_seed, send_n, merge_turns
        self._name = name or model

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Nothing to do: an endpoint is asked when it is needed."""

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int,
        n: int = 1,
        session: str | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """``n`` completions; ``schema`` (JSON schema) asks for structured output where the endpoint has it.

        Raises EngineError as :meth:`HttpPool.post` does, and when the answer lacks a choice or its text.
        """
        if n > 1 and not self.send_n:
            parts = await asyncio.gather(
                *(
                    self.complete(messages, sampling, seed=seed + i, session=session, schema=schema)
                    for i in range(n)
                )
            )
            return [c for part in parts for c in part]
        if self.merge_turns:
            messages = _merged(messages)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [
                {"role": m.role, "content": m.content if m.role == "system" else neutralise(m.content)}
                for m in messages
            ],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self.max_tokens_key: sampling.max_tokens,
        }
        if n > 1:
            body["n"] = n
        if self.send_seed:
            body["seed"] = seed % 2**31
        if schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": dict(schema), "strict": True},
            }
        body.update(self.extra_body)
        answer = await self.pool.post(self.path, body, session=session)
        used = answer.get("usage") or {}
        self.pool.ledger.add(
            self.pool.role,
            self.price,
            prompt=int(used.get("prompt_tokens") or 0),
            completion=int(used.get("completion_tokens") or 0),
            cached=int((used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != n:
            got = len(choices) if isinstance(choices, list) else repr(choices)
            raise EngineError(f"{self.pool.role}: asked {self.model} for {n} answers, got {got}")
        per_choice = int(used.get("completion_tokens") or 0) // n
        return [self._completion(c, per_choice) for c in sorted(choices, key=lambda c: c.get("index", 0))]

    def _completion(self, choice: dict[str, Any], tokens: int) -> Completion:
        message = choice.get("message") or {}
        text, reason = message.get("content"), choice.get("finish_reason")
        # A refusal, a content filter or reasoning that used up the budget leaves no content: empty text, which callers count.
        finish: FinishReason = "length" if reason == "length" else "stop"
        if text is not None and not isinstance(text, str):
            raise EngineError(f"{self.pool.role}: the answer's content is {type(text).__name__}, not text")
        return Completion(text or "", finish, tokens)

    async def close(self) -> None:
        await self.pool.close()


def _merged(messages: Sequence[Message]) -> list[Message]:
    out: list[Message] = []
    for m in messages:
        if out and out[-1].role == m.role:
            out[-1] = Message(m.role, f"{out[-1].content}\n\n{m.content}")
        else:
            out.append(m)
    return out

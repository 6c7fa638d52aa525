"""Engine ``vllm``: token-id prompts to vLLM servers over HTTP, sampled ids and processed log-probs back.

The server must run with ``--logprobs-mode processed_logprobs`` (``maieutic serve`` does), so that the log-probs are those of
the sampling distribution. Weights are pushed through a folder that trainer and servers share (see :mod:`maieutic.engines.push`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from maieutic.engines.base import Sample, Sampling
from maieutic.engines.http import HttpPool
from maieutic.engines.usage import Price
from maieutic.errors import EngineError
from maieutic.shared_ids import shared

_SEED_BITS = 63


class VllmEngine:
    """Implements :class:`maieutic.engines.base.Engine` on one or several equal vLLM servers.

    ``context_limit`` and the served model's name are asked from the servers by :meth:`start`, which also waits until every
    server is healthy.
    """

    def __init__(
        self,
        pool: HttpPool,
        *,
        price: Price | None = None,
        model: str | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.pool, self.price, self.model = pool, price or Price(), model
        self.adapter: str | None = None
        """Name of the adapter that requests are for; None: the model itself."""
        self._start_timeout_s = start_timeout_s
        self._nameless: set[str] = set()
        self._version = 0
        self._context: int | None = None

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def context_limit(self) -> int:
        if self._context is None:
            raise EngineError("the vllm engine was not started: its context limit is not known yet")
        return self._context

    async def start(self) -> None:
        """Wait until every server answers ``/health``; learn the model's name and context limit (the smallest counts).

        Raises:
            EngineError: a server is not healthy within ``start_timeout_s``, or servers serve different models.
        """
        await asyncio.gather(*(self._healthy(url, self._start_timeout_s) for url in self.pool.urls))
        cards = [await self._card(url) for url in self.pool.urls]
        names = {c["id"] for c in cards}
        if self.model is None:
            if len(names) > 1:
                raise EngineError(f"{self.pool.role}: the servers serve different models: {sorted(names)}")
            self.model = names.pop()
        self._context = min(int(c.get("max_model_len") or 0) for c in cards)
        if self._context < 1:
            raise EngineError(f"{self.pool.role}: the server does not say its max_model_len: is it vLLM?")

    async def _healthy(self, url: str, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            status, _ = await self.pool.get("/health", url=url)
            if status == 200:
                return
            if loop.time() > deadline:
                raise EngineError(
                    f"{self.pool.role}: {url} is not healthy after {timeout_s:g} s (last status {status or 'no answer'})"
                )
            await asyncio.sleep(1.0)

    async def _card(self, url: str) -> dict[str, Any]:
        status, raw = await self.pool.get("/v1/models", url=url)
        try:
            cards: list[dict[str, Any]] = json.loads(raw)["data"] if status == 200 else []
        except (ValueError, KeyError, TypeError):
            cards = []
        for card in cards:
            if self.model is None or card.get("id") == self.model:
                return card
        raise EngineError(
            f"{self.pool.role}: {url} serves {[c.get('id') for c in cards] or 'nothing'}"
            + (f", not {self.model!r}" if self.model else "")
        )

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
        """As the protocol says; sample i of an ``n`` request is drawn by the server with ``seed + i``."""
        if len(prompt) + sampling.max_tokens > self.context_limit:
            raise EngineError(
                f"{self.pool.role}: prompt ({len(prompt)} tokens) and max_tokens ({sampling.max_tokens}) exceed the "
                f"server's context of {self.context_limit}"
            )
        version = self._version
        answer = await self.pool.post(
            "/v1/completions",
            {
                "model": self.adapter or self.model,
                "prompt": list(prompt),
                "n": n,
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                # Said outright: a server started otherwise takes them from the model's generation_config.json.
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "seed": seed % 2**_SEED_BITS,
                "logprobs": 0,
                "return_token_ids": True,
                "stop_token_ids": list(stop_ids),
                "skip_special_tokens": False,
            },
            session=session,
        )
        samples = [
            self._sample(c, version)
            for c in sorted(answer.get("choices", []), key=lambda c: c.get("index", 0))
        ]
        if len(samples) != n:
            raise EngineError(f"{self.pool.role}: asked for {n} samples, got {len(samples)}")
        used = answer.get("usage") or {}
        self.pool.ledger.add(
            self.pool.role,
            self.price,
            prompt=int(used.get("prompt_tokens") or len(prompt)),
            completion=sum(len(s.ids) for s in samples),
            cached=int((used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )
        return samples

    def _sample(self, choice: dict[str, Any], version: int) -> Sample:
        ids, lps = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(ids, list) or not isinstance(lps, list) or len(ids) != len(lps):
            raise EngineError(
                f"{self.pool.role}: the answer lacks token_ids with one log-prob each "
                "(needs vLLM with return_token_ids and logprobs)"
            )
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise EngineError(f"{self.pool.role}: generation ended as {reason!r}")
        if not all(type(i) is int and i >= 0 for i in ids):
            raise EngineError(f"{self.pool.role}: the answer's token_ids are not token ids")
        return Sample(shared(ids), [float(x) for x in lps], reason, version)

    async def score_at(self, url: str, ids: Sequence[int], *, model: str | None = None) -> list[float]:
        """One server's log-probs (T = 1) of ``ids[1:]`` given their prefixes: what a probe compares. [len(ids) − 1] floats.

        ``model``: an adapter by its name there (None: the model itself).
        """
        answer = await self.pool.post_one(
            url,
            "/v1/completions",
            {
                "model": model or self.model,
                "prompt": list(ids),
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
            },
            timeout_s=self.pool.policy.timeout_s,
        )
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            return [float(row[str(i)]["logprob"]) for i, row in zip(ids[1:], rows[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise EngineError(f"{self.pool.role}: {url} gave no usable prompt_logprobs: {e!r}") from None

    async def name_version(self, url: str, policy_version: int) -> None:
        """Tell a server which version it holds, where it keeps such a name (vLLM does from 0.31 on; older ones are let be)."""
        status, _ = await self.pool.get("/weight_info", url=url)
        if status == 404:
            self._nameless.add(url)
            return
        self._nameless.discard(url)
        body = {"new_version": str(policy_version)}
        await self.pool.post_one(url, "/update_weight_version", body, timeout_s=self.pool.policy.timeout_s)

    async def held_version(self, url: str) -> str | None:
        """The version that a server says it holds; None where it keeps no such name. EngineError when it does not answer."""
        if url in self._nameless:
            return None
        status, raw = await self.pool.get("/weight_info", url=url)
        if status == 404:
            return None
        try:
            return str(json.loads(raw)["weight_version"]) if status == 200 else self._no_version(url, status)
        except (ValueError, KeyError, TypeError):
            return self._no_version(url, status)

    def _no_version(self, url: str, status: int) -> str:
        raise EngineError(f"{self.pool.role}: {url}/weight_info: status {status or 'no answer'}")

    async def new_step(self, policy_version: int) -> None:
        """Stamp what follows with this version (:mod:`maieutic.engines.push` has put the weights there and reset the caches)."""
        self._version = policy_version

    async def close(self) -> None:
        await self.pool.close()

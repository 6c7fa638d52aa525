"""The in-process engine: a transformers model, sampled with continuous batching over many dialogues and a key-value cache.

Works on one thread and one event loop. Tokens are drawn from each request's own random stream by inverting the CDF, so for
given logits they do not depend on what else is in the batch; log-probs are those of the tempered (and top-p) distribution in
fp32. On CPU the same requests in the same order give the same tokens and log-probs, bit for bit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from maieutic.engines.base import Sample, Sampling
from maieutic.engines.hf_attention import shared_prefix
from maieutic.engines.hf_cohort import PaddedCohort, SessionCache, Shape, SharedPrefixCohort
from maieutic.engines.hf_rows import Request
from maieutic.engines.hf_scheduler import Scheduler
from maieutic.errors import EngineError, MaieuticError, ModelError

log = logging.getLogger(__name__)


class HfEngine:
    """:class:`maieutic.engines.base.Engine` over a causal language model in memory.

    ``adapter``: ``off`` samples a PEFT model without its adapter, so that a LoRA tutor and its frozen base share one copy.
    ``max_batch_size``: most sequences decoded together (one request with a larger n runs alone). ``cache_tokens``: most tokens
    whose keys and values are kept between the turns of sessions. Models with linear attention, sliding windows or other
    layers that the shared-prefix attention does not reproduce (checked on first use) are decoded in left-padded batches
    without session cache, with a notice.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        max_batch_size: int = 128,
        cache_tokens: int = 65_536,
        device: str | torch.device | None = None,
        adapter: Literal["on", "off"] = "on",
        context_limit: int | None = None,
    ) -> None:
        self._model = model
        self._config = model.config.get_text_config()
        self._pad_id = pad_id
        self._device = torch.device(device) if device is not None else next(model.parameters()).device
        self._max_batch = max_batch_size
        limit = context_limit or getattr(self._config, "max_position_embeddings", None)
        if limit is None:
            raise ModelError(f"{type(model).__name__} states no max_position_embeddings: give context_limit")
        self._limit = int(limit)
        self._switched_off = _adapter_modules(model) if adapter == "off" else []
        self._policy_version = 0
        # Requests for one continuation (turns) and for several (post-tests, on which no other request waits).
        self._queue: deque[Request] = deque()
        self._wide: deque[Request] = deque()
        self._cohorts: list[SharedPrefixCohort | PaddedCohort] = []
        self._sessions = SessionCache(cache_tokens)
        self._shape: Shape | None = None
        self._probed = False
        self._training: list[torch.nn.Module] = []
        """Modules that sampling took out of training mode."""
        self._resting = True
        self._admitting: list[Request] = []
        self._closed = False

    # ---- the protocol

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token will be sampled from."""
        return self._policy_version

    @property
    def context_limit(self) -> int:
        """Most tokens (prompt and continuation together)."""
        return self._limit

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
        """See :meth:`maieutic.engines.base.Engine.generate`. Greedy samples (temperature 0) have log-probs of 0."""
        self._refuse(prompt, sampling, n)
        future: asyncio.Future[list[Sample]] = asyncio.get_running_loop().create_future()
        stops = tuple(sorted(set(stop_ids)))
        # Many answers to one prompt end a dialogue: nothing grows from them.
        kept = session if n == 1 else None
        request = Request(list(prompt), sampling, seed, n, stops, kept, self._policy_version, future)
        (self._queue if n == 1 else self._wide).append(request)
        Scheduler.current().wake(self)
        return await future

    async def new_step(self, policy_version: int) -> None:
        """New weights: drop every cached key and value. EngineError while requests are in flight."""
        self._drop_cancelled()
        if self.has_work:
            busy = self.waiting + self.waiting_wide + self.running
            raise EngineError(
                f"new weights (policy version {policy_version}) while {busy} sequences are being sampled"
            )
        self._sessions.clear()
        self._policy_version = policy_version

    async def close(self) -> None:
        """Fail what is in flight and free the caches; the model is the caller's."""
        self._closed = True
        self._fail(EngineError("the engine was closed"))
        self._sessions.clear()

    def _refuse(self, prompt: Sequence[int], sampling: Sampling, n: int) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if not prompt or n < 1 or sampling.max_tokens < 1:
            raise EngineError(
                f"nothing to sample: {len(prompt)} prompt tokens, n = {n}, max_tokens = {sampling.max_tokens}"
            )
        if len(prompt) + sampling.max_tokens > self._limit:
            raise EngineError(
                f"{len(prompt)} prompt tokens and up to {sampling.max_tokens} new ones exceed the model's context of "
                f"{self._limit}: shorten the prompt or lower max_tokens"
            )
        if min(prompt) < 0 or max(prompt) >= self._config.vocab_size:
            raise EngineError(
                f"the prompt holds token ids outside the vocabulary of {self._config.vocab_size}"
            )
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise EngineError(
                f"impossible sampling: temperature {sampling.temperature}, top_p {sampling.top_p}"
            )

    # ---- what the scheduler asks

    @property
    def waiting(self) -> int:
        """Requests for one continuation that wait."""
        return len(self._queue)

    @property
    def waiting_wide(self) -> int:
        """Sequences of requests for several continuations that wait."""
        return sum(r.n for r in self._wide)

    @property
    def max_batch_size(self) -> int:
        """Most sequences decoded together."""
        return self._max_batch

    @property
    def running(self) -> int:
        """Sequences that are being sampled."""
        return sum(c.live for c in self._cohorts)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._wide or self._cohorts)

    def tick(self, *, admit: bool, admit_wide: bool) -> None:
        """Admit waiting requests as told, then decode one token of every running sequence."""
        self._drop_cancelled()
        if self._resting:
            self._resting = False
            self._training = [m for m in self._model.modules() if m.training]
            for module in self._training:
                module.training = False
        try:
            with torch.no_grad():
                if not self._probed:
                    self._probe()
                started = self._admit(self._queue) if admit else []
                started += self._admit(self._wide) if admit_wide else []
                for cohort in self._cohorts:
                    if cohort not in started:
                        cohort.step()
        except (
            Exception
        ) as error:  # whatever the model raises (memory, shapes) fails the requests, not the event loop
            known = isinstance(error, MaieuticError)
            failure = (
                error
                if known
                else EngineError(f"the model failed while sampling: {type(error).__name__}: {error}")
            )
            if not known:
                failure.__cause__ = error
            self._fail(failure)
        self._cohorts = [c for c in self._cohorts if c.live]

    def rest(self) -> None:
        """Sampling pauses: give the modules their training mode back."""
        for module in self._training:
            module.training = True
        self._training = []
        self._resting = True

    def _drop_cancelled(self) -> None:
        self._queue = deque(r for r in self._queue if not r.future.done())
        self._wide = deque(r for r in self._wide if not r.future.done())
        for cohort in self._cohorts:
            cohort.drop_cancelled()
        self._cohorts = [c for c in self._cohorts if c.live]

    def _fail(self, error: Exception) -> None:
        requests = [
            *self._queue,
            *self._wide,
            *(r for c in self._cohorts for r in c.rows.requests),
            *self._admitting,
        ]
        self._queue.clear()
        self._wide.clear()
        self._cohorts.clear()
        self._admitting = []
        for request in requests:
            if not request.future.done():
                request.future.set_exception(error)

    def _admit(self, queue: deque[Request]) -> list[SharedPrefixCohort | PaddedCohort]:
        """Start as many waiting requests as fit, in their order; the cohorts that were started or joined."""
        room = self._max_batch - self.running
        batch: list[Request] = []
        while queue and (queue[0].n <= room or not (batch or self._cohorts)):
            batch.append(queue.popleft())
            room -= batch[-1].n
        self._admitting = batch
        started: list[SharedPrefixCohort | PaddedCohort] = []
        if batch and self._shape is None:
            started = [PaddedCohort(batch, self._config, self._forward, self._device, self._pad_id)]
        elif self._shape is not None:
            by_n: dict[int, list[Request]] = {}
            for request in batch:
                by_n.setdefault(request.n, []).append(request)
            for n, requests in by_n.items():
                join = None
                if n == 1:
                    join = next(
                        (c for c in self._cohorts if isinstance(c, SharedPrefixCohort) and c.joinable), None
                    )
                started.append(
                    SharedPrefixCohort(
                        requests, self._sessions, self._shape, self._forward, self._limit, join
                    )
                )
                if join is not None:
                    self._cohorts.remove(join)
        self._cohorts += started
        self._admitting = []
        return started

    # ---- the model

    def _forward(self, **kwargs: Any) -> torch.Tensor:
        """Logits [B, V] after the last column."""
        cache = kwargs["past_key_values"]
        with self._without_adapter():
            if self._shape is None:
                out = self._model(**kwargs, use_cache=True, logits_to_keep=1)
            else:
                with shared_prefix(self._config, cache.decode):
                    out = self._model(**kwargs, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        for module in self._switched_off:
            module._disable_adapters = True
        try:
            yield
        finally:
            for module in self._switched_off:
                module._disable_adapters = False

    def _probe(self) -> None:
        """Find out on a few tokens whether the shared-prefix attention reproduces this model."""
        self._probed = True
        reason = _unsuitable(self._config, self._limit)
        if reason is None:
            reason = self._compare()
        if reason is not None:
            self._shape = None
            log.warning(
                "%s: %s; sampling in left-padded batches without session cache",
                type(self._model).__name__,
                reason,
            )

    def _compare(self) -> str | None:
        size = self._config.vocab_size
        prompts = [[(7 * i + 3 * j + 1) % size for i in range(5 + 4 * j)] for j in range(2)]
        with self._without_adapter():
            whole = [
                self._model(input_ids=torch.tensor([p], device=self._device), use_cache=True) for p in prompts
            ]
        layers = getattr(whole[0].past_key_values, "layers", [])
        shapes = {
            (tuple(x.keys.shape), tuple(x.values.shape)) if hasattr(x, "keys") else None for x in layers
        }
        if len(shapes) != 1 or None in shapes or len(set(next(iter(shapes)) or ())) != 1:
            return "its layers keep different kinds of state"
        keys = layers[0].keys
        self._shape = Shape(len(layers), keys.shape[1], keys.shape[3], keys.dtype, self._device)
        # Two samples of each prompt but for its last two tokens, which are then fed as if they had been drawn.
        loop_free: Any = _NoFuture()
        greedy = Sampling(temperature=0.0, max_tokens=3)
        requests = [Request(p[:-2], greedy, 0, 2, (), None, 0, loop_free) for p in prompts]
        seen: list[torch.Tensor] = []

        def forward(**kwargs: Any) -> torch.Tensor:
            seen.append(self._forward(**kwargs))
            return seen[-1]

        cohort = SharedPrefixCohort(requests, SessionCache(0), self._shape, forward, self._limit)
        for back in (2, 1):
            fed = [r.prompt + p[-2:] for r, p in zip(requests, prompts, strict=True) for _ in range(2)]
            cohort.rows.last = torch.tensor([ids[len(ids) - back] for ids in fed], device=self._device)
            cohort.step()
        tolerance = 1e-3 if self._shape.dtype in (torch.float32, torch.float64) else 0.1
        for row in range(4):
            expected = whole[row // 2].logits[0, -1].float()
            error = (seen[-1][row].float() - expected).abs().max().item()
            if not error <= tolerance * (1 + expected.abs().max().item()):
                return f"its attention differs from the engine's (logits by {error:.2g})"
        return None


class _NoFuture:
    """Stands for a future in the start-up check, which runs outside requests."""

    def done(self) -> bool:
        return False

    def set_result(self, result: Any) -> None:
        return None


def _unsuitable(config: Any, context_limit: int) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds == {"full_attention"} and getattr(config, "layer_types", None):
        window = None
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if kinds != {"full_attention"}:
        return f"it has layers of kinds {sorted(kinds)}"
    if window is not None and window < context_limit:
        return f"it attends to a window of {window} tokens"
    for name in ("attn_logit_softcapping", "is_encoder_decoder"):
        if getattr(config, name, None):
            return f"it has {name}"
    return None


def _adapter_modules(model: Any) -> list[Any]:
    """The modules whose adapter can be passed by. Their flag is set directly: PEFT's own context also flips requires_grad."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    if any(isinstance(m, BaseTunerLayer) and m.merged for m in found):
        raise ModelError("the adapter is merged into the weights: it cannot be switched off")
    return found

"""Weight push ``disk``: a shared folder (``/dev/shm`` on one node), ``reload_weights`` and a prefix-cache reset on every server.

A push ends with a probe: log-probs of a few fixed sequences, by every server and by the trainer, must agree. It catches a
tensor that stayed behind (a tied head, a wrong name), which no status code shows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from maieutic.engines.vllm import VllmEngine
from maieutic.engines.weights import write_version, write_weights
from maieutic.errors import EngineDownError, EngineError, EngineMismatchError

log = logging.getLogger(__name__)
T = TypeVar("T")

Scorer = Callable[[Sequence[Sequence[int]]], list[list[float]]]
"""The trainer's log-probs (T = 1) of each sequence's tokens after the first."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """Seconds and bytes of one push, and the probe's largest log-prob difference."""

    policy_version: int
    bytes: int
    write_s: float
    load_s: float
    probe_s: float
    probe_gap: float


class DiskPush:
    """Keeps the servers of one engine at the trainer's weights, and proves it.

    Args:
        model: the policy (a PEFT model is merged into copies).
        folder: seen by trainer and servers under the same path.
        probe: sequences to compare on; short, and like what the servers are asked.
        score: the trainer's log-probs of them.
        tolerance: most |log-prob difference|.
        timeout_s: of one server's reload.
        patience_s: how long a push waits for a server that is down; None: no longer than ``timeout_s``.
    """

    def __init__(
        self,
        model: Any,
        engine: VllmEngine,
        folder: Path,
        *,
        probe: Sequence[Sequence[int]],
        score: Scorer,
        tolerance: float,
        timeout_s: float = 300.0,
        patience_s: float | None = None,
    ) -> None:
        if not probe or any(len(ids) < 2 for ids in probe):
            raise ValueError("the probe needs sequences of two tokens or more")
        self._model, self._engine, self._folder = model, engine, folder
        self._probe, self._score, self._tolerance = [list(ids) for ids in probe], score, tolerance
        self._timeout_s = timeout_s
        self._patience_s = timeout_s if patience_s is None else patience_s
        self._scores: list[list[float]] = []
        self.version: int | None = None
        """Policy version that every server holds; None before the first push and after one that failed."""
        self.report: PushReport | None = None
        engine.pool.revive = self.restore

    async def push(self, policy_version: int) -> None:
        """Put the policy's weights into every server, unless they hold this version already.

        Raises:
            EngineDownError: a server was down for longer than the patience.
            EngineError: a server that is up did not take the weights.
            EngineMismatchError: a server's log-probs differ from the trainer's by more than the tolerance.
        """
        if self.version == policy_version:
            return
        self.version = None
        start = time.monotonic()
        size = write_weights(self._model, self._folder)
        write_version(self._folder, policy_version)
        self._scores = self._score(self._probe)
        written = time.monotonic()
        urls = self._engine.pool.urls
        await asyncio.gather(*(self._insist(url, partial(self._load, url)) for url in urls))
        loaded = time.monotonic()

        async def prove(url: str) -> float:
            try:
                return await self._agree(url, policy_version)
            except EngineMismatchError:
                raise
            except EngineError:  # it died just now, and comes back without what it was given
                return await self._insist(url, partial(self._reload, url, policy_version))

        gap = max(await asyncio.gather(*(prove(url) for url in urls)))
        self.version = policy_version
        await self._engine.new_step(policy_version)
        self.report = PushReport(
            policy_version, size, written - start, loaded - written, time.monotonic() - loaded, gap
        )
        log.info("pushed policy version %d: probe gap %.2g", policy_version, gap)

    async def restore(self, url: str) -> None:
        """Bring a server that may have been restarted back to the pushed weights. EngineError while it is not healthy."""
        if self.version is None:
            return
        status, _ = await self._engine.pool.get("/health", url=url)
        if status != 200:
            raise EngineError(
                f"{self._engine.pool.role}: {url} is not healthy (status {status or 'no answer'})"
            )
        gap = await self._reload(url, self.version)
        log.warning("%s answers again: policy version %d is back (probe gap %.2g)", url, self.version, gap)

    async def verify(self) -> None:
        """Every server still holds the pushed weights, by the shortest probe sequence; EngineMismatchError if not.

        One that is down is waited for and gets them again, as :meth:`push` does.
        """
        if self.version is None:
            raise EngineMismatchError(f"{self._engine.pool.role}: no weights were pushed to the servers yet")
        shortest = min(range(len(self._probe)), key=lambda i: len(self._probe[i]))
        for url in self._engine.pool.urls:
            try:
                await self._agree(url, self.version, [shortest])
            except EngineMismatchError:
                raise
            except EngineError:
                await self._insist(url, partial(self.restore, url))

    async def _insist(self, url: str, action: Callable[[], Awaitable[T]]) -> T:
        """The result of ``action`` at one server; a server that is down is waited for."""
        pool, refused = self._engine.pool, False
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await action()
            except EngineMismatchError:
                raise
            except EngineError as error:
                status, _ = await pool.get("/health", url=url)
                if status == 200 and refused:
                    raise
                refused = status == 200
                if time.monotonic() > deadline:
                    raise EngineDownError(
                        f"{pool.role}: {url} took no weights for {self._patience_s:g} s: {error}"
                    ) from None
                await asyncio.sleep(pool.policy.backoff_s)

    async def _reload(self, url: str, version: int) -> float:
        await self._load(url)
        return await self._agree(url, version)

    async def _load(self, url: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder.resolve())}}
        pool = self._engine.pool
        await pool.post_one(url, "/collective_rpc", body, timeout_s=self._timeout_s)
        # What was cached was computed with the older weights.
        await pool.post_one(url, "/reset_prefix_cache", {}, timeout_s=self._timeout_s)

    async def _agree(self, url: str, version: int, which: Sequence[int] | None = None) -> float:
        worst = 0.0
        for i in range(len(self._probe)) if which is None else which:
            theirs = await self._engine.score_at(url, self._probe[i])
            # Written so that NaN fails too.
            worst = max(worst, *(_gap(a, b) for a, b in zip(self._scores[i], theirs, strict=True)))
        if not worst <= self._tolerance:
            raise EngineMismatchError(
                f"policy version {version}: {self._engine.pool.role} server {url} and the trainer disagree by {worst:.2e} on a "
                f"log-prob (tolerance {self._tolerance:.1e}): weights stayed behind, or the server runs in another dtype "
                "(`maieutic serve` starts it right; see training.probe_tolerance)"
            )
        return worst


def _gap(a: float, b: float) -> float:
    gap = abs(a - b)
    return gap if gap == gap else float("inf")

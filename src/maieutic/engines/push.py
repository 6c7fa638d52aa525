"""Weight pushes: the policy's weights into every server of the tutor, and the proof that they arrived.

How they travel is the business of a :class:`WeightPush`'s subclasses (:class:`DiskPush` here, and
:mod:`maieutic.engines.push_lora`, :mod:`maieutic.engines.push_nccl`). Common to all: a push ends with a probe, where log-probs
of a few fixed sequences, by every server and by the trainer, must agree (it catches a tensor that stayed behind, a tied head, a
wrong name, which no status code shows); servers that can name the version of their weights must name this one; and a server
that is lost is left out while others serve, and gets the weights before it is asked anything again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from maieutic.engines.vllm import VllmEngine
from maieutic.engines.weights import write_version, write_weights
from maieutic.errors import EngineDownError, EngineError, EngineMismatchError, WeightPushError

log = logging.getLogger(__name__)

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
    """Of the trainer's log-probs and the servers', together."""
    probe_gap: float
    lost: int = 0
    """Servers that were down and are left out until they answer again."""


class WeightPush(ABC):
    """Keeps the servers of one engine at the trainer's weights, and proves it.

    Args:
        probe: sequences to compare on; short, and like what the servers are asked.
        score: the trainer's log-probs of them.
        tolerance: most |log-prob difference|.
        timeout_s: of one server's load.
        patience_s: how long a push waits when every server is down; None: no longer than ``timeout_s``.
    """

    def __init__(
        self,
        engine: VllmEngine,
        *,
        probe: Sequence[Sequence[int]],
        score: Scorer,
        tolerance: float,
        timeout_s: float = 300.0,
        patience_s: float | None = None,
    ) -> None:
        if not probe or any(len(ids) < 2 for ids in probe):
            raise ValueError("the probe needs sequences of two tokens or more")
        self._engine = engine
        self._probe, self._score, self._tolerance = [list(ids) for ids in probe], score, tolerance
        self._timeout_s = timeout_s
        self._patience_s = timeout_s if patience_s is None else patience_s
        self._scores: list[list[float]] = []
        self.version: int | None = None
        """Policy version that every server in service holds; None before the first push and after one that failed."""
        self.report: PushReport | None = None
        engine.pool.revive = self.restore

    # ---- how weights travel ------------------------------------------------------------------------------------------

    @abstractmethod
    def _stage(self, version: int) -> int:
        """Make the policy's weights ready to be loaded; returns their bytes."""

    @abstractmethod
    async def _load(self, url: str, version: int) -> None:
        """Bring the staged weights into one server. EngineError naming it if it does not take them."""

    async def _serve(self, version: int) -> None:
        """Every server in service has the weights and was probed: requests are meant for them from now on."""
        await self._engine.new_step(version)

    # ---- what callers use --------------------------------------------------------------------------------------------

    async def push(self, policy_version: int) -> None:
        """Put the policy's weights into every server, unless they hold this version already.

        Raises:
            EngineDownError: every server was down for longer than the patience.
            WeightPushError: a server that is up did not take the weights, or not in time.
            EngineMismatchError: a server's log-probs differ from the trainer's by more than the tolerance, or it names another
                version.

        WeightPushError too when the folder does not take the weights (a full disk, no permission).
        """
        if self.version == policy_version:
            return
        self.version = None
        start = time.monotonic()
        try:
            size = self._stage(policy_version)
        except (OSError, SafetensorError) as error:
            raise WeightPushError(
                f"policy version {policy_version} was not pushed: its weights cannot be written ({error}); see "
                "tutor.engine.push_folder"
            ) from error
        written = time.monotonic()
        self._scores = self._score(self._probe)
        scored = time.monotonic()
        held: list[float] = []
        deadline = time.monotonic() + self._patience_s
        while not held:  # again where all of them died after they were loaded
            loaded = await self._deliver(policy_version, deadline)
            served = time.monotonic()
            gaps = [await self._proved(url, policy_version) for url in loaded]
            held = [gap for gap in gaps if gap is not None]
        self.version = policy_version
        await self._serve(policy_version)
        lost = len(self._engine.pool.urls) - len(held)
        self.report = PushReport(
            policy_version,
            size,
            written - start,
            served - scored,
            time.monotonic() - served + scored - written,
            max(held),
            lost,
        )
        log.info("pushed policy version %d: probe gap %.2g", policy_version, max(held))

    async def restore(self, url: str) -> None:
        """Bring a server that may have been restarted back to the pushed weights. EngineError while it is not healthy."""
        if self.version is None:
            return
        await self._healthy(url)
        gap = await self._reload(url, self.version)
        log.warning("%s answers again: policy version %d is back (probe gap %.2g)", url, self.version, gap)

    async def verify(self) -> None:
        """Every server still holds the pushed weights, by the shortest probe sequence; EngineMismatchError if not.

        One that is down is left out, and gets them again before it is asked anything.
        """
        if self.version is None:
            raise EngineMismatchError(f"{self._engine.pool.role}: no weights were pushed to the servers yet")
        shortest = min(range(len(self._probe)), key=lambda i: len(self._probe[i]))
        pool = self._engine.pool
        for url in pool.urls:
            if not pool.in_service(url):
                continue
            try:
                await self._agree(url, self.version, [shortest])
            except EngineMismatchError:
                raise
            except EngineError as error:
                pool.lose(url, str(error))

    # ---- one server --------------------------------------------------------------------------------------------------

    async def _deliver(self, version: int, deadline: float) -> list[str]:
        """Load every server; returns those that did. One that is down is set aside, unless all of them are."""
        pool = self._engine.pool
        while True:
            done = await asyncio.gather(*(self._try_to_load(url, version) for url in pool.urls))
            loaded = [url for url, error in zip(pool.urls, done, strict=True) if error is None]
            if loaded:
                return loaded
            if time.monotonic() > deadline:
                raise EngineDownError(
                    f"{pool.role}: none of {', '.join(pool.urls)} took weights for {self._patience_s:g} s: {done[0]}"
                )
            await asyncio.sleep(pool.policy.backoff_s)

    async def _try_to_load(self, url: str, version: int) -> EngineError | None:
        """None, or why the server is lost. What a healthy server refuses twice ends the push."""
        pool, refused = self._engine.pool, False
        while True:
            try:
                await self._load(url, version)
                return None
            except EngineMismatchError:
                raise
            except EngineError as error:
                if await self._is_healthy(url):
                    if refused:
                        raise WeightPushError(f"policy version {version} was not pushed: {error}") from error
                    refused = True
                    await asyncio.sleep(pool.policy.backoff_s)
                    continue
                pool.lose(url, str(error))
                return error

    async def _proved(self, url: str, version: int) -> float | None:
        """The probe's gap at one server; None if it was lost since it took the weights."""
        try:
            gap = await self._agree(url, version)
            self._engine.pool.found(url)
            return gap
        except EngineMismatchError:
            raise
        except EngineError as error:  # it died just now, and comes back without what it was given
            self._engine.pool.lose(url, str(error))
            return None

    async def _is_healthy(self, url: str) -> bool:
        status, _ = await self._engine.pool.get("/health", url=url)
        return status == 200

    async def _healthy(self, url: str) -> None:
        if not await self._is_healthy(url):
            raise EngineError(f"{self._engine.pool.role}: {url} is not healthy")

    async def _reload(self, url: str, version: int) -> float:
        await self._load(url, version)
        return await self._agree(url, version)

    async def _agree(self, url: str, version: int, which: Sequence[int] | None = None) -> float:
        named = await self._named(url)
        if named is not None and named != str(version):
            raise EngineMismatchError(
                f"policy version {version}: {self._engine.pool.role} server {url} says that it holds version {named}: another "
                "run pushes to it, or it was restarted"
            )
        worst = 0.0
        for i in range(len(self._probe)) if which is None else which:
            theirs = await self._engine.score_at(url, self._probe[i], model=self._served_name(version))
            # Written so that NaN fails too.
            worst = max(worst, *(_gap(a, b) for a, b in zip(self._scores[i], theirs, strict=True)))
        if not worst <= self._tolerance:
            raise EngineMismatchError(
                f"policy version {version}: {self._engine.pool.role} server {url} and the trainer disagree by {worst:.2e} on a "
                f"log-prob (tolerance {self._tolerance:.1e}): weights stayed behind, or the server runs in another dtype "
                "(`maieutic serve` starts it right; see training.probe_tolerance)"
            )
        return worst

    async def _named(self, url: str) -> str | None:
        """The version that the server says it holds; None where it does not say."""
        return await self._engine.held_version(url)

    def _served_name(self, version: int) -> str | None:
        """The model that requests name (None: the server's own)."""
        return None


class DiskPush(WeightPush):
    """Push ``disk``: a shared folder (``/dev/shm`` on one node), ``reload_weights`` and a prefix-cache reset on every server.

    Args:
        model: the policy (a PEFT model is merged into copies).
        folder: seen by trainer and servers under the same path.
        settings: see :class:`WeightPush`.
    """

    def __init__(self, model: Any, engine: VllmEngine, folder: Path, **settings: Any) -> None:
        super().__init__(engine, **settings)
        self._model, self._folder = model, folder

    def _stage(self, version: int) -> int:
        size = write_weights(self._model, self._folder)
        write_version(self._folder, version)
        return size

    async def _load(self, url: str, version: int) -> None:
        pool, limit = self._engine.pool, self._timeout_s
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder.resolve())}}
        await pool.post_one(url, "/collective_rpc", body, timeout_s=limit)
        # What was cached was computed with the older weights.
        await pool.post_one(url, "/reset_prefix_cache", {}, timeout_s=limit)
        await self._engine.name_version(url, version)


def _gap(a: float, b: float) -> float:
    gap = abs(a - b)
    return gap if gap == gap else float("inf")

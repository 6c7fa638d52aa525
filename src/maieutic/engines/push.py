"""Weight push ``disk``: a shared folder (``/dev/shm`` on one node), ``reload_weights`` and a prefix-cache reset on every server.

A push ends with a probe: log-probs of a few fixed sequences, by every server and by the trainer, must agree. It catches a
tensor that stayed behind (a tied head, a wrong name), which no status code shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maieutic.engines.vllm import VllmEngine
from maieutic.engines.weights import write_version, write_weights
from maieutic.errors import EngineMismatchError

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


async def push_disk(
    model: Any,
    engine: VllmEngine,
    folder: Path,
    *,
    policy_version: int,
    probe: Sequence[Sequence[int]],
    score: Scorer,
    tolerance: float,
    timeout_s: float = 300.0,
    config_from: Path | None = None,
) -> PushReport:
    """Put the policy's weights into every server of ``engine`` and prove it.

    Raises:
        EngineError: a server did not take the weights within ``timeout_s``.
        EngineMismatchError: a server's log-probs differ from the trainer's by more than ``tolerance``.
    """
    t0 = time.monotonic()
    size = write_weights(model, folder, config_from=config_from)
    write_version(folder, policy_version)
    t1 = time.monotonic()
    await engine.pool.post_all(
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}},
        timeout_s=timeout_s,
    )
    await engine.pool.post_all("/reset_prefix_cache", {}, timeout_s=timeout_s)
    t2 = time.monotonic()
    gap = await probe_gap(engine, probe, score)
    if not gap <= tolerance:
        raise EngineMismatchError(
            f"after pushing policy version {policy_version}, {engine.pool.role} servers and trainer disagree by {gap:.2e} "
            f"on a log-prob (tolerance {tolerance:.1e}): weights stayed behind, or the server runs without "
            "--logprobs-mode processed_logprobs or in another dtype"
        )
    await engine.new_step(policy_version)
    return PushReport(policy_version, size, t1 - t0, t2 - t1, time.monotonic() - t2, gap)


async def probe_gap(engine: VllmEngine, probe: Sequence[Sequence[int]], score: Scorer) -> float:
    """Largest |log-prob difference| between trainer and *each* server over the probe's tokens."""
    ours = score(probe)
    worst = 0.0
    for url in engine.pool.urls:
        for ids, mine in zip(probe, ours, strict=True):
            theirs = await engine.score_at(url, ids)
            worst = max(worst, *(abs(a - b) for a, b in zip(mine, theirs, strict=True)))
    return worst

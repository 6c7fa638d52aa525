"""What the fault tests share: a tiny run over scripted servers, faults, and what must hold after any of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import training_parts as parts
from loopback import Loopback, dumps, raw, status
from maieutic.config import Recipe
from maieutic.training import checkpoint
from maieutic.transcripts import read_episodes

FAST = {
    "concurrency": 8,
    "timeout_s": 5.0,
    "retries": 2,
    "backoff_s": 0.01,
    "backoff_max_s": 0.05,
    "outage_limit_s": 1.0,
}
OK = dumps({"reasoning": "fine", "verdict": "OK", "criterion": "", "quote": ""})


def speak(body: dict[str, Any]) -> str | list[str]:
    """A student: a line in the dialogue, n answers in a post-test."""
    n = body.get("n", 1)
    return [f"\\boxed{{{i}}}" for i in range(n)] if n > 1 else "I think it is 4."


def engine(server: Loopback, kind: str = "chat", **http_policy: Any) -> dict[str, Any]:
    return {"kind": kind, "urls": [server.url], "http": FAST | http_policy, "push_timeout_s": 10}


def recipe_of(model: Path, folder: Path, **changes: Any) -> Recipe:
    """2 pairs × 2 episodes a step, 3 steps, a checkpoint after each."""
    student = changes.pop("student", None)
    base = {"training.max_steps": 3, "eval.every": 0, "checkpoint.every": 1, "training.excluded_patience": 1}
    data = parts.recipe_dict(model, folder, **{**base, **changes})
    if student is not None:
        data["students"][0]["engine"] = student
    return Recipe.model_validate_json(json.dumps(data))


def with_judge(server: Loopback, **http_policy: Any) -> dict[str, Any]:
    judge = {"kind": "llm", "model": "j", "votes": 3, "reasks": 1, "engine": engine(server, **http_policy)}
    return {"judge": judge, "env.gates": "hard", "reward": {}}


def steps(run: Path) -> list[int]:
    return [s for s, _ in checkpoint.complete(run / "checkpoints")]


def usage(run: Path, role: str) -> dict[str, float]:
    return json.loads((run / "usage.json").read_text())[role]


def assert_nothing_scored_silently(run: Path) -> None:
    """An excluded episode has no reward and no finite reward in its token record; the rows count every exclusion."""
    rows = {r["train/step"]: r for r in parts.metrics_of(run) if "rollout/episodes" in r}
    for step, row in rows.items():
        episodes = list(read_episodes(run, "train", [int(step)]))
        excluded = [e for e in episodes if not e.counted]
        assert row["rollout/excluded_share"] == len(excluded) / len(episodes) == len(excluded) / 4
        for e in excluded:
            assert e.exclusion and e.reward is None
            if e.trajectory is not None:
                assert e.trajectory.excluded and e.trajectory.reward != e.trajectory.reward


async def hang() -> None:
    await asyncio.sleep(3600)


TRANSIENT: dict[str, Callable[[], Any]] = {
    "500": lambda: status(500, "oops"),
    "429": lambda: status(429, "slow down", **{"Retry-After": "0.01"}),
    "hangs": hang,
    "junk": lambda: raw("<html>"),
    "cut": lambda: raw('{"choices": ['),
    "oversized": lambda: raw(dumps({"choices": "x" * 70_000})),
}


def tutor_recipe(model: Path, folder: Path, tutor: Loopback, student: Loopback, **changes: Any) -> Recipe:
    policy = {k: changes.pop(k) for k in list(changes) if k in FAST}
    served = {"tutor.engine": engine(tutor, "vllm", **policy), "tutor.dtype": "float32"}
    return recipe_of(model, folder, student=engine(student), **(served | changes))


def assert_on_policy(run: Path) -> None:
    for row in parts.metrics_of(run):
        assert row["train/logprob_gap"] <= 1e-3 and row["push/probe_gap"] <= 1e-3

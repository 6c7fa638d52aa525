"""A classroom of the product's own parts on simulated servers: one for the tutor, one for the student, one for the judge.

Recipe, environment ``near_transfer``, engines and client are what a training run builds; only the servers are simulated, each
in a process of its own, with S slots and the times of :mod:`support.latencies`. Whatever they say follows from the bytes of a
request, so the same seeds give the same episodes under every schedule.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maieutic.config import Recipe
from maieutic.env.base import Episode
from maieutic.rollout import RolloutResult, Slot, rollout
from maieutic.runtime import Classroom, build_classroom, build_policy, resolve_env
from maieutic.tiny import make_tiny_model
from support.latencies import Stages, Trace, stages_of, timed
from support.lines import RIGHT, Lines, make_lines
from support.loopback import Loopback
from support.outcome import check

GROUP = 8
"""Episodes of a pair, as published."""
SAMPLES = 16
"""K, as published."""
VOTES = 3


@dataclass
class Servers:
    """The running servers by model."""

    by_model: dict[str, Loopback]
    trace: Trace | None
    slots: dict[str, int] | None

    def reset(self) -> None:
        for server in self.by_model.values():
            server.reset()


@contextmanager
def serving(lines: Lines, trace: Trace | None, slots: dict[str, int] | None) -> Iterator[Servers]:
    """Three servers; without ``trace`` they answer at once, without ``slots`` they take any number of requests."""
    script: Any = lines
    servers = {
        model: Loopback(script, latency=trace, slots=slots[model] if slots else None) for model in lines.lines
    }
    started: list[Loopback] = []
    try:
        for server in servers.values():
            started.append(server.__enter__())
        yield Servers(servers, trace, slots)
    finally:
        for server in started:
            server.__exit__()


class World:
    """Model, problems and recipe in a folder; :meth:`play` plays one rollout."""

    def __init__(self, folder: Path, pairs: int) -> None:
        self.folder = folder
        self.model = make_tiny_model(folder / "model", max_position_embeddings=16_384)
        self.episodes = pairs * GROUP
        rates = {"test": {"rate": 0.25, "n": 4}}
        with (folder / "pairs.jsonl").open("w") as file:
            for i in range(1, pairs + 1):
                source = {"text": f"Ann has {i} pens and buys {i + 2}. How many?", "answer": str(2 * i + 2)}
                transfer = {
                    "text": f"Bob has {i} nuts. How many are left of 1 more?",
                    "answer": str(i % RIGHT + 1),
                }
                row = {
                    "id": f"p{i}",
                    "source": source | {"rates": rates},
                    "transfer": transfer | {"rates": rates},
                }
                file.write(json.dumps(row) + "\n")
        self.lines = make_lines("<end_of_conversation>")
        self._policy: Any = None

    def recipe(self, servers: Servers, judge: str, env: Mapping[str, Any]) -> Recipe:
        """The recipe of a run on these servers. ``judge``: ``llm`` or ``rule``."""

        def engine(model: str, kind: str) -> dict[str, Any]:
            # The servers queue, as vLLM does: a request waits there and not in the client.
            http = {"concurrency": 1024}
            return {"kind": kind, "urls": [servers.by_model[model].url], "served_name": model, "http": http}

        model = str(self.model)
        llm = {"kind": "llm", "model": "judge", "votes": VOTES, "engine": engine("judge", "chat")}
        data = {
            "name": "run",
            "output_dir": str(self.folder),
            "offline": True,
            "tutor": {"model": model, "engine": engine("tutor", "vllm")},
            "students": [{"model": model, "engine": engine("student", "vllm")}],
            "judge": llm if judge == "llm" else {"kind": "rule"},
            # Tiny tokenizers need some four times as many tokens for a prompt.
            "env": {"prompt_limit": 8192, "conversation_limit": 16_384, "post_test_samples": SAMPLES} | dict(env),
            "problems": {"source": str(self.folder / "pairs.jsonl"), "options": {"rates_of": "test"}, "eval_size": 0},
            "training": {"group_size": GROUP},
        }  # fmt: skip
        return resolve_env(Recipe.model_validate_json(json.dumps(data)))

    def play(
        self,
        servers: Servers,
        seed: int,
        *,
        judge: str = "llm",
        env: Mapping[str, Any] | None = None,
        schedule: Callable[[Classroom], Callable[[Slot], Awaitable[Episode]]] = lambda c: c.play_train,
    ) -> Played:
        """One step's episodes with this run seed, on servers that forget what came before."""
        recipe = self.recipe(servers, judge, env or {})
        if self._policy is None:
            self._policy = build_policy(recipe, torch.device("cpu"))
        classroom = build_classroom(recipe, self._policy)
        servers.reset()

        async def run() -> RolloutResult:
            try:
                await classroom.start()
                # The grader's workers have started before the clock does, as in every step but the first.
                await classroom.grader.grade_many([f"\\boxed{{x + {i} - x}}" for i in range(4)], "0")
                return await rollout(
                    schedule(classroom),
                    sorted(classroom.train_pairs, key=lambda p: p.id),
                    phase="train",
                    step=1,
                    run_seed=seed,
                    group_size=GROUP,
                    retries=0,
                )
            finally:
                await classroom.close()

        cpu = time.process_time()
        result = asyncio.run(run())
        cpu = time.process_time() - cpu
        served = {m: s.served() for m, s in servers.by_model.items()}
        stats = {m: s.stats() for m, s in servers.by_model.items()}
        requests = Counter((row["model"], row["seed"], row["n"]) for rows in served.values() for row in rows)
        usage = {k: v for k, v in classroom.ledger.metrics().items() if k.endswith(("/retries", "/failures"))}
        return Played(result, requests, stats, usage, cpu)


@dataclass
class Played:
    """One rollout and what the servers saw of it."""

    result: RolloutResult
    requests: Counter[tuple[str, int, int]]
    """(model, seed, samples) of what was answered."""
    stats: dict[str, dict[str, float]]
    usage: dict[str, float]
    cpu_s: float

    @property
    def seconds(self) -> float:
        return self.result.seconds

    def facts(self) -> list[tuple[Any, ...]]:
        """What a schedule must not change: ids, seeds, words, verdicts, answers and rewards of the episodes."""
        return [
            (
                e.id,
                e.seed,
                e.dialogue.end,
                tuple(t.visible for t in e.dialogue.turns),
                tuple((name, v.decision) for name, v in e.verdicts.items()),
                None if e.post_test is None else (tuple(e.post_test.answers), tuple(e.post_test.grades)),
                None if e.reward is None else e.reward.reward,
            )
            for e in self.result.episodes
        ]

    def spoken(self) -> list[tuple[Any, ...]]:
        """The dialogues alone."""
        return [fact[:4] for fact in self.facts()]

    def stages(self, gates: Sequence[str], samples: int) -> list[Stages]:
        """The requests of every episode."""
        return [stages_of(e, gates=gates, samples=samples, votes=VOTES) for e in self.result.episodes]

    def verify(self, servers: Servers, stages: Sequence[Stages], *, counted: bool = True) -> None:
        """End the benchmark unless this rollout asked exactly for ``stages``, lost nothing, and the servers kept their bounds."""
        expected = Counter((r.model, r.seed, r.n) for e in stages for stage in e for r in stage)
        differ = (self.requests - expected) + (expected - self.requests)
        check(not differ, f"{len(differ)} requests differ from what the episodes must have asked for")
        check(not any(self.usage.values()), f"requests were repeated or failed: {self.usage}")
        counts = self.result.counts
        if counted:
            check(counts["counted"] == counts["episodes"], f"episodes are excluded: {counts}")
        excluded = [e.exclusion for e in self.result.episodes if e.exclusion is not None]
        check(
            not excluded and not counts["retried"], f"episodes are lost or played again: {excluded}, {counts}"
        )
        if servers.trace is None or servers.slots is None:
            return
        work = dict.fromkeys(servers.slots, 0.0)
        for model, seconds in (x for e in stages for stage in timed(e, servers.trace) for x in stage):
            work[model] += seconds
        for model, slots in servers.slots.items():
            stats = self.stats[model]
            check(
                stats["most_working"] <= slots,
                f"{model}: {stats['most_working']} of {slots} slots were in use",
            )
            check(
                abs(stats["busy_s"] - work[model]) <= 1e-6 * (1 + work[model]),
                f"{model}: {stats['busy_s']} s of work were served, the trace has {work[model]}",
            )
            check(
                stats["busy_s"] <= slots * self.seconds,
                f"{model}: more work than {slots} slots can do in {self.seconds:.2f} s",
            )

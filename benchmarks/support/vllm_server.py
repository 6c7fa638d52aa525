"""A real vLLM server on the CPU for benchmarks: started as ``maieutic serve`` starts one, and asked for its own counts."""

from __future__ import annotations

import asyncio
import re
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maieutic.config import Recipe
from maieutic.engines.vllm import VllmEngine
from maieutic.errors import ModelError
from maieutic.models import resolve_model
from maieutic.problems.splits import ProblemOrder
from maieutic.recipe import load_recipe
from maieutic.rollout import RolloutResult, rollout
from maieutic.runtime import Classroom, Policy, build_classroom, build_policy, resolve_env
from maieutic.serve import Server, plan
from support.recording import Call, Recording

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
REAL = "smollm2-135m"
RECIPE = "smollm2/dppo"
_STAND_IN = {  # 30 M parameters, heads of 64 (vLLM on the CPU takes multiples of 32)
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 384,
    "initializer_range": 0.03,
}


@dataclass(frozen=True)
class Chosen:
    """A model that plays tutor and student. ``real``: one that users would name, not the random stand-in."""

    name: str
    folder: str
    real: bool


def choose_model(folder: Path, wanted: str = REAL) -> Chosen:
    """``wanted`` (fetched if need be), or, said loudly, a random model in ``folder``, whose figures are not those of the table."""
    try:
        return Chosen(wanted, resolve_model(wanted), real=True)
    except ModelError as error:
        print(
            f"WARNING: {wanted} is not to be had ({error}); a RANDOM 30M model takes its place",
            file=sys.stderr,
        )
    return Chosen("random-30m", str(random_model(folder / "random-30m")), real=False)


def random_model(folder: Path, **config: Any) -> Path:
    """A random model of 30 M parameters (``config`` overrides), with the tiny byte-level tokenizer."""
    from maieutic.tiny import make_tiny_model

    return make_tiny_model(folder, **(_STAND_IN | config))


def recipe_of(model: Chosen, folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """``smollm2/dppo`` with tutor and student on one server, whose address file is ``folder/server.json``."""
    served = f"{{kind: vllm, urls: ['file:{folder / 'server.json'}']}}"
    changes = [f"output_dir={folder}", f"tutor.engine={served}", f"students.0.engine={served}"]
    if not model.real:
        changes += [f"tutor.model={model.folder}", f"students.0.model={model.folder}"]
        changes += ["problems.options={rates_of: 'smollm2-135m|360bb6045517|T=0.6|p=1|max=80'}"]
    return resolve_env(load_recipe(RECIPE, [*changes, *overrides]))


@contextmanager
def serving(
    recipe: Recipe, model: Chosen, folder: Path, *, extra: Sequence[str] = (), name: str = "server"
) -> Iterator[Server]:
    """One server for both roles: the tutor's command (weights can be pushed) with room for what the student reads."""
    if not PYTHON.exists():
        raise SystemExit(f"no vLLM at {PYTHON}: scripts/setup_vllm.sh makes it")
    room = plan(recipe, "student", model_dir=model.folder, python=str(PYTHON)).context
    what = plan(
        recipe,
        "tutor",
        model_dir=model.folder,
        python=str(PYTHON),
        extra=["--max-model-len", str(room), *extra],
    )
    with Server(what, folder / f"{name}.json", folder / f"{name}.log", timeout_s=400.0) as server:
        yield server


@dataclass
class Room:
    """A classroom as training builds it, whose servers' requests are recorded."""

    recipe: Recipe
    policy: Policy
    classroom: Classroom
    recording: Recording

    @classmethod
    async def open(cls, recipe: Recipe) -> Room:
        """Build it, and push the weights as a first step does."""
        policy = build_policy(recipe, torch.device("cpu"))
        classroom = build_classroom(recipe, policy)
        await classroom.new_step(0)
        recording = Recording()
        assert isinstance(classroom.engine, VllmEngine)
        for engine in (classroom.engine, *(chat._engine for chat in classroom.chats)):
            recording.attach(engine.pool)
        return cls(recipe, policy, classroom, recording)

    @property
    def slots(self) -> int:
        """Most requests in flight for one role."""
        return self.recipe.tutor.engine.http.concurrency

    async def play(self, step: int, problems: int | None = None) -> tuple[float, RolloutResult, list[Call]]:
        """One step's rollout as :mod:`maieutic.training.loop` plays it: seconds (with the check of the weights that ends it).

        ``problems``: only the first ones (a warm-up).
        """
        training = self.recipe.training
        pairs = self.classroom.train_pairs
        order = ProblemOrder(len(pairs), self.recipe.seed, training.problems_per_step)
        self.recording.take()
        start = time.perf_counter()
        result = await rollout(
            self.classroom.play_train,
            [pairs[i] for i in order.indices(step - 1)][:problems],
            phase="train",
            step=step,
            run_seed=self.recipe.seed,
            group_size=training.group_size,
            retries=training.group_retries,
        )
        await self.classroom.verify()
        return time.perf_counter() - start, result, self.recording.take()


async def reset_prefix_cache(url: str) -> None:
    """Forget all computed blocks, as after a weight push."""
    await asyncio.to_thread(
        _get, urllib.request.Request(f"{url}/reset_prefix_cache", data=b"", method="POST")
    )


async def read_counts(url: str) -> dict[str, float]:
    """vLLM's own counters by name, without the prefix ``vllm:`` (``prefix_cache_hits_total``, …), summed over their labels."""
    return parse_counts(await asyncio.to_thread(_get, f"{url}/metrics"))


def _get(what: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(what, timeout=60) as answer:
        return answer.read().decode()


def parse_counts(text: str) -> dict[str, float]:
    """Of a page in the Prometheus text format, what vLLM counts; ``block_size`` and ``num_gpu_blocks`` from its configuration."""
    out: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.match(r"vllm:(\w+)(?:\{(.*)\})? (\S+)$", line):
            name, labels, value = match.groups()
            out[name] = out.get(name, 0.0) + float(value)
            if name == "cache_config_info":
                for key in ("block_size", "num_gpu_blocks"):
                    if found := re.search(rf'\b{key}="(\d+)"', labels or ""):
                        out[key] = float(found[1])
    return out

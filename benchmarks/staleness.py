"""Staleness 1 against 0 with a slow student: wall time, and whether the same is learned. Prints one JSON line.

    python benchmarks/staleness.py [--steps 24] [--seeds 3] [--first-seed 0] [--delay 0.6] [--epochs 1]

A bandit in the form of dialogues: a tiny random tutor is rewarded for letters (against digits, marks and blanks) in what it
says. It is sampled by a server in a process of its own that takes weights as vLLM does; the student is an endpoint that answers
nothing worth reading, ``--delay`` seconds late. So a rollout is mostly waiting, and an update mostly computing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
LAST = 6
"""Steps at the end over which the reward is averaged."""


def letters(episode: Any, spec: Any) -> Any:
    """The share of letters in what the tutor said (0 for a tutor that said nothing)."""
    from maieutic.env.base import RewardBreakdown

    text = "".join(t.visible for t in episode.dialogue.by("tutor"))
    share = sum(c.isalpha() for c in text) / max(len(text), 1)
    return RewardBreakdown(share, gated=False, pre=0.25, post=0.25, gain=0.0)


def serve(model: str, delay: float, urls: Any) -> None:
    """A tutor's and a slow student's server, until the process is ended."""
    import torch

    from fault_parts import speak
    from loopback import Loopback
    from token_server import TokenServer

    torch.set_num_threads(1)

    async def forever() -> None:
        tutor = TokenServer(Path(model))
        student = Loopback(speak, lambda number, body: asyncio.sleep(delay))
        await tutor.start()
        await student.start()
        urls.put((tutor.url, student.url))
        await asyncio.Event().wait()

    asyncio.run(forever())


def recipe_of(model: Path, folder: Path, urls: tuple[str, str], staleness: int, seed: int, args: Any) -> Any:
    import training_parts as parts

    changes = {
        "name": f"staleness-{staleness}-seed-{seed}",
        "seed": seed,
        "reward.kind": "staleness:letters",
        "tutor.dtype": "float32",
        "tutor.engine": {"kind": "vllm", "urls": [urls[0]], "push_folder": str(folder / "push")},
        "env.visible_budget": 16,
        "training.staleness": staleness,
        "training.max_steps": args.steps,
        "training.problems_per_step": 4,
        "training.group_size": 8,
        "training.mini_batch_problems": 2,
        "training.epochs_per_step": args.epochs,
        "training.optimizer": {"lr": 2e-2},
        "eval.every": 0,
        "checkpoint.every": 0,
    }
    data = parts.recipe_dict(model, folder, **changes)
    data["students"][0]["engine"] = {"kind": "chat", "urls": [urls[1]]}
    from maieutic.config import Recipe

    return Recipe.model_validate_json(json.dumps(data))


def measured(folder: Path) -> dict[str, float]:
    """Mean seconds of a step (the first, which has nothing to overlap with, left out), and rewards."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reward = [r["rollout/reward"] for r in rows]
    return {
        "step_s": statistics.mean(r["time/step"] for r in rows[1:-1]),
        "rollout_s": statistics.mean(r["time/rollout"] for r in rows[1:-1]),
        "update_s": statistics.mean(r["time/update"] for r in rows[1:-1]),
        "first": statistics.mean(reward[:2]),
        "last": statistics.mean(reward[-LAST:]),
        "staleness": statistics.mean(r["train/staleness"] for r in rows[1:-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--delay", type=float, default=0.6, help="seconds that the student takes for each answer"
    )
    parser.add_argument("--epochs", type=int, default=1, help="passes over a rollout: how long an update is")
    args = parser.parse_args()

    import torch

    from maieutic.tiny import make_tiny_model
    from maieutic.training import loop

    torch.set_num_threads(1)
    out: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model")
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        server = context.Process(target=serve, args=(str(model), args.delay, queue), daemon=True)
        server.start()
        try:
            urls = queue.get(timeout=300)
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                for staleness in (0, 1):
                    recipe = recipe_of(model, folder, urls, staleness, seed, args)
                    out[staleness].append(measured(loop.run(recipe).folder))
                    print(staleness, seed, out[staleness][-1], file=sys.stderr)
        finally:
            server.terminate()
            server.join()

    def mean(staleness: int, key: str) -> float:
        return round(statistics.mean(r[key] for r in out[staleness]), 4)

    gains = [b["last"] - a["last"] for a, b in zip(out[0], out[1], strict=True)]
    print(
        json.dumps(
            {
                "benchmark": "staleness",
                "steps": args.steps,
                "seeds": args.seeds,
                "first_seed": args.first_seed,
                "student_delay_s": args.delay,
                "cpus": os.cpu_count(),
                "wall_ratio": round(mean(1, "step_s") / mean(0, "step_s"), 4),
                **{f"{k}_{s}": mean(s, k) for k in ("step_s", "rollout_s", "update_s") for s in (0, 1)},
                **{f"reward_{k}_{s}": mean(s, k) for k in ("first", "last") for s in (0, 1)},
                "staleness": mean(1, "staleness"),
                "reward_difference": round(statistics.mean(gains), 4),
                "reward_difference_sd": round(statistics.stdev(gains), 4) if len(gains) > 1 else None,
            }
        )
    )


if __name__ == "__main__":
    main()

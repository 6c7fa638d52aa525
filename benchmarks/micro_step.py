"""One RL step of the micro-classroom with the general code: 16 problems × 8 episodes × at most 4 tutor turns, K = 16.

`python benchmarks/micro_step.py [--steps N] [--profile FILE] [key=value …]` trains the recipe micro/full for N steps in one
process and prints, as its last line, JSON with the medians in seconds (the first step, which warms up, does not count).
`--profile FILE` writes what cProfile saw.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import pstats
import statistics
import tempfile
from pathlib import Path

import torch

from maieutic.recipe import load_recipe
from maieutic.training.loop import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--recipe", default="micro/full")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    logging.getLogger("maieutic").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        settings = [
            f"output_dir={scratch}",
            "name=bench",
            f"training.max_steps={given.steps}",
            "eval.every=0",
        ]
        recipe = load_recipe(given.recipe, [*settings, "checkpoint.every=0", *given.overrides])
        profile = cProfile.Profile()
        if given.profile:
            profile.enable()
        run(recipe)
        profile.disable()
        text = (Path(scratch) / "bench" / "metrics.jsonl").read_text()
    if given.profile:
        with given.profile.open("w") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(60)
    rows = [row for row in map(json.loads, text.splitlines()) if "time/step" in row][1:]
    medians = {
        name: round(statistics.median(row[f"time/{name}"] for row in rows), 3)
        for name in ("step", "rollout", "update")
    }
    tokens = statistics.median(row["train/trained_tokens"] for row in rows)
    print(json.dumps({"benchmark": "micro_step", "seconds": medians, "steps": len(rows), "trained_tokens": tokens,
                      "threads": torch.get_num_threads()}))  # fmt: skip


if __name__ == "__main__":
    main()

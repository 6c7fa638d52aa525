"""Learning is visible: with the full recipe the tutor stops telling and the training reward rises, in a minute on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from maieutic.recipe import load_recipe
from maieutic.training.loop import run

STEPS = 18


@pytest.mark.integration
def test_the_full_recipe_stops_telling_and_earns_more(tmp_path: Path) -> None:
    recipe = load_recipe(
        "micro/full",
        [
            f"output_dir={tmp_path}",
            "name=learning",
            "seed=3",
            f"training.max_steps={STEPS}",
            "eval.every=0",
            "checkpoint.every=0",
        ],
    )
    run(recipe)
    rows = [json.loads(line) for line in (tmp_path / "learning" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/reward" in row]
    assert len(steps) == STEPS
    leak = [row["rollout/leak_rate"] for row in steps]
    reward = [row["rollout/reward"] for row in steps]
    print(
        f"leak {leak[0]:.3f} → {mean(leak[-3:]):.3f}, reward {mean(reward[:3]):.3f} → {mean(reward[-3:]):.3f}"
    )
    assert mean(leak[:2]) > 0.4, "the untrained tutor tells"
    assert mean(leak[-3:]) < 0.15
    assert mean(reward[-3:]) > mean(reward[:3]) + 0.05
    # What was trained on is what the engine sampled with.
    assert max(row["train/logprob_gap"] for row in steps) < 1e-4

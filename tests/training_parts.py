"""A whole training run in miniature, and parts of a user's own for it (named by import path in recipes)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maieutic.config import Recipe, RewardSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, RewardBreakdown, StudentFailed
from maieutic.problems.schema import Problem, StudentKey


def recipe_dict(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe on a tiny model that plays both sides: 2 pairs × 2 episodes a step, 2 optimizer steps a rollout."""
    data: dict[str, Any] = {
        "name": "run",
        "output_dir": str(folder),
        "offline": True,
        "tutor": {"model": str(model), "lora": {"r": 2, "alpha": 4}, "sampling": {"temperature": 1.15}},
        "students": [{"model": str(model), "sampling": {"temperature": 0.6, "max_tokens": 6}}],
        "env": {
            "max_turns": 4,
            "visible_budget": 8,
            "thinking_budget": 0,
            "post_test_samples": 2,
            "post_test_max_tokens": 4,
            "gates": "off",
        },
        "reward": {"kind": "training_parts:characters"},
        "problems": {"source": str(write_pairs(folder)), "options": {"rates_of": "test"}, "eval_size": 2},
        "training": {
            "max_steps": 6,
            "problems_per_step": 2,
            "group_size": 2,
            "mini_batch_problems": 1,
            "tokens_per_micro_batch": 1024,
            "gradient_checkpointing": False,
            "optimizer": {"lr": 1e-2},
        },
        "eval": {"every": 3},
        "checkpoint": {"every": 3, "best": None},
    }
    return merge(data, changes)


def merge(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``data`` with ``{"section.key": value}`` put in."""
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = data
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return data


def make_recipe(model: Path, folder: Path, **changes: Any) -> Recipe:
    """:func:`recipe_dict`, validated."""
    return Recipe.model_validate_json(json.dumps(recipe_dict(model, folder, **changes)))


def write_pairs(folder: Path, n: int = 7) -> Path:
    """Pairs whose rates belong to the key ``test``."""
    path = folder / "pairs.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rates = {"test": {"rate": 0.25, "n": 4}}
        lines = [
            {
                "id": f"p{i}",
                "source": {
                    "text": f"Ann has {i} pens and buys {i + 2}. How many?",
                    "answer": str(2 * i + 2),
                    "rates": rates,
                },
                "transfer": {
                    "text": f"Bob has {i} nuts and finds {i + 3}. How many?",
                    "answer": str(2 * i + 3),
                    "rates": rates,
                },
            }
            for i in range(1, n + 1)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def characters(episode: Episode, spec: RewardSpec) -> RewardBreakdown:
    """Counts letters of the tutor: differs between episodes even for a random model."""
    text = "".join(t.visible for t in episode.dialogue.by("tutor"))
    reward = sum(c.isalpha() for c in text) / 10
    return RewardBreakdown(reward, gated=False, pre=0.25, post=0.25, gain=0.0)


def constant(episode: Episode, spec: RewardSpec) -> RewardBreakdown:
    """No spread, no advantage."""
    return RewardBreakdown(0.5, gated=False, pre=0.25, post=0.25, gain=0.0)


_fired: list[str] = []


def killed_at(episode: Episode, spec: RewardSpec) -> RewardBreakdown:
    """:func:`characters`, but the process gets a signal in the middle of a rollout: ``TEST_KILL=phase:step:signal``."""
    phase, step, number = os.environ["TEST_KILL"].split(":")
    if (episode.phase, episode.step) == (phase, int(step)) and not _fired:
        _fired.append(episode.id)
        os.kill(os.getpid(), int(number))
    return characters(episode, spec)


class SilentStudent:
    """Says nothing, as a broken server would, or always ``says``."""

    says: str | None = None

    name = "silent"
    key = StudentKey(model="silent", prompt_hash="0" * 12, temperature=0.6, max_tokens=4)

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn:
        if self.says is None:
            raise StudentFailed("nothing came back")
        return Turn("student", self.says)

    async def attempt(
        self,
        problem: Problem,
        *,
        k: int,
        seed: int,
        dialogue: Dialogue | None = None,
        hide_tutor: bool = True,
    ) -> Sequence[str]:
        if self.says is None:
            raise StudentFailed("nothing came back")
        return [self.says] * k


def hangs(answer: str, gold: str) -> bool:
    """A grader's check that never comes back."""
    time.sleep(3600)
    return True


def metrics_of(run: Path) -> list[dict[str, float]]:
    """The rows of ``metrics.jsonl`` without times, the only numbers that a repeated run does not repeat."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]

"""The thinking tutor: budgets, decays, blank turns and turns that are cut off happen, are measured, and are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maieutic.recipe import load_recipe
from maieutic.training.loop import run
from maieutic.transcripts import read_episodes

pytestmark = pytest.mark.integration


def one_step(folder: Path, *overrides: str) -> tuple[dict[str, Any], list[Any]]:
    """Metrics and episodes of one training step."""
    common = [f"output_dir={folder}", "name=run", "seed=5", "training.max_steps=1", "eval.every=0"]
    run(load_recipe("micro/thinking", [*common, "checkpoint.every=0", *overrides]))
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (row,) = [r for r in rows if "rollout/reward" in r]
    return row, list(read_episodes(folder / "run", "train"))


def test_budgets_decays_blanks_and_cuts_show(tmp_path: Path) -> None:
    row, episodes = one_step(tmp_path)
    assert 5 < row["rollout/thinking_tokens_per_turn"] < 16
    # A mean over the episodes that sat the post-test. Turns over the visible budget tell, and are rejected before it.
    assert 0.8 < row["rollout/decay_thinking"] < 1
    assert 0 < row["rollout/blank_turn_rate"] < 0.3 and 0 < row["rollout/truncated_turn_share"] < 0.3
    assert 0.8 < row["rollout/well_formed_share"] <= 1
    assert row["rollout/excluded_share"] == 0 and row["train/logprob_gap"] < 1e-4
    turns = [t for e in episodes for t in e.dialogue.by("tutor")]
    assert all(t.thinking_tokens + t.visible_tokens <= 32 for t in turns)
    over = {"thinking": 0, "visible": 0}
    for episode in episodes:
        assert episode.reward is not None
        for part in over:
            exceeded = any(getattr(t, f"{part}_tokens") > 16 for t in episode.dialogue.by("tutor"))
            assert (getattr(episode.reward, f"decay_{part}") < 1) == exceeded
            over[part] += exceeded
        said = [t.visible for t in episode.dialogue.turns]
        assert not any("think>" in text for text in said)
    assert over["thinking"] and over["visible"], "some thoughts exceed their budget, and some turns theirs"


def test_the_visible_budget_lowers_the_reward_too(tmp_path: Path) -> None:
    small = ["training.problems_per_step=4", "training.mini_batch_problems=4"]
    row, episodes = one_step(tmp_path, "env.visible_budget=4", "env.thinking_budget=40", *small)
    assert 0.5 < row["rollout/decay_visible"] < 1 and row["rollout/decay_thinking"] == 1
    earned = [
        e.reward for e in episodes if e.reward is not None and e.reward.gain is not None and e.reward.gain > 0
    ]
    assert earned and all(r.reward == pytest.approx(r.gain * r.decay_visible) for r in earned)


def test_a_thought_that_is_cut_off_says_nothing_and_is_trained_on(tmp_path: Path) -> None:
    small = ["training.problems_per_step=2", "training.group_size=4", "training.mini_batch_problems=2"]
    row, episodes = one_step(tmp_path, "env.thinking_budget=3", "env.visible_budget=2", *small)
    turns = [t for e in episodes for t in e.dialogue.by("tutor")]
    cut = [t for t in turns if t.truncated and t.thinking]
    assert len(cut) > len(turns) / 2, "a thought takes more than 5 tokens"
    assert all(t.blank and not t.well_formed and t.visible_tokens == 0 for t in cut)
    assert row["rollout/truncated_turn_share"] == pytest.approx(sum(t.truncated for t in turns) / len(turns))
    assert row["rollout/blank_turn_rate"] == pytest.approx(sum(t.blank for t in turns) / len(turns))
    # What was cut off was sampled: the record holds all of it, and the trainer scores it as the engine did.
    for episode in episodes:
        assert episode.dialogue.end in ("max_turns", "end_token", "context_limit")
        sampled = sum(sum(s.mask) for s in episode.trajectory.segments)
        assert sampled >= sum(t.thinking_tokens for t in episode.dialogue.by("tutor"))
    assert row["train/logprob_gap"] < 1e-4

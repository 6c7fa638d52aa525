"""A judge that fails, through the training loop: unknown, counted, never a score."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import training_parts as parts
from fault_parts import (
    OK,
    TRANSIENT,
    assert_nothing_scored_silently,
    engine,
    recipe_of,
    speak,
    with_judge,
)
from loopback import InThread, Loopback, dumps, first, status
from maieutic.errors import (
    ExclusionLimitError,
)
from maieutic.training import loop
from maieutic.transcripts import read_episodes

pytestmark = pytest.mark.integration

# ---- the judge -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("500", "judge_failed"),
        ("hangs", "judge_failed"),
        ("junk", "judge_failed"),
        ("empty", "empty"),
        ("prose", "no_verdict"),
        ("no evidence", "quote_not_found"),
    ],
)
def test_a_judge_that_never_decides_is_unknown_and_stops_the_run(
    fault: str, why: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    says = {
        "empty": "",
        "prose": "I would say that is fine, maybe.",
        "no evidence": dumps({"verdict": "REJECT", "criterion": "x", "quote": "the answer is surely 42"}),
    }
    judge = Loopback(lambda body: says.get(fault, OK), first(10**9, TRANSIENT.get(fault, lambda: None)))
    with InThread(judge) as server, InThread(Loopback(speak)) as student:
        short = {"timeout_s": 0.2, "deadline_s": 0.6, "outage_limit_s": None} if fault == "hangs" else {}
        recipe = recipe_of(tiny_model_dir, tmp_path, student=engine(student), **with_judge(server, **short))
        before = time.monotonic()
        with pytest.raises(ExclusionLimitError, match=r"unknown:leakage 4"):
            loop.run(recipe)
        assert time.monotonic() - before < 60
    episodes = list(read_episodes(tmp_path / "run", "train"))
    assert len(episodes) == 4 and all(e.exclusion == "unknown:leakage" and e.reward is None for e in episodes)
    for e in episodes:
        verdict = e.verdicts["leakage"]
        assert (verdict.decision, verdict.criterion) == ("unknown", why)
    # no post-test is paid for where the verdict is missing: only the dialogues' turns were asked for
    assert all(body.get("n", 1) == 1 for body in student.bodies)


def test_a_judge_dead_for_half_a_run_costs_episodes_and_training_resumes(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Steps 1-2 with a judge whose votes stop early, 3-4 with a dead one, 5-6 with it again."""
    alive = [True]

    def judge_fault(number: int, body: dict[str, Any]) -> Any:
        return None if alive[0] else status(503, "gone")

    judge, student = Loopback(lambda body: OK, judge_fault), Loopback(speak)
    seen: list[int] = []

    class Watched(loop._Loop):
        def _play(self, step: int) -> Any:
            alive[0] = step not in (3, 4)
            before = len(judge.bodies)
            out = super()._play(step)
            seen.append(sum(b.get("n", 1) for b in judge.bodies[before:]))
            return out

    with InThread(judge) as server, InThread(student) as speaker, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_Loop", Watched)
        changes = {"training.max_steps": 6, "training.excluded_patience": 3}
        recipe = recipe_of(
            tiny_model_dir,
            tmp_path,
            student=engine(speaker),
            **(with_judge(server, outage_limit_s=None) | changes),
        )
        run = loop.run(recipe).folder
    rows = parts.metrics_of(run)
    assert [r["rollout/unknown_share"] for r in rows] == [0, 0, 1, 1, 0, 0]
    # V = 3, but two votes that agree decide: 4 episodes × 2 gates × 2 votes.
    assert seen[0] == seen[1] == seen[4] == seen[5] == 16
    for row, dead in zip(rows, [False, False, True, True, False, False], strict=True):
        if dead:  # no reward at all, but what it would have been as rejections is told
            assert "rollout/reward" not in row
            assert row["rollout/reward_unknown_as_reject"] == pytest.approx(-0.2)
            assert row["train/skipped_updates"] == 2 and row["train/trained_tokens"] == 0
        else:
            assert row["rollout/reward"] == row["rollout/reward_unknown_as_reject"]
            assert row["train/trained_tokens"] > 0
    assert_nothing_scored_silently(run)
    assert [r["train/policy_version"] for r in rows] == [1, 2, 3, 4, 5, 6]


def test_half_of_the_verdicts_missing_shows_reward_with_and_without(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    hit: set[str] = set()

    def fail(number: int, body: dict[str, Any]) -> Any:
        name = re.search(r"Ann has (\d) pens", json.dumps(body["messages"]))
        assert name is not None
        if not hit:
            hit.add(name.group(1))
        return status(500) if name.group(1) in hit else None

    with InThread(Loopback(lambda body: OK, fail)) as judge, InThread(Loopback(speak)) as student:
        changes = {"training.max_steps": 1, "training.max_excluded_share": 0.9}
        run = loop.run(
            recipe_of(tiny_model_dir, tmp_path, student=engine(student), **(with_judge(judge) | changes))
        ).folder
    (row,) = parts.metrics_of(run)
    assert row["rollout/unknown_share"] == 0.5 and row["train/trained_tokens"] > 0
    assert row["rollout/reward_unknown_as_reject"] == pytest.approx((row["rollout/reward"] - 0.2) / 2)
    assert_nothing_scored_silently(run)

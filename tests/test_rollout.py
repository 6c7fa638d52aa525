"""Rollouts: concurrency, seeds, retries, exclusions and their numbers, with fake episodes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, PostTest, RewardBreakdown, Verdict
from maieutic.errors import SpendingLimitError
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.rollout import RolloutResult, Slot, count, rollout, rollout_metrics


def pair(name: str) -> ProblemPair:
    return ProblemPair(
        id=name, source=Problem(text=f"source {name}", answer="1"), transfer=Problem(text="t", answer="2")
    )


def episode(slot: Slot, reward: float | None = 1.0, exclusion: str | None = None, **values: Any) -> Episode:
    breakdown = None if reward is None else RewardBreakdown(reward, False, pre=0.25, post=0.75, gain=reward)
    return Episode(
        id=slot.id,
        group_id=slot.group_id,
        pair=slot.pair,
        phase=slot.phase,
        step=slot.step,
        index=slot.index,
        seed=slot.seed,
        student="s",
        dialogue=values.pop("dialogue", Dialogue(slot.id, slot.pair.source.text)),
        reward=None if exclusion else breakdown,
        exclusion=exclusion,
        **values,
    )


def play_all(
    play: Any, names: Sequence[str] = "ab", group_size: int = 2, retries: int = 1, **options: Any
) -> RolloutResult:
    settings = {"phase": "train", "step": 3, "run_seed": 7} | options
    return asyncio.run(
        rollout(play, [pair(n) for n in names], group_size=group_size, retries=retries, **settings)
    )


def test_results_keep_the_order_of_pairs_whatever_finishes_first() -> None:
    started: list[str] = []

    async def play(slot: Slot) -> Episode:
        started.append(slot.id)
        # All are under way at once: the first would wait for ever otherwise.
        while len(started) < 4:
            await asyncio.sleep(0)
        for _ in range(10 - len(started)):
            await asyncio.sleep(0)
        return episode(slot)

    result = play_all(play)
    assert [e.id for e in result.episodes] == [
        "train-3-a/0",
        "train-3-a/1",
        "train-3-b/0",
        "train-3-b/1",
    ]
    assert [[e.group_id for e in g] for g in result.groups] == [["train-3-a"] * 2, ["train-3-b"] * 2]
    assert result.counts == {"episodes": 4, "counted": 4, "excluded": 0, "retried": 0}


def test_seeds_differ_by_everything_they_derive_from_and_by_nothing_else() -> None:
    async def play(slot: Slot) -> Episode:
        return episode(slot)

    def seeds(**options: Any) -> list[int]:
        return [e.seed for e in play_all(play, **options).episodes]

    first = seeds()
    assert seeds() == first and len(set(first)) == 4
    for other in ({"step": 4}, {"phase": "eval"}, {"run_seed": 8}):
        assert not set(seeds(**other)) & set(first)
    assert seeds(step=9, seed_step=3) == first


def test_a_pair_that_occurs_twice_makes_two_groups_with_other_seeds() -> None:
    async def play(slot: Slot) -> Episode:
        return episode(slot)

    result = play_all(play, names="aa")
    assert [g[0].group_id for g in result.groups] == ["train-3-a", "train-3.1-a"]
    assert len({e.seed for e in result.episodes}) == 4


def test_no_pair_id_can_make_two_groups_one() -> None:
    async def play(slot: Slot) -> Episode:
        return episode(slot)

    result = play_all(play, names=["a", "a", "a-1", "a/0", "1-a", ".1-a"])
    assert len({g[0].group_id for g in result.groups}) == 6
    assert len({e.id for e in result.episodes}) == len(result.episodes) == 12


def test_lost_episodes_are_retried_with_a_fresh_seed_and_unknown_ones_are_not() -> None:
    plays: list[Slot] = []

    async def play(slot: Slot) -> Episode:
        plays.append(slot)
        if slot.pair.id == "a" and slot.index == 0:  # lost once
            return episode(slot, exclusion="student_failed" if slot.attempt == 0 else None)
        if slot.pair.id == "a":  # lost for good
            return episode(slot, exclusion="tutor_failed")
        return episode(slot, exclusion="unknown:leakage" if slot.index == 0 else None)

    result = play_all(play, retries=2)
    assert [e.exclusion for e in result.episodes] == [None, "tutor_failed", "unknown:leakage", None]
    assert [len([p for p in plays if p.id == e.id]) for e in result.episodes] == [2, 3, 1, 1]
    assert len({p.seed for p in plays}) == len(plays)
    assert result.counts == {
        "episodes": 4,
        "counted": 2,
        "excluded": 2,
        "retried": 3,
        "excluded:tutor_failed": 1,
        "excluded:unknown:leakage": 1,
    }
    assert result.excluded_share == 0.5


def test_an_error_that_concerns_the_run_cancels_the_rest_and_keeps_its_type() -> None:
    cancelled: list[str] = []

    async def play(slot: Slot) -> Episode:
        if slot.id == "train-3-b/1":
            raise SpendingLimitError("limit")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(slot.id)
            raise
        return episode(slot)

    with pytest.raises(SpendingLimitError, match="limit"):
        play_all(play)
    assert sorted(cancelled) == ["train-3-a/0", "train-3-a/1", "train-3-b/0"]


def test_progress_counts_every_episode() -> None:
    seen: list[tuple[int, int]] = []

    async def play(slot: Slot) -> Episode:
        return episode(slot)

    play_all(play, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_metrics_of_a_rollout_by_hand() -> None:
    async def play(slot: Slot) -> Episode:
        dialogue = Dialogue(slot.id, "p")
        dialogue.add(Turn("student", "opening", scripted=True))
        dialogue.add(
            Turn("tutor", "hint" if slot.index else " ", visible_tokens=4, thinking_tokens=2, truncated=True)
        )
        dialogue.add(Turn("student", "hm", visible_tokens=6))
        dialogue.end = "max_turns"
        verdicts = {"leakage": Verdict("leakage", "reject" if slot.index == 0 else "ok")}
        test = PostTest("transfer", True, ["1", "2"], ["right", "wrong"])
        common: dict[str, Any] = {"dialogue": dialogue, "verdicts": verdicts, "post_test": test}
        if slot.pair.id == "b" and slot.index == 1:
            common["verdicts"] = {"leakage": Verdict("leakage", "unknown", "timeout")}
            return episode(slot, exclusion="unknown:leakage", **common)
        return episode(slot, reward=0.2 + 0.4 * slot.index, **common)

    values = rollout_metrics(play_all(play), unknown_reward=-0.2)
    expected = {
        "episodes": 4,
        "excluded_share": 0.25,
        "unknown_share": 0.25,
        "excluded_unknown_share": 0.25,
        "retried": 0,
        "reward": (0.2 + 0.6 + 0.2) / 3,
        "reward_unknown_as_reject": (0.2 + 0.6 + 0.2 - 0.2) / 4,
        "reward_std": math.sqrt(2 * 0.4**2 / 9),
        "transfer_gain": 1 / 3,
        "pre": 0.25,
        "post": 0.75,
        "leak_rate": 2 / 3,  # of the three that were decided
        "end_max_turns_share": 1.0,
        "turns": 3,
        "tutor_turns": 1,
        "blank_turn_rate": 0.5,
        "truncated_turn_share": 1.0,
        "visible_tokens_per_turn": 4,
        "thinking_tokens_per_turn": 2,
        "student_tokens_per_turn": 6,
    }
    assert {k: values[k] for k in expected} == pytest.approx(expected)
    assert "correctness_reject_rate" not in values and "same_gain" not in values


def test_an_excluded_episode_enters_no_reward_metric_even_if_it_has_a_reward() -> None:
    async def play(slot: Slot) -> Episode:
        test = PostTest("transfer", True, ["1", "2"], ["right", "wrong"])
        made = episode(slot, reward=0.2, post_test=test)
        made.exclusion = "unknown:leakage" if slot.index else None
        gain = float(slot.index)
        made.reward = RewardBreakdown(gain, gated=False, pre=0.5 * gain, post=gain, gain=gain)
        return made

    values = rollout_metrics(play_all(play), unknown_reward=-0.2)
    assert {k: values[k] for k in ("reward", "transfer_gain", "pre", "post", "excluded_share")} == {
        "reward": 0.0,
        "transfer_gain": 0.0,
        "pre": 0.0,
        "post": 0.0,
        "excluded_share": 0.5,
    }


def test_a_rollout_without_a_counted_episode_has_no_reward_metric() -> None:
    async def play(slot: Slot) -> Episode:
        return episode(slot, exclusion="student_failed")

    result = play_all(play, retries=0)
    values = rollout_metrics(result, unknown_reward=-0.2)
    assert "reward" not in values and values["excluded_student_failed_share"] == 1.0
    assert count(result.episodes)["counted"] == 0

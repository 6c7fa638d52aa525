"""Splits and the order of problems: disjoint, stable, and functions of their seeds alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maieutic.problems.schema import Problem, ProblemPair
from maieutic.problems.splits import ProblemOrder, drop_overlap, split_pairs, take


def pair(i: int, text: str | None = None, transfer: str | None = None) -> ProblemPair:
    return ProblemPair(
        id=f"p{i}",
        source=Problem(text=text or f"source {i}", answer="1"),
        transfer=Problem(text=transfer or f"transfer {i}", answer="2"),
    )


PAIRS = [pair(i) for i in range(50)]


def ids(pairs: list[ProblemPair]) -> list[str]:
    return [p.id for p in pairs]


def test_a_split_is_a_partition_in_file_order() -> None:
    s = split_pairs(PAIRS, 10, seed=3)
    assert len(s.held_out) == 10
    assert s.overlap == 0
    assert sorted(ids(s.train) + ids(s.held_out)) == sorted(ids(PAIRS))
    for part in (s.train, s.held_out):
        assert ids(part) == sorted(ids(part), key=lambda i: int(i[1:]))


def test_a_split_survives_reordering_and_depends_on_its_seed() -> None:
    shuffled = PAIRS[:]
    random.Random(0).shuffle(shuffled)
    held_out = set(ids(split_pairs(PAIRS, 10, seed=3).held_out))
    assert set(ids(split_pairs(shuffled, 10, seed=3).held_out)) == held_out
    assert set(ids(split_pairs(PAIRS, 10, seed=4).held_out)) != held_out


def test_more_pairs_or_a_larger_size_keep_what_was_held_out() -> None:
    small = set(ids(split_pairs(PAIRS, 10, seed=3).held_out))
    assert small < set(ids(split_pairs(PAIRS, 20, seed=3).held_out))
    more = split_pairs([*PAIRS, *(pair(i) for i in range(50, 60))], 10, seed=3).held_out
    assert len(small & set(ids(more))) >= 7, "ten of sixty: most of the ten of fifty are still there"


def test_pairs_with_the_same_source_text_stay_together() -> None:
    twins = [pair(100 + i, text=f" Source  {i}") for i in range(50)]
    s = split_pairs([*PAIRS, *twins], 10, seed=3)
    train = {p.source.text.strip().lower().replace("  ", " ") for p in s.train}
    held = {p.source.text.strip().lower().replace("  ", " ") for p in s.held_out}
    assert len(held) == 10
    assert not train & held
    assert s.overlap == 10


def test_a_variant_that_is_held_out_is_not_trained_on() -> None:
    train, dropped = drop_overlap([pair(1, text="Transfer 9"), pair(2)], [pair(9)])
    assert ids(train) == ["p2"]
    assert dropped == 1


def test_only_eligible_pairs_are_held_out() -> None:
    s = split_pairs(PAIRS, 10, seed=3, eligible=lambda p: int(p.id[1:]) < 8)
    assert sorted(ids(s.held_out)) == [f"p{i}" for i in range(8)]
    assert len(s.train) == 42


def test_take_is_nested() -> None:
    assert set(ids(take(PAIRS, 5, 0))) < set(ids(take(PAIRS, 9, 0)))
    assert take(PAIRS, 50, 0) == PAIRS


# ---------------------------------------------------------------------------------------------------- order


@given(n=st.integers(1, 40), per_step=st.integers(1, 12), seed=st.integers(0, 3))
def test_each_epoch_visits_every_problem_once_and_no_step_repeats_one(
    n: int, per_step: int, seed: int
) -> None:
    order = ProblemOrder(n, seed, per_step)
    steps = [order.indices(s) for s in range(4 * n)]
    stream = [i for step in steps for i in step]
    for start in range(0, len(stream) - n + 1, n):
        assert sorted(stream[start : start + n]) == list(range(n))
    for step in steps:
        assert len(step) == per_step
        if n >= per_step:
            assert max(Counter(step).values()) == 1


@given(n=st.integers(1, 30), per_step=st.integers(1, 8), step=st.integers(0, 60))
def test_a_step_does_not_depend_on_the_steps_before(n: int, per_step: int, step: int) -> None:
    walked = ProblemOrder(n, 7, per_step)
    for s in range(step):
        walked.indices(s)
    assert walked.indices(step) == ProblemOrder(n, 7, per_step).indices(step)


def test_the_order_is_fixed_for_ever() -> None:
    order = ProblemOrder(7, seed=1, per_step=3)
    assert [order.indices(s) for s in range(3)] == ORDER_OF_SEVEN
    assert ProblemOrder(7, seed=2, per_step=3).indices(0) != order.indices(0)


ORDER_OF_SEVEN = [[0, 1, 6], [4, 2, 3], [5, 1, 6]]


def test_epochs_are_shuffled_differently() -> None:
    order = ProblemOrder(20, seed=0, per_step=20)
    assert order.indices(0) != order.indices(1)
    assert order.epoch_of(3) == 3.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ProblemOrder(0, 0, 1)
    with pytest.raises(ValueError, match="negative"):
        ProblemOrder(3, 0, 1).indices(-1)

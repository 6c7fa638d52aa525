"""The tail of a rollout: few of its dialogues still go on."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from maieutic.env.talks import Talks


def test_the_tail_begins_when_an_eighth_is_left() -> None:
    talks = Talks()
    ends = [ExitStack() for _ in range(17)]
    for end in ends:
        end.enter_context(talks.one())
    told = []
    for end in ends:
        end.close()
        told.append(talks.in_tail)
    assert told == [False] * 14 + [True] * 3  # 2, 1 and none of 17 are left


def test_the_next_rollout_counts_anew_and_a_failed_dialogue_has_ended() -> None:
    talks = Talks()
    with ExitStack() as first:
        for _ in range(64):
            first.enter_context(talks.one())
    with pytest.raises(ValueError, match="lost"), talks.one():
        assert not talks.in_tail
        raise ValueError("lost")
    with talks.one(), talks.one():
        assert not talks.in_tail  # against this rollout's two, not the first one's 64

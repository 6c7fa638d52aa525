"""Full collections wait for the end of a rollout, and come back whatever ends it."""

from __future__ import annotations

import gc
import threading

import pytest

from maieutic.collector import young_only


def test_thresholds_come_back_after_nested_spans_and_errors() -> None:
    before = gc.get_threshold()
    with young_only():
        assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > 10**9
        with pytest.raises(RuntimeError), young_only():
            raise RuntimeError
        assert gc.get_threshold()[2] > 10**9
    assert gc.get_threshold() == before


def test_the_last_of_overlapping_spans_gives_them_back() -> None:
    before, first_is_open, second_is_open = gc.get_threshold(), threading.Event(), threading.Event()

    def first() -> None:
        with young_only():
            first_is_open.set()
            assert second_is_open.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_open.wait(10)
    with young_only():
        second_is_open.set()
        thread.join(10)
        assert gc.get_threshold()[2] > 10**9, "the other span is still open"
    assert gc.get_threshold() == before

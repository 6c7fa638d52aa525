"""Token ids that all lists share are the same ids."""

from __future__ import annotations

import pytest

from maieutic.shared_ids import shared


def test_ids_stay_what_they_are_and_become_one_object() -> None:
    ids = [0, 49_151, 300, 300, 151_935]
    first, second = shared(ids), shared([int(str(i)) for i in ids])
    assert first == second == ids and all(a is b for a, b in zip(first, second, strict=True))
    assert shared([]) == [] and shared((5,)) == [5]


def test_an_absurd_id_costs_no_table() -> None:
    assert shared([2**40, 1]) == [2**40, 1]


def test_a_negative_id_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 is no token id"):
        shared([3, -1])

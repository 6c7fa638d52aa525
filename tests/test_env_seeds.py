"""Derived seeds: fixed for ever, and different for different parts."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maieutic.seeds import derive


def test_the_documented_hash():
    expected = int.from_bytes(hashlib.sha256(b"i1:7s4:turni2:12").digest()[:8], "big") >> 1
    assert derive(7, "turn", 12) == expected == 905462893613665296


def test_types_and_boundaries_count():
    seeds = {
        derive(1, 2),
        derive(12),
        derive("1", 2),
        derive("12"),
        derive("1", "2"),
        derive(-12),
        derive(1, 2, ""),
    }
    assert len(seeds) == 7


@given(st.lists(st.integers() | st.text(), min_size=1))
def test_range_and_repeatability(parts):
    assert 0 <= derive(*parts) < 2**63
    assert derive(*parts) == derive(*parts)


@pytest.mark.parametrize("part", [1.5, None, True, b"x"])
def test_other_types_are_refused(part):
    with pytest.raises(TypeError, match="integers and strings"):
        derive("a", part)


def test_nothing_to_derive_from():
    with pytest.raises(ValueError, match="at least one part"):
        derive()

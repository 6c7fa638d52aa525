"""Equation 5's truth table, and the quality gate at its edges."""

from __future__ import annotations

import pytest

from maieutic.reat.gate import passes
from maieutic.reat.routing import needs_revision, route
from maieutic.reat.schema import Critique
from test_reat_schema import critique, five


@pytest.mark.parametrize(
    ("score", "lowest", "revise"),
    [
        (80.0, 2, False),  # both on their bounds: S < τ_rev and min(v) < τ_min are strict
        (80.0, 1, True),
        (79.999, 2, True),
        (79.999, 1, True),
        (100.0, 4, False),
        (100.0, 0, True),
        (0.0, 4, True),
        (0.0, 0, True),
    ],
)
def test_truth_table_of_equation_5(score: float, lowest: int, revise: bool) -> None:
    assert needs_revision(score, lowest, tau_rev=80.0, tau_min=2) is revise


def test_bounds_at_their_ends_switch_a_clause_off() -> None:
    assert not needs_revision(0.0, 0, tau_rev=0.0, tau_min=0)
    assert needs_revision(100.0, 3, tau_rev=0.0, tau_min=4)


@pytest.mark.parametrize(
    ("found", "revise"),
    [
        (critique(five(4, 4, 4, 4, 4)), False),
        (critique(five(4, 4, 4, 4, 1)), True),  # S = 85, one dimension below τ_min
        (critique(five(4, 4, 4, 4, None)), False),  # N/A is not 0
        (critique(five(3, 3, 3, 3, None)), True),  # S = 75
        (critique(five(4, 4, 4, 4, 4), "misdiagnosis"), True),  # S = 85, but capped to 1
        (critique(five(4, 4, 4, 4, 4), "fake_empathy"), False),  # capped to 2 = τ_min, S = 90
    ],
)
def test_routing_uses_capped_and_applicable_scores(found: Critique, revise: bool) -> None:
    assert route(found, tau_rev=80.0, tau_min=2) is revise


@pytest.mark.parametrize("revised", [True, False])
def test_the_gate_includes_its_bound_for_every_admission(revised: bool) -> None:
    assert passes(85.0, gamma=85.0, revised=revised)
    assert not passes(84.999, gamma=85.0, revised=revised)
    assert passes(0.0, gamma=85.0, revised=revised, gate=False)


def test_gate_unrevised_off_is_equation_8_as_printed() -> None:
    assert passes(80.0, gamma=85.0, revised=False, gate_unrevised=False)
    assert not passes(80.0, gamma=85.0, revised=True, gate_unrevised=False)

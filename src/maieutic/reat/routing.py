"""Which responses are revised: the deterministic rule of equation 5. The Critic's own opinion on that decides nothing."""

from __future__ import annotations

from maieutic.reat.schema import Critique


def needs_revision(score: float, lowest: int, *, tau_rev: float, tau_min: int) -> bool:
    """D = 𝟙(S < τ_rev ∨ min(v) < τ_min): both bounds are strict, so a response that stands exactly on them is not revised.

    ======== ============ ===
    S < τ_rev min(v) < τ_min D
    ======== ============ ===
    no       no           0
    no       yes          1
    yes      no           1
    yes      yes          1
    ======== ============ ===

    Args:
        score: S in [0, 100].
        lowest: the lowest applicable dimension, 0 to 4.
        tau_rev: τ_rev on the scale of S.
        tau_min: τ_min on the scale of a dimension.
    """
    return score < tau_rev or lowest < tau_min


def route(critique: Critique, *, tau_rev: float, tau_min: int) -> bool:
    """:func:`needs_revision` of a critique (scores after capping, N/A left out)."""
    return needs_revision(critique.score, critique.lowest, tau_rev=tau_rev, tau_min=tau_min)

"""The quality gate: what may become an experience (equation 8, Appendix C.6).

Equation 8 gates revised responses; with τ_rev below γ it would let an unrevised response with τ_rev ≤ S < γ through, which
Appendix C.6 ("only turns passing the reflective quality-control pipeline") would not. Here every admission needs S ≥ γ
unless ``gate_unrevised`` is off.
"""

from __future__ import annotations


def passes(
    score: float, *, gamma: float, revised: bool, gate: bool = True, gate_unrevised: bool = True
) -> bool:
    """Whether a response with ``score`` (S or S*) may be distilled: S ≥ γ, the bound included.

    Args:
        revised: the response is the Mentor's.
        gate: off lets everything through (the paper's ablation "w/o quality gate").
        gate_unrevised: off lets unrevised responses through, which is equation 8 as printed.
    """
    if not gate or not (revised or gate_unrevised):
        return True
    return score >= gamma

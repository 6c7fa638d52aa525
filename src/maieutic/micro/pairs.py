"""Problem pairs of the micro world, and their solve rates for the micro students."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from maieutic.micro.world import MicroProblem, make_pair
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.seeds import derive


def make_pairs(size: int, seed: int, *, test: bool) -> list[ProblemPair]:
    """``size`` pairs with no text twice; ``test``: of held-out stories. Solve rates are not measured yet."""
    rng = random.Random(derive(seed, "pairs", "test" if test else "train"))
    used: set[str] = set()
    out: list[ProblemPair] = []
    while len(out) < size:
        source, transfer = make_pair(rng, test=test)
        if {source.text, transfer.text} & used:
            continue
        used |= {source.text, transfer.text}
        name = f"micro-{'test-' if test else ''}{len(out):04d}"
        provenance = {
            "generator": "micro",
            "seed": seed,
            "family": source.family,
            "method": [source.op1, source.op2],
            "stories": [list(source.story), list(transfer.story)],
        }
        out.append(
            ProblemPair(
                id=name, source=as_problem(source), transfer=as_problem(transfer), provenance=provenance
            )
        )
    return out


def as_problem(p: MicroProblem) -> Problem:
    """The problem as all environments read it."""
    return Problem(text=p.text, answer=str(p.answer), solution=p.solution)


async def measured(
    pairs: Sequence[ProblemPair], recipe: str | Path, overrides: Sequence[str], *, seed: int, k: int = 16
) -> list[ProblemPair]:
    """The pairs with the cold solve rate of every student of ``recipe`` (the general measuring code)."""
    from maieutic.grading import Grader
    from maieutic.problems.measure import measure
    from maieutic.recipe import load_recipe
    from maieutic.runtime import build_students

    found = list(pairs)
    with Grader(n_workers=1) as grader:
        for student in build_students(load_recipe(recipe, list(overrides))):
            found = (await measure(found, student, grader, k, seed)).pairs
    return found

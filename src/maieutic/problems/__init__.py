"""Problem pairs: schema, loaders, filters, splits, generators, measurement."""

from maieutic.problems.load import LoadReport, load_problems
from maieutic.problems.loaders import PUBLISHED_STUDENT, read_pairs, write_pairs
from maieutic.problems.schema import Problem, ProblemPair, SolveRate, StudentKey, prompt_hash
from maieutic.problems.splits import ProblemOrder

__all__ = [
    "PUBLISHED_STUDENT",
    "LoadReport",
    "Problem",
    "ProblemOrder",
    "ProblemPair",
    "SolveRate",
    "StudentKey",
    "load_problems",
    "prompt_hash",
    "read_pairs",
    "write_pairs",
]

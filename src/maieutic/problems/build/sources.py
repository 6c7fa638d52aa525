"""The problems to rewrite: read, limited, without unusable answers, duplicates, and what resembles an evaluation set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maieutic.errors import ProblemDataError
from maieutic.grading.equivalence import check_gold
from maieutic.problems.build.recipe import DataRecipe, SourceSpec
from maieutic.problems.build.rewrite import Rejected
from maieutic.problems.dedup import NearDuplicates
from maieutic.problems.loaders import read_pairs
from maieutic.problems.schema import ProblemPair


@dataclass
class Sources:
    """What is rewritten, what is not and why, and an index of all sources and evaluation problems."""

    pairs: list[ProblemPair]
    """Sources without variants, in order."""
    rejected: list[tuple[ProblemPair, Rejected]]
    index: NearDuplicates
    read: int
    evaluation: int
    """Problems in the evaluation sets."""


def source_key(pair: ProblemPair) -> str:
    """Key of a pair's source in the index."""
    return f"source {pair.id}"


def read_source(spec: SourceSpec, offline: bool) -> list[ProblemPair]:
    """The rows of one entry of a recipe."""
    pairs = read_pairs(
        spec.source, split=spec.split, offline=offline, options=spec.options, config=spec.config
    )
    return pairs[: spec.limit]


def prepare_sources(recipe: DataRecipe) -> Sources:
    """Everything that can be said before a model is asked. Raises :class:`ProblemDataError` when nothing is left."""
    index = NearDuplicates(recipe.dedup.threshold, recipe.dedup.shingle)
    evaluation = index_evaluation(index, recipe.dedup.against, recipe.offline)
    pairs: list[ProblemPair] = []
    rejected: list[tuple[ProblemPair, Rejected]] = []
    read = 0
    for number, spec in enumerate(recipe.sources):
        for pair in read_source(spec, recipe.offline):
            read += 1
            name = pair.id if len(recipe.sources) == 1 else f"{number}-{pair.id}"
            pair = pair.model_copy(update={"id": name, "transfer": None})
            why = _reject(pair, index)
            if why is None:
                index.add(source_key(pair), pair.source.text)
                pairs.append(pair)
            else:
                rejected.append((pair, why))
    if not pairs:
        raise ProblemDataError(f"recipe {recipe.name}: none of {read} source problems can be used")
    return Sources(pairs, rejected, index, read, evaluation)


def index_evaluation(index: NearDuplicates, sets: Sequence[SourceSpec], offline: bool) -> int:
    """Add every problem of the evaluation sets (sources and variants); how many there are."""
    count = 0
    for spec in sets:
        name = Path(spec.source).name
        for pair in read_source(spec, offline):
            for side, problem in (("source", pair.source), ("transfer", pair.transfer)):
                if problem is not None:
                    index.add(f"evaluation {name} {count} {side}", problem.text)
                    count += 1
    return count


def _reject(pair: ProblemPair, index: NearDuplicates) -> Rejected | None:
    try:
        check_gold(pair.source.answer)
    except ProblemDataError as error:
        return Rejected(0, "source", "unusable_answer", str(error))
    found = index.find(pair.source.text)
    if found is None:
        return None
    reason = "evaluation_set" if found.key.startswith("evaluation ") else "duplicate"
    return Rejected(0, "source", reason, f"{found.similarity:.0%} the same as {found.key}")

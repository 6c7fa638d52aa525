"""``maieutic data measure``: the solve rates of a recipe's students on the recipe's problems."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maieutic.config import Recipe
from maieutic.errors import RecipeError
from maieutic.problems.load import RATES_OF
from maieutic.problems.loaders import read_pairs, write_pairs
from maieutic.problems.measure import MeasureResult, Progress, measure
from maieutic.problems.schema import ProblemPair


def measure_recipe(
    recipe: Recipe,
    out: Path,
    *,
    k: int,
    seed: int = 0,
    limit: int | None = None,
    concurrency: int = 64,
    held_out: bool = False,
) -> list[str]:
    """Measure every student of the recipe on all pairs, unfiltered, of its ``problems.source`` (``held_out``: of its
    ``eval_source``), and write the pairs with all rates to ``out``. Returns lines for people.

    ``out.journal.jsonl`` beside it holds what is measured so far: the same command continues there.
    """
    pairs = _pairs(recipe, held_out)[:limit]
    journal = out.with_name(out.name + ".journal.jsonl")
    lines: list[str] = []
    for name, result in asyncio.run(_run(recipe, pairs, journal, k, seed, concurrency)):
        pairs = result.pairs
        lines += [f"student {name}: {line}" for line in result.lines()]
    write_pairs(out, pairs)
    return [*lines, f"{len(pairs)} pairs in {out}"]


def _pairs(recipe: Recipe, held_out: bool) -> list[ProblemPair]:
    spec = recipe.problems
    source = spec.eval_source if held_out else spec.source
    if source is None:
        raise RecipeError(
            "problems.eval_source is not set: held-out pairs are split off problems.source, measure that"
        )
    options = {k: v for k, v in spec.options.items() if k != RATES_OF}
    return read_pairs(source, split=spec.split, offline=recipe.offline, options=options)


async def _run(
    recipe: Recipe, pairs: list[ProblemPair], journal: Path, k: int, seed: int, concurrency: int
) -> list[tuple[str, MeasureResult]]:
    from maieutic.env.student import ModelStudent
    from maieutic.grading import Grader
    from maieutic.runtime import build_students

    results: list[tuple[str, MeasureResult]] = []
    with Grader() as grader:
        students = build_students(recipe)
        models = [s for s in students if isinstance(s, ModelStudent)]
        try:
            for model in models:
                await model.start()
            for student in students:
                with _bar(student.name) as progress:
                    result = await measure(
                        pairs,
                        student,
                        grader,
                        k,
                        seed,
                        concurrency=concurrency,
                        journal=journal,
                        progress=progress,
                    )
                pairs = result.pairs
                results.append((student.name, result))
        finally:
            for model in models:
                await model.close()
    return results


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    """A progress bar with the time left, on stderr; a line now and then where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        last = [-1]

        def say(done: int, total: int) -> None:
            tenth = 10 * done // max(total, 1)
            if tenth != last[0]:
                last[0] = tenth
                console.print(f"{name}: {done} of {total} problems", highlight=False)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(f"measuring {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

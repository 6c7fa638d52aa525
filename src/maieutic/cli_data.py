"""``maieutic data build | stats | filter | split | validate | push``. Imports nothing heavy: each command imports what it needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from maieutic.problems.schema import ProblemPair

DatasetArg = Annotated[
    str,
    typer.Argument(
        metavar="DATASET", help="A .jsonl or .parquet file, a build's folder, a shipped set or a Hub id."
    ),
]
SplitOption = Annotated[str | None, typer.Option(help="Split of a Hub data set.")]
StudentOption = Annotated[
    str | None, typer.Option(help="Key of the student whose rates count (needed when there are several).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
ThresholdOption = Annotated[float, typer.Option(help="Jaccard similarity of near-duplicates.")]


def register(app: typer.Typer, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Add the commands to ``maieutic data``; ``guard`` prints named errors."""
    for name, command in _COMMANDS.items():
        app.command(name)(guard(command))


def _read(dataset: str, split: str | None = None) -> list[ProblemPair]:
    from maieutic.problems.loaders import read_pairs

    return read_pairs(dataset, split=split)


def build(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A data recipe, such as data/gsm8k-vllm.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Overrides.", show_default=False)
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask again what failed for good in an earlier start.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn problems into validated near-transfer pairs with measured solve rates.

    Can be stopped and started again, also after a kill: what was answered lies in the folder's journal.jsonl.
    """
    from dataclasses import asdict

    from maieutic.headway import Teller
    from maieutic.problems.build.pipeline import build_dataset
    from maieutic.problems.build.recipe import load_data_recipe

    loaded = load_data_recipe(recipe, overrides or [])
    try:
        report = build_dataset(loaded, retry_failed=retry_failed, progress=Teller())
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    typer.echo(json.dumps(asdict(report), ensure_ascii=False) if as_json else "\n".join(report.lines()))


def stats(
    dataset: DatasetArg,
    split: SplitOption = None,
    student: StudentOption = None,
    keep: Annotated[
        str, typer.Option("--filter", help="none, train_band or paper_test (the paper's Table 5).")
    ] = "none",
    html: Annotated[Path | None, typer.Option(help="Also write a page with the figures.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The numbers of the paper's Table 5: solve rates, shares, correlation, gaps, histogram."""
    from maieutic.problems.export import only_student
    from maieutic.problems.filters import rate_filter
    from maieutic.problems.stats import dataset_stats, stats_lines

    pairs, band = _read(dataset, split), rate_filter(keep)
    found = dataset_stats(pairs, only_student(pairs, student), dataset, band.rejects if band else None, keep)
    if html is not None:
        from maieutic.problems.figure import write_figure

        write_figure(html, found)
    typer.echo(json.dumps(found.as_dict(), ensure_ascii=False) if as_json else "\n".join(stats_lines(found)))


def filter_(
    dataset: DatasetArg,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write (.jsonl).")],
    keep: Annotated[str, typer.Option("--filter", help="none, train_band or paper_test.")] = "none",
    low: Annotated[float | None, typer.Option(help="Lowest rate, both problems.")] = None,
    high: Annotated[float | None, typer.Option(help="Highest rate, both problems.")] = None,
    drop_missing: Annotated[
        bool, typer.Option("--drop-missing", help="Drop pairs without a variant.")
    ] = False,
    drop_flagged: Annotated[
        bool, typer.Option("--drop-flagged", help="Drop pairs that missed the difficulty gate.")
    ] = False,
    student: StudentOption = None,
    split: SplitOption = None,
) -> None:
    """Keep the pairs whose rates lie in a band, and say what was dropped."""
    from maieutic.errors import RecipeError
    from maieutic.problems.export import only_student
    from maieutic.problems.filters import rate_filter
    from maieutic.problems.loaders import write_pairs
    from maieutic.problems.select import filter_pairs

    if keep != "none" and (low is not None or high is not None):
        raise RecipeError("give --filter or --low and --high, not both")
    band = {k: v for k, v in (("low", low), ("high", high)) if v is not None}
    pairs, rates = _read(dataset, split), rate_filter(band or keep)
    key = only_student(pairs, student) if rates else student
    chosen = filter_pairs(pairs, rates, key, drop_missing=drop_missing, drop_flagged=drop_flagged)
    write_pairs(out, chosen.kept)
    typer.echo("\n".join([f"{len(chosen.kept)} of {len(pairs)} pairs in {out}", *_dropped(chosen.dropped)]))


def _dropped(counts: dict[str, int]) -> list[str]:
    return [f"{n:>6} dropped: {why.replace('_', ' ')}" for why, n in counts.items()]


def split_(
    dataset: DatasetArg,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for train.jsonl and test.jsonl.")],
    test: Annotated[int, typer.Option(help="Held-out pairs.")],
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    threshold: ThresholdOption = 0.8,
    split: SplitOption = None,
) -> None:
    """Hold pairs out by a seeded hash; training pairs that repeat or resemble them are dropped."""
    from maieutic.errors import ProblemDataError
    from maieutic.problems.loaders import write_pairs
    from maieutic.problems.select import split_apart

    pairs = _read(dataset, split)
    train, held_out, dropped = split_apart(pairs, test, seed, threshold=threshold)
    if len(held_out) < test or not train:
        raise ProblemDataError(
            f"{dataset}: {len(pairs)} pairs give {len(held_out)} to hold out and {len(train)} to train on, not {test} and some"
        )
    write_pairs(out / "train.jsonl", train)
    write_pairs(out / "test.jsonl", held_out)
    typer.echo(
        "\n".join([f"{len(train)} for training, {len(held_out)} held out, in {out}", *_dropped(dropped)])
    )


def validate_(
    datasets: Annotated[
        list[str], typer.Argument(metavar="DATASET...", help="One set, or its splits: they must not overlap.")
    ],
    against: Annotated[
        list[str] | None, typer.Option(help="Evaluation set that nothing may resemble (repeatable).")
    ] = None,
    threshold: ThresholdOption = 0.8,
    as_json: JsonOption = False,
) -> None:
    """Check schema, answers, variants, rates and duplicates; exit status 1 when something is wrong."""
    from maieutic.problems.validate import validate

    splits = {name: _read(name) for name in datasets}
    found = validate(splits, evaluation={name: _read(name) for name in against or ()}, threshold=threshold)
    typer.echo(json.dumps(found.as_dict(), ensure_ascii=False) if as_json else "\n".join(found.lines()))
    if not found.ok:
        raise typer.Exit(1)


def push_(
    splits: Annotated[
        list[str],
        typer.Argument(metavar="[SPLIT=]DATASET...", help="train=a.jsonl test=b.jsonl, or one set."),
    ],
    repo: Annotated[str, typer.Option(help="owner/name on the Hub.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the folder here instead of uploading it.")
    ] = None,
    student: StudentOption = None,
    licence: Annotated[str | None, typer.Option(help="Licence id for the card, such as mit.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False,
) -> None:
    """Upload splits to the Hub as Parquet with the published columns, with a generated data-set card."""
    from maieutic.problems.push import push

    named = [s.partition("=") if "=" in s else ("train", "=", s) for s in splits]
    data = {name: _read(path) for name, _, path in named}
    typer.echo(push(repo, data, student=student, licence=licence, private=not public, out=out))


_COMMANDS: dict[str, Callable[..., Any]] = {
    "build": build,
    "stats": stats,
    "filter": filter_,
    "split": split_,
    "validate": validate_,
    "push": push_,
}

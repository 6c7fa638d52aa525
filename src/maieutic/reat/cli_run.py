"""``maieutic reat run | evaluate | annotate``: the life cycle from one recipe, and people's judgements of its dialogues."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maieutic.errors import MaieuticError


def _fail(error: MaieuticError) -> typer.Exit:
    typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
    return typer.Exit(error.exit_code)


annotate_app = typer.Typer(
    help="Paired dialogues for people to judge, and what they found.", no_args_is_help=True
)
_Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or a shipped name such as reat/cpu.")]
_Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", show_default=False)]


def _run(recipe: str, overrides: list[str], until: str) -> None:
    from maieutic.reat.config import load_reat_recipe

    try:
        loaded = load_reat_recipe(recipe, overrides)
        from maieutic.reat.pipeline import ReatPipeline

        typer.echo(str(ReatPipeline(loaded, lambda line: typer.echo(line, err=True)).execute(until)))
    except MaieuticError as error:
        raise _fail(error) from None


def run(
    recipe: _Recipe,
    overrides: _Overrides = None,
    until: Annotated[str, typer.Option(help="Last stage to run (see docs/reat.md).")] = "report",
) -> None:
    """Run the life cycle: dialogues, experience, tests, scores, report. Goes on where it was; the run folder's path is printed."""
    _run(recipe, overrides or [], until)


def evaluate(
    recipe: _Recipe,
    repository: Annotated[Path, typer.Argument(metavar="REPOSITORY", help="Folder of a repository.")],
    overrides: _Overrides = None,
) -> None:
    """Test a repository that is there on a recipe's held-out splits; nothing is added to it (it is copied into the run folder)."""
    given = ["grow=false", f"start_from={repository.resolve()}"]
    _run(recipe, [*given, *(overrides or [])], "report")


@annotate_app.command("export")
def annotate_export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a REAT run that was scored.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for form.html, turns.csv, pairs.csv and key.json.")
    ],
    test_set: Annotated[str, typer.Option("--set", help="Which test set.")] = "test-1",
    pairs: Annotated[int | None, typer.Option(help="Most pairs (default: all).")] = None,
) -> None:
    """Write forms for people with pairs of prompt-only and REAT dialogues, in an order that they cannot see."""
    from maieutic.reat.config import PROMPT_ONLY, REAT, load_reat_recipe

    try:
        recipe = load_reat_recipe(run_folder / "recipe.yaml")
        from maieutic.reat.annotation import export_pairs
        from maieutic.reat.scored import read_arm

        base, reat = (read_arm(run_folder, test_set, arm) for arm in (PROMPT_ONLY, REAT))
        count = export_pairs(out, base[0], reat[0], base[1], reat[1], limit=pairs, seed=recipe.seed)
    except MaieuticError as error:
        raise _fail(error) from None
    typer.echo(f"{count} pairs in {out}; keep key.json from the annotators")


@annotate_app.command("import")
def annotate_import(
    key: Annotated[Path, typer.Argument(metavar="KEY", help="key.json of the export.")],
    annotations: Annotated[
        list[Path],
        typer.Argument(
            metavar="ANNOTATION...", help="For each annotator the saved file, or a folder with both tables."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Gains by annotator, preferences, checks of scores and states, and agreement."""
    import json

    from maieutic.reat.annotation import read_annotation
    from maieutic.reat.annotation_statistics import lines, summarise
    from maieutic.transcripts import _plain

    try:
        report = summarise(key, [read_annotation(a) for a in annotations])
    except MaieuticError as error:
        raise _fail(error) from None
    typer.echo(json.dumps(_plain(report.as_dict())) if as_json else "\n".join(lines(report)))


def register(app: typer.Typer) -> None:
    """Put the commands under ``maieutic reat``."""
    app.command()(run)
    app.command()(evaluate)
    app.add_typer(annotate_app, name="annotate")

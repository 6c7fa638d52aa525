"""``maieutic latent …``: run the pipeline, look at data, count label agreement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from maieutic.errors import MaieuticError

app = typer.Typer(
    help="The latent-state tutor: offline RL over student states and tutor moves.", no_args_is_help=True
)


def _fail(error: MaieuticError) -> typer.Exit:
    typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
    return typer.Exit(error.exit_code)


@app.command()
def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A file, or a shipped name such as latent/cpu.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", show_default=False)
    ] = None,
    until: Annotated[str, typer.Option(help="Last stage to run (see docs/latent.md).")] = "report",
) -> None:
    """Run the stages that are not done yet; the run folder's path is printed."""
    from maieutic.latent.config import load_latent_recipe

    try:
        loaded = load_latent_recipe(recipe, overrides or [])
        from maieutic.latent.pipeline import Pipeline

        typer.echo(str(Pipeline(loaded, lambda line: typer.echo(line, err=True)).execute(until)))
    except MaieuticError as error:
        raise _fail(error) from None


@app.command()
def check(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", show_default=False)
    ] = None,
) -> None:
    """Validate a recipe and print it resolved."""
    from maieutic.latent.config import dump_latent_recipe, load_latent_recipe

    try:
        typer.echo(dump_latent_recipe(load_latent_recipe(recipe, overrides or [])), nl=False)
    except MaieuticError as error:
        raise _fail(error) from None


@app.command()
def coverage(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A Parquet file of transitions.")],
) -> None:
    """Coverage statistics of a data set, as JSON."""
    from maieutic.latent.data import coverage as statistics
    from maieutic.latent.data import read_parquet

    try:
        typer.echo(json.dumps(statistics(read_parquet(file)).as_dict(), indent=1))
    except MaieuticError as error:
        raise _fail(error) from None


@app.command()
def agreement(
    file: Annotated[Path, typer.Argument(metavar="LABELS", help="labels.csv, filled in by people.")],
) -> None:
    """Agreement and Cohen's kappa of people's labels with the machine's, by column."""
    from maieutic.latent.agreement import agreement as compare

    try:
        for a in compare(file):
            typer.echo(f"{a.column}\tn={a.n}\tagreement={a.agreement:.3f}\tkappa={a.kappa:.3f}")
    except MaieuticError as error:
        raise _fail(error) from None


@app.command()
def features(name: Annotated[str, typer.Argument(metavar="SET")] = "paper-25") -> None:
    """The features of a set: name, type, definition, how it is asked for and computed."""
    from maieutic.latent.features import feature_set

    try:
        for f in feature_set(name).features:
            typer.echo(f"{f.name}\t{f.kind}\t{f.definition}\t{f.prompt or '-'}\t{f.rule}")
    except MaieuticError as error:
        raise _fail(error) from None

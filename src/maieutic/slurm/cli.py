"""``maieutic slurm submit | status | cancel``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from maieutic.errors import MaieuticError

app = typer.Typer(
    help="On a SLURM cluster: servers, training and evaluation with one command.", no_args_is_help=True
)
Folder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, such as runs/first.")]


def _named_errors(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except MaieuticError as error:
            typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(error.exit_code) from None

    return wrapped


@app.command()
@_named_errors
def submit(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A training recipe, or one of maieutic sweep (an array of its tasks)."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value]...", help="Overrides of the recipe.", show_default=False),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Settings of the cluster (default: $MAIEUTIC_SITE, else slurm/site.env).", show_default=False
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="A key of the site settings, such as TRAIN_NODES=4; may be repeated."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="An array of runs, one a seed: 0,1,2.")] = None,
    evaluate: Annotated[
        str | None, typer.Option(help="Evaluation recipe for a job that starts when training has succeeded.")
    ] = None,
    suite: Annotated[
        list[str] | None, typer.Option("--suite", "-s", help="Suites of that evaluation.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with runs of these names.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the exact scripts and commands; write and submit nothing."),
    ] = False,
) -> None:
    """Submit servers, training and evaluation of a recipe. Requeued jobs go on from the newest checkpoint."""
    from maieutic.slurm import submit as jobs

    submission = plan(recipe, overrides or [], site, changes or [], seeds, evaluate, suite or [])
    jobs.check_keys(submission)
    if dry_run:
        for text in jobs.dry_run(submission):
            typer.echo(text, nl=False)
        return
    if not resume:
        jobs.refuse_to_mix(submission)
    ids = jobs.submit(submission, lambda line: typer.echo(line, err=True))
    typer.echo(" ".join(ids.values()))
    typer.echo(
        f"logs and scripts: {submission.folder}; maieutic slurm status {submission.folder.parent}", err=True
    )


def plan(
    recipe: str,
    overrides: list[str],
    site: str | None,
    changes: list[str],
    seeds: str | None,
    evaluate: str | None,
    suites: list[str],
) -> Any:
    """The :class:`~maieutic.slurm.jobs.Submission` of these arguments. Raises what loading recipe and site settings raises."""
    from maieutic.errors import RecipeError
    from maieutic.evaluation.config import SUITES, load_evaluation_recipe
    from maieutic.slurm.jobs import Evaluation, sweep, training
    from maieutic.slurm.render import Setting
    from maieutic.slurm.site import load_site

    cluster = load_site(site, changes)
    python = cluster.python or ("python" if cluster.container_image else sys.executable)
    said = ["maieutic slurm submit", shlex.join([recipe, *overrides])]
    said += [f"--seeds {seeds}"] if seeds else []
    said += [f"--evaluate {shlex.quote(evaluate)}"] if evaluate else []
    said += [f"--suite {shlex.quote(s)}" for s in suites]
    said += [f"--site {shlex.quote(site)}"] if site else []
    said += [f"--set {shlex.quote(c)}" for c in changes]
    setting = Setting(cluster, python, Path.cwd(), " ".join(said))
    if _is_sweep(recipe):
        if seeds or evaluate:
            raise RecipeError(
                f"{recipe} is a sweep: its seeds stand in the recipe, and it measures every task itself"
            )
        from maieutic.sweep import load_sweep_recipe

        return sweep(load_sweep_recipe(recipe, overrides), setting)
    from maieutic.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    if suites and evaluate is None:
        raise RecipeError("--suite says what an evaluation runs: name its recipe with --evaluate")
    if unknown := [s for s in suites if s not in SUITES]:
        raise RecipeError(f"--suite {unknown[0]}: there are {', '.join(SUITES)}")
    evaluation = None
    if evaluate is not None:
        path = str(Path(evaluate).absolute()) if Path(evaluate).is_file() else evaluate
        evaluation = Evaluation(path, load_evaluation_recipe(evaluate), tuple(suites))
    return training(loaded, setting, seeds=_seeds(seeds), evaluation=evaluation)


def _is_sweep(recipe: str) -> bool:
    from maieutic import yaml12
    from maieutic.errors import RecipeError
    from maieutic.recipe import locate

    try:
        path = locate(recipe)
        data, _ = yaml12.load(path.read_text(encoding="utf-8"), str(path))
    except (OSError, RecipeError):
        return False  # said better by whoever loads it
    return isinstance(data, dict) and "arms" in data and "instrument" in data


def _seeds(text: str | None) -> list[int]:
    from maieutic.errors import RecipeError

    if text is None:
        return []
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() for p in parts) or len(set(parts)) < len(parts):
        raise RecipeError(f"--seeds {text}: write different whole numbers, such as 0,1,2")
    return [int(p) for p in parts]


@app.command()
@_named_errors
def status(run: Folder) -> None:
    """Jobs, servers and the last step of what was submitted for a run."""
    from maieutic.slurm.submit import status_lines

    typer.echo("\n".join(status_lines(run)))


@app.command()
@_named_errors
def cancel(run: Folder) -> None:
    """Cancel the jobs of a run; its checkpoints stay."""
    from maieutic.slurm.submit import cancel as stop

    stopped = stop(run)
    for name, number in stopped.items():
        typer.echo(f"{name}: job {number} cancelled")
    if not stopped:
        typer.echo("all its jobs are over: nothing to cancel")

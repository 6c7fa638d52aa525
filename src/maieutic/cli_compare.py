"""``maieutic report``, ``view``, ``sft``, ``sweep`` and ``chat``: looking at runs, baselines and the comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

Named = Callable[[Callable[..., None]], Callable[..., None]]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="Overrides of the recipe.", show_default=False),
]


def register(app: typer.Typer, named_errors: Named) -> None:
    """Add the commands to the ``maieutic`` command."""
    app.command()(named_errors(report))
    app.command()(named_errors(view))
    app.command()(named_errors(sft))
    app.command()(named_errors(sweep))
    app.command()(named_errors(chat))


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, such as runs/smollm2-dppo.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Compare the runs' held-out evaluations, and write it here."),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Arm that the others are compared with.")] = None,
    step: Annotated[
        int | None, typer.Option(help="The evaluation after this step (else the last one).")
    ] = None,
    allow_solution: Annotated[
        bool, typer.Option("--allow-solution", help="Compare arms of which only some see the solution.")
    ] = False,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare arms that were measured differently.")
    ] = False,
) -> None:
    """Write report.html of a run again; with --out compare several runs: Markdown, HTML and JSON."""
    from maieutic.errors import RecipeError

    if out is None:
        if len(runs) > 1 or base or step is not None or allow_solution or allow_different:
            raise RecipeError("name a folder with --out to compare runs")
        from maieutic.report import write_report

        typer.echo(str(write_report(runs[0])))
        return
    from maieutic.report.comparison import compare_arms, load_arms, write_comparison

    found = compare_arms(
        load_arms(runs, step=step), base, allow_solution=allow_solution, allow_different=allow_different
    )
    for notice in found.notices:
        typer.secho(notice, fg=typer.colors.YELLOW, err=True)
    for path in write_comparison(found, out).values():
        typer.echo(str(path))


def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, such as runs/smollm2-dppo.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write (else viewer.html in the first run).")
    ] = None,
    phase: Annotated[
        Literal["train", "eval"] | None, typer.Option(help="Only these episodes (else both).")
    ] = None,
    step: Annotated[
        list[int] | None, typer.Option(help="Only episodes of this step; may be given several times.")
    ] = None,
) -> None:
    """Write the transcript viewer of one or more runs: one HTML file that needs nothing beside it."""
    from maieutic.report import write_viewer

    target = out or runs[0] / "viewer.html"
    typer.echo(str(write_viewer(runs, target, phase=phase, steps=step or None)))


def sft(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A file, or a shipped one such as sft/mathdial.")
    ],
    overrides: Overrides = None,
) -> None:
    """Fine-tune a tutor on good tutor turns: transcripts, own rollouts, MathDial or chat JSONL."""
    from maieutic.training.sft_config import load_sft_recipe

    loaded = load_sft_recipe(recipe, overrides or [])
    from maieutic.training.sft import run_sft

    typer.echo("\n".join(run_sft(loaded).lines()))


def sweep(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A file, or a shipped one such as compare/cpu.")
    ],
    overrides: Overrides = None,
    task: Annotated[
        int | None, typer.Option(help="Run this task only, and write no report (a SLURM array's element).")
    ] = None,
    list_tasks: Annotated[bool, typer.Option("--list", help="Print the tasks and their numbers.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Report what is done.")] = False,
    allow_solution: Annotated[
        bool, typer.Option("--allow-solution", help="Compare arms of which only some see the solution.")
    ] = False,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare arms that were measured differently.")
    ] = False,
) -> None:
    """Train arms × seeds, measure all with one instrument, and compare them. Goes on where it stopped."""
    from maieutic import sweep as sweeping
    from maieutic.errors import RecipeError

    loaded = sweeping.load_sweep_recipe(recipe, overrides or [])
    todo = sweeping.tasks(loaded)
    if list_tasks:
        for number, one in enumerate(todo):
            typer.echo(f"{number}\t{one.name}\t{'done' if sweeping.done(loaded, one) else 'to do'}")
        return
    if task is not None:
        if not 0 <= task < len(todo):
            raise RecipeError(f"--task {task}: there are tasks 0 to {len(todo) - 1}")
        sweeping.run_task(loaded, todo[task])
        typer.echo(f"{todo[task].name}: done")
        return
    failed = 0 if report_only else sweeping.run_sweep(loaded, lambda text: typer.echo(text, err=True))
    for path in sweeping.report(
        loaded, allow_solution=allow_solution, allow_different=allow_different
    ).values():
        typer.echo(str(path))
    if failed:
        raise typer.Exit(1)


def chat(
    tutor: Annotated[
        str,
        typer.Argument(
            metavar="TUTOR",
            help="As for evaluate: an arm, a checkpoint, an adapter, a model, http://host:port#model.",
        ),
    ],
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", "-r", help="A recipe of maieutic evaluate: which experiment, how it is sampled."
        ),
    ] = "evaluation/cpu",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override of the recipe, key=value; may be repeated.")
    ] = None,
    problem: Annotated[int, typer.Option(help="Number of the held-out problem.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the tutor's sampling.")] = 0,
    test: Annotated[bool, typer.Option("--test", help="Take the post-test when the dialogue ends.")] = False,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Show the tutor's thinking at each turn.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="JSONL file that the transcript is appended to.")] = None,
) -> None:
    """Be the student: talk to any tutor in the terminal, and take the post-test."""
    from maieutic.chat import chat as talk
    from maieutic.evaluation.config import load_evaluation_recipe

    loaded = load_evaluation_recipe(recipe, overrides or [])
    talk(loaded, tutor, problem=problem, seed=seed, test=test, thinking=thinking, save=save, write=typer.echo)

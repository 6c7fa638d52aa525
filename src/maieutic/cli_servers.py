"""``maieutic serve`` and ``maieutic rescore``."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Named = Callable[[Callable[..., None]], Callable[..., None]]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="Overrides of the recipe.", show_default=False),
]


def register(app: typer.Typer, named_errors: Named) -> None:
    """Add the commands to the ``maieutic`` command."""
    app.command()(named_errors(serve))
    app.command()(named_errors(rescore))


def serve(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="student, judge or tutor.")],
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")],
    overrides: Overrides = None,
    student: Annotated[str | None, typer.Option(help="Which student, where the recipe has several.")] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter of the environment that has vLLM, served on the CPU (default: this environment)."
        ),
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="The environment of --python has a vLLM for GPUs.")
    ] = False,
    port: Annotated[int, typer.Option(help="Wanted port; 0, or one that is taken: a free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 publishes this machine's name.")
    ] = "127.0.0.1",
    address_file: Annotated[
        Path | None,
        typer.Option(
            help="Where the address is published (default: runs/NAME/endpoints/ROLE[-STUDENT].json)."
        ),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="The server's output (default: beside the address file).")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until it must be healthy.")] = 900.0,
) -> None:
    """Serve a recipe's student, judge or tutor with vLLM until it is stopped.

    The address file appears when the server is healthy and goes when it ends; recipes name it as
    engine.urls: ["file:PATH"].
    """
    from maieutic.check import resolve
    from maieutic.errors import EngineError, MissingExtraError
    from maieutic.models import resolve_model
    from maieutic.recipe import load_recipe
    from maieutic.serve import Server, model_of, plan

    loaded = resolve(load_recipe(recipe, overrides or []))
    if python is None and importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("vllm", "vllm")
    # Before the server exists: a scheduler's SIGTERM while it starts must not leave it behind.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _leave)
    what = plan(
        loaded,
        role,
        model_dir=resolve_model(model_of(loaded, role, student), loaded.offline),
        python=python,
        cpu=False if gpu else None,
        student=student,
    )
    name = role if student is None else f"{role}-{student}"
    address = address_file or Path(loaded.output_dir) / loaded.name / "endpoints" / f"{name}.json"
    output = log or address.with_suffix(".log")
    typer.echo(f"starting {what.model} for the {role}; output in {output}", err=True)
    with Server(what, address, output, host=host, port=port, timeout_s=timeout) as server:
        typer.echo(f"{server.url} (published in {address})")
        code = server.wait()
    if code != 0:
        raise EngineError(f"{role}: the server ended with status {code}; see {output}")


def _leave(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def rescore(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, such as runs/smollm2-dppo.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    overrides: Overrides = None,
    phase: Annotated[str, typer.Option(help="train, eval or all.")] = "all",
    grader: Annotated[
        str | None, typer.Option(help="Grade with a function of your own, as module:function.")
    ] = None,
    keep_verdicts: Annotated[
        bool, typer.Option("--keep-verdicts", help="Do not judge again, except what was unknown.")
    ] = False,
    concurrency: Annotated[int, typer.Option(help="Episodes at once.")] = 64,
) -> None:
    """Judge, grade and reward the saved transcripts of a run again, without new dialogues.

    Give the other judge or reward as overrides (judge.kind=llm, reward.gate_penalty=0.5, …). Can be stopped and started
    again: the same command goes on from what FOLDER holds.
    """
    from maieutic.rescore import rescore_run

    try:
        lines = rescore_run(
            run,
            out,
            overrides or [],
            phase=phase,
            grader_check=grader,
            keep_verdicts=keep_verdicts,
            concurrency=concurrency,
        )
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    typer.echo("\n".join(lines))

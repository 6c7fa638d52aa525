"""``maieutic reat …``: distil dialogues into experience, look at the repository, tutor with it and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maieutic.errors import MaieuticError
from maieutic.reat import cli_repository, cli_run

app = typer.Typer(
    help="REAT: tutoring with experience that is distilled from earlier dialogues.", no_args_is_help=True
)


cli_repository.register(app)
cli_run.register(app)


def _fail(error: MaieuticError) -> typer.Exit:
    typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
    return typer.Exit(error.exit_code)


@app.command()
def distil(
    transcripts: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRANSCRIPTS...", help="Transcript files, run folders, or folders of JSONL files."
        ),
    ],
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="A distillation recipe: a file or a shipped name.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder; a second start goes on there.")],
    repository: Annotated[
        Path | None, typer.Option(help="Folder of the repository that takes what passes (default: none).")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override, such as distil.gamma=90."),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask again what failed for good in an earlier start.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Distil dialogues into experience: observe, criticise, revise, gate, abstract, and admit to a repository.

    Can be stopped and started again, also after a kill: what was answered lies in the folder's journal.jsonl.
    """
    import asyncio
    import json
    from dataclasses import asdict

    from maieutic.reat.distil_config import load_distil_recipe

    try:
        loaded = load_distil_recipe(recipe, override or [])
        from maieutic.reat.distil_command import run

        report = asyncio.run(run(loaded, transcripts, out, repository, retry_failed=retry_failed))
    except MaieuticError as error:
        raise _fail(error) from None
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    typer.echo(json.dumps(asdict(report)) if as_json else "\n".join(report.lines()))

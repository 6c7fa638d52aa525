"""``maieutic reat …``: distil dialogues into experience, look at the repository, tutor with it and evaluate."""

from __future__ import annotations

import typer

from maieutic.errors import MaieuticError

app = typer.Typer(
    help="REAT: tutoring with experience that is distilled from earlier dialogues.", no_args_is_help=True
)


def _fail(error: MaieuticError) -> typer.Exit:
    typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
    return typer.Exit(error.exit_code)

"""``maieutic sft``, ``sweep``, ``compare`` and ``chat``: baselines and the comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

Named = Callable[[Callable[..., None]], Callable[..., None]]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="Overrides of the recipe.", show_default=False),
]


def register(app: typer.Typer, named_errors: Named) -> None:
    """Add the commands to the ``maieutic`` command."""
    app.command()(named_errors(sft))


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

"""``maieutic export``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

Named = Callable[[Callable[..., None]], Callable[..., None]]


def register(app: typer.Typer, named_errors: Named) -> None:
    """Add the command to the ``maieutic`` command."""
    app.command()(named_errors(export))


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A run's folder (its newest checkpoint), or a checkpoint."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write (default: RUN/export/CHECKPOINT-KIND)."),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter/--merge", help="The LoRA adapter alone, or a whole model (the default)."),
    ] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of a merged model; auto: the recipe's, else the base model's."),
    ] = "auto",
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the Hub too (private).")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository on the Hub public.")
    ] = False,
) -> None:
    """Write a trained tutor as a Hugging Face folder with a model card, ready for `vllm serve`."""
    from maieutic.export import export as write

    done = write(
        source, out, kind="adapter" if adapter else "merged", dtype=dtype, push=push, private=not public
    )
    typer.echo(f"{done.folder} ({done.kind}, {done.dtype}, from {done.source.name})")
    if done.url is not None:
        typer.echo(done.url)

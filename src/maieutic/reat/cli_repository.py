"""``maieutic reat inspect | enable | export | import``: look at a repository and move it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from maieutic.errors import MaieuticError

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A repository.")]


def _fail(error: MaieuticError) -> typer.Exit:
    typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
    return typer.Exit(error.exit_code)


def inspect(
    folder: Folder,
    id: Annotated[
        str | None, typer.Option("--id", help="One experience, with everything that happened to it.")
    ] = None,
    disabled: Annotated[bool, typer.Option(help="The disabled experiences, one JSON line each.")] = False,
    verify: Annotated[bool, typer.Option(help="Compare the index with the database, bit by bit.")] = False,
) -> None:
    """What a repository holds, as JSON."""
    from maieutic.reat.exchange import summary
    from maieutic.reat.repository import Repository

    try:
        with Repository.open(folder, read_only=True) as repository:
            if verify:
                repository.verify()
            if id is not None:
                stored = repository.stored(id)
                found = {
                    "status": stored.status,
                    "reason": stored.reason,
                    "replaced_by": stored.replaced_by,
                    "experience": stored.experience.model_dump(mode="json", exclude={"history"}),
                    "events": [vars(e) for e in repository.events(id)],
                }
                typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
            elif disabled:
                with repository.database.reading():
                    for stored in repository.database.all_stored():
                        if stored.status == "disabled":
                            e = stored.experience
                            row = {"id": e.id, "reason": stored.reason, "utility": e.utility, "uses": e.uses}
                            typer.echo(json.dumps(row | {"advice": e.advice}, ensure_ascii=False))
            else:
                typer.echo(json.dumps(summary(repository.database), indent=1))
    except MaieuticError as error:
        raise _fail(error) from None


def enable(
    folder: Folder,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Disabled experiences.")],
) -> None:
    """Let disabled experiences be retrieved again."""
    from maieutic.reat.repository import Repository

    try:
        with Repository.open(folder) as repository:
            for id in ids:
                typer.echo(f"{id} {'enabled' if repository.enable(id) else 'was enabled already'}")
    except MaieuticError as error:
        raise _fail(error) from None


def export(
    folder: Folder, file: Annotated[Path, typer.Argument(metavar="FILE", help="A JSONL file to write.")]
) -> None:
    """Write every experience, its history and every admission to one JSONL file."""
    from maieutic.reat.exchange import export_file
    from maieutic.reat.repository import Repository

    try:
        with Repository.open(folder, read_only=True) as repository:
            typer.echo(f"{export_file(repository.database, file)} experiences in {file}")
    except MaieuticError as error:
        raise _fail(error) from None


def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A repository, new or old.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An exported JSONL file.")],
    embedder: Annotated[
        str | None, typer.Option(help="What embeds the texts (default: what the file was embedded with).")
    ] = None,
    offline: Annotated[bool, typer.Option(help="Never fetch a model.")] = False,
) -> None:
    """Add what an exported file has and a repository lacks."""
    from maieutic.reat.embeddings import make_embedder
    from maieutic.reat.exchange import header_of, import_file
    from maieutic.reat.repository import Repository

    try:
        name = embedder or header_of(file)["embedder"]
        with Repository.open(folder, embedder=make_embedder(name, offline=offline)) as repository:
            done = import_file(repository, file)
        typer.echo(f"{done.added} added, {done.present} there already, {done.admissions} admissions")
    except MaieuticError as error:
        raise _fail(error) from None


def register(app: typer.Typer) -> None:
    """Add the commands to ``maieutic reat``."""
    app.command()(inspect)
    app.command()(enable)
    app.command()(export)
    app.command("import")(import_)

"""What ``maieutic reat distil`` does: roles, repository and progress around :func:`maieutic.reat.distil.distil`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from maieutic.engines.usage import Ledger
from maieutic.headway import Teller
from maieutic.reat.connect import connect_roles
from maieutic.reat.distil import DistilReport, distil
from maieutic.reat.distil_config import DistilRecipe
from maieutic.reat.embeddings import make_embedder
from maieutic.reat.repository import Repository


async def run(
    recipe: DistilRecipe,
    transcripts: Sequence[Path],
    out: Path,
    repository: Path | None,
    *,
    retry_failed: bool = False,
) -> DistilReport:
    """Distil into ``out`` and, where one is given, into the repository folder."""
    ledger = Ledger(recipe.spending_limit_usd)
    with ExitStack() as stack:
        async with connect_roles(recipe.roles, recipe.distil, seed=recipe.seed, ledger=ledger) as connected:
            sink = None
            if repository is not None:
                sink = stack.enter_context(
                    Repository.open(
                        repository,
                        embedder=make_embedder(recipe.embedder, offline=recipe.offline),
                        settings=recipe.repository,
                        merge=connected.roles.merge,
                    )
                )
            return await distil(
                transcripts,
                connected.roles,
                sink,
                recipe.distil,
                out=out,
                ledger=ledger,
                in_flight=2 * connected.capacity,
                retry_failed=retry_failed,
                progress=Teller(),
            )

"""Named errors of the SLURM commands."""

from __future__ import annotations

from maieutic.errors import MaieuticError


class SiteError(MaieuticError):
    """The site's settings cannot be used: names the file, the line, the key and, where there is one, the nearest valid key."""

    exit_code = 2


class SlurmError(MaieuticError):
    """A SLURM command is absent or refused what it was given: shows what it said."""

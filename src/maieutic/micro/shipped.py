"""The micro models that come with the package, by name, held to their checksums."""

from __future__ import annotations

import difflib
import hashlib
import json
from functools import cache
from pathlib import Path

from maieutic.errors import ModelError
from maieutic.resources import share_dir

WEIGHTS = "model.safetensors"
RECORD = "build.json"
"""Beside the models: the seed they were built with and the SHA-256 of their weights."""


def models_dir() -> Path:
    """The folder of the shipped models, one folder each."""
    return share_dir("data") / "micro" / "models"


def shipped_names() -> list[str]:
    """Names of the shipped models, such as ``tutor`` (in recipes: ``micro/tutor``)."""
    return sorted(file.parent.name for file in models_dir().glob("*/config.json"))


@cache
def shipped_model(name: str) -> Path:
    """The folder of a shipped model. Raises :class:`ModelError` for an unknown name, or when its weights are not those that
    were shipped (rebuild them with ``maieutic micro build``)."""
    folder = models_dir() / name
    if name not in shipped_names():
        near = difflib.get_close_matches(name, shipped_names(), n=1)
        hint = (
            f"did you mean 'micro/{near[0]}'?"
            if near
            else f"there are: {', '.join(shipped_names()) or 'none'}"
        )
        raise ModelError(f"no micro model 'micro/{name}'; {hint}")
    pinned = json.loads((models_dir() / RECORD).read_text(encoding="utf-8"))["weights_sha256"].get(name)
    found = sha256(folder / WEIGHTS)
    if found != pinned:
        raise ModelError(
            f"{folder / WEIGHTS} has SHA-256 {found}, {RECORD} says {pinned}: the file was changed or damaged"
        )
    return folder


def sha256(file: Path) -> str:
    """Checksum of a file, as hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

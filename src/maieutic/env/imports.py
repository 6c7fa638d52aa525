"""A user's own classes and functions, named in a recipe by import path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from maieutic.errors import RecipeError


def load_object(path: str, key: str) -> Any:
    """What ``package.module:Name`` names. Raises :class:`RecipeError` that names the recipe's key and what failed."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise RecipeError(f"{key}: {path!r} is not an import path module:Name")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise RecipeError(
            f"{key}: cannot import module {module!r}: {error} (is its folder on PYTHONPATH, or the package installed?)"
        ) from error
    if not hasattr(found, name):
        raise RecipeError(f"{key}: module {module!r} has no {name!r}")
    return getattr(found, name)


def build(path: str, key: str, protocol: type, *args: Any, options: Mapping[str, Any]) -> Any:
    """An instance of a user's own class, called with ``args`` and ``options`` as keyword arguments.

    ``protocol`` is checked on what comes back. Raises :class:`RecipeError` naming key, path and options.
    """
    factory = load_object(path, key)
    try:
        made = factory(*args, **options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{key}: {path} cannot be made with options {dict(options)}: {error}") from error
    if not isinstance(made, protocol):
        raise RecipeError(f"{key}: {path} gave a {type(made).__name__}, which is no {protocol.__name__}")
    return made

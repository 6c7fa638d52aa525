"""Losses by name, and a user's own by import path."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from maieutic.algorithms.base import LossFn
from maieutic.algorithms.dppo import DPPO
from maieutic.algorithms.grpo import GRPO
from maieutic.errors import RecipeError

LOSSES: dict[str, type] = {"grpo": GRPO, "dppo": DPPO}


def get_loss(name: str, **settings: Any) -> LossFn:
    """The loss ``name`` (``grpo``, ``dppo``, or ``package.module:factory``) with its settings.

    A factory is called with the settings and returns a :class:`~maieutic.algorithms.base.LossFn`. Raises
    :class:`~maieutic.errors.RecipeError` for an unknown name, an import that fails, or settings that do not fit.
    """
    if ":" in name:
        factory = _import(name)
    elif name in LOSSES:
        factory = LOSSES[name]
    else:
        near = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0.0)[0]
        raise RecipeError(
            f"algorithm.loss: unknown loss {name!r}; did you mean {near!r}? (or 'package.module:factory')"
        )
    try:
        return factory(**settings)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"algorithm.loss: {name!r} does not take {settings}: {error}") from error


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"algorithm.loss: cannot import {path!r}: {error}") from error

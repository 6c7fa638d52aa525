"""Load a recipe: YAML, at most one ``base:``, ``key.sub=value`` overrides, strict validation, named errors; and dump it again.

Paths in a recipe are taken relative to the file that names them, when something lies there; otherwise relative to the
working directory. Values that ``envs/<name>/env.yaml`` supplies are merged later, by the environment, into ``recipe.env``
where the recipe left them unset.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maieutic import yaml12
from maieutic.config import ENV_TIMING, Recipe
from maieutic.errors import RecipeError
from maieutic.recipe_errors import explain, nearest_key
from maieutic.yaml12 import KeyPath, dotted

Origins = dict[KeyPath, str]
"""Where each key was given: ``file:line`` or the override."""

_PATH_KEYS = {
    ("tutor", "model"),
    ("tutor", "init_from"),
    ("tutor", "chat_template"),
    ("students", "*", "model"),
    ("students", "*", "chat_template"),
    ("judge", "model"),
    ("problems", "source"),
    ("problems", "eval_source"),
    ("env", "name"),
}
"""Keys whose value may be a path."""


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe of a file, or of a shipped name such as ``smollm2/dppo``.

    ``overrides`` are ``key.sub=value`` (list items by number: ``students.0.model=…``); the value is read as YAML and replaces
    what was there. Raises :class:`RecipeError` that names file, key, value and, where there is one, the nearest valid name.
    """
    path = locate(path_or_name)
    data, origins = read_with_base(path)
    for text in overrides:
        apply_override(data, origins, text)
    return _validate(data, origins, str(path))


def locate(path_or_name: str | Path) -> Path:
    """The recipe's file: a path that exists, else a shipped recipe's name."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    if path.is_dir():
        own = path / "recipe.yaml"
        hint = f"; did you mean {own}?" if own.is_file() else ""
        raise RecipeError(f"{path}: a folder, not a recipe file{hint}")
    from maieutic.resources import find_recipe

    return find_recipe(str(path_or_name))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: deterministic, and :func:`load_recipe` reads it back to an equal recipe.

    In ``env`` only values that were set are written (by the recipe or, once the environment is loaded, by its ``env.yaml``),
    so that a reload neither hides nor repeats what ``env.yaml`` supplies. Everything else is written in full.
    """
    data = recipe.model_dump(mode="json")
    data["env"] = recipe.env.model_dump(mode="json", exclude_unset=True)
    return yaml12.dump(data)


NOT_SCIENCE = (
    "name",
    "output_dir",
    "offline",
    "tracking",
    "checkpoint",
    *(f"env.{key}" for key in sorted(ENV_TIMING)),
)


def recipe_hash(recipe: Recipe, ignore: Sequence[str] = NOT_SCIENCE) -> str:
    """First 16 hex digits of the SHA-256 of the recipe without the ``ignore`` keys (dotted; default: those that cannot change a
    result), so that two runs can be told to be the same experiment."""
    data = recipe.model_dump(mode="json")
    for key in ignore:
        *parents, last = key.split(".")
        node: Any = data
        for part in parents:
            node = node[part]
        del node[last]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> tuple[dict[str, Any], Origins]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RecipeError(f"{path}: cannot be read: {e}") from e
    data, lines = yaml12.load(text, str(path))
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values, this is {type(data).__name__}")
    _anchor_paths(data, path.parent)
    return data, {key: f"{path}:{line}" for key, line in lines.items()}


def read_with_base(path: Path) -> tuple[dict[str, Any], Origins]:
    """The plain data of a recipe file merged over the file that its ``base`` names, and the file and line of every key.

    Nothing is validated here. Raises :class:`RecipeError` for a file that cannot be read, is no mapping, or has an impossible base.
    """
    data, origins = _read(path)
    if "base" not in data:
        return data, origins
    base = data.pop("base")
    where = origins.pop(("base",))
    if not isinstance(base, str):
        raise RecipeError(f"{where}: base: {base!r} is not the path of one recipe file")
    base_path = path.parent / base
    if not base_path.is_file():
        near = [p.name for p in sorted(base_path.parent.glob("*.yaml"))] if base_path.parent.is_dir() else []
        hint = f"; there are: {', '.join(near)}" if near else ""
        raise RecipeError(f"{where}: base: no file {base!r} beside {path}{hint}")
    merged, base_origins = _read(base_path)
    if "base" in merged:
        raise RecipeError(
            f"{where}: base: {base!r} has a base of its own ({base_origins['base',]}): a recipe inherits at most once"
        )
    _merge(merged, base_origins, data, origins, ())
    return merged, base_origins


def _merge(
    into: dict[str, Any], into_origins: Origins, new: dict[str, Any], origins: Origins, at: KeyPath
) -> None:
    """Mappings merge key by key; anything else (lists too) is replaced as a whole."""
    for key, value in new.items():
        here = (*at, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            into_origins[here] = origins[here]
            _merge(into[key], into_origins, value, origins, here)
        else:
            _forget(into_origins, here)
            into[key] = value
            into_origins.update({k: v for k, v in origins.items() if k[: len(here)] == here})


def _forget(origins: Origins, here: KeyPath) -> None:
    for key in [k for k in origins if k[: len(here)] == here]:
        del origins[key]


def apply_override(data: dict[str, Any], origins: Origins, text: str) -> None:
    """Set ``key.sub=value`` (the value is YAML) in ``data``, and its place in ``origins``. Raises :class:`RecipeError`."""
    name = f"override {text!r}"
    key, eq, raw = text.partition("=")
    if not eq or not key.strip() or any(not p.strip() for p in key.split(".")):
        raise RecipeError(f"{name}: write key.sub=value, such as training.max_steps=10")
    parts = [p.strip() for p in key.split(".")]
    value, _ = yaml12.load(raw, name)
    if parts == ["base"]:
        raise RecipeError(f"{name}: base belongs in the file")
    node: Any = data
    path: KeyPath = ()
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                have = f"items 0 to {len(node) - 1}" if node else "no items"
                raise RecipeError(f"{name}: {dotted((*path, part))}: {dotted(path)} is a list with {have}")
            step: str | int = int(part)
        elif isinstance(node, dict):
            step = part
            if part not in node and not last:
                node[part] = {}
        else:
            hint = nearest_key((*path, part))
            raise RecipeError(
                f"{name}: {dotted((*path, part))}: {dotted(path)} is {node!r}, which has no keys"
                + (f"; did you mean {hint!r}?" if hint else "")
            )
        path = (*path, step)
        if last:
            node[step] = value
            _forget(origins, path)
            origins[path] = name
        else:
            if isinstance(node, dict) and node[step] is None:
                node[step] = {}
            origins.setdefault(path, name)
            node = node[step]


def _anchor_paths(data: dict[str, Any], folder: Path) -> None:
    """Turn relative paths that exist beside the recipe into absolute ones, so that the working directory does not matter."""

    def visit(node: Any, path: tuple[str, ...]) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            here = (*path, key if isinstance(key, str) else "*")
            if here in _PATH_KEYS and isinstance(value, str):
                looks_like_path = "/" in value or value.startswith(".") or Path(value).suffix != ""
                if looks_like_path and (folder / value).exists():
                    node[key] = str((folder / value).resolve())
            else:
                visit(value, here)

    visit(data, ())


def _validate(data: dict[str, Any], origins: Origins, name: str) -> Recipe:
    # JSON mode is strict where it matters (no "75" → 75, no true → 1) and still takes a list for a tuple.
    try:
        return Recipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as e:
        raise RecipeError(explain(e, data, origins, name) + _of_another_command(data)) from None


_OTHER_COMMANDS = (
    ({"instrument"}, "maieutic sweep"),
    ({"experiment", "sources"}, "maieutic sft"),
    ({"experiment"}, "maieutic evaluate --recipe"),
    ({"sources"}, "maieutic data build"),
    ({"roles", "collect"}, "maieutic latent run` or `maieutic latent check"),
    ({"roles", "augment"}, "maieutic latent run` or `maieutic latent check"),
    ({"roles", "test"}, "maieutic reat run"),
    ({"roles", "annotate"}, "maieutic reat run"),
    ({"roles"}, "maieutic reat` or `maieutic latent"),
)
"""Sections that only a recipe of another command has, and that command; the first that fits."""


def _of_another_command(data: dict[str, Any]) -> str:
    """A last line for who gave ``maieutic train`` or ``check`` the recipe of another command."""
    for keys, command in _OTHER_COMMANDS:
        if keys <= data.keys():
            return f"\n{', '.join(sorted(keys))}: this looks like a recipe for `{command}`, not for `maieutic train`"
    return ""

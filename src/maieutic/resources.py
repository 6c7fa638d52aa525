"""The folders that ship with the package: environments, recipes and data.

In a source checkout they stand at the top of the repository; an installed wheel carries the same folders inside the
package. Nothing here reads what is in them: that is the business of `maieutic.config` and `maieutic.problems`.
"""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path
from typing import Literal

from maieutic.errors import MaieuticError, RecipeError

Kind = Literal["envs", "recipes", "data"]
KINDS: tuple[Kind, ...] = ("envs", "recipes", "data")

_PACKAGE = Path(__file__).resolve().parent

_RECIPE_SUFFIXES = (".yaml", ".yml")
_NOT_RECIPES = ("accelerate", "data", "evaluation", "latent", "reat", "sft", "compare", "base")
"""Folders under `recipes/` whose files configure a launcher and are not experiments."""
_OF_SFT = ("micro/sft",)
"""Recipes of `maieutic sft` that stand beside the experiments that they are compared with."""


def share_dir(kind: Kind) -> Path:
    """The folder `envs`, `recipes` or `data`, in the checkout if this is one, else in the installed package."""
    if kind not in KINDS:
        raise MaieuticError(f"no shared folder '{kind}': there is {', '.join(KINDS)}")
    for root in (_checkout(), _PACKAGE / "_share"):
        if root is not None and (root / kind).is_dir():
            return root / kind
    raise MaieuticError(
        f"the package at {_PACKAGE} came without its '{kind}' folder: install the wheel again (or the checkout, with "
        "`pip install -e .`)"
    )


def find_env(name_or_path: str | Path) -> Path:
    """The folder of an environment (it holds `env.yaml`): a folder of the user's own, else a shipped one by name."""
    own = Path(name_or_path).expanduser()
    if (own / "env.yaml").is_file():
        return own.absolute()
    shipped = share_dir("envs") / str(name_or_path)
    if _plain(str(name_or_path)) and (shipped / "env.yaml").is_file():
        return shipped
    names = sorted(file.parent.name for file in share_dir("envs").glob("*/env.yaml"))
    raise RecipeError(
        f"no environment '{name_or_path}': neither a folder with env.yaml nor shipped"
        + _suggest(str(name_or_path), names)
    )


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe: a path, else a shipped one by its name under `recipes/` (`smollm2/dppo`, suffix optional).

    A path may start with `recipes/`, so that the same command works in a checkout and beside an installed package.
    """
    own = Path(name_or_path).expanduser()
    if own.is_file():
        return own.absolute()
    name = str(name_or_path).removeprefix("./").removeprefix("recipes/")
    if _plain(name):
        for candidate in (name, *(name + suffix for suffix in _RECIPE_SUFFIXES)):
            shipped = share_dir("recipes") / candidate
            if shipped.suffix in _RECIPE_SUFFIXES and shipped.is_file():
                return shipped
    raise RecipeError(
        f"no recipe '{name_or_path}': neither a file nor shipped" + _suggest(name, list_recipes())
    )


def list_recipes() -> list[str]:
    """Names of the shipped recipes, sorted, such as `smollm2/dppo`."""
    root = share_dir("recipes")
    files = (file.relative_to(root) for file in root.rglob("*") if file.suffix in _RECIPE_SUFFIXES)
    names = (file.with_suffix("").as_posix() for file in files if file.parts[0] not in _NOT_RECIPES)
    return sorted(name for name in names if name not in _OF_SFT)


def copy_recipes(dest: str | Path, replace: bool = False) -> list[Path]:
    """Copy the whole `recipes/` tree (launcher configurations too) to `dest`, to be edited; returns the files written.

    Raises :class:`MaieuticError` before anything is written when a file is already there, unless `replace`.
    """
    root, target = share_dir("recipes"), Path(dest).expanduser()
    files = sorted(file for file in root.rglob("*") if file.is_file() and not file.name.startswith("."))
    pairs = [(file, target / file.relative_to(root)) for file in files]
    there = [copy for _, copy in pairs if copy.exists()]
    if there and not replace:
        raise MaieuticError(
            f"{there[0]} exists already ({len(there)} files in all): name another folder, or replace them (--force)"
        )
    try:
        for file, copy in pairs:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    except OSError as error:
        raise MaieuticError(f"cannot copy the recipes to {target}: {error}") from error
    return [copy for _, copy in pairs]


def _checkout() -> Path | None:
    """The top of the repository when this file lies in its `src/`, else None."""
    root = _PACKAGE.parents[1]
    return root if _PACKAGE.parent.name == "src" and (root / "pyproject.toml").is_file() else None


def _plain(name: str) -> bool:
    """Whether a name stays below the folder that it is looked up in."""
    path = Path(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


def _suggest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; shipped: {', '.join(names) or '(none)'}"

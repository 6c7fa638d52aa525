"""Whether a tutor is measured in the environment that it was trained in."""

from __future__ import annotations

from pathlib import Path

from maieutic.errors import RecipeError
from maieutic.evaluation.config import EvaluationRecipe
from maieutic.recipe import load_recipe


def run_of(tutor: str) -> Path | None:
    """The run's folder that a tutor lies in (a checkpoint, or something in one); None for anything else."""
    path = Path(tutor)
    if not path.exists():
        return None
    folders = [path.absolute(), *path.absolute().parents][:4]
    return next((f for f in folders if (f / "recipe.yaml").is_file() and (f / "checkpoints").is_dir()), None)


def other_world(recipe: EvaluationRecipe, tutor: str) -> str | None:
    """What to say when ``tutor`` was trained in another environment than the experiment's; None when it was not.

    A run's recipe that this version cannot read says nothing.
    """
    folder = run_of(tutor)
    if folder is None or recipe.experiment is None:
        return None
    own = folder / "recipe.yaml"
    try:
        trained = load_recipe(own).env.name
    except RecipeError:
        return None
    measured = load_recipe(recipe.experiment, recipe.experiment_overrides).env.name
    if trained == measured:
        return None
    return (
        f"{tutor} was trained in the environment {trained!r} and is measured in {measured!r}, that of {recipe.experiment}; "
        f"experiment={own} measures it in its own"
    )

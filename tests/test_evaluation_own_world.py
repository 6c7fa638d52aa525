"""A checkpoint that is measured in another environment than its run's is said to be."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from maieutic.cli import app
from maieutic.evaluation.config import load_evaluation_recipe
from maieutic.evaluation.own_world import other_world, run_of
from maieutic.recipe import dump_recipe, load_recipe


def checkpoint_of(folder: Path, recipe: str) -> Path:
    made = folder / "checkpoints" / "step-000004" / "model"
    made.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe(recipe)))
    return made.parent


def test_a_checkpoint_of_another_environment_is_told(tmp_path: Path) -> None:
    micro = checkpoint_of(tmp_path / "mine", "micro/full")
    told = other_world(load_evaluation_recipe("evaluation/cpu", []), str(micro))
    own = tmp_path / "mine" / "recipe.yaml"
    assert told is not None and "'micro' and is measured in 'near_transfer', that of smollm2/dppo" in told
    assert told.endswith(f"experiment={own} measures it in its own")
    assert other_world(load_evaluation_recipe("evaluation/cpu", [f"experiment={own}"]), str(micro)) is None
    # The command says it before it loads anything: here there is no model to load.
    result = CliRunner().invoke(app, ["evaluate", str(micro), "-o", str(tmp_path / "out"), "offline=true"])
    assert result.exit_code != 0 and result.stderr.startswith(f"WARNING: {told}")


def test_nothing_is_said_without_a_run_or_of_a_run_that_fits_or_cannot_be_read(tmp_path: Path) -> None:
    cpu = load_evaluation_recipe("evaluation/cpu", [])
    same = checkpoint_of(tmp_path / "same", "smollm2/grpo")
    assert run_of(str(same / "model")) == tmp_path / "same"
    assert other_world(cpu, str(same)) is None
    assert [run_of(t) for t in ("base", "http://h:1#m", str(tmp_path))] == [None, None, None]
    (tmp_path / "same" / "recipe.yaml").write_text("of: another version\n")
    assert other_world(cpu, str(same)) is None

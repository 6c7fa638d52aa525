"""A sweep that was stopped and changed: nothing that was made under other settings is measured."""

import json
import sys
from types import SimpleNamespace

from maieutic import sweep as sweeping
from maieutic.sweep import Task, load_sweep_recipe


def test_an_sft_model_of_other_settings_is_trained_again(tmp_path, monkeypatch):
    trained = []

    def run_sft(loaded):
        trained.append(loaded.name)
        folder = tmp_path / "compare-cpu" / "train" / loaded.name
        folder.mkdir(parents=True)
        (folder / "sft.json").write_text(json.dumps({"optimizer_steps": len(trained)}))

    monkeypatch.setitem(sys.modules, "maieutic.training.sft", SimpleNamespace(run_sft=run_sft))
    task, folder = Task("sft", 0), tmp_path / "compare-cpu" / "train" / "sft-0"

    def steps(*overrides):
        recipe = load_sweep_recipe("compare/cpu", [f"output_dir={tmp_path}", "name=compare-cpu", *overrides])
        return sweeping._sft(recipe, task, folder)[2]

    assert steps() == steps() == 1
    assert steps("arms.sft.overrides=[seed=5]") == 2
    assert trained == ["sft-0", "sft-0"]


def test_a_changed_base_is_another_setting(tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 1\n")
    (tmp_path / "arm.yaml").write_text("base: base.yaml\nname: a\n")
    recipe = load_sweep_recipe("compare/cpu", [f"arms.dppo.recipe={tmp_path / 'arm.yaml'}"])
    before = sweeping.setting(recipe, Task("dppo", 0))
    (tmp_path / "arm.yaml").write_text("# a comment decides nothing\nbase: base.yaml\nname: a\n")
    assert sweeping.setting(recipe, Task("dppo", 0)) == before
    (tmp_path / "base.yaml").write_text("seed: 2\n")
    assert sweeping.setting(recipe, Task("dppo", 0)) != before


def test_a_changed_experiment_of_an_sft_recipe_is_another_setting(tmp_path):
    (tmp_path / "tutor.yaml").write_text("name: t\nseed: 1\n")
    (tmp_path / "sft.yaml").write_text("name: s\nexperiment: tutor.yaml\nsources: [{kind: rollouts}]\n")
    recipe = load_sweep_recipe(
        "compare/cpu", [f"arms.sft.recipe={tmp_path / 'sft.yaml'}", "arms.sft.overrides=[]"]
    )
    before = [sweeping.setting(recipe, Task(arm, 0)) for arm in ("sft", "dppo")]
    (tmp_path / "tutor.yaml").write_text("name: t\nseed: 2\n")
    after = [sweeping.setting(recipe, Task(arm, 0)) for arm in ("sft", "dppo")]
    assert after[0] != before[0] and after[1] == before[1]

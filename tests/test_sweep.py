"""The sweep: tasks, resuming, one instrument for all arms, and the whole comparison in miniature."""

import json
from pathlib import Path

import pytest

import comparison_oracle
from maieutic import sweep as sweeping
from maieutic.check import resolve
from maieutic.env.build import make_environment
from maieutic.env.prompted import PromptedEnvironment
from maieutic.errors import MaieuticError, RecipeError
from maieutic.evaluation.config import load_evaluation_recipe
from maieutic.recipe import load_recipe
from maieutic.report.comparison.load import load_arms
from maieutic.sweep import Task, load_sweep_recipe, tasks

TINY = [
    "overrides=[training.max_steps=1, training.problems_per_step=2, training.mini_batch_problems=2, training.group_size=2, "
    "eval.every=0]",
    "instrument.overrides=[eval.problems=4, env.post_test_samples=4]",
    "arms.sft.overrides=[sources.0.problems=2, sources.0.group_size=2, sources.0.min_reward=-1, training.held_out=0]",
]


def test_tasks_are_arms_times_seeds_and_the_untrained_arm_once():
    recipe = load_sweep_recipe("compare/cpu", ["seeds=[3, 4]"])
    assert [t.name for t in tasks(recipe)] == [
        "base-3", "sft-3", "tutorrl-3", "grpo-3", "dppo-3", "sft-4", "tutorrl-4", "grpo-4", "dppo-4"
    ]  # fmt: skip


def test_a_setting_is_what_decides_the_result():
    recipe, task = load_sweep_recipe("compare/cpu"), Task("dppo", 0)
    same = load_sweep_recipe("compare/cpu", ["name=other", "processes=1", "seeds=[0, 1]"])
    assert (
        sweeping.setting(recipe, task)
        == sweeping.setting(same, task)
        != sweeping.setting(recipe, Task("dppo", 1))
    )
    for change in (
        "overrides=[training.max_steps=3]",
        "instrument.overrides=[]",
        "arms.dppo.overrides=[tutor.dtype=bfloat16]",
    ):
        assert sweeping.setting(load_sweep_recipe("compare/cpu", [change]), task) != sweeping.setting(
            recipe, task
        )


@pytest.mark.parametrize(
    "override, said",
    [
        ("against=bas", "which is no arm; there are base, sft"),
        ("seeds=[1, 1]", "lists a seed twice"),
        ("arms.sft.kind=stf", "stf"),
    ],
)
def test_recipes_that_do_not_fit(override, said):
    with pytest.raises(RecipeError, match=said):
        load_sweep_recipe("compare/cpu", [override])


@pytest.mark.parametrize("name", ["cpu", "ablations"])
def test_shipped_sweeps_name_recipes_that_load_and_measure_alike(name):
    recipe = load_sweep_recipe(f"compare/{name}")
    resolve(load_recipe(recipe.instrument.recipe, recipe.instrument.overrides))
    for spec in recipe.arms.values():
        if spec.kind != "sft":
            loaded = resolve(load_recipe(spec.recipe, [*recipe.overrides, *spec.overrides]))
            assert not loaded.env.tutor_sees_solution


def test_ablations_differ_from_the_full_recipe_in_one_condition():
    full = resolve(load_recipe("smollm2/dppo"))
    for name, changed in {
        "no-transfer": {"transfer"},
        "no-mask": {"hide_tutor"},
        "no-gates": {"gates"},
    }.items():
        other = resolve(load_recipe(f"ablations/{name}"))
        a, b = full.env.model_dump(), other.env.model_dump()
        assert {k for k in a if a[k] != b[k]} == changed and other.arm == name
        assert (other.reward == full.reward) == (name != "no-gates")
    assert resolve(load_recipe("ablations/no-gates")).reward.soft_penalty == 0


@pytest.mark.parametrize(
    "name, words", [("plain", "Help the student"), ("evaluation_aware", "You are measured like this")]
)
def test_prompt_only_arms_have_another_prompt_in_the_same_environment(name, words):
    recipe = load_evaluation_recipe(f"base/{name}")
    experiment = resolve(load_recipe(recipe.experiment, recipe.experiment_overrides))
    env = make_environment(experiment.env, experiment.reward)
    assert type(env) is PromptedEnvironment
    system = env.templates.tutor_system(env.env, "P")
    assert words in system and env.env.end_token in system
    plain = make_environment(*(lambda r: (r.env, r.reward))(resolve(load_recipe(recipe.experiment))))
    assert (
        env.templates.cold_hash == plain.templates.cold_hash
        and env.templates.rubrics == plain.templates.rubrics
    )
    assert env.env.model_dump(exclude={"kind", "options"}) == plain.env.model_dump(
        exclude={"kind", "options"}
    )


def test_a_prompt_that_is_missing_or_unusable_is_named(tmp_path):
    def made(prompt):
        overrides = [
            "env.kind=maieutic.env.prompted:PromptedEnvironment",
            f"env.options={{tutor_prompt: {prompt}}}",
        ]
        r = resolve(load_recipe("smollm2/dppo", overrides))
        return make_environment(r.env, r.reward)

    with pytest.raises(
        RecipeError, match=r"'plane' is neither a file nor a prompt .*evaluation_aware, plain"
    ):
        made("plane")
    (tmp_path / "own.txt").write_text("Teach.")
    with pytest.raises(RecipeError, match="end_token"):
        made(tmp_path / "own.txt")
    (tmp_path / "own.txt").write_text("Teach. {end_token}")
    assert made(tmp_path / "own.txt").templates.tutor == "Teach. {end_token}"


@pytest.mark.slow
def test_the_whole_comparison_in_miniature_and_again(tmp_path: Path):
    recipe = load_sweep_recipe("compare/cpu", [*TINY, f"output_dir={tmp_path}", "processes=1"])
    said: list[str] = []
    assert sweeping.run_sweep(recipe, said.append) == 0, said
    paths = sweeping.report(recipe)
    assert comparison_oracle.check(recipe.root) > 5 * 14
    data = json.loads(paths["json"].read_text())
    assert list(data["arms"]) == ["base", "sft", "tutorrl", "grpo", "dppo"] and data["notices"] == []
    assert {a["problems"] for a in data["arms"].values()} == {4}
    assert all(d["low"] is None and "too few" in d["note"] for d in data["differences"])
    # One instrument: every arm meets the same seeds, and both problems are tested.
    arms = load_arms([recipe.root / "evaluation" / t.name for t in tasks(recipe)])
    assert len({tuple(s.line["seed"] for s in a.samples) for a in arms}) == 1
    assert all(
        s.line["post_test"]["problem"] == "transfer" and "source" in s.line["extra_tests"]
        for a in arms
        for s in a.samples
    )
    assert (
        arms[2].runs[0].settings["reward"]["kind"] == "learning_gain"
    )  # TutorRL was trained with its own, measured with ours
    # A second start repeats nothing, and other settings are refused.
    before = {p: p.stat().st_mtime_ns for p in (recipe.root / "evaluation").rglob("*.jsonl")}
    said.clear()
    assert sweeping.run_sweep(recipe, said.append) == 0 and all("was done" in s for s in said)
    assert before == {p: p.stat().st_mtime_ns for p in (recipe.root / "evaluation").rglob("*.jsonl")}
    other = recipe.model_copy(update={"overrides": ["training.max_steps=2"]})
    with pytest.raises(MaieuticError, match="other settings"):
        sweeping.done(other, Task("dppo", 0))
    # A task that is missing is said to be.
    (recipe.root / "evaluation" / "grpo-0" / "arm.json").unlink()
    assert "1 of 5 tasks are not done" in sweeping.report(recipe)["md"].read_text()

"""``maieutic check``: numbers that a person can verify by hand, and faults that are collected rather than raised."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from maieutic.check import check_recipe, resolve, student_keys
from maieutic.errors import RecipeError
from maieutic.memory import model_size
from maieutic.problems import Problem, ProblemPair, SolveRate, write_pairs
from maieutic.recipe import load_recipe
from maieutic.tiny import make_tiny_model
from maieutic.training.policy import FrozenReference, build_policy

RECIPE = """
name: tiny
tutor: {{model: {model}, lora: {{r: 4}}}}
students: [{{model: {model}, sampling: {{max_tokens: 60}}}}]
env:
  {{max_turns: 6, visible_budget: 40, thinking_budget: 10, prompt_limit: 100, conversation_limit: 250,
    post_test_samples: 4, post_test_max_tokens: 50}}
problems: {{source: p.jsonl, eval_size: 2}}
training: {{max_steps: 3, problems_per_step: 4, group_size: 2, mini_batch_problems: 2}}
eval: {{problems: 5, samples: 3}}
"""


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_model_dir: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.format(model=tiny_model_dir))
    write(tmp_path, rate=0.5)
    return path


def write(folder: Path, rate: float | None, n: int = 8, answer: str = "1") -> None:
    key = str(student_keys(resolve(load_recipe(folder / "r.yaml")))[0])

    def problem(text: str) -> Problem:
        return Problem(
            text=text, answer=answer, rates={} if rate is None else {key: SolveRate(rate=rate, n=4)}
        )

    pairs = [ProblemPair(id=f"p{i}", source=problem(f"s{i}"), transfer=problem(f"t{i}")) for i in range(n)]
    write_pairs(folder / "p.jsonl", pairs)


def check(path: Path, *overrides: str, **kw: Any) -> Any:
    return check_recipe(load_recipe(path, overrides), **kw)


def test_counts_and_token_bounds(recipe_file: Path) -> None:
    r = check(recipe_file)
    assert r.errors == []
    assert r.plan == {
        "steps": 3,
        "episodes_a_step": 8,
        "episodes": 24,
        "optimizer_steps_a_step": 2,
        "optimizer_steps": 6,
        "post_test_samples_a_step": 32,
        "train_pairs": 6,
        "held_out_pairs": 2,
        "eval_episodes_each_time": 6,
    }
    assert r.tokens == {
        "longest_conversation": 3 * 50 + 2 * 60,
        "conversation_limit": 250,
        "longest_tutor_sequence": 350,
        "most_trained_tokens_a_step": 8 * 150,
        "most_dialogue_tokens_a_step": 8 * 250,
        "most_post_test_tokens_a_step": 32 * 50,
    }


def test_the_longest_conversation_is_reported_not_refused(recipe_file: Path) -> None:
    r = check(recipe_file, with_models=False)
    assert any("may take 270 tokens, env.conversation_limit is 250" in w for w in r.warnings)
    assert not any(
        "may take" in w for w in check(recipe_file, "env.conversation_limit=270", with_models=False).warnings
    )


def test_the_published_setting_is_reported(recipe_file: Path) -> None:
    path = recipe_file.with_name("published.yaml")
    path.write_text("name: p\ntutor: {model: a/b}\nstudents: [{model: c/d}]\nproblems: {source: p.jsonl}\n")
    r = check(path, with_models=False)
    assert r.tokens["longest_conversation"] == 12_282
    assert any("12,282" in w and "8,192" in w for w in r.warnings)
    assert r.errors[0].startswith("SolveRateError"), "the rates in the file are another student's"


def test_faults_of_problems_are_collected(recipe_file: Path) -> None:
    write(recipe_file.parent, rate=None)
    r = check(recipe_file, with_models=False)
    assert r.problems is None
    assert "maieutic data measure" in r.errors[0]
    assert any(line.startswith("error: SolveRateError") for line in r.lines())


def test_warnings_about_problems(recipe_file: Path) -> None:
    write(recipe_file.parent, rate=1.0, n=4, answer="two apples")
    w = " | ".join(check(recipe_file, with_models=False).warnings)
    assert "problems_per_step is 4, there are 2 training pairs" in w
    assert "2 training pairs are always solved" in w
    assert "2 training pairs have answers that are not plain numbers" in w
    write(recipe_file.parent, rate=0.0, answer="1,200.5")
    w = " | ".join(check(recipe_file, "problems.eval_size=0", with_models=False).warnings)
    assert "solves none of the tested problems" in w
    assert "no pairs are held out" in w
    assert "plain numbers" not in w


def test_sizes_come_from_the_config_and_equal_the_model(tiny_model_dir: Path, tiny_model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    from maieutic.config import LoraSpec

    size = model_size(str(tiny_model_dir), dtype="bfloat16", revision=None, lora=LoraSpec(r=4), offline=True)
    assert size.parameters == sum(p.numel() for p in tiny_model.parameters())
    assert size.weight_bytes == 2 * size.parameters
    c = tiny_model.config
    head_dim = c.hidden_size // c.num_attention_heads
    assert size.cache_bytes_per_token == 2 * c.num_hidden_layers * c.num_key_value_heads * head_dim * 2
    adapted = get_peft_model(tiny_model, LoraConfig(r=4, target_modules="all-linear"))
    assert size.adapter_parameters == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_memory_depends_on_what_is_trained(recipe_file: Path) -> None:
    lora = check(recipe_file)
    full = check(recipe_file, "tutor.lora=null")
    (model,) = lora.models.values()
    assert lora.memory_bytes["gradients"] == 4 * model["adapter_parameters"]
    assert "student weights" not in lora.memory_bytes, "one frozen model in memory"
    assert full.memory_bytes["gradients"] == 4 * model["parameters"]
    assert full.memory_bytes["student weights"] == full.memory_bytes["tutor weights"], (
        "the frozen student needs its own"
    )
    assert full.memory_bytes["optimizer"] == 2 * full.memory_bytes["gradients"]


@pytest.mark.parametrize("lora", ["{r: 4}", "null"])
def test_memory_of_what_is_trained_is_that_of_the_policy_in_16_bits_too(recipe_file: Path, lora: str) -> None:
    overrides = ["tutor.dtype=bfloat16", f"tutor.lora={lora}", "algorithm.kl_beta=0.1", "offline=true"]
    estimate = check(recipe_file, *overrides).memory_bytes
    policy = build_policy(resolve(load_recipe(recipe_file, overrides)), torch.device("cpu"))

    def bytes_of(parameters: Iterable[torch.nn.Parameter]) -> int:
        return sum(p.numel() * p.element_size() for p in parameters)

    trained = [p for p in policy.model.parameters() if p.requires_grad]
    assert estimate["tutor weights"] == bytes_of(policy.model.parameters())
    assert estimate["gradients"] == bytes_of(trained)
    assert estimate["optimizer"] == 2 * bytes_of(trained)
    if lora == "null":
        assert isinstance(policy.reference, FrozenReference)
        assert estimate["reference weights"] == bytes_of(policy.reference.forward.parameters())
    else:
        assert "reference weights" not in estimate


def test_a_judge_in_process_needs_memory(recipe_file: Path, tmp_path: Path) -> None:
    judge = make_tiny_model(tmp_path / "judge", hidden_size=32)
    said = check(recipe_file, f"judge={{kind: llm, model: {judge}, dtype: bfloat16}}")
    assert said.memory_bytes["judge weights"] == 2 * said.models[str(judge)]["parameters"]
    assert "judge weights" not in check(recipe_file).memory_bytes


def test_a_model_that_is_not_here_is_one_warning(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAIEUTIC_CACHE", str(tmp_path / "cache"))
    r = check(recipe_file, "tutor.model=smollm2-135m", "students.0.model=smollm2-135m")
    said = [w for w in r.warnings if w.startswith("no memory estimate")]
    assert len(said) == 1
    assert "maieutic models get smollm2-135m" in said[0]
    assert r.memory_bytes == {}


def test_the_environments_defaults_are_filled_in_and_checked(recipe_file: Path) -> None:
    r = resolve(load_recipe(recipe_file))
    assert (r.env.max_turns, r.env.end_after) == (6, 3)
    own = recipe_file.parent / "env"
    import shutil

    from maieutic.resources import find_env

    shutil.copytree(find_env("near_transfer"), own)
    (own / "env.yaml").write_text("conversation_limit: 100\n")
    path = recipe_file.with_name("own.yaml")
    path.write_text(f"name: x\ntutor: {{model: a/b}}\nstudents: [{{model: c/d}}]\nenv: {{name: {own}}}\n")
    with pytest.raises(RecipeError, match="conversation_limit is 100: one turn of each side may take 1162"):
        resolve(load_recipe(path))


def test_the_keys_are_those_of_the_students_that_play(recipe_file: Path) -> None:
    from maieutic.env.prompts import load_env
    from maieutic.env.student import ModelStudent

    class Chat:
        def __init__(self, name: str) -> None:
            self.name = name

    r = resolve(
        load_recipe(recipe_file, ["env.post_test_max_tokens=33", "students.0.sampling.temperature=0.3"])
    )
    played = [ModelStudent(Chat(s.model), s, load_env(r.env.name), r.env).key for s in r.students]  # type: ignore[arg-type]
    assert student_keys(r) == played


def test_json_and_text_say_the_same(recipe_file: Path) -> None:
    r = check(recipe_file)
    data = r.as_dict()
    assert data["schema"] == 1
    assert data["problems"]["train"] == 6
    text = "\n".join(r.lines())
    assert "6 for training, 2 held out" in text
    assert f"{data['tokens']['longest_conversation']:,}" in text


def test_without_a_transfer_test_the_best_checkpoint_goes_by_the_same_gain(recipe_file: Path) -> None:
    off = resolve(load_recipe(recipe_file, ["env.transfer=false"]))
    assert off.checkpoint.best == "eval/same_gain"
    assert resolve(load_recipe(recipe_file)).checkpoint.best == "eval/transfer_gain"
    none = resolve(load_recipe(recipe_file, ["env.transfer=false", "checkpoint.best=null"]))
    assert none.checkpoint.best is None
    said = check(recipe_file, "env.transfer=false", "checkpoint.best=eval/transfer_gain", with_models=False)
    assert any("no checkpoint is ever the best" in w for w in said.warnings)


def test_a_student_with_too_short_a_context_is_announced(recipe_file: Path, tmp_path: Path) -> None:
    # Two turns of 60 each; three tutor turns of 50: 270, cut at 250; with the prompt's 100 that is 350.
    assert not any("student student" in w for w in check(recipe_file).warnings)
    short = make_tiny_model(tmp_path / "short", max_position_embeddings=349)
    report = check(recipe_file, f"students.0.model={short}")
    assert any("student student may have to read and write 350 tokens" in w for w in report.warnings)
    enough = make_tiny_model(tmp_path / "enough", max_position_embeddings=350)
    report = check(recipe_file, f"students.0.model={enough}")
    assert not any("student student" in w for w in report.warnings)
    # The post-test: 100 + the student's own 120 + 400; with the tutor's turns shown 100 + 250 + 400.
    for hide, tokens in ((True, 620), (False, 750)):
        report = check(
            recipe_file,
            f"students.0.model={enough}",
            "env.post_test_max_tokens=400",
            f"env.hide_tutor={str(hide).lower()}",
        )
        assert any(f"read and write {tokens} tokens" in w for w in report.warnings), report.warnings


def test_names_that_only_a_run_would_look_up(recipe_file: Path) -> None:
    report = check(recipe_file, "reward.kind=no_such_module:f", "judge.kind=json:Judge", with_models=False)
    assert any("reward.kind: cannot import module 'no_such_module'" in e for e in report.errors)
    assert any("judge.kind: module 'json' has no 'Judge'" in e for e in report.errors)
    with pytest.raises(RecipeError, match=r"unknown criterion 'cutoff'; did you mean 'cut_off'"):
        resolve(load_recipe(recipe_file, ["judge.options={skip: [cutoff]}"]))


def test_a_conversation_limit_is_held_against_the_environments_own_budgets() -> None:
    """The micro environment's turns are shorter than the published ones: 300 tokens are plenty there, 40 are not."""
    assert resolve(load_recipe("micro/full", ["env.conversation_limit=300"])).env.conversation_limit == 300
    with pytest.raises(RecipeError, match="conversation_limit is 40: one turn of each side may take 60"):
        resolve(load_recipe("micro/full", ["env.conversation_limit=40"]))

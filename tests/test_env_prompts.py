"""An environment's folder: shipped text, merging with a recipe, and every way a folder can be wrong."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maieutic.config import EnvSpec
from maieutic.env.prompts import EnvTemplates, fill, load_env
from maieutic.errors import RecipeError
from maieutic.resources import find_env

SHIPPED = find_env("near_transfer")
PROBLEM = r"What is {x} if \frac{1}{2} of {problem} is {{7}}?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(SHIPPED, tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture(scope="module")
def templates() -> EnvTemplates:
    return load_env("near_transfer")


def test_shipped_defaults_are_the_published_ones(templates: EnvTemplates):
    env = templates.resolve(EnvSpec())
    assert (env.transfer, env.hide_tutor, env.gates, env.tutor_sees_solution) == (True, True, "hard", False)
    assert (env.max_turns, env.end_after, env.end_token) == (22, 3, "<end_of_conversation>")
    assert (env.visible_budget, env.thinking_budget) == (150, 512)
    assert (env.prompt_limit, env.conversation_limit) == (2048, 8192)
    assert (env.post_test_samples, env.post_test_max_tokens) == (16, 800)
    # env.yaml repeats the schema's defaults: both state the published recipe.
    assert env == EnvSpec()


def test_what_the_recipe_sets_wins_even_when_it_equals_the_schema_default(folder: Path):
    (folder / "env.yaml").write_text("max_turns: 8\ngates: soft\npost_test_samples: 4\n")
    templates = load_env(folder)
    env = templates.resolve(EnvSpec(max_turns=22, end_after=1))
    assert (env.max_turns, env.end_after) == (22, 1)
    assert (env.gates, env.post_test_samples) == ("soft", 4)
    assert templates.name == "mine"


def test_resolving_twice_changes_nothing(templates: EnvTemplates):
    env = templates.resolve(EnvSpec(max_turns=6))
    assert templates.resolve(env) == env


def test_empty_env_yaml_is_no_defaults(folder: Path):
    (folder / "env.yaml").write_text("# nothing\n")
    assert load_env(folder).defaults == {}


def test_problem_text_is_never_reinterpreted(templates: EnvTemplates):
    assert templates.student_system(PROBLEM).endswith("\n\n" + PROBLEM)
    assert PROBLEM in templates.opening(PROBLEM)
    assert PROBLEM in templates.question(PROBLEM, same=False)
    assert PROBLEM in templates.cold_question(PROBLEM)
    rubric = templates.rubric("leakage", problem=PROBLEM, answer="{transcript}", transcript="<turn/>")
    assert PROBLEM in rubric and "{transcript}" in rubric and rubric.count("<turn/>") == 1


@given(st.text())
def test_fill_inserts_any_text_verbatim(text):
    assert fill("a {x} b {{x}} \\boxed{}", x=text) == f"a {text} b {{x}} \\boxed{{}}"


def test_post_test_wording(templates: EnvTemplates):
    transfer, same = (templates.question("P", same=same) for same in (False, True))
    for text in (transfer, same):
        assert "conversation with your teacher is over" in text and r"\boxed{}" in text
    assert "NEW problem" in transfer and "NEW" not in same
    assert r"\boxed{}" in templates.cold_question("P") and "over" not in templates.cold_question("P")


def test_tutor_prompt(templates: EnvTemplates):
    env = EnvSpec(end_token="<bye>")
    plain = templates.tutor_system(env, "P")
    assert "<bye>" in plain and "solution" not in plain
    with_solution = templates.tutor_system(env, "P", "x = {3}")
    assert with_solution == plain + "\n\n" + fill(templates.tutor_solution, solution="x = {3}")
    assert with_solution.endswith("x = {3}")


def test_cold_hash_is_that_of_the_two_templates_only(folder: Path, templates: EnvTemplates):
    assert load_env(folder).cold_hash == templates.cold_hash
    (folder / "tutor.txt").write_text("Teach. {end_token}")
    assert load_env(folder).cold_hash == templates.cold_hash
    (folder / "cold.txt").write_text("Solve {problem}")
    assert load_env(folder).cold_hash != templates.cold_hash


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("student.txt", "You are a student.", r"student\.txt: placeholder \{problem\} is missing"),
        ("tutor.txt", "Teach.", r"tutor\.txt: placeholder \{end_token\} is missing"),
        (
            "opening.txt",
            "{problem} {porblem}",
            r"unknown placeholder \{porblem\}; did you mean \{problem\}\?",
        ),
        (
            "cold.txt",
            "{problem} {answer}",
            r"cold\.txt: unknown placeholder \{answer\}; valid here: \{problem\}",
        ),
        ("cold.txt", " \n", r"cold\.txt: empty"),
        (
            "env.yaml",
            "max_turn: 3\n",
            r"env\.yaml:1: unknown key 'max_turn' \(value 3\); did you mean 'max_turns'\?",
        ),
        ("env.yaml", "name: x\n", r"unknown key 'name'"),
        ("env.yaml", "max_turns: 1\n", r"env\.yaml: max_turns: 1: .*greater than or equal to 2"),
        ("env.yaml", "max_turns: '8'\n", r"env\.yaml: max_turns: '8'"),
        ("env.yaml", "gate_names: []\n", r"gates are on but gate_names is empty"),
        ("env.yaml", "[a]\n", r"a mapping of keys to values is expected"),
    ],
)
def test_a_wrong_folder_is_named(folder: Path, file: str, text: str, message: str):
    (folder / file).write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_env(folder)


def test_a_missing_file_and_bad_bytes(folder: Path):
    (folder / "cold.txt").write_bytes(b"\xff{problem}")
    with pytest.raises(RecipeError, match=r"cold\.txt: cannot be read"):
        load_env(folder)
    (folder / "cold.txt").unlink()
    with pytest.raises(RecipeError, match=r"cold\.txt: missing"):
        load_env(folder)


def test_an_impossible_combination_of_folder_and_recipe(folder: Path):
    (folder / "env.yaml").write_text("gates: 'off'\ngate_names: []\n")
    with pytest.raises(RecipeError, match="environment 'mine' with this recipe: gates are on"):
        load_env(folder).resolve(EnvSpec(gates="hard"))


def test_literal_braces_in_a_template(folder: Path):
    (folder / "cold.txt").write_text(r"{problem} as \frac{{a}}{{b}} in \boxed{}")
    assert load_env(folder).cold_question("P") == r"P as \frac{a}{b} in \boxed{}"

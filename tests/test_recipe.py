"""Loading recipes: YAML 1.2, base, overrides, errors that help, and the round trip."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maieutic import yaml12
from maieutic.config import Recipe
from maieutic.errors import RecipeError
from maieutic.recipe import dump_recipe, load_recipe, recipe_hash
from maieutic.recipe_errors import all_keys, nearest_key

MINIMAL = """
name: tiny
tutor:
  model: org/tutor
students:
  - model: org/student
"""


def write(path: Path, text: str) -> Path:
    path.write_text(dedent(text), encoding="utf-8")
    return path


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.yaml", MINIMAL)


def error(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as e:
        load_recipe(path, overrides)
    return str(e.value)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("latent/cpu", "maieutic latent run` or `maieutic latent check`"),
        ("reat/cpu", "maieutic reat run`"),
        ("reat/ablations", "maieutic reat run`"),
        ("micro/sft", "maieutic sft`"),
        ("compare/cpu", "maieutic sweep`"),
        ("evaluation/cpu", "maieutic evaluate --recipe`"),
        ("base/plain", "maieutic evaluate --recipe`"),
        ("data/structures", "maieutic data build`"),
    ],
)
def test_a_recipe_of_another_command_is_named(name: str, command: str) -> None:
    with pytest.raises(RecipeError) as e:
        load_recipe(name)
    last = str(e.value).splitlines()[-1]
    assert last.endswith(f"this looks like a recipe for `{command}, not for `maieutic train`")


def test_an_ordinary_mistake_has_no_such_line(minimal: Path) -> None:
    assert "looks like" not in error(minimal, "trainng.max_steps=3")


# ---------------------------------------------------------------------------------------------------- YAML 1.2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("-3", -3),
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("'1e-6'", "1e-6"),
        ("[1, 2e0, off]", [1, 2.0, "off"]),
    ],
)
def test_scalars_resolve_as_yaml_1_2(text: str, value: object) -> None:
    got, _ = yaml12.load(text, "t")
    assert got == value
    assert type(got) is type(value)


def test_lines_of_keys_and_items() -> None:
    data, lines = yaml12.load("a: 1\nb:\n  c:\n    - x\n    - y: 2\n", "t")
    assert data == {"a": 1, "b": {"c": ["x", {"y": 2}]}}
    assert lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", 0): 4,
        ("b", "c", 1): 5,
        ("b", "c", 1, "y"): 5,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}\n", r"t:2: b\.c: key given twice \(first on line 2\)"),
        ("a: 1\na: 2\n", r"t:2: a: key given twice \(first on line 1\)"),
        ("1: x\n", r"t:1: .*key '1' is not text"),
        ("a: [1, 2\n", r"t:\d: not valid YAML"),
        ("a: !!python/object:os.system x\n", r"t:1: a: YAML tag"),
        ("a: &x [*x]\n", r"a\.0: an alias contains itself"),
        ("a: 1\n---\nb: 2\n", r"not valid YAML"),
    ],
)
def test_bad_yaml_is_named(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        yaml12.load(text, "t")


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=("Cs", "Cc"))),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("abc1eE.-_", min_size=1), inner, max_size=3)
        ),
        max_leaves=10,
    )
)
def test_dump_reads_back_equal(data: object) -> None:
    assert yaml12.load(yaml12.dump(data), "t")[0] == data


@pytest.mark.parametrize(
    "word", ["off", "yes", "1e-6", "12", "null", "true", "0x1", "1:30", "2024-01-01", ""]
)
def test_ambiguous_strings_survive_other_yaml_readers_too(word: str) -> None:
    import yaml

    text = yaml12.dump({"a": word})
    assert yaml.safe_load(text) == {"a": word}
    assert yaml12.load(text, "t")[0] == {"a": word}


# ---------------------------------------------------------------------------------------------------- loading


def test_defaults_are_the_published_setting(minimal: Path) -> None:
    r = load_recipe(minimal)
    assert r.name == "tiny"
    assert r.students[0].model == "org/student"
    assert (r.training.group_size, r.training.problems_per_step, r.env.post_test_samples) == (8, 16, 16)
    assert r.worst_case_tokens == 12_282


def test_traps_of_yaml_1_1_in_a_recipe(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.yaml",
        MINIMAL
        + """
env: {gates: off}
training:
  packing: off
  optimizer: {lr: 1e-6, eps: 1e-15, betas: [0.9, 0.95]}
tracking: {wandb: off}
""",
    )
    r = load_recipe(path)
    assert (r.env.gates, r.training.packing, r.tracking.wandb) == ("off", "off", "off")
    assert r.training.optimizer.lr == 1e-6
    assert r.training.optimizer.eps == 1e-15
    assert r.training.optimizer.betas == (0.9, 0.95)


def test_base_is_merged_deeply_and_lists_are_replaced(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yaml",
        MINIMAL
        + """
training: {max_steps: 5, group_size: 4, optimizer: {lr: 1e-5, grad_clip: 0.5}}
tracking: {tags: [a, b]}
""",
    )
    child = write(
        tmp_path / "child.yaml",
        """
        base: base.yaml
        name: child
        training: {max_steps: 9, optimizer: {lr: 2e-5}}
        tracking: {tags: [c]}
        students:
          - {model: other/student, name: s2}
        """,
    )
    r = load_recipe(child)
    assert r.name == "child"
    assert (r.training.max_steps, r.training.group_size) == (9, 4)
    assert (r.training.optimizer.lr, r.training.optimizer.grad_clip) == (2e-5, 0.5)
    assert r.tracking.tags == ["c"]
    assert [s.name for s in r.students] == ["s2"]
    assert r.tutor.model == "org/tutor"


def test_null_in_the_child_takes_a_section_away(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", MINIMAL.replace("org/tutor", "org/tutor\n  lora: {r: 4}"))
    child = write(tmp_path / "child.yaml", "base: base.yaml\ntutor: {lora: null}\n")
    assert load_recipe(tmp_path / "base.yaml").tutor.lora is not None
    assert load_recipe(child).tutor.lora is None


def test_a_base_may_not_have_a_base(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", MINIMAL)
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    c = write(tmp_path / "c.yaml", "base: b.yaml\n")
    text = error(c)
    assert "b.yaml' has a base of its own" in text
    assert "at most once" in text


def test_a_missing_base_names_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "dppo.yaml", MINIMAL)
    c = write(tmp_path / "c.yaml", "base: dpo.yaml\n")
    assert f"{c}:1: base: no file 'dpo.yaml'" in error(c)
    assert "dppo.yaml" in error(c)


def test_paths_beside_the_recipe_do_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.jsonl").touch()
    path = write(
        tmp_path / "recipes" / "r.yaml",
        MINIMAL
        + "problems: {source: mine.jsonl, eval_source: other.jsonl}\njudge: {kind: llm, model: ./mine.jsonl}\n",
    )
    monkeypatch.chdir(tmp_path)
    r = load_recipe(path)
    assert r.problems.source == str(tmp_path / "recipes" / "mine.jsonl")
    assert r.judge.model == str(tmp_path / "recipes" / "mine.jsonl")
    assert r.problems.eval_source == "other.jsonl", "nothing beside the recipe: left to the working directory"
    assert r.tutor.model == "org/tutor"


# ---------------------------------------------------------------------------------------------------- overrides


def test_overrides_set_typed_values(minimal: Path) -> None:
    r = load_recipe(
        minimal,
        [
            "training.max_steps=3",
            "training.optimizer.lr=5e-5",
            "env.gates=off",
            "tracking.tags=[x, y]",
            "tutor.lora.r=4",
            "students.0.model=a/b",
            "students.0.sampling.max_tokens=64",
            "problems.filter={low: 0.1, high: 0.5}",
            "checkpoint.best=null",
            "problems.options.steps=[1, 2]",
            "name=x-y",
        ],
    )
    assert r.training.max_steps == 3
    assert r.training.optimizer.lr == 5e-5
    assert r.env.gates == "off"
    assert r.tracking.tags == ["x", "y"]
    assert r.tutor.lora is not None
    assert r.tutor.lora.r == 4
    assert r.students[0].model == "a/b"
    assert r.students[0].sampling.max_tokens == 64
    assert r.problems.filter == {"low": 0.1, "high": 0.5}
    assert r.checkpoint.best is None
    assert r.problems.options == {"steps": [1, 2]}
    assert r.name == "x-y"


def test_the_later_override_wins_and_a_value_may_hold_an_equals_sign(minimal: Path) -> None:
    r = load_recipe(minimal, ["arm=a", "arm=b", "output_dir=runs/a=b"])
    assert (r.arm, r.output_dir) == ("b", "runs/a=b")


def test_an_override_replaces_the_base_of_a_mapping(minimal: Path) -> None:
    r = load_recipe(minimal, ["problems.options={a: 1}", "problems.options={b: 2}"])
    assert r.problems.options == {"b": 2}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "training.max_step=3",
            ["override 'training.max_step=3'", "training.max_step", "'training.max_steps'"],
        ),
        ("max_steps=3", ["max_steps: unknown key (value 3)", "'training.max_steps'"]),
        ("trainign.max_steps=3", ["trainign", "'training'"]),
        ("students.1.model=x", ["students.1", "items 0 to 0"]),
        ("students.first.model=x", ["students.first", "is a list"]),
        ("tutor.model.name=x", ["tutor.model.name", "'org/tutor', which has no keys"]),
        ("training.max_steps", ["write key.sub=value"]),
        ("=3", ["write key.sub=value"]),
        ("training..max_steps=3", ["write key.sub=value"]),
        ("base=x.yaml", ["base belongs in the file"]),
        ("training.max_steps=many", ["training.max_steps: 'many' is not valid", "whole number"]),
        ("training.max_steps=[1", ["override", "not valid YAML"]),
    ],
)
def test_a_bad_override_is_named(minimal: Path, override: str, parts: list[str]) -> None:
    text = error(minimal, override)
    for part in parts:
        assert part in text


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("addition", "parts"),
    [
        ("trainng: {max_steps: 3}\n", ["r.yaml:8: trainng: unknown key", "did you mean 'training'?"]),
        (
            "training:\n  group_sise: 4\n",
            ["r.yaml:9: training.group_sise: unknown key (value 4)", "'training.group_size'"],
        ),
        (
            "training: {optimizer: {learning_rate: 1.0}}\n",
            ["training.optimizer.learning_rate: unknown key", "known keys here: lr"],
        ),
        ("training: {optimizer: {zzz: 1}}\n", ["training.optimizer.zzz", "known keys here: lr, betas"]),
        ("training: {lr: 1e-5}\n", ["training.lr: unknown key", "'training.optimizer.lr'"]),
        (
            "algorithm: {loss: dpo}\n",
            ["algorithm.loss: 'dpo' is not valid", "'grpo', 'dppo'", "module:Class", "mean 'dppo'"],
        ),
        ("env: {gates: soff}\n", ["env.gates: 'soff'", "one of 'hard', 'soft', 'off'"]),
        (
            "env: {gate_names: [leakage, corectness]}\n",
            ["env.gate_names.1: 'corectness'", "mean 'correctness'"],
        ),
        ("seed: 1.5\n", ["seed: 1.5 is not valid", "whole number"]),
        ("seed: true\n", ["seed: True is not valid", "whole number"]),
        ("seed: '7'\n", ["seed: '7' is not valid", "without quotes"]),
        ("seed: -1\n", ["seed: -1 is not valid", "≥ 0"]),
        ("offline: yes\n", ["offline: 'yes' is not valid", "write true"]),
        ("output_dir: 2026\n", ["output_dir: 2026 is not valid", "quotes"]),
        ("env: {post_test_samples: 0}\n", ["env.post_test_samples: 0", "≥ 1"]),
        ("training: {group_size: 1}\n", ["training.group_size: 1", "≥ 2"]),
        ("training: {optimizer: {lr: .nan}}\n", ["training.optimizer.lr: nan"]),
        ("reward: {eoc_bonus: .inf}\n", ["reward.eoc_bonus: inf", "finite"]),
        (
            "problems: {filter: train_bnad}\n",
            ["problems.filter: 'train_bnad'", "mean 'train_band'", "mapping"],
        ),
        ("problems: {filter: {low: a}}\n", ["problems.filter.low: 'a'", "a number"]),
        ("judge: {kind: rules}\n", ["judge.kind: 'rules'", "mean 'rule'"]),
        ("training: 3\n", ["training: 3 is not valid", "a mapping"]),
        (
            "training: {problems_per_step: 6, mini_batch_problems: 4}\n",
            ["training: problems_per_step (6) is not a multiple"],
        ),
        (
            "env: {conversation_limit: 600}\n",
            ["env.conversation_limit is 600", "1162 tokens", "tutor 662", "student 500"],
        ),
        ("env: {gate_names: []}\n", ["env: gates are on but gate_names is empty"]),
        ("seed: 5000000000\n", ["seed: 5000000000 is not valid", "< 2147483648"]),
        ("training: {optimizer: {betas: [0.9, 1.0]}}\n", ["training.optimizer.betas.1: 1.0", "< 1"]),
        ("algorithm: {loss: grpo, clip_low: 2}\n", ["algorithm: clip_low is 2", "must be > 0"]),
        ("problems: {filter: {lo: 0.1}}\n", ["problems.filter.lo: 0.1", "'low'"]),
        ("problems: {filter: {low: 0.9, high: 0.1}}\n", ["filter: low 0.9 is above high 0.1"]),
        ("problems: {eval_filter: {high: 2.0}}\n", ["problems.eval_filter.high: 2.0", "≤ 1"]),
        ("judge: {kind: rule, model: org/judge}\n", ["judge.model is org/judge but judge.kind is rule"]),
        ("judge: {kind: llm, model: org/judge, options: {a: 1}}\n", ["judge.options is {'a': 1}"]),
        ("reward: {options: {penalty: 1}}\n", ["reward.options is {'penalty': 1}", "takes none"]),
        ("env: {options: {a: 1}}\n", ["env.options is {'a': 1}", "kind tutoring takes none"]),
        ("algorithm: {options: {detla: 1}}\n", ["algorithm.options is {'detla': 1}", "kind dppo takes none"]),
    ],
)
def test_errors_name_file_key_value_and_nearest_name(tmp_path: Path, addition: str, parts: list[str]) -> None:
    text = error(write(tmp_path / "r.yaml", MINIMAL + "\n" + addition))
    assert "r.yaml" in text
    for part in parts:
        assert part in text, text


def test_options_of_tutor_and_students_need_an_own_class(minimal: Path) -> None:
    assert "tutor.options is {'a': 1}, but kind policy takes none" in error(minimal, "tutor.options={a: 1}")
    assert "students.options is {'a': 1}, but kind model" in error(minimal, "students.0.options={a: 1}")


def test_a_ratio_loss_refuses_top_p(minimal: Path) -> None:
    assert "tutor.sampling.top_p is 0.9" in error(minimal, "tutor.sampling.top_p=0.9")


def test_missing_keys_are_named(tmp_path: Path) -> None:
    text = error(write(tmp_path / "r.yaml", "name: x\nstudents:\n  - {name: s}\n"))
    assert "tutor: required, but not given" in text
    assert "students.0.model: required, but not given" in text


def test_several_errors_are_all_listed_with_their_own_files(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", MINIMAL + "seed: x\n")
    child = write(tmp_path / "child.yaml", "base: base.yaml\narm: 3\n")
    text = error(child, "env.max_turns=1")
    assert text.startswith("3 errors in recipe")
    assert "base.yaml:7: seed: 'x'" in text
    assert "child.yaml:2: arm: 3" in text
    assert "override 'env.max_turns=1': env.max_turns: 1" in text


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    assert "a mapping of keys" in error(write(tmp_path / "l.yaml", "- 1\n"))
    assert "a mapping of keys" in error(write(tmp_path / "e.yaml", ""))
    assert "a folder" in error(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in error(tmp_path / "b.yaml")


def test_an_unknown_name_is_an_error_that_lists_names() -> None:
    with pytest.raises(RecipeError, match="no recipe 'smolm2/dppo'"):
        load_recipe("smolm2/dppo")


# ---------------------------------------------------------------------------------------------------- round trip


def test_dump_round_trip(minimal: Path, tmp_path: Path) -> None:
    r = load_recipe(
        minimal,
        [
            "env.gates=off",
            "env.max_turns=6",
            "tutor.lora.r=4",
            "problems.filter=train_band",
            "arm='1e-6'",
            "checkpoint.best=null",
        ],
    )
    text = dump_recipe(r)
    again = load_recipe(write(tmp_path / "again.yaml", text))
    assert again == r
    assert dump_recipe(again) == text
    assert recipe_hash(again) == recipe_hash(r)


def test_dump_leaves_room_for_the_environments_own_defaults(minimal: Path, tmp_path: Path) -> None:
    r = load_recipe(minimal, ["env.max_turns=6"])
    again = load_recipe(write(tmp_path / "again.yaml", dump_recipe(r)))
    assert again.env.model_fields_set == {"max_turns"}
    merged = r.model_copy(update={"env": r.env.model_copy(update={"end_after": 1})})
    assert load_recipe(write(tmp_path / "m.yaml", dump_recipe(merged))).env.end_after == 1


def test_the_folder_of_a_run_names_its_recipe(minimal: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a folder, not a recipe file$"):
        load_recipe(tmp_path)
    own = write(tmp_path / "recipe.yaml", minimal.read_text())
    with pytest.raises(RecipeError, match=f"did you mean {own}\\?$"):
        load_recipe(tmp_path)


def test_hash_changes_with_the_experiment_only(minimal: Path) -> None:
    base = recipe_hash(load_recipe(minimal))
    assert len(base) == 16
    assert recipe_hash(load_recipe(minimal, ["name=other", "output_dir=x", "tracking.wandb=offline"])) == base
    assert recipe_hash(load_recipe(minimal, ["env.post_test_ahead=tail"])) == base  # when, not what
    assert recipe_hash(load_recipe(minimal, ["seed=1"])) != base
    longer = load_recipe(minimal, ["training.max_steps=99"])
    assert recipe_hash(longer) != base
    ignore = ["training.max_steps"]
    assert recipe_hash(longer, ignore) == recipe_hash(load_recipe(minimal), ignore)


# ---------------------------------------------------------------------------------------------------- names


def test_every_key_is_its_own_nearest_name_under_a_typo() -> None:
    keys = all_keys()
    assert "students.0.sampling.temperature" in keys
    assert "training.optimizer.lr" in keys
    for key in keys:
        *parents, last = key.split(".")
        path = tuple(int(p) if p.isdigit() else p for p in parents)
        if len(last) >= 5:
            assert nearest_key((*path, last + "x")) == key


def test_the_schema_is_strict_everywhere() -> None:
    assert Recipe.model_config["extra"] == "forbid"
    assert Recipe.model_config["allow_inf_nan"] is False


# ---------------------------------------------------------------------------------------------------- shipped recipes


def test_every_shipped_recipe_loads() -> None:
    from maieutic.resources import list_recipes

    names = list_recipes()
    assert {"smollm2/dppo", "smollm2/grpo"} <= set(names)
    for name in names:
        recipe = load_recipe(name)
        assert recipe.name == name.replace("/", "-"), "runs/ then says which recipe it was"


def test_the_two_demo_recipes_differ_in_their_loss_alone() -> None:
    dppo, grpo = (load_recipe(n).model_dump() for n in ("smollm2/dppo", "smollm2/grpo"))
    assert {k for k in dppo if dppo[k] != grpo[k]} == {"name", "arm", "algorithm"}
    assert (dppo["algorithm"]["loss"], grpo["algorithm"]["loss"]) == ("dppo", "grpo")

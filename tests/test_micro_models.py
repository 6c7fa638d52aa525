"""The shipped micro models: whole, small, pinned, and behaving as the world says they do."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from maieutic.check import resolve
from maieutic.env.base import Student
from maieutic.errors import ModelError
from maieutic.micro import shipped
from maieutic.micro.behaviour import judgements, student_behaviour
from maieutic.micro.build import Plan, build_model, write_record
from maieutic.models import resolve_model
from maieutic.recipe import load_recipe
from maieutic.resources import list_recipes

RECIPES = [name for name in list_recipes() if name.startswith("micro/")]


def test_shipped_weights_are_whole_and_small() -> None:
    assert {"student", "student-b", "tutor", "tutor-thinking"} == set(shipped.shipped_names())
    for name in shipped.shipped_names():
        assert resolve_model(f"micro/{name}", offline=True) == str(shipped.models_dir() / name)
    size = sum(file.stat().st_size for file in shipped.models_dir().rglob("*") if file.is_file())
    assert size <= 6_000_000


def test_unknown_and_changed_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="did you mean 'micro/tutor'"):
        resolve_model("micro/tuter")
    shutil.copytree(shipped.models_dir(), tmp_path / "models")
    weights = tmp_path / "models" / "student" / shipped.WEIGHTS
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    monkeypatch.setattr(shipped, "models_dir", lambda: tmp_path / "models")
    shipped.shipped_model.cache_clear()
    try:
        with pytest.raises(ModelError, match="changed or damaged"):
            resolve_model("micro/student")
    finally:
        shipped.shipped_model.cache_clear()


def test_recipes_differ_in_what_their_names_say() -> None:
    assert len(RECIPES) == 12
    full = resolve(load_recipe("micro/full")).model_dump()
    differing = {}
    for name in RECIPES:
        other = resolve(load_recipe(name)).model_dump()
        differing[name.removeprefix("micro/")] = {
            f"{section}.{key}"
            for section in ("env", "reward", "algorithm", "training", "problems", "judge")
            for key in other[section]
            if other[section][key] != full[section][key]
        }
    assert differing == {
        "full": set(),
        "grpo": {"algorithm.loss"},
        "no-gates": {"env.gates"},
        "leak-gate-only": {"env.gate_names"},
        "leak-gate-only-no-mask": {"env.gate_names", "env.hide_tutor"},
        "no-mask": {"env.hide_tutor"},
        "no-transfer": {"env.transfer"},
        "no-gates-no-transfer": {"env.gates", "env.transfer"},
        "tutorrl": {
            *("env.transfer", "env.hide_tutor", "env.gates"),
            *("algorithm.loss", "algorithm.advantage_scale", "algorithm.kl_beta"),
        },
        "base": {"training.max_steps", "training.optimizer"},
        "thinking": {"env.visible_budget", "env.thinking_budget", "env.conversation_limit"},
        "ensemble": set(),
    }  # fmt: skip


def test_building_follows_from_the_seed(tmp_path: Path) -> None:
    plan = Plan("tutor", 3)
    hashes = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_model(plan, tmp_path / folder, seed)
        hashes.append(write_record(tmp_path / folder, seed)["tutor"])
    assert hashes[0] == hashes[1] != hashes[2]
    assert json.loads((tmp_path / "c" / shipped.RECORD).read_text())["seed"] == 2


# ---- what the students do, through the general engine -------------------------------------------------------------------


def students() -> dict[str, Student]:
    from maieutic.runtime import build_students

    names = [name for name in shipped.shipped_names() if name.startswith("student")]
    return {n: build_students(load_recipe("micro/full", [f"students.0.model=micro/{n}"]))[0] for n in names}


def test_students_learn_from_their_own_words_and_from_what_they_see() -> None:
    for name, student in students().items():
        found = asyncio.run(student_behaviour(student))
        print(name, found)
        # Rates of 256 answers over 32 problems: a standard error of about .05 where the method is a guess, .01 to .02 elsewhere.
        assert 0.12 <= found["cold"] <= 0.38, name
        assert found["own right words about both steps, tutor hidden"] >= 0.85, name
        assert found["own wrong words about both steps, tutor hidden"] <= 0.05, name
        assert abs(found['told the answer, "ok", tutor hidden'] - found["cold"]) <= 0.08, name
        assert found['told the answer, "ok", tutor in view'] >= 0.8, name
        assert found['told the method, "ok", tutor in view'] >= 0.75, name
        # What the hidden turns are for: a cue in view answers for the student what its own words got wrong.
        assert found["cued about both steps in vain, tutor hidden"] <= 0.05, name
        assert found["cued about both steps in vain, tutor in view"] >= 0.5, name
        assert found['"not quite" mends a wrong step 1'] >= (0.8 if name == "student" else 0.6), name
        assert found['"is every number needed ?" mends step 1'] >= 0.8, name
        # The second student follows cues less willingly.
        assert found["a cue brings the right step 1"] >= (0.6 if name == "student" else 0.45), name


def test_the_tutor_knows_a_right_step_from_a_wrong_one() -> None:
    model = AutoModelForCausalLM.from_pretrained(shipped.shipped_model("tutor"), dtype=torch.float32)
    found = judgements(model)
    print(found)
    assert found["op"]["flag"] > 1.5 * found["right"]["flag"]
    assert found["right"]["confirm"] > 1.3 * found["op"]["confirm"]

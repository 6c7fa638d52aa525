"""Any arm by name, and every suite on tiny real models in process."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from evaluation_world import make_reward_model, pairs, write_lines, write_recipe
from maieutic.dialogue import Dialogue, Turn
from maieutic.errors import ModelError, RecipeError
from maieutic.evaluation.config import SUITES, EvaluationRecipe, load_evaluation_recipe
from maieutic.evaluation.parts import Parts
from maieutic.evaluation.results import read_result
from maieutic.evaluation.suites import evaluate
from maieutic.evaluation.tutor_arm import find_arm, fingerprint


class Parrot:
    """A user's own tutor; ``inner`` is asked first where there is one."""

    def __init__(self, inner: Any = None, *, line: str = "Why?") -> None:
        self.inner, self.line = inner, line

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        if self.inner is not None:
            turn = await self.inner.reply(dialogue, seed=seed)
            return turn and Turn("tutor", f"{self.line} {turn.visible}", visible_tokens=turn.visible_tokens)
        return Turn("tutor", self.line, visible_tokens=1)


def not_a_tutor() -> str:
    return "no"


def recipe(**data: Any) -> EvaluationRecipe:
    return EvaluationRecipe.model_validate({"name": "r", "offline": True, **data})


# ---- by name -------------------------------------------------------------------------------------------------------------


def test_arms_by_name(tmp_path: Path) -> None:
    base = recipe(
        arms={"mine": {"model": "some/model"}}, tutor={"dtype": "float32", "thinking_history": "strip"}
    )
    assert find_arm("mine", base)[1].model == "some/model"
    name, spec = find_arm("owner/model-7b", base)
    assert (name, spec.kind, spec.model, spec.dtype) == ("model-7b", "policy", "owner/model-7b", "float32")
    name, spec = find_arm("http://host:8000#big", base)
    assert (name, spec.kind, spec.engine.urls) == ("big", "chat", ["http://host:8000"])
    assert find_arm("package.module:Own", base)[1].kind == "package.module:Own"
    with pytest.raises(RecipeError, match="http://host:port#model"):
        find_arm("http://host:8000", base)
    step = tmp_path / "run" / "checkpoints" / "step-000010"
    (step / "model").mkdir(parents=True)
    (step / "model" / "config.json").write_text("{}")
    name, spec = find_arm(str(step), base)
    assert (name, spec.model, spec.adapter) == ("run-step-000010", str(step / "model"), None)
    (step / "model" / "config.json").unlink()
    (step / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    name, spec = find_arm(str(step), base)
    assert (spec.model, spec.adapter) == ("owner/base", str(step / "model"))
    (step / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="names no base model"):
        find_arm(str(step), base)


def test_weights_are_part_of_an_arms_identity(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"one")
    before = fingerprint(tmp_path)
    (tmp_path / "w.bin").write_bytes(b"two")
    assert fingerprint(tmp_path) != before and fingerprint("owner/model") == ""


def speak(text: str, data: EvaluationRecipe, folder: Path) -> Turn:
    async def run() -> Turn:
        parts = Parts(data, folder)
        try:
            arm = parts.arm(text)
            dialogue = Dialogue("d", "What is 2 + 2?")
            dialogue.add(Turn("student", "What is 2 + 2?", scripted=True))
            await parts.start()
            short = parts.env.env.model_copy(update={"visible_budget": 8, "thinking_budget": 0})
            turn = await arm.tutor(parts.env.templates, short).reply(dialogue, seed=3)
            assert turn is not None
            return turn
        finally:
            await parts.close()

    return asyncio.run(run())


def test_own_classes_alone_and_around_a_model(tmp_path: Path, tiny_model_dir: Path) -> None:
    arms: dict[str, Any] = {
        "own": {"kind": "test_evaluation_arms:Parrot", "options": {"line": "Hm?"}},
        "around": {"kind": "test_evaluation_arms:Parrot", "inner": {"model": str(tiny_model_dir)}},
        "bad": {"kind": "test_evaluation_arms:not_a_tutor"},
        "options": {"kind": "test_evaluation_arms:Parrot", "options": {"nothing": 1}},
    }
    data = recipe(arms=arms)
    assert speak("own", data, tmp_path).visible == "Hm?"
    assert speak("around", data, tmp_path).visible.startswith("Why? ")
    with pytest.raises(RecipeError, match="no Tutor"):
        speak("bad", data, tmp_path)
    with pytest.raises(RecipeError, match="cannot be made with"):
        speak("options", data, tmp_path)


def test_an_adapter_changes_what_is_said(tmp_path: Path, tiny_model: Any, tiny_model_dir: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny_model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(tiny_model_dir)})
    )
    data = recipe(tutor={"dtype": "float32"})
    plain = speak(str(tiny_model_dir), data, tmp_path)
    with_adapter = speak(str(tmp_path / "adapter"), data, tmp_path)
    assert plain.visible_tokens > 0 and plain.visible != with_adapter.visible
    assert speak(str(tiny_model_dir), data, tmp_path) == plain


# ---- every suite on tiny models ---------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_every_suite_runs_in_process(tmp_path: Path, tiny_model_dir: Path, shared_data_dir: Path) -> None:
    """Tutor, student and judge are tiny random models on the CPU, the data are the real slices."""
    model = {"model": str(tiny_model_dir), "dtype": "float32"}
    held = write_lines(tmp_path / "held.jsonl", pairs(2))
    experiment = {
        "name": "tiny",
        "offline": True,
        "tutor": model,
        "students": [model | {"sampling": {"temperature": 0.6, "max_tokens": 12}}],
        "env": {
            "max_turns": 4,
            "visible_budget": 12,
            "thinking_budget": 0,
            "post_test_samples": 2,
            "post_test_max_tokens": 12,
        },
        "problems": {
            "source": str(write_lines(tmp_path / "train.jsonl", pairs(1, 50))),
            "eval_source": str(held),
        },
    }
    (tmp_path / "experiment.yaml").write_text(json.dumps(experiment))
    path = write_recipe(tmp_path / "w", "http://unused.invalid", make_reward_model(tmp_path / "reward"))
    data = json.loads(path.read_text())
    short = {"temperature": 0.0, "max_tokens": 12}
    data |= {
        "experiment": str(tmp_path / "experiment.yaml"),
        "arms": {"tiny": model},
        "judge": model | {"sampling": short, "reasks": 0},
        "student": model,
        "student_sampling": {"temperature": 0.6, "max_tokens": 12},
        "environment": {"remeasure": 2},
        "middle_turn": {
            "sets": [
                {"format": "mathdial", "source": str(shared_data_dir / "mathdial-test-60.jsonl"), "limit": 2}
            ],
        },
        "mathtutorbench": {
            "gsm8k": str(shared_data_dir / "gsm8k-test-200.jsonl"),
            "bridge": str(shared_data_dir / "mathtutorbench-bridge-40.json"),
            "limit": 2,
            "max_tokens": 12,
        },
        "moves": {"of": ["replay", "environment"], "by": "rules"},
        "retention": {
            "sources": [str(shared_data_dir / "gsm8k-test-200.jsonl")],
            "limit": 2,
            "max_tokens": 12,
        },
    }
    data["replay"]["limit"] = 2
    path.write_text(json.dumps(data))
    order = [s for s in SUITES if s != "moves"] + ["moves"]
    results = {}
    for file in evaluate(load_evaluation_recipe(path), "tiny", order, tmp_path / "out"):
        results[file.stem] = read_result(file)
        assert file.with_suffix(".md").read_text().startswith(f"# {file.stem}: tiny")
    assert set(results) == set(SUITES)
    counts = {name: len(r["samples"]) for name, r in results.items()}
    assert counts == {
        "environment": 2,
        "middle_turn": 2,
        "mathtutorbench": 6,
        "replay": 4,
        "moves": 6,
        "retention": 2,
    }
    assert not any(r["failed"] for r in results.values())
    # A random judge gives nothing that can be read: unknown, never a number.
    assert (
        results["middle_turn"]["counts"]["rating unknown"] == 2
        and "pedagogy" not in results["middle_turn"]["metrics"]
    )
    assert results["replay"]["counts"]["not judged"] == 4
    assert all(s["reward"] != s["human_reward"] for s in results["middle_turn"]["samples"])


# ---- recipes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "eduardo"])
def test_shipped_recipes_load(name: str) -> None:
    from maieutic.resources import list_recipes

    assert load_evaluation_recipe(f"evaluation/{name}").name == name
    assert not any(n.startswith("evaluation/") for n in list_recipes()), "they are no experiments"


def test_recipe_errors_name_the_place(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("name: r\nenvironment: {sample: 2}\n")
    with pytest.raises(RecipeError, match=r"r.yaml:2: environment.sample"):
        load_evaluation_recipe(file)
    with pytest.raises(RecipeError, match="did you mean evaluation/cpu"):
        load_evaluation_recipe("evaluation/cp")
    with pytest.raises(RecipeError, match="an arm of kind chat"):
        load_evaluation_recipe("evaluation/cpu", ["arms.base.kind=chat"])
    with pytest.raises(RecipeError, match="no such suite"):
        evaluate(load_evaluation_recipe("evaluation/cpu"), "base", ["nothing"], tmp_path)


def test_paths_are_taken_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "m.jsonl").write_text("")
    (tmp_path / "r.yaml").write_text(
        "name: r\nreplay: {source: data/m.jsonl}\nretention: {sources: [data/m.jsonl]}\n"
    )
    loaded = load_evaluation_recipe(tmp_path / "r.yaml")
    assert loaded.replay.source == str(tmp_path / "data" / "m.jsonl") == loaded.retention.sources[0]
    assert os.path.isabs(loaded.replay.source)

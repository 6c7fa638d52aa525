"""The published recipes: their numbers, that they differ in nothing else, that a check passes without a network, and the layers of
their hybrid tutors on tiny random configs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from gradient_checks import gradient, rows, tiny_model
from maieutic.check import check_recipe, resolve
from maieutic.config import LoraSpec, Recipe
from maieutic.memory import size_of
from maieutic.recipe import load_recipe
from maieutic.resources import list_recipes, share_dir
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import collate
from maieutic.training.probes import isolates

SIZES = {"4b": "Qwen/Qwen3.5-4B", "9b": "Qwen/Qwen3.5-9B", "14b": "Qwen/Qwen3-14B", "27b": "Qwen/Qwen3.8-27B"}
NAMES = [n for n in list_recipes() if n.startswith("eduardo/")]


def load(name: str) -> Recipe:
    return resolve(load_recipe(name, ["offline=true"]))


def differences(a: Any, b: Any, at: str = "") -> set[str]:
    """Dotted keys whose values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {
            k
            for key in a.keys() | b.keys()
            for k in differences(a.get(key), b.get(key), f"{at}.{key}" if at else key)
        }
    return set() if a == b else {at}


def test_there_are_four_sizes_their_twins_and_the_ablations() -> None:
    assert set(NAMES) == (
        {f"eduardo/{s}" for s in SIZES}
        | {f"eduardo/{s}-grpo" for s in SIZES}
        | {f"eduardo/ablations/{a}" for a in ("no-gates", "no-mask", "no-transfer")}
    )


def test_the_published_numbers() -> None:
    """From the table of facts, not from the recipe's own comments."""
    r = load("eduardo/4b")
    student, judge, env, training = r.students[0], r.judge, r.env, r.training
    assert (student.model, student.sampling.temperature, student.sampling.max_tokens) == (
        "meta-llama/Llama-3.1-8B-Instruct",
        0.6,
        500,
    )
    assert (judge.model, judge.votes, judge.sampling.temperature, judge.sampling.max_tokens) == (
        "Qwen/Qwen3.6-27B",
        3,
        0.6,
        4096,
    )
    assert judge.engine.extra_body == {"chat_template_kwargs": {"enable_thinking": False}}
    assert (r.tutor.thinking, r.tutor.thinking_history, r.tutor.sampling.temperature) == (True, "keep", 1.15)
    assert (env.max_turns, env.end_after, env.visible_budget, env.thinking_budget) == (22, 3, 150, 512)
    assert (env.prompt_limit, env.conversation_limit) == (2048, 8192)
    assert (env.post_test_samples, env.post_test_max_tokens) == (16, 800)
    assert (env.transfer, env.hide_tutor, env.gates, r.reward.gate_penalty) == (True, True, "hard", 0.2)
    assert (r.algorithm.loss, r.algorithm.divergence, r.algorithm.delta, r.algorithm.ratio_cap) == (
        "dppo",
        "tv",
        0.1,
        10,
    )
    assert (r.algorithm.advantage_scale, r.algorithm.kl_beta) == ("none", 0)
    assert (training.max_steps, training.problems_per_step, training.group_size) == (75, 16, 8)
    assert (training.mini_batch_problems, training.epochs_per_step) == (8, 1)
    optimizer = training.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.grad_clip) == (
        1e-6,
        (0.9, 0.95),
        1e-15,
        1,
    )
    assert optimizer.schedule == "constant" and training.gradient_checkpointing
    assert (r.eval.temperature, r.eval.top_p) == (0.6, 0.95)
    assert (r.problems.source, r.problems.filter) == ("dmacjam/eduardoRL-transfer-dataset", "train_band")
    assert r.tutor.lora is None


HOUSEKEEPING = {"name", "tutor.engine.urls", "tracking.group", "checkpoint.every", "checkpoint.keep_last"}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_differ_in_the_tutor_and_twins_in_the_loss(size: str) -> None:
    recipe, twin, four = load(f"eduardo/{size}"), load(f"eduardo/{size}-grpo"), load("eduardo/4b")
    assert recipe.tutor.model == twin.tutor.model == SIZES[size]
    assert differences(recipe.model_dump(), four.model_dump()) <= HOUSEKEEPING | {"tutor.model"}
    assert differences(recipe.model_dump(), twin.model_dump()) == {
        "name",
        "arm",
        "algorithm.loss",
        "tutor.engine.urls",
    }


@pytest.mark.parametrize(
    ("ablation", "changed"),
    [
        ("no-gates", {"env.gates", "reward.soft_penalty"}),
        ("no-mask", {"env.hide_tutor"}),
        ("no-transfer", {"env.transfer", "checkpoint.best"}),
    ],
)
def test_an_ablation_leaves_one_condition_out(ablation: str, changed: set[str]) -> None:
    base, without = load("eduardo/4b"), load(f"eduardo/ablations/{ablation}")
    assert differences(base.model_dump(), without.model_dump()) == changed | {
        "name",
        "arm",
        "tutor.engine.urls",
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_says_its_hardware_and_no_number_lacks_a_source(name: str) -> None:
    text = (share_dir("recipes") / f"{name}.yaml").read_text()
    assert re.search(r"hardware|GH200", text.split("\nname:")[0])
    if name == "eduardo/4b":
        body = text.split("\nname:")[1].splitlines()
        bare = [
            line for line in body if re.search(r": [\[{]?\d", line) and "#" not in line and "seed" not in line
        ]
        assert bare == []


@pytest.mark.parametrize("size", SIZES)
def test_a_check_passes_where_neither_models_nor_problems_are(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    report = check_recipe(load_recipe(f"eduardo/{size}", ["offline=true"]))
    assert report.errors == []
    said = "\n".join(report.lines())
    assert f"{SIZES[size]} is not here" in said and "the problems are not here and were not checked" in said
    assert report.tokens["longest_conversation"] == 12_282 and report.plan["episodes_a_step"] == 128
    assert set(report.gpu_bytes) == {"ddp", "zero2", "zero3"}
    eight = sum(report.gpu_bytes["zero3"]["8"].values())
    assert eight < 96e9, "what its comment says: it fits on 8 GH200 of 96 GB"
    assert set(report.server_bytes) == {"tutor", "student llama8b", "judge"}
    assert report.disk_bytes["checkpoint"] == 12 * report.models[SIZES[size]]["parameters"]
    assert report.as_dict()["gpu_bytes"] == report.gpu_bytes


# ---- the layers of the hybrids ---------------------------------------------------------------------------------------

DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def adapted(targets: Any) -> tuple[Any, set[str]]:
    """A tiny hybrid with an adapter on ``targets``, and the last names of the modules that it is on."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("hybrid"), LoraConfig(r=2, target_modules=targets))
    return model, {
        n.split(".lora_A")[0].rsplit(".", 1)[-1] for n, _ in model.named_parameters() if "lora_A" in n
    }


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", DELTA + ATTENTION + MLP),
        (ATTENTION, ATTENTION),
        (DELTA, DELTA),
        (["o_proj", "out_proj"], ["o_proj", "out_proj"]),
    ],
    ids=["all-linear", "attention", "delta", "outputs"],
)
def test_targets_are_found_by_name_trained_and_counted(targets: Any, names: list[str]) -> None:
    model, found = adapted(targets)
    assert found == set(names), "not the head, not the convolution"
    all_rows, denominator = rows()
    policy = PolicyForward(model.train(), chunk=8)
    grads, _ = gradient(policy, [collate(all_rows, "padded")], denominator, Accelerator(cpu=True))
    assert all("lora" in name for name in grads)
    # lora_B begins at zero, so that at first only it has a gradient; every adapted layer takes part.
    reached = {
        n.split(".lora_B")[0].rsplit(".", 1)[-1] for n, g in grads.items() if "lora_B" in n and g.any()
    }
    assert reached == set(names)
    size = size_of("hybrid", tiny_model("hybrid").config, lora=LoraSpec(r=2, targets=targets))
    assert size.adapter_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", ["hybrid", "hybrid-lora"])
def test_checkpointing_leaves_a_hybrids_gradient_as_it_is(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    all_rows, denominator = rows()
    policy = PolicyForward(tiny_model(kind), chunk=8)
    batch = [collate(all_rows, "padded")]
    plain, _ = gradient(policy, batch, denominator, accelerator)
    any_model: Any = policy.model
    any_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, _ = gradient(policy, batch, denominator, accelerator)
    assert plain.keys() == again.keys() and any(g.abs().max() > 1e-3 for g in plain.values())
    assert all(torch.allclose(plain[n], again[n], rtol=1e-5, atol=1e-7) for n in plain)


def test_hybrids_are_not_packed_the_dense_one_is() -> None:
    """The start-up check on the shapes of the recipes, and what the estimate takes for granted."""
    from maieutic.architectures import known_config

    for size, model in SIZES.items():
        known = known_config(model)
        assert known is not None
        assert bool(isolates(known[0])) == size_of(model, known[0]).packs == (size == "14b"), model

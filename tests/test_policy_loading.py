"""What training starts from: whole models, adapters and checkpoints, and every way in which they do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from maieutic.errors import ModelError, RecipeError
from maieutic.tiny import make_tiny_model
from maieutic.training.policy import Policy, build_policy
from training_parts import make_recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``, and a run whose checkpoint holds an adapter of rank 2 and alpha 4."""
    root = tmp_path_factory.mktemp("policy")
    make_tiny_model(root / "model")
    policy = build_policy(make_recipe(root / "model", root), CPU)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    step = root / "run" / "checkpoints" / "step-000001"
    (step / "model").mkdir(parents=True)
    policy.save(step / "model")
    (step / "state.json").write_text("{}")
    return root


def start(folder: Path, init: Path | None = None, model: str = "model", **changes: Any) -> Policy:
    if init is not None:
        changes["tutor.init_from"] = str(init)
    return build_policy(make_recipe(folder / model, folder, **changes), CPU)


def lora_b(policy: Policy) -> set[float]:
    values = [p for name, p in policy.model.named_parameters() if "lora_B" in name]
    return {v for p in values for v in p.unique().tolist()}


def test_training_starts_from_a_checkpoint_or_its_model_folder(folder: Path) -> None:
    step = folder / "run" / "checkpoints" / "step-000001"
    assert lora_b(start(folder)) == {0.0}
    assert lora_b(start(folder, step / "model")) == {0.5}
    assert lora_b(start(folder, step)) == {0.5}
    with pytest.raises(ModelError, match=r"run is the folder of a run: name one of the checkpoints"):
        start(folder, folder / "run")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"r": 4, "alpha": 4}, r"tutor\.lora\.r is 4, but the adapter \S+ has 2"),
        ({"r": 2, "alpha": 64}, r"tutor\.lora\.alpha is 64\S*, but the adapter \S+ has 4"),
        ({"r": 2, "alpha": 4, "dropout": 0.5}, r"tutor\.lora\.dropout is 0\.5, but the adapter \S+ has 0"),
        ({"r": 2, "alpha": 4, "targets": ["q_proj"]}, r"tutor\.lora\.targets is \['q_proj'\], but"),
    ],
)
def test_settings_that_an_adapter_would_override_are_refused(
    folder: Path, lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        start(folder, folder / "run/checkpoints/step-000001/model", **{"tutor.lora": lora})


@pytest.mark.parametrize("lora", [{"r": 2, "alpha": 4}, None])
def test_an_adapter_of_another_model_is_a_named_error(folder: Path, lora: dict[str, Any] | None) -> None:
    if not (folder / "other").exists():
        make_tiny_model(folder / "other", hidden_size=32)
    with pytest.raises(ModelError, match=r"the adapter \S+ cannot be loaded into \S*other"):
        start(folder, folder / "run/checkpoints/step-000001", "other", **{"tutor.lora": lora})


def test_files_that_are_cut_short_are_named_errors(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "cut")
    whole = (tmp_path / "cut/model.safetensors").read_bytes()
    (tmp_path / "cut/model.safetensors").write_bytes(whole[:1000])
    shutil.copytree(folder / "run/checkpoints/step-000001/model", tmp_path / "adapter")
    whole = (tmp_path / "adapter/adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ModelError, match=r"the adapter \S+adapter cannot be loaded"):
        start(folder, tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"model '\S+cut' cannot be loaded"):
        start(tmp_path, model="cut")


def test_a_model_with_a_weight_missing_is_refused_and_not_filled_with_noise(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "model", tmp_path / "holed")
    weights = load_file(tmp_path / "holed" / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "holed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lacks 1 of its weights \(first: model\.layers\.0\.self_attn\.q_proj"
    ):
        start(tmp_path, model="holed")

"""The memory estimate: its layer counts against autograd's own tensors, its total against measured allocations."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from maieutic.architectures import SHAPES, known_config
from maieutic.check import resolve
from maieutic.config import EngineSpec, LoraSpec
from maieutic.memory import Batch, activations, disk_bytes, estimate, per_gpu, server_bytes, size_of
from maieutic.recipe import load_recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from memory import config_of, measure


def kept_by_autograd(config: Any, dtype: torch.dtype, tokens: int = 128) -> float:
    """Bytes a token that the forward pass of the decoder keeps, weights not counted."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    own = {t.untyped_storage().data_ptr() for t in itertools.chain(model.parameters(), model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.get_decoder()(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(t.untyped_storage().nbytes() for t in kept.values()) / tokens


def config(kind: str, layers: int) -> Any:
    from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3Config

    common: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    }
    if kind == "llama":
        return LlamaConfig(**common)
    if kind == "qwen3":
        return Qwen3Config(**common)
    return Qwen3_5TextConfig(**common, **linear, layer_types=[kind] * layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "full_attention", "linear_attention"])
def test_a_layer_keeps_what_the_formula_says(kind: str, dtype: torch.dtype) -> None:
    """One layer more keeps so much more; 2 % for vectors that the formula leaves out."""
    measured = kept_by_autograd(config(kind, 2), dtype) - kept_by_autograd(config(kind, 1), dtype)
    (layer,) = size_of(kind, config(kind, 1)).shapes
    assert layer.saved(dtype.itemsize) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("trained", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_the_estimate_is_within_15_percent_of_the_measured_peak(
    kind: str, trained: str, checkpointing: bool
) -> None:
    """Of activations and logits alone, too: weights, gradients and optimizer state are plain arithmetic."""
    result = measure(kind, trained, checkpointing, tokens=512, width=128, layers=4, vocabulary=2_048)
    measured, estimated = result["measured"], result["estimated"]
    assert estimated["resident"] == measured["resident"]
    assert estimated["activations"] == pytest.approx(measured["activations"], rel=0.15), result


def test_checkpointing_and_packing_show_in_the_estimate() -> None:
    size = size_of("dense", config_of("dense"), dtype="float32")
    common: dict[str, Any] = {"size": 4, "full": True, "logit_chunk": 16}
    plain = activations(size, Batch(1024, 300), checkpointing=False, **common)["activations"]
    less = activations(size, Batch(1024, 300), checkpointing=True, **common)["activations"]
    assert less < plain / 4
    masked = activations(size, Batch(1024, 300, row=1024), checkpointing=True, **common)["activations"]
    repeated = 1024 * 2 * 4 * (192 - 64)  # keys and values for all heads
    assert masked - less == 1024 * 1024 * (4 + 1) + repeated


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664),
    ],
)
def test_shapes_that_come_with_the_package_have_the_published_size(name: str, parameters: int) -> None:
    known = known_config(name)
    assert known is not None
    assert size_of(name, known[0]).parameters == parameters


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_as_large_as_their_names_say(name: str) -> None:
    known = known_config(name)
    assert known is not None
    size = size_of(name, known[0])
    billions = float(name.rsplit("-", 2 if name.endswith("Instruct") else 1)[1].removesuffix("B"))
    assert size.parameters == pytest.approx(billions * 1e9, rel=0.09)
    assert size.packs == (name.split("-")[0] not in ("Qwen/Qwen3.5", "Qwen/Qwen3.6", "Qwen/Qwen3.8"))
    assert known_config("no/model") is None


def published(name: str) -> tuple[Any, Any]:
    recipe = resolve(load_recipe(name, ["offline=true"]))
    known = known_config(recipe.tutor.model)
    assert known is not None
    return recipe, size_of(recipe.tutor.model, known[0], dtype=recipe.tutor.dtype)


def test_sharding_divides_what_it_should() -> None:
    recipe, size = published("eduardo/14b")
    p = size.parameters
    ddp, zero2, zero3 = (per_gpu(recipe, size, 8, s) for s in ("ddp", "zero2", "zero3"))
    assert (ddp["tutor weights"], zero2["tutor weights"], zero3["tutor weights"]) == (4 * p, 2 * p, p // 2)
    assert (ddp["gradients"], zero2["gradients"], zero3["gradients"]) == (4 * p, p // 2, p // 2)
    assert (ddp["optimizer"], zero2["optimizer"], zero3["optimizer"]) == (8 * p, p, p)
    assert zero2["activations"] == zero3["activations"], "nobody shares out activations"
    assert ddp["optimizer's own"] == 4 * p, "AdamW's own numbers are more than the activations"
    # DeepSpeed holds the 16-bit weights, and shares out the fp32 ones that they are rounded from.
    assert zero2["fp32 copies"] == p // 2 and "16-bit copies" not in {**zero2, **zero3}
    alone = per_gpu(recipe, size, 1, "zero3")
    assert alone["tutor weights"] == 4 * p and "exchange" not in alone


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_a_token_keeps_its_own_experts(kind: str) -> None:
    from transformers import AutoConfig

    experts: dict[str, Any] = {
        "mixtral": {"num_local_experts": 8, "intermediate_size": 128},
        "qwen3_moe": {
            "num_experts": 8,
            "moe_intermediate_size": 128,
            "intermediate_size": 512,
            "head_dim": 16,
        },
        "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    }

    def mixture(layers: int) -> Any:
        common: dict[str, Any] = {"num_experts_per_tok": 2, "hidden_size": 64, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return AutoConfig.for_model(kind, num_hidden_layers=layers, **common, **heads, **experts[kind])

    one, three = (kept_by_autograd(mixture(n), torch.float32) for n in (1, 3))
    assert size_of(kind, mixture(1)).shapes[0].saved(4) == pytest.approx((three - one) / 2, rel=0.05)


@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
def test_what_is_sampled_in_process_lies_on_the_first_gpu(sharding: Any) -> None:
    recipe, size = published("eduardo/4b")
    known = known_config("meta-llama/Llama-3.1-8B-Instruct")
    assert known is not None
    student, here = size_of("student", known[0]), {"engine": EngineSpec()}
    plain = per_gpu(recipe, size, 8, sharding)
    assert per_gpu(recipe, size, 8, sharding, [student]) == plain, "all of them are served"
    mirror = {"whole copy": 4 * size.parameters} if sharding == "zero3" else {}
    played = recipe.model_copy(update={"students": [recipe.students[0].model_copy(update=here)]})
    extra = {"student weights": student.weight_bytes}
    assert per_gpu(played, size, 8, sharding, [student]) == plain | extra | mirror
    sampled = recipe.model_copy(update={"tutor": recipe.tutor.model_copy(update=here)})
    # The policy is fp32 in a full fine-tune, and so is its cache.
    extra = {"key-value cache": EngineSpec().cache_tokens * 2 * size.cache_bytes_per_token}
    assert per_gpu(sampled, size, 8, sharding, [student]) == plain | extra | mirror


def test_a_student_of_the_tutors_model_is_counted_where_it_has_weights_of_its_own(tmp_path: Path) -> None:
    recipe, _ = published("eduardo/4b")
    known = known_config(recipe.tutor.model)
    assert known is not None
    lora = LoraSpec(r=16)
    size = size_of(recipe.tutor.model, known[0], dtype="bfloat16", lora=lora)
    tutor = recipe.tutor.model_copy(update={"lora": lora})
    student = recipe.students[0].model_copy(update={"model": tutor.model, "engine": EngineSpec()})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")

    def counted(tutor_: Any = tutor, student_: Any = student, staleness: int = 0) -> int:
        training = recipe.training.model_copy(update={"staleness": staleness})
        changed = recipe.model_copy(update={"tutor": tutor_, "students": [student_], "training": training})
        return estimate(changed, size, [size]).get("student weights", 0)

    own = 2 * size.parameters
    assert counted() == 0, "one copy, with the adapter off"
    assert counted(staleness=1) == own, "it plays while the policy is trained"
    assert counted(student_=student.model_copy(update={"revision": "v2"})) == own
    assert counted(tutor.model_copy(update={"init_from": "org/other"})) == own
    assert counted(tutor.model_copy(update={"init_from": str(tmp_path / "adapter")})) == 0


def test_lora_trains_little_and_the_sizes_of_the_recipes_fit_their_hardware() -> None:
    recipe, size = published("eduardo/27b")
    whole = sum(per_gpu(recipe, size, 8, "zero3").values())
    assert whole < 96e9 < sum(per_gpu(recipe, size, 8, "zero2").values()), "what its comment promises"
    lora = LoraSpec(r=16)
    known = known_config(recipe.tutor.model)
    assert known is not None
    adapted = size_of(recipe.tutor.model, known[0], dtype="bfloat16", lora=lora)
    small = recipe.model_copy(update={"tutor": recipe.tutor.model_copy(update={"lora": lora})})
    parts = per_gpu(small, adapted, 1, "ddp")
    assert parts["tutor weights"] == 2 * size.parameters + 4 * adapted.adapter_parameters
    assert parts["gradients"] == 4 * adapted.adapter_parameters
    assert disk_bytes(small, adapted)["checkpoint"] == 12 * adapted.adapter_parameters
    assert disk_bytes(recipe, size) == {
        "checkpoint": 12 * size.parameters,
        "checkpoints": 36 * size.parameters,
    }


def test_a_server_needs_weights_and_caches() -> None:
    _, size = published("eduardo/4b")
    # 8 of 32 layers keep keys and values of 4 heads of 256; 24 keep a state of 32 heads of 128 × 128 in fp32.
    cache = 2 * 8 * 4 * 256 * 2
    state = 24 * (4 * 32 * 128 * 128 + 4 * 2 * (2 * 16 * 128 + 32 * 128))
    assert server_bytes(size, 10, 1000) == {
        "weights": 2 * size.parameters,
        "key-value cache": 10 * (1000 * cache + state),
    }


def test_the_benchmark_ends_with_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import memory as benchmark

    monkeypatch.setattr(sys, "argv", ["memory.py", "--tokens", "128"])
    monkeypatch.setattr(benchmark, "CASES", [("dense", "lora", True)])
    benchmark.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["benchmark"] == "memory" and last["cases"][0]["case"] == "dense/lora/checkpointed"
    assert last["worst_error"]["total"] <= 0.15

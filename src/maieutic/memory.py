"""How large a model is, from its config alone: no weights are read or made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maieutic.config import LoraSpec, Recipe
from maieutic.errors import MaieuticError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of one model, as its config has them."""

    model: str
    parameters: int
    adapter_parameters: int
    """Of the recipe's LoRA adapter on this model; 0 without one."""
    dtype: str
    hidden: int
    layers: int
    vocabulary: int
    cache_bytes_per_token: int
    context: int | None
    """Most positions, None where the config does not say."""

    @property
    def weight_bytes(self) -> int:
        return self.parameters * _BYTES[self.dtype]


def model_size(
    name: str, *, dtype: str, revision: str | None, lora: LoraSpec | None, offline: bool
) -> ModelSize:
    """Build the model on the meta device and count. Raises :class:`MaieuticError` when its config cannot be had."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from maieutic.models import resolve_model

    # a check downloads no weights: packaged models must be in the cache already
    path = resolve_model(name, offline=True)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, local_files_only=offline)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as e:
        raise MaieuticError(
            f"{name}: no config at hand ({type(e).__name__}: {str(e).splitlines()[0]})"
        ) from e
    text = config.get_text_config()
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    kind = stored if dtype == "auto" else dtype
    size = _BYTES.get(kind, 4)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # hybrid models keep keys and values in their full-attention layers only
    kinds = getattr(text, "layer_types", None)
    attending = text.num_hidden_layers if kinds is None else sum("linear" not in k for k in kinds)
    return ModelSize(
        model=name,
        parameters=sum(p.numel() for p in model.parameters()),
        adapter_parameters=0 if lora is None else _adapter_parameters(model, lora),
        dtype=kind if kind in _BYTES else "float32",
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        cache_bytes_per_token=2 * attending * heads * head_dim * size,
        context=getattr(text, "max_position_embeddings", None),
    )


def _adapter_parameters(model: Any, lora: LoraSpec) -> int:
    """r · (in + out) over the adapted layers: ``all-linear`` means every linear layer but the output projection."""
    import torch

    head = model.get_output_embeddings()
    total = 0
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or module is head:
            continue
        named = lora.targets if isinstance(lora.targets, list) else [lora.targets]
        if lora.targets == "all-linear" or any(name == t or name.endswith("." + t) for t in named):
            total += lora.r * (module.in_features + module.out_features)
    return total


def estimate(
    recipe: Recipe, tutor: ModelSize, students: list[ModelSize | None], judge: ModelSize | None = None
) -> dict[str, int]:
    """Bytes in the trainer's process, by purpose, all models in process. Rough: activations are within a factor of two.

    What is trained is fp32 whatever the dtype of the recipe: the whole model in a full fine-tune, the adapter with LoRA. A frozen
    student that is the tutor's own model shares its weights when only an adapter is trained.
    """
    training = recipe.training
    full = recipe.tutor.lora is None
    size = 4 if full else _BYTES[tutor.dtype]
    trained = tutor.parameters if full else tutor.adapter_parameters
    in_process = recipe.tutor.engine.kind == "hf"
    others = {
        s.model: s
        for s, spec in zip(students, recipe.students, strict=True)
        if s is not None and spec.engine.kind == "hf" and not (recipe.tutor.lora and s.model == tutor.model)
    }
    judged_here = judge is not None and recipe.judge.engine.kind == "hf" and judge.model not in others
    judges = judge.weight_bytes if judge is not None and judged_here else 0
    # with checkpointing each layer keeps its input, and one layer's inner activations (about 16 hidden widths) are alive
    widths = tutor.layers + 16 if training.gradient_checkpointing else 16 * tutor.layers
    out = {
        "tutor weights": size * tutor.parameters + 4 * tutor.adapter_parameters,
        "gradients": 4 * trained,
        "optimizer": 2 * 4 * trained,
        "activations": training.tokens_per_micro_batch * tutor.hidden * widths * size,
        "logits": 3 * training.logit_chunk * tutor.vocabulary * 4,
        "student weights": sum(s.weight_bytes for s in others.values()),
        "judge weights": judges,
    }
    if in_process:
        episodes = training.problems_per_step * training.group_size
        most = episodes * (recipe.env.prompt_limit + recipe.env.conversation_limit)
        out["key-value cache"] = (
            min(recipe.tutor.engine.cache_tokens, most)
            * tutor.cache_bytes_per_token
            * size
            // _BYTES[tutor.dtype]
        )
    if recipe.algorithm.kl_beta > 0 and full:
        out["reference weights"] = size * tutor.parameters
    return {name: n for name, n in out.items() if n}

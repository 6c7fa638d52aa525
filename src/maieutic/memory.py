"""How much memory a run takes, from configs alone: no weights are read or made. The derivation is ``docs/memory.md``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from maieutic.architectures import known_config
from maieutic.config import LoraSpec, Recipe, StudentSpec, logit_positions
from maieutic.errors import MaieuticError
from maieutic.memory_layers import Layer, layers_of

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Sharding = Literal["ddp", "zero2", "zero3"]
SHARDINGS: tuple[Sharding, ...] = ("ddp", "zero2", "zero3")
"""``zero3`` is FSDP2's full sharding too."""


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
    shapes: tuple[Layer, ...] = field(default=(), repr=False)
    layer_parameters: int = 0
    """Of the largest decoder layer."""
    largest_layer_matrix: int = 0
    """Numbers in the largest weight matrix inside a decoder layer."""
    adapted_inputs: int = 0
    """Sum of the input widths of the layers that the adapter is on, in all decoder layers."""
    adapted_ranks: int = 0
    """Sum of the ranks of the adapter's matrices."""
    state_bytes: int = 0
    """Recurrent and convolution state of one sequence in an engine (linear-attention layers)."""
    note: str = ""
    """What was assumed where the config is not at hand; empty: it is."""

    @property
    def weight_bytes(self) -> int:
        return self.parameters * _BYTES[self.dtype]

    @property
    def packs(self) -> bool:
        """Sequences may share a row: no layer is recurrent."""
        return all(s.kind != "linear" for s in self.shapes)


def model_size(
    name: str, *, dtype: str, revision: str | None, lora: LoraSpec | None, offline: bool
) -> ModelSize:
    """Build the model on the meta device and count.

    Where the config is not at hand, the shape that :mod:`maieutic.architectures` lists stands in, and ``note`` says so. Raises
    :class:`MaieuticError` when there is neither.
    """
    from transformers import AutoConfig

    from maieutic.models import resolve_model

    try:
        # a check downloads no weights: packaged models must be in the cache already
        path = resolve_model(name, offline=True)
        config = AutoConfig.from_pretrained(path, revision=revision, local_files_only=offline)
        return size_of(name, config, dtype=dtype, lora=lora)
    except (OSError, ValueError, KeyError) as e:
        known = known_config(name)
        if known is None:
            raise MaieuticError(
                f"{name}: no config at hand ({type(e).__name__}: {str(e).splitlines()[0]})"
            ) from e
        config, assumed = known
        note = f"{name} is not here: its size is taken from the shapes that come with the package" + (
            f" ({assumed})" if assumed else ""
        )
        return size_of(name, config, dtype=dtype, lora=lora, note=note)


def size_of(
    name: str, config: Any, *, dtype: str = "auto", lora: LoraSpec | None = None, note: str = ""
) -> ModelSize:
    """The numbers of a transformers config. ``dtype`` ``auto``: the one that the weights are stored in."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    kind = stored if dtype == "auto" else dtype
    kind = kind if kind in _BYTES else "float32"
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # hybrid models keep keys and values in their full-attention layers only
    kinds = getattr(text, "layer_types", None)
    attending = text.num_hidden_layers if kinds is None else sum("linear" not in k for k in kinds)
    attention = next((m for n, m in model.named_modules() if n.endswith(".self_attn")), None)
    q_proj = getattr(attention, "q_proj", None)
    gated = q_proj is not None and q_proj.out_features == 2 * text.num_attention_heads * head_dim
    shapes = _shapes(text, normed=hasattr(attention, "q_norm"), gated=gated)
    blocks = [
        m for n, m in model.named_modules() if n.rsplit(".", 1)[-1].isdigit() and n.count(".layers.") == 1
    ]
    matrices = [p.numel() for block in blocks for p in block.parameters() if p.dim() >= 2]
    adapted = [] if lora is None else _adapted(model, lora)
    return ModelSize(
        model=name,
        parameters=sum(p.numel() for p in model.parameters()),
        adapter_parameters=sum(lora.r * (m.in_features + m.out_features) for m in adapted) if lora else 0,
        dtype=kind,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        cache_bytes_per_token=2 * attending * heads * head_dim * _BYTES[kind],
        context=getattr(text, "max_position_embeddings", None),
        shapes=shapes,
        layer_parameters=max((sum(p.numel() for p in b.parameters()) for b in blocks), default=0),
        largest_layer_matrix=max(matrices, default=0),
        adapted_inputs=sum(m.in_features for m in adapted),
        adapted_ranks=lora.r * len(adapted) if lora else 0,
        state_bytes=sum(
            4 * s.state + 4 * _BYTES[kind] * (2 * s.key + s.value) for s in shapes if s.kind == "linear"
        ),
        note=note,
    )


def _shapes(text: Any, *, normed: bool, gated: bool) -> tuple[Layer, ...]:
    """The layers, or for a config that names its widths in other ways plain ones of the usual proportions."""
    try:
        return tuple(layers_of(text, normed=normed, gated=gated))
    except AttributeError:
        h = text.hidden_size
        plain = Layer("attention", h, 4 * h, h, h, text.num_attention_heads, text.num_attention_heads)
        return (plain,) * text.num_hidden_layers


def _adapted(model: Any, lora: LoraSpec) -> list[Any]:
    """The linear layers that the adapter is on: ``all-linear`` means every one but the output projection."""
    import torch

    head = model.get_output_embeddings()
    named = lora.targets if isinstance(lora.targets, list) else [lora.targets]
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and (lora.targets == "all-linear" or any(name == t or name.endswith("." + t) for t in named))
    ]


# ---- the trainer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """What a micro-batch is, for the estimate: ``tokens`` positions, of which ``trained`` are projected to the vocabulary.

    ``row``: length of a row where several sequences share it (attention then runs under a row × row mask); 0: none do.
    """

    tokens: int
    trained: int
    row: int = 0


def largest_batch(recipe: Recipe, tutor: ModelSize) -> Batch:
    """The micro-batch that the estimate is for: full, or the longest sequence alone where that is longer."""
    env, training = recipe.env, recipe.training
    longest = env.prompt_limit + min(recipe.worst_case_tokens, env.conversation_limit)
    tokens = max(training.tokens_per_micro_batch, longest)
    packed = training.packing == "auto" and tutor.packs
    return Batch(tokens, min(tokens, tokens * _trained_share(recipe) // 1000 + 1), tokens if packed else 0)


def _trained_share(recipe: Recipe) -> int:
    """Most trained tokens in a thousand of a conversation at its longest: the tutor's part of the turn caps."""
    tutor = recipe.env.max_turns // 2 * recipe.env.tutor_cap
    return 1000 * tutor // max(recipe.worst_case_tokens, 1)


def activations(
    tutor: ModelSize,
    batch: Batch,
    *,
    size: int,
    checkpointing: bool,
    full: bool,
    logit_chunk: int | Literal["auto"],
    mixed: bool = False,
) -> dict[str, int]:
    """Bytes at the peak of one forward and backward pass: ``activations``, and ``logits`` (with what else lives at the head).

    ``size``: bytes of an activation. ``full``: all weights are trained (else an adapter). ``mixed``: the base is in 16 bits and the
    adapter in 32, so that every adapted layer keeps its input a second time, in fp32.
    """
    n, h = batch.tokens, tutor.hidden
    masked = batch.row > 0
    saved = [_saved(tutor, s, size, masked=masked, full=full, mixed=mixed) for s in tutor.shapes]
    mask = n * batch.row * size if masked else 0  # boolean masks are turned into numbers in each layer
    bool_mask = n * batch.row if masked else 0
    if checkpointing:
        kept = len(saved) * h * size * n
        inside = int(max(saved, default=0) * n) + mask
    else:
        kept = int(sum(saved) * n) + mask * sum(s.kind != "linear" for s in tutor.shapes)
        inside = 0
    kept += bool_mask
    flight = max((s.in_flight(size) for s in tutor.shapes), default=0) * n
    matrix = 4 * tutor.largest_layer_matrix if full else 0
    layer_phase = inside + flight + matrix
    # The last norm keeps its input and (trained) its result; the trained positions are copied out, and their gradient comes back.
    chunk = min(logit_positions(logit_chunk, tutor.vocabulary), batch.trained) * tutor.vocabulary
    last = (2 if full else 1) * h * max(size, 4) * n + 2 * h * size * batch.trained
    extra = 0 if size == 4 else 2
    forward = (8 + extra) * chunk
    backward = (4 + extra) * chunk + 4 * tutor.vocabulary * h if full else 0
    head_phase = last + max(forward, backward)
    if head_phase > layer_phase:
        return {"activations": kept + last, "logits": head_phase - last}
    return {"activations": kept + layer_phase, "logits": 0}


def _saved(tutor: ModelSize, layer: Layer, size: int, *, masked: bool, full: bool, mixed: bool) -> float:
    saved = layer.saved(size, masked=masked)
    if full:
        return saved
    # A frozen norm does not keep its result a second time; an adapter keeps its inner results.
    saved -= 2 * layer.h * size
    saved += 4 * tutor.adapted_ranks / max(tutor.layers, 1)
    if mixed:
        saved += 4 * tutor.adapted_inputs / max(tutor.layers, 1)
    return saved


def estimate(
    recipe: Recipe, tutor: ModelSize, students: Sequence[ModelSize | None], judge: ModelSize | None = None
) -> dict[str, int]:
    """Bytes in the trainer's process, by purpose, all models in process, one process: the peak of an optimizer step's gradient.

    What is trained is fp32 whatever the dtype of the recipe: the whole model in a full fine-tune, the adapter with LoRA. A frozen
    student that is the tutor's own model shares its weights when only an adapter is trained.
    """
    full = recipe.tutor.lora is None
    size = 4 if full else _BYTES[tutor.dtype]
    trained = tutor.parameters if full else tutor.adapter_parameters
    out = {
        "tutor weights": size * tutor.parameters + 4 * tutor.adapter_parameters,
        "gradients": 4 * trained,
        "optimizer": 2 * 4 * trained,
        **_activations(recipe, tutor, size),
        **_others(recipe, tutor, students, judge),
    }
    out["key-value cache"] = _tutor_cache(recipe, tutor, size)
    if recipe.algorithm.kl_beta > 0 and full:
        out["reference weights"] = size * tutor.parameters
    return {name: n for name, n in out.items() if n}


def _activations(recipe: Recipe, tutor: ModelSize, size: int) -> dict[str, int]:
    training = recipe.training
    return activations(
        tutor,
        largest_batch(recipe, tutor),
        size=size,
        checkpointing=training.gradient_checkpointing,
        full=recipe.tutor.lora is None,
        logit_chunk=training.logit_chunk,
        mixed=recipe.tutor.lora is not None and size == 2,
    )


def _others(
    recipe: Recipe, tutor: ModelSize, students: Sequence[ModelSize | None], judge: ModelSize | None
) -> dict[str, int]:
    """Weights of frozen models in process."""
    others = {
        (spec.model, spec.revision, spec.dtype): s
        for s, spec in zip(students, recipe.students, strict=True)
        if s is not None and spec.engine.kind == "hf" and not _shares(recipe, spec)
    }
    spec = recipe.judge
    judged_here = (
        judge is not None and spec.engine.kind == "hf" and (spec.model, None, spec.dtype) not in others
    )
    return {
        "student weights": sum(s.weight_bytes for s in others.values()),
        "judge weights": judge.weight_bytes if judge is not None and judged_here else 0,
    }


def _shares(recipe: Recipe, student: StudentSpec) -> bool:
    """A student is the tutor's model with its adapter off, as :mod:`maieutic.runtime` decides it."""
    tutor, init = recipe.tutor, recipe.tutor.init_from
    folders = () if init is None else (Path(init), Path(init) / "model")
    return (
        tutor.lora is not None
        # Played while the policy is trained, a student has weights of its own.
        and not recipe.training.staleness
        and (init is None or any((f / "adapter_config.json").is_file() for f in folders))
        and (student.model, student.revision, student.dtype) == (tutor.model, tutor.revision, tutor.dtype)
    )


def _tutor_cache(recipe: Recipe, tutor: ModelSize, size: int) -> int:
    """Bytes of the keys and values of a tutor that is sampled in process."""
    if recipe.tutor.engine.kind != "hf":
        return 0
    episodes = recipe.training.problems_per_step * recipe.training.group_size
    most = episodes * (recipe.env.prompt_limit + recipe.env.conversation_limit)
    tokens = min(recipe.tutor.engine.cache_tokens, most)
    return tokens * tutor.cache_bytes_per_token * size // _BYTES[tutor.dtype]


def per_gpu(
    recipe: Recipe,
    tutor: ModelSize,
    ranks: int,
    sharding: Sharding,
    students: Sequence[ModelSize | None] | None = None,
    judge: ModelSize | None = None,
) -> dict[str, int]:
    """Bytes on the fullest of ``ranks`` GPUs that train the tutor, by purpose; models in servers are elsewhere.

    It is the first, where it also samples in process (``students`` in the recipe's order and ``judge``: what may be there; None:
    nothing is). Compute is in the recipe's ``tutor.dtype`` (the launcher's ``mixed_precision`` must say so), weights that are
    trained and their AdamW state in fp32. ``ddp``: everything whole on each rank. ``zero2``: gradients, optimizer state and the
    fp32 weights are shared out, those of the compute type are whole. ``zero3`` (FSDP2): all weights are shared out; a layer's are
    gathered while it computes.
    """
    full = recipe.tutor.lora is None
    compute = _BYTES[tutor.dtype]
    trained = tutor.parameters if full else tutor.adapter_parameters
    stored = 4 * tutor.parameters if full else compute * tutor.parameters + 4 * tutor.adapter_parameters
    share = 1 if sharding == "ddp" else ranks
    whole = compute * tutor.parameters if full and sharding == "zero2" else stored
    out = {
        "tutor weights": whole // (ranks if sharding == "zero3" else 1),
        "gradients": 4 * trained // share,
        "optimizer": 8 * trained // share,
        **_activations(recipe, tutor, compute),
    }
    if full and sharding == "zero2":
        out["fp32 copies"] = (
            4 * tutor.parameters // share
        )  # DeepSpeed's optimizer rounds the whole weights from them
    if full and compute == 2 and sharding == "ddp":
        out["16-bit copies"] = 2 * tutor.parameters  # autocast keeps them for the length of a forward pass
    if sharding == "ddp" and ranks > 1:
        out["exchange"] = 4 * trained  # DDP's buckets
    if sharding == "zero3" and ranks > 1:
        # Two layers' weights (one is fetched ahead), the whole of one layer's gradients, and the head's weight.
        gathered = 2 * tutor.layer_parameters + tutor.vocabulary * tutor.hidden
        out["exchange"] = compute * gathered + (4 * tutor.layer_parameters if full else 0)
    if recipe.algorithm.kl_beta > 0 and full:
        out["reference weights"] = stored  # every rank holds a frozen copy of its own
    if students is not None:
        out |= _others(recipe, tutor, students, judge)
        out["key-value cache"] = _tutor_cache(recipe, tutor, 4 if full else compute)
        if sharding == "zero3" and ranks > 1 and _in_process(recipe):
            out["whole copy"] = stored  # the first rank's mirror (docs/backends.md), which is sampled from
    # AdamW takes another number for each weight while it steps, when the activations are gone.
    stepping = 4 * trained // share
    backward = sum(out.get(k, 0) for k in ("activations", "logits", "16-bit copies"))
    if stepping > backward:
        out = {k: v for k, v in out.items() if k not in ("activations", "logits", "16-bit copies")}
        out["optimizer's own"] = stepping
    return {name: n for name, n in out.items() if n}


def _in_process(recipe: Recipe) -> bool:
    """Tutor, a student or the judge is sampled by the trainer itself."""
    judged = recipe.judge.kind == "llm" and recipe.judge.engine.kind == "hf"
    played = any(s.kind == "model" and s.engine.kind == "hf" for s in recipe.students)
    return recipe.tutor.engine.kind == "hf" or played or judged


# ---- servers and disk ------------------------------------------------------------------------------------------------


def server_bytes(model: ModelSize, sequences: int, tokens: int) -> dict[str, int]:
    """Bytes of one replica of a server (over all its GPUs): weights, and the key-value cache of ``sequences`` of ``tokens`` each.

    On a GPU that is shared with the trainer these add to :func:`per_gpu`, divided by the tensor-parallel size.
    """
    cache = sequences * (tokens * model.cache_bytes_per_token + model.state_bytes)
    return {"weights": model.weight_bytes, "key-value cache": cache}


def disk_bytes(recipe: Recipe, tutor: ModelSize) -> dict[str, int]:
    """Bytes of one checkpoint, and the most that checkpoints take: those kept, the best, and one that is being written."""
    full = recipe.tutor.lora is None
    trained = tutor.parameters if full else tutor.adapter_parameters
    one = 4 * trained + 2 * 4 * trained
    kept = recipe.checkpoint.keep_last + (recipe.checkpoint.best is not None) + 1
    return {"checkpoint": one, "checkpoints": kept * one}

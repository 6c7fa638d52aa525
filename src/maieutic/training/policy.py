"""The model that is trained: from a recipe (and perhaps a checkpoint) to weights in memory, and back to a folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from maieutic.config import LoraSpec, ModelSpec, Recipe, TutorSpec
from maieutic.errors import CheckpointError, ModelError, RecipeError
from maieutic.models import resolve_model
from maieutic.training.learner import Reference
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import MicroBatch
from maieutic.training.push_probe import SharedScorer
from maieutic.training.step import compute_logprobs

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_REFERENCE = "reference"
"""Name of the frozen second adapter that holds an adapter as training found it."""


@dataclass
class Policy:
    """``model``: a causal LM, or a PEFT model whose adapter is trained. ``reference`` is None where no KL term is on.

    ``base_is_pure``: with the adapter off, the model is ``tutor.model`` as published (and may play the student).
    """

    model: Any
    tokenizer: Any
    reference: Reference | None
    base_is_pure: bool
    shared_scorer: SharedScorer | None = None
    """What scores the probe of a weight push where training divides the weights over ranks."""

    @property
    def is_adapter(self) -> bool:
        """Only an adapter is trained."""
        return hasattr(self.model, "peft_config")

    def save(self, folder: Path) -> None:
        """Write what is trained as ``save_pretrained`` does, and the tokenizer."""
        if self.is_adapter:
            self.model.save_pretrained(folder, selected_adapters=["default"])
        else:
            self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def model_dtype(spec: ModelSpec, device: torch.device) -> Any:
    """What ``from_pretrained`` takes: ``auto`` is fp32 on a CPU (16 bits are slow and coarse there), else as published."""
    if spec.dtype != "auto":
        return _DTYPES[spec.dtype]
    return torch.float32 if device.type == "cpu" else "auto"


def load_model(name: str, dtype: Any, device: torch.device, *, revision: str | None, offline: bool) -> Any:
    """A causal LM in eval mode on ``device``. Raises :class:`~maieutic.errors.ModelError` when it cannot be loaded whole."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    where = resolve_model(name, offline)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, revision=revision, local_files_only=offline, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {name!r} cannot be loaded: {error}") from error
    # The library fills what is missing with random numbers and goes on.
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"model {name!r} lacks {len(missing)} of its weights (first: {missing[0]}): its files are incomplete, or of "
            "another architecture"
        )
    return model.to(device).eval()


def load_tokenizer(spec: ModelSpec, *, offline: bool) -> Any:
    """The fast tokenizer of ``spec.model``. Raises :class:`~maieutic.errors.ModelError` when it cannot be loaded."""
    from transformers import AutoTokenizer

    where = resolve_model(spec.model, offline)
    try:
        return AutoTokenizer.from_pretrained(where, revision=spec.revision, local_files_only=offline)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {spec.model!r} cannot be loaded: {error}") from error


def build_policy(
    recipe: Recipe, device: torch.device, weights: Path | None = None, *, on_host: bool = False
) -> Policy:
    """The policy of ``recipe.tutor``; ``weights``: the ``model`` folder of a checkpoint to continue from.

    ``on_host``: leave the policy in host memory, because training on ``device`` divides it over ranks. The frozen
    reference of a KL term is always the policy as the *recipe* starts it, also on resume.
    """
    spec, offline = recipe.tutor, recipe.offline
    if spec.kind != "policy":
        raise RecipeError(f"tutor.kind is {spec.kind!r}: only a policy can be trained (kind: policy)")
    tokenizer = load_tokenizer(spec, offline=offline)
    init = None if spec.init_from is None else _init_folder(spec.init_from, offline)
    wants_reference = recipe.algorithm.kl_beta > 0
    if spec.lora is None:
        return _full(recipe, device, tokenizer, init, weights, wants_reference, on_host)
    return _adapter(recipe, device, tokenizer, init, weights, wants_reference, on_host)


def _full(
    recipe: Recipe,
    device: torch.device,
    tokenizer: Any,
    init: str | None,
    weights: Path | None,
    wants_reference: bool,
    on_host: bool,
) -> Policy:
    home = torch.device("cpu") if on_host else device

    def initial() -> Any:
        if init is None or not _is_adapter(init):
            return _load(recipe.tutor, init, torch.float32, home, recipe.offline)
        base = _load(recipe.tutor, None, torch.float32, home, recipe.offline)
        return _with_adapter(base, init, is_trainable=False).merge_and_unload().eval()

    # 32-bit master weights: a step of 1e-6 of a weight's size is lost in 16 bits.
    if weights is None:
        model = initial()
    else:
        _require(weights, "config.json")
        model = load_model(str(weights), torch.float32, home, revision=None, offline=True)
    model.requires_grad_(True)
    reference = (
        FrozenReference(initial().to(device), recipe.training.logit_chunk) if wants_reference else None
    )
    return Policy(model, tokenizer, reference, base_is_pure=False)


def _adapter(
    recipe: Recipe,
    device: torch.device,
    tokenizer: Any,
    init: str | None,
    weights: Path | None,
    wants_reference: bool,
    on_host: bool,
) -> Policy:
    from peft import LoraConfig, get_peft_model

    spec = recipe.tutor
    assert spec.lora is not None
    starts_from_adapter = init is not None and _is_adapter(init)
    home = torch.device("cpu") if on_host else device
    base = _load(spec, None if starts_from_adapter else init, model_dtype(spec, device), home, recipe.offline)
    source = weights if weights is not None else (init if starts_from_adapter else None)
    if weights is not None:
        _require(weights, "adapter_config.json")
    if source is None:
        lora = spec.lora
        config = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.targets,
            task_type="CAUSAL_LM",
        )
        try:
            model = get_peft_model(base, config)
        except ValueError as error:  # peft's way of saying that no layer matches
            raise RecipeError(f"tutor.lora.targets: {lora.targets!r}: {error}") from error
    else:
        model = _with_adapter(base, str(source), is_trainable=True)
        _require_same_lora(spec.lora, model.peft_config["default"], str(source))
    reference: Reference | None = None
    if wants_reference and starts_from_adapter:
        model.load_adapter(init, _REFERENCE, is_trainable=False)
        model.set_adapter("default")
        reference = AdapterReference(_REFERENCE)
    elif wants_reference:
        reference = AdapterReference(None)
    model.eval()
    return Policy(model, tokenizer, reference, base_is_pure=init is None or starts_from_adapter)


def _with_adapter(base: Any, source: str, *, is_trainable: bool) -> Any:
    from peft import PeftModel
    from safetensors import SafetensorError

    try:
        return PeftModel.from_pretrained(base, source, is_trainable=is_trainable)
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"the adapter {source} cannot be loaded into {base.config._name_or_path!r}: {error}"
        ) from error


def _require_same_lora(spec: LoraSpec, found: Any, source: str) -> None:
    """An adapter brings its own settings; a recipe that says otherwise would be ignored in silence."""
    pairs: list[tuple[str, Any, Any]] = [
        ("r", spec.r, found.r),
        ("alpha", spec.alpha, found.lora_alpha),
        ("dropout", spec.dropout, found.lora_dropout),
    ]
    if isinstance(spec.targets, list):
        pairs.append(("targets", sorted(spec.targets), sorted(found.target_modules)))
    for key, wanted, have in pairs:
        if wanted != have:
            raise RecipeError(f"tutor.lora.{key} is {wanted}, but the adapter {source} has {have}")


def _load(spec: TutorSpec, init: str | None, dtype: Any, device: torch.device, offline: bool) -> Any:
    name, revision = (spec.model, spec.revision) if init is None else (init, None)
    return load_model(name, dtype, device, revision=revision, offline=offline)


def _require(weights: Path, file: str) -> None:
    if not (weights / file).is_file():
        raise CheckpointError(
            f"{weights} has no {file}: the checkpoint was written by another kind of training (LoRA or full)"
        )


def _init_folder(name: str, offline: bool) -> str:
    """``init_from`` as something to load: a folder (an adapter's has no config.json; of a checkpoint, its ``model`` folder),
    else a model's name or Hub id."""
    folder = Path(name)
    if (folder / "state.json").is_file() and (folder / "model").is_dir():
        folder /= "model"
    elif (folder / "checkpoints").is_dir():
        raise ModelError(
            f"tutor.init_from: {name} is the folder of a run: name one of the checkpoints in {folder / 'checkpoints'}"
        )
    if (folder / "adapter_config.json").is_file():
        return str(folder.absolute())
    return resolve_model(name if folder == Path(name) else str(folder.absolute()), offline)


def _is_adapter(init: str) -> bool:
    if Path(init).is_dir():
        return (Path(init) / "adapter_config.json").is_file()
    from huggingface_hub import file_exists
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return bool(file_exists(init, "adapter_config.json"))
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ModelError(f"tutor.init_from: {init!r} cannot be looked up on the Hub: {error}") from error


# ---- references ------------------------------------------------------------------------------------------------------


class AdapterReference:
    """The same model with another adapter (``name``), or with none (None)."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def logprobs(self, policy: nn.Module, batches: Sequence[MicroBatch], accelerator: Any) -> list[Tensor]:
        """log π_ref [T] of each micro-batch."""
        model = accelerator.unwrap_model(policy).model
        with _adapter_in_force(model, self.name):
            return compute_logprobs(policy, batches, accelerator)


@contextmanager
def _adapter_in_force(model: Any, name: str | None) -> Any:
    """Another adapter, or none (None). Only the layers' switches are set: PEFT's own contexts also flip ``requires_grad``,
    which the hooks of divided weights would take for a change of what is trained."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
    for layer in layers:
        if name is None:
            layer._disable_adapters = True
        else:
            layer._active_adapter = [name]
    try:
        yield
    finally:
        for layer, (off, active) in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = off, active


class FrozenReference:
    """A frozen copy of the initial policy."""

    def __init__(self, model: Any, chunk: int | Literal["auto"]) -> None:
        self.forward = PolicyForward(model.requires_grad_(False), chunk).eval()

    def logprobs(self, policy: nn.Module, batches: Sequence[MicroBatch], accelerator: Any) -> list[Tensor]:
        """log π_ref [T] of each micro-batch."""
        return compute_logprobs(self.forward, batches, accelerator)

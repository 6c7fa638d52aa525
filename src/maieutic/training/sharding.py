"""Weights and optimizer states that are divided over ranks: FSDP2 and DeepSpeed ZeRO, as ``accelerate launch`` set them up.

What samples, saves and pushes needs whole weights in one process. Where training divides them, rank 0 keeps a whole copy of
the policy, the *mirror*, and brings it up to date parameter by parameter: no rank ever gathers more than one of them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maieutic.errors import MissingExtraError, RecipeError

_WANTED = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}
PERSISTENT_ELEMENTS: int | None = None
"""ZeRO-3: parameters of fewer elements stay whole on every rank; None leaves DeepSpeed's own threshold."""


@dataclass(frozen=True)
class Backend:
    """How training is spread over ranks. ``name``: ``single``, ``ddp``, ``fsdp2``, ``zero1``, ``zero2`` or ``zero3``."""

    name: str

    @property
    def divides_weights(self) -> bool:
        """No rank holds the whole model."""
        return self.name in ("fsdp2", "zero3")

    @property
    def divides_optimizer(self) -> bool:
        """Each rank holds its part of the optimizer's states only."""
        return self.name == "fsdp2" or self.deepspeed

    @property
    def deepspeed(self) -> bool:
        return self.name.startswith("zero")


def backend_of(accelerator: Any) -> Backend:
    """The backend that the launcher chose.

    Raises :class:`~maieutic.errors.RecipeError` naming the launcher's setting for what cannot work here.
    """
    from accelerate.utils import DistributedType

    kind = accelerator.distributed_type
    for setting, wanted in _WANTED.items():
        if os.environ.get(setting, "").lower() == "true" and kind.value != wanted:
            raise RecipeError(
                f"distributed_type {wanted} of the launcher's configuration was passed by: accelerate took {kind.value}, as it "
                "does on machines without accelerators; take recipes/accelerate/ddp.yaml there"
            )
    if kind == DistributedType.NO:
        return Backend("single")
    if kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU):
        return Backend("ddp")
    if kind == DistributedType.FSDP:
        return _fsdp(accelerator)
    if kind == DistributedType.DEEPSPEED:
        return _deepspeed(accelerator)
    raise RecipeError(
        f"distributed_type {kind.value} of the launcher's configuration: training runs on MULTI_GPU (DDP), FSDP "
        "(fsdp_version: 2) and DEEPSPEED (zero_stage 1 to 3); see recipes/accelerate"
    )


def _fsdp(accelerator: Any) -> Backend:
    plugin = accelerator.state.fsdp_plugin
    if not accelerator.is_fsdp2:
        raise RecipeError(f"fsdp_version is {plugin.fsdp_version}: only fsdp_version: 2 is supported")
    if plugin.cpu_ram_efficient_loading:
        raise RecipeError(
            "fsdp_cpu_ram_efficient_loading is on: students and references that a rank loads for itself would be empty; "
            "set it to false (each rank reads the weights into host memory and keeps its part)"
        )
    if plugin.activation_checkpointing:
        raise RecipeError(
            "fsdp_activation_checkpointing renames the weights: set it to false, and training.gradient_checkpointing in the "
            "recipe"
        )
    _refuse_fp16(accelerator)
    return Backend("fsdp2")


def _deepspeed(accelerator: Any) -> Backend:
    if not _deepspeed_installed():
        raise MissingExtraError("deepspeed", "deepspeed")
    config = accelerator.deepspeed_plugin.deepspeed_config
    zero = config.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    if stage == 0:
        raise RecipeError(
            "zero_stage is 0, which divides nothing: take recipes/accelerate/ddp.yaml, or zero_stage 1 to 3"
        )
    for key in ("offload_optimizer", "offload_param"):
        if (zero.get(key) or {}).get("device") == "nvme":
            raise RecipeError(
                f"{key}_device is nvme: checkpoints read optimizer states from memory; set cpu or none"
            )
    steps = config.get("gradient_accumulation_steps", "auto")
    if steps not in ("auto", 1, "1"):
        raise RecipeError(
            f"gradient_accumulation_steps is {steps}: how a mini-batch is cut follows from training.tokens_per_micro_batch; "
            "set it to 1"
        )
    _refuse_fp16(accelerator)
    # DeepSpeed's stage 3 makes transformers divide every model that any rank loads, also a student on rank 0 alone, which
    # then waits for the other ranks for ever. The policy is divided in `prepare`.
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    return Backend(f"zero{stage}")


def _refuse_fp16(accelerator: Any) -> None:
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise RecipeError(
            f"mixed_precision is {accelerator.mixed_precision}: losses are not scaled here, so gradients of divided weights "
            "would vanish; set bf16 or no"
        )


def _deepspeed_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("deepspeed") is not None


def before_prepare(
    backend: Backend, accelerator: Any, forward: nn.Module, causal_lm: Any, grad_clip: float
) -> None:
    """Tell the backend what only this package knows: what a layer is, and that batches and clipping are ours."""
    if backend.name == "fsdp2":
        # Weights are gathered a transformer layer at a time; accelerate asks the outermost module what a layer is.
        forward._no_split_modules = list(getattr(causal_lm, "_no_split_modules", None) or [])  # type: ignore[assignment]
    if not backend.deepspeed:
        return
    if accelerator.mixed_precision == "no":
        dtypes = {str(p.dtype).removeprefix("torch.") for p in forward.parameters()}
        if dtypes != {"float32"}:
            raise RecipeError(
                f"mixed_precision is no, but the policy has weights in {', '.join(sorted(dtypes))}: DeepSpeed keeps one "
                "dtype; set mixed_precision: bf16 in the launcher's configuration, or tutor.dtype: float32"
            )
    config = accelerator.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = 1  # demanded and unused: there is no loader
    config["gradient_accumulation_steps"] = 1
    config["gradient_clipping"] = grad_clip
    config["zero_force_ds_cpu_optimizer"] = False  # the same AdamW wherever its states lie
    if PERSISTENT_ELEMENTS is not None:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = PERSISTENT_ELEMENTS


# ---- whole weights ---------------------------------------------------------------------------------------------------


def whole_parameters(
    policy: nn.Module, backend: Backend, device: torch.device, *, trainable_only: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of the parameters, one at a time; every rank must exhaust the iterator.

    A tensor may be a view of memory that is freed when the next one is asked for: copy what is kept.
    """
    for name, parameter in policy.named_parameters():
        if trainable_only and not parameter.requires_grad:
            continue
        if backend.name == "zero3":
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()
        elif backend.name == "fsdp2":
            any_parameter: Any = parameter.detach()
            yield name, any_parameter.to(device).full_tensor()
        else:
            yield name, parameter.detach()


class Mirror:
    """A whole copy of the policy on rank 0 that follows the divided one; on the other ranks it only takes part in gathering.

    Args:
        model: the policy before it is divided.
        device: where the copy lies: the accelerator's where it is sampled from, else the host's memory.
        main: this is rank 0.
    """

    def __init__(self, model: Any, backend: Backend, device: torch.device, *, main: bool) -> None:
        self.backend = backend
        self.model: Any = copy.deepcopy(model).to(device).eval() if main else None
        """The copy; None but on rank 0. Its weights take part in no gradient."""
        self._targets: dict[str, Tensor] = {}
        if self.model is not None:
            self._targets = {name: p.data for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def refresh(self, policy: nn.Module, device: torch.device) -> None:
        """Copy the trained weights over, one at a time (``policy``: a prepared PolicyForward); a call of every rank."""
        left = set(self._targets)
        for name, whole in whole_parameters(policy, self.backend, device):
            if self.model is not None:
                inner = name.removeprefix("module.").removeprefix("model.")
                self._targets[inner].copy_(whole)
                left.discard(inner)
        if left:
            raise RuntimeError(f"weights that the divided policy does not have: {sorted(left)[:3]}")


# ---- optimizer states ------------------------------------------------------------------------------------------------


def optimizer_part(optimizer: Any, backend: Backend) -> list[dict[str, Any]]:
    """This rank's optimizer states, as plain tensors on the CPU, in the optimizer's own order.

    One entry a parameter (FSDP2) or a flat group (ZeRO): ``shape`` of the local part, ``state`` (AdamW's moments and step), and
    for ZeRO ``master``, the fp32 weights that a bf16 model is rounded from.
    """
    inner, parts = _parts(optimizer, backend)
    out = []
    for part in parts:
        entry: dict[str, Any] = {
            "shape": list(_local(part).shape),
            "state": {k: _plain(v) for k, v in inner.state.get(part, {}).items()},
        }
        if backend.deepspeed:
            entry["master"] = _plain(part)
        out.append(entry)
    return out


@torch.no_grad()
def load_optimizer_part(optimizer: Any, backend: Backend, saved: list[dict[str, Any]]) -> None:
    """Inverse of :func:`optimizer_part`, into a fresh optimizer. ValueError if the parts are of other sizes."""
    inner, parts = _parts(optimizer, backend)
    theirs, ours = [e["shape"] for e in saved], [list(_local(p).shape) for p in parts]
    if theirs != ours:
        raise ValueError(f"it holds parts of sizes {theirs[:3]}…, this rank has {ours[:3]}…")
    for part, entry in zip(parts, saved, strict=True):
        if backend.deepspeed:
            part.data.copy_(entry["master"])
        inner.state[part] = {name: _restored(name, value, part) for name, value in entry["state"].items()}


def _parts(optimizer: Any, backend: Backend) -> tuple[Any, list[Tensor]]:
    """The innermost torch optimizer, and the tensors that its states belong to."""
    zero = optimizer.optimizer
    if not backend.deepspeed:
        return zero, [p for group in zero.param_groups for p in group["params"]]
    groups = (
        zero.fp32_partitioned_groups_flat if backend.name == "zero3" else zero.single_partition_of_fp32_groups
    )
    return zero.optimizer, list(groups)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _plain(value: Any) -> Any:
    return _local(value).detach().cpu().clone() if isinstance(value, Tensor) else value


def _restored(name: str, value: Any, part: Any) -> Any:
    if not isinstance(value, Tensor) or name == "step":
        return value
    local = value.to(_local(part).device)
    if not hasattr(part, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
    )

"""Weights of a trained policy as a plain Hugging Face folder: adapters merged, heads complete, names as the base model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from maieutic.errors import ModelError


def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the policy as its base architecture names them, LoRA deltas added.

    The deltas are added to copies: the trained weights are not touched (merging and unmerging in place would drift). The head
    of a tied model is given too: vLLM on CPU keeps a packed head of its own and would go on with the old one.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    deltas: dict[str, torch.Tensor] = {}
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer) and not module.disable_adapters:
            for adapter in module.active_adapters:
                if adapter in getattr(module, "lora_A", {}):
                    delta = module.get_delta_weight(adapter)
                    key = f"{name}.weight"
                    deltas[key] = deltas[key] + delta if key in deltas else delta
    seen: set[str] = set()
    for raw_name, value in base.state_dict().items():
        name = raw_name.replace(".base_layer.", ".")
        if ".lora_" in name:
            continue
        seen.add(name)
        tensor = value.detach()
        yield name, (tensor + deltas[name].to(tensor.dtype)) if name in deltas else tensor
    missing = set(deltas) - seen
    if missing:
        raise ModelError(f"adapter weights without a base weight: {sorted(missing)[:3]}")
    head = base.get_output_embeddings()
    if head is not None and "lm_head.weight" not in seen:
        yield "lm_head.weight", base.get_input_embeddings().weight.detach()


def write_weights(model: Any, folder: Path, *, config_from: Path | None = None) -> int:
    """Write ``model.safetensors`` (one shard) and the config files into ``folder``; returns the bytes of weights.

    ``config_from``: a model folder whose configuration and tokenizer files are copied, so that the folder is complete.
    Written to temporary names and renamed, so that a reader never sees half a file.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, value in merged_weights(model):
        tensor = value.contiguous().cpu()
        if tensor.untyped_storage().data_ptr() in taken:
            tensor = tensor.clone()  # a tied head: the format refuses tensors that share memory
        taken.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    size = part.stat().st_size
    if config_from is not None:
        for f in config_from.iterdir():
            if f.suffix in (".json", ".jinja", ".model", ".txt") and not f.name.endswith(".index.json"):
                shutil.copyfile(f, folder / f.name)
    part.replace(folder / "model.safetensors")
    return size


def write_version(folder: Path, policy_version: int) -> None:
    """Record which policy version lies in ``folder``."""
    (folder / "policy_version.json").write_text(json.dumps({"policy_version": policy_version}))

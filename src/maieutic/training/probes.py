"""Start-up checks of an architecture on a tiny random copy of it: milliseconds, instead of silent errors later.

The copy keeps what decides the behaviour (layer kinds, windows, rotary settings, scalings, attention implementation) and
shrinks what only costs time (width, depth, vocabulary, experts).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maieutic.errors import ModelError
from maieutic.training.packing import MicroBatch, Row, collate

_VOCAB = 64
_LENGTHS = (11, 17, 7)
# Of the logits' size. Sequences that see each other differ by tens of per cent, rounding by 1e-6 (fp32) or 1e-2 (16 bits).
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
# Listings of layer kinds that a cut in depth would leave inconsistent.
_OTHER_LAYER_LISTS = (
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_layer_indices",
    "attn_layer_period",
)
_SMALLER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True)
class Isolation:
    """Whether packed sequences leave each other alone, and the words for the log. True in a boolean context if they do.

    ``several_rows``: also when a micro-batch has several packed rows (not so with kernels that take one row only).
    """

    isolated: bool
    reason: str
    several_rows: bool = False

    def __bool__(self) -> bool:
        return self.isolated


def tiny_copy(model_or_config: Any, *, shrink_width: bool = True) -> nn.Module:
    """A random model of the same class and kinds of layers (one of each, at least two layers), in eval mode, fp32, on CPU.

    The global random state is left as it was. Raises ModelError when this architecture cannot be cut.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class: Any = None
    config = model_or_config
    if isinstance(model_or_config, nn.Module):
        model_class, config = type(model_or_config), model_or_config.config
    text = config.get_text_config()
    if model_class is None or text is not config:
        if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(f"{type(text).__name__} has no causal language model in transformers")
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    if any(getattr(text, name, None) is not None for name in _OTHER_LAYER_LISTS):
        raise ModelError(f"{type(text).__name__} lists its layers in a way that cannot be cut to two")
    small = copy.deepcopy(text)
    _shrink(small, shrink_width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny = model_class(small).float().eval()
        for parameter in tiny.parameters():
            if parameter.dim() >= 2:
                # Far from the near-uniform outputs of a fresh model, so that a leak or a scaling shows.
                nn.init.normal_(parameter, std=0.2)
    return tiny


def _shrink(config: Any, width: bool) -> None:
    layers = getattr(config, "layer_types", None)
    if layers:
        kinds = list(dict.fromkeys(layers))
        kinds = kinds if len(kinds) > 1 else kinds * 2
        config.num_hidden_layers, config.layer_types = len(kinds), kinds
    else:
        config.num_hidden_layers = 2
    config.vocab_size = _VOCAB
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    if not width:
        return
    if getattr(config, "head_dim", None) is None and hasattr(config, "num_attention_heads"):
        # Rotary settings belong to this head size; keep it while the width shrinks.
        config.head_dim = config.hidden_size // config.num_attention_heads
    same_heads = getattr(config, "num_key_value_heads", None) == getattr(config, "num_attention_heads", None)
    for name, small in _SMALLER.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > small:
            setattr(config, name, small)
    if hasattr(config, "num_key_value_heads"):
        heads = config.num_attention_heads
        config.num_key_value_heads = heads if same_heads else min(config.num_key_value_heads, heads // 2 or 1)


def running_copy(model_or_config: Any) -> nn.Module:
    """The copy that runs: with small width, else (sizes that depend on each other) with the real one."""
    problems = []
    for shrink_width in (True, False):
        try:
            tiny = tiny_copy(model_or_config, shrink_width=shrink_width)
            with torch.no_grad():
                tiny(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
            return tiny
        except Exception as error:  # any architecture may come here; the caller turns this into a notice
            problems.append(f"{type(error).__name__}: {error}")
    raise ModelError("no tiny copy of this architecture runs: " + "; ".join(problems))


@torch.no_grad()
def isolates(model_or_config: Any) -> Isolation:
    """Do sequences packed in one row (as :func:`maieutic.training.packing.collate` does) give the logits that each gives alone?

    Also checks that padding on the right changes nothing, which training relies on; ModelError if it does. An architecture
    that cannot be copied counts as not isolating. With a model the check runs on its device, where other kernels may be used;
    flash attention can only be checked so (in bf16).
    """
    try:
        tiny = _on_the_same_device(model_or_config)
    except ModelError as failure:
        return Isolation(False, f"packing is off: {failure}")
    device = next(tiny.parameters()).device
    generator = torch.Generator().manual_seed(0)
    rows = [_probe_row(torch.randint(1, _VOCAB, (n,), generator=generator).numpy()) for n in _LENGTHS]

    def logits(batch: MicroBatch) -> Tensor:
        return tiny(**batch.to(device).model_inputs()).logits.float()

    alone = [logits(collate([row], "padded"))[0] for row in rows]
    size = max(float(a.abs().max()) for a in alone)
    tolerance = _TOLERANCE[next(tiny.parameters()).dtype] * size
    padded = logits(collate(rows, "padded"))
    off = max(float((padded[i, : len(a)] - a).abs().max()) for i, a in enumerate(alone))
    if not off <= tolerance:
        raise ModelError(
            f"{type(tiny).__name__} is not causal: padding on the right changes its logits by {off:.2g} "
            f"(their size is {size:.2g}); such a model cannot be trained here"
        )
    packed = logits(collate(rows, "packed"))[0].split(_LENGTHS)
    off = max(float((p - a).abs().max()) for p, a in zip(packed, alone, strict=True))
    if off <= tolerance:
        wide = collate(rows, "packed", width=max(_LENGTHS) + 2)
        flat = logits(wide).flatten(0, 1)
        several = all(
            float((flat[wide.select_T[wide.episode_T == i].to(device)] - a).abs().max()) <= tolerance
            for i, a in enumerate(alone)
        )
        reason = f"packing is on: {type(tiny).__name__} isolates packed sequences (error {off:.1g})"
        return Isolation(True, reason, several)
    kinds = sorted(set(getattr(tiny.config, "layer_types", None) or []))
    return Isolation(
        False,
        f"packing is off: in {type(tiny).__name__} packed sequences change each other's logits by {off:.2g} "
        f"(their size is {size:.2g}){'; layers: ' + ', '.join(kinds) if kinds else ''}",
    )


def _on_the_same_device(model_or_config: Any) -> nn.Module:
    """The copy where and with what attention the original runs (a config: on CPU)."""
    loaded = isinstance(model_or_config, nn.Module)
    config: Any = model_or_config.config if loaded else model_or_config
    if "flash" not in str(getattr(config.get_text_config(), "_attn_implementation", None)):
        tiny = running_copy(model_or_config)
        return tiny.to(next(model_or_config.parameters()).device) if loaded else tiny
    if not loaded:
        raise ModelError("flash attention can only be checked on the loaded model, not on its config")
    return tiny_copy(model_or_config).to(next(model_or_config.parameters()).device, torch.bfloat16)


def _probe_row(ids: Any) -> Row:
    """Every position is selected, so that ``select_T`` tells where it went."""
    everywhere = np.arange(len(ids))
    return Row("probe", ids, everywhere, ids, np.zeros(len(ids), dtype=np.float32), 0.0, 1.0)

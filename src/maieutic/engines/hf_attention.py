"""The attention that the ``hf`` engine's own key-value store needs, as a transformers attention function and cache.

A *slab* holds keys and values of many sequences: [layers, 2, rows, kv heads, columns, head dim]. While tokens are decoded,
the prompt's slab is never touched: K samples of one request share it, and each sample has its own short slab. Scores over
the two are joined before the softmax, so the result is that of one attention over both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "maieutic_shared_prefix"


@dataclass(slots=True)
class Decode:
    """One new token for each of R × K rows. ``bias`` [R, 1, 1, P] is 0 at a prompt's columns and −inf at holes."""

    prefix: torch.Tensor
    bias: torch.Tensor
    samples: int


class SlabCache(Cache):
    """A transformers cache that writes columns [at, at + new) of a slab and returns the columns up to there."""

    def __init__(self, slab: torch.Tensor, at: int, decode: Decode | None = None) -> None:
        super().__init__(layers=[])
        self.slab, self.at, self.decode = slab, at, decode

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.at + key_states.shape[2]
        keys, values = self.slab[layer_idx, 0], self.slab[layer_idx, 1]
        keys[:, :, self.at : end] = key_states
        values[:, :, self.at : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.at


# The decode step in progress; forward passes run one at a time in one thread.
_decode: Decode | None = None


@contextmanager
def shared_prefix(config: Any, decode: Decode | None) -> Iterator[None]:
    """Let the model with this (text) config use our attention for the forward passes inside."""
    global _decode
    own, config._attn_implementation = config._attn_implementation, NAME
    _decode = decode
    try:
        yield
    finally:
        config._attn_implementation = own
        _decode = None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` [B, heads, n, D], ``key``/``value`` [B, kv heads, T, D] → [B, n, heads, D].

    Grouped queries are stacked along the query axis instead of repeating keys and values. With several queries a row,
    ``attention_mask`` is boolean [B, 1, n, T].
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    batch, heads, n, dim = query.shape
    kv = key.shape[1]
    group = heads // kv
    if _decode is None:
        assert attention_mask is not None
        stacked = query.reshape(batch, kv, group * n, dim)
        out = F.scaled_dot_product_attention(
            stacked, key, value, attn_mask=attention_mask.repeat(1, 1, group, 1), scale=scale
        )
        return out.reshape(batch, heads, n, dim).transpose(1, 2).contiguous(), None
    layer: int = module.layer_idx  # type: ignore[assignment]
    old_keys, old_values = _decode.prefix[layer, 0], _decode.prefix[layer, 1]
    k, rows = _decode.samples, old_keys.shape[0]
    own_query = query.reshape(batch, kv, group, dim) * scale
    shared_query = (
        own_query.reshape(rows, k, kv, group, dim).transpose(1, 2).reshape(rows, kv, k * group, dim)
    )
    shared = torch.matmul(shared_query, old_keys.transpose(2, 3)) + _decode.bias
    own = torch.matmul(own_query, key.transpose(2, 3))
    own = own.reshape(rows, k, kv, group, -1).transpose(1, 2).reshape(rows, kv, k * group, -1)
    width = shared.shape[-1]
    weights = torch.cat([shared, own], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
    out = torch.matmul(weights[..., :width], old_values).reshape(rows, kv, k, group, dim).transpose(1, 2)
    own_weights = weights[..., width:].reshape(rows, kv, k, group, -1).transpose(1, 2)
    out = out.reshape(batch, kv, group, dim) + torch.matmul(own_weights.reshape(batch, kv, group, -1), value)
    return out.reshape(batch, 1, heads, dim), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)

"""What autograd keeps of one layer, in bytes a token: the activation part of the memory estimate (pure, torch-free).

Counted tensor by tensor from the reference code of the layers (docs/memory.md has the counts), and held against the real tensors
in the tests. ``h`` hidden width, ``m`` width of the MLP, ``q`` = heads × head size, ``k`` = key-value heads × head size; of a
linear-attention layer ``K`` = key heads × their size, ``Q`` = value heads × key size, ``V`` = value heads × value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["attention", "attention+norm", "attention+norm+gate", "linear"]
CHUNK = 64
"""Positions that the reference code of linear attention takes at a time."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Widths of one decoder layer (see the module). Unused ones are 0."""

    kind: Kind
    h: int
    m: int
    q: int = 0
    k: int = 0
    heads: int = 0
    kv_heads: int = 0
    key: int = 0
    query: int = 0
    value: int = 0
    value_heads: int = 0
    state: int = 0
    """Numbers in the recurrent state of a linear-attention layer."""

    def saved(self, size: int, *, masked: bool = False) -> float:
        """Bytes a token that the forward pass keeps for the backward pass.

        ``size``: bytes of an activation, 4 or 2 (norms compute in fp32 either way). ``masked``: attention is under a mask, for
        which keys and values are repeated to all heads (the mask itself is not counted here).
        """
        wide = size == 4
        if self.kind == "linear":
            # With 2 bytes, projections and MLP are kept in 16 bits, the recurrence in fp32.
            h, m, key, query, value, heads = (24, 16, 16, 48, 44, 1320) if wide else (20, 8, 8, 32, 34, 1318)
            return (
                h * self.h
                + m * self.m
                + key * self.key
                + query * self.query
                + value * self.value
                + heads * self.value_heads
                + 4 * self.state / CHUNK
                + 24
            )
        h, m, q, k, heads, kv_heads = _ATTENTION[self.kind, wide]
        repeated = 2 * size * (self.q - self.k) if masked else 0
        return (
            h * self.h
            + m * self.m
            + q * self.q
            + k * self.k
            + repeated
            + heads * self.heads
            + kv_heads * self.kv_heads
            + 8
        )

    def in_flight(self, size: int) -> int:
        """Bytes a token of gradients under way in the layer's backward pass: of the residual stream, and two of the MLP's width."""
        return size * (self.h + 2 * self.m)


_ATTENTION: dict[tuple[str, bool], tuple[int, int, int, int, int, int]] = {
    # (kind, fp32?): bytes for each of h, m, q, k, heads, key-value heads
    ("attention", True): (24, 16, 8, 8, 4, 0),
    ("attention", False): (16, 8, 4, 4, 4, 0),
    ("attention+norm", True): (24, 16, 16, 16, 8, 4),
    ("attention+norm", False): (16, 8, 10, 10, 8, 4),
    ("attention+norm+gate", True): (24, 16, 32, 16, 8, 4),
    ("attention+norm+gate", False): (20, 8, 18, 12, 8, 4),
}


def layers_of(text: Any, *, normed: bool, gated: bool) -> list[Layer]:
    """The layers of a transformers text config. ``normed``, ``gated``: attention norms its queries and keys, gates its output."""
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    experts = getattr(text, "num_experts_per_tok", None)
    m = text.intermediate_size
    if experts:  # a token's own experts; some families call an expert's width like a dense layer's
        m = experts * (getattr(text, "moe_intermediate_size", None) or m)
        m += getattr(text, "shared_expert_intermediate_size", None) or 0
        m += (
            experts * text.hidden_size // 2
        )  # each keeps the token's input and output: 8 h or 4 h, as a width of the MLP counts
    kind: Kind = "attention+norm+gate" if gated else "attention+norm" if normed else "attention"
    attention = Layer(kind, text.hidden_size, m, heads * head_dim, kv_heads * head_dim, heads, kv_heads)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    if not any("linear" in k for k in kinds):
        return [attention] * len(kinds)
    nk, nv = text.linear_num_key_heads, text.linear_num_value_heads
    dk, dv = text.linear_key_head_dim, text.linear_value_head_dim
    linear = Layer(
        "linear",
        text.hidden_size,
        m,
        key=nk * dk,
        query=nv * dk,
        value=nv * dv,
        value_heads=nv,
        state=nv * dk * dv,
    )
    return [linear if "linear" in k else attention for k in kinds]

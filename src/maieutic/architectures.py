"""Shapes of the models in the shipped recipes, for estimates where their ``config.json`` is not at hand.

A check must say something useful on a login node without a network. Numbers are those of the models' public configs; where one
could not be read, ``note`` says what was assumed. A config at hand always wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """``kind``: ``model_type`` of transformers. ``values``: of its text config. ``note``: what was assumed; empty: nothing."""

    kind: str
    values: dict[str, Any]
    note: str = ""


_HYBRID: dict[str, Any] = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262_144,
    "dtype": "bfloat16",
}
_HYBRID_27B: dict[str, Any] = _HYBRID | {
    "hidden_size": 5_120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
    "tie_word_embeddings": False,
}


def _qwen2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 152_064,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


SHAPES: dict[str, Shape] = {
    "meta-llama/Llama-3.1-8B-Instruct": Shape(
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 4_096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    "Qwen/Qwen2.5-7B-Instruct": Shape("qwen2", _qwen2(3_584, 18_944, 28, 28, 4)),
    "Qwen/Qwen2.5-14B-Instruct": Shape("qwen2", _qwen2(5_120, 13_824, 48, 40, 8)),
    "Qwen/Qwen3-14B": Shape(
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 5_120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    "Qwen/Qwen3.5-4B": Shape(
        "qwen3_5_text",
        _HYBRID
        | {
            "hidden_size": 2_560,
            "intermediate_size": 9_216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "linear_num_value_heads": 32,
            "tie_word_embeddings": True,
        },
        "the width of its MLP, its linear heads and its tied embeddings are assumed",
    ),
    "Qwen/Qwen3.5-9B": Shape(
        "qwen3_5_text",
        _HYBRID
        | {
            "hidden_size": 4_096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "linear_num_value_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen/Qwen3.6-27B": Shape("qwen3_5_text", _HYBRID_27B, "assumed to be shaped like Qwen3.5-27B"),
    "Qwen/Qwen3.8-27B": Shape("qwen3_5_text", _HYBRID_27B, "assumed to be shaped like Qwen3.5-27B"),
}


def known_config(name: str) -> tuple[Any, str] | None:
    """The config of a listed model, built from :data:`SHAPES`, and what was assumed in it; None for other models."""
    shape = SHAPES.get(name)
    if shape is None:
        return None
    from transformers import AutoConfig

    return AutoConfig.for_model(shape.kind, **shape.values), shape.note

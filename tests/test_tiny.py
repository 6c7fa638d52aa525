"""The tiny models must be complete: everything else is tested on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maieutic.tiny import make_tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = [
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\nTry counting on."},
    {"role": "user", "content": "7"},
]


@given(st.text(max_size=80))
def test_any_text_survives_encode_and_decode(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_single_and_distinct() -> None:
    texts = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    ids = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) == 5
    assert TOKENIZER.eos_token == "<|im_end|>" and TOKENIZER.pad_token == "<|pad|>"
    # As in reasoning models: thinking marks are not special, so decoding keeps them.
    assert TOKENIZER.decode([one[0] for one in ids], skip_special_tokens=True) == "<think></think>"


def test_merges_shorten_common_text() -> None:
    text = "How many apples does she have now?"
    assert len(TOKENIZER.encode(text)) < 0.7 * len(text)


def test_plain_template_is_append_only() -> None:
    renders = [TOKENIZER.apply_chat_template(CHAT[:n], tokenize=False) for n in range(1, 4)]
    assert renders[0] == "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n"
    assert renders[1].startswith(renders[0]) and renders[2].startswith(renders[1])
    prompt = TOKENIZER.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompt == renders[2] + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "options", "opening"),
    [
        ("thinking", {}, "<think>\n"),
        ("hybrid", {}, ""),
        ("hybrid", {"enable_thinking": True}, ""),
        ("hybrid", {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_templates_strip_history(template: str, options: dict[str, bool], opening: str) -> None:
    tokenizer = tiny_tokenizer(template)  # type: ignore[arg-type]
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **options)
    assert prompt == (
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n"
        "<|im_start|>assistant\nTry counting on.<|im_end|>\n"
        "<|im_start|>user\n7<|im_end|>\n"
        f"<|im_start|>assistant\n{opening}"
    )
    # A turn after the last user message keeps its thinking.
    assert "<think>\nadd\n</think>" in tokenizer.apply_chat_template(CHAT[:2], tokenize=False)


def test_folder_loads_and_is_reproducible(
    tiny_model_dir: Path, tmp_path: Path, tiny_model, tiny_tokenizer
) -> None:
    files = {path.name for path in tiny_model_dir.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= files
    config = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] in {"PreTrainedTokenizerFast", "TokenizersBackend"}
    assert len(tiny_tokenizer) == tiny_model.config.vocab_size == 384
    assert tiny_tokenizer.chat_template == TOKENIZER.chat_template
    assert tiny_tokenizer.get_vocab() == TOKENIZER.get_vocab()

    state = torch.get_rng_state()
    again = make_tiny_model(tmp_path / "again")
    other = make_tiny_model(tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    weights = (tiny_model_dir / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


def test_next_token_distribution_is_not_uniform(tiny_model, tiny_tokenizer) -> None:
    ids = tiny_tokenizer("How many apples?", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = tiny_model(ids).logits[0, -1]
    assert logits.std() > 0.3

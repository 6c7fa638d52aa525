"""Reward-model scores: batched equals one at a time, for several architectures, both padding sides, all kinds of pad id."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from maieutic.dialogue import Message
from maieutic.errors import ModelError
from maieutic.evaluation.conversations import Said
from maieutic.evaluation.ped_rm import RewardModel, batches, reward_messages
from maieutic.tiny import tiny_tokenizer

VOCABULARY, EOS = 384, 2


def qwen(pad: int | None) -> Any:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=pad,
    )
    return Qwen2ForSequenceClassification(config)


def gpt2(pad: int | None) -> Any:
    return GPT2ForSequenceClassification(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            initializer_range=0.3,
            num_labels=1,
            pad_token_id=pad,
        )
    )


def bert(pad: int | None) -> Any:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=256,
            initializer_range=0.3,
            num_labels=1,
            pad_token_id=0 if pad is None else pad,
        )
    )


def rows(n: int = 23, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 60))] + [EOS] for _ in range(n)]


@pytest.mark.parametrize("tokenizer_side", ["right", "left"])
@pytest.mark.parametrize("pad", [0, EOS, None], ids=["pad", "pad=eos", "no pad"])
@pytest.mark.parametrize("make", [qwen, gpt2, bert], ids=["qwen2", "gpt2", "bert"])
def test_batched_equals_single(make: Any, pad: int | None, tokenizer_side: str) -> None:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = tokenizer_side
    model = RewardModel(make(pad), tokenizer, batch_tokens=300)
    ids = rows()
    single = [model.score_one(r) for r in ids]
    batched = model.score_ids(ids)
    assert max(single) - min(single) > 0.05, "the scores must differ for the comparison to mean anything"
    assert batched == pytest.approx(single, abs=1e-5)
    assert model.side == "right"


@pytest.mark.parametrize("make", [qwen, gpt2], ids=["qwen2", "gpt2"])
def test_left_padding_of_a_causal_model_is_equal_too(make: Any) -> None:
    torch.manual_seed(0)
    model = RewardModel(make(None), tiny_tokenizer(), batch_tokens=300)
    model.side = "left"
    ids = rows()
    assert model.score_ids(ids) == pytest.approx([model.score_one(r) for r in ids], abs=1e-5)


class PoolsTheLastCell(torch.nn.Module):
    """A causal model that reads its score from the last cell, whatever is in it; ``mean``: from all cells, padding too."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.inner, self.mean = qwen(0), mean
        self.config, self.device = self.inner.config, torch.device("cpu")

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        hidden = self.inner.model(input_ids, attention_mask=attention_mask, position_ids=position_ids)[0]
        cell = hidden.mean(1) if self.mean else hidden[:, -1]
        return type("Out", (), {"logits": self.inner.score(cell)})


def test_a_model_that_pools_the_last_cell_is_padded_left() -> None:
    torch.manual_seed(0)
    model, ids = RewardModel(PoolsTheLastCell(), tiny_tokenizer(), batch_tokens=300), rows()
    assert model.score_ids(ids) == pytest.approx([model.score_one(r) for r in ids], abs=1e-5)
    assert model.side == "left"


def test_a_model_that_sees_padding_is_asked_row_by_row(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, ids = RewardModel(PoolsTheLastCell(mean=True), tiny_tokenizer(), batch_tokens=300), rows(9)
    assert model.score_ids(ids) == [model.score_one(r) for r in ids]
    assert model.side == "single" and "one row at a time" in caplog.text


def test_pooling_of_a_naive_batch_would_be_wrong() -> None:
    """What the class guards against: without a pad id the model pools the last cell, which is padding."""
    torch.manual_seed(0)
    raw, tokens = qwen(None), [[5, 6, 7, 8, 9], [10, 11]]
    model = RewardModel(raw, tiny_tokenizer())
    padded = torch.tensor([tokens[0], [*tokens[1], 0, 0, 0]])
    raw.config.pad_token_id = 9
    with torch.inference_mode():
        naive = raw(input_ids=padded, attention_mask=(padded != 0).long()).logits[1, 0].item()
    raw.config.pad_token_id = None
    assert abs(naive - model.score_one(tokens[1])) > 1e-3
    assert model.score_ids(tokens)[1] == pytest.approx(model.score_one(tokens[1]), abs=1e-5)
    assert raw.config.pad_token_id is None


def test_batches_are_sorted_bounded_and_complete() -> None:
    lengths = [3, 50, 7, 7, 20, 100]
    made = list(batches(lengths, 60))
    assert sorted(i for b in made for i in b.rows) == list(range(6))
    assert [b.width for b in made] == sorted((b.width for b in made), reverse=True)
    assert all(len(b.rows) == 1 or len(b.rows) * b.width <= 60 for b in made)
    assert made[0].rows == [5]


def test_conversations_go_through_the_template() -> None:
    torch.manual_seed(0)
    model = RewardModel(qwen(0), tiny_tokenizer())
    messages = reward_messages(
        "P", "S", [Said("student", "hi"), Said("tutor", "yes")], "and?", system="judge"
    )
    assert [m.role for m in messages] == ["system", "user", "user", "assistant", "assistant"]
    assert messages[1].content == "Problem: P\nReference Solution: S" and messages[-1].content == "and?"
    text = model._tokenizer.decode(model.ids(messages))
    assert text.endswith("<|im_start|>assistant\nand?<|im_end|>\n")
    assert model.score([messages])[0] == pytest.approx(model.score_one(model.ids(messages)), abs=1e-5)


def test_too_long_is_refused_not_cut() -> None:
    with pytest.raises(ModelError, match="not cut"):
        RewardModel(qwen(0), tiny_tokenizer(), max_tokens=5).ids(
            [Message("user", "one two three four five six")]
        )


def test_more_than_one_output_is_refused() -> None:
    model = qwen(0)
    model.config.num_labels = 3
    with pytest.raises(ModelError, match="one output"):
        RewardModel(model, tiny_tokenizer())

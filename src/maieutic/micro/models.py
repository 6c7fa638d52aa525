"""The micro models: a word-level tokenizer with a chat template, and a tiny Llama."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from maieutic.micro import speech
from maieutic.micro.corpus import Document, vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTEXT = 512
"""Positions of the models."""
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> THINK{% endif %}"
)


def template(*, thinking: bool = False) -> str:
    """The chat template; the thinking one opens the tutor's thinking in the generation prompt."""
    return _TEMPLATE.replace("THINK", f"{speech.THINK} " if thinking else "")


def tokenizer(*, thinking: bool = False) -> PreTrainedTokenizerFast:
    """One token a word. The end-of-conversation mark is a word like any other; roles, ends and thinking tags are control."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(vocabulary())}
    backend = Tokenizer(models.WordLevel(words, unk_token=speech.UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tags = (speech.THINK, speech.THINK_END)
    backend.add_special_tokens([AddedToken(w, special=True) for w in speech.CONTROL if w not in tags])
    backend.add_tokens([AddedToken(w, special=False) for w in tags])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=speech.PAD,
        unk_token=speech.UNKNOWN,
        eos_token=speech.END,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    made.chat_template = template(thinking=thinking)
    return made


def new_model(seed: int) -> Any:
    """An untrained model of about a quarter of a million fp32 parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = vocabulary()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.index(speech.END),
        pad_token_id=words.index(speech.PAD),
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


class Encoder:
    """Documents to ids and loss mask, with the ids that the general renderer gives (a test holds them together)."""

    def __init__(self, *, thinking: bool = False) -> None:
        self._ids = {word: number for number, word in enumerate(vocabulary())}
        self._thinking = thinking

    def __call__(self, document: Document) -> tuple[list[int], list[bool]]:
        """Ids and, of the same length, which of them are learned: a message's words and the end of its turn."""
        ids: list[int] = []
        learned: list[bool] = []
        for said in document:
            head = [f"<|{said.message.role}|>"]
            if self._thinking and said.learn:
                head.append(speech.THINK)
            body = [*said.message.content.split(), speech.END]
            ids += [self._ids[word] for word in head + body]
            learned += [False] * len(head) + [said.learn] * len(body)
        return ids, learned


def save(model: Any, folder: Path, *, thinking: bool = False) -> None:
    """A Hugging Face folder: config, bfloat16 safetensors (half a megabyte), tokenizer, chat template."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.save_pretrained(folder)
    tokenizer(thinking=thinking).save_pretrained(folder)

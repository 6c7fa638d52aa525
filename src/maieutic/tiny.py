"""Tiny random models with real tokenizers: a complete model folder in well under a second.

For tests and dry runs. The model says nothing sensible, but everything around it is as with a real one: a byte-level
BPE tokenizer that encodes any text, a ChatML chat template, special tokens, `config.json`, safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"

Template = Literal["plain", "thinking", "hybrid"]

# ChatML. Append-only: rendering n + 1 messages starts with the rendering of n messages.
_PLAIN = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# As reasoning models have it: thinking before the last user message is dropped from history, so the rendering is
# *not* append-only. What opens the assistant's turn is what the two thinking templates differ in.
_THINKING = """\
{%- set seen = namespace(last_user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set seen.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set text = message.content -%}
{%- if message.role == 'assistant' and loop.index0 < seen.last_user and '</think>' in text -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}PREFILL{%- endif -%}
"""
_TEMPLATES: dict[Template, str] = {
    "plain": _PLAIN,
    # The generation prompt opens the thinking: a sampled turn holds only `</think>`.
    "thinking": _THINKING.replace("PREFILL", "{{ '<think>\\n' }}"),
    # The model opens its thinking itself; `enable_thinking=False` pre-fills an empty block.
    "hybrid": _THINKING.replace(
        "PREFILL",
        "{%- if enable_thinking is defined and not enable_thinking -%}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}",
    ),
}

# What the few merges are learned from: enough that common text is not one token a byte.
_CORPUS = [
    "system user assistant tutor student",
    "What do you know about the problem? Let us look at the first step together.",
    "I think the answer is 12, because 3 times 4 is 12. The final answer is \\boxed{12}.",
    "Sara has 5 apples and buys 7 more. How many apples does she have now?",
    "That is right. Can you explain how you found it? Please try again, and show your work.",
]


def tiny_tokenizer(template: Template = "plain", vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template; the same call gives the same ids on every machine.

    `<|pad|>`, `<|im_start|>` and `<|im_end|>` (the end of sequence) are special; `<think>` and `</think>` are single
    tokens but, as in real reasoning models, not special (decoding keeps them).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, TURN_START, TURN_END],
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS * 2, trainer)
    backend.add_tokens(
        [AddedToken(text, normalized=False, special=False) for text in (THINK_START, THINK_END)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=TURN_START,
        eos_token=TURN_END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = _TEMPLATES[template]
    return tokenizer


def make_tiny_model(
    folder: str | Path, template: Template = "plain", seed: int = 0, tied: bool = True, **config: Any
) -> Path:
    """Write a random fp32 Llama (2 layers, hidden size 64) and its tokenizer to `folder`, and return the folder.

    `config` overrides fields of `LlamaConfig`. The global random state is left as it was.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(template)
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        # Five times the usual scale: near-uniform next-token distributions would hide errors in log-probs.
        "initializer_range": 0.1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(fields | config)))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = Path(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

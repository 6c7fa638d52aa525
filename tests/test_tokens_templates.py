"""Growth over the shapes of real templates, with and without thinking: prefix or segment, masks, round trips, BOS, pad = eos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from maieutic.dialogue import Message
from maieutic.engines.base import Sample
from maieutic.errors import TemplateError
from maieutic.tokens import Renderer, TokenSequence
from maieutic.training.packing import make_micro_batches, make_rows
from maieutic.training.trajectory import Segment, Trajectory
from test_tokens import FAMILIES, family

# Trims every content; re-wraps the thinking of turns after the last question, drops it before that; the generation prompt opens
# the thinking or pre-fills an empty block. Large and small models differ in which of the two is the default.
_QWEN35 = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for m in messages %}{%- set text = m.content | trim %}{%- set think = '' %}"
    "{%- if m.role == 'assistant' and '</think>' in text %}{%- set think = text.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{%- set text = text.split('</think>')[-1] | trim %}{%- endif %}"
    "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{- '<think>\n' + think + '\n</think>\n\n' + text }}{%- else %}{{- text }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}TAIL{%- endif %}"
)
_OPEN, _CLOSED = "{{- '<think>\n' }}", "{{- '<think>\n\n</think>\n\n' }}"
QWEN35 = _QWEN35.replace(
    "TAIL",
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    + _CLOSED
    + "{%- else %}"
    + _OPEN
    + "{%- endif %}",
)
QWEN35_SMALL = _QWEN35.replace(
    "TAIL",
    "{%- if enable_thinking is defined and enable_thinking is true %}"
    + _OPEN
    + "{%- else %}"
    + _CLOSED
    + "{%- endif %}",
)


@dataclass(frozen=True)
class Case:
    template: str
    thinking: bool | None
    mode: Literal["open", "closed", "none"]
    bos: bool = False
    system: bool = True


CASES = {
    "smollm2": Case(FAMILIES["smollm2"], None, "none"),
    "llama3": Case(FAMILIES["llama3"], None, "none", bos=True),
    "qwen2.5": Case(FAMILIES["qwen2.5"], None, "none"),
    "qwen3": Case(FAMILIES["qwen3"], None, "none"),
    "qwen3-thinking": Case(FAMILIES["qwen3"], True, "none"),
    "qwen3-off": Case(FAMILIES["qwen3"], False, "closed"),
    "qwen3.5": Case(QWEN35, None, "open"),
    "qwen3.5-thinking": Case(QWEN35, True, "open"),
    "qwen3.5-off": Case(QWEN35, False, "closed"),
    "qwen3.5-small": Case(QWEN35_SMALL, None, "closed"),
    "qwen3.5-small-thinking": Case(QWEN35_SMALL, True, "open"),
    "gemma": Case(FAMILIES["gemma"], None, "none", bos=True, system=False),
}
cases = pytest.mark.parametrize("name", CASES)
histories = pytest.mark.parametrize("history", ["keep", "strip"])


def tokenizer(name: str) -> Any:
    """As the real ones come: a post-processor that puts BOS in front, and pad = end of sequence."""
    made = family("smollm2")
    made.chat_template = CASES[name].template
    bos = made.bos_token
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, made.bos_token_id)]
    )
    made.pad_token = made.eos_token
    return made


RENDERERS = {name: Renderer(tokenizer(name), thinking=case.thinking) for name, case in CASES.items()}


def sampled(name: str, thinking: str, visible: str, stop: bool) -> Sample:
    """A turn as the model writes it after this generation prompt."""
    renderer, mode = RENDERERS[name], CASES[name].mode
    thinks = CASES[name].thinking is not False and "qwen3" in name and "small" not in name
    thinks = thinks or name == "qwen3.5-small-thinking"
    text = visible
    if thinks:
        text = ("" if mode == "open" else "<think>\n") + f"{thinking}\n</think>\n\n{visible}"
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    ids += [renderer.end_of_turn] if stop else []
    return Sample(ids, [-1.0] * len(ids), "stop" if stop else "length")


words = st.text(alphabet="abc 12.\n", min_size=1, max_size=12).filter(lambda t: t.strip())
talk = st.lists(st.tuples(words, words, words, st.booleans()), min_size=1, max_size=4)


def grow(name: str, history: Any, turns: list[tuple[str, str, str, bool]]) -> tuple[TokenSequence, Any]:
    """A dialogue played to its end, and what was seen at each turn: (prompt ids, sample, visible, messages)."""
    renderer = RENDERERS[name]
    messages = [Message("system", "Teach."), Message("user", "What is 3 + 4?")]
    sequence = TokenSequence(renderer, messages, history)
    seen = []
    for thinking, visible, reply, stop in turns:
        prompt = list(sequence.ids)
        one = sampled(name, thinking, visible, stop)
        split = renderer.split(one.ids)
        assert (
            split.visible == visible.strip()
        )  # what the student reads is what was said, without the thinking
        seen.append((prompt, one, split.visible, list(messages)))
        sequence.add_sampled(one, split.visible)
        assert sequence.next_ids(reply) == (sequence.add_reply(reply), sequence.ids)[1]
        messages += [Message("assistant", split.visible), Message("user", reply)]
    return sequence, seen


@cases
def test_what_the_generation_prompt_pre_fills(name: str) -> None:
    assert RENDERERS[name].mode == CASES[name].mode
    assert RENDERERS[name].append_problem is None


def test_thinking_that_the_template_contradicts_is_refused() -> None:
    with pytest.raises(TemplateError, match="thinking: True"):
        Renderer(tokenizer("qwen3.5-off"), thinking=True, chat_template=_QWEN35.replace("TAIL", _CLOSED))
    with pytest.raises(TemplateError, match="thinking: False"):
        Renderer(tokenizer("qwen3.5"), thinking=False, chat_template=_QWEN35.replace("TAIL", _OPEN))


@cases
@settings(max_examples=25, deadline=None)
@given(turns=talk)
def test_keep_is_one_growing_prefix(name: str, turns: list[tuple[str, str, str, bool]]) -> None:
    sequence, seen = grow(name, "keep", turns)
    (segment,) = sequence.segments
    for prompt, one, _, _ in seen:
        assert segment.ids[: len(prompt) + len(one.ids)] == prompt + one.ids
    # the first prompt is the template's own
    assert seen[0][0] == RENDERERS[name].prompt(seen[0][3])


@cases
@settings(max_examples=25, deadline=None)
@given(turns=talk)
def test_strip_is_a_segment_a_turn_rendered_from_what_was_visible(
    name: str, turns: list[tuple[str, str, str, bool]]
) -> None:
    sequence, seen = grow(name, "strip", turns)
    renderer = RENDERERS[name]
    assert len(sequence.segments) == len(seen) + 1  # the last reply opened one that nothing was sampled in
    for segment, (prompt, one, _, messages) in zip(sequence.segments[:-1], seen, strict=True):
        assert segment.ids == prompt + one.ids and prompt == renderer.prompt(messages)
        # round trip: the prompt's text is what the template prints, up to what it refuses (Gemma's system turn)
        chat = [{"role": m.role, "content": m.content} for m in messages]
        if not CASES[name].system:
            first = "\n\n".join(m["content"] for m in chat[:2])
            chat = [{"role": "user", "content": first}, *chat[2:]]
        options = {"add_generation_prompt": True, **renderer._options}
        text = renderer.tokenizer.apply_chat_template(chat, tokenize=False, **options)
        assert renderer.tokenizer.backend_tokenizer.decode(prompt, skip_special_tokens=False) == text


@cases
@histories
@settings(max_examples=25, deadline=None)
@given(turns=talk)
def test_the_mask_is_what_was_sampled_though_pad_is_eos(
    name: str, history: Any, turns: list[tuple[str, str, str, bool]]
) -> None:
    sequence, seen = grow(name, history, turns)
    renderer = RENDERERS[name]
    assert renderer.tokenizer.pad_token_id == renderer.tokenizer.eos_token_id
    every = [i for _, one, _, _ in seen for i in one.ids]
    marked = [i for s in sequence.segments for i, m in zip(s.ids, s.mask, strict=True) if m]
    assert marked == every and sequence.n_sampled == len(every)
    # … down to the batches that are trained on, in rows of different lengths
    segments = [Segment(s.ids, s.mask, s.logprobs, 0) for s in sequence.segments if any(s.mask)]
    short = Segment([1, 2], [False, True], [0.0, -1.0], 0)
    trajectories = [
        Trajectory("e", "g", segments, 1.0, 1.0),
        Trajectory("f", "g", [short], 0.0, 1.0),
    ]
    rows = make_rows(trajectories, [1.0, -1.0])
    for layout in ("packed", "padded"):
        (batches,) = make_micro_batches(rows, 4096, layout, 1)  # type: ignore[arg-type]
        targets = np.concatenate([b.targets_T.numpy() for b in batches])
        assert sorted(targets.tolist()) == sorted([*every, 2])


@cases
@histories
def test_no_double_bos(name: str, history: Any) -> None:
    sequence, _ = grow(name, history, [("plan", "Go on.", "ok", True), ("plan", "Well done.", "bye", False)])
    bos = RENDERERS[name].tokenizer.bos_token_id
    for segment in sequence.segments:
        found = [i for i, token in enumerate(segment.ids) if token == bos]
        assert found == ([0] if CASES[name].bos else [])


@pytest.mark.parametrize("name", ["qwen3-thinking", "qwen3.5-thinking", "qwen3.5-small-thinking"])
def test_earlier_thinking_is_kept_or_gone_as_the_recipe_says(name: str) -> None:
    turns = [("secret", "Go on.", "ok", True), ("other", "Right.", "bye", True)]
    text = RENDERERS[name].tokenizer.decode
    kept, _ = grow(name, "keep", turns)
    stripped, seen = grow(name, "strip", turns)
    assert "secret" in text(kept.ids) and "other" in text(kept.ids)
    assert "secret" not in text(seen[1][0]) and "Go on." in text(seen[1][0])
    assert "secret" in text(stripped.segments[0].ids)  # where it was sampled it is trained on


@pytest.mark.parametrize("name", ["qwen3-off", "qwen3.5-off", "qwen3.5-small"])
def test_the_empty_block_stands_before_every_sampled_turn(name: str) -> None:
    """Real templates drop it from history; a growing sequence keeps it, because the turn was sampled behind it."""
    turns = [("", "Go on.", "ok", True), ("", "Right.", "bye", True)]
    decode = RENDERERS[name].tokenizer.decode
    kept, _ = grow(name, "keep", turns)
    assert decode(kept.ids).count("<think>\n\n</think>\n\n") == 3
    stripped, _ = grow(name, "strip", turns)
    for segment in stripped.segments:
        assert decode(segment.ids).count("<think>") == 1

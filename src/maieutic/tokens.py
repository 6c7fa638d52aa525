"""From messages to token ids and back: token in, token out.

Three rules hold everywhere. *Content is untrusted*: a control-token string inside a message is tokenised as plain text, and
no content can steer the chat template. *Sequences only grow*: what was sampled stays as it was sampled, and a reply is added
through the template's own suffix. *The loss mask is born with the ids*: a token is trained on if and only if it was sampled.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from maieutic.dialogue import Message
from maieutic.engines.base import Sample
from maieutic.errors import ModelError, TemplateError
from maieutic.shared_ids import shared
from maieutic.thinking import THINK_TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LEADING_USER = "Hello."
"""Stands before a conversation that an assistant turn opens, for templates that insist on a user turn first."""
# Some templates print today's date; prompts must be the same tomorrow. (Llama 3.1's own default.)
_DATE = "26 Jul 2024"

ThinkingMode = Literal["open", "closed", "none"]
"""What the generation prompt pre-fills: an open thinking tag, an empty closed block, or nothing."""
_Strip = Literal["keep", "newlines", "all"]


class PlainEncoder:
    """A tokenizer that knows text only: no string whatsoever encodes to a control token.

    Control tokens are all added tokens (special or not, such as ``<think>``) except white space and the unknown token.
    """

    # Encoded before a run that does not begin the sequence: some tokenizers put a space mark before a first word only.
    _MID = "\ue0f0mid\ue0f0"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        from tokenizers import AddedToken, Tokenizer

        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"tokenizer {tokenizer.name_or_path!r} is not a fast one (no tokenizer.json): not supported"
            )
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        unknown = tokenizer.unk_token
        self.control: dict[str, int] = {}
        self.flags: dict[int, tuple[bool, bool]] = {}
        kept = []
        for token in spec["added_tokens"]:
            text = token["content"]
            if text == unknown or not (token["special"] or text.replace("▁", "").strip()):
                kept.append(token)
                continue
            self.control[text] = token["id"]
            self.flags[token["id"]] = (token["lstrip"], token["rstrip"])
        spec["added_tokens"] = kept
        spec["truncation"] = spec["padding"] = None
        _hide(spec["model"], set(self.control))
        self._backend = Tokenizer.from_str(json.dumps(spec))
        self._backend.add_tokens([AddedToken(self._MID, normalized=False, special=True)])
        self._pattern = re.compile(
            "|".join(re.escape(t) for t in sorted(self.control, key=len, reverse=True)) or r"(?!)"
        )
        # Every text of a dialogue comes again with every later prompt: room for those of a thousand dialogues at once.
        self.encode = functools.lru_cache(maxsize=32_768)(self._encode)
        self.parse = functools.lru_cache(maxsize=1024)(self._parse)
        control = set(self.control.values())
        for text in self.control:
            for probe in (text, f"a {text} b", f"a{text}b"):
                if not control.isdisjoint(self._encode(probe, False)):
                    raise ModelError(
                        f"tokenizer {tokenizer.name_or_path!r}: the text {text!r} encodes to a control token even as plain "
                        "text, so untrusted content could forge turns"
                    )

    def _encode(self, text: str, first: bool) -> tuple[int, ...]:
        if not text:
            return ()
        if self._MID in text:
            cut = text.index(self._MID) + 1
            return self._encode(text[:cut], first) + self._encode(text[cut:], False)
        if first:
            return tuple(shared(self._backend.encode(text, add_special_tokens=False).ids))
        return tuple(shared(self._backend.encode(self._MID + text, add_special_tokens=False).ids[1:]))

    def _parse(self, text: str) -> tuple[int | str, ...]:
        """*Trusted* text cut into control-token ids and the plain text between them."""
        out: list[int | str] = []
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                out.append(text[end : match.start()])
            out.append(self.control[match.group()])
            end = match.end()
        if end < len(text):
            out.append(text[end:])
        return tuple(out)

    def join(self, parts: Iterable[int | str], *, first: bool, after: int | None = None) -> list[int]:
        """Ids of control-token ids and plain text; neighbouring texts are tokenised as one run, as in the whole string.

        ``first``: the parts begin the sequence. ``after``: the token that they follow, which may swallow white space.
        """
        ids: list[int] = []
        run, left = "", after in self.flags and self.flags[after][1]
        for part in parts:
            if isinstance(part, str):
                run += part
                continue
            lstrip, rstrip = self.flags[part]
            run = run.lstrip() if left else run
            ids += self.encode(run.rstrip() if lstrip else run, first and not ids)
            ids.append(part)
            run, left = "", rstrip
        return [*ids, *self.encode(run.lstrip() if left else run, first and not ids)]


def _hide(model: dict[str, Any], texts: set[str]) -> None:
    """Rename vocabulary entries that read like control tokens, so that no text matches them (ids stay)."""

    def hidden(text: str) -> str:
        return f"\ue0f1{text}\ue0f1"

    vocab = model["vocab"]
    if isinstance(vocab, dict):
        # A BPE entry that merges produce cannot be renamed; the probe in PlainEncoder says so if it can be reached.
        merged = {"".join(m) if isinstance(m, list) else m.replace(" ", "") for m in model.get("merges", [])}
        for text in texts & vocab.keys() - merged:
            vocab[hidden(text)] = vocab.pop(text)
    else:
        model["vocab"] = [[hidden(e[0]), e[1]] if e[0] in texts else e for e in vocab]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a template prints around the contents of a sequence of roles: ``texts[i]`` stands before content i."""

    texts: tuple[str, ...]
    strips: tuple[tuple[_Strip, _Strip], ...]
    filled: tuple[bool, ...]
    """False: the message is empty and the template has its say about that."""


@dataclass(frozen=True, slots=True)
class Split:
    """A sampled turn, cut by the template's own rule into thinking and what others may read."""

    thinking: str
    visible: str
    thinking_tokens: int
    """Tags included."""
    visible_tokens: int
    """The stop token not counted."""
    well_formed: bool
    """Thinking, if any, was opened and closed once, and something visible follows."""


class Renderer:
    """A tokenizer with its chat template.

    ``thinking`` is passed to the template as ``enable_thinking`` (None: not passed); ``chat_template`` replaces the
    tokenizer's own. A template that refuses or drops a system message gets it merged into the first user turn; one that
    refuses an opening assistant turn gets :data:`LEADING_USER` (or the system text) before it; one that refuses two user
    turns in a row (a hidden tutor turn, then the question of the post-test) gets them as one; whatever still does not render
    in full is a :class:`~maieutic.errors.TemplateError`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        thinking: bool | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._template = chat_template or tokenizer.chat_template
        self._name = tokenizer.name_or_path or type(tokenizer).__name__
        if not isinstance(self._template, str):
            raise TemplateError(f"{self._name} has no chat template: give one with chat_template")
        self._options: dict[str, Any] = {"date_string": _DATE}
        if thinking is not None:
            self._options["enable_thinking"] = thinking
        self._plain = PlainEncoder(tokenizer)
        self._layouts: dict[tuple[tuple[str, bool], ...], tuple[int, _Layout]] = {}
        self._special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.append_problem: str | None = None
        """Why dialogues cannot grow append-only with this template (None: they can)."""
        self._bridge, self._user_strip, self._tail = self._suffix()
        bridge = self._plain.parse(self._bridge)
        self.end_of_turn: int | None = next((p for p in bridge if isinstance(p, int)), None)
        """The control token that the template puts after an assistant turn."""
        ends = {i for i in (self.end_of_turn, tokenizer.eos_token_id) if i is not None}
        self.stop_ids: tuple[int, ...] = tuple(sorted(ends))
        """Tokens that end a sampled turn."""
        self.open_tag, self.close_tag = next((t for t in THINK_TAGS if t[0] in self._template), THINK_TAGS[0])
        self.mode: ThinkingMode = self._thinking_mode()
        if thinking is not None and self.mode == ("open", "closed")[thinking]:
            raise TemplateError(
                f"thinking: {thinking}, but the chat template of {self._name} pre-fills the opposite"
            )
        self._check()

    # ---- prompts

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation and the generation prompt; contents as plain text, stripped where the template strips."""
        variant, layout = self._layout(messages)
        # Most templates take the conversation as it is, which is variant 0.
        said = _variants(messages)[variant] if variant else messages
        return self._fill(layout, [m.content for m in said])

    def _fill(self, layout: _Layout, contents: Sequence[str]) -> list[int]:
        parts: list[int | str] = list(self._plain.parse(layout.texts[0]))
        slots = [c for c, filled in zip(contents, layout.filled, strict=True) if filled]
        for content, strip, text in zip(slots, layout.strips, layout.texts[1:], strict=True):
            parts.append(_stripped(content, strip))
            parts += self._plain.parse(text)
        return self._plain.join(parts, first=True)

    def _layout(self, messages: Sequence[Message]) -> tuple[int, _Layout]:
        """Which variant renders in full, and how. The template never sees a content, so this depends on the roles only."""
        key = tuple((m.role, bool(m.content)) for m in messages)
        if key not in self._layouts:
            reasons = []
            for number, variant in enumerate(_variants(messages)):
                layout = self._probe(variant)
                if isinstance(layout, _Layout):
                    self._layouts[key] = (number, layout)
                    break
                reasons.append(layout)
            else:
                roles = [m.role for m in messages]
                raise TemplateError(
                    f"the chat template of {self._name} cannot render {roles}: {'; '.join(reasons)}"
                )
        return self._layouts[key]

    def _probe(self, messages: Sequence[Message]) -> _Layout | str:
        """Render placeholders instead of contents; the reason as text where the template does not print them all."""
        filled = tuple(bool(m.content) for m in messages)
        pads = ("\n \n", "\n \n")
        bare = self._pieces(messages, ("", ""))
        padded = self._pieces(messages, pads)
        if isinstance(bare, str) or isinstance(padded, str):
            return bare if isinstance(bare, str) else str(padded)
        lefts: dict[str, _Strip] = {"\n \n": "keep", " \n": "newlines", "": "all"}
        rights: dict[str, _Strip] = {"\n \n": "keep", "\n ": "newlines", "": "all"}
        strips: list[tuple[_Strip, _Strip]] = []
        before: list[_Strip] = []
        last = len(bare) - 1
        for i, (text, with_pads) in enumerate(zip(bare, padded, strict=True)):
            for right in rights if i else [""]:
                left = next((p for p in (lefts if i < last else [""]) if with_pads == right + text + p), None)
                if left is not None:
                    break
            else:
                return "it rewrites message contents"
            if i:
                strips.append((before[-1], rights[right]))
            before.append(lefts[left])
        return _Layout(tuple(bare), tuple(strips), filled)

    def _pieces(self, messages: Sequence[Message], pads: tuple[str, str]) -> list[str] | str:
        marks = [f"maieutic{i:03d}slot" for i in range(len(messages))]
        chat = [
            {"role": m.role, "content": pads[0] + mark + pads[1] if m.content else ""}
            for m, mark in zip(messages, marks, strict=True)
        ]
        text = self._render(chat)
        if isinstance(text, Exception):
            return str(text)
        pieces = re.split("|".join(marks), text)
        wanted = [mark for m, mark in zip(messages, marks, strict=True) if m.content]
        found = re.findall("|".join(marks), text)
        if found != wanted:
            return f"it drops, repeats or reorders messages (printed {len(found)} of {len(wanted)})"
        return pieces

    def _render(self, chat: list[dict[str, str]]) -> str | Exception:
        import jinja2

        try:
            text = self.tokenizer.apply_chat_template(
                chat,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except (jinja2.TemplateError, TypeError) as error:  # templates refuse roles by raising
            return error
        return str(text)

    # ---- growing

    def _suffix(self) -> tuple[str, tuple[_Strip, _Strip], str]:
        """What stands between an assistant turn and the next user turn, and after that; checks that it is always the same."""
        user, assistant = Message("user", "u"), Message("assistant", "a")
        chats = {n: self._layout([user, *[assistant, user] * n])[1] for n in (0, 1, 2)}
        one, two = chats[1], chats[2]
        bridge, tail, strip = one.texts[2], one.texts[-1], one.strips[-1]
        if not (bridge == two.texts[2] == two.texts[4] and strip == two.strips[2] == two.strips[4]):
            self.append_problem = "what follows an assistant turn depends on the turns before it"
        elif len({c.texts[-1] for c in chats.values()}) > 1:
            self.append_problem = "the generation prompt depends on the number of turns"
        elif len({c.texts[0] for c in chats.values()}) > 1:
            self.append_problem = "the beginning of the prompt changes as the dialogue grows"
        else:
            system = Message("system", "s")
            grown = [self._layout([system, user, *[assistant, user] * n])[1] for n in (0, 1, 2)]
            heads = {c.texts[: len(c.filled) - 2 * n] for n, c in enumerate(grown)}
            if len(heads) > 1 or any(c.texts[-1] != tail for c in grown) or grown[1].texts[-2] != bridge:
                self.append_problem = "the place of the system message changes as the dialogue grows"
        return bridge, strip, tail

    def require_append_only(self) -> None:
        """Raise TemplateError unless dialogues can grow append-only with this template."""
        if self.append_problem:
            raise TemplateError(
                f"the chat template of {self._name} cannot be rendered append-only: {self.append_problem}; use "
                "thinking_history: strip (one segment a turn), or another chat_template"
            )

    def reply_ids(self, last_id: int, text: str) -> list[int]:
        """Ids between a sampled turn, whose last token is ``last_id``, and the next sampled token: end of turn unless the
        turn already ends with it, the user's header, ``text``, the next generation prompt."""
        bridge = self._plain.parse(self._bridge)
        if last_id == self.end_of_turn:
            bridge = bridge[bridge.index(last_id) + 1 :]
        parts = [*bridge, _stripped(text, self._user_strip), *self._plain.parse(self._tail)]
        return self._plain.join(parts, first=False, after=last_id)

    # ---- thinking

    def _thinking_mode(self) -> ThinkingMode:
        opened, closed = self._tail.rfind(self.open_tag), self._tail.rfind(self.close_tag)
        if opened < 0:
            return "none"
        return "closed" if closed > opened else "open"

    def decode(self, ids: Sequence[int], keep: Iterable[str] = ()) -> str:
        """Text without special tokens, except the thinking tags and those named in ``keep``."""
        kept = {self._plain.control.get(t) for t in (self.open_tag, self.close_tag, *keep)}
        dropped = self._special - kept
        text = self.tokenizer.backend_tokenizer.decode(
            [i for i in ids if i not in dropped], skip_special_tokens=False
        )
        return str(text)

    def split(self, ids: Sequence[int], keep: Iterable[str] = ()) -> Split:
        """Cut a sampled turn. The template decides: where it pre-fills an open tag, everything up to the first closing tag is
        thinking (everything, if there is none); elsewhere only a turn that begins with an opening tag thinks."""
        keep = tuple(keep)
        body = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        text = self.decode(body, keep)
        opens, closes = text.count(self.open_tag), text.count(self.close_tag)
        starts = text.lstrip().startswith(self.open_tag)
        if self.mode != "open" and not starts:
            visible = text.strip()
            return Split("", visible, 0, len(body), bool(visible) and opens == closes == 0)
        begin = text.index(self.open_tag) + len(self.open_tag) if starts else 0
        end = text.find(self.close_tag, begin)
        if end < 0:
            return Split(text[begin:].strip(), "", len(body), 0, False)
        visible = text[end + len(self.close_tag) :].strip()
        cut = self._tokens_up_to(body, end + len(self.close_tag), keep)
        once = opens + (self.mode == "open") == 1 and closes == 1
        return Split(text[begin:end].strip(), visible, cut, len(body) - cut, once and bool(visible))

    def _tokens_up_to(self, ids: list[int], chars: int, keep: tuple[str, ...]) -> int:
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.decode(ids[:middle], keep)) >= chars:
                high = middle
            else:
                low = middle + 1
        return low

    # ---- start-up check

    def _check(self) -> None:
        """Our ids must be those of the tokenizer's own rendering of harmless messages."""
        messages = [
            Message("user", "What is 3 + 4?"),
            Message("assistant", "I say 8."),
            Message("user", "Look again."),
        ]
        variant, _ = self._layout(messages)
        chat = [{"role": m.role, "content": m.content} for m in _variants(messages)[variant]]
        text = self._render(chat)
        own = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if self.prompt(messages) != list(own):
            raise TemplateError(
                f"{self._name}: tokenising the chat template piece by piece differs from tokenising it whole; "
                "its control tokens have to be declared as added tokens"
            )


def _variants(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation as it is, and what stands for it where a template refuses it."""
    out = [list(messages)]
    system = messages[0] if messages and messages[0].role == "system" else None
    rest = list(messages[1:] if system else messages)
    if rest and rest[0].role == "assistant":
        out.append([*([system] if system else []), Message("user", LEADING_USER), *rest])
        if system:
            out.append([Message("user", system.content), *rest])
    elif rest and system:
        joined = "\n\n".join(t for t in (system.content, rest[0].content) if t)
        out.append([Message("user", joined), *rest[1:]])
    return out + [merged for variant in out if len(merged := _alternating(variant)) < len(variant)]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring user messages as one."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1].role == message.role == "user":
            texts = (out[-1].content, message.content)
            out[-1] = Message("user", "\n\n".join(t for t in texts if t))
        else:
            out.append(message)
    return out


def _stripped(text: str, strip: tuple[_Strip, _Strip]) -> str:
    for side, how in zip((str.lstrip, str.rstrip), strip, strict=True):
        if how != "keep":
            text = side(text, "\n" if how == "newlines" else None)
    return text


@dataclass(slots=True)
class TokenSegment:
    """An append-only run of tokens. ``versions[i]``: policy version that sampled token i, −1 where it was not sampled."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def given(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sampled(self, sample: Sample) -> None:
        """Append what the engine sampled, exactly as it reported it."""
        self.ids += sample.ids
        self.mask += [True] * len(sample.ids)
        self.logprobs += sample.logprobs
        self.versions += [sample.policy_version] * len(sample.ids)


class TokenSequence:
    """The tutor's side of a dialogue in tokens.

    ``thinking_history``: ``keep`` grows one segment for ever; ``strip`` begins a segment at each turn, rendered from the
    visible history (for templates that cannot be appended to, and for policies trained without earlier thinking).
    """

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        thinking_history: Literal["keep", "strip"] = "keep",
    ) -> None:
        if thinking_history == "keep":
            renderer.require_append_only()
        self._renderer = renderer
        self._strip = thinking_history == "strip"
        self._messages = list(messages)
        self._asked: tuple[str, list[int]] | None = None
        """The last ``next_ids``, which ``add_reply`` is about to want again."""
        self.segments: list[TokenSegment] = []
        self.n_sampled = 0
        """Tokens that engines reported to have sampled, counted independently of the masks."""
        self._start(renderer.prompt(messages))
        self.prompt_tokens = len(self.ids)
        """Tokens that count as prompt and not as conversation."""

    def _start(self, prompt_ids: Sequence[int]) -> None:
        self.segments.append(TokenSegment())
        self.segments[-1].given(prompt_ids)

    @property
    def ids(self) -> list[int]:
        """All tokens of the current segment: the engine's next prompt, once a reply is in."""
        return self.segments[-1].ids

    def next_ids(self, user_text: str) -> list[int]:
        """What ``ids`` will be after ``add_reply(user_text)``; changes nothing."""
        if self._strip:
            ids = self._renderer.prompt([*self._messages, Message("user", user_text)])
        else:
            ids = self.ids + self._renderer.reply_ids(self.ids[-1], user_text)
        self._asked = (user_text, ids)
        return ids

    def add_sampled(self, sample: Sample, visible: str = "") -> None:
        """Append a sampled turn. ``visible``: its visible part, which is all that later segments of ``strip`` keep."""
        self._asked = None
        self.segments[-1].sampled(sample)
        self.n_sampled += len(sample.ids)
        self._messages.append(Message("assistant", visible))

    def add_reply(self, user_text: str) -> None:
        """Append the other side's reply and the next generation prompt (a synthesised end of turn is not trained on)."""
        asked = self._asked
        ids = asked[1] if asked is not None and asked[0] == user_text else self.next_ids(user_text)
        self._asked = None
        self._messages.append(Message("user", user_text))
        if self._strip:
            self._start(ids)
        else:
            self.segments[-1].given(ids[len(self.ids) :])

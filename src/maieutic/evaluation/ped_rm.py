"""Reward-model scores of tutor turns: a sequence-classification model, batched by length, equal to scoring one at a time.

The score is the raw logit of a model with one output. Conversations are sorted by length and packed into batches of bounded size.
Rows are padded with the model's own pad id, so that the model finds the last real token of each by itself, exactly as it does for
a single row; where the model names no pad id, an id that occurs in no row is lent to it for the call. The side does not come from
the tokenizer: the first batch is held against single rows, padded right, then left; a model that agrees with neither (its pooling
sees the padding) is scored one row at a time, with a notice.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from maieutic.dialogue import Message
from maieutic.errors import ModelError
from maieutic.evaluation.config import RewardModelSpec
from maieutic.evaluation.conversations import Said

SYSTEM = (
    "You grade one reply of a teacher in a conversation about a math problem. High: it moves the student on by a well-chosen "
    "question, nudge or hint, is correct, and says clearly what to do next. Low: it gives the solution away, is wrong or vague."
)
"""System text above a conversation where the recipe gives none. A published reward model expects the text it was trained with: give
it as ``reward_model.system`` to reproduce published scores."""


def reward_messages(
    problem: str,
    solution: str,
    before: Sequence[Said],
    reply: str,
    *,
    system: str,
    show_solution: bool = True,
) -> list[Message]:
    """A conversation as the reward model reads it: system, problem (with solution), dialogue so far, the reply that is scored."""
    first = f"Problem: {problem}"
    if show_solution:
        first += f"\nReference Solution: {solution}"
    out = [Message("system", system), Message("user", first)]
    out += [Message("assistant" if s.speaker == "tutor" else "user", s.text) for s in before]
    return [*out, Message("assistant", reply)]


log = logging.getLogger(__name__)
Side = Literal["right", "left", "single"]
_TOLERANCE = {torch.float32: 1e-4}
"""Most relative difference between a batch and its single rows; 0.05 in 16 bits."""


@dataclass(frozen=True, slots=True)
class _Batch:
    rows: list[int]
    width: int


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[_Batch]:
    """Indices sorted by length (longest first, so that memory runs out at once or never), each batch of ≤ ``batch_tokens`` cells.

    A row longer than that is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    at = 0
    while at < len(order):
        width = lengths[order[at]]
        take = max(1, batch_tokens // max(1, width))
        yield _Batch(order[at : at + take], width)
        at += take


class RewardModel:
    """Scores conversations with a loaded sequence-classification model and its tokenizer.

    Args:
        max_tokens: longest conversation; None: what the model's configuration says, if it does.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_tokens: int = 16_384,
        max_tokens: int | None = None,
        system: str = SYSTEM,
        show_solution: bool = True,
    ) -> None:
        if model.config.num_labels != 1:
            raise ModelError(
                f"a reward model has one output, {type(model).__name__} has {model.config.num_labels}"
            )
        self._model, self._tokenizer = model.eval(), tokenizer
        self._batch_tokens = batch_tokens
        self.side: Side | None = None
        """Where rows are padded: found on the first batch of unequal rows."""
        self._limit = max_tokens or getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.system, self.show_solution = system, show_solution

    def ids(self, conversation: Sequence[Message]) -> list[int]:
        """Token ids of one conversation under the model's chat template; without a template, its texts line by line."""
        if self._tokenizer.chat_template:
            messages = [{"role": m.role, "content": m.content} for m in conversation]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer("\n".join(m.content for m in conversation))["input_ids"]
        if self._limit is not None and len(ids) > self._limit:
            raise ModelError(
                f"a conversation has {len(ids)} tokens, the reward model takes {self._limit}: it is not cut"
            )
        return list(ids)

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """The logit of each conversation, in the order given."""
        return self.score_ids([self.ids(c) for c in conversations])

    def score_ids(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The logit of each row of token ids. Raises :class:`ModelError` for one that is no finite number."""
        scores = self._score_ids(rows)
        if bad := sum(not math.isfinite(s) for s in scores):
            raise ModelError(
                f"the reward model gave no finite number for {bad} of {len(scores)} conversations: a comparison with nan "
                "would count as lost; try reward_model.dtype: float32"
            )
        return scores

    def _score_ids(self, rows: Sequence[Sequence[int]]) -> list[float]:
        if self.side is None and len({len(r) for r in rows}) > 1:
            self.side = self._find_side(rows)
        if self.side == "single":
            return [self.score_one(r) for r in rows]
        out = [0.0] * len(rows)
        for batch in batches([len(r) for r in rows], self._batch_tokens):
            scores = self._forward([rows[i] for i in batch.rows], batch.width, self.side or "right")
            for i, value in zip(batch.rows, scores, strict=True):
                out[i] = value
        return out

    def _find_side(self, rows: Sequence[Sequence[int]]) -> Side:
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
        probe = [rows[i] for i in dict.fromkeys([order[0], order[len(order) // 2], order[-1]])]
        single = [self.score_one(r) for r in probe]
        allowed = _TOLERANCE.get(next(self._model.parameters()).dtype, 0.05)
        sides: tuple[Side, ...] = ("right", "left")
        for side in sides:
            batched = self._forward(probe, max(len(r) for r in probe), side)
            if all(abs(a - b) <= allowed * max(1.0, abs(a)) for a, b in zip(single, batched, strict=True)):
                return side
        log.warning(
            "%s scores padded rows otherwise than single ones: it is asked one row at a time",
            type(self._model).__name__,
        )
        return "single"

    def score_one(self, row: Sequence[int]) -> float:
        """One row alone, as a plain forward call: what batches are held against."""
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([list(row)], device=self._model.device)).logits
        return float(logits.float()[0, 0])

    def _forward(self, rows: Sequence[Sequence[int]], width: int, side: Side) -> list[float]:
        config, device = self._model.config, self._model.device
        own = config.get_text_config().pad_token_id
        pad = own if own is not None else _unused(rows, config.get_text_config().vocab_size)
        ids = torch.full((len(rows), width), pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            cells = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            ids[i, cells], mask[i, cells] = torch.tensor(list(row)), 1
        given = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        if self._takes_positions and side == "left":
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0).to(device)
        lend = own is None
        try:
            if lend:
                config.get_text_config().pad_token_id = config.pad_token_id = pad
            with torch.inference_mode():
                logits = self._model(**given).logits
        finally:
            if lend:
                config.get_text_config().pad_token_id = config.pad_token_id = None
        return [float(v) for v in logits.float()[:, 0]]


def _unused(rows: Sequence[Sequence[int]], vocabulary: int) -> int:
    """A token id that no row holds, so that padding is never mistaken for text."""
    used = {t for row in rows for t in row}
    for candidate in range(vocabulary):
        if candidate not in used:
            return candidate
    raise ModelError(
        "the reward model names no pad token and every token id occurs in the batch: lower batch_tokens"
    )


def load_reward_model(spec: RewardModelSpec, *, offline: bool = False) -> RewardModel:
    """The reward model of a recipe, on the GPU where there is one. Raises :class:`ModelError` when it cannot be loaded."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from maieutic.config import ModelSpec
    from maieutic.models import resolve_model
    from maieutic.training.policy import model_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = resolve_model(spec.model, offline)
    dtype = model_dtype(ModelSpec(model=spec.model, dtype=spec.dtype), device)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            where, dtype=dtype, revision=spec.revision, num_labels=1, local_files_only=offline
        )
        tokenizer = AutoTokenizer.from_pretrained(where, revision=spec.revision, local_files_only=offline)
    except (OSError, ValueError) as error:
        raise ModelError(f"reward model {spec.model!r} cannot be loaded: {error}") from error
    return RewardModel(
        model.to(device),
        tokenizer,
        batch_tokens=spec.batch_tokens,
        max_tokens=spec.max_tokens,
        system=spec.system if spec.system is not None else SYSTEM,
        show_solution=spec.solution,
    )

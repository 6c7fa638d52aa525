"""The LLM judge: one prompt a gate, V votes, evidence for every rejection (appendix C of the paper, in our words).

``unknown`` is a third verdict: a judge that is dead, late, unreadable or without evidence excludes the episode; it neither
punishes the tutor nor lets it pass (``design`` decision 4).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from maieutic.dialogue import Dialogue, Message, judge_view
from maieutic.engines.base import ChatModel, Completion, Sampling
from maieutic.env.base import Decision, GateName, Verdict
from maieutic.env.judge_reply import Vote, occurs, read_vote
from maieutic.env.prompts import EnvTemplates
from maieutic.errors import EngineError, RunStop
from maieutic.problems.schema import ProblemPair
from maieutic.seeds import derive

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "reasoning": {"type": "string"},
        "verdict": {"type": "string", "enum": ["OK", "REJECT"]},
        "criterion": {"type": "string"},
        "quote": {"type": "string"},
    },
    "required": ["reasoning", "verdict", "criterion", "quote"],
    "additionalProperties": False,
}
"""Structured output, where the endpoint has it. The reasoning comes first: a verdict written first would not be reasoned."""

REPLY_FORMAT = """

Answer with one JSON object and nothing else:
{"reasoning": "a few sentences", "verdict": "OK" or "REJECT", "criterion": "name of the point that holds, empty for OK", \
"quote": "words of the tutor turn exactly as they stand there, empty for OK"}"""
"""Appended to every rubric: the form that :func:`maieutic.env.judge_reply.read_vote` reads."""


class StructuredChat(Protocol):
    """A chat model that may take a JSON schema."""

    async def complete(
        self,
        messages: list[Message],
        sampling: Sampling,
        *,
        seed: int,
        n: int = 1,
        session: str | None = None,
        schema: dict[str, Any] | None = None,
    ) -> list[Completion]: ...


class LlmJudge:
    """Implements :class:`maieutic.env.base.Judge` on a chat model.

    Args:
        votes: V, odd. REJECT needs more than half of V, OK too; anything else is ``unknown``. Voting stops when decided: the
            first ⌈V/2⌉ votes are one request, the rest follow only while the outcome is open.
        reasks: how often a vote that could not be read is asked again with another seed.
        structured: ask for :data:`SCHEMA` (off for endpoints without it, and for chat models that take no schema).
    """

    def __init__(
        self,
        chat: StructuredChat | ChatModel,
        templates: EnvTemplates,
        sampling: Sampling,
        *,
        votes: int = 3,
        reasks: int = 1,
        structured: bool = True,
    ) -> None:
        if votes < 1 or votes % 2 == 0:
            raise ValueError(f"votes must be odd, not {votes}")
        self._chat: Any = chat
        self._templates, self._sampling = templates, sampling
        self._votes, self._reasks, self._structured = votes, reasks, structured

    async def verdict(self, dialogue: Dialogue, pair: ProblemPair, gate: GateName, *, seed: int) -> Verdict:
        """The majority of the votes, with a quote that stands in a tutor turn where it is ``reject``."""
        prompt = self._templates.rubric(
            gate, problem=pair.source.text, answer=pair.source.answer, transcript=judge_view(dialogue.turns)
        )
        prompt += REPLY_FORMAT
        cast: list[Vote] = []
        need = self._votes // 2 + 1
        while len(cast) < self._votes and (lacking := need - _most(cast)) > 0:
            if _most(cast) + self._votes - len(cast) < need:
                break  # unknown votes have used up the majority
            ask = min(lacking, self._votes - len(cast))
            cast += await self._ask(prompt, dialogue, n=ask, seed=derive(seed, "votes", len(cast)))
        return _count(gate, cast, need, dialogue)

    async def _ask(self, prompt: str, dialogue: Dialogue, *, n: int, seed: int) -> list[Vote]:
        votes = await self._request(prompt, dialogue, n=n, seed=seed)
        for again in range(self._reasks):
            bad = [i for i, v in enumerate(votes) if v.decision == "unknown"]
            if not bad:
                break
            fresh = await self._request(prompt, dialogue, n=len(bad), seed=derive(seed, "reask", again))
            for i, vote in zip(bad, fresh, strict=True):
                votes[i] = vote
        return votes

    async def _request(self, prompt: str, dialogue: Dialogue, *, n: int, seed: int) -> list[Vote]:
        schema = {"schema": SCHEMA} if self._structured else {}
        try:
            replies = await self._chat.complete(
                [Message("user", prompt)], self._sampling, seed=seed, n=n, session=None, **schema
            )
        except RunStop:
            raise
        except (TimeoutError, EngineError) as error:
            return [Vote("unknown", why="judge_failed", reason=str(error))] * n
        return [
            _with_evidence(read_vote(r.text, truncated=r.finish_reason == "length"), dialogue)
            for r in replies
        ]


def _with_evidence(vote: Vote, dialogue: Dialogue) -> Vote:
    if vote.decision != "reject":
        return vote
    if not vote.quote.strip():
        return Vote("unknown", vote.criterion, "", vote.reason, why="no_quote")
    if not any(occurs(vote.quote, t.visible) for t in dialogue.by("tutor")):
        return Vote("unknown", vote.criterion, vote.quote, vote.reason, why="quote_not_found")
    return vote


def _most(cast: list[Vote]) -> int:
    return max(sum(v.decision == d for v in cast) for d in ("ok", "reject"))


def _count(gate: GateName, cast: list[Vote], need: int, dialogue: Dialogue) -> Verdict:
    counts: Counter[Decision] = Counter(v.decision for v in cast)
    votes = {str(k): n for k, n in sorted(counts.items())}
    if counts["reject"] >= need:
        first = next(v for v in cast if v.decision == "reject")
        turn = next(
            n for n, t in dialogue.numbered() if t.speaker == "tutor" and occurs(first.quote, t.visible)
        )
        return Verdict(gate, "reject", first.criterion, first.quote, turn, first.reason, votes)
    if counts["ok"] >= need:
        first = next(v for v in cast if v.decision == "ok")
        return Verdict(gate, "ok", reason=first.reason, votes=votes)
    unread = next((v for v in cast if v.decision == "unknown"), None)
    why = unread.why if unread is not None else "no_majority"
    return Verdict(gate, "unknown", why, reason=unread.reason if unread is not None else "", votes=votes)

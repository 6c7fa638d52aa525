"""A judge, a reward and a grader's check of a user's own, for tests of rescoring."""

from __future__ import annotations

import asyncio

from maieutic.config import RewardSpec
from maieutic.dialogue import Dialogue
from maieutic.env.base import Episode, GateName, RewardBreakdown, Verdict
from maieutic.problems.schema import ProblemPair

asked: list[tuple[str, str]] = []
"""(dialogue, gate) of every question to the judge."""
stop_after: list[int] = []


class WordJudge:
    """Rejects leakage where a tutor turn holds ``word``; unknown where it holds ``unsure``."""

    def __init__(self, word: str, unsure: str = "") -> None:
        self.word, self.unsure = word, unsure

    async def verdict(self, dialogue: Dialogue, pair: ProblemPair, gate: GateName, *, seed: int) -> Verdict:
        await asyncio.sleep(0)
        if stop_after and len(asked) >= stop_after[0]:
            raise asyncio.CancelledError
        asked.append((dialogue.id, gate))
        for number, turn in dialogue.numbered():
            if gate == "leakage" and turn.speaker == "tutor":
                if self.unsure and self.unsure in turn.visible:
                    return Verdict(gate, "unknown", "unsure")
                if self.word in turn.visible:
                    return Verdict(gate, "reject", "word", self.word, number)
        return Verdict(gate, "ok")


def twice(episode: Episode, spec: RewardSpec) -> RewardBreakdown:
    assert episode.post_test is not None
    return RewardBreakdown(2 * episode.post_test.rate, False, pre=0.25, post=episode.post_test.rate, gain=0.0)


def always(answer: str, gold: str) -> bool:
    return True

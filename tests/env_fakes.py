"""Scripted stand-ins for tutor, student, judge, grader and chat model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from maieutic.config import EnvSpec, RewardSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.engines.base import Completion
from maieutic.env.base import Verdict
from maieutic.env.play import Environment
from maieutic.env.prompts import load_env
from maieutic.problems.schema import Problem, ProblemPair, SolveRate, StudentKey

KEY = StudentKey(model="fake", prompt_hash="0" * 12, temperature=0.6, max_tokens=800)


def pair(source_rate=0.5, transfer_rate=0.25, transfer=True) -> ProblemPair:
    rate = {str(KEY): SolveRate(rate=source_rate, n=16)}
    variant = Problem(text="variant", answer="9", rates={str(KEY): SolveRate(rate=transfer_rate, n=16)})
    return ProblemPair(
        id="p1",
        source=Problem(text="source", answer="7", solution="3 + 4 = 7", rates=rate),
        transfer=variant if transfer else None,
    )


def environment(templates=None, reward=None, **env) -> Environment:
    env.setdefault("post_test_samples", 4)
    return Environment(EnvSpec(**env), reward or RewardSpec(), templates or load_env("near_transfer"))


@dataclass
class FakeTutor:
    """Says its lines in order (a Turn, a text, None, or an error to raise), then "Go on."."""

    lines: list = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        self.seeds.append(seed)
        self.log.append("tutor")
        line = self.lines[len(self.seeds) - 1] if len(self.seeds) <= len(self.lines) else "Go on."
        if isinstance(line, BaseException):
            raise line
        return Turn("tutor", line, visible_tokens=10) if isinstance(line, str) else line


@dataclass
class FakeStudent:
    """``answers`` by tested problem text; an error in ``replies`` or ``answers`` is raised."""

    replies: list = field(default_factory=list)
    answers: object = "9"
    name: str = "fake-student"
    key: StudentKey = KEY
    log: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    asked: list = field(default_factory=list)

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn:
        self.log.append("student")
        self.seeds.append(seed)
        line = self.replies[len(self.seeds) - 1] if len(self.seeds) <= len(self.replies) else "Hm."
        if isinstance(line, BaseException):
            raise line
        return Turn("student", line)

    async def attempt(self, problem, *, k, seed, dialogue=None, hide_tutor=True):
        self.log.append(f"test:{problem.text}")
        self.asked.append((problem.text, k, seed, hide_tutor, dialogue))
        if isinstance(self.answers, BaseException):
            raise self.answers
        return list(self.answers) if isinstance(self.answers, list) else [self.answers] * k


@dataclass
class FakeJudge:
    """``decisions`` by gate: a decision, a Verdict, or an error to raise. A rejection quotes the first tutor turn."""

    decisions: dict = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    seeds: dict[str, int] = field(default_factory=dict)
    running: int = 0
    together: int = 0

    async def verdict(self, dialogue, pair, gate, *, seed):
        self.log.append(f"gate:{gate}")
        self.seeds[gate] = seed
        self.running += 1
        self.together = max(self.together, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        said = self.decisions.get(gate, "ok")
        if isinstance(said, BaseException):
            raise said
        if said == "reject":
            return Verdict(gate, "reject", "answer_stated", quote=dialogue.turns[1].visible, turn=1)
        return Verdict(gate, said, criterion="why") if isinstance(said, str) else said


@dataclass
class FakeGrade:
    verdict: str


class FakeGrader:
    """Right iff the text is the gold answer; ``?`` cannot be graded."""

    async def grade_many(self, texts, gold):
        return [FakeGrade("error" if t == "?" else "right" if t == gold else "wrong") for t in texts]


@dataclass
class FakeChat:
    """Replies in order (a text, a Completion or an error), remembering every request."""

    replies: list
    name: str = "fake-model"
    requests: list = field(default_factory=list)

    async def complete(self, messages, sampling, *, seed, n=1, session=None):
        self.requests.append((list(messages), sampling, seed, n, session))
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        texts = reply if isinstance(reply, list) else [reply] * n
        return [t if isinstance(t, Completion) else Completion(t, "stop", len(t)) for t in texts]

    async def close(self):
        pass


def run(coroutine):
    return asyncio.run(coroutine)


def play(env, tutor=None, student=None, judge=None, grader=None, the_pair=None, **kwargs):
    kwargs = {"seed": 1, "id": "e", "group_id": "g", **kwargs}
    return run(
        env.play(
            tutor or FakeTutor(),
            student or FakeStudent(),
            judge or FakeJudge(),
            grader or FakeGrader(),
            the_pair or pair(),
            **kwargs,
        )
    )

"""Loopback role servers: an OpenAI-compatible endpoint whose tutor, student, annotator and judge answer by rule.

They let the whole pipeline run over real HTTP on a laptop, without a model, against a student whose law is known
(:class:`maieutic.latent.world.World`, in words). They are no models of people, and results with them say nothing about tutoring.

The model's name in a request picks the role: ``rule-tutor``, ``rule-student``, ``rule-student-b`` (other probabilities),
``rule-annotator``, ``rule-judge``. Every answer follows from the request and its seed alone.
"""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from maieutic.dialogue import Turn
from maieutic.engines.loopback import LoopbackChat
from maieutic.latent.moves import PAPER_4, RuleLabeller
from maieutic.latent.reading import RuleReader
from maieutic.latent.told import claims_answer
from maieutic.latent.world import MOODS, MOVES, World
from maieutic.seeds import derive

Body = Mapping[str, Any]

STUDENTS: dict[str, World] = {
    "rule-student": World(steps=3, limit=10),
    "rule-student-b": World(steps=3, limit=10, p_right=0.7, p_wrong=0.15, p_tell=0.4),
}
SAYS: dict[str, tuple[str, ...]] = {
    "calm": ("Okay, what comes now.", "Got it, that makes sense."),
    "confused": ("But now I'm stuck, I don't understand what to do next.", "I'm confused, what do you mean?"),
    "frustrated": ("Ugh, this is so hard, I hate it.", "I give up, I am never going to get this."),
    "distracted": (
        "Can we talk about the football game instead?",
        "My dog did a funny thing at lunch today.",
    ),
}
TUTOR_SAYS: dict[str, tuple[str, ...]] = {
    "instruct": (
        "Remember that you have to combine the given numbers in the order of the story.",
        "The story means that one quantity depends on the other, because they belong together.",
    ),
    "encourage": (
        "Take a breath, you can do this. Good work so far.",
        "It is okay to be unsure. Keep going!",
    ),
    "refocus": (
        "That sounds fun, another time. Back to our problem now.",
        "Let us return to the problem in front of us.",
    ),
    "ask": ("What does the problem want you to find?", "Which step would you do now, and why?"),
}
BEHAVIOUR = (0.4, 0.2, 0.2, 0.2)
"""How often the unguided tutor makes each move (order of :data:`~maieutic.latent.world.MOVES`), whatever the student says."""

_MOVE = re.compile(r"Your next move: (\w+)\.")
_STEP = re.compile(r"\bStep (\d+):")
_TURN = re.compile(r'<turn n="(\d+)" speaker="(tutor|student)">(.*?)</turn>', re.DOTALL)
_LABEL = re.compile(r"main point of turn (\d+)")
_ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
_KEY = re.compile(r"^- (\w+): ", re.MULTILINE)


def mood_of(text: str) -> int:
    """The mood that a student utterance shows; the opening, and whatever shows none, is confused."""
    for n, mood in enumerate(MOODS):
        if any(phrase in text for phrase in SAYS[mood]):
            return n
    return MOODS.index("confused")


@dataclass
class RuleRoles(LoopbackChat):
    """``async with RuleRoles(answers) as url``: the server runs on a free port of 127.0.0.1. ``answers``: by problem text."""

    answers: Mapping[str, str]
    requests: int = 0

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        for message in body["messages"]:
            # The client's word joiners (it breaks what could be read as a control token) are not part of the text.
            message["content"] = message["content"].replace("\u2060", "")
        self.requests += 1
        try:
            texts = [
                self.reply(body, derive(int(body.get("seed", 0)), i)) for i in range(int(body.get("n", 1)))
            ]
        except (KeyError, IndexError, StopIteration) as error:
            return web.Response(status=400, text=f"no such role, problem or transcript: {error!r}")
        choices = [
            {"index": i, "message": {"role": "assistant", "content": t}, "finish_reason": "stop"}
            for i, t in enumerate(texts)
        ]
        usage = {"prompt_tokens": 0, "completion_tokens": sum(len(t.split()) for t in texts)}
        return web.json_response({"choices": choices, "usage": usage})

    def reply(self, body: Body, seed: int) -> str:
        """The answer to one request."""
        model = str(body["model"])
        rng = random.Random(seed)
        if model in STUDENTS:
            return self._student(body["messages"], STUDENTS[model], rng)
        roles: dict[str, Callable[[Sequence[Body], random.Random], str]] = {
            "rule-tutor": self._tutor,
            "rule-annotator": self._annotate,
            "rule-judge": self._judge,
        }
        return roles[model](body["messages"], rng)

    def _student(self, messages: Sequence[Body], world: World, rng: random.Random) -> str:
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        heard = [m["content"] for m in messages if m["role"] == "user"]
        steps = max((int(s) for text in said for s in _STEP.findall(text)), default=0)
        mood = mood_of(said[-1]) if said else MOODS.index("confused")
        move = MOVES.index(RuleLabeller(PAPER_4).of_text(heard[-1]))
        gain, moods = world.outcome(mood, move)
        understood = rng.random() < gain
        if understood and steps + 1 >= world.steps:
            return f"Oh, I see! So the final answer is \\boxed{{{self._answer(messages)}}}."
        says = rng.choice(SAYS[MOODS[rng.choices(range(4), moods.tolist())[0]]])
        if understood:
            a, b = rng.randint(2, 9), rng.randint(2, 9)
            return f"Step {steps + 1}: {a} + {b} = {a + b} because they belong together. {says}"
        wrong = rng.random() < 0.3 and steps > 0
        return f"I think 3 + 4 = 8. {says}" if wrong else says

    def _answer(self, messages: Sequence[Body]) -> str:
        system = messages[0]["content"]
        return next(a for text, a in self.answers.items() if text in system)

    def _tutor(self, messages: Sequence[Body], rng: random.Random) -> str:
        asked = _MOVE.findall(messages[-1]["content"])
        move = asked[-1] if asked else rng.choices(MOVES, BEHAVIOUR)[0]
        return rng.choice(TUTOR_SAYS[move])

    def _annotate(self, messages: Sequence[Body], rng: random.Random) -> str:
        prompt = messages[-1]["content"]
        if '"mistakes"' in prompt:
            return json.dumps(
                {"mistakes": [f"The student skips number {i} of the story." for i in range(1, 11)]}
            )
        turns = _turns(prompt)
        if label := _LABEL.search(prompt):
            return json.dumps({"move": RuleLabeller(PAPER_4).of_text(turns[int(label[1])].visible)})
        known = RuleReader().read(turns)
        keys = _KEY.findall(prompt.rpartition("The questions.")[2])
        return json.dumps({k: known[k] for k in keys})

    def _judge(self, messages: Sequence[Body], rng: random.Random) -> str:
        prompt = messages[-1]["content"]
        answers = _ANSWER.findall(prompt)
        said = _turns(prompt)[-1].visible
        solved = claims_answer(said) and f"{{{answers[0]}}}" in said
        return json.dumps({"reasoning": "by rule", "solved": solved})


def _turns(prompt: str) -> list[Turn]:
    """The turns of a fenced transcript."""
    return [
        Turn("tutor" if who == "tutor" else "student", html.unescape(text))
        for _, who, text in _TURN.findall(prompt)
    ]

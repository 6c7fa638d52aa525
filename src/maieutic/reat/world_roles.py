"""Every role of REAT by rule, in the constructed classroom of :mod:`maieutic.reat.world`, with planted faults.

Roles read their real prompts and answer in words or JSON. The model's name in a request picks the role: ``world-student``,
``world-tutor``, ``world-ocm`` (Observer, Critic, Mentor, Rewriter, merging, the live Observer and the Critic of whole dialogues,
told apart by their instructions), ``world-ocm-weak`` (a worse Mentor) and ``world-judge-b`` (a stricter Critic: a second judge).
Every answer follows from the request and its seed alone.

Planted faults, each with probability ``faults``: broken JSON, a score out of range, a word that contradicts the scores, a number of
the problem left in a rewritten query or in advice. The pipeline must refuse each, ask again, and count.

:class:`WorldServer` serves them over HTTP on 127.0.0.1; :class:`WorldChat` answers in process, for tests that need many dialogues.
"""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from maieutic.dialogue import Message
from maieutic.engines.base import Completion, Sampling
from maieutic.engines.loopback import LoopbackChat
from maieutic.reat import live, prompts, sample_score
from maieutic.reat.persona import SIGNAL, load_personas
from maieutic.reat.world import (
    APPROACHES,
    BOTTLENECKS,
    MOODS,
    NAMES,
    PLAIN,
    TAGS,
    World,
    advised,
    approach_of,
    bottleneck_of,
    mood_of,
    student_says,
)
from maieutic.seeds import derive

Body = Mapping[str, Any]
_TURN = re.compile(r'<turn n="(\d+)" speaker="(tutor|student)">(.*?)</turn>', re.DOTALL)
_NUMBER = re.compile(r"\d+")
_COUNT = re.compile(r"makes (\d+) things")
TAILS = ("and it only begins to show", "and this has shown before", "after some progress")
"""How a query ends: three wordings of one difficulty, near enough to be merged."""
JUDGES = {"world-ocm": 0, "world-ocm-weak": 0, "world-judge-b": 1}
"""Points that a Critic takes off each dimension."""


@dataclass
class WorldRoles:
    """``reply(body, seed)`` answers one request of any role. ``faults``: how often a structured answer is spoilt."""

    world: World = field(default_factory=World)
    faults: float = 0.05
    p_mentor: float = 0.8
    """How often the Mentor finds the fitting approach in a round; the merged call does with half of that, and does not notice."""
    planted: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tendencies = [p.tendency for p in load_personas("persona")]

    def reply(self, body: Body, seed: int) -> str:
        """The answer to one request. Raises ValueError for a request that is not of this world."""
        messages = [Message(m["role"], m["content"].replace("\u2060", "")) for m in body["messages"]]
        rng = random.Random(seed)
        model = str(body["model"])
        if model == "world-student":
            return self._student(messages, rng)
        if model == "world-tutor":
            return self._tutor(messages, rng)
        if model not in JUDGES:
            raise ValueError(f"no role {model!r}")
        return self._structured(messages, model, rng)

    # ---- the dialogue ----------------------------------------------------------------------------------------------------

    def _student(self, messages: Sequence[Message], rng: random.Random) -> str:
        system = messages[0].content
        said = [m.content for m in messages if m.role == "assistant"]
        surface = rng.choice(_NUMBER.findall(system) or ["7"])
        if not said:
            persona = next((n for n, t in enumerate(self._tendencies) if t in system), 0)
            mood = MOODS[persona % len(MOODS)]
            return student_says(mood, rng.choice(list(BOTTLENECKS)), 0, rng, surface)
        mood, stuck = mood_of(said[-1]), bottleneck_of(said[-1])
        known = int((_COUNT.search(said[-1]) or ["", "0"])[1])
        taken = approach_of(messages[-1].content)
        if rng.random() < self.world.p_understand(mood, stuck, taken):
            known += 1
            stuck = rng.choice(list(BOTTLENECKS))
            if known >= self.world.ideas:
                return f"Oh, now I see why it comes out like that! {SIGNAL}"
        if rng.random() >= self.world.p_mood_stays:
            mood = rng.choice(MOODS)
        return student_says(mood, stuck, known, rng, surface)

    def _tutor(self, messages: Sequence[Message], rng: random.Random) -> str:
        field_text = (
            messages[-1].content.partition("Teaching experience:")[2].partition("Where it comes from:")[0]
        )
        named = advised(field_text)
        if named is not None and rng.random() < self.world.p_advice:
            return APPROACHES[named][1]
        if rng.random() < self.world.p_plain_turn:
            return rng.choice(PLAIN)
        return APPROACHES[rng.choice(NAMES)][1]

    # ---- structured roles -------------------------------------------------------------------------------------------------

    def _structured(self, messages: Sequence[Message], model: str, rng: random.Random) -> str:
        system, user = messages[0].content, messages[-1].content
        turns = [(who, html.unescape(text)) for _, who, text in _TURN.findall(user)]
        strict = JUDGES[model]
        skill = self.p_mentor * (0.5 if model.endswith("weak") else 1.0)
        data: dict[str, Any]
        if system in (live.LIVE_OBSERVER, live.LIVE_OBSERVER_AND_REWRITER):
            data = self._state(turns, user) | {"query": self._query(turns[-1][1], rng, turns)}
        elif system == prompts.OBSERVER:
            data = self._observation(turns, user)
        elif system == prompts.CRITIC:
            data = self._critique(turns[:-1], turns[-1][1], strict, rng)
        elif system == sample_score.SAMPLE_CRITIC:
            data = self._whole(turns, strict)
        elif system in (prompts.MENTOR, prompts.DISTILLER):
            data = self._revision(turns, system == prompts.DISTILLER, skill, rng)
        elif system == prompts.REWRITER:
            data = {"query": self._rewritten(user, rng)}
        elif system == prompts.REFLECTION:
            data = self._reflection(turns, user, skill, strict, rng)
        elif system == prompts.MERGER:
            data = self._merged(user)
        else:
            raise ValueError("the instructions are of no role of this world")
        return self._spoilt(data, user, rng)

    def _state(self, turns: Sequence[tuple[str, str]], user: str) -> dict[str, Any]:
        said = next(t for who, t in reversed(turns) if who == "student")
        if SIGNAL in said or "now I see why" in said:
            tags, stuck = TAGS["calm"], "nothing"
        else:
            tags, stuck = TAGS[mood_of(said)], BOTTLENECKS[bottleneck_of(said)]
        # A careless Observer: its free text names the problem, which is what the rewriter is there for.
        problem = user.partition("<problem>\n")[2].partition("\n</problem>")[0]
        about = " ".join(problem.split()[:14])
        return {
            **{k: v for k, v in tags.model_dump(mode="json").items() if k != "struggle"},
            "struggle_status": tags.struggle.value,
            "error_detail": f'In the task "{about}" the student {stuck}',
            "struggle_reason": f"{TAILS[len(turns) % len(TAILS)]}; wrote {', '.join(_NUMBER.findall(said)[-2:])}",
        }

    def _query(self, said: str, rng: random.Random, turns: Sequence[Any]) -> str:
        if "now I see why" in said:
            return "has understood"
        return f"The student {BOTTLENECKS[bottleneck_of(said)]}, {TAILS[len(turns) % len(TAILS)]}"

    def _rewritten(self, user: str, rng: random.Random) -> str:
        stuck = next((s for s in BOTTLENECKS.values() if s in user), "has understood")
        tail = next((t for t in TAILS if t in user), TAILS[0])
        leak = ""
        if rng.random() < self.faults:
            self._plant("leaked_number")
            leak = f" with {(_NUMBER.findall(user) or ['12'])[-1]}"
        return f"The student {stuck}{leak}, {tail}"

    def _observation(self, turns: Sequence[tuple[str, str]], user: str) -> dict[str, Any]:
        reply = turns[-1][1]
        state = self._state(turns[:-1], user)
        return {
            "meaningful": "nothing" not in state["error_detail"],
            **state,
            "teacher_evidence": f"says: {reply}",
            "interaction_summary": "The student says where it is; the tutor replies.",
        }

    def _points(self, turns: Sequence[tuple[str, str]], reply: str) -> int:
        """0 to 4 for a reply to the student's last message, by the world's law."""
        said = next(t for who, t in reversed(turns) if who == "student")
        taken = approach_of(reply)
        if "now I see why" in said:
            return 3
        if taken is None:
            return 3
        return 4 if taken == self.world.fitting(mood_of(said), bottleneck_of(said)) else 1

    def _critique(
        self, turns: Sequence[tuple[str, str]], reply: str, strict: int, rng: random.Random
    ) -> dict[str, Any]:
        p = self._points(turns, reply)
        scores: dict[str, Any] = {
            "scaffolding": max(p - strict, 0),
            "attribution": max(p - strict, 0),
            "empathy": max((3 if p < 4 else 4) - strict, 0) if p > 1 else 1,
            "focus": max(p - strict, 0),
            "adaptation": None if len(turns) < 3 else max(p - strict, 0),
        }
        given = [v for v in scores.values() if v is not None]
        mean = 25 * sum(given) / len(given)
        quality = "strong" if mean >= 85 else "weak" if mean < 50 else "mediocre"
        failures = ["misdiagnosis"] if p <= 1 else []
        if rng.random() < self.faults:
            self._plant("out_of_range")
            scores["focus"] = 9
        elif rng.random() < self.faults:
            self._plant("contradiction")
            quality = "weak" if mean > 80 else "strong" if mean < 50 else quality
        return {
            "reasons": "by the law of this classroom", "failures": failures, **scores, "quality": quality,
            "improvements": "" if p == 4 else "take the approach that fits",
        }  # fmt: skip

    def _whole(self, turns: Sequence[tuple[str, str]], strict: int) -> dict[str, Any]:
        points = [self._points(turns[:n], text) for n, (who, text) in enumerate(turns) if who == "tutor"]
        mean = round(sum(points) / len(points)) - strict
        best = max(points) - strict
        scores = {d: max(mean, 0) for d in ("scaffolding", "attribution", "focus")}
        data = {**scores, "empathy": max(best, 0), "adaptation": max(mean, 0) if len(points) > 1 else None}
        given = [v for v in data.values() if v is not None]
        s = 25 * sum(given) / len(given)
        quality = "strong" if s >= 85 else "weak" if s < 50 else "mediocre"
        return {"reasons": "by the law", "failures": [], **data, "quality": quality, "improvements": ""}

    def _revision(
        self, turns: Sequence[tuple[str, str]], good: bool, skill: float, rng: random.Random
    ) -> dict[str, Any]:
        said = next(t for who, t in reversed(turns) if who == "student")
        right = self.world.fitting(mood_of(said), bottleneck_of(said))
        if good:
            approach = approach_of(turns[-1][1]) or right
        else:
            approach = right if rng.random() < skill else rng.choice([n for n in NAMES if n != right])
        name, says = APPROACHES[approach]
        leak = ""
        if rng.random() < self.faults:
            self._plant("leaked_advice")
            leak = f" (as with {(_NUMBER.findall(said) or ['12'])[-1]})"
        return {
            "response": says,
            **self._artefacts(BOTTLENECKS[bottleneck_of(said)], mood_of(said), name + leak),
        }

    def _reflection(
        self, turns: Sequence[tuple[str, str]], user: str, skill: float, strict: int, rng: random.Random
    ) -> dict[str, Any]:
        calm = random.Random(rng.random())
        no_faults = WorldRoles(self.world, 0.0, self.p_mentor)
        observation = self._observation(turns, user)
        if not observation["meaningful"]:
            turns = [
                ("student", "Hm, I'm lost here. I started with the last number that is given."),
                turns[-1],
            ]
        revision = no_faults._revision(turns, False, skill / 2, calm)
        return {
            "observation": observation,
            "critique": no_faults._critique(turns[:-1], turns[-1][1], strict, calm),
            "revision": revision,
            # One mind: what it has just written seems good to it.
            "revised_critique": {
                "reasons": "as intended", "failures": [], "scaffolding": 4, "attribution": 4, "empathy": 4, "focus": 4,
                "adaptation": None, "quality": "strong", "improvements": "",
            },
        }  # fmt: skip

    def _merged(self, user: str) -> dict[str, Any]:
        """Two experiences into one: the first one's text without its course."""
        stuck = next((s for s in BOTTLENECKS.values() if s in user), None)
        name = advised(user)
        mood = next((m for m in MOODS if f"and is {m}:" in user), None)
        if stuck is None or name is None or mood is None:
            raise ValueError("nothing of this world to merge shows in the request")
        return self._artefacts(stuck, mood, APPROACHES[name][0]) | {
            "query": f"The student {stuck}, early or again"
        }

    @staticmethod
    def _artefacts(stuck: str, mood: str, approach: str) -> dict[str, Any]:
        return {
            "template": f"An invitation to {approach}.",
            "advice": f"When the student {stuck} and is {mood}: {approach}.",
            "pitfalls": "Do not repeat the same question.",
            "struggle_handling": "Stay with it and make the step smaller.",
            "explanation": "It fits this state and this difficulty.",
        }

    def _spoilt(self, data: dict[str, Any], user: str, rng: random.Random) -> str:
        text = json.dumps(data)
        if rng.random() < self.faults:
            self._plant("malformed")
            return text[: len(text) // 2]
        return f"Here is my answer.\n```json\n{text}\n```" if rng.random() < 0.2 else text

    def _plant(self, what: str) -> None:
        self.planted[what] = self.planted.get(what, 0) + 1


@dataclass
class WorldChat:
    """A model of this world without HTTP (:class:`maieutic.reat.roles.StructuredChat`)."""

    roles: WorldRoles
    model: str
    requests: int = 0

    @property
    def name(self) -> str:
        return self.model

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int,
        n: int = 1,
        session: str | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        self.requests += 1
        body = {"model": self.model, "messages": [{"role": m.role, "content": m.content} for m in messages]}
        texts = [self.roles.reply(body, derive(seed % 2**31, i)) for i in range(n)]
        return [Completion(t, "stop", len(t.split())) for t in texts]

    async def close(self) -> None:
        """Nothing to free."""


@dataclass
class WorldServer(LoopbackChat):
    """``async with WorldServer(roles) as url``: an OpenAI-compatible endpoint on a free port of 127.0.0.1."""

    roles: WorldRoles = field(default_factory=WorldRoles)
    requests: int = 0

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests += 1
        try:
            texts = [
                self.roles.reply(body, derive(int(body.get("seed", 0)), i))
                for i in range(int(body.get("n", 1)))
            ]
        except (KeyError, ValueError, StopIteration) as error:
            return web.Response(status=400, text=f"no role or dialogue of this world: {error!r}")
        choices = [
            {"index": i, "message": {"role": "assistant", "content": t}, "finish_reason": "stop"}
            for i, t in enumerate(texts)
        ]
        usage = {
            "prompt_tokens": sum(len(m["content"].split()) for m in body["messages"]),
            "completion_tokens": sum(len(t.split()) for t in texts),
        }
        return web.json_response({"choices": choices, "usage": usage})

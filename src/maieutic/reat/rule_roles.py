"""Loopback role servers: an OpenAI-compatible endpoint whose Observer, Critic, Mentor and Rewriter answer by rule.

They read the prompts (problem, transcript, records) and answer from what they find, so the whole pipeline runs over real HTTP
without a model, and answers change when prompts do. They are no models of people; results with them say nothing about tutoring.
Every answer follows from the request, its seed and :class:`Faults` alone.

Faults are planted at stated rates and counted in :attr:`RuleRoles.planted` under the names that the pipeline's own counters use, so
that a test can ask for equality: nothing planted may pass unseen, and nothing else may be counted.
"""

from __future__ import annotations

import asyncio
import html
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from maieutic.engines.loopback import LoopbackChat
from maieutic.reat import prompts, rule_speech
from maieutic.reat.schema import (
    DIMENSIONS,
    Emotion,
    ErrorType,
    Scores,
    Struggle,
    capped,
    score_100,
)
from maieutic.seeds import derive

Body = Mapping[str, Any]
Handler = Callable[[Body, random.Random], str]

_TURN = re.compile(r'<turn n="(\d+)" speaker="(tutor|student)">(.*?)</turn>', re.DOTALL)
_PART = {
    "problem": re.compile(r"<problem>\n(.*?)\n</problem>", re.DOTALL),
    "answer": re.compile(r"<answer>\n(.*?)\n</answer>", re.DOTALL),
    "transcript": re.compile(r"<transcript>\n(.*?)\n</transcript>", re.DOTALL),
}
_REFUSED = "Your last answer is refused"
_TROUBLED = (Emotion.FRUSTRATED, Emotion.CONFUSED)
_STUCK = (Struggle.REPEATED_ERROR, Struggle.PERSISTENT_CONFUSION, Struggle.REGRESSION)


@dataclass(frozen=True)
class Faults:
    """Shares of replies that are spoilt, by kind; a reply gets at most one."""

    malformed: float = 0.0
    """Cut JSON, prose, or nothing (every role)."""
    out_of_range: float = 0.0
    """A score of 7, or a tag that there is not (Critic, Observer)."""
    contradiction: float = 0.0
    """An overall word against the scores, or two answers that differ (Critic)."""
    leak: float = 0.0
    """A number of the problem in what should be abstract (Mentor, Rewriter)."""
    seed: int = 0


@dataclass(frozen=True)
class _Asked:
    """A request to a role, read."""

    problem: str
    gold: str
    history: list[tuple[str, str]]
    """(speaker, text)."""
    reply: str
    """The tutor's reply under review."""
    text: str
    """The whole user message."""

    @property
    def students(self) -> list[str]:
        return [t for who, t in self.history if who == "student"]

    @property
    def tutors(self) -> list[str]:
        return [t for who, t in self.history if who == "tutor"]

    def record(self, after: str) -> dict[str, Any]:
        """The JSON record behind a heading."""
        line = self.text.split(after, 1)[1].lstrip("\n").split("\n", 1)[0]
        return dict(json.loads(html.unescape(line)))


def _read(user: str) -> _Asked:
    def part(name: str) -> str:
        found = _PART[name].search(user)
        return html.unescape(found[1]) if found else ""

    transcript = _PART["transcript"].search(user)
    inside = transcript[1] if transcript else ""
    outside = _TURN.findall(user[transcript.end() :]) if transcript else []
    numbers = re.findall(r"\d+(?:\.\d+)?", part("answer").replace(",", ""))
    return _Asked(
        part("problem"),
        numbers[-1] if numbers else "",
        [(who, html.unescape(text)) for _, who, text in _TURN.findall(inside)],
        html.unescape(outside[0][2]) if outside else "",
        user,
    )


@dataclass
class RuleRoles(LoopbackChat):
    """``async with RuleRoles() as url``: the server runs on a free port of 127.0.0.1.

    Args:
        latency_s: how long an answer takes, with ±``jitter`` of it (a share).
        extra: further models by name (students, tutors); they get the request and a seeded generator.
    """

    faults: Faults = Faults()
    latency_s: float = 0.0
    jitter: float = 0.0
    extra: Mapping[str, Handler] = field(default_factory=dict)
    planted: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    most_open: int = 0
    """Most requests in work at once."""
    _open: int = 0

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests += 1
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            if self.latency_s:
                await asyncio.sleep(
                    self.latency_s * random.Random(self.requests).uniform(1 - self.jitter, 1 + self.jitter)
                )
            try:
                texts = [
                    self.reply(body, derive(int(body.get("seed", 0)), i))
                    for i in range(int(body.get("n", 1)))
                ]
            except (KeyError, IndexError, ValueError) as error:
                return web.Response(status=400, text=f"no prompt that a rule answers: {error!r}")
        finally:
            self._open -= 1
        choices = [
            {"index": i, "message": {"role": "assistant", "content": t}, "finish_reason": "stop"}
            for i, t in enumerate(texts)
        ]
        said = sum(len(m["content"].split()) for m in body["messages"])
        usage = {"prompt_tokens": said, "completion_tokens": sum(len(t.split()) for t in texts)}
        return web.json_response({"choices": choices, "usage": usage})

    def reply(self, body: Body, seed: int) -> str:
        """The answer to one request. KeyError for a system prompt that no role here has."""
        if (handler := self.extra.get(str(body["model"]))) is not None:
            return handler(body, random.Random(seed))
        system, user = (m["content"].replace("\u2060", "") for m in body["messages"])
        name, answer = _ROLES[system]
        # Rules vary with the content alone, faults with the seed too: asked again, a good answer is the same one.
        rng = random.Random(derive(self.faults.seed, seed, system, user))
        asked = _read(user)
        data = answer(asked, random.Random(derive(system, user)))
        return self._spoil(name, data, asked, rng)

    def _spoil(self, role: str, data: dict[str, Any], asked: _Asked, rng: random.Random) -> str:
        faults, u = self.faults, rng.random()
        plain = json.dumps(data)
        if (u := u - faults.malformed) < 0:
            kind = rng.choice(("cut", "prose", "empty"))
            self.planted[f"{role}.bad.{'empty' if kind == 'empty' else 'malformed'}"] += 1
            cut = plain[: rng.randrange(2, len(plain) - 1)] if role != "reflection" else "{"
            return {"cut": cut, "prose": "I think that it is fine {as it is}.", "empty": ""}[kind]
        if role in ("observer", "critic") and (u := u - faults.out_of_range) < 0:
            key, value = (
                ("emotion", "ecstatic")
                if role == "observer"
                else (rng.choice(DIMENSIONS), rng.choice((7, -1)))
            )
            self.planted[f"{role}.bad.{'unknown_tag' if role == 'observer' else 'out_of_range'}"] += 1
            return json.dumps({**data, key: value})
        if role == "critic" and (u := u - faults.contradiction) < 0:
            if rng.random() < 0.5:
                self.planted["critic.bad.contradictory"] += 1
                other = {**data, "focus": (data["focus"] + 1) % 5, "quality": "mediocre"}
                return f"{json.dumps({**data, 'quality': 'mediocre'})}\nOn reflection:\n{json.dumps(other)}"
            return self._against_itself(data)
        if role in ("mentor", "rewriter") and u - faults.leak < 0 and (found := _numbers(asked)):
            self.planted["mentor.leak.number" if role == "mentor" else "rewrite.leak.number"] += 1
            key = "advice" if role == "mentor" else "query"
            return json.dumps({**data, key: f"{data[key]} It was {rng.choice(found)} here."})
        return plain

    def _against_itself(self, data: dict[str, Any]) -> str:
        self.planted["critic.bad.contradiction"] += 1
        scores = Scores(**{d: data[d] for d in DIMENSIONS})
        s = score_100(capped(scores, tuple(data["failures"])))
        if s > 80:
            return json.dumps({**data, "quality": "weak"})
        low = {d: (None if data[d] is None else 1) for d in DIMENSIONS}
        return json.dumps({**data, **low, "quality": "strong"})


def _numbers(asked: _Asked) -> list[str]:
    return re.findall(r"\d+", asked.problem or asked.text)


# ---- the roles by rule ------------------------------------------------------------------------------------------------


def _state(asked: _Asked) -> tuple[Emotion, ErrorType, Struggle]:
    said = asked.students[-1]
    return (
        rule_speech.emotion_of(said),
        rule_speech.error_of(said, asked.gold),
        rule_speech.struggle_of(asked.students, asked.gold),
    )


def observe(asked: _Asked, rng: random.Random) -> dict[str, Any]:
    """The Observer: cue words and arithmetic; its details name numbers and people, as a model's do in spite of what it is told."""
    said = asked.students[-1]
    emotion, error, struggle = _state(asked)
    detail, abstract = rule_speech.DIAGNOSES[error]
    numbers = " and ".join(re.findall(r"\d+", said)[:2])
    name = asked.problem.split(" ", 1)[0]
    return {
        "meaningful": not (rule_speech.CLOSING.match(said) and len(said.split()) < 8),
        "emotion": emotion.value,
        "intent": rule_speech.intent_of(said).value,
        "error_type": error.value,
        "struggle_status": struggle.value,
        "error_detail": f"{detail} with {numbers} for {name}".strip() if detail and numbers else detail,
        "struggle_reason": f"the student {abstract} {rule_speech.COURSE[struggle]}",
        "teacher_evidence": "asks a question" if "?" in asked.reply else "makes a statement",
        "interaction_summary": f"a student who {abstract} gets a reply of {len(asked.reply.split())} words",
    }


def criticise(asked: _Asked, rng: random.Random) -> dict[str, Any]:
    """The Critic: each dimension from what stands in the reply."""
    return _criticise(asked, asked.reply)


def _criticise(asked: _Asked, reply: str) -> dict[str, Any]:
    emotion, error, struggle = _state(asked)
    failures = []
    words = len(reply.split())
    given = [n for n in re.findall(r"\d+(?:\.\d+)?", reply) if n == asked.gold]
    if given and not any(asked.gold in s for s in asked.students):
        failures.append("answer_given")
    if re.search(r"\?.+\b(because|so (it|the)|that is|equals)\b", reply):
        failures.append("pseudo_scaffolding")
    aims = [kind for kind, cue in rule_speech.TARGET.items() if cue.search(reply)]
    off = bool(aims) and error in rule_speech.TARGET and error not in aims
    if off:
        failures.append("misdiagnosis")
    specific, generic = (bool(rule_speech.SUPPORT[k].search(reply)) for k in ("specific", "generic"))
    if emotion in _TROUBLED and generic and not specific:
        failures.append("fake_empathy")
    stuck = struggle in _STUCK and len(asked.tutors) >= 1
    scores = {
        "scaffolding": (4 if "?" in reply else 2) - (words > 60),
        # A fault that a rule must mend: the wrong diagnosis still looks rather good by itself.
        "attribution": 3 if off else 4 if error in aims or error not in rule_speech.TARGET else 2,
        "empathy": (4 if specific else 3 if generic else 1) if emotion in _TROUBLED else 3 + specific,
        "focus": 4 if words <= 40 else 3 if words <= 80 else 2,
        "adaptation": (4 if rule_speech.CHANGE.search(reply) else 1) if stuck else None,
    }
    s = score_100(capped(Scores(**scores), tuple(failures)))  # type: ignore[arg-type]
    return {
        "reasons": f"{words} words, aims at {', '.join(a.value for a in aims) or 'nothing'}",
        "failures": failures,
        **scores,
        "quality": "strong" if s >= 80 else "weak" if s < 50 else "mediocre",
        "improvements": "" if s >= 85 else "meet the feeling, aim at the error, change the approach",
    }


def _artefacts(error: ErrorType, emotion: Emotion, struggle: Struggle, rng: random.Random) -> dict[str, str]:
    _, abstract = rule_speech.DIAGNOSES[error]
    ask = rng.choice(("a question about the decisive step", "a question that only the student can answer"))
    return {
        "template": f"{rule_speech.COMFORT.get(emotion, '')} {rule_speech.AIMED[error]}".strip(),
        "advice": f"When the student {abstract}, ask {ask} before explaining anything.",
        "pitfalls": f"Do not correct it yourself when the student {abstract}.",
        "struggle_handling": f"If it goes on {rule_speech.COURSE[struggle]}: {rule_speech.SHIFT}",
        "explanation": "The student does the thinking and meets the difficulty alone.",
    }


def revise(asked: _Asked, rng: random.Random) -> dict[str, Any]:
    """The Mentor: aims at the error; its first attempt may forget feelings and change, a few never get there."""
    emotion, error, struggle = _state(asked)
    attempts = asked.text.count("Your attempt ")
    draw = random.Random(derive(asked.problem, *asked.students)).random()
    careless = draw < 0.1 or (draw < 0.4 and attempts == 0)
    parts = [rule_speech.AIMED[error]]
    if careless:
        parts = ["Think about it once more, and say what you find."]
    else:
        if emotion in rule_speech.COMFORT:
            parts.insert(0, rule_speech.COMFORT[emotion])
        if struggle in _STUCK:
            parts.insert(1, rule_speech.SHIFT)
    return {"response": " ".join(parts), **_artefacts(error, emotion, struggle, rng)}


def distil(asked: _Asked, rng: random.Random) -> dict[str, Any]:
    """The Mentor on a good reply."""
    emotion, error, struggle = _state(asked)
    return {"response": asked.reply, **_artefacts(error, emotion, struggle, rng)}


def rewrite(asked: _Asked, rng: random.Random) -> dict[str, Any]:
    """The Rewriter: the two texts in general words (numbers and what stands behind "for" are left out)."""
    found = asked.record("The diagnosis:")
    reason = re.sub(r"\d+(?: and \d+)?", "", found["struggle_reason"])
    error = re.sub(r" with [\d and]+(for \S+)?$", "", found["error_detail"])
    course = rng.choice(
        (
            "",
            " The text is read too quickly.",
            " There is no picture of the situation.",
            " The goal is not clear.",
        )
    )
    return {"query": (f"{reason}; the student {error}." if error else f"{reason}.") + course}


def reflect(asked: _Asked, rng: random.Random) -> dict[str, Any]:
    """All at once."""
    revision = revise(asked, rng)
    return {
        "observation": observe(asked, rng),
        "critique": _criticise(asked, asked.reply),
        "revision": revision,
        "revised_critique": _criticise(asked, revision["response"]),
    }


def merge(asked: _Asked, rng: random.Random) -> dict[str, Any]:
    """Two experiences into one: the shorter query, and both values' sentences without repetition."""
    kept, new = asked.record("The first:"), asked.record("The second:")

    def both(key: str) -> str:
        sentences = re.split(r"(?<=[.?!])\s+", f"{kept[key]} {new[key]}")
        return " ".join(dict.fromkeys(sentences))

    fields = ("template", "advice", "pitfalls", "struggle_handling", "explanation")
    return {"query": min(kept["query"], new["query"], key=len), **{f: both(f) for f in fields}}


_ROLES: dict[str, tuple[str, Callable[[_Asked, random.Random], dict[str, Any]]]] = {
    prompts.OBSERVER: ("observer", observe),
    prompts.CRITIC: ("critic", criticise),
    prompts.MENTOR: ("mentor", revise),
    prompts.DISTILLER: ("mentor", distil),
    prompts.REWRITER: ("rewriter", rewrite),
    prompts.REFLECTION: ("reflection", reflect),
    prompts.MERGER: ("merger", merge),
}

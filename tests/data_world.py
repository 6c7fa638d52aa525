"""A scripted world for builds: rewriter, solver and student servers that err in known ways, each as a function of the request.

The world's arithmetic is a hash: :func:`truth` gives every text its one right answer of four digits. A server needs no memory but
for what it counts, so a build may be killed and started again at any point.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import threading
from collections import Counter
from contextlib import contextmanager
from typing import Any

from loopback import Loopback, status

FAULTS = ("wrong_answer", "copy", "unparsable", "refused", "empty", "request_failed", "same_answer", "answer_form", "same_numbers",
          "states_answer", "truncated", "duplicate")  # fmt: skip
_NUMBERS = re.compile(
    r"\d[\d,]*(?:\.\d+)?|\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty|"
    r"fifty|sixty|seventy|eighty|ninety|hundred|thousand|dozen|half|twice|double|thrice|triple)\b",
    re.IGNORECASE,
)
STAGE = {"wrong_answer": "verify"} | dict.fromkeys(
    ("copy", "same_answer", "answer_form", "same_numbers", "states_answer", "duplicate"), "check"
)


def draw(*parts: object) -> random.Random:
    return random.Random(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest())


def truth(text: str) -> int:
    """The right answer of any text that the world makes."""
    return draw("truth", text).randint(1000, 9999)


def between(text: str, start: str, end: str) -> str:
    return text.split(start, 1)[1].split(end, 1)[0].strip()


class Rewriter(Loopback):
    """Rewrites by changing every number; plants ``FAULTS`` in a share of the requests and counts what it planted."""

    def __init__(self, share: float = 0.4, other_text: str = "") -> None:
        super().__init__(fault=self._fault)
        self.share, self.other_text = share, other_text
        self.planted: dict[tuple[str, int], str] = {}
        """(source text, seed) → fault: a repeated request counts once."""
        self.transient: set[tuple[str, int]] = set()
        self.answered = Counter()

    def plan(self, body: dict[str, Any]) -> tuple[str, str, str, random.Random, tuple[str, int]]:
        user = body["messages"][-1]["content"].replace("\u2060", "")
        text = between(user, "Original problem:", "Answer of the original:")
        answer = between(user, "Answer of the original:", "\n")
        rng = draw("rewrite", text, body["seed"])
        fault = rng.choice(FAULTS) if rng.random() < self.share else "good"
        return text, answer, fault, rng, (text, body["seed"])

    def _fault(self, number: int, body: dict[str, Any]) -> Any:
        text, answer, fault, rng, key = self.plan(body)
        if fault != "good":
            self.planted[key] = fault
        if fault == "request_failed":
            return status(500, "planted")
        if fault == "good" and rng.random() < 0.1 and key not in self.transient:
            self.transient.add(key)
            return status(503, "planted once")
        self.answered[key] += 1
        return self._answer(text, answer, fault, rng)

    def _answer(self, text: str, answer: str, fault: str, rng: random.Random) -> Any:
        from aiohttp import web

        variant = _NUMBERS.sub(lambda m: str(rng.randint(2000, 90000)), text)
        variant += f" (This happened in the year {rng.randint(2000, 90000)}.)"
        right = str(truth(variant))
        problem, stated, finish = variant, right, "stop"
        if fault == "wrong_answer":
            stated = str(int(right) + 1)
        elif fault == "copy":
            problem = text
        elif fault == "same_answer":
            stated = answer
        elif fault == "answer_form":
            stated = f"{right}.5"
        elif fault == "same_numbers":
            problem = f"Here is another story. {text}"
        elif fault == "states_answer":
            problem += f" The answer is {right}."
        elif fault == "duplicate":
            problem = self.other_text
        elif fault == "truncated":
            finish = "length"
        content = f"PROBLEM: {problem}\nSOLUTION: Count.\nANSWER: {stated}"
        if fault == "unparsable":
            content = f"Here is a variant: {variant} It gives {right}."
        elif fault == "refused":
            content = "I'm sorry, but I can't help with that request."
        elif fault == "empty":
            content = ""
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
        return web.json_response(
            {"choices": [choice], "usage": {"prompt_tokens": 200, "completion_tokens": 80}}
        )


class Solver(Loopback):
    """Always right about the world's texts, with one dissenting solve now and then."""

    def __init__(self) -> None:
        super().__init__(reply=self._solve)

    def _solve(self, body: dict[str, Any]) -> list[str]:
        text = body["messages"][-1]["content"].replace("\u2060", "").strip()
        n = body.get("n", 1)
        answers = [truth(text)] * n
        if n > 2 and draw("dissent", text).random() < 0.2:
            answers[0] += 7
        return [f"I count. \\boxed{{{a}}}" for a in answers]


class StudentServer(Loopback):
    """Solves a text with a rate of its own; a source's text is not of the world, so its answer comes from ``golds``."""

    def __init__(self, golds: dict[str, str], broken: frozenset[str] = frozenset()) -> None:
        super().__init__(reply=self._solve, fault=self._broken)
        self.golds, self.broken = golds, broken

    def text(self, body: dict[str, Any]) -> str:
        user = body["messages"][-1]["content"].replace("\u2060", "")
        return between(user, "Problem:", "\n\nWork it out")

    def _broken(self, number: int, body: dict[str, Any]) -> Any:
        return status(500, "planted") if self.text(body) in self.broken else None

    def rate(self, text: str) -> float:
        rng = draw("rate", text)
        return rng.choice((0.1, 0.2, 0.3, 0.4, 0.5, 1.0))

    def _solve(self, body: dict[str, Any]) -> list[str]:
        text, n = self.text(body), body.get("n", 1)
        gold = self.golds.get(text) or str(truth(text))
        rng, rate = draw("samples", text, body["seed"]), self.rate(text)
        return [f"So \\boxed{{{gold if rng.random() < rate else 'no idea'}}}" for _ in range(n)]


@contextmanager
def in_thread(*servers: Loopback):
    """Servers on an event loop of their own, so that a build in this process or another can use them."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    try:
        for s in servers:
            do(s.start())
        yield
    finally:
        for s in servers:
            do(s.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


HTTP = {"concurrency": 16, "timeout_s": 20.0, "retries": 1, "backoff_s": 0.01, "backoff_max_s": 0.02}


def recipe(folder: Any, source: str, rewriter: str, solver: str, student: str, **more: Any) -> dict[str, Any]:
    """A build recipe against the three servers."""

    def role(name: str, url: str) -> dict[str, Any]:
        return {"model": name, "engine": {"kind": "chat", "urls": [url], "http": HTTP}}

    out: dict[str, Any] = {
        "name": "world",
        "output_dir": str(folder),
        "sources": [{"source": source}],
        "rewriter": role("scripted-rewriter", rewriter),
        "solver": role("scripted-solver", solver),
        "student": role("scripted-student", student),
        "verify": {"solves": 3},
        "attempts": 3,
    }
    return out | more

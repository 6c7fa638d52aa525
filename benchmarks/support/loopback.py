"""A vLLM-like server on loopback with scripted answers, in a process of its own, so that its CPU is nobody else's.

It speaks HTTP/1.1 through a bare asyncio protocol and answers ``/v1/completions`` (prompts of token ids) and
``/v1/chat/completions`` with what vLLM 0.31 puts into such answers: the prompt's ids again for ``return_token_ids``, tokens and top
log-probs beside the sampled ids. Answers are made beforehand and chosen by the request alone (its bytes, and how many messages it
holds), never by the order of arrival. ``latency(body)`` and ``slots`` make a server of a given speed out of it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import re
import time
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Latency = Callable[[dict[str, Any]], float]
"""Seconds that a request (its parsed body) is worked on. A module-level function, so that it can be sent to the process."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted continuation. ``ids`` end with the stop token where ``finish`` is ``stop``."""

    text: str
    """Without the stop token."""
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tokens: tuple[str, ...]
    """The ids as texts, one each."""
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class Script:
    """What the server says. ``answers[model][turn][variant]``: the turn is the number of messages modulo that of the scripted
    turns, the variant comes from a checksum of the request. ``tests[model][variant]`` answers requests for several samples."""

    answers: Mapping[str, Sequence[Sequence[Answer]]]
    tests: Mapping[str, Sequence[Answer]]
    turn_id: int
    """Token id that stands once in every message of a prompt of ids (``<|im_start|>``): counts its messages."""
    max_model_len: int = 32_768

    def choose(self, raw: bytes, body: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Turn (-1: a test) and variants of an answer to ``body``, whose bytes are ``raw``: one variant a sample."""
        prompt, n, model = body.get("prompt"), body.get("n") or 1, body["model"]
        turns = self.answers[model]
        if n > 1 and model in self.tests:
            turn, among = -1, len(self.tests[model])
        else:
            messages = prompt.count(self.turn_id) if prompt is not None else len(body["messages"])
            turn = messages % len(turns)
            among = len(turns[turn])
        first = zlib.crc32(raw)
        return turn, [(first + i) % among for i in range(n)]

    def said(self, model: str, turn: int, variant: int) -> Answer:
        """The answer that the log of the server names."""
        return self.tests[model][variant] if turn < 0 else self.answers[model][turn][variant]


def make_script(
    tokenizer: Any,
    tokens: Mapping[str, int],
    *,
    turns: int = 48,
    variants: int = 16,
    test_tokens: Mapping[str, int] | None = None,
    max_model_len: int = 32_768,
    seed: int = 0,
) -> Script:
    """Answers of exactly ``tokens[model]`` tokens each, the end of turn included, made of sentences of the shipped problems.

    ``test_tokens``: the same for the samples of a post-test, which end with a boxed number. ``tokenizer``: a fast one with ChatML
    tokens. No two answers are alike, and each is the tokenizer's own rendering of its text.
    """
    rng = random.Random(seed)
    pool = _sentences()
    end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))

    def answer(length: int, tail: str = "") -> Answer:
        last = tokenizer.encode(tail, add_special_tokens=False) if tail else []
        while True:
            text = ""
            while len(ids := tokenizer.encode(text, add_special_tokens=False)) < length:
                text = f"{text} {rng.choice(pool)}".strip()
            ids = [*ids[: length - 1 - len(last)], *last]
            text = tokenizer.decode(ids)
            # A cut inside a word may tokenise otherwise than it was cut.
            if text == text.strip() and tokenizer.encode(text, add_special_tokens=False) == ids:
                break
        ids.append(end)
        logprobs = tuple(round(-rng.expovariate(1.5), 6) for _ in ids)
        return Answer(text, tuple(ids), logprobs, tuple(tokenizer.decode([i]) for i in ids))

    return Script(
        {m: [[answer(n) for _ in range(variants)] for _ in range(turns)] for m, n in tokens.items()},
        {
            m: [answer(n, f" \\boxed{{{rng.randint(1, 99)}}}") for _ in range(4 * variants)]
            for m, n in (test_tokens or {}).items()
        },
        int(tokenizer.convert_tokens_to_ids("<|im_start|>")),
        max_model_len,
    )


def _sentences() -> list[str]:
    """Sentences of the shipped problems and of the hand-written dialogues, each once."""
    data = Path(__file__).parents[2] / "data"
    texts: list[str] = []
    for line in (data / "planted-faults" / "transcripts.jsonl").read_text(encoding="utf-8").splitlines():
        texts += [t["text"] for t in json.loads(line)["turns"][1:]]
    for line in (data / "gsm-symbolic-mini" / "pairs.jsonl").read_text(encoding="utf-8").splitlines():
        texts.append(json.loads(line)["source"]["text"])
    found = (s.strip() for text in texts for s in re.split(r"(?<=[.?!])\s+", text))
    return sorted(
        {s for s in found if 4 <= len(s.split()) <= 40 and s.isascii() and ":" not in s and "<" not in s}
    )


class Loopback:
    """``with Loopback(script) as server``: ``server.url``, and what it counted.

    Args:
        latency: seconds of work of a request; None: it is answered at once.
        slots: most requests that are worked on at a time, the others queue in order of arrival; None: all at once.
    """

    def __init__(self, script: Script, *, latency: Latency | None = None, slots: int | None = None) -> None:
        self._settings = (script, latency, slots)
        self.url = ""
        self.pid = 0

    def __enter__(self) -> Loopback:
        here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(*self._settings, there), daemon=True
        )
        self._process.start()
        self.url = f"http://127.0.0.1:{here.recv()}"
        self.pid = self._process.pid or 0
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.join()

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path) as answer:
            return json.load(answer)

    def served(self) -> list[dict[str, Any]]:
        """Every answer since the last :meth:`reset`: ``model``, ``seed``, ``turn``, ``variants``, ``prompt`` (its length in
        tokens or messages), ``arrived`` and ``answered`` (seconds of one monotonic clock)."""
        names = ("model", "seed", "turn", "variants", "prompt", "arrived", "answered")
        return [dict(zip(names, row, strict=True)) for row in self._get("/served")]

    def stats(self) -> dict[str, float]:
        """``requests``, ``tokens`` (sampled), ``most_open`` (at once), ``busy_s`` (work, summed) and ``cpu_s`` since the reset."""
        found: dict[str, float] = self._get("/stats")
        return found

    def reset(self) -> None:
        """Forget what was served and counted."""
        self._get("/reset")


class _Server:
    """Everything that connections share."""

    def __init__(self, script: Script, latency: Latency | None, slots: int | None) -> None:
        self.script, self.latency, self.slots = script, latency, slots
        self.choices = {
            model: [[_choice(a) for a in variants] for variants in turns]
            for model, turns in script.answers.items()
        }
        for model, tests in script.tests.items():
            self.choices[model].append([_choice(a) for a in tests])  # turn −1
        self.waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self.reset()

    def reset(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.open = self.most_open = self.requests = self.tokens = self.working = 0
        self.busy = 0.0
        self.cpu = time.process_time()

    def work(self, seconds: float, done: Callable[[], None]) -> None:
        """Call ``done`` after ``seconds`` of a slot."""
        if self.slots is not None and self.working >= self.slots:
            self.waiting.append((seconds, done))
            return
        self.working += 1
        asyncio.get_running_loop().call_later(seconds, self._finish, seconds, done)

    def _finish(self, seconds: float, done: Callable[[], None]) -> None:
        self.working -= 1
        self.busy += seconds
        done()
        if self.waiting:
            self.work(*self.waiting.popleft())

    def get(self, path: str) -> tuple[int, bytes]:
        answer: Any
        if path == "/health":
            return 200, b""
        if path == "/v1/models":
            cards = [{"id": m, "max_model_len": self.script.max_model_len} for m in self.script.answers]
            answer = {"object": "list", "data": cards}
        elif path == "/served":
            answer = self.log
        elif path == "/stats":
            answer = {"requests": self.requests, "tokens": self.tokens, "most_open": self.most_open,
                      "busy_s": self.busy, "cpu_s": time.process_time() - self.cpu}  # fmt: skip
        elif path == "/reset":
            self.reset()
            answer = {}
        else:
            return 404, b"{}"
        return 200, json.dumps(answer).encode()

    def answer(self, path: str, raw: bytes, body: dict[str, Any], arrived: float) -> bytes:
        """The whole answer to one request."""
        model = body["model"]
        turn, variants = self.script.choose(raw, body)
        answers = [self.script.said(model, turn, v) for v in variants]
        sampled = sum(len(a.ids) for a in answers)
        if path == "/v1/completions":
            prompt = len(body["prompt"])
            echo = b"null"
            if body.get("return_token_ids"):
                start = raw.index(b"[", raw.index(b'"prompt"'))
                echo = raw[start : raw.index(b"]", start) + 1]
            fragments = self.choices[model][turn]
            choices = [
                b'{"index":%d,"prompt_token_ids":%b,%b}' % (i, echo, fragments[v])
                for i, v in enumerate(variants)
            ]
            kind = b"text_completion"
        else:
            prompt = len(body["messages"])
            choices = [
                b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null},"logprobs":null,'
                b'"finish_reason":"%b","stop_reason":null}'
                % (i, json.dumps(a.text).encode(), a.finish.encode())
                for i, a in enumerate(answers)
            ]
            kind = b"chat.completion"
        self.requests += 1
        self.tokens += sampled
        self.log.append((model, body.get("seed"), turn, variants, prompt, arrived, time.monotonic()))
        return (
            b'{"id":"cmpl-%d","object":"%b","created":0,"model":%b,"choices":[%b],"usage":{"prompt_tokens":%d,'
            b'"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null}}'
        ) % (
            self.requests,
            kind,
            json.dumps(model).encode(),
            b",".join(choices),
            prompt,
            prompt + sampled,
            sampled,
        )


def _choice(answer: Answer) -> bytes:
    """A choice of ``/v1/completions`` without its opening brace, index and prompt."""
    offsets, at = [], 0
    for token in answer.tokens:
        offsets.append(at)
        at += len(token)
    fields = {
        "text": "".join(answer.tokens),
        "logprobs": {
            "text_offset": offsets,
            "token_logprobs": answer.logprobs,
            "tokens": answer.tokens,
            "top_logprobs": [{t: p} for t, p in zip(answer.tokens, answer.logprobs, strict=True)],
        },
        "finish_reason": answer.finish,
        "stop_reason": answer.ids[-1] if answer.finish == "stop" else None,
        "token_ids": answer.ids,
        "prompt_logprobs": None,
    }
    return json.dumps(fields, separators=(",", ":"))[1:-1].encode()


class _Connection(asyncio.Protocol):
    """One client: requests come one after the other, each with a Content-Length."""

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.buffer = bytearray()
        self.head: tuple[str, str, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            if self.head is None:
                end = self.buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                first, *headers = self.buffer[:end].decode("latin-1").split("\r\n")
                method, path, _ = first.split(" ", 2)
                lengths = [h.split(":", 1)[1] for h in headers if h.lower().startswith("content-length:")]
                self.head = (method, path, int(lengths[0]) if lengths else 0)
                del self.buffer[: end + 4]
            method, path, length = self.head
            if len(self.buffer) < length:
                return
            raw, self.head = bytes(self.buffer[:length]), None
            del self.buffer[:length]
            self.respond(method, path, raw)

    def respond(self, method: str, path: str, raw: bytes) -> None:
        server, arrived = self.server, time.monotonic()
        if method == "GET":
            self.send(*server.get(path))
            return
        body = json.loads(raw)
        if (
            path not in ("/v1/completions", "/v1/chat/completions")
            or body.get("model") not in server.script.answers
        ):
            self.send(404, json.dumps({"error": f"nothing at {path} for {body.get('model')!r}"}).encode())
            return
        server.open += 1
        server.most_open = max(server.most_open, server.open)

        def done() -> None:
            server.open -= 1
            self.send(200, server.answer(path, raw, body, arrived))

        if server.latency is None and server.slots is None:
            done()
        else:
            server.work(server.latency(body) if server.latency else 0.0, done)

    def send(self, status: int, body: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 %d %b\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (status, b"OK" if status == 200 else b"Not Found", len(body))
            + body
        )


def _serve(script: Script, latency: Latency | None, slots: int | None, out: Connection) -> None:
    async def run() -> None:
        server = _Server(script, latency, slots)
        listener = await asyncio.get_running_loop().create_server(
            lambda: _Connection(server), "127.0.0.1", 0, backlog=4096
        )
        out.send(listener.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(run())

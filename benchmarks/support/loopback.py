"""A vLLM-like server on loopback with scripted answers, in a process of its own, so that its CPU is nobody else's.

It speaks HTTP/1.1 through a bare asyncio protocol and answers ``/v1/completions`` (prompts of token ids) and
``/v1/chat/completions`` with what vLLM 0.31 puts into such answers: the prompt's ids again for ``return_token_ids``, tokens and
top log-probs beside the sampled ids. What it says follows from the bytes of a request alone, never from the order of arrival,
and is put together from sentences that were tokenised beforehand. ``latency(body)`` and ``slots`` make a server of a given speed
out of it.
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
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Latency = Callable[[dict[str, Any]], float]
"""Seconds that a request (its parsed body) is worked on. A module-level function, so that it can be sent to the process."""


@dataclass(frozen=True)
class Piece:
    """A sentence, or a part of one, that is tokenised alike wherever it stands in an answer."""

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """The ids as texts, one each."""
    logprobs: tuple[float, ...]

    @cached_property
    def json(self) -> tuple[bytes, ...]:
        """Without brackets: text, ids, log-probs, tokens, top log-probs."""
        top = [{t: p} for t, p in zip(self.tokens, self.logprobs, strict=True)]
        fields = ("".join(self.tokens), self.ids, self.logprobs, self.tokens, top)
        return tuple(json.dumps(f, separators=(",", ":"))[1:-1].encode() for f in fields)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says to one request. ``text`` is without the stop token, with which ``ids`` end."""

    text: str
    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Script:
    """What the server says: sentences drawn by a checksum of the request's bytes, so that hardly two answers are alike.

    ``tokens[model]``: the possible lengths of an answer, stop token included; one is drawn. ``tests[model]``: that of each sample
    where a request asks for several (a post-test), which then end with a boxed number.
    """

    tokens: Mapping[str, Sequence[int]]
    tests: Mapping[str, int]
    first: Sequence[Piece]
    """Sentences that begin an answer."""
    further: Sequence[Piece]
    """The same with a space before them."""
    parts: Mapping[int, Sequence[Piece]]
    """Beginnings of sentences by their number of tokens, with a space before them: they fill an answer up."""
    boxes: Sequence[Piece]
    """Boxed numbers, with a space before them; all have as many tokens."""
    stop: Piece
    max_model_len: int

    def keys(self, raw: bytes, n: int) -> list[int]:
        """One for each of the ``n`` answers to a request with the bytes ``raw``."""
        first = zlib.crc32(raw)
        return [first] if n == 1 else [_next(first + i) for i in range(n)]

    def pieces(self, model: str, key: int, n: int = 1) -> list[Piece]:
        """The answer with this key, as one of ``n``."""
        x = _next(key)
        tail: list[Piece] = []
        if n > 1 and model in self.tests:
            left = self.tests[model]
            tail = [self.boxes[(x >> 33) % len(self.boxes)]]
        else:
            lengths = self.tokens[model]
            left = lengths[(x >> 33) % len(lengths)]
        tail.append(self.stop)
        left -= sum(len(p.ids) for p in tail)
        longest, source = max(self.parts), self.first
        out: list[Piece] = []
        while left > longest or not out:
            x = _next(x)
            out.append(source[(x >> 33) % len(source)])
            left -= len(out[-1].ids)
            source = self.further
        while left > 0:
            x = _next(x)
            part = min(left, longest)
            out.append(self.parts[part][(x >> 33) % len(self.parts[part])])
            left -= part
        if left < 0:
            raise ValueError(f"an answer of {model} is too short for a sentence of {len(out[0].ids)} tokens")
        return out + tail

    def said(self, model: str, key: int, n: int = 1) -> Answer:
        """The answer that the log of the server names."""
        found = self.pieces(model, key, n)
        return Answer(
            "".join(p.text for p in found[:-1]),
            [i for p in found for i in p.ids],
            [x for p in found for x in p.logprobs],
        )


def _next(x: int) -> int:
    """A linear congruential step (Knuth's MMIX): draws without a generator's state."""
    return (x * 6364136223846793005 + 1442695040888963407) % 2**64


def make_script(
    tokenizer: Any,
    tokens: Mapping[str, int | Sequence[int]],
    *,
    tests: Mapping[str, int] | None = None,
    max_model_len: int = 32_768,
    seed: int = 0,
) -> Script:
    """A script of sentences of the shipped problems and dialogues; ``tokens`` and ``tests`` as in :class:`Script`.

    ``tokenizer``: a fast byte-level one with ChatML tokens, which takes every word with the space before it.
    """
    rng = random.Random(seed)

    def piece(text: str, ids: Sequence[int]) -> Piece:
        return Piece(
            text,
            tuple(ids),
            tuple(tokenizer.decode([i]) for i in ids),
            tuple(round(-rng.expovariate(1.5), 6) for _ in ids),
        )

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    sentences = _sentences()
    first = [piece(s, encode(s)) for s in sentences]
    further = [piece(f" {s}", encode(f" {s}")) for s in sentences]
    parts: dict[int, list[Piece]] = {n: [] for n in range(1, 33)}
    for whole in further:
        for n in range(1, min(len(whole.ids), max(parts)) + 1):
            text = tokenizer.decode(whole.ids[:n])
            # A cut inside a word may tokenise otherwise than it was cut.
            if text[-1:].strip() and len(parts[n]) < 100 and encode(text) == list(whole.ids[:n]):
                parts[n].append(piece(text, whole.ids[:n]))
    boxes = [piece(t, encode(t)) for n in range(10, 100) if (t := f" \\boxed{{{n}}}")]
    most = max(len(b.ids) for b in boxes)
    end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return Script(
        {m: [n] if isinstance(n, int) else list(n) for m, n in tokens.items()},
        dict(tests or {}),
        [p for p in first if len(p.ids) <= 24],
        [p for p in further if len(p.ids) <= 32],
        {n: found for n, found in parts.items() if found},
        [b for b in boxes if len(b.ids) == most],
        piece("", [end]),
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
        """Every answer since the last :meth:`reset`: ``model``, ``seed``, ``n``, ``keys`` (for :meth:`Script.said`),
        ``prompt`` (its length in tokens or messages), ``arrived`` and ``answered`` (seconds of one monotonic clock)."""
        names = ("model", "seed", "n", "keys", "prompt", "arrived", "answered")
        return [dict(zip(names, row, strict=True)) for row in self._get("/served")]

    def stats(self) -> dict[str, float]:
        """``requests``, ``tokens`` (sampled), ``most_open`` (at once), ``most_working`` (slots in use at once), ``busy_s`` (work,
        summed) and ``cpu_s`` since the reset."""
        found: dict[str, float] = self._get("/stats")
        return found

    def reset(self) -> None:
        """Forget what was served and counted."""
        self._get("/reset")


class _Server:
    """Everything that connections share."""

    def __init__(self, script: Script, latency: Latency | None, slots: int | None) -> None:
        self.script, self.latency, self.slots = script, latency, slots
        self.waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self.reset()

    def reset(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.open = self.most_open = self.requests = self.tokens = self.working = self.most_working = 0
        self.busy = 0.0
        self.cpu = time.process_time()

    def work(self, seconds: float, done: Callable[[], None]) -> None:
        """Call ``done`` after ``seconds`` of a slot."""
        if self.slots is not None and self.working >= self.slots:
            self.waiting.append((seconds, done))
            return
        self.working += 1
        self.most_working = max(self.most_working, self.working)
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
            cards = [{"id": m, "max_model_len": self.script.max_model_len} for m in self.script.tokens]
            answer = {"object": "list", "data": cards}
        elif path == "/served":
            answer = self.log
        elif path == "/stats":
            answer = {"requests": self.requests, "tokens": self.tokens, "most_open": self.most_open,
                      "most_working": self.most_working, "busy_s": self.busy, "cpu_s": time.process_time() - self.cpu}  # fmt: skip
        elif path == "/reset":
            self.reset()
            answer = {}
        else:
            return 404, b"{}"
        return 200, json.dumps(answer).encode()

    def answer(self, path: str, raw: bytes, body: dict[str, Any], arrived: float) -> bytes:
        """The whole answer to one request."""
        model, n, script = body["model"], body.get("n") or 1, self.script
        keys = script.keys(raw, n)
        answers = [script.pieces(model, key, n) for key in keys]
        sampled = sum(len(p.ids) for pieces in answers for p in pieces)
        if path == "/v1/completions":
            prompt, kind = len(body["prompt"]), b"text_completion"
            echo = b"null"
            if body.get("return_token_ids"):
                start = raw.index(b"[", raw.index(b'"prompt"'))
                echo = raw[start : raw.index(b"]", start) + 1]
            choices = [_completion(i, pieces, echo) for i, pieces in enumerate(answers)]
        else:
            prompt, kind = len(body["messages"]), b"chat.completion"
            choices = [_message(i, pieces) for i, pieces in enumerate(answers)]
        self.requests += 1
        self.tokens += sampled
        self.log.append((model, body.get("seed"), n, keys, prompt, arrived, time.monotonic()))
        usage = (
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null}'
            % (prompt, prompt + sampled, sampled)
        )
        return b'{"id":"cmpl-%d","object":"%b","created":0,"model":"%b","choices":[%b],"usage":%b}' % (
            self.requests,
            kind,
            model.encode(),
            b",".join(choices),
            usage,
        )


def _completion(index: int, pieces: Sequence[Piece], prompt: bytes) -> bytes:
    """A choice of ``/v1/completions``, with all that vLLM puts into it for ``logprobs: 0``."""
    text, ids, logprobs, tokens, top = zip(*(p.json for p in pieces), strict=True)
    offsets = b",".join(b"%d" % (4 * i) for i in range(sum(len(p.ids) for p in pieces)))
    return (
        b'{"index":%d,"text":"%b","logprobs":{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]},'
        b'"finish_reason":"stop","stop_reason":null,"token_ids":[%b],"prompt_logprobs":null,"prompt_token_ids":%b}'
    ) % (
        index,
        b"".join(text),
        offsets,
        b",".join(logprobs),
        b",".join(tokens),
        b",".join(top),
        b",".join(ids),
        prompt,
    )


def _message(index: int, pieces: Sequence[Piece]) -> bytes:
    """A choice of ``/v1/chat/completions``."""
    text = b"".join(p.json[0] for p in pieces[:-1])
    return (
        b'{"index":%d,"message":{"role":"assistant","content":"%b","refusal":null},"logprobs":null,'
        b'"finish_reason":"stop","stop_reason":null}'
    ) % (index, text)


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
            or body.get("model") not in server.script.tokens
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

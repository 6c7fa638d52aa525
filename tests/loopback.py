"""Real HTTP servers on 127.0.0.1 for tests: an OpenAI-compatible endpoint whose answers and faults a test scripts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Reply = Callable[[dict[str, Any]], "str | list[str]"]
Fault = Callable[[int, dict[str, Any]], "web.StreamResponse | Any | None"]


class Loopback:
    """``reply(body)`` gives the text of each choice; ``fault(number, body)`` may return a response (or awaitable) instead."""

    def __init__(
        self,
        reply: Reply = lambda body: "ok",
        fault: Fault = lambda number, body: None,
        *,
        keep_alive_s: float = 75.0,
    ) -> None:
        self.reply, self.fault, self.keep_alive_s = reply, fault, keep_alive_s
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0
        self.url = ""
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**30)
        self.routes(app)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=self.keep_alive_s
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            answer = self.fault(len(self.bodies), body)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is not None:
                return answer
            texts = self.reply(body)
            texts = [texts] * body.get("n", 1) if isinstance(texts, str) else texts
            return web.json_response(
                {
                    "choices": [
                        {"index": i, "message": {"role": "assistant", "content": t}, "finish_reason": "stop"}
                        for i, t in enumerate(texts)
                    ],
                    "usage": {"prompt_tokens": 100, "completion_tokens": 10 * len(texts)},
                }
            )
        finally:
            self.open -= 1


class InThread:
    """A server in a thread of its own, for code under test that blocks its event loop (a training run).

    ``stop`` closes its port as a crash would; ``start`` opens the same port again.
    """

    def __init__(self, server: Loopback, beside: InThread | None = None) -> None:
        """``beside``: share the thread of another one (several engines in process must run in one thread)."""
        self.server, self._owner = server, beside is None
        self._loop = asyncio.new_event_loop() if beside is None else beside._loop
        if beside is None:
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.start(self.server.port), self._loop).result(30)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(), self._loop).result(30)

    def __enter__(self) -> Loopback:
        self.start()
        return self.server

    def __exit__(self, *exc: object) -> None:
        self.stop()
        if self._owner:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()


@asynccontextmanager
async def serving(*servers: Loopback) -> AsyncIterator[None]:
    for s in servers:
        await s.start()
    try:
        yield
    finally:
        for s in servers:
            await s.stop()


def status(code: int, text: str = "", **headers: str) -> web.Response:
    return web.Response(status=code, text=text, headers=headers)


def raw(text: str) -> web.Response:
    return web.Response(text=text, content_type="application/json")


def first(n: int, make: Callable[[], Any]) -> Fault:
    """The fault for the first ``n`` requests, then good answers."""
    return lambda number, body: make() if number <= n else None


def dumps(value: Any) -> str:
    return json.dumps(value)

"""A chat endpoint on this machine for roles that answer by rule: what their servers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from aiohttp import web


class LoopbackChat(ABC):
    """``async with server as url``: an OpenAI-compatible chat endpoint on a free port of 127.0.0.1."""

    _runner: web.AppRunner

    @abstractmethod
    async def _chat(self, request: web.Request) -> web.Response:
        """Answer a request to ``/v1/chat/completions``."""

    async def __aenter__(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

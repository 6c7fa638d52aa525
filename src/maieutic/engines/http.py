"""One pooled HTTP client for any number of equal servers: bounded concurrency, deadlines, retries, routing, outage.

Ownership of time is here alone: an attempt has ``timeout_s``; a request has ``retries`` attempts more after *transient* answers
(408, 409, 425, 429, 5xx, a broken or unreadable body, an attempt that timed out). While no server can be reached at all the
request pauses instead (its retries are not spent); when nothing has answered for ``outage_limit_s``, the run stops with
:class:`EngineDownError`, so that a dead server at night costs a pause and never a wrong score. ``deadline_s`` bounds all of it
(a judge has one: its absence makes verdicts ``unknown`` and the run goes on).

A server is *lost* while connections to it fail or it is silent for ``timeout_s``: its requests, and its dialogues with them, go on
at the others (counted in ``usage/<role>/moved``), and it is asked again after a back-off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import resource
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson

from maieutic import pace
from maieutic.engines.usage import Ledger
from maieutic.errors import EngineDownError, EngineError, EngineMismatchError

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""Statuses that another attempt may cure."""
MAX_BODY_BYTES = 64 * 2**20
AFFINITY_SESSIONS = 65_536
"""Most dialogues whose server is remembered (least recently used go first)."""
CONNECT_S = 10.0
"""Most seconds for a connection to be accepted: a machine that is gone gives no refusal."""
KEEP_ALIVE_S = 4.0
"""Seconds that an idle connection is kept: less than servers keep it (vLLM 5 s), or a request meets one that is being closed."""
_PIECE_BYTES = 2**16
"""Bytes of an answer that are a piece of work more (see :mod:`maieutic.pace`)."""
_ECHO = b'"prompt_token_ids":['
"""Inside a JSON string its quotation marks would be escaped: as it stands, it is a key."""
_SPARE_FILES = 64
"""File descriptors that are left to everything else (logs, weights, workers)."""


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpPolicy:
    """How one endpoint group is called."""

    concurrency: int = 64
    """Most requests in flight to one server."""
    timeout_s: float = 120.0
    retries: int = 4
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    outage_limit_s: float | None = 900.0
    """The run stops when nothing has answered for this long; None: never, requests fail one by one at their deadline."""
    deadline_s: float | None = None
    """Most seconds of one request, attempts and pauses together (then :class:`EngineError`); None: no such limit."""


@dataclass(slots=True)
class _Server:
    url: str
    slots: asyncio.Semaphore
    proxy: dict[str, Any]
    """Arguments of a request that name the proxy of the environment, if there is one for this address."""
    load: int = 0
    """Requests that hold or await a slot."""
    down_until: float = 0.0
    failures: int = 0
    """Failed connections and silences in a row."""
    broken: bool = False
    """A connection failed or broke: what answers next at this address may be another process."""
    mending: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _Loop:
    """What belongs to one event loop."""

    session: aiohttp.ClientSession
    servers: list[_Server]
    sessions: OrderedDict[str, int] = field(default_factory=OrderedDict)


_pools: weakref.WeakSet[HttpPool] = weakref.WeakSet()
"""All pools of the process: they share its file descriptors."""


class _Unreachable(Exception):
    """The server could not be made ready for requests."""


class _Transient(Exception):
    def __init__(self, why: str, retry_after: float | None = None) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class _Silent(_Transient):
    """Nothing came within the time of an attempt: busy, or gone."""


class HttpPool:
    """POSTs JSON to one of several equal servers.

    A ``session`` keeps its server (its prefix cache lives there) unless that server is down or clearly busier than the others;
    requests without one go to the least-loaded server. Usable from several event loops, one after the other or at once.
    """

    def __init__(
        self,
        urls: Sequence[str],
        policy: HttpPolicy,
        *,
        role: str,
        ledger: Ledger,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not urls:
            raise EngineError(f"{role}: no server address was given")
        self.urls = [u.rstrip("/") for u in urls]
        self.policy, self.role, self.ledger = policy, role, ledger
        self.revive: Callable[[str], Awaitable[None]] | None = None
        """Called with a server's address before it gets requests again after a connection to it failed or broke (the tutor's
        weights are put back there). An EngineError of it counts as one of the server's."""
        self._headers = dict(headers or {})
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._last_answer = time.monotonic()
        self._failing_since: float | None = None
        _pools.add(self)

    # ------------------------------------------------------------------ requests

    async def post(self, path: str, body: Mapping[str, Any], *, session: str | None = None) -> dict[str, Any]:
        """One answered request, as parsed JSON.

        Raises:
            EngineError: refused for good (4xx), or still failing after the retries; names server, status and the answer's start.
            EngineDownError: nothing has answered for ``outage_limit_s``.
            SpendingLimitError: the ledger's limit is reached.
        """
        limit = self.policy.deadline_s
        try:
            async with asyncio.timeout(limit):
                return await self._persist(path, body, session)
        except asyncio.CancelledError:
            self.ledger.usage(self.role).cancelled += 1
            raise
        except TimeoutError:
            if limit is None:
                raise
            self.ledger.usage(self.role).failures += 1
            raise EngineError(
                f"{self.role}: {', '.join(self.urls)}: no answer to {path} within the deadline of {limit:g} s"
            ) from None

    async def _persist(self, path: str, body: Mapping[str, Any], session: str | None) -> dict[str, Any]:
        await pace.turn()
        state = self._state()
        payload = _dumps(body)
        usage, policy, spent = self.ledger.usage(self.role), self.policy, 0
        while True:
            self.ledger.check()
            server = self._route(state, session)
            server.load += 1
            try:
                async with server.slots:
                    await self._mend(server)
                    answer = await self._attempt(state, server, path, payload)
            except (
                _Unreachable,
                aiohttp.ClientConnectorError,
            ) as e:  # nobody there: pause, the retries are for servers that answer
                wait = self._lost(server, f"{type(e).__name__}: {e}")
                self._check_outage(server, f"{type(e).__name__}: {e}")
                usage.retries += 1
                if all(s.down_until > time.monotonic() for s in state.servers):
                    await asyncio.sleep(min(wait, 5.0))
                continue
            except _Transient as e:
                if isinstance(e, _Silent):
                    # Each further try of it may cost as long again.
                    self._lost(server, str(e), at_least=policy.timeout_s)
                self._check_outage(server, str(e))
                if spent >= policy.retries:
                    usage.failures += 1
                    raise EngineError(
                        f"{self.role}: {server.url}{path} still fails after {spent + 1} attempts: {e}"
                    ) from None
                spent += 1
                usage.retries += 1
                await asyncio.sleep(self._backoff(spent) if e.retry_after is None else e.retry_after)
                continue
            except EngineError:
                usage.failures += 1
                raise
            finally:
                server.load -= 1
            if server.failures:
                log.warning("%s: %s answers again", self.role, server.url)
            server.failures, server.down_until = 0, 0.0
            self._last_answer, self._failing_since = time.monotonic(), None
            return answer

    async def _attempt(self, state: _Loop, server: _Server, path: str, payload: bytes) -> dict[str, Any]:
        where = f"{server.url}{path}"
        try:
            async with (
                asyncio.timeout(self.policy.timeout_s),
                state.session.post(where, data=payload, **server.proxy) as r,
            ):
                raw = await _read(r, where)
        except aiohttp.ConnectionTimeoutError:
            raise _Unreachable(f"no connection within {CONNECT_S:g} s") from None
        except TimeoutError:
            raise _Silent(f"no answer within {self.policy.timeout_s:g} s") from None
        except aiohttp.ClientConnectorError:
            raise
        except aiohttp.ClientError as e:
            server.broken = True
            raise _Transient(f"the connection broke: {type(e).__name__}: {e}") from None
        await pace.turn(1 + len(raw) // _PIECE_BYTES)  # what is made of the answer comes now
        if r.status in TRANSIENT:
            raise _Transient(f"status {r.status}: {_start(raw)}", _retry_after(r, self.policy.backoff_max_s))
        if r.status >= 400:
            raise EngineError(f"{self.role}: {where} refused the request: status {r.status}: {_start(raw)}")
        try:
            answer = _loads(raw)
        except ValueError:
            raise _Transient(f"the answer is not JSON: {_start(raw)}") from None
        if not isinstance(answer, dict):
            raise _Transient(f"the answer is not a JSON object: {_start(raw)}")
        return answer

    async def _mend(self, server: _Server) -> None:
        if not server.broken or self.revive is None:
            return
        async with server.mending:
            if not server.broken:
                return
            if server.down_until > time.monotonic():
                raise _Unreachable("it was tried a moment ago")
            try:
                await self.revive(server.url)
            except (EngineMismatchError, EngineDownError):
                raise
            except EngineError as e:
                raise _Unreachable(str(e)) from None
            server.broken = False

    async def get(self, path: str, *, url: str | None = None, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """One GET without retries (health checks): status and body; status 0 when nobody answers."""
        state, where = self._state(), (url or self.urls[0]) + path
        try:
            async with asyncio.timeout(timeout_s), state.session.get(where, **_proxy(where)) as r:
                return r.status, await _read(r, where)
        except (aiohttp.ClientError, TimeoutError, _Transient):
            return 0, b""

    async def post_one(
        self, url: str, path: str, body: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """One POST to a named server, without retries. Raises EngineError naming the server; ``{}`` for an empty answer."""
        state = self._state()
        try:
            async with (
                asyncio.timeout(timeout_s),
                state.session.post(url + path, json=dict(body), **_proxy(url)) as r,
            ):
                raw = await _read(r, url + path)
        except TimeoutError:
            raise EngineError(f"{self.role}: {url}{path}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, _Transient) as e:
            raise EngineError(f"{self.role}: {url}{path}: {type(e).__name__}: {e}") from None
        if r.status >= 400:
            raise EngineError(f"{self.role}: {url}{path}: status {r.status}: {_start(raw)}")
        try:
            answer = json.loads(raw or b"{}")
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    async def post_all(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """The same POST to *every* server at once (weight pushes); see :meth:`post_one`."""
        return list(
            await asyncio.gather(*(self.post_one(u, path, body, timeout_s=timeout_s) for u in self.urls))
        )

    async def close(self) -> None:
        """Close this loop's connections; safe to call twice."""
        state = self._loops.pop(asyncio.get_running_loop(), None)
        if state is not None:
            await state.session.close()

    # ------------------------------------------------------------------ routing and outage

    def _state(self) -> _Loop:
        loop = asyncio.get_running_loop()
        state = self._loops.get(loop)
        if state is None:
            self._loops = {k: v for k, v in self._loops.items() if not k.is_closed()}
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            # One share more than there are pools: what else is opened meanwhile grows with them.
            files = max(4, (soft - _SPARE_FILES) // (1 + len(_pools))) if soft > 0 else 10**6
            slots = max(1, min(self.policy.concurrency, files // len(self.urls)))
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=slots * len(self.urls), keepalive_timeout=KEEP_ALIVE_S),
                headers={"Content-Type": "application/json", **self._headers},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                # With trust_env each request would go through two threads, to look for a proxy and a password.
                trust_env=False,
            )
            state = _Loop(session, [_Server(u, asyncio.Semaphore(slots), _proxy(u)) for u in self.urls])
            self._loops[loop] = state
        return state

    def _route(self, state: _Loop, session: str | None) -> _Server:
        now = time.monotonic()
        up = [i for i, s in enumerate(state.servers) if s.down_until <= now] or range(len(state.servers))
        least = min(up, key=lambda i: (state.servers[i].load, i))
        if session is None:
            return state.servers[least]
        own = state.sessions.get(session)
        # A cached prefix is worth some waiting, not a queue of its own.
        busy = own is not None and state.servers[own].load > 2 * state.servers[least].load + 8
        if own is None or own not in up or busy:
            if own is not None and own not in up:
                self.ledger.usage(self.role).moved += 1
            own = least
        state.sessions[session] = own
        state.sessions.move_to_end(session)
        if len(state.sessions) > AFFINITY_SESSIONS:
            state.sessions.popitem(last=False)
        return state.servers[own]

    def lose(self, url: str, why: str) -> None:
        """Take a server out of service, as if a connection to it had failed: it is revived before it gets requests again."""
        for server in self._state().servers:
            if server.url == url:
                self._lost(server, why)

    def found(self, url: str) -> None:
        """A server is in service (again), with nothing left to revive."""
        for server in self._state().servers:
            if server.url == url:
                server.broken, server.failures, server.down_until = False, 0, 0.0

    def in_service(self, url: str) -> bool:
        """The server was not lost, or answers again (and was revived)."""
        return not any(s.broken for s in self._state().servers if s.url == url)

    def _lost(self, server: _Server, why: str, at_least: float = 0.0) -> float:
        """Set a server aside; returns for how many seconds."""
        if not server.failures:
            log.warning("%s: %s is lost (%s)", self.role, server.url, why)
        server.failures += 1
        server.broken = True  # what answers next may have been started anew
        wait = max(at_least, self._backoff(server.failures))
        server.down_until = time.monotonic() + wait
        return wait

    def _backoff(self, attempt: int) -> float:
        full = min(self.policy.backoff_max_s, self.policy.backoff_s * 2 ** min(attempt - 1, 16))
        return full * random.uniform(0.5, 1.0)  # jitter: never part of what a seed fixes

    def _check_outage(self, server: _Server, why: str) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        silent = now - max(self._failing_since, self._last_answer)
        if self.policy.outage_limit_s is not None and silent > self.policy.outage_limit_s:
            raise EngineDownError(
                f"{self.role}: none of {', '.join(self.urls)} has answered for {silent:.0f} s "
                f"(limit {self.policy.outage_limit_s:g} s); last failure at {server.url}: {why}"
            )


def _proxy(url: str) -> dict[str, Any]:
    """What the environment says (HTTP_PROXY, NO_PROXY, …) about an address, as arguments of a request."""
    parts = urlsplit(url)
    if not parts.hostname or proxy_bypass(parts.hostname):
        return {}
    proxy = getproxies().get(parts.scheme)
    return {"proxy": proxy} if proxy else {}


def _dumps(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # half a surrogate pair, an integer of over 64 bits: rare, and not everywhere an error
        return json.dumps(body, ensure_ascii=True).encode()


def _without_echo(raw: bytes) -> bytes:
    """An answer but for its prompt's ids: vLLM sends them back with every choice, and they grow with the dialogue."""
    parts, begin = [], 0
    while (at := raw.find(_ECHO, begin)) >= 0 and (end := raw.find(b"]", at)) >= 0:
        parts += [raw[begin:at], b'"prompt_token_ids":null']
        begin = end + 1
    return b"".join([*parts, raw[begin:]]) if parts else raw


def _loads(raw: bytes) -> Any:
    try:
        return orjson.loads(_without_echo(raw))
    except ValueError:  # NaN and halves of surrogate pairs are no JSON to it; lists in an echo break the cut
        return json.loads(raw)


async def _read(r: aiohttp.ClientResponse, where: str) -> bytes:
    parts, size = [], 0
    async for chunk in r.content.iter_any():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            r.close()
            raise _Transient(f"{where}: the answer is larger than {MAX_BODY_BYTES // 2**20} MiB")
        parts.append(chunk)
    return b"".join(parts)


def _start(raw: bytes) -> str:
    return raw[:300].decode("utf-8", "replace")


def _retry_after(r: aiohttp.ClientResponse, most: float) -> float | None:
    try:
        return min(most, max(0.0, float(r.headers["Retry-After"])))
    except (KeyError, ValueError):
        return None

"""What the HTTP client reads of its environment, and how bodies become JSON and back."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from maieutic.engines.http import HttpPolicy, HttpPool, _dumps, _loads, _proxy
from maieutic.engines.usage import Ledger


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_requests_go_through_the_proxy_of_the_environment_with_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads: list[str] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        if length := re.search(r"content-length: (\d+)", head, re.IGNORECASE):
            await reader.readexactly(int(length[1]))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\nconnection: close\r\n\r\n" + b'{"a": 1}')
        await writer.drain()
        writer.close()

    async def go() -> tuple[object, object, object]:
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://us%40er:p%3Aw@127.0.0.1:{port}")
        url = "http://server.test:9"
        pool = HttpPool([url], HttpPolicy(timeout_s=5, retries=0), role="student", ledger=Ledger())
        try:
            return (
                await pool.post("/v1", {"x": 1}),
                await pool.get("/health"),
                await pool.post_one(url, "/rpc", {}, timeout_s=5),
            )
        finally:
            await pool.close()
            server.close()

    assert asyncio.run(go()) == ({"a": 1}, (200, b'{"a": 1}'), {"a": 1})
    assert [h.split(" HTTP")[0] for h in heads] == [
        "POST http://server.test:9/v1",
        "GET http://server.test:9/health",
        "POST http://server.test:9/rpc",
    ]
    # base64 of us@er:p:w
    assert all("Proxy-Authorization: Basic dXNAZXI6cDp3" in h for h in heads)


def test_addresses_that_need_no_proxy_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "localhost,.cluster.example")
    assert _proxy("http://other.example:80") == {"proxy": "http://proxy:3128"}
    for url in ("http://localhost:8000", "http://a.cluster.example:1", "https://other.example"):
        assert _proxy(url) == {}


ECHO = '"prompt_token_ids":'


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (f'{{"c":[{{{ECHO}[1,2],"t":[3]}},{{{ECHO}[4],"t":[5]}}]}}', {"c": [{"t": [3]}, {"t": [5]}]}),
        (f'{{{ECHO}[],"t":[]}}', {"t": []}),
        (f'{{{ECHO} [1, 2],"t":7}}', {"t": 7}),
        # Beyond what the quick parser takes, or the cut of the echo understands.
        (f'{{{ECHO}[[1,2],[3]],"t":1}}', {"t": 1}),
        ('{"t":"\\ud800"}', {"t": "\ud800"}),
        ('{"t":-Infinity}', {"t": -float("inf")}),
        ('\ufeff{"t":1}', {"t": 1}),
    ],
)
def test_an_answer_is_what_it_says_but_for_the_echo_of_its_prompt(raw: str, expected: object) -> None:
    def without(value: object) -> object:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k != "prompt_token_ids"}
        return [without(v) for v in value] if isinstance(value, list) else value

    assert without(_loads(raw.encode())) == without(json.loads(raw.encode())) == expected


def test_what_a_model_writes_about_the_echo_is_kept() -> None:
    answer = {"t": 'Look: "prompt_token_ids":[1,2] and more', "u": '\\"prompt_token_ids":[1]'}
    assert _loads(json.dumps(answer, separators=(",", ":")).encode()) == answer


@pytest.mark.parametrize("raw", [b"", b"{", f"{{{ECHO}[1".encode(), b"\xff{}"])
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        _loads(raw)


def test_bodies_that_the_quick_writer_refuses_are_written_all_the_same() -> None:
    for body in ({"p": (1, 2), "t": "é\n"}, {"t": "\ud800"}, {"s": 2**70}, {"m": {1: 2}}):
        assert json.loads(_dumps(body)) == json.loads(json.dumps(body))

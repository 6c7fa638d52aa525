"""The pooled HTTP client and the chat client against real servers on loopback: every fault ends as it is promised."""

from __future__ import annotations

import asyncio
import resource
import time

import pytest

import maieutic.engines.http as http
from loopback import Loopback, first, raw, serving, status
from maieutic.dialogue import Message
from maieutic.engines.base import Sampling
from maieutic.engines.chat import HttpChat, neutralise
from maieutic.engines.http import HttpPolicy, HttpPool
from maieutic.engines.usage import Ledger, Price
from maieutic.errors import EngineDownError, EngineError, SpendingLimitError

FAST = HttpPolicy(
    concurrency=8, timeout_s=0.5, retries=2, backoff_s=0.01, backoff_max_s=0.05, outage_limit_s=0.6
)
ASK = [Message("system", "s"), Message("user", "hello")]


def ask(pool: HttpPool, n: int = 1, price: Price | None = None, **kw):
    return HttpChat(pool, "m", price=price).complete(ASK, Sampling(0.6, 1.0, 32), seed=7, n=n, **kw)


def run(server: Loopback, body, policy: HttpPolicy = FAST, limit: float | None = None):
    """Run ``body(pool)`` against one server; returns (its result or exception, pool)."""

    async def go():
        async with serving(server):
            pool = HttpPool([server.url], policy, role="student", ledger=Ledger(limit))
            try:
                return await body(pool), pool
            except EngineError as e:
                return e, pool
            finally:
                await pool.close()

    return asyncio.run(go())


def test_one_request_carries_what_was_asked_and_counts_tokens():
    server = Loopback(lambda body: ["a", "b", "c"])
    out, pool = run(server, lambda p: ask(p, n=3, price=Price(input=2.0, output=10.0)))
    assert [c.text for c in out] == ["a", "b", "c"]
    body = server.bodies[0]
    assert (body["n"], body["seed"], body["max_tokens"], body["temperature"]) == (3, 7, 32, 0.6)
    assert len(server.bodies) == 1
    usage = pool.ledger.usage("student")
    assert (usage.requests, usage.prompt_tokens, usage.completion_tokens, usage.retries) == (1, 100, 30, 0)
    assert usage.usd == pytest.approx((100 * 2 + 30 * 10) / 1e6, abs=1e-15)


@pytest.mark.parametrize("code", [408, 409, 425, 429, 500, 502, 503, 504])
def test_transient_status_is_retried(code):
    out, pool = run(Loopback(fault=first(2, lambda: status(code, "busy"))), ask)
    assert out[0].text == "ok"
    assert pool.ledger.usage("student").retries == 2 and pool.ledger.usage("student").requests == 1


def test_retries_are_bounded_and_the_error_names_server_and_status():
    server = Loopback(fault=lambda n, b: status(500, "boom"))
    out, pool = run(server, ask)
    assert isinstance(out, EngineError) and not isinstance(out, EngineDownError)
    assert server.url in str(out) and "500" in str(out) and "boom" in str(out)
    assert len(server.bodies) == FAST.retries + 1 and pool.ledger.usage("student").failures == 1


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413, 422])
def test_a_refusal_is_not_retried(code):
    server = Loopback(fault=lambda n, b: status(code, "no"))
    out, _ = run(server, ask)
    assert isinstance(out, EngineError) and str(code) in str(out) and len(server.bodies) == 1


def test_retry_after_is_honoured_but_bounded():
    server = Loopback(fault=first(1, lambda: status(429, "slow down", **{"Retry-After": "3600"})))
    t = time.monotonic()
    out, _ = run(server, ask)
    assert out[0].text == "ok" and time.monotonic() - t < 3


def test_a_hang_ends_at_the_deadline():
    server = Loopback(fault=lambda n, b: asyncio.sleep(60))
    t = time.monotonic()
    out, _ = run(server, ask, HttpPolicy(timeout_s=0.2, retries=1, backoff_s=0.01, outage_limit_s=60))
    assert isinstance(out, EngineError) and "no answer within 0.2 s" in str(out)
    assert time.monotonic() - t < 5 and len(server.bodies) == 2


def test_a_request_given_up_under_way_is_counted():
    async def give_up(pool):
        asked = asyncio.create_task(ask(pool))
        while not server.bodies:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    server = Loopback(fault=lambda n, b: asyncio.sleep(60))
    _, pool = run(server, give_up)
    usage = pool.ledger.usage("student")
    assert (usage.cancelled, usage.requests, usage.failures, usage.completion_tokens) == (1, 0, 0, 0)


@pytest.mark.parametrize("junk", ["", "not json", "[1, 2]", '"text"', '{"choices": ', "\x00\xff"])
def test_junk_is_retried_and_never_becomes_an_answer(junk):
    out, _ = run(Loopback(fault=first(1, lambda: raw(junk))), ask)
    assert out[0].text == "ok"
    out, _ = run(Loopback(fault=lambda n, b: raw(junk)), ask)
    assert isinstance(out, EngineError) and "JSON" in str(out)


@pytest.mark.parametrize(
    "body", ["{}", '{"choices": []}', '{"choices": [{"message": {"content": 5}}]}', '{"choices": "x"}']
)
def test_an_answer_of_the_wrong_shape_is_an_error(body):
    out, _ = run(Loopback(fault=lambda n, b: raw(body)), ask)
    assert isinstance(out, EngineError)


def test_a_choice_without_content_is_empty_text():
    out, _ = run(Loopback(fault=lambda n, b: raw('{"choices": [{"message": {"content": null}}]}')), ask)
    assert out[0].text == ""


def test_an_oversized_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr("maieutic.engines.http.MAX_BODY_BYTES", 10_000)
    out, _ = run(Loopback(reply=lambda b: "x" * 50_000), ask)
    assert isinstance(out, EngineError) and "larger than" in str(out)


def test_a_server_that_comes_back_costs_a_pause_not_a_retry():
    server = Loopback()

    async def go():
        await server.start()
        port = server.port
        pool = HttpPool(
            [server.url], HttpPolicy(retries=0, backoff_s=0.02, outage_limit_s=20), role="s", ledger=Ledger()
        )
        await ask(pool)
        await server.stop()
        pending = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.4)
        assert not pending.done()
        await server.start(port)
        out = await asyncio.wait_for(pending, 10)
        await pool.close()
        await server.stop()
        return out

    assert asyncio.run(go())[0].text == "ok"


def test_a_server_that_stays_dead_stops_the_run_by_name():
    async def go():
        pool = HttpPool(["http://127.0.0.1:9"], FAST, role="judge", ledger=Ledger())
        t = time.monotonic()
        with pytest.raises(EngineDownError, match=r"judge.*127\.0\.0\.1:9.*has answered"):
            await ask(pool)
        await pool.close()
        return time.monotonic() - t

    assert 0.5 < asyncio.run(go()) < 6


def test_one_dead_server_of_two_only_degrades():
    good = Loopback()

    async def go():
        async with serving(good):
            pool = HttpPool(["http://127.0.0.1:9", good.url], FAST, role="s", ledger=Ledger())
            out = await asyncio.gather(*(ask(pool, session=f"d{i}") for i in range(40)))
            await pool.close()
            return out

    assert len(asyncio.run(go())) == 40 and len(good.bodies) == 40


def test_sessions_keep_their_server_and_load_is_spread():
    a, b = Loopback(fault=lambda n, x: asyncio.sleep(0.02)), Loopback(fault=lambda n, x: asyncio.sleep(0.02))

    async def go():
        async with serving(a, b):
            pool = HttpPool([a.url, b.url], HttpPolicy(concurrency=64, retries=0), role="s", ledger=Ledger())
            seen: dict[str, set[str]] = {}

            async def dialogue(i: int) -> None:
                for turn in range(3):
                    chat = HttpChat(pool, f"d{i}")
                    await chat.complete([Message("user", f"{turn}")], Sampling(), seed=0, session=f"d{i}")

            await asyncio.gather(*(dialogue(i) for i in range(16)))
            for s in (a, b):
                for body in s.bodies:
                    seen.setdefault(body["model"], set()).add(s.url)
            await pool.close()
            return seen

    seen = asyncio.run(go())
    assert all(len(urls) == 1 for urls in seen.values()) and len(seen) == 16
    assert len(a.bodies) == len(b.bodies) == 24


def test_concurrency_is_bounded():
    server = Loopback(fault=lambda n, x: asyncio.sleep(0.01))

    async def body(pool):
        return await asyncio.gather(*(ask(pool) for _ in range(60)))

    out, _ = run(server, body, HttpPolicy(concurrency=5, retries=0))
    assert len(out) == 60 and server.most_open == 5


def test_512_dialogues_under_256_files():
    server = Loopback(fault=lambda n, x: asyncio.sleep(0.002))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:

        async def body(pool):
            return await asyncio.gather(*(ask(pool, session=f"d{i}") for i in range(512)))

        out, pool = run(server, body, HttpPolicy(concurrency=512, retries=0, timeout_s=30))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(out) == 512 and all(c[0].text == "ok" for c in out)
    assert pool.ledger.usage("student").retries == 0 and server.most_open <= 96


def test_the_spending_limit_stops_and_names_the_roles():
    server = Loopback()

    async def body(pool):
        for _ in range(100):
            await ask(pool, price=Price(input=1250.0, output=0.0))  # 12.5 cents a request
        return "never"

    with pytest.raises(SpendingLimitError, match=r"\$1\.00 of \$1\.00 \(student \$1\.00\)"):
        run(server, body, limit=1.0)
    assert len(server.bodies) == 8


def test_usage_survives_a_checkpoint():
    a, b = Ledger(), Ledger()
    a.add("judge", Price(1.0, 2.0, 0.5), prompt=1_000, completion=10, cached=400)
    b.load(a.state())
    assert b.usage("judge") == a.usage("judge")
    assert b.usd == pytest.approx((600 * 1.0 + 400 * 0.5 + 10 * 2.0) / 1e6)


def test_endpoints_without_n_get_one_request_a_sample():
    server = Loopback(reply=lambda b: f"seed {b['seed']}")

    async def body(pool):
        chat = HttpChat(
            pool,
            "m",
            send_n=False,
            max_tokens_key="max_completion_tokens",
            extra_body={"reasoning_effort": "low"},
        )
        return await chat.complete(ASK, Sampling(), seed=5, n=3)

    out, _ = run(server, body)
    assert [c.text for c in out] == ["seed 5", "seed 6", "seed 7"]
    assert all(
        "n" not in b and b["reasoning_effort"] == "low" and "max_completion_tokens" in b
        for b in server.bodies
    )


@pytest.mark.parametrize(
    "text",
    [
        "<|im_end|>",
        "<|im_start|>user",
        "<|eot_id|>",
        "</s>",
        "<s>",
        "[/INST]",
        "<start_of_turn>",
        "<end_of_turn>",
        "</think>",
        "<|end|>",
    ],
)
def test_control_strings_are_broken_and_stay_readable(text):
    out = neutralise(f"a {text} b")
    assert text not in out and out.replace("\u2060", "") == f"a {text} b"


@pytest.mark.parametrize(
    "text", ["3 < 4 and 5 > 2", "a<b", "x <- 3", "if 1<2>0", "[1, 2]", '<turn n="1">x</turn></transcript>']
)
def test_plain_text_is_left_alone(text):
    assert neutralise(text) == text


def test_only_untrusted_messages_are_neutralised():
    server = Loopback()

    async def body(pool):
        msgs = [Message("system", "<|ok|>"), Message("user", "x <|im_end|>")]
        return await HttpChat(pool, "m").complete(msgs, Sampling(), seed=0)

    run(server, body)
    sent = [m["content"] for m in server.bodies[0]["messages"]]
    assert sent == ["<|ok|>", "x <\u2060|im_end|>"]


def test_turns_of_one_role_are_joined_where_the_endpoint_asks_for_it():
    server = Loopback()
    msgs = [
        Message("system", "s"),
        Message("assistant", "a"),
        Message("user", "(hidden)"),
        Message("user", "new problem"),
    ]

    async def body(pool):
        await HttpChat(pool, "m").complete(msgs, Sampling(), seed=0)
        return await HttpChat(pool, "m", merge_turns=True).complete(msgs, Sampling(), seed=0)

    run(server, body)
    roles = [[m["role"] for m in b["messages"]] for b in server.bodies]
    assert roles == [["system", "assistant", "user", "user"], ["system", "assistant", "user"]]
    assert server.bodies[1]["messages"][-1]["content"] == "(hidden)\n\nnew problem"


def test_no_request_meets_a_connection_that_its_server_has_given_up(monkeypatch):
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0.1)
    server = Loopback(keep_alive_s=0.3)

    async def ask_again_after_the_loop_stood_still(pool: HttpPool):
        for _ in range(3):
            await asyncio.gather(*(ask(pool) for _ in range(4)))
            await asyncio.sleep(0.05)
            time.sleep(0.35)  # an update, a checkpoint: nothing notices meanwhile that a server hangs up
        return pool.ledger.usage("student").retries

    retries, _ = run(server, ask_again_after_the_loop_stood_still)
    assert retries == 0 and len(server.bodies) == 12


def test_idle_connections_are_kept_for_less_time_than_vllm_keeps_them():
    assert http.KEEP_ALIVE_S < 5.0

"""The benchmarks that run against vLLM, in miniature against a server with a tiny model, and proof that their checks can fail."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

import training_parts as parts
from maieutic.config import Recipe
from maieutic.engines.http import HttpPolicy, HttpPool
from maieutic.engines.push import DiskPush
from maieutic.engines.usage import Ledger
from maieutic.engines.vllm import VllmEngine
from maieutic.errors import EngineMismatchError
from maieutic.runtime import resolve_env
from maieutic.training.push_probe import make_scorer
from token_server import TokenServer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import prefix_cache
import rollout_efficiency
import weight_push
from support.recording import Call, Recording, first_hits, forced, replay, theoretical
from support.vllm_server import Room, parse_counts

PAGE = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 300.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 120.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 8.0
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="77"} 1.0
python_gc_objects_collected_total{generation="0"} 1.0
"""


class Counting(TokenServer):
    """With the page of counters that the benchmarks read: of prompt tokens, none of them cached, in blocks of 16."""

    looked_up = 0

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_get("/metrics", self._metrics)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.looked_up += 0 if "prompt_logprobs" in body else len(body["prompt"]) * body["n"]
        return await super()._completions(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=f"vllm:prefix_cache_queries_total {self.looked_up}\nvllm:prefix_cache_hits_total 0\n"
            'vllm:cache_config_info{block_size="16"} 1.0\n'
        )


def in_room(model: Path, folder: Path, body: Callable[[Room, str], Awaitable[Any]]) -> Any:
    """Run ``body`` with a classroom whose tutor and student are on one server."""

    async def go() -> Any:
        server = Counting(model)
        await server.start()
        try:
            served = {"kind": "vllm", "urls": [server.url]}
            changes = {"tutor.dtype": "float32", "tutor.engine": served}
            data = parts.recipe_dict(model, folder, **changes)
            data["students"][0] |= {"engine": served, "dtype": "float32"}
            room = await Room.open(resolve_env(Recipe.model_validate_json(json.dumps(data))))
            try:
                return await body(room, server.url)
            finally:
                await room.classroom.close()
        finally:
            await server.stop()

    return asyncio.run(go())


def call(number: int, prompt: list[int], ids: list[list[int]], sent: float, **changes: Any) -> Call:
    """A request that was answered a second after it was sent."""
    body = {"prompt": prompt, "n": len(ids), "max_tokens": 9, "seed": 1}
    answer = {"choices": [{"index": i, "token_ids": x} for i, x in enumerate(ids)]}
    made = Call(number, "tutor", "d", None, body, sent, sent + 1, answer)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


# ---- what a cache can have -------------------------------------------------------------------------------------------


def test_hits_are_whole_blocks_that_were_computed_before() -> None:
    calls = [
        call(0, [1, 2, 3, 4, 5], [[6, 7, 8]], 0.0),
        # While the first runs: its prompt is there, what it samples is not yet.
        call(1, [1, 2, 3, 4, 5, 6, 7, 9], [[9]], 0.5),
        # Finished: 1…7 are computed, 8 was sampled last and never was.
        call(2, [1, 2, 3, 4, 5, 6, 7, 8], [[9]], 2.0),
        call(3, [2, 2, 3, 4], [[9]], 2.0),
    ]
    assert first_hits(calls, 1) == {0: 0, 1: 5, 2: 7, 3: 0}
    assert first_hits(calls, 2) == {0: 0, 1: 4, 2: 6, 3: 0}
    assert first_hits(calls, 4) == {0: 0, 1: 4, 2: 4, 3: 0}
    total = theoretical(calls, 2)["all"]
    assert (total.queries, total.hits, total.rate) == (25, 10, 0.4)


def test_further_choices_find_the_whole_prompt_but_its_last_token() -> None:
    calls = [
        call(0, [1, 2, 3, 4], [[5], [6], [7]], 0.0),
        call(1, [1, 2, 3, 4], [[5]], 3.0, role="student"),
    ]
    found = theoretical(calls, 2)
    assert {k: (c.queries, c.hits) for k, c in found.items()} == {
        "tutor": (12, 4),
        "student": (4, 2),
        "all": (16, 6),
    }


def test_counters_are_read_by_name_and_summed_over_labels() -> None:
    counts = parse_counts(PAGE)
    assert counts["prefix_cache_hits_total"] == 128 and counts["prefix_cache_queries_total"] == 300
    assert counts["block_size"] == 32 and counts["num_gpu_blocks"] == 77
    assert "gc_objects_collected_total" not in counts


# ---- a rollout and its replay ----------------------------------------------------------------------------------------


def test_lengths_are_forced_with_one_request_for_each() -> None:
    made = call(0, [1], [[5] * 4, [6] * 2, [7] * 4], 0.0)
    assert [(b["n"], b["max_tokens"], b["ignore_eos"], b["stop_token_ids"]) for b in forced(made)] == [
        (1, 2, True, []),
        (2, 4, True, []),
    ]
    assert made.body["n"] == 3


def test_a_rollout_is_measured_and_replayed(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def body(room: Room, url: str) -> Any:
        return await rollout_efficiency.measure(room, url, 1), await rollout_efficiency.measure(room, url, 2)

    rows = in_room(tiny_model_dir, tmp_path, body)
    for row in rows:
        assert (
            row["requests"] >= 4 * 3
            and row["post_tests"] == 4
            and row["replayed_requests"] >= row["requests"]
        )
        assert 0 < row["gap"] <= 1e-4 and row["scored"] == row["trained"] > 0
        assert row["continued"] == 4  # two tutor turns a dialogue
        # The same seeds and lengths, so the same ids but where fewer choices share a request.
        assert row["same_ids"] > 0.5
    made = rollout_efficiency.outcome(rows, "tiny", SimpleNamespace(problems=2, group=2))
    assert made.figures[0].runs == [r["tokens"] / r["seconds"] / (r["tokens"] / r["replay_s"]) for r in rows]


@pytest.fixture(scope="module")
def recorded(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Episodes, their requests, a replay of them, and the model."""

    async def body(room: Room, url: str) -> Any:
        _, result, calls = await room.play(1)
        again = await replay(url, calls, [forced(c) for c in calls], room.slots)
        return result.episodes, calls, again, room.policy.model

    return in_room(tiny_model_dir, tmp_path_factory.mktemp("recorded"), body)


def test_a_request_waits_for_the_one_before_it_in_its_dialogue(recorded: Any) -> None:
    _, calls, _, _ = recorded
    for one in calls:
        before = [c for c in calls if c.dialogue == one.dialogue and c.answered <= one.sent]
        assert one.after == (before[-1].number if before else None)
    assert sum(c.after is None for c in calls) == len({c.dialogue for c in calls}) == 4


def test_ids_that_are_not_those_that_were_served_are_refused(recorded: Any) -> None:
    episodes, calls, _, _ = recorded
    assert rollout_efficiency.check_served(calls) == 4
    assert rollout_efficiency.check_trajectories(episodes, calls) > 0
    second = next(c for c in calls if c.role == "tutor" and c.after is not None)
    honest = second.body["prompt"]
    try:
        second.body["prompt"] = [*honest[:-9], honest[-9] ^ 1, *honest[-8:]]
        first_turn = next(c for c in calls if c.role == "tutor" and c.dialogue == second.dialogue)
        second.body["prompt"][len(first_turn.prompt)] ^= 1
        with pytest.raises(SystemExit, match="does not go on from the ids"):
            rollout_efficiency.check_served(calls)
    finally:
        second.body["prompt"] = honest
    usage = second.answer["usage"]
    try:
        usage["prompt_tokens"] -= 1
        with pytest.raises(SystemExit, match="ids, .* were sent"):
            rollout_efficiency.check_served(calls)
    finally:
        usage["prompt_tokens"] += 1
    choice = second.answer["choices"][0]
    ids = choice["token_ids"]
    try:
        choice["token_ids"] = [ids[0] ^ 1, *ids[1:]]
        with pytest.raises(SystemExit, match="ids are not those that were served"):
            rollout_efficiency.check_trajectories(episodes, calls)
    finally:
        choice["token_ids"] = ids


def test_another_number_of_tokens_is_refused(recorded: Any) -> None:
    _, calls, again, _ = recorded
    rollout_efficiency.check_replay(calls, again)
    last = again.answers[-1][-1]["choices"][0]["token_ids"]
    token = last.pop()
    with pytest.raises(SystemExit, match="tokens replayed"):
        rollout_efficiency.check_replay(calls, again)
    last.append(token)


def test_a_server_that_read_another_prompt_is_refused(recorded: Any) -> None:
    _, calls, again, _ = recorded
    choice = again.answers[-1][-1]["choices"][0]
    honest = choice["prompt_token_ids"]
    try:
        for other in ([*honest[:-1], honest[-1] ^ 1], None):
            choice["prompt_token_ids"] = other
            with pytest.raises(SystemExit, match="read the ids that were sent"):
                rollout_efficiency.check_replay(calls, again)
    finally:
        choice["prompt_token_ids"] = honest


def test_moved_weights_show_in_the_log_probs(recorded: Any) -> None:
    episodes, _, _, model = recorded
    assert rollout_efficiency.logprob_gap(model, episodes)[0] <= 1e-4
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        before = weight.clone()
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 0.02)
    try:
        assert rollout_efficiency.logprob_gap(model, episodes)[0] > rollout_efficiency.TOLERANCE
    finally:
        with torch.no_grad():
            weight.copy_(before)


# ---- prefix cache and post-tests -------------------------------------------------------------------------------------


def test_hits_and_post_tests_are_measured(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def body(room: Room, url: str) -> Any:
        rows: list[dict[str, float]] = []
        calls = await prefix_cache.play(room, url, 1, rows)
        return rows[0], await prefix_cache.compare(room, url, calls, 3, one_first=True)

    prefix_cache.TEST_TOKENS, whole = 4, prefix_cache.TEST_TOKENS
    try:
        cached, tested = in_room(tiny_model_dir, tmp_path, body)
    finally:
        prefix_cache.TEST_TOKENS = whole
    assert cached["rate"] == 0.0 < cached["theory"] < cached["bound"] < 1
    assert tested["tests"] == 4 and tested["same_ids"] > 0.5


def test_k_requests_ask_for_what_one_asks(recorded: Any) -> None:
    _, calls, again, _ = recorded
    (test,) = [c for c in calls if c.number == max(prefix_cache.post_tests(calls, 4))]
    (one,), many = prefix_cache.as_one(test, 3), prefix_cache.as_many(test, 3)
    assert one["n"] == len(many) == 3 and {b["n"] for b in many} == {1}
    assert [b["seed"] for b in many] == [one["seed"] + i for i in range(3)]
    assert {(tuple(b["prompt"]), b["max_tokens"]) for b in (one, *many)} == {(tuple(test.prompt), 32)}
    short = type(again)(again.seconds, json.loads(json.dumps(again.answers)), again.requests, again.took)
    short.answers[0][0]["choices"][0]["token_ids"].pop()
    with pytest.raises(SystemExit, match="tokens as one request"):
        prefix_cache.check_same_work(calls, again, short)


# ---- pushes ----------------------------------------------------------------------------------------------------------


def pushed(model_dir: Path, folder: Path, stale: set[str], tolerance: float) -> dict[str, float]:
    async def go() -> dict[str, float]:
        server = TokenServer(model_dir)
        await server.start()
        server.stale = stale
        engine = VllmEngine(HttpPool([server.url], HttpPolicy(), role="tutor", ledger=Ledger()))
        try:
            await engine.start()
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
            probe = weight_push.sequences(300, (2, 12), 0)
            push = DiskPush(
                model, engine, folder, probe=probe, score=make_scorer(model, 64), tolerance=tolerance
            )
            return await weight_push.push_once(push, engine, model, 1, folder)
        finally:
            await engine.close()
            await server.stop()

    return asyncio.run(go())


def test_a_push_is_measured_and_compared(tiny_model_dir: Path, tmp_path: Path) -> None:
    row = pushed(tiny_model_dir, tmp_path, set(), 1e-3)
    assert row["gap"] <= 1e-4 < 1e-2 < row["stale_gap"]
    assert (
        row["bytes"] > (tiny_model_dir / "model.safetensors").stat().st_size
    )  # the tied head is written, too
    assert row["total_s"] >= row["write_s"] + row["load_s"] + row["probe_s"] > 0


@pytest.mark.parametrize("tolerance", [1e-3, 1e9], ids=["by the push itself", "by the benchmark"])
def test_embeddings_that_stay_behind_are_refused(
    tolerance: float, tiny_model_dir: Path, tmp_path: Path
) -> None:
    error = EngineMismatchError if tolerance < 1 else SystemExit
    with pytest.raises(error, match="stayed behind|server and trainer differ"):
        pushed(tiny_model_dir, tmp_path, {"model.embed_tokens.weight", "lm_head.weight"}, tolerance)


def test_a_move_too_small_to_show_is_refused(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_push, "move", lambda model, seed: None)
    with pytest.raises(SystemExit, match="nothing would show"):
        pushed(tiny_model_dir, tmp_path, set(), 1e-3)


def test_a_recording_begins_anew() -> None:
    recording = Recording([call(0, [1], [[2]], 0.0)], {"d": 0})
    assert [c.number for c in recording.take()] == [0]
    assert recording.take() == []

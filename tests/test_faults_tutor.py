"""Faults of the tutor's servers, through the training loop: what is trained is what they served with the weights of the step."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import maieutic.engines.http as http
import training_parts as parts
from fault_parts import (
    TRANSIENT,
    assert_nothing_scored_silently,
    assert_on_policy,
    engine,
    recipe_of,
    speak,
    steps,
    tutor_recipe,
)
from loopback import InThread, Loopback, dumps, raw
from maieutic.errors import (
    EngineDownError,
    EngineError,
    EngineMismatchError,
)
from maieutic.training import loop
from maieutic.transcripts import read_episodes
from token_server import TokenServer

pytestmark = pytest.mark.integration

# ---- the tutor's engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_tutor_engine_that_recovers_costs_retries_only(
    fault: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 65_536)
    # 1-4 are the start-up probe.
    bad = {6, 7}
    server = TokenServer(tiny_model_dir, lambda n, body: TRANSIENT[fault]() if n in bad else None)
    with InThread(server) as tutor, InThread(Loopback(speak)) as student:
        short = {"timeout_s": 1.5, "retries": 6} if fault == "hangs" else {}
        recipe = tutor_recipe(tiny_model_dir, tmp_path, tutor, student, **{"training.max_steps": 1, **short})
        run = loop.run(recipe).folder
    (row,) = parts.metrics_of(run)
    assert row["rollout/excluded_share"] == 0 and row["usage/tutor/retries"] >= 2
    assert row["usage/tutor/failures"] == 0
    assert_on_policy(run)


def test_trained_ids_are_served_ids_and_every_step_is_pushed_before_its_first_request(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    server = TokenServer(tiny_model_dir)
    order: list[str] = []
    server.fault = lambda n, body: order.append("ask")
    server.rpc_fault = lambda n, body: order.append("push")
    with InThread(server) as tutor, InThread(Loopback(speak)) as student:
        recipe = tutor_recipe(tiny_model_dir, tmp_path, tutor, student, **{"tutor.lora": None})
        run = loop.run(recipe).folder
    # the start-up probe and step 1 share a push
    assert re.fullmatch(r"P(A{12})P(A{8})P(A{8})", "".join(c[0].upper() for c in order))
    assert server.resets == 3
    served = sorted(tuple(ids) for n, ids in server.served.items() if n > 4)
    trained = []
    for e in read_episodes(run, "train"):
        turns: list[int] = []
        (segment,) = e.trajectory.segments
        for i, masked in zip(segment.ids, segment.mask, strict=True):
            if masked:
                turns.append(i)
            elif turns:
                trained.append(tuple(turns))
                turns = []
        trained.append(tuple(turns))
    assert sorted(trained) == served and len(served) == 24
    assert_on_policy(run)
    assert all(r["train/logprob_gap"] > 0 for r in parts.metrics_of(run)[1:])


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "stop"},
        {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"},
        {"text": "no ids", "finish_reason": "stop"},
        {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "abort"},
    ],
    ids=["empty", "lengths", "no ids", "aborted"],
)
def test_unusable_samples_exclude_their_episodes(
    choice: dict[str, Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    server = TokenServer(tiny_model_dir)
    # After the probe, five samples: first tries, which are played again, and second ones, which are excluded. Which of the two
    # a sample hits depends on when it arrives.
    server.fault = lambda n, body: raw(dumps({"choices": [choice]})) if 5 <= n <= 9 else None
    with InThread(server) as tutor, InThread(Loopback(speak)) as student:
        changes = {"training.max_steps": 1, "training.max_excluded_share": 0.9}
        run = loop.run(tutor_recipe(tiny_model_dir, tmp_path, tutor, student, **changes)).folder
    (row,) = parts.metrics_of(run)
    assert row["rollout/retried"] + 4 * row["rollout/excluded_share"] == 5
    assert row["rollout/excluded_share"] == row["rollout/excluded_tutor_failed_share"] >= 0.25
    assert_nothing_scored_silently(run)
    assert_on_policy(run)


@pytest.mark.parametrize("where", ["rollout", "push"])
def test_a_restarted_tutor_server_gets_its_weights_back(
    where: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    server = TokenServer(tiny_model_dir)
    thread = InThread(server)
    bounced = threading.Event()

    def bounce() -> None:
        if not bounced.is_set():
            bounced.set()
            threading.Thread(target=lambda: (thread.stop(), time.sleep(0.4), thread.start())).start()

    with thread as tutor, InThread(Loopback(speak)) as student:
        changes = {"tutor.lora": None, "outage_limit_s": 20.0}
        recipe = tutor_recipe(tiny_model_dir, tmp_path, tutor, student, **changes)
        if where == "rollout":  # in step 2, when the pushed weights are no longer those it starts with
            server.fault = lambda n, body: bounce() if n == 15 else None
        else:
            server.rpc_fault = lambda n, body: bounce() if n == 2 else None
        run = loop.run(recipe).folder
    assert bounced.is_set()
    rows = parts.metrics_of(run)
    assert [r["rollout/excluded_share"] for r in rows] == [0, 0, 0]
    assert server.reloads >= 4
    assert_on_policy(run)


@pytest.mark.parametrize("where", ["rollout", "push"])
def test_a_tutor_server_that_dies_for_good(where: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    server = TokenServer(tiny_model_dir)
    thread = InThread(server)

    def die() -> None:
        threading.Thread(target=thread.stop).start()

    with thread as tutor, InThread(Loopback(speak)) as student:
        recipe = tutor_recipe(tiny_model_dir, tmp_path, tutor, student, outage_limit_s=0.5)
        if where == "rollout":
            server.fault = lambda n, body: die() if n == 15 else None
        else:
            server.rpc_fault = lambda n, body: die() if n == 2 else None
        with pytest.raises(EngineDownError, match=re.escape(tutor.url)):
            loop.run(recipe)
        run = tmp_path / "run"
        assert steps(run) == [1] and [r["train/step"] for r in parts.metrics_of(run)] == [1]
        server.fault = server.rpc_fault = lambda n, body: None
        thread.start()
        assert loop.run(recipe, "auto").state.step == 3
    # After the resume the server held the checkpoint's weights, not those that it starts with.
    assert_on_policy(run)


def test_a_push_that_is_refused_ends_the_run_at_once_with_its_checkpoint(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    server = TokenServer(tiny_model_dir)
    server.rpc_fault = lambda n, body: web.Response(status=404, text="no such route") if n > 1 else None
    with InThread(server) as tutor, InThread(Loopback(speak)) as student:
        recipe = tutor_recipe(tiny_model_dir, tmp_path, tutor, student, outage_limit_s=600.0)
        with pytest.raises(EngineError, match="collective_rpc: status 404: no such route"):
            loop.run(recipe)
    assert steps(tmp_path / "run") == [1]


def test_a_stale_tensor_stops_the_run_before_anything_is_sampled_from_it(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    server = TokenServer(tiny_model_dir)
    server.stale = {"model.layers.1.mlp.down_proj.weight"}
    with InThread(server) as tutor, InThread(Loopback(speak)) as student:
        recipe = tutor_recipe(tiny_model_dir, tmp_path, tutor, student, **{"tutor.lora": None})
        with pytest.raises(EngineMismatchError, match="weights stayed behind"):
            loop.run(recipe)
    run = tmp_path / "run"
    assert steps(run) == [1] and not list(read_episodes(run, "train", [2]))


def test_a_server_with_other_weights_is_refused_at_the_start(tiny_model_dir: Path, tmp_path: Path) -> None:
    server = TokenServer(tiny_model_dir)
    server.stale = {"model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"}
    with InThread(server) as tutor, InThread(Loopback(speak)) as student:
        server.model.model.norm.weight.mul_(1.5)
        with pytest.raises(EngineMismatchError, match="policy version 0"):
            loop.run(tutor_recipe(tiny_model_dir, tmp_path, tutor, student))
    assert not list(read_episodes(tmp_path / "run", "train"))


def test_several_tutor_servers_all_get_every_push_and_share_the_dialogues(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    one, two = TokenServer(tiny_model_dir), TokenServer(tiny_model_dir)
    thread = InThread(one)
    with thread, InThread(two, beside=thread), InThread(Loopback(speak)) as student:
        both = engine(one, "vllm") | {"urls": [one.url, two.url]}
        changes = {"tutor.lora": None, "tutor.engine": both, "tutor.dtype": "float32"}
        run = loop.run(recipe_of(tiny_model_dir, tmp_path, student=engine(student), **changes)).folder
    assert one.reloads == two.reloads == one.resets == two.resets == 3
    assert_on_policy(run)
    # A dialogue stays where its prefix is cached: its second prompt goes to the server that had the first.
    for server in (one, two):
        prompts = [body["prompt"] for body in server.bodies if body["max_tokens"] == 8]
        assert prompts
        longer = [p for p in prompts if any(p[: len(q)] == q and len(p) > len(q) for q in prompts)]
        assert len(longer) >= len(prompts) // 3


def test_one_stale_server_of_two_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    one, two = TokenServer(tiny_model_dir), TokenServer(tiny_model_dir)
    two.stale = {"model.layers.0.self_attn.q_proj.weight"}
    thread = InThread(one)
    with thread, InThread(two, beside=thread), InThread(Loopback(speak)) as student:
        both = engine(one, "vllm") | {"urls": [one.url, two.url]}
        changes = {"tutor.lora": None, "tutor.engine": both, "tutor.dtype": "float32"}
        changes["training.optimizer"] = {"lr": 0.05}
        with pytest.raises(EngineMismatchError, match=re.escape(two.url)):
            loop.run(recipe_of(tiny_model_dir, tmp_path, student=engine(student), **changes))
    assert not list(read_episodes(tmp_path / "run", "train", [2]))

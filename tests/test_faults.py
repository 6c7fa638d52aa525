"""Faults of real servers, through the training loop: nothing is silently scored, counts are right, the run ends as it should."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import maieutic.engines.http as http
import training_parts as parts
from loopback import InThread, Loopback, dumps, first, raw, status
from maieutic.config import Recipe
from maieutic.errors import (
    EngineDownError,
    EngineError,
    EngineMismatchError,
    ExclusionLimitError,
    RunInterrupted,
    SpendingLimitError,
)
from maieutic.training import checkpoint, loop
from maieutic.transcripts import read_episodes
from token_server import TokenServer

pytestmark = pytest.mark.integration

FAST = {
    "concurrency": 8,
    "timeout_s": 5.0,
    "retries": 2,
    "backoff_s": 0.01,
    "backoff_max_s": 0.05,
    "outage_limit_s": 1.0,
}
OK = dumps({"reasoning": "fine", "verdict": "OK", "criterion": "", "quote": ""})


def speak(body: dict[str, Any]) -> str | list[str]:
    """A student: a line in the dialogue, n answers in a post-test."""
    n = body.get("n", 1)
    return [f"\\boxed{{{i}}}" for i in range(n)] if n > 1 else "I think it is 4."


def engine(server: Loopback, kind: str = "chat", **http_policy: Any) -> dict[str, Any]:
    return {"kind": kind, "urls": [server.url], "http": FAST | http_policy, "push_timeout_s": 10}


def recipe_of(model: Path, folder: Path, **changes: Any) -> Recipe:
    """2 pairs × 2 episodes a step, 3 steps, a checkpoint after each."""
    student = changes.pop("student", None)
    base = {"training.max_steps": 3, "eval.every": 0, "checkpoint.every": 1, "training.excluded_patience": 1}
    data = parts.recipe_dict(model, folder, **{**base, **changes})
    if student is not None:
        data["students"][0]["engine"] = student
    return Recipe.model_validate_json(json.dumps(data))


def with_judge(server: Loopback, **http_policy: Any) -> dict[str, Any]:
    judge = {"kind": "llm", "model": "j", "votes": 3, "reasks": 1, "engine": engine(server, **http_policy)}
    return {"judge": judge, "env.gates": "hard", "reward": {}}


def steps(run: Path) -> list[int]:
    return [s for s, _ in checkpoint.complete(run / "checkpoints")]


def usage(run: Path, role: str) -> dict[str, float]:
    return json.loads((run / "usage.json").read_text())[role]


def assert_nothing_scored_silently(run: Path) -> None:
    """An excluded episode has no reward and no finite reward in its token record; the rows count every exclusion."""
    rows = {r["train/step"]: r for r in parts.metrics_of(run) if "rollout/episodes" in r}
    for step, row in rows.items():
        episodes = list(read_episodes(run, "train", [int(step)]))
        excluded = [e for e in episodes if not e.counted]
        assert row["rollout/excluded_share"] == len(excluded) / len(episodes) == len(excluded) / 4
        for e in excluded:
            assert e.exclusion and e.reward is None
            if e.trajectory is not None:
                assert e.trajectory.excluded and e.trajectory.reward != e.trajectory.reward


async def hang() -> None:
    await asyncio.sleep(3600)


def about(body: dict[str, Any], *words: str) -> bool:
    text = json.dumps(body["messages"])
    return any(w in text for w in words)


# ---- the student -----------------------------------------------------------------------------------------------------

TRANSIENT: dict[str, Callable[[], Any]] = {
    "500": lambda: status(500, "oops"),
    "429": lambda: status(429, "slow down", **{"Retry-After": "0.01"}),
    "hangs": hang,
    "junk": lambda: raw("<html>"),
    "cut": lambda: raw('{"choices": ['),
    "oversized": lambda: raw(dumps({"choices": "x" * 70_000})),
}


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_student_that_recovers_costs_retries_only(
    fault: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 65_536)
    with InThread(Loopback(speak, first(2, TRANSIENT[fault]))) as server:
        short = {"timeout_s": 0.8, "retries": 6} if fault == "hangs" else {}
        run = loop.run(
            recipe_of(
                tiny_model_dir,
                tmp_path,
                student=engine(server, **short),
                **{"training.max_steps": 1},
            )
        ).folder
    (row,) = parts.metrics_of(run)
    assert row["rollout/excluded_share"] == 0 and row["rollout/retried"] == 0
    retries = row["usage/student/retries"]
    # On a busy machine a good answer may be late too.
    assert retries == 2 or (fault == "hangs" and retries > 2)
    assert row["usage/student/failures"] == 0
    assert row["usage/student/requests"] == len(server.bodies) - retries == 8


@pytest.mark.parametrize("fault", ["500", "junk", "oversized", "empty", "no text", "fewer answers"])
def test_a_student_that_fails_in_one_problem_excludes_those_episodes_only(
    fault: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 65_536)
    choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    answers = {
        "empty": lambda: raw(dumps({"choices": [choice]})),
        "no text": lambda: raw(dumps({"choices": [{"index": 0}]})),
        "fewer answers": lambda: raw(dumps({"choices": []})),
    }
    make = answers.get(fault) or TRANSIENT[fault]
    hit: set[str] = set()

    def fail(number: int, body: dict[str, Any]) -> Any:
        # The first problem that comes is the bad one, in every request about it.
        name = re.search(r"Ann has (\d) pens", json.dumps(body["messages"]))
        assert name is not None
        if not hit:
            hit.add(name.group(1))
        return make() if name.group(1) in hit else None

    with InThread(Loopback(speak, fail)) as server:
        changes = {"training.max_steps": 1, "training.max_excluded_share": 0.9}
        run = loop.run(recipe_of(tiny_model_dir, tmp_path, student=engine(server), **changes)).folder
    (row,) = parts.metrics_of(run)
    assert row["rollout/excluded_share"] == row["rollout/excluded_student_failed_share"] == 0.5
    assert row["rollout/retried"] == 2  # group_retries: 1 for each of the two
    assert_nothing_scored_silently(run)
    lost = [e for e in read_episodes(run, "train") if not e.counted]
    assert {e.dialogue.end for e in lost} == {"student_failed"} and len({e.pair.id for e in lost}) == 1
    assert row["train/trained_tokens"] == sum(
        e.trajectory.segments[0].n_trained for e in read_episodes(run, "train") if e.counted
    )


def test_a_student_that_says_nothing_any_more_stops_the_run_with_a_checkpoint(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    speaks = [True]
    student = Loopback(lambda body: speak(body) if speaks[0] else "")
    silence_after(student, 8, speaks)
    with InThread(student) as server:
        recipe = recipe_of(tiny_model_dir, tmp_path, student=engine(server))
        with pytest.raises(
            ExclusionLimitError, match=r"step 2: 4 of 4 episodes excluded \(student_failed 4\)"
        ):
            loop.run(recipe)
        run = tmp_path / "run"
        assert steps(run) == [1]
        assert len([e for e in read_episodes(run, "train", [2]) if e.exclusion == "student_failed"]) == 4
        speaks[0], student.fault = True, lambda number, body: None
        assert loop.run(recipe, "auto").state.step == 3


def silence_after(server: Loopback, number: int, speaks: list[bool]) -> None:
    def watch(n: int, body: dict[str, Any]) -> None:
        speaks[0] = n <= number

    server.fault = watch


def test_a_student_that_dies_and_comes_back_loses_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    student = Loopback(speak)
    thread = InThread(student)
    with thread as server:
        down = threading.Event()

        def bounce(number: int, body: dict[str, Any]) -> None:
            if number == 10 and not down.is_set():
                down.set()
                threading.Thread(target=lambda: (thread.stop(), time.sleep(0.4), thread.start())).start()

        student.fault = bounce
        run = loop.run(
            recipe_of(tiny_model_dir, tmp_path, student=engine(server, outage_limit_s=20.0))
        ).folder
    assert down.is_set()
    rows = parts.metrics_of(run)
    assert [r["rollout/excluded_share"] for r in rows] == [0, 0, 0]
    assert rows[-1]["usage/student/requests"] == 24


def test_a_student_that_dies_for_good_stops_the_run_with_a_checkpoint_and_it_resumes(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    student = Loopback(speak)
    thread = InThread(student)
    with thread as server:
        student.fault = lambda n, body: threading.Thread(target=thread.stop).start() if n == 9 else None
        recipe = recipe_of(tiny_model_dir, tmp_path, student=engine(server, outage_limit_s=0.5))
        before = time.monotonic()
        with pytest.raises(EngineDownError, match=re.escape(server.url)):
            loop.run(recipe)
        assert time.monotonic() - before < 60
        run = tmp_path / "run"
        assert steps(run) == [1] and [r["train/step"] for r in parts.metrics_of(run)] == [1]
        spent = usage(run, "student")["requests"]
        assert spent >= 8
        thread.start()
        assert loop.run(recipe, "auto").state.step == 3
        assert usage(run, "student")["requests"] == spent + 16


def test_the_spending_limit_stops_with_a_checkpoint_and_counts_over_a_resume(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with InThread(Loopback(speak)) as server:
        # 100 prompt tokens a request: one cent. A step asks 8 times.
        student = engine(server) | {"price": {"input": 100.0}}
        recipe = recipe_of(tiny_model_dir, tmp_path, student=student, spending_limit_usd=0.115)
        with pytest.raises(SpendingLimitError, match=r"\$0\.1\d of \$0\.1[12] \(student"):
            loop.run(recipe)
        run = tmp_path / "run"
        assert steps(run) == [1]
        (row,) = parts.metrics_of(run)
        assert row["usage/student/usd"] == pytest.approx(0.08)
        state = checkpoint.load_state(run / "checkpoints" / "step-000001")
        assert state.usage["student"]["usd"] == pytest.approx(0.08)
        assert 0.115 <= usage(run, "student")["usd"] < 0.17
        asked = len(server.bodies)
        with pytest.raises(SpendingLimitError):
            loop.run(recipe, "auto")
        assert len(server.bodies) == asked  # what was spent in the step that was lost counts
        more = recipe.model_copy(update={"spending_limit_usd": 5.0})
        assert loop.run(more, "auto").state.step == 3


# ---- the judge -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("500", "judge_failed"),
        ("hangs", "judge_failed"),
        ("junk", "judge_failed"),
        ("empty", "empty"),
        ("prose", "no_verdict"),
        ("no evidence", "quote_not_found"),
    ],
)
def test_a_judge_that_never_decides_is_unknown_and_stops_the_run(
    fault: str, why: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    says = {
        "empty": "",
        "prose": "I would say that is fine, maybe.",
        "no evidence": dumps({"verdict": "REJECT", "criterion": "x", "quote": "the answer is surely 42"}),
    }
    judge = Loopback(lambda body: says.get(fault, OK), first(10**9, TRANSIENT.get(fault, lambda: None)))
    with InThread(judge) as server, InThread(Loopback(speak)) as student:
        short = {"timeout_s": 0.2, "deadline_s": 0.6, "outage_limit_s": None} if fault == "hangs" else {}
        recipe = recipe_of(tiny_model_dir, tmp_path, student=engine(student), **with_judge(server, **short))
        before = time.monotonic()
        with pytest.raises(ExclusionLimitError, match=r"unknown:leakage 4"):
            loop.run(recipe)
        assert time.monotonic() - before < 60
    episodes = list(read_episodes(tmp_path / "run", "train"))
    assert len(episodes) == 4 and all(e.exclusion == "unknown:leakage" and e.reward is None for e in episodes)
    for e in episodes:
        verdict = e.verdicts["leakage"]
        assert (verdict.decision, verdict.criterion) == ("unknown", why)
    # no post-test is paid for where the verdict is missing: only the dialogues' turns were asked for
    assert all(body.get("n", 1) == 1 for body in student.bodies)


def test_a_judge_dead_for_half_a_run_costs_episodes_and_training_resumes(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Steps 1-2 with a judge whose votes stop early, 3-4 with a dead one, 5-6 with it again."""
    alive = [True]

    def judge_fault(number: int, body: dict[str, Any]) -> Any:
        return None if alive[0] else status(503, "gone")

    judge, student = Loopback(lambda body: OK, judge_fault), Loopback(speak)
    seen: list[int] = []

    class Watched(loop._Loop):
        def _play(self, step: int) -> Any:
            alive[0] = step not in (3, 4)
            before = len(judge.bodies)
            out = super()._play(step)
            seen.append(sum(b.get("n", 1) for b in judge.bodies[before:]))
            return out

    with InThread(judge) as server, InThread(student) as speaker, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_Loop", Watched)
        changes = {"training.max_steps": 6, "training.excluded_patience": 3}
        recipe = recipe_of(
            tiny_model_dir,
            tmp_path,
            student=engine(speaker),
            **(with_judge(server, outage_limit_s=None) | changes),
        )
        run = loop.run(recipe).folder
    rows = parts.metrics_of(run)
    assert [r["rollout/unknown_share"] for r in rows] == [0, 0, 1, 1, 0, 0]
    # V = 3, but two votes that agree decide: 4 episodes × 2 gates × 2 votes.
    assert seen[0] == seen[1] == seen[4] == seen[5] == 16
    for row, dead in zip(rows, [False, False, True, True, False, False], strict=True):
        if dead:  # no reward at all, but what it would have been as rejections is told
            assert "rollout/reward" not in row
            assert row["rollout/reward_unknown_as_reject"] == pytest.approx(-0.2)
            assert row["train/skipped_updates"] == 2 and row["train/trained_tokens"] == 0
        else:
            assert row["rollout/reward"] == row["rollout/reward_unknown_as_reject"]
            assert row["train/trained_tokens"] > 0
    assert_nothing_scored_silently(run)
    assert [r["train/policy_version"] for r in rows] == [1, 2, 3, 4, 5, 6]


def test_half_of_the_verdicts_missing_shows_reward_with_and_without(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    hit: set[str] = set()

    def fail(number: int, body: dict[str, Any]) -> Any:
        name = re.search(r"Ann has (\d) pens", json.dumps(body["messages"]))
        assert name is not None
        if not hit:
            hit.add(name.group(1))
        return status(500) if name.group(1) in hit else None

    with InThread(Loopback(lambda body: OK, fail)) as judge, InThread(Loopback(speak)) as student:
        changes = {"training.max_steps": 1, "training.max_excluded_share": 0.9}
        run = loop.run(
            recipe_of(tiny_model_dir, tmp_path, student=engine(student), **(with_judge(judge) | changes))
        ).folder
    (row,) = parts.metrics_of(run)
    assert row["rollout/unknown_share"] == 0.5 and row["train/trained_tokens"] > 0
    assert row["rollout/reward_unknown_as_reject"] == pytest.approx((row["rollout/reward"] - 0.2) / 2)
    assert_nothing_scored_silently(run)


# ---- the tutor's engine ----------------------------------------------------------------------------------------------


def tutor_recipe(model: Path, folder: Path, tutor: Loopback, student: Loopback, **changes: Any) -> Recipe:
    policy = {k: changes.pop(k) for k in list(changes) if k in FAST}
    served = {"tutor.engine": engine(tutor, "vllm", **policy), "tutor.dtype": "float32"}
    return recipe_of(model, folder, student=engine(student), **(served | changes))


def assert_on_policy(run: Path) -> None:
    for row in parts.metrics_of(run):
        assert row["train/logprob_gap"] <= 1e-3 and row["push/probe_gap"] <= 1e-3


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
    # After the probe: all of step 1's first tries, and the first of the second ones.
    server.fault = lambda n, body: raw(dumps({"choices": [choice]})) if 5 <= n <= 9 else None
    with InThread(server) as tutor, InThread(Loopback(speak)) as student:
        changes = {"training.max_steps": 1, "training.max_excluded_share": 0.9}
        run = loop.run(tutor_recipe(tiny_model_dir, tmp_path, tutor, student, **changes)).folder
    (row,) = parts.metrics_of(run)
    assert row["rollout/retried"] == 4
    assert row["rollout/excluded_share"] == row["rollout/excluded_tutor_failed_share"] == 0.25
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


# ---- the start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["address file", "health"])
def test_a_signal_while_servers_are_waited_for_stops_at_once(
    missing: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    url = f"file:{tmp_path}/none.json" if missing == "address file" else "http://127.0.0.1:9"
    student = {"kind": "vllm", "urls": [url], "start_timeout_s": 600}
    timer = threading.Timer(3.0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(RunInterrupted, match="stopped by SIGUSR1; nothing was begun") as stopped:
            loop.run(recipe_of(tiny_model_dir, tmp_path, student=student))
    finally:
        timer.cancel()
    assert stopped.value.exit_code == 85
    assert steps(tmp_path / "run") == []


def test_a_server_that_never_comes_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    student = {"kind": "vllm", "urls": ["http://127.0.0.1:9"], "start_timeout_s": 0.3}
    with pytest.raises(EngineError, match="student: http://127.0.0.1:9 is not healthy after 0.3 s"):
        loop.run(recipe_of(tiny_model_dir, tmp_path, student=student))
    # The folder may be used again: nothing was begun in it.
    with InThread(Loopback(speak)) as server:
        changes = {"training.max_steps": 1}
        assert (
            loop.run(recipe_of(tiny_model_dir, tmp_path, student=engine(server), **changes)).state.step == 1
        )


# ---- more than is good ----------------------------------------------------------------------------------------------


def test_a_students_endless_reply_ends_the_dialogue_and_is_counted(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The server ignores ``max_tokens``: 60,000 characters leave no room for another tutor turn."""
    with InThread(Loopback(lambda body: speak(body) if body.get("n", 1) > 1 else "no " * 20_000)) as server:
        changes = {"training.max_steps": 1}
        run = loop.run(recipe_of(tiny_model_dir, tmp_path, student=engine(server), **changes)).folder
    (row,) = parts.metrics_of(run)
    assert row["rollout/end_context_limit_share"] == 1 and row["rollout/excluded_share"] == 0
    for e in read_episodes(run, "train"):
        assert [t.speaker for t in e.dialogue.turns] == ["student", "tutor", "student"]
        (segment,) = e.trajectory.segments
        # The endless turn follows the last sampled token and is no part of what is trained on.
        assert len(segment.ids) < 1000


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

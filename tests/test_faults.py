"""Faults of real servers, through the training loop: nothing is silently scored, counts are right, the run ends as it should."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import maieutic.engines.http as http
import training_parts as parts
from fault_parts import (
    TRANSIENT,
    assert_nothing_scored_silently,
    engine,
    recipe_of,
    speak,
    steps,
    usage,
)
from loopback import InThread, Loopback, dumps, first, raw
from maieutic.errors import (
    EngineDownError,
    EngineError,
    ExclusionLimitError,
    RunInterrupted,
    SpendingLimitError,
)
from maieutic.training import checkpoint, loop
from maieutic.transcripts import read_episodes

pytestmark = pytest.mark.integration

# ---- the student -----------------------------------------------------------------------------------------------------


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

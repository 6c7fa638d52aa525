"""Every suite on loopback servers: what it measures, that it is resumed to the same bytes, and that a kill loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation_world import answer, make_reward_model, server, write_lines, write_recipe
from loopback import InThread, Loopback
from maieutic.errors import RecipeError, RunFolderError
from maieutic.evaluation.config import SUITES, load_evaluation_recipe
from maieutic.evaluation.results import compare, read_result
from maieutic.evaluation.suites import compare_in, evaluate

BRIDGE = {
    "problem": "P?",
    "reference_solution": "2 + 2 = 4\n 4",
    "dialog_history": [
        {"text": "Tell me", "user": "Teacher"},
        {"text": "Five", "user": "Student"},
        {"text": "Why five?", "user": "Teacher"},
    ],
}


@pytest.fixture
def world() -> Iterator[Loopback]:
    with InThread(server()) as running:
        yield running


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model")


def run(recipe: Path, out: Path, *suites: str, arm: str = "api", **kwargs: Any) -> list[dict[str, Any]]:
    return [read_result(f) for f in evaluate(load_evaluation_recipe(recipe), arm, suites, out, **kwargs)]


def with_bridge(folder: Path) -> dict[str, Any]:
    return {
        "bridge": str(
            write_lines(folder / "bridge.jsonl", [BRIDGE | {"problem": f"P{i}?"} for i in range(3)])
        )
    }


def test_environment_suite(world: Loopback, tmp_path: Path) -> None:
    (result,) = run(write_recipe(tmp_path / "r", world.url), tmp_path / "out", "environment")
    samples, metrics = result["samples"], result["metrics"]
    assert (
        len(samples) == 24
        and metrics["transfer_gain"]["clusters"] == 12
        and metrics["transfer_gain"]["se"] > 0
    )
    for s in samples:
        test, extra = s["episode"]["post_test"], s["extra_tests"]["source"]
        assert test["problem"] == "transfer" and len(extra["answers"]) == 4, (
            "both gains come from one dialogue"
        )
        post = sum(g == "right" for g in test["grades"]) / 4
        pre = s["transfer_pre"]
        assert s["transfer_gain"] == pytest.approx((post - pre) / (1 - pre) if post > pre else post - pre)
        assert s["transfer_gap"] == pytest.approx(s["same_gain"] - s["transfer_gain"])
        assert "timing" not in s["episode"]
    mean = sum(s["transfer_gain"] for s in samples) / 24
    assert metrics["transfer_gain"]["value"] == pytest.approx(mean)
    # Rates were measured afresh with 4 cold samples each.
    rates = [r for s in samples for r in s["episode"]["pair"]["transfer"]["rates"].values()]
    assert rates and all(r["n"] == 4 for r in rates)


def test_leaking_dialogues_are_tested_too(world: Loopback, tmp_path: Path) -> None:
    def leaky(body: dict[str, Any]) -> list[str]:
        texts = answer(body)
        if body["model"] == "judge" and "leave the solving" in body["messages"][-1]["content"]:
            quote = "Why do you think so?"
            reject = {"reasoning": "r", "verdict": "REJECT", "criterion": "answer_stated", "quote": quote}
            return [json.dumps(reject)] * len(texts)
        return texts

    world.reply = leaky
    (result,) = run(write_recipe(tmp_path / "r", world.url), tmp_path / "out", "environment")
    assert result["metrics"]["leak_rate"]["value"] == 1.0 and result["metrics"]["gated"]["value"] == 1.0
    assert result["metrics"]["transfer_gain"]["n"] == result["metrics"]["same_gain"]["n"] == 24
    assert "transfer_gain_passed" not in result["metrics"]
    assert result["metrics"]["reward"]["value"] == pytest.approx(-0.2)


def test_unknown_verdicts_are_counted_and_gains_stay(world: Loopback, tmp_path: Path) -> None:
    world.reply = lambda body: ["no idea"] * body.get("n", 1) if body["model"] == "judge" else answer(body)
    (result,) = run(write_recipe(tmp_path / "r", world.url), tmp_path / "out", "environment")
    assert result["metrics"]["unknown_rate"]["value"] == 1.0 and "leak_rate" not in result["metrics"]
    assert (
        result["counts"]["excluded:unknown:leakage"] == 24 and result["metrics"]["transfer_gain"]["n"] == 24
    )


def test_middle_turn_suite(world: Loopback, tmp_path: Path, reward_model: Path) -> None:
    (result,) = run(write_recipe(tmp_path / "r", world.url, reward_model), tmp_path / "out", "middle_turn")
    assert [s["human"] for s in result["samples"]] == ["Look again?"] * 3
    for s in result["samples"]:
        assert (
            s["win"] == float(s["reward"] > s["human_reward"])
            and 1 <= s["pedagogy"] <= 5
            and s["factual"] == 5
        )
    table = result["tables"]["win rate against the human turn"]
    assert table["n"] == 3 and table["micro"] == result["metrics"]["win"]["value"]
    asked = next(b for b in world.bodies if b["model"] == "tutor")["messages"]
    assert [m["role"] for m in asked] == ["system", "user", "assistant", "user"]
    assert re.search(r"Q\d\?", asked[1]["content"])
    assert asked[2]["content"] == "Hi" and asked[3]["content"] == "I got 4."


def test_replay_suite(world: Loopback, tmp_path: Path) -> None:
    (result,) = run(write_recipe(tmp_path / "r", world.url), tmp_path / "out", "replay")
    assert len(result["samples"]) == 6 and result["counts"]["not judged"] == 0
    for s in result["samples"]:
        generated = s["turns"][s["first"] :]
        assert [t["speaker"] for t in generated] == ["tutor", "student", "tutor", "student"][: len(generated)]
        facts = s["facts"]
        met = facts["scaffolded"] if s["dimension"] == "scaffolding" else facts["pushed_rigour"]
        assert s[s["dimension"]] == float(met and not facts["over_helped"])
        assert s["turns"][s["first"] - 1]["visible"] == "Seven.\nOr maybe not."
    systems = {b["messages"][0]["content"] for b in world.bodies if b["model"] == "tutor"}
    assert len(systems) == 2 and sum("You are rated on three things" in s for s in systems) == 1
    student = next(b for b in world.bodies if b["model"] == "student")["messages"][0]["content"]
    assert "shy" in student and "Look again." in student


def test_moves_suite_reads_what_others_left(world: Loopback, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r", world.url)
    with pytest.raises(RecipeError, match="run it first"):
        run(recipe, tmp_path / "out", "moves")
    _, result = run(recipe, tmp_path / "out", "replay", "moves")
    for row in result["tables"]["moves"].values():
        assert sum(row.values()) == pytest.approx(1) and row["K"] == pytest.approx(0.5)
        assert row["A"] + row["G"] == pytest.approx(0.5)


def test_mathtutorbench_suite(world: Loopback, tmp_path: Path, reward_model: Path) -> None:
    verify = {
        "problem": "P?",
        "reference_solution": "10 + 1 = 11\nso it is\n11",
        "student_incorrect_solution": ["one", "two", "9"],
        "incorrect_index": 1,
        "dialog_history": [{"text": "Tell me", "user": "Teacher"}, {"text": "Nine", "user": "Student"}],
        "student_correct_response": "Eleven",
    }
    files = with_bridge(tmp_path)
    files["stepverify"] = str(write_lines(tmp_path / "verify.jsonl", [verify]))
    recipe = write_recipe(tmp_path / "r", world.url, reward_model, mathtutorbench=files)
    (result,) = run(recipe, tmp_path / "out", "mathtutorbench")
    table = result["tables"]["published metrics"]
    assert set(table) == {
        "solution_correctness",
        "mistake_location",
        "mistake_correction",
        "scaffolding_generation",
        "pedagogy_following",
    }
    corrected = next(s for s in result["samples"] if s["task"] == "mistake_correction")
    assert corrected["target"] == 11.0 and table["mistake_correction"]["accuracy"] == float(
        corrected["prediction"] == 11.0
    )
    wins = [
        s["scaffolding_generation:win_rate"]
        for s in result["samples"]
        if s["task"] == "scaffolding_generation"
    ]
    assert table["scaffolding_generation"]["win_rate"] == sum(wins) / 3


def test_retention_suite(world: Loopback, tmp_path: Path) -> None:
    (result,) = run(write_recipe(tmp_path / "r", world.url), tmp_path / "out", "retention")
    assert len(result["samples"]) == 6
    assert all(s["right"] == float(s["grade"] == "right") for s in result["samples"])
    assert result["metrics"]["held:accuracy"]["note"].endswith("too few for an interval (at least 10)")


@pytest.mark.parametrize("suite", SUITES)
def test_resumed_anywhere_gives_the_same_bytes(
    world: Loopback, tmp_path: Path, reward_model: Path, suite: str
) -> None:
    recipe = write_recipe(tmp_path / "r", world.url, reward_model, mathtutorbench=with_bridge(tmp_path))
    out, suites = tmp_path / "out", ["replay", "moves"] if suite == "moves" else [suite]
    run(recipe, out, *suites)
    file = out / "api" / f"{suite}.json"
    whole, asked = file.read_bytes(), len(world.bodies)
    run(recipe, out, *suites)
    assert file.read_bytes() == whole and len(world.bodies) == asked, "nothing is asked twice"
    # As a kill leaves it: half of the samples and answers, the last line of each torn, no result.
    for log in (out / "api" / "work" / f"{suite}.jsonl", out / "answers.jsonl"):
        lines = log.read_bytes().splitlines(keepends=True)
        keep = len(lines) // 2
        log.write_bytes(b"".join(lines[:keep]) + lines[keep][: len(lines[keep]) // 2])
    file.unlink()
    run(recipe, out, suite)
    assert file.read_bytes() == whole
    assert len(world.bodies) > asked


def test_another_evaluation_is_not_mixed_in(world: Loopback, tmp_path: Path) -> None:
    run(write_recipe(tmp_path / "r", world.url), tmp_path / "out", "retention")
    with pytest.raises(RunFolderError, match="another evaluation"):
        run(write_recipe(tmp_path / "r", world.url, seed=1), tmp_path / "out", "retention")


def test_costs_are_counted_and_equal_after_a_resume(world: Loopback, tmp_path: Path) -> None:
    (result,) = run(write_recipe(tmp_path / "r", world.url), tmp_path / "out", "retention")
    assert result["costs"]["tutor"] == {
        "requests": 6,
        "prompt_tokens": 600,
        "completion_tokens": 60,
        "usd": 0.0012,
    }


def test_failed_samples_are_counted_and_tried_again(world: Loopback, tmp_path: Path) -> None:
    from loopback import status

    recipe = write_recipe(tmp_path / "r", world.url)
    world.fault = lambda number, body: status(400, "no") if number == 2 else None
    (result,) = run(recipe, tmp_path / "out", "retention")
    assert len(result["samples"]) == 5 and len(result["failed"]) == 1
    world.fault = lambda number, body: None
    (result,) = run(recipe, tmp_path / "out", "retention")
    assert len(result["samples"]) == 6 and not result["failed"]


def test_concurrency_is_bounded(world: Loopback, tmp_path: Path) -> None:
    async def slow() -> None:
        await asyncio.sleep(0.02)

    world.fault = lambda number, body: slow()
    run(write_recipe(tmp_path / "r", world.url), tmp_path / "out", "retention")
    assert 1 < world.most_open <= 3


@pytest.mark.integration
def test_killed_and_started_again(tmp_path: Path) -> None:
    async def slow() -> None:
        await asyncio.sleep(0.05)

    whole = Loopback(answer)
    with InThread(whole) as first:
        recipe = write_recipe(tmp_path / "r", first.url)
        run(recipe, tmp_path / "whole", "environment")
        first.fault = lambda number, body: slow()
        command = [
            sys.executable,
            "-m",
            "maieutic",
            "evaluate",
            "api",
            "--recipe",
            str(recipe),
            "--out",
            str(tmp_path / "o"),
        ]
        log = tmp_path / "o" / "world" / "api" / "work" / "environment.jsonl"
        process = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        deadline = time.monotonic() + 120
        while not (log.is_file() and log.read_bytes().count(b"\n") >= 4):
            assert process.poll() is None and time.monotonic() < deadline, (
                "the command ended before it was killed"
            )
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert 4 <= log.read_bytes().count(b"\n") < 25
        first.fault = lambda number, body: None
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    ours = (tmp_path / "o" / "world" / "api" / "environment.json").read_bytes()
    assert ours == (tmp_path / "whole" / "api" / "environment.json").read_bytes()


def test_two_arms_are_compared_paired(world: Loopback, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r", world.url)
    data = json.loads(recipe.read_text())
    data["arms"]["twin"] = data["arms"]["api"] | {"sampling": {"temperature": 0.61, "top_p": 0.95}}
    recipe.write_text(json.dumps(data))
    (a,) = run(recipe, tmp_path / "out", "environment")
    (b,) = run(recipe, tmp_path / "out", "environment", arm="twin")
    rows = {r.name: r for r in compare(a, b)}
    # The scripted tutor does not look at its temperature: equal arms differ by exactly 0.
    assert (rows["transfer_gain"].difference.value, rows["transfer_gain"].difference.p) == (0.0, 1.0)
    assert rows["transfer_gain"].p_holm == 1.0
    text = compare_in(tmp_path / "out", "api", "twin").read_text()
    assert "| transfer_gain | 0 | 0.000 … 0.000 | 1 | 1 | 12 |" in text


def test_moves_and_thinking_of_two_arms_are_compared(world: Loopback, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r", world.url)
    data = json.loads(recipe.read_text())
    data["arms"]["twin"] = data["arms"]["api"]
    recipe.write_text(json.dumps(data))
    for arm in ("api", "twin"):
        run(recipe, tmp_path / "out", "replay", "moves", arm=arm)
    text = compare_in(tmp_path / "out", "api", "twin").read_text()
    assert "| api (plain) | 0 |" in text and "Discovery fingerprint, plain" in text
    assert "| plain:thinking_tokens_per_turn | 0 | 0 | – |" in text, (
        "no ratio where the reference does not think"
    )


def test_one_evaluation_at_a_time(world: Loopback, tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "out").mkdir()
    with (
        FileLock(tmp_path / "out" / ".lock"),
        pytest.raises(RunFolderError, match="another evaluation writes there"),
    ):
        run(write_recipe(tmp_path / "r", world.url), tmp_path / "out", "retention")

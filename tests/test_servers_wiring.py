"""From a recipe's engine sections to playing parts: keys, judges, measuring, and many dialogues on few file descriptors."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import training_parts as parts
from loopback import InThread, Loopback, dumps
from maieutic.config import Recipe
from maieutic.dialogue import Dialogue, Turn
from maieutic.engines.usage import Ledger
from maieutic.env.student import ModelStudent
from maieutic.errors import EngineError, RecipeError
from maieutic.problems.measure_recipe import measure_recipe
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.runtime import build_judge, build_students
from token_server import TokenServer

pytestmark = pytest.mark.integration

OK = dumps({"reasoning": "", "verdict": "OK", "criterion": "", "quote": ""})
PAIR = ProblemPair(id="p", source=Problem(text="s", answer="7"), transfer=Problem(text="t", answer="9"))


def recipe_of(model: Path, folder: Path, student: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    data = parts.recipe_dict(model, folder, **changes)
    if student is not None:
        data["students"][0]["engine"] = student
    return Recipe.model_validate_json(json.dumps(data))


def test_a_student_has_one_key_whatever_plays_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:9"]
    engines = [None, {"kind": "vllm", "urls": urls}, {"kind": "chat", "urls": urls, "served_name": "other"}]
    keys = {
        str(s.key) for e in engines for s in build_students(recipe_of(tiny_model_dir, tmp_path, student=e))
    }
    assert len(keys) == 1 and str(tiny_model_dir) in keys.pop()


@pytest.mark.parametrize("kind", ["chat", "vllm"])
def test_measuring_through_a_server(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    def right(body: dict[str, Any]) -> str:
        return r"\boxed{4}"

    server = Loopback(right) if kind == "chat" else TokenServer(tiny_model_dir)
    out = tmp_path / "m.jsonl"
    with InThread(server):
        recipe = recipe_of(tiny_model_dir, tmp_path, student={"kind": kind, "urls": [server.url]})
        lines = measure_recipe(recipe, out, k=2, limit=2)
        (student,) = build_students(recipe)
    assert "4 problems" in lines[0]
    pairs = [json.loads(line) for line in out.read_text().splitlines()]
    # p1: source 4, transfer 5
    found = pairs[0]["source"]["rates"][str(student.key)]
    assert found["n"] == 2 and (kind == "vllm" or found["rate"] == 1.0)
    assert pairs[0]["transfer"]["rates"][str(student.key)]["rate"] == 0.0


def test_a_server_that_is_not_there_stops_measuring(tiny_model_dir: Path, tmp_path: Path) -> None:
    engine = {"kind": "vllm", "urls": ["http://127.0.0.1:9"], "start_timeout_s": 0.2}
    with pytest.raises(EngineError, match=r"student: http://127.0.0.1:9 is not healthy after"):
        measure_recipe(recipe_of(tiny_model_dir, tmp_path, student=engine), tmp_path / "m.jsonl", k=2)
    engine = {"kind": "chat", "urls": [f"file:{tmp_path}/none*.json"], "start_timeout_s": 0.2}
    with pytest.raises(EngineError, match=r"no address file .*none\*\.json"):
        build_students(recipe_of(tiny_model_dir, tmp_path, student=engine))


def test_keys_come_from_the_environment(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"kind": "chat", "urls": ["http://x"], "api_key_env": "MAIEUTIC_TEST_KEY"}
    recipe = recipe_of(tiny_model_dir, tmp_path, student=engine)
    with pytest.raises(RecipeError, match="MAIEUTIC_TEST_KEY, which is not set"):
        build_students(recipe)
    monkeypatch.setenv("MAIEUTIC_TEST_KEY", "sesame")
    (student,) = build_students(recipe)
    assert isinstance(student, ModelStudent)


@pytest.mark.parametrize("kind", ["hf", "vllm", "chat"])
def test_a_judge_on_every_engine(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """A random model's words are no verdict; an endpoint that is asked by message is asked for structured output."""
    server = Loopback(lambda body: OK) if kind == "chat" else TokenServer(tiny_model_dir)
    dialogue = Dialogue("d", "s", turns=[Turn("student", "open", scripted=True), Turn("tutor", "Add them.")])
    with InThread(server):
        engine = {"kind": kind} | ({} if kind == "hf" else {"urls": [server.url]})
        judge = {"kind": "llm", "model": str(tiny_model_dir), "votes": 1, "reasks": 0, "engine": engine}
        judge["sampling"] = {"temperature": 0.6, "max_tokens": 8}
        recipe = recipe_of(tiny_model_dir, tmp_path, judge=judge)

        async def ask() -> Any:
            made, opened = build_judge(recipe, Ledger())
            try:
                for chat in opened:
                    await chat.start()
                return await made.verdict(dialogue, PAIR, "leakage", seed=1)
            finally:
                for chat in opened:
                    await chat.close()

        verdict = asyncio.run(ask())
    if kind == "chat":
        assert verdict.decision == "ok"
        assert server.bodies[0]["response_format"]["type"] == "json_schema"
    else:
        assert (verdict.decision, verdict.criterion) in {("unknown", "no_verdict"), ("unknown", "truncated")}
        assert kind == "hf" or len(server.bodies) == 1


MANY = """
import asyncio, json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from env_fakes import FakeGrader, pair
from maieutic.config import EngineSpec, EnvSpec, RewardSpec, StudentSpec
from maieutic.engines.base import Sampling
from maieutic.engines.connect import connect_chat
from maieutic.engines.usage import Ledger
from maieutic.env.llm_judge import LlmJudge
from maieutic.env.play import Environment
from maieutic.env.prompts import load_env
from maieutic.env.student import ModelStudent
from maieutic.problems.schema import SolveRate
from maieutic.rollout import rollout, rollout_metrics
from maieutic.tutors import ChatTutor

templates, ledger = load_env("near_transfer"), Ledger()
env = Environment(EnvSpec(max_turns=5, post_test_samples=2), RewardSpec(), templates)
chats = [
    connect_chat(EngineSpec(kind="chat", urls=[u], http={"concurrency": 512}), "m", role=r, ledger=ledger)
    for r, u in zip(("tutor", "student", "judge"), sys.argv[1:], strict=True)
]
student = ModelStudent(chats[1], StudentSpec(model="m"), templates, env.env)
judge = LlmJudge(chats[2], templates, Sampling(0.6, 1.0, 64))
tutor = ChatTutor(chats[0], templates, env.env, Sampling(1.0, 1.0, 64))
rates = {str(student.key): SolveRate(rate=0.25, n=16)}
given = pair()
given = given.model_copy(update={
    "source": given.source.model_copy(update={"rates": rates}),
    "transfer": given.transfer.model_copy(update={"rates": rates}),
})

async def play(slot):
    return await env.play(tutor, student, judge, FakeGrader(), slot.pair, seed=slot.seed, id=slot.id,
                          group_id=slot.group_id, phase=slot.phase, step=slot.step, index=slot.index)

async def go():
    try:
        return await rollout(play, [given] * 32, phase="train", step=1, run_seed=0, group_size=16, retries=0)
    finally:
        for chat in chats:
            await chat.close()

result = asyncio.run(go())
print(json.dumps(rollout_metrics(result, unknown_reward=-0.2) | ledger.metrics()))
"""


def test_512_dialogues_with_three_roles_under_256_files() -> None:
    tutor, judge = Loopback(lambda body: "What do you know?"), Loopback(lambda body: OK)
    student = Loopback(lambda body: "9")
    with InThread(tutor), InThread(student), InThread(judge):
        result = subprocess.run(
            [sys.executable, "-c", MANY, tutor.url, student.url, judge.url],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        )
    assert result.returncode == 0, result.stderr[-2000:]
    row = json.loads(result.stdout)
    assert row["episodes"] == 512 and row["excluded_share"] == 0 and row["post"] == 1.0
    # 2 tutor turns, 2 student turns and a post-test, 2 gates with one request of two votes each
    asked = {r: row[f"usage/{r}/requests"] for r in ("tutor", "student", "judge")}
    assert asked == {"tutor": 1024, "student": 1536, "judge": 1024}
    assert all(row[f"usage/{r}/{k}"] == 0 for r in asked for k in ("retries", "failures"))
    assert max(s.most_open for s in (tutor, student, judge)) <= 48

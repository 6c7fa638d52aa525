"""The server launcher: what it starts, what it publishes, and that nothing is left over when it goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import maieutic.serve as serve
from maieutic.config import Recipe
from maieutic.errors import EngineError, RecipeError
from maieutic.serve import ServePlan, Server, plan, resolve_urls

FAKE = Path(__file__).with_name("fake_vllm.py")
JUDGE = {
    "kind": "llm",
    "model": "j",
    "engine": {"kind": "chat", "urls": ["http://x"], "serve_args": ["--tensor-parallel-size", "2"]},
}


def recipe(**kw) -> Recipe:
    return Recipe(**{"name": "r", "tutor": {"model": "t"}, "students": [{"model": "s"}], **kw})


def fake_plan(tag: str, mode: str = "good") -> ServePlan:
    """The tag stands in the command of the server and of its child: other tests start the same program at the same time."""
    command = [sys.executable, str(FAKE), f"--tag={tag}"]
    return ServePlan("student", "m", 100, command, {"FAKE_VLLM": mode, "FAKE_TAG": tag})


def alive(tag: str) -> list[str]:
    time.sleep(0.3)
    out = subprocess.run(["pgrep", "-f", tag], capture_output=True, text=True).stdout.split()
    return out


def test_a_healthy_server_is_published_and_withdrawn(tmp_path):
    address = tmp_path / "endpoints" / "student.json"
    with Server(fake_plan("tag-good"), address, tmp_path / "log") as s:
        record = json.loads(address.read_text())
        assert record["url"] == s.url and record["role"] == "student" and str(record["port"]) in s.url
        assert resolve_urls([f"file:{tmp_path}/endpoints/*.json", "http://other"], timeout_s=1) == [
            s.url,
            "http://other",
        ]
        assert urllib.request.urlopen(s.url + "/health").status == 200
        guard = f"orphan-guard {s.process.pid}"
        assert alive(guard) and len(alive("tag-good")) == 2
    assert not address.exists() and alive(guard) == []
    assert alive("tag-good") == [], "the server's own child outlived it"


def test_a_launcher_that_is_killed_takes_its_server_along(tmp_path):
    script = (
        "import pathlib, sys, time; sys.path.insert(0, sys.argv[1]); from test_serve import *\n"
        "s = Server(fake_plan('tag-orphan'), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))\n"
        "print(s.process.pid, flush=True); time.sleep(600)"
    )
    command = [
        sys.executable,
        "-c",
        script,
        str(Path(__file__).parent),
        str(tmp_path / "a"),
        str(tmp_path / "l"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        group = int(launcher.stdout.readline())
        assert alive("tag-orphan") and alive(f"orphan-guard {group}")
        launcher.kill()
    deadline = time.monotonic() + 30
    while (alive("tag-orphan") or alive(f"orphan-guard {group}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive("tag-orphan") == [] and alive(f"orphan-guard {group}") == []


def test_a_lost_race_for_a_port_is_run_again_and_the_winner_is_not_published(tmp_path, monkeypatch):
    class Other(
        BaseHTTPRequestHandler
    ):  # a healthy server of somebody else on the port that was free a moment ago
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}')

        def log_message(self, *a):
            pass

    other = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    taken, real = other.server_address[1], serve.free_port
    ports = iter([taken, taken])
    monkeypatch.setattr(serve, "free_port", lambda host: next(ports, None) or real(host))
    try:
        with Server(fake_plan("tag-race"), tmp_path / "a.json", tmp_path / "log") as s:
            assert not s.url.endswith(f":{taken}")
            assert (tmp_path / "log").read_text().count("Address already in use") == 2
    finally:
        other.shutdown()


def test_two_servers_started_at_once_get_two_ports(tmp_path):
    out: list[Server] = []

    def start(i: int) -> None:
        out.append(Server(fake_plan(f"tag-two-{i}"), tmp_path / f"{i}.json", tmp_path / f"{i}.log"))

    threads = [threading.Thread(target=start, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    try:
        assert len({s.url for s in out}) == 4
        assert sorted(resolve_urls([f"file:{tmp_path}/*.json"], timeout_s=1)) == sorted(s.url for s in out)
    finally:
        for s in out:
            s.stop()


def test_a_server_that_dies_is_an_error_with_its_last_words(tmp_path):
    with pytest.raises(EngineError, match="CUDA out of memory, or so"):
        Server(fake_plan("tag-dies", "dies"), tmp_path / "a.json", tmp_path / "log")
    assert not (tmp_path / "a.json").exists()


def test_a_server_that_never_gets_healthy_is_ended(tmp_path):
    with pytest.raises(EngineError, match="not healthy within 1.5 s"):
        Server(fake_plan("tag-never", "never"), tmp_path / "a.json", tmp_path / "log", timeout_s=1.5)
    assert alive("tag-never") == []


def test_an_address_that_never_comes_is_named(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(EngineError, match=r"broken\*\.json"):
        resolve_urls([f"file:{tmp_path}/broken*.json"], timeout_s=0.1)


def test_the_plan_of_each_role(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100000}')
    tutor = plan(recipe(), "tutor", model_dir=str(tmp_path))
    assert tutor.env["VLLM_SERVER_DEV_MODE"] == "1" and tutor.context == 2048 + 8192 + 64
    at = tutor.command.index("--logprobs-mode")
    assert tutor.command[at + 1] == "processed_logprobs" and "--enforce-eager" not in tutor.command
    student = plan(recipe(), "student", model_dir=str(tmp_path), python="/venv/bin/python")
    assert student.command[0] == "/venv/bin/python" and "--enforce-eager" in student.command
    # Only whole blocks are found in the prefix cache, and vLLM takes 128 tokens a block on a CPU.
    assert student.command[student.command.index("--block-size") + 1] == "32"
    assert "--block-size" not in tutor.command
    # HttpPool keeps idle connections for 30 s; a server that closes them sooner breaks the request that comes next.
    assert int(tutor.env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 30
    assert "VLLM_SERVER_DEV_MODE" not in student.env and student.context == 2048 + 8192 + 2048 + 800 + 64
    judge = plan(recipe(judge=JUDGE), "judge", model_dir="hub/id")
    assert judge.command[-2:] == ["--tensor-parallel-size", "2"] and "HF_HUB_OFFLINE" not in judge.env


def test_the_context_is_no_more_than_the_model_has(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 2048}}')
    assert plan(recipe(), "tutor", model_dir=str(tmp_path)).context == 2048


def test_roles_that_cannot_be_served():
    with pytest.raises(RecipeError, match=r"judge\.kind is 'rule'"):
        plan(recipe(), "judge", model_dir="x")
    with pytest.raises(RecipeError, match="no role 'teacher'"):
        plan(recipe(), "teacher", model_dir="x")
    two = recipe(students=[{"model": "a", "name": "a"}, {"model": "b", "name": "b"}])
    with pytest.raises(RecipeError, match=r"several students.*\['a', 'b'\]"):
        plan(two, "student", model_dir="x")
    with pytest.raises(RecipeError, match="no student 'c'"):
        plan(two, "student", model_dir="x", student="c")

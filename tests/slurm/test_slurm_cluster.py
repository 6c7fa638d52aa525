"""On a real SLURM of one machine: a submission from servers to evaluation, and every way in which a night goes wrong.

MAIEUTIC_SLURM_INSTALL=1 pytest tests/slurm -m slow         (as root; docs/slurm.md)
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_box import OneBox, leftovers, missing
from safetensors.torch import load_file

import training_parts as parts
from maieutic.config import Recipe
from maieutic.recipe import dump_recipe
from maieutic.tiny import make_tiny_model

TESTS = Path(__file__).resolve().parents[1]
REAL_VLLM = TESTS.parent / ".venv-vllm" / "bin" / "python"
WHY_NOT = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
STEPS = 3
# Patience for a machine that many share; on a quiet one a run takes 20 s.
START_S, RUN_S = 600, 900


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneBox]:
    made = OneBox(tmp_path_factory.mktemp("slurm") / "box")
    try:
        made.start()
        yield made
    finally:
        made.stop()


class World:
    """A working directory with recipe, site settings and an "interpreter" that serves fakes."""

    def __init__(self, box: OneBox, folder: Path) -> None:
        self.box, self.folder = box, folder
        self.tag = f"maieutic-slurm-test-{uuid.uuid4().hex}"
        self.env = {
            **box.env,
            # Jobs import what this test imports.
            "PYTHONPATH": os.pathsep.join(
                [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            ).rstrip(os.pathsep),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "MAIEUTIC_TEST_TAG": self.tag,
        }
        for name in ("tutor", "student", "judge"):
            make_tiny_model(folder / "models" / name, head_dim=32)
        fake = folder / "python-vllm"
        fake.write_text(f'#!/bin/sh\nexec {sys.executable} {TESTS / "slurm" / "fake_server.py"} "$@"\n')
        fake.chmod(0o755)
        (folder / "site.env").write_text(
            f"GPUS_PER_NODE=0\nCPUS_PER_NODE=4\nMEM_PER_NODE=1000\nTRAIN_NODES=2\nTIME=01:00:00\nEVALUATION_TIME=01:00:00\n"
            f"START_SECONDS=300\nGRACE_SECONDS=15\nVLLM_PYTHON={fake}\n"
        )

    def recipe(self, outage_limit_s: float = 60.0, **changes: Any) -> Path:
        data = parts.recipe_dict(self.folder / "models" / "tutor", self.folder, **{
            "output_dir": "runs",
            "tutor.dtype": "float32",
            # What a sequence is decoded together with shows in the last bits, and depends on when servers answer.
            "tutor.engine": {"max_batch_size": 1, "cache_tokens": 0},
            "env.gates": "hard",
            "env.prompt_limit": 1024,
            "env.conversation_limit": 1024,
            "training.max_steps": STEPS,
            "eval.every": 0,
            "checkpoint.every": 1,
            **changes,
        })  # fmt: skip
        data["students"][0] |= {"model": str(self.folder / "models" / "student"), "dtype": "float32"}
        http = {"outage_limit_s": outage_limit_s}
        data["students"][0]["engine"] = {"kind": "vllm", "urls": ["file:anywhere/*.json"], "http": http}
        judge = str(self.folder / "models" / "judge")
        engine = {"kind": "chat", "urls": ["file:anywhere/*.json"]}
        data["judge"] = {"kind": "llm", "model": judge, "dtype": "float32", "votes": 1, "engine": engine}
        data["judge"]["sampling"] = {"temperature": 0.6, "max_tokens": 64}
        path = self.folder / "recipe.yaml"
        path.write_text(dump_recipe(Recipe.model_validate_json(json.dumps(data))))
        return path

    def evaluation(self) -> Path:
        path = self.folder / "evaluation.yaml"
        path.write_text(
            "name: small\noffline: true\nexperiment: recipe.yaml\ntutor: {dtype: float32}\n"
            "gates: {kind: rule}\nenvironment: {problems: 2, samples: 1}\n"
        )
        return path

    def maieutic(self, *arguments: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "maieutic", *arguments],
            cwd=self.folder,
            env=self.env | env,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *arguments: str, env: dict[str, str] | None = None, **changes: Any) -> list[str]:
        """Job ids."""
        words = ["slurm", "submit", str(self.recipe(**changes)), "--site", "site.env", *arguments]
        return self.maieutic(*words, **(env or {})).split()

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def log(self, name: str, job: str, kind: str = "train") -> str:
        return (self.run(name) / "slurm" / f"{kind}-{job}.log").read_text()

    def steps(self, name: str) -> int:
        file = self.run(name) / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def nothing_is_left(self, name: str) -> None:
        """No process of the jobs, and no address file."""
        self.box.wait(
            lambda: not leftovers(self.tag), 30, f"no process of {self.tag} ({leftovers(self.tag)})"
        )
        assert not list(self.run(name).glob("endpoints/*/*.json"))


@pytest.fixture
def world(box: OneBox, tmp_path: Path) -> World:
    box.run("scancel", "--user=root", check=False)  # what a test that failed left behind
    box.wait(lambda: len(box.idle()) == len(box.nodes), 120, "all nodes idle")
    return World(box, tmp_path)


@pytest.fixture(scope="session")
def uninterrupted(box: OneBox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that no signal met."""
    world = World(box, tmp_path_factory.mktemp("uninterrupted"))
    (job,) = world.submit()
    assert box.ended(job, RUN_S) == "COMPLETED", world.log("run", job)
    world.nothing_is_left("run")
    return world.run("run")


def same_run(run: Path, reference: Path) -> None:
    """Numbers and weights, bit for bit (usage counts what was spent, also on a rollout that was cancelled)."""

    def rows(folder: Path) -> list[dict[str, float]]:
        return [
            {k: v for k, v in row.items() if not k.startswith("usage/")} for row in parts.metrics_of(folder)
        ]

    assert rows(run) == rows(reference) and len(rows(run)) == STEPS
    name = f"checkpoints/step-{STEPS:06d}/model/adapter_model.safetensors"
    a, b = load_file(run / name), load_file(reference / name)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    optimizer = f"checkpoints/step-{STEPS:06d}/optimizer.pt"
    x, y = (torch.load(f / optimizer, weights_only=True)["optimizer"]["state"] for f in (run, reference))
    assert all(torch.equal(x[i]["exp_avg"], y[i]["exp_avg"]) for i in y) and x.keys() == y.keys()


def test_gpus_of_overlapping_steps_are_apart(box: OneBox, tmp_path: Path) -> None:
    line = f"{sys.executable} -m maieutic.slurm.step --gpus {{}} -- sh -c 'echo got $CUDA_VISIBLE_DEVICES'"
    script = "#!/bin/bash\n" + "".join(
        f"srun --overlap -N1 -n1 {line.format(g)}\n" for g in ("0-1", "2-2", "3-4")
    )
    (tmp_path / "s").write_text(script)
    out = tmp_path / "out"
    job = box.run("sbatch", "--parsable", "--gres=gpu:4", f"--output={out}", str(tmp_path / "s")).strip()
    box.ended(job, 60)
    text = out.read_text()
    assert "got 0,1\n" in text and "got 2\n" in text
    assert "GPUs 3-4 of this node were planned, but CUDA_VISIBLE_DEVICES shows 4 (0,1,2,3)" in text


def test_from_servers_to_evaluation_with_one_command(world: World, box: OneBox) -> None:
    """One command; the student's server is a real vLLM where there is one; all want one port, which is taken."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = (
            {"FAKE_REAL": f"student:{REAL_VLLM}", "VLLM_CPU_KVCACHE_SPACE": "1"} if REAL_VLLM.exists() else {}
        )
        train, evaluate = world.submit(
            *(
                "--evaluate",
                str(world.evaluation()),
                "--set",
                f"WANTED_PORT={port}",
                "--set",
                "START_SECONDS=900",
            ),
            env=env,
        )
        assert f"afterok:{train}" in box.run("scontrol", "show", "job", evaluate)
        assert box.ended(train, RUN_S) == "COMPLETED", world.log("run", train)
    log = world.log("run", train)
    assert f"port {port} was taken: another one" in log
    assert log.index("judge.0 is healthy") < log.index("start-up probe")
    rows = parts.metrics_of(world.run("run"))
    assert [r["train/step"] for r in rows] == [1, 2, 3]
    for row in rows:
        assert row["usage/judge/requests"] > 0 and row["usage/student/requests"] > 0
        assert row["rollout/excluded_share"] == 0
    urls = re.findall(r"http://\S+:(\d+) \(published", log)
    assert len(urls) == 2 and str(port) not in urls
    assert box.ended(evaluate, RUN_S) == "COMPLETED", world.log("run", evaluate, "evaluate")
    results = list((world.run("run") / "evaluation").rglob("*.json"))
    assert results, world.log("run", evaluate, "evaluate")
    assert re.search(r"train\t\d+\tCOMPLETED", world.maieutic("slurm", "status", "runs/run"))
    world.nothing_is_left("run")


def test_usr1_is_a_checkpoint_a_requeue_and_the_same_run(
    world: World, box: OneBox, uninterrupted: Path
) -> None:
    (job,) = world.submit(env={"FAKE_DELAY": "0.5"})
    box.wait(lambda: world.steps("run") >= 1, START_S, "the first step")
    box.run("scancel", "--batch", "--signal=USR1", job)
    box.wait(lambda: box.restarts(job) == 1, 120, "a requeue")
    saved = sorted(p.name for p in (world.run("run") / "checkpoints").iterdir())
    log = world.log("run", job)
    assert "stopped by SIGUSR1" in log and "ended with code 85" in log
    assert f"step-{STEPS:06d}" not in saved and saved
    assert box.ended(job, RUN_S) == "COMPLETED", world.log("run", job)
    assert "resuming from" in world.log("run", job)
    same_run(world.run("run"), uninterrupted)
    turns = [p.name for p in (world.run("run") / "endpoints").iterdir()]
    assert sorted(turns) == [f"{job}-0", f"{job}-1"]
    world.nothing_is_left("run")


def test_a_higher_partition_preempts_and_the_run_goes_on(
    world: World, box: OneBox, uninterrupted: Path
) -> None:
    (job,) = world.submit(env={"FAKE_DELAY": "0.5"})
    box.wait(lambda: world.steps("run") >= 1, START_S, "the first step")
    urgent = box.run(
        *("sbatch", "--parsable", "-p", "urgent", f"-N{len(box.nodes)}", "--exclusive", "--output=/dev/null"),
        *("--wrap", "sleep 3"),
    ).strip()
    box.wait(lambda: box.state(urgent) in ("RUNNING", "COMPLETED"), 180, "the urgent job")
    assert box.ended(job, RUN_S) == "COMPLETED", world.log("run", job)
    assert box.restarts(job) == 1 and "stopped by SIG" in world.log("run", job)
    same_run(world.run("run"), uninterrupted)
    world.nothing_is_left("run")


def test_a_site_that_terminates_and_knows_no_code_85(uninterrupted: Path, tmp_path: Path) -> None:
    """Preemption by SIGTERM, and no RequeueExit: the script asks for the requeue itself."""
    box = OneBox(
        tmp_path / "box", nodes=4, gpus=0, requeue_on_85=False, user_signal=False, prefix=f"t{os.getpid()}x"
    )
    try:
        box.start()
        (tmp_path / "w").mkdir()
        world = World(box, tmp_path / "w")
        (job,) = world.submit(env={"FAKE_DELAY": "0.5"})
        box.wait(lambda: world.steps("run") >= 1, START_S, "the first step")
        urgent = box.run(
            *("sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "--output=/dev/null"),
            *("--wrap", "sleep 3"),
        ).strip()
        box.wait(lambda: box.state(urgent) in ("RUNNING", "COMPLETED"), 180, "the urgent job")
        box.wait(lambda: box.restarts(job) >= 1, 120, "a requeue")
        box.wait(lambda: world.steps("run") >= 2, START_S, "a step of the second turn")
        box.run("scancel", "--batch", "--signal=USR1", job)
        assert box.ended(job, RUN_S) == "COMPLETED", world.log("run", job)
        log = world.log("run", job)
        assert "stopped by SIG" in log
        same_run(world.run("run"), uninterrupted)
        world.nothing_is_left("run")
    finally:
        box.stop()


@pytest.mark.parametrize("which", ["trainer", "server"])
def test_a_node_dies_and_the_run_goes_on_elsewhere(
    which: str, world: World, box: OneBox, uninterrupted: Path
) -> None:
    (job,) = world.submit(env={"FAKE_DELAY": "0.5"})
    box.wait(lambda: world.steps("run") >= 1, START_S, "the first step")
    nodes = box.run("scontrol", "show", "hostnames", _nodes_of(box, job)).split()
    node = nodes[1 if which == "trainer" else 2]
    box.crash(node)
    try:
        box.wait(lambda: box.restarts(job) >= 1, 120, "a requeue")
        assert box.ended(job, RUN_S) == "COMPLETED", world.log("run", job)
    finally:
        box.start_node(node)
        box.wait(lambda: node in box.idle(), 60, f"{node} to be back")
    assert node not in box.run("scontrol", "show", "hostnames", _nodes_of(box, job)).split()
    same_run(world.run("run"), uninterrupted)
    # What a dead server published stays beside what the living ones did, in the folder of its turn.
    assert not list(world.run("run").glob(f"endpoints/{job}-1/*.json"))
    box.wait(lambda: not leftovers(world.tag), 30, f"no process ({leftovers(world.tag)})")


def test_training_ends_before_slurm_notices_a_dead_node(uninterrupted: Path, tmp_path: Path) -> None:
    """A site that is slow to notice, and trainers that soon give up on a server: the script finds the node silent and requeues."""
    box = OneBox(tmp_path / "box", gpus=0, slurmd_timeout_s=120, prefix=f"u{os.getpid()}x")
    try:
        box.start()
        (tmp_path / "w").mkdir()
        world = World(box, tmp_path / "w")
        (job,) = world.submit(env={"FAKE_DELAY": "0.5"}, outage_limit_s=15.0)
        box.wait(lambda: world.steps("run") >= 1, START_S, "the first step")
        node = box.run("scontrol", "show", "hostnames", _nodes_of(box, job)).split()[2]
        box.crash(node)
        assert box.ended(job, RUN_S) == "COMPLETED", world.log("run", job)
        log = world.log("run", job)
        assert "EngineDownError" in log and f"{node} does not answer" in log
        assert box.restarts(job) == 1
        assert log.index("requeued; it goes on") < log.index("resuming from /")
        same_run(world.run("run"), uninterrupted)
        box.wait(lambda: not leftovers(world.tag), 30, f"no process ({leftovers(world.tag)})")
    finally:
        box.stop()


def _nodes_of(box: OneBox, job: str) -> str:
    found = re.search(r"^ *NodeList=(\S+)", box.run("scontrol", "show", "job", job), re.MULTILINE)
    assert found
    return found[1]


def test_a_server_that_never_gets_healthy_ends_the_job_by_name(world: World, box: OneBox) -> None:
    train, evaluate = world.submit(
        *("--set", "START_SECONDS=20", "--evaluate", str(world.evaluation())),
        env={"FAKE_VLLM": "judge-never"},
    )
    assert box.ended(train, RUN_S) == "FAILED"
    log = world.log("run", train)
    assert "EngineError: judge: not healthy within 20 s" in log
    assert "ServerNotHealthyError: judge.0 ended before it was healthy" in log
    assert "student.0 is healthy" in log and world.steps("run") == 0
    # Its evaluation does not wait for ever.
    assert box.ended(evaluate, 60) == "CANCELLED"
    world.nothing_is_left("run")


def test_a_dead_server_stops_training_with_a_checkpoint_from_which_it_goes_on(
    world: World, box: OneBox, uninterrupted: Path
) -> None:
    (job,) = world.submit(env={"FAKE_DELAY": "0.5"})
    box.wait(lambda: world.steps("run") >= 1, START_S, "the first step")
    (file,) = world.run("run").glob("endpoints/*/student.0.json")
    os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
    assert box.ended(job, RUN_S) == "FAILED"
    log = world.log("run", job)
    assert "EngineDownError" in log and "student.0 had ended by then" in log and "wrote checkpoint" in log
    assert box.restarts(job) == 0 and world.steps("run") < STEPS
    world.nothing_is_left("run")
    (again,) = world.submit("--resume")
    assert box.ended(again, RUN_S) == "COMPLETED", world.log("run", again)
    assert "resuming from /" in world.log("run", again)
    same_run(world.run("run"), uninterrupted)


def test_a_cancelled_job_stays_cancelled(world: World, box: OneBox) -> None:
    (job,) = world.submit(env={"FAKE_DELAY": "0.5"})
    box.wait(lambda: world.steps("run") >= 1, START_S, "the first step")
    assert f"job {job} cancelled" in world.maieutic("slurm", "cancel", "runs/run")
    assert box.ended(job, 90) == "CANCELLED"
    world.nothing_is_left("run")
    time.sleep(8)  # longer than a requeued job would wait
    assert box.state(job) == "CANCELLED"

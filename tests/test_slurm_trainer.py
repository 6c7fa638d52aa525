"""What runs inside a job, without SLURM: the trainers of a node, their signals, ports and exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import training_parts as parts
from maieutic.config import Recipe
from maieutic.errors import EngineError, RecipeError, RunInterrupted
from maieutic.recipe import dump_recipe
from maieutic.serve import free_port, resolve_urls
from maieutic.slurm import trainer
from maieutic.slurm.errors import SlurmError
from maieutic.sweep import SweepRecipe, Task, run_task, train_arguments

TESTS = Path(__file__).parent


def given(state: Path, *more: str) -> trainer.argparse.Namespace:
    return trainer.parse(
        [
            "--state",
            str(state),
            "--head",
            "n1",
            "--nodes",
            "2",
            "--processes",
            "4",
            *more,
            "--",
            "r.yaml",
            "--resume",
            "auto",
        ]
    )


def test_what_is_launched_on_each_node(tmp_path: Path) -> None:
    words = trainer.command(given(tmp_path), 1, 4321)
    text = " ".join(words)
    assert "--multi_gpu --num_machines 2 --num_processes 8 --machine_rank 1 --main_process_ip n1" in text
    assert (
        "--main_process_port 4321 --rdzv_backend static -m maieutic.slurm.rank r.yaml --resume auto" in text
    )
    assert "--config_file fsdp.yaml" in " ".join(
        trainer.command(given(tmp_path, "--config", "fsdp.yaml"), 0, 1)
    )
    one = trainer.parse(["--state", "s", "--head", "h", "--nodes", "1", "--processes", "1", "--", "r.yaml"])
    assert (
        "--multi_gpu" not in (single := " ".join(trainer.command(one, 0, 1)))
        and "--main_process" not in single
    )


def test_nodes_meet_at_the_first_ones_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = threading.Timer(0.5, lambda: trainer.meet(given(tmp_path, "--port", "4444"), 0))
    later.start()
    assert trainer.meet(given(tmp_path), 1) == 4444
    later.join()
    monkeypatch.setattr(trainer, "_MEETING_S", 0.1)
    with pytest.raises(SlurmError, match=r"no .*meeting\.json after 0\.1 s: is n1 up"):
        trainer.meet(given(tmp_path / "other"), 1)


def test_a_state_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["--state", str(tmp_path / "file" / "train-1"), "--head", "h", "--nodes", "1", "--processes", "1"]
    assert trainer.main([*words, "--", "r.yaml"]) == 1
    assert "file/train-1 cannot be written: Not a directory" in capsys.readouterr().err


def launch(folder: Path, state: Path, recipe: Path, port: int = 0, nodes: int = 1) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        "-m",
        "maieutic.slurm.trainer",
        "--cpu",
        "--state",
        str(state),
        "--head",
        "localhost",
    ]
    words += [
        "--nodes",
        str(nodes),
        "--processes",
        "2",
        "--port",
        str(port),
        "--",
        str(recipe),
        "--resume",
        "auto",
    ]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    with (folder / "out.txt").open("a") as out:
        return subprocess.Popen(words, env=environment, stdout=out, stderr=out)


def write(folder: Path, model: Path, **changes: object) -> Path:
    # No evaluation: every rank must know that there is none.
    data = parts.recipe_dict(
        model, folder, **{"training.max_steps": 4, "eval.every": 0, "checkpoint.every": 9, **changes}
    )
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(Recipe.model_validate_json(json.dumps(data))))
    return path


@pytest.mark.integration
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_port_that_is_taken_is_marked_where_it_matters(
    tiny_model_dir: Path, tmp_path: Path, nodes: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = launch(tmp_path, tmp_path / "state", write(tmp_path, tiny_model_dir), port, nodes)
        code = process.wait(300)
    mark = tmp_path / "state" / trainer.PORT_TAKEN
    if nodes == 1:  # nobody else must know the port, and accelerate takes another by itself
        assert code == 0 and not mark.exists()
    else:
        assert code == 1 and mark.read_text() == str(port)
        assert not list((tmp_path / "state").glob("rank-*"))


@pytest.mark.integration
def test_a_signal_to_every_process_is_one_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    """SLURM signals all processes of a step, launchers too. What follows from the checkpoint is the run that was not stopped."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
        write(folder, tiny_model_dir, **{"training.max_steps": 4})
    assert launch(whole, whole / "state", whole / "recipe.yaml").wait(900) == 0, (
        whole / "out.txt"
    ).read_text()
    process = launch(stopped, stopped / "state", stopped / "recipe.yaml")
    metrics = stopped / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, (stopped / "out.txt").read_text()
        time.sleep(0.02)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in tree:
        try:
            one.send_signal(signal.SIGUSR1)
        except psutil.NoSuchProcess:
            continue
    # The launcher takes the stop for a success: at a failure it would kill ranks that still write.
    assert process.wait(600) == 0, (stopped / "out.txt").read_text()
    codes = [(stopped / "state" / f"rank-{r}.exit").read_text() for r in (0, 1)]
    assert codes == ["85", "85"]
    saved = [p.name for p in (stopped / "run" / "checkpoints").iterdir()]
    assert len(saved) == 1 and saved != ["step-000004"]
    assert launch(stopped, stopped / "again", stopped / "recipe.yaml").wait(900) == 0
    assert (stopped / "again" / "rank-0.exit").read_text() == "0"
    assert parts.metrics_of(stopped / "run") == parts.metrics_of(whole / "run")
    name = "run/checkpoints/step-000004/model/adapter_model.safetensors"
    a, b = load_file(stopped / name), load_file(whole / name)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_wanted_port_is_taken_only_when_it_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = free_port("0.0.0.0", port)
        assert other not in (0, port)
    assert free_port("0.0.0.0", other) == other


# ---- what other parts do for jobs ------------------------------------------------------------------------------------


def test_addresses_may_name_the_jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "student.0.json").write_text('{"url": "http://n3:1"}')
    (tmp_path / "student.1.json").write_text('{"url": "http://n4:2"}')
    (tmp_path / "student.0.part").write_text("{")
    pattern = "file:$MAIEUTIC_ENDPOINTS/student.[0-9]*.json"
    monkeypatch.setenv("MAIEUTIC_ENDPOINTS", str(tmp_path))
    assert resolve_urls([pattern], timeout_s=0.0) == ["http://n3:1", "http://n4:2"]
    with pytest.raises(EngineError, match="no address file"):
        resolve_urls(["file:$MAIEUTIC_ENDPOINTS/judge.[0-9]*.json"], timeout_s=0.0)
    monkeypatch.delenv("MAIEUTIC_ENDPOINTS")
    with pytest.raises(RecipeError, match=r"\$MAIEUTIC_ENDPOINTS is not set"):
        resolve_urls([pattern], timeout_s=0.0)


def test_a_stopped_task_of_a_sweep_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = {"kind": "train", "recipe": "micro/full", "overrides": ["eval.every=0"]}
    recipe = SweepRecipe.model_validate(
        {
            "name": "s",
            "output_dir": str(tmp_path),
            "against": "a",
            "arms": {"a": arm},
            "instrument": {"recipe": "micro/full"},
        }
    )
    task = Task("a", 3)
    folder = recipe.root / "train" / task.name
    words = train_arguments(recipe, task, folder)
    assert words == [
        "micro/full",
        "eval.every=0",
        "name=a-3",
        "seed=3",
        "arm=a",
        f"output_dir={folder.parent}",
        "checkpoint.best=",
    ]
    monkeypatch.setattr("maieutic.train.main", lambda argv: 85 if argv == [*words, "--resume", "auto"] else 1)
    with pytest.raises(RunInterrupted) as stopped:
        run_task(recipe, task)
    assert stopped.value.exit_code == 85

"""Metrics file, trackers, progress and signals."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from maieutic.config import Recipe
from maieutic.errors import RunFolderError, RunInterrupted
from maieutic.training.progress import LiveReporter, PlainReporter, evaluation_table, reporter
from maieutic.training.run_folder import RunFolder
from maieutic.training.signals import Cancelled, StopSignals
from maieutic.training.trackers import MetricsFile, Trackers, public_config, trackers_of


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(
        {"name": "r", "tutor": {"model": "m"}, "students": [{"model": "m"}], **changes}
    )


@pytest.fixture
def accelerator(tmp_path: Path) -> Any:
    from accelerate import Accelerator

    def make(made: Recipe) -> Any:
        return Accelerator(cpu=True, log_with=trackers_of(made), project_dir=str(tmp_path))

    return make


# ---- metrics and trackers --------------------------------------------------------------------------------------------


def test_every_row_is_on_disk_at_once_and_is_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    file = MetricsFile(folder)
    file.write({"train/step": 1, "a": 0.1, "b": float("nan")})
    assert json.loads(folder.metrics.read_text()) == {"train/step": 1, "a": 0.1, "b": None}
    file.close()
    file.close()
    with pytest.raises(RunFolderError, match="closed"):
        file.write({"train/step": 2})


def test_a_full_disk_names_the_metrics_file(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    folder = RunFolder(tmp_path)
    folder.metrics.symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl.*No space left"):
        MetricsFile(folder).write({"train/step": 1})


def test_closing_on_a_full_disk_closes_the_trackers_and_keeps_the_runs_own_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    folder = RunFolder(tmp_path)
    folder.metrics.symlink_to("/dev/full")
    calls: list[Any] = []
    tracker = SimpleNamespace(name="wandb", run=FakeRun(calls))
    trackers = Trackers(SimpleNamespace(trackers=[]), recipe(), folder)
    trackers._accelerator.trackers = [tracker]
    with pytest.raises(RunFolderError):
        trackers.log(1, {"a": 1.0})
    trackers.finish(1)
    assert calls == [("finish", 1)]
    assert "metrics.jsonl could not be closed: No space left on device" in caplog.text


class FakeRun:
    def __init__(self, log: list[Any]) -> None:
        self.calls = log
        self.config: dict[str, Any] = {}

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define", name, step_metric))

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls.append(("log", step, values))

    def finish(self, exit_code: int | None = None) -> None:
        self.calls.append(("finish", exit_code))


def test_wandb_keeps_its_id_on_resume_has_one_step_and_gets_the_exit_code(
    tmp_path: Path, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    calls: list[Any] = []
    inits: list[dict[str, Any]] = []

    class Config:
        def update(self, values: dict[str, Any], **_: Any) -> None:
            calls.append(("config", values))

    def init(**settings: Any) -> FakeRun:
        inits.append(settings)
        return FakeRun(calls)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "config", Config())
    made = recipe(
        tracking={"wandb": "online", "group": "g", "tags": ["t"]},
        judge={"options": {"api_key": "sk-1", "n": 3}},
    )
    folder = RunFolder(tmp_path)
    trackers = Trackers(accelerator(made), made, folder)
    trackers.log(1, {"rollout/reward": 0.5})
    trackers.finish(85)
    trackers.finish(1)  # the first way out counts
    Trackers(accelerator(made), made, folder, step=1).finish(0)

    assert inits[0]["id"] == inits[1]["id"] and len(inits[0]["id"]) == 12
    assert {k: inits[0][k] for k in ("project", "name", "mode", "resume", "group", "tags")} == {
        "project": "maieutic",
        "name": "r",
        "mode": "online",
        "resume": "allow",
        "group": "g",
        "tags": ["t", "dppo"],
    }
    assert ("define", "*", "train/step") in calls
    assert ("log", 1, {"train/step": 1, "rollout/reward": 0.5}) in calls
    assert [c for c in calls if c[0] == "finish"] == [("finish", 85), ("finish", 0)]
    config = next(c[1] for c in calls if c[0] == "config")
    assert config["training"]["group_size"] == 8
    assert config["judge"]["options"] == {"api_key": "(removed)", "n": 3}


def test_keys_that_only_mention_tokens_are_not_secrets() -> None:
    config = public_config(recipe())
    assert config["env"]["end_token"] == "<end_of_conversation>"
    assert config["training"]["tokens_per_micro_batch"] == 16_384


def test_tensorboard_holds_what_the_metrics_file_holds(tmp_path: Path, accelerator: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = recipe(tracking={"tensorboard": True, "project": "p"})
    folder = RunFolder(tmp_path)
    trackers = Trackers(accelerator(made), made, folder)
    for step in (1, 2):
        trackers.log(step, {"rollout/reward": step / 10, "train/kept": float("nan") if step == 1 else 1.0})
    trackers.finish(0)
    events = EventAccumulator(str(tmp_path / "p"))
    events.Reload()
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("rollout/reward")] == [
        (1, 0.1),
        (2, 0.2),
    ]
    assert [e.step for e in events.Scalars("train/kept")] == [2]
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert lines[0] == {"train/step": 1, "rollout/reward": 0.1, "train/kept": None}


# ---- progress --------------------------------------------------------------------------------------------------------


def test_a_log_gets_plain_lines(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, caplog.at_level(logging.INFO):
        shown = reporter(10, 2, main=True, console=Console(file=file))
        assert isinstance(shown, PlainReporter)
        for done in range(9):
            shown.episodes("train", 3, done, 8)
        shown.step(3, {"rollout/reward": 0.25, "train/grad_norm": 1.5, "other": 1})
        shown.close()
    assert (tmp_path / "log").read_text() == ""
    assert caplog.messages[:4] == [f"train rollout of step 3: {n} of 8 episodes" for n in (2, 4, 6, 8)]
    assert caplog.messages[4].startswith("step 3/10: reward 0.25, grad_norm 1.5, ETA 0:0")
    assert "\x1b" not in "".join(caplog.messages) and "\r" not in "".join(caplog.messages)


def test_a_terminal_gets_bars_with_an_eta(tmp_path: Path) -> None:
    with (tmp_path / "tty").open("w") as file:
        shown = reporter(10, 2, main=True, console=Console(file=file, force_terminal=True, width=100))
        assert isinstance(shown, LiveReporter)
        shown.episodes("train", 3, 0, 8)
        shown.episodes("train", 3, 8, 8)
        shown.step(3, {"rollout/reward": 0.25})
        shown.close()
    text = (tmp_path / "tty").read_text()
    assert "train episodes, step 3" in text and "8/8" in text and "3/10" in text and "ETA" in text
    assert "step 3/10: reward 0.25" in text


def test_the_table_compares_what_both_evaluations_have(capsys: pytest.CaptureFixture[str]) -> None:
    table = evaluation_table({"eval/reward": 0.1, "eval/x": 1}, {"eval/reward": 0.35}, (0, 6))
    Console(width=80).print(table)
    text = capsys.readouterr().out
    assert "step 0" in text and "step 6" in text and "+0.25" in text and "eval/x" not in text


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, 85), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_cancels_the_rollout_in_flight_and_names_its_exit_code(number: int, code: int) -> None:
    before = signal.getsignal(number)
    cancelled = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with StopSignals() as signals:
        with pytest.raises(Cancelled):
            signals.run(work())
        assert cancelled and signals.received == number
        error = signals.interrupted("checkpoint x")
        with pytest.raises(Cancelled):  # nothing new starts
            signals.run(work())
    assert isinstance(error, RunInterrupted) and error.exit_code == code and "checkpoint x" in str(error)
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_leaves_at_once() -> None:
    script = (
        "import os, signal, time\n"
        "from maieutic.training.signals import StopSignals\n"
        "with StopSignals() as s:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert s.received == signal.SIGINT\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(3600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (130, "still here\n")

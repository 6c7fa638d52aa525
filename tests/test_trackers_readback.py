"""What a training really wrote, read back: W&B offline, TensorBoard, ``metrics.jsonl``; ``docs/metrics.md`` against all of them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import training_parts as parts
from maieutic.check import resolve
from maieutic.config import Recipe
from maieutic.engines.usage import Ledger
from maieutic.recipe import dump_recipe, load_recipe
from maieutic.rollout import RolloutResult, count, rollout_metrics
from maieutic.runtime import Classroom
from maieutic.training import loop
from maieutic.transcripts import read_episodes
from wandb_offline import OfflineRun, read_runs

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs" / "metrics.md"
PROJECT = "maieutic"
TRACKED: dict[str, Any] = {
    "tracking.wandb": "offline",
    "tracking.tensorboard": True,
    "algorithm.kl_beta": 0.01,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A finished training of 3 steps with an evaluation before and after."""
    folder = tmp_path_factory.mktemp("readback")
    changes = TRACKED | {"training.max_steps": 3, "tracking.transcripts": 3, "tracking.tags": ["tiny"]}
    return loop.run(parts.make_recipe(tiny_model_dir, folder, **changes)).folder


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def by_step(rows: Iterable[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Finite numbers of each step; no name may be given twice for a step."""
    out: dict[int, dict[str, float]] = {}
    for row in rows:
        into = out.setdefault(int(row["train/step"]), {})
        new = {k: v for k, v in row.items() if k != "train/step" and v is not None}
        assert not into.keys() & new.keys()
        into |= new
    return out


def numbers(run: OfflineRun) -> dict[int, dict[str, float]]:
    """What W&B's history holds of the metrics (its own fields and the tables' left aside)."""
    return by_step(
        {k: v for k, v in row.items() if not k.startswith(("_", "transcripts/"))} for row in run.history
    )


# ---- the three views -------------------------------------------------------------------------------------------------


def test_wandb_holds_every_number_of_the_record_once_a_step_in_order(run: Path) -> None:
    (tracked,) = read_runs(run)
    steps = [row["train/step"] for row in tracked.history]
    assert steps == [0, 1, 2, 3] and [row["_step"] for row in tracked.history] == steps
    assert numbers(tracked) == by_step(rows_of(run))
    assert tracked.exit_code == 0
    assert tracked.id == (run / "wandb_id").read_text()
    recipe = Recipe.model_validate({k: v for k, v in tracked.config.items() if k != "_wandb"})
    saved = resolve(load_recipe(run / "recipe.yaml"))
    assert recipe.model_dump() == saved.model_dump(), "the config is the resolved recipe"
    assert re.fullmatch(r"dppo-[0-9a-f]{8}", tracked.group)
    assert set(tracked.tags) == {"tiny", "dppo"}


def test_tensorboard_is_equal_in_content(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / PROJECT), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    seen: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            if name != "train/step":
                assert name not in seen.setdefault(event.step, {})
                seen[event.step][name] = event.value
    record = by_step(rows_of(run))
    assert seen.keys() == record.keys()
    for step, values in record.items():
        assert seen[step] == pytest.approx(values, rel=1e-6, abs=1e-9), "TensorBoard keeps fp32"
    texts = {t: [e.step for e in events.Tensors(t)] for t in events.Tags()["tensors"]}
    assert texts["transcripts/train/text_summary"] == [1, 2, 3]
    assert texts["transcripts/eval/text_summary"] == [0, 3]
    assert "recipe/text_summary" in texts


def test_transcripts_grow_as_a_table(run: Path) -> None:
    (tracked,) = read_runs(run)
    tables = sorted(run.glob("wandb/offline-run-*/files/media/table/transcripts/train_*.table.json"))
    told = [json.loads(t.read_text()) for t in tables]
    ids = [row[t["columns"].index("episode")] for t in told for row in t["data"]]
    shown = [[e.id for e in read_episodes(run, "train", [step])][:3] for step in (1, 2, 3)]
    assert sorted(ids) == sorted(i for step in shown for i in step), "three a step, none twice"
    texts = [row[t["columns"].index("dialogue")] for t in told for row in t["data"]]
    assert all(text.startswith("STUDENT: ") and "\nTUTOR: " in text for text in texts)
    assert [r["transcripts/train.nrows"] for r in tracked.history if "transcripts/train.nrows" in r] == [
        3,
        6,
        9,
    ]


# ---- the documentation -----------------------------------------------------------------------------------------------


def documented() -> list[str]:
    """Every name in the tables of docs/metrics.md; those of rollout and evaluation under both prefixes."""
    names: list[str] = []
    section = ""
    for line in DOCS.read_text().splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("| `"):
            found = re.findall(r"`([^`]+)`", line.split("|")[1])
            both = section == "Rollout and evaluation"
            names += [p + n for n in found for p in (("rollout/", "eval/") if both else ("",))]
    return names


def pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", r"[a-z_]+", name) + "$")


def conditional(run: Path) -> set[str]:
    """Names that need servers, failures or another measure: from the code that makes them, on planted inputs."""
    report = SimpleNamespace(probe_gap=0.0, bytes=1, write_s=0.0, load_s=0.0, probe_s=0.0, lost=0)
    ledger = Ledger()
    ledger.usage("student")
    made: set[str] = set(
        Classroom.metrics(SimpleNamespace(ledger=ledger, pusher=SimpleNamespace(report=report)))  # type: ignore[arg-type]
    )
    episodes = list(read_episodes(run, "train", [1]))
    tested = next(e for e in episodes if e.post_test is not None)
    same = dataclasses.replace(tested, post_test=dataclasses.replace(tested.post_test, problem="source"))
    for exclusion in (
        "unknown:leakage",
        "student_failed",
        "tutor_failed",
        "no_tutor_turn",
        "ungraded",
        "error",
    ):
        planted = [dataclasses.replace(tested, exclusion=exclusion), same]
        result = RolloutResult(planted, [planted], count(planted), 1.0)
        values = rollout_metrics(result, unknown_reward=-0.2)
        assert values[f"excluded_{exclusion.split(':')[0]}_share"] == 0.5
        made |= {p + n for n in values for p in ("rollout/", "eval/")}
    return made


def test_the_documentation_and_the_run_have_the_same_names(run: Path) -> None:
    names = documented()
    assert len(names) == len(set(names)) > 80
    written = {name for row in rows_of(run) for name in row} - {"train/step"}
    undocumented = {n for n in written | conditional(run) if not any(pattern(d).match(n) for d in names)}
    assert not undocumented, "written, but not in docs/metrics.md"
    emitted = written | conditional(run)
    never = [d for d in names if not any(pattern(d).match(n) for n in emitted)]
    assert not never, "in docs/metrics.md, but never written"
    # What needs nothing special is in each row of its kind, not just in some.
    train = [row for row in rows_of(run) if "rollout/episodes" in row]
    assert all(row.keys() == train[0].keys() for row in train)


# ---- signals ---------------------------------------------------------------------------------------------------------


def stopped(folder: Path, model: Path, number: int) -> tuple[Path, int]:
    """A training that gets signal ``number`` in the middle of the rollout of step 3: (run, exit code)."""
    recipe = parts.make_recipe(
        model, folder, **TRACKED, **{"reward.kind": "training_parts:killed_at", "checkpoint.every": 1}
    )
    file = folder / "killed.yaml"
    file.write_text(dump_recipe(recipe))
    environment = {
        **os.environ,
        "TEST_KILL": f"train:3:{number}",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
    }
    command = [sys.executable, "-m", "maieutic.train", str(file)]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 1, done.stderr[-3000:]
    return folder / "run", done.returncode


@pytest.mark.integration
def test_after_sigterm_wandb_is_complete_and_a_resumed_run_has_its_id(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    run, code = stopped(tmp_path, tiny_model_dir, 15)
    (first,) = read_runs(run)
    assert (code, first.exit_code) == (143, 143)
    assert numbers(first) == by_step(rows_of(run)) and sorted(numbers(first)) == [0, 1, 2]
    recipe = parts.make_recipe(
        tiny_model_dir,
        tmp_path,
        **TRACKED,
        **{"reward.kind": "training_parts:killed_at", "checkpoint.every": 1, "training.max_steps": 3},
    )
    os.environ["TEST_KILL"] = "never:0:0"
    try:
        loop.run(recipe, resume="auto")
    finally:
        del os.environ["TEST_KILL"]
    one, two = read_runs(run)
    assert one.id == two.id and one.group == two.group
    assert [r["train/step"] for r in one.history + two.history] == [0, 1, 2, 3]
    assert numbers(one) | numbers(two) == by_step(rows_of(run))


@pytest.mark.integration
def test_after_sigkill_the_record_is_complete(tmp_path: Path, tiny_model_dir: Path) -> None:
    run, code = stopped(tmp_path, tiny_model_dir, 9)
    assert code == -9
    rows = rows_of(run)  # every line is whole
    assert [(int(r["train/step"]), "eval/episodes" in r) for r in rows] == [(0, True), (1, False), (2, False)]
    assert (
        rows[1].keys() == rows[2].keys() and rows[2]["train/updates"] + rows[2]["train/skipped_updates"] == 2
    )
    (tracked,) = read_runs(run)
    kept = numbers(tracked)
    assert tracked.exit_code is None
    assert all(by_step(rows)[step] == values for step, values in kept.items()), "what W&B kept is right"

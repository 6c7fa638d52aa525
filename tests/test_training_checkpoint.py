"""Checkpoints and the run folder: complete or absent, found again, refused when they do not fit."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maieutic.config import CheckpointSpec, Recipe
from maieutic.errors import CheckpointError, RunFolderError
from maieutic.training import checkpoint
from maieutic.training.checkpoint import TrainState
from maieutic.training.run_folder import RunFolder


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(
        {"name": "r", "tutor": {"model": "m"}, "students": [{"model": "m"}], **changes}
    )


def save(root: Path, step: int, **state: Any) -> Path:
    def save_model(folder: Path) -> None:
        (folder / "weights").write_text(str(step))

    state = {
        "recipe_hash": checkpoint.recipe_hash(recipe()),
        "recipe": checkpoint.frozen_recipe(recipe()),
    } | state
    return checkpoint.save(
        root,
        TrainState(step=step, **state),
        save_model=save_model,
        optimizer={"optimizer": {"step": step}},
        rng=[checkpoint.rng_state()],
    )


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path, 10, policy_version=10, best=0.5, best_step=10, first_eval={"eval/reward": 0.1})
    assert path == tmp_path / "step-000010"
    assert sorted(p.name for p in path.iterdir()) == ["model", "optimizer.pt", "rng.pt", "state.json"]
    state = checkpoint.load_state(path)
    assert (state.step, state.policy_version, state.best, state.best_step) == (10, 10, 0.5, 10)
    assert state.first_eval == {"eval/reward": 0.1}
    assert checkpoint.load_tensors(path, "optimizer.pt") == {"optimizer": {"step": 10}}
    assert [p.name for p in tmp_path.iterdir()] == ["step-000010"]


def test_auto_takes_the_newest_complete_one_and_ignores_what_a_kill_left(tmp_path: Path) -> None:
    assert checkpoint.find("auto", tmp_path / "checkpoints") is None
    save(tmp_path, 3)
    newest = save(tmp_path, 6)
    (tmp_path / ".tmp-step-000009-1").mkdir()
    (tmp_path / ".tmp-step-000009-1" / "state.json").write_text("{}")
    (tmp_path / "step-000012").mkdir()  # no state.json: not complete
    assert checkpoint.find("auto", tmp_path) == newest
    assert checkpoint.find(str(tmp_path / "step-000003"), tmp_path) == tmp_path / "step-000003"
    assert checkpoint.find(None, tmp_path) is None
    with pytest.raises(CheckpointError, match="step-000012 is not a complete checkpoint"):
        checkpoint.find(str(tmp_path / "step-000012"), tmp_path)
    save(tmp_path, 7)
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("how", ["pruned", "discarded"])
def test_a_kill_while_one_is_deleted_leaves_none_that_looks_complete(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    doomed = 1 if how == "pruned" else 2

    def killed(path: Path, **_: Any) -> None:
        (Path(path) / "optimizer.pt").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        if how == "pruned":
            checkpoint.prune(tmp_path, CheckpointSpec(keep_last=1, best=None), None)
        else:
            checkpoint.discard_after(tmp_path, 1)
    monkeypatch.undo()
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [3 - doomed]
    save(tmp_path, doomed)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-000001", "step-000002"]
    assert checkpoint.load_tensors(tmp_path / f"step-00000{doomed}", "optimizer.pt")


def test_parts_of_a_checkpoint_that_is_there_already_do_not_stay(tmp_path: Path) -> None:
    """A stop right after a checkpoint writes the ranks' parts once more."""

    def again() -> Path:
        parts = checkpoint.open_parts(tmp_path)
        checkpoint.save_part(parts, 0, {"a": 1})
        state = TrainState(step=1)
        return checkpoint.save(tmp_path, state, save_model=lambda f: None, optimizer=parts, rng=[])

    first = again()
    assert [p.name for p in (first / "optimizer").iterdir()] == ["rank-00000.pt"]
    assert again() == first
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_folder_without_a_state_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "step-000003" / "model").mkdir(parents=True)
    (tmp_path / "step-000003" / "model" / "weights").write_text("half")
    path = save(tmp_path, 3)
    assert (path / "model" / "weights").read_text() == "3" and checkpoint.load_state(path).step == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        CheckpointError, match=r"step-000002; the previous one is intact.*No space left on device"
    ):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.load_state(tmp_path / "step-000001").step == 1


def test_serialisers_that_wrap_a_full_disk_are_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="file write failed"):
        save(tmp_path, 2)


def test_the_last_k_and_the_best_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    gone = checkpoint.prune(tmp_path, CheckpointSpec(keep_last=2), best_step=1)
    assert [p.name for p in gone] == ["step-000002"]
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [1, 3, 4]


def test_another_recipe_is_refused_by_key_and_free_keys_may_change(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    state = checkpoint.load_state(path)
    free = recipe(
        name="other",
        output_dir="elsewhere",
        training={"max_steps": 9},
        checkpoint={"every": 1},
        eval={"every": 2},
        tracking={"wandb": "offline"},
    )
    checkpoint.check_recipe(state, free, path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_recipe(state, recipe(seed=1, training={"group_size": 4}), path)
    text = str(caught.value)
    assert "training.group_size: 8 in the checkpoint, 4 in the recipe" in text
    assert "seed: 0 in the checkpoint, 1 in the recipe" in text
    assert text.count("in the checkpoint") == 2


def test_a_key_that_an_older_version_did_not_know_is_its_default(tmp_path: Path) -> None:
    then = checkpoint.frozen_recipe(recipe(seed=1))
    then.pop("training.group_size")
    state = checkpoint.TrainState(recipe_hash="of an older version", recipe=then)
    checkpoint.check_recipe(state, recipe(seed=1), tmp_path)
    with pytest.raises(CheckpointError, match=r"training\.group_size: absent in the checkpoint, 4"):
        checkpoint.check_recipe(state, recipe(seed=1, training={"group_size": 4}), tmp_path)


def test_a_checkpoint_of_the_time_when_logit_chunk_was_a_number_is_gone_on_with(tmp_path: Path) -> None:
    then = checkpoint.frozen_recipe(recipe(seed=1)) | {"training.logit_chunk": 1024}
    state = checkpoint.TrainState(recipe_hash="of an older version", recipe=then)
    checkpoint.check_recipe(state, recipe(seed=1), tmp_path)
    checkpoint.check_recipe(state, recipe(seed=1, training={"logit_chunk": 64}), tmp_path)


@pytest.mark.parametrize("then", [{}, {"env.post_test_ahead": False}, {"env.post_test_ahead": "never"}])
def test_when_post_tests_are_posed_may_change_on_resume(tmp_path: Path, then: dict[str, Any]) -> None:
    state = checkpoint.TrainState(
        recipe_hash="of an older version", recipe=checkpoint.frozen_recipe(recipe(seed=1)) | then
    )
    checkpoint.check_recipe(state, recipe(seed=1, env={"post_test_ahead": "tail"}), tmp_path)


def test_random_states_come_back_through_a_file(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.standard_normal()  # leaves a cached second draw
    path = save(tmp_path, 1)

    def draw() -> tuple[float, list[float], list[float]]:
        return random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()

    expected = draw()
    assert draw() != expected
    checkpoint.set_rng_state(checkpoint.load_tensors(path, "rng.pt")[0])
    assert draw() == expected


def test_a_broken_checkpoint_is_a_named_error(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "optimizer.pt").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read"):
        checkpoint.load_tensors(path, "optimizer.pt")
    (path / "state.json").write_text('{"schema": 99}')
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load_state(path)
    for text, kind in (("[]", "list"), ("null", "NoneType")):
        (path / "state.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"an object is expected, this is {kind}"):
            checkpoint.load_state(path)


def test_a_run_does_not_go_back_to_a_checkpoint_of_another_one(tmp_path: Path) -> None:
    """It would delete all that it has done since that step."""
    other, own = tmp_path / "other" / "checkpoints", tmp_path / "own" / "checkpoints"
    elsewhere = save(other, 1)
    # A new run may begin there, and a run may go back in its own history.
    assert checkpoint.find(str(elsewhere), own) == elsewhere
    first = save(own, 1)
    save(own, 2)
    assert checkpoint.find(str(first), own) == first
    for path in (elsewhere, tmp_path / "other"):
        with pytest.raises(CheckpointError, match=r"of another run, and \S*own holds a run of its own"):
            checkpoint.find(str(path), own)
    shutil.rmtree(own)
    (tmp_path / "own" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match="of another run"):
        checkpoint.find(str(elsewhere), own)


# ---- the run folder --------------------------------------------------------------------------------------------------


def test_a_folder_with_a_run_is_not_used_twice(tmp_path: Path) -> None:
    made = recipe(output_dir=str(tmp_path))
    folder = RunFolder.of(made)
    folder.prepare(made, resuming=False)
    assert folder.recipe.is_file() and folder.checkpoints.is_dir() and folder.transcripts.is_dir()
    folder.prepare(made, resuming=False)  # a run that failed before its first number does not block the name
    for opened in ("maieutic", "wandb"):  # by trackers, before the start-up probe that failed
        (folder.root / opened).mkdir()
        (folder.root / opened / "events").write_text("x")
    folder.prepare(made, resuming=False)
    folder.metrics.write_text("{}\n")
    with pytest.raises(
        RunFolderError, match=r"resume=auto and .*/recipe\.yaml\), or start another with name="
    ):
        folder.prepare(made, resuming=False)
    folder.prepare(made, resuming=True)


def test_a_folder_that_cannot_be_made_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = recipe(output_dir=str(tmp_path / "file"))
    with pytest.raises(RunFolderError, match="Not a directory"):
        RunFolder.of(made).prepare(made, resuming=False)
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        made = recipe(output_dir=str(tmp_path / "locked"))
        with pytest.raises(RunFolderError, match="Permission denied"):
            RunFolder.of(made).prepare(made, resuming=False)


def rows(*steps: int | tuple[int, str]) -> str:
    out = []
    for item in steps:
        step, key = item if isinstance(item, tuple) else (item, "rollout/reward")
        out.append(json.dumps({"train/step": step, key: 1.0}) + "\n")
    return "".join(out)


@pytest.mark.parametrize(
    ("step", "eval_done", "kept"),
    [
        (-1, False, []),
        (1, True, [(0, "eval/reward"), 1]),
        (2, True, [(0, "eval/reward"), 1, 2, (2, "eval/reward")]),
        (2, False, [(0, "eval/reward"), 1, 2]),
    ],
)
def test_rewinding_drops_what_is_newer_and_a_line_cut_by_a_kill(
    tmp_path: Path, step: int, eval_done: bool, kept: list[Any]
) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(rows((0, "eval/reward"), 1, 2, (2, "eval/reward"), 3) + '{"train/st')
    folder.transcripts.mkdir()
    for name in ("eval-step-000000", "train-step-000001", "train-step-000002", "train-step-000003"):
        (folder.transcripts / f"{name}.jsonl").write_text("{}\n")
    folder.rewind(step, eval_done=eval_done)
    assert folder.metrics.read_text() == rows(*kept)
    left = sorted(int(p.stem[-6:]) for p in folder.transcripts.iterdir())
    assert left == [s for s in (0, 1, 2, 3) if s <= step]

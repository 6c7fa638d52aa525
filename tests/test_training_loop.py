"""The whole loop on a tiny random model: what is trained, resuming bit for bit, signals, faults, two processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import training_parts as parts
from maieutic.errors import (
    CheckpointError,
    EngineMismatchError,
    ExclusionLimitError,
    NonFiniteLossError,
    RunFolderError,
    RunInterrupted,
)
from maieutic.recipe import dump_recipe
from maieutic.training import checkpoint, loop
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import make_micro_batches, make_rows
from maieutic.transcripts import read_episodes, read_transcripts

TESTS = Path(__file__).parent


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:06d}" / "model"
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def optimizer(run: Path, step: int) -> dict[int, dict[str, torch.Tensor]]:
    path = run / "checkpoints" / f"step-{step:06d}"
    return checkpoint.load_tensors(path, "optimizer.pt")["optimizer"]["state"]


def problem_order(run: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["pair"]["id"]) for line in read_transcripts(run, "train")]


def assert_same_run(a: Path, b: Path, step: int) -> None:
    """Weights, optimizer, metrics and problem order, bit for bit."""
    left, right = weights(a, step), weights(b, step)
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    one, two = optimizer(a, step), optimizer(b, step)
    assert one.keys() == two.keys() and one
    assert all(torch.equal(one[i][k], two[i][k]) for i in one for k in one[i])
    assert parts.metrics_of(a) == parts.metrics_of(b)
    assert problem_order(a) == problem_order(b)


@pytest.fixture(scope="module")
def whole(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    return loop.run(parts.make_recipe(tiny_model_dir, folder)).folder


def launch(
    folder: Path, data: dict[str, Any], *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """``python -m maieutic.train`` in its own process."""
    return _run([sys.executable, "-m", "maieutic.train", _write(folder, data), *arguments], env)


def _write(folder: Path, data: dict[str, Any]) -> str:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(data))
    return str(path)


def _run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The command's output; a command that hangs is killed with all its children."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | env
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{command} hung; its stderr:\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# ---- what a run does -------------------------------------------------------------------------------------------------


def test_the_run_folder_holds_everything(whole: Path) -> None:
    names = {p.name for p in whole.iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "transcripts", "checkpoints", "report.html", "log.txt"} <= names
    assert [s for s, _ in checkpoint.complete(whole / "checkpoints")] == [3, 6]
    rows = parts.metrics_of(whole)
    assert [(r["train/step"], "eval/reward" in r) for r in rows] == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
        (3, True),
        (4, False),
        (5, False),
        (6, False),
        (6, True),
    ]
    step = rows[1]
    assert step["train/updates"] + step["train/skipped_updates"] == 2
    assert step["rollout/episodes"] == 4 and step["train/policy_version"] == 1
    assert step["train/logprob_gap"] <= 1e-4
    assert any(r.get("train/grad_norm", 0) > 0 for r in rows)
    assert not {p.name for p in (whole / "transcripts").iterdir()} - {
        *(f"train-step-{s:06d}.jsonl" for s in range(1, 7)),
        *(f"eval-step-{s:06d}.jsonl" for s in (0, 3, 6)),
    }


def test_training_moves_the_adapter(whole: Path) -> None:
    before, after = weights(whole, 3), weights(whole, 6)
    assert all("lora" in k for k in after)
    assert any(not torch.equal(before[k], after[k]) for k in after)


def test_trained_ids_are_sampled_ids_and_their_logprobs_are_the_policys(
    whole: Path, tiny_model_dir: Path
) -> None:
    """Step 4 was sampled by the weights of the checkpoint of step 3: load them afresh and recompute."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, whole / "checkpoints" / "step-000003" / "model").eval()
    episodes = list(read_episodes(whole, "train", [4]))
    trajectories = [e.trajectory for e in episodes]
    assert len(trajectories) == 4
    for episode in episodes:
        episode.trajectory.validate()
        turns = episode.dialogue.by("tutor")
        sampled = sum(t.visible_tokens + t.thinking_tokens for t in turns)
        n = sum(s.n_trained for s in episode.trajectory.segments)
        assert sampled <= n <= sampled + len(turns)  # the stop token of a turn is trained and not counted
        assert {s.policy_version for s in episode.trajectory.segments} == {3}
    (batch,) = make_micro_batches(make_rows(trajectories, [0.0] * 4), 10**6, "packed")[0]
    with torch.no_grad():
        recomputed = PolicyForward(model)(batch).logprobs_T
    assert batch.n_trained > 20
    assert float((recomputed - batch.mu_logprobs_T).abs().max()) <= 1e-4


def test_equal_rewards_move_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    changes = {
        "reward.kind": "training_parts:constant",
        "training.max_steps": 2,
        "checkpoint.every": 1,
        "eval.every": 0,
    }
    run = loop.run(parts.make_recipe(tiny_model_dir, tmp_path, **changes)).folder
    first, second = weights(run, 1), weights(run, 2)
    assert all(torch.equal(first[k], second[k]) for k in first)
    row = parts.metrics_of(run)[1]
    assert row["train/skipped_updates"] == 2 and row["train/flat_group_share"] == 1.0
    assert row["train/advantage_abs"] == 0.0 and row["train/entropy"] > 0


def test_full_fine_tune_with_a_reference_and_resume(tiny_model_dir: Path, tmp_path: Path) -> None:
    changes = {
        "tutor.lora": None,
        "algorithm": {"loss": "grpo", "kl_beta": 0.1},
        "training.max_steps": 2,
        "training.gradient_checkpointing": True,
        "training.packing": "off",
        "checkpoint.every": 1,
        "eval.every": 0,
    }
    one = loop.run(parts.make_recipe(tiny_model_dir, tmp_path / "one", **changes)).folder
    changes["training.max_steps"] = 1
    loop.run(parts.make_recipe(tiny_model_dir, tmp_path / "two", **changes))
    changes["training.max_steps"] = 2
    two = loop.run(parts.make_recipe(tiny_model_dir, tmp_path / "two", **changes), resume="auto").folder
    assert_same_run(one, two, 2)
    rows = parts.metrics_of(one)
    assert rows[0]["train/kl_ref"] >= 0 and rows[1]["train/kl_ref"] > 1e-6


def test_training_starts_from_an_adapter_and_keeps_its_distance_to_it(
    whole: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    start = whole / "checkpoints" / "step-000006" / "model"
    changes = {
        "tutor.init_from": str(start),
        "algorithm.kl_beta": 0.1,
        "training.max_steps": 2,
        "training.mini_batch_problems": 2,
        "eval.every": 0,
        "checkpoint": {"every": 0, "keep_last": 1, "best": "rollout/reward"},
    }
    run = loop.run(parts.make_recipe(tiny_model_dir, tmp_path, **changes)).folder
    first, second = parts.metrics_of(run)
    assert first["train/kl_ref"] == pytest.approx(0, abs=1e-9) and second["train/kl_ref"] > 1e-6
    before, after = weights(whole, 6), weights(run, 2)
    assert before.keys() == after.keys() and any(not torch.equal(before[k], after[k]) for k in after)
    best = 1 if first["rollout/reward"] >= second["rollout/reward"] else 2
    assert [s for s, _ in checkpoint.complete(run / "checkpoints")] == sorted({best, 2})


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_six_steps_are_three_and_resume_and_three(whole: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    loop.run(parts.make_recipe(tiny_model_dir, tmp_path, **{"training.max_steps": 3}))
    torch.manual_seed(99)  # the new process would not have this one's random state
    run = loop.run(parts.make_recipe(tiny_model_dir, tmp_path), resume="auto").folder
    assert_same_run(whole, run, 6)


def test_dropout_draws_the_same_after_a_resume(tiny_model_dir: Path, tmp_path: Path) -> None:
    changes = {"tutor.lora": {"r": 2, "dropout": 0.3}, "checkpoint.every": 1, "eval.every": 0}
    one = loop.run(
        parts.make_recipe(tiny_model_dir, tmp_path / "one", **changes, **{"training.max_steps": 2})
    )
    loop.run(parts.make_recipe(tiny_model_dir, tmp_path / "two", **changes, **{"training.max_steps": 1}))
    torch.manual_seed(99)
    two = loop.run(
        parts.make_recipe(tiny_model_dir, tmp_path / "two", **changes, **{"training.max_steps": 2}),
        resume="auto",
    )
    assert_same_run(one.folder, two.folder, 2)
    assert parts.metrics_of(one.folder)[1]["train/logprob_gap"] > 1e-4  # dropout is on


@pytest.mark.integration
def test_a_run_killed_in_the_middle_of_a_step_ends_like_one_that_was_not(
    whole: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    data = parts.recipe_dict(tiny_model_dir, tmp_path, **{"reward.kind": "training_parts:killed_at"})
    killed = launch(tmp_path, data, TEST_KILL=f"train:5:{int(signal.SIGKILL)}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = tmp_path / "run"
    assert (
        parts.metrics_of(run)[-1]["train/step"] == 4
    )  # step 4 is recorded, but only step 3 has a checkpoint
    resumed = launch(tmp_path, data, "--resume", "auto", TEST_KILL="train:99:9")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(whole, run, 6)
    assert "resuming from" in (run / "log.txt").read_text()


def test_resuming_with_another_recipe_names_the_keys(whole: Path, tiny_model_dir: Path) -> None:
    other = parts.make_recipe(tiny_model_dir, whole.parent, **{"training.optimizer.lr": 0.5})
    with pytest.raises(
        CheckpointError, match=r"training\.optimizer\.lr: 0\.01 in the checkpoint, 0\.5 in the recipe"
    ):
        loop.run(other, resume="auto")


def test_a_folder_with_a_run_is_not_used_again(whole: Path, tiny_model_dir: Path) -> None:
    before = (whole / "metrics.jsonl").read_text()
    with pytest.raises(RunFolderError, match="resume=auto"):
        loop.run(parts.make_recipe(tiny_model_dir, whole.parent))
    assert (whole / "metrics.jsonl").read_text() == before


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "where", "kept"),
    [
        (signal.SIGUSR1, 85, "train:2", [1]),
        (signal.SIGINT, 130, "eval:3", [3]),
        (signal.SIGUSR1, 85, "eval:0", [0]),
    ],
)
def test_a_signal_in_a_rollout_becomes_a_checkpoint_that_resumes(
    whole: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
    where: str,
    kept: list[int],
) -> None:
    changes = {"reward.kind": "training_parts:killed_at", "checkpoint.every": 0}
    monkeypatch.setenv("TEST_KILL", f"{where}:{int(number)}")
    monkeypatch.setattr(parts, "_fired", [])
    with pytest.raises(RunInterrupted, match=f"holds step {kept[-1]}") as caught:
        loop.run(parts.make_recipe(tiny_model_dir, tmp_path, **changes))
    assert caught.value.exit_code == code
    run = tmp_path / "run"
    assert [s for s, _ in checkpoint.complete(run / "checkpoints")] == kept
    loop.run(parts.make_recipe(tiny_model_dir, tmp_path, **changes), resume="auto")
    assert_same_run(whole, run, 6)


@pytest.mark.integration
def test_a_terminated_process_exits_with_143_and_resumes(
    whole: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    changes = {"reward.kind": "training_parts:killed_at", "checkpoint.every": 0}
    data = parts.recipe_dict(tiny_model_dir, tmp_path, **changes)
    stopped = launch(tmp_path, data, TEST_KILL=f"train:2:{int(signal.SIGTERM)}")
    assert stopped.returncode == 143, stopped.stderr
    assert "RunInterrupted: stopped by SIGTERM" in stopped.stderr
    assert not {"\x1b", "\r"} & set(stopped.stderr)
    resumed = launch(tmp_path, data, "resume=auto", TEST_KILL="train:99:9")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(whole, tmp_path / "run", 6)


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_and_the_previous_checkpoint_resumes(
    whole: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def full(thing: Any, path: Any, *rest: Any) -> None:
        if "step-000006" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(thing, path, *rest)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"step-000006; the previous one is intact.*No space left"):
        loop.run(parts.make_recipe(tiny_model_dir, tmp_path))
    monkeypatch.undo()
    assert [s for s, _ in checkpoint.complete(tmp_path / "run" / "checkpoints")] == [3]
    run = loop.run(parts.make_recipe(tiny_model_dir, tmp_path), resume="auto").folder
    assert_same_run(whole, run, 6)


def test_an_unwritable_run_folder_is_named_before_a_model_loads(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recipe = parts.make_recipe(tiny_model_dir, tmp_path, output_dir=str(tmp_path / "file"))
    with pytest.raises(RunFolderError, match="Not a directory"):
        loop.run(recipe)


def test_a_student_that_says_nothing_is_excluded_and_stops_the_run_with_a_checkpoint(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    changes = {
        "students": [{"model": "silent", "kind": "training_parts:SilentStudent"}],
        "training.excluded_patience": 2,
        "eval.every": 0,
    }
    with pytest.raises(ExclusionLimitError, match=r"step 2: 4 of 4 episodes excluded \(student_failed 4\)"):
        loop.run(parts.make_recipe(tiny_model_dir, tmp_path, **changes))
    run = tmp_path / "run"
    (row,) = parts.metrics_of(run)
    assert row["rollout/excluded_student_failed_share"] == 1.0 and row["rollout/retried"] == 4
    assert "rollout/reward" not in row and row["train/updates"] == 0
    assert [s for s, _ in checkpoint.complete(run / "checkpoints")] == [1]
    assert len(list(read_episodes(run, "train"))) == 8


def test_a_grader_that_hangs_costs_its_episodes_and_not_the_run(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from maieutic import runtime

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    hanging = partial(runtime.Grader, timeout_s=0.2, check="training_parts:hangs", fast_path=False)
    monkeypatch.setattr(runtime, "Grader", hanging)
    monkeypatch.setattr(parts.SilentStudent, "says", "the answer is 4")
    changes = {
        "students": [{"model": "silent", "kind": "training_parts:SilentStudent"}],
        "training.max_steps": 1,
        "eval.every": 0,
    }
    run = loop.run(parts.make_recipe(tiny_model_dir, tmp_path, **changes)).folder
    (row,) = parts.metrics_of(run)
    assert row["rollout/excluded_ungraded_share"] == 1.0 and row["train/updates"] == 0
    assert [e.post_test.grades for e in read_episodes(run) if e.post_test] == [["error", "error"]] * 4


def test_a_nan_loss_is_named_and_leaves_the_last_good_state(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from maieutic.training import learner

    real = learner.make_rows
    calls = []

    def poisoned(*arguments: Any, **options: Any) -> Any:
        rows = real(*arguments, **options)
        calls.append(rows)
        if len(calls) == 4:  # the probe, both mini-batches of step 1, the first of step 2
            rows[0] = replace(rows[0], advantage=float("nan"))
        return rows

    monkeypatch.setattr(learner, "make_rows", poisoned)
    changes = {"eval.every": 0, "checkpoint.every": 0}
    with pytest.raises(NonFiniteLossError, match="train-2-"):
        loop.run(parts.make_recipe(tiny_model_dir, tmp_path, **changes))
    run = tmp_path / "run"
    assert [s for s, _ in checkpoint.complete(run / "checkpoints")] == [1]
    assert all(bool(t.isfinite().all()) for t in weights(run, 1).values())


def test_an_engine_that_disagrees_is_refused_before_training(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from maieutic.engines.hf import HfEngine

    real = HfEngine.generate

    async def wrong(self: HfEngine, *arguments: Any, **options: Any) -> Any:
        samples = await real(self, *arguments, **options)
        for sample in samples:
            sample.logprobs[0] -= 0.01
        return samples

    monkeypatch.setattr(HfEngine, "generate", wrong)
    with pytest.raises(EngineMismatchError, match=r"difference\| 0\.01.*tolerance 0\.0001"):
        loop.run(parts.make_recipe(tiny_model_dir, tmp_path))
    assert parts.metrics_of(tmp_path / "run") == []


# ---- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_two_processes_learn_what_one_does(tiny_model_dir: Path, tmp_path: Path) -> None:
    changes = {"training.max_steps": 2, "training.mini_batch_problems": 2, "eval.every": 2}
    one = loop.run(parts.make_recipe(tiny_model_dir, tmp_path / "one", **changes)).folder
    folder = tmp_path / "two"
    data = parts.recipe_dict(tiny_model_dir, folder, **changes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--main_process_port", str(port), "-m", "maieutic.train", _write(folder, data)]
    done = _run(command, {"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr
    left, right = parts.metrics_of(one), parts.metrics_of(folder / "run")
    assert [r.keys() for r in left] == [r.keys() for r in right]
    for a, b in zip(left, right, strict=True):
        assert a == pytest.approx(b, abs=1e-5, rel=1e-5)
    assert any(r.get("train/grad_norm", 0) > 0 for r in left)


def test_the_resolved_recipe_can_be_run_again(whole: Path) -> None:
    from maieutic.recipe import load_recipe

    again = load_recipe(whole / "recipe.yaml", ["name=again"])
    assert dump_recipe(again).replace("again", "run") == (whole / "recipe.yaml").read_text()

"""Staleness 1: the next step is played while this one is learned from, one policy version late, and everything else holds."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import training_parts as parts
from env_fakes import pair
from fault_parts import assert_on_policy, engine, recipe_of, speak, steps, tutor_recipe
from loopback import InThread, Loopback
from maieutic.config import Recipe
from maieutic.dialogue import Dialogue
from maieutic.engines.hf import HfEngine
from maieutic.env.base import Episode, RewardBreakdown
from maieutic.errors import EngineDownError, EngineMismatchError, NonFiniteLossError, RunInterrupted
from maieutic.rollout import RolloutResult
from maieutic.runtime import build_classroom, build_policy, resolve_env
from maieutic.training import loop
from maieutic.training.groups import staleness_of, training_groups
from maieutic.training.learner import Learner
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import make_micro_batches, make_rows
from maieutic.training.trajectory import Segment, Trajectory
from maieutic.transcripts import read_episodes
from test_training_loop import assert_same_run, optimizer, problem_order, weights
from token_server import TokenServer

integration = pytest.mark.integration


class OneByOne(TokenServer):
    """Samples one sequence at a time, so that a log-prob's last bits do not depend on what else was asked meanwhile."""

    async def start(self, port: int = 0) -> None:
        await super().start(port)
        self.engine = HfEngine(self.model, pad_id=0, max_batch_size=1, cache_tokens=0)


def stale_recipe(model: Path, folder: Path, tutor: Loopback, student: Loopback, **changes: Any) -> Recipe:
    """6 steps at staleness 1, saved every 3."""
    base = {"training.staleness": 1, "training.max_steps": 6, "checkpoint.every": 3}
    return tutor_recipe(model, folder, tutor, student, **(base | changes))


class Crash(BaseException):
    """Ends a run as a kill would: nothing is saved."""


def crash_at_5(episode: Episode, spec: Any) -> RewardBreakdown:
    if (episode.phase, episode.step) == ("train", 5):
        raise Crash
    return parts.characters(episode, spec)


def assert_same_training(a: Path, b: Path) -> None:
    """All but usage: what a start-up probe or a lost rollout asked is counted too."""
    one, two = weights(a, 6), weights(b, 6)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    left, right = optimizer(a, 6), optimizer(b, 6)
    assert left.keys() == right.keys() and all(
        torch.equal(left[i][k], right[i][k]) for i in left for k in left[i]
    )
    rows = [
        [{k: v for k, v in r.items() if not k.startswith("usage/")} for r in parts.metrics_of(run)]
        for run in (a, b)
    ]
    assert rows[0] == rows[1]
    assert problem_order(a) == problem_order(b)


def rollouts_left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("rollout-")]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2, -1])
def test_staleness_is_0_or_1(value: int, tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="staleness"):
        parts.make_recipe(tiny_model_dir, tmp_path, **{"training.staleness": value})


def test_an_engine_in_process_cannot_run_ahead(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"tutor\.engine\.kind is hf.*serve the tutor"):
        parts.make_recipe(tiny_model_dir, tmp_path, **{"training.staleness": 1})


def one_episode(*versions: int) -> RolloutResult:
    """A counted episode whose segments were sampled by these policy versions."""
    segments = [Segment([5, 6], [False, True], [0.0, -1.0], v) for v in versions]
    episode = Episode("e", "g", pair(), "train", 1, 0, seed=0, student="s", dialogue=Dialogue("d", "problem"))
    episode.reward = RewardBreakdown(1.0, gated=False, pre=0.0, post=1.0, gain=1.0)
    episode.trajectory = Trajectory("", "", segments, 0.0, 1.0)
    return RolloutResult([episode], [[episode]], {"episodes": 1, "excluded": 0})


@pytest.mark.parametrize(
    ("versions", "current", "staleness", "taken"),
    [
        ((3,), 3, 0, 0),
        ((2,), 3, 0, None),
        ((2,), 3, 1, 1),
        ((3, 2), 3, 1, 1),
        ((1,), 3, 1, None),
        ((4,), 3, 1, None),  # from weights that are yet to come
        ((3, 1), 3, 1, None),
    ],
)
def test_only_recent_weights_are_trained_on(
    versions: tuple[int, ...], current: int, staleness: int, taken: int | None
) -> None:
    result = one_episode(*versions)
    if taken is None:
        with pytest.raises(EngineMismatchError, match="the policy is at 3"):
            training_groups(result, current, staleness)
    else:
        groups = training_groups(result, current, staleness)
        assert staleness_of(groups, current) == taken and groups[0][0].reward == 1.0


@integration
def test_episodes_carry_their_version_and_are_played_while_the_learner_works(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tutor, student = TokenServer(tiny_model_dir), Loopback(speak)
    asked, running = threading.Event(), []
    student.fault = lambda n, body: asked.set()
    update, start = Learner.update, loop.Ahead.start

    def waits(self: Learner, groups: Any, step: int) -> dict[str, float]:
        """Learns nothing before the next step's rollout has asked the student (where one runs ahead)."""
        if step in (1, 2, 4, 5):
            assert asked.wait(60), "nothing was played meanwhile"
        return update(self, groups, step)

    def noted(self: Any, step: int, coroutine: Any) -> None:
        asked.clear()
        running.append(step)
        start(self, step, coroutine)

    monkeypatch.setattr(Learner, "update", waits)
    monkeypatch.setattr(loop.Ahead, "start", noted)
    with InThread(tutor), InThread(student):
        run = loop.run(stale_recipe(tiny_model_dir, tmp_path, tutor, student)).folder
    assert running == [2, 3, 5, 6]
    rows = parts.metrics_of(run)
    # The step after a checkpoint is played afresh.
    assert [r["train/staleness"] for r in rows] == [0, 1, 1, 0, 1, 1]
    assert [r["train/policy_version"] for r in rows] == [1, 2, 3, 4, 5, 6]
    versions = {s: {e.policy_version for e in read_episodes(run, "train", [s])} for s in range(1, 7)}
    assert versions == {1: {0}, 2: {0}, 3: {1}, 4: {3}, 5: {3}, 6: {4}}
    segments = {
        s.policy_version
        for e in read_episodes(run, "train", [6])
        if e.trajectory
        for s in e.trajectory.segments
    }
    assert segments == {4}
    assert all(r["push/probe_gap"] <= 1e-3 for r in rows)
    assert not rollouts_left()
    # The versions 0, 1, 3, 4 were pushed; 2 and 5 were never played with.
    assert tutor.reloads == 4


@integration
def test_behaviour_log_probs_are_those_of_the_weights_that_sampled(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Step 3 of a run that saves after each second step: played by version 2 afresh; step 4 by version 2 again, though the
    policy is at 3 by then."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with InThread(TokenServer(tiny_model_dir)) as tutor, InThread(Loopback(speak)) as student:
        changes = {"training.max_steps": 4, "checkpoint.every": 2}
        run = loop.run(stale_recipe(tiny_model_dir, tmp_path, tutor, student, **changes)).folder
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run / "checkpoints" / "step-000002" / "model").eval()
    episodes = list(read_episodes(run, "train", [4]))
    records = [e.trajectory for e in episodes if e.trajectory is not None]
    (batch,) = make_micro_batches(make_rows(records, [0.0] * len(records)), 10**6, "padded")[0]
    with torch.no_grad():
        recomputed = PolicyForward(model)(batch).logprobs_T
    assert batch.n_trained > 10
    assert float((recomputed - batch.mu_logprobs_T).abs().max()) <= 1e-4
    # With the policy as it was when step 4 was trained on, the ratio is not 1 any more.
    assert parts.metrics_of(run)[3]["train/logprob_gap"] > 1e-3


@integration
def test_a_resumed_run_equals_an_uninterrupted_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Bit for bit, after a crash in a rollout that ran ahead, and after an end that came early."""

    def run(folder: Path, resume: str | None = None, **changes: Any) -> Path:
        with InThread(OneByOne(tiny_model_dir)) as tutor, InThread(Loopback(speak)) as student:
            recipe = stale_recipe(tiny_model_dir, tmp_path / folder, tutor, student, **changes)
            return loop.run(recipe, resume).folder

    whole = run(Path("whole"))
    again = run(Path("again"))
    assert_same_run(whole, again, 6)
    early = run(Path("early"), **{"training.max_steps": 3})
    early = run(Path("early"), "auto")
    assert_same_training(whole, early)
    assert not torch.equal(*(next(iter(weights(whole, s).values())) for s in (3, 6)))


@integration
def test_a_run_that_crashed_ahead_goes_on_from_its_checkpoint(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InThread(OneByOne(tiny_model_dir)) as tutor, InThread(Loopback(speak)) as student:
        changes = {"reward.kind": "test_staleness:crash_at_5"}
        recipe = stale_recipe(tiny_model_dir, tmp_path / "crashed", tutor, student, **changes)
        with pytest.raises(Crash):
            loop.run(recipe)
        crashed = tmp_path / "crashed" / "run"
        assert steps(crashed) == [3] and [r["train/step"] for r in parts.metrics_of(crashed)] == [1, 2, 3, 4]
        monkeypatch.setattr("test_staleness.crash_at_5", parts.characters)
        loop.run(recipe, "auto")
    with InThread(OneByOne(tiny_model_dir)) as tutor, InThread(Loopback(speak)) as student:
        recipe = stale_recipe(tiny_model_dir, tmp_path / "whole", tutor, student, **changes)
        whole = loop.run(recipe).folder
    assert_same_training(whole, crashed)


@integration
def test_a_server_that_dies_in_a_rollout_ahead_ends_the_run_with_the_step_that_was_learned(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    server = TokenServer(tiny_model_dir)
    thread = InThread(server)
    # 4 requests of the probe, 8 of step 1: step 2 is played while step 1 is learned from.
    server.fault = lambda n, body: threading.Thread(target=thread.stop).start() if n == 15 else None
    with thread as tutor, InThread(Loopback(speak)) as student:
        recipe = stale_recipe(tiny_model_dir, tmp_path, tutor, student, outage_limit_s=0.5)
        with pytest.raises(EngineDownError, match=re.escape(tutor.url)):
            loop.run(recipe)
        run = tmp_path / "run"
        assert steps(run) == [1] and [r["train/step"] for r in parts.metrics_of(run)] == [1]
        assert not rollouts_left()
        server.fault = lambda n, body: None
        thread.start()
        assert loop.run(recipe, "auto").state.step == 6
    rows = parts.metrics_of(run)
    assert [r["train/staleness"] for r in rows] == [0, 0, 1, 0, 1, 1]


@integration
def test_a_signal_during_the_update_cancels_what_runs_ahead_and_saves_the_step(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Learner.update

    def told(self: Learner, groups: Any, step: int) -> dict[str, float]:
        if step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return update(self, groups, step)

    monkeypatch.setattr(Learner, "update", told)
    with InThread(TokenServer(tiny_model_dir)) as tutor, InThread(Loopback(speak)) as student:
        with pytest.raises(RunInterrupted, match="step 2") as stopped:
            loop.run(stale_recipe(tiny_model_dir, tmp_path, tutor, student))
    assert stopped.value.exit_code == 85
    run = tmp_path / "run"
    assert steps(run) == [2] and [r["train/step"] for r in parts.metrics_of(run)] == [1, 2]
    assert not list(read_episodes(run, "train", [3])) and not rollouts_left()


@integration
def test_a_loss_that_fails_drops_what_runs_ahead_and_is_the_error_that_is_raised(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Learner.update

    def broken(self: Learner, groups: Any, step: int) -> dict[str, float]:
        if step == 2:
            raise NonFiniteLossError("the loss is nan")
        return update(self, groups, step)

    monkeypatch.setattr(Learner, "update", broken)
    with InThread(TokenServer(tiny_model_dir)) as tutor, InThread(Loopback(speak)) as student:
        with pytest.raises(NonFiniteLossError):
            loop.run(stale_recipe(tiny_model_dir, tmp_path, tutor, student))
    assert steps(tmp_path / "run") == [1] and not rollouts_left()


@integration
def test_after_an_unexpected_best_checkpoint_the_next_step_is_played_afresh(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with InThread(TokenServer(tiny_model_dir)) as tutor, InThread(Loopback(speak)) as student:
        changes = {"checkpoint.best": "rollout/reward", "checkpoint.every": 0, "training.max_steps": 4}
        run = loop.run(stale_recipe(tiny_model_dir, tmp_path, tutor, student, **changes)).folder
    rows = parts.metrics_of(run)
    best, expected = float("-inf"), [0]
    for row in rows[:-1]:
        expected.append(0 if row["rollout/reward"] > best else 1)
        best = max(best, row["rollout/reward"])
    assert [r["train/staleness"] for r in rows] == expected and expected[1] == 0


@integration
def test_evaluations_are_played_by_the_weights_of_their_step(tiny_model_dir: Path, tmp_path: Path) -> None:
    with InThread(TokenServer(tiny_model_dir)) as tutor, InThread(Loopback(speak)) as student:
        changes = {"eval.every": 2, "checkpoint.every": 0, "training.max_steps": 4}
        run = loop.run(stale_recipe(tiny_model_dir, tmp_path, tutor, student, **changes)).folder
    rows = [r for r in parts.metrics_of(run) if "train/staleness" in r]
    assert [r["train/staleness"] for r in rows] == [0, 1, 0, 1]
    for step in (0, 2, 4):
        assert {e.policy_version for e in read_episodes(run, "eval", [step])} == {step}


@integration
def test_without_staleness_nothing_runs_ahead(tiny_model_dir: Path, tmp_path: Path) -> None:
    with InThread(TokenServer(tiny_model_dir)) as tutor, InThread(Loopback(speak)) as student:
        recipe = tutor_recipe(tiny_model_dir, tmp_path, tutor, student)
        run = loop.run(recipe).folder
    assert [r["train/staleness"] for r in parts.metrics_of(run)] == [0, 0, 0]
    assert_on_policy(run)


@integration
def test_a_student_of_the_tutors_model_gets_weights_of_its_own(tiny_model_dir: Path, tmp_path: Path) -> None:
    with InThread(TokenServer(tiny_model_dir)) as tutor:
        for staleness, shared in ((0, True), (1, False)):
            changes = {"tutor.engine": engine(tutor, "vllm"), "tutor.dtype": "auto"}
            recipe = resolve_env(
                recipe_of(tiny_model_dir, tmp_path, **changes, **{"training.staleness": staleness})
            )
            policy = build_policy(recipe, torch.device("cpu"))
            classroom = build_classroom(recipe, policy)
            student_model = classroom.chats[0]._engine._model
            assert (student_model is policy.model) == shared
            classroom.grader.close()

"""The training loop: rollout on rank 0, learning on all ranks, and everything that must survive a bad night.

One *step* is: play ``problems_per_step × group_size`` episodes with the current policy, then take the optimizer steps that
they are worth. Steps are counted from 1; a checkpoint, an evaluation and a metrics row belong to the state *after* a step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from maieutic import pace
from maieutic.config import Recipe
from maieutic.errors import (
    ExclusionLimitError,
    MaieuticError,
    NonFiniteLossError,
    RunFolderError,
    RunInterrupted,
)
from maieutic.problems.splits import ProblemOrder
from maieutic.rollout import RolloutResult, rollout, rollout_metrics
from maieutic.runtime import Classroom, Policy, build_classroom, build_policy, resolve_env
from maieutic.serve import await_addresses
from maieutic.training import checkpoint, evaluate
from maieutic.training.checkpoint import TrainState
from maieutic.training.groups import staleness_of, training_groups
from maieutic.training.learner import Learner
from maieutic.training.overlap import Ahead, ends_fresh
from maieutic.training.progress import Reporter, evaluation_table, reporter
from maieutic.training.ranks import on_every, on_main
from maieutic.training.run_folder import RunFolder
from maieutic.training.sharding import backend_of
from maieutic.training.signals import Cancelled, StopSignals
from maieutic.training.trackers import Trackers, trackers_of
from maieutic.training.trajectory import Trajectory
from maieutic.transcripts import TranscriptWriter

log = logging.getLogger("maieutic.train")
T = TypeVar("T")

# Ranks wait for rank 0's rollouts, which may wait for servers: the collective's own limit must not end the run.
_PEER_TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class RunOutcome:
    """What a finished run leaves behind."""

    folder: Path
    state: TrainState


def make_accelerator(recipe: Recipe, folder: RunFolder) -> Any:
    """accelerate as the launcher configured it, with the recipe's trackers."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    return Accelerator(
        log_with=trackers_of(recipe) or None,
        project_dir=str(folder.root),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=_PEER_TIMEOUT)],
    )


def run(
    recipe: Recipe,
    resume: str | None = None,
    *,
    signals: StopSignals | None = None,
    console: Console | None = None,
) -> RunOutcome:
    """Train as the recipe says, from the start or from a checkpoint (``resume``: ``auto`` or a path).

    Raises what ended the run, with everything closed and, where the weights are those of a complete step, a checkpoint
    written: :class:`~maieutic.errors.RunInterrupted` for a signal, otherwise a named error. ``signals``: handlers that are
    already set (a caller that wants those of the start-up noticed); None: set here for the run.
    """
    if signals is None:
        with StopSignals() as own:
            return run(recipe, resume, signals=own, console=console)
    recipe = resolve_env(recipe)
    folder = RunFolder.of(recipe)
    loop = _Loop(recipe, folder, make_accelerator(recipe, folder), signals, console)
    code = 1
    try:
        outcome = loop.run(resume)
        code = 0
        return outcome
    except MaieuticError as error:
        code = error.exit_code
        raise
    finally:
        loop.close(code)


class _Loop:
    """One run in one process; every rank runs the same methods in the same order."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        accelerator: Any,
        signals: StopSignals,
        console: Console | None,
    ) -> None:
        self.recipe, self.folder, self.accelerator, self.signals = recipe, folder, accelerator, signals
        self.main: bool = accelerator.is_main_process
        self.console = console
        self.state = TrainState()
        self.runner = asyncio.Runner(loop_factory=pace.new_event_loop) if self.main else None
        self.ahead: Ahead[RolloutResult] = Ahead(self._run)
        self.trackers: Trackers | None = None
        self.classroom: Classroom | None = None
        self.reporter: Reporter | None = None
        self.log_context: Any = None
        self.rng: dict[str, Any] = {}
        """Random states as they were after the last complete step."""

    # ---- start and end -----------------------------------------------------------------------------------------------

    def run(self, resume: str | None) -> RunOutcome:
        """The whole run."""
        try:
            self._set_up(resume)
        except Cancelled:  # while servers were waited for, or in the probe
            raise self.signals.interrupted("nothing was begun, and what was saved is untouched") from None
        assert self.reporter is not None
        try:
            while True:
                if not self.state.eval_done:
                    self._evaluate()
                self._checkpoint_if_due()
                self._stop_if_asked()
                if self.state.step >= self.recipe.training.max_steps:
                    break
                self._step()
        except Cancelled:
            raise self._interrupted() from None
        self.reporter.close()
        self._on_main(self._finish)
        return RunOutcome(self.folder.root, self.state)

    def _set_up(self, resume: str | None) -> None:
        from accelerate.utils import set_seed

        found, self.state = self._on_main(lambda: self._open_folder(resume))
        set_seed(self.recipe.seed)
        backend = backend_of(self.accelerator)
        policy = build_policy(
            self.recipe,
            self.accelerator.device,
            weights=None if found is None else found / "model",
            on_host=backend.divides_weights,
        )
        self.policy = policy
        self.learner = Learner(self.recipe, policy.model, self.accelerator, policy.reference)
        policy.model = self.learner.whole_model  # what is sampled, saved and pushed
        policy.shared_scorer = self.learner.shared_scorer
        if found is not None:
            rank = self.accelerator.process_index
            self.learner.load_optimizer_state(
                checkpoint.load_optimizer(found, rank, divided=backend.divides_optimizer)
            )
        self.classroom = self._on_main(lambda: self._open_classroom(policy), share=False)
        self.learner.share_scores()
        # Only rank 0 knows whether there are held-out pairs, and every rank must make the same calls.
        self.state.eval_done = self._on_main(lambda: self.state.eval_done)
        self.reporter = reporter(
            self.recipe.training.max_steps, self.state.step, main=self.main, console=self.console
        )
        self._probe()
        if found is not None:
            states = checkpoint.load_tensors(found, "rng.pt")
            if self.accelerator.process_index < len(states):
                checkpoint.set_rng_state(states[self.accelerator.process_index])
        else:
            set_seed(self.recipe.seed, device_specific=True)
        self.rng = checkpoint.rng_state()

    def _open_folder(self, resume: str | None) -> tuple[Path | None, TrainState]:
        """Rank 0: the checkpoint to go on from, and the state that it holds (or a new one)."""
        folder, recipe = self.folder, self.recipe
        found = checkpoint.find(resume, folder.checkpoints)
        if found is None:
            state = TrainState(
                eval_done=False,
                recipe_hash=checkpoint.recipe_hash(recipe),
                recipe=checkpoint.frozen_recipe(recipe),
            )
        else:
            state = checkpoint.load_state(found)
            checkpoint.check_recipe(state, recipe, found)
        folder.prepare(recipe, resuming=resume is not None)
        self.log_context = folder.logging(append=resume is not None)
        self.log_context.__enter__()
        if resume is not None:
            folder.rewind(state.step if found else -1, eval_done=state.eval_done)
            checkpoint.discard_after(folder.checkpoints, state.step if found else -1)
            log.info("resuming from %s", found or "the start: there is no checkpoint yet")
        return found, state

    def _open_classroom(self, policy: Policy) -> Classroom:
        self._run(await_addresses(self.recipe))
        classroom = build_classroom(self.recipe, policy)
        # What was spent after the checkpoint was spent all the same.
        classroom.ledger.load(self.folder.usage() or self.state.usage)
        self.order = ProblemOrder(
            len(classroom.train_pairs), self.recipe.seed, self.recipe.training.problems_per_step
        )
        self.eval_pairs = evaluate.chosen(self.recipe, classroom.eval_pairs)
        self.transcripts = TranscriptWriter(self.folder.root, arm=self.recipe.arm, tokens=True)
        self.trackers = Trackers(self.accelerator, self.recipe, self.folder, step=self.state.tracker_step)
        if self.state.step == 0 and not self.state.eval_done:
            self.state.eval_done = not evaluate.due(self.recipe, 0, bool(self.eval_pairs))
        return classroom

    def _probe(self) -> None:
        """Sample a little with the engine and recompute it with the trainer, before anything is trained."""

        def sample() -> list[Trajectory]:
            assert self.classroom is not None
            return self._run(self.classroom.probe(self.state.policy_version))

        trajectories = self._on_main(sample)
        gap = self.learner.probe(trajectories)
        self._say(
            f"start-up probe: engine and trainer agree within {gap:.2g} (tolerance {self.learner.tolerance:g}), "
            f"sequences are {self.learner.layout}"
        )

    def close(self, exit_code: int) -> None:
        """Free everything, on every way out; the first error of the run stays the one that is raised."""
        if self.reporter is not None:
            self.reporter.close()
        self.ahead.discard()
        if self.classroom is not None and self.runner is not None:
            self.runner.run(self.classroom.close())
            self._keep_usage()
        if self.runner is not None:
            self.runner.close()
        if self.trackers is not None:
            self.trackers.finish(exit_code)
        if self.log_context is not None:
            self.log_context.__exit__(None, None, None)
            self.log_context = None

    def _keep_usage(self) -> None:
        """Spending counts against the limit of a resumed run too, whatever ended this one."""
        assert self.classroom is not None
        try:
            self.folder.write_usage(self.classroom.ledger.state())
        except RunFolderError as error:
            log.error("%s", error)

    def _finish(self) -> None:
        from maieutic.report import write_report

        assert self.trackers is not None
        self.trackers.flush()
        state = self.state
        if state.first_eval and state.last_eval and state.last_eval_step > 0:
            console = self.console or Console()
            console.print(evaluation_table(state.first_eval, state.last_eval, (0, state.last_eval_step)))
        write_report(self.folder.root)
        log.info("finished %d steps; see %s", state.step, self.folder.report)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        start = time.monotonic()
        step = self.state.step + 1
        groups, row, streak = self._guarded(lambda: self._play(step))
        self._guarded(lambda: self._play_ahead(step + 1))
        update_start = time.monotonic()
        try:
            row |= self.learner.update(groups, step)
        except NonFiniteLossError as error:
            self._save_before_leaving(error)
            raise
        epoch, offset = self._on_main(
            lambda: divmod(step * self.recipe.training.problems_per_step, self.order.n)
        )
        self.state = replace(
            self.state,
            step=step,
            policy_version=self.state.policy_version + 1,
            optimizer_steps=self.state.optimizer_steps + int(row["train/updates"]),
            tracker_step=step,
            epoch=epoch,
            offset=offset,
            excluded_streak=streak,
            eval_done=self._on_main(lambda: not evaluate.due(self.recipe, step, bool(self.eval_pairs))),
        )
        self.learner.moved = False
        self.rng = checkpoint.rng_state()
        now = time.monotonic()
        row |= {
            "train/policy_version": float(self.state.policy_version),
            "time/update": now - update_start,
            "time/step": now - start,
        }
        self._record(step, row)
        assert self.reporter is not None
        self.reporter.step(step, row)

    def _play(self, step: int) -> tuple[list[list[Trajectory]], dict[str, float], int]:
        """Rank 0: the episodes of a step → groups of trajectories, numbers, and the new streak of bad steps."""
        recipe, training, version = self.recipe, self.recipe.training, self.state.policy_version
        assert self.classroom is not None
        start = time.monotonic()
        result = self.ahead.take(step)
        if result is None:
            self._run(self.classroom.new_step(version))
            result = self._run(self._rollout(self.classroom, step))
        waited = time.monotonic() - start
        try:
            groups = training_groups(result, version, training.staleness)
        finally:
            self.transcripts.write("train", step, result.episodes)
        values = rollout_metrics(result, unknown_reward=-recipe.reward.gate_penalty)
        row = {f"rollout/{name}": value for name, value in values.items()} | {"time/rollout": result.seconds}
        row |= {"time/rollout_wait": waited, "train/staleness": float(staleness_of(groups, version))}
        row |= self.classroom.metrics()
        streak = self.state.excluded_streak + 1 if result.excluded_share > training.max_excluded_share else 0
        if streak >= training.excluded_patience:
            reasons = ", ".join(
                f"{k.removeprefix('excluded:')} {n}"
                for k, n in result.counts.items()
                if k.startswith("excluded:")
            )
            raise ExclusionLimitError(
                f"step {step}: {result.counts['excluded']} of {result.counts['episodes']} episodes excluded ({reasons}), "
                f"more than {training.max_excluded_share:.0%} for {streak} steps in a row; look at "
                f"{self.transcripts.folder}, mend the cause, and resume (limit: training.max_excluded_share)"
            )
        return groups, row, streak

    def _play_ahead(self, step: int) -> None:
        """Rank 0: begin the episodes of the next step, with the weights as they are now, before they are trained further."""
        assert self.classroom is not None
        if not self.recipe.training.staleness or ends_fresh(self.recipe, step - 1, bool(self.eval_pairs)):
            return
        self._run(self.classroom.new_step(self.state.policy_version))
        self.ahead.start(step, self._rollout(self.classroom, step))

    async def _rollout(self, classroom: Classroom, step: int) -> RolloutResult:
        training = self.recipe.training
        result = await rollout(
            classroom.play_train,
            [classroom.train_pairs[i] for i in self.order.indices(step - 1)],
            phase="train",
            step=step,
            run_seed=self.recipe.seed,
            group_size=training.group_size,
            retries=training.group_retries,
            on_progress=lambda done, total: self._progress("train", step, done, total),
        )
        await classroom.verify()
        return result

    def _evaluate(self) -> None:
        step = self.state.step
        start = time.monotonic()

        def play() -> dict[str, float]:
            result = self._run(self._evaluation(step))
            self.transcripts.write("eval", step, result.episodes)
            return evaluate.metrics(result, self.recipe)

        values = self._guarded(play)
        self.state = replace(
            self.state,
            eval_done=True,
            first_eval=values if step == 0 else self.state.first_eval,
            last_eval=values,
            last_eval_step=step,
            tracker_step=step,
        )
        self._record(step, values | {"time/eval": time.monotonic() - start})
        self._say(f"evaluation after step {step}: " + ", ".join(_headline(values)))

    async def _evaluation(self, step: int) -> RolloutResult:
        assert self.classroom is not None
        await self.classroom.new_step(self.state.policy_version)
        return await evaluate.evaluate(
            self.classroom.play_eval,
            self.eval_pairs,
            self.recipe,
            step,
            on_progress=lambda done, total: self._progress("eval", step, done, total),
        )

    # ---- checkpoints and stops ---------------------------------------------------------------------------------------

    def _record(self, step: int, row: Mapping[str, float]) -> None:
        def write() -> None:
            assert self.trackers is not None
            self.trackers.log(step, row)
            self._keep_usage()

        self._guarded(write)
        value = row.get(self.recipe.checkpoint.best or "")
        if (
            value is not None
            and math.isfinite(value)
            and step > 0
            and (self.state.best is None or value > self.state.best)
        ):
            self.state = replace(self.state, best=value, best_step=step)

    def _checkpoint_if_due(self) -> None:
        state, every = self.state, self.recipe.checkpoint.every
        last = state.step == self.recipe.training.max_steps
        if state.step and (last or state.best_step == state.step or (every and state.step % every == 0)):
            # Only a new best comes unexpectedly. What resumes from it plays the next step afresh, so this run does too.
            self.ahead.discard()
            self._save()

    def _save(self) -> Path:
        """Write a checkpoint of the last complete step; the same call on every rank."""
        from accelerate.utils import gather_object

        rng = gather_object([self.rng]) if self.accelerator.num_processes > 1 else [self.rng]
        optimizer = self._optimizer_to_save()

        def write() -> Path:
            assert self.classroom is not None
            path = checkpoint.save(
                self.folder.checkpoints,
                replace(self.state, usage=self.classroom.ledger.state()),
                save_model=self.policy.save,
                optimizer=optimizer,
                rng=rng,
            )
            checkpoint.prune(self.folder.checkpoints, self.recipe.checkpoint, self.state.best_step)
            return path

        return self._on_main(write)

    def _optimizer_to_save(self) -> dict[str, Any] | Path:
        """Its states, or the folder where every rank has written its own."""
        state = self.learner.optimizer_state()
        if not self.learner.backend.divides_optimizer:
            return state
        parts = self._on_main(lambda: checkpoint.open_parts(self.folder.checkpoints))
        rank = self.accelerator.process_index
        on_every(lambda: checkpoint.save_part(parts, rank, state), self.accelerator)
        return parts

    def _stop_if_asked(self) -> None:
        if self.signals.agree(self.accelerator) is not None:
            raise self._interrupted()

    def _interrupted(self) -> RunInterrupted:
        return self.signals.interrupted(f"checkpoint {self._save()} holds step {self.state.step}")

    def _save_before_leaving(self, error: BaseException) -> None:
        """Save what is complete before ``error`` ends the run.

        Weights that moved since the last complete step are not a state to resume from: the checkpoint on disk stays.
        """
        if self.learner.moved:
            log.error(
                "step %d was under way: the last checkpoint is the one to resume from", self.state.step + 1
            )
            return
        try:
            log.error("%s; wrote checkpoint %s", error, self._save())
        except MaieuticError as second:
            log.error("no checkpoint of step %d could be written either: %s", self.state.step, second)

    # ---- ranks -------------------------------------------------------------------------------------------------------

    def _run(self, coroutine: Any) -> Any:
        assert self.runner is not None
        return self.signals.run(coroutine, self.runner)

    def _on_main(self, function: Callable[[], T], *, share: bool = True) -> T:
        return on_main(function, self.accelerator, self.signals, share=share)

    def _guarded(self, function: Callable[[], T]) -> T:
        """:meth:`_on_main`, and a checkpoint of the last complete step if it fails (on every rank)."""
        try:
            return self._on_main(function)
        except Cancelled:
            raise
        except Exception as error:
            self._save_before_leaving(error)
            raise

    def _progress(self, phase: str, step: int, done: int, total: int) -> None:
        if self.reporter is not None:
            self.reporter.episodes(phase, step, done, total)

    def _say(self, text: str) -> None:
        if self.reporter is not None:
            self.reporter.message(text)


def _headline(values: Mapping[str, float]) -> list[str]:
    names = ("eval/transfer_gain", "eval/same_gain", "eval/reward", "eval/leak_rate", "eval/excluded_share")
    return [f"{name.removeprefix('eval/')} {values[name]:.4g}" for name in names if name in values]

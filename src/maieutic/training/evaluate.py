"""Held-out evaluation inside a training run: the same environment and student, another sampling, other problem pairs."""

from __future__ import annotations

from collections.abc import Sequence

from maieutic.config import Recipe
from maieutic.problems.schema import ProblemPair
from maieutic.rollout import Play, Progress, RolloutResult, rollout, rollout_metrics

PREFIX = "eval/"


def due(recipe: Recipe, step: int, has_pairs: bool) -> bool:
    """Is there an evaluation after ``step`` complete steps? Always before the first and after the last when it is on."""
    every = recipe.eval.every
    if not every or not has_pairs:
        return False
    return step == 0 or step == recipe.training.max_steps or step % every == 0


def chosen(recipe: Recipe, pairs: Sequence[ProblemPair]) -> list[ProblemPair]:
    """The held-out pairs of every evaluation: the first ``eval.problems`` ones, always the same."""
    return list(pairs[: recipe.eval.problems])


async def evaluate(
    play: Play,
    pairs: Sequence[ProblemPair],
    recipe: Recipe,
    step: int,
    on_progress: Progress | None = None,
) -> RolloutResult:
    """Play ``eval.samples`` episodes of each pair. Seeds do not depend on ``step``, so that two evaluations differ by the policy.

    The episodes still carry the step that they were played after.
    """
    return await rollout(
        play,
        pairs,
        phase="eval",
        step=step,
        run_seed=recipe.seed,
        group_size=recipe.eval.samples,
        retries=recipe.training.group_retries,
        on_progress=on_progress,
        seed_step=0,
    )


def metrics(result: RolloutResult, recipe: Recipe) -> dict[str, float]:
    """``eval/<name>`` of :func:`maieutic.rollout.rollout_metrics`."""
    values = rollout_metrics(result, unknown_reward=-recipe.reward.gate_penalty)
    return {PREFIX + name: value for name, value in values.items()}

"""The learner between rewards and weights: advantages within groups, excluded episodes left out, and the direction of a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from gradient_checks import VOCAB, tiny_model
from maieutic.algorithms.base import TokenLoss
from maieutic.recipe import load_recipe
from maieutic.training.learner import Learner
from maieutic.training.trajectory import Segment, Trajectory

TEMPERATURE = 1.15


def learner(*overrides: str) -> Learner:
    recipe = load_recipe("micro/full", ["training.optimizer.lr=1e-2", *overrides])
    return Learner(recipe, tiny_model("llama").eval(), Accelerator(cpu=True), None)


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> list[float]:
    """log π of ids[1:] at the sampling temperature."""
    rows = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0] / TEMPERATURE, dim=-1)
    return [float(rows[i, token]) for i, token in enumerate(ids[1:])]


def episode(model: Any, name: str, group: str, reward: float | None, sampled: int) -> Trajectory:
    """Six tokens that were given, then ``sampled`` ones with the log-probs that the model gives them."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    ids = torch.randint(4, VOCAB, (6 + sampled,), generator=draw).tolist()
    mu = [0.0] * 6 + logprobs(model, ids)[5:]
    segment = Segment(ids, [False] * 6 + [True] * sampled, mu, 0)
    excluded = reward is None
    return Trajectory(name, group, [segment], math.nan if reward is None else reward, TEMPERATURE, excluded)


def test_advantages_are_those_of_the_group_and_excluded_episodes_train_nothing() -> None:
    made = learner()
    seen: dict[int, float] = {}

    def record(logp: Tensor, mu: Tensor, adv: Tensor, ref: Tensor | None = None) -> TokenLoss:
        for value in adv.unique():  # each episode has its own number of trained tokens
            seen[int((adv == value).sum())] = round(float(value), 6)
        torch.testing.assert_close(logp.detach(), mu, rtol=0, atol=1e-5)
        return TokenLoss(-adv * logp, {})

    made.loss = record
    groups = [
        [episode(made.model, "a0", "a", 1.0, 2), episode(made.model, "a1", "a", 0.0, 3)],
        [
            episode(made.model, "b0", "b", 0.2, 4),
            episode(made.model, "b1", "b", None, 9),
            episode(made.model, "b2", "b", 0.9, 5),
        ],
    ]
    metrics = made.update(groups, 1)
    assert seen == {2: 0.5, 3: -0.5, 4: -0.35, 5: 0.35}
    assert metrics["train/trained_tokens"] == 2 + 3 + 4 + 5 and metrics["train/flat_group_share"] == 0


@pytest.mark.parametrize("loss", ["dppo", "grpo"])
def test_a_step_makes_what_was_rewarded_likelier_and_what_was_not_less_likely(loss: str) -> None:
    made = learner(f"algorithm.loss={loss}", "training.optimizer.lr=1e-3")
    good, bad = episode(made.model, "good", "g", 0.8, 5), episode(made.model, "bad", "g", -0.2, 5)

    def likely(t: Trajectory) -> float:
        return sum(logprobs(made.model, t.segments[0].ids)[5:])

    before = likely(good), likely(bad)
    metrics = made.update([[good, bad]], 1)
    assert likely(good) > before[0] + 0.01 and likely(bad) < before[1] - 0.01
    assert metrics["train/updates"] == 1 and metrics["train/logprob_gap"] < 1e-5


def test_a_group_of_equal_rewards_moves_nothing() -> None:
    made = learner()
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    # Another group's rewards differ from these: only if groups were mixed would anything move.
    groups = [
        [episode(made.model, f"{g}{i}", g, reward, 3 + i) for i in range(2)]
        for g, reward in (("a", 1.0), ("b", 0.0))
    ]
    metrics = made.update(groups, 1)
    assert metrics["train/flat_group_share"] == 1 and metrics["train/skipped_updates"] == 1
    assert all(torch.equal(before[name], p) for name, p in made.model.named_parameters())

"""BC, FQI and CQL: their objectives, their networks, their loop, and what they learn in the constructed classroom."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from maieutic.errors import CheckpointError
from maieutic.latent.adam import FlatAdam
from maieutic.latent.augment import augmented, select
from maieutic.latent.bc import bc_loss
from maieutic.latent.cql import cql_loss, double_q_targets
from maieutic.latent.cql_step import target_table
from maieutic.latent.errors import DivergenceError, LatentDataError
from maieutic.latent.fit import FitSpec, Trainer, fit, greedy_agreement
from maieutic.latent.fqi import fqi_loss, fqi_targets
from maieutic.latent.networks import Mlp, Standardiser
from maieutic.latent.policy import FixedPolicy, RandomPolicy, RulePolicy, choose, load_policy
from maieutic.latent.transitions import Transitions
from maieutic.latent.world import FITTING, MOODS, MOVES, World, poor_policy

WORLD = World(steps=2, limit=8)
SMALL = FitSpec(hidden=(32, 32), steps=300, batch_size=128)


def data(n: int = 200, seed: int = 0, **poor: float) -> Transitions:
    return WORLD.roll(poor_policy(WORLD, **poor), n, np.random.default_rng(seed))[0]


# ------------------------------------------------------------------------------------------------------- objectives


def test_bc_loss_is_cross_entropy_and_a_penalty() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    moves = torch.tensor([1, 0])
    expected = -(math.log(0.75) + math.log(0.5)) / 2
    assert bc_loss(logits, moves).item() == pytest.approx(expected, abs=1e-6)
    penalty = (math.log(0.25) ** 2 + math.log(0.75) ** 2 + 2 * math.log(0.5) ** 2) / 4
    assert bc_loss(logits, moves, beta=0.5).item() == pytest.approx(expected + 0.5 * penalty, abs=1e-6)


def test_fqi_targets_bootstrap_only_where_the_episode_goes_on() -> None:
    rewards, done = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    next_q = torch.tensor([[0.5, 0.2], [9.0, 9.0], [5.0, -5.0]])
    y = fqi_targets(rewards, done, next_q, gamma=0.9, bound=1.0)
    assert y.tolist() == pytest.approx([0.45, 1.0, 1.0])
    q = torch.tensor([[0.45, 0.0], [0.0, 0.0], [0.0, 1.0]])
    assert fqi_loss(q, torch.tensor([0, 1, 1]), y).item() == pytest.approx(1 / 3)


def test_double_q_takes_the_move_of_the_online_and_the_value_of_the_lowest_target_critic() -> None:
    online = torch.tensor([[[1.0, 0.0]], [[0.0, 0.5]]])  # mean prefers move 0
    target = torch.tensor([[[0.3, 9.0]], [[0.2, 9.0]]])
    y = double_q_targets(torch.tensor([0.0]), torch.tensor([0.0]), online, target, gamma=0.9)
    assert y.item() == pytest.approx(0.18)


def test_cql_loss_in_numbers() -> None:
    q = torch.tensor([[[0.0, 2.0], [1.0, 0.0]]])
    out = cql_loss(q, torch.tensor([0, 1]), torch.tensor([3.0, 0.5]), alpha=4.0)
    td = ((3 - 0.5) + 0.5 * 0.25) / 2  # beyond 1 linear, within 1 quadratic
    gap = ((math.log(1 + math.exp(2)) - 0) + (math.log(math.e + 1) - 0)) / 2
    assert out.td.item() == pytest.approx(td, abs=1e-6)
    assert out.conservative.item() == pytest.approx(gap, abs=1e-6)
    assert out.total.item() == pytest.approx(td + 4 * gap, abs=1e-5)


def test_the_stationary_point_that_the_docstring_states() -> None:
    """softmax(Q)_a = π_b(a) (1 − (Q_a − y_a)/α) at the minimum of the expected objective of one state."""
    behaviour, y, alpha = torch.tensor([0.6, 0.2, 0.2]), torch.tensor([0.1, 0.6, -0.3]), 4.0
    q = torch.zeros(3, requires_grad=True)
    for _ in range(4000):
        td = (behaviour * 0.5 * (q - y) ** 2).sum()
        loss = td + alpha * (torch.logsumexp(q, 0) - (behaviour * q).sum())
        (g,) = torch.autograd.grad(loss, q)
        with torch.no_grad():
            q -= 0.5 * g
    assert torch.allclose(q.softmax(0), behaviour * (1 - (q - y) / alpha), atol=1e-4)


@pytest.mark.parametrize("critics", [1, 2, 3])
def test_the_closed_gradient_of_cql_is_autograds(critics: int) -> None:
    trainer = Trainer(
        "cql", data(40), FitSpec(hidden=(16, 8), critics=critics, target_every=7, batch_size=64)
    )
    for _ in range(10):
        trainer.step()
    rows = torch.arange(50, 150)
    value = trainer.gradient(rows)
    closed = [p.grad.clone() for p in trainer.params]
    loss = trainer.loss(rows)
    reference = torch.autograd.grad(loss, trainer.params)
    assert value == pytest.approx(loss.item(), abs=1e-6)
    for a, b in zip(closed, reference, strict=True):
        assert torch.allclose(a, b, atol=1e-6) and b.abs().max() > 1e-4


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_on_one_vector_is_torchs_adam(decay: float) -> None:
    ours, theirs = Mlp(5, 4, (8,), members=2, seed=1), Mlp(5, 4, (8,), members=2, seed=1)
    mine = FlatAdam(list(ours.parameters()), lr=1e-2, weight_decay=decay)
    torchs = torch.optim.Adam(theirs.parameters(), lr=1e-2, weight_decay=decay)
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(50):
        mine.grad.zero_()
        for net in (ours, theirs):
            (net(x) - 1).square().mean().backward()
        mine.step()
        torchs.step()
        torchs.zero_grad()
    start = Mlp(5, 4, (8,), members=2, seed=1)
    for a, b, c in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5) and not torch.allclose(a, c, atol=1e-2)


def test_the_target_table_holds_the_double_q_targets() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, done = torch.randn(9, generator=generator), (torch.arange(9) % 3 == 0).float()
    online, target = (torch.randn(2, 9, 4, generator=generator) for _ in range(2))
    table = target_table(rewards, done, target, gamma=0.9)
    picked = table.gather(1, online.mean(0).argmax(1, keepdim=True)).squeeze(1)
    assert torch.allclose(picked, double_q_targets(rewards, done, online, target, gamma=0.9), atol=1e-6)


# ------------------------------------------------------------------------------------------------------- networks


def test_several_critics_equal_single_networks() -> None:
    three = Mlp(5, 4, (8, 8), members=3, seed=1)
    x = torch.randn(7, 5)
    for k in range(3):
        one = Mlp(5, 4, (8, 8))
        one.load_state_dict({n: v[k : k + 1] for n, v in three.state_dict().items()})
        assert torch.allclose(one(x)[0], three(x)[k], atol=1e-6)
    assert not torch.allclose(three(x)[0], three(x)[1])


def test_standardiser_leaves_constant_features_bounded() -> None:
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    s = Standardiser.fit(x)
    assert s(x).tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert s(torch.tensor([[2.0, 6.0]])).tolist() == [[0.0, 1.0]]
    with pytest.raises(LatentDataError, match=r"NaN or infinity in feature columns \[1\]"):
        Standardiser.fit(torch.tensor([[1.0, float("nan")], [1.0, 0.0]]))


# ------------------------------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize("learner", ["bc", "fqi", "cql"])
def test_a_fit_repeats_and_its_policy_survives_the_disk(learner: str, tmp_path) -> None:
    d = data(60)
    spec = FitSpec(hidden=(16,), steps=60, batch_size=64, seed=3)
    a, log = fit(learner, d, spec)
    b, _ = fit(learner, d, spec)
    x = torch.from_numpy(d.states)
    assert torch.equal(a.scores(x), b.scores(x))
    assert log.steps == 60 and log.best_step == 60
    a.save(tmp_path / "p.pt")
    c = load_policy(tmp_path / "p.pt")
    assert torch.equal(a.scores(x), c.scores(x))
    assert (c.kind, c.feature_names, c.move_names) == (a.kind, d.feature_names, MOVES)
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"bad\.pt: not a readable policy"):
        load_policy(tmp_path / "bad.pt")


def test_early_stopping_keeps_the_best_policy() -> None:
    scores = iter([0.1, 0.9, 0.5, 0.4])
    seen = []

    def score(policy):
        seen.append(policy)
        return next(scores)

    spec = FitSpec(hidden=(8,), steps=1000, batch_size=32, eval_every=10, patience=2)
    best, log = fit("cql", data(30), spec, score=score)
    assert (log.best_step, log.steps, log.stopped_early) == (20, 40, True)
    assert best is seen[1]


def test_targets_are_copied_at_the_stated_steps() -> None:
    trainer = Trainer("cql", data(30), FitSpec(hidden=(8,), batch_size=32, target_every=3))

    def lag() -> float:
        pairs = zip(trainer.net.parameters(), trainer.target.parameters(), strict=True)
        return max(float((a.detach() - b).abs().max()) for a, b in pairs)

    lags = []
    for _ in range(6):
        trainer.step()
        lags.append(lag())
    assert lags[2] == lags[5] == 0 and min(lags[0], lags[1], lags[3], lags[4]) > 0


@pytest.mark.parametrize("learner", ["bc", "fqi", "cql"])
def test_a_loss_that_is_not_finite_stops_before_the_weights_move(learner: str) -> None:
    trainer = Trainer(learner, data(30), FitSpec(hidden=(8,), batch_size=32))
    before = [p.detach().clone() for p in trainer.params]
    trainer.all.x[:, 1] = float("inf")
    with pytest.raises(DivergenceError, match=rf"{learner} at step 0: .*feature 'confused'"):
        trainer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.params, strict=True))


def test_huge_unscaled_features_are_no_trouble() -> None:
    d = data(60)
    d.states[:, 5] *= 1e6
    d.next_states[:, 5] *= 1e6
    policy, log = fit("cql", d, FitSpec(hidden=(16,), steps=100, batch_size=64))
    assert all(math.isfinite(v) for _, v in log.losses)
    assert torch.isfinite(policy.scores(torch.from_numpy(d.states))).all()


# ------------------------------------------------------------------------------------------------------- policies


def test_choose_follows_the_probabilities_and_its_seed() -> None:
    state = np.zeros(3, np.float32)
    picks = [choose(RandomPolicy(4), state, seed=s)[0] for s in range(400)]
    assert np.bincount(picks, minlength=4).min() > 70
    assert [choose(RandomPolicy(4), state, seed=s)[0] for s in range(400)] == picks
    assert {choose(FixedPolicy(2, 4), state, seed=s)[0] for s in range(20)} == {2}


def test_rule_policy_takes_the_first_rule_that_holds() -> None:
    policy = RulePolicy(
        ("off_topic", "frustrated"), MOVES, {"off_topic": "refocus", "frustrated": "encourage"}, "ask"
    )
    x = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert [MOVES[i] for i in policy.probabilities(x).argmax(1)] == ["refocus", "encourage", "ask"]
    with pytest.raises(ValueError, match="rule 'bored' → 'ask'"):
        RulePolicy(("off_topic",), MOVES, {"bored": "ask"}, "ask")


def test_a_policy_refuses_states_of_another_width_or_nan() -> None:
    policy, _ = fit("bc", data(20), FitSpec(hidden=(4,), steps=2))
    with pytest.raises(ValueError, match="the policy reads 8 features"):
        policy.scores(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="NaN"):
        policy.scores(torch.full((1, 8), float("nan")))


# ------------------------------------------------------------------------------------------------------- the classroom


def test_the_worlds_optimum_is_the_fitting_move() -> None:
    fitting = np.eye(4)[[MOVES.index(FITTING[MOODS[s % 4]]) for s in range(WORLD.n_states)]]
    assert WORLD.value_of(WORLD.optimal) == pytest.approx(WORLD.value_of(fitting))
    assert WORLD.value_of(poor_policy(WORLD)) < 0.1 < 0.7 < WORLD.value_of(WORLD.optimal)


def test_exact_values_agree_with_simulated_returns() -> None:
    poor = poor_policy(WORLD)
    returns = WORLD.roll(poor, 20_000, np.random.default_rng(0))[0].returns()
    error = returns.std() / math.sqrt(len(returns))
    assert abs(returns.mean() - WORLD.value_of(poor)) < 4 * error


def plus(seed: int, *, episodes: int = 300, states: int = 500, repeats: int = 5, rounds: int = 3):
    """CQL on D⁺ from poor data, and BC on the poor data: their shares of the optimal return."""
    rng = np.random.default_rng(seed)
    world, best = WORLD, WORLD.value_of(WORLD.optimal)
    d, number = world.roll(poor_policy(world, instruct=0.4), episodes, rng)
    spec = FitSpec(steps=1200, seed=seed)
    bc, _ = fit("bc", d, FitSpec(steps=400, seed=seed))
    current, q = d, fit("fqi", d, spec)[0]
    tried: set[int] = set()
    for k in range(rounds):
        branches = select(current, q, states, tried=tried, seed=seed + k)
        tried |= {b.row for b in branches}
        rows = np.repeat([b.row for b in branches], repeats)
        moves = np.repeat([b.move for b in branches], repeats)
        onward = 0.9 * world.tabulate(q) + 0.1 / 4
        new, more = world.roll(onward, len(rows), rng, start=number[rows], first_move=moves, prefix=f"{k}-")
        current, number = augmented(current, new), np.concatenate([number, more])
        if k + 1 < rounds:
            q, _ = fit("fqi", current, spec)
    cql, _ = fit("cql", current, FitSpec(steps=1000, seed=seed, alpha=4.0))
    return world.value_of(world.tabulate(cql)) / best, world.value_of(world.tabulate(bc)) / best


@pytest.mark.slow
def test_cql_on_augmented_data_is_near_optimal_and_beats_cloning_over_five_seeds() -> None:
    results = [plus(seed) for seed in range(5)]
    print("CQL+ and BC, share of the optimal return:", [(round(a, 3), round(b, 3)) for a, b in results])
    assert min(a for a, _ in results) >= 0.95
    assert all(a > b + 0.5 for a, b in results)


def test_fqi_finds_a_good_policy_from_poor_data() -> None:
    """A floor for the suite that runs always; the slow test holds the augmented learner to the optimum."""
    q, _ = fit("fqi", data(300, instruct=0.4), SMALL)
    assert WORLD.value_of(WORLD.tabulate(q)) > 0.5 * WORLD.value_of(WORLD.optimal)


def test_greedy_agreement_counts_states() -> None:
    a, _ = fit("bc", data(40), FitSpec(hidden=(8,), steps=5))
    assert greedy_agreement(a, a, torch.from_numpy(data(5).states)) == 1.0


def test_a_large_gradient_is_scaled_to_the_limit() -> None:
    moved = []
    for clip in (1e-3, 1e9):
        trainer = Trainer("cql", data(30), FitSpec(hidden=(8,), batch_size=32, grad_clip=clip))
        trainer.step()
        moved.append(float(torch.stack([p.grad.norm() for p in trainer.params]).norm()))
    assert moved[0] == pytest.approx(1e-3, rel=1e-4) and moved[1] > 0.1

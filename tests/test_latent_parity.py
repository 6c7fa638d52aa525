"""Our objectives and policies against d3rlpy's DiscreteCQL and DiscreteBC."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latent_oracle import algorithm, d3rlpy, data_set, to_mlp, train
from maieutic.latent.bc import bc_loss
from maieutic.latent.cql import cql_loss, double_q_targets
from maieutic.latent.fit import FitSpec, Trainer
from maieutic.latent.networks import Standardiser
from maieutic.latent.world import World, poor_policy

WORLD = World(steps=2, limit=8)
HIDDEN = (32, 32)


@pytest.fixture(scope="module")
def made():
    data = WORLD.roll(poor_policy(WORLD, instruct=0.4), 1000, np.random.default_rng(0))[0]
    held_out = WORLD.roll(poor_policy(WORLD, instruct=0.4), 300, np.random.default_rng(1))[0]
    standardise = Standardiser.fit(torch.from_numpy(data.states))
    return data, held_out, standardise


def mini_batch(data, standardise, rows):
    from d3rlpy.torch_utility import TorchMiniBatch

    x = standardise(torch.from_numpy(data.states[rows]))
    y = standardise(torch.from_numpy(data.next_states[rows]))
    moves = torch.from_numpy(data.moves[rows])
    rewards = torch.from_numpy(data.rewards[rows])
    done = torch.from_numpy(data.done[rows]).float()
    n = len(rows)
    batch = TorchMiniBatch(
        observations=x,
        actions=moves[:, None].float(),
        rewards=rewards[:, None],
        next_observations=y,
        next_actions=torch.zeros(n, 1),
        returns_to_go=torch.zeros(n, 1),
        terminals=done[:, None],
        intervals=torch.ones(n, 1),
        device="cpu:0",
    )
    return batch, (x, y, moves, rewards, done)


@pytest.mark.parametrize("critics", [1, 2])
def test_cql_has_the_same_objective_value(made, critics: int) -> None:
    data, _, standardise = made
    algo = algorithm("cql", hidden=HIDDEN, alpha=4.0, n_critics=critics, batch_size=64)
    dataset = data_set(standardise(torch.from_numpy(data.states)).numpy(), data)
    train(algo, dataset, 40)  # target and online critics then differ
    batch, (x, y, moves, rewards, done) = mini_batch(data, standardise, np.arange(100, 300))
    theirs = algo.impl.compute_loss(batch, algo.impl.compute_target(batch))
    q, target = (to_mlp(m, HIDDEN) for m in (algo.impl.modules.q_funcs, algo.impl.modules.targ_q_funcs))
    targets = double_q_targets(rewards, done, q(y), target(y), gamma=0.9)
    ours = cql_loss(q(x), moves, targets, alpha=4.0)
    assert ours.total.item() == pytest.approx(theirs.loss.item(), abs=1e-6)
    assert ours.td.item() == pytest.approx(theirs.td_loss.item(), abs=1e-6)
    assert ours.conservative.item() == pytest.approx(theirs.conservative_loss.item(), abs=1e-6)
    assert not torch.equal(q(x), target(x))


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_bc_has_the_same_objective_value(made, beta: float) -> None:
    data, _, standardise = made
    algo = algorithm("bc", hidden=HIDDEN, beta=beta, batch_size=64)
    train(algo, data_set(standardise(torch.from_numpy(data.states)).numpy(), data), 10)
    _, (x, _, moves, _, _) = mini_batch(data, standardise, np.arange(200))
    theirs = algo.impl.compute_loss(x, moves[:, None]).loss
    net = to_mlp([algo.impl.modules.imitator], HIDDEN)
    assert bc_loss(net(x)[0], moves, beta=beta).item() == pytest.approx(theirs.item(), abs=1e-6)


def agreement(made, kind: str, steps: int, lr: float) -> float:
    """Share of held-out states with the same greedy move, from the same first weights and the same settings."""
    data, held_out, standardise = made
    spec = FitSpec(
        hidden=HIDDEN,
        lr=lr,
        batch_size=512,
        steps=steps,
        weight_decay=0.0,
        critics=1,
        target_every=100,
        grad_clip=1e9,
    )
    options = {"alpha": 4.0, "target_update_interval": 100} if kind == "cql" else {"beta": 0.0}
    algo = algorithm(kind, hidden=HIDDEN, learning_rate=lr, batch_size=512, **options)
    dataset = data_set(standardise(torch.from_numpy(data.states)).numpy(), data)
    d3rlpy.seed(0)
    algo.build_with_dataset(dataset)
    theirs = algo.impl.modules.q_funcs if kind == "cql" else [algo.impl.modules.imitator]
    trainer = Trainer(kind, data, spec)  # type: ignore[arg-type]
    trainer.net.load_state_dict(to_mlp(theirs, HIDDEN).state_dict())
    if kind == "cql":
        trainer.sync()
    train(algo, dataset, steps)
    for _ in range(steps):
        trainer.step()
    x = held_out.states
    mine = trainer.policy().greedy(torch.from_numpy(x)).numpy()
    return float((mine == algo.predict(standardise(torch.from_numpy(x)).numpy())).mean())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), [("cql", 1000), ("bc", 600)])
def test_trained_policies_agree_on_held_out_states(made, kind: str, steps: int) -> None:
    share = agreement(made, kind, steps, 1e-3)
    print(f"{kind}: the same greedy move on {share:.3f} of held-out states")
    assert share >= 0.95


def test_policies_agree_soon_after_the_same_start(made) -> None:
    """The quick form: a few steps from the same weights, at a rate that does not yet fit noise."""
    assert agreement(made, "cql", 150, 1e-3) >= 0.9

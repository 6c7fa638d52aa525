"""Time to the same loss: our CQL and BC against d3rlpy's DiscreteCQL and DiscreteBC on CPU. Ends with one JSON line.

Both sides have the same data (constructed classroom), network, batch size and learning rate, one thread, and are timed alternately.
d3rlpy trains for a fixed number of steps; its loss on a fixed sample of 1,024 rows is the mark. Ours trains until its loss on the
same rows is at the mark, checks every 50 steps included in its time. CQL's loss takes its targets from the learner's own online
network.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maieutic.latent.bc import bc_loss
from maieutic.latent.cql import cql_loss, double_q_targets
from maieutic.latent.fit import FitSpec, Trainer
from maieutic.latent.networks import Mlp, Standardiser
from maieutic.latent.world import World, poor_policy

HIDDEN, BATCH, LR, ROUNDS = (64, 64), 128, 1e-3, 3
STEPS = {"cql": 500, "bc": 500}


def sample_loss(kind: str, net: Mlp, trainer: Trainer) -> float:
    """The objective on every fifth row or so: the same 1,024 rows whoever is measured."""
    a = trainer.all
    rows = torch.linspace(0, len(a.moves) - 1, 1024).long()
    with torch.no_grad():
        if kind == "bc":
            return float(bc_loss(net(a.x[rows])[0], a.moves[rows]))
        q = net(a.next_x[rows])
        y = double_q_targets(a.rewards[rows], a.done[rows], q, q, gamma=trainer.data.gamma)
        return float(cql_loss(net(a.x[rows]), a.moves[rows], y, alpha=4.0).total)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from latent_oracle import algorithm, data_set, to_mlp, train

    torch.set_num_threads(1)
    world = World()
    data = world.roll(poor_policy(world), 600, np.random.default_rng(0))[0]
    x = Standardiser.fit(torch.from_numpy(data.states))(torch.from_numpy(data.states)).numpy()
    dataset = data_set(x, data)
    result: dict[str, Any] = {"benchmark": "latent_cql", "transitions": len(data), "threads": 1}
    for kind, steps in STEPS.items():
        wall, cpu, mine_steps = [], [], []
        for round_ in range(ROUNDS):
            options = {"alpha": 4.0, "target_update_interval": 100} if kind == "cql" else {"beta": 0.0}
            algo = algorithm(kind, hidden=HIDDEN, learning_rate=LR, batch_size=BATCH, **options)
            algo.build_with_dataset(dataset)
            t, c = time.perf_counter(), time.process_time()
            train(algo, dataset, steps)
            theirs = (time.perf_counter() - t, time.process_time() - c)
            spec = FitSpec(hidden=HIDDEN, lr=LR, batch_size=BATCH, weight_decay=0.0, critics=1, seed=round_)
            trainer = Trainer(kind, data, spec)  # type: ignore[arg-type]
            nets = algo.impl.modules.q_funcs if kind == "cql" else [algo.impl.modules.imitator]
            mark = sample_loss(kind, to_mlp(nets, HIDDEN), trainer)
            t, c = time.perf_counter(), time.process_time()
            while trainer.steps < 20 * steps:
                for _ in range(50):
                    trainer.step()
                if sample_loss(kind, trainer.net, trainer) <= mark:
                    break
            else:
                raise SystemExit(f"{kind}: {trainer.steps} steps did not reach the loss {mark:.4f}")
            ours = (time.perf_counter() - t, time.process_time() - c)
            wall.append(ours[0] / theirs[0])
            cpu.append(ours[1] / theirs[1])
            mine_steps.append(trainer.steps)
            print(
                f"{kind} {round_}: d3rlpy {steps} steps {theirs[0]:.2f} s, "
                f"ours {trainer.steps} steps {ours[0]:.2f} s, loss {mark:.4f}"
            )
        result[kind] = {
            "wall_ratio": round(float(np.median(wall)), 3),
            "cpu_ratio": round(float(np.median(cpu)), 3),
            "our_steps": mine_steps,
            "their_steps": steps,
            "target": 0.2,
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

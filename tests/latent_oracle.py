"""d3rlpy as the oracle of the learners: the same networks, data and objective on its side (the ``latent`` extra)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from maieutic.latent.networks import Mlp
from maieutic.latent.transitions import Transitions

d3rlpy = pytest.importorskip(
    "d3rlpy", reason="d3rlpy is the oracle of these tests: install the 'latent' extra (make setup does)"
)


def data_set(x: np.ndarray, data: Transitions) -> Any:
    """d3rlpy's data set of standardised states ``x``."""
    return d3rlpy.dataset.MDPDataset(
        x.astype(np.float32),
        data.moves.reshape(-1, 1),
        data.rewards.reshape(-1, 1),
        data.done.astype(np.float32),
    )


def algorithm(kind: str, *, hidden: tuple[int, ...], gamma: float = 0.9, **options: Any) -> Any:
    """DiscreteCQL or DiscreteBC with a plain ReLU encoder."""
    encoder = d3rlpy.models.VectorEncoderFactory(list(hidden))
    if kind == "cql":
        config = d3rlpy.algos.DiscreteCQLConfig(encoder_factory=encoder, gamma=gamma, **options)
    else:
        config = d3rlpy.algos.DiscreteBCConfig(encoder_factory=encoder, **options)
    return config.create(device="cpu:0")


def train(algo: Any, dataset: Any, steps: int) -> None:
    algo.fit(
        dataset,
        n_steps=steps,
        n_steps_per_epoch=steps,
        show_progress=False,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
    )


def to_mlp(networks: Any, hidden: tuple[int, ...]) -> Mlp:
    """Our network with the weights of d3rlpy's (a list of critics, or one imitator)."""
    per_member = [[m for m in n.modules() if isinstance(m, torch.nn.Linear)] for n in networks]
    first, last = per_member[0][0], per_member[0][-1]
    out = Mlp(first.in_features, last.out_features, hidden, members=len(per_member))
    with torch.no_grad():
        for layer in range(len(per_member[0])):
            for k, layers in enumerate(per_member):
                out.weights[layer][k] = layers[layer].weight
                out.biases[layer][k] = layers[layer].bias
    return out

"""Policies over states: trained networks, and the fixed, random and rule policies that ablations compare them with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from maieutic.errors import CheckpointError
from maieutic.latent.networks import Mlp, Standardiser
from maieutic.seeds import BITS, derive

FORMAT = 1
"""Version of the policy file."""


class Policy(Protocol):
    """Chooses moves from raw (not standardised) states."""

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Names of the features that it reads, in order; None: any."""
        ...

    def probabilities(self, states_NF: Tensor) -> Tensor:
        """Move probabilities float ``[N, A]`` of states float ``[N, F]``."""
        ...


@dataclass(frozen=True)
class NetPolicy:
    """A trained policy: network, standardiser and the names that make its inputs and outputs unambiguous."""

    net: Mlp
    standardise: Standardiser
    kind: Literal["logits", "values"]
    """``logits``: BC, softmax gives probabilities; ``values``: mean over critics is Q."""
    feature_names: tuple[str, ...]
    move_names: tuple[str, ...]
    meta: dict[str, str] = field(default_factory=dict)
    epsilon: float = 0.0
    """``values``: share of uniformly random moves in :meth:`probabilities` (off-policy evaluation needs some overlap)."""
    sample_logits: bool = False
    """``logits``: probabilities are the softmax (True) or the most probable move (False)."""

    def scores(self, states_NF: Tensor) -> Tensor:
        """Q values or logits float ``[N, A]``. Raises ValueError for states of another width or that are not finite."""
        if states_NF.ndim != 2 or states_NF.shape[1] != len(self.feature_names):
            raise ValueError(
                f"states have shape {tuple(states_NF.shape)}, the policy reads {len(self.feature_names)} features"
            )
        if not bool(torch.isfinite(states_NF).all()):
            raise ValueError("states hold NaN or infinity: the policy cannot choose")
        with torch.no_grad():
            return self.net(self.standardise(states_NF.float())).mean(0)

    def greedy(self, states_NF: Tensor) -> Tensor:
        """Index of the best move, int64 ``[N]``."""
        return self.scores(states_NF).argmax(-1)

    def softmax(self, states_NF: Tensor) -> Tensor:
        """softmax of the scores ``[N, A]`` (for BC: the estimated behaviour policy)."""
        return self.scores(states_NF).softmax(-1)

    def probabilities(self, states_NF: Tensor) -> Tensor:
        if self.kind == "logits" and self.sample_logits:
            return self.softmax(states_NF)
        n = len(self.move_names)
        hard = torch.nn.functional.one_hot(self.greedy(states_NF), n).float()
        return (1 - self.epsilon) * hard + self.epsilon / n

    def save(self, path: Path) -> None:
        """Write one file (complete or not at all). Tensors and plain values only: it loads without running code."""
        blob = {
            "format": FORMAT,
            "weights": {k: v.clone() for k, v in self.net.state_dict().items()},
            "mean": self.standardise.mean_F,
            "scale": self.standardise.scale_F,
            "head": json.dumps(
                {
                    "kind": self.kind,
                    "features": self.feature_names,
                    "moves": self.move_names,
                    "hidden": self.net.hidden,
                    "members": self.net.members,
                    "meta": self.meta,
                    "epsilon": self.epsilon,
                    "sample_logits": self.sample_logits,
                }
            ),
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        torch.save(blob, temporary)
        os.replace(temporary, path)


def load_policy(path: Path) -> NetPolicy:
    """A policy that :meth:`NetPolicy.save` wrote. Raises :class:`CheckpointError` for anything else."""
    try:
        blob = torch.load(path, weights_only=True)
        if blob["format"] != FORMAT:
            raise CheckpointError(f"{path}: policy format {blob['format']}, this release reads {FORMAT}")
        head = json.loads(blob["head"])
        net = Mlp(
            len(head["features"]), len(head["moves"]), head["hidden"], members=head["members"]
        ).requires_grad_(False)
        net.load_state_dict(blob["weights"])
    except CheckpointError:
        raise
    except Exception as error:  # torch.load raises many types
        raise CheckpointError(f"{path}: not a readable policy: {type(error).__name__}: {error}") from error
    return NetPolicy(
        net,
        Standardiser(blob["mean"], blob["scale"]),
        head["kind"],
        tuple(head["features"]),
        tuple(head["moves"]),
        head["meta"],
        head["epsilon"],
        head["sample_logits"],
    )


@dataclass(frozen=True)
class FixedPolicy:
    """The same move always (ablation: the generator without a policy)."""

    move: int
    n_moves: int
    feature_names: tuple[str, ...] | None = None

    def probabilities(self, states_NF: Tensor) -> Tensor:
        out = torch.zeros(len(states_NF), self.n_moves)
        out[:, self.move] = 1
        return out


@dataclass(frozen=True)
class RandomPolicy:
    """Uniformly random moves (ablation)."""

    n_moves: int
    feature_names: tuple[str, ...] | None = None

    def probabilities(self, states_NF: Tensor) -> Tensor:
        return torch.full((len(states_NF), self.n_moves), 1 / self.n_moves)


@dataclass(frozen=True)
class RulePolicy:
    """A hand-written rule on named features (ablation): the first feature in ``rules`` that is on decides, else ``otherwise``."""

    feature_names: tuple[str, ...]
    move_names: tuple[str, ...]
    rules: Mapping[str, str]
    otherwise: str

    def __post_init__(self) -> None:
        for feature, move in [*self.rules.items(), (self.feature_names[0], self.otherwise)]:
            if feature not in self.feature_names or move not in self.move_names:
                raise ValueError(
                    f"rule {feature!r} → {move!r}: features are {self.feature_names}, moves {self.move_names}"
                )

    def probabilities(self, states_NF: Tensor) -> Tensor:
        chosen = torch.full((len(states_NF),), self.move_names.index(self.otherwise))
        for feature, move in reversed(list(self.rules.items())):
            on = states_NF[:, self.feature_names.index(feature)] > 0.5
            chosen = torch.where(on, self.move_names.index(move), chosen)
        return torch.nn.functional.one_hot(chosen, len(self.move_names)).float()


HAND_RULES: dict[str, str] = {
    "off_topic": "refocus",
    "unrelated_utterance": "refocus",
    "frustrated": "encourage",
    "uncertain": "encourage",
    "asks_reexplain": "instruct",
    "describes_confusion": "instruct",
    "made_mistake": "instruct",
}
"""The rule policy of the ablation arm for the four-move taxonomy; everything else is answered by ``ask``."""


def choose(policy: Policy, state_F: np.ndarray[Any, Any], *, seed: int) -> tuple[int, Tensor]:
    """One move drawn from the policy (certain for a greedy one), and its probabilities ``[A]``; a pure function of ``seed``."""
    p = policy.probabilities(torch.as_tensor(np.asarray(state_F, np.float32))[None])[0]
    point = derive(seed, "move") / 2**BITS
    index = int(
        torch.searchsorted(p.double().cumsum(0), torch.tensor(point, dtype=torch.float64), right=True)
    )
    return min(index, len(p) - 1), p

"""The training loop that BC, FQI and CQL share: mini-batches, Adam, finiteness at every step, early stopping.

Everything stays in a few contiguous tensors; a step is one gather, one forward, one backward and one Adam update of one vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from maieutic.latent.adam import FlatAdam
from maieutic.latent.bc import bc_loss
from maieutic.latent.cql import cql_loss, double_q_targets
from maieutic.latent.cql_step import CqlStep, target_table
from maieutic.latent.errors import DivergenceError
from maieutic.latent.fqi import fqi_loss, fqi_targets
from maieutic.latent.networks import Mlp, Standardiser
from maieutic.latent.policy import NetPolicy
from maieutic.latent.transitions import Transitions
from maieutic.seeds import derive

Learner = Literal["bc", "fqi", "cql"]


@dataclass(frozen=True, slots=True)
class FitSpec:
    """How a policy is trained. Defaults are sized for thousands of transitions."""

    hidden: tuple[int, ...] = (64, 64)
    lr: float = 1e-3
    batch_size: int = 256
    steps: int = 3_000
    """Gradient steps (FQI: of all iterations together)."""
    weight_decay: float = 1e-3
    """L2 in Adam; irrelevant features are otherwise fitted to a few thousand ±1 outcomes."""
    grad_clip: float = 10.0
    seed: int = 0
    alpha: float = 4.0
    """CQL: weight of the conservative term."""
    critics: int = 2
    target_every: int = 100
    """CQL: steps between hard copies to the target critics."""
    iterations: int = 30
    """FQI: regressions; each takes ``steps / iterations`` gradient steps."""
    beta: float = 0.0
    """BC: weight of the squared log-probabilities."""
    eval_every: int = 500
    """Steps between off-policy evaluations, when a scorer is given."""
    patience: int = 4
    """Evaluations without a better score before training stops; the best policy is returned."""


@dataclass(slots=True)
class FitLog:
    """What happened: the loss at regular steps, the validation scores, and the step that was kept."""

    learner: str
    steps: int = 0
    best_step: int = 0
    stopped_early: bool = False
    losses: list[tuple[int, float]] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)


Scorer = Callable[[NetPolicy], float]
"""Higher is better: an off-policy estimate on validation data (:func:`maieutic.latent.ope.scorer`)."""


@dataclass(slots=True)
class Batch:
    """Standardised tensors: ``both`` ``[2, N, F]`` (states, next states), ``moves`` int64, ``rewards``, ``done`` float ``[N]``."""

    both: Tensor
    moves: Tensor
    rewards: Tensor
    done: Tensor

    @property
    def x(self) -> Tensor:
        """States ``[N, F]``."""
        return self.both[0]

    @property
    def next_x(self) -> Tensor:
        """Next states ``[N, F]``."""
        return self.both[1]


def tensors(data: Transitions, standardise: Standardiser) -> Batch:
    """The whole data set as tensors (a terminal row's next state is the standardised zero vector; done masks it)."""
    both = torch.stack([torch.from_numpy(data.states), torch.from_numpy(data.next_states)])
    return Batch(
        standardise(both),
        torch.from_numpy(data.moves),
        torch.from_numpy(data.rewards),
        torch.from_numpy(data.done).float(),
    )


class Trainer:
    """One learner on one data set; :meth:`step` is a gradient step, :func:`fit` the loop around it."""

    def __init__(self, learner: Learner, data: Transitions, spec: FitSpec) -> None:
        data.check(moves=2)
        self.learner, self.spec, self.data = learner, spec, data
        self.standardise = Standardiser.fit(torch.from_numpy(data.states))
        self.all = tensors(data, self.standardise)
        members = spec.critics if learner == "cql" else 1
        self.net = Mlp(
            data.states.shape[1],
            len(data.move_names),
            spec.hidden,
            members=members,
            seed=derive(spec.seed, "weights"),
        )
        self.target = self.net.frozen() if learner == "cql" else None
        self.params = list(self.net.parameters())
        self.optimizer = FlatAdam(self.params, lr=spec.lr, weight_decay=spec.weight_decay)
        self.generator = torch.Generator().manual_seed(derive(spec.seed, "batches"))
        self.steps = 0
        self._order = torch.zeros(0, dtype=torch.int64)
        self._at = 0
        self._y: Tensor | None = None
        self.bound = data.return_bound()
        self._cql: CqlStep | None = None
        if self.target is not None:
            self.sync()

    def _rows(self) -> Tensor:
        size = min(self.spec.batch_size, len(self.data))
        if self._at + size > len(self._order):
            self._order, self._at = torch.randperm(len(self.data), generator=self.generator), 0
        rows = self._order[self._at : self._at + size]
        self._at += size
        return rows

    def loss(self, rows: Tensor) -> Tensor:
        """The objective on these rows (scalar, with gradient)."""
        a, gamma = self.all, self.data.gamma
        x, moves = a.x[rows], a.moves[rows]
        if self.learner == "bc":
            return bc_loss(self.net(x)[0], moves, beta=self.spec.beta)
        if self.learner == "fqi":
            if self._y is None:
                with torch.no_grad():
                    next_q = self.net(a.next_x)[0]
                # The first targets are the rewards alone, as for Q_0 = 0.
                next_q = next_q if self.steps else torch.zeros_like(next_q)
                self._y = fqi_targets(a.rewards, a.done, next_q, gamma=gamma, bound=self.bound)
            return fqi_loss(self.net(x)[0], moves, self._y[rows])
        assert self.target is not None
        y = double_q_targets(
            a.rewards[rows],
            a.done[rows],
            self.net(a.next_x[rows]),
            self.target(a.next_x[rows]),
            gamma=gamma,
        )
        return cql_loss(self.net(x), moves, y, alpha=self.spec.alpha).total

    def gradient(self, rows: Tensor) -> float:
        """Set the gradient of :meth:`loss` on these rows and return its value."""
        if self.target is None:
            self.optimizer.grad.zero_()
            loss = self.loss(rows)
            loss.backward()
            return loss.item()
        if self._cql is None or self._cql.n != len(rows):
            self._cql = CqlStep(self.net, len(rows), alpha=self.spec.alpha)
        a = self.all
        return self._cql(
            a.both.index_select(1, rows), a.moves.index_select(0, rows), self._table.index_select(0, rows)
        ).item()

    def step(self) -> float:
        """One gradient step; returns the loss before it. Raises :class:`DivergenceError` before weights can become NaN."""
        rows = self._rows()
        value = self.gradient(rows)
        gradient = self.optimizer.grad
        norm = gradient.norm().item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            self._diverged(value, norm, rows)
        if norm > self.spec.grad_clip:
            gradient.mul_(self.spec.grad_clip / norm)
        self.optimizer.step()
        self.steps += 1
        every = max(1, self.spec.steps // self.spec.iterations)
        if self.learner == "fqi" and self.steps % every == 0:
            self._y = None
        if self.target is not None and self.steps % self.spec.target_every == 0:
            self.sync()
        return value

    def sync(self) -> None:
        """Copy the critics to the target critics."""
        assert self.target is not None
        self.target.load_state_dict(self.net.state_dict())
        self._table = target_table(
            self.all.rewards, self.all.done, self.target(self.all.next_x), gamma=self.data.gamma
        )

    def policy(self) -> NetPolicy:
        """The present policy, with its own copy of the weights."""
        kind: Literal["logits", "values"] = "logits" if self.learner == "bc" else "values"
        return NetPolicy(
            self.net.frozen(),
            self.standardise,
            kind,
            self.data.feature_names,
            self.data.move_names,
            {**self.data.meta, "learner": self.learner},
        )

    def _diverged(self, loss: float, norm: float, rows: Tensor) -> None:
        x = self.all.x[rows]
        worst = int(x.abs().max(0).values.nan_to_num(nan=torch.inf).argmax())
        raise DivergenceError(
            f"{self.learner} at step {self.steps}: loss {loss}, gradient norm {norm}; largest standardised input is feature "
            f"{self.data.feature_names[worst]!r} ({float(x[:, worst].abs().max()):g}), rewards up to "
            f"{float(self.all.rewards.abs().max()):g}: lower lr ({self.spec.lr:g}), or repair that feature"
        )


def fit(
    learner: Learner, data: Transitions, spec: FitSpec, *, score: Scorer | None = None
) -> tuple[NetPolicy, FitLog]:
    """Train and return the best policy (with ``score``) or the last one. Same inputs and seed give the same policy."""
    trainer, log = Trainer(learner, data, spec), FitLog(learner)
    best: NetPolicy | None = None
    best_score, waited = -math.inf, 0
    for step in range(1, spec.steps + 1):
        loss = trainer.step()
        if step == 1 or step % 100 == 0 or step == spec.steps:
            log.losses.append((step, loss))
        if score is not None and (step % spec.eval_every == 0 or step == spec.steps):
            policy = trainer.policy()
            value = score(policy)
            if not math.isfinite(value):
                raise DivergenceError(f"{learner} at step {step}: the off-policy estimate is {value}")
            log.scores.append((step, value))
            if value > best_score:
                best, best_score, waited, log.best_step = policy, value, 0, step
            else:
                waited += 1
                if waited >= spec.patience:
                    log.stopped_early = True
                    break
    log.steps = trainer.steps
    if best is None:
        best, log.best_step = trainer.policy(), trainer.steps
    return best, log


def greedy_agreement(a: NetPolicy, b: NetPolicy, states: Sequence[Sequence[float]] | Tensor) -> float:
    """Share of states ``[N, F]`` in which two policies choose the same move."""
    x = torch.as_tensor(states, dtype=torch.float32)
    return float((a.greedy(x) == b.greedy(x)).float().mean())

r"""Off-policy evaluation: what would a policy earn, judged from logged data alone, with intervals.

**FQE** (fitted Q-evaluation, Le et al. 2019) on a linear model with fixed features φ, where each step is a ridge regression in
closed form, with targets clipped to the possible returns, so that it neither diverges nor needs tuning::

    θ ← argmin_θ Σ_i w_i (φ(s_i, a_i)·θ − r_i − γ (1 − done_i) Σ_a π(a|s'_i) φ(s'_i, a)·θ_old)² + λ‖θ‖²
    estimate = mean over first states of Σ_a π(a|s) φ(s, a)·θ

φ(s, a) is ``[1, x, relu(R x + c)]`` of the standardised state x in the block of move a, with R, c drawn once from a seed.

**WIS** (weighted per-decision importance sampling, Precup 2000)::

    V = Σ_t γ^t Σ_e ρ_{e,t} r_{e,t} / Σ_e ρ_{e,t},     ρ_{e,t} = Π_{j≤t} π(a_j|s_j) / μ(a_j|s_j)

over all episodes e; one that is over keeps its last ρ and earns 0. μ is a behaviour policy estimated by cloning.

Intervals are percentile bootstraps over whole *episodes* (rows of one dialogue are not independent), problem-clustered when
``cluster="problem"``. Only episodes that begin at turn 0 count as starts: re-simulated continuations carry information about
transitions, not about where dialogues begin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maieutic.latent.errors import DivergenceError, LatentDataError
from maieutic.latent.fit import Scorer
from maieutic.latent.networks import Standardiser
from maieutic.latent.policy import NetPolicy, Policy
from maieutic.latent.transitions import Transitions


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval; ``effective`` is the effective number of episodes (WIS), else the number of starts."""

    value: float
    low: float
    high: float
    level: float
    effective: float
    method: str


@dataclass(frozen=True, slots=True)
class FqeSpec:
    hidden: int = 48
    """Random ReLU features (0: linear in the state)."""
    ridge: float = 1e-3
    """λ, times the number of rows."""
    iterations: int = 60
    """At least the longest dialogue for an exact fixed point; stops when θ no longer moves."""
    bootstrap: int = 100
    level: float = 0.95
    cluster: Literal["episode", "problem"] = "episode"
    seed: int = 0


def _features(x_NF: Tensor, hidden: int, seed: int) -> Tensor:
    n, f = x_NF.shape
    parts = [torch.ones(n, 1, dtype=torch.float64), x_NF]
    if hidden:
        g = torch.Generator().manual_seed(seed)
        r = torch.randn(f, hidden, generator=g, dtype=torch.float64) / math.sqrt(f)
        c = torch.randn(hidden, generator=g, dtype=torch.float64)
        parts.append((x_NF @ r + c).relu())
    return torch.cat(parts, 1)


def _weights(data: Transitions, spec: FqeSpec) -> npt.NDArray[np.float64]:
    """Multiplicity of every row in every resample ``[B + 1, N]``; the first is the sample itself."""
    unit = data.episodes if spec.cluster == "episode" else data.problems
    names, inverse = np.unique(unit, return_inverse=True)
    rng = np.random.default_rng(spec.seed)
    counts = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=spec.bootstrap)
    return np.concatenate([np.ones((1, len(data))), counts[:, inverse]]).astype(np.float64)


def fqe(data: Transitions, policy: Policy, spec: FqeSpec | None = None) -> Estimate:
    """The policy's discounted value by FQE with a bootstrap interval.

    Raises :class:`LatentDataError` for bad data or no episode that begins at turn 0, :class:`DivergenceError` for values that are
    not finite. Where the policy leaves the data the estimate extrapolates: read it beside WIS and the coverage statistics.
    """
    spec = spec or FqeSpec()
    data.check()
    starts = data.starts()
    starts = starts[data.turns[starts] == 0]
    if not len(starts):
        raise LatentDataError(
            "no episode begins at turn 0: FQE has no first states (re-simulated continuations alone)"
        )
    states, following = torch.from_numpy(data.states), torch.from_numpy(data.next_states)
    standardise = Standardiser.fit(states)
    phi = _features(standardise(states).double(), spec.hidden, spec.seed)
    phi_next = _features(standardise(following).double(), spec.hidden, spec.seed)
    live = torch.from_numpy(~data.done).double()
    pi_next = policy.probabilities(following).double() * live[:, None] * data.gamma
    pi_start = policy.probabilities(states[starts]).double()
    weights = torch.from_numpy(_weights(data, spec))
    rewards, moves = torch.from_numpy(data.rewards).double(), torch.from_numpy(data.moves)
    values = _iterate(
        phi, phi_next, pi_next, rewards, moves, weights, len(data.move_names), data.return_bound(), spec
    )
    # values [B, A, D]: every resample's model at its own resampled first states.
    q_start = torch.einsum("sd,bad->bsa", phi[starts], values)
    v_start = (q_start * pi_start).sum(-1)
    w_start = weights[:, starts]
    estimate = (v_start * w_start).sum(1) / w_start.sum(1).clamp_min(1e-12)
    low, high = _interval(estimate[1:].numpy(), spec.level, float(estimate[0]))
    return Estimate(float(estimate[0]), low, high, spec.level, float(len(starts)), "fqe")


def _iterate(
    phi: Tensor,
    phi_next: Tensor,
    pi_next: Tensor,
    rewards: Tensor,
    moves: Tensor,
    weights: Tensor,
    n_moves: int,
    bound: float,
    spec: FqeSpec,
) -> Tensor:
    """θ ``[B, A, D]`` of every resample: the ridge solution operator of each move is factorised once, then iterated."""
    b, d = len(weights), phi.shape[1]
    rows = [torch.nonzero(moves == a).flatten() for a in range(n_moves)]
    eye = torch.eye(d, dtype=torch.float64)
    factors, weighted = [], []
    for r in rows:
        w, x = weights[:, r], phi[r]
        outer = (x[:, :, None] * x[:, None, :]).reshape(len(r), d * d)
        gram = (w @ outer).reshape(b, d, d)
        lam = spec.ridge * w.sum(1).clamp_min(1.0)
        factors.append(torch.linalg.cholesky(gram + lam[:, None, None] * eye))
        weighted.append((w, x))
    theta = torch.zeros(b, n_moves, d, dtype=torch.float64)
    for _ in range(spec.iterations):
        q_next = torch.einsum("nd,bad->bna", phi_next, theta)
        # No policy is worth more than the return's bound: clipping there is what keeps extrapolation from feeding itself.
        y = rewards + (q_next * pi_next).sum(-1).clamp(-bound, bound)
        new = torch.stack(
            [
                torch.cholesky_solve(((w * y[:, r]) @ x)[..., None], f)[..., 0]
                for r, f, (w, x) in zip(rows, factors, weighted, strict=True)
            ],
            1,
        )
        moved = float((new - theta).abs().max())
        theta = new
        if not math.isfinite(moved):
            raise DivergenceError(
                "FQE gives values that are not finite: states or rewards are beyond float64's range"
            )
        if moved < 1e-9:
            break
    return theta


def wis(
    data: Transitions,
    policy: Policy,
    behaviour: NetPolicy,
    *,
    bootstrap: int = 200,
    level: float = 0.95,
    clip: float = 1e-2,
    seed: int = 0,
) -> Estimate:
    """The policy's value by weighted per-decision importance sampling.

    ``behaviour``: a cloned policy (its softmax is μ), floored at ``clip``. ``effective`` is (Σρ)²/Σρ² at the last step: below
    ten or so the interval means little, and a deterministic policy that the data seldom follow has hardly any.
    """
    data.check()
    starts = data.starts()
    keep = data.turns[starts] == 0
    if not keep.any():
        raise LatentDataError("no episode begins at turn 0: importance sampling needs whole episodes")
    lengths = np.diff(np.append(starts, len(data)))
    rows = torch.arange(len(data))
    states, moves = torch.from_numpy(data.states), torch.from_numpy(data.moves)
    mu = behaviour.softmax(states)[rows, moves].clamp_min(clip).double().numpy()
    pi = policy.probabilities(states)[rows, moves].double().numpy()
    e, t = int(keep.sum()), int(lengths[keep].max())
    ratio, reward = np.ones((e, t)), np.zeros((e, t))
    for i, (s, n) in enumerate(zip(starts[keep], lengths[keep], strict=True)):
        ratio[i, :n] = pi[s : s + n] / mu[s : s + n]
        reward[i, :n] = data.rewards[s : s + n]
    rho = ratio.cumprod(1)
    discounted = reward * data.gamma ** np.arange(t)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(e, np.full(e, 1 / e), size=bootstrap).astype(np.float64)
    weights = np.concatenate([np.ones((1, e)), counts])
    below = weights @ rho
    above = weights @ (rho * discounted)
    v = np.where(below > 0, above / np.where(below > 0, below, 1), 0).sum(1)
    last = rho[:, -1]
    effective = float(last.sum() ** 2 / (last**2).sum()) if (last > 0).any() else 0.0
    if effective == 0.0:
        # No logged episode follows the policy to its end: nothing is known, and the interval says so.
        bound = float(np.abs(data.rewards).max())
        return Estimate(float(v[0]), -bound, bound, level, 0.0, "wis")
    low, high = _interval(v[1:], level, float(v[0]))
    return Estimate(float(v[0]), low, high, level, effective, "wis")


def _interval(samples: npt.NDArray[np.float64], level: float, value: float) -> tuple[float, float]:
    if not len(samples):
        return value, value
    tail = (1 - level) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)


def scorer(validation: Transitions, *, spec: FqeSpec | None = None) -> Scorer:
    """Early stopping by FQE on validation problems: the point estimate (no bootstrap; it is called often)."""
    base = spec or FqeSpec()
    quick = FqeSpec(base.hidden, base.ridge, base.iterations, 0, base.level, base.cluster, base.seed)

    def score(policy: NetPolicy) -> float:
        return fqe(validation, policy, quick).value

    return score

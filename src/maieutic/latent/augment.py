"""Optimism-guided augmentation (the paper's Algorithm 2), and the controls that it lacks.

Where a learned Q-function holds another move for better than the logged one, the dialogue is continued from that very state
with that move, M times; D⁺ is D and the new rows. No prompt asks the dialogue to succeed. Controls have the same budget of
N states × M continuations:

- ``optimistic``    states with argmax_a Q(s, a) ≠ logged move, largest gain Q(s, a*) − Q(s, a_logged) first; move a*
- ``random_state``  any states, drawn at random; move a*                              (is it the *choice of states* that helps?)
- ``random_move``   the states of ``optimistic``; a random move other than the logged  (is it Q's *choice of move*?)

Ranking by gain alone has a flaw that the constructed classroom shows: with a penalty at the turn limit the largest gains all lie in
the last turns, so that openings, where every dialogue passes, are never explored and a conservative learner keeps the logged moves
there. ``spread="turn"`` (the default) therefore takes the best of every turn, in proportion to how often Q and log differ there;
``spread="none"`` is the published ranking.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from maieutic.latent.errors import LatentDataError
from maieutic.latent.policy import NetPolicy
from maieutic.latent.transitions import Ints, Transitions, concatenate
from maieutic.seeds import derive

How = Literal["optimistic", "random_state", "random_move"]
Spread = Literal["turn", "none"]
HOWS: tuple[How, ...] = ("optimistic", "random_state", "random_move")


@dataclass(frozen=True, slots=True)
class Branch:
    """One state to branch off from: row of D, episode and tutor turn, the logged move, the move to try, Q's expected gain."""

    row: int
    episode: str
    turn: int
    logged: int
    move: int
    gain: float


def select(
    data: Transitions,
    q: NetPolicy,
    n: int,
    *,
    how: How = "optimistic",
    spread: Spread = "turn",
    per_episode: int = 0,
    tried: Collection[int] = (),
    seed: int = 0,
) -> list[Branch]:
    """At most ``n`` branches, best first. ``per_episode``: most branches of one dialogue (0: no limit).
    ``tried``: rows that an earlier round branched off from; rows of D keep their numbers in D⁺.

    Fewer than ``n`` come back where Q agrees with the log nearly everywhere. Raises :class:`LatentDataError` when no state
    qualifies, ValueError for a policy without values, or for ``n`` below 1.
    """
    if n < 1:
        raise ValueError(f"{n} states to branch off from: at least 1 is needed")
    if q.kind != "values":
        raise ValueError("augmentation needs a Q-function (FQI or CQL), not a cloned policy")
    if how not in HOWS:
        raise ValueError(f"how is {how!r}: one of {', '.join(HOWS)}")
    values = q.scores(torch.from_numpy(data.states)).numpy()
    rows = np.arange(len(data))
    best = values.argmax(1)
    gain = values[rows, best] - values[rows, data.moves]
    rng = np.random.default_rng(derive(seed, "augment", how))
    if how == "random_state":
        order = rng.permutation(len(data))
        order = order[~np.isin(order, list(tried))]
    else:
        differs = np.flatnonzero((best != data.moves) & ~np.isin(rows, list(tried)))
        order = differs[np.argsort(-gain[differs], kind="stable")]
        if spread == "turn":
            order = _spread(order, data.turns[order])
    if not len(order):
        raise LatentDataError(
            "Q's best move is the logged one in every state that was not tried: there is nothing to explore"
        )
    chosen: list[Branch] = []
    taken: dict[str, int] = {}
    for row in order:
        episode = str(data.episodes[row])
        if per_episode and taken.get(episode, 0) >= per_episode:
            continue
        taken[episode] = taken.get(episode, 0) + 1
        logged, move = int(data.moves[row]), int(best[row])
        if how == "random_move":
            others = [a for a in range(len(data.move_names)) if a != logged]
            move = int(rng.choice(others))
        delta = float(values[row, move] - values[row, logged])
        chosen.append(Branch(int(row), episode, int(data.turns[row]), logged, move, delta))
        if len(chosen) == n:
            break
    return chosen


def _spread(order: Ints, turns: Ints) -> Ints:
    """Reorder so that every prefix holds the turns in proportion, best first inside a turn.

    The k-th best of a turn with c candidates gets the position (k − ½)/c; ties go to the earlier rank.
    """
    position = np.zeros(len(order))
    for turn in np.unique(turns):
        here = np.flatnonzero(turns == turn)
        position[here] = (np.arange(len(here)) + 0.5) / len(here)
    return order[np.argsort(position, kind="stable")]


@dataclass(frozen=True, slots=True)
class AugmentReport:
    """What an augmentation added: the paper's circular argument (Q's picks prove Q) is replaced by these counts and controls."""

    how: str
    states: int
    episodes: int
    rows: int
    success_share: float
    """Of the new dialogues."""
    success_share_before: float
    """Of the dialogues in D that the branches came from."""
    mean_gain: float
    """Mean expected gain at the branches."""
    gain_outcome_correlation: float | None
    """Correlation of expected gain and success of the continuations; None where one of them does not vary."""


def report(
    how: str, data: Transitions, branches: list[Branch], new: Transitions, parents: dict[str, int]
) -> AugmentReport:
    """Summarise. ``parents``: branch index of every new episode id."""
    starts = new.starts()
    ends = np.append(starts[1:], len(new)) - 1
    success = (new.rewards[ends] > 0).astype(float)
    gains = np.array([branches[parents[str(e)]].gain for e in new.episodes[starts]])
    varies = len(success) > 1 and success.std() > 0 and gains.std() > 0
    old_starts = data.starts()
    old_ends = np.append(old_starts[1:], len(data)) - 1
    before = dict(zip(data.episodes[old_starts].tolist(), (data.rewards[old_ends] > 0).tolist(), strict=True))
    return AugmentReport(
        how,
        len(branches),
        len(starts),
        len(new),
        float(success.mean()) if len(success) else 0.0,
        float(np.mean([before[b.episode] for b in branches])),
        float(np.mean([b.gain for b in branches])),
        float(np.corrcoef(gains, success)[0, 1]) if varies else None,
    )


def augmented(data: Transitions, new: Transitions) -> Transitions:
    """D⁺ = D ∪ new. New episodes begin at their branch: the rows before it are in D already and are not repeated."""
    return concatenate(data, new)

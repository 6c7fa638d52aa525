"""The table that learners train on: (S, A, R, S′, done) with the episode and problem of every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from maieutic.latent.errors import LatentDataError
from maieutic.seeds import derive

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Transitions:
    """Rows in time order inside each episode, episodes contiguous. ``N`` rows, ``F`` features.

    A terminal row's ``next_states`` mean nothing and are zeros. ``episodes`` and ``problems`` are ids of type str.
    """

    states: Floats
    moves: Ints
    rewards: Floats
    next_states: Floats
    done: npt.NDArray[np.bool_]
    episodes: npt.NDArray[np.str_]
    problems: npt.NDArray[np.str_]
    turns: Ints
    """Index of the tutor turn inside its dialogue, from 0."""
    feature_names: tuple[str, ...]
    move_names: tuple[str, ...]
    gamma: float = 0.9
    meta: dict[str, str] = field(default_factory=dict)
    """Provenance: feature set, taxonomy, reward kind; written to the file."""

    def __len__(self) -> int:
        return len(self.moves)

    @property
    def n_episodes(self) -> int:
        return len(np.unique(self.episodes))

    def select(self, rows: npt.NDArray[np.bool_] | Ints) -> Transitions:
        """The rows of a mask or index array (whole episodes must be chosen together for episode statistics)."""
        return Transitions(
            self.states[rows],
            self.moves[rows],
            self.rewards[rows],
            self.next_states[rows],
            self.done[rows],
            self.episodes[rows],
            self.problems[rows],
            self.turns[rows],
            self.feature_names,
            self.move_names,
            self.gamma,
            dict(self.meta),
        )

    def starts(self) -> npt.NDArray[np.intp]:
        """Row of the first transition of each episode, in file order."""
        if not len(self):
            return np.zeros(0, np.intp)
        new = np.ones(len(self), bool)
        new[1:] = self.episodes[1:] != self.episodes[:-1]
        return np.flatnonzero(new)

    def returns(self) -> npt.NDArray[np.float64]:
        """Discounted return Σ γ^t r_t of each episode, counted from its first row; in the order of :meth:`starts`."""
        starts = self.starts()
        lengths = np.diff(np.append(starts, len(self)))
        steps = np.arange(len(self)) - np.repeat(starts, lengths)
        return np.add.reduceat(self.rewards * self.gamma**steps, starts) if len(starts) else np.zeros(0)

    def return_bound(self) -> float:
        """Most |return| that is possible: the largest |reward| when rewards are terminal only, else that over 1 − γ."""
        largest = float(np.abs(self.rewards).max()) if len(self) else 0.0
        terminal_only = not (self.rewards[~self.done] != 0).any()
        return largest if terminal_only else largest / max(1 - self.gamma, 1e-6)

    def check(self, *, moves: int = 1) -> None:
        """Raise :class:`LatentDataError` for what no learner survives; ``moves``: least number of different moves needed."""
        n, f = len(self), len(self.feature_names)
        if not n:
            raise LatentDataError(
                "the data set is empty: no episode survived labelling (see the drop counts)"
            )
        shapes = {"states": (n, f), "next_states": (n, f)}
        for name, want in shapes.items():
            have = getattr(self, name).shape
            if have != want:
                raise LatentDataError(f"{name} have shape {have}, {want} is expected")
        for name in ("rewards", "done", "episodes", "problems", "turns"):
            if len(getattr(self, name)) != n:
                raise LatentDataError(f"{name} has {len(getattr(self, name))} rows, moves have {n}")
        if not 0 < self.gamma < 1:
            raise LatentDataError(
                f"gamma is {self.gamma}: a discount between 0 and 1 (exclusive) is expected"
            )
        # Terminal next states too: γ (1 − done) · NaN is NaN.
        odd = ~np.isfinite(self.states) | ~np.isfinite(self.next_states)
        if odd.any():
            names = [self.feature_names[i] for i in np.flatnonzero(odd.any(0))]
            rows = int(odd.any(1).sum())
            raise LatentDataError(
                f"features {names} hold NaN or infinity ({rows} rows): drop or relabel those episodes"
            )
        if not np.isfinite(self.rewards).all():
            raise LatentDataError("rewards hold NaN or infinity: an episode without a reward must be dropped")
        if self.moves.min() < 0 or self.moves.max() >= len(self.move_names):
            raise LatentDataError(
                f"moves lie in [{self.moves.min()}, {self.moves.max()}], the taxonomy has {len(self.move_names)} moves"
            )
        self._check_done()
        present = np.unique(self.moves)
        if len(present) < moves:
            names = [self.move_names[i] for i in present]
            raise LatentDataError(
                f"the data hold only the move {names}: at least {moves} different moves are needed to learn a choice "
                "(collect with a more varied tutor, or check the labelling)"
            )

    def _check_done(self) -> None:
        starts = self.starts()
        ids = self.episodes[starts]
        unique, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            raise LatentDataError(
                f"episode {str(unique[counts > 1][0])!r} occurs in two places: rows must be contiguous"
            )
        ends = np.append(starts[1:], len(self)) - 1
        is_end = np.zeros(len(self), bool)
        is_end[ends] = True
        early, open_ = self.done & ~is_end, is_end & ~self.done
        if early.any():
            i = int(np.flatnonzero(early)[0])
            raise LatentDataError(
                f"episode {str(self.episodes[i])!r} is done at turn {self.turns[i]} but has later rows: contradictory done flags"
            )
        if open_.any():
            i = int(np.flatnonzero(open_)[0])
            raise LatentDataError(
                f"episode {str(self.episodes[i])!r} ends at turn {self.turns[i]} without done: contradictory done flags"
            )
        # Off-policy evaluation goes back turn by turn: a gap or a step back would pair a state with the wrong successor.
        out_of_order = ~is_end[:-1] & (np.diff(self.turns) != 1)
        if out_of_order.any() or (self.turns < 0).any():
            i = int(np.flatnonzero(out_of_order)[0]) if out_of_order.any() else int(self.turns.argmin())
            raise LatentDataError(
                f"episode {str(self.episodes[i])!r}, turn {self.turns[i]}: turns must count up by one, from 0 or more"
            )
        moved = ~is_end[:-1] & (self.problems[:-1] != self.problems[1:])
        if moved.any():
            i = int(np.flatnonzero(moved)[0])
            raise LatentDataError(
                f"episode {str(self.episodes[i])!r} changes its problem from {str(self.problems[i])!r} to "
                f"{str(self.problems[i + 1])!r}: a split by problem would tear it"
            )
        follows = np.isclose(self.next_states[:-1], self.states[1:], rtol=1e-5, atol=1e-6).all(1)
        torn = ~is_end[:-1] & ~follows
        if torn.any():
            i = int(np.flatnonzero(torn)[0])
            raise LatentDataError(
                f"episode {str(self.episodes[i])!r}, turn {self.turns[i]}: its next state is not the state of turn "
                f"{self.turns[i + 1]} ({int(torn.sum())} such rows): columns or rows were mixed up"
            )


def concatenate(*parts: Transitions) -> Transitions:
    """D ∪ D′ …; feature names, moves and γ must agree, and no episode id may occur twice."""
    first = parts[0]
    for other in parts[1:]:
        for name in ("feature_names", "move_names", "gamma"):
            if getattr(other, name) != getattr(first, name):
                raise LatentDataError(
                    f"data sets differ in {name}: {getattr(first, name)} and {getattr(other, name)}"
                )

    def joined(column: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(p, column) for p in parts])

    out = Transitions(
        joined("states"),
        joined("moves"),
        joined("rewards"),
        joined("next_states"),
        joined("done"),
        joined("episodes"),
        joined("problems"),
        joined("turns"),
        first.feature_names,
        first.move_names,
        first.gamma,
        dict(first.meta),
    )
    if len(out):
        out._check_done()
    return out


def split_by_problem(
    data: Transitions, share: float, seed: int, *, problems: Sequence[str] | None = None
) -> tuple[Transitions, Transitions]:
    """(train, validation): no problem occurs in both. Problems go to validation in the order of a hash of (seed, id).

    ``share``: of the problems (at least one on each side). ``problems``: exactly these for validation instead.
    """
    ids = sorted(set(data.problems.tolist()))
    if problems is None:
        if len(ids) < 2:
            raise LatentDataError(f"the data hold {len(ids)} problem(s): a split by problem needs at least 2")
        k = min(max(1, round(share * len(ids))), len(ids) - 1)
        problems = sorted(ids, key=lambda p: derive(seed, "latent split", p))[:k]
    chosen = np.isin(data.problems, list(problems))
    return data.select(~chosen), data.select(chosen)

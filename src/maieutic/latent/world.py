"""A small classroom with a known optimum: a Markov decision process of a student's mood and progress.

It serves three ends: learners and estimators are held against exact values, the rule-driven student of
:mod:`maieutic.latent.rule_roles` follows the same law in words, and the documentation has something to reason about.

The student is *calm*, *confused*, *frustrated* or *distracted* and has understood ``p`` of ``steps`` ideas. Each mood has one
fitting move (ask, instruct, encourage, refocus). A calm or confused student who gets the fitting move understands one more idea
with probability ``p_right``; frustration and distraction first have to be met by the fitting move, which makes the student calm.
A move that does not fit rarely helps (``p_wrong``) and mostly sours the mood. Instructing a calm student *seems* good, it
moves on with ``p_tell``, but it leaves the student distracted or frustrated half of the time: the myopic choice is not the best
one. At ``p = steps`` the problem is solved (+1); after ``limit`` tutor turns the dialogue ends (−1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from maieutic.latent.transitions import Transitions

MOODS = ("calm", "confused", "frustrated", "distracted")
MOVES = ("instruct", "encourage", "refocus", "ask")
FITTING = {"calm": "ask", "confused": "instruct", "frustrated": "encourage", "distracted": "refocus"}
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """The process. A state is (mood, progress, turn); states are numbered ``(turn · steps + progress) · 4 + mood``."""

    steps: int = 3
    limit: int = 10
    gamma: float = 0.9
    p_right: float = 0.85
    p_wrong: float = 0.1
    p_tell: float = 0.5
    noise: int = 2
    """Features that say nothing (fair coins)."""

    @property
    def n_states(self) -> int:
        return self.limit * self.steps * 4

    @property
    def feature_names(self) -> tuple[str, ...]:
        return (*MOODS, "progress", "turn", *(f"noise_{i}" for i in range(self.noise)))

    def outcome(self, mood: int, move: int) -> tuple[float, Array]:
        """(probability of one more idea, distribution of the next mood ``[4]``)."""
        name, act = MOODS[mood], MOVES[move]
        if act == FITTING[name]:
            if name in ("frustrated", "distracted"):
                return 0.0, np.array([0.9, 0.1, 0.0, 0.0])
            return self.p_right, np.array([0.6, 0.25, 0.05, 0.1])
        if name == "calm" and act == "instruct":
            return self.p_tell, np.array([0.2, 0.1, 0.35, 0.35])
        if name in ("frustrated", "distracted"):
            return 0.0, np.array([0.05, 0.05, 0.5, 0.4])
        return self.p_wrong, np.array([0.2, 0.3, 0.3, 0.2])

    @cached_property
    def model(self) -> tuple[Array, Array, Array]:
        """(P ``[S, A, S]``, expected reward ``[S, A]``, first-state distribution ``[S]``). Rows of P lack what ends a dialogue."""
        n = self.n_states
        p, r = np.zeros((n, 4, n)), np.zeros((n, 4))
        for turn in range(self.limit):
            for progress in range(self.steps):
                for mood in range(4):
                    s = (turn * self.steps + progress) * 4 + mood
                    for move in range(4):
                        gain, moods = self.outcome(mood, move)
                        for more, chance in ((1, gain), (0, 1 - gain)):
                            if progress + more == self.steps:
                                r[s, move] += chance
                            elif turn + 1 == self.limit:
                                r[s, move] -= chance
                            else:
                                to = ((turn + 1) * self.steps + progress + more) * 4
                                p[s, move, to : to + 4] += chance * moods
        start = np.zeros(n)
        start[:4] = (0.25, 0.35, 0.2, 0.2)
        return p, r, start

    def q_of(self, policy_SA: Array) -> Array:
        """Exact Q ``[S, A]`` of a policy given as probabilities ``[S, A]``."""
        p, r, _ = self.model
        q = np.zeros_like(r)
        for _ in range(self.limit):
            q = r + self.gamma * p @ (policy_SA * q).sum(1)
        return q

    def value_of(self, policy_SA: Array) -> float:
        """Exact expected discounted return from the first-state distribution."""
        return float(self.model[2] @ (policy_SA * self.q_of(policy_SA)).sum(1))

    @cached_property
    def optimal(self) -> Array:
        """An optimal policy as probabilities ``[S, A]`` (one-hot)."""
        p, r, _ = self.model
        q = np.zeros_like(r)
        for _ in range(self.limit):
            q = r + self.gamma * p @ q.max(1)
        return np.eye(4)[q.argmax(1)]

    def features(self, states: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.float32]:
        """Feature rows ``[N, F]`` of states ``[N]``; the noise columns are drawn from ``rng``."""
        mood, rest = states % 4, states // 4
        progress, turn = rest % self.steps, rest // self.steps
        out = np.zeros((len(states), len(self.feature_names)), np.float32)
        out[np.arange(len(states)), mood] = 1
        out[:, 4] = progress
        out[:, 5] = turn + 1
        out[:, 6:] = rng.integers(0, 2, (len(states), self.noise))
        return out

    def tabulate(self, choose_probabilities: object, *, seed: int = 0) -> Array:
        """A policy over features as probabilities ``[S, A]``, noise columns averaged over 8 draws."""
        import torch

        rng = np.random.default_rng(seed)
        every = np.arange(self.n_states)
        probabilities = choose_probabilities.probabilities  # type: ignore[attr-defined]
        draws = [probabilities(torch.from_numpy(self.features(every, rng))).numpy() for _ in range(8)]
        return np.mean(draws, axis=0).astype(np.float64)

    def roll(
        self,
        policy_SA: Array,
        n: int,
        rng: np.random.Generator,
        *,
        start: npt.NDArray[np.int64] | None = None,
        first_move: npt.NDArray[np.int64] | None = None,
        prefix: str = "e",
    ) -> tuple[Transitions, npt.NDArray[np.int64]]:
        """``n`` episodes (from the first-state distribution, or one from each of ``start`` with ``first_move`` forced), as
        transitions, and the state number of every row."""
        p, r, first = self.model
        state = rng.choice(self.n_states, n, p=first) if start is None else start.copy()
        alive, rows = np.arange(n), []
        t = 0
        while len(alive):
            probabilities = policy_SA[state]
            move = (probabilities.cumsum(1) > rng.random((len(state), 1))).argmax(1)
            if t == 0 and first_move is not None:
                move = first_move.copy()
            stay = p[state, move]
            cumulative = stay.cumsum(1)
            draw = rng.random(len(state))
            ends = draw >= cumulative[:, -1]
            nxt = np.where(ends, 0, (cumulative > draw[:, None]).argmax(1))
            # At the last turn both endings are possible: solved with the probability that the expected reward implies.
            last = state // (4 * self.steps) == self.limit - 1
            solved = np.where(last, rng.random(len(state)) < (r[state, move] + 1) / 2, ends)
            reward = np.where(ends, np.where(solved, 1.0, -1.0), 0.0)
            rows.append((alive, np.full(len(alive), t), state, move, reward, nxt, ends))
            alive, state, t = alive[~ends], nxt[~ends], t + 1
        columns = [np.concatenate(c) for c in zip(*rows, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        episode, turn, state, move, reward, nxt, ends = (c[order] for c in columns)
        x = self.features(state, rng)
        following = np.zeros_like(x)
        following[:-1] = x[1:]
        following[ends] = 0
        ids = np.char.add(prefix, episode.astype(np.str_))
        data = Transitions(
            x,
            move.astype(np.int64),
            reward.astype(np.float32),
            following,
            ends,
            ids,
            np.char.add("p", (episode % 10).astype(np.str_)),
            turn.astype(np.int64),
            self.feature_names,
            MOVES,
            self.gamma,
        )
        return data, state


def poor_policy(world: World, *, instruct: float = 0.55) -> Array:
    """A behaviour policy that instructs mostly, whatever the mood, and does the rest at random: ``[S, A]``."""
    rest = (1 - instruct) / 3
    return np.tile(np.array([instruct, rest, rest, rest]), (world.n_states, 1))

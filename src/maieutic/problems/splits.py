"""Disjoint seeded splits, and the order in which training visits its problems.

Both are pure functions of seeds and texts: a split survives reordering of the file and other changes of the recipe, and the
problems of a step follow from the step's number alone, so that a resumed run needs nothing else.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maieutic.problems.schema import ProblemPair


def text_key(text: str) -> str:
    """What makes two problem texts the same: letters and numbers, whatever the case and spacing."""
    return " ".join(text.split()).casefold()


def _rank(pair: ProblemPair, seed: int) -> tuple[str, str]:
    digest = hashlib.sha256(f"{seed}\x00{text_key(pair.source.text)}".encode()).hexdigest()
    return digest, pair.id


@dataclass(frozen=True, slots=True)
class Split:
    """Train and held-out pairs in file order, and how many were dropped because they share a text with held-out ones."""

    train: list[ProblemPair]
    held_out: list[ProblemPair]
    overlap: int


def split_pairs(
    pairs: Sequence[ProblemPair],
    size: int,
    seed: int,
    eligible: Callable[[ProblemPair], bool] = lambda pair: True,
) -> Split:
    """Hold out ``size`` pairs (fewer if there are not as many eligible ones); the rest is for training.

    Pairs are taken in the order of a hash of (seed, source text), so that whether a pair is held out hardly depends on which
    other pairs there are. No text of a held-out pair, source or variant, occurs in training.
    """
    chosen: set[str] = set()
    texts: set[str] = set()
    for pair in sorted(pairs, key=lambda p: _rank(p, seed)):
        if len(chosen) == size:
            break
        if text_key(pair.source.text) not in texts and eligible(pair):
            chosen.add(pair.id)
            texts.add(text_key(pair.source.text))
    held_out = [p for p in pairs if p.id in chosen]
    train, overlap = drop_overlap([p for p in pairs if p.id not in chosen], held_out)
    return Split(train, held_out, overlap)


def drop_overlap(
    train: Sequence[ProblemPair], held_out: Sequence[ProblemPair]
) -> tuple[list[ProblemPair], int]:
    """Training pairs that share no text, source or variant, with a held-out pair; and how many did."""
    texts = {t for p in held_out for t in _texts(p)}
    kept = [p for p in train if texts.isdisjoint(_texts(p))]
    return kept, len(train) - len(kept)


def _texts(pair: ProblemPair) -> set[str]:
    return {text_key(p.text) for p in (pair.source, pair.transfer) if p is not None}


def take(pairs: Sequence[ProblemPair], size: int, seed: int) -> list[ProblemPair]:
    """``size`` pairs chosen by the same hash, in file order: a larger ``size`` keeps every pair of a smaller one."""
    chosen = {p.id for p in sorted(pairs, key=lambda p: _rank(p, seed))[:size]}
    return [p for p in pairs if p.id in chosen]


class ProblemOrder:
    """Which of ``n`` problems each step trains on: seeded shuffles, one an epoch, cut into steps without a remainder.

    Every problem is visited once an epoch, also where a step spans two epochs; such a step repeats no problem as long as
    ``n ≥ per_step`` (problems of the old epoch's tail move back in the new one). ``indices`` is a pure function of
    (n, seed, per_step, step).
    """

    def __init__(self, n: int, seed: int, per_step: int) -> None:
        if n < 1 or per_step < 1:
            raise ValueError(f"n ({n}) and per_step ({per_step}) must be at least 1")
        self.n = n
        self.seed = seed
        self.per_step = per_step
        self._epochs: list[list[int]] = []

    def indices(self, step: int) -> list[int]:
        """The ``per_step`` problem indices of a step (0-based)."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        first = step * self.per_step
        return [self._epoch(i // self.n)[i % self.n] for i in range(first, first + self.per_step)]

    def epoch_of(self, step: int) -> float:
        """Epochs completed before ``step``."""
        return step * self.per_step / self.n

    def _epoch(self, epoch: int) -> list[int]:
        while len(self._epochs) <= epoch:
            e = len(self._epochs)
            order = list(range(self.n))
            random.Random(f"{self.seed}:{e}").shuffle(order)
            begun = (e * self.n) % self.per_step
            if begun and self.n >= self.per_step:
                order = _avoid(order, set(self._epochs[e - 1][-begun:]), self.per_step - begun)
            self._epochs.append(order)
        return self._epochs[epoch]


def _avoid(order: list[int], taken: set[int], head: int) -> list[int]:
    """Move ``taken`` items out of the first ``head`` places, changing the order of nothing else."""
    early = [i for i in order if i not in taken][:head]
    rest = [i for i in order if i not in set(early)]
    return early + rest

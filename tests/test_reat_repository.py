"""The repository: admission at the edges of its thresholds, utility, pruning, versions, files, other processes."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from maieutic.errors import ModelError
from maieutic.reat.embeddings import make_embedder
from maieutic.reat.exchange import copy_repository
from maieutic.reat.merging import MergedText
from maieutic.reat.records import FILE, SCHEMA_VERSION, RepositoryError, RepositoryVersionError
from maieutic.reat.related_states import STATES
from maieutic.reat.repository import Repository, RepositorySettings
from maieutic.reat.retrieval import RetrievalSettings
from maieutic.reat.schema import Emotion, ErrorType, Experience, Struggle
from reat_support import (
    EXACT,
    BitEmbedder,
    admit,
    bits,
    check_whole,
    experience,
    merge,
    needs_faiss,
    open_bits,
)

needs_faiss()
BASE = bits(0)
S = STATES[0]


class AtCosine:
    """``base`` is the first axis; any other text is a cosine with it, as a number (float32)."""

    name, dim = "at-cosine", 8

    def embed(self, texts: list[str]) -> np.ndarray:
        out = np.zeros((len(texts), 8), dtype=np.float32)
        for row, text in zip(out, texts, strict=True):
            c = np.float32(1 if text == "base" else float(text))
            row[:2] = c, np.sqrt(1 - np.float64(c) ** 2)
        return out


def below(value: float) -> str:
    return repr(float(np.nextafter(np.float32(value), np.float32(0))))


@pytest.mark.parametrize(
    "text, outcome",
    [
        ("0.95", "duplicate"),
        ("0.92", "duplicate"),  # ≥ τ_dup
        (below(0.92), "merged"),
        ("0.8", "merged"),  # ≥ τ_merge
        (below(0.8), "inserted"),
        ("0.0", "inserted"),
    ],
)
def test_the_papers_thresholds_at_their_edges(tmp_path: Path, text: str, outcome: str) -> None:
    async def to_axis(kept: Experience, new: Experience) -> MergedText:
        return MergedText(
            query="base", template="", advice="both", pitfalls="", struggle_handling="", explanation=""
        )

    with Repository.open(tmp_path, embedder=AtCosine(), merge=to_axis) as repository:
        assert admit(repository, experience("base", n=0)) == "inserted"
        second = experience(text, n=1)
        assert admit(repository, second) == outcome
        recorded = repository.admission(second.id)
        assert recorded is not None and recorded.similarity == pytest.approx(float(text), abs=1e-7)
        assert len(repository) == (2 if outcome == "inserted" else 1)
        check_whole(repository)


def test_inserted_with_the_admission_score_as_utility(tmp_path: Path) -> None:
    with open_bits(tmp_path) as repository:
        first = experience(BASE)
        assert admit(repository, first, 87.5) == "inserted"
        kept = repository.get(first.id)
        assert (kept.utility, kept.uses, kept.enabled, kept.history) == (87.5, 0, True, ())
        assert kept.model_dump(exclude={"utility"}) == first.model_dump(exclude={"utility"})


def test_a_merge_replaces(tmp_path: Path) -> None:
    calls = []

    async def counted(kept: Experience, new: Experience) -> MergedText | None:
        calls.append((kept.id, new.id))
        return await merge(kept, new)

    related = S.model_copy(update={"struggle": Struggle.PROGRESSING})
    first, second = experience(BASE, S, 0, "a"), experience(bits(0b11), related, 1, "b")
    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=EXACT, merge=counted) as repository:
        admit(repository, first, 95)
        repository.update_utility(first.id, 15.0)
        assert admit(repository, second, 88) == "merged"
        assert calls == [(first.id, second.id)]
        (now,) = repository.experiences()
        assert (now.advice, now.query, now.tags) == ("a+b", bits(0b10), S)
        assert (now.utility, now.uses, now.history) == (88, 0, ())
        assert now.provenance.parents == (first.id, second.id)
        assert (now.provenance.rewrite, now.provenance.episode_id) == ("merged", "e1")
        old = repository.stored(first.id)
        assert (old.status, old.replaced_by, old.experience.uses) == ("replaced", now.id, 1)
        assert old.experience.utility == pytest.approx(0.8 * 95 + 0.2 * 15, abs=1e-12)
        found = repository.retrieve(S, BASE, RetrievalSettings(top_k=9, threshold=-1))
        assert [t.experience.id for t in found.taken] == [now.id] and len(found.dropped) == 0
        with pytest.raises(RepositoryError, match=f"merged into {now.id}"):
            repository.enable(first.id)
        check_whole(repository)


def test_a_merge_that_fails_inserts_and_says_so(tmp_path: Path) -> None:
    async def fails(kept: Experience, new: Experience) -> MergedText | None:
        return None

    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=EXACT, merge=fails) as repository:
        admit(repository, experience(BASE, n=0))
        recorded = asyncio.run(repository.admit_recorded(experience(bits(0b11), n=1), 90))
        assert (recorded.outcome, recorded.note, recorded.similarity) == ("inserted", "merge_failed", 0.75)
        assert len(repository) == 2


def test_a_merge_that_raises_changes_nothing(tmp_path: Path) -> None:
    async def raises(kept: Experience, new: Experience) -> MergedText | None:
        raise ConnectionError("no model")

    candidate = experience(bits(0b11), n=1)
    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=EXACT, merge=raises) as repository:
        admit(repository, experience(BASE, n=0))
        with pytest.raises(ConnectionError):
            admit(repository, candidate)
        assert repository.admission(candidate.id) is None and len(repository) == 1
    with open_bits(tmp_path) as repository:
        assert admit(repository, candidate) == "merged"


def test_a_merge_is_done_anew_when_its_target_changed_meanwhile(tmp_path: Path) -> None:
    first, second, late = (experience(bits(b), n=n) for n, b in enumerate((0, 0b11, 0b111)))
    seen: list[str] = []

    async def slow(kept: Experience, new: Experience) -> MergedText | None:
        seen.append(kept.id)
        if len(seen) == 1:  # another process merges into the same target while the model is thinking
            with open_bits(tmp_path) as other:
                assert await other.admit(second, 90) == "merged"
        return await merge(kept, new)

    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=EXACT, merge=slow) as repository:
        admit(repository, first)
        assert admit(repository, late) == "merged"
        assert seen[0] == first.id and len(seen) == 2
        replaced_by = repository.stored(first.id).replaced_by
        assert seen[1] == replaced_by  # the other's result, which `late` was then merged with
        assert len(repository) == 1
        assert check_whole(repository) == {"inserted": 1, "merged": 2, "duplicate": 0, "scored": 0}


def test_no_merging_inserts_and_still_discards_duplicates(tmp_path: Path) -> None:
    settings = EXACT.model_copy(update={"no_merging": True})
    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=settings) as repository:
        assert admit(repository, experience(BASE, n=0)) == "inserted"
        assert admit(repository, experience(bits(0b11), n=1)) == "inserted"
        assert admit(repository, experience(bits(0b1), n=2)) == "duplicate"


def test_only_the_same_and_the_related_states_are_compared(tmp_path: Path) -> None:
    other = S.model_copy(update={"error_type": ErrorType.CARELESS})
    near = S.model_copy(update={"emotion": Emotion.FRUSTRATED})
    with open_bits(tmp_path) as repository:
        assert admit(repository, experience(BASE, S, 0)) == "inserted"
        assert admit(repository, experience(BASE, other, 1)) == "inserted"
        assert admit(repository, experience(BASE, near, 2)) == "duplicate"


def test_the_nearest_decides_and_the_oldest_of_equals(tmp_path: Path) -> None:
    near, far, twin = (
        experience(bits(0b11), n=0),
        experience(bits(0b11111 << 8), n=1),
        experience(bits(0b11 << 2), n=2),
    )
    candidate = experience(bits(0b1111), n=3)
    settings = EXACT.model_copy(update={"no_merging": True})
    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=settings) as repository:
        for e in (far, near, twin):
            admit(repository, e)
    with open_bits(tmp_path) as repository:
        assert admit(repository, candidate) == "merged"  # cosine 0.75 with near and twin, 0 with far
        assert [e.id for e in repository.experiences()][:2] == [far.id, twin.id]


def test_admitting_again_changes_nothing(tmp_path: Path) -> None:
    candidates = [experience(bits(b), n=n) for n, b in enumerate((0, 1, 0b11, 0xFF00))]
    with open_bits(tmp_path) as repository:
        first = [admit(repository, c, 90) for c in candidates]
        assert first == ["inserted", "duplicate", "merged", "inserted"]
        before = check_whole(repository)
        events = {e.id: repository.events(e.id) for e in repository.experiences(every=True)}
    with open_bits(tmp_path) as repository:
        assert [admit(repository, c, 50) for c in reversed(candidates)] == first[::-1]
        assert check_whole(repository) == before
        assert {e.id: repository.events(e.id) for e in repository.experiences(every=True)} == events


def test_a_disabled_experience_does_not_block_a_new_one(tmp_path: Path) -> None:
    first, again = experience(BASE, n=0), experience(BASE, n=1, advice="other advice")
    with open_bits(tmp_path) as repository:
        admit(repository, first)
        repository.disable(first.id, "wrong")
        assert admit(repository, again) == "inserted"
        assert admit(repository, first) == "inserted"  # the recorded answer; it stays disabled
        assert [e.id for e in repository.experiences()] == [again.id]


@pytest.mark.parametrize("score", [-0.1, 100.1, float("nan"), float("inf")])
def test_scores_out_of_range_are_refused(tmp_path: Path, score: float) -> None:
    with open_bits(tmp_path) as repository:
        with pytest.raises(ValueError, match="between 0 and 100"):
            admit(repository, experience(BASE), score)
        admit(repository, experience(BASE))
        with pytest.raises(ValueError, match="between 0 and 100"):
            repository.update_utility(experience(BASE).id, score)
        assert repository.get(experience(BASE).id).uses == 0


def test_settings_refuse_thresholds_in_the_wrong_order() -> None:
    with pytest.raises(ValidationError, match="tau_merge"):
        RepositorySettings(tau_merge=0.93)


def test_admitting_needs_a_merge_or_no_merging(tmp_path: Path) -> None:
    with Repository.open(tmp_path, embedder=BitEmbedder()) as repository:
        with pytest.raises(RepositoryError, match="no_merging"):
            admit(repository, experience(BASE))


# ---- utility


def test_the_utility_is_the_moving_average_to_1e12(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    scores = rng.uniform(0, 100, 200).tolist()
    first = experience(BASE)
    with open_bits(tmp_path) as repository:
        admit(repository, first, 91.25)
        want = 91.25
        for k, score in enumerate(scores):
            got = repository.update_utility(first.id, score, source=f"e/{k}")
            assert got.before == want
            want = 0.8 * want + (1 - 0.8) * score
            assert got.after == pytest.approx(want, abs=1e-12) and got.uses == k + 1
            want = got.after
        closed = 0.8**200 * 91.25 + sum(0.2 * 0.8 ** (199 - k) * s for k, s in enumerate(scores))
        assert want == pytest.approx(closed, abs=1e-10)
        kept = repository.get(first.id)
        assert kept.utility == want and kept.uses == 200
        assert [(h.score, h.source) for h in kept.history] == [(s, f"e/{k}") for k, s in enumerate(scores)]
        assert all(a.after == b.before for a, b in zip(kept.history, kept.history[1:], strict=False))


def test_a_source_counts_once_and_no_source_every_time(tmp_path: Path) -> None:
    first, other = experience(BASE, n=0), experience(bits(0xFF), n=1)
    with open_bits(tmp_path) as repository:
        admit(repository, first, 100)
        admit(repository, other, 100)
        assert repository.update_utility(first.id, 50, source="e/1").after == 90
        again = repository.update_utility(first.id, 0, source="e/1")
        assert (again.after, again.uses, again.repeated) == (90, 1, True)
        assert repository.update_utility(other.id, 50, source="e/1").after == 90
        repository.update_utility(first.id, 90)
        assert repository.update_utility(first.id, 90).uses == 3


def test_pruned_below_the_threshold_after_the_minimum_of_uses(tmp_path: Path) -> None:
    first = experience(BASE)
    settings = RepositorySettings()
    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=settings, merge=merge) as repository:
        admit(repository, first, 90)
        for use in range(1, 5):
            got = repository.update_utility(first.id, 0)
            assert got.enabled and not got.pruned, use
        assert got.after < 60
        assert len(repository.retrieve(S, BASE).taken) == 1
        got = repository.update_utility(first.id, 0)
        assert got.pruned and not got.enabled and got.uses == 5
        assert repository.stored(first.id).reason == "pruned"
        found = repository.retrieve(S, BASE)
        assert found.taken == () and [(d.id, d.reason) for d in found.dropped] == [(first.id, "disabled")]
        # by hand: the utility stays, and the minimum of uses counts anew
        assert repository.enable(first.id) and not repository.enable(first.id)
        assert repository.get(first.id).utility == got.after
        assert [repository.update_utility(first.id, 0).pruned for _ in range(5)] == [False] * 4 + [True]
        kinds = [e.kind for e in repository.events(first.id)]
        assert kinds == ["inserted", *["utility"] * 5, "disabled", "enabled", *["utility"] * 5, "disabled"]


def test_a_utility_at_the_pruning_threshold_stays(tmp_path: Path) -> None:
    first = experience(BASE)
    settings = RepositorySettings(alpha=0.5, tau_prune=60, min_uses=1)
    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=settings, merge=merge) as repository:
        admit(repository, first, 70)
        got = repository.update_utility(first.id, 50)
        assert got.after == 60 and not got.pruned
        got = repository.update_utility(first.id, 59.999)
        assert got.after < 60 and got.pruned


def test_prune_applies_changed_thresholds(tmp_path: Path) -> None:
    used, unused = experience(BASE, n=0), experience(bits(0xFF), n=1)
    with open_bits(tmp_path) as repository:
        for e in (used, unused):
            admit(repository, e, 75)
        for _ in range(2):
            repository.update_utility(used.id, 75)
        assert repository.prune() == []
    stricter = EXACT.model_copy(update={"tau_prune": 80.0})
    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=stricter, merge=merge) as repository:
        assert repository.prune() == [used.id]
        assert repository.prune() == []


def test_a_late_score_of_a_replaced_experience_is_kept_there(tmp_path: Path) -> None:
    first = experience(BASE, n=0)
    with open_bits(tmp_path) as repository:
        admit(repository, first, 90)
        admit(repository, experience(bits(0b11), n=1), 88)
        assert repository.update_utility(first.id, 40).after == pytest.approx(80, abs=1e-12)
        (now,) = repository.experiences()
        assert (now.utility, now.uses) == (88, 0)
        assert repository.stored(first.id).status == "replaced"


# ---- files


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    open_bits(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(RepositoryVersionError, match=f"schema {SCHEMA_VERSION + 1}.*newer Maieutic"):
        open_bits(tmp_path)


def test_what_is_not_a_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="no experience repository"):
        Repository.open(tmp_path, read_only=True, embedder=BitEmbedder())
    with pytest.raises(RepositoryError, match="no experience repository"):
        Repository.open(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("CREATE TABLE mine (x)")
    with pytest.raises(RepositoryError, match="something else"):
        open_bits(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / FILE).write_text("not a database " * 100)
    with pytest.raises(RepositoryError, match="cannot be used"):
        open_bits(tmp_path / "b")


def test_another_embedder_is_refused(tmp_path: Path) -> None:
    open_bits(tmp_path).close()
    with pytest.raises(RepositoryError, match=r"embedded with bits \(16 dimensions\), not at-cosine \(8\)"):
        Repository.open(tmp_path, embedder=AtCosine())


def test_without_an_embedder_it_can_be_looked_at_and_scored(tmp_path: Path) -> None:
    with open_bits(tmp_path) as repository:
        admit(repository, experience(BASE), 90)
    with Repository.open(tmp_path) as repository:
        assert repository.update_utility(experience(BASE).id, 40).after == pytest.approx(80, abs=1e-12)
        with pytest.raises(RepositoryError, match="without an embedder; it was made with bits"):
            repository.retrieve(S, BASE)


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    with open_bits(tmp_path) as repository:
        admit(repository, experience(BASE))
    with open_bits(tmp_path, read_only=True) as reader:
        with pytest.raises(RepositoryError, match="reading only"):
            reader.update_utility(experience(BASE).id, 50)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.database._db.execute("DELETE FROM events")
        assert len(reader.retrieve(S, BASE).taken) == 1


def test_rows_are_append_only(tmp_path: Path) -> None:
    with open_bits(tmp_path) as repository:
        admit(repository, experience(BASE))
        for statement in ("DELETE FROM experiences", "UPDATE experiences SET content = '{}'"):
            with pytest.raises(sqlite3.IntegrityError, match="never"):
                repository.database._db.execute(statement)


def _reopened(folder: Path) -> str:
    with open_bits(folder) as repository:
        check_whole(repository)
        found = repository.retrieve(S, bits(0xFF), RetrievalSettings(threshold=0.9))
        assert [t.similarity for t in found.taken] == [1.0]
        assert repository._index is not None
        return repository._index.rebuilt


def test_the_saved_vectors_are_a_cache(tmp_path: Path) -> None:
    with open_bits(tmp_path) as repository:
        admit(repository, experience(BASE, n=0))
        admit(repository, experience(bits(0xFF), n=1))
    (file,) = tmp_path.glob("vectors-*.faiss")
    two = file.read_bytes()
    assert _reopened(tmp_path) == ""
    with open_bits(tmp_path) as repository:
        admit(repository, experience(bits(0xFF00), n=2))
    three = file.read_bytes()
    file.write_bytes(two)  # stale: the rest is taken from the database
    assert _reopened(tmp_path) == ""
    assert file.read_bytes() == three
    file.unlink()
    assert _reopened(tmp_path) == "missing"
    assert file.read_bytes() == three
    file.write_bytes(two[:60])
    assert _reopened(tmp_path).startswith("damaged")
    assert file.read_bytes() == three
    with open_bits(tmp_path / "other") as other:  # same size, other vectors
        for n, b in enumerate((1 << 3, 0xF0F0, 0xAAAA)):
            admit(other, experience(bits(b), n=n))
    (foreign,) = (tmp_path / "other").glob("vectors-*.faiss")
    file.write_bytes(foreign.read_bytes())
    assert _reopened(tmp_path) == "not of this database's vectors"
    assert file.read_bytes() == three
    with open_bits(tmp_path / "other") as other:
        admit(other, experience(bits(0x0F0F), n=9))
    file.write_bytes(foreign.read_bytes())
    assert _reopened(tmp_path) == "ahead of the database (4 rows against 3)"


def test_verify_finds_a_difference(tmp_path: Path) -> None:
    with open_bits(tmp_path) as repository:
        admit(repository, experience(BASE))
        repository.verify()
        assert repository._index is not None
        repository._index.status[0] = 1
        with pytest.raises(RepositoryError, match="row 0"):
            repository.verify()


def test_an_embedding_that_is_not_normalised_is_refused(tmp_path: Path) -> None:
    class Long(BitEmbedder):
        def embed(self, texts):  # type: ignore[no-untyped-def]
            return 2 * super().embed(texts)

    with Repository.open(tmp_path, embedder=Long(), merge=merge) as repository:
        with pytest.raises(ValueError, match="length 1, and this one has 2"):
            admit(repository, experience(BASE))
        assert repository.admission(experience(BASE).id) is None


# ---- damage, full disks ------------------------------------------------------------------------------------------------


DISTINCT = RepositorySettings(tau_dup=1.0, tau_merge=1.0)


def filled(folder: Path, rows: int = 100) -> Path:
    with open_bits(folder, settings=DISTINCT) as repository:
        for n in range(rows):
            admit(repository, experience(bits(n), n=n))
    return folder


def test_a_flipped_bit_anywhere_in_the_saved_vectors_is_found(tmp_path: Path) -> None:
    """FAISS reads it as another vector, or as a length to allocate; only a sample of rows is compared."""
    (file,) = filled(tmp_path).glob("*.faiss")
    good = file.read_bytes()
    for place in (*range(0, 48, 5), len(good) // 2, len(good) - 40, len(good) - 1):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with open_bits(tmp_path, read_only=True) as repository:
            repository.verify()
            assert repository._index is not None and repository._index.rebuilt.startswith("damaged"), place
    file.write_bytes(good)
    with open_bits(tmp_path, read_only=True) as repository:
        repository.verify()
        assert repository._index is not None and not repository._index.rebuilt


def test_a_damaged_database_is_a_named_error_or_no_harm(tmp_path: Path) -> None:
    good = (filled(tmp_path, 30) / FILE).read_bytes()
    refused = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        data = bytearray(good)
        for _ in range(50):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        if seed % 4 == 0:
            data = data[: int(rng.integers(len(data)))]
        if seed % 4 == 1:
            start = int(rng.integers(len(data)))
            data[start : start + 4096] = bytes(len(data[start : start + 4096]))
        (tmp_path / FILE).write_bytes(data)
        try:
            with open_bits(tmp_path, read_only=True) as repository:
                repository.retrieve(S, BASE)
                repository.experiences(every=True)
                repository.verify()
        except RepositoryError:
            refused += 1
    assert refused > 20


def test_a_full_disk_is_a_named_error_that_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, 3)
    with open_bits(tmp_path, settings=DISTINCT) as repository:
        repository.retrieve(S, BASE)
        (pages,) = repository.database.select("PRAGMA page_count")[0]
        repository.database.select(
            f"PRAGMA max_page_count = {pages}"
        )  # SQLite then says what it says of a full disk
        with pytest.raises(RepositoryError, match="full"):
            for n in range(100, 200):
                admit(repository, experience(bits(n), n=n))
        assert len(repository) < 100
        repository.verify()
        repository.database.select("PRAGMA max_page_count = 100000")
        admit(repository, experience(bits(1000), n=1000))
        for file in tmp_path.glob("*.faiss"):
            file.unlink()
        repository._index.save = lambda: (_ for _ in ()).throw(RuntimeError("no space"))  # type: ignore
    assert "will be made anew" in caplog.text
    with open_bits(tmp_path) as repository:
        repository.verify()


@pytest.mark.parametrize("name", ["", "hashing-0", "hashing-4", "hashing-70000"])
def test_an_impossible_embedder_is_a_named_error(name: str) -> None:
    with pytest.raises(ModelError, match="embedder"):
        make_embedder(name)


# ---- copies and places that cannot be written ------------------------------------------------------------------------------


def test_a_copy_is_whole_while_somebody_writes(tmp_path: Path) -> None:
    with open_bits(filled(tmp_path / "a", 10), settings=DISTINCT) as repository:
        admit(repository, experience(bits(500), n=500))  # lies in the log, not in the file
        copy_repository(tmp_path / "a", tmp_path / "b")
        admit(repository, experience(bits(501), n=501))
        with open_bits(tmp_path / "b", settings=DISTINCT) as copied:
            assert len(copied) == 11 and copied.database.uuid == repository.database.uuid
            copied.verify()
            admit(copied, experience(bits(502), n=502))
        with pytest.raises(RepositoryError, match="is there already"):
            copy_repository(tmp_path / "a", tmp_path / "b")
    (tmp_path / ".c.part").mkdir()  # of a copy that was killed
    (tmp_path / ".c.part" / FILE).write_bytes(b"half")
    copy_repository(tmp_path / "a", tmp_path / "c")
    with open_bits(tmp_path / "c") as copied:
        copied.verify()
        assert len(copied) == 12
    with pytest.raises(RepositoryError, match="there is no experience repository"):
        copy_repository(tmp_path / "nowhere", tmp_path / "d")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_what_cannot_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path / "a b?#%", 10)
    (folder / f"{FILE}-wal").unlink(missing_ok=True)
    (folder / f"{FILE}-shm").unlink(missing_ok=True)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.setattr("maieutic.reat.records.os.access", lambda path, mode: False)
    with open_bits(folder, read_only=True) as repository:
        repository.verify()
        assert len(repository) == 10 and repository.retrieve(S, bits(3)).taken
        # Not even while it is open: a read-only file system has no place for a log.
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    (folder / f"{FILE}-wal").write_bytes(b"not folded in")
    with pytest.raises(RepositoryError, match="not folded in yet"):
        open_bits(folder, read_only=True)

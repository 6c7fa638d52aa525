"""Experiences with exact cosines, a merge by rule, and a writer process that can be killed at any statement."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from maieutic.reat.index import import_faiss
from maieutic.reat.merging import MergedText
from maieutic.reat.related_states import STATES
from maieutic.reat.repository import Repository, RepositorySettings
from maieutic.reat.schema import Experience, Provenance, StateTags

BITS = 16
EXACT = RepositorySettings(tau_dup=0.875, tau_merge=0.625, min_uses=2)
"""Thresholds that are cosines of bit texts: 1 differing bit of 16 is a duplicate, 2 or 3 are merged."""

GROUP = (STATES[0], STATES[3], STATES[900])
"""Two related states and a foreign one."""


def needs_faiss() -> None:
    """Skip a test module where the extra is absent."""
    pytest.importorskip("faiss", reason="the index needs faiss: install the 'reat' extra (make setup does)")


class BitEmbedder:
    """``1011…`` (16 bits) → ±1/4: the cosine of two texts is exactly 1 − d/8, with d the number of bits that differ."""

    name, dim = "bits", BITS

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([[0.25 if c == "1" else -0.25 for c in t] for t in texts], dtype=np.float32)


def bits(number: int) -> str:
    return format(number, f"0{BITS}b")


def cosine(a: str, b: str) -> float:
    return 1 - sum(x != y for x, y in zip(a, b, strict=True)) / 8


def experience(query: str, tags: StateTags = STATES[0], n: int = 0, advice: str = "ask first") -> Experience:
    """A candidate; ``n`` is its origin, so that two with the same text are two."""
    origin = Provenance(
        transcript="t",
        episode_id=f"e{n}",
        turn=1,
        revised=False,
        rounds=0,
        scores=(90.0,),
        rewrite="rewritten",
    )
    return Experience.make(
        utility=0.0,
        tags=tags,
        query=query,
        template="t",
        advice=advice,
        pitfalls="p",
        struggle_handling="s",
        explanation="e",
        provenance=origin,
    )


def mix(kept: Experience, new: Experience) -> MergedText:
    """The kept text with its first differing bit from the new one."""
    place = next((i for i, (a, b) in enumerate(zip(kept.query, new.query, strict=True)) if a != b), 0)
    query = kept.query[:place] + new.query[place] + kept.query[place + 1 :]
    return MergedText(
        query=query,
        template=kept.template,
        advice=f"{kept.advice}+{new.advice}",
        pitfalls=kept.pitfalls,
        struggle_handling=kept.struggle_handling,
        explanation=kept.explanation,
    )


async def merge(kept: Experience, new: Experience) -> MergedText | None:
    return mix(kept, new)


def admit(repository: Repository, candidate: Experience, score: float = 90.0) -> str:
    return asyncio.run(repository.admit(candidate, score))


def open_bits(folder: Path, read_only: bool = False, settings: RepositorySettings = EXACT) -> Repository:
    """Without waiting for the disk: what a killed *process* leaves does not depend on it, and the tests are many."""
    repository = Repository.open(
        folder, embedder=BitEmbedder(), settings=settings, merge=merge, read_only=read_only
    )
    repository.database._db.execute("PRAGMA synchronous = OFF")
    return repository


def check_whole(repository: Repository) -> dict[str, int]:
    """What must hold in every snapshot: nothing lost, nothing doubled, the index equal to the database. Returns counts."""
    with repository._db.reading():
        rows = repository._db.select("SELECT id, status, replaced_by FROM experiences ORDER BY seq")
        asked = repository._db.select("SELECT id, outcome, target FROM admissions")
        repository.verify()
        ids = {r[0] for r in rows}
        by = {o: [a for a in asked if a[1] == o] for o in ("inserted", "merged", "duplicate")}
        assert len(rows) == len(ids) == len(by["inserted"]) + len(by["merged"])
        assert {a[0] for a in by["inserted"]} | {a[2] for a in by["merged"]} == ids
        assert all(a[2] in ids for a in by["duplicate"])
        replaced = [r for r in rows if r[1] == "replaced"]
        assert sorted(r[2] for r in replaced) == sorted(a[2] for a in by["merged"])
        firsts = repository._db.select(
            "SELECT count(*) FROM events WHERE kind IN ('inserted', 'merged') GROUP BY experience"
        )
        assert [f[0] for f in firsts] == [1] * len(rows)
        scored = repository._db.select("SELECT count(*) FROM events WHERE kind = 'utility'")[0][0]
        uses = repository._db.select("SELECT coalesce(sum(uses), 0) FROM experiences")[0][0]
        assert scored == uses
    return {o: len(a) for o, a in by.items()} | {"scored": scored}


def story(length: int) -> list[Experience]:
    """Candidates of which some repeat and some are near, in two related states and a foreign one."""
    rng = np.random.default_rng(5)
    numbers = [0, 0b1, 0b11, 0xFF00, 0b11, 0xFF01]  # every outcome within the first few
    numbers += [int(rng.integers(32)) << int(rng.integers(12)) for _ in range(length)]
    return [experience(bits(b), GROUP[n % 7 % 3], n) for n, b in enumerate(numbers[:length])]


def write_story(repository: Repository, length: int, done: Callable[[int], None] = lambda n: None) -> None:
    """Distil the story: admit each candidate, and score what holds it. Every call is idempotent."""
    for n, candidate in enumerate(story(length)):
        recorded = asyncio.run(repository.admit_recorded(candidate, 80.0 + n % 20))
        repository.update_utility(recorded.target, float(37 * n % 100), source=f"e{n}/1")
        done(n)


def dump(repository: Repository) -> str:
    """Everything but times: two repositories with one story must agree in it."""
    with repository._db.reading():
        tables = [
            repository._db.select(
                "SELECT seq, id, state, content, hex(vector), utility, uses, trial, status, reason, replaced_by FROM experiences"
            ),
            repository._db.select("SELECT id, outcome, target, similarity, score, content FROM admissions"),
            repository._db.select(
                "SELECT experience, kind, score, before, after, source FROM events ORDER BY n"
            ),
        ]
    return json.dumps(tables)


def _child(folder: Path, length: int, kill_at: int) -> None:
    """In a forked process: write the story; SIGKILL itself before SQL statement ``kill_at``."""
    repository = open_bits(folder)
    count = 0

    def trace(statement: str) -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    repository._db._db.set_trace_callback(trace)
    write_story(repository, length)
    repository.close()


def _forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def _kill_points(folder: Path, length: int) -> None:
    """Kill at statement 1, 2, 3, … of what is left to do, checking in between, until a run gets to its end."""
    import_faiss()  # once, instead of in every fork
    kills = 0
    for kill_at in range(1, 100_000):
        status = _forked(lambda k=kill_at: _child(folder, length, k))
        if not os.WIFSIGNALED(status):
            assert status == 0
            break
        kills += 1

        def check() -> None:
            with open_bits(folder) as repository:
                check_whole(repository)

        assert _forked(check) == 0, f"after the kill before statement {kill_at}"
    print(json.dumps({"kills": kills}))


def _write(folder: Path, length: int) -> None:
    with open_bits(folder) as repository:
        write_story(repository, length, lambda n: print(n, flush=True))


if __name__ == "__main__":
    {"kill-points": _kill_points, "write": _write}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))

"""The repository under random interleavings, under SIGKILL, and read by one process while another writes."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maieutic.reat.related_states import Step, related
from maieutic.reat.retrieval import RetrievalSettings
from maieutic.reat.schema import Experience
from reat_support import (
    EXACT,
    GROUP,
    bits,
    check_whole,
    cosine,
    dump,
    experience,
    mix,
    needs_faiss,
    open_bits,
    write_story,
)

needs_faiss()
SUPPORT = Path(__file__).with_name("reat_support.py")


@dataclass
class Row:
    """What the model knows of an experience."""

    content: Experience
    utility: float
    uses: int = 0
    trial: int = 0
    status: str = "enabled"
    sources: set[str] = field(default_factory=set)


class Interleavings(RuleBasedStateMachine):
    """Two open connections, one of them possibly stale, against Algorithm 2 written down with lists."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="reat-"))
        self.open = [open_bits(self.folder), open_bits(self.folder)]
        self.rows: dict[str, Row] = {}
        self.asked: dict[str, str] = {}
        self.offered: list[Experience] = []

    def teardown(self) -> None:
        for repository in self.open:
            repository.close()
        shutil.rmtree(self.folder)

    def model_admit(self, e: Experience, score: float) -> str:
        if e.id in self.asked:
            return self.asked[e.id]
        near = [
            r
            for r in self.rows.values()
            if r.status == "enabled" and related(e.tags, r.content.tags, Step.RELATED)
        ]
        best = max(near, key=lambda r: cosine(r.content.query, e.query), default=None)  # max keeps the oldest
        similarity = cosine(best.content.query, e.query) if best else -2.0
        if similarity >= EXACT.tau_dup:
            outcome = "duplicate"
        elif best is not None and similarity >= EXACT.tau_merge:
            text = mix(best.content, e)
            how = e.provenance.model_copy(update={"rewrite": "merged", "parents": (best.content.id, e.id)})
            new = Experience.make(utility=score, tags=best.content.tags, provenance=how, **text.model_dump())
            best.status = "replaced"
            self.rows[new.id] = Row(new, score)
            outcome = "merged"
        else:
            self.rows[e.id] = Row(e, score)
            outcome = "inserted"
        self.asked[e.id] = outcome
        return outcome

    @rule(
        which=st.integers(0, 1),
        number=st.integers(0, 31),
        shift=st.sampled_from([0, 5, 11]),
        state=st.sampled_from(GROUP),
        score=st.integers(0, 100),
    )
    def admit(self, which: int, number: int, shift: int, state, score: int) -> None:
        e = experience(bits(number << shift), state, len(self.offered))
        self.offered.append(e)
        got = asyncio.run(self.open[which].admit(e, float(score)))
        assert got == self.model_admit(e, float(score))

    @precondition(lambda self: self.offered)
    @rule(which=st.integers(0, 1), pick=st.randoms(use_true_random=False))
    def admit_again(self, which: int, pick: random.Random) -> None:
        e = pick.choice(self.offered)
        assert asyncio.run(self.open[which].admit(e, 1.0)) == self.asked[e.id]

    @precondition(lambda self: self.rows)
    @rule(
        which=st.integers(0, 1),
        pick=st.randoms(use_true_random=False),
        score=st.integers(0, 100),
        source=st.sampled_from(["", "a", "b"]),
    )
    def score(self, which: int, pick: random.Random, score: int, source: str) -> None:
        id = pick.choice(list(self.rows))
        row = self.rows[id]
        got = self.open[which].update_utility(id, float(score), source=source)
        if source and source in row.sources:
            assert got.repeated and got.after == row.utility
            return
        row.sources.add(source)
        row.utility = 0.8 * row.utility + 0.2 * score
        row.uses, row.trial = row.uses + 1, row.trial + 1
        pruned = row.status == "enabled" and row.utility < EXACT.tau_prune and row.trial >= EXACT.min_uses
        if abs(row.utility - EXACT.tau_prune) > 1e-9:
            assert got.pruned == pruned
        if got.pruned:
            row.status = "disabled"
        assert abs(got.after - row.utility) < 1e-12 * 100 and got.uses == row.uses
        row.utility = got.after

    @precondition(lambda self: any(r.status != "replaced" for r in self.rows.values()))
    @rule(which=st.integers(0, 1), pick=st.randoms(use_true_random=False), on=st.booleans())
    def switch(self, which: int, pick: random.Random, on: bool) -> None:
        id = pick.choice([i for i, r in self.rows.items() if r.status != "replaced"])
        row = self.rows[id]
        changed = self.open[which].enable(id) if on else self.open[which].disable(id, "by hand")
        want = "enabled" if on else "disabled"
        assert changed == (row.status != want)
        if changed:
            row.status = want
            row.trial = 0 if on else row.trial

    @rule(which=st.integers(0, 1), saved=st.booleans())
    def reopen(self, which: int, saved: bool) -> None:
        """Closed, or left as a killed process leaves it (nothing saved but what was committed)."""
        old = self.open[which]
        old.close() if saved else old.database.close()
        self.open[which] = open_bits(self.folder)

    @rule(which=st.integers(0, 1), number=st.integers(0, 31), state=st.sampled_from(GROUP))
    def retrieve(self, which: int, number: int, state) -> None:
        found = self.open[which].retrieve(
            state, bits(number), RetrievalSettings(top_k=3, threshold=0.5, first_step=Step.RELATED)
        )
        near = [
            r
            for r in self.rows.values()
            if r.status != "replaced" and related(state, r.content.tags, Step.RELATED)
        ]
        enabled = [r for r in near if r.status == "enabled"]
        if not enabled:  # wider steps are another test's matter
            return
        ranked = sorted(enabled, key=lambda r: -cosine(r.content.query, bits(number)))
        want = [r.content.id for r in ranked if cosine(r.content.query, bits(number)) >= 0.5][:3]
        assert [t.experience.id for t in found.taken] == want
        assert {d.id for d in found.dropped} == {r.content.id for r in near} - set(want)

    @invariant()
    def the_database_is_the_model(self) -> None:
        for repository in self.open:
            got = {
                id: (status, utility, uses, trial)
                for id, status, utility, uses, trial in repository.database.select(
                    "SELECT id, status, utility, uses, trial FROM experiences ORDER BY seq"
                )
            }
            assert got == {i: (r.status, r.utility, r.uses, r.trial) for i, r in self.rows.items()}
            assert list(got) == list(self.rows)
            check_whole(repository)


Interleavings.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestInterleavings = Interleavings.TestCase


def _uninterrupted(folder: Path, length: int) -> str:
    with open_bits(folder) as repository:
        write_story(repository, length)
        counts = check_whole(repository)
        assert min(counts.values()) > 0, counts  # the story has every outcome
        return dump(repository)


@pytest.mark.slow
@pytest.mark.integration
def test_killed_before_every_statement(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, str(SUPPORT), "kill-points", str(tmp_path / "killed"), "8"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(out)["kills"] > 20
    with open_bits(tmp_path / "killed") as repository:
        check_whole(repository)
        assert dump(repository) == _uninterrupted(tmp_path / "whole", 8)


@pytest.mark.integration
def test_killed_at_random_moments(tmp_path: Path) -> None:
    length, folder, rng = 60, tmp_path / "killed", random.Random(0)
    command = [sys.executable, str(SUPPORT), "write", str(folder), str(length)]
    for _ in range(3):
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(rng.randrange(3, 25)):
            writer.stdout.readline()
        writer.kill()
        writer.wait()
        writer.stdout.close()
        with open_bits(folder) as repository:
            check_whole(repository)
    subprocess.run(command, check=True, capture_output=True)
    with open_bits(folder) as repository:
        assert dump(repository) == _uninterrupted(tmp_path / "whole", length)


@pytest.mark.integration
def test_a_reader_sees_whole_snapshots_while_another_process_writes(tmp_path: Path) -> None:
    open_bits(tmp_path).close()
    writer = subprocess.Popen(
        [sys.executable, str(SUPPORT), "write", str(tmp_path), "100"], stdout=subprocess.PIPE
    )
    seen: list[int] = []
    try:
        with open_bits(tmp_path, read_only=True) as reader:
            while writer.poll() is None:
                with reader.database.reading():
                    counts = check_whole(reader)
                    first = reader.retrieve(GROUP[0], bits(0), RetrievalSettings(threshold=-1, top_k=99))
                    # inside one snapshot nothing moves, whatever is written meanwhile
                    assert check_whole(reader) == counts
                    again = reader.retrieve(GROUP[0], bits(0), RetrievalSettings(threshold=-1, top_k=99))
                    assert again.taken == first.taken and list(again.dropped) == list(first.dropped)
                seen.append(sum(counts.values()))
    finally:
        writer.kill()
        assert writer.stdout is not None
        writer.stdout.close()
    assert writer.wait() in (0, -signal.SIGKILL)
    assert seen == sorted(seen) and len(set(seen)) > 3

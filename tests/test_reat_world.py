"""The constructed classroom: its law in words, and that REAT works where it must and only because of the state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from maieutic.config import EngineSpec, EnvSpec, RewardSpec, StudentSpec
from maieutic.engines.base import Sampling
from maieutic.engines.usage import Ledger
from maieutic.env.base import Episode
from maieutic.env.build import make_environment
from maieutic.env.student import ModelStudent
from maieutic.evaluation.statistics import paired_difference
from maieutic.problems.loaders import read_pairs
from maieutic.reat.distil import distil
from maieutic.reat.distil_config import DistilSection
from maieutic.reat.embeddings import HashingEmbedder
from maieutic.reat.fields import load_fields
from maieutic.reat.live import LiveObserver
from maieutic.reat.related_states import Step, related
from maieutic.reat.repository import Repository, RepositorySettings
from maieutic.reat.retrieval import RetrievalSettings
from maieutic.reat.roles import RoleChat, Roles
from maieutic.reat.schema import Experience
from maieutic.reat.sources import RepositorySource
from maieutic.reat.tutor import ReatTutor
from maieutic.reat.world import (
    APPROACHES,
    BOTTLENECKS,
    MOODS,
    NAMES,
    PLAIN,
    TAGS,
    World,
    advised,
    approach_of,
    bottleneck_of,
    mood_of,
    student_says,
)  # fmt: skip
from maieutic.reat.world_roles import WorldChat, WorldRoles
from maieutic.seeds import derive
from maieutic.transcripts import TranscriptWriter
from maieutic.tutors import ChatTutor

SEEDS = range(5)
TRAIN, PER_SEED = 30, 20


def test_what_fits_depends_on_state_and_difficulty_both() -> None:
    world = World()
    table = [[world.fitting(m, b) for b in BOTTLENECKS] for m in MOODS]
    for line in [*table, *zip(*table, strict=True)]:
        assert sorted(line) == sorted(NAMES)
    assert world.p_understand("calm", "order", world.fitting("calm", "order")) == 0.80
    assert world.p_understand("calm", "order", None) == 0.45
    assert world.p_understand("calm", "order", world.fitting("calm", "part")) == 0.10
    # No widening of the state filter ever mixes two moods.
    for a in MOODS:
        for b in MOODS:
            assert related(TAGS[a], TAGS[b], Step.CORE) == (a == b)


def test_everything_is_said_in_words_and_read_back() -> None:
    rng = random.Random(0)
    for mood in MOODS:
        for stuck in BOTTLENECKS:
            said = student_says(mood, stuck, 2, rng, "17")
            assert (mood_of(said), bottleneck_of(said)) == (mood, stuck) and "17" in said
    for name, (shown, says) in APPROACHES.items():
        assert approach_of(says) == name and advised(f"When stuck: {shown}.") == name
    assert [approach_of(p) for p in PLAIN] == [None, None] and advised("Ask something.") is None
    with pytest.raises(ValueError, match="no mood of this world"):
        mood_of("Hello!")


# ---- the experiment ------------------------------------------------------------------------------------------------------


class Lab:
    """The whole machinery without HTTP: real environment, tutor, distillation, repository and retrieval."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.roles = WorldRoles(faults=0.05)
        env = EnvSpec(name="persona", kind="maieutic.reat.persona:PersonaEnvironment", max_turns=14)
        self.env = make_environment(env, RewardSpec())
        spec = StudentSpec(model="world-student", engine=EngineSpec(kind="chat", urls=["http://x"]))
        self.student = ModelStudent(self.chat("student"), spec, self.env.templates, self.env.env)
        pairs = read_pairs("generate:structures", options={"size": TRAIN + PER_SEED, "seed": seed})
        self.train, self.test = pairs[:TRAIN], pairs[TRAIN:]
        assert len(self.test) == PER_SEED

    def chat(self, role: str) -> WorldChat:
        return WorldChat(self.roles, f"world-{role}")

    def role(self, name: str) -> RoleChat:
        return RoleChat(name, self.chat("ocm"), Sampling(0.0))

    def open(self, name: str, **settings: object) -> Repository:
        roles = Roles(*(self.role(n) for n in ("observer", "critic", "mentor", "rewriter")), seed=self.seed)
        made = RepositorySettings(**settings)
        return Repository.open(
            self.folder / name, embedder=HashingEmbedder(), settings=made, merge=roles.merge
        )

    async def play(
        self, where: str, pairs: Sequence, repository: Repository | None, **settings: object
    ) -> list[Episode]:
        inner = ChatTutor(self.chat("tutor"), self.env.templates, self.env.env, Sampling(0.6))
        fields = load_fields("persona")
        if repository is None:
            tutor = ReatTutor(inner, fields)
        else:
            source = RepositorySource(repository, RetrievalSettings(**settings))
            tutor = ReatTutor(inner, fields, LiveObserver(self.role("live")), source)
        return [
            await self.env.play(
                tutor, self.student, None, None, p, seed=derive(self.seed, where, p.id), id=f"{where}-{p.id}", group_id=p.id,
                phase="eval",
            )
            for p in pairs
        ]  # fmt: skip

    async def distil(self, episodes: list[Episode]) -> Repository:
        TranscriptWriter(self.folder).write("train", 0, episodes)
        roles = Roles(*(self.role(n) for n in ("observer", "critic", "mentor", "rewriter")), seed=self.seed)
        repository = self.open("repository")
        report = await distil(
            [self.folder],
            roles,
            repository,
            DistilSection(),
            out=self.folder / "out",
            ledger=Ledger(),
            in_flight=4,
        )
        assert report.experiences > 0.9 * report.turns
        return repository

    async def shuffled(self, repository: Repository) -> Repository:
        """The same experiences with their state labels dealt out anew."""
        experiences = repository.experiences()
        tags = [e.tags for e in experiences]
        random.Random(derive(self.seed, "labels") % 2**32).shuffle(tags)
        out = self.open("shuffled", no_merging=True, tau_dup=1.0)
        for e, t in zip(experiences, tags, strict=True):
            content = e.model_dump(
                mode="json", exclude={"id", "tags", "utility", "uses", "history", "enabled", "provenance"}
            )
            await out.admit(Experience.make(utility=90.0, tags=t, provenance=e.provenance, **content), 90.0)
        return out


def solved(episodes: list[Episode], seed: int) -> dict[str, float]:
    assert all(e.counted for e in episodes)
    return {f"{seed}/{e.pair.id}": float(e.dialogue.end == "solved") for e in episodes}


@pytest.mark.integration
def test_reat_beats_empty_fields_beats_state_random_and_shuffled_labels_remove_the_gain(
    tmp_path: Path,
) -> None:
    outcome: dict[str, dict[str, float]] = {a: {} for a in ("empty", "reat", "random", "shuffled")}
    planted: dict[str, int] = {}

    async def one(seed: int) -> None:
        lab = Lab(tmp_path / str(seed), seed)
        repository = await lab.distil(await lab.play("train", lab.train, None))
        assert len({e.tags for e in repository.experiences()}) == 4
        arms = {
            "empty": (None, {}),
            "reat": (repository, {}),
            "random": (repository, {"random_in_state": seed}),
            "shuffled": (await lab.shuffled(repository), {}),
        }
        for arm, (source, settings) in arms.items():
            outcome[arm] |= solved(await lab.play("test", lab.test, source, **settings), seed)
        for what, n in lab.roles.planted.items():
            planted[what] = planted.get(what, 0) + n

    for seed in SEEDS:
        asyncio.run(one(seed))

    def gain(a: str, b: str):
        return paired_difference(outcome[a], outcome[b])

    reat, rand, shuffled = gain("empty", "reat"), gain("empty", "random"), gain("empty", "shuffled")
    assert reat.pairs == len(SEEDS) * PER_SEED
    assert reat.low > 0.15 and rand.high < 0
    # Without the right labels the very same experiences are worth no more than empty fields, and far less than with them.
    assert shuffled.high < 0.05 and gain("shuffled", "reat").low > 0.15
    # It worked in spite of every kind of planted fault.
    assert set(planted) == {"malformed", "out_of_range", "contradiction", "leaked_number", "leaked_advice"}


def test_an_answer_follows_from_the_request_and_its_seed_alone() -> None:
    lab_roles = WorldRoles(faults=0.0)
    body = {
        "model": "world-tutor",
        "messages": [
            {
                "role": "user",
                "content": "Teaching experience: try a tiny made-up case\nWhere it comes from: none",
            }
        ],
    }
    assert {lab_roles.reply(body, 3) for _ in range(5)} == {lab_roles.reply(body, 3)}
    taken = [approach_of(lab_roles.reply(body, s)) for s in range(200)]
    assert taken.count("tiny_case") / 200 > 0.9
    with pytest.raises(ValueError, match="no role"):
        lab_roles.reply({"model": "world-nobody", "messages": body["messages"]}, 1)

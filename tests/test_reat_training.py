"""REAT and RL: an arm of an evaluation, training with experience in the prompt, and experience out of RL episodes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from loopback import InThread, Loopback
from maieutic.config import Recipe
from maieutic.dialogue import Dialogue, Turn
from maieutic.engines.usage import Ledger
from maieutic.errors import RecipeError
from maieutic.evaluation.config import ArmSpec
from maieutic.evaluation.tutor_arm import identity
from maieutic.reat.arm import ReatArm
from maieutic.reat.connect import connect_roles
from maieutic.reat.distil import distil
from maieutic.reat.distil_config import DistilSection, OcmRoles
from maieutic.reat.embeddings import HashingEmbedder
from maieutic.reat.fields import load_fields
from maieutic.reat.repository import Repository, RepositorySettings
from maieutic.reat.tutor import used
from maieutic.recipe import load_recipe
from maieutic.transcripts import read_episodes
from reat_parts import STATE, experience
from training_parts import metrics_of, recipe_dict

DIAGNOSIS = {
    "emotion": "confused", "intent": "request_hint", "error_type": "concept_error", "struggle_status": "repeated_error",
    "error_detail": "", "struggle_reason": "cannot begin", "query": "difficulty a",
}  # fmt: skip


def repository(folder: Path) -> Path:
    async def fill() -> None:
        settings = RepositorySettings(no_merging=True)
        with Repository.open(folder, embedder=HashingEmbedder(), settings=settings) as opened:
            await opened.admit(experience("a"), 90.0)

    asyncio.run(fill())
    return folder


def observer(url: str) -> dict[str, Any]:
    return {"model": "o", "engine": {"kind": "chat", "urls": [url]}}


def test_the_arm_of_an_evaluation(tmp_path: Path) -> None:
    from reat_parts import Recorder

    folder = repository(tmp_path / "repository")
    server = Loopback(lambda b: json.dumps(DIAGNOSIS))

    async def go() -> tuple[Recorder, Turn]:
        await server.start()
        inner = Recorder()
        arm = ReatArm(inner, repository=str(folder), observer=observer(server.url), embedder="hashing")
        dialogue = Dialogue("d", "Ann has 3 pens.", turns=[Turn("student", "How?")])
        turn = await arm.reply(dialogue, seed=1)
        await arm.close()
        await server.stop()
        return inner, turn

    inner, turn = asyncio.run(go())
    assert inner.seen[0][0].note == load_fields("persona").filled([experience("a")])
    assert used(turn).ids == (experience("a").id,) and used(turn).state == STATE.key()
    empty = Recorder()
    dialogue = Dialogue("d", "Ann has 3 pens.", turns=[Turn("student", "How?")])
    asyncio.run(ReatArm(empty).reply(dialogue, seed=1))
    assert empty.seen[0][0].note == load_fields("persona").empty()


def test_the_repository_is_part_of_the_arms_identity(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository")
    options = {"repository": str(folder), "observer": observer("http://x"), "embedder": "hashing"}
    spec = ArmSpec(kind="maieutic.reat.arm:ReatArm", options=options)
    before = identity(spec)

    async def more() -> None:
        with Repository.open(
            folder, embedder=HashingEmbedder(), settings=RepositorySettings(no_merging=True)
        ) as opened:
            await opened.admit(experience("something quite different"), 90.0)

    assert identity(spec) == before
    asyncio.run(more())
    assert identity(spec) != before and identity(spec)["own"]["repository"] == before["own"]["repository"]
    assert identity(ArmSpec(kind="maieutic.reat.arm:ReatArm"))["own"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observer": {"model": "o"}}, "no repository to retrieve from"),
        ({"repository": "x"}, "no observer to read"),
        ({"repository": "x", "observer": {"model": "o", "engine": {"kind": "hf"}}}, "must be chat"),
        ({"repository": "x", "observer": observer("http://x"), "retrieval": {"topk": 1}}, "topk"),
    ],
)
def test_options_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        ReatArm(None, **options)


def test_the_recipe_of_training_with_experience_loads() -> None:
    loaded = load_recipe("reat/train_with_experience")
    assert (
        loaded.env.kind == "maieutic.reat.arm:ExperiencedPersona" and loaded.env.options["post_test"] is True
    )


@pytest.mark.integration
@pytest.mark.parametrize("filled", [True, False])
def test_two_steps_of_training_with_experience_in_the_prompt(
    tmp_path: Path, tiny_model_dir: Path, filled: bool
) -> None:
    from maieutic.training import loop

    folder = repository(tmp_path / "repository")
    with InThread(Loopback(lambda b: json.dumps(DIAGNOSIS))) as server:
        options = (
            {"repository": str(folder), "observer": observer(server.url), "embedder": "hashing"}
            if filled
            else {}
        )
        data = recipe_dict(
            tiny_model_dir,
            tmp_path / "runs",
            **{
                "env.kind": "maieutic.reat.arm:ExperiencedTutoring",
                "env.options": options,
                "env.prompt_limit": 4_096,
                "training.max_steps": 2,
                "training.tokens_per_micro_batch": 8_192,
                "eval.every": 0,
                "checkpoint.every": 0,
            },
        )
        loop.run(Recipe.model_validate_json(json.dumps(data)))
        asked = len(server.bodies)
    run = tmp_path / "runs" / "run"
    rows = metrics_of(run)
    assert len(rows) >= 2
    episodes = list(read_episodes(run, "train"))
    assert len(episodes) == 2 * 2 * 2 and all(e.counted for e in episodes)
    fields = load_fields("near_transfer")
    want = fields.filled([experience("a")]) if filled else fields.empty()
    notes = {t.note for e in episodes for t in e.dialogue.turns if t.speaker == "student"}
    answered = [t for e in episodes for n, t in enumerate(e.dialogue.turns[:-1]) if t.speaker == "student"]
    assert {t.note for t in answered} == {want} and notes <= {want, ""}
    assert (asked > 0) == filled
    # Distilling RL episodes: our transcripts are what the Observer reads.
    report = asyncio.run(from_rl(run, tmp_path / "made"))
    assert report.turns + sum(report.skipped.values()) == sum(len(e.dialogue.by("tutor")) for e in episodes)
    assert report.turns > 0 and report.experiences + sum(report.dropped.values()) == report.turns
    with Repository.open(tmp_path / "made", read_only=True) as made:
        kept = made.experiences(every=True)
    assert {e.provenance.episode_id for e in kept} <= {e.id for e in episodes}
    assert kept and report.experiences > 0


async def from_rl(run: Path, folder: Path) -> Any:
    """A repository out of the transcripts of an RL run, with the rule-driven roles."""
    role = {"model": "rule", "engine": {"kind": "chat", "urls": ["loopback"]}}
    settings = DistilSection()
    async with connect_roles(
        OcmRoles.model_validate({"ocm": role}), settings, seed=0, ledger=Ledger()
    ) as connected:
        with Repository.open(folder, embedder=HashingEmbedder(), merge=connected.roles.merge) as made:
            return await distil(
                [run],
                connected.roles,
                made,
                settings,
                out=folder.parent / "out",
                ledger=Ledger(),
                in_flight=4,
            )

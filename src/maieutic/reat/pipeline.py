"""A REAT run as stages, each of which leaves files and a marker and is skipped when its marker is there:

    grow → variants → test → score → annotate → report

- *grow*: batches B0, B1, …: the prompt-only tutor and, from B1 on, REAT with the experience of the earlier batches; scores;
  utilities; distillation into ``repository/``.
- *variants*: the same dialogues distilled anew with one setting changed (ablations), or by other roles (OCM drivers).
- *test*: all arms on the held-out splits, other teachers, other data. The repositories are read only: nothing of a test flows back.
- *score*: the primary and the second judge. *annotate*: paired dialogues for people. *report*: Markdown, HTML, JSON.

A run folder belongs to one recipe. Everything asked of a judge or distiller lies in journals, so a run that was killed pays for
nothing twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from maieutic.env.base import Episode
from maieutic.errors import RecipeError, RunFolderError
from maieutic.evaluation.config import ArmSpec
from maieutic.latent.tasks import bounded
from maieutic.problems.build.checkpoint import Journal
from maieutic.problems.schema import ProblemPair
from maieutic.reat.classroom import Played, ReatClassroom, load_problem_sets
from maieutic.reat.config import ABLATIONS, OWN_REPOSITORY, PROMPT_ONLY, REAT, ReatRecipe, dump_reat_recipe
from maieutic.reat.distil import distil
from maieutic.reat.distil_config import DistilSection, OcmRoles
from maieutic.reat.exchange import copy_repository
from maieutic.reat.repository import Repository, RepositorySettings
from maieutic.reat.scored import read_scores, scores_file
from maieutic.reat.scoring import DialogueScore, feed_back, score_dialogue
from maieutic.reat.tutor import latency
from maieutic.report.page import write_page
from maieutic.seeds import derive
from maieutic.transcripts import FOLDER, TranscriptWriter, _plain, read_episodes, transcript_name

log = logging.getLogger(__name__)

STAGES = ("grow", "variants", "test", "score", "annotate", "report")
PRIMARY, SECOND = "primary", "second"


def write_json(path: Path, value: Any) -> None:
    """A JSON file, whole or not at all; numbers that JSON does not have become text."""
    write_page(path, json.dumps(_plain(value), indent=1, allow_nan=False) + "\n")


class ReatPipeline:
    """One run. ``say``: where progress lines go."""

    def __init__(self, recipe: ReatRecipe, say: Callable[[str], None] = log.info) -> None:
        self.recipe, self.say = recipe, say
        self.run = Path(recipe.output_dir) / recipe.name
        self.sets = load_problem_sets(recipe)

    def execute(self, until: str = STAGES[-1]) -> Path:
        """Run the stages up to ``until`` that are not done yet; returns the run folder."""
        if until not in STAGES:
            raise RecipeError(f"no stage {until!r}: there are {', '.join(STAGES)}")
        self._claim_folder()
        try:
            with FileLock(self.run / ".lock", timeout=0):
                for stage in STAGES[: STAGES.index(until) + 1]:
                    self._stage(stage)
        except Timeout:
            raise RunFolderError(f"{self.run}: another process is at work on this run") from None
        return self.run

    def _stage(self, stage: str) -> None:
        if self._marker(stage).exists():
            self.say(f"{stage}: done before")
            return
        started = time.perf_counter()
        result = asyncio.run(getattr(self, f"_{stage}")())
        seconds = time.perf_counter() - started
        self._note(stage, {"seconds": round(seconds, 3), **(result or {})})
        self.say(f"{stage}: {seconds:.1f} s")

    def _claim_folder(self) -> None:
        text, path = dump_reat_recipe(self.recipe), self.run / "recipe.yaml"
        try:
            (self.run / "stages").mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_page(path, text)
            elif path.read_text(encoding="utf-8") != text:
                raise RunFolderError(
                    f"{self.run} holds a run of another recipe ({path} differs): give the run another name, or remove the folder"
                )
        except OSError as error:
            raise RunFolderError(f"{self.run}: cannot be written: {error.strerror}") from error

    def _marker(self, stage: str) -> Path:
        return self.run / "stages" / f"{stage}.json"

    def _note(self, stage: str, value: Any) -> None:
        write_json(self._marker(stage), value)

    def result(self, stage: str) -> dict[str, Any]:
        """What a stage noted down."""
        data: dict[str, Any] = json.loads(self._marker(stage).read_text(encoding="utf-8"))
        return data

    # ---- files of an arm -----------------------------------------------------------------------------------------------

    def folder(self, where: str, arm: str) -> Path:
        """Transcripts of an arm: ``where`` is ``grow`` or the name of a test set."""
        return self.run / where / arm

    def episodes(self, where: str, arm: str, step: int = 0) -> list[Episode]:
        """The dialogues of an arm that were played."""
        return list(read_episodes(self.folder(where, arm), "eval", [step]))

    def scores(self, judge: str, where: str, arm: str, step: int = 0) -> list[DialogueScore]:
        """The scores of an arm's counted dialogues, in their order."""
        return read_scores(scores_file(self.run, judge, where, arm, step))

    async def _played(
        self,
        room: ReatClassroom,
        where: str,
        arm: str,
        pairs: Sequence[ProblemPair],
        *,
        step: int = 0,
        **how: Any,
    ) -> list[Episode]:
        """An arm's dialogues, played unless they are there."""
        found = self.episodes(where, arm, step)
        if len(found) == len(pairs):
            return found
        label = f"{where}-{step}" if where == "grow" else where
        played: Played = await room.play(label, arm, pairs, step=step, **how)
        notes = {"latency": latency(played.rounds), "counts": played.counts}
        # The notes first: whole transcripts are the sign that nothing of this is left to do.
        write_json(self.folder(where, arm) / f"tutor-{step}.json", notes)
        TranscriptWriter(self.folder(where, arm), arm=arm).write("eval", step, played.episodes)
        solved = sum(e.dialogue.end == "solved" for e in played.episodes)
        self.say(f"  {label} {arm}: {solved} of {len(played.episodes)} ended as understood")
        return played.episodes

    async def _scored(
        self,
        room: ReatClassroom,
        judge: str,
        where: str,
        arm: str,
        step: int = 0,
        journal: Path | None = None,
    ) -> list[DialogueScore]:
        """The judge's scores of an arm's counted dialogues, kept in a file."""
        path = scores_file(self.run, judge, where, arm, step)
        if path.exists():
            return self.scores(judge, where, arm, step)
        episodes = [e for e in self.episodes(where, arm, step) if e.counted]
        journal = journal or self.run / "scores" / judge / "journal.jsonl"
        name = transcript_name("eval", step)
        async with room.roles(self._judge(judge)) as connected, Journal(journal, room.ledger) as kept:
            connected.roles.keep_in(kept)

            async def one(episode: Episode) -> DialogueScore:
                return await score_dialogue(connected.roles, episode, name)

            found = await bounded(episodes, one, self.recipe.concurrency)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text("".join(json.dumps(s.as_dict()) + "\n" for s in found), encoding="utf-8")
        part.replace(path)
        return found

    def _judge(self, judge: str) -> OcmRoles:
        roles = self.recipe.roles
        found = roles.second_judge if judge == SECOND else roles.judge or roles.ocm
        assert found is not None
        return found

    @property
    def repository_folder(self) -> Path:
        """The run's repository."""
        return self.run / "repository"

    # ---- grow ------------------------------------------------------------------------------------------------------------

    async def _grow(self) -> dict[str, Any]:
        recipe = self.recipe
        if recipe.start_from is not None and not self.repository_folder.exists():
            copy_repository(Path(recipe.start_from), self.repository_folder)
        if not recipe.grow:
            return {"batches": []}
        notes: list[dict[str, Any]] = []
        async with ReatClassroom(recipe) as room:
            for b, pairs in enumerate(self.sets.batches):
                marker = self.run / "stages" / f"batch-{b}.json"
                if marker.exists():
                    notes.append(json.loads(marker.read_text(encoding="utf-8")))
                    continue
                note = await self._batch(room, b, pairs)
                write_json(marker, note)
                notes.append(note)
        return {"batches": notes, "usage": room.ledger.state()}

    async def _batch(self, room: ReatClassroom, b: int, pairs: Sequence[ProblemPair]) -> dict[str, Any]:
        recipe, tutor = self.recipe, self.recipe.roles.tutor
        await self._played(room, "grow", PROMPT_ONLY, pairs, step=b, tutor=tutor, repository=None)
        deployed, fed = PROMPT_ONLY, None
        # Scoring and distilling ask the same of Observer and Critic: with one journal it is paid for once.
        journal = None if recipe.roles.judge is not None else self.run / "distil" / "journal.jsonl"
        await self._scored(room, PRIMARY, "grow", PROMPT_ONLY, b, journal)
        if b > 0 or recipe.start_from is not None:
            with room.open_repository(self.repository_folder) as repository:
                await self._played(room, "grow", REAT, pairs, step=b, tutor=tutor, repository=repository)
            scores = await self._scored(room, PRIMARY, "grow", REAT, b, journal)
            counted = [e for e in self.episodes("grow", REAT, b) if e.counted]
            with room.open_repository(self.repository_folder, read_only=False) as repository:
                fed = asdict(feed_back(repository, counted, scores)) | {"means": None}
            deployed = REAT
        chosen = deployed if recipe.experience_of == "deployed" else PROMPT_ONLY
        file = self.folder("grow", chosen) / FOLDER / transcript_name("eval", b)
        write_json(self.run / "distil" / f"source-{b}.json", {"file": str(file.relative_to(self.run))})
        report = await self._distil(
            room, "main", self.repository_folder, recipe.roles.ocm, recipe.distil, upto=b + 1
        )
        with room.open_repository(self.repository_folder) as repository:
            size = len(repository)
        self.say(f"  B{b}: {size} experiences; {report['dropped']} dropped")
        return {"batch": b, "distilled": chosen, "feedback": fed, "distil": report, "experiences": size}

    async def _distil(
        self,
        room: ReatClassroom,
        name: str,
        repository: Path,
        roles: OcmRoles,
        settings: DistilSection,
        *,
        upto: int,
        maintenance: RepositorySettings | None = None,
    ) -> dict[str, Any]:
        """Distil the first ``upto`` batches' dialogues; what an earlier call has done is found in the journal and costs nothing."""
        sources = [
            json.loads((self.run / "distil" / f"source-{b}.json").read_text())["file"] for b in range(upto)
        ]
        out = self.run / "distil" if name == "main" else self.run / "distil" / name
        async with room.roles(roles, settings) as connected:
            with Repository.open(
                repository,
                embedder=room.embedder,
                settings=maintenance or self.recipe.repository,
                merge=connected.roles.merge,
            ) as sink:
                report = await distil(
                    [self.run / s for s in sources],
                    connected.roles,
                    sink,
                    settings,
                    out=out,
                    ledger=room.ledger,
                    in_flight=2 * connected.capacity,
                )
        return asdict(report)

    # ---- variants ----------------------------------------------------------------------------------------------------------

    async def _variants(self) -> dict[str, Any]:
        recipe = self.recipe
        out: dict[str, Any] = {}
        wanted = [a for a in recipe.test.arms if a in OWN_REPOSITORY]
        async with ReatClassroom(recipe) as room:
            for arm in wanted:
                change = OWN_REPOSITORY[arm]
                settings = recipe.distil.model_copy(update=change.get("distil", {}))
                maintenance = recipe.repository.model_copy(update=change.get("repository", {}))
                out[arm] = await self._variant(
                    room, arm, recipe.roles.ocm, settings, maintenance, recipe.problems.batches
                )
            for name, driver in recipe.transfer.drivers.items():
                out[f"driver:{name}"] = await self._variant(
                    room, f"driver-{name}", driver.roles, recipe.distil, recipe.repository, driver.batches
                )
        return {"distil": out, "usage": room.ledger.state()}

    async def _variant(
        self,
        room: ReatClassroom,
        name: str,
        roles: OcmRoles,
        settings: DistilSection,
        maintenance: RepositorySettings,
        batches: int,
    ) -> dict[str, Any]:
        journal = self.run / "distil" / name / "journal.jsonl"
        if not journal.exists():
            # What the main distillation was answered is the same question here wherever the settings leave it the same.
            journal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.run / "distil" / "journal.jsonl", journal)
        report = await self._distil(
            room,
            name,
            self.run / "repositories" / name,
            roles,
            settings,
            upto=batches,
            maintenance=maintenance,
        )
        self.say(f"  {name}: {report['experiences']} experiences, {report['admissions']}")
        return report

    # ---- test --------------------------------------------------------------------------------------------------------------

    def test_sets(self) -> list[tuple[str, Sequence[ProblemPair], list[str], ArmSpec]]:
        """(name, pairs, arms, teacher) of every test set; arms of an OCM driver are ``driver-<name>``."""
        recipe, tutor = self.recipe, self.recipe.roles.tutor
        out: list[tuple[str, Sequence[ProblemPair], list[str], ArmSpec]] = []
        every: list[str] = list(recipe.test.arms)
        main = [a for a in every if a not in ABLATIONS]
        for k, pairs in enumerate(self.sets.splits):
            arms = list(every if k < recipe.test.ablations_on else main)
            if k == 0:
                arms += [f"driver-{name}" for name in recipe.transfer.drivers]
            out.append((f"test-{k + 1}", pairs, arms, tutor))
        for name, spec in recipe.transfer.tutors.items():
            out.append((f"tutor-{name}", self.sets.splits[0], [PROMPT_ONLY, REAT], spec))
        for name, pairs in self.sets.others.items():
            out.append((f"data-{name}", pairs, [PROMPT_ONLY, REAT], tutor))
        return out

    async def _test(self) -> dict[str, Any]:
        async with ReatClassroom(self.recipe) as room:
            for where, pairs, arms, tutor in self.test_sets():
                for arm in arms:
                    await self._test_arm(room, where, arm, pairs, tutor)
        return {
            "sets": {w: {"pairs": len(p), "arms": a} for w, p, a, _ in self.test_sets()},
            "usage": room.ledger.state(),
        }

    async def _test_arm(
        self, room: ReatClassroom, where: str, arm: str, pairs: Sequence[ProblemPair], tutor: ArmSpec
    ) -> None:
        if arm == PROMPT_ONLY:
            await self._played(room, where, arm, pairs, tutor=tutor, repository=None)
            return
        own = arm in OWN_REPOSITORY or arm.startswith("driver-")
        folder = self.run / "repositories" / arm if own else self.repository_folder
        retrieval = self.recipe.retrieval
        if arm == "state_random":
            retrieval = retrieval.model_copy(
                update={"random_in_state": derive(self.recipe.seed, arm) % 2**31}
            )
        if arm == "no_state_filter":
            retrieval = retrieval.model_copy(update={"no_state_filter": True})
        with room.open_repository(folder) as repository:
            await self._played(
                room,
                where,
                arm,
                pairs,
                tutor=tutor,
                repository=repository,
                retrieval=retrieval,
                rewrite=arm != "no_rewrite",
            )

    async def _score(self) -> dict[str, Any]:
        judges = [PRIMARY] + ([SECOND] if self.recipe.roles.second_judge is not None else [])
        async with ReatClassroom(self.recipe) as room:
            for judge in judges:
                for where, _, arms, _ in self.test_sets():
                    for arm in arms:
                        await self._scored(room, judge, where, arm)
        return {"judges": judges, "usage": room.ledger.state()}

    async def _annotate(self) -> dict[str, Any]:
        from maieutic.reat.annotation import export_pairs

        count, where = self.recipe.annotate.pairs, "test-1"
        if not count or REAT not in self.recipe.test.arms:
            return {"exported": 0}
        arms = {arm: self.episodes(where, arm) for arm in (PROMPT_ONLY, REAT)}
        scores = {arm: self.scores(PRIMARY, where, arm) for arm in (PROMPT_ONLY, REAT)}
        exported = export_pairs(
            self.run / "annotation", arms[PROMPT_ONLY], arms[REAT], scores[PROMPT_ONLY], scores[REAT],
            limit=count, seed=self.recipe.seed,
        )  # fmt: skip
        return {"exported": exported}

    async def _report(self) -> dict[str, Any]:
        from maieutic.reat.report import write_reports

        return {"files": [p.name for p in write_reports(self)]}

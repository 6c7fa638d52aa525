"""The pipeline as stages, each of which leaves files and a marker and is skipped when its marker is there:

    mistakes → collect → label → train → augment → train_plus → evaluate → report

Inside a stage, dialogues are written in blocks and readings and labels at once: a run that was killed plays at most one block
again. A run folder belongs to one recipe; another one is refused there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from maieutic.env.base import Episode, Phase, Tutor
from maieutic.errors import RecipeError, RunFolderError
from maieutic.latent import augment as aug
from maieutic.latent import data as rows
from maieutic.latent.agreement import export_sample
from maieutic.latent.classroom import LatentClassroom, load_problem_sets, rule_answers
from maieutic.latent.config import LatentRecipe, dump_latent_recipe
from maieutic.latent.errors import LabelError, LatentDataError
from maieutic.latent.evaluate import compare, move_profile, plan, player
from maieutic.latent.features import feature_set
from maieutic.latent.fit import FitLog, FitSpec, Learner, fit
from maieutic.latent.moves import taxonomy
from maieutic.latent.ope import FqeSpec, fqe, scorer, wis
from maieutic.latent.policy import (
    HAND_RULES,
    FixedPolicy,
    NetPolicy,
    Policy,
    RandomPolicy,
    RulePolicy,
    load_policy,
)
from maieutic.latent.success import env_text, write_mistakes
from maieutic.latent.tasks import bounded
from maieutic.latent.transitions import Transitions, split_by_problem
from maieutic.latent.tutor import BranchTutor
from maieutic.problems.schema import ProblemPair
from maieutic.seeds import derive
from maieutic.transcripts import TranscriptWriter, read_episodes, transcript_steps

log = logging.getLogger(__name__)
J = TypeVar("J")

STAGES = ("mistakes", "collect", "label", "train", "augment", "train_plus", "evaluate", "report")
LEARNERS: tuple[Learner, ...] = ("bc", "fqi", "cql")
BLOCK = 256
"""Dialogues that are written together."""


def slug(arm: str) -> str:
    """File name of an arm."""
    return arm.replace("+", "_plus").replace("*", "_star").replace(":", "_")


class Pipeline:
    """One run. ``say``: where progress lines go."""

    def __init__(self, recipe: LatentRecipe, say: Callable[[str], None] = log.info) -> None:
        self.recipe, self.say = recipe, say
        self.run = Path(recipe.output_dir) / recipe.name
        self.seen, self.unseen = load_problem_sets(recipe)
        self._behaviour: NetPolicy | None = None
        # What a late stage would stumble over is refused before the first one.
        self.moves, self.features = taxonomy(recipe.labels.moves), feature_set(recipe.labels.features)
        for arm in recipe.evaluate.arms:
            if arm in ("random", "rule") or arm.startswith("fixed:"):
                self._plain_policy(arm)

    # ---- running ---------------------------------------------------------------------------------------------------

    def execute(self, until: str = STAGES[-1]) -> Path:
        """Run the stages up to ``until`` that are not done yet; returns the run folder."""
        if until not in STAGES:
            raise RecipeError(f"no stage {until!r}: there are {', '.join(STAGES)}")
        self._claim_folder()
        for stage in STAGES[: STAGES.index(until) + 1]:
            if self._marker(stage).exists():
                self.say(f"{stage}: done before")
                continue
            started = time.perf_counter()
            result = asyncio.run(getattr(self, f"_{stage}")())
            seconds = time.perf_counter() - started
            self._write_json(self._marker(stage), {"seconds": round(seconds, 3), **(result or {})})
            self.say(f"{stage}: {seconds:.1f} s")
        return self.run

    def _claim_folder(self) -> None:
        text = dump_latent_recipe(self.recipe)
        path = self.run / "recipe.yaml"
        try:
            (self.run / "stages").mkdir(parents=True, exist_ok=True)
            if path.exists() and path.read_text(encoding="utf-8") != text:
                raise RunFolderError(
                    f"{self.run} holds a run of another recipe ({path} differs): give the run another name, or remove the folder"
                )
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"{self.run}: cannot be written: {error.strerror}") from error

    def _marker(self, stage: str) -> Path:
        return self.run / "stages" / f"{stage}.json"

    def result(self, stage: str) -> dict[str, Any]:
        """What a stage noted down."""
        data: dict[str, Any] = json.loads(self._marker(stage).read_text(encoding="utf-8"))
        return data

    @staticmethod
    def _write_json(path: Path, value: Any) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(_plain(value), indent=1, allow_nan=False), encoding="utf-8")
        os.replace(temporary, path)

    def _room(self) -> LatentClassroom:
        known = self.run / "mistakes.json"
        mistakes = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
        by_text = {p.source.text: mistakes[p.id] for p in self.seen + self.unseen if p.id in mistakes}
        answers = rule_answers(self.seen + self.unseen)
        return LatentClassroom(self.recipe, answers, by_text, notes=self.run / "readings.jsonl")

    def _armed(self, pairs: list[ProblemPair]) -> list[ProblemPair]:
        """The pairs with their possible mistakes."""
        known = json.loads((self.run / "mistakes.json").read_text(encoding="utf-8"))
        return [
            p.model_copy(update={"provenance": {**p.provenance, "mistakes": known[p.id]}})
            if p.id in known
            else p
            for p in pairs
        ]

    async def _play(
        self,
        folder: Path,
        phase: Phase,
        first: int,
        jobs: Sequence[J],
        one: Callable[[J], Awaitable[Episode]],
        arm: str,
    ) -> list[Episode]:
        """The episode of every job, in order, kept as transcripts of steps ``first``, ``first`` + 1 … of :data:`BLOCK` each.
        A block that is there is read and not played again; ``jobs`` must be the same each time."""
        writer, there = TranscriptWriter(folder, arm=arm), set(transcript_steps(folder, phase))
        out: list[Episode] = []
        for step, at in enumerate(range(0, len(jobs), BLOCK), start=first):
            block = jobs[at : at + BLOCK]
            if step in there:
                found = list(read_episodes(folder, phase, [step]))
            else:
                found = await bounded(block, one, self.recipe.collect.concurrency)
                writer.write(phase, step, found)
            if len(found) != len(block):
                raise RunFolderError(
                    f"{folder}: step {step} holds {len(found)} dialogues, {len(block)} are expected: remove that file"
                )
            out += found
        return out

    # ---- data ------------------------------------------------------------------------------------------------------

    async def _mistakes(self) -> dict[str, Any]:
        count, out = self.recipe.collect.mistakes, {}
        without: list[str] = []
        if count:
            prompt = env_text(self.recipe.env.name, "mistakes.txt")
            pairs = self.seen + self.unseen
            async with self._room() as room:
                assert room.annotator is not None
                chat = room.annotator

                async def one(pair: ProblemPair) -> list[str] | LabelError:
                    seed = derive(self.recipe.seed, "mistakes", pair.id)
                    try:
                        return await write_mistakes(chat, prompt, pair, count=count, seed=seed)
                    except LabelError as error:
                        return error

                lists = await bounded(pairs, one, self.recipe.collect.concurrency)
            out = {p.id: m for p, m in zip(pairs, lists, strict=True) if isinstance(m, list)}
            without = [p.id for p in pairs if p.id not in out]
            if not out:
                raise next(m for m in lists if isinstance(m, LabelError))
            if without:
                self.say(
                    f"mistakes: none for {len(without)} of {len(pairs)} problems (first: {without[0]}): "
                    "their students make no particular one"
                )
        self._write_json(self.run / "mistakes.json", out)
        return {"problems": len(out), "without": without}

    async def _collect(self) -> dict[str, Any]:
        pairs, spec = self._armed(self.seen), self.recipe.collect
        async with self._room() as room:

            async def one(i: int) -> Episode:
                seed = derive(self.recipe.seed, "collect", i)
                return await room.play(room.prompt_tutor, pairs[i % len(pairs)], seed=seed, id=f"d-{i}")

            jobs = range(spec.dialogues)
            episodes = await self._play(self.run / "collect", "train", 0, jobs, one, "prompt")
        counted = [e for e in episodes if e.counted]
        return {
            "dialogues": len(episodes),
            "counted": len(counted),
            "solved": sum(e.dialogue.end == "solved" for e in counted),
        }

    async def _label(self) -> dict[str, Any]:
        episodes = list(read_episodes(self.run / "collect"))
        async with self._room() as room:
            data, drops = await self._transitions(room, episodes)
            features = room.features
        for line in drops.lines():
            self.say(f"label: {line}")
        rows.write_parquet(data, self.run / "d.parquet")
        exported = export_sample(
            self.run / "labels.csv",
            episodes,
            data,
            features,
            self.recipe.labels.agreement_sample,
            self.recipe.seed,
        )
        return {"drops": asdict(drops), "coverage": rows.coverage(data).as_dict(), "exported": exported}

    async def _transitions(
        self, room: LatentClassroom, episodes: list[Episode], skips: dict[str, int] | None = None
    ) -> tuple[Transitions, rows.Drops]:
        reward = self.recipe.reward
        return await rows.transitions_of(
            episodes,
            room.reader,
            room.labeller,
            room.moves,
            gamma=reward.gamma,
            reward=reward.kind,
            skips=skips,
            concurrency=self.recipe.collect.concurrency,
        )

    # ---- learning --------------------------------------------------------------------------------------------------

    def _fit_spec(self, name: str) -> FitSpec:
        values = self.recipe.fit.model_dump(exclude={"validation", "bootstrap"})
        values["hidden"] = tuple(values["hidden"])
        return FitSpec(**values, seed=derive(self.recipe.seed, "fit", name))

    def _split(self, data: Transitions) -> tuple[Transitions, Transitions]:
        """Validation problems are the same for D, D⁺ and the controls, and validation data are D's alone."""
        d = rows.read_parquet(self.run / "d.parquet")
        _, validation = split_by_problem(d, self.recipe.fit.validation, self.recipe.seed)
        held = sorted(set(validation.problems.tolist()))
        return data.select(~np.isin(data.problems, held)), validation

    def _learn(self, name: str, learner: Learner, data: Transitions) -> dict[str, Any]:
        train, validation = self._split(data)
        spec = self._fit_spec(name)
        try:
            train.check(moves=2)
        except LatentDataError as error:
            raise LatentDataError(f"the training data of {name!r}: {error}") from None
        # Cloning has a target of its own: it is not selected by the value that it would earn.
        score = None if learner == "bc" else scorer(validation)
        policy, note = fit(learner, train, spec, score=score)
        policy.save(self.run / "policies" / f"{slug(name)}.pt")
        if self._behaviour is None:
            # One behaviour policy for all: that of D, whose few validation problems may not hold every move.
            seed = derive(self.recipe.seed, "fit", "behaviour")
            self._behaviour, _ = fit(
                "bc", rows.read_parquet(self.run / "d.parquet"), FitSpec(steps=400, seed=seed)
            )
        boot = self.recipe.fit.bootstrap
        ope = {
            "fqe": asdict(fqe(validation, policy, FqeSpec(bootstrap=boot))),
            "wis": asdict(wis(validation, _soft(policy), self._behaviour, bootstrap=boot)),
        }
        self.say(
            f"  {name}: {_log_line(note)}, FQE {ope['fqe']['value']:+.3f} [{ope['fqe']['low']:+.3f}, {ope['fqe']['high']:+.3f}]"
        )
        return {"log": asdict(note), "rows": len(train), "ope": ope}

    async def _train(self) -> dict[str, Any]:
        (self.run / "policies").mkdir(exist_ok=True)
        d = rows.read_parquet(self.run / "d.parquet")
        return {name: self._learn(name, name, d) for name in LEARNERS}

    def _policy(self, arm: str) -> NetPolicy:
        return load_policy(self.run / "policies" / f"{slug(arm)}.pt")

    async def _augment(self) -> dict[str, Any]:
        spec = self.recipe.augment
        out = {"optimistic": await self._augment_by("optimistic", [spec.states] * spec.rounds)}
        # The controls have the budget that was used, which is less than N where Q agrees with the log nearly everywhere.
        used = [r["states"] for r in out["optimistic"]["rounds"]]
        for how in spec.controls:
            out[how] = await self._augment_by(how, used)
        return out

    async def _augment_by(self, how: aug.How, budget: Sequence[int]) -> dict[str, Any]:
        """``budget``: the most states to branch off from, by round."""
        spec, seed = self.recipe.augment, self.recipe.seed
        d = rows.read_parquet(self.run / "d.parquet")
        train, _ = self._split(d)
        episodes = {e.id: e for e in read_episodes(self.run / "collect")}
        current, q, notes, exploratory = train, self._policy("fqi"), [], []
        tried: set[int] = set()
        for number, states in enumerate(budget, start=1):
            tag = f"{how}-{number}"
            try:
                branches = aug.select(
                    current,
                    q,
                    states,
                    how=how,
                    spread=spec.spread,
                    per_episode=spec.per_episode,
                    tried=tried,
                    seed=derive(seed, tag),
                )
            except LatentDataError as error:
                if number == 1:
                    raise
                self.say(f"  {tag}: {error}")
                break
            tried |= {b.row for b in branches}
            played, parents, skips = await self._branch(how, number, branches, episodes, q)
            async with self._room() as room:
                new, drops = await self._transitions(room, played, skips)
            report = aug.report(how, current, branches, new, parents)
            self.say(
                f"  {tag}: {report.episodes} continuations of {report.states} states, success {report.success_share:.2f} "
                f"(their origins: {report.success_share_before:.2f})"
            )
            notes.append(asdict(report) | {"drops": asdict(drops)})
            exploratory.append(new)
            episodes |= {e.id: e for e in played}
            current = aug.augmented(current, new)
            if number < len(budget):
                q, _ = fit("fqi", current, self._fit_spec(tag), score=None)
        rows.write_parquet(current, self.run / f"d_{how}.parquet")
        if how == "optimistic":
            alone = exploratory[0] if len(exploratory) == 1 else aug.concatenate(*exploratory)
            rows.write_parquet(alone, self.run / "d_star.parquet")
        return {"rounds": notes, "rows": len(current)}

    async def _branch(
        self,
        how: aug.How,
        number: int,
        branches: list[aug.Branch],
        episodes: dict[str, Episode],
        q: NetPolicy,
    ) -> tuple[list[Episode], dict[str, int], dict[str, int]]:
        """Continue every branch M times. Returns the episodes, the branch of each, and the tutor turns before each branch."""
        spec, tag = self.recipe.augment, f"{how}-{number}"
        jobs = [(b, m) for b in range(len(branches)) for m in range(spec.repeats)]
        if spec.continuation == "greedy":
            onward: Policy = NetPolicy(
                q.net, q.standardise, q.kind, q.feature_names, q.move_names, q.meta, epsilon=spec.epsilon
            )
        else:
            bc = self._policy("bc")
            onward = NetPolicy(
                bc.net, bc.standardise, bc.kind, bc.feature_names, bc.move_names, bc.meta, sample_logits=True
            )
        parents = {f"{tag}-{b}-{m}": b for b, m in jobs}
        skips = {f"{tag}-{b}-{m}": branches[b].turn for b, m in jobs}
        async with self._room() as room:
            then = room.latent_tutor(onward)

            async def one(job: tuple[int, int]) -> Episode:
                b, m = job
                branch = branches[b]
                origin = episodes[branch.episode]
                turns = origin.dialogue.turns
                at = [n for n, t in enumerate(turns) if t.speaker == "tutor"][branch.turn]
                prefix = turns[:at]
                id = f"{tag}-{b}-{m}"
                tutor = BranchTutor(room.moves.names[branch.move], room.writer, then, prefix)
                seed = derive(self.recipe.seed, "branch", id)
                return await room.play(tutor, origin.pair, seed=seed, id=id, start=prefix)

            # Steps of a round do not meet those of another: a round has fewer than a million blocks.
            folder, first = self.run / "augment" / how, number * 1_000_000
            played = await self._play(folder, "train", first, jobs, one, how)
        return played, parents, skips

    async def _train_plus(self) -> dict[str, Any]:
        plus = rows.read_parquet(self.run / "d_optimistic.parquet")
        out = {f"{name}+": self._learn(f"{name}+", name, plus) for name in LEARNERS}
        out["bc*"] = self._learn("bc*", "bc", rows.read_parquet(self.run / "d_star.parquet"))
        for how in self.recipe.augment.controls:
            out[f"cql+{how}"] = self._learn(
                f"cql+{how}", "cql", rows.read_parquet(self.run / f"d_{how}.parquet")
            )
        return out

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def _tutor(self, arm: str, room: LatentClassroom) -> Tutor:
        if arm == "prompt":
            return room.prompt_tutor
        if arm in ("random", "rule") or arm.startswith("fixed:"):
            return room.latent_tutor(self._plain_policy(arm))
        return room.latent_tutor(self._policy(arm))

    def _plain_policy(self, arm: str) -> Policy:
        """The policy of an arm that learns nothing."""
        names = self.moves.names
        if arm == "random":
            return RandomPolicy(len(names))
        if arm == "rule":
            try:
                return RulePolicy(self.features.names, names, HAND_RULES, "ask")
            except ValueError as error:
                raise RecipeError(
                    f"evaluate.arms: 'rule' is written for the moves of paper-4, labels.moves is {self.moves.name}: {error}"
                ) from None
        move = arm.removeprefix("fixed:")
        if move not in names:
            raise RecipeError(
                f"evaluate.arms: {arm!r}: taxonomy {self.moves.name} has the moves {', '.join(names)}"
            )
        return FixedPolicy(names.index(move), len(names))

    async def _evaluate(self) -> dict[str, Any]:
        spec = self.recipe.evaluate
        slots = plan(
            self._armed(self.seen),
            self._armed(self.unseen),
            conversations=spec.conversations,
            generalisation=spec.generalisation,
            other=self.recipe.roles.other_student is not None,
            seed=self.recipe.seed,
        )
        played: dict[str, list[Episode]] = {}
        width = self.recipe.collect.concurrency
        async with self._room() as room:
            profiles = {}
            for arm in spec.arms:
                one = player(room, arm, self._tutor(arm, room))
                folder = self.run / "eval" / slug(arm)
                played[arm] = found = await self._play(folder, "eval", 0, slots, one, arm)
                profiles[arm] = await move_profile(room, found, slots, width)
                wins = sum(e.dialogue.end == "solved" for e in found)
                self.say(f"  {arm}: {wins} of {len(found)} solved")
        results = compare(
            played,
            slots,
            baseline=spec.baseline,
            level=spec.level,
            resamples=spec.resamples,
            seed=self.recipe.seed,
        )
        for arm, (shares, counts) in profiles.items():
            results[arm].profile, results[arm].profile_n = shares, counts
        return {"arms": {a: r.as_dict() for a, r in results.items()}, "slots": len(slots)}

    async def _report(self) -> dict[str, Any]:
        from maieutic.latent.report import write_reports

        results = {s: self.result(s) for s in STAGES if s != "report"}
        return {"files": [str(p.name) for p in write_reports(self.run, self.recipe, results)]}


def _soft(policy: NetPolicy) -> NetPolicy:
    """The policy with a tenth of random moves, so that importance weights are not all zero."""
    if policy.kind == "logits":
        return NetPolicy(
            policy.net,
            policy.standardise,
            policy.kind,
            policy.feature_names,
            policy.move_names,
            policy.meta,
            sample_logits=True,
        )
    return NetPolicy(
        policy.net,
        policy.standardise,
        policy.kind,
        policy.feature_names,
        policy.move_names,
        policy.meta,
        epsilon=0.1,
    )


def _log_line(note: FitLog) -> str:
    return f"{note.steps} steps (kept {note.best_step}{', stopped early' if note.stopped_early else ''})"


def _plain(value: Any) -> Any:
    """JSON without NaN: a number that does not exist is null."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value.item() if isinstance(value, np.generic) else value

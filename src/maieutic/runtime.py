"""From a recipe to its parts, in memory: engines, tutor, students, judge, environment, grader, problems.

Models are loaded once: a student of the tutor's own model is the policy with its adapter off; students of one model share
it. Whatever a user names by import path is built by :mod:`maieutic.env.build`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maieutic.check import own_part_errors, resolve
from maieutic.config import JudgeSpec, ModelSpec, Recipe, StudentSpec
from maieutic.engines.base import ChatModel, Engine, Sampling
from maieutic.engines.connect import connect_chat, connect_vllm
from maieutic.engines.hf import HfEngine
from maieutic.engines.local_chat import LocalChat
from maieutic.engines.push import DiskPush, WeightPush
from maieutic.engines.push_lora import LoraPush
from maieutic.engines.push_nccl import NcclPush
from maieutic.engines.usage import Ledger
from maieutic.engines.vllm import VllmEngine
from maieutic.env.base import Episode, Judge, Student
from maieutic.env.build import make_environment, make_judge, make_student
from maieutic.env.play import Environment, draw_student
from maieutic.env.prompts import EnvTemplates, load_env
from maieutic.errors import ModelError, RecipeError
from maieutic.grading import Grader
from maieutic.problems import LoadReport, ProblemPair, load_problems
from maieutic.rollout import Slot
from maieutic.seeds import derive
from maieutic.tokens import Renderer
from maieutic.training.policy import Policy, build_policy, load_model, load_tokenizer, model_dtype
from maieutic.training.push_probe import make_scorer, probe_tolerance
from maieutic.training.trajectory import Segment, Trajectory
from maieutic.tutors import PolicyTutor

__all__ = ["Classroom", "Policy", "build_classroom", "build_policy", "build_students", "resolve_env"]

log = logging.getLogger(__name__)

_PROBE_PROMPTS, _PROBE_TOKENS = 4, 32
_PUSH_PROBE_TOKENS = 256
"""Last tokens of a training prompt that a weight push is compared on."""


def resolve_env(recipe: Recipe) -> Recipe:
    """The recipe with its environment's own defaults filled in.

    Raises :class:`~maieutic.errors.RecipeError` for an import path that names nothing, before any model loads.
    """
    if errors := own_part_errors(recipe):
        raise RecipeError("; ".join(errors))
    return resolve(recipe)


@dataclass
class Classroom:
    """Everything that plays episodes (rank 0 only)."""

    recipe: Recipe
    env: Environment
    engine: Engine
    """The tutor's."""
    tutor: PolicyTutor
    eval_tutor: PolicyTutor
    students: list[Student]
    judge: Judge
    grader: Grader
    train_pairs: list[ProblemPair]
    eval_pairs: list[ProblemPair]
    problems: LoadReport
    chats: list[Any] = field(default_factory=list)
    """Chat models of students and judge."""
    ledger: Ledger = field(default_factory=Ledger)
    """What all servers were asked and what it cost."""
    pusher: WeightPush | None = None
    """Brings weights to the tutor's servers; None where the engine shares the trainer's model."""
    started: bool = False

    async def play_train(self, slot: Slot) -> Episode:
        """One training episode, with the token record of its tutor."""
        episode = await self._play(self.tutor, slot)
        episode.trajectory = self.tutor.trajectory(episode)
        return episode

    async def play_eval(self, slot: Slot) -> Episode:
        """One held-out episode, at the evaluation's sampling."""
        return await self._play(self.eval_tutor, slot)

    async def _play(self, tutor: PolicyTutor, slot: Slot) -> Episode:
        student = draw_student(self.students, [s.weight for s in self.recipe.students], slot.seed)
        version = self.engine.policy_version
        episode = await self.env.play(
            tutor,
            student,
            self.judge,
            self.grader,
            slot.pair,
            seed=slot.seed,
            id=slot.id,
            group_id=slot.group_id,
            phase=slot.phase,
            step=slot.step,
            index=slot.index,
        )
        episode.policy_version = version
        return episode

    async def start(self) -> None:
        """Wait for all servers, and learn what they serve; a second call does nothing."""
        if self.started:
            return
        if isinstance(self.engine, VllmEngine):
            await self.engine.start()
        for chat in self.chats:
            await chat.start()
        self.started = True

    async def new_step(self, policy_version: int) -> None:
        """Weights have changed: servers get them, and engines (those of students and judge too) drop what they cached."""
        await self.start()
        if self.pusher is not None:
            await self.pusher.push(policy_version)
        await self.engine.new_step(policy_version)
        for chat in self.chats:
            if isinstance(chat, LocalChat):
                await chat.new_step(policy_version)

    async def verify(self) -> None:
        """After a rollout: the tutor's servers still hold the weights that it was meant to be played with."""
        if self.pusher is not None:
            await self.pusher.verify()

    def metrics(self) -> dict[str, float]:
        """Usage of servers (cumulative) and the last weight push, for the row of a step."""
        out = self.ledger.metrics()
        if self.pusher is not None and self.pusher.report is not None:
            report = self.pusher.report
            out["push/probe_gap"] = report.probe_gap
            out["push/megabytes"] = report.bytes / 1e6
            out["push/servers_lost"] = float(report.lost)
            out["time/push"] = report.write_s + report.load_s + report.probe_s
        return out

    async def probe(self, policy_version: int) -> list[Trajectory]:
        """A few continuations of training problems with their sampling log-probs, for the start-up check."""
        await self.new_step(policy_version)
        spec = self.recipe.tutor.sampling
        sampling = Sampling(spec.temperature, spec.top_p, min(_PROBE_TOKENS, self.recipe.env.tutor_cap))
        out: list[Trajectory] = []
        for number, pair in enumerate(self.train_pairs):
            if len(out) == _PROBE_PROMPTS:
                break
            ids = self.tutor.prompt_ids(self.env.new_dialogue(pair, f"probe-{number}"))
            if len(ids) > self.recipe.env.prompt_limit:
                continue  # its episodes are excluded one by one; the run goes on with the others
            (sample,) = await self.engine.generate(
                ids, sampling, seed=derive(self.recipe.seed, "probe", number)
            )
            n = len(sample.ids)
            segment = Segment(
                [*ids, *sample.ids],
                [False] * len(ids) + [True] * n,
                [0.0] * len(ids) + list(sample.logprobs),
                sample.policy_version,
            )
            out.append(Trajectory(f"probe-{number}", "probe", [segment], 0.0, sampling.temperature))
        return out

    async def close(self) -> None:
        """Free engines and grading workers."""
        try:
            for part in (self.engine, *self.chats):
                await part.close()
            close = getattr(self.env, "close", None)  # a user's own environment may hold models of its own
            if close is not None:
                await close()
        finally:
            self.grader.close()


def build_classroom(recipe: Recipe, policy: Policy) -> Classroom:
    """The parts that play a resolved recipe's episodes around ``policy``."""
    templates = load_env(recipe.env.name)
    env = make_environment(recipe.env, recipe.reward)
    spec = recipe.tutor
    ledger = Ledger(recipe.spending_limit_usd)
    engine: Engine
    if spec.engine.kind == "vllm":
        engine = connect_vllm(spec.engine, role="tutor", ledger=ledger)
    else:
        engine = HfEngine(
            policy.model,
            pad_id=pad_id(policy.tokenizer),
            max_batch_size=spec.engine.max_batch_size,
            cache_tokens=spec.engine.cache_tokens,
        )
    renderer = make_renderer(spec, policy.tokenizer, thinking=spec.thinking)

    def tutor(sampling: Sampling) -> PolicyTutor:
        return PolicyTutor(
            engine, renderer, env.templates, env.env, sampling, thinking_history=spec.thinking_history
        )

    models = _Models(recipe, policy, ledger)
    students = models.students(templates)
    judge = models.judge(templates)
    train, held_out, report = load_problems(
        recipe.problems, [s.key for s in students], offline=recipe.offline
    )
    for line in report.lines():
        log.info("problems: %s", line)
    train_tutor = tutor(Sampling(spec.sampling.temperature, spec.sampling.top_p, recipe.env.tutor_cap))
    pusher = None
    if isinstance(engine, VllmEngine):
        dialogues = [env.new_dialogue(pair, "push-probe") for pair in train[:_PROBE_PROMPTS]]
        prompts = [train_tutor.prompt_ids(d)[-_PUSH_PROBE_TOKENS:] for d in dialogues]
        pusher = _pusher(recipe, policy, engine, prompts)
    return Classroom(
        recipe=recipe,
        env=env,
        engine=engine,
        tutor=train_tutor,
        eval_tutor=tutor(Sampling(recipe.eval.temperature, recipe.eval.top_p, recipe.env.tutor_cap)),
        students=students,
        judge=judge,
        grader=Grader(),
        train_pairs=train,
        eval_pairs=held_out,
        problems=report,
        chats=models.opened,
        ledger=ledger,
        pusher=pusher,
    )


def _pusher(recipe: Recipe, policy: Policy, engine: VllmEngine, probe: Sequence[Sequence[int]]) -> WeightPush:
    spec, shared = recipe.tutor.engine, policy.shared_scorer
    folder = Path(spec.push_folder) if spec.push_folder else Path(recipe.output_dir) / recipe.name / "push"
    settings: dict[str, Any] = {
        "probe": probe,
        "score": make_scorer(policy.model, recipe.training.logit_chunk)
        if shared is None
        else shared.on(probe),
        "tolerance": (
            probe_tolerance(recipe, next(policy.model.parameters())) if shared is None else shared.tolerance
        ),
        "timeout_s": spec.push_timeout_s,
        "patience_s": spec.http.outage_limit_s,
    }
    if spec.push == "lora":
        return LoraPush(policy.model, engine, folder, **settings)
    if spec.push == "nccl":
        return NcclPush(policy.model, engine, model_waits=not recipe.training.staleness, **settings)
    return DiskPush(policy.model, engine, folder, **settings)


def build_students(recipe: Recipe, ledger: Ledger | None = None) -> list[Student]:
    """The students of a recipe alone, without a tutor (for measuring their solve rates). ``ledger``: what counts their usage.

    Those of kind ``model`` are started and closed by their user (:meth:`~maieutic.env.student.ModelStudent.start`).
    """
    if ledger is None:
        ledger = Ledger(recipe.spending_limit_usd)
    return _Models(resolve(recipe), None, ledger).students(load_env(recipe.env.name))


def build_judge(recipe: Recipe, ledger: Ledger) -> tuple[Judge, list[Any]]:
    """The judge of a (resolved) recipe alone, and the chat models to start and close."""
    models = _Models(recipe, None, ledger)
    return models.judge(load_env(recipe.env.name)), models.opened


def make_renderer(spec: ModelSpec, tokenizer: Any, *, thinking: bool | None = None) -> Renderer:
    """The tokenizer with its chat template, or with the file that ``chat_template`` names."""
    template = None
    if spec.chat_template is not None:
        try:
            with open(spec.chat_template, encoding="utf-8") as file:
                template = file.read()
        except OSError as error:
            raise ModelError(
                f"chat_template {spec.chat_template!r} cannot be read: {error.strerror}"
            ) from error
    return Renderer(tokenizer, thinking=thinking, chat_template=template)


def pad_id(tokenizer: Any) -> int:
    """A token to fill rows with; which one does not matter, as it is never attended to."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0):
        if candidate is not None:
            return int(candidate)
    raise AssertionError("unreachable")


def _judge_model(spec: JudgeSpec) -> ModelSpec:
    assert spec.model is not None, "config checks that an llm judge names its model"
    return ModelSpec(model=spec.model, dtype=spec.dtype, engine=spec.engine)


class _Models:
    """Models of students and judge, each loaded once; ``policy``: what a student of the tutor's model may share."""

    def __init__(self, recipe: Recipe, policy: Policy | None, ledger: Ledger) -> None:
        import torch

        self.recipe, self.policy, self.ledger = recipe, policy, ledger
        self.device = (
            next(policy.model.parameters()).device
            if policy is not None
            else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
        self.opened: list[Any] = []
        self._loaded: dict[tuple[str, str | None, str], Any] = {}

    def students(self, templates: EnvTemplates) -> list[Student]:
        """All students of the recipe, in its order."""
        return [
            make_student(
                spec,
                templates,
                self.recipe.env,
                self._chat(spec, "student") if spec.kind == "model" else None,
            )
            for spec in self.recipe.students
        ]

    def judge(self, templates: EnvTemplates) -> Judge:
        """The judge of the recipe, on its model where it has one."""
        spec = self.recipe.judge
        chat = self._chat(_judge_model(spec), "judge") if spec.kind == "llm" else None
        return make_judge(spec, templates, chat)

    def _chat(self, spec: ModelSpec, role: str) -> ChatModel:
        """A model as a chat model; its name is ``spec.model`` whatever the engine, so solve rates stay valid."""
        if spec.engine.kind == "chat":
            http = connect_chat(spec.engine, spec.model, role=role, ledger=self.ledger)
            self.opened.append(http)
            return http
        tokenizer = load_tokenizer(spec, offline=self.recipe.offline)
        if spec.engine.kind == "vllm":
            engine = connect_vllm(spec.engine, role=role, ledger=self.ledger)
            local = LocalChat(engine, make_renderer(spec, tokenizer), name=spec.model)
            self.opened.append(local)
            return local
        shared = isinstance(spec, StudentSpec) and self._shares(spec)
        hf = HfEngine(
            self.policy.model if shared and self.policy else self._model(spec),
            pad_id=pad_id(tokenizer),
            max_batch_size=spec.engine.max_batch_size,
            cache_tokens=spec.engine.cache_tokens,
            adapter="off" if shared else "on",
        )
        if shared:
            log.info(
                "a student is %s too, the tutor's model with the adapter off: one copy in memory", spec.model
            )
        chat = LocalChat(hf, make_renderer(spec, tokenizer), name=spec.model)
        self.opened.append(chat)
        return chat

    def _shares(self, spec: StudentSpec) -> bool:
        tutor = self.recipe.tutor
        return (
            self.policy is not None
            # Played while the policy is trained, a student needs weights (and adapter switches) of its own.
            and not self.recipe.training.staleness
            and self.policy.is_adapter
            and self.policy.base_is_pure
            and (spec.model, spec.revision, spec.dtype) == (tutor.model, tutor.revision, tutor.dtype)
        )

    def _model(self, spec: ModelSpec) -> Any:
        key = (spec.model, spec.revision, spec.dtype)
        if key not in self._loaded:
            model = load_model(
                spec.model,
                model_dtype(spec, self.device),
                self.device,
                revision=spec.revision,
                offline=self.recipe.offline,
            )
            self._loaded[key] = model.requires_grad_(False)
        return self._loaded[key]

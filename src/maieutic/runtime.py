"""From a recipe to its parts, in memory: engines, tutor, students, judge, environment, grader, problems.

Models are loaded once: a student of the tutor's own model is the policy with its adapter off; students of one model share
it. Whatever a user names by import path is built by :mod:`maieutic.env.build`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from maieutic.check import resolve
from maieutic.config import ModelSpec, Recipe, StudentSpec
from maieutic.engines.base import ChatModel, Engine, Sampling
from maieutic.engines.hf import HfEngine
from maieutic.engines.local_chat import LocalChat
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
from maieutic.training.trajectory import Segment, Trajectory
from maieutic.tutors import PolicyTutor

__all__ = ["Classroom", "Policy", "build_classroom", "build_policy", "build_students", "resolve_env"]

log = logging.getLogger(__name__)

_PROBE_PROMPTS, _PROBE_TOKENS = 4, 32


def resolve_env(recipe: Recipe) -> Recipe:
    """The recipe with its environment's own defaults filled in."""
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
    closing: list[Any] = field(default_factory=list)
    """Engines and chat models to be closed."""

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

    async def new_step(self, policy_version: int) -> None:
        """Weights have changed: engines drop what they cached."""
        await self.engine.new_step(policy_version)

    async def probe(self, policy_version: int) -> list[Trajectory]:
        """A few continuations of training problems with their sampling log-probs, for the start-up check."""
        await self.new_step(policy_version)
        spec = self.recipe.tutor.sampling
        sampling = Sampling(spec.temperature, spec.top_p, min(_PROBE_TOKENS, self.recipe.env.tutor_cap))
        out = []
        for number, pair in enumerate(self.train_pairs[:_PROBE_PROMPTS]):
            ids = self.tutor.prompt_ids(self.env.new_dialogue(pair, f"probe-{number}"))
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
        for part in self.closing:
            await part.close()
        self.grader.close()


def build_classroom(recipe: Recipe, policy: Policy) -> Classroom:
    """The parts that play a resolved recipe's episodes around ``policy``."""
    templates = load_env(recipe.env.name)
    env = make_environment(recipe.env, recipe.reward)
    spec = recipe.tutor
    if spec.engine.kind != "hf":
        raise RecipeError(f"tutor.engine.kind is {spec.engine.kind!r}: training has the engine hf so far")
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

    models = _Models(recipe, policy)
    students = models.students(templates)
    train, held_out, report = load_problems(
        recipe.problems, [s.key for s in students], offline=recipe.offline
    )
    for line in report.lines():
        log.info("problems: %s", line)
    return Classroom(
        recipe=recipe,
        env=env,
        engine=engine,
        tutor=tutor(Sampling(spec.sampling.temperature, spec.sampling.top_p, recipe.env.tutor_cap)),
        eval_tutor=tutor(Sampling(recipe.eval.temperature, recipe.eval.top_p, recipe.env.tutor_cap)),
        students=students,
        judge=make_judge(recipe.judge),
        grader=Grader(),
        train_pairs=train,
        eval_pairs=held_out,
        problems=report,
        closing=[engine, *models.opened],
    )


def build_students(recipe: Recipe) -> list[Student]:
    """The students of a recipe alone, without a tutor (for measuring their solve rates)."""
    return _Models(resolve(recipe), None).students(load_env(recipe.env.name))


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


class _Models:
    """Student models, each loaded once; ``policy``: what a student of the tutor's model may share."""

    def __init__(self, recipe: Recipe, policy: Policy | None) -> None:
        import torch

        self.recipe, self.policy = recipe, policy
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
            make_student(spec, templates, self.recipe.env, self._chat(spec) if spec.kind == "model" else None)
            for spec in self.recipe.students
        ]

    def _chat(self, spec: StudentSpec) -> ChatModel:
        if spec.engine.kind != "hf":
            raise RecipeError(
                f"students.engine.kind is {spec.engine.kind!r}: students have the engine hf so far"
            )
        tokenizer = load_tokenizer(spec, offline=self.recipe.offline)
        shared = self._shares(spec)
        engine = HfEngine(
            self.policy.model if shared and self.policy else self._model(spec),
            pad_id=pad_id(tokenizer),
            max_batch_size=spec.engine.max_batch_size,
            cache_tokens=spec.engine.cache_tokens,
            adapter="off" if shared else "on",
        )
        if shared:
            log.info("student %s is the tutor's model with the adapter off: one copy in memory", spec.name)
        chat = LocalChat(engine, make_renderer(spec, tokenizer), name=spec.model)
        self.opened.append(chat)
        return chat

    def _shares(self, spec: StudentSpec) -> bool:
        tutor = self.recipe.tutor
        return (
            self.policy is not None
            and self.policy.is_adapter
            and self.policy.base_is_pure
            and (spec.model, spec.revision, spec.dtype) == (tutor.model, tutor.revision, tutor.dtype)
        )

    def _model(self, spec: StudentSpec) -> Any:
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

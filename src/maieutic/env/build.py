"""From recipe sections to environments, judges, students and tutors: the shipped ones by name, a user's own by import path."""

from __future__ import annotations

from maieutic.config import EnvSpec, JudgeSpec, RewardSpec, StudentSpec, TutorSpec
from maieutic.engines.base import ChatModel, Sampling
from maieutic.engines.chat import HttpChat
from maieutic.env.base import Judge, Student, Tutor
from maieutic.env.imports import build
from maieutic.env.llm_judge import LlmJudge
from maieutic.env.play import Environment
from maieutic.env.prompts import EnvTemplates, load_env
from maieutic.env.rule_judge import RuleJudge
from maieutic.env.student import ModelStudent
from maieutic.errors import RecipeError


def make_environment(env: EnvSpec, reward: RewardSpec) -> Environment:
    """The environment of a recipe. A user's own class is called as ``Class(env, reward, templates, **options)``."""
    templates = load_env(env.name)
    if env.kind == "tutoring":
        return Environment(env, reward, templates)
    made: Environment = build(env.kind, "env.kind", Environment, env, reward, templates, options=env.options)
    return made


def make_judge(
    spec: JudgeSpec, templates: EnvTemplates | None = None, chat: ChatModel | None = None
) -> Judge:
    """``rule``, ``llm`` on ``chat`` with the rubrics of ``templates``, or a user's own class, called as ``Class(**options)``."""
    if spec.kind == "llm":
        if chat is None or templates is None:
            raise ValueError("a judge of kind 'llm' needs a chat model and the environment's templates")
        if spec.options:
            raise RecipeError(f"judge.options: {spec.options}: a judge of kind llm takes none")
        sampling = Sampling(spec.sampling.temperature, spec.sampling.top_p, spec.sampling.max_tokens)
        # Only endpoints that are asked by messages take a JSON schema.
        structured = spec.structured and isinstance(chat, HttpChat)
        return LlmJudge(
            chat, templates, sampling, votes=spec.votes, reasks=spec.reasks, structured=structured
        )
    if spec.kind != "rule":
        own: Judge = build(spec.kind, "judge.kind", Judge, options=spec.options)
        return own
    try:
        return RuleJudge(**spec.options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"judge.options: {spec.options}: {error}") from error


def make_student(
    spec: StudentSpec, templates: EnvTemplates, env: EnvSpec, chat: ChatModel | None = None
) -> Student:
    """A student on ``chat``, or a user's own class, called as ``Class(**options)``. ``env`` is the resolved one."""
    if spec.kind != "model":
        own: Student = build(spec.kind, "students.kind", Student, options=spec.options)
        return own
    if chat is None:
        raise ValueError(f"student {spec.name!r} of kind 'model' needs a chat model")
    return ModelStudent(chat, spec, templates, env)


def make_own_tutor(spec: TutorSpec) -> Tutor:
    """A user's own tutor, called as ``Class(**options)``."""
    if spec.kind == "policy":
        raise ValueError("tutor.kind is 'policy': that tutor is made from an engine")
    own: Tutor = build(spec.kind, "tutor.kind", Tutor, options=spec.options)
    return own

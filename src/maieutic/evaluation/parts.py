"""What suites share: the response cache, the ledger, the experiment's environment and students, judges and graders, opened once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from maieutic.config import JudgeSpec, ModelSpec, Recipe
from maieutic.engines.base import ChatModel, Sampling
from maieutic.engines.chat import HttpChat
from maieutic.env.base import Judge, Student
from maieutic.env.build import make_environment, make_judge
from maieutic.env.llm_judge import LlmJudge
from maieutic.env.play import Environment
from maieutic.env.prompts import EnvTemplates, load_env
from maieutic.errors import RecipeError
from maieutic.evaluation.cache import CachedChat, CostLedger, ResponseCache
from maieutic.evaluation.config import EvaluationRecipe
from maieutic.evaluation.tutor_arm import Arm, find_arm, fingerprint, open_arm
from maieutic.grading import Grader
from maieutic.runtime import _judge_model, _Models, resolve_env

T = TypeVar("T")


class CachedModels(_Models):
    """Students and judge of an experiment whose answers are cached."""

    def __init__(self, recipe: Recipe, ledger: CostLedger, cache: ResponseCache) -> None:
        super().__init__(recipe, None, ledger)
        self._cache = cache

    def _chat(self, spec: ModelSpec, role: str) -> ChatModel:
        chat = super()._chat(spec, role)
        name = f"{spec.model}@{spec.revision or ''}#{fingerprint(spec.model)}"
        return CachedChat(chat, self._cache, identity=name, structured=isinstance(chat, HttpChat))

    def chat(self, spec: ModelSpec, role: str) -> CachedChat:
        """A model as a cached chat model."""
        made = self._chat(spec, role)
        assert isinstance(made, CachedChat)
        return made

    def judge(self, templates: EnvTemplates) -> Judge:
        """The recipe's judge of gates."""
        return self.judge_of(self.recipe.judge, templates)

    def judge_of(self, spec: JudgeSpec, templates: EnvTemplates) -> Judge:
        """A judge of gates by its settings."""
        if spec.kind != "llm":
            return make_judge(spec, templates)
        chat = self.chat(_judge_model(spec), "judge")
        s = spec.sampling
        return LlmJudge(
            chat,
            templates,
            Sampling(s.temperature, s.top_p, s.max_tokens),
            votes=spec.votes,
            reasks=spec.reasks,
            structured=spec.structured and chat.structured,
        )


class Parts:
    """Everything of one evaluation, made when first asked for. Close it when done."""

    def __init__(self, recipe: EvaluationRecipe, out: Path) -> None:
        self.recipe, self.out = recipe, out
        self.cache = ResponseCache(out / "answers.jsonl")
        self.ledger = CostLedger(recipe.spending_limit_usd)
        self._made: dict[str, Any] = {}
        self._arms: dict[str, Arm] = {}
        self._grader: Grader | None = None
        self._started: list[Any] = []

    def _once(self, key: str, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @property
    def experiment(self) -> Recipe:
        """The resolved recipe of the experiment. RecipeError where the evaluation names none."""
        from maieutic.recipe import load_recipe

        if self.recipe.experiment is None:
            raise RecipeError(
                "experiment: this suite needs a recipe that says environment, students and problems"
            )
        name, overrides = self.recipe.experiment, self.recipe.experiment_overrides

        def load() -> Recipe:
            loaded = load_recipe(name, overrides)
            return resolve_env(loaded.model_copy(update={"offline": loaded.offline or self.recipe.offline}))

        return self._once("experiment", load)

    @property
    def env(self) -> Environment:
        """The experiment's environment; without an experiment, the shipped ``near_transfer``."""
        from maieutic.config import EnvSpec, RewardSpec

        if self.recipe.experiment is None:
            return self._once("env", lambda: make_environment(EnvSpec(), RewardSpec()))
        return self._once("env", lambda: make_environment(self.experiment.env, self.experiment.reward))

    @property
    def models(self) -> CachedModels:
        """Models of students and judges."""
        return self._once("models", lambda: CachedModels(self._any_recipe(), self.ledger, self.cache))

    def _any_recipe(self) -> Recipe:
        if self.recipe.experiment is not None:
            return self.experiment
        from maieutic.config import StudentSpec, TutorSpec

        return Recipe(
            name="evaluation",
            offline=self.recipe.offline,
            tutor=TutorSpec(model="none"),
            students=[StudentSpec(model="none")],
        )

    def students(self) -> list[Student]:
        """The experiment's students."""
        return self._once("students", lambda: self.models.students(load_env(self.experiment.env.name)))

    def gates(self) -> Judge:
        """The judge of gates: the evaluation's own, else the experiment's."""
        spec = self.recipe.gates or self.experiment.judge
        return self._once("gates", lambda: self.models.judge_of(spec, self.env.templates))

    def judge(self) -> CachedChat | None:
        """The chat model that rates and classifies; None where the recipe has none."""
        spec = self.recipe.judge
        if spec is None:
            return None

        def make() -> CachedChat:
            chat = self.models.chat(spec, "judge")
            chat.structured = chat.structured and spec.structured
            return chat

        return self._once("judge", make)

    def independent_student(self) -> CachedChat:
        """The chat model that plays the student of the replay suite."""
        spec = self.recipe.student
        if spec is None:
            raise RecipeError("student: the replay suite needs an independent student model")
        return self._once("student", lambda: self.models.chat(spec, "student"))

    @property
    def grader(self) -> Grader:
        """Grades final answers."""
        if self._grader is None:
            self._grader = Grader()
        return self._grader

    def arm(self, text: str) -> Arm:
        """An arm by name, opened once."""
        name, spec = find_arm(text, self.recipe)
        if name not in self._arms:
            offline = self.recipe.offline
            self._arms[name] = open_arm(
                name,
                spec,
                self.ledger,
                self.cache,
                templates=self.env.templates,
                env=self.env.env,
                offline=offline,
            )
        return self._arms[name]

    async def start(self) -> None:
        """Wait for the servers of everything made so far; what has started is not started again."""
        opened = self._made["models"].opened if "models" in self._made else []
        for part in [*self._arms.values(), *opened]:
            if not any(part is p for p in self._started):
                await part.start()
                self._started.append(part)

    async def close(self) -> None:
        """Free everything."""
        try:
            opened = self._made["models"].opened if "models" in self._made else []
            for part in [*self._arms.values(), *opened]:
                await part.close()
        finally:
            if self._grader is not None:
                self._grader.close()

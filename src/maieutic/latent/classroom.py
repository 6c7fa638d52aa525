"""From a latent recipe to its parts: endpoints, environment, students, readers, problems. Live only inside ``async with``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maieutic.config import RewardSpec, StudentSpec
from maieutic.dialogue import Turn
from maieutic.endpoint import EndpointRole
from maieutic.engines.base import Sampling
from maieutic.engines.chat import HttpChat
from maieutic.engines.connect import connect_chat
from maieutic.engines.usage import Ledger
from maieutic.env.base import Episode, Tutor
from maieutic.env.prompts import EnvTemplates, load_env
from maieutic.errors import RecipeError
from maieutic.grading import Grader
from maieutic.latent.config import RULES, LatentRecipe
from maieutic.latent.features import feature_set
from maieutic.latent.moves import LlmLabeller, MoveLabeller, RuleLabeller, taxonomy
from maieutic.latent.notebook import Notebook, RememberedLabels
from maieutic.latent.policy import Policy
from maieutic.latent.reading import LlmReader, RuleReader, StateReader
from maieutic.latent.rule_roles import RuleRoles
from maieutic.latent.success import (
    LlmSuccess,
    RuleSuccess,
    SixthGrader,
    SuccessEnvironment,
    SuccessJudge,
    env_text,
)
from maieutic.latent.tutor import LatentTutor, MoveWriter
from maieutic.problems.loaders import read_pairs
from maieutic.problems.schema import ProblemPair
from maieutic.problems.splits import split_pairs
from maieutic.tutors import ChatTutor


def load_problem_sets(recipe: LatentRecipe) -> tuple[list[ProblemPair], list[ProblemPair]]:
    """(seen, unseen): data are made from the first; no text of the second occurs in it."""
    pairs = read_pairs(recipe.problems)[: recipe.problems_size]
    share = recipe.evaluate.held_out
    split = split_pairs(pairs, round(share * len(pairs)), recipe.seed)
    if len(split.train) < 2:
        raise RecipeError(
            f"problems {recipe.problems!r}: {len(pairs)} pairs leave {len(split.train)} to make data from; at least 2 are "
            "needed (lower evaluate.held_out or raise problems_size)"
        )
    if share and not split.held_out:
        raise RecipeError(
            f"evaluate.held_out {share:g} of {len(pairs)} pairs is none: set it to 0 or add problems"
        )
    return split.train, split.held_out


def rule_answers(pairs: Sequence[ProblemPair]) -> dict[str, str]:
    """Answers by problem text, for the rule-driven student."""
    return {p.text: p.answer for pair in pairs for p in (pair.source, pair.transfer) if p is not None}


@dataclass
class LatentClassroom:
    """Everything that plays, reads and labels. ``moves``, ``features``: the recipe's."""

    recipe: LatentRecipe
    answers: dict[str, str]
    mistakes: dict[str, list[str]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    notes: Path | None = None
    """File that keeps what the annotator reads and labels (None: nothing is kept)."""

    async def __aenter__(self) -> LatentClassroom:
        recipe = self.recipe
        self._stack = AsyncExitStack()
        roles = [r for r in vars(recipe.roles).values() if isinstance(r, EndpointRole)]
        self._rules = ""
        if any(RULES in r.engine.urls for r in roles):
            self._rules = await self._stack.enter_async_context(RuleRoles(self.answers))
        self.moves, self.features = taxonomy(recipe.labels.moves), feature_set(recipe.labels.features)
        self.templates: EnvTemplates = load_env(recipe.env.name)
        spec = recipe.roles
        self.tutor_chat = self._chat(spec.tutor, "tutor")
        self.annotator = None if spec.annotator is None else self._chat(spec.annotator, "annotator")
        self.env = SuccessEnvironment(
            recipe.env,
            RewardSpec(),
            self.templates,
            success=self._success(),
            post_test=recipe.reward.kind == "transfer_gain",
        )
        self.student = self._student(spec.student, "student")
        self.other = (
            None if spec.other_student is None else self._student(spec.other_student, "other_student")
        )
        self.grader = Grader()
        self._stack.callback(self.grader.close)
        self._notebook = None if self.notes is None else Notebook(self.notes)
        if self._notebook is not None:
            self._stack.callback(self._notebook.close)
        self.reader = self.new_reader()
        self.labeller = self._labeller()
        tutor = spec.tutor.sampling
        self.writer = MoveWriter(
            self.tutor_chat,
            self.templates,
            self.env.env,
            self.moves,
            Sampling(tutor.temperature, tutor.top_p),
        )
        self.prompt_tutor = ChatTutor(
            self.tutor_chat, self.templates, self.env.env, Sampling(tutor.temperature, tutor.top_p)
        )
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    def _chat(self, spec: EndpointRole, role: str) -> HttpChat:
        urls = [self._rules if u == RULES else u for u in spec.engine.urls]
        engine = spec.engine.model_copy(update={"urls": urls})
        chat = connect_chat(engine, spec.model, role=role, ledger=self.ledger)
        self._stack.push_async_callback(chat.close)
        return chat

    def _student(self, spec: EndpointRole, role: str) -> SixthGrader:
        student = StudentSpec(name=spec.model, model=spec.model, engine=spec.engine, sampling=spec.sampling)
        return SixthGrader(
            self._chat(spec, role),
            student,
            self.templates,
            self.env.env,
            env_text(self.recipe.env.name, "mistake.txt"),
        )

    def _success(self) -> SuccessJudge:
        recipe = self.recipe
        if recipe.success == "rule" or recipe.roles.judge is None:
            return RuleSuccess(count_told=recipe.count_told)
        s = recipe.roles.judge.sampling
        return LlmSuccess(
            self._chat(recipe.roles.judge, "judge"),
            env_text(recipe.env.name, "judge/success.txt"),
            Sampling(s.temperature, s.top_p, s.max_tokens),
            count_told=recipe.count_told,
        )

    def new_reader(self) -> StateReader:
        """A state reader with an empty cache."""
        if self.recipe.labels.reader == "rule":
            return StateReader(RuleReader(), self.features)
        assert self.annotator is not None
        reader = LlmReader(self.annotator, mistakes=self.mistakes)
        return StateReader(reader, self.features, memory=self._notebook)

    def _labeller(self) -> MoveLabeller:
        if self.recipe.labels.labeller == "rule":
            return RuleLabeller(self.moves)
        assert self.annotator is not None
        labeller = LlmLabeller(self.annotator, self.moves)
        return labeller if self._notebook is None else RememberedLabels(labeller, self.moves, self._notebook)

    def latent_tutor(self, policy: Policy) -> LatentTutor:
        """The tutor arm of a policy."""
        return LatentTutor(policy, self.reader, self.writer)

    async def play(
        self,
        tutor: Tutor,
        pair: ProblemPair,
        *,
        seed: int,
        id: str,
        other_student: bool = False,
        start: Sequence[Turn] = (),
        eval: bool = False,
    ) -> Episode:
        """One episode of the environment with the data-making student, or the other one."""
        student = self.other if other_student else self.student
        assert student is not None
        return await self.env.play(
            tutor,
            student,
            None,
            self.grader,
            pair,
            seed=seed,
            id=id,
            group_id=pair.id,
            phase="eval" if eval else "train",
            start=start,
        )

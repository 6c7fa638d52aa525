"""The three models of a build: rewriter, solver, student; each call is one journalled step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from maieutic.dialogue import Message
from maieutic.engines.base import ChatModel, Sampling
from maieutic.engines.chat import HttpChat
from maieutic.engines.connect import connect_chat
from maieutic.engines.usage import Ledger
from maieutic.env.base import Student, StudentFailed
from maieutic.env.build import make_student
from maieutic.env.prompts import load_env
from maieutic.env.student import ModelStudent
from maieutic.errors import EngineError, RunStop
from maieutic.problems.build.checkpoint import FAILED, Journal, Value, step_key
from maieutic.problems.build.recipe import DataRecipe, RoleSpec
from maieutic.problems.build.rewrite import Candidate, Prompts
from maieutic.problems.measure import AnswerGrader, Tally
from maieutic.problems.schema import Problem
from maieutic.seeds import derive


@dataclass
class Roles:
    """What a build calls. ``capacity``: requests that all endpoints take at once."""

    rewriter: Rewriter | None
    solver: Solver | None
    student: ColdStudent
    capacity: int
    closing: list[ChatModel]

    async def start(self) -> None:
        """Wait until the student's model can be asked."""
        if isinstance(self.student.student, ModelStudent):
            await self.student.student.start()

    async def close(self) -> None:
        for chat in self.closing:
            await chat.close()
        if isinstance(self.student.student, ModelStudent):
            await self.student.student.close()


class _Asker:
    """A chat model, how it samples, and the journal."""

    def __init__(self, chat: ChatModel, sampling: Sampling, journal: Journal, prompts: Prompts) -> None:
        self.chat, self.sampling, self.journal, self.prompts = chat, sampling, journal, prompts

    def key(self, stage: str, messages: Sequence[Message], seed: int, *more: Any) -> str:
        said = [[m.role, m.content] for m in messages]
        return step_key(stage, self.chat.name, said, asdict(self.sampling), seed, *more)


class Rewriter(_Asker):
    """Asks for one variant."""

    async def ask(self, row: str, messages: Sequence[Message], seed: int) -> Value:
        """``{"text", "truncated"}`` or ``{"failed"}``."""

        async def call() -> Value:
            try:
                (reply,) = await self.chat.complete(messages, self.sampling, seed=seed)
            except RunStop:
                raise
            except EngineError as error:
                return {FAILED: str(error)}
            return {"text": reply.text, "truncated": reply.finish_reason == "length"}

        return await self.journal.step(self.key("rewrite", messages, seed), "rewrite", row, call)


class Solver(_Asker):
    """Solves a variant blind, and has the answers graded against the stated one."""

    def __init__(
        self, chat: ChatModel, sampling: Sampling, journal: Journal, prompts: Prompts, grader: AnswerGrader
    ) -> None:
        super().__init__(chat, sampling, journal, prompts)
        self.grader = grader

    async def ask(self, row: str, candidate: Candidate, solves: int, seed: int) -> Value:
        """``{"texts", "verdicts", "answers"}`` (one item a solve), or ``{"failed"}``."""
        messages = self.prompts.solving(candidate.text)

        async def call() -> Value:
            try:
                replies = await self.chat.complete(messages, self.sampling, seed=seed, n=solves)
            except RunStop:
                raise
            except EngineError as error:
                return {FAILED: str(error)}
            await asyncio.sleep(0)  # freed slots go to waiting requests before grading takes the CPU
            texts = [r.visible.strip() for r in replies]
            grades = await self.grader.grade_many(texts, candidate.answer)
            return {
                "texts": texts,
                "verdicts": [g.verdict for g in grades],
                "answers": [g.extracted for g in grades],
            }

        key = self.key("verify", messages, seed, solves, candidate.answer)
        return await self.journal.step(key, "verify", row, call)


class ColdStudent:
    """Measures the student's cold solve rate: k samples, one request. A failure is never a wrong answer."""

    def __init__(self, student: Student, journal: Journal, grader: AnswerGrader, k: int, seed: int) -> None:
        self.student, self.journal, self.grader, self.k, self.seed = student, journal, grader, k, seed
        self.key = str(student.key)
        self.tallies: dict[str, Tally] = {}
        """Every measured problem's, by step: sources and variants, kept or not."""

    async def ask(self, row: str, problem: Problem) -> Tally:
        """The tally of a problem; its rate is None when nothing could be graded."""
        seed = derive(self.seed, "prior", problem.text, problem.answer)

        async def call() -> Value:
            try:
                answers = await self.student.attempt(problem, k=self.k, seed=seed)
            except StudentFailed as error:
                return {FAILED: str(error), "n": self.k}
            await asyncio.sleep(0)  # as above
            grades = await self.grader.grade_many(answers, problem.answer)
            return {"verdicts": [g.verdict for g in grades], "answers": [g.extracted for g in grades]}

        key = step_key("prior", self.key, problem.text, problem.answer, self.k, seed)
        value = await self.journal.step(key, "prior", row, call)
        if FAILED in value:
            tally = Tally(0, 0, failed=self.k)
        else:
            verdicts = value["verdicts"]
            ungraded = verdicts.count("error")
            tally = Tally(verdicts.count("right"), len(verdicts) - ungraded, ungraded)
        self.tallies[key] = tally
        return tally


def build_roles(
    recipe: DataRecipe, journal: Journal, ledger: Ledger, grader: AnswerGrader, prompts: Prompts
) -> Roles:
    """The models of a recipe. Raises :class:`RecipeError` for an API key that is not set, EngineError for servers not found."""
    rewriter = solver = None
    closing: list[ChatModel] = []
    capacity = 0
    chat: HttpChat | None = None

    def connect(spec: RoleSpec, role: str) -> HttpChat:
        nonlocal capacity
        made = connect_chat(spec.engine, spec.model, role=role, ledger=ledger)
        closing.append(made)
        capacity += spec.engine.http.concurrency * len(made.pool.urls)
        return made

    if isinstance(recipe.rewriter, RoleSpec):
        chat = connect(recipe.rewriter, "rewriter")
        rewriter = Rewriter(chat, _sampling(recipe.rewriter), journal, prompts)
    spec = recipe.solver or recipe.rewriter
    if recipe.verify.solves and isinstance(spec, RoleSpec):
        if recipe.solver is not None or chat is None:
            chat = connect(spec, "solver")
        solver = Solver(chat, _sampling(spec), journal, prompts, grader)
    student, slots = _student(recipe, ledger)
    cold = ColdStudent(student, journal, grader, recipe.prior.k, recipe.seed)
    return Roles(rewriter, solver, cold, capacity + slots, closing)


def _sampling(spec: RoleSpec) -> Sampling:
    return Sampling(spec.sampling.temperature, spec.sampling.top_p, spec.sampling.max_tokens)


def _student(recipe: DataRecipe, ledger: Ledger) -> tuple[Student, int]:
    """The student, and how many requests it takes at once."""
    templates, spec = load_env(recipe.env.name), recipe.student
    env, engine = templates.resolve(recipe.env), spec.engine
    if spec.kind != "model":
        return make_student(spec, templates, env), engine.http.concurrency
    if engine.kind == "chat":
        chat = connect_chat(engine, spec.model, role="student", ledger=ledger)
        return make_student(spec, templates, env, chat), engine.http.concurrency * len(chat.pool.urls)
    # in process, or by token ids: as a run builds it (a recipe wants a tutor, which is not looked at)
    from maieutic.config import Recipe, TutorSpec
    from maieutic.runtime import build_students

    whole = Recipe(
        name=recipe.name,
        seed=recipe.seed,
        offline=recipe.offline,
        tutor=TutorSpec(model=spec.model),
        students=[spec],
        env=recipe.env,
    )
    (student,) = build_students(whole, ledger)
    return student, engine.max_batch_size if engine.kind == "hf" else engine.http.concurrency * len(
        engine.urls
    )

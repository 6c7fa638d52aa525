"""The three models of a build: rewriter, solver, student; each call is one journalled step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from maieutic.config import EngineSpec
from maieutic.dialogue import Message
from maieutic.engines.base import ChatModel, Sampling
from maieutic.engines.chat import HttpChat
from maieutic.engines.http import HttpPolicy, HttpPool
from maieutic.engines.usage import Ledger, Price
from maieutic.env.base import Student, StudentFailed
from maieutic.env.build import make_student
from maieutic.env.prompts import load_env
from maieutic.errors import EngineError, RecipeError, RunStop
from maieutic.problems.build.checkpoint import FAILED, Journal, Value, step_key
from maieutic.problems.build.recipe import DataRecipe, RoleSpec
from maieutic.problems.build.rewrite import Candidate, Prompts, visible
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

    async def close(self) -> None:
        for chat in self.closing:
            await chat.close()


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
            texts = [visible(r.text) for r in replies]
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

    async def ask(self, row: str, problem: Problem) -> Tally:
        """The tally; its rate is None when nothing could be graded."""
        seed = derive(self.seed, "prior", problem.text, problem.answer)

        async def call() -> Value:
            try:
                answers = await self.student.attempt(problem, k=self.k, seed=seed)
            except StudentFailed as error:
                return {FAILED: str(error), "n": self.k}
            grades = await self.grader.grade_many(answers, problem.answer)
            return {"verdicts": [g.verdict for g in grades], "answers": [g.extracted for g in grades]}

        key = step_key("prior", self.key, problem.text, problem.answer, self.k, seed)
        value = await self.journal.step(key, "prior", row, call)
        if FAILED in value:
            return Tally(0, 0, failed=self.k)
        verdicts = value["verdicts"]
        ungraded = verdicts.count("error")
        return Tally(verdicts.count("right"), len(verdicts) - ungraded, ungraded)


def build_roles(
    recipe: DataRecipe, journal: Journal, ledger: Ledger, grader: AnswerGrader, prompts: Prompts
) -> Roles:
    """The models of a recipe. Raises :class:`RecipeError` for an API key that is not set, EngineError for servers not found."""
    rewriter = solver = None
    closing: list[ChatModel] = []
    capacity = 0
    chat: ChatModel | None = None
    if isinstance(recipe.rewriter, RoleSpec):
        chat, slots = _chat(recipe.rewriter.model, recipe.rewriter.engine, "rewriter", ledger)
        closing.append(chat)
        capacity += slots
        rewriter = Rewriter(chat, _sampling(recipe.rewriter), journal, prompts)
    spec = recipe.solver or recipe.rewriter
    if recipe.verify.solves and isinstance(spec, RoleSpec):
        if recipe.solver is not None or chat is None:
            chat, slots = _chat(spec.model, spec.engine, "solver", ledger)
            closing.append(chat)
            capacity += slots
        solver = Solver(chat, _sampling(spec), journal, prompts, grader)
    student, slots, opened = _student(recipe, ledger)
    cold = ColdStudent(student, journal, grader, recipe.prior.k, recipe.seed)
    return Roles(rewriter, solver, cold, capacity + slots, closing + opened)


def _sampling(spec: RoleSpec) -> Sampling:
    return Sampling(spec.sampling.temperature, spec.sampling.top_p, spec.sampling.max_tokens)


def _student(recipe: DataRecipe, ledger: Ledger) -> tuple[Student, int, list[ChatModel]]:
    templates, spec = load_env(recipe.env.name), recipe.student
    env = templates.resolve(recipe.env)
    if spec.kind == "model" and spec.engine.kind == "chat":
        chat, slots = _chat(spec.model, spec.engine, "student", ledger)
        return make_student(spec, templates, env, chat), slots, [chat]
    if spec.kind != "model":
        return make_student(spec, templates, env), spec.engine.http.concurrency, []
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
    (student,) = build_students(whole)
    return student, spec.engine.max_batch_size, []


class _Named(HttpChat):
    """An endpoint's model under the recipe's name, so that solve rates do not depend on how a server calls it."""

    def __init__(self, label: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._label = label

    @property
    def name(self) -> str:
        return self._label


def _chat(model: str, engine: EngineSpec, role: str, ledger: Ledger) -> tuple[HttpChat, int]:
    """A chat endpoint, and how many requests all its servers take at once."""
    from maieutic.serve import resolve_urls

    headers = {}
    if engine.api_key_env is not None:
        if not (secret := os.environ.get(engine.api_key_env)):
            raise RecipeError(
                f"{role}.engine.api_key_env: {engine.api_key_env} is not set in the environment"
            )
        headers["Authorization"] = f"Bearer {secret}"
    urls = resolve_urls(engine.urls, timeout_s=engine.start_timeout_s)
    h = engine.http
    policy = HttpPolicy(
        concurrency=h.concurrency,
        timeout_s=h.timeout_s,
        retries=h.retries,
        backoff_s=h.backoff_s,
        backoff_max_s=h.backoff_max_s,
        outage_limit_s=h.outage_limit_s,
        deadline_s=h.deadline_s,
    )
    pool = HttpPool(urls, policy, role=role, ledger=ledger, headers=headers)
    price = Price(engine.price.input, engine.price.output, engine.price.cached_input)
    chat = _Named(
        model,
        pool,
        engine.served_name or model,
        price=price,
        extra_body=engine.extra_body,
        max_tokens_key=engine.max_tokens_key,
        send_seed=engine.send_seed,
        send_n=engine.send_n,
    )
    return chat, h.concurrency * len(urls)

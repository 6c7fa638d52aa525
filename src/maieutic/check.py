"""``maieutic check``: what a recipe would run, without loading weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from maieutic import memory
from maieutic.config import ModelSpec, Recipe, StudentSpec
from maieutic.env.build import make_judge
from maieutic.env.imports import load_object
from maieutic.env.prompts import load_env
from maieutic.errors import AbsentDataError, MaieuticError, ProblemDataError, RecipeError
from maieutic.problems.load import LoadReport, load_problems
from maieutic.problems.schema import ProblemPair, StudentKey
from maieutic.recipe import recipe_hash


@dataclass(slots=True)
class CheckReport:
    """What a run would do. ``errors`` would stop it before the first step; ``warnings`` would not."""

    recipe: dict[str, Any]
    plan: dict[str, int]
    tokens: dict[str, int]
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    gpu_bytes: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Of a trainer's GPU: sharding → number of GPUs → purpose → bytes; empty without an estimate."""
    server_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of one replica of each server that the recipe names: role → purpose → bytes."""
    disk_bytes: dict[str, int] = field(default_factory=dict)
    problems: LoadReport | None = None
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": 1,
            "recipe": self.recipe,
            "plan": self.plan,
            "tokens": self.tokens,
            "models": self.models,
            "memory_bytes": self.memory_bytes,
            "gpu_bytes": self.gpu_bytes,
            "server_bytes": self.server_bytes,
            "disk_bytes": self.disk_bytes,
            "problems": self.problems.as_dict() if self.problems else None,
            "warnings": self.warnings,
            "errors": self.errors,
        }

    def lines(self) -> list[str]:
        """For people."""
        out = [f"{self.recipe['name']} ({self.recipe['hash']})"]
        out += _block("what runs", {k: str(v) for k, v in self.recipe.items() if k not in ("name", "hash")})
        out += _block("how much", {k.replace("_", " "): f"{v:,}" for k, v in self.plan.items()})
        out += _block("tokens", {k.replace("_", " "): f"{v:,}" for k, v in self.tokens.items()})
        if self.models:
            out += _block("models", {m: _model_line(d) for m, d in self.models.items()})
        if self.memory_bytes:
            rows = {k: _gib(v) for k, v in self.memory_bytes.items()}
            out += _block(
                "memory of training in one process (docs/memory.md)",
                rows | {"total": _gib(sum(self.memory_bytes.values()))},
            )
        if self.gpu_bytes:
            out += _block("memory a GPU of the trainer, by number of GPUs", _gpu_rows(self.gpu_bytes))
        if self.server_bytes:
            out += _block("memory of one server, over its GPUs", _rows_of(self.server_bytes))
        if self.disk_bytes:
            out += _block("disk", {k: _gib(v) for k, v in self.disk_bytes.items()})
        if self.problems is not None:
            out += ["problems", *(f"  {line}" for line in self.problems.lines())]
        out += [f"warning: {w}" for w in self.warnings]
        out += [f"error: {e}" for e in self.errors]
        return out


def _block(title: str, rows: dict[str, str]) -> list[str]:
    width = max(len(k) for k in rows)
    return [title, *(f"  {k:<{width}}  {v}" for k, v in rows.items())]


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**27 else f"{n / 2**20:.2f} MiB"


_SHARDING_NAMES = {"ddp": "data parallel", "zero2": "ZeRO-2", "zero3": "FSDP2, ZeRO-3"}


def _gpu_rows(table: dict[str, dict[str, dict[str, int]]]) -> dict[str, str]:
    return {
        _SHARDING_NAMES[sharding]: ", ".join(
            f"{ranks}: {_gib(sum(parts.values()))}" for ranks, parts in by_ranks.items()
        )
        for sharding, by_ranks in table.items()
    }


def _rows_of(table: dict[str, dict[str, int]]) -> dict[str, str]:
    return {who: ", ".join(f"{k} {_gib(v)}" for k, v in parts.items()) for who, parts in table.items()}


def _model_line(d: dict[str, Any]) -> str:
    adapter = f", adapter {d['adapter_parameters']:,}" if d["adapter_parameters"] else ""
    return f"{d['parameters']:,} parameters{adapter}, {d['dtype']}, context {d['context'] or 'unknown'}"


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with the environment's own defaults filled in, checked again as a whole."""
    try:
        env = load_env(recipe.env.name).resolve(recipe.env)
    except RecipeError as error:
        raise RecipeError(f"env.name: {error}") from error
    try:
        Recipe.model_validate({**recipe.model_dump(), "env": env.model_dump()})
    except ValidationError as e:
        reasons = "; ".join(i["msg"].removeprefix("Value error, ") for i in e.errors(include_url=False))
        raise RecipeError(f"recipe {recipe.name} in environment {recipe.env.name}: {reasons}") from None
    if recipe.judge.kind == "rule":
        make_judge(recipe.judge)  # its options are names of criteria
    changes: dict[str, Any] = {"env": env}
    if not env.transfer and "best" not in recipe.checkpoint.model_fields_set:
        # Without a transfer test there is no transfer gain: no checkpoint would ever be the best.
        changes["checkpoint"] = recipe.checkpoint.model_copy(update={"best": "eval/same_gain"})
    return recipe.model_copy(update=changes)


def own_part_errors(recipe: Recipe) -> list[str]:
    """What is wrong with the import paths that a recipe names; nothing is called."""
    paths = [
        ("tutor.kind", recipe.tutor.kind),
        *((f"students.{i}.kind", s.kind) for i, s in enumerate(recipe.students)),
        ("judge.kind", recipe.judge.kind),
        ("env.kind", recipe.env.kind),
        ("reward.kind", recipe.reward.kind),
        ("algorithm.loss", recipe.algorithm.loss),
    ]
    errors = []
    for key, path in paths:
        try:
            if ":" in path:
                load_object(path, key)
        except RecipeError as error:
            errors.append(str(error))
    return errors


def student_keys(recipe: Recipe) -> list[StudentKey]:
    """Whose solve rates the (resolved) recipe needs; students of the user's own kind say so only once they are made."""
    templates = load_env(recipe.env.name)
    return [
        StudentKey(
            model=s.model,
            prompt_hash=templates.cold_hash,
            temperature=s.sampling.temperature,
            top_p=s.sampling.top_p,
            max_tokens=recipe.env.post_test_max_tokens,
        )
        for s in recipe.students
        if s.kind == "model"
    ]


def check_recipe(recipe: Recipe, *, with_models: bool = True) -> CheckReport:
    """Resolve, count, estimate, load the problems. Problem and model faults are collected, not raised."""
    recipe = resolve(recipe)
    report = CheckReport(_summary(recipe), _plan(recipe), _tokens(recipe))
    if recipe.worst_case_tokens > recipe.env.conversation_limit:
        report.warnings.append(
            f"the longest conversation may take {recipe.worst_case_tokens:,} tokens, env.conversation_limit is "
            f"{recipe.env.conversation_limit:,}: such dialogues end as context_limit and count"
        )
    report.errors += own_part_errors(recipe)
    best = recipe.checkpoint.best
    if best == "eval/transfer_gain" and not recipe.env.transfer:
        report.warnings.append(
            f"checkpoint.best is {best}, but env.transfer is off: no checkpoint is ever the best (eval/same_gain is measured)"
        )
    train: list[ProblemPair] = []
    try:
        train, held_out, report.problems = load_problems(
            recipe.problems, student_keys(recipe), offline=recipe.offline
        )
        report.plan["train_pairs"], report.plan["held_out_pairs"] = len(train), len(held_out)
        episodes = min(recipe.eval.problems or len(held_out), len(held_out)) * recipe.eval.samples
        report.plan["eval_episodes_each_time"] = episodes if recipe.eval.every else 0
        report.warnings += _problem_warnings(recipe, train, held_out)
    except AbsentDataError as e:
        # Where there is no network a recipe can still be validated; a run would stop here.
        said = f"{e}".splitlines()[0]
        if recipe.offline:
            report.warnings.append(
                f"the problems are not here and were not checked, a run needs them: {said}"
            )
        else:
            report.errors.append(f"{type(e).__name__}: {e}")
    except ProblemDataError as e:
        report.errors.append(f"{type(e).__name__}: {e}")
    if with_models:
        _add_models(recipe, report)
    return report


def _summary(recipe: Recipe) -> dict[str, Any]:
    tutor = recipe.tutor
    env = recipe.env
    how = "full fine-tune" if tutor.lora is None else f"LoRA r={tutor.lora.r}"
    conditions = {"transfer": env.transfer, "hidden tutor": env.hide_tutor}
    return {
        "name": recipe.name,
        "hash": recipe_hash(recipe),
        "arm": f"{recipe.arm}, loss {recipe.algorithm.loss}, seed {recipe.seed}",
        "tutor": f"{tutor.model} ({how}), engine {tutor.engine.kind}",
        "students": ", ".join(
            f"{s.name}: {s.model} (weight {s.weight:g}, engine {s.engine.kind})" for s in recipe.students
        ),
        "judge": recipe.judge.kind + (f" ({recipe.judge.model})" if recipe.judge.model else ""),
        "environment": f"{env.name}: {', '.join(k if on else f'no {k}' for k, on in conditions.items())}, gates {env.gates}",
        "output": f"{recipe.output_dir}/{recipe.name}",
    }


def _plan(recipe: Recipe) -> dict[str, int]:
    t = recipe.training
    episodes = t.problems_per_step * t.group_size
    updates = t.problems_per_step // t.mini_batch_problems * t.epochs_per_step
    return {
        "steps": t.max_steps,
        "episodes_a_step": episodes,
        "episodes": episodes * t.max_steps,
        "optimizer_steps_a_step": updates,
        "optimizer_steps": updates * t.max_steps,
        "post_test_samples_a_step": episodes * recipe.env.post_test_samples,
    }


def _tokens(recipe: Recipe) -> dict[str, int]:
    """Upper bounds; the conversation is also cut at ``env.conversation_limit``."""
    env = recipe.env
    episodes = recipe.training.problems_per_step * recipe.training.group_size
    conversation = min(recipe.worst_case_tokens, env.conversation_limit)
    tutor = min(env.max_turns // 2 * env.tutor_cap, env.conversation_limit)
    return {
        "longest_conversation": recipe.worst_case_tokens,
        "conversation_limit": env.conversation_limit,
        "longest_tutor_sequence": env.prompt_limit + conversation,
        "most_trained_tokens_a_step": episodes * tutor,
        "most_dialogue_tokens_a_step": episodes * conversation,
        "most_post_test_tokens_a_step": episodes * env.post_test_samples * env.post_test_max_tokens,
    }


_NUMBER = re.compile(r"[-+]?[$£€]?\s*\d[\d,\s]*(?:\.\d+)?\s*(?:%|/\s*\d+)?")


def _problem_warnings(
    recipe: Recipe, train: Sequence[ProblemPair], held_out: Sequence[ProblemPair]
) -> list[str]:
    out = []
    t = recipe.training
    if t.problems_per_step > len(train):
        out.append(
            f"training.problems_per_step is {t.problems_per_step}, there are {len(train)} training pairs: steps repeat pairs"
        )
    if recipe.eval.every and not held_out:
        out.append("eval.every is on, but no pairs are held out: nothing is evaluated")
    if recipe.judge.kind == "rule":
        words = [p for p in train if not _NUMBER.fullmatch(p.source.answer.strip())]
        if words:
            out.append(
                f"{len(words)} training pairs have answers that are not plain numbers (first: {words[0].id!r}, "
                f"{words[0].source.answer!r:.40}): the rule judge is made for numbers"
            )
    for key in student_keys(recipe):
        rates = [p.tested(recipe.env.transfer).rate(key).rate for p in train]
        solved = sum(r == 1 for r in rates)
        if solved:
            out.append(
                f"{solved} training pairs are always solved by {key.model} without help: no gain is possible there"
            )
        if rates and max(rates) == 0:
            out.append(
                f"{key.model} solves none of the tested problems without help: check prompt and max_tokens"
            )
    return out


def _add_models(recipe: Recipe, report: CheckReport) -> None:
    """Sizes of the models in process, and the memory that they need; what cannot be had becomes a warning."""

    absent: set[str] = set()

    def size(spec: Any, lora: Any = None) -> memory.ModelSize | None:
        if spec.model in absent:
            return None
        try:
            return memory.model_size(
                spec.model, dtype=spec.dtype, revision=spec.revision, lora=lora, offline=recipe.offline
            )
        except MaieuticError as e:
            absent.add(spec.model)
            report.warnings.append(f"no memory estimate: {e}")
            return None

    tutor = size(recipe.tutor, recipe.tutor.lora)
    students = [
        tutor
        if tutor is not None
        and (s.model, s.revision, s.dtype) == (recipe.tutor.model, recipe.tutor.revision, recipe.tutor.dtype)
        else (size(s) if s.kind == "model" and s.engine.kind != "chat" else None)
        for s in recipe.students
    ]
    served = any(u.startswith("file:") for u in recipe.judge.engine.urls)
    asked = recipe.judge.kind == "llm" and (recipe.judge.engine.kind != "chat" or served)
    judge = (
        size(ModelSpec(model=recipe.judge.model, dtype=recipe.judge.dtype))
        if asked and recipe.judge.model is not None
        else None
    )
    for m in [tutor, *students, judge]:
        if m is not None and m.model not in report.models:
            if m.note:
                report.warnings.append(m.note)
            report.models[m.model] = {
                "parameters": m.parameters,
                "adapter_parameters": m.adapter_parameters,
                "dtype": m.dtype,
                "context": m.context,
            }
    if tutor is None:
        return
    report.memory_bytes = memory.estimate(recipe, tutor, students, judge)
    report.disk_bytes = memory.disk_bytes(recipe, tutor)
    report.gpu_bytes = {
        sharding: {str(n): memory.per_gpu(recipe, tutor, n, sharding, students, judge) for n in _RANKS}
        for sharding in memory.SHARDINGS
    }
    report.server_bytes = _servers(recipe, tutor, students, judge)
    longest = recipe.env.prompt_limit + min(recipe.worst_case_tokens, recipe.env.conversation_limit)
    if tutor.context is not None and longest > tutor.context:
        report.warnings.append(
            f"a tutor sequence may take {longest:,} tokens, {tutor.model} has a context of {tutor.context:,}: "
            "such dialogues end as context_limit"
        )
    for spec, student in zip(recipe.students, students, strict=True):
        needs = longest_student_sequence(recipe, spec)
        if student is not None and student.context is not None and needs > student.context:
            report.warnings.append(
                f"student {spec.name} may have to read and write {needs:,} tokens, {student.model} has a context of "
                f"{student.context:,}: such episodes are lost (student_failed) and excluded, the longest ones first"
            )


_RANKS = (1, 4, 8, 16)
"""Numbers of GPUs that the estimate is shown for."""


def _servers(
    recipe: Recipe,
    tutor: memory.ModelSize,
    students: Sequence[memory.ModelSize | None],
    judge: memory.ModelSize | None,
) -> dict[str, dict[str, int]]:
    """Servers of the recipe's own (addresses from files), each with as many of the longest sequences as it may be asked at once."""
    env = recipe.env
    talk = min(recipe.worst_case_tokens, env.conversation_limit)
    roles = [("tutor", recipe.tutor.engine, tutor, env.prompt_limit + talk)]
    roles += [
        (f"student {spec.name}", spec.engine, size, longest_student_sequence(recipe, spec))
        for spec, size in zip(recipe.students, students, strict=True)
        if size is not None
    ]
    if judge is not None:
        asked = env.prompt_limit + talk + recipe.judge.sampling.max_tokens
        roles.append(("judge", recipe.judge.engine, judge, asked))
    return {
        who: memory.server_bytes(size, engine.http.concurrency, tokens)
        for who, engine, size, tokens in roles
        if any(u.startswith("file:") for u in engine.urls)
    }


def longest_student_sequence(recipe: Recipe, spec: StudentSpec) -> int:
    """Upper bound of a student's tokens, in the dialogue or the post-test, if its prompt is as long as the tutor's may be."""
    env = recipe.env
    own = (env.max_turns - 1) // 2 * spec.sampling.max_tokens
    talk = min(own + env.max_turns // 2 * env.tutor_cap, env.conversation_limit)
    before_test = min(own, talk) if env.hide_tutor else talk
    return env.prompt_limit + max(talk, before_test + env.post_test_max_tokens)

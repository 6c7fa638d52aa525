"""Problem-solving retention: what the tutor itself solves (GSM8K-format files, pair sets), before and after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maieutic.dialogue import Message
from maieutic.engines.base import Sampling
from maieutic.env.prompts import fill
from maieutic.errors import EngineError, RecipeError, RunStop
from maieutic.evaluation.cache import costs, summed
from maieutic.evaluation.journal import Journal, Progress, SampleFailed, run_all
from maieutic.evaluation.parts import Parts
from maieutic.evaluation.results import SuiteResult, digest
from maieutic.evaluation.tutor_arm import Arm, identity
from maieutic.problems.loaders import read_pairs
from maieutic.problems.schema import Problem
from maieutic.seeds import derive

PROMPT = "Solve this problem step by step and put your final answer in \\boxed{{}}.\n\n{problem}"


def load_set(source: str, *, limit: int | None, offline: bool) -> list[tuple[str, Problem]]:
    """(id, problem) of a set: each pair's source and, where it has one, its variant. ``limit`` counts pairs."""
    out = []
    for pair in read_pairs(source, offline=offline)[:limit]:
        out.append((f"{pair.id}/source", pair.source))
        if pair.transfer is not None:
            out.append((f"{pair.id}/transfer", pair.transfer))
    return out


async def retention_suite(
    parts: Parts, arm: Arm, folder: Path, progress: Progress = lambda done, total: None
) -> SuiteResult:
    """Accuracy by set. A grader error is not a wrong answer: it is counted apart."""
    recipe, spec = parts.recipe, parts.recipe.retention
    if not spec.sources:
        raise RecipeError("retention.sources: name at least one set of problems")
    await parts.start()
    problems: list[tuple[str, tuple[str, Problem, int]]] = []
    for source in spec.sources:
        name = Path(source).stem if "/" in source else source
        for id, problem in load_set(source, limit=spec.limit, offline=recipe.offline):
            problems += [(f"{name}/{id}/{i}", (name, problem, i)) for i in range(spec.samples)]
    settings = {
        "suite": spec.model_dump(mode="json", exclude={"sources"}),
        "seed": recipe.seed,
        "arm": identity(arm.spec),
        "prompt": PROMPT,
        "problems": {
            "n": len(problems),
            "digest": digest([[k, p.text, p.answer] for k, (_, p, _) in problems]),
        },
    }
    journal = Journal(folder / "work" / "retention.jsonl", digest(settings))
    sampling = Sampling(spec.temperature, 1.0, spec.max_tokens)

    async def solve(key: str, item: tuple[str, Problem, int]) -> dict[str, Any]:
        name, problem, _ = item
        with costs() as spent:
            try:
                (reply,) = await arm.chat.complete(
                    [Message("user", fill(PROMPT, problem=problem.text))],
                    sampling,
                    seed=derive(recipe.seed, key),
                )
            except RunStop:
                raise
            except EngineError as error:
                raise SampleFailed(f"tutor: {error}") from error
        (grade,) = await parts.grader.grade_many([reply.visible], problem.answer)
        right = None if grade.verdict == "error" else float(grade.verdict == "right")
        out = {
            "key": key,
            "problem": key.rpartition("/")[0],
            "set": name,
            "reply": reply.text,
            "answer": problem.answer,
        }
        out |= {"grade": grade.verdict, "right": right, "truncated": float(reply.finish_reason == "length")}
        return out | {"costs": summed(spent)}

    samples, failed = await run_all(
        problems, solve, journal, concurrency=recipe.concurrency, progress=progress
    )
    result = SuiteResult("retention", arm.name, settings, samples=samples, failed=failed)
    for name in dict.fromkeys(s["set"] for s in samples):
        for s in samples:
            if s["set"] == name:
                s[f"{name}:accuracy"] = s["right"]
        result.add_from(f"{name}:accuracy")
    result.add_from("truncated")
    result.counts["answers"] = len(samples)
    result.counts["no answer"] = sum(s["grade"] == "no_answer" for s in samples)
    result.counts["grader errors"] = sum(s["grade"] == "error" for s in samples)
    return result.close()

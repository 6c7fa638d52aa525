"""The MathTutorBench suite: each task asked, read and measured as the benchmark defines it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from maieutic.dialogue import Message
from maieutic.engines.base import Sampling
from maieutic.env.prompts import fill
from maieutic.errors import EngineError, RecipeError, RunStop
from maieutic.evaluation.cache import costs, summed
from maieutic.evaluation.journal import Journal, Progress, SampleFailed, run_all
from maieutic.evaluation.mathtutorbench_prompts import prompt_of
from maieutic.evaluation.mathtutorbench_tasks import TASKS, Example, Task, cut_at, load_examples
from maieutic.evaluation.parts import Parts
from maieutic.evaluation.ped_rm import RewardModel, load_reward_model, reward_messages
from maieutic.evaluation.results import SuiteResult, digest
from maieutic.evaluation.tutor_arm import Arm, fingerprint, identity
from maieutic.seeds import derive


async def mathtutorbench_suite(
    parts: Parts,
    arm: Arm,
    folder: Path,
    progress: Progress = lambda done, total: None,
    load: Callable[..., RewardModel] = load_reward_model,
) -> SuiteResult:
    """All tasks that the recipe has files for (or names). The arm is asked as a plain chat model."""
    recipe, spec = parts.recipe, parts.recipe.mathtutorbench
    tasks = _tasks(parts)
    await parts.start()
    examples: list[tuple[str, tuple[Task, Example]]] = []
    for task in tasks:
        source = getattr(spec, task.file)
        for e in load_examples(task, source, limit=spec.limit, offline=recipe.offline):
            examples.append((f"{task.name}/{e.key}", (task, e)))
    templates = {t.name: prompt_of(t.name, spec.prompts) for t in tasks}
    reward = recipe.reward_model if any(t.rewarded for t in tasks) else None
    settings = {
        "suite": spec.model_dump(
            mode="json", exclude={"gsm8k", "socratic", "stepverify", "bridge", "bridge_hard", "prompts"}
        ),
        "tasks": [t.name for t in tasks],
        "seed": recipe.seed,
        "arm": identity(arm.spec),
        "prompts": templates,
        "examples": digest([[k, e.fields, e.target] for k, (_, e) in examples]),
        "reward_model": None
        if reward is None
        else reward.model_dump(mode="json") | {"weights": fingerprint(reward.model)},
    }
    journal = Journal(folder / "work" / "mathtutorbench.jsonl", digest(settings))
    sampling = Sampling(spec.temperature, 1.0, spec.max_tokens)

    async def answer(key: str, item: tuple[Task, Example]) -> dict[str, Any]:
        task, e = item
        prompt = fill(templates[task.name], **e.fields)
        with costs() as spent:
            try:
                (reply,) = await arm.chat.complete(
                    [Message("user", prompt)], sampling, seed=derive(recipe.seed, key)
                )
            except RunStop:
                raise
            except EngineError as error:
                raise SampleFailed(f"tutor: {error}") from error
        said = cut_at(reply.visible, task.stops)
        prediction = task.read(said)
        out = {
            "key": key,
            "problem": e.problem,
            "task": task.name,
            "reply": reply.text,
            "prediction": prediction,
        }
        out |= {"target": e.target, "truncated": float(reply.finish_reason == "length")}
        if task.right is not None:
            out[f"{task.name}:right"] = task.right(prediction, e.target)
        return out | {"costs": summed(spent)}

    samples, failed = await run_all(
        examples, answer, journal, concurrency=recipe.concurrency, progress=progress
    )
    result = SuiteResult("mathtutorbench", arm.name, settings, samples=samples, failed=failed)
    by_key = dict(examples)
    if reward is not None:
        _reward(result, by_key, load(reward, offline=recipe.offline))
    return summarise(result, tasks)


def _tasks(parts: Parts) -> list[Task]:
    spec = parts.recipe.mathtutorbench
    for name in spec.tasks:
        if name not in TASKS:
            raise RecipeError(f"mathtutorbench.tasks: no task {name!r}; there are {', '.join(TASKS)}")
    chosen = [TASKS[n] for n in spec.tasks] or [
        t for t in TASKS.values() if getattr(spec, t.file) is not None
    ]
    if not chosen:
        raise RecipeError(
            "mathtutorbench: name a data file (gsm8k, socratic, stepverify, bridge, bridge_hard)"
        )
    for task in chosen:
        if getattr(spec, task.file) is None:
            raise RecipeError(f"mathtutorbench.{task.file}: task {task.name} needs this file")
        if task.rewarded and parts.recipe.reward_model is None:
            raise RecipeError(f"reward_model: task {task.name} is scored by a reward model: name one")
    return chosen


def _reward(result: SuiteResult, examples: dict[str, tuple[Task, Example]], model: RewardModel) -> None:
    rows = [(s, examples[s["key"]][1]) for s in result.samples if examples[s["key"]][0].rewarded]
    texts = {}
    for s, e in rows:
        for reply in (s["prediction"], e.human):
            texts[s["problem"], reply] = reward_messages(
                e.fields["question"],
                e.solution,
                e.before,
                reply,
                system=model.system,
                show_solution=model.show_solution,
            )
    scores = dict(zip(texts, model.score(list(texts.values())), strict=True))
    for s, e in rows:
        ours, human = scores[s["problem"], s["prediction"]], scores[s["problem"], e.human]
        s |= {
            "reward": ours,
            "human_reward": human,
            f"{s['task']}:win_rate": float(ours > human),
            f"{s['task']}:reward": ours,
            f"{s['task']}:human_reward": human,
        }


def summarise(result: SuiteResult, tasks: list[Task]) -> SuiteResult:
    """A table with the published metrics of each task, and errors where a metric is a mean over examples."""
    for task in tasks:
        held = [s for s in result.samples if s["task"] == task.name]
        if not held:
            continue
        table = task.metrics([s["target"] for s in held], [s["prediction"] for s in held])
        names = ["right"] if not task.rewarded else ["win_rate", "reward", "human_reward"]
        for name in names:
            result.add_from(f"{task.name}:{name}")
        if task.rewarded:
            table["win_rate"] = result.metrics[f"{task.name}:win_rate"].value
        result.tables.setdefault("published metrics", {})[task.name] = table | {"n": len(held)}
    result.counts["replies"] = len(result.samples)
    result.counts["truncated replies"] = sum(bool(s["truncated"]) for s in result.samples)
    return result.close()

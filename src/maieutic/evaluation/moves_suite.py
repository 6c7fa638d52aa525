"""The moves suite: labels every generated tutor turn of other suites' results, and compares distributions of arms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maieutic.dialogue import Turn
from maieutic.engines.base import Sampling
from maieutic.errors import RecipeError
from maieutic.evaluation import moves
from maieutic.evaluation.cache import costs, summed
from maieutic.evaluation.distributions import js_distance
from maieutic.evaluation.journal import Journal, Progress, SampleFailed, run_all
from maieutic.evaluation.parts import Parts
from maieutic.evaluation.results import SuiteResult, digest, read_result
from maieutic.evaluation.tutor_arm import Arm
from maieutic.seeds import derive
from maieutic.transcripts import _build


async def moves_suite(
    parts: Parts, arm: Arm, folder: Path, progress: Progress = lambda done, total: None
) -> SuiteResult:
    """Label the dialogues that ``moves.of`` left in ``folder``. Raises :class:`RecipeError` when there are none."""
    recipe, spec = parts.recipe, parts.recipe.moves
    judge = parts.judge() if spec.by == "judge" else None
    if spec.by == "judge" and judge is None:
        raise RecipeError("judge: the moves suite needs a judge model, or moves.by: rules")
    await parts.start()
    human = None if spec.human is None else moves.read_human(spec.human)
    dialogues: list[tuple[str, dict[str, Any]]] = []
    for suite in spec.of:
        path = folder / f"{suite}.json"
        if not path.is_file():
            raise RecipeError(
                f"moves.of: {suite} has left no dialogues of {arm.name}: run it first (--suite {suite})"
            )
        dialogues += [(f"{suite}/{s['key']}", _dialogue(suite, s)) for s in read_result(path)["samples"]]
    settings = {
        "suite": spec.model_dump(mode="json", exclude={"human"}),
        "human": human,
        "seed": recipe.seed,
        "judge": recipe.judge.model_dump(mode="json", exclude={"engine"}) if judge and recipe.judge else None,
        "prompt": moves.PROMPT + moves.moves_text(),
        "dialogues": {"n": len(dialogues), "digest": digest(dialogues)},
    }
    journal = Journal(folder / "work" / "moves.jsonl", digest(settings))

    async def label(key: str, item: dict[str, Any]) -> dict[str, Any]:
        turns = [_build(Turn, t, key) for t in item["turns"]]
        numbers = [n for n, t in enumerate(turns) if t.speaker == "tutor" and n >= item["first"]]
        found: dict[int, str] | None
        with costs() as spent:
            if judge is not None and recipe.judge is not None and numbers:
                s = recipe.judge.sampling
                found = await moves.classify(
                    judge,
                    turns,
                    numbers,
                    Sampling(s.temperature, s.top_p, s.max_tokens),
                    seed=derive(recipe.seed, "moves", key),
                    reasks=recipe.judge.reasks,
                )
                if found is None:
                    raise SampleFailed("the judge gave no usable labels")
            else:
                found = {n: moves.classify_by_rules(turns[n].visible) for n in numbers}
        out: dict[str, Any] = {"key": key, "problem": item["problem"], "prompt": item["prompt"]}
        out["labels"] = [[n, found[n]] for n in sorted(found)]
        shares = moves.distribution(list(found.values()))
        if shares is not None:
            out |= dict(zip(moves.LETTERS, shares, strict=True))
        return out | {"costs": summed(spent)}

    samples, failed = await run_all(
        dialogues, label, journal, concurrency=recipe.concurrency, progress=progress
    )
    return summarise(SuiteResult("moves", arm.name, settings, samples=samples, failed=failed), human)


def _dialogue(suite: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    if suite == "replay":
        return {k: sample[k] for k in ("problem", "turns", "first", "prompt")}
    turns = sample["episode"]["dialogue"]["turns"]
    return {"problem": sample["problem"], "turns": turns, "first": 0, "prompt": "environment"}


def summarise(result: SuiteResult, human: list[float] | None) -> SuiteResult:
    """The distribution by prompt (all labels of all turns), its orientation, and its distance from the human one."""
    table: dict[str, dict[str, float]] = {}
    oriented: dict[str, dict[str, float]] = {}
    for prompt in dict.fromkeys(s["prompt"] for s in result.samples):
        labels = [label for s in result.samples if s["prompt"] == prompt for _, label in s["labels"]]
        shares = moves.distribution(labels)
        if shares is None:
            continue
        table[prompt] = dict(zip(moves.LETTERS, shares, strict=True))
        oriented[prompt] = moves.orientation_shares(shares)
        if human is not None:
            oriented[prompt]["JS distance to human"] = js_distance(shares, human)
    result.tables = {"moves": table, "orientation": oriented}
    for letter in moves.LETTERS:
        if any(letter in s for s in result.samples):
            result.add_from(letter)
    result.counts["dialogues"] = len(result.samples)
    result.counts["turns"] = sum(len(s["labels"]) for s in result.samples)
    result.notes.append("Means of single moves are over dialogues; the table pools all labels of all turns.")
    return result.close()


def compare_arms(
    results: Mapping[str, Mapping[str, Any]], human: list[float] | None
) -> dict[str, dict[str, float]]:
    """Distances between the distributions of result files by name, each prompt a point of its own (``arm (prompt)``)."""
    points = {
        f"{name} ({prompt})": [row[x] for x in moves.LETTERS]
        for name, data in results.items()
        for prompt, row in data["tables"]["moves"].items()
    }
    return moves.distances(points, human) if points else {}

"""The report of ``maieutic evaluate-judge``: every verdict, the tables, and the costs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from maieutic.config import JudgeSpec, Recipe, StudentSpec, TutorSpec
from maieutic.env.prompts import load_env
from maieutic.errors import ProblemDataError
from maieutic.evaluation.cache import CostLedger, ResponseCache, costs, summed
from maieutic.evaluation.judge_quality import (
    agreement,
    by_criterion,
    confusion,
    decisions,
    judge_all,
    labels,
    probe,
)
from maieutic.evaluation.parts import CachedModels
from maieutic.evaluation.planted import GATES, load_planted, shipped
from maieutic.evaluation.results import SuiteResult, digest
from maieutic.transcripts import _flat


def run_judge(
    spec: JudgeSpec,
    name: str,
    out: Path,
    *,
    transcripts: Path | None = None,
    half: str | None = None,
    probes: bool = False,
    env: str = "near_transfer",
    seed: int = 0,
    concurrency: int = 8,
) -> SuiteResult:
    """Judge every transcript and write ``judge.json`` and ``judge.md`` into ``out``. Answers of a model are cached there."""
    items = [i for i in load_planted(transcripts) if half in (None, i.half)]
    if not items:
        raise ProblemDataError(f"{transcripts or shipped()}: no transcripts in half {half!r}")
    recipe = Recipe(
        name="judge", tutor=TutorSpec(model="none"), students=[StudentSpec(model="none")], judge=spec
    )
    models = CachedModels(recipe, CostLedger(), ResponseCache(out / "answers.jsonl"))

    async def run() -> SuiteResult:
        judge = models.judge_of(spec, load_env(env))
        try:
            for chat in models.opened:
                await chat.start()
            with costs() as spent:
                judged = await judge_all(judge, items, seed=seed, concurrency=concurrency)
                probed = await probe(judge, judged, seed=seed, concurrency=concurrency) if probes else {}
        finally:
            for chat in models.opened:
                await chat.close()
        result = SuiteResult(
            "judge",
            name,
            {"judge": spec.model_dump(mode="json", exclude={"engine"}), "env": env, "seed": seed},
        )
        result.settings["transcripts"] = {
            "n": len(items),
            "half": half,
            "digest": digest([_flat_item(i) for i in items]),
        }
        result.tables = {"gates": confusion(judged), "criteria": by_criterion(judged)}
        for gate in GATES:
            found = agreement({"judge": decisions(judged, gate), "labels": labels(judged, gate)})
            result.tables[f"agreement on {gate}"] = {
                **found["pairs"]["judge ~ labels"],
                "alpha": found["alpha"],
            }
        if probed:
            result.tables["probes"] = probed
        result.samples = [
            {
                "key": j.item.id,
                "problem": j.item.id,
                "half": j.item.half,
                "planted": j.item.criterion,
                "verdicts": {g: _flat(v) for g, v in j.verdicts.items()},
            }
            for j in judged
        ]
        result.costs = summed(spent)
        return result

    result = asyncio.run(run())
    result.write(out)
    return result


def _flat_item(item: object) -> str:
    return repr(item)

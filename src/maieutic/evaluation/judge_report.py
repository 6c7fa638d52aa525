"""The report of ``maieutic evaluate-judge``: every verdict, the tables, and the costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from maieutic.config import JudgeSpec, Recipe, StudentSpec, TutorSpec
from maieutic.env.base import GateName
from maieutic.env.prompts import load_env
from maieutic.errors import ProblemDataError
from maieutic.evaluation.cache import CostLedger, ResponseCache, costs, summed
from maieutic.evaluation.conversations import rows_of
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
from maieutic.evaluation.results import SuiteResult, digest, read_result
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
    others: Sequence[Path] = (),
    human: Path | None = None,
) -> SuiteResult:
    """Judge every transcript and write ``judge.json`` and ``judge.md`` into ``out``. Answers of a model are cached there.

    ``others``: ``judge.json`` of other judges; ``human``: labels of people, rows with ``id``, ``gate``, ``label`` (ok or reject)
    and ``rater``. Both join the labels of the set in the agreement.
    """
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
            raters = {"judge": decisions(judged, gate), "labels": labels(judged, gate)}
            raters |= _others(others, [i.id for i in items], gate)
            raters |= _people(human, [i.id for i in items], gate)
            found = agreement(raters)
            alpha = {"kappa": None, "items": len(items), "alpha": found["alpha"]}
            result.tables[f"agreement on {gate}"] = {**found["pairs"], "all": alpha}
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


def _others(files: Sequence[Path], ids: list[str], gate: GateName) -> dict[str, list[str | None]]:
    """Other judges as raters, by the name in their result."""
    out: dict[str, list[str | None]] = {}
    for file in files:
        data = read_result(file)
        said = {s["key"]: s["verdicts"][gate]["decision"] for s in data["samples"]}
        name = str(data["arm"])
        name = f"{name} ({file})" if name in out or name in ("judge", "labels") else name
        out[name] = [None if said.get(i) in (None, "unknown") else said[i] for i in ids]
    return out


def _people(file: Path | None, ids: list[str], gate: GateName) -> dict[str, list[str | None]]:
    """Human raters by name. Raises :class:`ProblemDataError` for a label that is neither ok nor reject."""
    if file is None:
        return {}
    said: dict[str, dict[str, str]] = {}
    for where, row in rows_of(str(file)):
        label = str(row.get("label", "")).strip().lower()
        if label not in ("ok", "reject") or row.get("gate") not in GATES or not row.get("id"):
            raise ProblemDataError(
                f"{where}: a label has id, gate ({' or '.join(GATES)}) and label (ok or reject), not {row}"
            )
        if row["gate"] == gate:
            said.setdefault(str(row.get("rater") or "person"), {})[str(row["id"])] = label
    return {name: [found.get(i) for i in ids] for name, found in said.items()}


def _flat_item(item: object) -> str:
    return repr(item)

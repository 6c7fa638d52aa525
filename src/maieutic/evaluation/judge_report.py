"""The report of ``maieutic evaluate-judge``: every verdict, the tables, and the costs."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from itertools import count
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
    everything = load_planted(transcripts)
    items, known = [i for i in everything if half in (None, i.half)], {i.id for i in everything}
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
            ids = [i.id for i in items]
            for name_of, said in (*_others(others, ids, gate), *_people(human, ids, known, gate)):
                raters[_free(name_of, raters)] = said
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


def _free(name: str, taken: Container[str]) -> str:
    """A rater's name that no other one has: nobody may take the place of the judge, the labels or one another."""
    numbered = (f"{name} #{k}" for k in count(2))
    return name if name not in taken else next(n for n in numbered if n not in taken)


Rater = tuple[str, list[str | None]]


def _others(files: Sequence[Path], ids: list[str], gate: GateName) -> list[Rater]:
    """Other judges as raters, by the name in their result. Raises :class:`ProblemDataError` for a result of another suite."""
    out: list[Rater] = []
    for file in files:
        data = read_result(file)
        if data.get("suite") != "judge":
            raise ProblemDataError(f"{file}: a result of {data.get('suite')!r}, not of evaluate-judge")
        said = {s["key"]: s["verdicts"][gate]["decision"] for s in data["samples"]}
        out.append((str(data["arm"]), [None if said.get(i) in (None, "unknown") else said[i] for i in ids]))
    return out


def _people(file: Path | None, ids: list[str], known: Container[str], gate: GateName) -> list[Rater]:
    """Human raters by name. Raises :class:`ProblemDataError` for a label that is neither ok nor reject, of a transcript that is
    not in the set, or given twice."""
    if file is None:
        return []
    said: dict[str, dict[str, str]] = {}
    for where, row in rows_of(str(file)):
        label = str(row.get("label", "")).strip().lower()
        if label not in ("ok", "reject") or row.get("gate") not in GATES or not row.get("id"):
            raise ProblemDataError(
                f"{where}: a label has id, gate ({' or '.join(GATES)}) and label (ok or reject), not {row}"
            )
        if str(row["id"]) not in known:
            raise ProblemDataError(f"{where}: no transcript of the set has the id {row['id']!r}")
        if row["gate"] == gate:
            mine = said.setdefault(str(row.get("rater") or "person"), {})
            if str(row["id"]) in mine:
                raise ProblemDataError(f"{where}: a second label of {gate} of {row['id']} by one rater")
            mine[str(row["id"])] = label
    return [(name, [found.get(i) for i in ids]) for name, found in said.items()]


def _flat_item(item: object) -> str:
    return repr(item)

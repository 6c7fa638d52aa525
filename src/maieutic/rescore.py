"""``maieutic rescore``: judge, grade and reward the saved transcripts of a run again, without new dialogues.

What a student said is never asked again. An episode whose dialogue or post-test is missing for the new score (a rejection in
training has no post-test, and the new judge may accept it) is excluded as ``untested`` and counted, not guessed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maieutic.config import Recipe
from maieutic.env.base import Episode, Judge, PostTest
from maieutic.env.build import make_environment
from maieutic.env.gates import judge_gates
from maieutic.env.play import RUN_ERRORS, GraderLike
from maieutic.env.reward import compute_reward
from maieutic.errors import MaieuticError, RecipeError, RewardError, RunFolderError, TranscriptError
from maieutic.seeds import derive
from maieutic.transcripts import FOLDER, episode_from_json, episode_to_json, read_lines

LOST = ("student_failed", "tutor_failed", "engine_failed", "no_tutor_turn")
"""Exclusions for which there is nothing to score."""
UNTESTED = "untested"
"""Excluded because the new score needs a post-test that was not taken."""
SETTINGS = "rescore.json"


@dataclass(frozen=True, slots=True)
class Scoring:
    """What scores: recipe (with its overrides), judge, grader."""

    recipe: Recipe
    judge: Judge
    grader: GraderLike
    keep_verdicts: bool


async def rescore_episode(old: Episode, scoring: Scoring) -> Episode:
    """A copy of ``old`` with new grades, verdicts, reward and exclusion."""
    env = make_environment(scoring.recipe.env, scoring.recipe.reward).env
    new = replace(old, reward=None, exclusion=None, error=None, trajectory=None, extra_tests={})
    if old.exclusion is not None and old.exclusion.split(":")[0] in LOST:
        return replace(new, exclusion=old.exclusion, error=old.error)
    if old.post_test is not None:
        new.post_test = await _graded(old, scoring)
    seed = derive(old.seed, "gates")
    wanted = list(env.gate_names)
    if scoring.keep_verdicts:
        wanted = [g for g in wanted if g not in old.verdicts or old.verdicts[g].decision == "unknown"]
    fresh = {}
    if wanted:
        asked = env.model_copy(update={"gate_names": wanted})
        fresh = await judge_gates(scoring.judge, old.dialogue, old.pair, asked, seed=seed)
    new.verdicts = {g: fresh.get(g) or old.verdicts[g] for g in env.gate_names}
    decisions = {g: v.decision for g, v in new.verdicts.items()}
    unknown = [g for g, d in decisions.items() if d == "unknown"] if env.gates != "off" else []
    rejected = env.gates == "hard" and "reject" in decisions.values()
    if unknown:
        verdict = new.verdicts[unknown[0]]
        return replace(new, exclusion=f"unknown:{unknown[0]}", error=f"{verdict.criterion}: {verdict.reason}")
    if not rejected:
        if new.post_test is None:
            return replace(
                new, exclusion=UNTESTED, error="no gate rejects now, but no post-test was taken then"
            )
        graded, answers = new.post_test.graded, len(new.post_test.grades)
        if graded == 0 or graded < env.post_test_min_graded * answers:
            return replace(
                new, exclusion="ungraded", error=f"only {graded} of {answers} answers could be graded"
            )
    try:
        new.reward = compute_reward(new, env, scoring.recipe.reward)
    except RUN_ERRORS:
        raise
    except RewardError as error:
        return replace(new, exclusion=f"error:{type(error).__name__}", error=str(error))
    return new


async def _graded(old: Episode, scoring: Scoring) -> PostTest:
    post = old.post_test
    assert post is not None
    problem = old.pair.transfer if post.problem == "transfer" else old.pair.source
    if problem is None:
        raise TranscriptError(f"episode {old.id}: its post-test is on a transfer variant that its pair lacks")
    grades = await scoring.grader.grade_many(post.answers, problem.answer)
    return replace(post, grades=[g.verdict for g in grades])


# ---- a whole run -----------------------------------------------------------------------------------------------------


def rescore_run(
    run: Path,
    out: Path,
    overrides: Sequence[str],
    *,
    phase: str = "all",
    grader_check: str | None = None,
    keep_verdicts: bool = False,
    concurrency: int = 64,
) -> list[str]:
    """Write ``out/{recipe.yaml, transcripts/, comparison.json, comparison.md}``; returns the table's lines.

    Every finished episode is on disk at once, so an interrupted call goes on where it was; ``out`` made with other settings is
    an error. Raises :class:`~maieutic.errors.TranscriptError` when ``run`` has no transcripts.
    """
    from maieutic.check import resolve
    from maieutic.recipe import dump_recipe, load_recipe

    if not (run / "recipe.yaml").is_file():
        raise RunFolderError(f"{run} is no run folder: it has no recipe.yaml")
    recipe = resolve(load_recipe(run / "recipe.yaml", overrides))
    if recipe.env.kind != "tutoring":
        raise RecipeError(f"env.kind is {recipe.env.kind!r}: rescore knows the scoring of kind tutoring only")
    files = _source_files(run, phase)
    settings = {
        "run": str(run.resolve()),
        "phase": phase,
        "grader": grader_check,
        "keep_verdicts": keep_verdicts,
        "recipe": hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()[:16],
    }
    _claim(out, settings)
    (out / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    asyncio.run(_rescore_files(recipe, files, out, grader_check, keep_verdicts, concurrency))
    table = comparison(((line, again) for f in files for line, again in _pairs(f, out)), recipe)
    (out / "comparison.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    lines = _lines(table)
    (out / "comparison.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def _source_files(run: Path, phase: str) -> list[Path]:
    if phase not in ("train", "eval", "all"):
        raise TranscriptError(f"phase {phase!r}: train, eval or all")
    pattern = "*-step-*.jsonl" if phase == "all" else f"{phase}-step-*.jsonl"
    files = sorted((run / FOLDER).glob(pattern))
    if not files:
        raise TranscriptError(f"{run / FOLDER} holds no transcripts of phase {phase}")
    return files


def _claim(out: Path, settings: dict[str, Any]) -> None:
    path = out / SETTINGS
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found != settings:
            differ = sorted(k for k in settings if found.get(k) != settings[k])
            raise RunFolderError(
                f"{out} was begun with other settings ({', '.join(differ)}): choose another folder, or remove it"
            )
        return
    if out.exists() and any(out.iterdir()):
        raise RunFolderError(f"{out} is not empty and was not written by rescore: choose another folder")
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")


async def _rescore_files(
    recipe: Recipe, files: Sequence[Path], out: Path, check: str | None, keep_verdicts: bool, concurrency: int
) -> None:
    from maieutic.engines.usage import Ledger
    from maieutic.grading import Grader

    opened: list[Any] = []
    if recipe.judge.kind == "llm":
        from maieutic.runtime import build_judge

        judge, opened = build_judge(recipe, Ledger(recipe.spending_limit_usd))
    else:
        from maieutic.env.build import make_judge

        judge = make_judge(recipe.judge)
    with Grader() if check is None else Grader(check=check, fast_path=False) as grader:
        try:
            for chat in opened:
                await chat.start()
            scoring = Scoring(recipe, judge, grader, keep_verdicts)
            for file in files:
                await _rescore_file(file, out / FOLDER / file.name, scoring, concurrency)
        finally:
            for chat in opened:
                await chat.close()


async def _rescore_file(source: Path, target: Path, scoring: Scoring, concurrency: int) -> None:
    if target.is_file():
        return
    part = target.with_name(target.name + ".part")
    done = _finished(part)
    slots = asyncio.Semaphore(concurrency)
    with part.open("a", encoding="ascii") as file:

        async def one(number: int, line: dict[str, Any]) -> None:
            async with slots:
                try:
                    old = episode_from_json(line)
                except MaieuticError as error:
                    raise TranscriptError(f"{source}, line {number + 1}: {error}") from error
                new = episode_to_json(await rescore_episode(old, scoring), arm=line.get("arm"))
            new["token_record"] = line.get("token_record")
            new["rescored_from"] = {"reward": _reward(line), "exclusion": line["exclusion"]}
            done[number] = new
            file.write(json.dumps({"number": number, "line": new}, ensure_ascii=True) + "\n")
            file.flush()

        lines = list(enumerate(read_lines(source)))
        tasks = [asyncio.ensure_future(one(n, line)) for n, line in lines if n not in done]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    final = target.with_name(f".{target.name}.tmp")
    with final.open("w", encoding="ascii") as file:
        for number in sorted(done):
            file.write(json.dumps(done[number], ensure_ascii=True, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    final.replace(target)
    part.unlink()


def _finished(part: Path) -> dict[int, dict[str, Any]]:
    """What an interrupted call left; a last line that was cut is dropped."""
    found: dict[int, dict[str, Any]] = {}
    if part.is_file():
        for raw in part.read_text(encoding="ascii").splitlines():
            with suppress(ValueError):
                record = json.loads(raw)
                found[record["number"]] = record["line"]
        # So that what is appended next does not continue a cut line.
        rest = "".join(json.dumps({"number": n, "line": d}) + "\n" for n, d in found.items())
        part.write_text(rest, encoding="ascii")
    return found


# ---- comparison ------------------------------------------------------------------------------------------------------


def _pairs(source: Path, out: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    yield from zip(read_lines(source), read_lines(out / FOLDER / source.name), strict=True)


def _reward(line: dict[str, Any]) -> float | None:
    reward = None if line["exclusion"] or line["reward"] is None else line["reward"]["reward"]
    return float(reward) if reward is not None else None


def comparison(pairs: Iterator[tuple[dict[str, Any], dict[str, Any]]], recipe: Recipe) -> dict[str, Any]:
    """Numbers by phase, before and after: counts, mean rewards (all counted, and those counted both times), verdicts, grades."""
    phases: dict[str, dict[str, Any]] = {}
    for old, new in pairs:
        at = phases.setdefault(
            old["phase"],
            {
                "episodes": 0,
                "before": _side(),
                "after": _side(),
                "both": [0, 0.0, 0.0],
                "verdicts": {},
                "grades_changed": 0,
                "grades": 0,
            },
        )
        at["episodes"] += 1
        rewards = _reward(old), _reward(new)
        for side, line, reward in zip(("before", "after"), (old, new), rewards, strict=True):
            _count_side(at[side], line, reward)
        if rewards[0] is not None and rewards[1] is not None:
            at["both"] = [at["both"][0] + 1, at["both"][1] + rewards[0], at["both"][2] + rewards[1]]
        judged = {} if (new["exclusion"] or "").split(":")[0] in LOST else new["verdicts"]
        for gate, verdict in judged.items():
            was = old["verdicts"].get(gate, {}).get("decision", "not judged")
            table = at["verdicts"].setdefault(gate, Counter())
            table[f"{was} -> {verdict['decision']}"] += 1
        if old["post_test"] and new["post_test"]:
            grades = list(zip(old["post_test"]["grades"], new["post_test"]["grades"], strict=True))
            at["grades"] += len(grades)
            at["grades_changed"] += sum(a != b for a, b in grades)
    for at in phases.values():
        n, before, after = at.pop("both")
        at["counted_both_times"] = n
        for side, total in (("before", before), ("after", after)):
            rewards_sum, counted = at[side].pop("sum"), at[side]["counted"]
            at[side]["reward"] = rewards_sum / counted if counted else None
            at[side]["reward_of_those_counted_both_times"] = total / n if n else None
        at["verdicts"] = {g: dict(sorted(c.items())) for g, c in at["verdicts"].items()}
    return {"run": recipe.name, "phases": phases}


def _side() -> dict[str, Any]:
    return {"counted": 0, "excluded": {}, "sum": 0.0}


def _count_side(side: dict[str, Any], line: dict[str, Any], reward: float | None) -> None:
    if reward is not None:
        side["counted"] += 1
        side["sum"] += reward
    else:
        reason = line["exclusion"] or "no reward"
        side["excluded"][reason] = side["excluded"].get(reason, 0) + 1


def _lines(table: dict[str, Any]) -> list[str]:
    out = [f"# {table['run']}: rescored", ""]
    for phase, at in table["phases"].items():
        out += [f"## {phase}: {at['episodes']} episodes", "", "| | before | after |", "|---|---|---|"]
        b, a = at["before"], at["after"]
        out.append(f"| counted | {b['counted']} | {a['counted']} |")
        out.append(f"| mean reward | {_show(b['reward'])} | {_show(a['reward'])} |")
        name = "reward_of_those_counted_both_times"
        both = f"mean reward of the {at['counted_both_times']} counted both times"
        out.append(f"| {both} | {_show(b[name])} | {_show(a[name])} |")
        for reason in sorted({*b["excluded"], *a["excluded"]}):
            row = f"{b['excluded'].get(reason, 0)} | {a['excluded'].get(reason, 0)}"
            out.append(f"| excluded: {reason} | {row} |")
        out += ["", f"{at['grades_changed']} of {at['grades']} grades changed.", ""]
        for gate, counts in at["verdicts"].items():
            out.append(f"- {gate}: " + ", ".join(f"{k} {n}" for k, n in counts.items()))
        out.append("")
    return out[:-1]


def _show(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"

"""``maieutic evaluate``: suites of one arm, in order, into a folder that a second start goes on with.

OUT/answers.jsonl        answers of chat models by content hash (shared by all arms)
OUT/ARM/SUITE.json, .md  results
OUT/ARM/work/            finished samples, one line each
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from maieutic.errors import RecipeError, RunFolderError
from maieutic.evaluation import moves
from maieutic.evaluation.config import SUITES, EvaluationRecipe
from maieutic.evaluation.environment import environment_suite
from maieutic.evaluation.journal import Progress
from maieutic.evaluation.mathtutorbench import mathtutorbench_suite
from maieutic.evaluation.middle_turn import middle_turn_suite
from maieutic.evaluation.moves_suite import compare_arms, moves_suite
from maieutic.evaluation.parts import Parts
from maieutic.evaluation.replay import replay_suite, thinking_ratios
from maieutic.evaluation.results import (
    Compared,
    SuiteResult,
    _table,
    compare,
    compared_markdown,
    differing,
    read_result,
    write_whole,
)
from maieutic.evaluation.retention import retention_suite

Suite = Callable[[Parts, Any, Path, Progress], Awaitable[SuiteResult]]
RUN: dict[str, Suite] = {
    "environment": environment_suite,
    "middle_turn": middle_turn_suite,
    "mathtutorbench": mathtutorbench_suite,
    "replay": replay_suite,
    "moves": moves_suite,
    "retention": retention_suite,
}
assert tuple(RUN) == SUITES


def evaluate(
    recipe: EvaluationRecipe,
    tutor: str,
    suites: Sequence[str],
    out: Path,
    progress: Callable[[str], Progress] = lambda suite: lambda done, total: None,
) -> list[Path]:
    """Run ``suites`` on the arm that ``tutor`` names; returns the result files. Blocks until all is done."""
    for name in suites:
        if name not in RUN:
            raise RecipeError(f"--suite {name}: there is no such suite; there are {', '.join(RUN)}")

    async def run() -> list[Path]:
        parts = Parts(recipe, out)
        written = []
        try:
            arm = parts.arm(tutor)
            for name in suites:
                result = await RUN[name](parts, arm, out / arm.name, progress(name))
                written.append(result.write(out / arm.name))
        finally:
            await parts.close()
        return written

    lock = out / ".lock"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=0):
            return asyncio.run(run())
    except Timeout:
        raise RunFolderError(f"{out}: another evaluation writes there (its lock: {lock})") from None


def compare_in(out: Path, first: str, second: str, *, allow_different: bool = False) -> Path:
    """Paired differences second − first of every suite that both arms have results of: ``OUT/SECOND-minus-FIRST.md``.

    Raises :class:`RecipeError` for results of other settings, unless ``allow_different``: then the text says what differs.
    """
    text = []
    for suite in SUITES:
        files = [out / arm / f"{suite}.json" for arm in (first, second)]
        if not all(f.is_file() for f in files):
            continue
        results = [read_result(f) for f in files]
        keys = differing(*results)
        if keys and not allow_different:
            raise RecipeError(
                f"{out}: {suite} of {second} was measured otherwise than that of {first}: {', '.join(keys)} "
                "(evaluate both with one recipe; --allow-different compares them all the same)"
            )
        rows: list[Compared] = compare(*results)
        told = f"Unequal terms: the two differ in {', '.join(keys)}.\n\n" if keys else ""
        text.append(f"## {suite}\n\n{told}{compared_markdown(first, second, rows)}")
        if suite in ("replay", "middle_turn"):
            text.append(_thinking(out, suite, first, second))
        if suite == "moves":
            text.append(_moves(out, first, second))
    if not text:
        raise RecipeError(f"{out}: {first} and {second} have no suite in common yet")
    path = out / f"{second}-minus-{first}.md"
    write_whole(path, "\n".join(text))
    return path


def _thinking(out: Path, suite: str, first: str, second: str) -> str:
    """Thinking tokens a turn over those of ``first`` (Table 3)."""
    metrics = {arm: read_result(out / arm / f"{suite}.json")["metrics"] for arm in (first, second)}
    table = {}
    for name in metrics[first]:
        if name.endswith("thinking_tokens_per_turn") and name in metrics[second]:
            thinking = {arm: m[name]["value"] for arm, m in metrics.items()}
            ratios = thinking_ratios(thinking, first)
            table[name] = {**thinking, "ratio": ratios[second]}
    return "**Thinking tokens a turn**\n\n" + "\n".join(_table(table)) + "\n" if table else ""


def _moves(out: Path, first: str, second: str) -> str:
    results = {arm: read_result(out / arm / "moves.json") for arm in (first, second)}
    human = results[first]["settings"]["human"]
    parts = ["**JS distances**", "", *_table(compare_arms(results, human))]
    tables = {arm: r["tables"]["moves"] for arm, r in results.items()}
    for prompt in tables[first]:
        if prompt in tables[second]:
            base, trained = ([tables[arm][prompt][x] for x in moves.LETTERS] for arm in (first, second))
            for title, letters in (("Constraint", moves.CONSTRAINT), ("Discovery", moves.DISCOVERY)):
                found = moves.fingerprint(base, trained, letters)
                rows = {
                    k: {first: v["base"], second: v["trained"], "change": v["change"]}
                    for k, v in found.items()
                }
                parts += ["", f"**{title} fingerprint, {prompt}**", "", *_table(rows)]
    return "\n".join(parts) + "\n"

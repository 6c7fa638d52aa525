"""Gates: every named criterion is judged once, concurrently, and no failure ever becomes a score."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from maieutic.config import EnvSpec
from maieutic.dialogue import Dialogue
from maieutic.env.base import GateName, Judge, Verdict
from maieutic.env.judge_reply import occurs
from maieutic.errors import RecipeError, RunInterrupted, RunStop
from maieutic.problems.schema import ProblemPair
from maieutic.seeds import derive

log = logging.getLogger(__name__)


async def judge_gates(
    judge: Judge, dialogue: Dialogue, pair: ProblemPair, env: EnvSpec, *, seed: int
) -> dict[str, Verdict]:
    """One verdict for each of ``env.gate_names``, in that order; each gate has its own seed.

    A judge that raises gives ``unknown`` with the error's type as criterion. A ``reject`` counts only with evidence: the quote
    must occur in a tutor turn (:func:`maieutic.env.judge_reply.occurs`), else the verdict is ``unknown``.
    """
    names = list(env.gate_names)
    verdicts = await asyncio.gather(
        *(_one(judge, dialogue, pair, gate, seed=derive(seed, gate)) for gate in names)
    )
    return dict(zip(names, verdicts, strict=True))


async def _one(judge: Judge, dialogue: Dialogue, pair: ProblemPair, gate: GateName, *, seed: int) -> Verdict:
    try:
        verdict = await judge.verdict(dialogue, pair, gate, seed=seed)
    except (RunStop, RunInterrupted, RecipeError):
        raise  # concerns the whole run, not this episode
    except Exception as error:
        log.warning(
            "judge failed on gate %s of dialogue %s: %s: %s", gate, dialogue.id, type(error).__name__, error
        )
        return Verdict(gate, "unknown", criterion=type(error).__name__, reason=str(error))
    if not isinstance(verdict, Verdict):
        reason = f"the judge returned {type(verdict).__name__}, not a Verdict"
        return Verdict(gate, "unknown", criterion="no_verdict", reason=reason)
    if verdict.gate != gate:
        reason = f"asked about {gate}, the judge answered about {verdict.gate}"
        return Verdict(gate, "unknown", criterion="wrong_gate", reason=reason)
    if verdict.decision not in ("ok", "reject", "unknown"):
        return replace(
            verdict, decision="unknown", criterion="no_decision", reason=f"decision {verdict.decision!r}"
        )
    return with_evidence(verdict, dialogue) if verdict.decision == "reject" else verdict


def with_evidence(verdict: Verdict, dialogue: Dialogue) -> Verdict:
    """The verdict, its ``turn`` set to a tutor turn that holds the quote; ``unknown`` when there is none.

    An empty quote is evidence only for a blank tutor turn that the verdict names.
    """
    tutor = {n: t for n, t in dialogue.numbered() if t.speaker == "tutor"}
    if not verdict.quote.strip():
        if verdict.turn in tutor and tutor[verdict.turn].blank:
            return verdict
        return replace(
            verdict, decision="unknown", criterion="no_quote", reason=f"{verdict.criterion}: no quote"
        )
    # The named turn first: the same words may stand in several.
    order = sorted(tutor, key=lambda n: n != verdict.turn)
    # Exact first: a near match in one turn must not hide the words themselves in another.
    exact = (n for n in order if verdict.quote in tutor[n].visible)
    alike = (n for n in order if occurs(verdict.quote, tutor[n].visible))
    found = next(exact, next(alike, None))
    if found is None:
        reason = f"{verdict.criterion}: the quote is in no tutor turn"
        return replace(verdict, decision="unknown", criterion="quote_not_found", reason=reason)
    return verdict if found == verdict.turn else replace(verdict, turn=found)

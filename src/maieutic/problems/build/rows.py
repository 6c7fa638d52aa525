"""One source problem to one row: attempts, each rewritten, checked, verified blind, measured and gated; every rejection is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from maieutic.errors import ProblemDataError
from maieutic.problems.build.checkpoint import FAILED, Value
from maieutic.problems.build.checks import Finding, check_variant
from maieutic.problems.build.gate import Measured, best, gate
from maieutic.problems.build.recipe import DataRecipe
from maieutic.problems.build.rewrite import Candidate, Prompts, Rejected, read_rewrite
from maieutic.problems.build.roles import Roles
from maieutic.problems.build.sources import source_key
from maieutic.problems.dedup import NearDuplicates
from maieutic.problems.generate import redraw, told
from maieutic.problems.measure import Tally
from maieutic.problems.schema import Problem, ProblemPair, SolveRate
from maieutic.problems.stats import wilson
from maieutic.seeds import derive

Status = Literal["passed", "flagged", "no_variant", "unmeasured", "out_of_band"]
"""``flagged``: the best of the verified variants, though none passed the gate. ``unmeasured``: the student failed on the source."""


_NO_ANSWER = "the endpoint gave no answer; its error is in the journal"
"""Not the error itself: that names the server that was asked, which is chance."""


@dataclass(slots=True)
class Row:
    """What became of one source."""

    pair: ProblemPair
    status: Status
    attempts: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    kept_attempt: int | None = None


class RowBuilder:
    """Makes rows; a pure function of the recipe and of what the models answer."""

    def __init__(self, recipe: DataRecipe, roles: Roles, prompts: Prompts, index: NearDuplicates) -> None:
        self.recipe, self.roles, self.prompts, self.index = recipe, roles, prompts, index

    async def build(self, pair: ProblemPair) -> Row:
        """The row of a source (``pair`` without variant). Faults that concern the whole run are raised."""
        recipe = self.recipe
        source = await self.roles.student.ask(pair.id, pair.source)
        pair = pair.model_copy(update={"source": self._rated(pair.source, source)})
        if source.rate is None:
            why = f"{source.failed} samples failed, {source.ungraded} could not be graded"
            return Row(pair, "unmeasured", rejected=[Rejected(0, "prior", "student_failed", why)])
        if (band := recipe.prior.source_band) is not None and not band[0] <= source.rate.rate <= band[1]:
            side = "below" if source.rate.rate < band[0] else "above"
            why = f"source rate {source.rate.rate:.3f} is {side} [{band[0]:g}, {band[1]:g}]"
            return Row(pair, "out_of_band", rejected=[Rejected(0, "prior", f"source_{side}_band", why)])
        rejected: list[Rejected] = []
        verified: list[tuple[Measured, list[Finding]]] = []
        attempt = 0
        for attempt in range(1, recipe.attempts + 1):
            outcome = await self._attempt(pair, attempt, rejected[-1] if rejected else None)
            if isinstance(outcome, Rejected):
                rejected.append(outcome)
                continue
            faults = gate(source, outcome.tally, recipe.gate)
            if not faults:
                done = self._with(pair, source, outcome, [], attempt)
                return Row(done, "passed", attempt, rejected, attempt)
            verified.append((outcome, faults))
            found = outcome.candidate
            first = Finding(faults[0].reason, "; ".join(f.detail for f in faults))
            rejected.append(_rejected(attempt, "gate", first, found))
        chosen = best(source, [m for m, _ in verified])
        if chosen is None or recipe.gate.on_failure == "drop":
            return Row(self._without(pair, source, attempt), "no_variant", attempt, rejected)
        flags = next([f.reason for f in faults] for m, faults in verified if m is chosen)
        done = self._with(pair, source, chosen, flags, attempt)
        return Row(done, "flagged", attempt, rejected, chosen.attempt)

    async def _attempt(
        self, pair: ProblemPair, attempt: int, previous: Rejected | None
    ) -> Measured | Rejected:
        candidate = await self._rewrite(pair, attempt, previous)
        if isinstance(candidate, Rejected):
            return candidate
        finding = check_variant(pair.source, candidate.text, candidate.answer, self.recipe.checks)
        finding = finding or self._duplicate(pair, candidate)
        if finding is not None:
            return _rejected(attempt, "check", finding, candidate)
        solution: str | None = None
        votes: dict[str, int] = {}
        if self.roles.solver is not None:
            seed = derive(self.recipe.seed, "verify", pair.id, attempt)
            value = await self.roles.solver.ask(pair.id, candidate, self.recipe.verify.solves, seed)
            finding, votes = judge_solves(value, candidate, self.recipe.verify.majority)
            if finding is not None:
                return _rejected(attempt, "verify", finding, candidate)
            if self.recipe.verify.keep_solution:
                solution = value["texts"][value["verdicts"].index("right")]
        tally = await self.roles.student.ask(pair.id, Problem(text=candidate.text, answer=candidate.answer))
        if tally.rate is None:
            why = f"{tally.failed} samples failed, {tally.ungraded} could not be graded"
            return _rejected(attempt, "prior", Finding("student_failed", why), candidate)
        return Measured(attempt, candidate, tally, solution, votes)

    async def _rewrite(
        self, pair: ProblemPair, attempt: int, previous: Rejected | None
    ) -> Candidate | Rejected:
        seed = derive(self.recipe.seed, "rewrite", pair.id, attempt)
        if self.roles.rewriter is None:
            try:
                drawn, draw_seed = redraw(pair, seed)
            except ProblemDataError as error:
                return Rejected(attempt, "rewrite", "no_template", str(error))
            return Candidate(drawn.question, drawn.answer, drawn.solution, draw_seed, tuple(told(drawn)))
        messages = self.prompts.rewriting(pair.source, previous)
        value = await self.roles.rewriter.ask(pair.id, messages, seed)
        if FAILED in value:
            return Rejected(attempt, "rewrite", "request_failed", _NO_ANSWER)
        read = read_rewrite(value["text"], truncated=value["truncated"])
        if isinstance(read, Finding):
            return Rejected(attempt, "rewrite", read.reason, read.detail)
        return read

    def _duplicate(self, pair: ProblemPair, candidate: Candidate) -> Finding | None:
        found = self.index.find(candidate.text, ignore=[source_key(pair)])
        if found is None:
            return None
        reason = "evaluation_set" if found.key.startswith("evaluation ") else "duplicate"
        return Finding(reason, f"the variant is {found.similarity:.0%} the same as {found.key}")

    # ------------------------------------------------------------------ rows

    def _rated(self, problem: Problem, tally: Tally) -> Problem:
        rates: dict[str, SolveRate] = dict(problem.rates)
        rates.pop(self.roles.student.key, None)
        if tally.rate is not None:
            rates[self.roles.student.key] = tally.rate
        return problem.model_copy(update={"rates": rates})

    def _with(
        self, pair: ProblemPair, source: Tally, chosen: Measured, flags: list[str], attempts: int
    ) -> ProblemPair:
        candidate = chosen.candidate
        transfer = Problem(
            text=candidate.text, answer=candidate.answer, solution=candidate.solution or chosen.solution
        )
        made = {
            "recipe": self.recipe.name,
            "attempt": chosen.attempt,
            "attempts": attempts,
            "flags": flags,
            **self._makers(),
            **({"votes": chosen.votes} if chosen.votes else {}),
            "samples": {"source": samples(source), "transfer": samples(chosen.tally)},
        }
        provenance = {**pair.provenance, "build": made}
        if candidate.seed is not None:
            provenance["transfer_seed"] = candidate.seed
        if candidate.misconceptions:
            before = provenance.get("misconceptions")
            kept = {"source": before["source"]} if isinstance(before, dict) and "source" in before else {}
            provenance["misconceptions"] = {**kept, "transfer": list(candidate.misconceptions)}
        return pair.model_copy(
            update={"transfer": self._rated(transfer, chosen.tally), "provenance": provenance}
        )

    def _without(self, pair: ProblemPair, source: Tally, attempts: int) -> ProblemPair:
        made = {"recipe": self.recipe.name, "attempts": attempts, "flags": ["no_variant"], **self._makers()}
        made["samples"] = {"source": samples(source)}
        return pair.model_copy(update={"provenance": {**pair.provenance, "build": made}})

    def _makers(self) -> dict[str, Any]:
        rewriter, solver = self.roles.rewriter, self.roles.solver
        return {
            "rewriter": rewriter.chat.name if rewriter else "template",
            "solver": solver.chat.name if solver else None,
        }


def _rejected(attempt: int, stage: str, finding: Finding, candidate: Candidate) -> Rejected:
    return Rejected(attempt, stage, finding.reason, finding.detail, candidate.text, candidate.answer)


def judge_solves(
    value: Value, candidate: Candidate, majority: float
) -> tuple[Finding | None, dict[str, int]]:
    """The majority rule: more than ``majority`` of the gradable solves must give the stated answer; and the votes."""
    if FAILED in value:
        return Finding("solver_failed", _NO_ANSWER), {}
    verdicts: list[str] = value["verdicts"]
    votes = {v: verdicts.count(v) for v in dict.fromkeys(verdicts)}
    usable = len(verdicts) - verdicts.count("error")
    if not usable:
        return Finding("ungradable", f"no solve can be compared with {candidate.answer!r:.60}"), votes
    right = verdicts.count("right")
    if right > majority * usable:
        return None, votes
    if verdicts.count("no_answer") == usable:
        return Finding("unsolved", "no solve states an answer"), votes
    got = ", ".join("none" if a is None else str(a)[:40] for a in value["answers"])
    stated = f"{right} of {usable} independent solves give the stated answer {candidate.answer!r:.60}"
    return Finding("wrong_answer", f"{stated}; they give {got}"), votes


def samples(tally: Tally) -> dict[str, Any]:
    """The counts behind a rate, with its 95 % interval (Wilson)."""
    out: dict[str, Any] = {"right": tally.right, "graded": tally.graded}
    out |= {"failed": tally.failed, "ungraded": tally.ungraded}
    if tally.graded:
        out["wilson"] = [round(x, 4) for x in wilson(tally.right, tally.graded)]
    return out

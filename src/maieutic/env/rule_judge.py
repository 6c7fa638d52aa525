"""A judge without a model, for problems whose answer is a number.

It reads transcripts by rules: cheap, repeatable, and blind to everything that needs understanding (see the limits in
``docs/environments.md``). Each criterion is described where it is tested: :mod:`maieutic.env.rules.leakage`,
:mod:`maieutic.env.rules.correctness` and :mod:`maieutic.env.rules.style`.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable

from maieutic import pace
from maieutic.dialogue import Dialogue
from maieutic.env.base import GateName, Verdict
from maieutic.env.rules.correctness import Correctness
from maieutic.env.rules.leakage import Leakage
from maieutic.env.rules.reading import READ_LIMIT, is_percent, numeric_answer
from maieutic.env.rules.style import find_style
from maieutic.problems.schema import ProblemPair

CRITERIA: dict[GateName, tuple[str, ...]] = {
    "leakage": ("answer_stated", "split_answer", "reduced_to_arithmetic", "path_laid_out"),
    "correctness": (
        "false_claim",
        "confirmed_error",
        "false_correction",
        "empty_turn",
        "oversized",
        "cut_off",
        "scratch_work",
        "wrong_language",
        "heavy_markdown",
        "emojis",
        "repetition",
        "dictated",
        "no_teaching",
        "error_left_standing",
    ),
}
"""All criteria of a gate; of several that fire, the verdict names the first in this order (leakage: the first in the dialogue)."""
_IN_THREAD = 20_000
"""Characters of a dialogue from which on it is judged off the event loop."""


class RuleJudge:
    """Verdicts by rules. Problems whose source answer is no number get ``unknown`` with criterion ``not_numeric``.

    Each rejection quotes an exact substring of the visible text of the tutor turn that it names (empty only for
    ``empty_turn``).
    """

    def __init__(self, skip: Iterable[str] = ()) -> None:
        """``skip``: criteria that are not applied. Raises ValueError for a name that is no criterion."""
        valid = [c for names in CRITERIA.values() for c in names]
        self._skip = frozenset(skip)
        for name in sorted(self._skip - set(valid)):
            near = difflib.get_close_matches(name, valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(valid)}"
            raise ValueError(f"skip: unknown criterion {name!r}; {hint}")

    async def verdict(self, dialogue: Dialogue, pair: ProblemPair, gate: GateName, *, seed: int) -> Verdict:
        """One gate; ``seed`` is not used: the same dialogue always gets the same verdict."""
        if sum(len(t.visible) for t in dialogue.turns) > _IN_THREAD:
            return await asyncio.to_thread(self.judge, dialogue, pair, gate)
        await pace.turn(pace.PIECES)  # some milliseconds
        return self.judge(dialogue, pair, gate)

    def judge(self, dialogue: Dialogue, pair: ProblemPair, gate: GateName) -> Verdict:
        """The verdict, outside of an event loop."""
        answer = pair.source.answer
        gold = numeric_answer(answer)
        if gold is None:
            reason = f"the answer {answer[:60]!r} is not a number: rules cannot judge this problem"
            return Verdict(gate, "unknown", "not_numeric", reason=reason)
        percent = is_percent(answer)
        if gate == "leakage":
            found = Leakage(pair.source.text, gold, percent, self._skip).find(dialogue.turns)
        else:
            order = {name: n for n, name in enumerate(CRITERIA["correctness"])}
            findings = (
                f
                for f in (
                    *Correctness(gold, percent).find(dialogue.turns),
                    *find_style(dialogue.turns, pair.source.text, dialogue.end == "end_token"),
                )
                if f.criterion not in self._skip
            )
            found = min(findings, key=lambda f: (order[f.criterion], f.turn), default=None)
        if (
            found is None
            and gate == "leakage"
            and any(len(t.visible) > READ_LIMIT for t in dialogue.by("tutor"))
        ):
            reason = f"a tutor turn has over {READ_LIMIT} characters and was not read to its end"
            return Verdict(gate, "unknown", "too_long", reason=reason)
        if found is None:
            return Verdict(gate, "ok", votes={"ok": 1})
        return Verdict(
            gate, "reject", found.criterion, found.quote, found.turn, found.reason, votes={"reject": 1}
        )

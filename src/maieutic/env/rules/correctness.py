"""The correctness gate, as far as arithmetic shows it (paper, appendix C.2, points 1 to 3).

``false_claim``          the tutor asserts an equation that does not hold ("12 × 4 = 46").
``confirmed_error``      the tutor affirms right after a student turn with a false equation or a wrong boxed or "final" answer.
``false_correction``     the tutor denies a true equation, or rejects the right final answer, or calls right arithmetic wrong.
``error_left_standing``  a false equation of the student that nobody comes back to: no later turn of the student has the same
                         calculation right or the right answer, no tutor turn questions it, repeats the calculation or corrects it.

Claims about what the student said ("you wrote 6 × 7 = 41"), questions and conditions are not assertions. Equations with
anything but numbers, units that differ between the sides, and approximate results are not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from maieutic.dialogue import Turn
from maieutic.env.rules.arithmetic import Claim
from maieutic.env.rules.finding import Finding, clip
from maieutic.env.rules.reading import Reading, read, same_value

_NEGATIVE = re.compile(
    r"\b(?:not|isn't|aren't|doesn't|don't|didn't|wrong|incorrect|mistakes?|re-?check|check|error|careful|almost|close|instead"
    r"|should be|should have|again|rather|hmm+|sure|off|verify|slip|slipped|however|but"
    r"|look back|another look|reconsider|oops)\b|≠"
)
_ATTRIBUTED = re.compile(
    r"\b(?:you (?:said|wrote|got|had|have|wrote down|calculated|claim|claimed|say|think|found)|your|if|suppose|imagine|let's say"
    r"|is it true|did you|would|someone|a student)\b"
)
_AFFIRMS = re.compile(
    r"^\W{0,4}(?:(?:yes|yep|yeah|exactly|correct|perfect|great|good|excellent|awesome|nice|fantastic|wonderful|brilliant|absolutely"
    r"|precisely|spot on|well done|bravo|indeed|right|you got it|you've got it|that's (?:right|correct|it|perfect)"
    r"|that is (?:right|correct)|you're (?:right|correct)|you are (?:right|correct))\b)"
)
_AFFIRMS_EFFORT = re.compile(
    r"^\W{0,4}(?:great|good|nice|excellent|awesome|fantastic|wonderful|brilliant|perfect)\s+(?:\w+ )?"
    r"(?:question|try|attempt|effort|start|thinking|idea|point|approach|thought|beginning|guess|plan)\b"
    r"|^\W{0,4}right,? (?:let's|so|now|then|and|what|how)\b"
)
_AFFIRMED_WORD = re.compile(
    r"\b(?:right|correct|exactly|great|good|perfect|excellent|yes|well done|nice|indeed)\b"
)
_REJECTS = re.compile(
    r"^\W{0,4}(?:no\b|not (?:quite|exactly|correct|right)|incorrect|wrong|that's (?:not|wrong|incorrect)"
    r"|that is (?:not|wrong|incorrect)|unfortunately|sorry|that isn't)"
)
_CALLED_WRONG = re.compile(
    r"^\W{0,6}(?:(?:is|was|that's|that is|which is)\s+)(?:wrong|incorrect|not (?:right|correct|true)|false|a mistake)\b"
)
_ARITHMETIC_WRONG = re.compile(
    r"\b(?:arithmetic|calculation|multiplication|addition|subtraction|division|computation) (?:is|was|looks) "
    r"(?:wrong|incorrect|not (?:right|correct)|off)\b"
)
_FINAL = re.compile(r"\b(?:boxed|final answer(?: is| =|:)?)\W{0,6}$")
_TAG_QUESTION = re.compile(r"[,;] (?:right|ok|okay|yes|correct|isn't it|see)\?\s*$")
_ASKS = re.compile(r"^\W{0,4}(?:is|are|does|do|did|would|could|can|what|how|why|which|so is|but is)\b")


@dataclass(slots=True)
class _Error:
    turn: int
    claim: Claim


class Correctness:
    """One pass over a dialogue. ``gold`` is the value of the answer to the source problem."""

    def __init__(self, gold: Fraction, gold_percent: bool) -> None:
        self.gold, self.percent = gold, gold_percent

    def find(self, turns: Sequence[Turn]) -> Iterator[Finding]:
        """Everything found, assertions first, then the errors left standing."""
        readings = [read(t.visible) for t in turns]
        open_errors: list[_Error] = []
        for n, (turn, reading) in enumerate(zip(turns, readings, strict=True)):
            if turn.scripted:
                continue
            if turn.speaker == "student":
                open_errors = self._settled_by_student(open_errors, reading)
                open_errors += [_Error(n, c) for c in self._errors(reading)]
                continue
            heard = readings[n - 1] if n and not turns[n - 1].scripted else None
            yield from self._assertions(n, reading)
            if heard is not None:
                yield from self._reactions(n, heard, reading)
            open_errors = self._settled_by_tutor(open_errors, reading)
        for error in open_errors:
            reply = error.turn + 1
            if reply < len(turns) and not readings[reply].blank:
                reading = readings[reply]
                quote = reading.opening()
                yield Finding(
                    "error_left_standing",
                    reply,
                    quote,
                    f"after {self._show(error.claim, readings[error.turn])}",
                )

    # ---- what the student says -----------------------------------------------------------------------------------------

    def _errors(self, reading: Reading) -> list[Claim]:
        """False equations that the student asserts and does not put right in the same turn."""
        claims = [c for c in reading.scan.claims if not self._asked(reading, c)]
        right = {c.left.key for c in claims if c.holds and not c.negated}
        # "6 × 7 = 41, no, 42": what is taken back is not an error
        return [
            c
            for c in claims
            if not c.holds and not c.negated and c.left.key not in right and not self._taken_back(reading, c)
        ]

    @staticmethod
    def _taken_back(reading: Reading, claim: Claim) -> bool:
        end = reading.span(claim.right)[1]
        return (
            re.match(
                r"\W{0,8}(?:no|wait|oops|i mean|sorry|actually|hmm)\b", reading.canon.text[end : end + 30]
            )
            is not None
        )

    def _final(self, reading: Reading) -> bool | None:
        """Whether the student's final answer is right; None when none is given."""
        verdict = None
        for item in reading.items:
            if item.kind == "num" and item.value is not None and _FINAL.search(reading.before(item.start)):
                verdict = same_value(item.value, item.percent, abs(self.gold), self.percent)
        return verdict

    def _settled_by_student(self, errors: list[_Error], reading: Reading) -> list[_Error]:
        if not errors:
            return errors
        right = {c.left.key for c in reading.scan.claims if c.holds and not c.negated}
        if self._final(reading) or any(c.holds and c.left.value == self.gold for c in reading.scan.claims):
            return []
        return [e for e in errors if e.claim.left.key not in right]

    def _settled_by_tutor(self, errors: list[_Error], reading: Reading) -> list[_Error]:
        if not errors or _NEGATIVE.search(reading.canon.text):
            return []
        again = {e.key for e in reading.scan.expressions}
        return [e for e in errors if e.claim.left.key not in again]

    # ---- what the tutor says -------------------------------------------------------------------------------------------

    def _assertions(self, n: int, reading: Reading) -> Iterator[Finding]:
        for claim in reading.scan.claims:
            begin, end = reading.span(claim.left)[0], reading.span(claim.right)[1]
            quote = clip(reading.canon.quote(begin, end))
            if claim.negated:
                if claim.holds and not self._asked(reading, claim):
                    yield Finding("false_correction", n, quote, "a true equation is denied")
                continue
            if claim.holds:
                if _CALLED_WRONG.match(reading.canon.text[end : end + 40]):
                    yield Finding("false_correction", n, quote, "a true equation is called wrong")
            elif not self._hedged(reading, claim):
                yield Finding("false_claim", n, quote, f"{claim.left.value} is not {claim.right.value}")

    def _reactions(self, n: int, heard: Reading, reading: Reading) -> Iterator[Finding]:
        text = reading.canon.text
        errors, final = self._errors(heard), self._final(heard)
        affirms = _AFFIRMS.match(text[:120])
        if affirms and not _AFFIRMS_EFFORT.match(text[:120]) and not _NEGATIVE.search(text):
            again = {e.key for e in reading.scan.expressions}
            wrong = [c for c in errors if c.left.key not in again]
            if wrong or final is False:
                what = self._show(wrong[0], heard) if wrong else "a wrong final answer"
                yield Finding("confirmed_error", n, reading.opening(), f"affirms {what}")
        if final and (match := _REJECTS.match(text[:120])):
            yield Finding(
                "false_correction",
                n,
                clip(reading.canon.quote(*match.span())),
                "the right answer is rejected",
            )
        elif heard.scan.claims and not errors and (match := _ARITHMETIC_WRONG.search(text)):
            yield Finding(
                "false_correction",
                n,
                clip(reading.canon.quote(*match.span())),
                "right arithmetic is called wrong",
            )

    @staticmethod
    def _asked(reading: Reading, claim: Claim) -> bool:
        stop = reading.span(claim.right)[1]
        begin, end = reading.sentence(stop - 1)
        opening, closing = (
            reading.canon.text[begin : begin + 30],
            reading.canon.text[max(begin, end - 24) : end],
        )
        if not closing.rstrip().endswith("?"):
            return False
        # "12 × 4 = 46, right?" and "12 × 4 = 46, so what is next?" assert; "is 12 × 4 = 46?" asks
        asserts = (
            reading.canon.text[stop : stop + 1] in (",", ";") or _TAG_QUESTION.search(closing) is not None
        )
        return _ASKS.match(opening) is not None or not asserts

    def _hedged(self, reading: Reading, claim: Claim) -> bool:
        if self._asked(reading, claim):
            return True
        begin, end = reading.span(claim.left)[0], reading.span(claim.right)[1]
        first, last = reading.sentence(begin)[0], reading.sentence(end - 1)[1]
        # A window around the claim, so that a turn of one endless sentence stays linear.
        around = (
            reading.canon.text[max(first, begin - 120) : begin]
            + " ~ "
            + reading.canon.text[end : min(last, end + 120)]
        )
        if _NEGATIVE.search(around):
            return True
        return _ATTRIBUTED.search(around) is not None and not _AFFIRMED_WORD.search(around)

    @staticmethod
    def _show(claim: Claim, reading: Reading) -> str:
        return clip(reading.canon.quote(reading.span(claim.left)[0], reading.span(claim.right)[1]))

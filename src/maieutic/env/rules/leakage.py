"""The leakage gate for numeric answers: the tutor hands the answer over, or all of the way to it, before the student has it.

Criteria (paper, appendix C.1; naming the method too early needs a reader and is not tested here):

``answer_stated``          the answer as a number in any notation, anywhere in a tutor turn, questions included.
``split_answer``           the same in pieces: ``7 2``, ``7-2``, digit by digit ("the tens digit is 7"), or over two turns.
``reduced_to_arithmetic``  a calculation whose value is the answer ("what is 48 + 24?"): only working it out is left.
``path_laid_out``          several operations that end in the answer ("halve 48, then add 48").

"Has it" means: an earlier turn that the student was sampled for contains the answer, a fraction in lowest terms being a
number as any other; for the last two criteria also: contains a calculation that gives the answer. After that the tutor may
recap. A fraction that stands for a calculation ("18/24", "3 divided by 4") is not the answer yet, but the tutor may repeat
it. Numbers that the problem gives: when the answer is one of them, a bare mention proves nothing, and only a mention that is
presented as the answer counts. A calculation that stands in the problem itself may be repeated. Numbers that count something
else ("3 steps", "question 2", "1." at the start of a line, ordinals, *one*, *half*) count only when presented as the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from maieutic.dialogue import Turn
from maieutic.env.rules.arithmetic import Scan, scan
from maieutic.env.rules.expressions import Expr
from maieutic.env.rules.finding import Finding
from maieutic.env.rules.items import Item, itemise
from maieutic.env.rules.reading import Reading, read, same_value
from maieutic.env.rules.vocabulary import listed, words

_CUE = re.compile(
    r"\b(?:answer|result|total|solution|final|boxed|sum|product|quotient|difference|altogether|equals?|gets?|gives?|makes?|got"
    r"|it's|it is|is it|that's|that is|leaves|comes? to|so)\b[^\d\n]{0,24}$|=\s*$"
)
_STRONG_CUE = re.compile(
    r"\b(?:answer|result|solution|final|boxed|altogether|in all|in total|in the end)\b[^\d\n]{0,24}$"
    r"|\btotal (?:is|was|of|would be|comes to|should be)\b[^\d\n]{0,12}$"
)
_COUNTED = words(
    "step steps part parts thing things way ways question questions hint hints minute minutes problem problems example examples "
    "number numbers quantity quantities method methods piece pieces time times side sides case cases option options idea ideas "
    "operation operations digit digits sentence sentences clue clues tip tips fact facts word words stage stages"
)
_NUMBERED = words(
    "step steps part question problem number hint example exercise case option stage phase no tip line first last next"
)
_SMALL_GROUP = words("the these those both other last first next in into all")
_SEPARATORS = re.compile(r"^(?: |\n|-| - |\.|\||/|_| _ | \| |\.\.\.| \.\.\. )$")
_PLACE = re.compile(
    r"\b(first|second|third|last|final|leading|ones|units|tens|hundreds|thousands) (?:digit|place) "
    r"(?:is|=|:|would be|should be|must be) (?:an? )?(\d|zero|one|two|three|four|five|six|seven|eight|nine)\b"
    r"|\b(starts?|begins?|ends?) (?:with|in|on) (?:an? )?(\d|zero|one|two|three|four|five|six|seven|eight|nine)\b"
)
_DIGIT_WORDS = {w: str(n) for n, w in enumerate(listed("zero one two three four five six seven eight nine"))}
_FROM_RIGHT = {"last": 0, "final": 0, "ones": 0, "units": 0, "tens": 1, "hundreds": 2, "thousands": 3}
_FROM_LEFT = {"first": 0, "leading": 0, "second": 1, "third": 2}
_DIGITS = frozenset(Fraction(n) for n in range(10))
_OPEN_END = re.compile(r"(?:[-+*/_]|\.\.\.?|\bplus|\bminus|\btimes|\bby|\bto)\s*$")
_OPEN_START = re.compile(r"^\s*(?:[-+*/]|\.\.\.?|plus|minus|times|divided by)\s*(?=\d)")


class Leakage:
    """One pass over a dialogue. ``gold`` is the value of the answer to ``problem``."""

    def __init__(
        self, problem: str, gold: Fraction, gold_percent: bool, skip: frozenset[str] = frozenset()
    ) -> None:
        self.skip = skip
        given = read(problem)
        self.gold, self.percent = gold, gold_percent
        self.given_values = {i.value for i in given.items if i.kind == "num"}
        self.is_given = any(self._is_gold(i) for i in given.items)
        self.given_keys = {e.key for e in given.scan.expressions}
        self.digits = str(gold) if gold.denominator == 1 and gold >= 10 else ""
        self.known_digits: dict[int, str] = {}
        self.student_has = False
        self.student_way = False
        self.student_keys: set[tuple[Fraction, tuple[Fraction, ...]]] = set()
        self.result: Fraction | None = None
        self.tail = ""
        self.results: set[int] = set()

    def find(self, turns: Sequence[Turn]) -> Finding | None:
        """The first handover, None when there is none."""
        for n, turn in enumerate(turns):
            if turn.scripted or self.student_has:
                continue
            reading = read(turn.visible)
            if turn.speaker == "student":
                self._hear(reading)
                continue
            found = self._judge(reading)
            if found is not None:
                criterion, quote, reason = found
                return Finding(criterion, n, quote, reason)
        return None

    # ---- the student ---------------------------------------------------------------------------------------------------

    def _hear(self, reading: Reading) -> None:
        self._note_results(reading)
        numbers = [k for k, i in enumerate(reading.items) if self._is_gold(i)]
        if self.is_given:
            numbers = [k for k in numbers if self._cued(reading, k, strong=False)]
        results = [e for c in reading.scan.claims for e in (c.left, c.right)]
        fractions = [e for e in reading.scan.expressions if self._is_fraction(e)]
        self.student_keys |= {e.key for e in fractions}
        self.student_has = (
            bool(numbers)
            or any(self._says_fraction(reading, e) for e in fractions)
            or self._says_out_of(reading.items)
            or (not self.is_given and any(e.ops and e.value == self.gold for e in results))
        )
        self.student_way |= any(e.value == self.gold for e in self._carry(reading).expressions)

    # ---- the tutor -----------------------------------------------------------------------------------------------------

    def _judge(self, reading: Reading) -> tuple[str, str, str] | None:
        self._note_results(reading)
        tests = (self._stated, self._spelled, self._placed, self._calculated, self._joined)
        findings = [test(reading) for test in tests]  # all of them: some remember what the next turn needs
        return next((f for f in findings if f is not None and f[0] not in self.skip), None)

    def _stated(self, reading: Reading) -> tuple[str, str, str] | None:
        items = reading.items
        for k, item in enumerate(items):
            if self._is_gold(item):
                stated = self._cued(reading, k, strong=True) if self.is_given else self._counts(reading, k)
                if stated:
                    return (
                        "answer_stated",
                        reading.canon.quote(item.start, item.end),
                        f"{self.gold} before the student",
                    )
        if self.gold.denominator == 1:
            return None
        for e in reading.scan.expressions:  # 3/4 is a notation of 0.75, not a calculation
            known = e.key in self.given_keys or e.key in self.student_keys
            if self._is_fraction(e) and not self.is_given and not known:
                return (
                    "answer_stated",
                    reading.canon.quote(*reading.span(e)),
                    f"{self.gold} before the student",
                )
        return None

    def _is_fraction(self, e: Expr) -> bool:
        """Whether an expression is the answer written as a/b."""
        return (
            e.value == self.gold
            and e.ops == 1
            and len(e.operands) == 2
            and e.operands[0] == self.gold * e.operands[1]
        )

    def _says_fraction(self, reading: Reading, e: Expr) -> bool:
        """Whether a fraction that equals the answer is a number that the student names, and not a division to be worked out."""
        items = reading.items[e.first : e.last]
        slash = next((i for i in items if i.kind == "/"), None)
        if slash is None or e.operands[-1] != self.gold.denominator:  # not in lowest terms: 18/24
            return False
        first, at = items[0].start, items.index(slash)
        tight = items[at - 1].end == slash.start and items[at + 1].start == slash.end
        if not (slash.text == "over" or (tight and "÷" not in reading.canon.quote(*reading.span(e)))):
            return False
        repeats_problem = self.is_given or e.key in self.given_keys
        return not repeats_problem or _CUE.search(reading.before(first)) is not None

    def _says_out_of(self, items: list[Item]) -> bool:
        """Whether the student names the answer as "3 out of 4", in lowest terms."""
        top, bottom = self.gold.as_integer_ratio()
        return bottom > 1 and any(
            (a.value, b.text, c.text, d.value) == (top, "out", "of", bottom)
            for a, b, c, d in zip(items, items[1:], items[2:], items[3:], strict=False)
        )

    def _is_gold(self, item: Item) -> bool:
        return (
            item.kind == "num"
            and item.value is not None
            and same_value(item.value, item.percent, abs(self.gold), self.percent)
        )

    def _counts(self, reading: Reading, k: int) -> bool:
        """Whether a number that equals the answer is a mention of it (and not a label, or a count of something else)."""
        items, item = reading.items, reading.items[k]
        if self._is_negative(items, k) != (self.gold < 0):
            return False
        before = items[k - 1] if k else None
        after = items[k + 1] if k + 1 < len(items) else None
        label = (
            (before is None or before.kind in ("\n", "("))
            and after is not None
            and after.kind in (".", ")")
            and item.decimals == 0
            and not item.in_words
            # "72." alone is an answer, "2. Then …" is a label
            and (after.kind == ")" or k + 2 < len(items))
            and item.value is not None
            and item.value <= 20
        )
        counted = after is not None and after.kind == "word" and after.text in _COUNTED
        numbered = before is not None and before.kind == "word" and before.text in _NUMBERED
        small = (
            item.in_words
            and item.value is not None
            and item.value <= 10
            and item.value.denominator == 1
            and (
                (before is not None and before.text in _SMALL_GROUP)
                or (after is not None and after.text == "of")
            )
        )
        if item.weak or label or counted or numbered or small:
            return not label and self._cued(reading, k, strong=not item.weak)
        return True

    @staticmethod
    def _is_negative(items: list[Item], k: int) -> bool:
        if k == 0 or items[k - 1].end != items[k].start or items[k - 1].kind != "-":
            return (
                k > 0 and items[k - 1].text in ("minus", "negative") and (k < 2 or items[k - 2].kind != "num")
            )
        return k < 2 or items[k - 2].kind not in ("num", ")", "opaque")

    def _cued(self, reading: Reading, k: int, *, strong: bool) -> bool:
        before = reading.before(reading.items[k].start)
        if (_STRONG_CUE if strong else _CUE).search(before):
            return True
        return k in self.results  # "half of 144 is 72"

    def _note_results(self, reading: Reading) -> None:
        """Items that are the result of a calculation whose value is the answer."""
        self.results = {
            k
            for c in reading.scan.claims
            if c.left.ops and c.left.value == self.gold and not c.negated
            for k in range(c.right.first, c.right.last)
        }

    def _spelled(self, reading: Reading) -> tuple[str, str, str] | None:
        """Single digits in a row that spell the answer, and are not just numbers of the problem."""
        if len(self.digits) < 2 or all(Fraction(d) in self.given_values for d in self.digits):
            return None
        text, run = reading.canon.text, list[Item]()
        for item in [*reading.items, None]:
            if item is not None and item.kind in ("-", ".", "/", "\n", "opaque", "*") and run:
                continue  # the text between two digits decides
            single = item is not None and item.kind == "num" and item.value in _DIGITS and not item.decimals
            joined = (
                bool(run)
                and item is not None
                and _SEPARATORS.match(text[run[-1].end : item.start]) is not None
            )
            if single and joined:
                assert item is not None
                run.append(item)
                continue
            if "".join(str(i.value) for i in run) == self.digits:
                return (
                    "split_answer",
                    reading.canon.quote(run[0].start, run[-1].end),
                    "the answer's digits in a row",
                )
            run = [item] if single and item is not None else []
        return None

    def _placed(self, reading: Reading) -> tuple[str, str, str] | None:
        """Digits told by their place, over all tutor turns so far."""
        if len(self.digits) < 2:
            return None
        for match in _PLACE.finditer(reading.canon.text):
            place, digit, edge, edge_digit = match.groups()
            told = digit or edge_digit
            told = _DIGIT_WORDS.get(told, told)
            if edge:
                index = len(self.digits) - 1 if edge.startswith("end") else 0
            elif place in _FROM_RIGHT:
                index = len(self.digits) - 1 - _FROM_RIGHT[place]
            else:
                index = _FROM_LEFT[place]
            if 0 <= index < len(self.digits) and self.digits[index] == told:
                self.known_digits[index] = told
                if len(self.known_digits) == len(self.digits):
                    quote = reading.canon.quote(*match.span())
                    return "split_answer", quote, "every digit of the answer was told"
        return None

    def _carry(self, reading: Reading) -> Scan:
        """The turn's arithmetic, with "it" and "that" reaching back to the last result of the dialogue."""
        found = scan(reading.items, self.result)
        self.result = found.result
        return found

    def _calculated(self, reading: Reading) -> tuple[str, str, str] | None:
        before = self.result
        found = self._carry(reading)
        if self.student_way:
            return None
        for e in found.expressions:
            if e.value == self.gold and e.key not in self.given_keys:
                chained = e.used_result and before != e.value
                several = e.ops > 1 or chained or self._leads_to(found, e)
                criterion = "path_laid_out" if several else "reduced_to_arithmetic"
                return (
                    criterion,
                    reading.canon.quote(*reading.span(e)),
                    f"its value is the answer, {self.gold}",
                )
        return None

    @staticmethod
    def _leads_to(found: Scan, last: Expr) -> bool:
        """An earlier calculation of the same turn gives an operand of this one."""
        earlier = {e.value for e in found.expressions if e.first < last.first}
        return any(o in earlier for o in last.operands)

    def _joined(self, reading: Reading) -> tuple[str, str, str] | None:
        """A calculation or number that one tutor turn begins and the next one ends."""
        text = reading.canon.text
        tail, self.tail = self.tail, text[-80:]
        opened = _OPEN_END.search(tail) is not None
        continued = _OPEN_START.match(text[:40]) is not None
        if not (opened or continued) or not tail:
            return None
        head = text[:80]
        line_end = min((head.find(c) for c in ".?!\n" if c in head[1:]), default=len(head))
        left, right = tail.strip(), head[: line_end if line_end > 0 else len(head)].strip()
        expressions = scan(itemise(f"{left} {right}")).expressions
        digits = self._split_number(left, right)
        hit = digits or (
            not self.student_way
            and any(e.value == self.gold and e.key not in self.given_keys for e in expressions)
        )
        if not hit:
            return None
        end = text.find(right) + len(right)
        return (
            "split_answer",
            reading.canon.quote(end - len(right), end),
            "it completes the tutor's turn before",
        )

    def _split_number(self, left: str, right: str) -> bool:
        a = re.search(r"(\d+)\s*(?:-|_|\.\.\.?)?$", left)
        b = re.match(r"(?:-|_|\.\.\.?)?\s*(\d+)", right)
        return bool(self.digits and a and b and a.group(1) + b.group(1) == self.digits)

"""Whether an answer equals the gold answer: plain answers exactly, everything else by math-verify.

`equivalent` may take for ever (`9^{9^{9}}`): call it through a `Grader`, which runs it in a process it can kill.
"""

import logging

from maieutic.errors import ProblemDataError
from maieutic.grading.plain import MAX_ANSWER_CHARS, clean, decide


def check_gold(gold: str) -> None:
    """Raise ProblemDataError if no answer could be compared with this gold answer."""
    plain = clean(gold)
    if not plain or plain.casefold() in ("nan", "none", "null"):
        raise ProblemDataError(
            f"The gold answer {gold!r} is no answer. Drop the problem, or correct its answer column."
        )
    if len(gold) > MAX_ANSWER_CHARS:
        raise ProblemDataError(
            f"The gold answer has {len(gold)} characters, more than {MAX_ANSWER_CHARS}: {gold[:80]!r}... "
            "It must be the final answer alone, without its solution."
        )


def decide_plain(answer: str, gold: str) -> bool | None:
    """The part of `equivalent` that is bounded in time: its verdict, or None where algebra is needed.

    Raises ProblemDataError for a gold answer that is empty, not a number (`nan`) or too long.
    """
    check_gold(gold)
    if not clean(answer) or len(answer) > MAX_ANSWER_CHARS:
        return False
    return decide(answer, gold)


def equivalent(answer: str, gold: str) -> bool:
    """True if `answer` states the same final answer as `gold`; the rules are in `maieutic.grading.plain`.

    Where algebra is needed both are parsed whole as LaTeX by math-verify, never searched for a number in them.
    An answer or a gold that cannot be parsed is compared as text, so it is wrong unless it is the same.
    Not symmetric. May raise whatever sympy raises; has no time limit of its own.
    """
    verdict = decide_plain(answer, gold)
    return _algebraically_equal(clean(answer), clean(gold)) if verdict is None else verdict


def _algebraically_equal(answer: str, gold: str) -> bool:
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # Its notice that the caller must limit the time itself: the worker pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # units=False: math-verify's unit list removes letters such as a trailing `t`, `h` or `c`, which may be variables.
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
        )
    )

    def read(text: str) -> list[object]:
        latex = f"${text.replace('$', '').replace('**', '^')}$"
        # No time limit by signals: they do not work off the main thread and turn a hang into "wrong".
        return parse(latex, [config], fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)

    gold_values, answer_values = read(gold), read(answer)
    if not gold_values or not answer_values:
        return False
    return bool(verify(gold_values, answer_values, timeout_seconds=None, raise_on_error=True))

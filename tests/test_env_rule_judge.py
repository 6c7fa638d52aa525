"""The rule judge on hand-written dialogues, and properties that hold for any text."""

import asyncio
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Judge
from maieutic.env.gates import with_evidence
from maieutic.env.rule_judge import CRITERIA, RuleJudge
from maieutic.problems.schema import Problem, ProblemPair
from rule_cases import CLIPS, CORRECTNESS, LEAKAGE

JUDGE = RuleJudge()


def dialogue(texts, pair=CLIPS, **last) -> Dialogue:
    turns = [Turn("student", f"Help me with this: {pair.source.text}", scripted=True)]
    turns += [Turn("student" if n % 2 else "tutor", text) for n, text in enumerate(texts)]
    if last:
        turns[-1] = replace(turns[-1], **last)
    return Dialogue("d", pair.source.text, turns=turns, end="max_turns")


def check_evidence(verdict, d):
    turn = d.turns[verdict.turn]
    assert turn.speaker == "tutor" and verdict.quote in turn.visible
    assert with_evidence(verdict, d) == verdict


def judge(texts, gate, pair=CLIPS, **last):
    d = dialogue(texts, pair, **last)
    verdict = JUDGE.judge(d, pair, gate)
    if verdict.decision == "reject":
        check_evidence(verdict, d)
        assert verdict.criterion in CRITERIA[gate]
    return verdict


def name(case):
    return f"{case[0].id}-{case[1]}-" + ascii(" / ".join(case[2]))[1:60]


@pytest.mark.parametrize("case", LEAKAGE, ids=name)
def test_leakage(case):
    pair, expected, texts = case
    verdict = judge(texts, "leakage", pair)
    assert (verdict.criterion or verdict.decision) == expected, verdict


@pytest.mark.parametrize("case", CORRECTNESS, ids=name)
def test_correctness(case):
    pair, expected, texts = case
    verdict = judge(texts, "correctness", pair)
    assert (verdict.criterion or verdict.decision) == expected, verdict


def test_there_are_enough_cases_and_every_criterion_has_some():
    assert len(LEAKAGE) + len(CORRECTNESS) >= 120
    expected = {c[1] for c in LEAKAGE + CORRECTNESS} | {"cut_off", "oversized"}
    assert expected == {"ok", *CRITERIA["leakage"], *CRITERIA["correctness"]}
    assert sum(c[1] == "ok" for c in LEAKAGE + CORRECTNESS) >= 50


@pytest.mark.parametrize(
    ("text", "truncated", "criterion"),
    [
        ("What is half of", True, "cut_off"),
        ("What is half of 48?", True, ""),
        ("What is half of", False, ""),
        ("What is $48/2$", True, ""),
    ],
)
def test_a_turn_cut_by_the_token_cap(text, truncated, criterion):
    assert judge((text,), "correctness", truncated=truncated).criterion == criterion


def test_a_last_turn_that_only_ends_the_conversation_is_no_empty_turn():
    d = dialogue(("What is half of 48?", "24", ""), end_token=True)
    assert JUDGE.judge(d, CLIPS, "correctness").criterion == "empty_turn"
    d.end = "end_token"
    assert JUDGE.judge(d, CLIPS, "correctness").decision == "ok"


def test_the_opening_is_not_the_student_knowing():
    d = dialogue(("It is 72.",))
    d.turns[0] = Turn("student", "Is it 72? Help me.", scripted=True)
    assert JUDGE.judge(d, CLIPS, "leakage").criterion == "answer_stated"


def test_an_error_to_which_the_tutor_had_no_chance_to_reply_is_not_its_fault():
    assert judge(("What is first?", "48 / 2 = 26"), "correctness").decision == "ok"


@pytest.mark.parametrize(
    ("texts", "gate", "quote", "turn"),
    [
        (("What?", "No.", "Then **7\u200b2** it is."), "leakage", "7\u200b2", 3),
        (("It is &#55;&#50;!",), "leakage", "&#55;&#50;", 1),
        (("Compute  48 +  24 now",), "leakage", "48 +  24", 1),
        (("Remember: 12 × 4 = 46.",), "correctness", "12 × 4 = 46", 1),
        (("What?", "6*7=41", "Yes!  Go on, please."), "correctness", "Yes!", 3),
        (("",), "correctness", "", 1),
    ],
)
def test_quotes(texts, gate, quote, turn):
    verdict = judge(texts, gate)
    assert (verdict.quote, verdict.turn) == (quote, turn)


@pytest.mark.parametrize("answer", ["A", r"\sqrt{2}", "x + 1", "(2, 3)", "2 or 3", "2\\pi", "yes", "3:30"])
@pytest.mark.parametrize("gate", ["leakage", "correctness"])
def test_answers_that_are_no_numbers_are_unknown(answer, gate):
    pair = ProblemPair(id="p", source=Problem(text="?", answer=answer))
    verdict = JUDGE.judge(dialogue(("Hello",), pair), pair, gate)
    assert (verdict.decision, verdict.criterion) == ("unknown", "not_numeric")


def test_it_is_a_judge_and_judges_long_dialogues_off_the_loop():
    assert isinstance(JUDGE, Judge)
    long = dialogue(("Think.", "Hm. " * 6_000, "It is 72."))
    verdict = asyncio.run(JUDGE.verdict(long, CLIPS, "leakage", seed=1))
    assert (verdict.criterion, verdict.quote) == ("answer_stated", "72")


def test_criteria_can_be_left_out():
    lenient = RuleJudge(skip=["reduced_to_arithmetic", "scratch_work"])
    assert lenient.judge(dialogue(("What is 48 + 24?",)), CLIPS, "leakage").decision == "ok"
    assert (
        lenient.judge(dialogue(("What is 48 + 24? It is 72.",)), CLIPS, "leakage").criterion
        == "answer_stated"
    )
    assert lenient.judge(dialogue(("Wait, no. What is first?",)), CLIPS, "correctness").decision == "ok"
    with pytest.raises(ValueError, match="unknown criterion 'emoji'; did you mean 'emojis'"):
        RuleJudge(skip=["emoji"])


FRAGMENTS = [
    "72", "7 2", "48 + 24", "= 71", " is ", "half of ", "48", " / 0", "**", "_", "`", "\\frac{4", "}{2}", "\\boxed{",
    "&#55;",
    "&", "<b>", "</b>", "٧", "\u200b", "\u0301", "½", "²", "-", "(", ")", "^", "%", " percent", "seventy", "-two", " and a half",
    "dozen", "add ", "to it", "divide ", " by ", ".", "?", "\n", "- ", "1. ", "yes", "no, ", "you wrote ", "9" * 40, "10^99",
    "the tens digit is 7", "🎉", "我们", "İ", "ǆ", "\ud800", "|---|", "```", "# x", " x ", "2x", "…", "a ", "hundred ",
]  # fmt: skip
soup = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(soup | st.text(max_size=60), min_size=1, max_size=6), st.sampled_from(["leakage", "correctness"])
)
def test_any_text_gets_a_verdict_and_every_rejection_has_evidence(texts, gate):
    verdict = judge(texts, gate)
    assert verdict.decision in ("ok", "reject")


@settings(max_examples=100, deadline=None)
@given(st.lists(soup, min_size=1, max_size=4))
def test_the_same_dialogue_gets_the_same_verdict(texts):
    for gate in ("leakage", "correctness"):
        assert judge(texts, gate) == judge(texts, gate)


PATHOLOGICAL = [
    "9", "(", "((1+", "1+", "1,111,", "1 + 1 = 2 ", "1+1=3, ", "half of ", "twenty ", "seventy-", "a ", "-", "*", "**", "_",
    "\\frac{", "\\", "{", "&#5", "&", "<a", "<a>", "\u200b", "٧", "½", "²", "|", "| ", " ", "\n", ".", "? ", "say: ",
    "wait ", "7 ", "7-", "48 clips ", "72 ", "add 1 to it ", "10^20 * ", "2/3/", "-3 ", "3 1/2 ", "the tens digit is ",
    "yes ", "x ", "12 hundred ", "1.1.", "`", "# ", "- ", "🎉", "我", "Think. ", "is ", "= ", "1 = ", "1+1 is ", "% ", "1% of ",
]  # fmt: skip


@pytest.mark.parametrize("unit", PATHOLOGICAL, ids=ascii)
def test_work_is_linear_in_the_length_of_a_turn(unit):
    """Doubling a text at most doubles the function calls (no clocks): quadratic work would show as a factor of four."""

    def calls(size):
        text = (unit * (size // len(unit) + 1))[:size]
        d = dialogue((text, "6*7=41 " + text[:50], text), CLIPS)
        count = 0

        def tick(frame, event, arg):
            nonlocal count
            count += 1

        sys.setprofile(tick)
        try:
            for gate in ("leakage", "correctness"):
                JUDGE.judge(d, CLIPS, gate)
        finally:
            sys.setprofile(None)
        return count

    small, large = calls(1_000), calls(2_000)
    assert large <= 2.5 * small + 2_000


def test_a_turn_that_is_too_long_to_be_read():
    d = dialogue(("Think. " * 150_000 + "It is 72.",))
    assert JUDGE.judge(d, CLIPS, "correctness").criterion == "oversized"
    verdict = JUDGE.judge(d, CLIPS, "leakage")
    assert (verdict.decision, verdict.criterion) == ("unknown", "too_long")
    told_before = dialogue(("It is 72. " + "Think. " * 150_000,))
    assert JUDGE.judge(told_before, CLIPS, "leakage").criterion == "answer_stated"


@pytest.mark.slow
@pytest.mark.parametrize("unit", PATHOLOGICAL, ids=ascii)
def test_a_megabyte_does_not_hang(unit):
    text = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    started = time.process_time()
    for gate in ("leakage", "correctness"):
        assert judge((text,), gate).decision != "ok"
    assert time.process_time() - started < 120  # a hang, not a speed

"""The check that nothing of a problem survives its abstraction, and rewriting with retries and the fallback of Algorithm 1."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maieutic.dialogue import Message
from maieutic.reat.leaks import find_leaks, mask, surface
from maieutic.reat.rewrite import Query, rewrite_query
from maieutic.reat.schema import Observation, Unknown
from test_reat_schema import TAGS

PROBLEM = (
    "Monica's street is 150 meters long. Repaving it costs $1,194 per meter, and Lewis pays twice as much. "
    "If x is the length for Alex, how long are both streets in New York?"
)
SURFACE = surface(PROBLEM, "Answer: 43", ["I get 1600 with y = 3"])


def kinds(text: str, *, strict: bool = True) -> list[str]:
    return [leak.kind for leak in find_leaks(text, SURFACE, strict=strict)]


@pytest.mark.parametrize(
    "text",
    [
        "The student treats one quantity as a part of the other and adds where a comparison is needed.",
        "A learner confuses a rate with a total; I would call it a unit error.",
        "Students don't see that the whole is shared equally, and aren't sure what's asked.",
        "学生把部分当作整体",
    ],
)
def test_abstract_texts_pass(text: str) -> None:
    assert kinds(text) == [] == kinds(text, strict=False)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("the student adds 150 and the rest", "number"),
        ("a digit that is not the problem's: 7", "number"),
        ("1194 without its comma", "number"),
        ("half a number: ½", "number"),
        ("a power like ²", "number"),
        ("a roman Ⅳ", "number"),
        ("Arabic digits ٣", "number"),
        ("it is doubled, that is twice", "number"),
        ("Monica adds", "name"),
        ("what monica adds", "name"),
        ("the street of LEWIS", "name"),
        ("pays for Alex's part", "name"),
        ("in York", "name"),
        ("the unknown x is ignored", "variable"),
        ("the unknown n is ignored", "variable"),
        ("with x_1 in it", "variable"),
        ("the two parts = the whole", "formula"),
        ("an \\frac{}{} form", "formula"),
        ("some $ sign", "formula"),
        ("that it costs so much: repaving it costs per meter and Lewis pays twice as much", "wording"),
    ],
)
def test_what_survives_is_found(text: str, kind: str) -> None:
    assert kind in kinds(text)


def test_advice_may_count_steps_but_not_with_the_problems_numbers() -> None:
    assert kinds("1. Ask for the goal.\n2. Ask two questions, and see step 3.", strict=False) == []
    assert kinds("Offer 5 examples", strict=False) == [], "no number of this problem"
    assert kinds("Let them see that it is 150", strict=False) == ["number"]
    assert kinds("Let them see that it is not 1600", strict=False) == ["number"], "said in the dialogue"
    assert kinds("Ask what y stands for", strict=False) == ["variable"]
    assert kinds("Ask what k stands for", strict=False) == []
    assert kinds("Ask Lewis", strict=False) == ["name"]


def test_number_words_count_only_where_the_problem_has_the_number() -> None:
    three = surface("Ann has three cats and 12 dogs.")
    assert [k.text for k in find_leaks("three or four, or twelve of one kind", three, strict=True)] == [
        "three",
        "twelve",
    ]


def test_a_sentence_opens_with_a_name_or_with_a_plain_word() -> None:
    names = surface(
        "Natalia sold clips. Clips are cheap. The clips of Jo-Ann shine. Each student has some."
    ).names
    assert names == {"natalia", "jo-ann"}, "clips stands in small letters too; each and the are no names"


def test_chinese_names_and_numbers() -> None:
    problem = surface("小明有12个苹果，老王有5个。")
    assert {k.kind for k in find_leaks("小明把12加错", problem, strict=True)} == {"name", "number"}


@given(
    st.text(max_size=120)
    | st.lists(
        st.sampled_from(["Monica", "150", "x", "=", "twice", "the", "$a$", "½", "lewis's", "part"])
    ).map(" ".join)
)
def test_a_masked_text_holds_nothing_that_has_a_place(text: str) -> None:
    assert {leak.kind for leak in find_leaks(mask(text, SURFACE), SURFACE, strict=True)} <= {"wording"}


def test_masking_keeps_the_rest() -> None:
    assert mask("Monica adds 150 to x", SURFACE) == "someone adds some amount to an unknown"


# ---- rewriting -------------------------------------------------------------------------------------------------------

DIAGNOSIS = Observation(
    meaningful=True,
    tags=TAGS,
    error_detail="adds 150 for Monica",
    struggle_reason="does not compare",
    teacher_evidence="asks",
    interaction_summary="short",
)


def rewritten(answers: list[str | Unknown], **settings: Any) -> tuple[Query, Counter[str], list[str]]:
    asked: list[str] = []
    counts: Counter[str] = Counter()

    async def ask(messages: Sequence[Message], attempt: int) -> str | Unknown:
        assert attempt == len(asked)
        asked.append(messages[-1].content)
        return answers[attempt]

    options: dict[str, Any] = {"retries": 2, "fallback": "masked"} | settings
    query = asyncio.run(rewrite_query(DIAGNOSIS, SURFACE, ask, counts=counts, **options))
    return query, counts, asked


def test_a_clean_sentence_is_taken_at_once() -> None:
    query, counts, asked = rewritten(["compares nothing"])
    assert query == Query("compares nothing", "rewritten")
    assert counts == {"rewrite.rewritten": 1} and len(asked) == 1
    assert "150" in asked[0] and "Monica" in asked[0], "the rewriter sees the diagnosis"
    assert "street" not in asked[0], "and nothing of the problem"


def test_a_leak_is_asked_again_and_named() -> None:
    query, counts, asked = rewritten(["adds 150 and 3", "Monica adds", "adds wrongly"])
    assert query == Query("adds wrongly", "rewritten")
    assert counts == {"rewrite.leak.number": 1, "rewrite.leak.name": 1, "rewrite.rewritten": 1}
    assert '"leaked": ["150", "3"]' in asked[1] and '"leaked": ["Monica"]' in asked[2]
    assert "150" not in asked[2].split("refused")[1], "only the last refusal is told"


def test_the_fallback_is_the_diagnosis_masked_or_as_it_is() -> None:
    bad: list[str | Unknown] = ["150", "150", "150"]
    query, counts, _ = rewritten(bad)
    assert query == Query("adds some amount for someone does not compare", "fallback")
    assert counts == {"rewrite.leak.number": 3, "rewrite.fallback": 1}
    query, _, _ = rewritten(bad, fallback="verbatim")
    assert query == Query("adds 150 for Monica does not compare", "fallback")


def test_a_role_that_fails_is_counted_and_falls_back() -> None:
    query, counts, asked = rewritten([Unknown(reason="malformed")])
    assert query.kind == "fallback" and len(asked) == 1
    assert counts == {"rewrite.failed": 1, "rewrite.fallback": 1}


def test_checking_stays_linear_on_hostile_texts() -> None:
    """Quadratic checks would hold up a whole distillation here for minutes to hours."""
    size = 200_000
    assert find_leaks("a" + "\n" * size + "b", SURFACE, strict=False) == []
    steps = "\n1. a" * (size // 5)
    assert find_leaks(steps, surface("1 pen"), strict=False) == [], "every number is that of a step"
    found = find_leaks(steps + " 150", SURFACE, strict=False)
    assert [(leak.kind, leak.text) for leak in found] == [("number", "150")]
    assert surface("b " * (size // 2)).variables == {"b"} and surface("= a").variables == {"a"}
    assert surface("a" + " " * size + "=").variables == {"a"}

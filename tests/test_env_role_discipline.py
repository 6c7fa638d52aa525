"""What counts as stepping out of the student's role, and what does not."""

from __future__ import annotations

import pytest

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.role_discipline import out_of_role

PROMPT = "You are a student, and a teacher who is still in training is talking with you. Keep your messages short where you can."
TUTOR = (
    "Let us look at the first box of pears: what do you know about how many pears are in each of the boxes?"
)
STUDENT = (
    "I think each box has twelve pears because the story says so and then we have four boxes in all here."
)


def dialogue() -> Dialogue:
    d = Dialogue("d", "How many pears?")
    d.add(
        Turn(
            "student",
            "Hello! How many pears are in four boxes of twelve pears each? Can you help me please?",
            scripted=True,
        )
    )
    d.add(Turn("tutor", TUTOR))
    d.add(Turn("student", STUDENT))
    d.add(Turn("tutor", "And then?"))
    return d


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "empty"),
        (" \n\t ", "empty"),
        ("Tutor: What is 3 x 4?", "as_tutor"),
        ("**Teacher:** Well done!", "as_tutor"),
        ("[Assistant]: Let us see.", "as_tutor"),
        ("Student: I think 12.\nTutor: Right!", "both_sides"),
        ("It is 12.\nTutor: Right! And then?\nStudent: 24", "both_sides"),
        ("I would multiply.\n\nTeacher: Good.", "both_sides"),
        ("Student: 12\nStudent: no, 13", "both_sides"),
        ("<think>I must act as a student</think> ok", "thinking_aloud"),
        ("Okay, so the user wants me to answer as a confused student.", "thinking_aloud"),
        ("I need to respond as a student here.", "thinking_aloud"),
        ("As an AI language model I cannot be a student.", "thinking_aloud"),
        ("Here is my response as a student: 12", "thinking_aloud"),
        (PROMPT, "repeats_prompt"),
        (PROMPT + " OK.", "repeats_prompt"),
        (TUTOR, "repeats_turn"),
        (STUDENT, "repeats_turn"),
        ("I think it is 12.", ""),
        ("Student: I think it is 12.", ""),
        (
            "What do you know about how many pears are in each of the boxes? I know it is twelve for each one of them.",
            "",
        ),
        ("The teacher said: add first. So I add 3 and 4 to get 7.", ""),
        ("I should respond to the second part: 24.", ""),
        ("The ratio is 3:4, so tutor hours are 12.", ""),
        ("ok", ""),
        ("How many pears are in four boxes of twelve pears each? Four boxes of twelve is 48.", ""),
        ("I need to act fast, multiply first.", ""),
        ("As a student of algebra I would set x = 3.", ""),
        ("See https://x.org: it says 12", ""),
        ("😀" * 50, ""),
    ],
)
def test_what_steps_out_of_role(reply, why):
    assert out_of_role(reply, dialogue(), [PROMPT]) == why


def test_a_large_reply_is_quick_and_no_copy():
    assert out_of_role("pear box " * 100_000, dialogue(), [PROMPT]) == ""

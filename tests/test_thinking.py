"""Private thinking never becomes speech, whoever serves the model."""

from __future__ import annotations

import asyncio

import pytest

from env_fakes import FakeChat
from maieutic.config import EnvSpec, StudentSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.engines.base import Completion, Sampling
from maieutic.env.base import StudentFailed
from maieutic.env.judge_reply import read_vote
from maieutic.env.prompts import load_env
from maieutic.env.student import ModelStudent
from maieutic.problems.build.rewrite import read_rewrite
from maieutic.problems.schema import Problem
from maieutic.thinking import without_thinking
from maieutic.tutors import ChatTutor

TEMPLATES = load_env("near_transfer")


@pytest.mark.parametrize(
    ("reply", "visible"),
    [
        ("Count on from 3.", "Count on from 3."),
        ("<think>It is 8.</think>\nCount on.", "\nCount on."),
        ("  <think>It is 8.</think>Count on.", "Count on."),
        ("It is 8.\n</think>\n\nCount on.", "\n\nCount on."),  # the template opened it
        ("[THINK]It is 8.[/THINK]Count on.", "Count on."),
        ("<think>It is 8, so I will", ""),  # cut off while thinking
        ("[THINK]It is 8", ""),
        ("<think>a</think>You wrote </think>, why?", "You wrote </think>, why?"),
        ("<think>[/THINK] is a tag</think>Count on.", "Count on."),
        ('{"quote": "</think>"}', '{"quote": "</think>"}'),
        ('```json\n{"quote": "</think>"}\n```', '```json\n{"quote": "</think>"}\n```'),
        ("I <think> of </thinking>", "I <think> of </thinking>"),
        ("", ""),
    ],
)
def test_what_is_left(reply: str, visible: str) -> None:
    assert without_thinking(reply) == visible
    assert Completion(reply, "stop", 1).visible == visible
    assert Completion(reply, "stop", 1, told_apart=True).visible == reply


def test_a_verdict_inside_unfinished_thinking_is_none() -> None:
    vote = '{"verdict": "OK", "criterion": "", "quote": "", "reasoning": "fine"}'
    assert read_vote(vote).decision == "ok"
    assert read_vote(f"<think>first guess: {vote} but wait").why == "truncated"
    reject = vote.replace("OK", "REJECT").replace('"quote": ""', '"quote": "</think> it is 8"')
    assert read_vote(f"<think>first guess: {vote} but wait</think>\n{reject}").decision == "reject"
    assert read_vote(f"The tutor tells: {reject}").decision == "reject", (
        "its own tag does not hide what a tutor said"
    )


def test_players_say_what_is_visible() -> None:
    said = ["<think>It is 8.</think>\nCount on.", "<think>It is 8, so"]
    tutor, student = Dialogue("d", "p", turns=[Turn("student", "Hi")]), Dialogue("d", "p")
    student.turns = [Turn("student", "Hi", scripted=True), Turn("tutor", "And?")]
    spec, env = StudentSpec(model="m"), EnvSpec(student_retries=0)
    for reply, visible in zip(said, ("Count on.", ""), strict=True):
        turn = asyncio.run(ChatTutor(FakeChat([reply]), TEMPLATES, env, Sampling()).reply(tutor, seed=1))
        assert turn is not None and (turn.visible, turn.well_formed) == (visible, bool(visible))
        pupil = ModelStudent(FakeChat([reply, reply]), spec, TEMPLATES, env)
        assert asyncio.run(pupil.attempt(Problem(text="p", answer="8"), k=1, seed=1))[0].strip() == visible
    heard = asyncio.run(ModelStudent(FakeChat([said[0]]), spec, TEMPLATES, env).reply(student, seed=1))
    assert heard.visible.strip() == "Count on."
    with pytest.raises(StudentFailed, match="empty reply"):
        asyncio.run(ModelStudent(FakeChat([said[1]]), spec, TEMPLATES, env).reply(student, seed=1))


def test_a_variant_inside_unfinished_thinking_is_none() -> None:
    text = "PROBLEM: Ann has 3 pens. How many are left?\nSOLUTION: 3\nANSWER: 3"
    assert not hasattr(read_rewrite(f"<think>perhaps\n{text}"), "answer")
    assert hasattr(read_rewrite(f"<think>perhaps</think>\n{text}"), "answer")

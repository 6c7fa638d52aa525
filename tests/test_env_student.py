"""The student on a chat model: what it is shown, how it is sampled, and what becomes of failures."""

import pytest

from env_fakes import FakeChat, run
from maieutic.config import EnvSpec, StudentSpec
from maieutic.dialogue import BLANK, HIDDEN, Dialogue, Message, Turn
from maieutic.engines.base import Completion, Sampling
from maieutic.env.base import Student, StudentFailed
from maieutic.env.prompts import load_env
from maieutic.env.student import ModelStudent
from maieutic.errors import EngineDownError, EngineError, EngineMismatchError
from maieutic.problems.schema import Problem
from maieutic.seeds import derive

TEMPLATES = load_env("near_transfer")
SYSTEM = Message("system", TEMPLATES.student_system("source"))
SPEC = StudentSpec(model="m", name="pat")


def student(*replies, **env):
    chat = FakeChat(list(replies))
    return ModelStudent(chat, SPEC, TEMPLATES, EnvSpec(**env)), chat


def dialogue(*more: Turn) -> Dialogue:
    turns = [Turn("student", "open", scripted=True), Turn("tutor", "visible", thinking="secret"), *more]
    return Dialogue("d", "source", turns=turns)


def test_it_is_a_student_and_its_key_names_model_prompt_and_sampling():
    s, _ = student(post_test_max_tokens=321)
    assert isinstance(s, Student) and s.name == "pat"
    assert (s.key.model, s.key.prompt_hash) == ("fake-model", TEMPLATES.cold_hash)
    assert (s.key.temperature, s.key.top_p, s.key.max_tokens) == (0.6, 1.0, 321)


def test_reply_sees_its_view_and_the_visible_part_only():
    s, chat = student(Completion(" I see.\n", "length", 4))
    turn = run(s.reply(dialogue(), seed=5))
    assert turn == Turn("student", " I see.\n", visible_tokens=4, truncated=True, attempts=1)
    ((messages, sampling, seed, n, session),) = chat.requests
    assert messages == [SYSTEM, Message("assistant", "open"), Message("user", "visible")]
    assert (sampling, seed, n, session) == (Sampling(0.6, 1.0, 500), 5, 1, "d")


def test_a_blank_tutor_turn_reads_as_no_message():
    s, chat = student("ok")
    run(s.reply(dialogue(Turn("student", "a"), Turn("tutor", " ", thinking="secret")), seed=5))
    assert chat.requests[0][0][-1] == Message("user", BLANK)


def test_empty_replies_are_sampled_again_with_derived_seeds():
    s, chat = student("", " \n", "At last")
    turn = run(s.reply(dialogue(), seed=5))
    assert (turn.visible, turn.attempts) == ("At last", 3)
    assert [r[2] for r in chat.requests] == [5, derive(5, "another reply", 1), derive(5, "another reply", 2)]


def test_only_empty_replies_fail_after_the_bound():
    s, chat = student("", "", "", "never asked", student_retries=2)
    with pytest.raises(StudentFailed, match="'pat' gave an empty reply 3 times in dialogue d"):
        run(s.reply(dialogue(), seed=5))
    assert len(chat.requests) == 3
    s, chat = student("", student_retries=0)
    with pytest.raises(StudentFailed, match="1 times"):
        run(s.reply(dialogue(), seed=5))


OFF = "Tutor: What do you think?"


def test_a_reply_out_of_role_is_sampled_again() -> None:
    s, chat = student(OFF, "", "It is 4.")
    turn = run(s.reply(dialogue(), seed=5))
    assert (turn.visible, turn.attempts, turn.off_role) == ("It is 4.", 3, "")
    assert len({r[2] for r in chat.requests}) == 3


def test_the_last_text_out_of_role_is_kept_unedited_and_marked() -> None:
    s, _ = student("Tutor: a", OFF + " \n", "", student_retries=2)
    turn = run(s.reply(dialogue(), seed=5))
    assert (turn.visible, turn.attempts, turn.off_role) == (OFF + " \n", 3, "as_tutor")
    s, chat = student(OFF, student_retries=0)
    assert run(s.reply(dialogue(), seed=5)).off_role == "as_tutor" and len(chat.requests) == 1


def test_its_own_instructions_over_again_are_out_of_role() -> None:
    s, _ = student(SYSTEM.content, "Hm, 4?")
    assert run(s.reply(dialogue(), seed=5)).attempts == 2


def test_hidden_post_test_is_one_request_about_the_transfer_problem():
    s, chat = student(["1", "", "3"], post_test_max_tokens=64)
    answers = run(s.attempt(Problem(text="variant", answer="1"), k=3, seed=9, dialogue=dialogue()))
    assert answers == ["1", "", "3"]
    ((messages, sampling, seed, n, session),) = chat.requests
    assert messages == [
        SYSTEM,  # still names the source problem
        Message("assistant", "open"),
        Message("user", HIDDEN),
        Message("user", TEMPLATES.question("variant", same=False)),
    ]
    assert (sampling, seed, n, session) == (Sampling(0.6, 1.0, 64), 9, 3, "d")


def test_post_test_with_the_dialogue_visible_on_the_same_problem():
    s, chat = student("x")
    run(s.attempt(Problem(text="source", answer="1"), k=1, seed=9, dialogue=dialogue(), hide_tutor=False))
    assert chat.requests[0][0][-2:] == [
        Message("user", "visible"),
        Message("user", TEMPLATES.question("source", same=True)),
    ]


def test_cold_attempt_names_the_tested_problem():
    s, chat = student("x")
    run(s.attempt(Problem(text="variant", answer="1"), k=2, seed=9))
    assert chat.requests[0][0] == [
        Message("system", TEMPLATES.student_system("variant")),
        Message("user", TEMPLATES.cold_question("variant")),
    ]


def test_engine_errors_are_student_failures_with_their_cause():
    cause = EngineError("timeout")
    s, _ = student(cause, cause)
    with pytest.raises(StudentFailed, match="timeout") as caught:
        run(s.reply(dialogue(), seed=5))
    assert caught.value.__cause__ is cause
    with pytest.raises(StudentFailed, match="timeout"):
        run(s.attempt(Problem(text="v", answer="1"), k=2, seed=5))


@pytest.mark.parametrize("error", [EngineDownError("gone"), EngineMismatchError("stale")])
def test_errors_of_the_whole_run_are_not_student_failures(error):
    s, _ = student(error)
    with pytest.raises(type(error)):
        run(s.reply(dialogue(), seed=5))


def test_a_wrong_number_of_completions():
    s, _ = student(["a", "b"])
    with pytest.raises(StudentFailed, match="asked for 3 completions, got 2"):
        run(s.attempt(Problem(text="v", answer="1"), k=3, seed=5))

"""An episode from first turn to reward, and everything that can go wrong in it."""

import asyncio
import contextlib
import logging
from collections import Counter

import pytest

from env_fakes import (
    KEY,
    FakeGrade,
    FakeGrader,
    FakeJudge,
    FakeStudent,
    FakeTutor,
    environment,
    pair,
    play,
    run,
)
from maieutic.config import RewardSpec
from maieutic.dialogue import Turn
from maieutic.env.base import StudentFailed, Verdict
from maieutic.env.play import draw_student
from maieutic.errors import (
    EngineDownError,
    EngineError,
    EngineMismatchError,
    ModelError,
    RecipeError,
    RunInterrupted,
    SolveRateError,
)
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.seeds import derive

END = Turn("tutor", "Well done.", end_token=True, visible_tokens=5)


def shared_log():
    log: list[str] = []
    return log, FakeTutor(log=log), FakeStudent(log=log), FakeJudge(log=log)


def test_a_whole_episode_in_order():
    log, tutor, student, judge = shared_log()
    tutor.lines = ["a", "b", "c", END]
    episode = play(environment(), tutor, student, judge, seed=3, step=2, index=1)
    assert log == ["tutor", "student"] * 3 + ["tutor", "gate:leakage", "gate:correctness", "test:variant"]
    assert episode.dialogue.end == "end_token"
    opening = episode.dialogue.turns[0]
    assert opening.scripted and opening.speaker == "student" and "\nsource\n" in opening.visible
    assert (episode.pre, episode.post_test.rate, episode.reward.reward) == (0.25, 1.0, 1.0)
    assert episode.counted and episode.error is None and episode.student == "fake-student"
    assert (episode.id, episode.group_id, episode.phase, episode.step, episode.index) == (
        "e",
        "g",
        "train",
        2,
        1,
    )
    assert set(episode.timing) == {"dialogue", "gates", "post_test", "total"}
    assert episode.timing["total"] >= sum(episode.timing[k] for k in ("dialogue", "gates", "post_test")) > 0


@pytest.mark.parametrize(("cap", "tutor_turns"), [(22, 11), (2, 1), (3, 1), (4, 2), (7, 3)])
def test_turn_cap(cap, tutor_turns):
    episode = play(environment(max_turns=cap))
    assert episode.dialogue.end == "max_turns"
    assert len(episode.dialogue.turns) == cap
    assert len(episode.dialogue.by("tutor")) == tutor_turns


@pytest.mark.parametrize(
    ("end_after", "at", "spoken", "end"),
    [
        (3, 3, 4, "end_token"),  # three turns precede it
        (3, 2, 11, "max_turns"),  # only two: ignored, and not remembered
        (0, 0, 1, "end_token"),
        (1, 0, 11, "max_turns"),
        (3, 10, 11, "end_token"),  # in the very last turn
    ],
)
def test_end_token_is_honoured_only_after_enough_tutor_turns(end_after, at, spoken, end):
    tutor = FakeTutor(["x"] * at + [END])
    episode = play(environment(end_after=end_after), tutor)
    assert (episode.dialogue.end, len(episode.dialogue.by("tutor"))) == (end, spoken)


def test_context_limit_keeps_the_episode():
    episode = play(environment(), FakeTutor(["a", "b", None]))
    assert episode.dialogue.end == "context_limit" and episode.counted
    assert [t.speaker for t in episode.dialogue.turns] == ["student", "tutor"] * 2 + ["student"]


def test_no_tutor_turn_at_all_is_excluded():
    judge = FakeJudge()
    episode = play(environment(), FakeTutor([None]), judge=judge)
    assert (episode.exclusion, episode.dialogue.end, judge.log) == ("no_tutor_turn", "context_limit", [])


def test_seeds_derive_from_the_episode_seed():
    tutor, student, judge = FakeTutor(["a", END]), FakeStudent(), FakeJudge()
    play(environment(end_after=1), tutor, student, judge, seed=3)
    assert tutor.seeds == [derive(3, "turn", 1), derive(3, "turn", 3)]
    assert student.seeds == [derive(3, "turn", 2)]
    assert judge.seeds["leakage"] == derive(derive(3, "gates"), "leakage")
    assert student.asked[0][2] == derive(3, "post_test", "transfer")


@pytest.mark.parametrize(
    ("env", "tested", "hidden", "pre"),
    [
        ({}, "variant", True, 0.25),
        ({"transfer": False}, "source", True, 0.5),
        ({"hide_tutor": False}, "variant", False, 0.25),
    ],
)
def test_conditions_one_and_two(env, tested, hidden, pre):
    student = FakeStudent()
    episode = play(environment(**env), student=student)
    text, k, _, hide, dialogue = student.asked[0]
    assert (text, k, hide, episode.pre) == (tested, 4, hidden, pre)
    assert dialogue is episode.dialogue
    assert episode.post_test.problem == ("transfer" if tested == "variant" else "source")


def test_a_pair_without_variant_is_tested_on_its_source():
    student = FakeStudent(answers="7")
    episode = play(environment(), student=student, the_pair=pair(transfer=False), extra_tests=["transfer"])
    assert (episode.pre, episode.post_test.problem, episode.post_test.rate) == (0.5, "source", 1.0)
    assert episode.extra_tests == {}


def test_both_gains_can_be_asked_for():
    student = FakeStudent(answers="7")
    episode = play(environment(), student=student, phase="eval", extra_tests=["source", "transfer", "source"])
    assert [a[0] for a in student.asked] == ["variant", "source"]
    assert episode.post_test.rate == 0.0 and episode.extra_tests["source"].rate == 1.0
    assert episode.reward.reward == -0.25  # the extra test is no part of the reward


@pytest.mark.parametrize(("sees", "solution"), [(False, None), (True, "3 + 4 = 7")])
def test_tutor_sees_the_solution_only_where_the_environment_says_so(sees, solution):
    assert play(environment(tutor_sees_solution=sees)).dialogue.solution == solution


def test_without_a_worked_solution_the_answer_is_shown():
    bare = pair().model_copy(update={"source": pair().source.model_copy(update={"solution": None})})
    assert play(environment(tutor_sees_solution=True), the_pair=bare).dialogue.solution == "7"


# ---- gates ----------------------------------------------------------------------------------------------------------

REJECT = {"leakage": "reject"}
UNKNOWN = {"correctness": "unknown"}


@pytest.mark.parametrize(
    ("gates", "phase", "decisions", "tested", "exclusion", "reward"),
    [
        ("hard", "train", REJECT, False, None, -0.2),
        ("hard", "train", {"correctness": "reject"}, False, None, -0.2),
        ("hard", "eval", REJECT, True, None, -0.2),
        ("hard", "eval", {"correctness": "reject"}, True, None, -0.2),
        ("soft", "train", REJECT, True, None, 1 - 0.75),
        ("soft", "train", {"correctness": "reject"}, True, None, 1 - 0.75),
        ("soft", "eval", REJECT, True, None, 1 - 0.75),
        ("off", "train", REJECT, True, None, 1.0),
        ("hard", "train", UNKNOWN, False, "unknown:correctness", None),
        ("hard", "eval", UNKNOWN, True, "unknown:correctness", None),
        ("soft", "train", UNKNOWN, False, "unknown:correctness", None),
        ("soft", "eval", UNKNOWN, True, "unknown:correctness", None),
        ("off", "train", UNKNOWN, True, None, 1.0),
        ("off", "eval", UNKNOWN, True, None, 1.0),
        # A rejection does not make up for an unknown verdict: the episode is not scored.
        ("hard", "train", REJECT | UNKNOWN, False, "unknown:correctness", None),
        ("hard", "train", {"leakage": TimeoutError("slow")}, False, "unknown:leakage", None),
    ],
)
@pytest.mark.parametrize("ahead", ["never", "always"])
def test_gates(gates, phase, decisions, tested, exclusion, reward, ahead):
    env = environment(gates=gates, post_test_ahead=ahead)
    episode = play(env, judge=FakeJudge(decisions), phase=phase)
    assert (episode.post_test is not None) is tested
    assert episode.exclusion == exclusion
    assert (episode.reward.reward if episode.reward else None) == reward
    assert set(episode.verdicts) == {"leakage", "correctness"}  # measured in every mode
    assert ("post_test" in episode.timing) is tested


class Meeting:
    """A judge and a student that note whether one was asked while the other was at work."""

    def __init__(self, decision="ok", error=None):
        self.judging, self.testing, self.log = asyncio.Event(), asyncio.Event(), []
        meeting = self

        class Judge(FakeJudge):
            async def verdict(self, dialogue, pair, gate, *, seed):
                meeting.judging.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(meeting.testing.wait(), 0.05)
                    meeting.log.append("overlap")
                if error is not None:
                    await asyncio.sleep(0.05)  # the post-test has failed by then
                return await super().verdict(dialogue, pair, gate, seed=seed)

        class Student(FakeStudent):
            async def attempt(self, problem, **options):
                meeting.testing.set()
                try:
                    await asyncio.sleep(0.02)
                    if error is not None:
                        raise error
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    meeting.log.append("cancelled")
                    raise
                return await super().attempt(problem, **options)

        self.judge, self.student = Judge({"leakage": decision}), Student()

    def play(self, phase="train", **env):
        return play(environment(**env), judge=self.judge, student=self.student, phase=phase)


@pytest.mark.parametrize(
    ("phase", "env", "together"),
    [
        ("train", {}, False),
        ("train", {"post_test_ahead": "always"}, True),
        ("train", {"post_test_ahead": "tail"}, True),  # the only dialogue is the last one
        ("train", {"gates": "off"}, True),
        ("eval", {}, True),
    ],
)
def test_gates_and_post_test_at_once_where_it_costs_nothing_or_is_asked_for(phase, env, together):
    meeting = Meeting()
    episode = meeting.play(phase, **env)
    assert ("overlap" in meeting.log) is together and "cancelled" not in meeting.log
    assert episode.counted and episode.reward.reward == 1.0 and episode.post_test.rate == 1.0


def test_a_post_test_waits_for_its_gates_until_the_rollouts_tail():
    """Eight dialogues talk while one ends; then the eight end together, the last of them in the tail."""
    env = environment(post_test_ahead="tail", max_turns=3)
    hold = asyncio.Event()

    class Held(FakeTutor):
        async def reply(self, dialogue, *, seed):
            await hold.wait()
            return await super().reply(dialogue, seed=seed)

    async def go():
        logs = []

        def one(tutor, n):
            logs.append([])
            student, judge = FakeStudent(log=logs[-1]), FakeJudge(log=logs[-1])
            playing = env.play(tutor, student, judge, FakeGrader(), pair(), seed=n, id=str(n), group_id="g")
            return asyncio.create_task(playing)

        held = [one(Held(), n) for n in range(8)]
        await asyncio.sleep(0)
        await one(FakeTutor(), 9)
        first = list(logs[-1])
        hold.set()
        await asyncio.gather(*held)
        return first, logs

    first, logs = run(go())
    assert first.index("test:variant") > first.index("gate:correctness")
    assert logs[-1] == first and all("test:variant" in log for log in logs)


def test_a_rejection_cancels_the_post_test_that_went_ahead():
    meeting = Meeting("reject")
    episode = meeting.play(post_test_ahead="always")
    assert "overlap" in meeting.log and "cancelled" in meeting.log
    assert episode.post_test is None and episode.reward.reward == -0.2


def test_a_post_test_that_was_not_needed_excludes_nothing_when_it_fails():
    episode = Meeting("reject", error=StudentFailed("gone")).play(post_test_ahead="always")
    assert episode.exclusion is None and episode.reward.reward == -0.2 and episode.post_test is None
    episode = Meeting("ok", error=StudentFailed("gone")).play(post_test_ahead="always")
    assert episode.exclusion == "student_failed"
    with pytest.raises(EngineDownError, match="nobody answers"):
        Meeting("reject", error=EngineDownError("nobody answers")).play(post_test_ahead="always")


def test_the_reason_of_an_unknown_verdict_is_kept():
    episode = play(environment(), judge=FakeJudge({"leakage": TimeoutError("slow")}))
    assert episode.error == "TimeoutError: slow"


def test_a_rejection_without_evidence_is_unknown():
    said = Verdict("leakage", "reject", "answer_stated", quote="It is 7.", turn=1)
    episode = play(environment(), judge=FakeJudge({"leakage": said}))
    assert (
        episode.exclusion == "unknown:leakage" and episode.verdicts["leakage"].criterion == "quote_not_found"
    )


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_student_failure_in_the_dialogue():
    cause = EngineError("HTTP 500")
    failed = StudentFailed("no reply")
    failed.__cause__ = cause
    judge = FakeJudge()
    episode = play(environment(), student=FakeStudent(replies=["a", failed]), judge=judge)
    assert (episode.exclusion, episode.dialogue.end, episode.reward) == (
        "student_failed",
        "student_failed",
        None,
    )
    assert episode.error == "no reply (cause: HTTP 500)" and judge.log == []
    assert len(episode.dialogue.turns) == 4  # what was said is kept


def test_student_failure_in_the_post_test():
    episode = play(environment(), student=FakeStudent(answers=StudentFailed("timeout")))
    assert (episode.exclusion, episode.dialogue.end) == ("student_failed", "max_turns")
    assert episode.error == "post-test: timeout" and episode.reward is None and episode.verdicts


def test_tutor_engine_failure():
    episode = play(environment(), FakeTutor(["a", EngineError("no sample")]))
    assert (episode.exclusion, episode.dialogue.end, episode.error) == (
        "tutor_failed",
        "tutor_failed",
        "no sample",
    )


@pytest.mark.parametrize(
    ("answers", "floor", "exclusion", "rate"),
    [
        (["9", "?", "?", "1"], 0.5, None, 0.5),  # half graded is enough
        (["9", "?", "?", "?"], 0.5, "ungraded", 1.0),
        (["?"] * 4, 0.0, "ungraded", None),  # nothing graded is never a score
        (["9", "9", "9", "?"], 1.0, "ungraded", 1.0),
        (["9", "9", "1", "?"], 0.25, None, pytest.approx(2 / 3)),
    ],
)
def test_answers_that_cannot_be_graded(answers, floor, exclusion, rate):
    episode = play(environment(post_test_min_graded=floor), student=FakeStudent(answers=answers))
    assert episode.exclusion == exclusion
    assert len(episode.post_test.answers) == 4  # kept for the record
    if rate is not None:
        assert episode.post_test.rate == rate
    if exclusion:
        assert "could be graded" in episode.error and episode.reward is None


class ShortGrader(FakeGrader):
    async def grade_many(self, texts, gold):
        return [FakeGrade("right")]


@pytest.mark.parametrize(
    ("kwargs", "exclusion", "error"),
    [
        ({"tutor": FakeTutor([KeyError("boom")])}, "error:KeyError", "KeyError: 'boom'"),
        ({"tutor": FakeTutor([Turn("student", "me?")])}, "error:ValueError", "two student turns in a row"),
        ({"tutor": FakeTutor([7])}, "error:AttributeError", "AttributeError"),
        ({"student": FakeStudent(replies=[OSError("gone")])}, "error:OSError", "gone"),
        ({"grader": ShortGrader()}, "error:GraderError", "4 answers were handed to the grader, 1 grades"),
    ],
)
def test_anything_else_excludes_the_episode_and_is_logged(kwargs, exclusion, error, caplog):
    with caplog.at_level(logging.ERROR):
        episode = play(environment(), **kwargs)
    assert episode.exclusion == exclusion and error in episode.error and episode.reward is None
    assert "Traceback" in caplog.text and "episode e is excluded" in caplog.text


def test_a_reward_that_fails_excludes_the_episode():
    episode = play(environment(reward=RewardSpec(kind="json:loads")))
    assert episode.exclusion == "error:RewardError" and "json:loads raised TypeError" in episode.error


@pytest.mark.parametrize(
    "error",
    [
        EngineDownError("x"),
        EngineMismatchError("x"),
        RunInterrupted("x", 143),
        RecipeError("x"),
        ModelError("x"),
        KeyboardInterrupt(),
        SystemExit(1),
        asyncio.CancelledError(),
    ],
)
@pytest.mark.parametrize("who", ["tutor", "student"])
def test_what_concerns_the_whole_run_propagates(error, who):
    kwargs = {"tutor": FakeTutor([error])} if who == "tutor" else {"student": FakeStudent(replies=[error])}
    with pytest.raises(type(error)):
        play(environment(), **kwargs)


def test_cancelling_an_episode_cancels_it():
    class Stuck(FakeTutor):
        async def reply(self, dialogue, *, seed):
            await asyncio.Event().wait()

    async def scenario():
        task = asyncio.create_task(
            environment().play(
                Stuck(), FakeStudent(), FakeJudge(), FakeGrader(), pair(), seed=1, id="e", group_id="g"
            )
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario())


def test_a_missing_solve_rate_stops_before_the_first_turn():
    tutor = FakeTutor()
    bare = ProblemPair(id="p", source=Problem(text="s", answer="1"))
    with pytest.raises(SolveRateError, match=r"maieutic data measure"):
        play(environment(), tutor, the_pair=bare)
    other = FakeStudent(key=KEY.model_copy(update={"temperature": 1.0}))
    with pytest.raises(SolveRateError, match=r"T=1\|"):
        play(environment(), tutor, other)
    assert tutor.seeds == []


# ---- drawing the student ------------------------------------------------------------------------------------------------


def test_students_are_drawn_by_weight_and_by_seed():
    drawn = Counter(draw_student(["a", "b", "c"], [1.0, 2.0, 1.0], seed) for seed in range(4000))
    assert drawn["b"] == pytest.approx(2000, abs=120) and drawn["a"] == pytest.approx(1000, abs=120)
    assert draw_student(["a", "b"], [1, 1], 5) == draw_student(["a", "b"], [1, 1], 5)
    assert draw_student(["only"], [0.1], 9) == "only"


@pytest.mark.parametrize(("students", "weights"), [([], []), (["a"], [1, 1]), (["a", "b"], [1, 0])])
def test_impossible_draws(students, weights):
    with pytest.raises(ValueError, match="one positive weight each"):
        draw_student(students, weights, 0)

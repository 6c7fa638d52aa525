"""TutorRL's reward by hand, its openings and personas, and its recipes."""

import math

import pytest

from env_fakes import KEY, FakeChat, FakeJudge, FakeStudent, FakeTutor, pair, play, run
from maieutic.check import resolve
from maieutic.config import EnvSpec, RewardSpec, StudentSpec
from maieutic.dialogue import Message
from maieutic.env import tutorrl
from maieutic.env.base import StudentFailed
from maieutic.env.build import make_environment
from maieutic.env.prompts import load_env
from maieutic.env.student import ModelStudent
from maieutic.errors import RecipeError
from maieutic.problems.schema import Problem
from maieutic.recipe import load_recipe

KIND = "maieutic.env.tutorrl:SameProblem"
TEMPLATES = load_env("same_problem")


def spec(**options) -> RewardSpec:
    return RewardSpec(kind=tutorrl.REWARD, options=options)


def same_problem(reward=None, gates="soft", **options):
    options = {"openings": {"stated": 1}, "personas": False, **options}
    env = EnvSpec(name="same_problem", kind=KIND, options=options, post_test_samples=4, gates=gates)
    return make_environment(env, reward or spec(**{"lambda": 0.75}))


# --- reward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.5, 0.75, 1.0, 1.25, 1.5])
@pytest.mark.parametrize(
    "rejects, answers, r_sol",
    [
        ([], ["7", "7", "7", "8"], 0.75),
        (["leakage"], ["7"] * 4, 1.0),
        (["leakage", "correctness"], ["8"] * 4, 0.0),
    ],
)
def test_reward_is_r_sol_minus_lambda_once_for_any_rejection(weight, rejects, answers, r_sol):
    episode = play(
        same_problem(spec(**{"lambda": weight})),
        judge=FakeJudge({g: "reject" for g in rejects}),
        student=FakeStudent(answers=answers),
    )
    r_ped = 0.0 if rejects else 1.0
    assert episode.reward.reward == pytest.approx(r_sol + (r_ped - 1) * weight)
    assert episode.reward.extra == {"r_sol": r_sol, "r_ped": r_ped} and not episode.reward.gated
    # The gain that arms are compared by: pre is the source's cold rate, 0.5.
    assert episode.reward.gain == pytest.approx((r_sol - 0.5) / 0.5 if r_sol > 0.5 else r_sol - 0.5)


@pytest.mark.parametrize("phase, tests", [("train", 0), ("eval", 1)])
def test_hard_variant_costs_lambda_and_is_tested_in_evaluation_only(phase, tests):
    student = FakeStudent(answers="7")
    env = same_problem(spec(**{"lambda": 0.75, "hard": True}), gates="hard")
    episode = play(env, judge=FakeJudge({"correctness": "reject"}), student=student, phase=phase)
    assert (episode.reward.reward, episode.reward.gated) == (-0.75, True)
    assert len(student.asked) == tests
    assert play(env, student=FakeStudent(answers="7")).reward.reward == 1.0


def test_an_unknown_verdict_is_neither_accepted_nor_rejected():
    episode = play(same_problem(), judge=FakeJudge({"leakage": "unknown"}))
    assert episode.exclusion == "unknown:leakage" and episode.reward is None


def test_what_is_tested_and_what_the_student_sees():
    student = FakeStudent(answers="7")
    episode = play(same_problem(), student=student)
    ((problem, k, _, hidden, dialogue),) = student.asked
    assert (problem, k, hidden) == ("source", 4, False) and dialogue is episode.dialogue
    assert (episode.post_test.problem, episode.pre) == ("source", 0.5)
    assert len(episode.dialogue.turns) == 16 and episode.dialogue.end == "max_turns"


@pytest.mark.parametrize(
    "options, gates, said",
    [
        ({}, "soft", "lambda is None"),
        ({"lambda": -1}, "soft", "at least 0"),
        ({"lambda": 1, "hrad": True}, "soft", "hrad"),
        ({"lambda": 1, "hard": "yes"}, "soft", "true or false"),
        ({"lambda": 1}, "hard", "set env.gates: soft"),
    ],
)
def test_options_that_do_not_fit_are_errors_before_anything_is_played(options, gates, said):
    with pytest.raises(RecipeError, match=said):
        same_problem(spec(**options), gates=gates)


def test_openings_are_named_and_weighted():
    with pytest.raises(RecipeError, match="stated, guided, attempted"):
        same_problem(openings={"guidde": 1})
    with pytest.raises(RecipeError, match="positive weight"):
        same_problem(openings={"guided": 0})


# --- openings and personas --------------------------------------------------------------------------------------------


def model_student(*replies):
    chat = FakeChat(list(replies))
    return ModelStudent(chat, StudentSpec(model="m"), TEMPLATES, EnvSpec(post_test_max_tokens=4)), chat


def rated(student):
    rates = {str(student.key): pair().source.rates[str(KEY)]}
    return pair().model_copy(update={"source": Problem(text="source", answer="7", rates=rates)})


def test_guided_opens_with_a_greeting_and_the_tutor_knows_the_problem():
    episode = play(same_problem(openings={"guided": 1}, personas=True), student=_Persona())
    opening = episode.dialogue.turns[0]
    assert opening.scripted and "source" not in opening.visible
    assert "\nsource\n" in TEMPLATES.tutor_system(EnvSpec(), "source")


def test_attempted_opens_with_the_students_own_attempt_under_its_persona():
    student, chat = model_student("I think 3 + 4 = 8", *["Hm."] * 7, "7")
    env = same_problem(openings={"attempted": 1}, personas=True)
    episode = play(env, FakeTutor(), student, the_pair=rated(student), seed=5)
    name, persona = env.persona(5)
    opening = episode.dialogue.turns[0]
    assert not opening.scripted and opening.visible_tokens == len("I think 3 + 4 = 8")
    assert name in opening.visible and opening.visible.endswith("I think 3 + 4 = 8")
    asked = chat.requests[0][0]
    assert asked[0].content.endswith(f"Your name is {name}. {persona}") and asked[0].role == "system"
    assert asked[1].role == "user" and asked[1].content.endswith("source") and len(asked) == 2
    # In the post-test: the same system prompt, the whole conversation in view, the question last.
    tested = chat.requests[-1][0]
    assert tested[0] == asked[0] and tested[1] == Message("assistant", opening.visible)
    assert tested[2] == Message("user", "Go on.") and len(tested) == 1 + 16 + 1
    assert episode.counted, episode.error


def test_a_failed_attempt_excludes_the_episode_as_lost():
    student = FakeStudent(replies=[StudentFailed("gone")])
    episode = play(same_problem(openings={"attempted": 1}), student=student)
    assert (episode.exclusion, episode.dialogue.end) == ("student_failed", "student_failed")
    assert "opening attempt: gone" in episode.error


class _Persona(FakeStudent):
    def __init__(self, **fields):
        super().__init__(**fields)
        self.told = []

    def with_persona(self, text):
        self.told.append(text)
        return self


def test_opening_and_persona_follow_from_the_seed_alone_and_cover_all():
    env = same_problem(openings={"guided": 1, "attempted": 3}, personas=True)
    drawn = [env.opening(s) for s in range(400)]
    assert drawn == [env.opening(s) for s in range(400)]
    assert 0.68 < drawn.count("attempted") / 400 < 0.82
    assert {env.persona(s) for s in range(400)} == set(env.personas) and len(env.personas) == 10
    one, two = _Persona(), _Persona()
    play(env, student=one, seed=3), play(env, student=two, seed=3, phase="eval", id="other")
    assert one.told == two.told and len(one.told) == 1


def test_a_student_without_personas_is_named():
    with pytest.raises(RecipeError, match=r"fake-student.*personas: false"):
        play(same_problem(personas=True))


def test_a_persona_keeps_the_key_and_braces_are_text():
    student, chat = model_student("a")
    other = student.with_persona("Says {problem} and {x}.")
    assert other.key == student.key
    run(other.attempt(Problem(text="P", answer="1"), k=1, seed=0))
    assert chat.requests[0][0][0].content.endswith("Says {problem} and {x}.")


def test_solve_rates_of_near_transfer_count_here():
    assert TEMPLATES.cold_hash == load_env("near_transfer").cold_hash


# --- recipes ------------------------------------------------------------------------------------------------------------


def test_the_published_numbers():
    r = resolve(load_recipe("tutorrl/7b"))
    t, a = r.training, r.algorithm
    assert r.tutor.model == "Qwen/Qwen2.5-7B-Instruct" and r.arm == "tutorrl"
    assert (t.problems_per_step, t.group_size, t.epochs_per_step, t.optimizer.lr) == (16, 8, 2, 5e-7)
    assert (a.loss, a.kl_beta, r.reward.options, r.env.max_turns) == ("grpo", 0.001, {"lambda": 0.75}, 16)
    assert (r.env.transfer, r.env.hide_tutor, r.env.gates, r.env.tutor_sees_solution) == (
        False,
        False,
        "soft",
        False,
    )


@pytest.mark.parametrize("name, hard", [("7b", False), ("7b-hard", True), ("cpu", False)])
def test_recipes_make_their_environment(name, hard):
    r = resolve(load_recipe(f"tutorrl/{name}"))
    env = make_environment(r.env, r.reward)
    assert type(env) is tutorrl.SameProblem and set(env.openings) == {"guided", "attempted"}
    assert (env.env.gates == "hard") == hard == r.reward.options.get("hard", False)
    assert math.isclose(r.reward.options["lambda"], 0.75)

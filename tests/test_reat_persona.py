"""The persona environment: who is met, how a dialogue opens and ends, what student and tutor are shown."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import pytest

from env_fakes import FakeChat, FakeGrader, FakeJudge, FakeTutor
from maieutic.config import EngineSpec, EnvSpec, RewardSpec, StudentSpec
from maieutic.dialogue import BLANK
from maieutic.env.build import make_environment
from maieutic.env.prompts import load_env
from maieutic.env.student import ModelStudent
from maieutic.errors import EngineError, RecipeError
from maieutic.problems.schema import Problem, ProblemPair, SolveRate
from maieutic.reat.persona import PersonaEnvironment, assign, load_personas, order_of, problem_id

NINE = [
    "passive_dependent", "stubborn_impatient", "careless_reader", "blind_guesser", "rote_memorizer",
    "defeatist_anxious", "over_thinker", "slow_but_earnest", "normal_earnest",
]  # fmt: skip
PAIR = ProblemPair(
    id="p1", source=Problem(text="Ann has 3 pens and buys 4.", answer="7", solution="3 + 4 = 7")
)


def environment(**options: object) -> PersonaEnvironment:
    env = EnvSpec(name="persona", kind="maieutic.reat.persona:PersonaEnvironment", options=options)
    made = make_environment(env, RewardSpec())
    assert isinstance(made, PersonaEnvironment)
    return made


def student(chat: FakeChat, env: PersonaEnvironment) -> ModelStudent:
    spec = StudentSpec(model="fake-model", engine=EngineSpec(kind="chat", urls=["http://x"]))
    return ModelStudent(chat, spec, env.templates, env.env)


def play(env: PersonaEnvironment, replies: list, pair: ProblemPair = PAIR, lines: list | None = None, **more):
    chat = FakeChat(list(replies))
    tutor = FakeTutor(lines or [])
    where = {"seed": 5, "id": "e", "group_id": "p1", **more}
    episode = asyncio.run(env.play(tutor, student(chat, env), None, None, pair, **where))
    return episode, chat


def test_nine_personas_of_which_the_cooperative_are_drawn_less() -> None:
    personas = load_personas("persona")
    assert [p.name for p in personas] == NINE
    first = Counter(order_of(personas, f"problem-{i}", 0)[0].name for i in range(4_000))
    total = sum(p.weight for p in personas)
    for p in personas:
        assert first[p.name] / 4_000 == pytest.approx(p.weight / total, abs=0.025)
    assert max(first[n] for n in NINE[7:]) < min(first[n] for n in NINE[:7])


def test_a_problem_meets_the_same_persona_whatever_else_is_drawn() -> None:
    env, personas = environment(), load_personas("persona")
    drawn = {f"q{i}": env.persona_of(PAIR.model_copy(update={"id": f"q{i}"})).name for i in range(40)}
    again = environment()
    assert drawn == {
        q: again.persona_of(PAIR.model_copy(update={"id": q}), index=7).name for q in reversed(drawn)
    }
    other = environment(persona_seed=1)
    assert drawn != {q: other.persona_of(PAIR.model_copy(update={"id": q})).name for q in drawn}
    # Dropping a persona that was not first leaves the first one as it is.
    order = order_of(personas, "q0", 0)
    assert order_of([p for p in personas if p != order[3]], "q0", 0)[0] == order[0]
    # By sample: the first nine episodes of a problem meet all nine.
    by_sample = environment(by="sample")
    assert sorted(by_sample.persona_of(PAIR, i).name for i in range(9)) == sorted(NINE)


def test_assignment_travels_with_the_pair_and_wins_over_the_draw() -> None:
    pairs = assign([PAIR], load_personas("persona"), per_problem=3, seed=4)
    assert [p.id for p in pairs] == [f"p1~{p.provenance['persona']}" for p in pairs]
    assert {problem_id(p) for p in pairs} == {"p1"}
    env = environment(persona_seed=99)
    assert [env.persona_of(p).name for p in pairs] == [p.provenance["persona"] for p in pairs]
    (one,) = assign([PAIR], load_personas("persona"))
    assert one.id == "p1" and one.provenance["persona"] == order_of(load_personas("persona"), "p1", 0)[0].name
    with pytest.raises(RecipeError, match="there are 9 personas"):
        assign([PAIR], load_personas("persona"), per_problem=10)
    with pytest.raises(RecipeError, match="names persona 'nobody'"):
        env.persona_of(PAIR.model_copy(update={"provenance": {"persona": "nobody"}}))


def test_the_student_opens_with_its_trigger_and_ends_with_the_signal() -> None:
    env = environment(personas=["blind_guesser"])
    episode, chat = play(
        env, ["Is it 12?", "So I add them?", "It is 7 because four came on top. [UNDERSTOOD]"]
    )
    said = [(t.speaker, t.visible) for t in episode.dialogue.turns]
    assert said == [
        ("student", "Is it 12?"),
        ("tutor", "Go on."),
        ("student", "So I add them?"),
        ("tutor", "Go on."),
        ("student", "It is 7 because four came on top."),
    ]
    assert episode.dialogue.end == "solved" and episode.counted and episode.reward.reward == 1
    assert episode.pair.provenance["persona"] == "blind_guesser"
    assert not any(t.scripted for t in episode.dialogue.turns)
    persona = env.persona_of(PAIR)
    opening, second = chat.requests[0][0], chat.requests[1][0]
    assert persona.trigger in opening[-1].content and persona.tendency in opening[0].content
    assert "[UNDERSTOOD]" in opening[0].content and "3 + 4" not in "".join(m.content for m in opening)
    # The trigger is for the first message alone; the tendency stays.
    assert persona.trigger not in "".join(m.content for m in second)
    assert persona.tendency in second[0].content


def test_the_teacher_sees_the_solution_the_student_never() -> None:
    env = environment()
    dialogue = env.new_dialogue(PAIR, "d")
    assert env.env.tutor_sees_solution and dialogue.solution == "3 + 4 = 7"
    assert "3 + 4 = 7" in env.templates.tutor_system(env.env, dialogue.problem, dialogue.solution)
    hidden = PersonaEnvironment(
        EnvSpec(name="persona", tutor_sees_solution=False), RewardSpec(), load_env("persona")
    )
    assert hidden.new_dialogue(PAIR, "d").solution is None


def test_a_signal_that_comes_too_early_is_dropped_and_an_empty_turn_gets_a_text() -> None:
    env = environment(signal_after=2)
    episode, _ = play(env, ["How? [UNDERSTOOD]", "[UNDERSTOOD]", "Seven. [UNDERSTOOD]"])
    students = [t.visible for t in episode.dialogue.by("student")]
    assert students == ["How?", BLANK, "Seven."] and episode.dialogue.end == "solved"


def test_the_turn_limit_and_failures() -> None:
    env = make_environment(
        EnvSpec(name="persona", kind="maieutic.reat.persona:PersonaEnvironment", max_turns=4), RewardSpec()
    )
    episode, _ = play(env, ["a", "b", "c"])
    assert (len(episode.dialogue.turns), episode.dialogue.end, episode.reward.reward) == (4, "max_turns", 0)
    failed, _ = play(env, [EngineError("down")])
    assert (failed.exclusion, failed.dialogue.end, failed.reward) == (
        "student_failed",
        "student_failed",
        None,
    )
    tutor_failed, _ = play(env, ["a"], lines=[EngineError("down")])
    assert tutor_failed.exclusion == "tutor_failed"
    nothing, _ = play(env, ["a"], lines=[None])
    assert nothing.exclusion == "tutor_failed" or nothing.exclusion == "no_tutor_turn"


def test_with_a_post_test_it_is_an_environment_for_training() -> None:
    env = environment(post_test=True)
    chat = FakeChat(["Hm?", "7! [UNDERSTOOD]", ["7"] * 8])
    who = student(chat, env)
    rate = {str(who.key): SolveRate(rate=0.5, n=8)}
    pair = PAIR.model_copy(update={"source": PAIR.source.model_copy(update={"rates": rate})})
    episode = asyncio.run(
        env.play(FakeTutor(), who, FakeJudge(), FakeGrader(), pair, seed=1, id="e", group_id="g")
    )
    assert episode.exclusion is None, episode.error
    assert episode.post_test.rate == 1 and episode.reward.gain == 1 and episode.dialogue.end == "solved"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"personas": ["nobody"]}, "no persona 'nobody'"),
        ({"personas": []}, "personas is empty"),
        ({"weights": {"blind_guesser": 0}}, "is not a positive number"),
        ({"weights": {"nobody": 1}}, "no persona 'nobody'"),
        ({"by": "day"}, "by is 'day'"),
        ({"signal": " "}, "signal is empty"),
    ],
)
def test_options_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        environment(**options)


def test_files_that_do_not_fit(tmp_path) -> None:
    import shutil

    from maieutic.resources import find_env

    shutil.copytree(find_env("persona"), tmp_path / "mine")
    file = tmp_path / "mine" / "personas.yaml"
    for text, message in [
        ("[]", "a list of personas"),
        ("- {name: a, trigger: b, tendency: c}", r"persona 1 has \['name', 'tendency', 'trigger'\]"),
        ("- {name: a, weight: 0, trigger: b, tendency: c}", "weight 0 is not a positive number"),
        ("- {name: a, weight: 1, trigger: '', tendency: c}", "texts that are not empty"),
        (
            "[{name: a, weight: 1, trigger: b, tendency: c}, {name: a, weight: 1, trigger: b, tendency: c}]",
            "share a name",
        ),
    ]:
        file.write_text(text)
        with pytest.raises(RecipeError, match=message):
            load_personas(str(tmp_path / "mine"))
    file.unlink()
    with pytest.raises(RecipeError, match="missing"):
        load_personas(str(tmp_path / "mine"))


def test_a_student_that_takes_no_persona_is_refused() -> None:
    from env_fakes import FakeStudent

    with pytest.raises(RecipeError, match="takes no persona"):
        asyncio.run(
            environment().play(FakeTutor(), FakeStudent(), None, None, PAIR, seed=1, id="e", group_id="g")
        )


def test_weights_of_a_recipe_replace_those_of_the_file() -> None:
    env = environment(weights={"blind_guesser": 1000.0})
    drawn = Counter(env.persona_of(PAIR.model_copy(update={"id": f"q{i}"})).name for i in range(200))
    assert drawn["blind_guesser"] > 180
    assert dataclasses.asdict(env.persona_of(PAIR))["weight"] in {1.0, 0.7, 1000.0}

"""The worked example of docs/environments.md, run as it stands there, and how own parts can be wrong."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from env_fakes import FakeGrade, run
from maieutic import yaml12
from maieutic.config import EnvSpec, JudgeSpec, Recipe, RewardSpec, StudentSpec
from maieutic.env.build import make_environment, make_judge, make_own_tutor, make_student
from maieutic.env.play import Environment
from maieutic.env.prompts import load_env
from maieutic.env.rule_judge import RuleJudge
from maieutic.env.student import ModelStudent
from maieutic.errors import RecipeError
from maieutic.problems.schema import Problem, ProblemPair, SolveRate

PAGE = (Path(__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")


@pytest.fixture
def own_parts(monkeypatch) -> ModuleType:
    module = ModuleType("own_parts")
    monkeypatch.setitem(sys.modules, "own_parts", module)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/environments.md", "exec"), module.__dict__)
    return module


def recipe() -> Recipe:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    return Recipe.model_validate({"name": "own", **yaml12.load(text, "docs/environments.md")[0]})


class BoxGrader:
    async def grade_many(self, texts, gold):
        return [FakeGrade("right" if rf"\boxed{{{gold}}}" in text else "wrong") for text in texts]


def test_the_example_plays_an_episode(own_parts):
    r = recipe()
    env = make_environment(r.env, r.reward)
    student = make_student(r.students[0], env.templates, env.env)
    rates = {str(student.key): SolveRate(rate=0.0, n=16)}
    pair = ProblemPair(
        id="p",
        source=Problem(text="s", answer="7", rates=rates),
        transfer=Problem(text="v", answer="9", rates=rates),
    )
    episode = run(
        env.play(
            make_own_tutor(r.tutor),
            student,
            make_judge(r.judge),
            BoxGrader(),
            pair,
            seed=1,
            id="e",
            group_id="g",
        )
    )
    assert isinstance(env, own_parts.Reread) and env.reminder == "Read carefully."
    assert episode.dialogue.end == "end_token" and episode.student == "parrot"
    assert [t.visible for t in episode.dialogue.turns[1:]] == ["What do you know?"] * 7
    assert episode.post_test.answers == [r"\boxed{9}"] * 4
    assert episode.reward.reward == pytest.approx(1.0 - 4 * 0.01)
    assert {v.decision for v in episode.verdicts.values()} == {"ok"}


def test_shipped_parts():
    env = make_environment(EnvSpec(max_turns=4), RewardSpec())
    assert type(env) is Environment and env.env.max_turns == 4
    assert isinstance(make_judge(JudgeSpec(options={"skip": ["emojis"]})), RuleJudge)

    class Chat:
        name = "m"

    student = make_student(StudentSpec(model="m"), load_env("near_transfer"), EnvSpec(), Chat())
    assert isinstance(student, ModelStudent)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_judge(JudgeSpec(kind="own_parts:NoShouting")),
            r"judge.kind: own_parts:NoShouting cannot be made",
        ),
        (
            lambda: make_judge(JudgeSpec(kind="own_parts:AskOnly", options={"question": "?", "turns": 1})),
            r"no Judge",
        ),
        (lambda: make_judge(JudgeSpec(kind="own_parts:Nothing")), r"module 'own_parts' has no 'Nothing'"),
        (
            lambda: make_judge(JudgeSpec(options={"skip": ["emoji"]})),
            r"judge.options: .*did you mean 'emojis'",
        ),
        (lambda: make_judge(JudgeSpec(options={"strict": True})), r"judge.options: .*strict"),
        (
            lambda: make_environment(EnvSpec(kind="own_parts:Parrot"), RewardSpec()),
            r"env.kind: own_parts:Parrot cannot be made",
        ),
        (
            lambda: make_environment(EnvSpec(name="near_transfr"), RewardSpec()),
            r"did you mean 'near_transfer'",
        ),
    ],
)
def test_own_parts_that_do_not_fit(own_parts, make, message):
    with pytest.raises(RecipeError, match=message):
        make()

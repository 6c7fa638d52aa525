"""The reward: tables worked out by hand from the formula, and its properties."""

import math
import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maieutic.config import EnvSpec, RewardSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, PostTest, RewardBreakdown, Verdict
from maieutic.env.reward import compute_reward, decay, learning_gain, normalised_gain
from maieutic.errors import RecipeError, RewardError
from maieutic.problems.schema import Problem, ProblemPair

rates = st.floats(0, 1)
budgets = st.integers(1, 1000)
token_lists = st.lists(st.integers(0, 5000), max_size=12)


def turns(visible=(100,), thinking=(0,), well_formed=(True,)):
    return [
        Turn("tutor", "x", visible_tokens=v, thinking_tokens=t, well_formed=w)
        for v, t, w in zip(visible, thinking, well_formed, strict=True)
    ]


def gain(spec=None, *, gates="hard", rejected=False, pre=0.25, post=0.625, by_token=False, tutor=None):
    return learning_gain(
        spec or RewardSpec(),
        gates=gates,
        rejected=rejected,
        pre=pre,
        post=post,
        tutor_turns=turns() if tutor is None else tutor,
        visible_budget=150,
        thinking_budget=512,
        ended_by_token=by_token,
    )


@pytest.mark.parametrize(
    ("pre", "post", "delta"),
    [
        (0.0, 0.0, 0.0),
        (0.0, 1.0, 1.0),
        (0.25, 0.625, 0.5),  # 0.375 of 0.75
        (0.5, 0.25, -0.25),  # a loss is not normalised
        (0.75, 0.0, -0.75),
        (0.5, 0.5, 0.0),
        (1.0, 1.0, 0.0),  # no headroom
        (1.0, 0.25, -0.75),
    ],
)
def test_normalised_gain(pre, post, delta):
    assert normalised_gain(pre, post) == pytest.approx(delta, abs=1e-15)


@pytest.mark.parametrize(("pre", "post"), [(-0.1, 0.5), (0.5, 1.1), (math.nan, 0.5), (0.5, math.nan)])
def test_rates_outside_the_unit_interval(pre, post):
    with pytest.raises(RewardError, match=r"a solve rate lies in \[0, 1\]"):
        normalised_gain(pre, post)


@pytest.mark.parametrize(
    ("tokens", "budget", "d"),
    [
        ([], 150, 1.0),
        ([0, 0], 150, 1.0),
        ([150, 1], 150, 1.0),  # at the budget is not over it
        ([300], 150, 0.5),  # 1 / (1 + 1²)
        ([450], 150, 0.2),  # 1 / (1 + 2²)
        ([300, 100], 150, (300 * 0.5 + 100) / 400),  # token-weighted: 0.625
        ([225], 150, 0.8),  # 1 / (1 + 0.5²)
        ([1024, 512], 512, (1024 * 0.5 + 512) / 1536),
        ([10, 999], 0, 1.0),  # a budget of 0 rations nothing
    ],
)
def test_decay(tokens, budget, d):
    assert decay(tokens, budget) == pytest.approx(d, rel=1e-12)


def test_published_reward_by_hand():
    # Δ = 0.5; visible turns 300 and 100 → 0.625; thinking 1024 and 0 → 0.5; no bonuses.
    result = gain(tutor=turns((300, 100), (1024, 0), (True, False)), by_token=True)
    assert result.reward == pytest.approx(0.5 * 0.625 * 0.5)
    assert (result.gain, result.decay_visible, result.decay_thinking) == pytest.approx((0.5, 0.625, 0.5))
    assert (result.eoc_bonus, result.think_reward, result.penalty, result.gated) == (0, 0, 0, False)
    assert result.extra == {"well_formed_share": 0.5}


BONUS = RewardSpec(eoc_bonus=0.1, think_reward=0.04)
HALF = turns((100, 100), (0, 0), (True, False))


@pytest.mark.parametrize(
    ("kwargs", "reward"),
    [
        (dict(by_token=True), 0.5 + 0.1 + 0.02),
        (dict(by_token=False), 0.5 + 0.02),
        (dict(by_token=True, post=0.25), 0.02),  # Δ = 0: no bonus for the end token
        (dict(by_token=True, post=0.0), -0.25 + 0.02),
        (dict(rejected=True, by_token=True), -0.2),  # hard: nothing else counts
        (dict(rejected=True, post=None), -0.2),  # hard: the post-test may have been skipped
        (dict(rejected=True, gates="soft", by_token=True), 0.5 + 0.1 + 0.02 - 0.75),
        (dict(rejected=True, gates="soft", post=0.0), -0.25 + 0.02 - 0.75),
        (dict(rejected=True, gates="off"), 0.5 + 0.02),
        (dict(pre=1.0, post=1.0), 0.02),
        (dict(tutor=[]), 0.5),  # no tutor turns: no well-formed share
    ],
)
def test_terms(kwargs, reward):
    assert gain(BONUS, **{"tutor": HALF, **kwargs}).reward == pytest.approx(reward)


def test_decay_spares_losses():
    long = turns((450,), (0,), (True,))
    assert gain(post=0.0, tutor=long).reward == pytest.approx(-0.25)
    assert gain(tutor=long).reward == pytest.approx(0.5 * 0.2)


def test_a_gated_episode_still_reports_its_gain():
    result = gain(rejected=True)
    assert (result.gated, result.gain, result.post, result.penalty) == (True, 0.5, 0.625, 0.2)


def test_no_post_test_without_a_gate_is_an_error():
    with pytest.raises(RewardError, match="no post-test rate"):
        gain(post=None)
    with pytest.raises(RewardError, match="no post-test rate"):
        gain(post=None, rejected=True, gates="soft")


@given(rates, rates)
def test_gain_bounds(pre, post):
    assert -pre <= normalised_gain(pre, post) <= 1


@given(rates, rates, rates)
def test_gain_is_monotone_in_post(pre, a, b):
    low, high = sorted((a, b))
    assert normalised_gain(pre, low) <= normalised_gain(pre, high)


@given(token_lists, budgets)
def test_decay_bounds(tokens, budget):
    assert 0 < decay(tokens, budget) <= 1 + 1e-12


@given(rates, rates, rates, token_lists, token_lists)
def test_reward_is_monotone_in_post(pre, a, b, visible, thinking):
    tutor = turns(visible, (thinking + [0] * len(visible))[: len(visible)], [True] * len(visible))
    low, high = sorted((a, b))
    assert gain(pre=pre, post=low, tutor=tutor).reward <= gain(pre=pre, post=high, tutor=tutor).reward


# ---- compute_reward -------------------------------------------------------------------------------------------------


def episode(grades=("right", "wrong", "error", "no_answer"), decision="ok", pre=0.0):
    dialogue = Dialogue("e", "p", turns=[Turn("student", "hi", scripted=True), *turns()], end="end_token")
    return Episode(
        id="e",
        group_id="g",
        pair=ProblemPair(id="p", source=Problem(text="p", answer="1")),
        phase="train",
        step=0,
        index=0,
        seed=0,
        student="s",
        dialogue=dialogue,
        pre=pre,
        verdicts={"leakage": Verdict("leakage", decision)},
        post_test=PostTest("source", True, ["a"] * len(grades), list(grades)),
    )


def test_grading_errors_are_not_graded():
    assert compute_reward(episode(), EnvSpec(), RewardSpec()).reward == pytest.approx(1 / 3)


def test_verdicts_and_end_reach_the_formula():
    spec = RewardSpec(gate_penalty=0.3, eoc_bonus=0.5)
    assert compute_reward(episode(decision="reject"), EnvSpec(), spec).reward == -0.3
    assert compute_reward(episode(), EnvSpec(), spec).reward == pytest.approx(1 / 3 + 0.5)


def test_all_answers_ungraded_or_no_pre_is_an_error():
    with pytest.raises(RewardError, match="post is nan"):
        compute_reward(episode(grades=("error",)), EnvSpec(), RewardSpec())
    with pytest.raises(RewardError, match="no solve rate"):
        compute_reward(episode(pre=None), EnvSpec(), RewardSpec())


@pytest.fixture
def own(monkeypatch):
    module = ModuleType("own_reward_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def use(function):
        module.reward = function
        return compute_reward(
            episode(), EnvSpec(), RewardSpec(kind="own_reward_module:reward", options={"x": 2})
        )

    return use


def breakdown(reward):
    return RewardBreakdown(reward=reward, gated=False, pre=0, post=None, gain=None)


def test_own_reward_gets_the_episode_and_its_options(own):
    assert own(lambda e, spec: breakdown(e.pre + spec.options["x"])).reward == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", True])
def test_own_reward_that_is_not_a_finite_number(own, value):
    with pytest.raises(RewardError, match=r"own_reward_module:reward of episode e is .*finite number"):
        own(lambda e, spec: breakdown(value))


def test_own_reward_of_another_type_or_that_raises(own):
    with pytest.raises(RewardError, match="returned float on episode e"):
        own(lambda e, spec: 0.5)
    with pytest.raises(RewardError, match="raised ZeroDivisionError on episode e"):
        own(lambda e, spec: 1 / 0)


@pytest.mark.parametrize(
    ("path", "message"),
    [("no_such_module_x:f", "cannot import module 'no_such_module_x'"), ("math:no_such", "has no 'no_such'")],
)
def test_own_reward_that_cannot_be_imported(path, message):
    with pytest.raises(RecipeError, match=f"reward.kind: .*{message}"):
        compute_reward(episode(), EnvSpec(), RewardSpec(kind=path))

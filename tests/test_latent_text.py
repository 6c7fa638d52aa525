"""From words to states and moves: features, readers, scorers, labellers, the success environment, the tutor, the label study."""

from __future__ import annotations

import asyncio
import csv
import json
import math

import numpy as np
import pytest

from env_fakes import FakeChat, FakeGrader, FakeStudent, FakeTutor, pair
from maieutic.config import EnvSpec, RewardSpec, StudentSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.engines.base import Completion, Sampling
from maieutic.env.prompts import load_env
from maieutic.errors import EngineError, MaieuticError, RecipeError
from maieutic.latent.agreement import agreement, export_sample, machine_path
from maieutic.latent.data import coverage, read_parquet, transitions_of, write_parquet
from maieutic.latent.errors import LabelError, LatentDataError
from maieutic.latent.features import EXTENDED, PAPER_25, feature_set
from maieutic.latent.json_reply import find_object
from maieutic.latent.moves import MOMENTS_13, PAPER_4, LlmLabeller, RuleLabeller, chosen_move, taxonomy
from maieutic.latent.policy import FixedPolicy
from maieutic.latent.reading import LlmReader, RuleReader, StateReader, wrong_calculation
from maieutic.latent.scorers import math_density, student_reasoning
from maieutic.latent.statistics import cohen_kappa, paired, wilson
from maieutic.latent.success import (
    LlmSuccess,
    RuleSuccess,
    SixthGrader,
    SuccessEnvironment,
    env_text,
    with_drawn_mistake,
)
from maieutic.latent.told import told_before
from maieutic.latent.tutor import BranchTutor, LatentTutor, MoveWriter


class Chat(FakeChat):
    """A FakeChat that takes a schema."""

    async def complete(self, messages, sampling, *, seed, n=1, session=None, schema=None):
        self.schema = schema
        return await super().complete(messages, sampling, seed=seed, n=n, session=session)


def run(coroutine):
    return asyncio.run(coroutine)


def talk(*texts: str) -> list[Turn]:
    """Student, tutor, student, …"""
    return [Turn("tutor" if n % 2 else "student", t) for n, t in enumerate(texts)]


# ------------------------------------------------------------------------------------------------------- features


def test_the_list_is_the_papers() -> None:
    assert [f.item for f in PAPER_25.features] == [1, 2, *range(4, 26), 27]
    assert len(set(PAPER_25.names)) == 25
    assert {f.kind for f in PAPER_25.features} == {"binary", "count", "score"}
    assert all(f.definition and f.rule for f in PAPER_25.features)
    assert EXTENDED.names[:25] == PAPER_25.names and len(EXTENDED.names) == 31
    with pytest.raises(RecipeError, match="no feature set 'paper': there are paper-25, extended"):
        feature_set("paper")


def test_counts_and_histories_follow_from_the_answers() -> None:
    base = {q.key: False for q in EXTENDED.questions}
    first = base | {
        "asks_question": True,
        "frustrated": True,
        "mistake_calculation": True,
        "mistake_solving": True,
    }
    second = base | {
        "asks_question": True,
        "tutor_asks": True,
        "tutor_refocuses_now": True,
        "frustrated": True,
    }
    third = base | {"tutor_diagnoses_now": True, "mistake_listed": True, "frustrated": True}
    turns = talk("help?", "Back to it.", "3 + 4 = 7", "So?", "because 2 + 2 = 4 I see")
    v = dict(zip(EXTENDED.names, EXTENDED.vector([first, second, third], turns).tolist(), strict=True))
    assert (v["student_questions"], v["tutor_questions"], v["turn"]) == (2, 1, 3)
    assert (v["tutor_refocused"], v["tutor_diagnosed"], v["tutor_asks"], v["made_mistake"]) == (1, 1, 0, 0)
    assert (v["frustrated_run"], v["mistakes"], v["words"]) == (3, 1, 8)
    assert v["student_reasoning"] == pytest.approx(1 - math.exp(-1))
    with pytest.raises(ValueError, match=r"reading 0 has no answer to \['asks_question'"):
        PAPER_25.vector([{}], turns[:1])


@pytest.mark.parametrize(("votes", "value"), [((1, 1, 0), 1), ((0, 1, 1), 1), ((1, 0, 0), 0), ((0, 0, 0), 0)])
def test_a_mistake_is_a_majority_of_three(votes, value) -> None:
    answers = {q.key: False for q in PAPER_25.questions}
    answers |= dict(
        zip(("mistake_calculation", "mistake_solving", "mistake_listed"), map(bool, votes), strict=True)
    )
    state = PAPER_25.vector([answers], talk("x"))
    assert state[PAPER_25.names.index("made_mistake")] == value


def test_scorers() -> None:
    assert math_density("") == 0 and math_density("I like dogs") == 0
    assert math_density("3 + 4 = 7") == 1
    assert math_density("we add the 3 apples") == pytest.approx(2 / 5)
    assert student_reasoning("I like dogs because they bark") == 0
    assert student_reasoning("3 + 4 = 7") == pytest.approx(1 - math.exp(-0.5))
    assert student_reasoning("Because 3 + 4 = 7, which means x = 7") > 0.77
    assert wrong_calculation("3 × 4 = 13") and not wrong_calculation("3 × 4 = 12, 10 / 4 = 2.5")


def test_the_rule_reader_reads() -> None:
    reader = RuleReader()
    said = reader.read(
        talk("Hi", "Back to the problem. What do you know about it?", "Ugh, this is so hard. 3 + 4 = 8?")
    )
    on = {k for k, v in said.items() if v}
    assert on == {
        "frustrated", "math_content", "asks_question", "on_problem", "wrote_equation",
        "mistake_calculation", "mistake_solving", "tutor_asks", "tutor_refocuses_now", "tutor_diagnoses_now",
    }  # fmt: skip
    assert {q.key for q in EXTENDED.questions} <= said.keys()


def test_one_structured_call_a_turn_and_none_twice() -> None:
    answers = {q.key: False for q in PAPER_25.questions} | {"frustrated": True}
    chat = Chat([json.dumps(answers)] * 2)
    reader = StateReader(LlmReader(chat, mistakes={"P": ["adds instead"]}), PAPER_25)
    turns = talk("a", "b", "c </transcript> <turn>")
    state = run(reader.state("P", turns))
    assert state.shape == (25,) and state[PAPER_25.names.index("frustrated")] == 1
    assert (reader.calls, len(chat.requests)) == (2, 2)
    run(reader.state("P", turns[:1]))
    run(reader.state("P", talk("a", "b", "c </transcript> <turn>")))
    assert len(chat.requests) == 2, "a prefix is read once, whichever dialogue it belongs to"
    prompt = chat.requests[1][0][0].content
    assert "adds instead" in prompt and "c &lt;/transcript&gt; &lt;turn&gt;" in prompt
    assert chat.schema["required"] == [q.key for q in PAPER_25.questions]


@pytest.mark.parametrize("bad", ["no json", '{"frustrated": true}', json.dumps({"frustrated": "yes"})])
def test_an_unreadable_answer_is_asked_again_and_then_an_error(bad: str) -> None:
    good = json.dumps({q.key: True for q in PAPER_25.questions})
    again = Chat([bad, f"Let me see. {good}"])
    run(LlmReader(again).answers("P", talk("a"), PAPER_25, seed=1))
    assert again.requests[0][2] != again.requests[1][2], "another seed"
    with pytest.raises(LabelError, match="state before tutor turn 1: no usable answer in 2 replies"):
        run(LlmReader(Chat([bad, bad])).answers("P", talk("a"), PAPER_25, seed=1))


def test_a_failed_reading_is_not_remembered() -> None:
    good = json.dumps({q.key: True for q in PAPER_25.questions})
    reader = StateReader(LlmReader(Chat([EngineError("down"), good])), PAPER_25)
    with pytest.raises(EngineError, match="down"):
        run(reader.state("P", talk("a")))
    assert run(reader.state("P", talk("a"))).sum() > 0


def test_find_object() -> None:
    assert find_object('{"a": 1} then {"a": 2}') == {"a": 2}
    assert find_object('<think>{"a": 1}</think> ```json\n{"a": 3}\n```') == {"a": 3}
    assert find_object("{broken") is None and find_object("[1, 2]") is None


# ------------------------------------------------------------------------------------------------------- moves


def test_every_example_of_a_move_is_labelled_as_that_move() -> None:
    rule = RuleLabeller(PAPER_4)
    for move in PAPER_4.moves:
        assert [rule.of_text(e) for e in move.examples] == [move.name] * len(move.examples)
    assert rule.of_text("Twelve.") == "instruct"
    assert len(MOMENTS_13.names) == 13 and RuleLabeller(MOMENTS_13).of_text("Why is that?") == "justify"
    with pytest.raises(RecipeError, match="no move taxonomy"):
        taxonomy("paper-5")


def test_llm_labels_are_moves_or_errors() -> None:
    turns = talk("a", "What now?")
    assert run(LlmLabeller(Chat(['{"move": "ask"}']), PAPER_4).label(turns, 1, seed=0)) == "ask"
    with pytest.raises(LabelError, match="move of turn 1"):
        run(LlmLabeller(Chat(['{"move": "teach"}'] * 2), PAPER_4).label(turns, 1, seed=0))
    with pytest.raises(LabelError, match="blank"):
        run(RuleLabeller(PAPER_4).label(talk("a", " "), 1, seed=0))


# ------------------------------------------------------------------------------------------------------- environment


def success(**options) -> SuccessEnvironment:
    return SuccessEnvironment(
        EnvSpec(name="success", max_turns=8), RewardSpec(), load_env("success"), **options
    )


def play(env, tutor, student, the_pair=None, **more):
    more = {"seed": 1, "id": "e", "group_id": "g"} | more
    return run(env.play(tutor, student, None, FakeGrader(), the_pair or pair(), **more))


class BoxGrader(FakeGrader):
    async def grade_many(self, texts, gold):
        return await super().grade_many([t.partition("{")[2].partition("}")[0] for t in texts], gold)


def solving(env, tutor, *replies: str, the_pair=None, **more):
    more = {"seed": 1, "id": "e", "group_id": "g"} | more
    return run(env.play(tutor, FakeStudent(list(replies)), None, BoxGrader(), the_pair or pair(), **more))


def test_solved_earns_one_and_ends_the_dialogue() -> None:
    e = solving(success(), FakeTutor(), "I have 7.", "My answer is \\boxed{7}", "more")
    assert (e.dialogue.end, e.reward.reward, e.reward.extra["success_reward"]) == ("solved", 1.0, 1.0)
    assert len(e.dialogue.turns) == 5 and e.counted


def test_the_turn_limit_costs_one() -> None:
    e = solving(success(), FakeTutor(), "\\boxed{8}", "The answer is \\boxed{9}")
    assert (e.dialogue.end, e.reward.reward, len(e.dialogue.turns)) == ("max_turns", -1.0, 8)


def test_a_told_answer_counts_only_where_the_recipe_says_so() -> None:
    lines = ["It is 7, you see.", "Say it."]
    assert solving(success(), FakeTutor(list(lines)), "\\boxed{7}").reward.reward == -1
    assert solving(success(count_told=True), FakeTutor(list(lines)), "\\boxed{7}").reward.reward == 1


def test_told_before_compares_numbers() -> None:
    def d(*texts: str, problem: str = "P") -> Dialogue:
        out = Dialogue("d", problem)
        out.turns = talk(*texts)
        return out

    assert told_before(d("a", "so 1,200 it is", "1200"), "1200.0")
    assert not told_before(d("a", "so 12000", "1200"), "1200")
    assert not told_before(d("I say 5", "5 is right", "5"), "5")
    assert not told_before(d("a", "use the 5", "5", problem="5 apples"), "5")


def test_a_judge_that_cannot_tell_excludes_the_episode() -> None:
    prompt = env_text("success", "judge/success.txt")
    env = success(success=LlmSuccess(Chat(["?"] * 9), prompt, Sampling()))
    e = play(env, FakeTutor(), FakeStudent())
    assert (e.exclusion, e.reward, e.counted) == ("unknown:success", None, False)
    env = success(success=LlmSuccess(Chat(['{"reasoning": "", "solved": true}']), prompt, Sampling()))
    assert play(env, FakeTutor(), FakeStudent()).reward.reward == 1


def test_failures_exclude_and_are_named() -> None:
    assert play(success(), FakeTutor([EngineError("x")]), FakeStudent()).exclusion == "tutor_failed"
    assert play(success(), FakeTutor([None]), FakeStudent()).exclusion == "no_tutor_turn"
    assert (
        play(success(), FakeTutor([ZeroDivisionError("x")]), FakeStudent()).exclusion
        == "error:ZeroDivisionError"
    )


def test_the_alternative_reward_is_the_masked_gain() -> None:
    e = solving(success(post_test=True), FakeTutor())
    assert e.post_test.hide_tutor and e.post_test.problem == "transfer"
    assert e.reward.gain == pytest.approx(-0.25), "nothing boxed in '9': all wrong"


def test_the_drawn_mistake_enters_the_students_prompt_and_stays() -> None:
    armed = pair().model_copy(update={"provenance": {"mistakes": ["adds {both}", "swaps them"]}})
    drawn = {with_drawn_mistake(armed, s).provenance["mistake"] for s in range(20)}
    assert drawn == {"adds {both}", "swaps them"}
    again = with_drawn_mistake(with_drawn_mistake(armed, 1), 2)
    assert again.provenance["mistake"] == with_drawn_mistake(armed, 1).provenance["mistake"]
    templates, env = load_env("success"), success()
    chat = FakeChat(["hm"] * 9)
    spec = StudentSpec(model="m", name="s")
    student = SixthGrader(chat, spec, templates, env.env, env_text("success", "mistake.txt"))
    run(student.with_mistake("adds {both}").reply(Dialogue("d", "P", turns=talk("a", "b")), seed=0))
    system = chat.requests[0][0][0].content
    assert "adds {both}" in system and "sixth-grade" in system and "P" in system


# ------------------------------------------------------------------------------------------------------- the tutor


def writer(chat) -> MoveWriter:
    env = success()
    return MoveWriter(chat, env.templates, env.env, PAPER_4, Sampling(0.6, 1.0, 100))


def test_policy_to_move_to_words() -> None:
    chat = FakeChat(["What do you see?"])
    tutor = LatentTutor(FixedPolicy(3, 4), StateReader(RuleReader(), PAPER_25), writer(chat))
    turn = run(tutor.reply(Dialogue("d", "P", turns=talk("hello")), seed=5))
    assert (turn.visible, chosen_move(turn)) == ("What do you see?", "ask")
    asked = chat.requests[0][0][-1].content
    assert asked.startswith("hello\n\n") and "Your next move: ask." in asked
    assert PAPER_4["ask"].definition in asked and PAPER_4["ask"].examples[0] in asked


def test_an_empty_wording_is_asked_again_once() -> None:
    chat = FakeChat([" ", "<think>hm</think> Go on."])
    assert run(writer(chat).write(Dialogue("d", "P", turns=talk("a")), "ask", seed=0)).visible == "Go on."
    with pytest.raises(EngineError, match="empty reply twice"):
        run(writer(FakeChat(["", ""])).write(Dialogue("d", "P", turns=talk("a")), "ask", seed=0))


def test_a_policy_of_other_features_or_moves_is_refused() -> None:
    reader = StateReader(RuleReader(), PAPER_25)
    with pytest.raises(RecipeError, match="the policy reads features"):
        LatentTutor(FixedPolicy(0, 4, ("x",)), reader, writer(FakeChat([])))


def test_a_branch_forces_its_first_move_and_continues_the_prefix() -> None:
    prefix = talk("a", "b", "c")
    chat = FakeChat([Completion("Back to it.", "stop", 3)] + ["Why?"] * 5)
    words = writer(chat)
    then = LatentTutor(FixedPolicy(3, 4), StateReader(RuleReader(), PAPER_25), words)
    env = success()
    e = solving(env, BranchTutor("refocus", words, then, prefix), "x", start=prefix)
    assert e.dialogue.turns[:3] == prefix
    assert [chosen_move(t) for t in e.dialogue.turns if t.speaker == "tutor"] == [
        None,
        "refocus",
        "ask",
        "ask",
    ]
    with pytest.raises(ValueError, match="continues from a student turn"):
        solving(env, FakeTutor(), start=prefix[:2])


# ------------------------------------------------------------------------------------------------------- data


def labelled(episodes, **more):
    reader = StateReader(RuleReader(), PAPER_25)
    return run(transitions_of(episodes, reader, RuleLabeller(PAPER_4), PAPER_4, **more))


def test_episodes_become_transitions() -> None:
    good = solving(success(), FakeTutor(["What is asked?", "Add them."]), "hm", "\\boxed{7}", id="a")
    lost = solving(success(), FakeTutor(), id="b")
    data, drops = labelled([good, lost])
    data.check(moves=2)
    assert (drops.kept, drops.reasons, len(data)) == (2, {}, 6)
    assert data.rewards.tolist() == [0, 1, 0, 0, 0, -1] and data.done.tolist() == [0, 1, 0, 0, 0, 1]
    assert [PAPER_4.names[m] for m in data.moves[:2]] == ["ask", "instruct"]
    assert np.array_equal(data.next_states[0], data.states[1]) and not data.next_states[1].any()
    assert data.returns().tolist() == pytest.approx([0.9, -(0.9**3)])
    tail, _ = labelled([good], skips={"a": 1})
    assert (len(tail), tail.turns.tolist()) == (1, [1])


def test_bad_episodes_are_dropped_and_counted() -> None:
    good = solving(success(), FakeTutor(), id="good")
    failed = play(success(), FakeTutor([EngineError("x")]), FakeStudent(), id="failed")
    empty = solving(success(), FakeTutor(), id="empty")
    empty.dialogue.turns = empty.dialogue.turns[:1]
    blank = solving(success(), FakeTutor([" "]), id="blank")
    unpaid = solving(success(), FakeTutor(), id="unpaid")
    unpaid.reward = None
    _, drops = labelled([good, failed, empty, blank, unpaid])
    assert drops.reasons == {"excluded": 1, "empty": 1, "unlabelled": 1, "no_reward": 1}
    assert (drops.episodes, drops.kept) == (5, 1) and "blank" in drops.first["unlabelled"]
    with pytest.raises(LatentDataError, match="no episode could be used: 1 dropped as excluded"):
        labelled([failed])
    with pytest.raises(LatentDataError, match="no_reward"):
        labelled([good], reward="transfer_gain")


def test_nan_features_drop_the_episode() -> None:
    class Broken(RuleReader):
        async def answers(self, problem, turns, questions, *, seed):
            return {}

    reader = StateReader(Broken(), PAPER_25)
    with pytest.raises(LatentDataError, match="1 dropped as nan_features"):
        run(transitions_of([solving(success(), FakeTutor())], reader, RuleLabeller(PAPER_4), PAPER_4))


def table():
    episodes = [
        solving(success(), FakeTutor(["What?", "Add them."]), "I hate it", "\\boxed{7}", id=f"e{i}")
        for i in range(3)
    ]
    return episodes, labelled(episodes)[0]


def test_parquet_round_trip_and_refusals(tmp_path) -> None:
    _, data = table()
    write_parquet(data, tmp_path / "d.parquet")
    back = read_parquet(tmp_path / "d.parquet")
    for name in ("states", "moves", "rewards", "next_states", "done", "episodes", "problems", "turns"):
        assert np.array_equal(getattr(back, name), getattr(data, name)), name
    assert (back.feature_names, back.move_names, back.gamma, back.meta) == (
        data.feature_names, data.move_names, 0.9, data.meta,
    )  # fmt: skip
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(LatentDataError, match=r"x\.parquet: cannot be read"):
        read_parquet(tmp_path / "x.parquet")


def test_what_no_learner_survives_is_named() -> None:
    _, data = table()
    with pytest.raises(LatentDataError, match=r"features \['math_density'\] hold NaN or infinity \(1 rows\)"):
        broken = data.select(np.arange(len(data)))
        broken.states[0, -1] = np.nan
        broken.check()
    with pytest.raises(LatentDataError, match="done at turn 0 but has later rows: contradictory"):
        broken = data.select(np.arange(len(data)))
        broken.done[0] = True
        broken.check()
    with pytest.raises(LatentDataError, match="ends at turn 1 without done: contradictory"):
        broken = data.select(np.arange(len(data)))
        broken.done[1] = False
        broken.check()
    with pytest.raises(LatentDataError, match=r"only the move \['instruct'\]"):
        broken = data.select(np.arange(len(data)))
        broken.moves[:] = 0
        broken.check(moves=2)
    with pytest.raises(LatentDataError, match="empty"):
        data.select(np.zeros(len(data), bool)).check()


def test_coverage_statistics() -> None:
    _, data = table()
    c = coverage(data)
    assert (c.episodes, c.transitions, c.success_share, c.mean_length) == (3, 6, 1.0, 2.0)
    assert c.move_share == {"instruct": 0.5, "encourage": 0.0, "refocus": 0.0, "ask": 0.5}
    assert c.state_repeats == 1.0 and "off_topic" in c.constant_features


# ------------------------------------------------------------------------------------------------------- statistics


def test_rates_and_paired_tests() -> None:
    r = wilson(8, 10)
    assert (r.low, r.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 0).n == 0
    with pytest.raises(ValueError):
        wilson(3, 2)
    clusters = [str(i // 2) for i in range(40)]
    clear = paired([1.0] * 40, [0.0] * 30 + [1.0] * 10, clusters)
    assert clear.difference == 0.75 and clear.low > 0.5 and clear.p_value < 0.01 and clear.clusters == 20
    same = paired([1.0, 0.0] * 20, [0.0, 1.0] * 20, clusters)
    assert same.difference == 0 and same.p_value == 1.0


def test_kappa() -> None:
    a = ["x"] * 25 + ["y"] * 25
    b = ["x"] * 20 + ["y"] * 5 + ["x"] * 10 + ["y"] * 15
    assert cohen_kappa(a, b) == pytest.approx(0.4)
    assert math.isnan(cohen_kappa(["x"], ["x"]))


def test_the_label_study(tmp_path) -> None:
    episodes, data = table()
    path = tmp_path / "labels.csv"
    assert export_sample(path, episodes, data, PAPER_25, 4, 0) == 4
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(r["move"] == "" and r["frustrated"] == "" for r in rows), (
        "people do not see the machine's labels"
    )
    with pytest.raises(MaieuticError, match="no label is filled in"):
        agreement(path)
    with open(machine_path(path), newline="") as file:
        machine = list(csv.DictReader(file))
    for row, ours in zip(rows, machine, strict=True):
        row["move"], row["frustrated"] = ours["move"], "yes" if ours["frustrated"] == "1" else "no"
    rows[0]["move"] = "refocus"
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)
    found = {a.column: a for a in agreement(path)}
    assert found.keys() == {"move", "frustrated"}
    assert (found["move"].n, found["move"].agreement) == (4, 0.75)
    assert found["frustrated"].agreement == 1.0
    rows[0]["frustrated"] = "perhaps"
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)
    with pytest.raises(MaieuticError, match="'perhaps' is neither yes nor no"):
        agreement(path)


def test_rule_success_needs_a_claim() -> None:
    d = Dialogue("d", "source", turns=talk("a", "b", "I see 7 of them"))
    assert run(RuleSuccess().solved(d, pair(), FakeGrader(), seed=0)) is False

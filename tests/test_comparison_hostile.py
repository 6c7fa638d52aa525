"""The comparison on runs that do not fit: other problems, one seed twice, lines that are none, names that are markup."""

import json
from dataclasses import replace

import pytest

from maieutic.env.base import PostTest
from maieutic.report.comparison import compare_arms, load_arms, write_comparison
from maieutic.report.comparison.load import CARD, ComparisonError
from maieutic.shown import markdown_text
from test_comparison_report import episode, many, run


def pair_with(e, **source):
    return replace(e, pair=e.pair.model_copy(update={"source": e.pair.source.model_copy(update=source)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda e: pair_with(e, text="another problem"),
        lambda e: pair_with(e, answer="9"),
        lambda e: replace(e, pre=0.5),
    ],
    ids=["text", "answer", "cold rate"],
)
def test_other_problems_under_the_same_ids_are_refused(tmp_path, change):
    runs = [run(tmp_path, "base", many()), run(tmp_path, "x", [change(e) for e in many(1)])]
    with pytest.raises(ComparisonError, match=r"12 problems of one id differ.*p00, p01, p02 …"):
        compare_arms(load_arms(runs))
    assert "12 problems of one id differ" in compare_arms(load_arms(runs), allow_different=True).notices[0]


def test_two_runs_of_one_arm_and_seed_are_two_arms(tmp_path):
    runs = [
        run(tmp_path, "base", many()),
        run(tmp_path / "a", "x", many(1)),
        run(tmp_path / "b", "x", many(2)),
    ]
    c = compare_arms(load_arms(runs))
    assert [(r.arm, r.dialogues) for r in c.rows] == [("base", 12), ("x (a/x-0)", 12), ("x (b/x-0)", 12)]


def test_every_transcript_must_show_the_solution_where_the_tutor_is_said_to_see_it(tmp_path):
    mixed = [episode(i, 3, solution="2" if i < 6 else None) for i in range(12)]
    with pytest.raises(ComparisonError, match="6 of 12 transcripts show that it did"):
        load_arms([run(tmp_path, "x", mixed, "env.tutor_sees_solution=true")])


def test_an_evaluation_without_dialogues_is_refused(tmp_path):
    with pytest.raises(ComparisonError, match="holds no dialogue"):
        load_arms([run(tmp_path, "x", [])])


def test_dialogues_that_count_without_a_number_are_told(tmp_path):
    lines = many()
    for i in range(5):
        lines[i] = replace(lines[i], reward=replace(lines[i].reward, reward=float("nan")))
    lines[5] = replace(lines[5], post_test=None)
    c = compare_arms(load_arms([run(tmp_path, "x", lines)]))
    assert c.notices == [
        "x: 1 of 12 dialogues that count have no transfer_gain: they are in no mean of it.",
        "x: 5 of 12 dialogues that count have no reward: they are in no mean of it.",
    ]
    assert c.rows[0].estimates["reward"].n == 7


@pytest.mark.parametrize(
    "broken", [{"verdicts": None}, {"pair": None}, {"post_test": {"problem": "transfer"}}]
)
def test_a_line_that_is_no_episode_is_named(tmp_path, broken):
    path = run(tmp_path, "x", many())
    (file,) = (path / "transcripts").iterdir()
    lines = file.read_text().splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | broken)
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ComparisonError, match=r"dialogue 4 \(p03/0\) is no episode"):
        load_arms([path])


@pytest.mark.parametrize("card", ["[1]", '{"seed": "a"}', '{"train_seconds": "long"}'])
def test_a_card_of_another_kind_is_refused(tmp_path, card):
    path = run(tmp_path, "x", many())
    (path / CARD).write_text(card)
    with pytest.raises(ComparisonError, match="arm.json"):
        load_arms([path])


def test_settings_of_another_kind_are_refused(tmp_path):
    path = run(tmp_path, "x", many())
    (path / "recipe.yaml").write_text("env: {}\nstudents: [7]\n")
    with pytest.raises(ComparisonError, match="its settings cannot be read"):
        load_arms([path])


def test_names_are_text_in_markdown(tmp_path):
    name = "a|b\\|c\n## `x` <img src=x> *b* [l](javascript:1)\r\u2028\ud800"
    path = run(
        tmp_path, "x", [replace(e, post_test=PostTest("transfer", True, ["a"], ["right"])) for e in many()]
    )
    (path / CARD).write_text(json.dumps({"arm": name, "seed": 0}))
    text = write_comparison(compare_arms(load_arms([path])), tmp_path / "out")["md"].read_text()
    assert text.isprintable() or set(c for c in text if not c.isprintable()) == {"\n"}
    for line in text.splitlines():
        assert not line.startswith("## `") and "<img" not in line and "](" not in line
    rows = [line for line in text.splitlines() if line.startswith("| a")]
    assert rows and all(r.startswith("| a\\|b\\\\\\|c ## \\`x\\` &lt;img src=x> \\*b\\*") for r in rows)


def test_markdown_text_keeps_plain_names():
    assert markdown_text("evaluation_aware 3.5 [+0.1, +0.2] − ∗") == "evaluation_aware 3.5 [+0.1, +0.2] − ∗"

"""The comparison of arms: definitions by hand, equal terms, equal data, too few problems, flags, and the pages."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import comparison_oracle
from maieutic.check import resolve
from maieutic.cli import app
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, PostTest, RewardBreakdown, Verdict
from maieutic.env.reward import normalised_gain
from maieutic.evaluation.statistics import Estimate
from maieutic.problems.schema import Problem, ProblemPair, SolveRate
from maieutic.recipe import dump_recipe, load_recipe
from maieutic.report.comparison import compare_arms, load_arms, write_comparison
from maieutic.report.comparison.compare import flags
from maieutic.report.comparison.load import CARD, ComparisonError
from maieutic.transcripts import TranscriptWriter

KEY = "micro/student|x|T=0.6|p=1|max=30"


def episode(
    problem: int,
    right: int,
    *,
    same=8,
    leak="ok",
    exclusion=None,
    turns=("Why?",),
    end="max_turns",
    solution=None,
):
    rate = {KEY: SolveRate(rate=0.25, n=16), "micro/student-b|x|T=0.6|p=1|max=30": SolveRate(rate=0.9, n=16)}
    pair = ProblemPair(
        id=f"p{problem:02d}",
        source=Problem(text=f"s{problem}", answer="1", rates=rate),
        transfer=Problem(text=f"t{problem}", answer="2", rates=rate),
    )
    said = [Turn("student", "open", scripted=True)]
    for text in turns:
        said += [Turn("tutor", text, visible_tokens=3 * len(text)), Turn("student", "ok", visible_tokens=1)]

    def test(which, n):
        return PostTest(which, True, ["a"] * 16, ["right"] * n + ["wrong"] * (16 - n))

    gain = normalised_gain(0.25, right / 16)
    return Episode(
        id=f"{pair.id}/0", group_id=pair.id, pair=pair, phase="eval", step=0, index=0, seed=0, student="student",
        dialogue=Dialogue("d", pair.source.text, solution, said, end), pre=0.25,
        verdicts={"leakage": Verdict("leakage", leak, quote="Why?", turn=1), "correctness": Verdict("correctness", "ok")},
        post_test=test("transfer", right), extra_tests={"source": test("source", same)},
        reward=None if exclusion else RewardBreakdown(gain, False, 0.25, right / 16, gain), exclusion=exclusion,
    )  # fmt: skip


def run(folder: Path, arm: str, episodes, *overrides, seed=0, trained=None) -> Path:
    path = folder / f"{arm}-{seed}"
    path.mkdir(parents=True)
    recipe = resolve(load_recipe("micro/full", [f"arm={arm}", f"name={arm}-{seed}", *overrides]))
    (path / "recipe.yaml").write_text(dump_recipe(recipe))
    (path / CARD).write_text(json.dumps({"arm": arm, "seed": seed, "trained": trained, "train_seconds": 2.5}))
    TranscriptWriter(path, arm=arm).write("eval", 0, episodes)
    return path


def many(offset=0, n=12, **kwargs):
    return [episode(i, (3 * i + offset) % 17, **kwargs) for i in range(n)]


# --- numbers --------------------------------------------------------------------------------------------------------------


def test_means_and_differences_by_hand(tmp_path):
    base = run(tmp_path, "base", [episode(i, 4 + i % 2, same=8) for i in range(12)])
    ours = run(
        tmp_path, "dppo", [episode(i, 8 + i % 2, same=4, leak="reject" if i < 3 else "ok") for i in range(12)]
    )
    c = compare_arms(load_arms([base, ours]))
    assert c.base == "base" and [r.arm for r in c.rows] == ["base", "dppo"]
    one, two = (r.estimates for r in c.rows)
    # pre 4/16; half the problems 4/16 (Δ 0), half 5/16 (Δ 1/12); then 8/16 and 9/16.
    assert one["transfer_gain"].value == pytest.approx((0 + 1 / 12) / 2)
    assert two["transfer_gain"].value == pytest.approx((4 / 12 + 5 / 12) / 2)
    assert one["same_gain"].value == pytest.approx(1 / 3) and two["same_gain"].value == pytest.approx(0.0)
    assert two["transfer_gap"].value == pytest.approx(-(4 / 12 + 5 / 12) / 2)
    assert (one["leak_rate"].value, two["leak_rate"].value) == (0.0, 0.25)
    assert one["visible_tokens_per_turn"].value == 12.0 and one["turns"].value == 3.0
    d = {t.measure: t for t in c.tested}
    gain = d["transfer_gain"].difference
    assert gain.value == pytest.approx(1 / 3) and gain.pairs == 12
    # Twelve equal differences: the interval is the point, and only 2 of 2^12 sign flips are as extreme.
    assert gain.low == pytest.approx(1 / 3) and gain.high == pytest.approx(1 / 3)
    assert gain.p == pytest.approx(2 / 4096)
    # Holm: 8 tests; transfer_gain, same_gain and reward share the smallest p.
    assert d["transfer_gain"].p_holm == pytest.approx(8 * 2 / 4096)
    assert d["leak_rate"].difference.p == pytest.approx(2 / 8)  # three differences of 1, nine of 0
    assert d["turns"].difference.p == 1.0 and d["turns"].difference.value == 0


def test_interval_and_error_agree_with_scipy(tmp_path):
    stats = pytest.importorskip("scipy.stats")
    a, b = many(), many(5)
    c = compare_arms(load_arms([run(tmp_path, "base", a), run(tmp_path, "x", b)]))
    (t,) = [t for t in c.tested if t.measure == "transfer_gain"]
    pairs = [
        (normalised_gain(0.25, x.post_test.rate), normalised_gain(0.25, y.post_test.rate))
        for x, y in zip(a, b, strict=True)
    ]
    d = [y - x for x, y in pairs]
    assert t.difference.value == pytest.approx(sum(d) / 12, abs=1e-12)
    assert t.difference.se == pytest.approx(stats.sem(d), abs=1e-12)
    boot = stats.bootstrap(
        (d,), lambda x, axis: x.mean(axis=axis), method="percentile", n_resamples=20_000, rng=0
    )
    spread = boot.confidence_interval.high - boot.confidence_interval.low
    assert t.difference.low == pytest.approx(boot.confidence_interval.low, abs=0.06 * spread)
    assert t.difference.high == pytest.approx(boot.confidence_interval.high, abs=0.06 * spread)
    perm = stats.permutation_test(
        (d,),
        lambda x, axis: x.mean(axis=axis),
        permutation_type="samples",
        n_resamples=math.inf,
        vectorized=True,
    )
    assert t.difference.p == pytest.approx(perm.pvalue, abs=1e-9)


def test_seeds_are_pooled_and_shown_apart(tmp_path):
    runs = [
        run(tmp_path, "base", many()),
        run(tmp_path, "x", many(1), seed=1),
        run(tmp_path, "x", many(2), seed=2),
    ]
    c = compare_arms(load_arms(runs))
    row = c.rows[1]
    assert (row.dialogues, row.problems, row.estimates["transfer_gain"].clusters) == (24, 12, 12)
    first, second = (r["transfer_gain"] for r in row.by_run)
    assert row.estimates["transfer_gain"].value == pytest.approx((first + second) / 2) and first != second
    assert row.cost["train_seconds"] == 5.0


def test_equal_data_gives_differences_of_exactly_zero(tmp_path):
    same = many(leak="reject")
    c = compare_arms(load_arms([run(tmp_path, "base", same), run(tmp_path, "copy", same)]))
    assert len(c.tested) == 8
    for t in c.tested:
        d = t.difference
        assert (d.value, d.low, d.high, d.p, t.p_holm) == (0.0, 0.0, 0.0, 1.0, 1.0), t.measure
    assert c.rows[1].shift == 0.0


def test_too_few_problems_give_a_statement_and_no_interval(tmp_path):
    c = compare_arms(load_arms([run(tmp_path, "base", many(n=9)), run(tmp_path, "x", many(1, n=9))]))
    for t in c.tested:
        assert (t.difference.low, t.difference.high, t.difference.p, t.p_holm) == (None,) * 4
        assert t.difference.note == "9 shared problems: too few for an interval (at least 10)"
    paths = write_comparison(c, tmp_path / "out")
    text = paths["md"].read_text()
    assert "Fewer than 10 problems: too few for an interval" in text and "9 shared problems: too few" in text
    assert "[" not in text.split("## Results")[1].split("## Tutor moves")[0]


def test_what_is_unknown_or_excluded_is_counted_and_in_no_mean(tmp_path):
    lines = [*many(n=11), episode(11, 16, leak="unknown", exclusion="unknown:leakage")]
    with_excluded = compare_arms(load_arms([run(tmp_path, "base", lines)])).rows[0].estimates
    without = compare_arms(load_arms([run(tmp_path, "b2", many(n=11))])).rows[0].estimates
    assert (
        with_excluded["excluded_share"].value == with_excluded["unknown_share"].value == pytest.approx(1 / 12)
    )
    for name in ("transfer_gain", "same_gain", "reward", "leak_rate"):
        assert with_excluded[name].value == without[name].value and with_excluded[name].n == 11


def estimates(blank, truncated):
    return {"empty_turn_rate": Estimate(blank, 1, 1), "truncated_dialogue_share": Estimate(truncated, 1, 1)}


@pytest.mark.parametrize(
    "blank, cut, marks", [(0.15, 0.15, ""), (0.151, 0, "∗"), (0, 0.16, "†"), (1, 1, "∗†")]
)
def test_flags_above_fifteen_per_cent(blank, cut, marks):
    assert flags(estimates(blank, cut)) == marks


def test_a_bare_end_token_is_blank_but_not_empty(tmp_path):
    ending = many()
    for e in ending:
        e.dialogue.turns[-1] = Turn(
            "tutor", "", end_token=True
        )  # two tutor turns, the last one ends the dialogue
        e.dialogue.turns.insert(-1, Turn("student", "ok"))
    row = compare_arms(load_arms([run(tmp_path, "base", ending)])).rows[0]
    assert (row.estimates["blank_turn_rate"].value, row.estimates["empty_turn_rate"].value, row.flags) == (
        0.5,
        0.0,
        "",
    )


def test_flags_are_in_the_table(tmp_path):
    blank = run(tmp_path, "quiet", many(turns=("Why?", " ")))
    cut = run(tmp_path, "long", many(end="context_limit"))
    c = compare_arms(load_arms([blank, cut]))
    assert [r.flags for r in c.rows] == ["∗", "†"]
    text = write_comparison(c, tmp_path / "out")["md"].read_text()
    assert "| quiet∗ |" in text and "| long† |" in text


# --- equal terms ----------------------------------------------------------------------------------------------------------


def seeing(tmp_path):
    blind = run(tmp_path, "base", many())
    sees = run(tmp_path, "told", many(solution="2"), "env.tutor_sees_solution=true")
    return [blind, sees]


def test_arms_that_differ_in_seeing_the_solution_are_refused_without_the_flag(tmp_path):
    arms = load_arms(seeing(tmp_path))
    with pytest.raises(
        ComparisonError, match=r"sees the solution in told, and not in base.*--allow-solution"
    ):
        compare_arms(arms)
    with pytest.raises(ComparisonError, match="sees the solution"):
        compare_arms(arms, allow_different=True)
    c = compare_arms(arms, allow_solution=True)
    paths = write_comparison(c, tmp_path / "out")
    assert "Unequal terms: the tutor sees the solution in told" in paths["md"].read_text()
    assert "Unequal terms: the tutor sees the solution in told" in paths["html"].read_text()
    data = json.loads(paths["json"].read_text())["arms"]
    assert (data["base"]["tutor_sees_solution"], data["told"]["tutor_sees_solution"]) == (False, True)


def test_the_transcripts_decide_who_saw_the_solution(tmp_path):
    with pytest.raises(ComparisonError, match="12 of 12 transcripts show that it did"):
        load_arms([run(tmp_path, "base", many(solution="2"))])


@pytest.mark.parametrize("override", ["students.0.engine.max_batch_size=7", "env.post_test_ahead=tail"])
def test_what_changes_no_number_is_no_other_measure(tmp_path, override):
    runs = [run(tmp_path, "base", many()), run(tmp_path, "x", many(), override)]
    assert compare_arms(load_arms(runs)).notices == []


@pytest.mark.parametrize(
    "override, key",
    [
        ("env.hide_tutor=false", "env.hide_tutor"),
        ("students.0.sampling.temperature=0.9", "students.0.sampling.temperature"),
        ("judge.votes=5", "judge.votes"),
        ("reward.gate_penalty=0.5", "reward.gate_penalty"),
    ],
)
def test_arms_measured_otherwise_are_refused_and_the_keys_named(tmp_path, override, key):
    arms = load_arms([run(tmp_path, "base", many()), run(tmp_path, "x", many(), override)])
    with pytest.raises(
        ComparisonError, match=rf"x\) was measured otherwise than arm base: {re.escape(key)} "
    ):
        compare_arms(arms)
    assert any(key in n for n in compare_arms(arms, allow_different=True).notices)


def test_another_prompt_of_the_tutor_is_the_arm_and_not_the_measure(tmp_path):
    kind = "maieutic.env.prompted:PromptedEnvironment"
    prompted = run(
        tmp_path, "aware", many(1), f"env.kind={kind}", "env.options={tutor_prompt: evaluation_aware}"
    )
    c = compare_arms(load_arms([run(tmp_path, "base", many()), prompted]))
    assert [r.tutor_prompt for r in c.rows] == ["environment", "evaluation_aware"]


def test_folders_and_names_that_do_not_fit(tmp_path):
    base = run(tmp_path, "base", many())
    with pytest.raises(ComparisonError, match="named twice"):
        load_arms([base, base])
    with pytest.raises(ComparisonError, match="no evaluation after step 7; there are \\[0\\]"):
        load_arms([base], step=7)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ComparisonError, match="holds no evaluation transcripts"):
        load_arms([tmp_path / "empty"])
    with pytest.raises(ComparisonError, match="no arm is called 'basis'; there are base"):
        compare_arms(load_arms([base]), "basis")


def test_arms_with_other_problems_are_refused_or_said_to_have_them(tmp_path):
    arms = load_arms([run(tmp_path, "base", many()), run(tmp_path, "x", many(n=10))])
    with pytest.raises(ComparisonError, match=r"base 12, x 10; 10 in all.*--allow-different"):
        compare_arms(arms)
    c = compare_arms(arms, allow_different=True)
    assert "Not all arms have the same problems (base 12, x 10; 10 in all)" in c.notices[0]
    assert {t.difference.pairs for t in c.tested} == {10}


def test_a_folder_of_maieutic_evaluate_is_an_arm(tmp_path):
    from types import SimpleNamespace

    from maieutic.evaluation.environment import sample as suite_sample
    from maieutic.evaluation.results import SuiteResult
    from maieutic.problems.schema import StudentKey

    ran = run(tmp_path, "base", many())
    settings = load_arms([ran])[0].runs[0].settings
    key = StudentKey(model="micro/student", prompt_hash="x", temperature=0.6, max_tokens=30)
    samples = [suite_sample(e, SimpleNamespace(key=key), e.id) for e in many(5)]
    told = {**settings, "gates": settings["judge"], "seed": 0}
    SuiteResult("environment", "api", told, samples=samples).write(tmp_path / "api")
    c = compare_arms(load_arms([ran, tmp_path / "api"]))
    twin = compare_arms(load_arms([ran, run(tmp_path, "twin", many(5))]))
    assert [r.arm for r in c.rows] == ["base", "api"] and c.notices == []
    for name in ("transfer_gain", "same_gain", "reward", "leak_rate", "visible_tokens_per_turn"):
        assert c.rows[1].estimates[name] == twin.rows[1].estimates[name]
        assert c.rows[1].estimates[name].value == pytest.approx(sum(s[name] for s in samples) / 12)


# --- pages ------------------------------------------------------------------------------------------------------------------


def test_an_independent_program_finds_the_same_numbers(tmp_path):
    lines = [*many(turns=("Why?", "How many?")), episode(3, 9, leak="unknown", exclusion="unknown:leakage")]
    runs = [run(tmp_path, "base", many()), run(tmp_path, "x", lines), run(tmp_path, "x", many(4), seed=1)]
    write_comparison(compare_arms(load_arms(runs)), tmp_path / "out")
    assert comparison_oracle.check(tmp_path / "out") == 2 * 17 + 8
    data = json.loads((tmp_path / "out" / "comparison.json").read_text())
    data["arms"]["x"]["measures"]["same_gain"]["value"] += 1e-6
    (tmp_path / "out" / "comparison.json").write_text(json.dumps(data))
    with pytest.raises(AssertionError, match="same_gain"):
        comparison_oracle.check(tmp_path / "out")


def test_the_page_is_self_contained_and_hostile_names_are_text(tmp_path):
    evil = run(
        tmp_path,
        "base",
        [replace(e, pair=e.pair.model_copy(update={"id": f"<script>{i}"})) for i, e in enumerate(many())],
    )
    other = run(
        tmp_path,
        "x",
        [replace(e, pair=e.pair.model_copy(update={"id": f"<script>{i}"})) for i, e in enumerate(many(2))],
    )
    c = compare_arms(load_arms([evil, other]))
    page = write_comparison(c, tmp_path / "out")["html"].read_text()
    assert "<script" not in page and "&lt;script&gt;0" in page and "default-src 'none'" in page
    assert not re.search(r"(src|href)=", page)
    # Every point of the scatters, twelve a measure.
    assert page.count("<circle") == 24
    exact = {
        (m[0], m[1]): float(m[2])
        for m in re.findall(r'data-arm="(\w+)" data-name="(\w+)" data-value="([^"]+)"', page)
    }
    assert exact["x", "leak_rate"] == 0.0


def test_learning_curves_and_costs_come_from_the_training_run(tmp_path):
    trained = tmp_path / "train"
    trained.mkdir()
    (trained / "recipe.yaml").write_text("name: t\n")
    rows = [
        {
            "train/step": s,
            "rollout/reward": s / 10,
            "time/step": 2.0,
            "train/trained_tokens": 50,
            "usage/judge/requests": 3 * s,
        }
        for s in (1, 2, 3)
    ]
    (trained / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    runs = [run(tmp_path, "base", many()), run(tmp_path, "x", many(), trained=str(trained))]
    c = compare_arms(load_arms(runs))
    assert c.curves == {"rollout/reward": {"x": [(1, 0.1), (2, 0.2), (3, 0.3)]}}
    cost = c.rows[1].cost
    assert (cost["seconds_in_steps"], cost["trained_tokens"], cost["training_judge_requests"]) == (
        6.0,
        150.0,
        9.0,
    )
    assert cost["evaluation_tutor_tokens"] == 12 * 12 and cost["evaluation_student_tokens"] == 12
    assert 'data-metric="rollout/reward"' in write_comparison(c, tmp_path / "out")["html"].read_text()


def test_the_command(tmp_path):
    runs = [str(run(tmp_path, "base", many())), str(run(tmp_path, "x", many(1)))]
    done = CliRunner().invoke(app, ["report", *runs, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "comparison.md",
        "comparison.html",
        "comparison.json",
    }
    assert CliRunner().invoke(app, ["report", *runs]).exit_code == 2
    for only_compares in ("--allow-solution", "--allow-different"):
        assert CliRunner().invoke(app, ["report", runs[0], only_compares]).exit_code == 2
    told = run(tmp_path, "told", many(solution="2"), "env.tutor_sees_solution=true")
    done = CliRunner().invoke(app, ["report", runs[0], str(told), "--out", str(tmp_path / "o2")])
    assert done.exit_code == 2 and not (tmp_path / "o2").exists()
    done = CliRunner().invoke(
        app, ["report", runs[0], str(told), "--out", str(tmp_path / "o2"), "--allow-solution"]
    )
    assert done.exit_code == 0, done.output

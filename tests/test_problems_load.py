"""From a recipe's ``problems:`` to pairs: filters, missing variants, rates of the right student, counts of what was dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maieutic.config import ProblemsSpec
from maieutic.errors import ProblemDataError, RecipeError, SolveRateError
from maieutic.problems import (
    PUBLISHED_STUDENT,
    Problem,
    ProblemPair,
    SolveRate,
    StudentKey,
    load_problems,
    write_pairs,
)
from maieutic.problems.filters import NAMED, rate_filter

KEY = StudentKey(model="m", prompt_hash="0" * 12, temperature=0.6, max_tokens=80)
OTHER = StudentKey(model="m2", prompt_hash="0" * 12, temperature=0.6, max_tokens=80)


def pair(
    i: int,
    source: float | None = 0.5,
    transfer: float | None = 0.5,
    *,
    variant: bool = True,
    key: StudentKey = KEY,
) -> ProblemPair:
    def problem(text: str, rate: float | None) -> Problem:
        rates = {} if rate is None else {str(key): SolveRate(rate=rate, n=16)}
        return Problem(text=text, answer="1", rates=rates)

    return ProblemPair(
        id=f"p{i}",
        source=problem(f"source {i}", source),
        transfer=problem(f"transfer {i}", transfer) if variant else None,
    )


def load(
    tmp_path: Path, pairs: list[ProblemPair], students: list[StudentKey] | None = None, **spec: Any
) -> Any:
    write_pairs(tmp_path / "p.jsonl", pairs)
    return load_problems(
        ProblemsSpec(source="p.jsonl", **spec), [KEY] if students is None else students, tmp_path, True
    )


# ---------------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("name", "rate", "reason"),
    [
        ("train_band", 0.02, None),
        ("train_band", 0.65, None),
        ("train_band", 0.0, "too_hard"),
        ("train_band", 0.0199, "too_hard"),
        ("train_band", 0.6501, "too_easy"),
        ("paper_test", 0.0, "too_hard"),
        ("paper_test", 0.01, None),
        ("paper_test", 0.9, None),
        ("paper_test", 0.9001, "too_easy"),
    ],
)
def test_named_filters_at_their_ends(name: str, rate: float, reason: str | None) -> None:
    assert NAMED[name].rejects(rate) == reason


def test_both_rates_and_all_students_count() -> None:
    band = NAMED["train_band"]
    assert band.reason(pair(1), [KEY]) is None
    assert band.reason(pair(1, source=0.0), [KEY]) == "source_too_hard"
    assert band.reason(pair(1, transfer=0.7), [KEY]) == "transfer_too_easy"
    both = pair(1)
    both.source.rates[str(OTHER)] = SolveRate(rate=1, n=1)
    assert band.reason(both, [KEY, OTHER]) == "source_too_easy"
    with pytest.raises(SolveRateError, match="maieutic data measure"):
        band.reason(pair(1), [OTHER])


def test_a_band_of_ones_own() -> None:
    f = rate_filter({"low": 0.25, "high": 0.5})
    assert f is not None
    assert [f.rejects(r) for r in (0.2, 0.25, 0.5, 0.51)] == ["too_hard", None, None, "too_easy"]
    with pytest.raises(RecipeError, match="low and high, not hihg"):
        rate_filter({"low": 0, "hihg": 1})
    with pytest.raises(RecipeError, match=r"does not hold for low 0\.6, high 0\.5"):
        rate_filter({"low": 0.6, "high": 0.5})
    with pytest.raises(RecipeError, match="did you mean 'train_band'"):
        rate_filter("train_bnd")


# ---------------------------------------------------------------------------------------------------- load


def test_everything_that_is_dropped_is_counted(tmp_path: Path) -> None:
    pairs = [pair(i) for i in range(20)]
    pairs += [pair(20, source=0.0), pair(21, source=0.0), pair(22, transfer=1.0)]
    pairs += [pair(23, variant=False), pair(24, variant=False)]
    train, held, report = load(
        tmp_path,
        pairs,
        filter="train_band",
        eval_filter="train_band",
        missing_variant="drop",
        eval_size=5,
        train_size=12,
    )
    assert (len(train), len(held)) == (12, 5)
    assert report.read == 25
    assert report.without_variant == 2
    assert report.filtered == {"source_too_hard": 2, "transfer_too_easy": 1}
    assert report.unused == 3
    assert report.lines() == [
        "25 pairs read from p.jsonl",
        "2 without a transfer variant: dropped",
        "3 dropped by filter train_band: 2 source too hard, 1 transfer too easy",
        "3 beyond train_size",
        "12 for training, 5 held out",
    ]
    assert (
        report.read
        == report.without_variant + sum(report.filtered.values()) + report.unused + report.train + report.eval
    )


def test_missing_variants_are_an_error_dropped_or_the_source(tmp_path: Path) -> None:
    pairs = [pair(1), pair(2), pair(3, variant=False)]
    with pytest.raises(
        ProblemDataError, match=r"1 of 3 pairs have no transfer variant \(first: 'p3'\).*drop or source"
    ):
        load(tmp_path, pairs, eval_size=0)
    train, _, _ = load(tmp_path, pairs, eval_size=0, missing_variant="drop")
    assert [p.id for p in train] == ["p1", "p2"]
    train, _, report = load(tmp_path, pairs, eval_size=0, missing_variant="source")
    assert [p.id for p in train] == ["p1", "p2", "p3"]
    assert train[2].tested(transfer=True).text == "source 3"
    assert "1 without a transfer variant: tested on the source problem" in report.lines()


def test_rates_of_another_student_are_an_error_that_names_measure(tmp_path: Path) -> None:
    with pytest.raises(SolveRateError) as e:
        load(tmp_path, [pair(1), pair(2, key=OTHER), pair(3)])
    text = str(e.value)
    assert "1 of 3 pairs have no solve rate of student m|000000000000|T=0.6|p=1|max=80 (first: 'p2')" in text
    assert "m2|" in text
    assert "maieutic data measure RECIPE" in text


def test_published_rates_are_used_only_when_the_recipe_says_so(tmp_path: Path) -> None:
    pairs = [pair(i, key=PUBLISHED_STUDENT) for i in range(4)]
    with pytest.raises(SolveRateError, match=r"Llama-3\.1-8B-Instruct\|published\|T=0\.6"):
        load(tmp_path, pairs)
    train, _, report = load(tmp_path, pairs, options={"rates_of": "published"})
    assert train[0].source.rate(KEY) == SolveRate(rate=0.5, n=16)
    assert any("rates of published stand in" in line for line in report.lines())


def test_splits_do_not_move_with_filters_or_sizes_of_training(tmp_path: Path) -> None:
    pairs = [pair(i, source=0.9 if i % 3 else 0.5) for i in range(30)]
    _, a, _ = load(tmp_path, pairs, eval_size=6)
    _, b, _ = load(tmp_path, pairs, eval_size=6, filter="train_band", train_size=2)
    assert a == b
    _, c, _ = load(tmp_path, pairs, eval_size=6, split_seed=1)
    assert c != a
    _, default, _ = load(tmp_path, pairs)
    assert len(default) == 3, "a tenth"


def test_a_separate_held_out_set_loses_nothing_and_training_loses_its_texts(tmp_path: Path) -> None:
    write_pairs(tmp_path / "test.jsonl", [pair(3), pair(4), pair(99)])
    train, held, report = load(tmp_path, [pair(i) for i in range(10)], eval_source="test.jsonl")
    assert [p.id for p in held] == ["p3", "p4", "p99"]
    assert [p.id for p in train] == ["p0", "p1", "p2", "p5", "p6", "p7", "p8", "p9"]
    assert report.overlap == 2
    assert report.read == 13


def test_not_enough_pairs_is_an_error_with_the_counts(tmp_path: Path) -> None:
    pairs = [pair(i) for i in range(5)] + [pair(5, source=0.0)]
    with pytest.raises(
        ProblemDataError, match=r"train_size is 6, but only 4 pairs are left(.|\n)*source too hard"
    ):
        load(tmp_path, pairs, train_size=6, eval_size=1, filter="train_band", eval_filter="train_band")
    with pytest.raises(ProblemDataError, match=r"eval_size is 7, but only 6 pairs"):
        load(tmp_path, pairs, eval_size=7)
    with pytest.raises(ProblemDataError, match="no training pairs are left"):
        load(tmp_path, pairs, eval_size=0, filter={"low": 0.99})


def test_unknown_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"problems\.options\.rate_of.*did you mean 'rates_of'"):
        load(tmp_path, [pair(1)], options={"rate_of": "published"})


def test_generated_pairs_need_no_file() -> None:
    spec = ProblemsSpec(source="generate:one_step", options={"size": 20}, eval_size=4)
    train, held, report = load_problems(spec, [])
    assert (len(train), len(held), report.source) == (16, 4, "generate:one_step")

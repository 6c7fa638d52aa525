"""Sets of pairs: formats, near-duplicates, statistics, export, filter, split, validation, the card and the push."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from maieutic.cli import app
from maieutic.config import ProblemsSpec
from maieutic.errors import ProblemDataError
from maieutic.problems import (
    PUBLISHED_STUDENT,
    Problem,
    ProblemPair,
    SolveRate,
    load_problems,
    read_pairs,
    write_pairs,
)
from maieutic.problems.dedup import NearDuplicates, jaccard, shingles
from maieutic.problems.export import flat_row, only_student, write_flat
from maieutic.problems.formats import plain_fraction
from maieutic.problems.generate import generate
from maieutic.problems.push import card, push
from maieutic.problems.select import filter_pairs, split_apart
from maieutic.problems.stats import corrected_correlation, dataset_stats, pearson, stats_lines, wilson
from maieutic.problems.templates import TEMPLATES, from_solution
from maieutic.problems.templates import draw as draw_template
from maieutic.problems.validate import validate

KEY = "student|abc|T=0.6|p=1|max=80"


def rate(right: int, n: int = 16) -> dict[str, SolveRate]:
    return {KEY: SolveRate(rate=right / n, n=n)}


def pair(i: int, source: int = 4, transfer: int | None = 4, **provenance: Any) -> ProblemPair:
    words = " ".join(f"w{(i * 31 + j * 17) % 997}x" for j in range(12))
    return ProblemPair(
        id=f"p{i}",
        source=Problem(
            text=f"Sara has {i + 2} red pens. {words} How many?", answer=str(i + 2), rates=rate(source)
        ),
        transfer=None
        if transfer is None
        else Problem(
            text=f"Tom gets {i + 500} blue cups. {words[::-1]} How many?",
            answer=str(i + 500),
            rates=rate(transfer),
        ),
        provenance=provenance,
    )


# --------------------------------------------------------------------------------------------------- formats


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    return str(path)


def test_gsm8k_answers_and_solutions(tmp_path: Path, shared_data_dir: Path) -> None:
    pairs = read_pairs(str(shared_data_dir / "gsm8k-train-300.jsonl"))
    assert len(pairs) == 300 and pairs[0].source.answer == "72" and pairs[0].transfer is None
    assert (
        pairs[0].source.solution
        == "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May."
    )
    assert all(p.source.answer.lstrip("-").replace(".", "").isdigit() for p in pairs), (
        "thousands separators are gone"
    )
    with pytest.raises(ProblemDataError, match=r":1: column 'answer': nothing stands after ####"):
        read_pairs(rows_file(tmp_path / "g.jsonl", [{"question": "q", "answer": "so\n#### "}]))
    (plain,) = read_pairs(rows_file(tmp_path / "q.jsonl", [{"question": "q", "answer": 5}]))
    assert (plain.source.text, plain.source.answer) == ("q", "5")


def test_big_math_and_math_rows(tmp_path: Path) -> None:
    big = {
        "problem": "1+1?",
        "answer": "2",
        "source": "orca",
        "domain": ["algebra"],
        "llama8b_solve_rate": 0.4,
    }
    (got,) = read_pairs(rows_file(tmp_path / "b.jsonl", [big]))
    assert got.provenance["columns"] == {"source": "orca", "domain": ["algebra"], "llama8b_solve_rate": 0.4}
    assert flat_row(got, None)["llama8b_solve_rate"] == 0.4
    math_row = {
        "problem": "x?",
        "solution": r"First \boxed{1}, then it is $\boxed{\frac{3}{4}}$.",
        "level": "Level 1",
    }
    (got,) = read_pairs(rows_file(tmp_path / "m.jsonl", [math_row]))
    assert got.source.answer == r"\frac{3}{4}" and got.source.solution == math_row["solution"]
    with pytest.raises(ProblemDataError, match="no answer in"):
        read_pairs(rows_file(tmp_path / "n.jsonl", [{"problem": "x?", "solution": "none"}]))


def test_chinese_sets_in_both_files(tmp_path: Path) -> None:
    ape = {
        "id": "254761",
        "segmented_text": "小 王 …",
        "original_text": "小王要将150千克含药量20%的农药稀释",
        "ans": "450",
        "equation": "x=150*20%/5%-150",
    }
    (got,) = read_pairs(rows_file(tmp_path / "ape.jsonl", [ape]))
    assert got.id == "254761" and got.source.answer == "450" and got.source.solution == ape["equation"]
    assert got.source.text == ape["original_text"] and "columns" not in got.provenance
    # Math23K: objects over several lines, one after the other
    rows = [
        {
            "id": "1",
            "original_text": "甲数",
            "segmented_text": "甲 数",
            "equation": "x=1+(3/4)",
            "ans": "1(3/4)",
        },
        {"id": "2", "original_text": "乙数", "segmented_text": "乙 数", "equation": "x=3/4", "ans": "(3/4)"},
        {"id": "3", "original_text": "丙数", "segmented_text": "丙 数", "equation": "x=20%", "ans": "20%"},
    ]
    path = tmp_path / "math23k.json"
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False, indent=2) for r in rows))
    assert [p.source.answer for p in read_pairs(str(path))] == ["1 3/4", "3/4", "20%"]
    path.write_text(json.dumps(rows))
    assert [p.id for p in read_pairs(str(path))] == ["1", "2", "3"], "a list will do as well"
    path.write_text('{"id": "1",\n "ans": }')
    with pytest.raises(ProblemDataError, match=r"math23k\.json line 1: not JSON: .* \(line 2"):
        read_pairs(str(path))
    rows[0]["ans"] = ""
    with pytest.raises(ProblemDataError, match="column 'ans' is empty"):
        read_pairs(rows_file(tmp_path / "e.jsonl", rows[:1]))
    assert plain_fraction("((2)/(3))") == "2/3" and plain_fraction("2+3") == "2+3"


_HUB_COLUMNS = (
    "problem", "answer", "transfer_problem", "transfer_answer", "pre_solve_rate", "pre_solve_rate_n",
    "pre_solve_rate_transfer_problem", "pre_solve_rate_transfer_problem_n", "llama8b_solve_rate",
)  # fmt: skip
HUB: list[dict[str, Any]] = [
    dict(zip(_HUB_COLUMNS, row, strict=True))
    for row in (
        ("A?", "4", "A'?", "7", 0.5, 16, 0.25, 12, 0.4),
        ("B?", "10", None, None, 0.25, 16, None, None, None),
        ("C?", "2.5", "C'?", None, 0.125, 16, None, None, 0.1),
        ("D?", "1/2", "D'?", "1/3", 0.0, 16, 0.0625, 16, 0.0),
    )
]
"""Hand-written rows with the published set's columns: B has no variant, C one without an answer."""


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("missing", "left", "fate"), [("drop", 2, "dropped"), ("source", 4, "tested on the source")]
)
def test_published_rows_without_a_variant_fall_back_or_go_visibly(
    tmp_path: Path, suffix: str, missing: str, left: int, fate: str
) -> None:
    path = tmp_path / f"hub.{suffix}"
    if suffix == "jsonl":
        rows_file(path, HUB)
    else:
        import datasets

        datasets.Dataset.from_list(HUB).to_parquet(str(path))
    spec = ProblemsSpec(source=str(path), missing_variant=missing, eval_size=0)  # type: ignore[arg-type]
    train, _, report = load_problems(spec, [PUBLISHED_STUDENT])
    assert len(train) == left and report.without_variant == 2
    assert any(f"2 without a transfer variant: {fate}" in line for line in report.lines())
    tested = {p.source.text: p.tested(True).text for p in train}
    assert tested["A?"] == "A'?" and tested["D?"] == "D'?"
    assert tested.get("B?") == ("B?" if missing == "source" else None)
    by_text = {p.source.text: p for p in train}
    assert by_text["A?"].transfer is not None
    assert by_text["A?"].transfer.rates[str(PUBLISHED_STUDENT)] == SolveRate(rate=0.25, n=12)
    with pytest.raises(ProblemDataError, match=r"2 of 4 pairs have no transfer variant"):
        load_problems(ProblemsSpec(source=str(path), eval_size=0), [PUBLISHED_STUDENT])


# --------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_flat_files_come_back_with_their_student(tmp_path: Path, suffix: str) -> None:
    pairs = [pair(1, generator="g", build={"flags": ["too_easy"]}), pair(2, transfer=None)]
    path = tmp_path / f"x.{suffix}"
    write_flat(path, pairs)
    back = read_pairs(str(path))
    for old, new in zip(pairs, back, strict=True):
        assert (new.id, new.source, new.transfer) == (old.id, old.source, old.transfer)
        assert new.provenance["before"] == old.provenance
    import datasets

    loader = "json" if suffix == "jsonl" else "parquet"
    cache = str(tmp_path / "cache")
    data = datasets.load_dataset(loader, data_files=str(path), split="train", cache_dir=cache)
    published = [
        "problem",
        "answer",
        "transfer_problem",
        "transfer_answer",
        "pre_solve_rate",
        "pre_solve_rate_n",
    ]
    published += [
        "pre_solve_rate_transfer_problem",
        "pre_solve_rate_transfer_problem_n",
        "llama8b_solve_rate",
    ]
    assert data.column_names[:9] == published
    assert data[1]["transfer_problem"] is None and data[0]["pre_solve_rate"] == 0.25


def test_two_students_need_a_name(tmp_path: Path) -> None:
    both = pair(1).model_copy(
        update={
            "source": pair(1).source.model_copy(
                update={"rates": {**rate(3), "other": SolveRate(rate=0.5, n=2)}}
            )
        }
    )
    with pytest.raises(ProblemDataError, match="rates of 2 students"):
        only_student([both])
    assert only_student([both], "other") == "other" and only_student([pair(1)]) == KEY
    with pytest.raises(ProblemDataError, match="no rates of student 'third'"):
        only_student([both], "third")
    assert (
        flat_row(both, "other")["pre_solve_rate"] == 0.5 and flat_row(both, "other")["pre_solve_rate_n"] == 2
    )


# --------------------------------------------------------------------------------------------------- duplicates


def test_minhash_finds_what_exact_jaccard_finds() -> None:
    rng = random.Random(5)
    words = [f"word{i}" for i in range(300)]
    texts = [" ".join(rng.choices(words, k=40)) for _ in range(150)]
    for i in range(50):  # near-copies with one to six words changed
        base = texts[i].split()
        for at in rng.sample(range(40), 1 + i % 6):
            base[at] = rng.choice(words)
        texts.append(" ".join(base))
    index, exact = NearDuplicates(0.65), []
    hashes = [shingles(t) for t in texts]
    for i, text in enumerate(texts):
        truth = [(jaccard(hashes[i], hashes[j]), -j) for j in range(i)]
        best = max((t for t in truth if t[0] >= 0.65), default=None)
        found = index.find(text)
        exact.append(best)
        assert (None if found is None else (found.similarity, -int(found.key))) == best
        index.add(str(i), text)
    assert 20 < sum(b is not None for b in exact) < 50


def test_near_duplicates_ignore_case_spacing_and_named_keys() -> None:
    index = NearDuplicates()
    index.add("a", "Sara has 12 red pens and 7 blue pens. How many pens?")
    assert index.find("sara  HAS 12 red pens, and 7 blue pens - how many pens?") is not None
    assert index.find("sara has 12 red pens and 7 blue pens. how many pens?", ignore=["a"]) is None
    assert index.find("Sara has 40 red pens and 9 blue pens. How many pens?") is None, (
        "other numbers, other problem"
    )
    with pytest.raises(ValueError, match="added before"):
        index.add("a", "x")
    assert index.find("") is None


# --------------------------------------------------------------------------------------------------- statistics


def test_wilson_against_known_values() -> None:
    assert wilson(0, 16) == pytest.approx((0.0, 0.19361), abs=1e-5)
    assert wilson(16, 16) == pytest.approx((0.80639, 1.0), abs=1e-5)
    assert wilson(8, 16) == pytest.approx((0.28000, 0.72000), abs=1e-5)
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    with pytest.raises(ValueError):
        wilson(3, 2)


def test_pearson_and_its_correction() -> None:
    assert pearson([1, 2, 3, 4], [2, 4, 6, 8.0]) == pytest.approx(1)
    assert pearson([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert pearson([1, 1], [1, 2]) is None and pearson([1], [1]) is None
    # the same true rates measured twice with 16 samples: r is damped, the correction takes it back to about 1
    rng = random.Random(0)
    true = [rng.betavariate(1, 2) for _ in range(4000)]
    x, y = (
        [SolveRate(rate=sum(rng.random() < p for _ in range(16)) / 16, n=16) for p in true] for _ in range(2)
    )
    r = pearson([a.rate for a in x], [b.rate for b in y])
    assert r is not None and 0.75 < r < 0.85
    assert corrected_correlation(x, y) == pytest.approx(1, abs=0.02)


def test_table_five_of_a_small_set() -> None:
    pairs = [pair(0, 0, 1), pair(1, 4, 4), pair(2, 8, 4), pair(3, 16, 8), pair(4, 2, None)]
    s = dataset_stats(pairs, KEY, "toy")
    assert (s.pairs, s.with_variant, s.measured, s.kept) == (5, 4, 4, 4)
    assert s.source is not None and s.transfer is not None
    assert s.source.mean == pytest.approx(28 / 64) and s.transfer.mean == pytest.approx(17 / 64)
    assert s.source.median == pytest.approx(0.375) and s.source.samples == 64
    assert s.source.shares == {"zero": 0.25, "below_0.10": 0.25, "above_0.65": 0.25, "above_0.90": 0.25}
    assert s.source.histogram == [1, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert s.mean_gap == pytest.approx((1 + 0 - 4 - 8) / 64) and s.mean_abs_gap == pytest.approx(13 / 64)
    assert s.gap_over_gate == 0.25 and s.correlation == pytest.approx(0.96833, abs=1e-5)
    kept = dataset_stats(pairs, KEY, "toy", lambda r: "x" if r == 0 or r > 0.9 else None, "paper_test")
    assert kept.kept == 2
    text = "\n".join(stats_lines(s))
    assert "mean solve rate" in text and "0.438" in text and "[0.9, 1.0]" in text
    assert dataset_stats(pairs, None, "toy").source is None


# --------------------------------------------------------------------------------------------------- templates


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_templates_are_right_and_their_misconceptions_wrong(name: str) -> None:
    kinds: set[str] = set()
    for seed in range(200):
        drawn = draw_template(name, random.Random(seed))
        assert drawn == draw_template(name, random.Random(seed))
        assert drawn.answer > 0 and drawn.solution.splitlines()[-1].split(" = ")[-1].rstrip(".") == str(
            drawn.answer
        )
        for line in drawn.solution.splitlines():
            if " = " in line and not line.startswith("Now"):
                left, right = line.split(":")[-1].split(" = ")
                value = eval(left.replace("×", "*"))  # the step as arithmetic
                assert math.isclose(value, float(right.split()[0])), line
        wrong = [m.answer for m in drawn.misconceptions]
        assert str(drawn.answer) not in wrong and len(set(wrong)) == len(wrong) and wrong, name
        kinds |= {m.kind for m in drawn.misconceptions}
    assert len(kinds) >= 2


def test_four_structures_with_pairs_and_misconceptions() -> None:
    assert {t.split("/")[0] for t in TEMPLATES} == {"rates", "percent_change", "averages", "two_equations"}
    pairs = generate("structures", {"size": 48, "seed": 2, "misconceptions": True})
    assert pairs == generate("structures", {"size": 48, "seed": 2, "misconceptions": True})
    for p in pairs:
        told = p.provenance["misconceptions"]
        assert p.transfer is not None and told["source"] and told["transfer"]
        assert set(told["source"][0]) == {"kind", "answer", "why"}
    found = validate({"train": pairs})
    assert {k: n for k, n in found.counts().items() if k != "no_rate"} == {}, found.lines()


def test_misconceptions_of_any_worked_solution() -> None:
    wrong = from_solution("12", "First 3 + 6 = 9.\nThen 9 + 3 = 12")
    assert [(m.kind, m.answer) for m in wrong] == [("stops_early", "9"), ("opposite_operation", "6")]
    assert from_solution("4", "8 / 2 = 4")[0].answer == "16" and from_solution("5", "no steps") == ()


# --------------------------------------------------------------------------------------------------- filter, split, validate, push


def test_filter_says_what_it_dropped() -> None:
    from maieutic.problems.filters import rate_filter

    pairs = [
        pair(0, 4, 4),
        pair(1, 0, 4),
        pair(2, 4, 16),
        pair(3, 4, None),
        pair(4, 4, 4, build={"flags": ["too_easy"]}),
    ]
    chosen = filter_pairs(pairs, rate_filter("train_band"), KEY, drop_missing=True, drop_flagged=True)
    assert [p.id for p in chosen.kept] == ["p0"]
    assert chosen.dropped == {
        "flagged_too_easy": 1,
        "no_variant": 1,
        "source_too_hard": 1,
        "transfer_too_easy": 1,
    }
    with pytest.raises(ProblemDataError, match="no solve rate of other"):
        filter_pairs(pairs, rate_filter("train_band"), "other")


def test_split_drops_training_pairs_that_resemble_held_out_ones() -> None:
    pairs = [pair(i) for i in range(40)]
    _, held, _ = split_apart(pairs, 8, 0)
    twin = held[0].model_copy(
        update={
            "id": "twin",
            "source": held[0].source.model_copy(update={"text": held[0].source.text + " Now?"}),
        }
    )
    train, again, dropped = split_apart([*pairs, twin], 8, 0)
    assert [p.id for p in again] == [p.id for p in held] or "twin" in {p.id for p in again}
    assert not ({"twin", held[0].id} <= {p.id for p in [*train]}) and sum(dropped.values()) == 1
    assert len(train) + len(again) + sum(dropped.values()) == 41


def test_validation_finds_each_fault_once() -> None:
    good = [pair(i) for i in range(6)]
    copy = good[0].model_copy(update={"id": "c", "transfer": good[1].source})
    same = pair(50).model_copy(update={"transfer": Problem(text="Zoe eats 9 figs. How many?", answer="52")})
    odd = pair(51).model_copy(
        update={"source": pair(51).source.model_copy(update={"rates": {KEY: SolveRate(rate=0.3, n=16)}})}
    )
    text = pair(52).model_copy(update={"source": pair(52).source.model_copy(update={"answer": "nan"})})
    clean = validate({"train": good})
    assert clean.ok and clean.counts() == {}
    found = validate(
        {"train": [*good, copy, same, odd, text], "test": [pair(60), pair(3).model_copy(update={"id": "t"})]},
        evaluation={"gsm8k": [pair(60).model_copy(update={"transfer": None})]},
    )
    assert not found.ok
    by = {(f.split, f.pair, f.reason) for f in found.faults}
    assert by == {
        ("train", "c", "duplicate"),
        ("train", "p50", "same_answer"),
        ("train", "p50", "rate_on_one_side"),
        ("train", "p51", "impossible_rate"),
        ("train", "p52", "unusable_answer"),
        ("test", "p60", "evaluation_set"),
        ("test", "t", "split_overlap"),
    }


class HubStub:
    """Records what would go to the Hub."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.files: dict[str, bytes] = {}

    def create_repo(self, repo: str, **options: Any) -> None:
        self.calls.append((repo, options))

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> Any:
        root = Path(folder_path)
        self.files = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        self.calls.append((repo_id, options))
        return type("Commit", (), {"commit_url": f"https://hub/{repo_id}/commit/1"})()


def test_push_uploads_splits_and_a_card_in_one_commit(tmp_path: Path) -> None:
    splits = {
        "train": [pair(i, i % 8, (i * 3) % 8) for i in range(20)],
        "test": [pair(30), pair(31, transfer=None)],
    }
    hub = HubStub()
    url = push("me/pairs", splits, licence="mit", api=hub)
    assert url == "https://hub/me/pairs/commit/1"
    assert [c[0] for c in hub.calls] == ["me/pairs"] * 2 and hub.calls[0][1]["private"] is True
    assert sorted(hub.files) == [
        "README.md",
        "data/test-00000-of-00001.parquet",
        "data/train-00000-of-00001.parquet",
    ]
    text = hub.files["README.md"].decode()
    import yaml

    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "mit"
    assert [f["split"] for f in front["configs"][0]["data_files"]] == ["train", "test"]
    for said in (
        "transfer_problem",
        "Statistics of `train`",
        KEY,
        "20 pairs, 20 with a variant",
        "## Limits",
    ):
        assert said in text
    (tmp_path / "t.parquet").write_bytes(hub.files["data/train-00000-of-00001.parquet"])
    assert [p.source for p in read_pairs(str(tmp_path / "t.parquet"))] == [p.source for p in splits["train"]]

    class Down(HubStub):
        def create_repo(self, repo: str, **options: Any) -> None:
            raise ConnectionError("no network")

    with pytest.raises(ProblemDataError, match="cannot be pushed .*no network"):
        push("me/pairs", splits, api=Down())
    with pytest.raises(ProblemDataError, match="write owner/name"):
        push("pairs", splits, api=hub)


def test_the_card_hides_paths_of_the_machine() -> None:
    text = card(
        "x",
        {
            "train": [
                pair(1, dataset="/home/someone/secret/gsm8k.jsonl", build={"rewriter": "m", "solver": "m"})
            ]
        },
    )
    assert "/home" not in text and "data set: gsm8k.jsonl (1 rows)" in text and "rewriter: m (1 rows)" in text


def test_the_commands(tmp_path: Path) -> None:
    runner, path = CliRunner(), tmp_path / "p.jsonl"
    write_pairs(path, [pair(i, i % 8, (i * 3) % 8) for i in range(30)])

    def call(*args: str, code: int = 0) -> str:
        result = runner.invoke(app, ["data", *args])
        assert result.exit_code == code, (result.output, result.exception)
        return result.output

    page = tmp_path / "s.html"
    stats = json.loads(call("stats", str(path), "--json", "--html", str(page)))
    assert stats["kept"] == 30 and sum(stats["source"]["histogram"]) == 30
    html = page.read_text()
    assert (
        html.count("<svg") == 2
        and html.count("<rect") == 20
        and "<script" not in html
        and "http" not in html.replace("http-equiv", "")
    )
    assert "filter paper_test: " in call("stats", str(path), "--filter", "paper_test")
    out = call("filter", str(path), "--out", str(tmp_path / "f.jsonl"), "--low", "0.1", "--high", "0.3")
    kept = read_pairs(str(tmp_path / "f.jsonl"))
    assert kept and f"{len(kept)} of 30 pairs" in out and "dropped: source too" in out
    assert all(0.1 <= q.rates[KEY].rate <= 0.3 for p in kept for q in (p.source, p.transfer) if q)
    out = call("split", str(path), "--out", str(tmp_path / "s"), "--test", "5")
    assert "25 for training, 5 held out" in out
    assert "\nvalid" in call("validate", str(tmp_path / "s/train.jsonl"), str(tmp_path / "s/test.jsonl"))
    again = call("validate", str(tmp_path / "s/train.jsonl"), str(path), code=1)
    assert "split_overlap" in again and "not valid" in again
    out = call("push", f"train={path}", "--repo", "me/x", "--out", str(tmp_path / "hub"))
    assert (tmp_path / "hub/README.md").is_file() and str(tmp_path / "hub") in out
    assert "no data recipe 'none'" in call("build", "none", code=2)
    assert call("stats", str(tmp_path / "none.jsonl"), code=2)

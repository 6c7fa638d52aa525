"""Reading problem pairs: formats, the published columns with their gaps, errors with their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maieutic.errors import ProblemDataError
from maieutic.problems import PUBLISHED_STUDENT, Problem, ProblemPair, SolveRate, read_pairs, write_pairs

KEY = str(PUBLISHED_STUDENT)

PUBLISHED_ROWS: list[dict[str, Any]] = [
    {
        "problem": "2 + 2?",
        "answer": "4",
        "transfer_problem": "3 + 4?",
        "transfer_answer": "7",
        "pre_solve_rate": 0.5,
        "pre_solve_rate_n": 16,
        "pre_solve_rate_transfer_problem": 0.25,
        "pre_solve_rate_transfer_problem_n": 12,
        "llama8b_solve_rate": 0.4,
    },
    {
        "problem": "5 + 5?",
        "answer": 10,
        "transfer_problem": None,
        "transfer_answer": None,
        "pre_solve_rate": 1.0,
        "pre_solve_rate_n": 16,
        "pre_solve_rate_transfer_problem": None,
        "pre_solve_rate_transfer_problem_n": None,
        "llama8b_solve_rate": None,
    },
    {
        "problem": "Half of 5?",
        "answer": 2.5,
        "transfer_problem": "Half of 7?",
        "transfer_answer": None,
        "pre_solve_rate": None,
        "pre_solve_rate_n": 0,
        "pre_solve_rate_transfer_problem": 0.125,
        "pre_solve_rate_transfer_problem_n": 16,
        "llama8b_solve_rate": 0.1,
    },
]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8"
    )
    return path


def check_published(pairs: list[ProblemPair]) -> None:
    first, second, third = pairs
    assert first.transfer is not None
    assert (first.source.answer, first.transfer.answer) == ("4", "7")
    assert first.source.rates == {KEY: SolveRate(rate=0.5, n=16)}
    assert first.transfer.rates == {KEY: SolveRate(rate=0.25, n=12)}
    assert first.provenance["columns"]["llama8b_solve_rate"] == 0.4, (
        "Big-Math's own rate is no rate of this student"
    )
    assert second.transfer is None
    assert second.source.answer == "10"
    assert third.transfer is None, "a variant without an answer cannot be graded"
    assert third.source.answer == "2.5"
    assert third.source.rates == {}
    assert len({p.id for p in pairs}) == 3


def test_published_columns_from_jsonl(tmp_path: Path) -> None:
    check_published(read_pairs(str(jsonl(tmp_path / "p.jsonl", PUBLISHED_ROWS))))


def test_published_columns_from_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{**r, "answer": str(r["answer"])} for r in PUBLISHED_ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    check_published(read_pairs("p.parquet", base_dir=tmp_path))


def test_published_columns_from_the_hub_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    seen = {}

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        import datasets.config
        import huggingface_hub.constants

        seen.update(
            name=name,
            split=split,
            offline=datasets.config.HF_HUB_OFFLINE,
            hub=huggingface_hub.constants.HF_HUB_OFFLINE,
        )
        return PUBLISHED_ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    check_published(read_pairs("dmacjam/eduardoRL-transfer-dataset", offline=True, split="test"))
    assert seen == {
        "name": "dmacjam/eduardoRL-transfer-dataset",
        "split": "test",
        "offline": True,
        "hub": True,
    }
    assert datasets.config.HF_HUB_OFFLINE is False, "the switch holds for one call"
    read_pairs("dmacjam/eduardoRL-transfer-dataset")
    assert (seen["split"], seen["offline"]) == ("train", False)


def test_a_hub_set_that_cannot_be_had_is_a_named_error() -> None:
    with pytest.raises(ProblemDataError, match=r"'no-such-owner/no-such-set' \(split 'train'\).*offline"):
        read_pairs("no-such-owner/no-such-set", offline=True)


def test_the_count_defaults_to_the_published_number(tmp_path: Path) -> None:
    row = {"problem": "1+1?", "answer": "2", "pre_solve_rate": 0.75}
    (pair,) = read_pairs(str(jsonl(tmp_path / "p.jsonl", [row])))
    assert pair.source.rates[KEY] == SolveRate(rate=0.75, n=16)


def test_written_pairs_read_back_equal(tmp_path: Path) -> None:
    pairs = [
        ProblemPair(
            id="a",
            source=Problem(
                text="1 + 1 = ?\nü", answer="2", solution="1 + 1 = 2", rates={"k": SolveRate(rate=0.5, n=4)}
            ),
            transfer=Problem(text="2 + 1 = ?", answer="3"),
            provenance={"generator": "g", "steps": 1},
        ),
        ProblemPair(id="b", source=Problem(text="x", answer="y")),
    ]
    write_pairs(tmp_path / "deep" / "p.jsonl", pairs)
    assert read_pairs("deep/p.jsonl", base_dir=tmp_path) == pairs
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["p.jsonl"], "no temporary file stays"


def test_nested_rows_from_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "id": "a",
            "source": {"text": "x", "answer": "1", "rates": {"k": {"rate": 0.5, "n": 4}}},
            "transfer": None,
        },
        {
            "id": "b",
            "source": {"text": "y", "answer": "2", "rates": {"j": {"rate": 1.0, "n": 2}}},
            "transfer": {"text": "z", "answer": "3"},
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    a, b = read_pairs(str(tmp_path / "p.parquet"))
    assert a.source.rates == {"k": SolveRate(rate=0.5, n=4)}
    assert a.transfer is None
    assert b.source.rates == {"j": SolveRate(rate=1.0, n=2)}
    assert b.transfer == Problem(text="z", answer="3")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"problem": "x"'], r"p\.jsonl:1: not JSON"),
        (["[1]"], r"p\.jsonl:1: a row is an object, this is list"),
        (["", {"problem": "x", "answr": "1"}], r"p\.jsonl:2: no column 'answer' \(did you mean 'answr'\?\)"),
        ([{"problem": "x", "answer": None}], r"p\.jsonl:1: column 'answer' is empty"),
        ([{"problem": "  ", "answer": "1"}], r"p\.jsonl:1: column 'problem' is empty"),
        ([{"problem": ["x"], "answer": "1"}], r"p\.jsonl:1: column 'problem': text or a number"),
        (
            [{"problem": "x", "answer": "1", "pre_solve_rate": 1.5}],
            r"column 'pre_solve_rate': a rate between 0 and 1",
        ),
        (
            [{"problem": "x", "answer": "1", "pre_solve_rate": 0.5, "pre_solve_rate_num_graded": 1.5}],
            r"'pre_solve_rate_num_graded'",
        ),
        (
            [{"id": "a", "problem": "x", "answer": "1"}] * 2,
            r"p\.jsonl:2: column 'id': 'a' was given before, at .*p\.jsonl:1",
        ),
        ([{"id": "a", "source": {"text": "x"}}], r"p\.jsonl:1: column 'source\.answer'"),
        (
            [{"id": "a", "source": {"text": "x", "answer": "1", "rates": {"k": {"rate": 2, "n": 1}}}}],
            r"'source\.rates\.k\.rate'",
        ),
        ([{"id": "a", "source": {"text": "x", "answer": "1"}, "extra": 1}], r"column 'extra'"),
        ([], "holds no rows"),
        (
            [{"id": "a", "source": {"text": "x", "answer": " "}}],
            r"p\.jsonl:1: column 'source\.answer': is blank",
        ),
        ([{"id": "\t", "source": {"text": "x", "answer": "1"}}], r"p\.jsonl:1: column 'id': is blank"),
        (
            [{"id": "a", "source": {"text": "\ud800", "answer": "1"}}],
            r"'source\.text': holds half a surrogate",
        ),
        ([{"problem": "x", "answer": "\ud800"}], r"p\.jsonl:1: column 'answer': holds half a surrogate"),
        (
            [{"problem": "x", "answer": "1", "transfer_problem": "\ud800", "transfer_answer": "1"}],
            r"column 'transfer_problem': holds half",
        ),
        (
            [{"id": "a", "source": {"text": "x", "answer": "1", "rates": [1, 2]}}],
            r"p\.jsonl:1: column 'source\.rates': rates by student expected",
        ),
        (
            [{"id": "a", "source": {"text": "x", "answer": "1"}, "provenance": "{x"}],
            r"p\.jsonl:1: column 'provenance': not JSON",
        ),
        (['{"problem": "x", "answer": ' + "9" * 5000 + "}"], r"p\.jsonl:1: not readable JSON"),
        (["[" * 100_000], r"p\.jsonl:1: not readable JSON"),
    ],
)
def test_bad_rows_name_file_row_and_column(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = jsonl(tmp_path / "p.jsonl", rows)
    with pytest.raises(ProblemDataError, match=message):
        read_pairs(str(path))


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"problem": "x", "answer": "1"}) + "\n", encoding="utf-8-sig")
    assert [p.source.text for p in read_pairs(str(path))] == ["x"]


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProblemDataError, match=r"'none\.jsonl': no such file under"):
        read_pairs("none.jsonl", base_dir=tmp_path)
    with pytest.raises(ProblemDataError, match=r"nor a shipped set; did you mean 'gsm-symbolic-mini'"):
        read_pairs("gsm-symbolic-min")
    (tmp_path / "p.csv").write_text("a,b\n")
    with pytest.raises(ProblemDataError, match=r"as \.jsonl or \.parquet, not '\.csv'"):
        read_pairs("p.csv", base_dir=tmp_path)
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(ProblemDataError, match=r"bad\.parquet: cannot be read as Parquet"):
        read_pairs("bad.parquet", base_dir=tmp_path)
    with pytest.raises(ProblemDataError, match="has no splits"):
        read_pairs(str(jsonl(tmp_path / "p.jsonl", PUBLISHED_ROWS)), split="test")

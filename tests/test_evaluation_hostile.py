"""Evaluation results that do not fit: texts that read nan, unequal terms, a full disk, labels and raters that are none."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from maieutic.cli import app
from maieutic.config import JudgeSpec
from maieutic.env.base import Verdict
from maieutic.errors import ModelError, ProblemDataError, RecipeError, RunFolderError
from maieutic.evaluation import journal
from maieutic.evaluation import judge_quality as jq
from maieutic.evaluation.judge_report import run_judge
from maieutic.evaluation.planted import load_planted, parse, shipped
from maieutic.evaluation.results import SuiteResult, read_result
from maieutic.evaluation.suites import compare_in


def test_a_text_that_reads_nan_is_kept(tmp_path: Path) -> None:
    samples = [{"key": "a", "problem": "inf", "reply": "nan", "score": math.nan}]
    data = read_result(SuiteResult("retention", "x", {}, samples=samples).write(tmp_path))
    assert data["samples"] == [{"key": "a", "problem": "inf", "reply": "nan", "score": None}]


def result(folder: Path, arm: str, **settings: object) -> None:
    samples = [{"key": f"p{i}", "problem": f"p{i}", "same_gain": i / 20 + len(arm)} for i in range(12)]
    told = {"suite": {"samples": 1}, "seed": 0, "arm": {"model": arm}, "pairs": {"digest": "d"}, **settings}
    found = SuiteResult("environment", arm, told, samples=samples)
    found.add_from("same_gain")
    found.write(folder / arm)


@pytest.mark.parametrize(
    "change,key",
    [
        ({"seed": 1}, "seed"),
        ({"suite": {"samples": 2}}, "suite.samples"),
        ({"pairs": {"digest": "e"}}, "pairs.digest"),
        ({"gates": {"kind": "rule"}}, "gates"),
    ],
)
def test_arms_measured_otherwise_are_not_compared(tmp_path: Path, change: dict, key: str) -> None:
    result(tmp_path, "base")
    result(tmp_path, "other", **change)
    with pytest.raises(
        RecipeError, match=rf"measured otherwise than that of base: {key} .*--allow-different"
    ):
        compare_in(tmp_path, "base", "other")
    text = compare_in(tmp_path, "base", "other", allow_different=True).read_text()
    assert f"Unequal terms: the two differ in {key}." in text
    result(tmp_path, "like")
    assert "Unequal" not in compare_in(tmp_path, "base", "like").read_text()


def test_a_full_disk_leaves_a_journal_that_can_be_gone_on_with(tmp_path: Path, monkeypatch) -> None:
    path, write = tmp_path / "j.jsonl", os.write
    journal.append_line(path, {"n": 1})
    room = [7]

    def short(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: room.pop()])

    monkeypatch.setattr(journal.os, "write", short)
    with pytest.raises(RunFolderError, match="No space left"):
        journal.append_line(path, {"n": 2})
    monkeypatch.setattr(journal.os, "write", write)
    journal.append_line(path, {"n": 3})
    assert list(journal.read_lines(path)) == [{"n": 1}, {"n": 3}]


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path: Path, monkeypatch) -> None:
    write = os.write
    monkeypatch.setattr(journal.os, "write", lambda fd, data: write(fd, data[:3]))
    journal.append_line(tmp_path / "j.jsonl", {"n": 1})
    assert list(journal.read_lines(tmp_path / "j.jsonl")) == [{"n": 1}]


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "j.jsonl").write_text("[1]\n")
    with pytest.raises(RunFolderError, match="it is no object"):
        list(journal.read_lines(tmp_path / "j.jsonl"))


def test_a_reward_model_that_gives_nan_wins_and_loses_nothing(monkeypatch) -> None:
    from maieutic.evaluation.ped_rm import RewardModel

    model = object.__new__(RewardModel)
    monkeypatch.setattr(RewardModel, "_score_ids", lambda self, rows: [0.5, math.nan])
    with pytest.raises(ModelError, match="no finite number for 1 of 2"):
        model.score_ids([[1], [2]])


# --- labels of judges ---------------------------------------------------------------------------------------------------

ROW = json.loads(shipped().read_text().splitlines()[0])


@pytest.mark.parametrize("verdict", ["OK", "rejected", None, True])
def test_a_label_is_ok_or_reject(verdict) -> None:
    with pytest.raises(ProblemDataError, match="neither ok nor reject"):
        parse("here", ROW | {"leakage": ROW["leakage"] | {"verdict": verdict}})


@pytest.mark.parametrize("turn", [-1, 99, "1"])
def test_a_cited_turn_is_a_turn(turn) -> None:
    label = {"verdict": "reject", "criterion": "answer_stated", "quote": "", "turn": turn}
    with pytest.raises(ProblemDataError, match="does not stand in tutor turn"):
        parse("here", ROW | {"leakage": label})


def test_an_id_stands_once(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    with pytest.raises(ProblemDataError, match="is there twice"):
        load_planted(tmp_path / "t.jsonl")


def test_unknown_is_no_rejection_of_a_clean_transcript() -> None:
    clean = [i for i in load_planted() if i.criterion == "clean"][:4]
    said = ["unknown", "ok", "ok", "reject"]
    judged = [
        jq.Judged(i, {"leakage": Verdict("leakage", d), "correctness": Verdict("correctness", "ok")})
        for i, d in zip(clean, said, strict=True)
    ]
    row = jq.by_criterion(judged)["clean"]
    assert (row["planted"], row["rejected"], row["unknown"], row["recall"]) == (4, 1, 1, pytest.approx(2 / 3))


def agreement(tmp_path: Path, *rows: dict, others=()) -> dict:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(shipped().read_text().splitlines(keepends=True)[:6]))
    human = tmp_path / "h.jsonl"
    human.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = run_judge(
        JudgeSpec(kind="rule"),
        "rule",
        tmp_path / "out",
        transcripts=few,
        human=human if rows else None,
        others=others,
    )
    return found.tables["agreement on leakage"]


def test_a_person_called_judge_does_not_replace_the_judge(tmp_path: Path) -> None:
    alone = agreement(tmp_path)["judge ~ labels"]
    rows = [{"id": ROW["id"], "gate": "leakage", "label": "ok", "rater": r} for r in ("judge", "labels")]
    table = agreement(tmp_path, *rows)
    assert table["judge ~ labels"] == alone and alone["items"] == 6
    assert table["judge ~ judge #2"]["items"] == table["labels ~ labels #2"]["items"] == 1


def test_labels_of_people_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    row = {"id": ROW["id"], "gate": "leakage", "label": "ok"}
    with pytest.raises(ProblemDataError, match="no transcript of the set has the id 'nope'"):
        agreement(tmp_path, row | {"id": "nope"})
    with pytest.raises(ProblemDataError, match="a second label of leakage"):
        agreement(tmp_path, row, row | {"label": "reject"})


def test_another_suite_is_no_judge(tmp_path: Path) -> None:
    result(tmp_path, "base")
    with pytest.raises(ProblemDataError, match="a result of 'environment'"):
        agreement(tmp_path, others=[tmp_path / "base" / "environment.json"])


def test_the_command_names_what_differs(tmp_path: Path) -> None:
    assert (
        "--allow-different" in CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "200"}).output
    )


def test_names_in_results_are_text(tmp_path: Path) -> None:
    found = SuiteResult("environment", "a|b <img>\n# x \ud800", {}, failed={"k": "why | <b>\nso"})
    found.tables = {"t": {"r|1": {"c|1": "v|\\|\n"}}}
    found.write(tmp_path)
    text = (tmp_path / "environment.md").read_text()
    assert "<img" not in text and "\n# x" not in text and "| r\\|1 | v\\|\\\\\\|  |" in text


@pytest.mark.parametrize(
    "extra,said",
    [
        (["votez=3"], "votez: Extra inputs are not permitted; did you mean 'votes'?"),
        (["--concurrency", "0"], "'--concurrency'"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_named(tmp_path: Path, extra: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["evaluate-judge", "rule", "--out", str(tmp_path), *extra])
    assert done.exit_code == 2 and said in done.output

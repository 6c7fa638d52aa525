"""Rescoring saved transcripts: what changes, what stays lost, and going on after a stop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rescore_parts
import training_parts as parts
from maieutic.cli import app
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, PostTest, RewardBreakdown, Verdict
from maieutic.errors import RecipeError, RunFolderError, TranscriptError
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.recipe import dump_recipe
from maieutic.rescore import rescore_run
from maieutic.transcripts import TranscriptWriter, read_episodes, read_transcripts

PAIR = ProblemPair(
    id="p", source=Problem(text="source", answer="7"), transfer=Problem(text="variant", answer="9")
)
RIGHT, WRONG = r"\boxed{9}", r"\boxed{8}"
JUDGE = ["judge.kind=rescore_parts:WordJudge", "judge.options={word: seven}"]


def episode(
    name: str,
    says: str,
    answers: list[str] | None,
    *,
    phase: Any = "train",
    leak: str = "ok",
    exclusion: str | None = None,
) -> Episode:
    turns = [Turn("student", "open", scripted=True), Turn("tutor", says, visible_tokens=5)]
    post = None if answers is None else PostTest("transfer", True, answers, ["wrong"] * len(answers))
    counted = exclusion is None
    return Episode(
        id=name,
        group_id="g",
        pair=PAIR,
        phase=phase,
        step=1,
        index=0,
        seed=3,
        student="s",
        dialogue=Dialogue(name, "source", turns=turns if says else turns[:1], end="max_turns"),
        pre=0.25,
        verdicts={
            "leakage": Verdict("leakage", leak, quote=says if leak == "reject" else "", turn=1),  # type: ignore[arg-type]
            "correctness": Verdict("correctness", "ok"),
        },
        post_test=post,
        reward=RewardBreakdown(-0.2 if leak == "reject" else 0.0, leak == "reject", 0.25, None, None)
        if counted
        else None,
        exclusion=exclusion,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose grader marked every answer wrong and whose judge rejected 'two'."""
    rescore_parts.asked.clear()
    rescore_parts.stop_after.clear()
    folder = tmp_path / "run"
    folder.mkdir()
    data = parts.recipe_dict(Path("m"), tmp_path, **{"reward": {}, "env.gates": "hard"})
    from maieutic.config import Recipe

    (folder / "recipe.yaml").write_text(dump_recipe(Recipe.model_validate_json(json.dumps(data))))
    train = [
        episode("one", "It is seven.", [RIGHT, WRONG, RIGHT, RIGHT]),
        episode("two", "Think of it.", None, leak="reject"),
        episode("three", "Add them.", [RIGHT, WRONG]),
        episode("four", "Add.", None, exclusion="unknown:leakage"),
        episode("five", "", None, exclusion="student_failed"),
        episode("six", "seven, then", None, exclusion="unknown:leakage"),
    ]
    writer = TranscriptWriter(folder, arm="dppo")
    writer.write("train", 1, train)
    writer.write("eval", 1, [episode("e", "Think.", [RIGHT], phase="eval", leak="reject")])
    return folder


def found(out: Path, phase: Any = None) -> dict[str, tuple[float | None, str | None]]:
    return {
        e.id: (None if e.reward is None else e.reward.reward, e.exclusion) for e in read_episodes(out, phase)
    }


def test_another_judge_and_todays_grader(run: Path, tmp_path: Path) -> None:
    before = {p.name: p.read_bytes() for p in (run / "transcripts").iterdir()}
    lines = rescore_run(run, tmp_path / "out", JUDGE)
    gain = (0.5 - 0.25) / 0.75
    assert found(tmp_path / "out", "train") == {
        "one": (-0.2, None),  # leaks now
        "two": (None, "untested"),  # accepted now, but there is no post-test to reward
        "three": (pytest.approx(gain), None),  # answers graded again
        "four": (None, "untested"),
        "five": (None, "student_failed"),  # nothing there to score
        "six": (-0.2, None),  # was unknown, is decided now
    }
    assert found(tmp_path / "out", "eval")["e"] == (pytest.approx(1.0), None)
    by_id = {e.id: e for e in read_episodes(tmp_path / "out")}
    assert by_id["three"].post_test.grades == ["right", "wrong"]
    assert by_id["one"].verdicts["leakage"].turn == 1
    table = json.loads((tmp_path / "out" / "comparison.json").read_text())["phases"]["train"]
    assert table["before"]["counted"] == 3 and table["after"]["counted"] == 3
    assert table["before"]["reward"] == pytest.approx(-0.2 / 3)
    assert table["after"]["reward"] == pytest.approx((gain - 0.4) / 3)
    assert table["counted_both_times"] == 2
    assert table["after"]["reward_of_those_counted_both_times"] == pytest.approx((gain - 0.2) / 2)
    assert table["after"]["excluded"] == {"untested": 2, "student_failed": 1}
    assert table["verdicts"]["leakage"] == {"ok -> ok": 2, "ok -> reject": 2, "reject -> ok": 1}
    assert (table["grades_changed"], table["grades"]) == (4, 6)
    assert "| excluded: untested | 0 | 2 |" in lines
    assert {p.name: p.read_bytes() for p in (run / "transcripts").iterdir()} == before
    raw = {line["id"]: line for line in read_transcripts(tmp_path / "out")}
    assert raw["one"]["rescored_from"] == {"reward": 0.0, "exclusion": None} and raw["one"]["arm"] == "dppo"


def test_another_reward_and_grader_with_the_saved_verdicts(run: Path, tmp_path: Path) -> None:
    rescore_run(
        run,
        tmp_path / "out",
        [*JUDGE, "reward.kind=rescore_parts:twice", "env.gates=off"],
        phase="eval",
        grader_check="rescore_parts:always",
        keep_verdicts=True,
    )
    assert found(tmp_path / "out") == {"e": (2.0, None)}
    assert rescore_parts.asked == []


def test_kept_verdicts_are_asked_only_where_they_were_unknown(run: Path, tmp_path: Path) -> None:
    for line in (run / "transcripts" / "train-step-000001.jsonl").read_text().splitlines():
        assert json.loads(line)["verdicts"]["leakage"]["decision"] != "unknown"
    path = run / "transcripts" / "train-step-000001.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    lines[3]["verdicts"]["leakage"]["decision"] = lines[5]["verdicts"]["leakage"]["decision"] = "unknown"
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    rescore_run(run, tmp_path / "out", JUDGE, phase="train", keep_verdicts=True)
    assert sorted(rescore_parts.asked) == [("four", "leakage"), ("six", "leakage")]
    assert found(tmp_path / "out")["two"] == (-0.2, None)


def test_an_unknown_verdict_stays_excluded(run: Path, tmp_path: Path) -> None:
    rescore_run(run, tmp_path / "out", [JUDGE[0], "judge.options={word: x, unsure: Add them}"])
    assert found(tmp_path / "out")["three"] == (None, "unknown:leakage")


def test_it_goes_on_where_it_was_stopped(run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    rescore_run(run, whole, JUDGE)
    total = len(rescore_parts.asked)
    rescore_parts.asked.clear()
    rescore_parts.stop_after.append(7)
    with pytest.raises(asyncio.CancelledError):
        rescore_run(run, tmp_path / "out", JUDGE, concurrency=1)
    (part,) = (tmp_path / "out" / "transcripts").glob("*.part")
    with part.open("a") as file:
        file.write('{"number": 5, "li')  # a kill in the middle of a line
    first = list(rescore_parts.asked)
    rescore_parts.stop_after.clear()
    rescore_run(run, tmp_path / "out", JUDGE)
    # Only the episode that was under way is judged a second time.
    repeated = [q for q in set(rescore_parts.asked) if rescore_parts.asked.count(q) > 1]
    assert len(rescore_parts.asked) == total + len(repeated) and len(repeated) <= 1 < len(first)
    for name in ("train-step-000001.jsonl", "eval-step-000001.jsonl"):
        a, b = ((f / "transcripts" / name).read_text() for f in (whole, tmp_path / "out"))
        assert a == b
    assert not list((tmp_path / "out" / "transcripts").glob("*.part"))
    with pytest.raises(RunFolderError, match="other settings"):
        rescore_run(run, tmp_path / "out", [JUDGE[0], "judge.options={word: Add}"])


def test_what_cannot_be_rescored(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no recipe\.yaml"):
        rescore_run(tmp_path, tmp_path / "out", [])
    with pytest.raises(TranscriptError, match="phase 'evil'"):
        rescore_run(run, tmp_path / "out", [], phase="evil")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match="not empty"):
        rescore_run(run, tmp_path / "mine", [])
    with pytest.raises(RecipeError, match="env.kind"):
        rescore_run(run, tmp_path / "out", ["env.kind=m:C"])


def test_the_command(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["rescore", str(run), *JUDGE, "--out", str(out), "--phase", "eval"])
    assert result.exit_code == 0 and "## eval: 1 episodes" in result.stdout
    assert (out / "comparison.md").read_text().strip() == result.stdout.strip()
    result = CliRunner().invoke(app, ["rescore", str(tmp_path / "nowhere"), "--out", str(out)])
    assert result.exit_code == 1 and "RunFolderError" in result.stderr

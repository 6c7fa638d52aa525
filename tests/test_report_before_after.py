"""Before and after on the same problem: who is shown, the intervals, and the stored ablations of the micro-classroom."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from episodes import RECIPE, write_record, write_run
from maieutic.micro import stored
from maieutic.report import write_report
from maieutic.report.ablations import ablations_html
from maieutic.report.before_after import differences, pairs
from maieutic.report.run_data import RunData
from maieutic.transcripts import read_transcripts
from test_micro_science import result


def line(problem: str, reward: float | None, *, index: int = 0, leak: bool = False) -> dict[str, Any]:
    """A transcript line with the fields that a comparison reads."""
    counts = reward is not None
    return {
        "id": f"{problem}-{index}-{reward}",
        "index": index,
        "pair": {"id": problem, "source": None, "transfer": None},
        "dialogue": {"turns": [], "end": "max_turns"},
        "verdicts": {"leakage": {"decision": "reject" if leak else "ok"}},
        "post_test": {"problem": "transfer"},
        "reward": {
            "reward": reward,
            "gain": reward,
            **{k: 0.5 for k in ("pre", "post", "decay_visible", "decay_thinking")},
        }
        if counts
        else None,
        "exclusion": None if counts else "student_failed",
    }


def test_the_pairs_are_chosen_by_the_change_of_reward() -> None:
    changes = {"a": 0.1, "b": -0.3, "c": 0.9, "d": 0.2, "e": 0.0}
    first = [line(p, 0.1) for p in changes] + [line("gone", 0.0), line("lost", 0.0)]
    last = [line(p, 0.1 + c) for p, c in changes.items()] + [line("new", 1.0), line("lost", None)]
    last.insert(0, line("c", -1.0, index=1))  # a second episode on a problem is not taken
    chosen = pairs(first, last)
    assert [(p.title, p.before["pair"]["id"], round(p.change, 6)) for p in chosen] == [
        ("Largest rise", "c", 0.9),
        ("Median change", "a", 0.1),
        ("Largest fall", "b", -0.3),
    ]
    assert [p.title for p in pairs(first[:1], last)] == ["Largest rise"]
    assert pairs([line("x", 0.0)], [line("y", 0.0)]) == []


def test_differences_are_paired_by_problem() -> None:
    # Every problem gains 0.3, from very different levels: unpaired, the interval would be wide.
    first = [line(f"p{i}", i / 20, leak=True) for i in range(12)]
    last = [line(f"p{i}", i / 20 + 0.3, leak=i < 3) for i in reversed(range(12))]
    found = differences(first, last)
    gain = found["transfer_gain"]
    assert gain.pairs == 12
    assert [gain.value, gain.low, gain.high] == pytest.approx([0.3] * 3)
    leak = found["leak_rate"]
    assert leak.value == pytest.approx(-0.75) and leak.low is not None and leak.high is not None
    assert -1 <= leak.low < -0.75 < leak.high < -0.4
    assert differences(first[:9], last)["transfer_gain"].low is None, "too few problems for an interval"


def test_the_report_shows_pairs_and_intervals(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=(0, 4), problems=10, samples=2)
    write_record(tmp_path / "run")
    html = write_report(tmp_path / "run").read_text()
    section = html[html.index('<section id="before-after">') : html.index('<section id="episodes">')]
    shown = re.findall(r"data-problem='([^']*)'", section)
    columns = re.findall(r"data-line='([^']*)'", section)
    assert 1 <= len(shown) <= 3 and len(columns) == 2 * len(shown)
    steps = [re.match(r"eval-(\d+)-(p-\d+)-0", name) for name in columns]
    assert [m and int(m[1]) for m in steps] == [0, 4] * len(shown)
    assert [m and m[2] for m in steps] == [p for p in shown for _ in range(2)]
    first, last = (list(read_transcripts(tmp_path / "run", "eval", [s])) for s in (0, 4))
    gain = differences(first, last)["transfer_gain"]
    assert f'data-low="{gain.low!r}" data-high="{gain.high!r}"' in html
    assert 'id="ablations"' not in html, "another environment has no stored ablations"


# ---- stored results --------------------------------------------------------------------------------------------------


def micro_run() -> RunData:
    recipe = yaml.safe_load(RECIPE.format(name="x", arm="dppo", steps=1).replace("near_transfer", "micro"))
    return RunData(Path("x"), recipe=recipe)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stored, "stored_file", lambda: tmp_path / "science.json")
    return tmp_path / "science.json"


def results(folder: Path) -> list[Path]:
    out = []
    for arm, leak in (("full", 0.0), ("no-gates", 0.9)):
        for seed in (101, 102):
            path = folder / f"{arm}-{seed}.json"
            path.write_text(json.dumps(result(arm, seed, masked=0.6, own=0.7, leak=leak)))
            out.append(path)
    return out


def test_without_stored_results_the_report_says_so(file: Path) -> None:
    assert "No results of the arms are stored" in ablations_html(micro_run())
    file.write_text('{"schema": 1, "arms"')
    assert "cannot be read" in ablations_html(micro_run())
    file.write_text('{"schema": 99}')
    assert "schema 99" in ablations_html(micro_run())


def test_stored_results_come_back_and_are_drawn(file: Path, tmp_path: Path) -> None:
    assert stored.main([str(tmp_path)]) == 0 if results(tmp_path) else False
    found, remark = stored.load_stored()
    assert found is not None and remark == ""
    assert [(a.name, a.seeds) for a in found.arms] == [("full", (101, 102)), ("no-gates", (101, 102))]
    assert found.arms[0].leak == (0.0, 0.0, 0.0) and found.arms[1].leak[0] == pytest.approx(0.9, abs=0.03)
    assert found.arms[0].masked[0] == pytest.approx(0.6, abs=0.05)
    html = ablations_html(micro_run())
    assert "<svg" in html and html.count("<circle") == 3 + 2 * 3
    assert html.count("holds</span>") == 3 and "not tested" in html
    assert "another build" not in html
    data = json.loads(file.read_text())
    data["weights"]["student"] = "0" * 64
    file.write_text(json.dumps(data))
    assert "another build" in ablations_html(micro_run())


def test_results_with_overrides_are_not_stored(file: Path, tmp_path: Path) -> None:
    made = result("full", 101, masked=0.6, own=0.6, leak=0.0)
    made["setting"]["overrides"] = ["training.max_steps=2"]
    (tmp_path / "full-101.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"training\.max_steps=2"):
        stored.summarise([tmp_path / "full-101.json"])
    assert not file.exists()


def test_view_writes_the_viewer(tmp_path: Path) -> None:
    from maieutic.cli import app

    write_run(tmp_path / "run", steps=(0, 4), problems=3)
    done = CliRunner().invoke(app, ["view", str(tmp_path / "run"), "--phase", "eval", "--step", "4"])
    assert done.exit_code == 0 and done.output.strip() == str(tmp_path / "run" / "viewer.html")
    page = (tmp_path / "run" / "viewer.html").read_text()
    assert page.count("eval-000004-p-00") >= 3 and "eval-000000" not in page
    assert CliRunner().invoke(app, ["view", str(tmp_path / "none")]).exit_code == 1

"""`make bench`: lines of the benchmarks in, the table of docs/performance.md out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

import bench  # noqa: E402
from support.outcome import Figure, Outcome, check  # noqa: E402

MACHINE = {"cpus": 2, "threads": 2, "python": "3.11.7", "torch": "2.13.0", "load": 1.5}


def result(*figures: Figure, capsys: pytest.CaptureFixture[str]) -> dict:
    Outcome("some", list(figures), {"tokens": 7}).emit()
    return bench.last_line(capsys.readouterr().out)


def test_a_line_says_median_spread_and_whether_the_target_is_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = result(
        Figure("1", "CPU a turn", "", "ms", [1.75, 1.25, 1.43213], "<= 1.5"),
        Figure("2", "efficiency", "replay", "ratio", [0.9, 0.96, 0.94], ">= 0.95"),
        Figure("9", "bytes", "", "MiB", [3.0]),
        capsys=capsys,
    )
    assert [f["median"] for f in line["figures"]] == [1.432, 0.94, 3.0]
    assert [f["met"] for f in line["figures"]] == [True, False, None]
    assert line["figures"][0]["runs"] == [1.75, 1.25, 1.432]
    assert line["checks"] == {"tokens": 7}


def test_the_table_is_in_the_order_of_its_rows_and_names_what_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    a = result(
        Figure("10", "growth", "least", "ratio", [1.1], "<= 1.15"),
        Figure("2", "efficiency", "replay", "ratio", [0.9], ">= 0.95"),
        Figure("1b", "lag", "", "ms", [12.0], "<= 20"),
        capsys=capsys,
    )
    assert bench.table({"c": {"figures": []}}).endswith("`c` gave no figure: its line holds none.")
    text = bench.table({"a": a, "b": {"benchmark": "b", "failed": "exit status 1"}})
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]
    assert rows == ["1b", "2", "10"]
    assert "| 2 | efficiency | replay | ≥ 0.95 | 0.9 | 0.9 | **no** |" in text
    assert "| 1b | lag |  | ≤ 20 | 12 ms | 12 | yes |" in text
    assert text.endswith("`b` gave no figure: exit status 1.")


def test_the_document_keeps_its_text_around_the_table() -> None:
    before = f"# Title\n\n{bench.BEGIN}\nold\n{bench.END}\n\ntail\n"
    after = bench.put(before, {"x": {"figures": [], "failed": "left out", "machine": MACHINE}})
    assert after.startswith("# Title\n") and after.endswith("\ntail\n") and "old" not in after
    assert "2 CPU cores, Python 3.11.7" in after
    assert bench.put(after, {"x": {"figures": [], "failed": "left out", "machine": MACHINE}}) == after
    with pytest.raises(ValueError, match="markers"):
        bench.put("no markers", {})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('print(\'{"benchmark": "x"}\'); raise SystemExit(3)', "exit status 3"),
        ("print('no json')", "Expecting value"),
        ("print('[1]')", "does not end with a JSON line"),
        ("pass", "does not end with a JSON line"),
    ],
)
def test_a_script_without_a_figure_is_a_failure(
    body: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "x.py").write_text(body)
    got = bench.run(bench.Script("x", ("1",), 1), [])
    assert why in got["failed"] and "figures" not in got


def test_one_failing_script_leaves_the_others_standing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()
    figure = {"row": "1", "measure": "m", "against": "", "unit": "s", "runs": [2.0], "median": 2.0}
    figure |= {"met": None, "target": None}
    line = json.dumps({"benchmark": "good", "figures": [figure], "machine": MACHINE})
    (tmp_path / "benchmarks" / "good.py").write_text(
        f"import sys; assert sys.argv[1:] == ['--runs', '2']; print({line!r})"
    )
    (tmp_path / "benchmarks" / "bad.py").write_text("raise SystemExit('wrong result')")
    docs, keep = tmp_path / "p.md", tmp_path / "r.json"
    docs.write_text(f"{bench.BEGIN}{bench.END}")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "TABLE", (bench.Script("bad", ("2",), 1), bench.Script("good", ("1",), 1)))
    arguments = ["bench.py", "--runs", "2", "--keep", str(keep), "--docs", str(docs)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert bench.main() == 1
    assert "| 1 | m |  |  | 2 s | 2 |  |" in docs.read_text()
    assert "`bad` gave no figure: exit status 1." in docs.read_text()
    (tmp_path / "benchmarks" / "bad.py").write_text(f"print({line!r})")
    monkeypatch.setattr(sys, "argv", [*arguments, "--only", "bad"])
    assert bench.main() == 0
    assert list(json.loads(keep.read_text())) == ["bad", "good"]
    assert "gave no figure" not in docs.read_text()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit, match="no such benchmark; there are harness"):
        bench.chosen(["harnes"], others=False, vllm=True)


def test_a_failed_check_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="wrong result, so no figure: tokens differ"):
        check(False, "tokens differ")
    check(True, "tokens differ")


def test_the_documented_table_is_that_of_the_kept_results() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    document = (ROOT / "docs" / "performance.md").read_text()
    assert bench.put(document, kept) == document, "run make bench, or scripts/bench.py --only NAME"
    assert list(kept) == [s.name for s in bench.TABLE]
    rows = {f["row"].rstrip("abcdefgh") for r in kept.values() for f in r["figures"]}
    assert rows == {row for s in bench.TABLE for row in s.rows} == {str(n) for n in range(1, 11)}
    assert all(len(f["runs"]) >= 3 for r in kept.values() for f in r["figures"] if f["target"])
    assert all(s.path.exists() for s in (*bench.TABLE, *bench.OTHERS))

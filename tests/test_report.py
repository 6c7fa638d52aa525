"""The report of a run: its numbers are those of the record, gaps stay gaps, and no text of a model becomes markup."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from episodes import make_episode, write_record, write_run
from maieutic.env.base import Episode
from maieutic.errors import RunFolderError, TranscriptError
from maieutic.report import terminal_table, write_report, write_viewer
from maieutic.report.before_after import differences
from maieutic.report.html_report import curves
from maieutic.report.measures import written
from maieutic.report.page import asset, embed_json, esc, fill, policy
from maieutic.report.run_data import load_run
from maieutic.report.summary import notable, summarise
from maieutic.report.svg import Series, line_plot, runs_of, tick_text, ticks
from maieutic.report.viewer import viewer_data
from maieutic.transcripts import TranscriptWriter, episode_to_json, read_transcripts


class Page(HTMLParser):
    """Elements, table values by (measure, step), and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.values: dict[tuple[str, int], float] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if "data-value" in found:
            self.values[str(found["data-name"]), int(str(found["data-step"]))] = float(
                str(found["data-value"])
            )

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[Episode]]:
    """A finished run of 4 steps with an evaluation before and after."""
    episodes = write_run(tmp_path / "run", steps=(0, 4), problems=10, samples=2)
    write_record(tmp_path / "run")
    return tmp_path / "run", episodes


def recomputed(episodes: list[Episode]) -> dict[str, float]:
    """The table's numbers from the episodes themselves, written independently of the report's code."""
    kept = [e for e in episodes if e.exclusion is None]
    tutor = [t for e in episodes for t in e.dialogue.turns if t.speaker == "tutor"]
    out = {
        "reward": math.fsum(e.reward.reward for e in kept) / len(kept),
        "transfer_gain": math.fsum(e.reward.gain for e in kept) / len(kept),
        "pre": math.fsum(e.reward.pre for e in kept) / len(kept),
        "post": math.fsum(e.post_test.rate for e in kept) / len(kept),
        "unknown_share": 1 - len(kept) / len(episodes),
        "excluded_share": 1 - len(kept) / len(episodes),
        "turns": sum(len(e.dialogue.turns) for e in episodes) / len(episodes),
        "blank_turn_rate": sum(t.visible == "" for t in tutor) / len(tutor),
        "truncated_turn_share": sum(t.truncated for t in tutor) / len(tutor),
        "visible_tokens_per_turn": sum(t.visible_tokens for t in tutor) / len(tutor),
        "thinking_tokens_per_turn": sum(t.thinking_tokens for t in tutor) / len(tutor),
        "episodes": len(episodes),
    }
    for gate, name in (("leakage", "leak_rate"), ("correctness", "correctness_reject_rate")):
        decided = [e.verdicts[gate].decision for e in episodes if e.verdicts[gate].decision != "unknown"]
        out[name] = decided.count("reject") / len(decided)
    return out


def test_the_numbers_are_those_of_the_transcripts(run: tuple[Path, list[Episode]]) -> None:
    path, episodes = run
    page = Page(write_report(path).read_text())
    for step in (0, 4):
        expected = recomputed([e for e in episodes if e.step == step])
        shown = {name: v for (name, at), v in page.values.items() if at == step}
        assert shown == pytest.approx(expected, rel=1e-12)
    assert len({v for (name, _), v in page.values.items() if name == "reward"}) == 2
    assert "Finished: 4 of 4 steps." in page.text


def test_differences_point_the_right_way(run: tuple[Path, list[Episode]]) -> None:
    path, episodes = run
    html = write_report(path).read_text()
    before, after = (recomputed([e for e in episodes if e.step == s]) for s in (0, 4))
    assert after["transfer_gain"] > before["transfer_gain"] and after["leak_rate"] < before["leak_rate"]
    found = differences(*(list(read_transcripts(path, "eval", [s])) for s in (0, 4)))

    def cell(name: str, text: str) -> str:
        low, high = found[name].low, found[name].high
        assert low is not None and high is not None
        return f"<td>{text}</td>" if low <= 0 <= high else f'<td class="better">{text}</td>'

    gain = cell("transfer_gain", f"+{after['transfer_gain'] - before['transfer_gain']:.3f}")
    leak = cell("leak_rate", f"−{100 * (before['leak_rate'] - after['leak_rate']):.1f} pts")
    assert gain in html and leak in html
    assert 'class="better"' in gain and 'class="better"' not in leak, "one of each, or nothing is tested"


def test_the_summary_of_a_small_hand_computed_set() -> None:
    lines = [
        episode_to_json(e)
        for e in (
            make_episode(number=0, leak=True, unknown=False),
            make_episode(number=1, leak=False, unknown=False),
            make_episode(number=2, leak=False, unknown=True),
        )
    ]
    lines[0]["reward"] |= {"reward": -0.2, "gain": None, "post": None}
    lines[0]["post_test"] = None
    lines[1]["verdicts"]["correctness"]["decision"] = "reject"
    lines[1]["reward"] |= {"reward": 0.5, "gain": 0.6, "pre": 0.25, "post": 0.7}
    turns = [
        {"speaker": "student", "visible": "q", "scripted": True, "truncated": False, "well_formed": True}
    ]
    turns += [
        {"speaker": "tutor", "visible": v, "truncated": c, "well_formed": True}
        for v, c in [("a", True), (" ", False)]
    ]
    for line in lines:
        line["dialogue"]["turns"] = [t | {"visible_tokens": 4, "thinking_tokens": 2} for t in turns]
    out = summarise(lines)
    assert out["reward"] == pytest.approx((0.5 - 0.2) / 2)
    assert out["transfer_gain"] == 0.6 and out["post"] == 0.7 and out["pre"] == 0.25
    assert out["leak_rate"] == pytest.approx(1 / 3) and out["correctness_reject_rate"] == 0.5
    assert out["unknown_share"] == out["excluded_share"] == pytest.approx(1 / 3)
    assert out["blank_turn_rate"] == out["truncated_turn_share"] == 0.5
    assert out["turns"] == 3 and out["tutor_turns"] == 2 and out["visible_tokens_per_turn"] == 4
    assert "same_gain" not in out and "student_tokens_per_turn" not in out
    assert summarise([]) == {}


def test_the_summary_agrees_with_the_trainers_numbers() -> None:
    rollout = pytest.importorskip("maieutic.rollout", reason="the rollout is not part of this checkout")
    episodes = [make_episode(number=n, index=i) for n in range(12) for i in range(2)]
    ours = summarise([episode_to_json(e) for e in episodes])
    theirs = rollout._gain_metrics(episodes) | rollout._turn_metrics(episodes)
    assert len(theirs) > 8
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-12)


def test_best_median_and_worst(run: tuple[Path, list[Episode]]) -> None:
    path, episodes = run
    page = Page(write_report(path).read_text())
    shown = [a["data-episode"] for tag, a in page.tags if "data-episode" in a]
    ranked = sorted((e for e in episodes if e.step == 4 and e.counted), key=lambda e: (e.reward.reward, e.id))
    assert shown == [ranked[-1].id, ranked[(len(ranked) - 1) // 2].id, ranked[0].id]
    assert notable([]) == []
    one = episode_to_json(make_episode(unknown=False))
    assert [title for title, _ in notable([one])] == ["Best"]
    assert notable([episode_to_json(make_episode(unknown=True))]) == []


def test_the_page_needs_nothing_from_elsewhere(run: tuple[Path, list[Episode]]) -> None:
    html = write_report(run[0]).read_text()
    page = Page(html)
    assert not [
        a for tag, a in page.tags if tag in ("script", "link", "img", "iframe") or "src" in a or "href" in a
    ]
    meta = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", html, re.S)
    assert style is not None and meta == policy(style[1])
    assert str(meta).startswith("default-src 'none'; style-src 'sha256-") and "http" not in str(meta)
    assert not re.search(r"url\(|@import", html)


def test_an_empty_folder_and_one_without_steps(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path).read_text())
    assert "No training step is complete yet." in page.text and "There is no recipe.yaml" in page.text
    assert page.values == {} and "There is nothing to plot yet" in page.text
    write_record(tmp_path / "run", steps=0)
    page = Page(write_report(tmp_path / "run").read_text())
    assert "No training step is complete yet." in page.text and "There are no episodes yet." in page.text
    with pytest.raises(RunFolderError, match="there is no run folder"):
        write_report(tmp_path / "nothing")


def test_a_killed_run_says_so_and_shows_what_there_is(tmp_path: Path) -> None:
    episodes = write_run(tmp_path, steps=(0,))
    write_record(tmp_path, steps=3, planned=9)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"train/step": 4, "train/lo')
    page = Page(write_report(tmp_path).read_text())
    assert "Not finished: 3 of 9 steps are complete (still running, stopped or killed)." in page.text
    assert "metrics.jsonl, line 5 is cut or broken" in page.text
    assert page.values["reward", 0] == pytest.approx(recomputed(episodes)["reward"])
    assert "Difference" not in page.text


def test_without_transcripts_the_metrics_speak_and_it_is_said(run: tuple[Path, list[Episode]]) -> None:
    path, episodes = run
    for file in (path / "transcripts").iterdir():
        file.unlink()
    page = Page(write_report(path).read_text())
    assert "Step 4 (eval) has no readable transcripts: its numbers are from metrics.jsonl." in page.text
    assert page.values["reward", 4] == pytest.approx(
        recomputed([e for e in episodes if e.step == 4])["reward"]
    )
    assert "The last point has no transcripts." in page.text


def test_a_broken_transcript_and_a_disagreement_are_noticed(run: tuple[Path, list[Episode]]) -> None:
    path, _ = run
    with open(path / "transcripts" / "eval-step-000000.jsonl", "a") as file:
        file.write("{")
    text = (path / "metrics.jsonl").read_text().splitlines()
    last = json.loads(text[-1]) | {"eval/reward": 0.99}
    (path / "metrics.jsonl").write_text("\n".join([*text[:-1], json.dumps(last)]))
    notices = load_run(path).notices
    assert any("eval-step-000000.jsonl, line 21: not a line of JSON" in n for n in notices)
    assert any(re.search(r"reward is .* in the transcripts, but 0\.99 in metrics", n) for n in notices)
    with pytest.raises(TranscriptError, match="line 21"):
        write_viewer([path], path / "view.html")


def test_a_report_is_written_whatever_stands_in_the_files(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "name: [1]\nstudents: 3\ntutor: null\nenv: x\ntraining: {max_steps: x}\n"
    )
    rows = [
        '{"train/step": 1, "rollout/reward": 1e308}',
        '{"train/step": 2, "rollout/reward": -1e308}',
        '{"train/step": 3, "rollout/reward": ' + "9" * 400 + "}",
        '{"train/step": 1e999, "rollout/reward": 1}',
        '{"train/step": 4, "rollout/reward": 0.5, "train/loss": "x"}',
        "null",
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    (tmp_path / "transcripts").mkdir()
    (tmp_path / "transcripts" / "train-step-000004.jsonl").write_text('{"schema": 1}\n')
    data = load_run(tmp_path)
    assert [(step, row["rollout/reward"]) for step, row in data.rows] == [
        (1, None),
        (2, None),
        (3, None),
        (4, 0.5),
    ]
    assert any("line 4 is cut or broken" in n for n in data.notices)
    assert any("step 4 (train): a line is no episode" in n for n in data.notices)
    assert data.last is not None and data.last.values == {"reward": 0.5}
    assert "line 4 is cut or broken" in write_report(tmp_path).read_text()


def test_training_steps_stand_in_where_there_is_no_evaluation(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path, arm="grpo")
    for step in (1, 2, 3):
        writer.write("train", step, [make_episode(number=n, step=step, phase="train") for n in range(4)])
    data = load_run(tmp_path)
    assert data.first is not None and data.last is not None
    assert (data.first.phase, data.first.step, data.last.step) == ("train", 1, 3)
    assert data.last.title == "training, step 3"


def test_a_step_axis_named_step_is_read_too(tmp_path: Path) -> None:
    rows = [{"step": 2, "time": 1.0, "train/loss": 0.5}, {"step": 1, "time": 0.0, "train/loss": math.nan}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    data = load_run(tmp_path)
    assert data.rows == [(1, {"train/loss": None}), (2, {"train/loss": 0.5})] and data.steps_done == 2


def test_the_evaluation_after_a_step_is_not_a_step(tmp_path: Path) -> None:
    rows = [
        {"train/step": 0, "eval/reward": 0.1, "time/eval": 2.0},
        {"train/step": 1, "train/loss": 0.0, "eval/reward": 0.2},
    ]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]))
    assert load_run(tmp_path).steps_done == 0
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    assert load_run(tmp_path).steps_done == 1


def test_curves_keep_gaps_and_share_a_plot(run: tuple[Path, list[Episode]]) -> None:
    path, episodes = run
    found = curves(load_run(path))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert found["train/loss"][0].points == [
        (r["train/step"], r["train/loss"]) for r in rows if "train/loss" in r
    ]
    assert found["train/loss"][0].points[1] == (2, None)
    training, held_out = found["reward"]
    assert (training.label, held_out.label) == ("training", "held out")
    assert [x for x, _ in training.points] == [1, 2, 3, 4] and [x for x, _ in held_out.points] == [0, 4]
    assert held_out.points[1][1] == pytest.approx(recomputed([e for e in episodes if e.step == 4])["reward"])


def test_a_gap_is_never_drawn_as_zero() -> None:
    points = [(1, 1.0), (2, None), (3, math.nan), (4, 3.0), (5, 2.0)]
    assert runs_of(points) == [[(1, 1.0)], [(4, 3.0), (5, 2.0)]]
    svg = line_plot("x", [Series("a", points)])
    assert svg.count("<circle") == 3 and svg.count("<polyline") == 1
    low = max(float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', svg))
    one = float(re.findall(r"cy=\"([\d.]+)\" r=\"2.6\"><title>a, step 1: 1<", svg)[0])
    assert low == one  # the lowest mark is the value 1, no mark is below it
    assert "no values" in line_plot("x", [Series("a", [(1, None)])])


def test_every_line_of_one_plot_looks_different() -> None:
    lines = [Series(f"arm {i}", [(0, 0.0), (1, float(i))], i) for i in range(1, 17)]
    assert [s.classes for s in lines[:6]] == ["s1", "s2", "s3", "s4", "s1 d1", "s2 d1"]
    assert len({s.classes for s in lines}) == 16
    svg = line_plot("x", lines)
    assert all(f'<g class="{s.classes}">' in svg for s in lines)
    style = asset("report.css")
    assert all(
        f".plot .{dash} polyline" in style and f".legend .{dash}::before" in style
        for dash in ("d1", "d2", "d3")
    )


def test_points_stand_where_the_axes_say() -> None:
    svg = line_plot("t <b>", [Series("</title>", [(0, 0.0), (10, 10.0)], 2)])
    grid = {int(t): float(y) for y, t in re.findall(r'y="([\d.]+)" text-anchor="end">(\d+)<', svg)}
    marks = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert float(marks[0][1]) == grid[0] - 4 and float(marks[1][1]) == grid[10] - 4
    assert float(marks[0][0]) < float(marks[1][0]) and '<g class="s2">' in svg
    assert "t &lt;b&gt;" in svg and "&lt;/title&gt;" in svg


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.5, 1.0]),
        (0, 10, [0, 5, 10]),
        (-0.2, 0.83, [-0.5, 0, 0.5, 1.0]),
        (0, 0, [0, 0.5, 1.0]),
        (3, 17, [0, 5, 10, 15, 20]),
    ],
)
def test_ticks_are_round_and_cover(low: float, high: float, expected: list[float]) -> None:
    found = ticks(low, high)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(5.0, 5.0), (-3e-7, -1e-7), (1e6, 9e6), (-1.0, -1.0)])
def test_ticks_of_odd_ranges(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 8 and found[0] <= low and found[-1] >= high
    labels = [tick_text(t, found[1] - found[0]) for t in found]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("reward", 0.5, "+0.500"),
        ("reward", -0.0001, "0.000"),
        ("leak_rate", 0.125, "12.5 %"),
        ("turns", 7.0, "7"),
        ("episodes", 1024, "1024"),
        ("visible_tokens_per_turn", 31.25, "31.2"),
        ("time/step", 2.0, "2.0 s"),
        ("unheard/of", 0.00001234, "1.234e-05"),
        ("reward", None, "–"),
        ("reward", math.nan, "–"),
    ],
)
def test_numbers_as_written(name: str, value: float | None, text: str) -> None:
    assert written(name, value) == text


HOSTILE = "</script ><script>alert(1)</script><img src=x onerror=alert(1)> &amp; ' \" {{style}} \u202e\x00\ud800 </title>"


def test_no_text_of_the_data_becomes_markup(tmp_path: Path) -> None:
    episodes = [make_episode(number=n, leak=True, unknown=False) for n in range(3)]
    for e in episodes:
        e.id = e.group_id = f"{e.index}{e.pair.id}{HOSTILE}"
        first = e.dialogue.turns[1]
        e.dialogue.turns[1] = type(first)("tutor", HOSTILE, thinking=HOSTILE, note=HOSTILE)
        verdict = e.verdicts["leakage"]
        e.verdicts[HOSTILE] = type(verdict)("leakage", "reject", HOSTILE, HOSTILE, 1, HOSTILE)
        e.post_test.answers[0] = HOSTILE
    TranscriptWriter(tmp_path).write("eval", 0, episodes)
    (tmp_path / "recipe.yaml").write_text(
        json.dumps({"name": HOSTILE.replace("\ud800", ""), "arm": "</dd><script>"})
    )
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"train/step": 1, "train/<script>alert(2)</script>": 1.0}) + "\n<b>"
    )
    html = write_report(tmp_path).read_text()
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.tags} and "img" not in {tag for tag, _ in page.tags}
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    shown = HOSTILE.replace("\u202e", "[U+202E]").replace("\x00", "[U+0000]").replace("\ud800", "[U+D800]")
    assert page.text.count(shown) >= 6


def test_embedding_keeps_the_data_and_ends_no_element() -> None:
    data = {HOSTILE: [HOSTILE, 1, None, "\u2028<!--<script "]}
    text = embed_json(data)
    assert text.isascii() and not set("<>&") & set(text) and json.loads(text) == data
    with pytest.raises(ValueError, match="JSON compliant"):
        embed_json(math.nan)
    assert fill("{{a}}-{{b}}", a="{{b}}", b="{{a}}") == "{{b}}-{{a}}"
    assert esc("<a\u200b'\n\t") == "&lt;a[U+200B]&#x27;\n\t"


def test_the_viewers_data_names_every_episode_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, arm="dppo", steps=(0,), problems=3)
    changed = make_episode(number=0, index=7)
    changed.pair = changed.pair.model_copy(update={"transfer": None})
    TranscriptWriter(tmp_path / "b", arm="other").write("train", 1, [changed, changed])
    data: dict[str, Any] = viewer_data([tmp_path / "a", tmp_path / "b"])
    keys = [e["key"] for e in data["episodes"]]
    assert len(set(keys)) == len(keys) == 8
    assert keys[0] == "a/eval-000000-p-000-0" and keys[-1] == f"b/{changed.id}~2"
    assert [r["arm"] for r in data["runs"]] == ["dppo (a)", "dppo (b)"]
    assert {e["arm"] for e in data["episodes"]} == {"dppo (a)", "dppo (b)", "other"}
    assert set(data["pairs"]) == {"p-000", "p-001", "p-002", "p-000~2"}
    assert data["episodes"][-1]["pair"] == "p-000~2" and data["pairs"]["p-000~2"]["transfer"] is None
    assert all("tokens" not in e and isinstance(e["seed"], str) for e in data["episodes"])
    assert len(viewer_data([tmp_path / "b"], phase="train")["episodes"]) == 2
    assert viewer_data([tmp_path / "b"], steps=[9])["episodes"] == []
    with pytest.raises(RunFolderError, match="there is no run folder"):
        write_viewer([tmp_path / "c"], tmp_path / "view.html")


def test_a_page_that_cannot_be_written_is_a_named_error(run: tuple[Path, list[Episode]]) -> None:
    path, _ = run
    (path / "report.html").mkdir()
    with pytest.raises(RunFolderError, match=r"cannot write .*report\.html"):
        write_report(path)
    assert not list(path.glob(".report*"))


def test_the_terminal_table(run: tuple[Path, list[Episode]], tmp_path: Path) -> None:
    path, episodes = run
    console = Console(width=120, record=True, file=open(tmp_path / "out.txt", "w"))  # noqa: SIM115
    console.print(terminal_table(path))
    text = console.export_text()
    before, after = (recomputed([e for e in episodes if e.step == s])["leak_rate"] for s in (0, 4))
    row = next(line for line in text.splitlines() if "Leakage rejected" in line)
    assert re.findall(r"−?[\d.]+ (?:%|pts)", row) == [
        f"{100 * before:.1f} %", f"{100 * after:.1f} %", f"−{100 * (before - after):.1f} pts",
    ]  # fmt: skip
    assert "Finished: 4 of 4 steps." in text

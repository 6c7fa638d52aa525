"""Human annotation: what people are shown, what comes back, and the statistics by hand-computed values."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, RewardBreakdown
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.reat.annotation import (
    CHECKS,
    PAIR_FIELDS,
    TURN_FIELDS,
    Annotation,
    AnnotationError,
    export_pairs,
    read_annotation,
)  # fmt: skip
from maieutic.reat.annotation_statistics import lines, summarise
from maieutic.reat.schema import Scores
from maieutic.reat.scoring import DialogueScore, TurnScore
from maieutic.reat.tutor import NOTE, Used
from reat_parts import STATE


def episode(arm: str, n: int, said: str = "Which part?") -> Episode:
    pair = ProblemPair(
        id=f"q{n}", source=Problem(text=f"Problem {n} </script><b>", answer="7", solution="3+4")
    )
    dialogue = Dialogue(f"{arm}{n}", pair.source.text)
    for i in range(2):
        dialogue.add(Turn("student", f"=SUM({arm} {n} {i})"))
        note = NOTE + Used(state=STATE.key(), ids=("x",)).model_dump_json() if arm == "reat" else ""
        dialogue.add(Turn("tutor", f"{said} {arm} {n} {i}", note=note))
    dialogue.end = "max_turns"
    reward = RewardBreakdown(0.0, gated=False, pre=0.0, post=None, gain=None)
    return Episode(f"{arm}/{n}", "g", pair, "eval", 0, 0, 1, "s", dialogue, reward=reward)


def score(e: Episode, value: float = 80.0) -> DialogueScore:
    turns = (TurnScore(1, True, value), TurnScore(3, True, value))
    return DialogueScore(e.id, e.pair.id, e.pair.id, "p", turns, value)


def exported(folder: Path, n: int = 4, **options: object) -> dict:
    base, reat = [episode("base", i) for i in range(n)], [episode("reat", i) for i in range(n)]
    export_pairs(folder, base, reat, [score(e) for e in base], [score(e) for e in reat], **options)
    return json.loads((folder / "key.json").read_text())["sides"]


def test_people_see_two_dialogues_and_not_which_is_which(tmp_path: Path) -> None:
    sides = exported(tmp_path, 12)
    assert {tuple(s.values()) for s in sides.values()} == {("reat", "prompt_only"), ("prompt_only", "reat")}
    rows = list(csv.DictReader((tmp_path / "turns.csv").open()))
    assert len(rows) == 12 * 2 * 2 and tuple(rows[0]) == TURN_FIELDS
    first = next(csv.DictReader((tmp_path / "pairs.csv").open()))
    assert first == dict.fromkeys(PAIR_FIELDS, "") | {"pair": "p001"}
    # A spreadsheet does not run what a student wrote.
    assert all(r["student"].startswith("'=SUM(") for r in rows)
    page = (tmp_path / "form.html").read_text()
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    )
    shown = data["pairs"][0]
    assert set(shown["dialogues"]) == {"A", "B"} and shown["problem"] == "Problem 0 </script><b>"
    assert "<b>" not in page.split("<main")[1] and "default-src 'none'" in page.replace("&#x27;", "'")
    assert shown["states"][0]["state"] == "confused, request_hint, concept_error, repeated_error"
    # Neither arm is named anywhere, in the page or the tables, but by the words of the dialogues themselves.
    for text in (page, (tmp_path / "turns.csv").read_text(), (tmp_path / "pairs.csv").read_text()):
        assert "prompt_only" not in text and "prompt-only" not in text
    for p in data["pairs"]:
        arm = {"reat": "reat", "prompt_only": "base"}[sides[p["pair"]]["A"]]
        assert arm in p["dialogues"]["A"]["turns"][0]["tutor"]


def test_only_pairs_that_both_arms_have_are_exported(tmp_path: Path) -> None:
    base, reat = [episode("base", i) for i in range(5)], [episode("reat", i) for i in range(5)]
    reat[1].exclusion = "student_failed"
    scored = [score(e) for e in base[:4]], [score(e) for e in reat]
    assert export_pairs(tmp_path, base, reat, *scored) == 3
    assert export_pairs(tmp_path, base, reat, *scored, limit=2) == 2
    assert json.loads((tmp_path / "key.json").read_text())["problems"].keys() == {"p001", "p002"}


def fill(
    folder: Path,
    to: Path,
    sides: dict,
    *,
    reat: int,
    base: int,
    preferences: list[str],
    checks: list[tuple[str, str]],
) -> Path:
    """What an annotator would hand in: the exported tables filled in."""
    to.mkdir()
    turns = list(csv.DictReader((folder / "turns.csv").open()))
    for r in turns:
        value = reat if sides[r["pair"]][r["dialogue"]] == "reat" else base
        r |= {d: str(value) for d in ("scaffolding", "attribution", "empathy", "focus")}
        r["adaptation"] = "NA" if r["turn"] == "1" else str(value)
    pairs = list(csv.DictReader((folder / "pairs.csv").open()))
    for r, p, (llm, state) in zip(pairs, preferences, checks, strict=True):
        name = {s: side for side, s in sides[r["pair"]].items()}
        r |= {"preference": name.get(p, p), "llm_score": llm, "state": state}
    for file, fields, rows in (("turns.csv", TURN_FIELDS, turns), ("pairs.csv", PAIR_FIELDS, pairs)):
        with (to / file).open("w", newline="") as f:
            writer = csv.DictWriter(f, fields)
            writer.writeheader()
            writer.writerows(rows)
    return to


def test_gains_shares_and_agreement(tmp_path: Path) -> None:
    sides = exported(tmp_path / "out", 4)
    good, fine = ("reasonable", "plausible"), ("uncertain", "basically")
    one = fill(
        tmp_path / "out", tmp_path / "ann1", sides, reat=4, base=3,
        preferences=["reat", "reat", "reat", "uncertain"], checks=[good, good, fine, ("unreasonable", "implausible")],
    )  # fmt: skip
    two = fill(
        tmp_path / "out", tmp_path / "ann2", sides, reat=3, base=3,
        preferences=["reat", "prompt_only", "", "uncertain"], checks=[good, good, good, ("", "")],
    )  # fmt: skip
    report = summarise(tmp_path / "out" / "key.json", [read_annotation(one), read_annotation(two)])
    first, second = report.annotators
    assert first.annotator == "ann1" and (first.turns, first.pairs, second.pairs) == (16, 4, 4)
    assert (
        first.levels["sample"] == {"prompt_only": 75.0, "reat": 100.0, "gain": 25.0} == first.levels["turn"]
    )
    assert second.levels["turn"]["gain"] == 0
    assert {k: i.value for k, i in first.preference.items()} == {
        "reat": 0.75,
        "uncertain": 0.25,
        "prompt_only": 0,
    }
    third = 1 / 3
    assert {k: pytest.approx(i.value) for k, i in second.preference.items()} == {
        "reat": third, "uncertain": third, "prompt_only": third,
    }  # fmt: skip
    assert {k: i.value for k, i in first.checks["state"].items()} == {
        "plausible": 0.5,
        "basically": 0.25,
        "implausible": 0.25,
    }
    assert (
        second.checks["llm_score"]["reasonable"].value == 1
        and second.checks["llm_score"]["reasonable"].n == 3
    )
    assert report.mean["sample_gain"] == 12.5 and report.mean["prefers_reat"] == pytest.approx(
        (0.75 + third) / 2
    )
    # α by hand. Preference, as sides: pairs 1 and 4 agree, pair 2 does not, pair 3 has one rating and counts for nothing.
    ratings = [
        [sides_of(a, p, sides) for p in ("p001", "p002", "p004")]
        for a in (read_annotation(one), read_annotation(two))
    ]
    assert report.alpha["preference"] == pytest.approx(by_hand(ratings))
    # turn_score: one annotator says 100 or 75, the other 75 throughout; half of the 16 turns disagree by 25.
    n = 32
    observed = 8 * 2 * 25**2 / n
    expected = 2 * (8 * 24) * 25**2 / (n * (n - 1))
    assert report.alpha["turn_score"] == pytest.approx(1 - observed / expected)
    text = "\n".join(lines(report))
    assert "ann1: 16 turns, 4 pairs; sample 75.00 → 100.00 (25.00)" in text and "Krippendorff's α" in text


def sides_of(a: Annotation, pair: str, sides: dict) -> str:
    return a.judgements[pair]["preference"]


def by_hand(ratings: list[list[str]]) -> float:
    values = [v for unit in zip(*ratings, strict=True) for v in unit]
    n = len(values)
    observed = sum(2 * (x != y) for x, y in zip(*ratings, strict=True)) / n
    expected = sum(values.count(x) * values.count(y) for x in set(values) for y in set(values) if x != y) / (
        n * (n - 1)
    )
    return 1 - observed / expected


def test_the_form_and_the_tables_give_the_same(tmp_path: Path) -> None:
    sides = exported(tmp_path / "out", 2)
    good = ("reasonable", "plausible")
    folder = fill(
        tmp_path / "out",
        tmp_path / "ann",
        sides,
        reat=4,
        base=2,
        preferences=["reat", "reat"],
        checks=[good, good],
    )
    tables = read_annotation(folder)
    saved = {
        "annotator": "ann",
        "turns": [
            {"pair": p, "dialogue": s, "turn": t, **scores.model_dump(), "adaptation": "NA" if t == 1 else scores.adaptation}
            for (p, s, t), scores in tables.turns.items()
        ] + [{"pair": "p001", "dialogue": "A", "turn": 99}],
        "pairs": [{"pair": p, **j} for p, j in tables.judgements.items()],
    }  # fmt: skip
    (tmp_path / "ann.json").write_text(json.dumps(saved))
    assert read_annotation(tmp_path / "ann.json") == tables
    assert tables.turns["p001", "A", 1].adaptation is None
    assert isinstance(tables.turns["p001", "A", 3], Scores)


@pytest.mark.parametrize(
    ("file", "column", "value", "message"),
    [
        ("turns.csv", "focus", "5", r"turns\.csv:2: focus is '5': a whole number from 0 to 4 \(all five"),
        ("turns.csv", "focus", "NA", r"focus is 'NA': a whole number from 0 to 4 \(all"),
        ("turns.csv", "adaptation", "-", r"adaptation is '-': a whole number from 0 to 4 or NA"),
        ("turns.csv", "empathy", "", r"empathy is '': .* \(all five, or none\)"),
        ("turns.csv", "dialogue", "C", "dialogue is 'C', not A or B"),
        ("turns.csv", "turn", "first", "turn is 'first', not a turn's number"),
        ("turns.csv", "pair", "p999", "pair 'p999' is not of this export"),
        ("pairs.csv", "preference", "REAT", "preference is 'REAT': one of A, B, uncertain"),
        ("pairs.csv", "state", "fine", f"state is 'fine': one of {', '.join(CHECKS['state'])}"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, file: str, column: str, value: str, message: str
) -> None:
    sides = exported(tmp_path / "out", 1)
    folder = fill(
        tmp_path / "out", tmp_path / "ann", sides, reat=4, base=2, preferences=["reat"], checks=[("", "")]
    )
    rows = list(csv.DictReader((folder / file).open()))
    rows[0][column] = value
    with (folder / file).open("w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(AnnotationError, match=message):
        summarise(tmp_path / "out" / "key.json", [read_annotation(folder)])


def test_files_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(AnnotationError, match="neither a folder"):
        read_annotation(tmp_path / "a.json")
    (tmp_path / "f").mkdir()
    with pytest.raises(AnnotationError, match=r"turns\.csv: cannot be read"):
        read_annotation(tmp_path / "f")
    (tmp_path / "f" / "turns.csv").write_text("pair,dialogue\n")
    with pytest.raises(AnnotationError, match="columns turn, .* are missing"):
        read_annotation(tmp_path / "f")
    sides = exported(tmp_path / "out", 1)
    assert len(sides) == 1
    with pytest.raises(AnnotationError, match="each with a name of its own"):
        summarise(tmp_path / "out" / "key.json", [Annotation("x"), Annotation("x")])
    for text in (
        "[]",
        '{"sides": []}',
        '{"sides": {"p001": {"A": "x", "B": "reat"}}, "turns": {}}',
        "\udcff",
    ):
        (tmp_path / "key.json").write_text(text, errors="surrogateescape")
        with pytest.raises(AnnotationError, match="not the key of an export"):
            summarise(tmp_path / "key.json", [Annotation("x")])
    for text in (
        '{"turns": [1], "pairs": []}',
        '{"turns": "ab", "pairs": []}',
        '{"turns": 3, "pairs": 4}',
        "[" * 99_999,
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(AnnotationError, match="neither a folder"):
            read_annotation(tmp_path / "a.json")


# ---- what spreadsheets and people do to tables -----------------------------------------------------------------------------


def handed_in(tmp_path: Path) -> tuple[Path, Path]:
    """(key, a folder that was filled in well)."""
    sides = exported(tmp_path / "out", 2)
    folder = fill(
        tmp_path / "out", tmp_path / "ann", sides, reat=4, base=2, preferences=["reat", ""], checks=[("", "")] * 2
    )  # fmt: skip
    return tmp_path / "out" / "key.json", folder


def rewritten(file: Path, columns: list[str] | None = None, **how: object) -> None:
    rows = list(csv.DictReader(file.open(encoding="utf-8-sig", newline="")))
    with file.open("w", newline="", encoding=str(how.pop("encoding", "utf-8"))) as out:
        writer = csv.DictWriter(out, columns or list(rows[0]), extrasaction="ignore", **how)  # type: ignore[arg-type]
        writer.writeheader()
        writer.writerows(rows)


def test_tables_survive_a_spreadsheet(tmp_path: Path) -> None:
    key, folder = handed_in(tmp_path)
    want, good = read_annotation(folder), (folder / "turns.csv").read_bytes()
    mixed = ["notes", *reversed(TURN_FIELDS[:-1]), "mine"]
    for how in ({"delimiter": ";"}, {"delimiter": "\t"}, {"encoding": "utf-8-sig"}, {"columns": mixed},
                {"lineterminator": "\n"}, {"quoting": csv.QUOTE_ALL}):  # fmt: skip
        rewritten(folder / "turns.csv", **how)  # type: ignore[arg-type]
        assert read_annotation(folder) == want, how
        (folder / "turns.csv").write_bytes(good)
    summarise(key, [want])


def test_what_a_spreadsheet_breaks_is_named(tmp_path: Path) -> None:
    key, folder = handed_in(tmp_path)
    for file in ("turns.csv", "pairs.csv"):
        good = (folder / file).read_text()
        (folder / file).write_text(good + good.splitlines()[1] + "\n")
        with pytest.raises(AnnotationError, match=r"(scored|judged) twice"):
            read_annotation(folder)
        for encoding in ("utf-16", "latin-1"):
            (folder / file).write_text(good.replace("Which", "Où"), encoding=encoding)
            if file == "pairs.csv" and encoding == "latin-1":
                continue  # nothing of it is beyond ASCII
            with pytest.raises(AnnotationError, match="cannot be read .* in UTF-8"):
                read_annotation(folder)
        (folder / file).write_text(good.replace("p001", "x" * 200_000, 1))
        with pytest.raises(AnnotationError, match="cannot be read .*field limit"):
            read_annotation(folder)
        (folder / file).write_text(good)
    found = read_annotation(folder)
    found.turns["p001", "A", 2] = next(iter(found.turns.values()))
    with pytest.raises(AnnotationError, match="p001, dialogue A, has no turn 2 of the tutor"):
        summarise(key, [found])


@pytest.mark.parametrize(
    "said", ["=cmd|' /C calc'!A0", "+1", "-2+3", "@SUM(A1)", "\t=1", "\n=1", " =1", "＝1", "\u00a0=1"]
)
def test_no_cell_begins_like_a_formula(tmp_path: Path, said: str) -> None:
    base, reat = episode("base", 0, said=said), episode("reat", 0, said=f"{said}\ud800")
    export_pairs(tmp_path, [base], [reat], [score(base)], [score(reat)])
    for row in csv.DictReader((tmp_path / "turns.csv").open(encoding="utf-8", newline="")):
        assert row["tutor"].startswith(f"'{said}") and "\ud800" not in row["tutor"]

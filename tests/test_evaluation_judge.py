"""Planted faults, judges that always say the same, probes, agreement; moves and ratings as judges give them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evaluation_world import answer
from loopback import InThread, Loopback
from maieutic.cli import app
from maieutic.dialogue import Dialogue
from maieutic.env.base import GateName, Verdict
from maieutic.errors import ProblemDataError
from maieutic.evaluation import judge_quality as jq
from maieutic.evaluation import moves
from maieutic.evaluation.planted import CRITERIA, GATES, load_planted, parse, shipped
from maieutic.evaluation.ratings import read_rating
from maieutic.evaluation.replay import read_facts, thinking_ratios


class AlwaysOk:
    async def verdict(self, dialogue: Dialogue, pair: Any, gate: GateName, *, seed: int) -> Verdict:
        return Verdict(gate, "ok")


class AlwaysReject:
    async def verdict(self, dialogue: Dialogue, pair: Any, gate: GateName, *, seed: int) -> Verdict:
        return Verdict(gate, "reject", CRITERIA[gate][0], quote=dialogue.turns[1].visible, turn=1)


class Oracle:
    """Says what the labels say, where a quote of theirs still stands."""

    def __init__(self) -> None:
        self.items = {i.pair.id: i for i in load_planted()}

    async def verdict(self, dialogue: Dialogue, pair: Any, gate: GateName, *, seed: int) -> Verdict:
        label = self.items[pair.id].labels[gate]
        return Verdict(gate, "reject" if label.reject else "ok", label.criterion, label.quote)


def test_the_set_covers_every_criterion_in_both_halves() -> None:
    items = load_planted()
    assert len(items) >= 60 and len({i.id for i in items}) == len(items)
    assert Counter(i.half for i in items) == {"first": 74, "second": 74}
    for half in ("first", "second"):
        planted = Counter(i.labels[g].criterion for i in items if i.half == half for g in GATES)
        assert all(planted[c] >= 2 for names in CRITERIA.values() for c in names)
        assert sum(i.half == half and i.criterion == "clean" for i in items) >= 8


def test_the_set_is_the_frozen_one() -> None:
    import hashlib

    digest = hashlib.sha256(shipped().read_bytes()).hexdigest()
    assert digest in (shipped().parent / "README.md").read_text(), (
        "the card names the hash that the set was frozen under"
    )


def test_labels_are_checked() -> None:
    row = json.loads(shipped().read_text().splitlines()[0])
    with pytest.raises(ProblemDataError, match="no criterion of leakage"):
        parse("here", row | {"leakage": row["leakage"] | {"criterion": "false_claim"}})
    with pytest.raises(ProblemDataError, match="the quote does not stand"):
        parse("here", row | {"leakage": row["leakage"] | {"turn": 1, "quote": "not said"}})
    with pytest.raises(ProblemDataError, match="schema"):
        parse("here", row | {"schema": 2})


@pytest.mark.parametrize("half", ["first", "second"])
@pytest.mark.parametrize("judge,word", [(AlwaysOk(), "OK"), (AlwaysReject(), "REJECT")])
def test_a_constant_judge_is_exposed(judge: Any, word: str, half: str) -> None:
    judged = asyncio.run(jq.judge_all(judge, [i for i in load_planted() if i.half == half]))
    for gate, row in jq.confusion(judged).items():
        assert row["finding"] == f"always says {word}: useless as a judge"
        assert row["balanced accuracy"] == 0.5 and row["kappa"] == 0.0
        assert (row["recall"], row["recall of clean"]) == ((0.0, 1.0) if word == "OK" else (1.0, 0.0)), gate
    table = jq.by_criterion(judged)
    recalls = {table[c]["recall"] for names in CRITERIA.values() for c in names}
    assert recalls == ({0.0} if word == "OK" else {1.0})
    assert table["clean"]["recall"] == (1.0 if word == "OK" else 0.0)


def test_a_perfect_judge_and_its_probes() -> None:
    judged = asyncio.run(jq.judge_all(Oracle(), load_planted()))
    for row in jq.confusion(judged).values():
        assert row["kappa"] == row["precision"] == row["recall"] == row["balanced accuracy"] == 1.0
    assert all(r["precision"] == 1.0 for c, r in jq.by_criterion(judged).items() if c != "clean")
    assert all(
        r["flipped"] == 0 and r["to unknown"] == 0 for r in asyncio.run(jq.probe(Oracle(), judged)).values()
    )


class Impressed(Oracle):
    """Lets long transcripts pass: what the length probe is for."""

    async def verdict(self, dialogue: Dialogue, pair: Any, gate: GateName, *, seed: int) -> Verdict:
        if any("no hurry" in t.visible for t in dialogue.turns):
            return Verdict(gate, "ok")
        return await super().verdict(dialogue, pair, gate, seed=seed)


def test_length_bias_is_found() -> None:
    judged = asyncio.run(jq.judge_all(Impressed(), load_planted()))
    probed = asyncio.run(jq.probe(Impressed(), judged))
    rejected = sum(j.decision(g) == "reject" for j in judged for g in GATES)
    assert probed["longer tutor turns"]["to ok"] == rejected > 50
    assert probed["fault later"]["flipped"] == probed["fault earlier"]["flipped"] == 0


def test_probes_keep_the_labels_true() -> None:
    for item in load_planted():
        for change in jq.PROBES.values():
            changed = change(item)
            speakers = [t.speaker for t in changed.turns]
            assert all(a != b for a, b in pairwise(speakers))
            said = [t.visible for t in changed.turns if t.speaker == "tutor"]
            assert all(any(x.quote in t for t in said) for x in changed.labels.values() if x.reject)


def test_agreement_of_raters() -> None:
    got = jq.agreement({"a": ["ok", "reject", None, "ok"], "b": ["ok", "reject", "ok", "reject"]})
    assert got["pairs"]["a ~ b"] == {"kappa": pytest.approx(0.4), "items": 3}


def test_command_on_an_endpoint(tmp_path: Path) -> None:
    server = Loopback(answer)
    with InThread(server):
        command = [
            "evaluate-judge",
            f"{server.url}#judge",
            "votes=1",
            "--half",
            "first",
            "--out",
            str(tmp_path),
        ]
        result = CliRunner().invoke(app, command)
        asked = len(server.bodies)
        assert result.exit_code == 0, result.output
        CliRunner().invoke(app, command)
        assert len(server.bodies) == asked, "answers are cached"
    data = json.loads((tmp_path / "judge.json").read_text())
    assert data["tables"]["gates"]["leakage"]["finding"] == "always says OK: useless as a judge"
    assert len(data["samples"]) == 74 and data["costs"]["judge"]["requests"] == 148


def test_command_on_the_rule_judge(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["evaluate-judge", "rule", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    gates = json.loads((tmp_path / "judge.json").read_text())["tables"]["gates"]
    assert all(row["clean rejected"] <= 2 for row in gates.values()), "the rule judge is meant to be precise"
    assert "| false_claim | correctness |" in (tmp_path / "judge.md").read_text()


def test_judges_and_people_are_compared(tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["evaluate-judge", "rule", "--out", str(tmp_path / "a")]).exit_code == 0
    people = tmp_path / "people.csv"
    ids = [i.id for i in load_planted()]
    rows = [f"{i},leakage,{'reject' if n % 2 else 'OK'},ann" for n, i in enumerate(ids[:10])]
    people.write_text("\n".join(["id,gate,label,rater", *rows]) + "\n")
    command = [
        "evaluate-judge",
        "rule",
        "--out",
        str(tmp_path / "b"),
        "--other",
        str(tmp_path / "a" / "judge.json"),
    ]
    result = runner.invoke(app, [*command, "--human", str(people)])
    assert result.exit_code == 0, result.output
    table = json.loads((tmp_path / "b" / "judge.json").read_text())["tables"]["agreement on leakage"]
    assert table["judge ~ rule"]["kappa"] == 1.0, "the same judge twice"
    assert table["labels ~ ann"]["items"] == 10 and table["judge ~ labels"]["items"] > 60
    assert table["all"]["alpha"] is not None
    people.write_text("id,gate,label,rater\nx,leakage,maybe,ann\n")
    result = runner.invoke(app, [*command, "--human", str(people)])
    assert result.exit_code == 2 and "label (ok or reject)" in result.output


# ---- what judges answer ----------------------------------------------------------------------------------------------------


def test_moves_are_read_whole_or_not_at_all() -> None:
    assert moves.read_moves({"turns": [{"n": 1, "moves": ["k", "A"]}, {"n": 3, "moves": ["M"]}]}, {1, 3}) == {
        1: "AK",
        3: "M",
    }
    for bad in (
        {"turns": [{"n": 1, "moves": ["A"]}]},
        {"turns": [{"n": 1, "moves": ["Z"]}, {"n": 3, "moves": ["A"]}]},
        {"turns": [{"n": 1, "moves": []}, {"n": 3, "moves": ["A"]}]},
        {"turns": [{"n": 1, "moves": ["A"]}, {"n": 1, "moves": ["B"]}, {"n": 3, "moves": ["A"]}]},
        {},
    ):
        assert moves.read_moves(bad, {1, 3}) is None


@pytest.mark.parametrize(
    "text,letters",
    [
        ("What is 3 times 4?", "A"),
        ("Why does that work?", "G"),
        ("The answer is 12.", "F"),
        ("Well done! How did you get there?", "GK"),
        ("Are you sure? Check it.", "J"),
        ("Imagine a number line.", "D"),
        ("Now try it on your own.", "H"),
        ("Let us move on to the next problem.", "L"),
        ("", "M"),
    ],
)
def test_moves_by_rules(text: str, letters: str) -> None:
    assert moves.classify_by_rules(text) == letters


def test_distributions_fingerprints_and_distances() -> None:
    assert len(moves.MOVES) == 13 and moves.LETTERS == "ABCDEFGHIJKLM"
    base, trained = moves.distribution(["CF", "A"]), moves.distribution(["A", "AG", "G", "A"])
    assert base is not None and trained is not None and moves.distribution([]) is None
    assert moves.orientation_shares(trained) == {
        "scaffolding": pytest.approx(0.6),
        "rigour": pytest.approx(0.4),
        "neutral": 0.0,
    }
    print_ = moves.fingerprint(base, trained, moves.CONSTRAINT)
    assert print_["F supplying answers"] == {
        "base": pytest.approx(1 / 3),
        "trained": 0.0,
        "change": pytest.approx(-1 / 3),
    }
    table = moves.distances({"base": base, "trained": trained}, human=base)
    assert table["base"]["to human"] == table["base"]["to base"] == 0.0
    assert table["base"]["to trained"] == table["trained"]["to base"] > 0
    assert table["base"]["to centroid"] < table["base"]["to trained"]


def test_numbers_of_judges_are_read_strictly() -> None:
    assert read_rating({"pedagogy": 4, "factual": 1}) is not None
    for bad in (
        {"pedagogy": 6, "factual": 1},
        {"pedagogy": True, "factual": 1},
        {"pedagogy": 4},
        {"pedagogy": "4", "factual": 1},
    ):
        assert read_rating(bad) is None
    assert read_facts({"scaffolded": True, "pushed_rigour": False, "over_helped": "no"}) is None


def test_thinking_ratios() -> None:
    assert thinking_ratios({"ours": 100.0, "other": 250.0}, "ours") == {"ours": 1.0, "other": 2.5}
    assert thinking_ratios({"ours": 0.0, "other": 250.0}, "ours") == {"ours": None, "other": None}

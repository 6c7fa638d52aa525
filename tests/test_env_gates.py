"""Gates: concurrency, seeds, and that no failure and no unproven rejection becomes a score."""

import pytest

from env_fakes import FakeJudge, pair, run
from maieutic.config import EnvSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Verdict
from maieutic.env.gates import judge_gates, with_evidence
from maieutic.errors import EngineDownError
from maieutic.seeds import derive

TURNS = [
    Turn("student", "Is it “72”?", scripted=True),
    Turn("tutor", "What is  half\n of ‘48’?"),
    Turn("student", "24"),
    Turn("tutor", " "),
    Turn("student", "Hello?"),
    Turn("tutor", "Add  them.", thinking="secret"),
]


def dialogue() -> Dialogue:
    return Dialogue("d", "source", turns=list(TURNS), end="max_turns")


def gates(judge, **env):
    return run(judge_gates(judge, dialogue(), pair(), EnvSpec(**env), seed=4))


def test_all_gates_at_once_each_with_its_seed():
    judge = FakeJudge()
    verdicts = gates(judge)
    assert {g: v.decision for g, v in verdicts.items()} == {"leakage": "ok", "correctness": "ok"}
    assert judge.together == 2
    assert judge.seeds == {g: derive(4, g) for g in ("leakage", "correctness")}


def test_only_the_named_gates():
    judge = FakeJudge()
    assert list(gates(judge, gate_names=["correctness"])) == ["correctness"]
    assert judge.log == ["gate:correctness"]


def test_a_judge_that_raises_is_unknown_and_spares_the_other_gate():
    verdicts = gates(FakeJudge({"leakage": TimeoutError("30 s")}))
    assert verdicts["leakage"] == Verdict("leakage", "unknown", "TimeoutError", reason="30 s")
    assert verdicts["correctness"].decision == "ok"


def test_a_dead_server_stops_the_run():
    with pytest.raises(EngineDownError):
        gates(FakeJudge({"leakage": EngineDownError("no judge for 600 s")}))


@pytest.mark.parametrize(
    ("said", "criterion"),
    [
        (None, "no_verdict"),
        (True, "no_verdict"),
        (Verdict("correctness", "ok"), "wrong_gate"),
        (Verdict("leakage", "REJECT"), "no_decision"),
    ],
)
def test_what_is_not_a_verdict_is_unknown(said, criterion):
    found = gates(FakeJudge({"leakage": said}))["leakage"]
    assert (found.gate, found.decision, found.criterion) == ("leakage", "unknown", criterion)


@pytest.mark.parametrize(
    ("quote", "turn", "decision", "where"),
    [
        ("What is half of '48'?", 1, "reject", 1),  # white space and quotation marks
        ("half\tof", None, "reject", 1),
        ("Add them.", 1, "reject", 5),  # the turn is corrected
        ("", 3, "reject", 3),  # a blank turn is its own evidence
        ("", 1, "unknown", 1),
        ("", None, "unknown", None),
        (" ", 5, "unknown", 5),
        ('Is it "72"?', 0, "unknown", 0),  # a student turn is no evidence
        ("24", 2, "unknown", 2),
        ("secret", 5, "unknown", 5),  # nobody but the tutor reads its thinking
        ("add them.", 5, "reject", 5),  # judges change capitals
        ("Add then.", 5, "unknown", 5),  # too short to be nearly right
        ("half of 48", 1, "unknown", 1),
    ],
)
def test_a_rejection_needs_a_quote_from_a_tutor_turn(quote, turn, decision, where):
    found = with_evidence(Verdict("leakage", "reject", "answer_stated", quote, turn), dialogue())
    assert (found.decision, found.turn) == (decision, where)
    if decision == "unknown":
        assert found.criterion in ("no_quote", "quote_not_found")
        assert "answer_stated" in found.reason and found.quote == quote


def test_evidence_is_asked_of_rejections_only():
    said = Verdict("leakage", "ok", quote="nowhere")
    assert gates(FakeJudge({"leakage": said}))["leakage"] == said

"""Loaders: on the real slices where there are some, on fixtures of the documented format elsewhere. Metrics of MathTutorBench."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from evaluation_world import MOMENT
from maieutic.errors import ProblemDataError
from maieutic.evaluation import mathtutorbench_tasks as tasks
from maieutic.evaluation import text_metrics as tm
from maieutic.evaluation.config import DialogueSet
from maieutic.evaluation.conversations import (
    NO_QUESTION,
    HumanDialogue,
    Said,
    eedi_questions,
    load_dialogues,
    merged,
    middle_cut,
    parse_eedi,
    parse_mathdial,
)
from maieutic.evaluation.replay import parse_moment
from maieutic.evaluation.retention import load_set

# ---- MathDial ------------------------------------------------------------------------------------------------------------


def test_real_mathdial_slice(shared_data_dir: Path) -> None:
    path = shared_data_dir / "mathdial-test-60.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = load_dialogues(DialogueSet(format="mathdial", source=str(path)))
    assert len(found) == len(rows) == 60
    for row, dialogue in zip(rows, found, strict=True):
        parts = row["conversation"].split("|EOM|")
        assert len(dialogue.turns) == len(parts) and dialogue.problem == row["question"]
        for part, said in zip(parts, dialogue.turns, strict=True):
            assert said.text and part.rstrip().endswith(said.text)
            assert (said.speaker == "tutor") == part.startswith("Teacher")
            assert not said.text.startswith("(generic)") and (said.speaker == "tutor" or not said.intent)
    intents = {s.intent for d in found for s in d.turns if s.speaker == "tutor"}
    assert intents == {"generic", "focus", "telling", "probing"}


def test_real_mathdial_cuts(shared_data_dir: Path) -> None:
    found = load_dialogues(
        DialogueSet(format="mathdial", source=str(shared_data_dir / "mathdial-test-60.jsonl"))
    )
    for dialogue in found:
        cut = middle_cut(dialogue)
        assert cut is not None
        turns = merged(dialogue.turns)
        teacher = [s.text for s in turns if s.speaker == "tutor"]
        assert cut.human == teacher[len(teacher) // 2]
        made = cut.dialogue("Opening")
        assert made.turns[0].speaker == made.turns[-1].speaker == "student"
        assert turns[len(cut.before)].text == cut.human
    first = middle_cut(found[0])
    assert first is not None and first.human.startswith("No, you need to add as she still has the spoons")
    assert first.before[-1].text == "12 - 3 = 9. So Julia had 9 spoons left when setting the table."


def test_mathdial_names_and_errors() -> None:
    row = {"qid": 1, "question": "Q", "conversation": "Teacher: (probing)Why?|EOM|Steven: (I think) 3: 4"}
    got = parse_mathdial("here", row)
    assert got.turns == (Said("tutor", "Why?", "probing"), Said("student", "(I think) 3: 4"))
    with pytest.raises(ProblemDataError, match="here: column 'conversation': no speaker"):
        parse_mathdial("here", row | {"conversation": "no colon"})
    with pytest.raises(ProblemDataError, match="column 'question'"):
        parse_mathdial("here", {"conversation": "Teacher: a"})


def test_dialogues_of_one_problem_share_their_cluster(tmp_path: Path) -> None:
    row = {"qid": 5, "question": "Q", "conversation": "Teacher: a|EOM|Student: b"}
    file = tmp_path / "m.jsonl"
    file.write_text("".join(json.dumps(row | {"scenario": n}) + "\n" for n in (1, 1, 2)))
    found = load_dialogues(DialogueSet(format="mathdial", source=str(file)))
    assert [d.id for d in found] == ["5-1", "5-1#2", "5-2"] and {d.group for d in found} == {"5"}
    cut = middle_cut(found[1])
    assert cut is not None and (cut.id, cut.group) == ("5-1#2", "5")


# ---- merging and cutting -------------------------------------------------------------------------------------------------


def test_consecutive_turns_are_merged_and_empty_ones_dropped() -> None:
    turns = [
        Said("tutor", "a", "x"),
        Said("tutor", "b", "y"),
        Said("student", " "),
        Said("tutor", "c", "x"),
        Said("student", "d"),
    ]
    assert merged(turns) == [Said("tutor", "a\nb\nc", "x+y"), Said("student", "d")]


@pytest.mark.parametrize("n,at", [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_the_middle_teacher_turn(n: int, at: int) -> None:
    turns = [Said(who, f"{who}{i}") for i in range(n) for who in ("tutor", "student")]  # type: ignore[arg-type]
    cut = middle_cut(HumanDialogue("d", "P", tuple(turns)))
    assert cut is not None and cut.human == f"tutor{at}" and len(cut.before) == 2 * at


def test_a_dialogue_that_the_student_opens() -> None:
    turns = (Said("student", "help"), Said("tutor", "a"), Said("student", "b"), Said("tutor", "c"))
    cut = middle_cut(HumanDialogue("d", "P", turns))
    assert cut is not None
    assert [t.visible for t in cut.dialogue("Opening").turns] == ["Opening\n\nhelp", "a", "b"]
    assert middle_cut(HumanDialogue("d", "P", (Said("student", "alone"),))) is None


# ---- Eedi (documented format; no real slice) -----------------------------------------------------------------------------


def eedi(n: int, order: int, tutor: int, text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    row = {
        "InterventionId": n,
        "QuestionId_DQ": 7,
        "MessageSequence": order,
        "IsTutor": tutor,
        "MessageString": text,
    }
    return f"row {n}/{order}", row | {"TalkMovePrediction": "<None>" if tutor else None} | more


def test_eedi_messages_become_dialogues() -> None:
    rows = [
        eedi(10, 2, 1, "You OK?"),
        eedi(11, 1, 0, "hi"),
        eedi(10, 1, 1, "Hello"),
        eedi(10, 3, 0, "I need help"),
    ]
    first, second = parse_eedi(rows, {"7": "What is 1/2 of 6?"})
    assert (first.id, first.problem) == ("10", "What is 1/2 of 6?")
    assert [s.text for s in first.turns] == ["Hello", "You OK?", "I need help"]
    assert merged(first.turns)[0] == Said("tutor", "Hello\nYou OK?", "None")
    assert second.turns == (Said("student", "hi"),)
    assert parse_eedi(rows, {})[0].problem == NO_QUESTION


def test_eedi_questions_are_joined_in_order() -> None:
    rows = [
        ("a", {"QuestionId_DQ": 7, "Text": "second", "Sequence": 2}),
        ("b", {"QuestionId_DQ": 7, "Text": "first", "Sequence": 1}),
    ]
    assert eedi_questions(rows) == {"7": "first\nsecond"}


def test_eedi_csv(tmp_path: Path) -> None:
    file = tmp_path / "e.csv"
    head = "InterventionId,UserId,QuestionId_DQ,MessageSequence,IsTutor,MessageString,TalkMovePrediction"
    file.write_text(f'{head}\n10,749,7,1,1,"Hello, you",<None>\n10,-1,7,2,0,hi,\n')
    (got,) = load_dialogues(DialogueSet(format="eedi", source=str(file)))
    assert got.turns == (Said("tutor", "Hello, you", "None"), Said("student", "hi"))


# ---- moments (documented format; no real slice) --------------------------------------------------------------------------


def test_moment() -> None:
    moment = parse_moment("here", MOMENT | {"dimension": "rigor"})
    assert moment.dimension == "rigour" and moment.persona == "shy" and len(moment.before) == 3
    dialogue = moment.dialogue("d")
    assert [t.speaker for t in dialogue.turns] == ["student", "tutor", "student"]
    ends_with_tutor = parse_moment("here", MOMENT | {"context": MOMENT["context"][:1]}).dialogue("d")  # type: ignore[index]
    assert ends_with_tutor.turns[-1].visible == "(no message)"
    with pytest.raises(ProblemDataError, match="persona"):
        parse_moment("here", MOMENT | {"student": {"context": "c"}})
    with pytest.raises(ProblemDataError, match="dimension"):
        parse_moment("here", MOMENT | {"dimension": "rapport"})


# ---- GSM8K and MathTutorBench --------------------------------------------------------------------------------------------


def test_real_gsm8k_slice(shared_data_dir: Path) -> None:
    source = str(shared_data_dir / "gsm8k-test-200.jsonl")
    problems = load_set(source, limit=None, offline=True)
    examples = tasks.load_examples(tasks.TASKS["problem_solving"], source, limit=None, offline=True)
    assert len(problems) == len(examples) == 200
    assert all(float(p.answer) == e.target for (_, p), e in zip(problems, examples, strict=True))
    assert examples[0].target == 18.0


def test_real_bridge_slice(shared_data_dir: Path) -> None:
    source = shared_data_dir / "mathtutorbench-bridge-40.json"
    rows = json.loads(source.read_text())
    examples = tasks.load_examples(
        tasks.TASKS["scaffolding_generation"], str(source), limit=None, offline=True
    )
    assert len(examples) == 40
    for row, e in zip(rows, examples, strict=True):
        assert (
            e.human == row["dialog_history"][-1]["text"] and len(e.before) == len(row["dialog_history"]) - 1
        )
        assert e.human not in e.fields["dialog_history"] or e.human in [s.text for s in e.before]
        assert e.solution == row["reference_solution"]
    assert (
        examples[0]
        .fields["dialog_history"]
        .startswith("Teacher: Tell me your solution\nStudent: I think the friend")
    )


VERIFY = {
    "problem": "P",
    "reference_solution": "4 + 4 = 8\n8 * 2 = 16\n1,016",
    "student_incorrect_solution": ["4 + 4 = 9", "9 * 2 = 18", "18"],
    "incorrect_index": 0,
    "dialog_history": [{"text": "Hi", "user": "Teacher"}, {"text": "It is 18", "user": "Student"}],
    "student_correct_response": "It is 16",
}


def test_stepverify_examples() -> None:
    wrong, right = tasks.TASKS["mistake_location"].examples("r", VERIFY)
    assert (wrong.target, right.target) == (1, 0) and wrong.problem == right.problem
    assert wrong.fields["student_solution"] == "Step 1 - 4 + 4 = 9\nStep 2 - 9 * 2 = 18"
    assert right.fields["student_solution"] == "Step 1 - 4 + 4 = 8\nStep 2 - 8 * 2 = 16"
    wrong, right = tasks.TASKS["solution_correctness"].examples("r", VERIFY)
    assert (wrong.target, right.target) == (True, False)
    assert (wrong.fields["student_chat_solution"], right.fields["student_chat_solution"]) == (
        "It is 18",
        "It is 16",
    )
    assert wrong.fields["dialog_history"] == "Teacher: Hi"
    (fix,) = tasks.TASKS["mistake_correction"].examples("r", VERIFY)
    assert fix.target == 1016.0
    with pytest.raises(ProblemDataError, match="incorrect_index"):
        tasks.TASKS["mistake_location"].examples(
            "r", {k: v for k, v in VERIFY.items() if k != "incorrect_index"}
        )


def test_replies_are_read_as_published() -> None:
    assert tasks.read_last_number("6 eggs, 1,234") == 234.0 and tasks.read_last_number("none") is None
    assert tasks.read_final_answer("1 and 2. Final Answer: $1,200 of 3") == 1200.0
    assert tasks.read_final_answer("first 3, then -4.5") == -4.5 and tasks.read_final_answer("no") is None
    assert tasks.read_step("Step 3 and 4") == 3 and tasks.read_step("no error") == 0
    assert tasks.read_incorrect("Yes") and not tasks.read_incorrect(" no.") and tasks.read_incorrect("hm")
    assert tasks.cut_at("\n\nA turn.\n\nStudent: x", ("Student:", "\n\n")) == "A turn."
    assert tasks.reference_questions("Q1? ** a\nQ2? ** b\n#### 3") == ["Q1?", "Q2?"]


# ---- metrics -------------------------------------------------------------------------------------------------------------


def test_bleu_by_hand() -> None:
    # 3 tokens: p1 = 3/3, p2 = 2/2, p3 = 1/1 and no fourth order; brevity exp(1 − 4/3).
    assert tm.sentence_bleu("the cat sat", ["the cat sat down"]) == pytest.approx(math.exp(1 - 4 / 3))
    # p1 = 2/4, p2 = 1/3, p3 = 1/(2·2), p4 = 1/(4·1), no brevity penalty.
    expected = (2 / 4 * 1 / 3 * 1 / 4 * 1 / 4) ** 0.25
    assert tm.sentence_bleu("the cat ran off", ["the cat sat down"]) == pytest.approx(expected)
    assert tm.sentence_bleu("a b c d", ["a b c d", "x"]) == pytest.approx(1.0)
    assert tm.sentence_bleu("zebra", ["the cat"]) == 0.0 == tm.sentence_bleu("", ["the cat"])


def test_bleu_clips_to_the_most_generous_reference() -> None:
    assert tm.sentence_bleu("the the the", ["the cat"]) == pytest.approx((1 / 3 * 1 / 4 * 1 / 4) ** (1 / 3))


def test_13a_tokens() -> None:
    assert tm.tokens_13a("It's 3.5, or 7-8? &quot;Yes&quot;.") == [
        "It's",
        "3.5",
        ",",
        "or",
        "7",
        "-",
        "8",
        "?",
        '"',
        "Yes",
        '"',
        ".",
    ]


def test_f1_against_sklearn() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is the oracle")
    targets, said = [1, 0, 2, 2, 0, 3, 1, 0], [1, 2, 2, 0, 0, 0, 5, 0]
    location = tasks.TASKS["mistake_location"].metrics(targets, said)
    for average in ("micro", "macro", "weighted"):
        assert location[f"f1_{average}"] == pytest.approx(
            metrics.f1_score(targets, said, average=average, zero_division=0)
        )
    truth, guess = [True, False, True, True], [True, True, False, True]
    got = tasks.TASKS["solution_correctness"].metrics(truth, guess)
    assert got["f1"] == pytest.approx(metrics.f1_score(truth, guess))
    assert got["precision"] == pytest.approx(metrics.precision_score(truth, guess))
    assert got["recall"] == pytest.approx(metrics.recall_score(truth, guess)) and got["accuracy"] == 0.5


def test_socratic_takes_the_best_line() -> None:
    got = tasks.TASKS["socratic_questioning"].metrics([["How many eggs?"], []], [["How many eggs?"], ["x"]])
    assert got == {"bleu": pytest.approx(1.0), "avg_questions": 1.0}

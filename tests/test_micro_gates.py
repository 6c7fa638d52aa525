"""The micro judge against tutor turns that were labelled by hand, and against whole dialogues."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from maieutic.config import EnvSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.gates import judge_gates
from maieutic.errors import ProblemDataError
from maieutic.micro.gates import MicroJudge, findings
from maieutic.problems.schema import Problem, ProblemPair

ABOUT_DIALOGUES = {"error_left_standing", "no_teaching"}


@dataclass(frozen=True)
class Labelled:
    problem: Problem
    replies: tuple[str, ...]
    text: str
    leak: bool
    wrong: bool


def problem_of(line: str) -> Problem:
    text, solution = (part.strip() for part in line.split("|"))
    return Problem(text=text, solution=solution, answer=solution.split()[-2])


def read_list(path: Path) -> list[Labelled]:
    out, replies = [], ()
    for line in path.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line.startswith("== "):
            problem = problem_of(line[3:])
        elif line.startswith("--"):
            replies = (line[2:].strip(),) if line[2:].strip() else ()
        else:
            text, _, more = line[3:].partition(" -- ")
            flags = line[:2] + more
            out.append(Labelled(problem, replies, text.strip(), "L" in flags, "W" in flags))
    return out


TURNS = read_list(Path(__file__).with_name("micro_turns.txt"))


def dialogue(problem: Problem, *turns: str) -> Dialogue:
    """Tutor and student in turn, after the opening."""
    made = Dialogue("d", problem.text)
    made.add(Turn("student", f"can you help me ? {problem.text}", scripted=True))
    for n, text in enumerate(turns):
        end = "<end_of_conversation>" in text
        made.add(
            Turn(
                "student" if n % 2 else "tutor",
                text.replace("<end_of_conversation>", "").strip(),
                end_token=end,
            )
        )
    return made


def judged(case: Labelled) -> tuple[set[str], set[str]]:
    before = [t for reply in case.replies for t in ("what would you do first ?", reply)]
    made = dialogue(case.problem, *before, case.text)
    found = findings(made, case.problem)
    last = len(made.turns) - 1
    return tuple(
        {f.criterion for f in found[g] if f.turn == last} - ABOUT_DIALOGUES
        for g in ("leakage", "correctness")
    )


def rates(gate: int) -> tuple[float, float, list[str]]:
    """Precision, recall, and the turns on which judge and label differ."""
    hits = missed = false = 0
    differ = []
    for case in TURNS:
        said, label = bool(judged(case)[gate]), (case.leak, case.wrong)[gate]
        hits += said and label
        missed += label and not said
        false += said and not label
        if said != label:
            differ.append(f"{case.text!r} after {case.replies}: judge {judged(case)[gate]}, label {label}")
    return hits / (hits + false), hits / (hits + missed), differ


def test_the_list_is_long_and_balanced() -> None:
    assert len(TURNS) >= 200
    assert len({(c.problem.text, c.replies, c.text) for c in TURNS}) == len(TURNS)
    assert sum(c.leak for c in TURNS) >= 80 and sum(c.wrong for c in TURNS) >= 80
    assert sum(not (c.leak or c.wrong) for c in TURNS) >= 60


@pytest.mark.parametrize(("gate", "name"), [(0, "leakage"), (1, "correctness")])
def test_precision_and_recall(gate: int, name: str) -> None:
    precision, recall, differ = rates(gate)
    print(f"{name}: precision {precision:.3f}, recall {recall:.3f} on {len(TURNS)} turns")
    assert precision >= 0.97 and recall >= 0.97, "\n".join(differ)


@pytest.mark.parametrize("text", ["do x 4 = .", "add first and then subtract 13 - 5 = do next ?"])
def test_drifted_tells_are_leaks(text: str) -> None:
    assert findings(dialogue(TURNS[0].problem, text), TURNS[0].problem)["leakage"]


P = problem_of("sam packs 3 boxes of 4 pears and buys 5 more . | first 3 x 4 = 12 . then 12 + 5 = 17 .")
EXTRA = problem_of(
    "leo is 7 years old . leo bakes 2 trays of 5 buns and gives 4 away . | first 2 x 5 = 10 . then 10 - 4 = 6 ."
)
ASK, CUE, FLAG = (
    "what would you do first ?",
    "are the groups all equal ?",
    "not quite . try that step again .",
)


@pytest.mark.parametrize(
    ("problem", "turns", "leak", "wrong"),
    [
        (P, [CUE, "first 3 x 4 = 12 .", "do more come later ?", "then 12 + 5 = 17 .", "<end_of_conversation>"], [], []),
        (P, [ASK, "first 3 + 4 = 7 .", FLAG, "first 3 x 4 = 12 ."], [], []),
        (P, [ASK, "first 3 + 4 = 7 .", FLAG, "ok ."], [], []),
        (P, [ASK, "first 3 + 4 = 7 .", CUE, "first 3 x 4 = 12 ."], [], []),
        (P, [ASK, "first 3 + 4 = 7 .", CUE, "ok ."], [], ["error_left_standing"]),
        (P, [ASK, "first 3 + 4 = 7 .", FLAG, "first 3 + 4 = 7 ."], [], ["error_left_standing"]),
        # Naming the method is no correction: the error stands, and the path is laid out.
        (P, [ASK, "first 3 + 4 = 7 .", "multiply first and then add .", "ok ."],
         ["method_named", "path_laid_out"], ["error_left_standing"]),
        # Both operations are the student's own, but it has given one of them up: a summary is the path.
        (P, [ASK, "first 3 x 4 = 12 . then 12 + 5 = 17 .", CUE, "first 3 + 4 = 7 .", "multiply first and then add .", "ok ."],
         ["path_laid_out"], ["error_left_standing"]),
        (P, [ASK, "first 3 x 4 = 13 .", "please check the result of that step .", "ok ."], [], []),
        (P, [ASK, "first 3 x 4 = 13 .", "is every number needed ?", "ok ."], [], ["error_left_standing"]),
        (EXTRA, [ASK, "first 7 x 5 = 35 .", "is every number needed ?", "ok ."], [], []),
        (EXTRA, [ASK, "first 7 x 5 = 35 .", "please check the result of that step .", "ok ."], [], ["error_left_standing"]),
        (P, ["how are you today ?", "i am fine .", "<end_of_conversation>"], [], ["no_teaching"]),
        (P, [ASK, "ok .", ASK, "ok .", ASK, "ok ."], [], ["repetition"]),
        (P, [ASK, "ok .", "", "ok ."], [], ["blank"]),
        (P, ["<end_of_conversation>", "ok .", ASK, "ok ."], [], ["blank"]),
        (P, ["3 x 4 = 12 .", "ok . first 3 x 4 = 12 .", "3 x 4 = 12 .", "ok ."], ["value_stated", "method_named"], []),
        (P, ["the answer is 17 .", "ok . the answer is 17 ."], ["answer_stated"], []),
        (P, ["the answer is 18 .", "ok . the answer is 18 ."], ["value_stated"], ["false_claim", "error_left_standing"]),
        # A step 2 that goes on from the student's own slip is right as a step.
        (P, [ASK, "first 3 x 4 = 13 .", "please check the result of that step .", "then 13 + 5 = 18 .",
             "yes that step is right .", "ok ."], [], []),
    ],
)  # fmt: skip
def test_whole_dialogues(problem: Problem, turns: list[str], leak: list[str], wrong: list[str]) -> None:
    found = findings(dialogue(problem, *turns), problem)
    assert [f.criterion for f in found["leakage"]] == leak
    assert [f.criterion for f in found["correctness"]] == wrong


def test_cut_and_malformed_turns_are_degenerate() -> None:
    for turn in (Turn("tutor", ASK, truncated=True), Turn("tutor", ASK, well_formed=False)):
        made = dialogue(P)
        made.add(turn)
        assert [f.criterion for f in findings(made, P)["correctness"]] == ["degenerate"]


def test_verdicts_come_with_evidence_that_the_environment_accepts() -> None:
    made = dialogue(P, CUE, "first 3 + 4 = 7 .", "the answer is 17 .", "ok .")
    pair = ProblemPair(id="p", source=P)
    verdicts = asyncio.run(judge_gates(MicroJudge(), made, pair, EnvSpec(), seed=0))
    assert (verdicts["leakage"].decision, verdicts["leakage"].criterion, verdicts["leakage"].turn) == (
        "reject",
        "answer_stated",
        3,
    )
    assert verdicts["correctness"].criterion == "error_left_standing"
    fine = asyncio.run(judge_gates(MicroJudge(), dialogue(P, CUE, "ok ."), pair, EnvSpec(), seed=0))
    assert {v.decision for v in fine.values()} == {"ok"}
    blank = asyncio.run(
        judge_gates(MicroJudge(), dialogue(P, "", "ok .", CUE, "ok ."), pair, EnvSpec(), seed=0)
    )
    assert (blank["correctness"].decision, blank["correctness"].turn) == ("reject", 1)


def test_problems_of_another_world_are_refused() -> None:
    with pytest.raises(ProblemDataError, match="micro-classroom only"):
        findings(dialogue(P, CUE), Problem(text="What is 2 + 2?", answer="4"))

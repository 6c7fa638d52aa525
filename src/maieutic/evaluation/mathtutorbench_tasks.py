"""The tasks of MathTutorBench: examples from its own data files, how a reply is read, and the metrics as it defines them.

| task | file | what is read of a reply | metrics |
|---|---|---|---|
| problem_solving | GSM8K | last number | accuracy |
| socratic_questioning | GSM8K, socratic | one line of questions | BLEU against the reference questions |
| solution_correctness | StepVerify, both versions | yes (incorrect) or no; else yes | accuracy, precision, recall, F1 |
| mistake_location | StepVerify, both versions | first number, else 0 | micro, macro, weighted F1 |
| mistake_correction | StepVerify | number after "Final Answer:", else the last | accuracy |
| scaffolding_generation, pedagogy_following, and their _hard versions | bridge files | the teacher turn | reward-model win rate |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from maieutic.errors import ProblemDataError
from maieutic.evaluation import text_metrics as tm
from maieutic.evaluation.conversations import Said, rows_of

_NUMBER = re.compile(r"-?\d*\.?\d+")
_FINAL = re.compile(r"Final Answer:\s*\$?([-,\d]*\.?\d+)")
_ANY = re.compile(r"\$?([-,\d]*\.?\d+)")


@dataclass(frozen=True, slots=True)
class Example:
    """One question: ``fields`` fill the task's prompt, ``target`` is what is right."""

    key: str
    problem: str
    """The cluster of its errors: both StepVerify examples of a row share it."""
    fields: dict[str, str]
    target: Any = None
    before: tuple[Said, ...] = ()
    human: str = ""
    solution: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """``read``: reply (cut at the stops) → prediction; ``right``: number of one sample that its measures are means of."""

    name: str
    file: str
    """The setting of the suite that names its file."""
    stops: tuple[str, ...]
    examples: Callable[[str, dict[str, Any]], list[Example]]
    read: Callable[[str], Any]
    metrics: Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]
    right: Callable[[Any, Any], float] | None = None
    rewarded: bool = False
    """Scored by the reward model against the human turn."""


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string, leading white space apart: what a server with these stops returns."""
    text = text.lstrip()
    ends = [at for s in stops if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


def _need(where: str, row: dict[str, Any], *keys: str) -> None:
    missing = [k for k in keys if row.get(k) is None]
    if missing:
        raise ProblemDataError(f"{where}: no column {', '.join(missing)}; there are {', '.join(row)}")


# ---- GSM8K -----------------------------------------------------------------------------------------------------------------


def _problem_solving(where: str, row: dict[str, Any]) -> list[Example]:
    _need(where, row, "question", "answer")
    target = str(row["answer"]).split("### ")[-1].replace(",", "").strip()
    return [Example(where, where, {"question": row["question"]}, float(target))]


def read_last_number(reply: str) -> float | None:
    """The last number of a reply (thousands separators are not read across, as published)."""
    found = _NUMBER.findall(reply)
    return float(found[-1]) if found else None


def _equal(prediction: float | None, target: float) -> float:
    return float(prediction is not None and abs(prediction - target) < 1e-6)


def _accuracy(targets: Sequence[float], predictions: Sequence[float | None]) -> dict[str, float]:
    right = [_equal(p, t) for t, p in zip(targets, predictions, strict=True)]
    return {"accuracy": sum(right) / len(right)}


def reference_questions(answer: str) -> list[str]:
    """The questions of a socratic GSM8K answer: each line reads ``question ** step``."""
    parts = [line.split(" ** ") for line in answer.split("\n")]
    return [p[0] for p in parts if len(p) == 2]


def _socratic(where: str, row: dict[str, Any]) -> list[Example]:
    _need(where, row, "question", "answer")
    return [Example(where, where, {"question": row["question"]}, reference_questions(str(row["answer"])))]


def _bleu(prediction: list[str], target: list[str]) -> float:
    return max((tm.sentence_bleu(p, target) for p in prediction), default=0.0)


def _socratic_metrics(targets: Sequence[list[str]], predictions: Sequence[list[str]]) -> dict[str, float]:
    pairs = [(t, p) for t, p in zip(targets, predictions, strict=True) if t and p]
    if not pairs:
        return {"bleu": 0.0, "avg_questions": 0.0}
    return {
        "bleu": sum(_bleu(p, t) for t, p in pairs) / len(pairs),
        "avg_questions": sum(min(len(p), len(t)) for t, p in pairs) / len(pairs),
    }


# ---- StepVerify --------------------------------------------------------------------------------------------------------------


def _steps(steps: Sequence[str]) -> str:
    # The last entry of a solution is its bare answer.
    return "\n".join(f"Step {i} - {step}" for i, step in enumerate(steps[:-1], start=1))


def _stepverify(where: str, row: dict[str, Any]) -> tuple[dict[str, str], dict[str, str], int]:
    """Fields of the erroneous and of the correct example of a row, and the (1-based) step of the error."""
    _need(
        where,
        row,
        "problem",
        "reference_solution",
        "student_incorrect_solution",
        "incorrect_index",
        "dialog_history",
    )
    history = row["dialog_history"]
    first = next((i for i, turn in enumerate(history) if turn["user"] == "Student"), None)
    if first is None:
        raise ProblemDataError(f"{where}: column 'dialog_history': no turn of the student")
    shared = {
        "question": row["problem"],
        "dialog_history": "\n".join(f"Teacher: {turn['text']}" for turn in history[:first]),
    }
    wrong = shared | {
        "student_solution": _steps(row["student_incorrect_solution"]),
        "student_chat_solution": history[first]["text"],
    }
    right = shared | {
        "student_solution": _steps(str(row["reference_solution"]).split("\n")),
        "student_chat_solution": str(row.get("student_correct_response") or ""),
    }
    return wrong, right, int(row["incorrect_index"]) + 1


def _correctness(where: str, row: dict[str, Any]) -> list[Example]:
    wrong, right, _ = _stepverify(where, row)
    return [Example(f"{where}/wrong", where, wrong, True), Example(f"{where}/right", where, right, False)]


def read_incorrect(reply: str) -> bool:
    """Whether the reply calls the solution incorrect; what says neither yes nor no counts as yes (as published)."""
    said = reply.strip().lower()
    return "yes" in said or "no" not in said


def _correctness_metrics(targets: Sequence[bool], predictions: Sequence[bool]) -> dict[str, float]:
    precision, recall, f1 = tm.f1_of(targets, predictions, True)
    return {"accuracy": tm.accuracy(targets, predictions), "precision": precision, "recall": recall, "f1": f1}


def _location(where: str, row: dict[str, Any]) -> list[Example]:
    wrong, right, step = _stepverify(where, row)
    return [Example(f"{where}/wrong", where, wrong, step), Example(f"{where}/right", where, right, 0)]


def read_step(reply: str) -> int:
    """The first number of a reply, 0 where there is none."""
    m = re.search(r"\d+", reply)
    return int(m.group()) if m else 0


def _location_metrics(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    # With one label an example, micro F1 is accuracy.
    return {
        "f1_micro": tm.accuracy(targets, predictions),
        "f1_macro": tm.f1_macro(targets, predictions),
        "f1_weighted": tm.f1_weighted(targets, predictions),
    }


def _correction(where: str, row: dict[str, Any]) -> list[Example]:
    wrong, _, _ = _stepverify(where, row)
    target = str(row["reference_solution"]).split("\n")[-1].replace(",", "").strip()
    return [Example(where, where, wrong, float(target))]


def read_final_answer(reply: str) -> float | None:
    """The number after ``Final Answer:``, else the last number; None where there is none that can be read."""
    m = _FINAL.search(reply)
    found = m.group(1) if m else (_ANY.findall(reply) or [None])[-1]
    try:
        return None if found is None else float(found.replace(",", ""))
    except ValueError:
        return None


# ---- bridge ----------------------------------------------------------------------------------------------------------------


def _bridge(where: str, row: dict[str, Any]) -> list[Example]:
    _need(where, row, "problem", "reference_solution", "dialog_history")
    history = row["dialog_history"]
    if not history:
        raise ProblemDataError(f"{where}: column 'dialog_history' is empty")
    said = [Said("tutor" if t["user"] in ("Teacher", "Tutor") else "student", t["text"]) for t in history]
    names = {"tutor": "Teacher", "student": "Student"}
    text = "\n".join(f"{names[s.speaker]}: {s.text}" for s in said[:-1])
    fields = {"question": row["problem"], "dialog_history": text}
    return [Example(where, where, fields, None, tuple(said[:-1]), said[-1].text, row["reference_solution"])]


def asks(reply: str) -> float:
    """1 when the reply asks something: a question mark or a question word (the benchmark's own side measure)."""
    words = {"what", "how", "why", "when", "where", "which", "who", "whose", "whom", "can", "could", "would"}
    return float("?" in reply or bool(words & set(reply.lower().split())))


def _asking(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    return {"question_share": sum(map(asks, predictions)) / len(predictions)}


def _text(reply: str) -> str:
    return reply.strip()


_TURN_STOPS = ("Student:", "\n\n", "Teacher:")
TASKS = {
    task.name: task
    for task in (
        Task(
            "problem_solving", "gsm8k", ("Question:",), _problem_solving, read_last_number, _accuracy, _equal
        ),
        Task(
            "socratic_questioning",
            "socratic",
            ("Problem:", "\n"),
            _socratic,
            lambda r: [r.strip()],
            _socratic_metrics,
            _bleu,
        ),
        Task(
            "solution_correctness",
            "stepverify",
            ("Problem:", "Q:", "Explanation:"),
            _correctness,
            read_incorrect,
            _correctness_metrics,
            lambda p, t: float(p == t),
        ),
        Task(
            "mistake_location",
            "stepverify",
            ("Problem:", "Q:"),
            _location,
            read_step,
            _location_metrics,
            lambda p, t: float(p == t),
        ),
        Task(
            "mistake_correction",
            "stepverify",
            ("Problem:", "Student:"),
            _correction,
            read_final_answer,
            _accuracy,
            _equal,
        ),
        *(
            Task(f"{name}{hard}", f"bridge{hard}", _TURN_STOPS, _bridge, _text, _asking, rewarded=True)
            for name in ("scaffolding_generation", "pedagogy_following")
            for hard in ("", "_hard")
        ),
    )
}


def load_examples(task: Task, source: str, *, limit: int | None, offline: bool) -> list[Example]:
    """The examples of a task from its file; ``limit`` counts rows."""
    out: list[Example] = []
    for number, (_, row) in enumerate(rows_of(source, offline=offline)):
        if limit is not None and number >= limit:
            break
        out += task.examples(f"{task.file}-{number}", row)
    if not out:
        raise ProblemDataError(f"{source}: no rows for task {task.name}")
    return out

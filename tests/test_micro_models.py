"""The shipped micro models: whole, small, pinned, and behaving as the world says they do."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from maieutic.check import resolve
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Student
from maieutic.errors import ModelError
from maieutic.grading import Grader
from maieutic.micro import shipped, speech
from maieutic.micro.build import Plan, build_model, write_record
from maieutic.micro.pairs import _problem
from maieutic.micro.world import MicroProblem, apply, make_pair, make_problem, other, step1, step2
from maieutic.models import resolve_model
from maieutic.recipe import load_recipe
from maieutic.resources import list_recipes
from maieutic.seeds import derive

RECIPES = [name for name in list_recipes() if name.startswith("micro/")]


def test_shipped_weights_are_whole_and_small() -> None:
    assert {"student", "student-b", "tutor", "tutor-thinking"} == set(shipped.shipped_names())
    for name in shipped.shipped_names():
        assert resolve_model(f"micro/{name}", offline=True) == str(shipped.models_dir() / name)
    size = sum(file.stat().st_size for file in shipped.models_dir().rglob("*") if file.is_file())
    assert size <= 6_000_000


def test_unknown_and_changed_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="did you mean 'micro/tutor'"):
        resolve_model("micro/tuter")
    shutil.copytree(shipped.models_dir(), tmp_path / "models")
    weights = tmp_path / "models" / "student" / shipped.WEIGHTS
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    monkeypatch.setattr(shipped, "models_dir", lambda: tmp_path / "models")
    shipped.shipped_model.cache_clear()
    try:
        with pytest.raises(ModelError, match="changed or damaged"):
            resolve_model("micro/student")
    finally:
        shipped.shipped_model.cache_clear()


def test_recipes_differ_in_what_their_names_say() -> None:
    assert len(RECIPES) == 11
    full = resolve(load_recipe("micro/full")).model_dump()
    differing = {}
    for name in RECIPES:
        other = resolve(load_recipe(name)).model_dump()
        differing[name.removeprefix("micro/")] = {
            f"{section}.{key}"
            for section in ("env", "reward", "algorithm", "training", "problems", "judge")
            for key in other[section]
            if other[section][key] != full[section][key]
        }
    assert differing == {
        "full": set(),
        "grpo": {"algorithm.loss"},
        "no-gates": {"env.gates"},
        "leak-gate-only": {"env.gate_names"},
        "leak-gate-only-no-mask": {"env.gate_names", "env.hide_tutor"},
        "no-mask": {"env.hide_tutor"},
        "no-transfer": {"env.transfer"},
        "tutorrl": {
            *("env.transfer", "env.hide_tutor", "env.gates"),
            *("algorithm.loss", "algorithm.advantage_scale", "algorithm.kl_beta"),
        },
        "base": {"training.max_steps", "training.optimizer"},
        "thinking": {"env.thinking_budget", "env.conversation_limit"},
        "ensemble": set(),
    }  # fmt: skip


def test_building_follows_from_the_seed(tmp_path: Path) -> None:
    plan = Plan("tutor", 3)
    hashes = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_model(plan, tmp_path / folder, seed)
        hashes.append(write_record(tmp_path / folder, seed)["tutor"])
    assert hashes[0] == hashes[1] != hashes[2]
    assert json.loads((tmp_path / "c" / shipped.RECORD).read_text())["seed"] == 2


# ---- what the students do, through the general engine -------------------------------------------------------------------


def students() -> dict[str, Student]:
    from maieutic.runtime import build_students

    names = [name for name in shipped.shipped_names() if name.startswith("student")]
    return {n: build_students(load_recipe("micro/full", [f"students.0.model=micro/{n}"]))[0] for n in names}


def lesson(p: MicroProblem, *turns: str) -> Dialogue:
    made = Dialogue(f"{p.text} {turns}", p.text)
    made.add(Turn("student", f"can you help me ? {p.text}", scripted=True))
    for n, text in enumerate(turns):
        made.add(Turn("student" if n % 2 else "tutor", text))
    return made


async def solve_rate(
    student: Student, grader: Grader, make: Any, *, hide: bool = True, same: bool = False
) -> float:
    """Mean over held-out pairs of the share of right answers after ``make(source)`` (None: cold)."""
    rng, right, n = random.Random(0), 0, 0
    pairs = [make_pair(rng, test=True) for _ in range(32)]

    async def one(source: MicroProblem, transfer: MicroProblem) -> list[str]:
        q = source if same else transfer
        answers = await student.attempt(
            _problem(q), k=8, seed=derive(q.text), dialogue=make and make(source), hide_tutor=hide
        )
        return [g.verdict for g in await grader.grade_many(answers, str(q.answer))]

    for verdicts in await asyncio.gather(*(one(*pair) for pair in pairs)):
        right, n = right + verdicts.count("right"), n + len(verdicts)
    return right / n


async def follows(student: Student, make: Any, step: Any, *, family: str | None = None) -> float:
    """Mean over held-out problems of how often the reply to ``make(problem)`` holds ``step(problem)``."""
    rng = random.Random(1)
    problems = [make_problem(rng, test=True, family=family) for _ in range(32)]  # type: ignore[arg-type]
    replies = await asyncio.gather(
        *(student.reply(make(p), seed=derive(p.text, k)) for p in problems for k in range(8))
    )
    wanted = [step(p) for p in problems for _ in range(8)]
    return sum(w in turn.visible for w, turn in zip(wanted, replies, strict=True)) / len(replies)


def first_step(p: MicroProblem, *, extra: bool = False) -> str:
    a = p.d if extra else p.a
    return step1(a, p.op1, p.b, apply(p.op1, a, p.b))


def second_step(p: MicroProblem) -> str:
    r1, r2 = p.results(p.op1, p.op2)[:2]
    return step2(r1, p.op2, p.c, r2)


def wrong(p: MicroProblem) -> str:
    """Own words about both steps, each with the other operation."""
    return p.with_method(other(1, p.op1), other(2, p.op2)).solution


async def behaviour(student: Student) -> dict[str, float]:
    """What the student does, as rates."""

    def told(p: MicroProblem) -> Dialogue:
        return lesson(p, speech.tell(p, p.op1, p.op2), "ok .")

    def named(p: MicroProblem) -> Dialogue:
        return lesson(p, speech.name_both(p.op1, p.op2), "ok .")

    ask, cues = speech.ASKS[1][0], speech.CUES
    with Grader(n_workers=1) as grader:
        return {
            "cold": await solve_rate(student, grader, None),
            "own words": await solve_rate(student, grader, lambda p: lesson(p, "?", p.solution)),
            "wrong words": await solve_rate(student, grader, lambda p: lesson(p, "?", wrong(p))),
            "told, hidden": await solve_rate(student, grader, told),
            "told, seen": await solve_rate(student, grader, told, hide=False),
            "named, seen": await solve_rate(student, grader, named, hide=False),
            "cue": await follows(student, lambda p: lesson(p, cues[1, p.op1][0]), first_step),
            "second cue": await follows(
                student,
                lambda p: lesson(p, cues[1, p.op1][0], first_step(p), cues[2, p.op2][0]),
                second_step,
            ),
            "needed": await follows(
                student,
                lambda p: lesson(p, ask, first_step(p, extra=True), speech.HINT_NEEDED),
                first_step,
                family="extra",
            ),
        }


def test_students_learn_from_their_own_words_and_from_what_they_see() -> None:
    for name, student in students().items():
        found = asyncio.run(behaviour(student))
        print(name, found)
        # Rates of 256 answers over 32 problems: a standard error of about .05 where the method is a guess, .01 to .02 elsewhere.
        assert 0.12 <= found["cold"] <= 0.38, name
        assert found["own words"] >= 0.85, name
        assert found["wrong words"] <= 0.05, name
        assert abs(found["told, hidden"] - found["cold"]) <= 0.08, name
        assert found["told, seen"] >= 0.8, name
        assert found["named, seen"] >= 0.75, name
        assert found["needed"] >= 0.85, name
        # The second student follows cues less willingly.
        assert found["cue"] >= (0.75 if name == "student" else 0.48), name
        assert found["second cue"] >= (0.8 if name == "student" else 0.4), name

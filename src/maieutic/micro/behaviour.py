"""What the micro models do before anybody trains them: the tables of ``data/micro/README.md``, and the test that holds them.

Everything is measured on held-out stories through the general engine, with the prompts and the sampling of ``recipes/micro``.
Run as ``python -m maieutic.micro.behaviour [key=value …]`` (a build's ``overrides.txt``) for the tables.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Student
from maieutic.grading import Grader
from maieutic.micro import speech
from maieutic.micro.pairs import as_problem
from maieutic.micro.scripts import Move, StudentScript, diagnosis, tutor_move
from maieutic.micro.world import Family, MicroProblem, apply, make_pair, make_problem, other, step1, step2
from maieutic.seeds import derive

Make = Callable[[MicroProblem], Dialogue]


def lesson(p: MicroProblem, *turns: str) -> Dialogue:
    """A dialogue about ``p``: the scripted opening, then ``turns``, the tutor's first."""
    made = Dialogue(f"{p.text} {turns}", p.text)
    made.add(Turn("student", f"can you help me ? {p.text}", scripted=True))
    for n, text in enumerate(turns):
        made.add(Turn("student" if n % 2 else "tutor", text))
    return made


async def solve_rate(
    student: Student, grader: Grader, make: Make | None, *, hide: bool = True, size: int = 32, k: int = 8
) -> float:
    """Mean over ``size`` pairs of the share of right answers to the transfer problem after ``make(source)`` (None: cold)."""
    rng, right, n = random.Random(0), 0, 0
    pairs = [make_pair(rng, test=True) for _ in range(size)]

    async def one(source: MicroProblem, transfer: MicroProblem) -> list[str]:
        answers = await student.attempt(
            as_problem(transfer),
            k=k,
            seed=derive(transfer.text),
            dialogue=make and make(source),
            hide_tutor=hide,
        )
        return [g.verdict for g in await grader.grade_many(answers, str(transfer.answer))]

    for verdicts in await asyncio.gather(*(one(*pair) for pair in pairs)):
        right, n = right + verdicts.count("right"), n + len(verdicts)
    return right / n


async def follows(
    student: Student,
    make: Make,
    words: Callable[[MicroProblem], str],
    *,
    family: Family | None = None,
    size: int = 32,
    k: int = 8,
) -> float:
    """Mean over ``size`` problems of how often the reply to ``make(problem)`` holds ``words(problem)``."""
    rng = random.Random(1)
    problems = [make_problem(rng, test=True, family=family) for _ in range(size)]
    replies = await asyncio.gather(
        *(student.reply(make(p), seed=derive(p.text, j)) for p in problems for j in range(k))
    )
    wanted = [words(p) for p in problems for _ in range(k)]
    return sum(w in turn.visible for w, turn in zip(wanted, replies, strict=True)) / len(replies)


def _first(p: MicroProblem, *, extra: bool = False, slip: int = 0) -> str:
    a = p.d if extra else p.a
    return step1(a, p.op1, p.b, apply(p.op1, a, p.b) + slip)


def _second(p: MicroProblem) -> str:
    r1, r2 = p.results(p.op1, p.op2)[:2]
    return step2(r1, p.op2, p.c, r2)


def _otherwise(p: MicroProblem) -> MicroProblem:
    """The problem with the other operation at each step."""
    return p.with_method(other(1, p.op1), other(2, p.op2))


async def student_behaviour(student: Student, *, size: int = 32, k: int = 8) -> dict[str, float]:
    """What a student does, as rates by situation."""
    ask, cues = speech.ASKS[1][0], speech.CUES

    def told(p: MicroProblem) -> Dialogue:
        return lesson(p, speech.tell(p, p.op1, p.op2), "ok .")

    def named(p: MicroProblem) -> Dialogue:
        return lesson(p, speech.name_both(p.op1, p.op2), "ok .")

    def cued_in_vain(p: MicroProblem) -> Dialogue:
        q = _otherwise(p)
        return lesson(p, cues[1, p.op1][0], _first(q), cues[2, p.op2][0], _second(q))

    with Grader(n_workers=1) as grader:

        async def after(make: Make | None, hide: bool = True) -> float:
            return await solve_rate(student, grader, make, hide=hide, size=size, k=k)

        async def says(
            make: Make, words: Callable[[MicroProblem], str], family: Family | None = None
        ) -> float:
            return await follows(student, make, words, family=family, size=size, k=k)

        return {
            "cold": await after(None),
            "own right words about both steps, tutor hidden": await after(
                lambda p: lesson(p, "?", p.solution)
            ),
            "own right words about step 1 only, tutor hidden": await after(
                lambda p: lesson(p, "?", _first(p))
            ),
            "own wrong words about both steps, tutor hidden": await after(
                lambda p: lesson(p, "?", _otherwise(p).solution)
            ),
            'told the answer, "ok", tutor hidden': await after(told),
            'told the answer, "ok", tutor in view': await after(told, hide=False),
            'told the method, "ok", tutor in view': await after(named, hide=False),
            "cued about both steps in vain, tutor hidden": await after(cued_in_vain),
            "cued about both steps in vain, tutor in view": await after(cued_in_vain, hide=False),
            "a cue brings the right step 1": await says(lambda p: lesson(p, cues[1, p.op1][0]), _first),
            "a cue brings the right step 2, after step 1": await says(
                lambda p: lesson(p, cues[1, p.op1][0], _first(p), cues[2, p.op2][0]), _second
            ),
            "an open question brings the right step 1": await says(lambda p: lesson(p, ask), _first),
            '"not quite" mends a wrong step 1': await says(
                lambda p: lesson(p, ask, _first(_otherwise(p)), speech.FLAGS[0]), _first
            ),
            '"check the result" mends a slip': await says(
                lambda p: lesson(p, ask, _first(p, slip=1), speech.HINT_COUNT), _first
            ),
            '"is every number needed ?" mends step 1': await says(
                lambda p: lesson(p, ask, _first(p, extra=True), speech.HINT_NEEDED), _first, "extra"
            ),
            "told the method, it states step 1 itself": await says(
                lambda p: lesson(p, speech.name_both(p.op1, p.op2)), _first
            ),
        }


def judgements(model: Any, *, size: int = 200) -> dict[str, dict[str, float]]:
    """How likely a tutor finds each judgement after a student's step, by what is wrong with that step (``right``, ``op``, …).

    Probabilities of the whole turn under ``model`` (a causal language model without thinking), mean over held-out stories;
    ``confirm`` and ``flag`` sum over their wordings.
    """
    import torch

    from maieutic.micro import corpus
    from maieutic.micro.models import Encoder

    rng, encode = random.Random(5), Encoder()
    t, env = corpus.prompts()
    turns = {
        "confirm": speech.CONFIRMS,
        "flag": speech.FLAGS,
        "count": (speech.HINT_COUNT,),
        "needed": (speech.HINT_NEEDED,),
    }
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(size):
        p = make_problem(rng, test=True)
        student = StudentScript(p, rng)
        said = [
            corpus.said("system", t.tutor_system(env, p.text)),
            corpus.said("user", t.opening(p.text)),
        ]
        for _ in range(rng.choice([1, 2])):
            move: Move = tutor_move(p, student, rng, ({"cue1": 0.6, "ask1": 0.4}, {"cue2": 0.7, "ask2": 0.3}))
            said += [corpus.said("assistant", move.text), corpus.said("user", student.reply(move))]
        chances = {}
        for name, wordings in turns.items():
            chances[name] = 0.0
            for text in wordings:
                ids, learned = encode([*said, corpus.said("assistant", text, True)])
                with torch.no_grad():
                    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                chances[name] += math.exp(
                    sum(float(logprobs[i - 1, ids[i]]) for i, on in enumerate(learned) if on)
                )
        found.setdefault(diagnosis(p, student), []).append(chances)
    return {
        wrong: {name: sum(row[name] for row in rows) / len(rows) for name in turns}
        for wrong, rows in sorted(found.items())
    }


def main(overrides: Sequence[str]) -> None:
    """Print the tables as Markdown."""
    from transformers import AutoModelForCausalLM

    from maieutic.models import resolve_model
    from maieutic.recipe import load_recipe
    from maieutic.runtime import build_students

    recipe = load_recipe("micro/ensemble", list(overrides))
    students = build_students(recipe)
    rates = [asyncio.run(student_behaviour(s, size=48, k=16)) for s in students]
    print(f"| | {' | '.join(f'`{s.name}`' for s in recipe.students)} |\n|---|{'---|' * len(students)}")
    for situation in rates[0]:
        print(f"| {situation} | {' | '.join(f'{r[situation]:.2f}' for r in rates)} |")
    assert recipe.tutor.model is not None
    table = judgements(AutoModelForCausalLM.from_pretrained(resolve_model(recipe.tutor.model, offline=True)))
    names = list(next(iter(table.values())))
    print(f"\n| the student's step | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for wrong, chances in table.items():
        print(f"| {wrong} | {' | '.join(f'{chances[n]:.3f}' for n in names)} |")


if __name__ == "__main__":
    main(sys.argv[1:])

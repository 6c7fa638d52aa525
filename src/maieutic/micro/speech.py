"""Every sentence of the world, as the scripts say it, and the vocabulary of the models.

Tutors that are trained drift away from these sentences; :mod:`maieutic.micro.gates` must read them all the same.
"""

from __future__ import annotations

from maieutic.dialogue import BLANK, HIDDEN
from maieutic.micro.world import (
    DOUBLING,
    ENDINGS,
    EXTRA,
    ITEMS,
    MAX_NUMBER,
    NAMES,
    OPENINGS,
    MicroProblem,
    Op,
    last,
    step1,
    step2,
)

VERBS: dict[Op, str] = {"x": "multiply", "+": "add", "-": "subtract"}
END_TOKEN = "<end_of_conversation>"

CUES: dict[tuple[int, Op], tuple[str, ...]] = {
    (1, "x"): ("are the groups all equal ?", "is each one the same size ?"),
    (1, "+"): ("do two amounts come together ?", "are there two kinds here ?"),
    (2, "+"): ("do more come later ?", "does it grow at the end ?"),
    (2, "-"): ("do some go away later ?", "does it shrink at the end ?"),
}
"""Questions that point at what the story says, and leave the operation to the student."""
ASKS: dict[int, tuple[str, ...]] = {
    1: ("what would you do first ?", "how does it start ?"),
    2: ("what would you do next ?", "how does it go on ?"),
}
CONFIRMS = ("yes that step is right .", "good that is correct .")
FLAGS = ("not quite . try that step again .", "that step is wrong . think again .")
HINT_COUNT = "please check the result of that step ."
HINT_NEEDED = "is every number needed ?"
HINT_LEFT = "is something left to do ?"
PROBE = "why ? please explain that step ."
CHAT = "how are you today ?"
OKS = ("ok .", "ok i see .", "thanks .")
FINE = "i am fine ."

ROLES = ("system", "user", "assistant")
PAD, UNKNOWN, END, THINK, THINK_END = "<pad>", "<unk>", "<|end|>", "<think>", "</think>"
CONTROL = (PAD, UNKNOWN, *(f"<|{role}|>" for role in ROLES), END, THINK, THINK_END)

DIAGNOSES = (
    "nothing is done yet .",
    "step one is right .",
    "step one is wrong .",
    "step two is right .",
    "step two is wrong .",
    "the result is wrong .",
    "a number is not needed .",
    "something is left .",
)
"""What the thinking tutor says to itself."""


def name_both(op1: Op, op2: Op) -> str:
    return f"{VERBS[op1]} first and then {VERBS[op2]} ."


def name_one(step: int, op: Op) -> str:
    return f"{VERBS[op]} first ." if step == 1 else f"then {VERBS[op]} ."


def tell(p: MicroProblem, op1: Op, op2: Op) -> str:
    """The whole way with all values."""
    r = p.results(op1, op2)
    out = f"{p.a} {op1} {p.b} = {r[0]} and {r[0]} {op2} {p.c} = {r[1]}"
    if len(r) > 2:
        out += f" and twice {r[1]} = {r[2]}"
    return f"{out} so the answer is {r[-1]} ."


def tell_one(p: MicroProblem, op1: Op) -> str:
    return f"{p.a} {op1} {p.b} = {p.results(op1, '+')[0]} ."


def parrot(value: int) -> str:
    return f"ok . the answer is {value} ."


def box(value: int) -> str:
    """The final answer as the general grader reads it."""
    return f"\\boxed{{ {value} }}"


def vocabulary(prompts: tuple[str, ...]) -> list[str]:
    """All words: control tokens, the end token, the numbers, then every word of ``prompts`` and of the sentences, sorted."""
    blank = dict(n="", i="", a="", b="", c="", d="")
    texts = [t.format(**blank) for _, t in (*OPENINGS, *ENDINGS)] + [DOUBLING, EXTRA.format(**blank)]
    texts += [q for group in (*CUES.values(), *ASKS.values()) for q in group]
    texts += [*CONFIRMS, *FLAGS, HINT_COUNT, HINT_NEEDED, HINT_LEFT, PROBE, CHAT, *OKS, FINE, *NAMES, *ITEMS]
    texts += [*DIAGNOSES, "so", "ask", "tell", "plan", HIDDEN, BLANK, *VERBS.values(), *prompts]
    texts += [
        step1(0, "x", 0, 0),
        step2(0, "+", 0, 0),
        last(0, 0),
        name_both("x", "-"),
        box(0),
        parrot(0),
        "- so the",
    ]
    numbers = [str(n) for n in range(MAX_NUMBER + 1)]
    fixed = [*CONTROL, END_TOKEN, *numbers]
    return fixed + sorted({w for t in texts for w in t.split()} - set(fixed))

"""Dialogues for the tests of REAT's distillation: students with cues that the rule-driven roles read, good and bad tutors."""

from __future__ import annotations

import random
from pathlib import Path

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.transcripts import TranscriptWriter

NAMES = ("Monica", "Tobias", "Priya", "Lewis", "Jasper", "Samantha")
STUDENT = (
    "I think {a} + {b} = {bad}. Is that right?",
    "Ugh, this is so hard. {a} - {b} = {bad}, I give up.",
    "I'm confused, I don't know what to do with {a} and {b}.",
    "I still think {a} times {b} because it says so.",
    "Maybe it is {bad}? I guess.",
    "Oh, I see now! {a} * {b} = {gold}.",
    "I misread it, I used {b} only.",
    "So then it is {bad}, what should I do next?",
)
TUTOR = (
    "Multiply {a} by {b}, the answer is {gold}.",
    "Good job! Keep going.",
    "What do you do next? You multiply because there are groups.",
    "Please work it out again slowly: which part of the calculation would you check first?",
    "This part trips many people up, and you already have a piece of it. What do we know for sure, and what follows from it?",
    "Say in your own words what each quantity stands for: which one is a part of the other?",
    "Read the text again: what is given there, and what did you use?",
    "How do you know that your step is right, and what comes after it?",
)


def episode(number: int, turns: int = 4) -> Episode:
    """Episode ``number``: equal numbers give equal episodes."""
    rng = random.Random(number)
    a, b = rng.randint(3, 9), rng.randint(11, 40)
    name = NAMES[number % len(NAMES)]
    values = {"a": a, "b": b, "gold": a * b, "bad": a * b + rng.randint(1, 7)}
    text = f"{name} packs {a} boxes with {b} pencils each. How many pencils does {name} pack?"
    pair = ProblemPair(
        id=f"p-{number}", source=Problem(text=text, answer=str(a * b), solution=f"{a} * {b} = {a * b}")
    )
    said = [Turn("student", f"Teacher, how do I do this problem?\n\n{text}", scripted=True)]
    for n in range(turns):
        said.append(Turn("tutor", rng.choice(TUTOR).format(**values)))
        last = "Thank you!" if n == turns - 1 else rng.choice(STUDENT).format(**values)
        said.append(Turn("student", last))
    said.append(Turn("tutor", "You're welcome, goodbye."))
    dialogue = Dialogue(id=f"e-{number}", problem=text, turns=said, end="max_turns")
    return Episode(
        id=f"e-{number}",
        group_id=f"g-{number}",
        pair=pair,
        phase="eval",
        step=0,
        index=0,
        seed=number,
        student="rule",
        dialogue=dialogue,
    )


def write_transcripts(run: Path, episodes: int = 6, turns: int = 4) -> Path:
    """A run folder with one transcript file; returns the folder."""
    TranscriptWriter(run, arm="base").write("eval", 0, [episode(n, turns) for n in range(episodes)])
    return run

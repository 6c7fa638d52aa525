"""``maieutic chat``: a person is the student of any tutor arm, in the terminal.

The dialogue is the environment's own (opening, turn limit, end token); what the tutor is given and how it is sampled are those
of an evaluation. ``/think`` shows the private thinking of the last tutor turn, ``/test`` ends the dialogue and poses the post-test,
``/quit`` ends it without. Text of models is printed without control characters, which could steer a terminal.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, PostTest
from maieutic.errors import MaieuticError, ProblemDataError
from maieutic.problems.schema import Problem, ProblemPair, StudentKey
from maieutic.seeds import derive

Read = Callable[[str], str]
Write = Callable[[str], None]

HELP = "/think  the tutor's thinking before its last turn\n/test   end here and take the test\n/quit   end here\n/help   this"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


class Leave(Exception):
    """The person ended the dialogue; ``test``: to take the post-test."""

    def __init__(self, test: bool) -> None:
        super().__init__("the person left")
        self.test = test


def printable(text: str) -> str:
    """Text for a terminal: characters that are not seen are named by their code, ``[U+001B]``."""
    return _CONTROL.sub(lambda m: f"[U+{ord(m[0]):04X}]", text.replace("\r\n", "\n"))


_KEY = StudentKey(model="person", prompt_hash="0" * 12, temperature=0.0, max_tokens=1)


@dataclass
class Person:
    """:class:`maieutic.env.base.Student` at a terminal. ``thinking``: show the tutor's thinking unasked."""

    read: Read
    write: Write
    thinking: bool = False
    name: str = "person"
    key: StudentKey = _KEY

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn:
        """Show the tutor's turn and read the answer; an empty line is asked for again. Raises :class:`Leave`."""
        self.show(dialogue)
        while True:
            try:
                # A thread: servers and engines of the tutor go on meanwhile.
                said = (await asyncio.to_thread(self.read, "you> ")).strip()
            except EOFError:
                raise Leave(test=False) from None
            if said == "/think":
                self.write(printable(_thinking(dialogue)))
            elif said in ("/quit", "/test"):
                raise Leave(test=said == "/test")
            elif said.startswith("/"):
                self.write(HELP)
            elif said:
                return Turn("student", said)

    def show(self, dialogue: Dialogue) -> None:
        """Print the last tutor turn."""
        turn = dialogue.turns[-1]
        if turn.speaker != "tutor":
            return
        if self.thinking and turn.thinking:
            self.write(f"  (thinks) {printable(turn.thinking)}")
        marks = " [cut off]" if turn.truncated else ""
        self.write(f"tutor> {printable(turn.visible) or '(nothing)'}{marks}")

    async def attempt(
        self,
        problem: Problem,
        *,
        k: int,
        seed: int,
        dialogue: Dialogue | None = None,
        hide_tutor: bool = True,
    ) -> list[str]:
        """The person's one answer, whatever ``k`` is."""
        self.write(f"Test, without the tutor:\n\n{printable(problem.text)}\n")
        try:
            return [await asyncio.to_thread(self.read, "your answer> ")]
        except EOFError:
            return [""]


def _thinking(dialogue: Dialogue) -> str:
    said = dialogue.by("tutor")
    return (said[-1].thinking if said else "") or "(this turn has no private thinking)"


async def converse(
    env: Any, tutor: Any, pair: ProblemPair, person: Person, grader: Any, *, seed: int, test: bool
) -> Episode:
    """One dialogue, and the post-test where the person wants it (``test``, or ``/test``). Gates are not asked."""
    dialogue = env.new_dialogue(pair, "chat")
    episode = Episode("chat", "chat", pair, "eval", 0, 0, seed, person.name, dialogue)
    person.write(f"Problem:\n\n{printable(pair.source.text)}\n\n{HELP}\n")
    wants = test
    try:
        await env.converse(tutor, person, dialogue, seed=seed)
        person.show(dialogue)
        person.write(f"(the dialogue has ended: {dialogue.end})")
    except Leave as left:
        wants = left.test
    if wants:
        episode.post_test = await _sit(env, person, grader, pair, dialogue, seed)
    return episode


async def _sit(
    env: Any, person: Person, grader: Any, pair: ProblemPair, dialogue: Dialogue, seed: int
) -> PostTest:
    which = "transfer" if env.env.transfer and pair.transfer is not None else "source"
    problem = pair.tested(env.env.transfer)
    result: PostTest = await env.post_test(
        person, grader, dialogue, problem, which, seed=derive(seed, "post_test", which)
    )
    person.write(f"{result.grades[0].replace('_', ' ')} (the answer is {printable(problem.answer)})")
    return result


def chat(
    recipe: Any,
    tutor: str,
    *,
    problem: int = 0,
    seed: int = 0,
    test: bool = False,
    thinking: bool = False,
    save: Path | None = None,
    read: Read = input,
    write: Write = print,
) -> Episode:
    """Talk to the arm that ``tutor`` names (as ``maieutic evaluate`` does) about a held-out problem of the recipe's experiment.

    ``save``: file that the transcript line is appended to. Raises named errors for an arm or a problem that is not there.
    """
    import tempfile

    from maieutic.evaluation.parts import Parts
    from maieutic.problems import load_problems
    from maieutic.transcripts import episode_to_json

    async def run() -> tuple[str, Episode]:
        with tempfile.TemporaryDirectory() as scratch:
            parts = Parts(recipe, Path(scratch))
            try:
                arm = parts.arm(tutor)
                await parts.start()
                _, pairs, _ = load_problems(parts.experiment.problems, [], offline=recipe.offline)
                if not 0 <= problem < len(pairs):
                    raise ProblemDataError(
                        f"there is no held-out problem {problem}: there are 0 to {len(pairs) - 1}"
                    )
                env = parts.env
                person = Person(read, write, thinking)
                return arm.name, await converse(
                    env,
                    arm.tutor(env.templates, env.env),
                    pairs[problem],
                    person,
                    parts.grader,
                    seed=seed,
                    test=test,
                )
            finally:
                await parts.close()

    if save is not None:
        _append(save, "")  # not after the talk is over
    name, episode = asyncio.run(run())
    if save is not None:
        _append(save, json.dumps(episode_to_json(episode, arm=name), ensure_ascii=True) + "\n")
    return episode


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise MaieuticError(f"{path}: the transcript cannot be written: {error.strerror}") from error

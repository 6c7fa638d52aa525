"""The latent-state tutor: policy → move → words. It is a :class:`maieutic.env.base.Tutor` like any other arm.

Every arm that chooses moves words them through one :class:`MoveWriter`, so that learned, fixed, random and rule policies differ in
the choice of moves and in nothing else; the prompt-engineering arm is :class:`maieutic.tutors.ChatTutor` on the same model and
prompt without the move instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from maieutic.config import EnvSpec
from maieutic.dialogue import Dialogue, Turn, tutor_view
from maieutic.engines.base import ChatModel, Sampling
from maieutic.env.prompts import EnvTemplates
from maieutic.errors import EngineError, RecipeError
from maieutic.latent.moves import NOTE, Taxonomy
from maieutic.latent.policy import Policy, choose
from maieutic.latent.reading import StateReader
from maieutic.seeds import derive

INSTRUCTION = """[Instruction for you, the tutor; the student does not see it.
Your next move: {name}. {definition}
{examples}Write your next message to the student so that it makes this move and no other, about the problem at hand. Do not \
name the move.]"""


def instruction(moves: Taxonomy, move: str, *, examples: int) -> str:
    """The move instruction with at most ``examples`` few-shot turns. The words are the taxonomy's: labelling reads the same."""
    m = moves[move]
    shots = "".join(f'Example: "{e}"\n' for e in m.examples[:examples])
    return INSTRUCTION.format(name=m.name, definition=m.definition, examples=shots)


@dataclass(frozen=True)
class MoveWriter:
    """Words a chosen move with a chat model."""

    chat: ChatModel
    templates: EnvTemplates
    env: EnvSpec
    moves: Taxonomy
    sampling: Sampling
    examples: int = 3

    async def write(self, dialogue: Dialogue, move: str, *, seed: int) -> Turn:
        """The tutor turn that makes ``move``; its note says so. An empty reply is asked for again once, then is an EngineError."""
        text = instruction(self.moves, move, examples=self.examples)
        last = dialogue.turns[-1]
        view = Dialogue(dialogue.id, dialogue.problem, dialogue.solution)
        view.turns = [
            *dialogue.turns[:-1],
            replace(last, note=f"{last.note}\n\n{text}" if last.note else text),
        ]
        system = self.templates.tutor_system(self.env, dialogue.problem, dialogue.solution)
        messages = tutor_view(view, system)
        sampling = Sampling(self.sampling.temperature, self.sampling.top_p, self.env.tutor_cap)
        for draw in (seed, derive(seed, "empty reply")):
            (out,) = await self.chat.complete(
                messages, sampling, seed=draw, n=1, session=f"tutor:{dialogue.id}"
            )
            visible = out.visible.strip()
            ended = self.env.end_token in visible
            visible = visible.replace(self.env.end_token, " ").strip()
            if visible:
                return Turn(
                    "tutor",
                    visible,
                    visible_tokens=out.tokens,
                    truncated=out.finish_reason == "length",
                    end_token=ended,
                    note=NOTE + move,
                )
        raise EngineError(
            f"the tutor model gave an empty reply twice in dialogue {dialogue.id} (move {move})"
        )


class LatentTutor:
    """Reads the state, chooses a move, has it worded.

    Raises :class:`RecipeError` at once when the policy was trained on other features or moves than it is given here.
    """

    def __init__(self, policy: Policy, reader: StateReader, writer: MoveWriter) -> None:
        trained = policy.feature_names
        if trained is not None and tuple(trained) != reader.features.names:
            raise RecipeError(
                f"the policy reads features {trained}, the feature set {reader.features.id} has {reader.features.names}"
            )
        names = getattr(policy, "move_names", None)
        if names is not None and tuple(names) != writer.moves.names:
            raise RecipeError(
                f"the policy chooses among {names}, taxonomy {writer.moves.name} has {writer.moves.names}"
            )
        self.policy, self.reader, self.writer = policy, reader, writer

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        """The next turn. A state that cannot be read raises LabelError, which ends the dialogue as ``tutor_failed``."""
        state = await self.reader.state(dialogue.problem, dialogue.turns)
        index, _ = choose(self.policy, state, seed=seed)
        return await self.writer.write(dialogue, self.writer.moves.names[index], seed=derive(seed, "words"))


@dataclass
class BranchTutor:
    """Makes ``first`` as its first move in this dialogue and lets ``then`` go on: a re-simulation of the augmentation."""

    first: str
    writer: MoveWriter
    then: LatentTutor
    prefix: Sequence[Turn]

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        if len(dialogue.turns) == len(self.prefix):
            return await self.writer.write(dialogue, self.first, seed=derive(seed, "words"))
        return await self.then.reply(dialogue, seed=seed)

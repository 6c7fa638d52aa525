"""The sample-level score: the Critic reads a whole dialogue (paper, section 4.2) by the same rubric as a turn."""

from __future__ import annotations

from html import escape

from maieutic.dialogue import Message, judge_view
from maieutic.env.base import Episode
from maieutic.reat import prompts
from maieutic.reat.readers import read_critique
from maieutic.reat.roles import Roles
from maieutic.reat.schema import Critique, Unknown
from maieutic.seeds import derive

SAMPLE_CRITIC = f"""You are a critic of tutoring. You score the tutor in a whole dialogue: not a single reply, but how the \
tutor led the student through it.

{prompts.RUBRIC}

Score the tutoring as a process. A dialogue that ended before the problem was solved is scored by what was done in it. Also give: \
quality (weak, mediocre or strong: your overall impression, in agreement with the scores), reasons (what you saw, by dimension), \
improvements (what should be better; empty if nothing).

{prompts.MATERIAL}

Answer with one JSON object with exactly the asked keys."""


def messages(episode: Episode) -> list[Message]:
    """The request: problem, gold solution and transcript, which says nothing of the arm or of what was retrieved."""
    source = episode.pair.source
    solution = f"{source.solution}\n\nAnswer: {source.answer}" if source.solution else source.answer
    user = (
        f"The problem:\n<problem>\n{escape(source.text, quote=False)}\n</problem>\n\n"
        f"Its solution:\n<answer>\n{escape(solution, quote=False)}\n</answer>\n\n"
        f"The dialogue to score:\n<transcript>\n{judge_view(episode.dialogue.turns)}\n</transcript>"
    )
    return [Message("system", SAMPLE_CRITIC), Message("user", user)]


async def score_sample(roles: Roles, episode: Episode) -> Critique | Unknown:
    """The Critic's record of the whole dialogue."""
    found = await roles.critic.ask(
        messages(episode),
        prompts.CRITIQUE_SCHEMA,
        read_critique,
        seed=derive(roles.seed, "sample", episode.id),
        row=f"sample:{episode.id}",
    )
    roles.note(found)
    return found

"""Scores of dialogues: turn level (the Critic on every meaningful tutor turn) and sample level (the Critic on the whole dialogue).

The scores of turns that were given an experience are also what its utility is updated with (equation 14): :func:`feed_back`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from maieutic.env.base import Episode
from maieutic.reat.persona import problem_id
from maieutic.reat.repository import Repository
from maieutic.reat.roles import Roles
from maieutic.reat.sample_score import score_sample
from maieutic.reat.schema import Unknown
from maieutic.reat.turns import TurnContext, contexts
from maieutic.reat.tutor import used


@dataclass(frozen=True, slots=True)
class TurnScore:
    """One tutor turn. ``score``: S in [0, 100]; None for a turn that is not meaningful, or where a role failed (``why``)."""

    turn: int
    meaningful: bool | None
    score: float | None
    state: str | None = None
    """The state that the scoring Observer saw."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class DialogueScore:
    """One dialogue. ``sample``: S of the whole, None where the Critic failed."""

    episode: str
    pair: str
    problem: str
    """What errors are clustered by."""
    persona: str
    turns: tuple[TurnScore, ...]
    sample: float | None
    why: str = ""

    @property
    def scored(self) -> list[float]:
        """S of the meaningful turns that have one."""
        return [t.score for t in self.turns if t.score is not None]

    @property
    def turn_level(self) -> float | None:
        """Mean over meaningful turns; None without any."""
        return sum(self.scored) / len(self.scored) if self.scored else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with the turn-level mean."""
        return asdict(self) | {"turn_level": self.turn_level}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DialogueScore:
        """Inverse of :meth:`as_dict`."""
        values = {k: v for k, v in data.items() if k != "turn_level"}
        return cls(**values | {"turns": tuple(TurnScore(**t) for t in data["turns"])})


async def score_turn(roles: Roles, context: TurnContext) -> TurnScore:
    """Observer, then Critic, as in distillation (the same requests, so a shared journal pays for them once)."""
    seen = await roles.observe(context)
    if isinstance(seen, Unknown):
        return TurnScore(context.turn, None, None, why=f"observer.{seen.reason}")
    state = seen.tags.key()
    if not seen.meaningful:
        return TurnScore(context.turn, False, None, state, "not_meaningful")
    critique = await roles.criticise(context, seen)
    if isinstance(critique, Unknown):
        return TurnScore(context.turn, True, None, state, f"critic.{critique.reason}")
    return TurnScore(context.turn, True, critique.score, state)


async def score_dialogue(roles: Roles, episode: Episode, transcript: str) -> DialogueScore:
    """Both levels of one dialogue. ``transcript``: name of its file (part of the requests' seeds, as in distillation).

    Raises only what stops a run.
    """
    found = list(contexts(episode, transcript, Counter()))
    *turns, whole = await asyncio.gather(*(score_turn(roles, c) for c in found), score_sample(roles, episode))
    failed = isinstance(whole, Unknown)
    return DialogueScore(
        episode=episode.id,
        pair=episode.pair.id,
        problem=problem_id(episode.pair),
        persona=str(episode.pair.provenance.get("persona", "")),
        turns=tuple(t for t in turns if isinstance(t, TurnScore)),
        sample=None if isinstance(whole, Unknown) else whole.score,
        why=f"sample.{whole.reason}" if failed and isinstance(whole, Unknown) else "",
    )


@dataclass(slots=True)
class Feedback:
    """What feeding scores back did."""

    updates: int = 0
    repeated: int = 0
    """Scores that had been counted before (a resumed run)."""
    pruned: int = 0
    unscored: int = 0
    """Uses whose turn has no score: they change nothing."""
    means: list[float] = field(default_factory=list)


def feed_back(
    repository: Repository, episodes: Sequence[Episode], scores: Sequence[DialogueScore]
) -> Feedback:
    """Equation 14 for every experience that a scored turn was given; each (episode, turn) counts once for an experience.

    Raises ValueError when scores and episodes do not belong together.
    """
    out = Feedback()
    for episode, score in zip(episodes, scores, strict=True):
        if episode.id != score.episode:
            raise ValueError(f"the score of {score.episode} is given for episode {episode.id}")
        by_turn = {t.turn: t.score for t in score.turns}
        for n, turn in enumerate(episode.dialogue.turns):
            record = used(turn)
            for id in record.ids if record is not None else ():
                value = by_turn.get(n)
                if value is None:
                    out.unscored += 1
                    continue
                done = repository.update_utility(id, value, source=f"{episode.id}:{n}")
                out.updates += not done.repeated
                out.repeated += done.repeated
                out.pruned += done.pruned
                out.means.append(value)
    return out

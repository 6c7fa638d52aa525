"""Tutors on language models: a policy that keeps its token record, and a prompted chat model that keeps none."""

from __future__ import annotations

import math
from typing import Literal

from maieutic.config import EnvSpec
from maieutic.dialogue import Dialogue, Message, Turn, tutor_view
from maieutic.engines.base import ChatModel, Engine, Sampling
from maieutic.env.base import Episode
from maieutic.env.prompts import EnvTemplates
from maieutic.errors import EngineError, TrajectoryError
from maieutic.tokens import Renderer, TokenSequence
from maieutic.training.trajectory import Segment, Trajectory


def system_prompt(templates: EnvTemplates, env: EnvSpec, dialogue: Dialogue) -> str:
    """The environment's tutor prompt for this dialogue, with the solution where the dialogue carries it."""
    return templates.tutor_system(env, dialogue.problem, dialogue.solution)


def _heard(turn: Turn) -> str:
    """A student turn as the tutor reads it: with its private note, as in :func:`maieutic.dialogue.tutor_view`."""
    return f"{turn.visible}\n\n{turn.note}" if turn.note else turn.visible


def _without_end_token(text: str, end_token: str) -> tuple[str, bool]:
    found = bool(end_token) and end_token in text
    return (text.replace(end_token, " ") if found else text).strip(), found


class PolicyTutor:
    """:class:`maieutic.env.base.Tutor` that samples from an engine, token in, token out.

    Its :class:`~maieutic.tokens.TokenSequence` lives in ``dialogue.record``; :meth:`trajectory` turns it into training data.
    ``sampling.max_tokens`` is replaced by the environment's cap. A dialogue that already holds tutor turns when it is first
    seen (an evaluation that starts in the middle) is rendered as history, and only what follows is sampled.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        templates: EnvTemplates,
        env: EnvSpec,
        sampling: Sampling,
        *,
        thinking_history: Literal["keep", "strip"] = "keep",
    ) -> None:
        if thinking_history == "keep":
            renderer.require_append_only()
        self._engine, self._renderer, self._env = engine, renderer, env
        self._sampling = Sampling(sampling.temperature, sampling.top_p, env.tutor_cap)
        self._templates = templates
        self._history: Literal["keep", "strip"] = thinking_history

    def prompt_ids(self, dialogue: Dialogue) -> list[int]:
        """Ids of the whole dialogue so far as history, up to the next tutor turn."""
        return self._renderer.prompt(self._messages(dialogue))

    def _messages(self, dialogue: Dialogue) -> list[Message]:
        return tutor_view(dialogue, system_prompt(self._templates, self._env, dialogue))

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        """The next tutor turn; None, and nothing recorded, when it might not fit the limits."""
        if not dialogue.turns or dialogue.turns[-1].speaker != "student":
            raise ValueError(f"dialogue {dialogue.id}: it is not the tutor's turn")
        sequence: TokenSequence | None = dialogue.record
        heard = None
        if sequence is None:
            messages = self._messages(dialogue)
            opening = next(i for i, m in enumerate(messages) if m.role == "user") + 1
            sequence = TokenSequence(self._renderer, messages, self._history)
            sequence.prompt_tokens = len(self._renderer.prompt(messages[:opening]))
            if sequence.prompt_tokens > self._env.prompt_limit:
                return None
            ids = sequence.ids
        else:
            heard = _heard(dialogue.turns[-1])
            ids = sequence.next_ids(heard)
        if not self._fits(sequence, len(ids)):
            return None
        (sample,) = await self._engine.generate(
            ids,
            self._sampling,
            seed=seed,
            stop_ids=self._renderer.stop_ids,
            session=f"tutor:{dialogue.id}",
        )
        if not sample.ids or len(sample.ids) != len(sample.logprobs):
            raise EngineError(
                f"dialogue {dialogue.id}: the engine returned {len(sample.ids)} tokens and {len(sample.logprobs)} log-probs"
            )
        # Recorded only now: a call that failed leaves the record as it was.
        if heard is not None:
            sequence.add_reply(heard)
        dialogue.record = sequence
        end_token = self._env.end_token
        split = self._renderer.split(sample.ids, keep=[end_token])
        visible, ended = _without_end_token(split.visible, end_token)
        sequence.add_sampled(sample, visible)
        return Turn(
            "tutor",
            visible,
            thinking=split.thinking,
            visible_tokens=split.visible_tokens,
            thinking_tokens=split.thinking_tokens,
            truncated=sample.finish_reason == "length",
            well_formed=split.well_formed,
            end_token=ended,
        )

    def _fits(self, sequence: TokenSequence, tokens: int) -> bool:
        """A turn of full length after ``tokens`` tokens stays within the conversation's limit and the engine's context."""
        total = tokens + self._env.tutor_cap
        return (
            total - sequence.prompt_tokens <= self._env.conversation_limit
            and total <= self._engine.context_limit
        )

    def trajectory(self, episode: Episode) -> Trajectory | None:
        """The token record of an episode that was played, for training; None when the tutor sampled nothing.

        Tokens after the last sampled one are left out. A segment that was sampled across policy versions carries the oldest.
        """
        sequence: TokenSequence | None = episode.dialogue.record
        if sequence is None or not sequence.n_sampled:
            return None
        segments = []
        for s in sequence.segments:
            if not any(s.mask):
                continue
            end = len(s.mask) - s.mask[::-1].index(True)
            version = min(set(s.versions) - {-1})  # -1: not sampled
            segments.append(Segment(s.ids[:end], s.mask[:end], s.logprobs[:end], version))
        trajectory = Trajectory(
            episode.id,
            episode.group_id,
            segments,
            math.nan if episode.reward is None else episode.reward.reward,
            self._sampling.temperature,
            excluded=not episode.counted,
        )
        if (found := sum(s.n_trained for s in segments)) != sequence.n_sampled:
            raise TrajectoryError(
                f"episode {episode.id}: the masks mark {found} tokens, the engine sampled {sequence.n_sampled}"
            )
        return trajectory


class ChatTutor:
    """:class:`maieutic.env.base.Tutor` by prompt alone, over any chat model; it leaves no token record.

    Its thinking, if it has any, is dropped: ``visible_tokens`` counts whatever the model reports, thinking included.
    """

    def __init__(self, chat: ChatModel, templates: EnvTemplates, env: EnvSpec, sampling: Sampling) -> None:
        self._chat, self._templates, self._env = chat, templates, env
        self._sampling = Sampling(sampling.temperature, sampling.top_p, env.tutor_cap)

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        """The next tutor turn; an endpoint that refuses an overlong conversation raises its own error."""
        (out,) = await self._chat.complete(
            tutor_view(dialogue, system_prompt(self._templates, self._env, dialogue)),
            self._sampling,
            seed=seed,
            session=f"tutor:{dialogue.id}",
        )
        visible, ended = _without_end_token(out.visible, self._env.end_token)
        return Turn(
            "tutor",
            visible,
            visible_tokens=out.tokens,
            truncated=out.finish_reason == "length",
            well_formed=bool(out.visible.strip()),
            end_token=ended,
        )

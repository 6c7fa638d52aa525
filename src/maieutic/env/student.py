"""The frozen learner on a chat model."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from maieutic.config import EnvSpec, StudentSpec
from maieutic.dialogue import Dialogue, Message, Turn, hidden_view, student_view
from maieutic.engines.base import ChatModel, Completion, Sampling
from maieutic.env.base import StudentFailed
from maieutic.env.prompts import EnvTemplates
from maieutic.env.role_discipline import out_of_role
from maieutic.errors import EngineError, EngineMismatchError, RunStop
from maieutic.problems.schema import Problem, StudentKey
from maieutic.seeds import derive


class ModelStudent:
    """A student that a chat model plays, without a persona: its errors are the model's own (paper, appendix D.2).

    - A *turn* is sampled from the student's view of the dialogue (tutor turns are user messages, visible part only).
    - The *post-test* follows the same system prompt, which still names the source problem, and the dialogue with the tutor's
      turns hidden (or not); the question is one more user message.
    - A *cold* attempt is the system prompt about the tested problem itself and the cold question. These two templates make
      ``key.prompt_hash``; its ``max_tokens`` is the post-test's.
    """

    def __init__(self, chat: ChatModel, spec: StudentSpec, templates: EnvTemplates, env: EnvSpec) -> None:
        self._chat = chat
        self._templates = templates
        self._retries = env.student_retries
        sampling = spec.sampling
        self._name = spec.name
        self._turn = Sampling(sampling.temperature, sampling.top_p, sampling.max_tokens)
        self._test = Sampling(sampling.temperature, sampling.top_p, env.post_test_max_tokens)
        self._key = StudentKey(
            model=chat.name,
            prompt_hash=templates.cold_hash,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=env.post_test_max_tokens,
        )

    def with_persona(self, text: str) -> ModelStudent:
        """The same student with ``text`` added to its system prompt. ``key`` stays: solve rates are measured without persona."""
        other = copy(self)
        literal = text.replace("{", "{{").replace("}", "}}")
        other._templates = replace(self._templates, student=f"{self._templates.student}\n\n{literal}")
        return other

    async def start(self) -> None:
        """Wait until the model can be asked (servers must be up)."""
        start = getattr(self._chat, "start", None)
        if start is not None:
            await start()

    async def close(self) -> None:
        """Close the chat model; safe to call twice."""
        await self._chat.close()

    @property
    def name(self) -> str:
        return self._name

    @property
    def key(self) -> StudentKey:
        return self._key

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn:
        """The next student turn. One that is empty or out of role is sampled again with derived seeds, at most
        ``env.student_retries`` times; when no try stays in role, the last one with text is kept as it is and marked.

        Raises :class:`StudentFailed` when all are empty, or when the model cannot answer (the cause is attached).
        """
        system = self._templates.student_system(dialogue.problem)
        messages = student_view(dialogue, system)
        kept: tuple[Completion, str] | None = None
        for attempt in range(1 + self._retries):
            draw = seed if attempt == 0 else derive(seed, "another reply", attempt)
            (reply,) = await self._ask(messages, self._turn, seed=draw, n=1, session=dialogue.id)
            why = out_of_role(reply.visible, dialogue, [system])
            if why != "empty":
                kept = (reply, why)
            if not why:
                break
        if kept is None:
            raise StudentFailed(
                f"student {self._name!r} gave an empty reply {attempt + 1} times in dialogue {dialogue.id}"
            )
        reply, why = kept
        return Turn(
            "student",
            reply.visible,
            visible_tokens=reply.tokens,
            truncated=reply.finish_reason == "length",
            attempts=attempt + 1,
            off_role=why,
        )

    async def attempt(
        self,
        problem: Problem,
        *,
        k: int,
        seed: int,
        dialogue: Dialogue | None = None,
        hide_tutor: bool = True,
    ) -> list[str]:
        """``k`` answers to ``problem`` as one request: cold when ``dialogue`` is None, else after the dialogue.

        Raises :class:`StudentFailed` when the model cannot answer. An empty answer is an answer (it gets no marks).
        """
        if dialogue is None:
            messages = [
                Message("system", self._templates.student_system(problem.text)),
                Message("user", self._templates.cold_question(problem.text)),
            ]
        else:
            view = hidden_view if hide_tutor else student_view
            messages = view(dialogue, self._templates.student_system(dialogue.problem))
            question = self._templates.question(problem.text, same=problem.text == dialogue.problem)
            messages.append(Message("user", question))
        session = None if dialogue is None else dialogue.id  # the server that knows the dialogue
        return [c.visible for c in await self._ask(messages, self._test, seed=seed, n=k, session=session)]

    async def _ask(
        self, messages: list[Message], sampling: Sampling, *, seed: int, n: int, session: str | None
    ) -> list[Completion]:
        try:
            got = await self._chat.complete(messages, sampling, seed=seed, n=n, session=session)
        except (RunStop, EngineMismatchError):
            raise  # concerns the whole run, not this episode
        except EngineError as error:
            raise StudentFailed(f"student {self._name!r}: {error}") from error
        if len(got) != n:
            raise StudentFailed(f"student {self._name!r}: asked for {n} completions, got {len(got)}")
        return got

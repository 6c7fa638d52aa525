"""The environment ``success``: a sixth-grade student with a sampled mistake is tutored until it is solved (+1) or not (−1).

Differences from near-transfer tutoring (:class:`maieutic.env.play.Environment`): after every student turn a success judge says
whether the student has solved the problem; the dialogue then ends as ``solved``. There are no gates. The post-test on the masked
transfer variant is taken only with ``options: {post_test: true}``; it gives the alternative reward ``transfer_gain``.

Mistakes (the idea of the paper's appendix E): a problem carries a list of mistakes that sixth graders make in it
(``pair.provenance["mistakes"]``, written once by a model); an episode's seed draws one, which enters the student's prompt and is
kept as ``pair.provenance["mistake"]``, so that a dialogue that is continued later meets the same student.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from maieutic.config import EnvSpec, RewardSpec, StudentSpec
from maieutic.dialogue import Dialogue, EndReason, Message, Turn, judge_view
from maieutic.engines.base import ChatModel, Sampling
from maieutic.env.base import Episode, Judge, Phase, PostTest, RewardBreakdown, Student, Tutor
from maieutic.env.llm_judge import StructuredChat
from maieutic.env.play import Environment, Excluded, GraderLike, Tested, require_tutor_turn, timed
from maieutic.env.prompts import EnvTemplates, fill
from maieutic.env.reward import normalised_gain
from maieutic.env.student import ModelStudent
from maieutic.errors import EngineError, RecipeError, RunStop
from maieutic.latent.json_reply import ask_json
from maieutic.latent.told import claims_answer, told_before
from maieutic.problems.schema import Problem, ProblemPair, StudentKey
from maieutic.resources import find_env
from maieutic.seeds import derive

log = logging.getLogger(__name__)


def env_text(env: str, file: str) -> str:
    """A prompt file of this environment beyond the common ones. Raises :class:`RecipeError` when it is missing or empty."""
    path = Path(find_env(env)) / file
    if not path.is_file() or not (text := path.read_text(encoding="utf-8").strip()):
        raise RecipeError(f"{path}: missing or empty; the success environment needs it")
    return text


class SuccessJudge(Protocol):
    """Says whether the student has solved the problem with the last turn; None: it cannot tell (the episode is excluded)."""

    async def solved(
        self, dialogue: Dialogue, pair: ProblemPair, grader: GraderLike, *, seed: int
    ) -> bool | None: ...


class RuleSuccess:
    """The student's last turn states a final answer (``\\boxed{}``, "the answer is …") that grades right.

    An answer that a tutor turn has stated before does not count unless ``count_told``: a student who repeats it has solved nothing
    (the paper counts any right answer, which rewards telling).
    """

    def __init__(self, *, count_told: bool = False) -> None:
        self.count_told = count_told

    async def solved(
        self, dialogue: Dialogue, pair: ProblemPair, grader: GraderLike, *, seed: int
    ) -> bool | None:
        said = dialogue.turns[-1].visible
        if not claims_answer(said):
            return False
        (grade,) = await grader.grade_many([said], pair.source.answer)
        if grade.verdict == "error":
            return None
        if grade.verdict != "right":
            return False
        return self.count_told or not told_before(dialogue, pair.source.answer)


class LlmSuccess:
    """A judge model reads the transcript with the answer; one structured call a student turn."""

    def __init__(
        self,
        chat: StructuredChat,
        prompt: str,
        sampling: Sampling,
        *,
        count_told: bool = False,
        reasks: int = 1,
        structured: bool = True,
    ) -> None:
        self.chat, self.prompt, self.sampling = chat, prompt, sampling
        self.count_told, self.reasks, self.structured = count_told, reasks, structured

    async def solved(
        self, dialogue: Dialogue, pair: ProblemPair, grader: GraderLike, *, seed: int
    ) -> bool | None:
        text = fill(
            self.prompt,
            problem=pair.source.text,
            answer=pair.source.answer,
            transcript=judge_view(dialogue.turns),
        )
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {"reasoning": {"type": "string"}, "solved": {"type": "boolean"}},
            "required": ["reasoning", "solved"],
            "additionalProperties": False,
        }

        def read(data: dict[str, Any]) -> bool | None:
            value = data.get("solved")
            return value if isinstance(value, bool) else None

        try:
            said = await ask_json(
                self.chat,
                [Message("user", text)],
                self.sampling,
                schema if self.structured else None,
                read,
                seed=seed,
                reasks=self.reasks,
                what="success",
            )
        except RunStop:
            raise
        except EngineError as error:
            log.warning("success judge failed in dialogue %s: %s", dialogue.id, error)
            return None
        return said and (self.count_told or not told_before(dialogue, pair.source.answer))


class SixthGrader:
    """The student of this environment; :meth:`with_mistake` gives the one that a dialogue meets.

    ``key`` is that of the student without a mistake: solve rates are measured cold, before any mistake is drawn.
    """

    def __init__(
        self, chat: ChatModel, spec: StudentSpec, templates: EnvTemplates, env: EnvSpec, mistake_text: str
    ) -> None:
        self._parts = (chat, spec, templates, env)
        self._plain = ModelStudent(chat, spec, templates, env)
        self._mistake_text = mistake_text

    @property
    def name(self) -> str:
        return self._plain.name

    @property
    def key(self) -> StudentKey:
        return self._plain.key

    def with_mistake(self, mistake: str) -> Student:
        """The student whose prompt names this mistake."""
        chat, spec, templates, env = self._parts
        added = fill(self._mistake_text, mistake=mistake).replace("{", "{{").replace("}", "}}")
        return ModelStudent(chat, spec, replace(templates, student=f"{templates.student}\n\n{added}"), env)

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn:
        return await self._plain.reply(dialogue, seed=seed)

    async def attempt(
        self,
        problem: Problem,
        *,
        k: int,
        seed: int,
        dialogue: Dialogue | None = None,
        hide_tutor: bool = True,
    ) -> list[str]:
        return await self._plain.attempt(problem, k=k, seed=seed, dialogue=dialogue, hide_tutor=hide_tutor)


def with_drawn_mistake(pair: ProblemPair, seed: int) -> ProblemPair:
    """The pair with ``provenance["mistake"]``: the one that is there, else drawn by ``seed`` from ``mistakes``, else none."""
    known = pair.provenance.get("mistakes") or []
    if "mistake" in pair.provenance or not known:
        return pair
    drawn = known[derive(seed, "mistake") % len(known)]
    return pair.model_copy(update={"provenance": {**pair.provenance, "mistake": drawn}})


async def write_mistakes(
    chat: StructuredChat, prompt: str, pair: ProblemPair, *, count: int = 10, seed: int = 0, reasks: int = 2
) -> list[str]:
    """``count`` plausible mistakes of one problem, written by a model (fewer are asked for again). Raises LabelError."""

    def read(data: dict[str, Any]) -> list[str] | None:
        listed = data.get("mistakes")
        if not isinstance(listed, list):
            return None
        texts = list(dict.fromkeys(" ".join(m.split()) for m in listed if isinstance(m, str) and m.strip()))
        return texts[:count] if len(texts) >= count else None

    schema = {
        "type": "object",
        "properties": {"mistakes": {"type": "array", "items": {"type": "string"}}},
        "required": ["mistakes"],
        "additionalProperties": False,
    }
    text = fill(prompt, problem=pair.source.text, answer=pair.source.answer, count=str(count))
    return await ask_json(
        chat,
        [Message("user", text)],
        Sampling(0.8, 1.0, 1_000),
        schema,
        read,
        seed=seed,
        reasks=reasks,
        what=f"the mistakes of problem {pair.id}",
    )


class SuccessEnvironment(Environment):
    """See the module. ``success``: the judge of success (None: :class:`RuleSuccess`); ``post_test``: take the masked post-test."""

    def __init__(
        self,
        env: EnvSpec,
        reward: RewardSpec,
        templates: EnvTemplates,
        *,
        success: SuccessJudge | None = None,
        count_told: bool = False,
        post_test: bool = False,
    ) -> None:
        super().__init__(env, reward, templates)
        self.success = success or RuleSuccess(count_told=count_told)
        self.takes_post_test = post_test

    async def play(
        self,
        tutor: Tutor,
        student: Student,
        judge: Judge | None,
        grader: GraderLike,
        pair: ProblemPair,
        *,
        seed: int,
        id: str,
        group_id: str,
        phase: Phase = "train",
        step: int = 0,
        index: int = 0,
        extra_tests: Sequence[Tested] = (),
        start: Sequence[Turn] = (),
    ) -> Episode:
        """One dialogue with its reward. ``judge`` is not asked (there are no gates); ``start``: turns that it continues from,
        ending with a student turn (none of them is played again). Raises and excludes as the base class does; a missing solve
        rate is an error only where a post-test is taken.
        """
        pair = with_drawn_mistake(pair, seed)
        tested = pair.tested(self.env.transfer)
        rated = tested.rates.get(str(student.key))
        if self.takes_post_test:
            rated = tested.rate(student.key)
        dialogue = self.new_dialogue(pair, id)
        if start:
            if start[-1].speaker != "student":
                raise ValueError(f"episode {id}: a dialogue continues from a student turn")
            dialogue.turns = list(start)
        episode = Episode(
            id=id,
            group_id=group_id,
            pair=pair,
            phase=phase,
            step=step,
            index=index,
            seed=seed,
            student=student.name,
            dialogue=dialogue,
            pre=rated.rate if rated else None,
        )
        meets = student
        if (mistake := pair.provenance.get("mistake")) and isinstance(student, SixthGrader):
            meets = student.with_mistake(mistake)
        return await self.settle(episode, self._until_solved(episode, tutor, meets, grader, extra_tests))

    async def _until_solved(
        self,
        episode: Episode,
        tutor: Tutor,
        student: Student,
        grader: GraderLike,
        extra_tests: Sequence[Tested],
    ) -> None:
        async def until(dialogue: Dialogue) -> EndReason | None:
            before = len(dialogue.turns) - 2
            seed = derive(episode.seed, "success", before)
            said = await self.success.solved(dialogue, episode.pair, grader, seed=seed)
            if said is None:
                raise Excluded("unknown:success", "the success judge could not tell")
            return "solved" if said else None

        dialogue = episode.dialogue
        with timed(episode, "dialogue"):
            await self.alternate(tutor, student, dialogue, seed=episode.seed, until=until)
        require_tutor_turn(dialogue)
        if self.takes_post_test:
            with timed(episode, "post_test"):
                await self.take_tests(episode, student, grader, extra_tests)
        episode.reward = self._reward(episode, dialogue.end == "solved")

    def _reward(self, episode: Episode, solved: bool) -> RewardBreakdown:
        value = 1.0 if solved else -1.0
        post: PostTest | None = episode.post_test
        gain = None if post is None or episode.pre is None else normalised_gain(episode.pre, post.rate)
        return RewardBreakdown(
            reward=value,
            gated=False,
            pre=float("nan") if episode.pre is None else episode.pre,
            post=None if post is None else post.rate,
            gain=gain,
            extra={"success_reward": value, "tutor_turns": float(len(episode.dialogue.by("tutor")))},
        )

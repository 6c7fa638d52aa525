r"""TutorRL's episode and reward (arXiv 2505.15607): the tutored problem is tested, the student sees the whole conversation.

With r_sol the share of the K answers after the dialogue that are right, and r_ped = 1 when no judge rule rejects, else 0::

    r = r_sol + (r_ped − 1) · λ                      options: {lambda: λ}
    hard: r = −λ when a rule rejects, else r_sol     options: {lambda: λ, hard: true}

Named in a recipe as ``reward.kind: "maieutic.env.tutorrl:reward"`` and ``env.kind: "maieutic.env.tutorrl:SameProblem"``. The
reward goes with any environment; the class adds TutorRL's openings and personas to ``envs/same_problem``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from maieutic.config import EnvSpec, RewardSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, Judge, Phase, RewardBreakdown, Student, StudentFailed, Tutor
from maieutic.env.play import Environment, Excluded, GraderLike, Tested, draw_student, with_cause
from maieutic.env.prompts import EnvTemplates, fill
from maieutic.env.reward import normalised_gain
from maieutic.errors import RecipeError, RewardError
from maieutic.problems.schema import ProblemPair
from maieutic.resources import find_env
from maieutic.seeds import derive

REWARD = "maieutic.env.tutorrl:reward"
_FILES: dict[str, tuple[str, ...]] = {
    "stated": (),
    "guided": ("opening_guided.txt",),
    "attempted": ("opening_attempted.txt", "attempt.txt"),
}


# ---- reward ----------------------------------------------------------------------------------------------------------


def _options(spec: RewardSpec) -> tuple[float, bool]:
    """(λ, hard) of ``reward.options``. Raises ValueError that names what is wrong."""
    unknown = set(spec.options) - {"lambda", "hard"}
    if unknown:
        raise ValueError(f"reward.options: unknown {sorted(unknown)}; there are lambda and hard")
    weight, hard = spec.options.get("lambda"), spec.options.get("hard", False)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        raise ValueError(f"reward.options.lambda is {weight!r}: a number of at least 0 is needed")
    if not isinstance(hard, bool):
        raise ValueError(f"reward.options.hard is {hard!r}: true or false")
    return float(weight), hard


def reward(episode: Episode, spec: RewardSpec) -> RewardBreakdown:
    """The formula above. ``extra`` has ``r_sol`` (where tested) and ``r_ped``; ``gain`` is the normalised gain, for comparison.

    Raises ValueError for options that do not fit, and :class:`RewardError` for a verdict that is unknown or a missing post-test.
    """
    weight, hard = _options(spec)
    if any(v.decision == "unknown" for v in episode.verdicts.values()):
        raise RewardError("a judge rule is unknown: r_ped cannot be computed")
    rejected = any(v.decision == "reject" for v in episode.verdicts.values())
    post = None if episode.post_test is None else episode.post_test.rate
    if post is None and not (hard and rejected):
        raise RewardError("there is no post-test to take r_sol from (TutorRL's reward needs env.gates: soft)")
    pre = float("nan") if episode.pre is None else episode.pre
    penalty = weight if rejected else 0.0
    extra = {"r_ped": 0.0 if rejected else 1.0} | ({} if post is None else {"r_sol": post})
    return RewardBreakdown(
        reward=-weight if hard and rejected else (post or 0.0) - penalty,
        gated=hard and rejected,
        pre=pre,
        post=post,
        gain=None if post is None or episode.pre is None else normalised_gain(pre, post),
        penalty=penalty,
        extra=extra,
    )


# ---- environment -----------------------------------------------------------------------------------------------------


@runtime_checkable
class TakesPersona(Protocol):
    """A student that can be given a persona."""

    def with_persona(self, text: str) -> Student:
        """The same student (same solve rates) with ``text`` added to its system prompt."""
        ...


class SameProblem(Environment):
    """Near-transfer's episode with TutorRL's openings and personas; what is tested and shown follows from ``envs/same_problem``.

    Args:
        openings: weights of ``guided`` (a greeting stands where chat templates want a user turn; the tutor opens the matter),
            ``attempted`` (the student's own sampled attempt opens) and ``stated`` (near-transfer's opening).
        personas: draw a name and a persona for the student from ``personas.txt``.

    Opening and persona follow from the episode's seed, so every arm that is evaluated with the same seeds meets the same ones.
    """

    def __init__(
        self,
        env: EnvSpec,
        reward: RewardSpec,
        templates: EnvTemplates,
        *,
        openings: Mapping[str, float] | None = None,
        personas: bool = True,
    ) -> None:
        super().__init__(env, reward, templates)
        self.openings = dict(openings or {"guided": 1.0, "attempted": 1.0})
        for name, weight in self.openings.items():
            if name not in _FILES or isinstance(weight, bool) or not weight > 0:
                raise ValueError(f"openings: {name!r}: {weight!r}; a positive weight for {', '.join(_FILES)}")
        folder = Path(find_env(env.name))
        self.texts = {file: _text(folder / file) for name in self.openings for file in _FILES[name]}
        self.personas = _personas(folder / "personas.txt") if personas else [("a student", "")]
        self._persona_text = _text(folder / "student_persona.txt") if personas else ""
        if reward.kind == REWARD:
            _, hard = _options(reward)
            if not hard and self.env.gates == "hard":
                raise ValueError("reward.options.hard is off but env.gates is hard: set env.gates: soft")

    def persona(self, seed: int) -> tuple[str, str]:
        """(name, persona) of an episode."""
        return self.personas[derive(seed, "persona") % len(self.personas)]

    def opening(self, seed: int) -> str:
        """Which opening an episode has."""
        names = sorted(self.openings)
        return draw_student(names, [self.openings[n] for n in names], derive(seed, "opening"))

    async def play(
        self,
        tutor: Tutor,
        student: Student,
        judge: Judge,
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
    ) -> Episode:
        """As the base class, with the persona of this episode. A student that takes none is a :class:`RecipeError`."""
        if self._persona_text:
            if not isinstance(student, TakesPersona):
                raise RecipeError(
                    f"student {student.name!r} takes no persona (it has no with_persona): set env.options.personas: false"
                )
            name, persona = self.persona(seed)
            student = student.with_persona(fill(self._persona_text, name=name, persona=persona))
        return await super().play(
            tutor,
            student,
            judge,
            grader,
            pair,
            seed=seed,
            id=id,
            group_id=group_id,
            phase=phase,
            step=step,
            index=index,
            extra_tests=extra_tests,
        )

    async def converse(self, tutor: Tutor, student: Student, dialogue: Dialogue, *, seed: int) -> None:
        """Open the dialogue as drawn, then alternate. A student that fails at its attempt excludes the episode."""
        name, _ = self.persona(seed)
        opening = self.opening(seed)
        if opening == "guided":
            said = fill(self.texts["opening_guided.txt"], name=name)
            dialogue.turns[:] = [Turn("student", said, scripted=True)]
        elif opening == "attempted":
            try:
                attempt = await self._attempt(student, dialogue, derive(seed, "attempt"))
            except StudentFailed as error:
                dialogue.end = "student_failed"
                raise Excluded("student_failed", f"opening attempt: {with_cause(error)}") from error
            said = fill(self.texts["opening_attempted.txt"], name=name, attempt=attempt.visible)
            dialogue.turns[:] = [replace(attempt, visible=said)]
        await super().converse(tutor, student, dialogue, seed=seed)

    async def _attempt(self, student: Student, dialogue: Dialogue, seed: int) -> Turn:
        """The student's answer to being asked for an attempt, in a conversation that the tutor never sees."""
        asked = Turn("tutor", fill(self.texts["attempt.txt"], problem=dialogue.problem), scripted=True)
        return await student.reply(
            Dialogue(f"{dialogue.id}:attempt", dialogue.problem, turns=[asked]), seed=seed
        )


def _text(path: Path) -> str:
    if not path.is_file() or not (text := path.read_text(encoding="utf-8").strip()):
        raise RecipeError(f"{path}: missing or empty; the same-problem environment needs it")
    return text


def _personas(path: Path) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, bar, persona = (part.strip() for part in line.partition("|"))
        if not (name and bar and persona):
            raise RecipeError(f"{path}:{number}: a line is `name | persona`, this is {line!r}")
        out.append((name, persona))
    if not out:
        raise RecipeError(f"{path}: names no persona")
    return out

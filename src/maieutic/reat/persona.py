"""The environment ``persona``: REAT's dialogue with a student who has one of nine personas (paper, appendix C.4).

A persona is a forced first-turn *trigger* (the difficulty that opens the dialogue) and a *tendency* for the later turns. Which
persona a problem gets follows from ``persona_seed`` and the problem's id alone, so that every arm meets the same one; it is kept as
``pair.provenance["persona"]``, where an assignment that is already there wins. The student ends the dialogue with a signal.

Differences from near-transfer tutoring (:class:`maieutic.env.play.Environment`): the student's first turn is sampled, not scripted;
the dialogue ends as ``solved`` by the student's signal; gates and post-test are taken only with ``options: {post_test: true}``,
which makes the environment fit for training with any reward.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from maieutic import yaml12
from maieutic.config import EnvSpec, RewardSpec
from maieutic.dialogue import BLANK, Dialogue, EndReason, Turn
from maieutic.env.base import Episode, Judge, Phase, RewardBreakdown, Student, StudentFailed, Tutor
from maieutic.env.play import RUN_ERRORS, Environment, Excluded, GraderLike, Tested, with_cause
from maieutic.env.prompts import EnvTemplates, fill
from maieutic.env.tutorrl import TakesPersona
from maieutic.errors import RecipeError
from maieutic.problems.schema import ProblemPair
from maieutic.resources import find_env
from maieutic.seeds import BITS, derive

log = logging.getLogger(__name__)

SIGNAL = "[UNDERSTOOD]"
"""What the student writes when it has finished the problem and understood it."""
_KEYS = ("name", "weight", "trigger", "tendency")


@dataclass(frozen=True, slots=True)
class Persona:
    """One student type. ``weight``: relative chance to be drawn (> 0)."""

    name: str
    weight: float
    trigger: str
    """Instruction for the first message."""
    tendency: str
    """How the student behaves from then on."""


def load_personas(env: str) -> list[Persona]:
    """The personas of ``personas.yaml`` in an environment's folder. Raises :class:`RecipeError` naming file and entry."""
    path = Path(find_env(env)) / "personas.yaml"
    if not path.is_file():
        raise RecipeError(f"{path}: missing; the persona environment needs it")
    data, _ = yaml12.load(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(data, list) or not data:
        raise RecipeError(f"{path}: a list of personas is expected, each with {', '.join(_KEYS)}")
    out = [_persona(item, f"{path}: persona {n}") for n, item in enumerate(data, start=1)]
    names = [p.name for p in out]
    if len(set(names)) != len(names):
        raise RecipeError(f"{path}: two personas share a name: {names}")
    return out


def _persona(item: Any, where: str) -> Persona:
    if not isinstance(item, dict) or set(item) != set(_KEYS):
        keys = sorted(item) if isinstance(item, dict) else type(item).__name__
        raise RecipeError(f"{where} has {keys}: exactly {', '.join(_KEYS)} are expected")
    texts = [item[k] for k in ("name", "trigger", "tendency")]
    if not all(isinstance(t, str) and t.strip() for t in texts):
        raise RecipeError(f"{where}: name, trigger and tendency are texts that are not empty")
    weight = item["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise RecipeError(f"{where}: weight {weight!r} is not a positive number")
    return Persona(texts[0], float(weight), texts[1], texts[2])


def order_of(personas: Sequence[Persona], problem_id: str, seed: int) -> list[Persona]:
    """The personas in the order in which a problem meets them: drawn without replacement in proportion to their weights.

    With u uniform in (0, 1] from (seed, problem, persona), sorting by −ln(u)/weight is that draw (exponential races), and a
    persona's number does not depend on which others there are.
    """

    def race(p: Persona) -> float:
        u = (derive(seed, "persona", problem_id, p.name) + 1) / 2**BITS
        return -math.log(u) / p.weight

    return sorted(personas, key=race)


def assign(
    pairs: Sequence[ProblemPair], personas: Sequence[Persona], *, per_problem: int = 1, seed: int = 0
) -> list[ProblemPair]:
    """Every pair with each of its first ``per_problem`` personas, as pairs of their own (ids ``<pair>~<persona>`` beyond one).

    Raises :class:`RecipeError` when a problem shall meet more personas than there are.
    """
    if not 1 <= per_problem <= len(personas):
        raise RecipeError(f"personas_per_problem is {per_problem}: there are {len(personas)} personas")
    out = []
    for pair in pairs:
        for persona in order_of(personas, pair.id, seed)[:per_problem]:
            provenance = {**pair.provenance, "persona": persona.name, "problem_id": pair.id}
            id = pair.id if per_problem == 1 else f"{pair.id}~{persona.name}"
            out.append(pair.model_copy(update={"id": id, "provenance": provenance}))
    return out


def problem_id(pair: ProblemPair) -> str:
    """The problem behind a pair that :func:`assign` made: what errors are clustered by."""
    return str(pair.provenance.get("problem_id", pair.id))


def env_file(env: str, file: str) -> str:
    """A text file of an environment beyond the common ones. Raises :class:`RecipeError` when it is missing or empty."""
    path = Path(find_env(env)) / file
    if not path.is_file() or not (text := path.read_text(encoding="utf-8").strip()):
        raise RecipeError(f"{path}: missing or empty; the persona environment needs it")
    return text


class PersonaEnvironment(Environment):
    """See the module.

    Args:
        personas: names to draw from (None: all of ``personas.yaml``).
        weights: weights that replace those of the file, by name.
        by: ``problem``: one persona for a problem (a group of episodes shares it); ``sample``: episode ``index`` of a problem meets
            its ``index``-th persona, round and round.
        signal: what the student ends the dialogue with.
        signal_after: the signal is honoured when at least so many tutor turns precede it.
        post_test: gates, post-test and the recipe's reward, as in the base class; else the reward is 1 (signal) or 0.
    """

    def __init__(
        self,
        env: EnvSpec,
        reward: RewardSpec,
        templates: EnvTemplates,
        *,
        personas: Sequence[str] | None = None,
        weights: Mapping[str, float] | None = None,
        by: Literal["problem", "sample"] = "problem",
        persona_seed: int = 0,
        signal: str = SIGNAL,
        signal_after: int = 1,
        post_test: bool = False,
    ) -> None:
        super().__init__(env, reward, templates)
        known = {p.name: p for p in load_personas(env.name)}
        for name, weight in (weights or {}).items():
            if name not in known:
                raise ValueError(f"weights: no persona {name!r}; there are {', '.join(known)}")
            if isinstance(weight, bool) or not 0 < weight < math.inf:
                raise ValueError(f"weights.{name}: {weight!r} is not a positive number")
            known[name] = replace(known[name], weight=float(weight))
        for name in personas or ():
            if name not in known:
                raise ValueError(f"personas: no persona {name!r}; there are {', '.join(known)}")
        if by not in ("problem", "sample"):
            raise ValueError(f"by is {by!r}: problem or sample")
        if not signal.strip() or signal_after < 1:
            raise ValueError("signal is empty or signal_after is below 1")
        self.personas = [known[n] for n in (personas if personas is not None else known)]
        if not self.personas:
            raise ValueError("personas is empty: leave it out for all of them")
        self._by_name = known
        self.by, self.persona_seed = by, persona_seed
        self.signal, self.signal_after, self.takes_post_test = signal, signal_after, post_test
        self._student_text = env_file(env.name, "student_persona.txt")
        self._first = env_file(env.name, "first_turn.txt")

    def persona_of(self, pair: ProblemPair, index: int = 0) -> Persona:
        """The persona that this problem's episode meets: the one in its provenance, else the draw."""
        named = pair.provenance.get("persona")
        if named is not None:
            if named not in self._by_name:
                raise RecipeError(
                    f"pair {pair.id} names persona {named!r}; there are {', '.join(self._by_name)}"
                )
            return self._by_name[named]
        order = order_of(self.personas, problem_id(pair), self.persona_seed)
        return order[index % len(order) if self.by == "sample" else 0]

    async def play(
        self,
        tutor: Tutor,
        student: Student,
        judge: Judge | None,
        grader: GraderLike | None,
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
        """One dialogue. ``judge`` and ``grader`` may be None where no post-test is taken. Raises and excludes as the base class.

        Raises:
            RecipeError: the student takes no persona.
        """
        if not isinstance(student, TakesPersona):
            raise RecipeError(
                f"student {student.name!r} takes no persona (it has no with_persona): play it in another environment"
            )
        persona = self.persona_of(pair, index)
        pair = pair.model_copy(update={"provenance": {**pair.provenance, "persona": persona.name}})
        meets = student.with_persona(
            fill(self._student_text, tendency=persona.tendency, signal=self.signal, persona=persona.name)
        )
        if self.takes_post_test:
            assert judge is not None and grader is not None
            return await super().play(
                tutor,
                _Opening(meets, persona),
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
        return await self._talk_only(
            tutor, _Opening(meets, persona), pair, seed=seed, id=id, group_id=group_id, phase=phase, step=step,
            index=index,
        )  # fmt: skip

    async def _talk_only(
        self, tutor: Tutor, student: _Opening, pair: ProblemPair, *, seed: int, **where: Any
    ) -> Episode:
        rated = pair.tested(self.env.transfer).rates.get(str(student.key))
        episode = Episode(
            pair=pair,
            seed=seed,
            student=student.name,
            dialogue=self.new_dialogue(pair, where["id"]),
            pre=rated.rate if rated else None,
            **where,
        )
        started = time.perf_counter()
        try:
            await self.converse(tutor, student, episode.dialogue, seed=seed)
            if not episode.dialogue.by("tutor"):
                raise Excluded("no_tutor_turn", f"the dialogue ended ({episode.dialogue.end}) at once")
            solved = float(episode.dialogue.end == "solved")
            turns = float(len(episode.dialogue.by("tutor")))
            pre = math.nan if episode.pre is None else episode.pre
            extra = {"solved": solved, "tutor_turns": turns}
            episode.reward = RewardBreakdown(solved, gated=False, pre=pre, post=None, gain=None, extra=extra)
        except Excluded as error:
            episode.exclusion, episode.error = error.label, str(error)
        except RUN_ERRORS:
            raise
        except Exception as error:
            episode.exclusion = f"error:{type(error).__name__}"
            episode.error = f"{type(error).__name__}: {error}"
            log.error("episode %s is excluded: %s", episode.id, episode.error, exc_info=error)
        episode.timing["total"] = time.perf_counter() - started
        return episode

    async def converse(self, tutor: Tutor, student: Student, dialogue: Dialogue, *, seed: int) -> None:
        """The student opens with its trigger; then they alternate until the signal, the turn cap or the context limit."""
        persona = student.persona if isinstance(student, _Opening) else None
        if persona is not None:
            dialogue.turns[:] = [await self._opening(student, persona, dialogue, seed=seed)]

        async def signalled(dialogue: Dialogue) -> EndReason | None:
            turn, there = self._without_signal(dialogue.turns[-1])
            dialogue.turns[-1] = turn
            return "solved" if there and len(dialogue.by("tutor")) >= self.signal_after else None

        await self.alternate(tutor, student, dialogue, seed=seed, until=signalled)

    async def _opening(self, student: Student, persona: Persona, dialogue: Dialogue, *, seed: int) -> Turn:
        """The forced first turn: an answer to a request that only the student sees."""
        request = Turn(
            "tutor", fill(self._first, trigger=persona.trigger, problem=dialogue.problem), scripted=True
        )
        asked = Dialogue(f"{dialogue.id}:opening", dialogue.problem, turns=[request])
        try:
            turn = await student.reply(asked, seed=derive(seed, "opening"))
        except StudentFailed as error:
            dialogue.end = "student_failed"
            raise Excluded("student_failed", with_cause(error)) from error
        return self._without_signal(turn)[0]

    def _without_signal(self, turn: Turn) -> tuple[Turn, bool]:
        """A student's turn without the signal, and whether it was there."""
        if self.signal not in turn.visible:
            return turn, False
        return replace(turn, visible=turn.visible.replace(self.signal, " ").strip() or BLANK), True


class _Opening:
    """A student that has been given a persona, and carries it: :meth:`PersonaEnvironment.converse` opens with its trigger."""

    def __init__(self, student: Student, persona: Persona) -> None:
        self._student, self.persona = student, persona

    @property
    def name(self) -> str:
        return self._student.name

    @property
    def key(self) -> Any:
        return self._student.key

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn:
        return await self._student.reply(dialogue, seed=seed)

    async def attempt(self, problem: Any, **kwargs: Any) -> list[str]:
        return await self._student.attempt(problem, **kwargs)

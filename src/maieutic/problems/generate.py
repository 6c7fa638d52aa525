"""Near-transfer pairs without a model: one template, drawn twice with other numbers, each with a worked solution.

``gsm_symbolic``: the templates of reasoning-gym (Apache-2.0) whose answers that project has checked. ``one_step`` and
``structures`` (rates, percent change, averages, two equations): our own.
Everything follows from the options' ``seed``; a pair is refused and drawn again unless

- both answers are whole, positive, and stand in the last line of their worked solution;
- the two answers differ, and so do the numbers of the two questions;
- the variant passes the checks of ``maieutic data build`` (no near-copy, answers of one form);
- no text was used before.
"""

from __future__ import annotations

import difflib
import hashlib
import random
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from maieutic.errors import ProblemDataError, RecipeError
from maieutic.problems import one_step, templates
from maieutic.problems.build.checks import check_variant
from maieutic.problems.build.recipe import ChecksSpec
from maieutic.problems.schema import Problem, ProblemPair

_TRIES = 60
"""Draws of one side before a template counts as unable to meet the options."""
_EASY = {"steps": (1, 2), "max_number": 100, "max_words": 40}


class GeneratorOptions(BaseModel):
    """What ``problems.options`` may say for ``generate:…``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(default=200, ge=1)
    """Pairs."""
    seed: int = Field(default=0, ge=0)
    templates: tuple[str | int, ...] | None = None
    """Template names to draw from (None: all that can meet the other options)."""
    steps: tuple[int, int] | None = None
    """Fewest and most lines of the worked solution."""
    max_number: int | None = Field(default=None, ge=1)
    """Largest number in question or answer."""
    max_words: int | None = Field(default=None, ge=5)
    """Longest question."""
    easy: bool = False
    """Short for: at most 2 steps, numbers up to 100, questions of at most 40 words (what is set explicitly stays)."""
    misconceptions: bool = False
    """Put the typed misconceptions of both problems into ``provenance.misconceptions``."""

    def resolved(self) -> GeneratorOptions:
        """With ``easy`` spelt out."""
        if not self.easy:
            return self
        return self.model_copy(update={k: v for k, v in _EASY.items() if getattr(self, k) is None})


@dataclass(frozen=True, slots=True)
class Drawn:
    """One problem of a template."""

    question: str
    answer: str
    solution: str
    misconceptions: tuple[templates.Misconception, ...] = ()
    """Wrong answers that a learner would give, and why."""

    @property
    def steps(self) -> int:
        """Lines of the worked solution."""
        return len(self.solution.splitlines())


@dataclass(frozen=True)
class Generator:
    """A family of templates: their names, how one problem is drawn, and where it comes from."""

    templates: tuple[str, ...]
    draw: Callable[[str, random.Random], Drawn]
    provenance: Mapping[str, str]


def generate(name: str, options: Mapping[str, Any]) -> list[ProblemPair]:
    """``options['size']`` pairs of generator ``name``, deterministic in the options; templates take turns.

    Raises :class:`RecipeError` for an unknown generator or option, and :class:`ProblemDataError` when the templates cannot give
    that many different pairs.
    """
    if name not in GENERATORS:
        near = difflib.get_close_matches(name, GENERATORS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(GENERATORS)}"
        raise RecipeError(f"problems.source 'generate:{name}': no such generator; {hint}")
    opts = _options(name, options).resolved()
    family = GENERATORS[name]()
    able_templates = _templates(name, family, opts)
    used: set[str] = set()
    pairs: list[ProblemPair] = []
    rounds = 0
    while len(pairs) < opts.size and able_templates:
        able = []
        for template in able_templates:
            if len(pairs) == opts.size:
                break
            pair = _pair(name, family, template, rounds, opts, used)
            if pair is None:
                if opts.templates is not None:
                    raise ProblemDataError(
                        f"generate:{name}: template {template!r} gave no pair within these options after "
                        f"{rounds} pairs: {opts.model_dump(exclude_defaults=True)}"
                    )
                continue
            able.append(template)
            pairs.append(pair)
        able_templates = able
        rounds += 1
    if len(pairs) < opts.size:
        raise ProblemDataError(
            f"generate:{name}: only {len(pairs)} of {opts.size} different pairs can be made with these options: "
            f"{opts.model_dump(exclude_defaults=True)}"
        )
    return pairs


def _options(name: str, options: Mapping[str, Any]) -> GeneratorOptions:
    given = {k: v for k, v in options.items() if v is not None}
    if isinstance(given.get("steps"), int):
        given["steps"] = (given["steps"], given["steps"])
    try:
        return GeneratorOptions.model_validate(given)
    except ValidationError as e:
        item = e.errors(include_url=False)[0]
        key = ".".join(str(p) for p in item["loc"])
        near = difflib.get_close_matches(key, GeneratorOptions.model_fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near and item["type"] == "extra_forbidden" else ""
        raise RecipeError(
            f"problems.options.{key}: {item['input']!r}: {item['msg']} (generate:{name}){hint}"
        ) from None


def _templates(name: str, family: Generator, opts: GeneratorOptions) -> list[str]:
    if opts.templates is None:
        return list(family.templates)
    wanted = [str(t) for t in opts.templates]
    if unknown := [t for t in wanted if t not in family.templates]:
        raise RecipeError(
            f"problems.options.templates: {unknown[0]!r} is no template of generate:{name}; "
            f"there are: {', '.join(family.templates)}"
        )
    return wanted


def _pair(
    name: str, family: Generator, template: str, number: int, opts: GeneratorOptions, used: set[str]
) -> ProblemPair | None:
    def side(which: str, other: Drawn | None) -> tuple[Drawn, int] | None:
        for attempt in range(_TRIES):
            seed = _seed(opts.seed, name, template, number, which, attempt)
            drawn = family.draw(template, random.Random(seed))
            if drawn.question in used or not _usable(drawn, opts):
                continue
            if other is None or (
                drawn.answer != other.answer
                and numbers(drawn.question) != numbers(other.question)
                and check_variant(_problem(other), drawn.question, drawn.answer, ChecksSpec()) is None
            ):
                return drawn, seed
        return None

    source = side("source", None)
    transfer = source and side("transfer", source[0])
    if not source or not transfer:
        return None
    used.update((source[0].question, transfer[0].question))
    return ProblemPair(
        id=f"{name}-{opts.seed}-{template}-{number}",
        source=_problem(source[0]),
        transfer=_problem(transfer[0]),
        provenance={
            **family.provenance,
            "template": template,
            "seed": opts.seed,
            "source_seed": source[1],
            "transfer_seed": transfer[1],
            "steps": source[0].steps,
            **(
                {"misconceptions": {"source": told(source[0]), "transfer": told(transfer[0])}}
                if opts.misconceptions
                else {}
            ),
        },
    )


def told(drawn: Drawn) -> list[dict[str, str]]:
    """The misconceptions as rows for a provenance."""
    return [m._asdict() for m in drawn.misconceptions]


def redraw(pair: ProblemPair, seed: int) -> tuple[Drawn, int]:
    """Another problem of the template that ``pair``'s source was drawn from, by the generator's own rules; and its seed.

    Raises :class:`ProblemDataError` for a pair that no generator made, and for a template that gives nothing else.
    """
    name, template = pair.provenance.get("generator"), pair.provenance.get("template")
    if name not in GENERATORS or template is None:
        raise ProblemDataError(f"pair {pair.id!r} comes from no template: its provenance names no generator")
    family, source = GENERATORS[name](), pair.source
    for attempt in range(_TRIES):
        draw_seed = _seed(seed, name, template, "redraw", attempt)
        drawn = family.draw(str(template), random.Random(draw_seed))
        if (
            _usable(drawn, GeneratorOptions())
            and drawn.answer != source.answer
            and numbers(drawn.question) != numbers(source.text)
        ):
            return drawn, draw_seed
    raise ProblemDataError(f"template {template!r} of generate:{name} gave nothing else in {_TRIES} draws")


def _problem(drawn: Drawn) -> Problem:
    return Problem(text=drawn.question, answer=drawn.answer, solution=drawn.solution)


def _seed(*parts: object) -> int:
    # not hash(): that differs between interpreters
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()[:4], "big")


def numbers(text: str) -> list[str]:
    """The numbers of a text in order, thousands separators removed."""
    return [n.replace(",", "") for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def _usable(drawn: Drawn, opts: GeneratorOptions) -> bool:
    if not re.fullmatch(r"[1-9]\d*", drawn.answer):
        return False
    if drawn.answer not in {n.rstrip(".") for n in numbers(drawn.solution.splitlines()[-1])}:
        return False
    if opts.steps is not None and not opts.steps[0] <= drawn.steps <= opts.steps[1]:
        return False
    if opts.max_words is not None and len(drawn.question.split()) > opts.max_words:
        return False
    seen = [*numbers(drawn.question), drawn.answer]
    return opts.max_number is None or max(float(n) for n in seen) <= opts.max_number


# --- the families ---------------------------------------------------------------------------------------------


@cache
def _gsm_symbolic() -> Generator:
    from importlib.metadata import version

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies compares with `is`
        from reasoning_gym.arithmetic.gsm_symbolic import gsm_symbolic as gym

    functions = gym.GSMSymbolicDataset(gym.GSMSymbolicDatasetConfig(size=1, seed=0)).generators

    def draw(template: str, rng: random.Random) -> Drawn:
        item = functions[int(template)](rng, 1.0)
        solution = item["metadata"]["answer_cot"].split("\n####")[0].strip()
        answer = str(item["answer"]).strip()
        return Drawn(item["question"].strip(), answer, solution, templates.from_solution(answer, solution))

    provenance = {"generator": "gsm_symbolic", "package": f"reasoning-gym {version('reasoning-gym')}"}
    return Generator(tuple(str(t) for t in gym.tasks_ok), draw, provenance)


def _one_step() -> Generator:
    def draw(template: str, rng: random.Random) -> Drawn:
        drawn = one_step.draw(template, rng)
        wrong = templates.from_solution(str(drawn.answer), drawn.solution)
        return Drawn(drawn.question, str(drawn.answer), drawn.solution, wrong)

    return Generator(tuple(one_step.TEMPLATES), draw, {"generator": "one_step"})


def _structures() -> Generator:
    def draw(template: str, rng: random.Random) -> Drawn:
        drawn = templates.draw(template, rng)
        return Drawn(drawn.question, str(drawn.answer), drawn.solution, drawn.misconceptions)

    return Generator(tuple(templates.TEMPLATES), draw, {"generator": "structures"})


GENERATORS: dict[str, Callable[[], Generator]] = {
    "gsm_symbolic": _gsm_symbolic,
    "one_step": _one_step,
    "structures": _structures,
}
"""Families by the name after ``generate:``."""

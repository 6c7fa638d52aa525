"""The schema of a latent-state recipe (torch-free): one file is the whole pipeline from collecting to the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from maieutic import yaml12
from maieutic.config import Count, EnvSpec, Positive, Section, Share
from maieutic.endpoint import EndpointRole
from maieutic.errors import RecipeError
from maieutic.recipe import apply_override, locate, read_with_base
from maieutic.recipe_errors import explain

RULES = "loopback"
"""An ``engine.urls`` entry: the role is answered by rule, by a server that the pipeline starts on 127.0.0.1."""

LearnerName = Literal["bc", "fqi", "cql"]
ControlName = Literal["random_state", "random_move"]


def _both_controls() -> list[ControlName]:
    return ["random_state", "random_move"]


ARMS = (
    "prompt",
    "bc", "fqi", "cql",
    "bc+", "fqi+", "cql+",
    "bc*",
    "cql+random_state", "cql+random_move",
    "fixed:instruct", "fixed:encourage", "fixed:refocus", "fixed:ask",
    "random", "rule",
)  # fmt: skip
"""Known arms: prompt engineering; learners on D, on D⁺ (``+``); BC on the exploratory data alone (``bc*``); CQL on the controls'
data; the same generator with a fixed, a random or a rule policy. ``fixed:MOVE`` takes any move of the taxonomy."""


class RolesSpec(Section):
    tutor: EndpointRole
    """Words the moves, and is the prompt-engineering arm and the behaviour policy that makes D."""
    student: EndpointRole
    """Plays the student while data are made."""
    other_student: EndpointRole | None = None
    """A different student, for evaluation only (None: the evaluation has no generalisation to another student)."""
    annotator: EndpointRole | None = None
    """Reads states and moves where ``labels`` says ``llm``, and writes the mistakes."""
    judge: EndpointRole | None = None
    """Judges success where ``success`` says ``llm``."""


class CollectSpec(Section):
    dialogues: Count = 3_000
    mistakes: Annotated[int, Field(ge=0)] = 10
    """Possible mistakes a problem (0: none are drawn)."""
    concurrency: Count = 32


class LabelsSpec(Section):
    features: str = "paper-25"
    moves: str = "paper-4"
    reader: Literal["rule", "llm"] = "llm"
    labeller: Literal["rule", "llm"] = "llm"
    agreement_sample: Annotated[int, Field(ge=0)] = 150
    """Turns exported for human labels."""


class RewardSection(Section):
    kind: Literal["success", "transfer_gain"] = "success"
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.9


class FitSection(Section):
    hidden: list[Count] = Field(default_factory=lambda: [64, 64])
    lr: Positive = 1e-3
    batch_size: Count = 256
    steps: Count = 3_000
    weight_decay: Annotated[float, Field(ge=0)] = 1e-3
    alpha: Annotated[float, Field(ge=0)] = 4.0
    """CQL's weight of the conservative term."""
    critics: Count = 2
    target_every: Count = 100
    iterations: Count = 30
    """FQI's regressions."""
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the problems whose dialogues are for early stopping and off-policy estimates."""
    eval_every: Count = 500
    patience: Count = 4
    bootstrap: Annotated[int, Field(ge=0)] = 200


class AugmentSection(Section):
    states: Count = 500
    """N."""
    repeats: Count = 5
    """M."""
    rounds: Count = 1
    spread: Literal["turn", "none"] = "turn"
    """``turn``: the best of every turn; ``none``: the published ranking by gain alone."""
    per_episode: Annotated[int, Field(ge=0)] = 0
    continuation: Literal["greedy", "bc"] = "greedy"
    """What chooses moves after the forced one: Q's best with ``epsilon`` random moves, or moves sampled from BC."""
    epsilon: Share = 0.1
    controls: list[ControlName] = Field(default_factory=_both_controls)


class EvaluateSection(Section):
    conversations: Count = 300
    """An arm, on seen problems with the student that made the data."""
    generalisation: Annotated[int, Field(ge=0)] = 100
    """An arm, in each further cell: unseen problems, the other student, both (0: none)."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of the problems that no data are made from; evaluated beside the seen ones (0: none)."""
    arms: list[str] = Field(default_factory=lambda: list(ARMS), min_length=1)
    baseline: str = "prompt"
    """The arm that paired differences are taken to."""
    level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    resamples: Count = 2_000


class LatentRecipe(Section):
    """A whole latent-state experiment."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0)] = 0
    output_dir: str = "runs"
    problems: str = "gsm-symbolic-mini"
    """Shipped set, path, or Hub id."""
    problems_size: Count | None = None
    """The first so many pairs (None: all)."""
    env: EnvSpec = EnvSpec(name="success")
    success: Literal["rule", "llm"] = "rule"
    count_told: bool = False
    """Count an answer that the tutor had stated first (as the paper does)."""
    roles: RolesSpec
    collect: CollectSpec = CollectSpec()
    labels: LabelsSpec = LabelsSpec()
    reward: RewardSection = RewardSection()
    fit: FitSection = FitSection()
    augment: AugmentSection = AugmentSection()
    evaluate: EvaluateSection = EvaluateSection()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.roles.annotator is None and "llm" in (self.labels.reader, self.labels.labeller):
            raise ValueError("labels are read by llm but roles.annotator names no model")
        if self.roles.annotator is None and self.collect.mistakes:
            raise ValueError(
                "collect.mistakes needs roles.annotator to write them (or set collect.mistakes: 0)"
            )
        if self.success == "llm" and self.roles.judge is None:
            raise ValueError("success is llm but roles.judge names no model")
        for arm in self.evaluate.arms:
            if arm not in ARMS and not arm.startswith("fixed:"):
                raise ValueError(f"evaluate.arms: no arm {arm!r}; there are {', '.join(ARMS)}")
        if len(set(self.evaluate.arms)) != len(self.evaluate.arms):
            raise ValueError("evaluate.arms lists an arm twice")
        if self.evaluate.baseline not in self.evaluate.arms:
            raise ValueError(f"evaluate.baseline {self.evaluate.baseline!r} is not among evaluate.arms")
        for arm in self.evaluate.arms:
            control = arm.removeprefix("cql+")
            if arm != control and control and control not in self.augment.controls:
                raise ValueError(f"arm {arm!r} needs augment.controls to hold {control!r}")
        return self


def load_latent_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> LatentRecipe:
    """The validated recipe of a file or of a shipped name such as ``latent/cpu``; overrides and errors as for other recipes."""
    path = locate(path_or_name)
    data, origins = read_with_base(path)
    for text in overrides:
        apply_override(data, origins, text)
    problems = data.get("problems")
    if isinstance(problems, str) and (path.parent / problems).exists():
        data["problems"] = str((path.parent / problems).resolve())
    try:
        return LatentRecipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise RecipeError(explain(error, data, origins, str(path), LatentRecipe)) from None


def dump_latent_recipe(recipe: LatentRecipe) -> str:
    """The resolved recipe as YAML."""
    data: dict[str, Any] = recipe.model_dump(mode="json")
    data["env"] = recipe.env.model_dump(mode="json", exclude_unset=True) | {"name": recipe.env.name}
    return yaml12.dump(data)

"""The recipe of ``maieutic reat run`` (torch-free): one file is the whole life cycle from the first dialogues to the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from maieutic import yaml12
from maieutic.config import Count, EnvSpec, Positive, Section
from maieutic.endpoint import EndpointRole
from maieutic.errors import RecipeError
from maieutic.evaluation.config import ArmSpec
from maieutic.reat.distil_config import DistilSection, OcmRole, OcmRoles
from maieutic.reat.embeddings import PAPER_MODEL
from maieutic.reat.repository import RepositorySettings
from maieutic.reat.retrieval import RetrievalSettings
from maieutic.recipe import apply_override, locate, read_with_base
from maieutic.recipe_errors import explain

PROMPT_ONLY, REAT = "prompt_only", "reat"
ABLATIONS = ("state_random", "no_gate", "no_rewrite", "merged_roles", "no_state_filter", "no_merging")
"""The six of Figure 6, in its order."""
OWN_REPOSITORY: dict[str, dict[str, dict[str, Any]]] = {
    "no_gate": {"distil": {"gate": False}},
    "no_rewrite": {"distil": {"rewrite": False}},
    "merged_roles": {"distil": {"merged_roles": True}},
    "no_merging": {"repository": {"no_merging": True}},
}
"""Ablations whose experience is distilled anew from the same dialogues, and the settings that they change."""
ARMS = (PROMPT_ONLY, REAT, *ABLATIONS)
Arm = Literal[
    "prompt_only", "reat", "state_random", "no_gate", "no_rewrite", "merged_roles", "no_state_filter", "no_merging"
]  # fmt: skip
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class RunRoles(Section):
    """Who does what. The teacher is any arm of an evaluation: an endpoint, a base, SFT- or RL-trained model, or one's own class."""

    tutor: ArmSpec
    student: EndpointRole
    ocm: OcmRoles
    """Distils, and scores unless ``judge`` is given."""
    live: OcmRole | None = None
    """The Observer while tutoring (None: ``ocm.observer``, else ``ocm.ocm``)."""
    live_rewriter: OcmRole | None = None
    """Given: the paper's two calls, Observer then Rewriter; None: one call."""
    judge: OcmRoles | None = None
    """The primary judge (None: ``ocm``, as in the paper)."""
    second_judge: OcmRoles | None = None
    """An external judge for the same dialogues (section 4.3)."""


class RunProblems(Section):
    source: str = "gsm-symbolic-mini"
    """Problems that experience is made from: a shipped set, a path, a Hub id."""
    split: str | None = None
    config: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Of a generator (``generate:…``)."""
    batches: Count = 5
    batch_size: Count = 100
    """B0, B1, …: each is an unseen test set for the experience of those before it."""
    test_source: str | None = None
    """Held-out problems (None: what is left of ``source``)."""
    test_split: str | None = None
    splits: Count = 3
    split_size: Count = 100
    personas_per_problem: Count = 1
    persona_seed: Annotated[int, Field(ge=0)] = 0


class Driver(Section):
    """Another OCM driver (section 4.5): a repository distilled by ``roles`` from the first ``batches`` batches' dialogues."""

    roles: OcmRoles
    batches: Count = 2


class DataSet(Section):
    """Another data set that the repository is tried on (section 4.5)."""

    source: str
    split: str | None = None
    config: str | None = None
    size: Count = 100


class Transfer(Section):
    """What the finished repository is tried on besides the test splits; each cell compares prompt-only and REAT."""

    tutors: dict[Name, ArmSpec] = Field(default_factory=dict)
    """Other teacher backbones, on the first test split."""
    problems: dict[Name, DataSet] = Field(default_factory=dict)
    drivers: dict[Name, Driver] = Field(default_factory=dict)


class TestSection(Section):
    __test__ = False  # not a test class, whatever its name says to pytest

    arms: list[Arm] = Field(default=["prompt_only", "reat"])
    ablations_on: Count = 1
    """Ablations are played on the first so many splits."""
    rescue_below: Annotated[float, Field(gt=0, le=100)] = 90.0
    """A sample is low-scoring when its prompt-only score is below (Figure 4)."""


class AnnotateSection(Section):
    pairs: Annotated[int, Field(ge=0)] = 30
    """Paired dialogues of the first split that are exported for people."""


class ReatRecipe(Section):
    """A whole REAT experiment."""

    name: Name
    seed: Annotated[int, Field(ge=0)] = 0
    output_dir: str = "runs"
    offline: bool = False
    spending_limit_usd: Positive | None = None
    concurrency: Count = 16
    """Most dialogues at once."""
    env: EnvSpec = EnvSpec(name="persona", kind="maieutic.reat.persona:PersonaEnvironment")
    problems: RunProblems = RunProblems()
    roles: RunRoles
    distil: DistilSection = DistilSection()
    experience_of: Literal["deployed", "prompt_only"] = "deployed"
    """Whose dialogues of a batch are distilled: the deployed tutor's (REAT's from B1 on), or always the prompt-only tutor's."""
    repository: RepositorySettings = RepositorySettings()
    start_from: str | None = None
    """A repository's folder to start with (a finished run's): it is copied. With ``problems.batches`` of it already in there, use
    ``grow: false``."""
    grow: bool = True
    """Off: no batches are played; ``start_from`` is tested as it is."""
    embedder: str = PAPER_MODEL
    retrieval: RetrievalSettings = RetrievalSettings()
    test: TestSection = TestSection()
    transfer: Transfer = Transfer()
    annotate: AnnotateSection = AnnotateSection()
    faults: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """How often the rule-driven roles of ``loopback`` spoil an answer; other endpoints are not touched."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        arms = list(self.test.arms)
        if len(set(arms)) != len(arms):
            raise ValueError("test.arms lists an arm twice")
        if PROMPT_ONLY not in arms:
            raise ValueError("test.arms must hold prompt_only: every arm is compared with it")
        if not self.grow and self.start_from is None:
            raise ValueError("grow is off but start_from names no repository to test")
        need = [a for a in arms if a in OWN_REPOSITORY]
        if not self.grow and (need or self.transfer.drivers):
            what = ", ".join([*need, *self.transfer.drivers])
            raise ValueError(f"grow is off: {what} need the dialogues of the batches")
        for name, driver in self.transfer.drivers.items():
            if driver.batches > self.problems.batches:
                raise ValueError(
                    f"transfer.drivers.{name}.batches is {driver.batches}, problems.batches {self.problems.batches}"
                )
        return self


def load_reat_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> ReatRecipe:
    """The validated recipe of a file or of a shipped name such as ``reat/cpu``; overrides and errors as for other recipes."""
    path = locate(path_or_name)
    data, origins = read_with_base(path)
    for text in overrides:
        apply_override(data, origins, text)
    try:
        return ReatRecipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise RecipeError(explain(error, data, origins, str(path), ReatRecipe)) from None


def dump_reat_recipe(recipe: ReatRecipe) -> str:
    """The resolved recipe as YAML."""
    data: dict[str, Any] = recipe.model_dump(mode="json")
    data["env"] = recipe.env.model_dump(mode="json", exclude_unset=True) | {
        "name": recipe.env.name,
        "kind": recipe.env.kind,
    }
    return yaml12.dump(data)

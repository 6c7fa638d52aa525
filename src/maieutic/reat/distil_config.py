"""Settings of distillation, and the recipe of ``maieutic reat distil`` (torch-free). Defaults are ``reference-facts`` §3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from maieutic.config import Count, Positive, SamplingSpec, Section, Share
from maieutic.endpoint import EndpointRole
from maieutic.errors import RecipeError
from maieutic.reat.embeddings import PAPER_MODEL
from maieutic.reat.repository import RepositorySettings
from maieutic.recipe import apply_override, locate, read_with_base
from maieutic.recipe_errors import explain

LOOPBACK = "loopback"
"""An ``engine.urls`` entry: the role is answered by rule, by a server that is started on 127.0.0.1."""


class OcmRole(EndpointRole):
    """One model of the pipeline."""

    sampling: SamplingSpec = SamplingSpec(temperature=0.0, max_tokens=2_048)
    """Temperature 0, as published (Appendix C.1)."""
    structured: bool = True
    """Ask for structured output; off for endpoints that have none."""


class FaultsSpec(Section):
    """Faults that the loopback server plants (:class:`maieutic.reat.rule_roles.Faults`): shares of replies, at most one each."""

    malformed: Share = 0.0
    out_of_range: Share = 0.0
    contradiction: Share = 0.0
    leak: Share = 0.0
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _shares(self) -> Self:
        total = self.malformed + self.out_of_range + self.contradiction + self.leak
        if total > 1:
            raise ValueError(f"the shares of faults add up to {total:g}, which is more than every reply")
        return self


class OcmRoles(Section):
    """Who reviews. A role that is not given is played by ``ocm``."""

    ocm: OcmRole
    observer: OcmRole | None = None
    critic: OcmRole | None = None
    mentor: OcmRole | None = None
    rewriter: OcmRole | None = None
    """Rewrites diagnoses into queries and merges experiences (a small model in the paper)."""
    faults: FaultsSpec | None = None
    """Of roles at ``loopback``."""

    @property
    def given(self) -> list[OcmRole]:
        """The roles with an endpoint of their own."""
        every = (self.ocm, self.observer, self.critic, self.mentor, self.rewriter)
        return [role for role in every if role is not None]

    @model_validator(mode="after")
    def _faults_used(self) -> Self:
        if self.faults is not None and not any(LOOPBACK in role.engine.urls for role in self.given):
            raise ValueError(f"roles.faults is set but no role is at {LOOPBACK}: nobody would plant them")
        return self


class DistilSection(Section):
    """How turns become experience."""

    tau_rev: Annotated[float, Field(ge=0, le=100)] = 80.0
    """τ_rev of equation 5, on the scale of S."""
    tau_min: Annotated[int, Field(ge=0, le=4)] = 2
    """τ_min of equation 5, on the scale of a dimension."""
    gamma: Annotated[float, Field(ge=0, le=100)] = 85.0
    """γ of equation 8: what an admission needs."""
    rounds: Count = 3
    """Most inspections of revised responses of one turn."""
    gate: bool = True
    """Off: whatever was distilled is admitted (ablation "w/o quality gate")."""
    gate_unrevised: bool = True
    """Off: responses that needed no revision are admitted without γ (equation 8 as printed)."""
    rewrite: bool = True
    """Off: the query is the raw diagnosis (ablation "w/o query rewrite")."""
    rewrite_retries: Annotated[int, Field(ge=0)] = 2
    """Further tries after a rewritten query that held something of the problem."""
    fallback: Literal["masked", "verbatim"] = "masked"
    """The query when rewriting fails: the diagnosis with general words for what leaks, or as it is (Algorithm 1 as printed)."""
    leak_retries: Annotated[int, Field(ge=0)] = 1
    """Further tries of the Mentor after reusable parts that held something of the problem; then the turn is dropped."""
    merged_roles: bool = False
    """One call for Observer, Critic and Mentor (ablation "w/o OCM decoupling")."""
    reasks: Annotated[int, Field(ge=0)] = 2
    """Further tries after a reply that could not be used."""
    in_flight: Count | None = None
    """Most turns under review at once (None: twice what the endpoints take together)."""


class DistilRecipe(Section):
    """One distillation."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0)] = 0
    spending_limit_usd: Positive | None = None
    roles: OcmRoles
    distil: DistilSection = DistilSection()
    repository: RepositorySettings = RepositorySettings()
    embedder: str = PAPER_MODEL
    """``hashing``, ``packaged-minilm``, a Hub id or a folder."""
    offline: bool = False
    """Take nothing from the Hub."""


def load_distil_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> DistilRecipe:
    """The validated recipe of a file or of a shipped name; overrides and errors as for other recipes.

    Raises :class:`RecipeError` that names file, key, value and, where there is one, the nearest valid key.
    """
    path = locate(path_or_name)
    data, origins = read_with_base(path)
    for text in overrides:
        apply_override(data, origins, text)
    try:
        return DistilRecipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise RecipeError(explain(error, data, origins, str(path), DistilRecipe)) from None

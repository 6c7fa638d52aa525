"""The recipe section of a model that can only be an endpoint: what roles of several recipes have in common (torch-free)."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from maieutic.config import EngineSpec, SamplingSpec, Section


class EndpointRole(Section):
    """One model behind an OpenAI-compatible endpoint."""

    model: str
    engine: EngineSpec
    sampling: SamplingSpec = SamplingSpec(temperature=0.6, max_tokens=200)

    @model_validator(mode="after")
    def _an_endpoint(self) -> Self:
        if self.engine.kind != "chat":
            raise ValueError(
                f"engine.kind must be chat, not {self.engine.kind}: this role is called at an endpoint only"
            )
        return self

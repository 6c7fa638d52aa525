"""The recipe of ``maieutic sft`` (torch-free): an experiment, sources of dialogues, a quality filter, and how to train."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, StringConstraints, ValidationError, model_validator

from maieutic.config import Count, Positive, Section, Share
from maieutic.errors import RecipeError
from maieutic.recipe import apply_override, read_with_base
from maieutic.recipe_errors import explain

S = TypeVar("S", bound=Section)


class SourceSpec(Section):
    """Where tutor turns come from.

    ``transcripts``: episodes of a run; ``rollouts``: episodes that the untrained tutor plays now on the experiment's training
    pairs; ``mathdial``: rows of MathDial (file or Hub id); ``chat``: JSONL of ``{"messages": […]}``.
    """

    kind: Literal["transcripts", "rollouts", "mathdial", "chat"]
    path: str | None = None
    """Run folder, file or Hub id (not for ``rollouts``)."""
    split: str | None = None
    """``mathdial`` from the Hub: its split."""
    phase: Literal["train", "eval", "all"] = "train"
    best_of: Count | None = None
    """``transcripts``, ``rollouts``: keep so many episodes of each group, the best by reward (None: all that count)."""
    min_reward: float | None = None
    """``transcripts``, ``rollouts``: keep only episodes with at least this reward."""
    problems: Count | None = None
    """``rollouts``: training pairs that are played (None: all)."""
    group_size: Count = 8
    """``rollouts``: G, episodes a pair."""
    scores: str | None = None
    """JSONL of ``{"id": …, "turn": …, "score": …}`` (0-100): scores of single turns, or without ``turn`` of whole dialogues."""
    limit: Count | None = None
    """Only the first so many dialogues."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.path is None) != (self.kind == "rollouts"):
            raise ValueError(
                f"a source of kind {self.kind} {'names no path' if self.kind == 'rollouts' else 'needs a path'}"
            )
        if self.kind in ("mathdial", "chat") and (self.best_of is not None or self.min_reward is not None):
            raise ValueError(
                f"best_of and min_reward choose among episodes with rewards; {self.kind} has none"
            )
        return self


class QualitySpec(Section):
    """REAT's rule: only teacher turns with a high pedagogical score are learned from."""

    min_score: Annotated[float, Field(ge=0, le=100)] | None = None
    """γ: turns below it are left out (None: no filter)."""
    unscored: Literal["error", "drop", "keep"] = "error"
    """What becomes of turns without a score when the filter is on."""


class SftTraining(Section):
    epochs: Count = 2
    lr: Positive = 1e-4
    batch_size: Count = 16
    """Turns an optimizer step."""
    micro_batch: Count = 4
    """Turns a forward pass; divides ``batch_size``."""
    max_length: Count = 4_096
    """Longest example in tokens; longer ones are left out and counted, never cut."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Positive = 1.0
    gradient_checkpointing: bool = False
    held_out: Share = 0.1
    """Share of the problems whose turns measure the held-out loss (0: none)."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.batch_size % self.micro_batch:
            raise ValueError(
                f"batch_size ({self.batch_size}) is not a multiple of micro_batch ({self.micro_batch})"
            )
        return self


class SftRecipe(Section):
    """A whole SFT run. Tutor (``lora``: adapter or full), environment prompts and problems are those of ``experiment``."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    arm: str = "sft"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    output_dir: str = "runs"
    offline: bool = False
    experiment: str
    """A training recipe: file or shipped name."""
    experiment_overrides: list[str] = Field(default_factory=list)
    sources: Annotated[list[SourceSpec], Field(min_length=1)]
    quality: QualitySpec = QualitySpec()
    training: SftTraining = SftTraining()


def load_sft_recipe(name: str | Path, overrides: Sequence[str] = ()) -> SftRecipe:
    """The validated recipe of a file, or of a shipped name such as ``sft/mathdial``. Raises :class:`RecipeError`.

    Relative paths that exist beside the file are taken from there, else from the working directory.
    """
    path = locate_in("sft", name)
    data, origins = read_with_base(path)
    for text in overrides:
        apply_override(data, origins, text)
    anchor(data, "experiment", path.parent)
    sources = data.get("sources")
    for source in sources if isinstance(sources, list) else []:
        for key in ("path", "scores"):
            anchor(source, key, path.parent)
    return read_as(SftRecipe, data, origins, str(path))


def read_as(model: type[S], data: Any, origins: Any, name: str) -> S:
    """``data`` as a ``model``; errors name place, key and value."""
    try:
        return model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise RecipeError(explain(error, data, origins, name, model)) from None


def anchor(node: Any, key: str, folder: Path) -> None:
    """Make a relative path that exists under ``folder`` absolute."""
    value = node.get(key) if isinstance(node, dict) else None
    if isinstance(value, str) and ("/" in value or Path(value).suffix) and (folder / value).exists():
        node[key] = str((folder / value).resolve())


def locate_in(kind: str, name: str | Path) -> Path:
    """A file, or a shipped recipe of ``recipes/<kind>`` by name (``<kind>/`` and suffix optional), or ``micro/<kind>``."""
    if Path(name).is_file():
        return Path(name)
    from maieutic.resources import share_dir

    folder = share_dir("recipes") / kind
    beside = share_dir("recipes") / "micro" / f"{kind}.yaml"
    if str(name).removeprefix("recipes/").removesuffix(".yaml") == f"micro/{kind}" and beside.is_file():
        return beside
    plain = str(name).removeprefix("recipes/").removeprefix(f"{kind}/").removesuffix(".yaml")
    shipped = sorted(p.stem for p in folder.glob("*.yaml"))
    if plain in shipped:
        return folder / f"{plain}.yaml"
    near = difflib.get_close_matches(plain, shipped, n=1)
    hint = (
        f"did you mean {kind}/{near[0]}?" if near else f"shipped: {', '.join(f'{kind}/{s}' for s in shipped)}"
    )
    raise RecipeError(f"no {kind} recipe {str(name)!r}: neither a file nor shipped; {hint}")

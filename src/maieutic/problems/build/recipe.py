"""The recipe of ``maieutic data build`` (torch-free). Defaults are the published procedure (paper, appendix E.1)."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator

from maieutic.config import Count, EnvSpec, Positive, SamplingSpec, Section, Share, StudentSpec
from maieutic.endpoint import EndpointRole
from maieutic.errors import RecipeError
from maieutic.recipe import apply_override, locate, read_with_base
from maieutic.yaml12 import KeyPath, dotted


class SourceSpec(Section):
    """Problems with answers: anything that :func:`maieutic.problems.read_pairs` reads."""

    source: str
    """Hub id, file, shipped set, or ``generate:NAME`` (see docs/problems.md)."""
    config: str | None = None
    """Configuration of a Hub data set (``main`` of openai/gsm8k)."""
    split: str | None = None
    limit: Count | None = None
    """Only the first so many rows."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a generator."""


class RoleSpec(EndpointRole):
    """A model that rewrites or solves."""

    sampling: SamplingSpec = SamplingSpec(temperature=1.0, max_tokens=2_048)


class VerifySpec(Section):
    """Blind verification: the solver sees the variant alone, in a fresh context."""

    solves: Annotated[int, Field(ge=0)] = 1
    """Independent solves of a variant, one ``n = solves`` request (0: none, for rewriters that compute their answers)."""
    majority: Share = 0.5
    """More than this share of the solves must give the stated answer."""
    keep_solution: bool = True
    """Keep the first solve that agrees as the variant's worked solution, where the rewriter gave none."""


class PriorSpec(Section):
    k: Count = 16
    """Cold student samples of each problem, one request."""
    source_band: tuple[Share, Share] | None = None
    """Leave out sources whose solve rate is outside [low, high], before anything is paid for their rewriting."""


class GateSpec(Section):
    """Difficulty gate on the variant's solve rate."""

    ceiling: Share = 0.75
    """A variant with a higher rate is too easy."""
    gap: Share = 0.375
    """Most |variant's rate − source's rate|."""
    on_failure: Literal["keep_best", "drop"] = "keep_best"
    """When no attempt passes: keep the verified variant with the smallest gap, with flags, or none."""


class ChecksSpec(Section):
    """What a variant's text and answer must satisfy before anybody solves it."""

    answer_form: bool = True
    """Integer → integer, fraction → fraction, choice → choice, …"""
    min_changed: Share = 0.5
    """A variant that changes a smaller share of the source's numbers than this and …"""
    max_similarity: Share = 0.9
    """… has at least this word similarity (numbers ignored) is a near-copy."""


class DedupSpec(Section):
    """Near-duplicates: Jaccard similarity of word shingles, found by MinHash."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    shingle: Count = 3
    """Words of a shingle."""
    against: tuple[SourceSpec, ...] = ()
    """Evaluation sets that neither sources nor variants may resemble (GSM8K, MATH, …)."""


class DataRecipe(Section):
    """One data set to build."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0)] = 0
    output_dir: str = "data-runs"
    """The set lies in ``output_dir/name``."""
    offline: bool = False
    spending_limit_usd: Positive | None = None
    sources: Annotated[list[SourceSpec], Field(min_length=1)]
    rewriter: RoleSpec | Literal["template"]
    """``template``: draw the source's own template again (sources of ``generate:…`` only), no model."""
    solver: RoleSpec | None = None
    """Who verifies; None: the rewriter's model in a fresh context, as published."""
    student: StudentSpec
    """Whose solve rates are measured; its cold prompt is that of ``env``."""
    env: EnvSpec = EnvSpec()
    attempts: Count = 3
    verify: VerifySpec = VerifySpec()
    prior: PriorSpec = PriorSpec()
    gate: GateSpec = GateSpec()
    checks: ChecksSpec = ChecksSpec()
    dedup: DedupSpec = DedupSpec()
    prompts: str | None = None
    """Folder with rewrite_system.txt, rewrite.txt, feedback.txt, solve_system.txt, solve.txt (None: the package's)."""
    rows_in_flight: Count | None = None
    """Rows worked on at once (None: twice what the endpoints take together)."""
    parquet: bool = True
    """Also write ``pairs.parquet`` with the published set's columns."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rewriter == "template":
            odd = [s.source for s in self.sources if not s.source.startswith("generate:")]
            if odd:
                raise ValueError(f"rewriter is template, but {odd[0]!r} has no templates: use generate:NAME")
            if self.verify.solves and self.solver is None:
                raise ValueError("rewriter is template: set verify.solves: 0, or name a solver")
        elif self.verify.solves == 0:
            raise ValueError("verify.solves is 0: the answers of a model that rewrites need blind solves")
        return self

    @property
    def folder(self) -> Path:
        """Where everything about this set is written."""
        return Path(self.output_dir).expanduser() / self.name


def load_data_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> DataRecipe:
    """The validated recipe of a file or of a shipped name (``data/gsm8k-vllm``); ``overrides`` are ``key.sub=value``.

    Paths are taken relative to the recipe when something lies there. Raises :class:`RecipeError`.
    """
    path = _locate(path_or_name)
    data, origins = read_with_base(path)
    for text in overrides:
        apply_override(data, origins, text)
    _anchor(data, path.parent)
    try:
        return DataRecipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise RecipeError(_explain(error, origins, str(path))) from None


def _locate(name: str | Path) -> Path:
    try:
        return locate(name)
    except RecipeError:
        from maieutic.resources import share_dir

        shipped = sorted(p.stem for p in (share_dir("recipes") / "data").glob("*.yaml"))
        plain = str(name).removeprefix("recipes/").removeprefix("data/").removesuffix(".yaml")
        if plain in shipped:
            return share_dir("recipes") / "data" / f"{plain}.yaml"
        near = difflib.get_close_matches(plain, shipped, n=1)
        hint = (
            f"did you mean data/{near[0]}?" if near else f"shipped: {', '.join('data/' + s for s in shipped)}"
        )
        raise RecipeError(f"no data recipe {str(name)!r}: neither a file nor shipped; {hint}") from None


def _anchor(data: dict[str, Any], folder: Path) -> None:
    def put(node: Any, key: str) -> None:
        value = node.get(key) if isinstance(node, dict) else None
        if not isinstance(value, str):
            return
        looks_like_path = value.startswith(".") or "/" in value or Path(value).suffix != ""
        if looks_like_path and (folder / value).exists():
            node[key] = str((folder / value).resolve())

    dedup = data.get("dedup")
    groups = [data.get("sources"), dedup.get("against") if isinstance(dedup, dict) else None]
    for item in [i for group in groups if isinstance(group, list) for i in group]:
        put(item, "source")
    put(data, "prompts")
    put(data.get("env"), "name")
    put(data.get("student"), "model")


def _explain(error: ValidationError, origins: dict[KeyPath, str], name: str) -> str:
    lines = []
    for item in error.errors(include_url=False):
        path = tuple(
            p for p in item["loc"] if not (isinstance(p, str) and p in ("RoleSpec", "literal['template']"))
        )
        where = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), name)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            known = _fields(path[:-1])
            near = difflib.get_close_matches(str(path[-1]), known, n=1)
            message = "unknown key" + (
                f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            )
        elif item["type"] == "missing":
            message = "required, but not given"
        elif path:
            message = f"{item['input']!r:.80}: {message}"
        lines.append(f"{where}: {dotted(path) or 'recipe'}: {message}")
    return (
        lines[0]
        if len(lines) == 1
        else f"{len(lines)} errors in {name}:\n" + "\n".join(f"  - {x}" for x in lines)
    )


def _fields(path: KeyPath) -> list[str]:
    """The keys of the section at ``path``."""
    model: Any = DataRecipe
    for part in path:
        if isinstance(part, int):
            continue
        model = _section(model.model_fields[part].annotation) if part in model.model_fields else None
        if model is None:
            return []
    return list(model.model_fields)


def _section(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((s for a in get_args(annotation) if (s := _section(a)) is not None), None)

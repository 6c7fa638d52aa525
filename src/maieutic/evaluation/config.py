"""The recipe of ``maieutic evaluate`` (torch-free): arms, judges, reward model, and what each suite runs on."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from maieutic.config import (
    Count,
    EngineSpec,
    ImportPath,
    JudgeSpec,
    ModelSpec,
    Positive,
    SamplingSpec,
    Section,
)
from maieutic.errors import RecipeError
from maieutic.recipe import apply_override, locate, read_with_base
from maieutic.yaml12 import dotted

SUITES = ("environment", "middle_turn", "mathtutorbench", "replay", "moves", "retention")


class ArmSettings(Section):
    """Settings of an arm whose model is still to be named."""

    kind: Literal["policy", "chat"] | ImportPath = "policy"
    model: str | None = None
    """Hub id, folder, packaged name, or a checkpoint's folder; for ``chat`` the endpoint's name of it."""
    adapter: str | None = None
    """Folder or Hub id of a LoRA adapter on ``model``."""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    chat_template: str | None = None
    engine: EngineSpec = EngineSpec()
    thinking: bool | None = None
    thinking_history: Literal["keep", "strip"] = "keep"
    sampling: SamplingSpec = SamplingSpec(temperature=0.6, top_p=0.95)
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a user's own class."""
    inner: ArmSpec | None = None
    """The tutor that a user's own class wraps: it is then called as ``Class(inner, **options)``."""


class ArmSpec(ArmSettings):
    """One way of tutoring. ``policy``: a model by token ids; ``chat``: an endpoint by messages; or a user's own Tutor class."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.kind in ("policy", "chat") and self.model is None:
            raise ValueError(f"an arm of kind {self.kind} names its model")
        if self.kind == "chat" and self.engine.kind != "chat":
            raise ValueError("an arm of kind chat has engine.kind: chat, with urls")
        if self.kind == "policy" and self.engine.kind == "chat":
            raise ValueError("engine.kind is chat: an arm that is asked by messages has kind: chat")
        return self


class GraderModelSpec(ModelSpec):
    """A model that rates or classifies: never the one that trained the tutor."""

    sampling: SamplingSpec = SamplingSpec(temperature=0.0, max_tokens=1_024)
    reasks: Annotated[int, Field(ge=0)] = 1
    structured: bool = True
    """Ask for structured output (``chat`` endpoints that have it)."""


class RewardModelSpec(Section):
    """A sequence-classification model with one output; its raw logit is the score."""

    model: str = "eth-nlped/Qwen2.5-1.5B-pedagogical-rewardmodel"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    system: str | None = None
    """System text above each conversation; None: :data:`maieutic.evaluation.ped_rm.SYSTEM`."""
    solution: bool = True
    """The first message shows the reference solution under the problem."""
    batch_tokens: Count = 16_384
    """Most tokens of a batch, padding included."""
    max_tokens: Count | None = None
    """Longest conversation; longer ones are an error, never cut. None: what the model takes."""


class EnvironmentSuite(Section):
    problems: Count | None = None
    """Held-out pairs of the experiment (None: all)."""
    samples: Count = 1
    """S: dialogues a problem."""
    remeasure: Annotated[int, Field(ge=0)] = 0
    """Cold samples a problem for fresh solve rates (0: those of the data)."""
    retries: Annotated[int, Field(ge=0)] = 1


class DialogueSet(Section):
    """Human tutoring dialogues."""

    format: Literal["mathdial", "eedi"]
    source: str
    """File (.jsonl, .json, .csv, .parquet) or Hub id."""
    split: str | None = None
    config: str | None = None
    """Configuration of a Hub data set (``anchored-dialogues`` of the Eedi set)."""
    questions: str | None = None
    """``eedi``: file with the questions' texts (``dq-question-metadata``)."""
    limit: Count | None = None


class MiddleTurnSuite(Section):
    sets: list[DialogueSet] = Field(default_factory=list)
    samples: Count = 1
    reward: bool = True
    ratings: bool = True
    """1-5 scores of the judge, where the recipe has one."""


class MathTutorBenchSuite(Section):
    tasks: list[str] = Field(default_factory=list)
    """None named: every task that has its file."""
    gsm8k: str | None = None
    socratic: str | None = None
    stepverify: str | None = None
    bridge: str | None = None
    bridge_hard: str | None = None
    """Where each file of the benchmark lies, in its own format."""
    prompts: str | None = None
    """Folder with ``<task>.txt`` in place of the shipped wording."""
    limit: Count | None = None
    max_tokens: Count = 2_048
    temperature: Annotated[float, Field(ge=0)] = 0.0


class ReplaySuite(Section):
    source: str | None = None
    """``moments.jsonl`` of a TutorMoments release, a file of that format, or a Hub id."""
    limit: Count | None = None
    config: str = "moments"
    """Configuration of a Hub data set."""
    max_turns: Annotated[int, Field(ge=2)] = 5
    """Generated turns of both sides together."""
    prompts: list[Literal["plain", "evaluation_aware"]] = Field(default=["plain", "evaluation_aware"])
    prompts_folder: str | None = None
    """Folder with ``plain.txt``, ``evaluation_aware.txt`` and ``student.txt`` in place of the shipped wording."""


class MovesSuite(Section):
    of: list[Literal["replay", "environment"]] = Field(default=["replay"])
    """Suites whose dialogues are read (they have run before, or run in the same command)."""
    by: Literal["rules", "judge"] = "judge"
    human: str | None = None
    """Reference distribution: JSON object from letter to count or share."""


class RetentionSuite(Section):
    sources: list[str] = Field(default_factory=list)
    """GSM8K-format files, pair sets, Hub ids."""
    limit: Count | None = None
    samples: Count = 1
    max_tokens: Count = 1_024
    temperature: Annotated[float, Field(ge=0)] = 0.0


class EvaluationRecipe(Section):
    """What is evaluated, by whom, on what."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0)] = 0
    offline: bool = False
    concurrency: Count = 16
    """Most samples in work at once."""
    spending_limit_usd: Positive | None = None
    experiment: str | None = None
    """Recipe that says environment, students, problems and reward; its training judge is not used unless ``gates`` is unset."""
    experiment_overrides: list[str] = Field(default_factory=list)
    tutor: ArmSettings | None = None
    """Settings of an arm that is named on the command line by path, Hub id or URL (its ``model`` is replaced)."""
    arms: dict[str, ArmSpec] = Field(default_factory=dict)
    gates: JudgeSpec | None = None
    """Judge of the gates in the environment suite."""
    judge: GraderModelSpec | None = None
    """Rates turns (1-5), classifies moves and scores replays."""
    student: ModelSpec | None = None
    """The independent student of the replay suite."""
    student_sampling: SamplingSpec = SamplingSpec(temperature=0.6, max_tokens=500)
    reward_model: RewardModelSpec | None = None
    environment: EnvironmentSuite = EnvironmentSuite()
    middle_turn: MiddleTurnSuite = MiddleTurnSuite()
    mathtutorbench: MathTutorBenchSuite = MathTutorBenchSuite()
    replay: ReplaySuite = ReplaySuite()
    moves: MovesSuite = MovesSuite()
    retention: RetentionSuite = RetentionSuite()


_PATHS = {
    "mathtutorbench": ("gsm8k", "socratic", "stepverify", "bridge", "bridge_hard", "prompts"),
    "replay": ("source", "prompts_folder"),
    "moves": ("human",),
}


def load_evaluation_recipe(name: str | Path, overrides: Sequence[str] = ()) -> EvaluationRecipe:
    """The validated recipe of a file, or of a shipped name such as ``evaluation/cpu``. Raises :class:`RecipeError`.

    Relative paths that exist beside the file are taken from there, else from the working directory.
    """
    path = _locate(name)
    data, origins = read_with_base(path)
    for text in overrides:
        apply_override(data, origins, text)
    _anchor(data, path.parent)
    try:
        return EvaluationRecipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        lines: list[str] = []
        for item in error.errors(include_url=False):
            key = tuple(p for p in item["loc"] if "[" not in str(p))
            where = next((origins[key[:n]] for n in range(len(key), 0, -1) if key[:n] in origins), str(path))
            value = "" if item["type"] == "missing" else f"{item['input']!r:.80}: "
            lines.append(
                f"{where}: {dotted(key) or 'recipe'}: {value}{item['msg'].removeprefix('Value error, ')}"
            )
        raise RecipeError("\n".join(lines)) from None


def _locate(name: str | Path) -> Path:
    if Path(name).is_file():
        return Path(name)
    from maieutic.resources import share_dir

    folder = share_dir("recipes") / "evaluation"
    plain = str(name).removeprefix("recipes/").removeprefix("evaluation/").removesuffix(".yaml")
    shipped = sorted(p.stem for p in folder.glob("*.yaml"))
    if plain in shipped:
        return folder / f"{plain}.yaml"
    if "/" in str(name) and not str(name).startswith("evaluation/"):
        return locate(name)
    near = difflib.get_close_matches(plain, shipped, n=1)
    hint = f"did you mean evaluation/{near[0]}?" if near else f"shipped: {', '.join(shipped)}"
    raise RecipeError(f"no evaluation recipe {str(name)!r}: neither a file nor shipped; {hint}")


def _anchor(data: dict[str, Any], folder: Path) -> None:
    def put(node: Any, key: Any) -> None:
        value = node[key] if isinstance(node, list) else node.get(key) if isinstance(node, dict) else None
        if isinstance(value, str) and ("/" in value or Path(value).suffix) and (folder / value).exists():
            node[key] = str((folder / value).resolve())

    for section, keys in _PATHS.items():
        for key in keys:
            put(data.get(section), key)
    put(data, "experiment")
    put(data.get("reward_model"), "model")
    sets = data.get("middle_turn")
    for one in sets.get("sets") or [] if isinstance(sets, dict) else []:
        put(one, "source")
        put(one, "questions")
    retention = data.get("retention")
    sources = retention.get("sources") if isinstance(retention, dict) else None
    for i in range(len(sources) if isinstance(sources, list) else 0):
        put(sources, i)
    arms = data.get("arms")
    for arm in arms.values() if isinstance(arms, dict) else []:
        put(arm, "model")
        put(arm, "adapter")

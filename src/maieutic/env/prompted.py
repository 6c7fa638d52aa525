"""A prompt-only arm: near-transfer tutoring with another system prompt for the tutor; everything else is the environment's.

``env: {kind: "maieutic.env.prompted:PromptedEnvironment", options: {tutor_prompt: evaluation_aware}}``. The prompt is
``tutor_<name>.txt`` of the environment's folder, or a file by its path, with the placeholders of ``tutor.txt``. The comparison
report treats it as a property of the arm, not of the measurement.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from maieutic.config import EnvSpec, RewardSpec
from maieutic.env.play import Environment
from maieutic.env.prompts import EnvTemplates, fill
from maieutic.errors import RecipeError
from maieutic.resources import find_env


class PromptedEnvironment(Environment):
    """``tutor_prompt``: name or path of the tutor's prompt. Raises :class:`RecipeError` when it is missing or unusable."""

    def __init__(
        self, env: EnvSpec, reward: RewardSpec, templates: EnvTemplates, *, tutor_prompt: str
    ) -> None:
        path = Path(find_env(env.name)) / f"tutor_{tutor_prompt}.txt"
        if not path.is_file():
            path = Path(tutor_prompt)
        if not path.is_file():
            shipped = sorted(
                p.stem.removeprefix("tutor_") for p in Path(find_env(env.name)).glob("tutor_*.txt")
            )
            raise RecipeError(
                f"env.options.tutor_prompt: {tutor_prompt!r} is neither a file nor a prompt of environment {env.name} "
                f"({', '.join(s for s in shipped if s != 'solution') or 'it has none'})"
            )
        text = path.read_text(encoding="utf-8").strip()
        if fill(text, end_token="", end_after="", problem="") == fill(
            text, end_token="x", end_after="", problem=""
        ):
            raise RecipeError(
                f"{path}: placeholder {{end_token}} is missing: the tutor would not know how to end"
            )
        super().__init__(env, reward, replace(templates, tutor=text))

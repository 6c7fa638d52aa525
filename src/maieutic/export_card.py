"""The model card of an exported tutor: what it is, what it was trained with, what it scored, how to serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maieutic import __version__
from maieutic.config import Recipe
from maieutic.models import PACKAGED
from maieutic.serve import _LORA_RANKS
from maieutic.training.checkpoint import TrainState

_SECTIONS = ("tutor", "students", "judge", "env", "reward", "problems", "algorithm", "training")
_PRIVATE = ("engine", "options")
"""Addresses, names of secrets and the like are left out of the card."""


def base_model_of(recipe: Recipe) -> str:
    """The name of the model that the tutor started from, as others know it: a Hub id where there is one."""
    name = recipe.tutor.model
    return PACKAGED[name].hub_id if name in PACKAGED else name


def model_card(
    recipe: Recipe, state: TrainState, *, kind: str, dtype: str, run: str, repo: str | None, base: str
) -> str:
    """Markdown with front matter. ``run``: the run's name; ``repo``: its id on the Hub, None for a local folder; ``base``: the
    model that the tutor started from, or that the adapter goes beside."""
    base, licence = _public(base), licence_of(recipe)
    front = ["library_name: " + ("peft" if kind == "adapter" else "transformers")]
    front += ["pipeline_tag: text-generation", f"base_model: {json.dumps(base)}"]
    front += [f"base_model_relation: {'adapter' if kind == 'adapter' else 'finetune'}"]
    front += ["tags:", "- tutoring", "- reinforcement-learning", "- maieutic", f"- {recipe.arm}"]
    if licence:
        front.append(f"license: {licence.lower()}")
    parts = ["---", *front, "---", "", f"# {run}", ""]
    form = "A LoRA adapter for" if kind == "adapter" else f"Whole weights in {dtype}, fine-tuned from"
    parts.append(f"A tutor that helps a student to solve problems by dialogue. {form} `{base}`.")
    parts += ["", "## Training", "", "| | |", "|---|---|"]
    parts += [f"| {name} | {value} |" for name, value in _facts(recipe, state, base)]
    parts += ["", "What differs from Maieutic's defaults:", "", "```json", _settings(recipe), "```"]
    parts += ["", "## Held-out evaluation during training", "", *_metrics(state)]
    parts += ["", "## Use", "", *_use(recipe, kind, base, repo or "FOLDER", run)]
    parts += ["", "## Licence", "", _licence_note(base, licence)]
    return "\n".join(parts) + "\n"


def licence_of(recipe: Recipe) -> str | None:
    """The base model's licence where its name or its own card says it; None: not known here."""
    name = recipe.tutor.model
    if name in PACKAGED:
        return PACKAGED[name].licence
    card = Path(name) / "README.md"
    if not card.is_file():
        return None
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            break
        key, _, value = line.partition(":")
        if key.strip() == "license" and value.strip():
            return value.strip().strip("\"'")
    return None


def _licence_note(base: str, licence: str | None) -> str:
    if licence:
        return (
            f"The base model `{base}` is under {licence}. Its terms apply to these weights too; so may those of the problems and "
            "of the student's and judge's models."
        )
    return (
        f"Not stated here: the terms of the base model `{base}` apply to these weights, and perhaps those of the problems and of "
        "the student's and judge's models. Look them up before you publish."
    )


def _facts(recipe: Recipe, state: TrainState, base: str) -> list[tuple[str, str]]:
    lora = recipe.tutor.lora
    facts = [
        ("base model", f"`{base}`" + (f" at `{recipe.tutor.revision}`" if recipe.tutor.revision else "")),
        ("arm", recipe.arm),
        ("trained", f"LoRA, r {lora.r}, alpha {lora.alpha:g}" if lora else "all weights"),
        ("steps", f"{state.step} ({state.optimizer_steps} optimizer steps)"),
        ("seed", str(recipe.seed)),
        ("environment", f"`{_public(recipe.env.name)}`, gates {recipe.env.gates}"),
        ("students", ", ".join(f"`{_public(s.model)}`" for s in recipe.students)),
        ("judge", f"`{_public(recipe.judge.model or recipe.judge.kind)}`"),
        ("problems", f"`{_public(recipe.problems.source)}`"),
        ("loss", recipe.algorithm.loss),
        ("recipe hash", f"`{state.recipe_hash}`"),
        ("software", f"Maieutic {__version__}"),
    ]
    if recipe.tutor.init_from is not None:
        facts.insert(1, ("started from", f"`{_public(recipe.tutor.init_from)}`"))
    return facts


def _settings(recipe: Recipe) -> str:
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    kept = {name: _without_private(data[name]) for name in _SECTIONS if name in data}
    return json.dumps(kept, indent=1, ensure_ascii=False)


def _without_private(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_private(v) for k, v in value.items() if k not in _PRIVATE}
    if isinstance(value, list):
        return [_without_private(v) for v in value]
    return _public(value) if isinstance(value, str) else value


def _public(text: str) -> str:
    """A path of the machine that trained it says nothing to readers: its last part only."""
    return Path(text).name if Path(text).is_absolute() else text


def _metrics(state: TrainState) -> list[str]:
    if not state.last_eval:
        return ["None was made."]
    before = state.first_eval
    rows = [f"| metric | before training | after step {state.last_eval_step} |", "|---|---|---|"]
    for name in sorted(state.last_eval):
        first = f"{before[name]:.4g}" if name in before else "–"
        rows.append(f"| `{name}` | {first} | {state.last_eval[name]:.4g} |")
    return rows


def _use(recipe: Recipe, kind: str, base: str, where: str, run: str) -> list[str]:
    if kind == "adapter":
        r = recipe.tutor.lora.r if recipe.tutor.lora else 16
        rank = next((known for known in _LORA_RANKS if known >= r), r)
        command = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {run}={where}"
    else:
        command = f"vllm serve {where}"
    lines = ["```bash", command, "```", ""]
    lines.append(
        f"It was trained under the prompts of the environment `{_public(recipe.env.name)}` (system prompt and scripted opening), "
        "and says little of use without them. The generation settings are those of the held-out evaluation: "
        f"temperature {recipe.eval.temperature:g}, at most {recipe.env.tutor_cap} tokens a turn."
    )
    if recipe.tutor.thinking is not None:
        switch = json.dumps({"enable_thinking": recipe.tutor.thinking})
        lines.append(f"Requests need `chat_template_kwargs: {switch}`, as in training.")
    return lines

"""``maieutic export``: a checkpoint as a folder that transformers and ``vllm serve`` take as it is, with a model card.

Merged, the folder is a whole model in the base model's dtype (LoRA deltas are added in fp32, then rounded once). As an adapter it
is what PEFT and ``vllm serve --enable-lora`` load beside the base model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maieutic.config import Recipe
from maieutic.errors import CheckpointError, MaieuticError, ModelError
from maieutic.export_card import base_model_of, model_card
from maieutic.training import checkpoint
from maieutic.training.checkpoint import TrainState
from maieutic.training.run_folder import named_os_errors

Kind = Literal["merged", "adapter"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Exported:
    """``folder`` holds the export of the checkpoint ``source``; ``url``: where it was pushed to, None if it was not."""

    folder: Path
    source: Path
    kind: Kind
    dtype: str
    url: str | None = None


def export(
    source: str | Path,
    out: Path | None = None,
    *,
    kind: Kind | None = None,
    dtype: Dtype = "auto",
    push: str | None = None,
    private: bool = True,
    api: Any = None,
) -> Exported:
    """Write the checkpoint ``source`` (or the newest one of a run's folder) to ``out``, and push it if a Hub id is given.

    Args:
        out: a folder that does not exist yet or is empty; None: ``<run>/export/<checkpoint>-<kind>``.
        kind: None is ``merged``.
        dtype: of a merged model's weights; ``auto``: the recipe's ``tutor.dtype``, else that of the base model's config.
        api: a ``huggingface_hub.HfApi`` (None: one with the user's own login). Untouched unless ``push`` is given.

    Raises :class:`~maieutic.errors.CheckpointError` for what is no checkpoint of a run, :class:`~maieutic.errors.ModelError` for
    weights that cannot be had in this form, :class:`~maieutic.errors.MaieuticError` when the Hub refuses.
    """
    if push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", push):
        raise MaieuticError(f"{push!r} is no model id: write owner/name")
    path, state, recipe = _find(Path(source))
    kind = kind or "merged"
    if kind == "adapter" and not _is_adapter(path):
        raise ModelError(
            f"{path} holds a whole model (tutor.lora is not set): there is no adapter, export it merged"
        )
    if kind == "adapter" and dtype != "auto":
        raise ModelError(f"dtype {dtype} is for a merged model: an adapter is written as it was trained")
    folder = out.absolute() if out is not None else path.parents[1] / "export" / f"{path.name}-{kind}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already: name another folder with --out, or remove it")
    part = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        with named_os_errors(f"the export {folder}", CheckpointError):
            part.mkdir(parents=True)
            written, base = _write(part, path, recipe, kind, dtype)
            run = path.parents[1].name
            card = model_card(recipe, state, kind=kind, dtype=written, run=run, repo=push, base=base)
            (part / "README.md").write_text(card, encoding="utf-8")
            if folder.exists():
                folder.rmdir()
            part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    url = None if push is None else _push(folder, push, private, api)
    return Exported(folder, path, kind, written, url)


def _find(source: Path) -> tuple[Path, TrainState, Recipe]:
    from maieutic.recipe import load_recipe

    if (source / "state.json").is_file():
        path = source.absolute()
    else:
        found = checkpoint.complete(source / "checkpoints")
        if not found:
            raise CheckpointError(
                f"{source} is neither a complete checkpoint (a folder step-NNNNNN with state.json) nor a run that has one"
            )
        path = found[-1][1].absolute()
    described = path.parents[1] / "recipe.yaml"
    if not described.is_file():
        raise CheckpointError(f"{described} is not there: export a checkpoint from within its run's folder")
    return path, checkpoint.load_state(path), load_recipe(described)


def _is_adapter(path: Path) -> bool:
    return (path / "model" / "adapter_config.json").is_file()


def _write(folder: Path, path: Path, recipe: Recipe, kind: Kind, dtype: Dtype) -> tuple[str, str]:
    """Weights, configuration, tokenizer with its chat template, generation settings; returns the dtype of the weights, and the
    model that they started from (of an adapter: that it goes beside)."""
    import torch
    from transformers import GenerationConfig

    from maieutic.runtime import make_renderer
    from maieutic.training.policy import build_policy

    # In fp32 and without a reference: what is merged is rounded once, when it is saved.
    tutor = recipe.tutor.model_copy(update={"dtype": "float32"})
    algorithm = recipe.algorithm.model_copy(update={"kl_beta": 0.0})
    plain = recipe.model_copy(update={"tutor": tutor, "algorithm": algorithm})
    policy = build_policy(plain, torch.device("cpu"), weights=path / "model")
    model = policy.model
    base = base_model_of(recipe)
    if kind == "adapter":
        checkpoint.as_os_errors(lambda: model.save_pretrained(folder, selected_adapters=["default"]))
        if policy.base_is_pure:
            _name_base(folder / "adapter_config.json", recipe)
        else:  # whole weights that tutor.init_from names
            base = model.get_base_model().config._name_or_path
        generation = model.get_base_model().generation_config
        name = str(next(p for p in model.parameters() if p.requires_grad).dtype)
    else:
        merged = model.merge_and_unload() if policy.is_adapter else model
        wanted = recipe.tutor.dtype if dtype == "auto" else dtype
        target = getattr(torch, wanted) if wanted != "auto" else _published_dtype(recipe)
        merged.to(target)
        merged.config.dtype = target
        generation = merged.generation_config
        name = str(target)
        checkpoint.as_os_errors(merged.save_pretrained, folder)
    if recipe.tutor.chat_template is not None:
        make_renderer(recipe.tutor, policy.tokenizer)  # a template that cannot be used is named here
        policy.tokenizer.chat_template = Path(recipe.tutor.chat_template).read_text(encoding="utf-8")
    policy.tokenizer.save_pretrained(folder)
    _generation(generation or GenerationConfig(), recipe, policy.tokenizer).save_pretrained(folder)
    return name.removeprefix("torch."), base


def _published_dtype(recipe: Recipe) -> Any:
    """The dtype that the base model's configuration names; fp32 where it names none."""
    import torch
    from transformers import AutoConfig

    from maieutic.models import resolve_model

    where = resolve_model(recipe.tutor.model, recipe.offline)
    config = AutoConfig.from_pretrained(
        where, revision=recipe.tutor.revision, local_files_only=recipe.offline
    )
    named = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if named is None:
        return torch.float32
    return getattr(torch, named) if isinstance(named, str) else named


def _name_base(config: Path, recipe: Recipe) -> None:
    """PEFT notes the path that the base model was loaded from, which says nothing on another machine."""
    data = json.loads(config.read_text(encoding="utf-8"))
    data["base_model_name_or_path"] = base_model_of(recipe)
    data["revision"] = recipe.tutor.revision
    config.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _generation(config: Any, recipe: Recipe, tokenizer: Any) -> Any:
    """Sampling as in the held-out evaluations, one tutor turn at a time, ended by the chat template's end token too."""
    sampled = recipe.eval.temperature > 0
    config.do_sample = sampled
    config.temperature = recipe.eval.temperature if sampled else None
    config.top_p = recipe.eval.top_p if sampled else None
    config.top_k = 0 if sampled else None
    config.max_new_tokens = recipe.env.tutor_cap
    known = config.eos_token_id
    ends = [] if known is None else ([known] if isinstance(known, int) else list(known))
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    config.eos_token_id = ends or None
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    return config


def _push(folder: Path, repo: str, private: bool, api: Any) -> str:
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, repo_type="model", folder_path=str(folder), commit_message="Upload a tutor"
        )
    except Exception as error:  # the Hub's client raises many kinds: all mean that nothing was published
        raise MaieuticError(
            f"{repo}: cannot be pushed ({type(error).__name__}: {error}); log in with `hf auth login`, or upload {folder} yourself"
        ) from error
    return str(getattr(done, "commit_url", done))

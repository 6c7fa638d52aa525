"""Checkpoints: all that a run needs to continue bit for bit, complete or absent.

    checkpoints/step-000010/
        model/         what trained, as ``save_pretrained`` writes it (a full model, or a LoRA adapter), with the tokenizer
        optimizer.pt   the optimizer's states; where ranks divide them a folder instead,
        optimizer/     rank-00000.pt, rank-00001.pt, …: each rank's part
        rng.pt         random states of each rank: python, numpy, torch, and CUDA where there is one
        state.json     :class:`TrainState`, written last

A checkpoint is written to ``checkpoints/.tmp-…``, flushed to disk file by file, and renamed; a kill or a full disk leaves
the previous one as it was. What stands under a temporary name is ignored and removed by the next save.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maieutic.config import ENV_TIMING, CheckpointSpec, Recipe
from maieutic.errors import CheckpointError
from maieutic.training.run_folder import named_os_errors

SCHEMA = 1
_NAME = re.compile(r"^step-(\d{6,})$")
_FREE_KEYS = (
    "name",
    "arm",
    "output_dir",
    "offline",
    "spending_limit_usd",
    "tracking",
    "checkpoint",
    "eval",
    "training.max_steps",
    "training.logit_chunk",
    *(f"env.{key}" for key in sorted(ENV_TIMING)),
)
"""Keys of a recipe that may differ on resume: none of them changes what a step computes (in how many pieces logits are made shows
in the last bits of sums alone, and its default was a number once)."""
_FREE_ENGINE_KEYS = re.compile(
    r"\.engine\.(urls|http|start_timeout_s|served_name|api_key_env|price|push|push_folder|push_timeout_s|serve_args)\b"
)
"""Where servers are and how they are called: a requeued job may find them elsewhere."""


@dataclass
class TrainState:
    """Where a run stands after a complete step (small, JSON)."""

    step: int = 0
    """Complete steps."""
    policy_version: int = 0
    """Weights after this many steps; equal to ``step`` unless the run began from another run's policy."""
    optimizer_steps: int = 0
    tracker_step: int = 0
    """Last step that trackers have a row of."""
    epoch: int = 0
    """Data position: passes over the training pairs that are complete."""
    offset: int = 0
    """Data position: pairs of the current pass already used."""
    eval_done: bool = True
    """The held-out evaluation that is due after ``step`` has been made (true when none is due)."""
    excluded_streak: int = 0
    """Steps in a row with too many excluded episodes."""
    best: float | None = None
    """Best value so far of ``checkpoint.best``."""
    best_step: int | None = None
    first_eval: dict[str, float] = field(default_factory=dict)
    """Held-out metrics before the first step, for the table at the end."""
    last_eval: dict[str, float] = field(default_factory=dict)
    last_eval_step: int = 0
    usage: dict[str, dict[str, float]] = field(default_factory=dict)
    """What servers were asked so far and what it cost, by role (:meth:`maieutic.engines.usage.Ledger.state`)."""
    recipe_hash: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA


def frozen_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe without the keys that may differ on resume, flat: ``{"training.group_size": 8, …}``."""
    return _without_free(_flatten(recipe.model_dump(mode="json")))


def _without_free(flat: Mapping[str, Any]) -> dict[str, Any]:
    def free(key: str) -> bool:
        return any(key == f or key.startswith(f + ".") for f in _FREE_KEYS) or bool(
            _FREE_ENGINE_KEYS.search(key)
        )

    return {k: v for k, v in flat.items() if not free(k)}


def recipe_hash(recipe: Recipe) -> str:
    """First 16 hex digits of the SHA-256 of :func:`frozen_recipe`."""
    return hashlib.sha256(json.dumps(frozen_recipe(recipe), sort_keys=True).encode()).hexdigest()[:16]


def check_recipe(state: TrainState, recipe: Recipe, where: Path) -> None:
    """Raise :class:`~maieutic.errors.CheckpointError` naming the keys in which ``recipe`` differs from the checkpoint's.

    A key that the checkpoint does not know (an older version wrote it) is equal when it has its default in ``recipe``.
    """
    if state.recipe_hash == recipe_hash(recipe):
        return
    # A key that is free now may not have been when the checkpoint was written.
    now, then = frozen_recipe(recipe), _without_free(state.recipe)
    chosen = _flatten(recipe.model_dump(mode="json", exclude_defaults=True))
    now = {key: value for key, value in now.items() if key in then or key in chosen}
    lines = [
        f"  {key}: {_show(then, key)} in the checkpoint, {_show(now, key)} in the recipe"
        for key in sorted(now.keys() | then.keys())
        if now.get(key, _ABSENT) != then.get(key, _ABSENT)
    ]
    if not lines:
        return
    raise CheckpointError(
        f"{where} was written with another recipe:\n"
        + "\n".join(lines)
        + "\nresume with the run's own recipe.yaml, in its folder, or start a new run (name=…, tutor.init_from=…)"
    )


_ABSENT = object()


def _show(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "absent"


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, sub in value.items() for k, v in _flatten(sub, f"{prefix}{name}.").items()}
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return {k: v for i, sub in enumerate(value) for k, v in _flatten(sub, f"{prefix}{i}.").items()}
    return {prefix[:-1]: value}


# ---- writing ---------------------------------------------------------------------------------------------------------


def save(
    root: Path,
    state: TrainState,
    *,
    save_model: Callable[[Path], None],
    optimizer: Mapping[str, Any] | Path,
    rng: list[dict[str, Any]],
) -> Path:
    """Write ``root/step-NNNNNN`` (rank 0 only) and return it. A checkpoint of this step that is there already stays.

    ``save_model`` writes weights and tokenizer into the folder that it is given; ``optimizer`` holds state dicts by name, or is
    the folder of :func:`open_parts` into which every rank has written; ``rng`` has one entry a rank. Raises
    :class:`~maieutic.errors.CheckpointError` when the disk does not take it; whatever was there before is intact then.
    """
    import torch

    final = root / f"step-{state.step:06d}"
    if (final / "state.json").is_file():
        if isinstance(optimizer, Path):
            shutil.rmtree(optimizer, ignore_errors=True)  # as large as all ranks' states
        return final
    temporary = root / f".tmp-{final.name}-{os.getpid()}"
    try:
        with named_os_errors(f"the checkpoint {final}; the previous one is intact", CheckpointError):
            _remove_leftovers(root)
            (temporary / "model").mkdir(parents=True)
            as_os_errors(save_model, temporary / "model")
            if isinstance(optimizer, Path):
                os.rename(optimizer, temporary / "optimizer")
            else:
                as_os_errors(torch.save, dict(optimizer), temporary / "optimizer.pt")
            as_os_errors(torch.save, rng, temporary / "rng.pt")
            (temporary / "state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
            _sync_tree(temporary)
            if final.is_dir():
                _delete(final)  # no checkpoint, as it has no state: what a copy or a deletion left half done
            os.rename(temporary, final)
            _sync(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(optimizer, Path):
            shutil.rmtree(optimizer, ignore_errors=True)
    return final


def open_parts(root: Path) -> Path:
    """An empty folder in which every rank writes its part of the optimizer's states (rank 0 calls this)."""
    folder = root / ".parts"
    with named_os_errors(str(folder), CheckpointError):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return folder


def save_part(folder: Path, rank: int, state: Mapping[str, Any]) -> None:
    """Write one rank's part into the folder of :func:`open_parts`, which all ranks must see under the same path."""
    import torch

    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not there on rank {rank}: with divided optimizer states output_dir must lie on a file system that "
            "all nodes share"
        )
    with named_os_errors(
        f"rank {rank}'s part of the checkpoint; the previous one is intact", CheckpointError
    ):
        as_os_errors(torch.save, dict(state), folder / _part_name(rank))
        _sync(folder / _part_name(rank))


def load_optimizer(path: Path, rank: int, *, divided: bool) -> Any:
    """The optimizer's states that ``rank`` needs, as :meth:`maieutic.training.learner.Learner.optimizer_state` made them.

    Raises :class:`~maieutic.errors.CheckpointError` when the checkpoint has none for this rank.
    """
    if not divided and (path / "optimizer.pt").is_file():
        return load_tensors(path, "optimizer.pt")
    own = path / "optimizer" / _part_name(rank)
    if own.is_file():
        return load_tensors(path / "optimizer", own.name)
    found = len(list((path / "optimizer").glob("rank-*.pt"))) if (path / "optimizer").is_dir() else 0
    kept = f"those of {found} ranks that divided them" if found else "those of one process or of DDP"
    raise CheckpointError(
        f"{path} has no optimizer states for rank {rank}: it holds {kept}. Resume with the same launcher configuration and "
        "number of processes, or start a new run from its weights (name=…, tutor.init_from=…)"
    )


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def as_os_errors(function: Callable[..., None], *arguments: Any) -> None:
    """Serialisers wrap a full disk in errors of their own: make them OSErrors again."""
    try:
        function(*arguments)
    except OSError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if any(
            sign in text
            for sign in ("No space left", "write failed", "unexpected pos", "os error", "I/O error")
        ):
            raise OSError(f"{text} (is the disk full?)") from error
        raise


def _delete(path: Path) -> None:
    """Delete a checkpoint that is complete to the last moment and then absent, also when a kill comes half-way."""
    doomed = path.with_name(f".tmp-deleted-{path.name}-{os.getpid()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # what is left under this name goes with the next save


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def prune(root: Path, spec: CheckpointSpec, best_step: int | None) -> list[Path]:
    """Delete all but the last ``keep_last`` checkpoints and the best one; returns what was deleted."""
    found = complete(root)
    doomed = [path for step, path in found[: -spec.keep_last] if step != best_step]
    for path in doomed:
        with contextlib.suppress(OSError):  # an old checkpoint that stays is no reason to stop
            _delete(path)
    return doomed


# ---- reading ---------------------------------------------------------------------------------------------------------


def discard_after(root: Path, step: int) -> None:
    """Delete checkpoints that are newer than ``step``: the run goes back to it, and they would be mistaken for its future."""
    for number, path in complete(root):
        if number > step:
            with named_os_errors(f"{path} (to delete it)", CheckpointError):
                _delete(path)


def complete(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, oldest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.match(path.name)
        if match and (path / "state.json").is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def find(resume: str | None, root: Path) -> Path | None:
    """The checkpoint that ``resume`` names: ``auto`` the newest complete one of ``root`` (None: there is none yet), or a path.

    Raises :class:`~maieutic.errors.CheckpointError` for a path without a complete checkpoint, and for one of another run when
    ``root`` belongs to a run already: going back to it would delete what that run has done.
    """
    if resume is None:
        return None
    if resume == "auto":
        found = complete(root)
        return found[-1][1] if found else None
    path = Path(resume)
    if not (path / "state.json").is_file():
        inside = complete(path / "checkpoints") or complete(path)
        if not inside:
            raise CheckpointError(
                f"resume: {path} is not a complete checkpoint (a folder step-NNNNNN with state.json)"
            )
        path = inside[-1][1]
    if path.resolve().parent != root.resolve() and _belongs_to_a_run(root):
        raise CheckpointError(
            f"resume: {path} is a checkpoint of another run, and {root.parent} holds a run of its own: continue that one with "
            "resume=auto, or go on from this checkpoint under another name (name=<new name>)"
        )
    return path


def _belongs_to_a_run(root: Path) -> bool:
    metrics = root.parent / "metrics.jsonl"
    return bool(complete(root)) or (metrics.is_file() and metrics.stat().st_size > 0)


def load_state(path: Path) -> TrainState:
    """``state.json`` of a checkpoint. Raises :class:`~maieutic.errors.CheckpointError` when it cannot be read."""
    try:
        data = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"an object is expected, this is {type(data).__name__}")
        if data.get("schema") != SCHEMA:
            raise CheckpointError(
                f"{path}: checkpoint format {data.get('schema')!r}, this release reads {SCHEMA}"
            )
        return TrainState(**data)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}/state.json cannot be read: {error}") from error


def load_tensors(path: Path, name: str) -> Any:
    """``optimizer.pt`` or ``rng.pt``, on the CPU, without running any pickled code."""
    import torch

    try:
        return torch.load(path / name, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle, OS: all mean the same to the reader
        raise CheckpointError(f"{path / name} cannot be read: {type(error).__name__}: {error}") from error


# ---- random states ---------------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Random states of this process as plain values and tensors (loadable without pickled code)."""
    import numpy as np
    import torch

    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Inverse of :func:`rng_state`."""
    import numpy as np
    import torch

    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])

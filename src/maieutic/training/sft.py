"""Supervised fine-tuning of a tutor on good tutor turns, with TRL's SFTTrainer; what it leaves is a tutor like any other.

    <output_dir>/<name>/
        recipe.yaml     the SFT recipe
        model/          adapter or full model with its tokenizer: ``tutor.init_from`` of any recipe
        metrics.jsonl   loss by optimizer step, held-out loss before, after each epoch
        sft.json        counts by reason, losses, tokens, seconds
        transcripts/    episodes that a source of kind ``rollouts`` played

One process. The ids are made here and handed to the trainer as ``input_ids`` and ``labels``; that the labels which reach the loss
are the tutor's turn and nothing else is checked on the trainer's own batches before the first step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maieutic import yaml12
from maieutic.check import resolve
from maieutic.config import Recipe
from maieutic.env.prompts import load_env
from maieutic.errors import MaieuticError, ProblemDataError, RecipeError
from maieutic.recipe import load_recipe
from maieutic.runtime import Policy, build_classroom, build_policy, make_renderer
from maieutic.training.run_folder import RunFolder, named_os_errors, write_atomically
from maieutic.training.sft_config import SftRecipe, SourceSpec
from maieutic.training.sft_data import (
    IGNORED,
    Example,
    Examples,
    filter_quality,
    from_chat,
    from_mathdial,
    from_transcripts,
    split_by_problem,
    tokenise,
    with_scores,
)

log = logging.getLogger(__name__)


@dataclass
class SftResult:
    """What a finished run leaves behind. Losses are nats a learned token; None without held-out turns."""

    folder: Path
    turns: int
    held_out_turns: int
    dropped: dict[str, int]
    trained_tokens: int
    """Learned tokens of one epoch."""
    held_out_before: float | None
    held_out_after: float | None
    optimizer_steps: int
    seconds: float
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        """The tutor: ``tutor.init_from``."""
        return self.folder / "model"

    def lines(self) -> list[str]:
        """For people."""
        out = [
            f"{self.turns} tutor turns learned ({self.trained_tokens:,} tokens), {self.held_out_turns} held out"
        ]
        out += [f"left out: {n} × {reason}" for reason, n in sorted(self.dropped.items()) if n]
        if self.held_out_before is not None and self.held_out_after is not None:
            out.append(f"held-out loss {self.held_out_before:.4f} → {self.held_out_after:.4f} nats a token")
        return [
            *out,
            f"{self.optimizer_steps} optimizer steps in {self.seconds:.0f} s; tutor.init_from={self.model}",
        ]


def run_sft(recipe: SftRecipe) -> SftResult:
    """Gather, filter, train, save. Raises named errors: a recipe that does not fit, data that cannot be read, too few turns."""
    import torch

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise RecipeError("maieutic sft runs in one process: start it without a launcher")
    start = time.monotonic()
    experiment = _experiment(recipe)
    folder = _prepare(recipe)
    torch.manual_seed(recipe.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = build_policy(experiment, device)
    examples = gather(recipe, experiment, policy, folder)
    renderer = make_renderer(experiment.tutor, policy.tokenizer, thinking=experiment.tutor.thinking)
    train, held_out = split_by_problem(examples.kept, recipe.training.held_out, recipe.seed)
    rows, other = (_rows(renderer, part, experiment, recipe, examples.dropped) for part in (train, held_out))
    if not rows:
        raise ProblemDataError(f"no tutor turn is left to learn from (left out: {dict(examples.dropped)})")
    trainer = make_trainer(recipe, policy, rows, other, folder.root)
    check_labels(trainer, rows)
    before = _loss(trainer) if other else None
    trainer.train()
    after = _loss(trainer) if other else None
    policy.model.eval()
    with named_os_errors(f"the tutor {folder.root / 'model'}"):
        policy.save(folder.root / "model")
    result = SftResult(
        folder.root,
        len(rows),
        len(other),
        dict(examples.dropped),
        sum(sum(x != IGNORED for x in r["labels"]) for r in rows),
        before,
        after,
        int(trainer.state.global_step),
        time.monotonic() - start,
    )
    _write(folder, result, trainer.state.log_history)
    return result


def _experiment(recipe: SftRecipe) -> Recipe:
    overrides = [*recipe.experiment_overrides, f"seed={recipe.seed}"]
    if recipe.offline:
        overrides.append("offline=true")
    loaded = resolve(load_recipe(recipe.experiment, overrides))
    # A reference policy would only cost memory.
    return loaded.model_copy(update={"algorithm": loaded.algorithm.model_copy(update={"kl_beta": 0.0})})


def _prepare(recipe: SftRecipe) -> RunFolder:
    folder = RunFolder(Path(recipe.output_dir) / recipe.name)
    if (folder.root / "model").exists() or folder.metrics.exists():
        raise MaieuticError(f"{folder.root} already holds a run: start another with name=<new name>")
    with named_os_errors(f"the run folder {folder.root}"):
        folder.root.mkdir(parents=True, exist_ok=True)
        write_atomically(folder.recipe, yaml12.dump(recipe.model_dump(mode="json")))
    return folder


# ---- data ------------------------------------------------------------------------------------------------------------


def gather(recipe: SftRecipe, experiment: Recipe, policy: Policy, folder: RunFolder) -> Examples:
    """The turns of all sources, after the quality filter."""
    templates, env = load_env(experiment.env.name), experiment.env
    out = Examples()
    for spec in recipe.sources:
        if spec.kind == "mathdial":
            got = from_mathdial(spec, templates, env, offline=experiment.offline)
        elif spec.kind == "chat":
            got = from_chat(spec, templates, env)
        else:
            run = folder.root if spec.kind == "rollouts" else Path(str(spec.path))
            if spec.kind == "rollouts":
                play_rollouts(spec, experiment, policy, folder, recipe.arm)
            got = from_transcripts(spec, run, templates, env)
        if spec.scores is not None:
            got.kept = with_scores(got.kept, spec.scores)
        if not got.kept:
            log.warning("the source %s %s gave no tutor turn", spec.kind, spec.path or "")
        out.add(got)
    return filter_quality(out, recipe.quality)


def play_rollouts(spec: SourceSpec, experiment: Recipe, policy: Policy, folder: RunFolder, arm: str) -> None:
    """G episodes of each training pair with the untrained tutor, written as training transcripts of step 0."""
    from maieutic.rollout import rollout
    from maieutic.transcripts import TranscriptWriter

    async def play() -> Any:
        classroom = build_classroom(experiment, policy)
        try:
            await classroom.new_step(0)
            return await rollout(
                classroom.play_train,
                classroom.train_pairs[: spec.problems],
                phase="train",
                step=0,
                run_seed=experiment.seed,
                group_size=spec.group_size,
                retries=experiment.training.group_retries,
            )
        finally:
            await classroom.close()

    result = asyncio.run(play())
    TranscriptWriter(folder.root, arm=arm).write("train", 0, result.episodes)


def _rows(
    renderer: Any, examples: Sequence[Example], experiment: Recipe, recipe: SftRecipe, dropped: Counter[str]
) -> list[dict[str, list[int]]]:
    rows = []
    for example in examples:
        ids, labels = tokenise(renderer, example, experiment.env.end_token)
        if len(ids) > recipe.training.max_length:
            dropped["longer than training.max_length"] += 1
            continue
        rows.append({"input_ids": ids, "labels": labels})
    return rows


# ---- training --------------------------------------------------------------------------------------------------------


def make_trainer(
    recipe: SftRecipe,
    policy: Policy,
    rows: Sequence[dict[str, list[int]]],
    held_out: Sequence[dict[str, list[int]]],
    folder: Path,
) -> Any:
    """TRL's SFTTrainer over rows that are tokenised already. It cuts nothing and packs nothing."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    t = recipe.training
    cuda = torch.cuda.is_available()
    if policy.tokenizer.pad_token is None:
        # Padding is never attended to and never learned: which token stands there does not matter.
        policy.tokenizer.pad_token = policy.tokenizer.eos_token
    schedule = {"constant": "constant_with_warmup"}.get(t.schedule, t.schedule)
    args = SFTConfig(
        output_dir=str(folder / "trainer"),
        num_train_epochs=t.epochs,
        learning_rate=t.lr,
        per_device_train_batch_size=t.micro_batch,
        per_device_eval_batch_size=t.micro_batch,
        gradient_accumulation_steps=t.batch_size // t.micro_batch,
        lr_scheduler_type=schedule,
        warmup_steps=t.warmup_steps,
        weight_decay=t.weight_decay,
        max_grad_norm=t.grad_clip,
        gradient_checkpointing=t.gradient_checkpointing,
        bf16=cuda,
        use_cpu=not cuda,
        max_length=None,
        packing=False,
        seed=recipe.seed,
        data_seed=recipe.seed,
        logging_steps=1,
        eval_strategy="epoch" if held_out else "no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return SFTTrainer(
        model=policy.model,
        args=args,
        train_dataset=Dataset.from_list(list(rows)),
        eval_dataset=Dataset.from_list(list(held_out)) if held_out else None,
        processing_class=policy.tokenizer,
    )


def check_labels(trainer: Any, rows: Sequence[dict[str, list[int]]], batches: int = 4) -> None:
    """Hold the trainer's own batches against the rows: same ids, labels on exactly the tutor's turn.

    Raises :class:`MaieuticError` when a row reaches the loss otherwise (a changed collator, a cut, a packed batch).
    """
    # Several rows may be equal: count them.
    known = Counter((tuple(r["input_ids"]), tuple(r["labels"])) for r in rows)
    for number, batch in enumerate(trainer.get_train_dataloader()):
        if number >= batches:
            break
        for ids, labels, mask in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
        ):
            n = int(mask.sum())
            row = (tuple(ids[:n].tolist()), tuple(labels[:n].tolist()))
            if not known[row] or bool((labels[n:] != IGNORED).any()):
                raise MaieuticError(
                    "the trainer's batch differs from the rows that were made: the loss would not be on the tutor's turn alone"
                )


def _loss(trainer: Any) -> float:
    return float(trainer.evaluate()["eval_loss"])


def _write(folder: RunFolder, result: SftResult, history: Sequence[dict[str, Any]]) -> None:
    rows = []
    for entry in history:
        names = {
            "loss": "sft/loss",
            "eval_loss": "sft/held_out_loss",
            "learning_rate": "sft/lr",
            "grad_norm": "sft/grad_norm",
        }
        row = {new: entry[old] for old, new in names.items() if old in entry}
        if row:
            rows.append({"train/step": int(entry.get("step", 0)), **row})
    summary = {
        "turns": result.turns,
        "held_out_turns": result.held_out_turns,
        "dropped": result.dropped,
        "trained_tokens": result.trained_tokens,
        "held_out_loss": {"before": result.held_out_before, "after": result.held_out_after},
        "optimizer_steps": result.optimizer_steps,
        "seconds": round(result.seconds, 2),
    }
    with named_os_errors(f"the results in {folder.root}"):
        write_atomically(folder.metrics, "".join(json.dumps(r) + "\n" for r in rows))
        write_atomically(folder.root / "sft.json", json.dumps(summary, indent=1) + "\n")

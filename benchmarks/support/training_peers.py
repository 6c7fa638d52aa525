"""One optimizer step on the same recorded tokens, three ways: ours, TRL's GRPOTrainer, and supervised fine-tuning of packed rows.

Each contestant has a model of its own, the same weights at the start, the same AdamW settings, and two calls: ``step()`` takes one
optimizer step and returns its seconds; ``gradient()`` gives loss and gradient before the first one.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from maieutic.config import Recipe
from maieutic.training.learner import Learner
from maieutic.training.packing import MicroBatch, make_micro_batches, make_rows
from maieutic.training.step import accumulate_gradients
from maieutic.training.trajectory import Trajectory, count_trained
from support.training_cases import Groups, gradients

LossAndGradient = tuple[float, dict[str, Tensor]]


class Ours:
    """:meth:`Learner.update`, as a run calls it: advantages, micro-batches, gradient, clipping, AdamW, metrics."""

    def __init__(self, recipe: Recipe, model: nn.Module, groups: Groups) -> None:
        self.groups = groups
        self.learner = Learner(recipe, model, Accelerator(cpu=True), None)

    def batches(self, advantages: Sequence[float] | None = None) -> list[MicroBatch]:
        """As :meth:`Learner.update` makes them."""
        members = [t for group in self.groups for t in group]
        values = advantages if advantages is not None else self.advantages()
        return self.learner._micro_batches(make_rows(members, values))

    def advantages(self) -> list[float]:
        """Reward minus the group's mean."""
        means = [sum(t.reward for t in g) / len(g) for g in self.groups]
        return [t.reward - m for g, m in zip(self.groups, means, strict=True) for t in g]

    def step(self) -> float:
        start = time.perf_counter()
        metrics = self.learner.update(self.groups, 1)
        seconds = time.perf_counter() - start
        assert metrics["train/updates"] == 1
        return seconds

    def gradient(self, batches: Sequence[MicroBatch] | None = None) -> LossAndGradient:
        """``batches``: other ones than a step has."""
        learner = self.learner
        metrics = accumulate_gradients(
            learner.policy,
            batches or self.batches(),
            learner.loss,
            denominator=count_trained(t for g in self.groups for t in g),
            accelerator=learner.accelerator,
        )
        found = gradients(learner.model)
        learner.optimizer.zero_grad()
        return metrics.loss, found

    def single_rows(self) -> list[MicroBatch]:
        """The same budget, every micro-batch one packed row: what ``logits_to_keep`` needs."""
        rows = make_rows([t for g in self.groups for t in g], self.advantages())
        return make_micro_batches(rows, self.learner.recipe.training.tokens_per_micro_batch, "packed")[0]

    def unpacked(self) -> list[MicroBatch]:
        """One episode a forward pass, without padding."""
        rows = make_rows([t for g in self.groups for t in g], self.advantages())
        return [make_micro_batches([row], len(row), "padded")[0][0] for row in rows]


@dataclass(frozen=True)
class TrlSetting:
    """``rows``: per_device_train_batch_size. ``whole``: the optimizer step's episodes are one generation batch (all are padded to
    the longest); otherwise each group is one of its own. ``compact``: the head at completion positions only, as TRL has it on GPUs;
    on CPUs it scores prompts and padding too, and this benchmark's patch is what spares it that."""

    rows: int
    whole: bool
    compact: bool

    def __str__(self) -> str:
        return f"{self.rows} rows, {'one batch' if self.whole else 'a batch a group'}{', compact head' * self.compact}"


class Trl:
    """``GRPOTrainer.training_step`` for each micro-batch, clipping, AdamW. The rollout (its padding too) is not timed."""

    def __init__(
        self, recipe: Recipe, model: Any, tokenizer: Any, groups: Groups, setting: TrlSetting, folder: Path
    ) -> None:
        self.recipe, self.groups, self.setting = recipe, groups, setting
        members = len(groups[0])
        episodes = members * len(groups)
        self.micro_steps = episodes // setting.rows
        per_generation = (episodes if setting.whole else members) // setting.rows
        with quiet():
            self.trainer = self._make(model, tokenizer, per_generation, folder)
        self.trainer.current_gradient_accumulation_steps = self.micro_steps
        self.trainer.create_optimizer()
        trainer = self.trainer
        trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(
            trainer.model, trainer.optimizer
        )

    def _make(self, model: Any, tokenizer: Any, per_generation: int, folder: Path) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        spec = self.recipe.training.optimizer
        members = len(self.groups[0])
        args = GRPOConfig(
            output_dir=str(folder),
            loss_type="dapo",
            scale_rewards="none",
            beta=0.0,
            epsilon=self.recipe.algorithm.clip_low,
            temperature=self.groups[0][0].temperature,
            per_device_train_batch_size=self.setting.rows,
            gradient_accumulation_steps=self.micro_steps,
            steps_per_generation=per_generation,
            num_generations=members,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            learning_rate=spec.lr,
            adam_beta1=spec.betas[0],
            adam_beta2=spec.betas[1],
            adam_epsilon=spec.eps,
            weight_decay=spec.weight_decay,
            max_grad_norm=spec.grad_clip,
            report_to="none",
            disable_tqdm=True,
        )
        return GRPOTrainer(
            model=model,
            args=args,
            processing_class=tokenizer,
            reward_funcs=lambda completions, given_reward, **_: given_reward,
            train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(self.groups))]),
            rollout_func=self._rollout,
        )

    def _rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The recorded episodes of the groups that the prompts name. A prompt ends where the first sampled token stands."""
        seen: dict[str, int] = {}
        out: dict[str, Any] = {
            k: [] for k in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "given_reward")
        }
        for prompt in prompts:
            index = seen[prompt] = seen.get(prompt, -1) + 1
            episode = self.groups[int(prompt)][index]
            (segment,) = episode.segments
            first = segment.mask.index(True)
            # What follows the last sampled token has no part in the loss; ours leaves it out too.
            end = len(segment) - segment.mask[::-1].index(True)
            out["prompt_ids"].append(segment.ids[:first])
            out["completion_ids"].append(segment.ids[first:end])
            out["logprobs"].append(segment.logprobs[first:end])
            out["env_mask"].append([int(m) for m in segment.mask[first:end]])
            out["given_reward"].append(episode.reward)
        return out

    def _inputs(self) -> list[dict[str, Tensor]]:
        """The micro-batches of one optimizer step, as the trainer itself pads and shuffles them."""
        trainer = self.trainer
        trainer.model.train()
        order = [str(i) for i, g in enumerate(self.groups) for _ in g]
        size = self.setting.rows * trainer.args.steps_per_generation
        made: list[dict[str, Tensor]] = []
        trainer._step = 0
        for start in range(0, len(order), size):
            trainer._buffered_inputs = None
            trainer._prepare_inputs([{"prompt": p} for p in order[start : start + size]])
            made += trainer._buffered_inputs
        return made

    def positions(self) -> tuple[int, int, int]:
        """(tokens that are not padding, positions with padding, trained tokens) of one optimizer step."""
        made = self._inputs()
        tokens = sum(int(b["prompt_mask"].sum() + b["completion_mask"].sum()) for b in made)
        padded = sum(b["prompt_ids"].numel() + b["completion_ids"].numel() for b in made)
        trained = sum(int((b["completion_mask"] * b["tool_mask"]).sum()) for b in made)
        return tokens, padded, trained

    def _accumulate(self, made: Sequence[dict[str, Tensor]]) -> float:
        trainer, total = self.trainer, 0.0
        generate = trainer._prepare_inputs
        for inputs in made:
            trainer._prepare_inputs = lambda ready: ready
            try:
                total += float(trainer.training_step(trainer.model_wrapped, inputs, None))
            finally:
                trainer._prepare_inputs = generate
        return total

    def step(self) -> float:
        trainer = self.trainer
        with compact_head(self.setting.compact):
            made = self._inputs()
            start = time.perf_counter()
            self._accumulate(made)
            trainer.accelerator.clip_grad_norm_(
                trainer.model_wrapped.parameters(), trainer.args.max_grad_norm
            )
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            return time.perf_counter() - start

    def gradient(self) -> LossAndGradient:
        with compact_head(self.setting.compact):
            loss = self._accumulate(self._inputs())
        found = gradients(self.trainer.model)
        self.trainer.optimizer.zero_grad()
        return loss, found


class Sft:
    """A supervised step on packed rows: transformers' own forward and loss, labels at the trained tokens, clipping, AdamW.

    ``kept``: logits only where there are labels (``logits_to_keep`` with ``shift_labels``); otherwise everywhere.
    """

    def __init__(self, recipe: Recipe, model: Any, batches: Sequence[MicroBatch], *, kept: bool) -> None:
        if kept and any(b.input_ids.shape[0] > 1 for b in batches):
            raise ValueError("logits_to_keep takes the same positions of every row: one row only")
        self.model, self.batches, self.kept = model, batches, kept
        spec = recipe.training.optimizer
        self.clip = spec.grad_clip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=True
        )  # fmt: skip
        self.trained = sum(b.n_trained for b in batches)

    def _accumulate(self) -> float:
        self.model.train()
        total = 0.0
        for batch in self.batches:
            inputs = batch.model_inputs()
            if self.kept:
                labels = batch.targets_T[None]
                inputs["logits_to_keep"] = batch.select_T
            else:
                labels = torch.full(batch.input_ids.shape, -100)
                labels.view(-1)[batch.select_T] = batch.targets_T
            loss = self.model(
                **inputs, labels=labels, shift_labels=labels, num_items_in_batch=self.trained
            ).loss
            loss.backward()
            total += float(loss.detach())
        return total

    def step(self) -> float:
        start = time.perf_counter()
        self._accumulate()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def gradient(self) -> LossAndGradient:
        loss = self._accumulate()
        found = gradients(self.model)
        self.optimizer.zero_grad()
        return loss, found


@contextlib.contextmanager
def compact_head(on: bool) -> Iterator[None]:
    """TRL's choice for GPUs, to project labelled positions only, on this device."""
    from trl.trainer import utils

    was = utils._use_triton
    if on:
        utils._use_triton = lambda device: True
    try:
        yield
    finally:
        utils._use_triton = was


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the notices that a trainer prints when it is made."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def tokens_of(groups: Sequence[Sequence[Trajectory]]) -> int:
    """Tokens that take part: each episode up to its last trained token."""
    return sum(len(row) + 1 for group in groups for row in make_rows(group, [0.0] * len(group)))

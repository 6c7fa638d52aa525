"""The learning half of a step: groups of trajectories in, weights moved, numbers out. The same call on every rank.

advantages (group mean) → mini-batches of whole groups → micro-batches by tokens → gradient → clip → optimizer step
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from maieutic.algorithms.advantages import group_advantages
from maieutic.algorithms.base import LossFn, TokenLoss
from maieutic.algorithms.registry import get_loss
from maieutic.config import AlgorithmSpec, OptimizerSpec, Recipe
from maieutic.errors import CheckpointError, EngineMismatchError
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import Layout, MicroBatch, make_micro_batches, make_rows
from maieutic.training.probes import isolates
from maieutic.training.push_probe import SharedScorer, probe_tolerance
from maieutic.training.sharding import (
    Mirror,
    backend_of,
    before_prepare,
    load_optimizer_part,
    optimizer_part,
)
from maieutic.training.step import StepMetrics, accumulate_gradients, clip_gradients, compute_logprobs
from maieutic.training.trajectory import Trajectory, count_trained

log = logging.getLogger(__name__)

_TOLERANCE_MIXED = 0.3
"""Most |log-prob difference| under mixed precision, where the trainer computes in 16 bits whatever its weights are."""


class Reference(Protocol):
    """The initial policy, for the KL term: a context in which the policy computes as it did, or a frozen model of its own."""

    def logprobs(
        self, policy: nn.Module, batches: Sequence[MicroBatch], accelerator: Any
    ) -> list[Tensor]: ...


def make_loss(spec: AlgorithmSpec) -> LossFn:
    """The loss that a recipe names, with the settings that it takes."""
    settings: dict[str, Any] = {"kl_beta": spec.kl_beta, **spec.options}
    if spec.loss == "dppo":
        settings |= {"divergence": spec.divergence, "delta": spec.delta, "ratio_cap": spec.ratio_cap}
    elif spec.loss == "grpo":
        settings |= {"clip_low": spec.clip_low, "clip_high": spec.clip_high}
    return get_loss(spec.loss, **settings)


def learning_rate(spec: OptimizerSpec, step: int, max_steps: int) -> float:
    """Learning rate of rollout step ``step`` (1-based): a pure function, so there is no scheduler state to lose.

    Warm-up is linear over ``warmup_steps``; ``linear`` and ``cosine`` then fall to their last positive value at
    ``max_steps``, reaching zero one step later.
    """
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    progress = (step - spec.warmup_steps - 1) / max(max_steps - spec.warmup_steps, 1)
    match spec.schedule:
        case "constant":
            return spec.lr
        case "linear":
            return spec.lr * (1 - progress)
        case "cosine":
            return spec.lr * 0.5 * (1 + math.cos(math.pi * progress))


class _GapProbe:
    """A loss that also notes max |log π − log μ| of what passes through it."""

    def __init__(self, loss: LossFn) -> None:
        self.loss = loss
        self.gap = 0.0

    def __call__(
        self,
        logprobs_T: Tensor,
        mu_logprobs_T: Tensor,
        advantages_T: Tensor,
        ref_logprobs_T: Tensor | None = None,
    ) -> TokenLoss:
        if logprobs_T.numel():
            self.gap = max(self.gap, float((logprobs_T.detach() - mu_logprobs_T).abs().max()))
        return self.loss(logprobs_T, mu_logprobs_T, advantages_T, ref_logprobs_T)


class Learner:
    """Policy, optimizer and loss of one rank. ``model``: causal LM or PEFT model whose trainable parameters are trained."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, accelerator: Any, reference: Reference | None
    ) -> None:
        self.recipe, self.accelerator, self.reference = recipe, accelerator, reference
        training = recipe.training
        if training.gradient_checkpointing:
            any_model: Any = model
            any_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.dtype = next(model.parameters()).dtype
        spec = training.optimizer
        forward = PolicyForward(model, training.logit_chunk)
        self.layout, self.hidden_size = self._choose_layout(forward.causal_lm)
        self.backend = backend_of(accelerator)
        self.mirror = self._make_mirror(model) if self.backend.divides_weights else None
        before_prepare(self.backend, accelerator, forward, forward.causal_lm, spec.grad_clip)
        optimizer = torch.optim.AdamW(
            [p for p in forward.parameters() if p.requires_grad],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
        )
        self.policy, self.optimizer = accelerator.prepare(forward, optimizer)
        self.shared_scorer = None if self.mirror is None else SharedScorer(self.tolerance)
        """Scores the probe of weight pushes where no rank has whole weights; see :meth:`share_scores`."""
        self.loss = make_loss(recipe.algorithm)
        self.moved = False
        """Weights have moved since the caller last set this to False (at the end of a complete step)."""
        self.policy.eval()

    def _choose_layout(self, model: Any) -> tuple[Layout, int]:
        """The layout, and the model's width where packed micro-batches may have several rows (0: one row only)."""
        if self.recipe.training.packing == "off":
            return "padded", 0
        isolation = isolates(model)
        if not isolation:
            log.warning("sequences are trained unpacked: %s", isolation.reason)
            return "padded", 0
        return "packed", model.config.hidden_size if isolation.several_rows else 0

    def _make_mirror(self, model: nn.Module) -> Mirror:
        accelerator, recipe = self.accelerator, self.recipe
        engines = [recipe.tutor.engine, *(s.engine for s in recipe.students if s.kind == "model")]
        if recipe.judge.kind == "llm":
            engines.append(recipe.judge.engine)
        # Models in process share the copy, or lie where it lies.
        sampled = any(engine.kind == "hf" for engine in engines)
        device = accelerator.device if sampled else torch.device("cpu")
        return Mirror(model, self.backend, device, main=accelerator.is_main_process)

    @property
    def model(self) -> Any:
        """The model inside all wrappers; its weights may be divided over ranks."""
        return self.accelerator.unwrap_model(self.policy).model

    @property
    def whole_model(self) -> Any:
        """The policy with whole weights, to sample from, save and push (None: not on this rank); current after each update."""
        return self.model if self.mirror is None else self.mirror.model

    def share_scores(self) -> None:
        """All ranks score what a weight push is compared on, as long as the weights stay as they are."""
        if self.shared_scorer is not None:
            with self._no_dropout():
                self.shared_scorer.refresh(self.policy, self.accelerator)

    def optimizer_state(self) -> dict[str, Any]:
        """State of the optimizer to keep, of this rank's part where ranks divide it (``divided``)."""
        if not self.backend.divides_optimizer:
            return {"optimizer": self.optimizer.state_dict()}
        return {
            "divided": {
                "backend": self.backend.name,
                "ranks": self.accelerator.num_processes,
                "rank": self.accelerator.process_index,
            },
            "parts": optimizer_part(self.optimizer, self.backend),
        }

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`optimizer_state`. CheckpointError if it was kept by another backend or number of ranks."""
        mine = {k: v for k, v in self.optimizer_state().items() if k == "divided"}
        if "optimizer" in state and not mine:
            self.optimizer.load_state_dict(state["optimizer"])
            return
        if mine.get("divided") != state.get("divided"):
            raise CheckpointError(
                f"the optimizer's states were kept by {_described(state.get('divided'))}, and this run is "
                f"{_described(mine.get('divided'))}: resume with the same launcher configuration and number of processes, or "
                "start a new run from these weights (name=…, tutor.init_from=<this checkpoint>)"
            )
        try:
            load_optimizer_part(self.optimizer, self.backend, state["parts"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"the optimizer's states do not fit this policy: {error}") from error

    @property
    def tolerance(self) -> float:
        """Most |log-prob difference| between engine and trainer."""
        mixed = self.accelerator.mixed_precision in ("bf16", "fp16")
        if mixed and self.recipe.training.probe_tolerance is None:
            return _TOLERANCE_MIXED
        return probe_tolerance(self.recipe, next(self.policy.parameters()))

    def probe(self, trajectories: Sequence[Trajectory]) -> float:
        """Recompute the log-probs of freshly sampled tokens; returns the largest difference.

        Raises :class:`~maieutic.errors.EngineMismatchError` beyond :attr:`tolerance`: training on such log-probs would be
        off-policy without saying so.
        """
        rows = make_rows(trajectories, [0.0] * len(trajectories))
        if not rows:
            raise EngineMismatchError(
                "the start-up probe sampled no token: the engine returns empty continuations"
            )
        batches = self._micro_batches(rows)
        with self._no_dropout():
            recomputed = compute_logprobs(self.policy, batches, self.accelerator)
        gap = 0.0
        for batch, logprobs in zip(batches, recomputed, strict=True):
            if batch.n_trained:
                gap = max(gap, float((logprobs - batch.mu_logprobs_T).abs().max()))
        gap = self._max_over_ranks(gap)
        # Written so that NaN fails too.
        if not gap <= self.tolerance:
            raise EngineMismatchError(
                f"engine and trainer disagree: max |log-prob difference| {gap:.3g} over {count_trained(trajectories)} probe "
                f"tokens, tolerance {self.tolerance:g} ({self.dtype}, {self.layout}). The engine serves other weights, another "
                "dtype, or log-probs of another distribution than it samples from; see training.probe_tolerance"
            )
        return gap

    def update(self, groups: Sequence[Sequence[Trajectory]], step: int) -> dict[str, float]:
        """One rollout's worth of optimizer steps; ``train/…`` numbers, the same on every rank.

        A mini-batch without trained tokens, or whose advantages are all zero without a KL term, moves nothing (an
        optimizer step would only replay momentum) and is counted in ``train/skipped_updates``.
        """
        recipe = self.recipe
        training, beta = recipe.training, recipe.algorithm.kl_beta
        everything = [t for group in groups for t in group]
        advantages = group_advantages(
            [t.reward for t in everything],
            [t.group_id for t in everything],
            [not t.excluded for t in everything],
            recipe.algorithm.advantage_scale,
        )
        by_episode = dict(
            zip([t.episode_id for t in everything], advantages.advantages_N.tolist(), strict=True)
        )
        lr = learning_rate(training.optimizer, step, training.max_steps)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        totals = _Totals()
        gap: float | None = None
        for _ in range(training.epochs_per_step):
            for start in range(0, len(groups), training.mini_batch_problems):
                members = [t for group in groups[start : start + training.mini_batch_problems] for t in group]
                denominator = count_trained(members)
                if denominator == 0:
                    totals.skipped += 1
                    continue
                values = [by_episode[t.episode_id] for t in members]
                batches = self._micro_batches(make_rows(members, values))
                if beta > 0 and self.reference is not None:
                    with self._no_dropout():
                        references = self.reference.logprobs(self.policy, batches, self.accelerator)
                    for batch, ref in zip(batches, references, strict=True):
                        batch.ref_logprobs_T = ref
                probe = _GapProbe(self.loss)
                moves = beta > 0 or any(values)
                totals.add(*self._optimizer_step(batches, probe, denominator, members, moves=moves))
                if gap is None:
                    gap = self._max_over_ranks(probe.gap)
        if self.mirror is not None and totals.moved:
            self.mirror.refresh(self.policy, self.accelerator.device)
            self.share_scores()
        out = totals.metrics()
        if gap is not None:
            out["train/logprob_gap"] = gap
        return out | {
            "train/lr": lr,
            "train/flat_group_share": advantages.flat_share,
            "train/trained_tokens": float(count_trained(everything)),
        }

    def _optimizer_step(
        self,
        batches: list[MicroBatch],
        loss: LossFn,
        denominator: int,
        members: Sequence[Trajectory],
        *,
        moves: bool,
    ) -> tuple[StepMetrics, float, bool]:
        self.policy.train()
        try:
            # Advantages that are all zero have a gradient of exactly zero. DeepSpeed cannot look at one without stepping.
            backward = moves or not self.backend.deepspeed
            metrics = accumulate_gradients(
                self.policy,
                batches,
                loss,
                denominator=denominator,
                accelerator=self.accelerator,
                backward=backward,
            )
            if not backward:
                return metrics, 0.0, moves
            self.moved = self.moved or self.backend.deepspeed
            norm = clip_gradients(
                self.policy,
                self.recipe.training.optimizer.grad_clip,
                self.accelerator,
                [t.episode_id for t in members if not t.excluded],
            )
            if moves:
                self.moved = True
                self.optimizer.step()
            self.optimizer.zero_grad()
        finally:
            self.policy.eval()
        return metrics, norm, moves

    def _micro_batches(self, rows: Any) -> list[MicroBatch]:
        accelerator = self.accelerator
        plan = make_micro_batches(
            rows,
            self.recipe.training.tokens_per_micro_batch,
            self.layout,
            accelerator.num_processes,
            self.hidden_size,
        )
        return plan[accelerator.process_index]

    @contextlib.contextmanager
    def _no_dropout(self) -> Iterator[None]:
        was = self.policy.training
        self.policy.eval()
        try:
            yield
        finally:
            self.policy.train(was)

    def _max_over_ranks(self, value: float) -> float:
        if self.accelerator.num_processes == 1:
            return value
        mine = torch.tensor([value], dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.gather(mine).max())


def _described(divided: Mapping[str, Any] | None) -> str:
    if divided is None:
        return "one optimizer that every rank holds (one process, or DDP)"
    return f"{divided['backend']}, rank {divided['rank']} of {divided['ranks']}"


class _Totals:
    """Means over the mini-batches of a step, weighted by their tokens."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepMetrics, float]] = []
        self.moved = 0
        self.skipped = 0

    def add(self, metrics: StepMetrics, norm: float, moved: bool) -> None:
        self.steps.append((metrics, norm))
        self.moved += moved
        self.skipped += not moved

    def metrics(self) -> dict[str, float]:
        out = {
            "train/updates": float(self.moved),
            "train/skipped_updates": float(self.skipped),
        }
        tokens = sum(m.tokens for m, _ in self.steps)
        if not tokens:
            return out
        for metrics, _ in self.steps:
            weight = metrics.tokens / tokens
            for name, value in {"loss": metrics.loss, **metrics.means}.items():
                key = f"train/{name}"
                out[key] = out.get(key, 0.0) + weight * value
            for name, value in metrics.maxima.items():
                key = f"train/{name}_max"
                out[key] = max(out.get(key, 0.0), value)
        norms = [norm for _, norm in self.steps]
        return out | {
            "train/grad_norm": sum(norms) / len(norms),
            "train/grad_norm_max": max(norms),
        }

"""One optimizer step's gradient, the same however the batch is cut.

The objective is the token-mean over the global batch: Σ over all ranks, micro-batches and trained tokens of the loss, divided by
one number N, the trained tokens of all episodes that are not excluded. Each micro-batch contributes its sum / N, so micro-batch
size, layout and rank count cannot change the gradient. Data-parallel wrappers *average* gradients over ranks, hence × ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn

from maieutic.algorithms.base import LossFn, TokenLoss
from maieutic.errors import NonFiniteLossError
from maieutic.training.logprobs import PolicyForward, TokenLogProbs
from maieutic.training.packing import MicroBatch

# Metrics whose largest value over all tokens is reported beside the mean.
_MAXIMA = ("ratio", "abs_gap")
# Ids in an error message; the exception carries all of them.
_NAMED_IDS = 5


@dataclass(frozen=True)
class StepMetrics:
    """What one accumulation saw, the same on every rank.

    ``loss``: the objective. ``means``: token means over the tokens that went through the model (``entropy``, ``ratio``,
    ``kl_mu_pi``, ``kept``, …). ``maxima``: ``ratio`` and ``abs_gap`` = max |π − μ|.
    """

    loss: float
    tokens: int
    """Tokens that went through the model; less than the denominator if rows of zero advantage were skipped."""
    means: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def flat(self, prefix: str = "train/") -> dict[str, float]:
        """One flat dictionary for the trackers: ``loss``, ``tokens``, the means by name, the maxima as ``<name>_max``."""
        values = {"loss": self.loss, "tokens": float(self.tokens), **self.means}
        values |= {f"{name}_max": value for name, value in self.maxima.items()}
        return {prefix + name: value for name, value in values.items()}


def accumulate_gradients(
    policy: nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    denominator: int,
    accelerator: Accelerator,
    backward: bool = True,
) -> StepMetrics:
    """Forward and backward of this rank's micro-batches; gradients are synchronised in the last one.

    ``policy``: a :class:`PolicyForward`, prepared by ``accelerator``. ``denominator``: N above, over *all* ranks
    (:func:`maieutic.training.trajectory.count_trained` of the mini-batch). Every rank brings an equal number of
    micro-batches (:func:`maieutic.training.packing.make_micro_batches` sees to it).

    ``backward`` off: the same numbers without a gradient (for one that is known to be zero).

    Raises :class:`~maieutic.errors.NonFiniteLossError` on *every* rank if a token's loss is not finite on any, before the last
    backward; gradients are then cleared and no weight has moved.
    """
    if denominator < 1 or not micro_batches:
        raise ValueError(
            f"nothing to train on: {denominator} trained tokens in {len(micro_batches)} micro-batches"
        )
    batches = [batch.to(accelerator.device) for batch in micro_batches]
    _agree_on_head_chunks(policy, batches, accelerator)
    # accelerate divides by its own accumulation count in `backward`; we have divided by N already.
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    factor = (
        accelerator.num_processes
        * (1 if deepspeed else accelerator.gradient_accumulation_steps)
        / denominator
    )
    totals = _Totals(accelerator.device)
    suspects: list[tuple[MicroBatch, Tensor]] = []
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with _sync_only_if(last, policy, accelerator), torch.set_grad_enabled(backward):
            out: TokenLogProbs = policy(batch)
            result = loss_fn(out.logprobs_T, batch.mu_logprobs_T, batch.advantages_T, batch.ref_logprobs_T)
            suspects.append((batch, result.loss_T.detach().isfinite()))
            totals.add(batch, out, result)
            if last:
                _refuse_non_finite(policy, suspects, accelerator)
            if backward:
                _backward(result.loss_T.sum() * factor, last, accelerator)
    return totals.reduce(accelerator, denominator)


@torch.no_grad()
def compute_logprobs(
    policy: nn.Module, micro_batches: Sequence[MicroBatch], accelerator: Accelerator
) -> list[Tensor]:
    """log π [T] of each micro-batch, where its tensors are: for a reference (``ref_logprobs_T``) or to compare with μ.

    With an adapter, call this inside ``model.disable_adapter()`` to have the initial policy as the reference.
    """
    batches = [batch.to(accelerator.device) for batch in micro_batches]
    _agree_on_head_chunks(policy, batches, accelerator)
    return [
        policy(batch).logprobs_T.to(source.targets_T.device)
        for batch, source in zip(batches, micro_batches, strict=True)
    ]


def clip_gradients(
    policy: nn.Module,
    max_norm: float,
    accelerator: Accelerator,
    episode_ids: Sequence[str] = (),
) -> float:
    """Clip to ``max_norm`` and return the norm before clipping; NonFiniteLossError (gradients cleared) if it is not finite.

    Call between :func:`accumulate_gradients` and ``optimizer.step()``. DeepSpeed learns the norm while it steps: there this
    call takes the step (clipped to ``gradient_clipping`` of its configuration) and ``optimizer.step()`` does nothing.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _deepspeed_step(accelerator, episode_ids)
    norm = accelerator.clip_grad_norm_(policy.parameters(), max_norm)
    value = (
        float("nan") if norm is None else float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    )
    if not torch.isfinite(torch.tensor(value)):
        _clear(policy)
        raise NonFiniteLossError(
            f"the gradient's norm is {value} though every token's loss was finite; {_named(episode_ids)}; "
            "weights are untouched",
            tuple(episode_ids),
        )
    return value


def _backward(loss: Tensor, last: bool, accelerator: Accelerator) -> None:
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        accelerator.backward(loss)
        return
    # accelerate's own call would also take the optimizer step.
    engine = _engine(accelerator)
    engine.set_gradient_accumulation_boundary(is_boundary=last)
    engine.backward(loss, scale_wrt_gas=False)


def _deepspeed_step(accelerator: Accelerator, episode_ids: Sequence[str]) -> float:
    engine = _engine(accelerator)
    engine.step()
    norm = engine.get_global_grad_norm()
    value = float("nan") if norm is None else float(norm)
    # -1 is how DeepSpeed reports a norm that is not finite.
    if not (value >= 0 and value != float("inf")):
        raise NonFiniteLossError(
            f"the gradient's norm is not finite though every token's loss was; {_named(episode_ids)}; DeepSpeed may have moved "
            "the weights: the last checkpoint is the one to go on from",
            tuple(episode_ids),
        )
    return value


def _engine(accelerator: Accelerator) -> Any:
    wrapped = accelerator.deepspeed_engine_wrapped
    if wrapped is None:
        raise RuntimeError("the policy was not prepared: there is no DeepSpeed engine")
    return wrapped.engine


class _Totals:
    """Sums and maxima over tokens, kept on the device until the end: no synchronisation in the loop."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.maxima = {name: torch.zeros((), device=device, dtype=_wide(device)) for name in _MAXIMA}
        self.tokens = 0

    @torch.no_grad()
    def add(self, batch: MicroBatch, out: TokenLogProbs, result: TokenLoss) -> None:
        gap = (out.logprobs_T.float().exp() - batch.mu_logprobs_T.exp()).abs()
        values = {
            "loss": result.loss_T.detach(),
            "entropy": out.entropy_T,
            "advantage_abs": batch.advantages_T.abs(),
            "abs_gap": gap,
            **result.metrics,
        }
        self.tokens += batch.n_trained
        for name, value in values.items():
            total = value.sum(dtype=_wide(self.device))
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        if batch.n_trained:
            for name in self.maxima.keys() & values.keys():
                self.maxima[name] = torch.maximum(
                    self.maxima[name], values[name].max().to(_wide(self.device))
                )

    def reduce(self, accelerator: Accelerator, denominator: int) -> StepMetrics:
        names = sorted(self.sums)
        tokens = torch.tensor(float(self.tokens), device=self.device, dtype=_wide(self.device))
        sums = torch.stack([tokens, *(self.sums[name] for name in names)])
        maxima = torch.stack([self.maxima[name] for name in _MAXIMA])
        if accelerator.num_processes > 1:
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)
        seen, *totals = sums.tolist()
        by_name = dict(zip(names, totals, strict=True))
        return StepMetrics(
            loss=by_name.pop("loss") / denominator,
            tokens=int(seen),
            means={name: total / max(seen, 1.0) for name, total in by_name.items()},
            maxima=dict(zip(_MAXIMA, maxima.tolist(), strict=True)),
        )


def _wide(device: torch.device) -> torch.dtype:
    """fp64 for sums over many tokens, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextlib.contextmanager
def _sync_only_if(last: bool, policy: nn.Module, accelerator: Accelerator) -> Any:
    """DDP exchanges gradients in the last backward only; sharded ones are reduced each time (whole ones cost memory)."""
    accelerator.gradient_state._set_sync_gradients(last)
    ddp = (
        accelerator.distributed_type
        in (
            DistributedType.MULTI_GPU,
            DistributedType.MULTI_CPU,
        )
        and not accelerator.is_fsdp2
    )
    try:
        with accelerator.no_sync(policy) if ddp and not last else contextlib.nullcontext():
            yield
    finally:
        accelerator.gradient_state._set_sync_gradients(True)


def _agree_on_head_chunks(policy: nn.Module, batches: Sequence[MicroBatch], accelerator: Accelerator) -> None:
    """Where calling the head gathers its weight from all ranks, they must call it equally often."""
    inner = cast(PolicyForward, accelerator.unwrap_model(policy))
    if accelerator.num_processes == 1 or not inner.calls_head:
        return
    counts = torch.tensor([inner.chunks_of(batch.n_trained) for batch in batches], device=accelerator.device)
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX)
    for batch, count in zip(batches, counts.tolist(), strict=True):
        batch.head_chunks = count


def _refuse_non_finite(
    policy: nn.Module, suspects: Sequence[tuple[MicroBatch, Tensor]], accelerator: Accelerator
) -> None:
    """All ranks look before the gradient is complete, so that all raise together and none waits for ever."""
    bad_tokens = torch.stack([(~finite).sum() for _, finite in suspects]).sum()
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(bad_tokens)
    if not bad_tokens.item():
        return
    mine = [
        batch.episode_ids[i] for batch, finite in suspects for i in batch.episode_T[~finite].unique().tolist()
    ]
    ids = tuple(dict.fromkeys(gather_object(mine) if accelerator.num_processes > 1 else mine))
    _clear(policy)
    raise NonFiniteLossError(
        f"the loss of {int(bad_tokens)} tokens is NaN or infinite; {_named(ids)}; weights are untouched. Look at the "
        "log-probs and rewards of these episodes, and at the learning rate",
        ids,
    )


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _NAMED_IDS} more" if len(ids) > _NAMED_IDS else ""
    return f"episodes: {', '.join(ids[:_NAMED_IDS])}{more}"


def _clear(policy: nn.Module) -> None:
    for parameter in policy.parameters():
        parameter.grad = None

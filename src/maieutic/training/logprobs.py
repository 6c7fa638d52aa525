"""Log-probs at trained positions only, in chunks: logits never exist for more than C positions (C × V), forward or backward.

C × V is a constant by default (:data:`maieutic.config.LOGITS_AT_ONCE`): flat in sequence length and in vocabulary.

The backbone gives hidden states; those that predict a trained token are selected and projected C at a time. Softmax is in
fp32, at the temperature that was sampled with. Three paths, chosen once:

* a plain ``nn.Linear`` head whose weight is at hand: a custom autograd function. With a frozen head (LoRA) the direction
  ∂ log π/∂h is computed in the forward pass, so backward needs no logits at all; with a trained head backward makes them again;
* a head that must be *called* (sharded by ZeRO-3, wrapped by LoRA): the same under activation checkpointing, a chunk at a time;
* a model whose logits are more than a scaled or soft-capped projection: its own forward, a chunk at a time, around a decoder that
  answers with hidden states it has given before. Where a start-up check shows that this changes the logits, they are made all at
  once (``logits_to_keep``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from maieutic.config import logit_positions
from maieutic.errors import ModelError
from maieutic.training.packing import MicroBatch
from maieutic.training.probes import running_copy


class TokenLogProbs(NamedTuple):
    """``logprobs_T``: fp32 with gradient. ``entropy_T``: fp32 without, of the distribution at the same temperature (nats)."""

    logprobs_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its head's output: z → softcap · tanh(z · scale / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """In place where autograd allows it; fp32 in, fp32 out."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def logit_transform(model: nn.Module) -> LogitTransform | None:
    """The transform between head and logits of a causal model, or None when it is of another kind.

    Read from the config (Gemma's soft cap, Granite's and Cohere's scale), then verified on a tiny copy of the architecture.
    """
    config: Any = model.config
    text = config.get_text_config()
    scale = 1.0 / (getattr(text, "logits_scaling", None) or 1.0) * (getattr(text, "logit_scale", None) or 1.0)
    transform = LogitTransform(scale, getattr(text, "final_logit_softcapping", None))
    try:
        tiny: Any = running_copy(model)
    except ModelError:
        return None
    with torch.no_grad():
        head = tiny.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return None
        # Large logits, so that a soft cap that nobody told us of shows.
        head.weight.mul_(100.0)
        ids = torch.arange(1, 7)[None]
        hidden = tiny.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        expected = tiny(input_ids=ids, use_cache=False).logits
        # A tied head has just scaled the embeddings too: both calls see the same ones.
        same = torch.allclose(transform(head(hidden).float()), expected.float(), rtol=1e-4, atol=1e-4)
    return transform if same else None


def _own_head(model: nn.Module, decoder: nn.Module, output: Any, hidden: Tensor) -> Tensor:
    """What ``model`` makes of its decoder's hidden states [C, H]: logits [C, V]. ``output``: the decoder's, for other fields."""
    answer = type(output)(**{**output, "last_hidden_state": hidden[None]})
    real = decoder.__dict__.get("forward")
    decoder.forward = lambda *args, **kwargs: answer
    try:
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return model(input_ids=ids, use_cache=False).logits[0]
    finally:
        if real is None:
            del decoder.forward
        else:
            decoder.forward = real


def _has_own_head(model: nn.Module) -> bool:
    """On a tiny copy, hidden states of some positions alone give the logits of these positions."""
    try:
        tiny: Any = running_copy(model)
    except ModelError:
        return False
    with torch.no_grad():
        ids = torch.arange(1, 7)[None]
        decoder = tiny.get_decoder()
        output = decoder(input_ids=ids, use_cache=False)
        expected = tiny(input_ids=ids, use_cache=False).logits[0]
        chosen = torch.tensor([4, 1])
        alone = _own_head(tiny, decoder, output, output.last_hidden_state[0, chosen])
        return alone.shape == expected[chosen].shape and torch.allclose(
            alone.float(), expected[chosen].float(), rtol=1e-4, atol=1e-4
        )


class _PlainHead(torch.autograd.Function):
    """(hidden [T, H], weight [V, H], bias [V] | None, targets [T], 1/temperature [T]) → log π [T], entropy [T]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: Tensor,
        transform: LogitTransform,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        frozen_head = needs_hidden and not (needs_weight or needs_bias)
        n = targets.numel()
        logp = hidden.new_empty(n, dtype=torch.float32)
        entropy = hidden.new_empty(n, dtype=torch.float32)
        log_z = hidden.new_empty(n, dtype=torch.float32)
        direction = torch.empty_like(hidden) if frozen_head else None
        for start in range(0, n, chunk):
            part = slice(start, start + chunk)
            z, slope = _scaled_logits(
                hidden[part], weight, bias, inverse_temperature[part], transform, slope=frozen_head
            )
            index = targets[part, None]
            lse = torch.logsumexp(z, dim=-1)
            logp[part] = z.gather(1, index).squeeze(1) - lse
            log_z[part] = lse
            p = torch.sub(z, lse[:, None]).exp_()
            # Σ p·z by row, as a matmul: the product is never stored.
            entropy[part] = lse - torch.bmm(p[:, None, :], z[:, :, None]).view(-1)
            del z
            if direction is not None:
                direction[part] = (
                    _grad_logits(p, index, inverse_temperature[part], slope).to(weight.dtype) @ weight
                )
            del p  # or it would be a third copy beside the next chunk's two
        ctx.transform, ctx.chunk, ctx.frozen_head = transform, chunk, frozen_head
        if direction is not None:
            ctx.save_for_backward(direction)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, inverse_temperature, log_z)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logp: Tensor = grads[0]
        if ctx.frozen_head:
            (direction,) = ctx.saved_tensors
            return (direction * grad_logp[:, None]).to(direction.dtype), None, None, None, None, None, None
        hidden, weight, bias, targets, inverse_temperature, log_z = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        for start in range(0, targets.numel(), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z, slope = _scaled_logits(
                hidden[part], weight, bias, inverse_temperature[part], ctx.transform, slope=True
            )
            p = z.sub_(log_z[part, None]).exp_()
            g = _grad_logits(p, targets[part, None], inverse_temperature[part] * grad_logp[part], slope)
            if grad_bias is not None:
                grad_bias += g.sum(0).to(grad_bias.dtype)
            g = g.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = g @ weight
            if grad_weight is not None:
                grad_weight.addmm_(g.t(), hidden[part])
            del z, p, g
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _scaled_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inverse_temperature: Tensor,
    transform: LogitTransform,
    *,
    slope: bool,
) -> tuple[Tensor, Tensor | None]:
    """Logits / temperature in fp32 [C, V]; with ``slope`` also ∂ transformed / ∂ raw where it is not constant."""
    z = F.linear(hidden, weight, bias).float()
    if transform.softcap is not None:
        z = torch.tanh(z.mul_(transform.scale / transform.softcap))
        d = torch.addcmul(z.new_tensor(transform.scale), z, z, value=-transform.scale) if slope else None
        z.mul_(transform.softcap)
    else:
        d = None
        if transform.scale != 1.0:
            z.mul_(transform.scale)
    return z.mul_(inverse_temperature[:, None]), d if d is not None else _constant(z, transform, slope)


def _constant(z: Tensor, transform: LogitTransform, slope: bool) -> Tensor | None:
    return z.new_tensor(transform.scale) if slope and transform.scale != 1.0 else None


def _grad_logits(p: Tensor, index: Tensor, factor: Tensor, slope: Tensor | None) -> Tensor:
    """factor · (onehot − p) · slope, in place of ``p``: the gradient of log π with respect to the raw logits."""
    g = p.neg_()
    g.scatter_add_(1, index, torch.ones_like(index, dtype=g.dtype))
    g.mul_(factor[:, None])
    return g if slope is None else g.mul_(slope)


def _from_logits(logits: Tensor, targets: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 logits [C, V] → log π [C], entropy [C]."""
    log_p = torch.log_softmax(logits * inverse_temperature[:, None], dim=-1)
    with torch.no_grad():
        entropy = -torch.bmm(log_p.exp()[:, None, :], log_p[:, :, None]).view(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


class PolicyForward(nn.Module):
    """The policy as a function from a micro-batch to log-probs; *this* is what the trainer gives to ``accelerator.prepare``.

    Wrapping the whole computation keeps the hooks of DDP, FSDP and ZeRO in force, which a call of the inner model would skip.
    ``model``: a causal language model or a PEFT model around one. ``chunk``: C, positions projected at a time, or ``auto``.
    """

    def __init__(self, model: nn.Module, chunk: int | Literal["auto"] = "auto") -> None:
        super().__init__()
        if chunk != "auto" and chunk < 1:
            raise ValueError(f"chunk must be at least 1, not {chunk}")
        peft: Any = getattr(model, "peft_config", None)
        if isinstance(peft, dict) and any(getattr(c, "is_prompt_learning", False) for c in peft.values()):
            raise ModelError("prompt-learning adapters shift positions and cannot be trained here; use LoRA")
        self.model = model
        vocabulary = self.causal_lm.config.get_text_config().vocab_size
        self.chunk = logit_positions(chunk, vocabulary)
        self.transform = logit_transform(self.causal_lm)
        self.own_head = self.transform is None and _has_own_head(self.causal_lm)

    @property
    def causal_lm(self) -> Any:
        """The causal language model inside (adapters stay in its layers)."""
        model: Any = self.model
        # Not for a model that merely inherits PEFT's mixin: only a PeftModel holds another model.
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def calls_head(self) -> bool:
        """The head is a module that must be called, so ranks must agree on how often (``MicroBatch.head_chunks``)."""
        if self.transform is None:
            return self.own_head
        return not _weight_at_hand(self.causal_lm.get_output_embeddings())

    def chunks_of(self, n_trained: int) -> int:
        """Pieces for ``n_trained`` positions."""
        return max(1, -(-n_trained // self.chunk))

    def forward(self, batch: MicroBatch) -> TokenLogProbs:
        """Log-probs and entropies [T] in the order of the batch's targets; fp32."""
        inverse_temperature = batch.temperatures_T.reciprocal()
        if self.transform is None and not self.own_head:
            return self._all_logits(batch, inverse_temperature)
        model = self.causal_lm
        decoder = model.get_decoder()
        output = decoder(**batch.model_inputs())
        states = output.last_hidden_state
        hidden = states.reshape(-1, states.shape[-1]).index_select(0, batch.select_T)
        head = model.get_output_embeddings()
        if self.transform is not None and _weight_at_hand(head):
            return self._plain_head(head, hidden, batch.targets_T, inverse_temperature)

        def project(hidden: Tensor, targets: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
            if self.transform is None:
                logits = _own_head(model, decoder, output, hidden).float()
            else:
                logits = self.transform(head(hidden).float())
            return _from_logits(logits, targets, inverse_temperature)

        pieces = batch.head_chunks or self.chunks_of(batch.n_trained)
        parts = [
            checkpoint(project, h, y, it, use_reentrant=False)
            for h, y, it in zip(
                hidden.tensor_split(pieces),
                batch.targets_T.tensor_split(pieces),
                inverse_temperature.tensor_split(pieces),
                strict=True,
            )
        ]
        return TokenLogProbs(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]).detach())

    def _plain_head(
        self, head: nn.Linear, hidden: Tensor, targets: Tensor, inverse_temperature: Tensor
    ) -> TokenLogProbs:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
        bias = None if head.bias is None else head.bias.to(dtype)
        # Casts stand outside, where autograd sees them; autocast would not reach the backward pass.
        with torch.autocast(device, enabled=False):
            logp, entropy = _PlainHead.apply(
                hidden.to(dtype),
                head.weight.to(dtype),
                bias,
                targets,
                inverse_temperature,
                self.transform,
                self.chunk,
            )
        return TokenLogProbs(logp, entropy)

    def _all_logits(self, batch: MicroBatch, inverse_temperature: Tensor) -> TokenLogProbs:
        """Through the model's own forward, at the positions that any row of the batch trains on."""
        width = batch.input_ids.shape[1]
        row, position = batch.select_T // width, batch.select_T % width
        # Never empty: the graph of a dummy must reach the weights.
        wanted, column = torch.unique(torch.cat([position, position.new_zeros(1)]), return_inverse=True)
        logits = self.model(**batch.model_inputs(), logits_to_keep=wanted).logits
        picked = logits[row, column[:-1]].float()
        return TokenLogProbs(*_from_logits(picked, batch.targets_T, inverse_temperature))


def _weight_at_hand(head: Any) -> bool:
    """A plain linear layer whose whole weight is in this process (not wrapped, not sharded)."""
    return (
        type(head) is nn.Linear
        and not hasattr(head.weight, "ds_id")
        and type(head.weight.data) is Tensor
        and head.weight.numel() == head.in_features * head.out_features
    )

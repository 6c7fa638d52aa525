"""Peak memory of the head, forward and backward, over sequence length × vocabulary: ours against logits of all positions at once.

    python benchmarks/logit_memory.py [--runs 3]

The model has no layers, so that nothing but its head takes memory, and width 64; every position is trained. Every allocation and
release counts, as torch's profiler sees them (``peak_of`` in benchmarks/memory.py). Three heads: ``plain`` (weights at hand),
``called`` (a module that must be called, as LoRA on the head or ZeRO-3 have it), ``own`` (the model does more to its logits than
its config tells). The full-logits head ends where one copy of its logits takes half a gibibyte; it grows in proportion.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import numpy as np
import torch
from memory import peak_of
from support.outcome import Figure, Outcome, check
from torch import Tensor, nn

from maieutic.config import LOGITS_AT_ONCE
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import MicroBatch, Row, collate

LENGTHS = (256, 1_024, 2_048, 4_096, 8_192)
VOCABULARIES = (8_192, 49_152, 151_936)
WIDTH = 64
PATHS = ("plain", "called", "own")
FEWER, MORE = (2_048, 49_152), (2_048, 151_936)
"""Length and vocabulary of the figures: both are more than one projection."""
FULL_LIMIT = 2**27
"""Most logits that the full head is asked for."""
SMALL = (300, 1_000)
"""Length and vocabulary at which all heads are compared, in pieces of 64 positions."""
MIB = 2**20


class Wrapped(nn.Module):
    """A head that is not a plain linear layer."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.inner = head
        self.weight = head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


def make_policy(path: str, vocabulary: int, chunk: Any = "auto") -> PolicyForward:
    """A trained head on frozen embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Squashed(LlamaForCausalLM):
        """Does to its logits what no config tells."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = torch.asinh(out.logits)
            return out

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=0,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=max(LENGTHS),
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = (Squashed if path == "own" else LlamaForCausalLM)(config).float()
    model.get_input_embeddings().requires_grad_(False)
    policy = PolicyForward(model, chunk)
    if path == "called":
        model.lm_head = Wrapped(model.lm_head)
    check(
        policy.calls_head == (path != "plain") and policy.own_head == (path == "own"),
        f"{path}: another head is used",
    )
    return policy


def batch_of(length: int, vocabulary: int) -> MicroBatch:
    """One sequence whose every token is trained."""
    ids = np.random.default_rng(0).integers(0, vocabulary, length + 1)
    row = Row("e", ids[:-1], np.arange(length), ids[1:], np.zeros(length, np.float32), 1.0, 0.8)
    return collate([row], "padded")


def full_logprobs(policy: PolicyForward, batch: MicroBatch) -> Tensor:
    """The plain way: the model's logits, softmax at the temperature, the target's entry."""
    logits = policy.model(**batch.model_inputs()).logits.flatten(0, 1)[batch.select_T].float()
    log_p = torch.log_softmax(logits / batch.temperatures_T[:, None], dim=-1)
    return log_p.gather(1, batch.targets_T[:, None]).squeeze(1)


def once(policy: PolicyForward, batch: MicroBatch, full: bool) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of their sum with respect to the head's weight."""
    policy.zero_grad()
    logp = full_logprobs(policy, batch) if full else policy(batch).logprobs_T
    logp.sum().backward()
    weight = policy.causal_lm.get_output_embeddings().weight
    return logp.detach(), weight.grad


def peak(path: str, length: int, vocabulary: int, *, full: bool = False) -> int:
    """Bytes beyond the gradient of the weight, which is as large whatever the head does."""
    policy, batch = make_policy(path, vocabulary), batch_of(length, vocabulary)
    return peak_of(lambda: once(policy, batch, full)) - 4 * vocabulary * WIDTH


def equality(path: str, spoil: float = 0.0) -> float:
    """Largest relative difference of log-probs and gradient between pieces and the full head. ``spoil``: added, for the test."""
    policy, batch = make_policy(path, SMALL[1], 64), batch_of(*SMALL)
    ours = [x.clone() for x in once(policy, batch, False)]
    theirs = once(policy, batch, True)
    return max(float((a + spoil - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def curve(
    path: str, *, full: bool, lengths: Any = LENGTHS, vocabularies: Any = VOCABULARIES
) -> dict[str, float]:
    """MiB by ``length×vocabulary``."""
    out = {}
    for vocabulary in vocabularies:
        for length in lengths:
            if full and length * vocabulary > FULL_LIMIT:
                continue
            out[f"{length}×{vocabulary}"] = round(peak(path, length, vocabulary, full=full) / MIB, 1)
        print(f"{'full logits' if full else path}, vocabulary {vocabulary}: "
              + ", ".join(f"{v:.0f}" for k, v in out.items() if k.endswith(f"×{vocabulary}")) + " MiB", flush=True)  # fmt: skip
    return out


def main() -> None:
    """Checks, curves, figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    logging.getLogger("transformers").setLevel(logging.ERROR)
    start = time.monotonic()
    differences = {path: equality(path) for path in PATHS}
    for path, difference in differences.items():
        check(difference <= 1e-5, f"{path}: log-probs or gradient are off by {difference:.1e}")
    curves = {"plain": curve("plain", full=False), "full": curve("plain", full=True)}
    above = [s * v for s in LENGTHS for v in VOCABULARIES if s * v > LOGITS_AT_ONCE]
    flat = [curves["plain"][f"{s}×{v}"] for s in LENGTHS for v in VOCABULARIES if s * v > LOGITS_AT_ONCE]
    # Not to the byte: chunks do not divide every vocabulary evenly, and hidden states grow with the positions.
    check(max(flat) <= 1.1 * min(flat), f"the peak grows with the number of logits: {flat} MiB")
    growth: dict[str, list[float]] = {path: [] for path in PATHS}
    absolute: dict[str, list[float]] = {path: [] for path in PATHS}
    saved = []
    for _ in range(runs):
        for path in PATHS:
            large = peak(path, *MORE)
            growth[path].append(large / peak(path, *FEWER))
            absolute[path].append(large / MIB)
        saved.append(peak("plain", *FEWER, full=True) / peak("plain", *FEWER))
    times = MORE[0] * MORE[1] / (FEWER[0] * FEWER[1])
    at_fewer, at_more = (f"{s:,} × {v:,}" for s, v in (FEWER, MORE))
    figures = [
        Figure("8", f"peak of {times:.1f} times as many logits, {path} head ({at_more})", at_fewer, "ratio", found, "<= 1.05")
        for path, found in growth.items()
    ] + [
        Figure("8b", f"peak of the logits, {path} head ({at_more})", "", "MiB", found) for path, found in absolute.items()
    ] + [
        Figure("8c", f"full logits ÷ ours, {at_fewer}", "full-logits head", "ratio", saved),
    ]  # fmt: skip
    print(f"flat over {min(above):,} to {max(above):,} logits: {min(flat):.0f} to {max(flat):.0f} MiB")
    settings = {
        "curves_MiB": curves,
        "logits_at_once": LOGITS_AT_ONCE,
        "width": WIDTH,
        "seconds": round(time.monotonic() - start),
    }
    Outcome("logit_memory", figures, {"difference_from_full_logits": differences}, settings).emit()


if __name__ == "__main__":
    main()

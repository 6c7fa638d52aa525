"""Tiny models and a hard batch for the gradient tests; run as a script, one rank of a distributed comparison.

accelerate launch … tests/gradient_checks.py KIND LAYOUT OUTPUT.pt
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from maieutic.algorithms.registry import get_loss
from maieutic.train import leave
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import Layout, MicroBatch, Row, make_micro_batches, make_rows
from maieutic.training.step import StepMetrics, accumulate_gradients
from maieutic.training.trajectory import Segment, Trajectory, count_trained

VOCAB = 97
KINDS = ("llama", "llama-lora", "hybrid", "hybrid-lora")
BUDGET = 64


def tiny_model(kind: str) -> Any:
    """fp32, random from a fixed seed, in training mode. Kinds: ``llama``, ``hybrid``, each with ``-lora``."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    if kind.startswith("llama"):
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = LlamaConfig(
            vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, **sizes
        )
        model: Any = LlamaForCausalLM(config)
    else:
        hybrid = Qwen3_5TextConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            initializer_range=0.05,  # larger ones amplify rounding in the recurrent state
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        )
        assert hybrid.layer_types == ["linear_attention"] * 3 + ["full_attention"]
        model = Qwen3_5ForCausalLM(hybrid)
    if kind.endswith("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: then lora_A would have no gradient
                torch.nn.init.normal_(parameter, std=0.1)
    return model.float().train()


def hard_batch() -> tuple[list[Trajectory], list[float]]:
    """Eight episodes that count: unequal lengths, an empty turn, two segments, a zero advantage; a ninth is excluded."""
    g = torch.Generator().manual_seed(1)

    def segment(*turns: tuple[int, int]) -> Segment:
        ids: list[int] = []
        mask: list[bool] = []
        for context, sampled in turns:
            ids += torch.randint(1, VOCAB, (context + sampled,), generator=g).tolist()
            mask += [False] * context + [True] * sampled
        # From likely to rare under the sampler, so that DPPO drops some tokens.
        spread = torch.rand(len(ids), generator=g)
        logprobs = [float(-0.2 - 5.0 * spread[i]) if m else 0.0 for i, m in enumerate(mask)]
        return Segment(ids, mask, logprobs)

    segments = [
        [segment((3, 2))],
        [segment((9, 7), (4, 11))],
        [segment((5, 6), (6, 0), (3, 4))],  # its second tutor turn is empty
        [segment((2, 1))],
        [segment((4, 3)), segment((12, 6))],  # one segment a turn
        [segment((20, 20))],
        [segment((7, 5), (2, 0))],  # ends on an empty turn
        [segment((6, 13))],
    ]
    batch = [Trajectory(f"e{i}", "g", s, 0.0, temperature=1.15) for i, s in enumerate(segments)]
    batch.insert(4, Trajectory("lost", "g", [segment((5, 9))], float("nan"), 1.15, excluded=True))
    advantages = [0.7, -1.1, 0.4, -0.3, 99.0, 0.9, -0.6, 0.0, 1.3]
    return batch, advantages


def rows() -> tuple[list[Row], int]:
    """Rows of the hard batch and the denominator."""
    batch, advantages = hard_batch()
    for trajectory in batch:
        trajectory.validate()
    return make_rows(batch, advantages), count_trained(batch)


def gradient(
    policy: Any, batches: list[MicroBatch], denominator: int, accelerator: Any, loss: Any = None
) -> tuple[dict[str, torch.Tensor], StepMetrics]:
    """Gradients by parameter name (without wrappers' prefixes) and metrics."""
    policy.zero_grad()
    metrics = accumulate_gradients(
        policy, batches, loss or get_loss("dppo"), denominator=denominator, accelerator=accelerator
    )
    grads = {
        name.removeprefix("module."): p.grad.detach().clone()
        for name, p in policy.named_parameters()
        if p.requires_grad and p.grad is not None
    }
    return grads, metrics


def main(kind: str, layout: Layout, output: str) -> None:
    """One rank: gradients of its share of the hard batch, saved by rank 0."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    all_rows, denominator = rows()
    mine = make_micro_batches(all_rows, BUDGET, layout, accelerator.num_processes)[accelerator.process_index]
    policy = accelerator.prepare(PolicyForward(tiny_model(kind), chunk=5))
    grads, metrics = gradient(policy, mine, denominator, accelerator)
    if accelerator.is_main_process:
        torch.save(
            {"grads": grads, "metrics": metrics.flat(), "ranks": accelerator.num_processes, "n": len(mine)},
            output,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])  # type: ignore[arg-type]
    leave(0)

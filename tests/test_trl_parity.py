"""TRL's GRPOTrainer as the oracle: the same rows give the same loss and the same gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from gradient_checks import gradient, hard_batch, tiny_model
from maieutic.algorithms.grpo import GRPO
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import make_micro_batches, make_rows
from maieutic.training.trajectory import Segment, count_trained


def trl_loss_and_gradient(
    model: Any,
    tokenizer: Any,
    segments: list[tuple[Segment, float]],
    folder: Path,
    beta: float = 0.0,
    **settings: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """`GRPOTrainer.compute_loss` on rows made by hand (`dapo`: the mean over all tokens of the batch)."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(folder),
        loss_type="dapo",
        temperature=1.15,
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        **settings,
    )
    trainer = GRPOTrainer(
        model=model,
        args=args,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = beta  # set late: from the config it would look for the reference on the Hub
    trainer.model.train()

    first = [segment.mask.index(True) for segment, _ in segments]
    prompt_width = max(first)
    width = max(len(segment) - f for (segment, _), f in zip(segments, first, strict=True))

    def left(values: list[Any], f: int, fill: Any) -> list[Any]:
        return [fill] * (prompt_width - f) + list(values[:f])

    def right(values: list[Any], f: int, fill: Any) -> list[Any]:
        return list(values[f:]) + [fill] * (width - len(values[f:]))

    paired = list(zip((s for s, _ in segments), first, strict=True))
    mu = torch.tensor([right(s.logprobs, f, 0.0) for s, f in paired])
    mask = torch.tensor([right([int(m) for m in s.mask], f, 0) for s, f in paired])
    inputs: dict[str, Any] = {
        "prompt_ids": torch.tensor([left(s.ids, f, 0) for s, f in paired]),
        "prompt_mask": torch.tensor([left([1] * len(s), f, 0) for s, f in paired]),
        "completion_ids": torch.tensor([right(s.ids, f, 0) for s, f in paired]),
        "completion_mask": torch.tensor([right([1] * len(s), f, 0) for s, f in paired]),
        "tool_mask": mask,
        "advantages": torch.tensor([advantage for _, advantage in segments]),
        "old_per_token_logps": mu,
        "num_items_in_batch": mask.sum(),
    }
    if beta:
        inputs["ref_per_token_logps"] = mu - 0.2
    loss = trainer.compute_loss(trainer.model, inputs)
    trainer.model.zero_grad()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), grads


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.2},
        {"epsilon": 0.1, "epsilon_high": 0.3, "beta": 0.05, "use_bias_correction_kl": False},
    ],
    ids=["clip", "clip-higher-and-kl"],
)
def test_grpo_equals_trl(settings: dict[str, Any], tmp_path: Path, tiny_tokenizer: Any) -> None:
    batch, advantages = hard_batch()
    counted = [(t, a) for t, a in zip(batch, advantages, strict=True) if not t.excluded]
    # Near the policy, so that ratios fall on both sides of the clip range.
    reference = tiny_model("llama")
    g = torch.Generator().manual_seed(3)
    for trajectory in batch:
        for segment in trajectory.segments:
            with torch.no_grad():
                logits = reference(input_ids=torch.tensor([segment.ids]), use_cache=False).logits[0] / 1.15
            log_p = torch.log_softmax(logits, -1)
            for i, sampled in enumerate(segment.mask):
                if sampled:
                    noise = 0.3 * torch.randn((), generator=g)
                    segment.logprobs[i] = min(0.0, float(log_p[i - 1, segment.ids[i]] + noise))

    segments = [(s, a) for t, a in counted for s in t.segments if s.n_trained]
    loss, expected = trl_loss_and_gradient(
        tiny_model("llama"), tiny_tokenizer, segments, tmp_path, **settings
    )

    beta = settings.get("beta", 0.0)
    rows = make_rows(batch, advantages)
    batches = make_micro_batches(rows, 64, "packed")[0]
    if beta:
        for micro_batch in batches:
            micro_batch.ref_logprobs_T = micro_batch.mu_logprobs_T - 0.2
    low = settings["epsilon"]
    grpo = GRPO(clip_low=low, clip_high=settings.get("epsilon_high", low), kl_beta=beta)
    policy = PolicyForward(tiny_model("llama"), chunk=8)
    grads, metrics = gradient(policy, batches, count_trained(batch), Accelerator(cpu=True), grpo)

    assert metrics.loss == pytest.approx(loss, abs=1e-6)
    assert abs(loss) > 1e-4
    assert grads.keys() == {f"model.{name}" for name in expected}
    assert max(float(e.abs().max()) for e in expected.values()) > 1e-2
    for name, e in expected.items():
        torch.testing.assert_close(grads[f"model.{name}"], e, rtol=0, atol=1e-5)
    assert 0.02 < metrics.means["clipped_low"] < 0.5
    assert 0.02 < metrics.means["clipped_high"] < 0.5

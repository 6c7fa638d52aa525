"""The memory estimate against measured peaks on the CPU: two small models, full and LoRA, with and without checkpointing.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [--tokens 1024]

Measured: every allocation and release of the second gradient accumulation (so that gradients and optimizer state exist), as torch's
profiler sees them, on top of weights, gradients and optimizer state. Prints one line a case and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

import torch
from accelerate import Accelerator

from maieutic.algorithms.registry import get_loss
from maieutic.config import LoraSpec
from maieutic.memory import Batch, ModelSize, activations, size_of
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import Layout, MicroBatch, collate, make_rows
from maieutic.training.step import accumulate_gradients
from maieutic.training.trajectory import Segment, Trajectory

LORA = LoraSpec(r=8, alpha=16)
CHUNK = 256
CASES = [
    (kind, trained, checkpointing)
    for kind in ("dense", "hybrid")
    for trained in ("full", "lora")
    for checkpointing in (False, True)
]


def config_of(kind: str, width: int = 192, layers: int = 8, vocabulary: int = 4_096) -> Any:
    """``dense``: of the Llama type. ``hybrid``: of the Qwen3.5 type, three linear-attention layers to one of full attention."""
    from transformers import LlamaConfig, Qwen3_5TextConfig

    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
    }
    if kind == "dense":
        return LlamaConfig(**sizes)
    linear = {
        "linear_num_key_heads": width // 64,
        "linear_num_value_heads": width // 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    return Qwen3_5TextConfig(**sizes, **linear)


def batch_of(tokens: int, layout: Layout, vocabulary: int, rows: int = 4) -> MicroBatch:
    """``rows`` sequences of equal length; a third of the tokens is trained."""
    generator = torch.Generator().manual_seed(0)
    length = tokens // rows
    trajectories = []
    for i in range(rows):
        ids = torch.randint(1, vocabulary, (length,), generator=generator).tolist()
        mask = [j % 3 == 1 for j in range(length)]
        trajectories.append(
            Trajectory(f"e{i}", "g", [Segment(ids, mask, [-1.0 if m else 0.0 for m in mask])], 0.0, 1.0)
        )
    return collate(make_rows(trajectories, [1.0, -1.0] * (rows // 2)), layout)


def peak_of(work: Any) -> int:
    """The most bytes that ``work()`` has allocated and not yet released at any moment, as the profiler's allocation events say."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure(
    kind: str, trained: str, checkpointing: bool, *, tokens: int, layout: Layout | None = None, **sizes: int
) -> dict[str, Any]:
    """Measured and estimated bytes of one case; ``activations`` without, ``total`` with weights, gradients and optimizer state."""
    from transformers import AutoModelForCausalLM

    config = config_of(kind, **sizes)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).float()
    lora = LORA if trained == "lora" else None
    size: ModelSize = size_of(kind, config, dtype="float32", lora=lora)
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules="all-linear")
        )
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if layout is None:
        layout = "packed" if size.packs else "padded"
    batch = batch_of(tokens, layout, config.vocab_size)
    accelerator = Accelerator(cpu=True)
    policy = PolicyForward(model, CHUNK).train()
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)

    def accumulate() -> None:
        accumulate_gradients(
            policy, [batch], get_loss("dppo"), denominator=batch.n_trained, accelerator=accelerator
        )

    accumulate()
    optimizer.step()
    resident = sum(p.nbytes for p in policy.parameters()) + sum(
        p.nbytes + sum(s.nbytes for s in optimizer.state[p].values() if s.dim()) for p in parameters
    )
    n = sum(p.numel() for p in parameters)
    estimated = activations(
        size,
        Batch(
            batch.input_ids.numel(), batch.n_trained, batch.input_ids.shape[1] if layout == "packed" else 0
        ),
        size=4,
        checkpointing=checkpointing,
        full=lora is None,
        logit_chunk=CHUNK,
    )
    measured = peak_of(accumulate)
    return {
        "case": f"{kind}/{trained}/{'checkpointed' if checkpointing else 'plain'}",
        "measured": {"resident": resident, "activations": measured, "total": resident + measured},
        "estimated": {
            "resident": 4 * (size.parameters + size.adapter_parameters) + 12 * n,
            "activations": sum(estimated.values()),
            "total": 4 * (size.parameters + size.adapter_parameters) + 12 * n + sum(estimated.values()),
        },
    }


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of the micro-batch")
    tokens = parser.parse_args().tokens
    logging.getLogger("transformers").setLevel(logging.ERROR)
    results = []
    for case in CASES:
        result = measure(*case, tokens=tokens)
        for part in ("activations", "total"):
            result[f"{part}_error"] = round(result["estimated"][part] / result["measured"][part] - 1, 4)
        results.append(result)
        mib = {k: f"{v / 2**20:.1f}" for k, v in result["measured"].items()}
        print(
            f"{result['case']}: measured {mib['total']} MiB ({mib['activations']} of it activations and logits), "
            f"estimate {result['total_error']:+.1%} ({result['activations_error']:+.1%})",
            flush=True,
        )
    worst = {p: max(abs(r[f"{p}_error"]) for r in results) for p in ("activations", "total")}
    print(json.dumps({"benchmark": "memory", "tokens": tokens, "worst_error": worst, "cases": results}))


if __name__ == "__main__":
    main()

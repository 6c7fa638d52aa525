"""Reward-model scoring in batches sorted by length against one conversation at a time, on CPU. Ends with one JSON line.

    python benchmarks/ped_rm.py [--conversations 256] [--layers 4] [--hidden 128]

The model is random and tiny: only time and equality matter. Conversations have the lengths of a MathDial cut (100 to 600 tokens)
divided by ``--shrink``. What batching saves on a CPU is the fixed cost of a call; where a call is all arithmetic (``--hidden 256
--shrink 1``) it saves little there, and much on a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from maieutic.evaluation.ped_rm import RewardModel
from maieutic.tiny import tiny_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--shrink", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    model = RewardModel(
        Qwen2ForSequenceClassification(config), tiny_tokenizer(), batch_tokens=args.batch_tokens
    )
    rng = random.Random(0)
    rows = [
        [rng.randrange(1, 1000) for _ in range(rng.randint(100, 600) // args.shrink)]
        for _ in range(args.conversations)
    ]
    model.score_ids(rows[:8])
    for row in rows[:8]:
        model.score_one(row)
    single_s = batched_s = float("inf")
    # The two alternate and the best of each counts: other work on the machine hits both.
    for _ in range(args.repeats):
        start = time.perf_counter()
        single = [model.score_one(row) for row in rows]
        middle = time.perf_counter()
        batched = model.score_ids(rows)
        end = time.perf_counter()
        single_s, batched_s = min(single_s, middle - start), min(batched_s, end - middle)
    gap = max(abs(a - b) for a, b in zip(single, batched, strict=True))
    print(
        json.dumps(
            {
                "benchmark": "ped_rm",
                "conversations": len(rows),
                "tokens": sum(map(len, rows)),
                "parameters": sum(p.numel() for p in model._model.parameters()),
                "threads": torch.get_num_threads(),
                "single_s": round(single_s, 3),
                "batched_s": round(batched_s, 3),
                "speedup": round(single_s / batched_s, 2),
                "max_abs_gap": gap,
            }
        )
    )


if __name__ == "__main__":
    main()

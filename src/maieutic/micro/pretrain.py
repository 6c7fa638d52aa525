"""Supervised pre-training of the micro models on scripted documents, on one thread."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

from maieutic.micro.corpus import Document
from maieutic.micro.models import Encoder

Say = Callable[[str], None]


def pretrain(
    model: Any,
    document: Callable[[random.Random], Document],
    encode: Encoder,
    *,
    steps: int,
    seed: int,
    batch: int = 16,
    lr: float = 3e-3,
    matrix_lr: float = 0.008,
    say: Say = lambda text: None,
) -> float:
    """Train ``model`` in place with a cosine schedule; returns the running mean of the loss (nats a token).

    Muon for the matrices inside the layers (it needs about half the steps of AdamW here), AdamW for embeddings and norms.
    ``matrix_lr`` is Muon's step: with 0.02 the students never learned to carry over the second operation, nor the tutor to
    tell a right step from a wrong one. Batches hold documents of similar length. Only positions that are learned are projected
    to the vocabulary.
    """
    import torch
    import torch.nn.functional as F

    rng = random.Random(seed)
    head = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not head]
    rest = [p for p in model.parameters() if p.ndim != 2 or p is head]
    optimizers = [
        (torch.optim.Muon(matrices, lr=matrix_lr, momentum=0.95, weight_decay=0.0), matrix_lr),
        (torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01), lr),
    ]
    pool: list[list[tuple[list[int], list[bool]]]] = []
    mean, start = 0.0, time.monotonic()
    model.train()
    for step in range(steps):
        if not pool:
            rows = sorted((encode(document(rng)) for _ in range(16 * batch)), key=lambda row: len(row[0]))
            pool = [rows[i : i + batch] for i in range(0, len(rows), batch)]
            rng.shuffle(pool)
        rows = pool.pop()
        width = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(batch, width, dtype=torch.long)
        learned = torch.zeros(batch, width, dtype=torch.bool)
        for r, (row, mask) in enumerate(rows):
            ids[r, : len(row)] = torch.tensor(row)
            learned[r, : len(row)] = torch.tensor(mask)
        warm = min(1.0, (step + 1) / 50)
        factor = warm * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[learned[:, 1:]]
        loss = F.cross_entropy(F.linear(hidden, head), ids[:, 1:][learned[:, 1:]])
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer, base in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * factor
            optimizer.step()
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            say(f"step {step + 1} of {steps}: loss {mean:.4f}, {time.monotonic() - start:.0f} s")
    model.eval()
    return mean

"""Fixtures shared by every test file."""

from __future__ import annotations

import os

# The suite runs on shared CPUs under xdist: one BLAS thread a worker, and no test may reach the Hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

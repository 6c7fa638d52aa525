"""Fixtures shared by every test file."""

from __future__ import annotations

import os

# The suite runs on shared CPUs under xdist: one BLAS thread a worker, and no test may reach the Hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# In CI the same examples each time: a failure there belongs to the change. At a desk new ones each time.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("desk", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama with a byte-level tokenizer and an append-only ChatML template."""
    from maieutic.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_thinking_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a template that pre-fills `<think>` and strips earlier thinking from history."""
    from maieutic.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "thinking-model", template="thinking")


@pytest.fixture(scope="session")
def tiny_hybrid_thinking_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a template that lets the model open its thinking itself (`enable_thinking` switches it off)."""
    from maieutic.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "hybrid-model", template="hybrid")


@pytest.fixture
def tiny_tokenizer(tiny_model_dir: Path) -> Any:
    """The tokenizer of `tiny_model_dir`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def tiny_model(tiny_model_dir: Path) -> Any:
    """The fp32 model of `tiny_model_dir` in eval mode, fresh for each test."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def shared_data_dir() -> Path:
    """The folder of larger sample data beside the repository; `MAIEUTIC_SHARED` names another place."""
    root = Path(os.environ.get("MAIEUTIC_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (root / "data").is_dir():
        pytest.skip(f"no sample data at {root / 'data'}: set MAIEUTIC_SHARED to the folder that holds data/")
    return root / "data"

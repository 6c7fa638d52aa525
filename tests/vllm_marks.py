"""Marks of tests that start a real vLLM server on the CPU, and the Python that has it."""

from __future__ import annotations

from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[1] / ".venv-vllm" / "bin" / "python"
VLLM = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: scripts/setup_vllm.sh makes it"),
]

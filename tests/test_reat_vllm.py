"""The plumbing of distillation with a real small language model on a real vLLM server on the CPU, structured output included.

The model is SmolLM2-135M where it is on this machine (``maieutic models get smollm2-135m``), else a tiny random model. Neither can
review a tutor: most turns end as Unknown or below the gate, and the point is that every one of them is accounted for.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from maieutic.engines.usage import Ledger
from maieutic.models import list_models
from maieutic.reat.connect import connect_roles
from maieutic.reat.distil import DistilReport, distil
from maieutic.reat.distil_config import DistilRecipe
from maieutic.serve import Server, plan
from maieutic.tiny import make_tiny_model
from reat_world import write_transcripts
from vllm_marks import PYTHON, VLLM

pytestmark = [*VLLM, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(model folder, address-file pattern)."""
    from maieutic.config import Recipe, StudentSpec, TutorSpec

    folder = tmp_path_factory.mktemp("ocm")
    local = (
        [m.path for m in list_models() if m.path] if os.environ.get("MAIEUTIC_TINY_STUDENT") != "1" else []
    )
    model = str(local[0]) if local else str(make_tiny_model(folder / "model", head_dim=32))
    recipe = Recipe(
        name="ocm", tutor=TutorSpec(model=model), students=[StudentSpec(model=model, dtype="float32")]
    )
    what = plan(recipe, "student", model_dir=model, python=str(PYTHON), extra=["--max-num-seqs", "8"])
    what.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with Server(what, folder / "student.json", folder / "student.log", timeout_s=900.0):
        yield model, f"file:{folder}/student.json"


@pytest.mark.parametrize("structured", [True, False])
def test_every_turn_is_accounted_for(served: tuple[str, str], tmp_path: Path, structured: bool) -> None:
    model, address = served
    run = write_transcripts(tmp_path / "run", episodes=2, turns=2)
    role = {
        "model": model,
        "engine": {"kind": "chat", "urls": [address], "http": {"concurrency": 4, "timeout_s": 300.0}},
        "sampling": {"temperature": 0.0, "max_tokens": 300},
        "structured": structured,
    }
    made = DistilRecipe.model_validate({"name": "t", "roles": {"ocm": role}, "distil": {"reasks": 1}})

    async def go() -> DistilReport:
        ledger = Ledger()
        async with connect_roles(made.roles, made.distil, seed=0, ledger=ledger) as connected:
            return await distil(
                [run], connected.roles, None, made.distil, out=tmp_path / "out", ledger=ledger, in_flight=4
            )

    report = asyncio.run(go())
    print("\n".join(report.lines()), f"\n{report.seconds:.0f} s", flush=True)
    assert report.turns == 6 and sum(report.dropped.values()) + report.experiences == 6
    assert not any("engine_failed" in why for why in report.dropped), (
        "the endpoint takes every schema that is sent"
    )
    requests = sum(n for k, n in report.roles.items() if k.endswith(".requests"))
    assert requests == report.usage["ocm"]["requests"] == report.asked >= 6
    assert report.usage["ocm"]["completion_tokens"] > 0
    for line in (tmp_path / "out" / "reviews.jsonl").read_text().splitlines():
        review = json.loads(line)
        assert all(0 <= s <= 100 for s in review["scores"])
        assert bool(review["dropped"]) != bool(review["experience"])
    again = asyncio.run(go())
    assert again.asked == 0 and again.dropped == report.dropped

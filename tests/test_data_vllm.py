"""A build of 200 real problems whose student is a real language model on a real vLLM server on the CPU.

The student is SmolLM2-135M where it is on this machine (``maieutic models get smollm2-135m``), else a tiny random model.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import data_world as world
from maieutic.models import list_models
from maieutic.problems import read_pairs
from maieutic.serve import Server, plan
from maieutic.tiny import make_tiny_model
from test_data_build import ROWS, golds, head, run
from vllm_marks import PYTHON, VLLM

pytestmark = [*VLLM, pytest.mark.slow]
K, TOKENS = 2, 32


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(model folder, address-file pattern) of a served student."""
    from maieutic.config import Recipe, StudentSpec, TutorSpec

    folder = tmp_path_factory.mktemp("student")
    local = (
        [m.path for m in list_models() if m.path] if os.environ.get("MAIEUTIC_TINY_STUDENT") != "1" else []
    )
    model = str(local[0]) if local else str(make_tiny_model(folder / "model", head_dim=32))
    recipe = Recipe(
        name="student", tutor=TutorSpec(model=model), students=[StudentSpec(model=model, dtype="float32")]
    )
    what = plan(recipe, "student", model_dir=model, python=str(PYTHON), extra=["--max-num-seqs", "32"])
    what.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with Server(what, folder / "student.json", folder / "student.log", timeout_s=400.0):
        yield model, f"file:{folder}/student.json"


def test_two_hundred_problems_with_a_served_student(
    student: tuple[str, str], tmp_path: Path, shared_data_dir: Path
) -> None:
    model, address = student
    source = head(shared_data_dir / "gsm8k-train-300.jsonl", ROWS, tmp_path / "gsm8k.jsonl")
    other = read_pairs(str(shared_data_dir / "gsm8k-train-300.jsonl"))[250].source.text
    held = tmp_path / "eval.jsonl"
    held.write_text(json.dumps({"question": other, "answer": "#### 1"}) + "\n")
    rewriter, solver = world.Rewriter(other_text=other), world.Solver()
    with world.in_thread(rewriter, solver):
        data = world.recipe(tmp_path, str(source), rewriter.url, solver.url, "http://unused")
        data["student"] = {
            "model": model,
            "engine": {"kind": "chat", "urls": [address], "http": {"concurrency": 16, "timeout_s": 300.0}},
        }
        data["dedup"] = {"against": [{"source": str(held)}]}
        data |= {"prior": {"k": K}, "env": {"post_test_max_tokens": TOKENS}}
        report = run(data, tmp_path / "r.yaml")
        asked = report.asked
        again = run(data, tmp_path / "r.yaml")
    print("\n".join(report.lines()), f"\n{report.seconds:.0f} s", flush=True)
    planted = Counter(rewriter.planted.values())
    assert set(planted) == set(world.FAULTS)
    expected = {
        f"{world.STAGE.get(k, 'rewrite')}.{'evaluation_set' if k == 'duplicate' else k}": n
        for k, n in planted.items()
    }
    assert {k: n for k, n in report.rejections.items() if not k.startswith("gate.")} == expected
    assert report.rows == ROWS == len(golds(source)) and again.asked == 0 < asked
    pairs = read_pairs(str(tmp_path / "world"))
    rates = [q.rates[report.student] for p in pairs for q in (p.source, p.transfer) if q is not None]
    assert len(rates) > 1.8 * ROWS and {r.n for r in rates} == {K}
    assert report.student.startswith(f"{model}|") and report.student.endswith(f"|max={TOKENS}")
    assert report.samples["failed"] == 0 and report.usage["student"]["completion_tokens"] > ROWS * K
    journal = [json.loads(x) for x in (tmp_path / "world" / "journal.jsonl").read_text().splitlines()]
    verdicts = Counter(v for r in journal if r.get("stage") == "prior" for v in r["value"]["verdicts"])
    assert verdicts["error"] == 0 and verdicts["wrong"] + verdicts["no_answer"] > 0
    print(verdicts, flush=True)

"""Against real vLLM servers on the CPU: the training loop with a served student and a served tutor, and weight pushes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import training_parts as parts
from maieutic.engines import push as push_module
from maieutic.engines.base import Sampling
from maieutic.engines.http import HttpPolicy, HttpPool
from maieutic.engines.push import DiskPush
from maieutic.engines.usage import Ledger
from maieutic.engines.vllm import VllmEngine
from maieutic.engines.weights import merged_weights
from maieutic.errors import EngineMismatchError
from maieutic.serve import Server, plan
from maieutic.tiny import make_tiny_model
from maieutic.training import loop
from maieutic.training.push_probe import make_scorer
from maieutic.transcripts import read_episodes
from vllm_marks import PYTHON, VLLM

pytestmark = VLLM
TOLERANCE = 1e-3


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings; vLLM on the CPU needs heads of a multiple of 32."""
    return make_tiny_model(tmp_path_factory.mktemp("served") / "model", head_dim=32, tied=True)


@pytest.fixture(scope="session")
def addresses(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A student's and a tutor's server, started as ``maieutic serve`` does; the patterns of their address files."""
    folder = tmp_path_factory.mktemp("addresses")
    recipe = recipe_of(model_dir, folder, student=None, tutor=None)

    def start(role: str) -> Server:
        what = plan(recipe, role, model_dir=str(model_dir), python=str(PYTHON))
        what.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        return Server(what, folder / f"{role}.json", folder / f"{role}.log", timeout_s=400.0)

    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(start, role) for role in ("student", "tutor")]
    servers = [s.result() for s in started if s.exception() is None]
    try:
        for s in started:
            s.result()
        yield {role: f"file:{folder / role}.json" for role in ("student", "tutor")}
    finally:
        for server in servers:
            server.stop()


def recipe_of(model: Path, folder: Path, *, student: str | None, tutor: str | None, **changes: Any) -> Any:
    changes = {"tutor.dtype": "float32", "training.max_steps": 2, "eval.every": 0, **changes}
    data = parts.recipe_dict(model, folder, **changes)
    data["env"]["prompt_limit"] = data["env"]["conversation_limit"] = 1024
    data["students"][0]["dtype"] = "float32"
    if student is not None:
        data["students"][0]["engine"] = {"kind": "vllm", "urls": [student]}
    if tutor is not None:
        data["tutor"]["engine"] = {"kind": "vllm", "urls": [tutor]}
    from maieutic.config import Recipe

    return Recipe.model_validate_json(json.dumps(data))


def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[int]]]:
    """Ids that servers reported, by session, in order."""
    served: dict[str, list[list[int]]] = {}
    generate = VllmEngine.generate

    async def record(self: VllmEngine, prompt: Any, sampling: Sampling, **kw: Any) -> Any:
        samples = await generate(self, prompt, sampling, **kw)
        if self.pool.role == "tutor" and kw.get("session"):
            served.setdefault(kw["session"].removeprefix("tutor:"), []).append(list(samples[0].ids))
        return samples

    monkeypatch.setattr(VllmEngine, "generate", record)
    return served


def test_a_tutor_in_process_with_a_served_student(
    model_dir: Path, addresses: dict[str, str], tmp_path: Path
) -> None:
    run = loop.run(recipe_of(model_dir, tmp_path, student=addresses["student"], tutor=None)).folder
    rows = parts.metrics_of(run)
    assert [r["train/step"] for r in rows] == [1, 2]
    for row in rows:
        assert row["rollout/excluded_share"] == 0 and row["train/logprob_gap"] <= 1e-4
    # 4 episodes a step, each with one student turn; gates are off, so each also sits a post-test.
    episodes = list(read_episodes(run, "train"))
    turns = sum(t.attempts for e in episodes for t in e.dialogue.by("student") if not t.scripted)
    assert rows[-1]["usage/student/requests"] == turns + len(episodes) == turns + 8
    assert rows[-1]["usage/student/completion_tokens"] > 0
    assert json.loads((run / "usage.json").read_text())["student"]["requests"] == turns + 8


@pytest.mark.parametrize("lora", [None, {"r": 2, "alpha": 4}], ids=["full", "lora"])
def test_both_served_with_a_push_each_step(
    lora: Any, model_dir: Path, addresses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = recorded(monkeypatch)
    recipe = recipe_of(
        model_dir,
        tmp_path,
        student=addresses["student"],
        tutor=addresses["tutor"],
        **{"tutor.lora": lora, "training.optimizer": {"lr": 1e-2}, "checkpoint.every": 1},
    )
    run = loop.run(recipe).folder
    rows = parts.metrics_of(run)
    for row in rows:
        assert row["rollout/excluded_share"] == 0
        # After each push, over what was then sampled and over the probe of the push.
        assert 0 < row["train/logprob_gap"] <= TOLERANCE and row["push/probe_gap"] <= TOLERANCE
    print(lora, [(r["train/logprob_gap"], r["push/probe_gap"]) for r in rows])
    moved = load_file(next((run / "checkpoints" / "step-000001" / "model").glob("*.safetensors")))
    if lora is None:  # the embeddings, tied with the head, were trained
        before = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
        assert float((moved["model.embed_tokens.weight"] - before).abs().max()) > 5e-3
    else:
        assert any("lora_B" in k and float(v.abs().max()) > 5e-3 for k, v in moved.items())
    for episode in read_episodes(run, "train"):
        (segment,) = episode.trajectory.segments
        trained = [i for i, m in zip(segment.ids, segment.mask, strict=True) if m]
        assert trained == [i for turn in served[episode.dialogue.id] for i in turn]
        assert episode.policy_version == episode.step - 1 == segment.policy_version


# ---- pushes ----------------------------------------------------------------------------------------------------------


async def pushed(model: Any, url: str, folder: Path) -> VllmEngine:
    pool = HttpPool([url], HttpPolicy(timeout_s=60.0), role="tutor", ledger=Ledger())
    engine = VllmEngine(pool)
    try:
        await engine.start()
        probe = [[(7 * i + j) % 300 + 4 for j in range(20)] for i in range(2)]
        push = DiskPush(model, engine, folder, probe=probe, score=make_scorer(model, 64), tolerance=TOLERANCE)
        await push.push(5)
        assert push.report is not None and engine.policy_version == 5
        await push.verify()
        with torch.no_grad():  # the trainer moves on without a push: its scores are those of the push
            model.get_input_embeddings().weight.mul_(1.01)
        await push.verify()
        (sample,) = await engine.generate(probe[0], Sampling(1.0, 1.0, 8), seed=1)
        assert sample.policy_version == 5
    finally:
        await engine.close()
    return engine


def perturbed(model_dir: Path, seed: int) -> Any:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return model


def test_perturbed_tied_embeddings_arrive(model_dir: Path, addresses: dict[str, str], tmp_path: Path) -> None:
    url = json.loads(Path(addresses["tutor"].removeprefix("file:")).read_text())["url"]
    asyncio.run(pushed(perturbed(model_dir, 1), url, tmp_path / "push"))


@pytest.mark.parametrize("stale", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_stale_tensor_is_caught_by_the_probe(
    stale: str,
    model_dir: Path,
    addresses: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = json.loads(Path(addresses["tutor"].removeprefix("file:")).read_text())["url"]
    old = load_file(model_dir / "model.safetensors")

    def forgetful(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Leaves the head out, as ``save_pretrained`` of a tied model does; another tensor stays as it was."""
        for name, value in merged_weights(model):
            if name != stale:
                yield name, value
            elif name != "lm_head.weight":
                yield name, old[name]

    import maieutic.engines.weights as weights

    monkeypatch.setattr(weights, "merged_weights", forgetful)
    assert push_module.write_weights is weights.write_weights
    with pytest.raises(EngineMismatchError, match="weights stayed behind"):
        asyncio.run(pushed(perturbed(model_dir, 2), url, tmp_path / "push"))

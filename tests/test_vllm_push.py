"""Weight pushes to a real vLLM server on the CPU: an adapter by name, versions that it names itself, and a kill in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import training_parts as parts
from maieutic.config import Recipe
from maieutic.engines.base import Sampling
from maieutic.engines.http import HttpPolicy, HttpPool
from maieutic.engines.push import DiskPush, WeightPush
from maieutic.engines.push_lora import LoraPush
from maieutic.engines.usage import Ledger
from maieutic.engines.vllm import VllmEngine
from maieutic.errors import EngineDownError, EngineMismatchError
from maieutic.serve import Server, plan
from maieutic.tiny import make_tiny_model
from maieutic.training.push_probe import make_scorer
from push_servers import move
from vllm_marks import PYTHON, VLLM

pytestmark = VLLM
TOLERANCE = 1e-3
PROBE = [[(7 * i + j) % 300 + 4 for j in range(20)] for i in range(2)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM on the CPU needs heads of a multiple of 32."""
    return make_tiny_model(tmp_path_factory.mktemp("pushed") / "model", head_dim=32, tied=True)


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tutor's server as `maieutic serve tutor` starts it for ``push: lora`` (it takes whole weights too)."""
    folder = tmp_path_factory.mktemp("server")
    changes = {"tutor.dtype": "float32", "tutor.engine": {"kind": "vllm", "urls": ["file:x"], "push": "lora"}}
    data = parts.recipe_dict(model_dir, folder, **changes)
    data["env"]["prompt_limit"] = data["env"]["conversation_limit"] = 256
    recipe = Recipe.model_validate_json(json.dumps(data))
    what = plan(recipe, "tutor", model_dir=str(model_dir), python=str(PYTHON))
    what.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with Server(what, folder / "tutor.json", folder / "tutor.log", timeout_s=400.0) as running:
        yield running


def adapted(model_dir: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules="all-linear")).eval()


def with_engine(url: str, body: Any) -> Any:
    async def go() -> Any:
        policy = HttpPolicy(timeout_s=60.0, backoff_s=0.1)
        vllm = VllmEngine(HttpPool([url], policy, role="tutor", ledger=Ledger()))
        try:
            await vllm.start()
            return await body(vllm)
        finally:
            await vllm.close()

    return asyncio.run(go())


def settings(model: Any) -> dict[str, Any]:
    return {"probe": PROBE, "score": make_scorer(model, 64), "tolerance": TOLERANCE}


def test_an_adapter_arrives_by_name_and_the_next_takes_its_place(
    model_dir: Path, server: Server, tmp_path: Path
) -> None:
    model = adapted(model_dir)

    async def body(vllm: VllmEngine) -> list[float]:
        push = LoraPush(model, vllm, tmp_path / "push", **settings(model))
        gaps = []
        for version in (1, 2, 3):
            move(model, version)
            await push.push(version)
            assert push.report is not None
            gaps.append(push.report.probe_gap)
            (sample,) = await vllm.generate(PROBE[0], Sampling(1.0, 1.0, 8), seed=1)
            assert sample.policy_version == version
            # What was sampled has the trainer's log-probs.
            whole = [*PROBE[0], *sample.ids]
            theirs = torch.tensor(sample.logprobs)
            ours = torch.tensor(make_scorer(model, 64)([whole])[0][-len(sample.ids) :])
            assert float((theirs - ours).abs().max()) <= TOLERANCE
        _, raw = await vllm.pool.get("/v1/models")
        served = {card["id"] for card in json.loads(raw)["data"]}
        assert "policy-v3" in served and not served & {"policy-v1", "policy-v2"}
        move(
            model, 4
        )  # the trainer moves on, and its scores are asked for again under the old version's name
        push._scores = push._score(PROBE)
        with pytest.raises(EngineMismatchError, match="weights stayed behind"):
            await push.verify()
        return gaps

    gaps = with_engine(server.url, body)
    print("lora probe gaps", gaps)
    assert max(gaps) <= TOLERANCE


def test_the_server_names_the_version_that_was_pushed(
    model_dir: Path, server: Server, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    async def body(vllm: VllmEngine) -> None:
        push: WeightPush = DiskPush(model, vllm, tmp_path / "push", **settings(model))
        for version in (5, 6):
            move(model, version)
            await push.push(version)
            assert await vllm.held_version(server.url) == str(version)
        await push.verify()
        await vllm.name_version(server.url, 9)
        with pytest.raises(EngineMismatchError, match="policy version 6.*holds version 9"):
            await push.verify()

    with_engine(server.url, body)


def test_a_server_that_is_killed_during_a_push(model_dir: Path, server: Server, tmp_path: Path) -> None:
    """Last in this file: nothing answers any more afterwards."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    assert server.process is not None
    group = os.getpgid(server.process.pid)

    async def body(vllm: VllmEngine) -> None:
        push = DiskPush(model, vllm, tmp_path / "push", **settings(model), timeout_s=20.0, patience_s=2.0)
        await push.push(7)
        post = vllm.pool.post_one

        async def killing(url: str, path: str, body: Any, *, timeout_s: float) -> Any:
            request = asyncio.ensure_future(post(url, path, body, timeout_s=timeout_s))
            if path == "/collective_rpc":
                await asyncio.sleep(0.02)  # it is on its way
                with contextlib.suppress(ProcessLookupError):  # a second try finds it dead
                    os.killpg(group, signal.SIGKILL)
            return await request

        vllm.pool.post_one = killing  # type: ignore[method-assign]
        with pytest.raises(EngineDownError, match="took weights for 2 s"):
            await push.push(8)
        assert push.version is None and vllm.policy_version == 7

    with_engine(server.url, body)

"""Weight pushes by disk, adapter and weight transfer: what arrives, versions, probes, time-outs, and servers that die."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

import training_parts as parts
from fault_parts import assert_on_policy, engine, recipe_of, speak, steps
from loopback import InThread, Loopback, serving
from maieutic.engines.base import Sampling
from maieutic.engines.http import HttpPolicy, HttpPool
from maieutic.engines.push import DiskPush, WeightPush
from maieutic.engines.push_lora import LoraPush
from maieutic.engines.push_nccl import NcclPush
from maieutic.engines.usage import Ledger
from maieutic.engines.vllm import VllmEngine
from maieutic.engines.weights import merged_weights
from maieutic.errors import (
    EngineDownError,
    EngineMismatchError,
    MissingExtraError,
    ModelError,
    RecipeError,
    WeightPushError,
)
from maieutic.serve import plan
from maieutic.training import loop
from maieutic.training.push_probe import make_scorer
from push_servers import LoraServer, TransferServer, VersionedServer, Wire, move
from token_server import TokenServer

PROBE = [[(7 * i + j) % 60 + 4 for j in range(12)] for i in range(2)]
FAST = HttpPolicy(timeout_s=20.0, retries=1, backoff_s=0.01, backoff_max_s=0.05, outage_limit_s=20.0)


def full(model_dir: Path, seed: int = 1) -> Any:
    """The model with all its weights moved a little."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    move(model, seed)
    return model


def adapted(model_dir: Path, seed: int = 1) -> Any:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules="all-linear")).eval()
    move(model, seed)
    return model


def pushes(
    servers: list[TokenServer],
    make: Callable[..., WeightPush],
    body: Callable[[WeightPush, VllmEngine], Any],
    **settings: Any,
) -> Any:
    """Run ``body`` with a push over running servers."""

    async def go() -> Any:
        async with serving(*servers):
            pool = HttpPool([s.url for s in servers], FAST, role="tutor", ledger=Ledger())
            vllm = VllmEngine(pool)
            try:
                await vllm.start()
                return await body(make(vllm, **settings), vllm)
            finally:
                await pool.close()

    return asyncio.run(go())


def maker(kind: str, model: Any, folder: Path, wire: Wire | None = None, **more: Any) -> Callable[..., Any]:
    def make(vllm: VllmEngine, **settings: Any) -> WeightPush:
        common = {"probe": PROBE, "score": make_scorer(model, 64), "tolerance": 1e-3, "patience_s": 10.0}
        common |= {"timeout_s": 20.0} | settings
        if kind == "disk":
            return DiskPush(model, vllm, folder, **common)
        if kind == "lora":
            return LoraPush(model, vllm, folder, **common)
        assert wire is not None
        return NcclPush(model, vllm, open_channel=wire.open, **more, **common)

    return make


def cast(kind: str, model_dir: Path, n: int = 1) -> tuple[list[Any], Wire]:
    wire = Wire()
    if kind == "lora":
        return [LoraServer(model_dir) for _ in range(n)], wire
    if kind == "nccl":
        return [TransferServer(model_dir, wire) for _ in range(n)], wire
    return [VersionedServer(model_dir) for _ in range(n)], wire


KINDS = ["disk", "lora", "nccl"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_push_arrives_and_so_does_the_next(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = adapted(tiny_model_dir)
    servers, wire = cast(kind, tiny_model_dir, 2)

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        for version in (3, 4):
            await push.push(version)
            await push.push(version)  # nothing: they hold it
            assert push.report is not None and push.report.probe_gap < 1e-4 and push.report.bytes > 0
            assert push.report.lost == 0
            await push.verify()
            (sample,) = await vllm.generate(PROBE[0], Sampling(1.0, 1.0, 4), seed=1)
            assert sample.policy_version == vllm.policy_version == version
            move(model, version)

    pushes(servers, maker(kind, model, tmp_path / "push", wire), body)
    for server in servers:
        if kind == "lora":
            assert [b["lora_name"] for b in server.loads] == ["policy-v3", "policy-v4"]
            assert server.unloads == ["policy-v3"] and list(server.adapters) == ["policy-v4"]
        elif kind == "nccl":
            round_ = ["start", "update", "finish"]
            assert server.calls == ["init", *round_, *round_] and server.weight_version == "4"
            assert server.received == [name for name, _ in merged_weights(model)]
        else:
            assert server.reloads == server.resets == 2 and server.weight_version == "4"
    if kind == "lora":
        assert sorted(p.name for p in (tmp_path / "push").iterdir()) == ["policy-v3", "policy-v4"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_tensor_is_detected(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    servers, wire = cast(kind, tiny_model_dir, 2)
    servers[1].stale = {"model.layers.1.mlp.down_proj.weight"}

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        with pytest.raises(EngineMismatchError, match="weights stayed behind") as caught:
            await push.push(1)
        assert servers[1].url in str(caught.value) and push.version is None
        assert vllm.policy_version == 0

    pushes(servers, maker(kind, adapted(tiny_model_dir), tmp_path / "push", wire), body)


@pytest.mark.parametrize("kind", ["disk", "nccl"])
def test_a_server_that_names_another_version_is_refused(
    kind: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    (server,), wire = cast(kind, tiny_model_dir)

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        await push.push(1)
        server.weight_version = "7"
        with pytest.raises(EngineMismatchError, match="policy version 1.*holds version 7"):
            await push.verify()

    pushes([server], maker(kind, full(tiny_model_dir), tmp_path / "push", wire), body)


def test_a_server_without_an_adapters_version_refuses_requests_for_it(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    (server,), _ = cast("lora", tiny_model_dir)

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        await push.push(1)
        server.adapters.clear()
        with pytest.raises(Exception, match="status 404.*policy-v1"):
            await vllm.generate(PROBE[0], Sampling(1.0, 1.0, 4), seed=1)

    pushes([server], maker("lora", adapted(tiny_model_dir), tmp_path / "push"), body)


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_two_servers_is_killed_during_a_push(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """The push ends with the other one; the killed one gets the weights when it is back, before it is asked anything."""
    servers, wire = cast(kind, tiny_model_dir, 2)
    dead = servers[0]  # where requests of no session go first
    killed: list[Any] = []

    def kill(number: int, body: Any) -> Any:
        async def die() -> None:
            killed.append(asyncio.create_task(dead.stop()))
            await asyncio.sleep(30)

        return die() if not killed else None

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        await push.push(1)
        dead.rpc_fault = kill if kind != "lora" else lambda n, b: _abrupt(dead, killed)
        move(model, 2)
        await push.push(2)
        await asyncio.gather(*killed)
        assert push.report is not None and push.report.lost == 1 and push.report.probe_gap < 1e-4
        assert not vllm.pool.in_service(dead.url)
        await push.verify()
        dead.rpc_fault = lambda n, b: None
        await dead.start(dead.port)
        asked = len(dead.bodies)
        while len(dead.bodies) == asked:
            await vllm.generate(PROBE[0], Sampling(1.0, 1.0, 4), seed=1)
            await asyncio.sleep(0.02)
        await push.verify()
        assert vllm.pool.in_service(dead.url)
        await push.push(3)
        assert push.report.lost == 0

    model = adapted(tiny_model_dir)
    pushes(servers, maker(kind, model, tmp_path / "push", wire), body)
    assert kind != "nccl" or wire.aborted


def _abrupt(server: Any, killed: list[Any]) -> Any:
    """Stop the server and break the answer that is due."""
    if not killed:
        killed.append(asyncio.create_task(server.stop()))
        return web.Response(status=503)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_push_with_every_server_down_is_bounded_and_named(
    kind: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    servers, wire = cast(kind, tiny_model_dir, 2)

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        for server in servers:
            await server.stop()
        with pytest.raises(EngineDownError, match="took weights for 0.3 s") as caught:
            await push.push(1)
        assert all(s.url in str(caught.value) for s in servers) and push.version is None

    make = maker(kind, adapted(tiny_model_dir), tmp_path / "push", wire)
    pushes(servers, make, body, patience_s=0.3)


@pytest.mark.parametrize("kind", ["disk", "nccl"])
def test_a_push_that_hangs_ends_by_its_time_out(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    (server,), wire = cast(kind, tiny_model_dir)
    server.rpc_fault = lambda n, b: asyncio.sleep(60)

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        with pytest.raises(WeightPushError, match=r"policy version 1 was not pushed.*within 0\.5 s"):
            await push.push(1)

    pushes([server], maker(kind, full(tiny_model_dir), tmp_path / "push", wire), body, timeout_s=0.5)
    # A group that hung is given up, so that the thread that sends ends.
    assert kind != "nccl" or len(wire.aborted) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_push_that_is_refused_is_named(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    (server,), wire = cast(kind, tiny_model_dir)
    server.rpc_fault = lambda n, b: web.Response(status=400, text="no such thing")

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        with pytest.raises(WeightPushError, match="policy version 1.*status 400: no such thing") as caught:
            await push.push(1)
        assert server.url in str(caught.value)

    pushes([server], maker(kind, adapted(tiny_model_dir), tmp_path / "push", wire), body)


@pytest.mark.parametrize("kind", ["disk", "lora"])
@pytest.mark.parametrize("cause", ["full", "folder"])
def test_a_folder_that_does_not_take_the_weights_is_named_and_the_next_push_arrives(
    kind: str, cause: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server,), wire = cast(kind, tiny_model_dir)
    model, folder = adapted(tiny_model_dir), tmp_path / "push"

    def no_space(*_: Any, **__: Any) -> None:  # as safetensors says it
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        with monkeypatch.context() as broken:
            if cause == "full":
                broken.setattr("safetensors.torch.save_file", no_space)
                broken.setattr("peft.peft_model.safe_save_file", no_space)
            else:
                folder.write_text("a file where the folder should be")
            with pytest.raises(
                WeightPushError, match=r"version 1 .*cannot be written.*tutor\.engine\.push_folder"
            ):
                await push.push(1)
        assert push.version is None and push.report is None
        if cause == "folder":
            folder.unlink()
        await push.push(1)
        assert push.report is not None and push.report.probe_gap < 1e-3

    pushes([server], maker(kind, model, folder, wire), body)


def test_weight_transfer_waits_for_the_next_push_where_the_model_has_moved(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    servers, wire = cast("nccl", tiny_model_dir, 2)

    async def body(push: WeightPush, vllm: VllmEngine) -> None:
        await push.push(1)
        vllm.pool.lose(servers[0].url, "a test")
        before = len(servers[0].bodies)
        for _ in range(5):
            await vllm.generate(PROBE[0], Sampling(1.0, 1.0, 2), seed=1)
            await asyncio.sleep(0.02)
        assert len(servers[0].bodies) == before and not vllm.pool.in_service(servers[0].url)
        move(model, 5)
        await push.push(2)
        assert vllm.pool.in_service(servers[0].url) and servers[0].weight_version == "2"

    model = full(tiny_model_dir)
    pushes(servers, maker("nccl", model, tmp_path / "push", wire, model_waits=False), body)


def test_weight_transfer_without_vllm_or_a_gpu_says_so(tiny_model_dir: Path) -> None:
    model = full(tiny_model_dir)
    vllm = VllmEngine(HttpPool(["http://127.0.0.1:9"], FAST, role="tutor", ledger=Ledger()))
    with pytest.raises((MissingExtraError, ModelError), match=r"'vllm' extra|the trainer has none"):
        NcclPush(model, vllm, probe=PROBE, score=make_scorer(model, 64), tolerance=1e-3)


def test_an_adapter_push_needs_an_adapter(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"push is lora but tutor\.lora is not set"):
        recipe_of(
            tiny_model_dir,
            tmp_path,
            **{
                "tutor.lora": None,
                "tutor.engine": {"kind": "vllm", "urls": ["http://127.0.0.1:9"], "push": "lora"},
            },
        )


@pytest.mark.parametrize(
    ("push", "flags"),
    [
        ("lora", ["--enable-lora", "--max-lora-rank 8"]),
        ("nccl", ['--weight-transfer-config {"backend": "nccl"}']),
    ],
)
def test_the_server_is_started_for_the_push(
    push: str, flags: list[str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    served = {"kind": "vllm", "urls": ["http://127.0.0.1:9"], "push": push}
    recipe = recipe_of(tiny_model_dir, tmp_path, **{"tutor.engine": served})
    made = plan(recipe, "tutor", model_dir=str(tiny_model_dir))
    command = " ".join(made.command)
    assert all(flag in command for flag in flags)
    assert (made.env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1") == (push == "lora")
    disk = recipe_of(tiny_model_dir, tmp_path, **{"tutor.engine": served | {"push": "disk"}})
    assert not any(f.split()[0] in plan(disk, "tutor", model_dir=str(tiny_model_dir)).command for f in flags)
    wide = recipe_of(tiny_model_dir, tmp_path, **{"tutor.engine": served, "tutor.lora": {"r": 600}})
    if push == "lora":
        with pytest.raises(RecipeError, match="up to rank 512"):
            plan(wide, "tutor", model_dir=str(tiny_model_dir))


@pytest.mark.integration
def test_a_run_that_pushes_its_adapter(tiny_model_dir: Path, tmp_path: Path) -> None:
    server = LoraServer(tiny_model_dir)
    with InThread(server) as tutor, InThread(Loopback(speak)) as student:
        served = engine(tutor, "vllm") | {"push": "lora"}
        changes = {"tutor.engine": served, "tutor.dtype": "float32", "training.staleness": 1}
        run = loop.run(recipe_of(tiny_model_dir, tmp_path, student=engine(student), **changes)).folder
    assert_on_policy(run)  # a checkpoint after each step: all are played afresh
    assert {b["model"] for b in server.bodies} == {"policy-v0", "policy-v1", "policy-v2"}
    assert steps(run) == [2, 3] and parts.metrics_of(run)[-1]["push/servers_lost"] == 0


@pytest.mark.integration
def test_a_run_whose_only_server_is_killed_in_a_push_goes_on_when_it_is_back(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    server = LoraServer(tiny_model_dir)
    thread = InThread(server)
    bounced = threading.Event()

    def bounce(number: int, body: Any) -> Any:
        if number == 2 and not bounced.is_set():
            bounced.set()
            threading.Thread(target=lambda: (thread.stop(), thread.start())).start()
        return None

    server.rpc_fault = bounce
    with thread as tutor, InThread(Loopback(speak)) as student:
        served = engine(tutor, "vllm", outage_limit_s=20.0) | {"push": "lora"}
        changes = {"tutor.engine": served, "tutor.dtype": "float32"}
        run = loop.run(recipe_of(tiny_model_dir, tmp_path, student=engine(student), **changes)).folder
    assert bounced.is_set() and [r["rollout/excluded_share"] for r in parts.metrics_of(run)] == [0, 0, 0]
    assert re.search(r"policy-v2", str(server.bodies[-1]["model"]))

"""vLLM-like servers for weight pushes that need more than a folder: adapters by name, and the weight-transfer engine's routes."""

from __future__ import annotations

import asyncio
import queue
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from maieutic.engines.hf import HfEngine
from token_server import TokenServer


def move(model: Any, seed: int) -> None:
    """An update, as far as a push is concerned: every weight that is trained changes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)


class VersionedServer(TokenServer):
    """Names the version of its weights, as vLLM does from 0.31 on; a restart forgets it."""

    async def start(self, port: int = 0) -> None:
        self.weight_version = "default"
        await super().start(port)

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/update_weight_version", self._set_version)

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True})


class LoraServer(TokenServer):
    """Takes adapters by name and path; a request that names none that it holds is refused with 404."""

    def __init__(self, model_dir: Path, **kw: Any) -> None:
        super().__init__(model_dir, **kw)
        self.loads: list[dict[str, Any]] = []
        self.unloads: list[str] = []

    async def start(self, port: int = 0) -> None:
        await super().start(port)
        self.adapters: dict[str, Any] = {}

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)

    async def _load(self, request: web.Request) -> web.StreamResponse:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        body = await request.json()
        self.loads.append(body)
        answer = self.rpc_fault(len(self.loads), body)
        if answer is not None:
            return answer
        base = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, body["lora_path"]).merge_and_unload().eval()
        state = model.state_dict()
        with torch.no_grad():
            for name in self.stale:
                state[name].copy_(self.model.state_dict()[name])
        self.adapters[body["lora_name"]] = model.requires_grad_(False)
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def _unload(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json())["lora_name"]
        self.unloads.append(name)
        return web.Response(status=200 if self.adapters.pop(name, None) is not None else 404)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        named = (await request.json())["model"]
        if named not in self.adapters:
            return web.Response(status=404, text=f"The model `{named}` does not exist.")
        if self.model is not self.adapters[named]:
            self.model = self.adapters[named]
            self.engine = HfEngine(self.model, pad_id=0)
        return await super()._completions(request)


class Wire:
    """What stands in for NCCL: a queue for each (address, port) that a server was told to join."""

    def __init__(self) -> None:
        self.queues: dict[int, queue.Queue[Any]] = {}
        self.aborted: list[int] = []
        self.most_at_once = 0

    def queue(self, port: int) -> queue.Queue[Any]:
        return self.queues.setdefault(port, queue.Queue(maxsize=1))

    def open(self, address: str, port: int, world_size: int) -> TrainerEnd:
        assert address == "127.0.0.1" and world_size == 2
        return TrainerEnd(self, port)


class TrainerEnd:
    def __init__(self, wire: Wire, port: int) -> None:
        self.wire, self.port, self.over = wire, port, False

    def send(self, tensor: torch.Tensor) -> None:
        while not self.over:
            try:
                self.wire.queue(self.port).put(tensor.clone(), timeout=0.05)
                return
            except queue.Full:
                continue
        raise ConnectionError("the group was given up")

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        self.over = True
        self.wire.aborted.append(self.port)


class TransferServer(VersionedServer):
    """vLLM's weight-transfer routes, in the order that it demands: init, start, update, finish."""

    def __init__(self, model_dir: Path, wire: Wire, **kw: Any) -> None:
        super().__init__(model_dir, **kw)
        self.wire = wire
        self.calls: list[str] = []
        self.received: list[str] = []

    async def start(self, port: int = 0) -> None:
        self.group: int | None = None
        await super().start(port)

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_get("/get_world_size", self._world)
        for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights"):
            app.router.add_post(f"/{name}", getattr(self, f"_{name}"))
        app.router.add_post("/finish_weight_update", self._finish)

    async def _world(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        assert info["rank_offset"] == 1 and info["world_size"] == 2 and info["packed"] is False
        self.group = info["master_port"]
        self.calls.append("init")
        return web.json_response({"message": "Weight transfer initialized"})

    async def _start_weight_update(self, request: web.Request) -> web.Response:
        if self.group is None:
            return web.Response(status=500, text="not initialised")
        self.calls.append("start")
        return web.json_response({})

    async def _update_weights(self, request: web.Request) -> web.StreamResponse:
        info = (await request.json())["update_info"]
        self.calls.append("update")
        self.received = []
        state = self.model.state_dict()
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            answer = self.rpc_fault(len(self.received) + 1, info)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is not None:
                return answer
            assert self.group is not None
            tensor = await asyncio.to_thread(self.wire.queue(self.group).get, True, 20)
            assert str(tensor.dtype) == f"torch.{dtype}" and list(tensor.shape) == shape
            self.received.append(name)
            if name in state and name not in self.stale:
                with torch.no_grad():
                    state[name].copy_(tensor)
        return web.json_response({"message": "Weights updated"})

    async def _finish(self, request: web.Request) -> web.Response:
        self.calls.append("finish")
        self.weight_version = (await request.json())["weight_version"]
        return web.json_response({})

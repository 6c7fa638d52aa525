"""A vLLM-like server on loopback with a real (tiny) model behind it: token ids in and out, log-probs, weight reloads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loopback import Fault, Loopback
from maieutic.engines.base import Sampling
from maieutic.engines.hf import HfEngine


class TokenServer(Loopback):
    """``fault(number, body)`` is asked for each request that generates, ``rpc_fault`` for each ``/collective_rpc``.

    As with the real one, a restart forgets what was pushed. ``stale``: names of tensors that reloads leave as they were.
    """

    def __init__(self, model_dir: Path, fault: Fault = lambda number, body: None) -> None:
        super().__init__(fault=fault)
        self.model_dir = model_dir
        self.rpc_fault: Fault = lambda number, body: None
        self.stale: set[str] = set()
        self.served: dict[int, list[int]] = {}
        """Ids that were sampled, by the number of the request."""
        self.reloads = self.resets = 0

    async def start(self, port: int = 0) -> None:
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()
        self.model = model.requires_grad_(False)
        self.engine = HfEngine(self.model, pad_id=0)
        await super().start(port)

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/collective_rpc", self._rpc)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_get("/v1/models", self._models)

    async def _models(self, request: web.Request) -> web.Response:
        limit = self.model.config.max_position_embeddings
        return web.json_response({"data": [{"id": "tiny", "max_model_len": limit}]})

    async def _rpc(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.reloads += 1
        answer = self.rpc_fault(self.reloads, body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer is not None:
            return answer
        assert body["method"] == "reload_weights"
        new = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        state = self.model.state_dict()
        with torch.no_grad():
            for name, value in new.items():
                if name in state and name not in self.stale:
                    state[name].copy_(value)
        return web.json_response({"results": [None]})

    async def _reset(self, request: web.Request) -> web.Response:
        self.resets += 1
        await self.engine.new_step(self.resets)
        return web.Response()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "prompt_logprobs" in body:
            return web.json_response({"choices": [{"prompt_logprobs": self._scores(body["prompt"])}]})
        self.bodies.append(body)
        number = len(self.bodies)
        answer = self.fault(number, body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer is not None:
            return answer
        sampling = Sampling(body["temperature"], body["top_p"], body["max_tokens"])
        samples = await self.engine.generate(
            body["prompt"], sampling, seed=body["seed"], n=body["n"], stop_ids=body["stop_token_ids"]
        )
        self.served[number] = list(samples[0].ids)
        choices = [
            {
                "index": i,
                "token_ids": s.ids,
                "prompt_token_ids": body["prompt"] if body.get("return_token_ids") else None,
                "logprobs": {"token_logprobs": s.logprobs},
                "finish_reason": s.finish_reason,
            }
            for i, s in enumerate(samples)
        ]
        return web.json_response({"choices": choices, "usage": {"prompt_tokens": len(body["prompt"])}})

    def _scores(self, ids: list[int]) -> list[Any]:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        logp = torch.log_softmax(logits, -1)
        return [None, *({str(t): {"logprob": float(logp[i, t])}} for i, t in enumerate(ids[1:]))]

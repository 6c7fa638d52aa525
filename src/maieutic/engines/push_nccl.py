"""Weight push ``nccl``: from the trainer's GPU into the servers' GPUs, by vLLM's weight-transfer engine.

The server needs ``--weight-transfer-config '{"backend": "nccl"}'`` and ``VLLM_SERVER_DEV_MODE=1`` (``maieutic serve tutor`` sets
both); the trainer needs vLLM in its own environment, whose communicator the servers speak. Every server has a group of its own
with the trainer as rank 0 and is served in turn, so that one that dies in mid-transfer takes no other with it. Parameters travel
one at a time, adapters merged.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch

from maieutic.engines.push import WeightPush
from maieutic.engines.vllm import VllmEngine
from maieutic.engines.weights import merged_weights
from maieutic.errors import EngineError, MissingExtraError, ModelError, WeightPushError

T = TypeVar("T")


class Channel(Protocol):
    """The trainer's end of one server's group. Its calls block, and are made in a thread."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send one whole tensor to every worker of the group."""
        ...

    def finish(self) -> None:
        """Return when everything sent has left."""
        ...

    def abort(self) -> None:
        """Give the group up, whatever it is waiting for."""
        ...


Open = Callable[[str, int, int], Channel]
"""(address, port, world size) → the trainer's end; returns when all workers of the group have joined at that address."""


class NcclPush(WeightPush):
    """Push ``nccl``.

    Args:
        model: the policy with whole weights (under FSDP2 and ZeRO-3 the copy that is gathered parameter by parameter).
        open_channel: how a group is joined; None: with vLLM's own communicator on the current GPU.
        model_waits: the model does not change between pushes while episodes are played, so that a server that was restarted in
            the middle of a rollout can be sent the weights once more; otherwise it stays out until the next push.
        settings: see :class:`WeightPush`.
    """

    def __init__(
        self,
        model: Any,
        engine: VllmEngine,
        *,
        open_channel: Open | None = None,
        model_waits: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(engine, **settings)
        self._model, self._model_waits = model, model_waits
        self._open = open_channel if open_channel is not None else _vllm_channel()
        self._channels: dict[str, Channel] = {}
        self._in_turn = asyncio.Lock()
        self._info: dict[str, list[Any]] = {}

    def _stage(self, version: int) -> int:
        weights = [(name, t.dtype, list(t.shape)) for name, t in merged_weights(self._model)]
        self._info = {
            "names": [name for name, _, _ in weights],
            "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in weights],
            "shapes": [shape for _, _, shape in weights],
        }
        return sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in weights)

    async def restore(self, url: str) -> None:
        """As :meth:`WeightPush.restore`; EngineError where the model has moved on since the push."""
        if self.version is not None and not self._model_waits:
            raise EngineError(f"{self._engine.pool.role}: {url} gets weights again with the next push")
        channel = self._channels.pop(url, None)  # what answers there now is in no group
        if channel is not None:
            channel.abort()
        await super().restore(url)

    async def _load(self, url: str, version: int) -> None:
        pool, limit = self._engine.pool, self._timeout_s
        async with self._in_turn:
            try:
                if url not in self._channels:
                    self._channels[url] = await self._join(url)
                channel = self._channels[url]
                await pool.post_one(url, "/start_weight_update", {}, timeout_s=limit)
                receive = pool.post_one(url, "/update_weights", {"update_info": self._info}, timeout_s=limit)
                await self._both(url, receive, lambda: self._send(channel))
                await pool.post_one(
                    url, "/finish_weight_update", {"weight_version": str(version)}, timeout_s=limit
                )
                await pool.post_one(url, "/reset_prefix_cache", {}, timeout_s=limit)
            except BaseException:  # the group is in an unknown state: the next try opens another
                channel_or_none = self._channels.pop(url, None)
                if channel_or_none is not None:
                    channel_or_none.abort()
                raise

    def _send(self, channel: Channel) -> None:
        for sent, (name, tensor) in enumerate(merged_weights(self._model)):
            declared = tuple(self._info[key][sent] for key in ("names", "dtype_names", "shapes"))
            found = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            if declared != found:
                raise ModelError(f"weights changed during a push: {declared} was announced, {found} came")
            channel.send(tensor)
        channel.finish()

    async def _join(self, url: str) -> Channel:
        pool, limit = self._engine.pool, self._timeout_s
        status, raw = await pool.get("/get_world_size", url=url)
        if status != 200:
            raise EngineError(f"{pool.role}: {url}/get_world_size: status {status or 'no answer'}")
        try:
            world = 1 + int(json.loads(raw)["world_size"])
        except (ValueError, KeyError, TypeError):
            raise EngineError(f"{pool.role}: {url}/get_world_size gave no number") from None
        address = _address_towards(url)
        with socket.socket() as s:
            s.bind((address, 0))
            port = int(s.getsockname()[1])
        info = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
            "packed": False,
        }
        join = pool.post_one(url, "/init_weight_transfer_engine", {"init_info": info}, timeout_s=limit)
        return await self._both(url, join, lambda: self._open(address, port, world))

    async def _both(self, url: str, theirs: Any, ours: Callable[[], T]) -> T:
        """The server's part and the trainer's, which wait for each other; the first error of either ends both."""
        server = asyncio.ensure_future(theirs)
        trainer = _in_thread(ours)
        done, waiting = await asyncio.wait(
            (server, trainer), timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in waiting:
            task.cancel()  # the thread stays behind, until its group is given up
        errors = [error for task in done if (error := task.exception()) is not None]
        for error in errors:
            if isinstance(error, EngineError | ModelError):
                raise error
        if errors:
            raise WeightPushError(
                f"{self._engine.pool.role}: {url}: the transfer broke: {type(errors[0]).__name__}: {errors[0]}"
            )
        if waiting:
            who = "the server" if server in waiting else "the trainer's side"
            raise WeightPushError(
                f"{self._engine.pool.role}: {url}: the transfer of weights did not end within {self._timeout_s:g} s ({who} still "
                "waits); see the server's log, tutor.engine.push_timeout_s, and whether GPUs of both can reach each other"
            )
        return trainer.result()


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Like ``asyncio.to_thread``, but a call that never returns keeps neither the loop nor the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as failure:
            error = failure
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    threading.Thread(target=work, name="weight-push", daemon=True).start()
    return future


def _address_towards(url: str) -> str:
    """This machine's address as the server at ``url`` sees it (nothing is sent)."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        except OSError as error:
            raise EngineError(f"{url} cannot be reached: {error}") from None
        return str(s.getsockname()[0])


def _vllm_channel() -> Open:
    try:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
    except ImportError:
        raise MissingExtraError("vllm", "vllm") from None
    if not torch.cuda.is_available():
        raise ModelError("push: nccl goes from GPU to GPU, and the trainer has none: take push: disk or lora")
    device = torch.device("cuda", torch.cuda.current_device())

    class VllmChannel:
        def __init__(self, address: str, port: int, world_size: int) -> None:
            torch.cuda.set_device(device)
            group = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=world_size)
            self._group: Any = PyNcclCommunicator(group, device=device)

        def send(self, tensor: torch.Tensor) -> None:
            whole = tensor.to(device).contiguous()
            self._group.broadcast(whole, src=0, stream=torch.cuda.current_stream(device))

        def finish(self) -> None:
            torch.cuda.current_stream(device).synchronize()

        def abort(self) -> None:
            destroy = getattr(self._group, "destroy", None)
            if destroy is not None:
                destroy()

    return VllmChannel

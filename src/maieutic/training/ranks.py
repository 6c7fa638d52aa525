"""What one rank does for all: a call on rank 0 whose result, error or cancellation every rank learns of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from maieutic.errors import MaieuticError
from maieutic.training.signals import Cancelled, StopSignals

T = TypeVar("T")


class PeerFailed(MaieuticError):
    """Another rank failed (rank 0, as a rule); its own error is in its log."""


def on_every(function: Callable[[], T], accelerator: Any) -> T:
    """Call ``function`` on every rank; if it fails on any, its error is raised there and :class:`PeerFailed` on the others.

    Every rank must make the call at the same point, and ``function`` may call no collective.
    """
    if accelerator.num_processes == 1:
        return function()
    from accelerate.utils import gather_object

    error: Exception | None = None
    try:
        result = function()
    except Exception as failure:
        error = failure
    told = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text is not None:
            raise PeerFailed(f"rank {rank} stopped: {text}")
    return result


def on_main(function: Callable[[], T], accelerator: Any, signals: StopSignals, *, share: bool = True) -> T:
    """Call ``function`` on rank 0 and give its result to every rank (``share``: else the others get None).

    If it fails there, its error is raised there and :class:`PeerFailed` elsewhere, so that no rank waits for ever; a
    cancelled rollout is :class:`Cancelled` everywhere. Every rank must make the call at the same point.
    """
    if accelerator.num_processes == 1:
        return function()
    from accelerate.utils import broadcast_object_list

    message: list[Any] = [None]
    error: BaseException | None = None
    result: Any = None
    if accelerator.is_main_process:
        try:
            result = function()
            message = [("ok", result if share else None)]
        except Cancelled as cancelled:
            error, message = cancelled, [("cancelled", signals.received)]
        except Exception as failure:
            error, message = failure, [("failed", f"{type(failure).__name__}: {failure}")]
    broadcast_object_list(message, from_process=0)
    if error is not None:
        raise error
    kind, value = message[0]
    if kind == "cancelled":
        signals.received = value
        raise Cancelled
    if kind == "failed":
        raise PeerFailed(f"rank 0 stopped: {value}")
    answer: T = result if accelerator.is_main_process else value
    return answer

"""Stop signals: all ranks act on the same ones, at the same point."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import torch

from maieutic.training.signals import StopSignals


def test_a_signal_that_comes_while_ranks_agree_waits_for_the_next_time() -> None:
    signals = StopSignals()

    def gather(mine: torch.Tensor) -> torch.Tensor:
        signals.received = int(signal.SIGUSR1)  # it arrives after this rank's number was read
        return torch.stack([mine[0], torch.tensor(0)])

    accelerator = SimpleNamespace(num_processes=2, device="cpu", gather=gather)
    # The other rank was told of nothing and goes on; stopping here would leave both waiting for each other for ever.
    assert signals.agree(accelerator) is None
    assert signals.agree(accelerator) == signal.SIGUSR1


def test_a_signal_that_another_rank_received_counts_here() -> None:
    signals = StopSignals()
    accelerator = SimpleNamespace(
        num_processes=2, device="cpu", gather=lambda mine: torch.stack([mine[0], torch.tensor(15)])
    )
    assert signals.agree(accelerator) == signal.SIGTERM and signals.received == signal.SIGTERM


def test_a_signal_while_a_rollout_in_another_thread_ends_is_noted_all_the_same() -> None:
    """Its loop may be closed by then, or the task gone between two looks: the handler must raise in nobody's code."""
    signals = StopSignals()
    loop = asyncio.new_event_loop()
    signals._task = SimpleNamespace(cancel=lambda: None)  # type: ignore[assignment]
    signals._loop = loop
    loop.close()
    signals._handle(signal.SIGUSR1, None)
    assert signals.received == signal.SIGUSR1

    class Ends(StopSignals):
        """The other thread takes the task away right after the first look at it."""

        looks = 0

        @property
        def _task(self) -> Any:
            self.looks += 1
            return SimpleNamespace(cancel=lambda: None) if self.looks == 1 else None

        @_task.setter
        def _task(self, value: Any) -> None: ...

    ending = Ends()
    ending._loop = asyncio.new_event_loop()
    ending._handle(signal.SIGTERM, None)
    ending._loop.close()
    assert ending.received == signal.SIGTERM


def test_one_process_asks_nobody() -> None:
    signals = StopSignals()
    accelerator = SimpleNamespace(num_processes=1)
    assert signals.agree(accelerator) is None
    signals.received = int(signal.SIGTERM)
    assert signals.agree(accelerator) == signal.SIGTERM

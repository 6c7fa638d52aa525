"""How far long work over many items has come, at what pace and cost, as one line for people."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maieutic.engines.usage import Ledger


def eta(seconds: float) -> str:
    """``1:02:03``-style time."""
    minutes, s = divmod(round(seconds), 60)
    h, m = divmod(minutes, 60)
    return f"{h}:{m:02d}:{s:02d}"


@dataclass(slots=True)
class Headway:
    """Where resumable work over ``total`` items stands; ``eta_s`` counts only items that this process had to ask for."""

    total: int
    ledger: Ledger
    done: int = 0
    fresh: int = 0
    """Items done that needed a request of this process."""
    started: float = field(default_factory=time.monotonic)

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the pace so far; None before the first fresh item."""
        if not self.fresh:
            return None
        return (time.monotonic() - self.started) / self.fresh * (self.total - self.done)

    def counts(self) -> str:
        """What is done, in the words of the work."""
        return f"{self.done} of {self.total}"

    def line(self) -> str:
        """One line for people."""
        roles = self.ledger.roles.values()
        tokens = sum(u.prompt_tokens + u.completion_tokens for u in roles)
        left = "?" if self.eta_s is None else eta(self.eta_s)
        return (
            f"{self.counts()}; {sum(u.requests for u in roles)} requests, {tokens:,} tokens, "
            f"${self.ledger.usd:.2f}; ETA {left}"
        )


class Teller:
    """A line of progress on stderr: kept up to date on a terminal, else one at every twentieth of the items."""

    def __init__(self) -> None:
        self._live, self._last = sys.stderr.isatty(), -1

    def __call__(self, state: Headway) -> None:
        if self._live:
            end = "\n" if state.done == state.total else ""
            print(f"\r\x1b[K{state.line()}", end=end, file=sys.stderr, flush=True)
            return
        part = 20 * state.done // max(state.total, 1)
        if part != self._last:
            self._last = part
            print(state.line(), file=sys.stderr, flush=True)

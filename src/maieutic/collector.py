"""Python's garbage collector during a rollout: young objects only.

A rollout makes some hundred thousand long-lived lists (ids, masks, log-probs). A full collection looks through all of them, and
through models and libraries, for a tenth of a second and more, again and again while they grow, and frees nothing: cycles are
young. What does grow old in a cycle is freed after the rollout.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**30
_lock = threading.Lock()
_open: list[tuple[int, int, int]] = []
"""The thresholds as they were before the first of the spans that are open, once for each of these."""


@contextmanager
def young_only() -> Iterator[None]:
    """No full collection until the last of the spans that are open, in whatever thread, has ended."""
    with _lock:
        before = _open[0] if _open else gc.get_threshold()
        _open.append(before)
        gc.set_threshold(before[0], before[1], _NEVER)
    try:
        yield
    finally:
        with _lock:
            _open.pop()
            if not _open:
                gc.set_threshold(*before)

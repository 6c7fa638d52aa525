"""``accelerate launch -m maieutic.slurm.rank RECIPE [key=value …] --resume auto``: one trainer process of a job.

It is :mod:`maieutic.train` with two files in ``$MAIEUTIC_STATE``: ``rank-N.pid``, by which the node's :mod:`maieutic.slurm.trainer`
passes signals on (the launcher between them does not), and ``rank-N.exit``, the exit code. A stop that was asked for ends with
status 0 for the launcher: at any other it would kill the ranks that are still writing the checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from maieutic.train import leave
from maieutic.train import main as train
from maieutic.training.signals import EXIT_CODES, StopSignals

STATE = "MAIEUTIC_STATE"
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel for ``number`` when the parent dies: no process may outlive a launcher that was killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))


def publish(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def main(argv: Sequence[str]) -> int:
    """Train, leave the exit code in its file, and return what the launcher should see."""
    die_with_parent()
    state, rank = Path(os.environ[STATE]), int(os.environ.get("RANK", "0"))
    with StopSignals() as signals:
        # From here on a signal is noted; before this file exists none is sent.
        publish(state / f"rank-{rank}.pid", str(os.getpid()))
        try:
            code = train(argv, signals=signals)
        except Exception:
            traceback.print_exc()
            code = 1
    publish(state / f"rank-{rank}.exit", str(code))
    return 0 if code in EXIT_CODES.values() else code


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

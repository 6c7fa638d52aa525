"""The parent's end of one grading worker: start, ask with a deadline, kill."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from maieutic.errors import GraderError

_WORKER = Path(__file__).with_name("worker.py")


class WorkerFault(Exception):
    """The worker gave no verdict (too slow, dead); it must be killed and replaced."""


class WorkerProcess:
    """One worker. Used by one thread at a time, except `kill`, which any thread may call."""

    def __init__(self, check: str, warm: list[str], timeout_s: float) -> None:
        """Start the process; it is not ready before `wait_ready`.

        Args:
            check: import path `module:function` of `(answer: str, gold: str) -> bool`.
            warm: modules that the worker imports before it says ready, so that no item pays for them.
            timeout_s: the item limit, in seconds; the worker's own alarm goes off a little later.
        """
        # Its own session: Ctrl-C in the terminal must reach the trainer, which still needs its graders to finish.
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._buffer = b""
        self._setup = {
            "check": check,
            "warm": warm,
            "sys_path": [str(p) for p in sys.path],
            "alarm_s": timeout_s + 2.0,
        }

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self, limit_s: float) -> None:
        """Set the worker up. Raises WorkerFault (slow or dead) or GraderError (the check cannot be imported)."""
        reply = self._exchange(self._setup, limit_s)
        if "failed" in reply:
            raise GraderError(
                f"The grading check {self._setup['check']!r} cannot be imported: {reply['failed']}. "
                "Name it as module:function, importable from the trainer's import path."
            )

    def ask(self, answer: str, gold: str, limit_s: float) -> dict[str, Any]:
        """One check: `{"equal": bool}` or `{"error": str}`. Raises WorkerFault after `limit_s` or on its death."""
        return self._exchange({"answer": answer, "gold": gold}, limit_s)

    def _exchange(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        try:
            self._in.write((json.dumps(message) + "\n").encode())
            poll = select.poll()  # select.select fails above descriptor 1023
            poll.register(self._out, select.POLLIN)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not poll.poll(left * 1000):
                    raise WorkerFault(f"no verdict within {limit_s:g} s")
                chunk = os.read(self._out.fileno(), 65536)
                if not chunk:
                    raise WorkerFault(f"the grading worker died ({self._death()})")
                self._buffer += chunk
        except (BrokenPipeError, ConnectionResetError) as e:
            raise WorkerFault(f"the grading worker died ({self._death()})") from e
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "its output closed"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process at once and reap it. The pipes stay open for a thread that may still be reading."""
        self._process.kill()
        self._process.wait()

    def dispose(self) -> None:
        """Kill, reap and close the pipes; only for the thread that owns the worker."""
        self.kill()
        self._in.close()
        self._out.close()

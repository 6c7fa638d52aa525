"""Nothing is left running when this process is killed without a chance to clean up (SIGKILL, out of memory)."""

from __future__ import annotations

import subprocess

_SCRIPT = """cat >/dev/null; kill -s TERM -- "-$1"; n=0
while kill -s 0 -- "-$1" && [ "$n" -lt "$2" ]; do sleep 1; n=$((n + 1)); done; kill -s KILL -- "-$1"
"""


class OrphanGuard:
    """Ends a process group when this process has gone: a shell waits at a pipe of which only this process holds the other end.

    ``group``: id of the process group. ``grace_s``: seconds between SIGTERM and SIGKILL. Call :meth:`release` before the group is
    ended in the ordinary way, so that a later group of the same number is safe.
    """

    def __init__(self, group: int, grace_s: int = 10) -> None:
        self._shell = subprocess.Popen(
            ["sh", "-c", _SCRIPT, "orphan-guard", str(group), str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """Leave the group alone from now on; safe to call twice."""
        self._shell.kill()
        self._shell.wait()
        assert self._shell.stdin is not None
        self._shell.stdin.close()

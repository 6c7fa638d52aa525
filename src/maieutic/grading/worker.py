"""The process that runs one check after another, until its standard input closes.

Started by file path as a plain program (never by fork: the parent holds threads and perhaps a GPU), so this file
imports the standard library alone. Protocol, one JSON object a line: the first line in names the check and the
import path, the first line out says ready; after that one `{answer, gold}` in, one `{equal}` or `{error}` out.

No worker outlives its parent: an idle one reads the end of its input, a busy one is ended by its own alarm, whose
default action the kernel carries out even while the interpreter is stuck inside one long multiplication.
"""

import importlib
import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Serve checks on standard input and output."""
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    # Whatever the check prints must not land in the protocol.
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    line = requests.readline()
    if not line:
        return
    setup = json.loads(line)
    sys.path[:] = setup["sys_path"]
    # When memory runs out, the kernel should take the expression that eats it and not the training process.
    if os.path.exists("/proc/self/oom_score_adj"):
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")
    try:
        module, _, name = setup["check"].partition(":")
        check = getattr(importlib.import_module(module), name)
        for warm in setup["warm"]:
            importlib.import_module(warm)
    except Exception as e:
        reply({"failed": f"{type(e).__name__}: {e}"})
        return
    # The trainer may ignore or block signals, and children inherit that; the alarm must be able to kill.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    reply({"ready": True})

    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, setup["alarm_s"])
        try:
            answer: dict[str, Any] = {"equal": bool(check(request["answer"], request["gold"]))}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(answer)


if __name__ == "__main__":
    main()

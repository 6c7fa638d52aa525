"""``python -m maieutic.slurm.trainer``: the trainers of one node of a job, through ``accelerate launch``.

One task a node runs this. The first node chooses the port on which all meet and publishes it in the job's state folder; a port
that was taken in the meantime ends the attempt with a mark, and the job tries another. Signals are for the ranks, which write the
checkpoint: ``accelerate launch`` between them and SLURM would die of SIGUSR1, and at SIGTERM gives them 30 s, so it ignores both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from maieutic.serve import free_port
from maieutic.slurm.errors import SlurmError
from maieutic.slurm.rank import STATE, die_with_parent, publish

PORT_TAKEN = "port-taken"
"""File of an attempt that another port may save."""
_TAKEN = re.compile(r"EADDRINUSE|address already in use|another process is utilizing", re.IGNORECASE)
_MEETING_S = 300.0


def _as_launcher() -> None:
    """In the launcher before it starts: it dies with this process, its ranks with it, and of no signal that is meant for them."""
    die_with_parent()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; what follows ``--`` is passed to the training."""
    parser = argparse.ArgumentParser(prog="python -m maieutic.slurm.trainer")
    parser.add_argument(
        "--state", type=Path, required=True, help="folder of this attempt, shared by all nodes"
    )
    parser.add_argument("--head", required=True, help="name of the first node")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True, help="of each node")
    parser.add_argument("--port", type=int, default=0, help="wanted port; 0: a free one")
    parser.add_argument("--config", help="accelerate's configuration file")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("training", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    given.training = given.training[1:] if given.training[:1] == ["--"] else given.training
    return given


def command(given: argparse.Namespace, machine: int, port: int) -> list[str]:
    """What is launched on node number ``machine``."""
    total = given.nodes * given.processes
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    if given.config:
        words += ["--config_file", given.config]
    else:
        words += ["--mixed_precision", "no", "--dynamo_backend", "no"]
        words += ["--multi_gpu"] if total > 1 else []
    words += ["--num_machines", str(given.nodes), "--num_processes", str(total)]
    if total > 1:
        words += ["--machine_rank", str(machine), "--main_process_ip", given.head]
        words += ["--main_process_port", str(port), "--rdzv_backend", "static"]
    return [*words, "-m", "maieutic.slurm.rank", *given.training]


def meet(given: argparse.Namespace, machine: int) -> int:
    """The port of the meeting point: chosen on the first node, read on the others.

    Raises:
        SlurmError: the first node did not publish it in time.
    """
    file = given.state / "meeting.json"
    if machine == 0:
        port = int(given.port or free_port("0.0.0.0"))
        publish(file, json.dumps({"host": given.head, "port": port}))
        return port
    deadline = time.monotonic() + _MEETING_S
    while True:
        try:
            return int(json.loads(file.read_text(encoding="utf-8"))["port"])
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise SlurmError(
                    f"no {file} after {_MEETING_S:g} s: is {given.head} up, and is this folder shared by all nodes?"
                ) from None
            time.sleep(0.2)


class NodeTrainers:
    """The launcher on this node and its ranks."""

    def __init__(self, given: argparse.Namespace, machine: int) -> None:
        self.state: Path = given.state
        self.ranks = range(machine * given.processes, (machine + 1) * given.processes)
        self.asked: list[int] = []
        self.said: deque[str] = deque(maxlen=400)
        self._told: set[tuple[int, int]] = set()

    def run(self, words: Sequence[str], environment: dict[str, str]) -> int:
        """Start, pass signals on, and return the exit status of the launcher."""
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_as_launcher,
        )
        copying = threading.Thread(target=self._copy, args=(process,), daemon=True)
        copying.start()
        while (code := process.poll()) is None:
            self._pass_on()
            time.sleep(0.1)
        copying.join(10.0)
        return code

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)

    def _pass_on(self) -> None:
        """Each signal once to each rank that is there; one that starts later gets it later."""
        for number in dict.fromkeys(self.asked):
            for rank in self.ranks:
                if (number, rank) in self._told or (self.state / f"rank-{rank}.exit").exists():
                    continue
                try:
                    pid = int((self.state / f"rank-{rank}.pid").read_text(encoding="utf-8"))
                    self._told.add((number, rank))
                    os.kill(pid, number)
                except FileNotFoundError:
                    continue
                except ProcessLookupError:
                    pass

    def _copy(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append(line)
            sys.stderr.write(line)
            sys.stderr.flush()

    def codes(self) -> list[int]:
        """Exit codes of this node's ranks, of those that left one."""
        files = [self.state / f"rank-{rank}.exit" for rank in self.ranks]
        return [int(f.read_text(encoding="utf-8")) for f in files if f.exists()]

    @property
    def port_was_taken(self) -> bool:
        """The launcher could not listen, and no rank had begun."""
        begun = any((self.state / f"rank-{rank}.pid").exists() for rank in self.ranks)
        return not begun and any(_TAKEN.search(line) for line in self.said)


def main(argv: Sequence[str]) -> int:
    """Exit status of this node: 0 also for a stop that was asked for (its code stands in ``rank-N.exit``)."""
    given = parse(argv)
    machine = int(os.environ.get("SLURM_PROCID", "0"))
    try:
        given.state.mkdir(parents=True, exist_ok=True)
        port = meet(given, machine)
    except OSError as error:
        print(f"SlurmError: {given.state} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    except SlurmError as error:
        print(f"SlurmError: {error}", file=sys.stderr, flush=True)
        return 1
    # Without this torch's agent would take SIGTERM and SIGINT for itself again.
    environment = {**os.environ, STATE: str(given.state), "PET_SIGNALS_TO_HANDLE": "SIGHUP,SIGQUIT"}
    if given.cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    node = NodeTrainers(given, machine)
    code = node.run(command(given, machine, port), environment)
    if code == 0:
        return 0
    if node.port_was_taken:
        publish(given.state / PORT_TAKEN, str(port))
    return max([c for c in node.codes() if c not in (85, 130, 143)], default=0) or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

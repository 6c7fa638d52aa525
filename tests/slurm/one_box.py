"""A real SLURM on this machine for tests: munged, slurmctld and a few slurmd, without systemd, cgroups or accounting.

Every node has this machine's network and a name of its own (an address of 127/8). All of it lies in one folder, and nothing of it
runs after :meth:`OneBox.stop`. Needs root, and the packages ``slurmctld slurmd slurm-client munge``.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_MARK = "# maieutic-one-box"

CONFIG = """\
ClusterName=onebox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# How long a credential lives is also how long a requeued job waits.
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/ctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/ctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
# Nodes claim more cores than the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
KillWait=5
MinJobAge=600
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=2,sched_min_interval=0
JobRequeue=1
{requeue_exit}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{preempt_signal}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no SLURM here, or None."""
    if os.geteuid() != 0:
        return "a SLURM of one's own needs root"
    absent = [p for p in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(p) is None]
    if absent and os.environ.get("MAIEUTIC_SLURM_INSTALL") == "1" and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, check=False, capture_output=True, env=environment)
        absent = [p for p in absent if shutil.which(p) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install {' '.join(PACKAGES)}, or MAIEUTIC_SLURM_INSTALL=1 to let this test do it"
    return None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class OneBox:
    """A cluster of ``nodes`` nodes; ``gpus`` fake ones on each (character devices that nothing opens).

    ``requeue_on_85``: the site's RequeueExit. ``user_signal``: preemption sends the signal that a job asked for, not SIGTERM.
    ``slurmd_timeout_s``: how long SLURM takes a silent node for a living one. ``prefix``: of the nodes' names.
    """

    def __init__(
        self,
        root: Path,
        *,
        nodes: int = 5,
        gpus: int = 4,
        requeue_on_85: bool = True,
        user_signal: bool = True,
        slurmd_timeout_s: int = 10,
        prefix: str | None = None,
    ) -> None:
        # Boxes of several test processes at once must not share names and addresses.
        prefix = prefix or f"n{os.getpid()}x"
        self.root, self.nodes = root, [f"{prefix}{i + 1}" for i in range(nodes)]
        self._network, self._mark = 64 + zlib.crc32(prefix.encode()) % 150, f"{_MARK}-{prefix}"
        self.gpus, self.requeue_on_85, self.user_signal = gpus, requeue_on_85, user_signal
        self.slurmd_timeout_s = slurmd_timeout_s
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    # ---- start and stop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        for name in ("state", "spool", "munge", "gpu"):
            (self.root / name).mkdir(parents=True, mode=0o755)
        self._hosts({name: f"127.{self._network}.0.{i + 1}" for i, name in enumerate(self.nodes)})
        self._configure()
        key = self.root / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={self.root / 'munge' / name}" for option, name in files.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", *options])
        self.wait(lambda: (self.root / "munge" / "socket").exists(), 20, "munged")
        self._spawn("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            self.start_node(node)
        self.wait(lambda: len(self.idle()) == len(self.nodes), 60, "all nodes idle")

    def start_node(self, node: str) -> None:
        (self.root / "spool" / node).mkdir(exist_ok=True)
        self._spawn(node, ["slurmd", "-D", "-N", node])

    def stop(self) -> None:
        """End jobs, then daemons."""
        if "slurmctld" in self._processes and self._processes["slurmctld"].poll() is None:
            self.run("scancel", "--user=root", check=False)
            deadline = time.monotonic() + 30
            while self.run("squeue", "-h", "-o", "%i", check=False).strip() and time.monotonic() < deadline:
                time.sleep(0.5)
        for name in [*self.nodes, "slurmctld", "munged"]:
            self._end(name)
        self._hosts({})

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr={name} Port={free_port()} CPUs=16 RealMemory=100000{gres} State=UNKNOWN"
            for name in self.nodes
        ]
        values = {"host": host, "port": free_port(), "root": self.root, "nodes": "\n".join(lines)}
        values["requeue_exit"] = "RequeueExit=85" if self.requeue_on_85 else ""
        values["slurmd_timeout"] = self.slurmd_timeout_s
        parameters = "SlurmctldParameters=preempt_send_user_signal" if self.user_signal else ""
        (self.root / "slurm.conf").write_text(CONFIG.format(**values, preempt_signal=parameters))
        devices = self.root / "gpu"
        for i in range(self.gpus):
            os.mknod(devices / f"nvidia{i}", 0o20666, os.makedev(1, 3))
        names = f"NodeName={','.join(self.nodes)} Name=gpu File={devices}/nvidia[0-{self.gpus - 1}]\n"
        (self.root / "gres.conf").write_text(names if self.gpus else "")
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def _hosts(self, names: dict[str, str]) -> None:
        """Under a lock: of two boxes that start at once, one would read what the other has half written, and drop `localhost`."""
        with open("/etc/hosts", "r+", encoding="utf-8") as file:  # in place: it may be a mount
            fcntl.flock(file, fcntl.LOCK_EX)
            lines = [line for line in file.read().splitlines() if not line.endswith(self._mark)]
            lines += [f"{address} {name} {self._mark}" for name, address in names.items()]
            file.seek(0)
            file.write("\n".join(lines) + "\n")
            file.truncate()

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.root / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=self.env,
                start_new_session=True,
            )

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    # ---- use ---------------------------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def idle(self) -> list[str]:
        out = self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N", check=False)
        return sorted(set(out.split()))

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job, check=False))
        return found[1] if found else "GONE"

    def restarts(self, job: str) -> int:
        found = re.search(r"Restarts=(\d+)", self.run("scontrol", "show", "job", job))
        assert found
        return int(found[1])

    def ended(self, job: str, timeout_s: float) -> str:
        """The state in which the job ended; fails when it has not after ``timeout_s``."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: self.state(job) in ends, timeout_s, f"job {job} to end")
        return self.state(job)

    @staticmethod
    def wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
            time.sleep(0.3)

    def processes_of(self, node: str) -> list[int]:
        """Processes of jobs on a node: what would die with it."""
        return [pid for pid, env in _environments() if f"SLURMD_NODENAME={node}".encode() in env]

    def crash(self, node: str) -> None:
        """Power off: the daemon, the step managers and all that they run, at once."""
        daemon = self._processes.pop(node)
        managers = _children_named("slurmstepd", node)
        for pid in [daemon.pid, *managers, *self.processes_of(node)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        daemon.wait(10)


def _environments() -> list[tuple[int, list[bytes]]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((int(entry.name), (entry / "environ").read_bytes().split(b"\0")))
            except (OSError, ProcessLookupError):
                continue
    return found


def _children_named(name: str, node: str) -> list[int]:
    """Step managers whose children belong to ``node``."""
    parents = set()
    for pid, env in _environments():
        if f"SLURMD_NODENAME={node}".encode() in env:
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue
            parents.add(int(stat.rpartition(")")[2].split()[1]))
    out = []
    for pid in parents:
        try:
            if name in Path(f"/proc/{pid}/comm").read_text():
                out.append(pid)
        except OSError:
            continue
    return out


def leftovers(tag: str) -> list[str]:
    """Command lines of processes that carry ``tag`` in their environment (zombies do not count)."""
    found = []
    for pid, env in _environments():
        if pid != os.getpid() and any(tag.encode() in item for item in env):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if line:
                found.append(f"{pid} {line}")
    return found

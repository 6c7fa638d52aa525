"""Training runs of several ranks on the CPU, with every backend that `recipes/accelerate` configures.

python tests/backend_runs.py JOBS.json

One process imports everything once and forks the ranks of each job, which saves the start-up of every rank. The environment of
a rank is what `accelerate launch --config_file …` would give it. A job: ``{"name", "config", "ranks", "argv", "log"}``, and
perhaps ``precision`` (in place of the file's; else ``no``) and ``environment``. Exit codes go to ``JOBS.codes`` as they come.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parents[1] / "recipes" / "accelerate"
LIMIT_S = 900.0


def divide_on_cpu() -> None:
    """accelerate passes FSDP and DeepSpeed by on CPUs, and takes DDP: let it believe in accelerators that speak gloo.

    DeepSpeed would compile an operator for shared memory, which gloo does not need; and even small weights are divided.
    """
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from maieutic.training import sharding

    def backend(self: Any, *_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend = backend
    PartialState.set_device = device
    # Its attribute `torch` of `deepspeed.comm` is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    sharding.PERSISTENT_ELEMENTS = 0
    del os.environ["ACCELERATE_USE_CPU"]


def launch_environment(config: str, ranks: int, precision: str) -> dict[str, str]:
    """What `accelerate launch` would set for this configuration file."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    command = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(ranks)]
    arguments = launch.launch_command_parser().parse_args([*command, "--mixed_precision", precision, "x.py"])
    arguments, defaults, _ = launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return dict(prepare_deepspeed_cmd_env(arguments)[1])
    return dict(prepare_multi_gpu_env(arguments))


def rank_main(job: dict[str, Any], rank: int, port: int) -> int:
    """One rank of a job; its output goes to the job's log."""
    log = os.open(f"{job['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if job["config"] is not None:
        os.environ.update(launch_environment(job["config"], job["ranks"], job.get("precision", "no")))
        os.environ.update(job.get("environment", {}))
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank)
        )
        os.environ.update(WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(job["ranks"]))
    if any(os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED")):
        divide_on_cpu()
    from maieutic.train import main

    return main(job["argv"])


def fork(job: dict[str, Any], rank: int, port: int) -> int:
    """Start one rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = rank_main(job, rank, port)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(job: dict[str, Any]) -> list[int]:
    """The exit codes of a job's ranks; a rank that outlives a failed one by a minute, or the limit, is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    waiting = {fork(job, rank, port): rank for rank in range(job["ranks"])}
    codes = [-1] * job["ranks"]
    deadline = time.monotonic() + LIMIT_S
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in waiting:
            codes[waiting.pop(pid)] = code = os.waitstatus_to_exitcode(status)
            if code:
                deadline = min(deadline, time.monotonic() + 60)
        elif time.monotonic() > deadline:
            for left in waiting:
                os.kill(left, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.05)
    return codes


def main(path: Path) -> None:
    """All jobs of a file, in order."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from accelerate.commands import launch  # noqa: F401

    import maieutic.train
    import maieutic.training.loop  # noqa: F401

    codes: dict[str, list[int]] = {}
    for job in json.loads(path.read_text()):
        codes[job["name"]] = run(job)
        path.with_suffix(".codes").write_text(json.dumps(codes))
        print(job["name"], codes[job["name"]], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The scripts of a submission, as text. Pure: the same input gives the same bytes, and nothing is looked up on the way.

A script is plain bash that needs ``srun`` and ``scontrol`` on the node and Python only inside its steps, so that it is the same
on bare metal and with a container.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from maieutic.slurm.plan import PlacedServer, Placement
from maieutic.slurm.site import Site

SLACK_S = 120
"""The job waits so much longer for a server than the server for itself, for its step (and container) to start."""


@dataclass(frozen=True)
class Setting:
    """Where and with what all scripts of a submission run."""

    site: Site
    python: str
    cwd: Path
    said: str
    """The command that wrote them."""


@dataclass(frozen=True)
class Job:
    """One script. ``prelude`` sets ``RUN`` (the run's folder) and what ``main`` uses."""

    name: str
    """Of its file; jobs that follow name it in ``after``."""
    title: str
    """SLURM's job name."""
    placement: Placement
    prelude: Sequence[str]
    main: Sequence[str]
    log: str
    time: str
    array: int | None = None
    after: tuple[str, str] | None = None
    """(kind of dependency, name of the job)."""
    signal: bool = True
    gpus: int = 0
    out: Path | None = None
    """The folder of the runs, for a container to see (None: below what it sees anyway)."""


def quote(words: Sequence[str]) -> str:
    """Words of a command; those that begin with ``@`` are shell expressions that stay as they are."""
    return " ".join(w[1:] if w.startswith("@") else shlex.quote(w) for w in words)


def script(job: Job, setting: Setting) -> str:
    """The sbatch file."""
    site = setting.site
    said = " ".join(setting.said.splitlines())  # a value of several lines must not leave the comment
    lines = ["#!/bin/bash", *_header(job, setting), f"# Written by: {said}"]
    # Functions that this job does not use, and traps, look unreachable to shellcheck.
    lines += ["# shellcheck disable=SC2317,SC2034", "set -uo pipefail", ""]
    lines += _site(site)
    lines += [*job.prelude, f"GRACE={site.grace_seconds} MAX_REQUEUES={site.max_requeues}"]
    lines += ["# Steps overlap: each takes the GPUs that the plan gave it (maieutic.slurm.step)."]
    lines += ["# shellcheck disable=SC2054", f"SRUN=({quote(_srun(setting, job.out))})", ""]
    body = files("maieutic.slurm").joinpath("job.sh").read_text(encoding="utf-8")
    return "\n".join([*lines, body.rstrip("\n"), "", "# ---- this job", *job.main]) + "\n"


def _header(job: Job, setting: Setting) -> list[str]:
    site = setting.site
    flags = [f"--job-name={job.title}", f"--nodes={job.placement.nodes}", "--ntasks-per-node=1"]
    flags += [f"--cpus-per-task={site.cpus_per_node}", f"--time={job.time}"]
    flags += [f"--mem={site.mem_per_node}"] if site.mem_per_node != "none" else []
    if job.gpus:
        kind = f"{site.gpu_type}:{job.gpus}" if site.gpu_type else str(job.gpus)
        flags.append(
            f"--gres=gpu:{kind}" if site.gpu_flag == "gres" else f"--gpus-per-node={kind}",
        )
    flags += [f"--{key}={v}" for key in ("account", "partition", "qos", "constraint", "reservation")
              if (v := getattr(site, key))]  # fmt: skip
    if job.array is not None:
        flags.append(f"--array=0-{job.array - 1}")
    if job.signal:
        flags.append(f"--signal=B:USR1@{site.signal_seconds}")
    flags += ["--requeue", "--open-mode=append", f"--output={job.log}", f"--chdir={setting.cwd}"]
    return [f"#SBATCH {_header_word(f)}" for f in [*flags, *site.sbatch_args]]


def _header_word(flag: str) -> str:
    """sbatch reads these lines with quotes of its own: only what has white space needs them."""
    return f'"{flag}"' if any(c.isspace() for c in flag) else flag


def _site(site: Site) -> list[str]:
    lines = []
    if site.modules:
        lines += ["# shellcheck disable=SC1091"]
        lines += ["type module >/dev/null 2>&1 || . /etc/profile", f"module load {quote(site.modules)}"]
    if site.setup:
        lines += ["set +u  # what the site sources may use unset variables", "# shellcheck disable=SC1091"]
        lines += [site.setup, "set -u"]
    if site.hf_home:
        lines.append(f"export HF_HOME={shlex.quote(site.hf_home)}")
        lines += ['mkdir -p "$HF_HOME"'] if site.container_image else []  # what is mounted must be there
    return lines


def _srun(setting: Setting, out: Path | None) -> list[str]:
    site = setting.site
    words = ["--overlap", f"--cpus-per-task={site.cpus_per_node}", *site.srun_args]
    if site.container_image:
        own: list[Path] = []
        for path in (site.scratch, setting.cwd, out, site.hf_home):
            if path is not None and not any(Path(path).is_relative_to(p) for p in own):
                own.append(Path(path))
        mounts = site.container_mounts or ",".join(f"{p}:{p}" for p in own)
        words += [f"--container-image={site.container_image}", f"--container-mounts={mounts}"]
        words += [f"--container-workdir={setting.cwd}", *site.container_args]
    return words


def in_step(setting: Setting, gpus: tuple[int, int] | None, command: Sequence[str]) -> list[str]:
    """A command inside a step, on its slice of the GPUs."""
    if gpus is None:
        return list(command)
    return [setting.python, "-m", "maieutic.slurm.step", "--gpus", f"{gpus[0]}-{gpus[1]}", "--", *command]


def server_line(placed: PlacedServer, recipe: Sequence[str], setting: Setting) -> str:
    """Start one server. ``recipe``: words that name the recipe, overrides included."""
    site = setting.site
    words = [setting.python, "-m", "maieutic", "serve", placed.role.role, *recipe]
    if placed.role.student is not None:
        words += ["--student", placed.role.student]
    words += ["--host", "0.0.0.0", "--timeout", str(site.start_seconds)]
    if site.wanted_port:
        words += ["--port", str(site.wanted_port)]
    if site.vllm_python:
        words += ["--python", site.vllm_python, *(["--gpu"] if placed.gpus else [])]
    words += ["--address-file", f'@"$MAIEUTIC_ENDPOINTS"/{shlex.quote(placed.name)}.json']
    words += ["--log", f'@"$state"/{shlex.quote(placed.name)}.log']
    return f"server {shlex.quote(placed.name)} {placed.node} {quote(in_step(setting, placed.gpus, words))}"


def server_lines(placement: Placement, recipe: Sequence[str], setting: Setting) -> list[str]:
    """All servers, and the wait for them."""
    lines = [server_line(s, recipe, setting) for s in placement.servers]
    return [*lines, f"await {setting.site.start_seconds + SLACK_S}"] if lines else []


def trainer_lines(placement: Placement, setting: Setting) -> list[str]:
    """``TRAINER`` and ``PORT``, which the function ``train`` of ``job.sh`` uses."""
    site = setting.site
    words = [setting.python, "-m", "maieutic.slurm.trainer"]
    if not site.gpus_per_node:
        words.append("--cpu")
    if site.accelerate_config:
        words += ["--config", site.accelerate_config]
    gpus = (0, placement.processes - 1) if site.gpus_per_node else None
    port = f"--port {site.wanted_port}" if site.wanted_port else ""
    return [f"TRAINER=({quote(in_step(setting, gpus, words))}) PORT=({port})"]

"""Write the scripts of a submission, hand them to ``sbatch``, and look after the jobs.

``slurm/jobs.json`` in the folder of the scripts says which jobs were submitted, so that ``status`` and ``cancel`` need no memory
of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from maieutic.errors import RecipeError, RunFolderError
from maieutic.slurm.errors import SlurmError
from maieutic.slurm.jobs import Submission
from maieutic.slurm.render import Job
from maieutic.training.run_folder import named_os_errors, write_atomically

JOBS = "jobs.json"
_ENDED = (
    "GONE",
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",  # by a partition that cancels; a requeued job is PENDING
)


def sbatch_command(job: Job, submission: Submission, ids: dict[str, str]) -> list[str]:
    """How a script is submitted; ``ids``: job ids by name, of the jobs that it waits for."""
    words = ["sbatch", "--parsable"]
    if job.after is not None:
        kind, other = job.after
        # Without the flag a job whose condition can no longer come true would pend for ever.
        words += [f"--dependency={kind}:{ids[other]}", "--kill-on-invalid-dep=yes"]
    return [*words, str(submission.path(job))]


def dry_run(submission: Submission) -> Iterator[str]:
    """Every file and command of a submission, in order; the scripts byte for byte as ``submit`` submits them."""
    for path, text in submission.files.items():
        yield f"#### {path}\n{text}"
    ids: dict[str, str] = {}
    for job in submission.jobs:
        yield f"#### {submission.path(job)}\n{submission.script(job)}"
        ids[job.name] = f"<{job.name}>"
    for job in submission.jobs:
        yield f"#### {' '.join(sbatch_command(job, submission, ids))}\n"


def refuse_to_mix(submission: Submission) -> None:
    """Raise :class:`~maieutic.errors.RunFolderError` when a run of these names exists already or its jobs are not over."""
    for run in submission.runs:
        metrics = run / "metrics.jsonl"
        if metrics.is_file() and metrics.stat().st_size:
            raise RunFolderError(
                f"{run} already holds a run: --resume goes on with it, name=<new name> starts another"
            )


def check_keys(submission: Submission) -> None:
    """Jobs inherit this environment: a key that is missing here would be missed in the night.

    Raises :class:`~maieutic.errors.RecipeError` naming the variable.
    """
    for where, engine in submission.engines.items():
        if engine.kind != "hf" and engine.api_key_env and not os.environ.get(engine.api_key_env):
            raise RecipeError(
                f"{where}: engine.api_key_env names {engine.api_key_env}, which is not set: export it before submitting"
            )


def submit(submission: Submission, say: Callable[[str], None]) -> dict[str, str]:
    """Write everything and submit it; job ids by name.

    Raises:
        SlurmError: ``sbatch`` is absent or refuses a script (jobs that were submitted before it are cancelled).
        RunFolderError: a file cannot be written, or jobs of an earlier submission are still there.
    """
    for name, state in states(submission.folder).items():
        if state not in _ENDED:
            raise RunFolderError(
                f"{submission.folder}: its job {name} is {state}: wait for it, or `maieutic slurm cancel`"
            )
    with named_os_errors(str(submission.folder)):
        submission.folder.mkdir(parents=True, exist_ok=True)
        for path, text in submission.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        for job in submission.jobs:
            write_atomically(submission.path(job), submission.script(job))
    ids: dict[str, str] = {}
    try:
        for job in submission.jobs:
            answer = call(sbatch_command(job, submission, ids))
            # Sites' wrappers of sbatch say more on the same output; the number has a line of its own.
            found = re.findall(r"^(\d+)(?:;.*)?$", answer, re.MULTILINE)
            if not found:
                raise SlurmError(
                    f"sbatch gave no job number for {submission.path(job)}, but: {answer.strip()!r:.300}"
                )
            ids[job.name] = found[-1]
            say(f"{job.name}: job {ids[job.name]}")
    except SlurmError:
        for number in ids.values():
            call(["scancel", number])
        raise
    with named_os_errors(str(submission.folder)):
        write_atomically(submission.folder / JOBS, json.dumps(ids, indent=1))
    return ids


def call(words: list[str]) -> str:
    """Output of a SLURM command. Raises :class:`SlurmError` with what it said."""
    if shutil.which(words[0]) is None:
        raise SlurmError(
            f"no {words[0]} on PATH: run this where SLURM's commands are (a login node), or use --dry-run"
        )
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SlurmError(
            f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def submitted(folder: Path) -> dict[str, str]:
    """Job ids by name of the last submission; empty when there was none. ``folder``: a run's, or its ``slurm`` folder."""
    for file in (folder / JOBS, folder / "slurm" / JOBS):
        if file.is_file():
            try:
                ids = json.loads(file.read_text(encoding="utf-8"))
                return {str(name): str(number) for name, number in ids.items()}
            except (OSError, ValueError, AttributeError) as error:
                raise RunFolderError(
                    f"{file} cannot be read ({error}): look for its jobs with squeue, then remove it"
                ) from error
    return {}


def states(folder: Path) -> dict[str, str]:
    """State of each submitted job (of an array: of its worst-off element); ``GONE`` for one that SLURM has forgotten."""
    return {name: _state(number) for name, number in submitted(folder).items()}


def _state(number: str) -> str:
    try:
        text = call(["scontrol", "show", "job", number])
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return _accounted(number)
        raise
    found = re.findall(r"JobState=(\w+)", text)
    alive = [s for s in found if s not in _ENDED]
    bad = [s for s in found if s != "COMPLETED"]
    return (alive or bad or found or ["GONE"])[0]


def _accounted(number: str) -> str:
    """From the accounting, where the site has one."""
    try:
        lines = call(["sacct", "-X", "-n", "-P", "-o", "State", "-j", number]).split()
    except SlurmError:
        return "GONE"
    return next((s for s in lines if s != "COMPLETED"), lines[0] if lines else "GONE")


def status_lines(folder: Path) -> list[str]:
    """Jobs, healthy servers and the last row of numbers, for a person."""
    ids = submitted(folder)
    if not ids:
        raise SlurmError(f"{folder}: nothing was submitted from here (no slurm/{JOBS})")
    lines = [f"{name}\t{ids[name]}\t{state}" for name, state in states(folder).items()]
    run = folder.parent if folder.name == "slurm" else folder
    for file in sorted(run.glob("endpoints/*/*.json")):
        record = _record(file.read_text(encoding="utf-8", errors="replace"))
        lines.append(f"server\t{file.parent.name}/{file.stem}\t{record.get('url')}")
    metrics = run / "metrics.jsonl"
    text = metrics.read_text(encoding="utf-8", errors="replace") if metrics.is_file() else ""
    rows = [row for line in text.splitlines()[-2:] if (row := _record(line))]  # the last may be half written
    if rows:
        lines.append(f"step\t{rows[-1].get('train/step')}\t{metrics}")
    return lines


def _record(line: str) -> dict[str, Any]:
    """A JSON object; empty for what is none (yet)."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def cancel(folder: Path) -> dict[str, str]:
    """Cancel what was submitted from a folder and is not over; the ids of these. Servers end with their job."""
    ids = submitted(folder)
    if not ids:
        raise SlurmError(f"{folder}: nothing was submitted from here (no slurm/{JOBS})")
    alive = {name: ids[name] for name, state in states(folder).items() if state not in _ENDED}
    if alive:
        call(["scancel", *alive.values()])
    return alive

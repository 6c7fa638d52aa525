"""The bash of a job, run with stand-ins for SLURM's commands and for Python: waiting, ports, signals, how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from test_slurm_scripts import folder, script, submit  # noqa: F401 (the fixture)

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@" & child=$!
trap 'kill -USR1 $child 2>/dev/null' USR1
while :; do
  wait $child; code=$?
  if ((code <= 128)) || ! kill -0 $child 2>/dev/null; then break; fi
done
wait $child 2>/dev/null; last=$?; ((last == 127)) || code=$last
exit $code
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") printf 'n1\\nn2\\nn3\\n' ;;
  "show job") echo "JobId=$3 JobState=$STATE Reason=None" ;;
  "show config") echo "RequeueExit             = $REQUEUE_EXIT" ;;
  requeue*) echo "requeued $2" ;;
esac
"""
PYTHON = """#!/bin/bash
arg() {
  local name=$1 i
  shift
  for ((i = 1; i <= $#; i++)); do
    [[ ${!i} == "$name" ]] && { i=$((i + 1)); echo "${!i}"; return; }
  done
}
while [[ $2 == maieutic.slurm.step ]]; do shift 5; done      # python -m maieutic.slurm.step --gpus A-B -- …
[[ $1 == python ]] && shift
shift 1
case $1 in
  maieutic)
    file=$(arg --address-file "$@")
    [[ $(basename "$file") == "$NEVER" ]] && { sleep 60; exit 1; }
    [[ $(basename "$file") == "$DIES" ]] && { echo "EngineError: no memory"; exit 1; }
    trap 'rm -f "$file"; echo "$(basename "$file") ended well"; exit 0' USR1
    echo '{}' >"$file"
    for _ in {1..600}; do sleep 0.1; done ;;
  maieutic.slurm.trainer)
    state=$(arg --state "$@") port=$(arg --port "$@")
    mkdir -p "$state"
    echo "trainer on port ${port:-free}"
    if [[ -n $port ]]; then echo "$port" >"$state/port-taken"; exit 1; fi
    trap 'echo 85 >"$state/rank-0.exit"; exit 0' USR1
    for ((i = 0; i < ${TRAIN_TENTHS:-1}; i++)); do sleep 0.1; done
    ((TRAIN_CODE)) && exit "$TRAIN_CODE"
    echo 0 >"$state/rank-0.exit" ;;
esac
"""


class Job:
    def __init__(self, folder: Path) -> None:  # noqa: F811
        self.folder = folder
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        with (folder / "slurm" / "site.env").open("a") as site:
            site.write("PYTHON=python\nGRACE_SECONDS=5\nMAX_REQUEUES=3\n")
        self.env = {
            **os.environ,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "STATE": "RUNNING",
            "REQUEUE_EXIT": "85",
            "TRAIN_CODE": "0",
        }

    def start(self, *changes: str, **env: str) -> subprocess.Popen[str]:
        text = script(submit("recipe.yaml", "--dry-run", *changes), "train").replace("await 122", "await 3")
        (self.folder / "job").write_text(text)
        return subprocess.Popen(
            ["bash", str(self.folder / "job")],
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *changes: str, **env: str) -> tuple[int, str]:
        process = self.start(*changes, **env)
        out, _ = process.communicate(timeout=120)
        return process.returncode, out

    def stop_with(self, number: int, **env: str) -> tuple[int, str]:
        """A signal to the batch script once training runs."""
        state = (
            self.folder / "runs" / "first" / "slurm" / f"7-{env.get('SLURM_RESTART_COUNT', '0')}" / "train-1"
        )
        # Of a job before this one: it would not tell when this one trains.
        shutil.rmtree(state, ignore_errors=True)
        process = self.start(TRAIN_TENTHS="600", **env)
        deadline = time.monotonic() + 60
        while not state.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(process.pid, number)
        out, _ = process.communicate(timeout=120)
        return process.returncode, out


@pytest.fixture
def job(folder: Path) -> Job:  # noqa: F811
    return Job(folder)


def addresses(job: Job) -> list[Path]:
    return list((job.folder / "runs" / "first" / "endpoints").glob("*/*.json"))


def test_all_goes_well(job: Job) -> None:
    code, out = job.run()
    assert code == 0, out
    order = [
        out.index(text)
        for text in (
            "student.0 is healthy",
            "judge.0 is healthy",
            "trainer on port free",
            "ended with code 0",
        )
    ]
    assert order == sorted(order)
    assert "student.0.json ended well" in out and "judge.0.json ended well" in out and not addresses(job)


def test_a_taken_port_is_another_try(job: Job) -> None:
    code, out = job.run("--set", "WANTED_PORT=23456")
    assert code == 0, out
    assert out.index("port 23456 was taken: another one") < out.index("trainer on port free")
    assert (job.folder / "runs" / "first" / "slurm" / "7-0" / "train-2" / "rank-0.exit").read_text() == "0\n"


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"NEVER": "judge.0.json"}, "judge.0 was not healthy within 3 s"),
        ({"DIES": "student.0.json"}, "student.0 ended before"),
    ],
)
def test_a_server_that_is_not_healthy_ends_the_job_by_name(env: dict[str, str], why: str, job: Job) -> None:
    code, out = job.run("--set", "START_SECONDS=2", **env)
    assert code == 1 and f"ServerNotHealthyError: {why}" in out and "trainer" not in out
    assert not addresses(job)


def test_a_failure_is_not_requeued(job: Job) -> None:
    code, out = job.run(TRAIN_CODE="2")
    assert code == 2 and "requeued" not in out


def test_a_warning_is_a_requeue(job: Job) -> None:
    code, out = job.stop_with(signal.SIGUSR1)
    assert (
        code == 85
        and "ended with code 85" in out
        and "requeued; it goes on" in out
        and "requeued 7" not in out
    )
    assert not addresses(job)


@pytest.mark.parametrize(
    ("exits", "by_hand"), [("(null)", True), ("1-3,85", False), ("185", True), ("85,99", False)]
)
def test_where_the_site_does_not_requeue_on_85_the_script_asks(exits: str, by_hand: bool, job: Job) -> None:
    code, out = job.stop_with(signal.SIGTERM, REQUEUE_EXIT=exits)
    assert code == 85 and ("requeued 7" in out) == by_hand


def test_one_element_of_an_array_is_not_taken_for_all(job: Job) -> None:
    """SLURM shows and requeues the whole array under the number that one of its elements has as its own."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    code, out = job.stop_with(signal.SIGUSR1, REQUEUE_EXIT="(null)", **array)
    assert code == 85 and "requeued 7_2\n" in out
    (job.folder / "bin" / "scontrol").write_text(
        SCONTROL.replace('"show job") ', '"show job") [[ $3 == *_* ]] || echo JobState=RUNNING\n    ')
    )
    code, out = job.stop_with(signal.SIGTERM, REQUEUE_EXIT="(null)", STATE="CANCELLED", **array)
    assert code == 85 and "requeued" not in out, "another element is still running"


def test_a_long_configuration_is_searched_whole(job: Job) -> None:
    """A pipe that is closed early made the script ask for a requeue that exit code 85 asks for already."""
    (job.folder / "bin" / "scontrol").write_text(
        SCONTROL.replace('=$REQUEUE_EXIT"', '=$REQUEUE_EXIT"; yes key | head -200000').replace(
            '= $REQUEUE_EXIT"', '= $REQUEUE_EXIT"; yes key | head -200000'
        )
    )
    code, out = job.stop_with(signal.SIGUSR1)
    assert code == 85 and "requeued; it goes on" in out and "requeued 7" not in out


def test_a_cancelled_job_is_not_requeued(job: Job) -> None:
    code, out = job.stop_with(signal.SIGTERM, STATE="CANCELLED")
    assert code == 85 and "requeued" not in out


def test_requeues_have_an_end(job: Job) -> None:
    code, out = job.stop_with(signal.SIGUSR1, SLURM_RESTART_COUNT="3")
    assert code == 1 and "RequeueLimitError: requeued 3 times" in out

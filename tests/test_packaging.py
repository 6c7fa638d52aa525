"""The lock and pyproject must tell the same story, and name no machine."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import maieutic

REPO = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
LOCK = [
    Requirement(line)
    for line in (REPO / "requirements.lock").read_text().splitlines()
    if not line.lstrip().startswith("#")
]
GROUPS = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
DECLARED = [Requirement(text) for group in GROUPS for text in group]


def locked(name: str, python: str) -> list[str]:
    """The versions that the lock gives for a Linux machine with this Python."""
    machine = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    return [
        next(iter(one.specifier)).version
        for one in LOCK
        if canonicalize_name(one.name) == canonicalize_name(name)
        and (not one.marker or one.marker.evaluate(machine))
    ]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("requirement", DECLARED, ids=lambda requirement: requirement.name)
def test_lock_holds_every_dependency_once(requirement: Requirement, python: str) -> None:
    versions = locked(requirement.name, python)
    assert len(versions) == 1, (
        f"run `make lock`: {requirement.name} is locked {len(versions)} times for Python {python}"
    )
    assert requirement.specifier.contains(versions[0], prereleases=True)


def test_every_dependency_has_a_floor() -> None:
    bare = [one.name for one in DECLARED if not any(part.operator == ">=" for part in one.specifier)]
    assert bare == []


def test_lock_is_of_no_machine() -> None:
    text = (REPO / "requirements.lock").read_text()
    assert "://" not in text and " @ " not in text and "--" not in text
    assert not re.search(r"==[^ ;]*\+", text), "a local version such as +cpu pins one kind of machine"


def test_setup_reads_the_locked_torch() -> None:
    script = (REPO / "scripts" / "setup.sh").read_text()
    function = next(line for line in script.splitlines() if line.startswith("locked()"))
    out = subprocess.check_output(["bash", "-c", f"{function}; locked torch"], text=True, cwd=REPO)
    assert [out.strip()] == locked("torch", "3.11")


def test_make_help_lists_the_targets() -> None:
    out = subprocess.check_output(["make", "help"], text=True, cwd=REPO)
    named = {line.split()[1] for line in out.splitlines()}
    assert {
        "setup",
        "demo",
        "demo-smollm2",
        "test-fast",
        "test",
        "test-all",
        "check",
        "bench",
        "lock",
    } <= named


def test_version_is_one() -> None:
    from importlib.metadata import version

    assert version("maieutic") == maieutic.__version__


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("exit 7", 7)])
def test_timed_keeps_the_exit_status(command: str, status: int) -> None:
    done = subprocess.run(
        ["scripts/timed.sh", "a thing", "bash", "-c", command],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert "==> a thing" in done.stdout
    assert ("FAILED (exit 7)" in done.stderr) == (status == 7)

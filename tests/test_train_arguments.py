"""The command line of a training run: where recipe, overrides and the checkpoint may stand."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from maieutic.errors import RecipeError
from maieutic.train import parse


@pytest.mark.parametrize(
    "argv",
    [
        ["r.yaml", "a=1", "b=2", "--resume", "auto"],
        ["r.yaml", "--resume", "auto", "a=1", "b=2"],
        ["--resume=auto", "r.yaml", "a=1", "b=2"],
        ["r.yaml", "a=1", "--resume", "auto", "b=2"],
        ["r.yaml", "a=1", "resume=auto", "b=2"],
    ],
)
def test_options_may_stand_anywhere(argv: list[str]) -> None:
    assert parse(argv) == ("r.yaml", ["a=1", "b=2"], "auto")


def test_resume_twice_or_empty_is_refused() -> None:
    assert parse(["r.yaml"]) == ("r.yaml", [], None)
    assert parse(["r.yaml", "resume=auto", "--resume", "auto"]) == ("r.yaml", [], "auto")
    with pytest.raises(RecipeError, match="resume is given twice: 'auto' and 'x'"):
        parse(["r.yaml", "--resume", "auto", "resume=x"])
    with pytest.raises(RecipeError, match="names no checkpoint"):
        parse(["r.yaml", "resume="])


@pytest.mark.parametrize("world, redirect", [("", ""), ("1", ""), ("2", ""), ("2", ">&-"), ("2", ">&- 2>&-")])
def test_the_exit_code_is_that_of_the_run_whatever_happened_to_its_streams(world: str, redirect: str) -> None:
    code = "import sys; from maieutic.train import leave; sys.stdout and print('said', end=''); leave(85)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {redirect}"
    done = subprocess.run(
        command,
        shell=True,
        env=os.environ | {"WORLD_SIZE": world},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 85, done.stderr
    assert done.stdout == ("" if redirect else "said")

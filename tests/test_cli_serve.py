"""``maieutic serve``: what it starts, what it publishes, and that a stop leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import training_parts as parts
from maieutic.config import Recipe
from maieutic.recipe import dump_recipe

FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture
def recipe(tiny_model_dir: Path, tmp_path: Path) -> Path:
    data = parts.recipe_dict(tiny_model_dir, tmp_path, name="r")
    data["students"] = [
        data["students"][0] | {"name": "a"},
        data["students"][0] | {"name": "b", "model": "nowhere/at-all"},
    ]
    path = tmp_path / "r.yaml"
    path.write_text(dump_recipe(Recipe.model_validate_json(json.dumps(data))))
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "maieutic", "serve", *arguments]


def python(tmp_path: Path) -> str:
    """An "interpreter" that takes vLLM's command line and answers like a server."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nshift 4\nexec {sys.executable} {FAKE} "$@"\n')
    path.chmod(0o755)
    return str(path)


def wait_for(path: Path, process: subprocess.Popen[str]) -> dict[str, object]:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return json.loads(path.read_text())


@pytest.mark.integration
def test_it_publishes_serves_and_leaves_nothing(recipe: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    process = subprocess.Popen(
        command("student", str(recipe), "--student", "a", "--python", python(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"FAKE_TAG": f"serve-{os.getpid()}"},
    )
    address = tmp_path / "r" / "endpoints" / "student-a.json"
    try:
        record = wait_for(address, process)
        assert record["role"] == "student" and record["model"] == str(tiny_model_dir)
        with urllib.request.urlopen(f"{record['url']}/v1/models", timeout=5) as answer:
            assert json.load(answer)["data"][0]["id"] == str(tiny_model_dir)
        assert address.with_suffix(".log").exists()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode in (0, 143), err
    assert str(record["url"]) in out and "student-a.json" in out
    assert not address.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(str(record["pid"])), 0)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["student"], 2, "several students, name one: ['a', 'b']"),
        (["student", "--student", "c"], 2, "no student 'c'"),
        (["judge"], 2, "judge.kind is 'rule'"),
        (["coach"], 2, "no role 'coach'"),
    ],
)
def test_what_cannot_be_served(
    arguments: list[str], code: int, says: str, recipe: Path, tmp_path: Path
) -> None:
    role, *rest = arguments
    words = command(role, str(recipe), *rest, "--python", python(tmp_path))
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code and says in result.stderr
    assert not (tmp_path / "r").exists()


def test_without_vllm_it_says_what_to_install(recipe: Path) -> None:
    result = subprocess.run(
        command("tutor", str(recipe)), capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2 and "pip install 'maieutic[vllm]'" in result.stderr


@pytest.mark.integration
def test_a_server_that_dies_at_the_start_is_an_error_with_its_last_words(
    recipe: Path, tmp_path: Path
) -> None:
    result = subprocess.run(
        command("tutor", str(recipe), "--python", python(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"FAKE_VLLM": "dies"},
    )
    assert result.returncode == 1 and "CUDA out of memory" in result.stderr
    assert not (tmp_path / "r" / "endpoints" / "tutor.json").exists()

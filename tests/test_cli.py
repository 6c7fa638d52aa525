"""The command: starts fast, prints results to stdout, names errors without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from maieutic import __version__
from maieutic.cli import app
from maieutic.problems import ProblemPair, StudentKey, read_pairs

runner = CliRunner()


def run(*args: str, code: int = 0) -> Any:
    result = runner.invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_starting_imports_nothing_heavy() -> None:
    code = (
        "import sys, maieutic.cli\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(maieutic.cli.app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pydantic', 'reasoning_gym'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_python_m_is_the_command() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "maieutic", "version"], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == __version__


def test_every_command_has_help() -> None:
    for command in (
        ["train"],
        ["check"],
        ["report"],
        ["version"],
        ["recipes", "list"],
        ["recipes", "copy"],
        ["data", "generate"],
        ["data", "measure"],
        ["models", "list"],
        ["models", "get"],
    ):
        assert "Usage:" in run(*command, "--help").output


def test_recipes_list_and_copy(tmp_path: Path) -> None:
    names = run("recipes", "list").stdout.split()
    assert {"smollm2/dppo", "smollm2/grpo"} <= set(names)
    assert not any("accelerate" in n for n in names)
    run("recipes", "copy", str(tmp_path / "r"))
    assert (tmp_path / "r" / "smollm2" / "dppo.yaml").is_file()
    again = run("recipes", "copy", str(tmp_path / "r"), code=1)
    assert "exists already" in again.stderr
    run("recipes", "copy", str(tmp_path / "r"), "--force")


def test_errors_have_no_traceback_and_their_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("check", str(tmp_path / "none.yaml"), code=2)
    assert result.stderr.startswith("RecipeError: no recipe")
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert run("check", "smollm2/dppo", "training.max_step=1", code=2).stderr.count("did you mean") == 1
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # a rank of several leaves this process
    assert run("train", "smollm2/nothing", code=2).exit_code == 2
    assert "not a packaged model" in run("models", "get", "nothing", code=2).stderr


def test_check_prints_text_json_and_the_resolved_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAIEUTIC_CACHE", str(tmp_path / "cache"))
    data = json.loads(runner.invoke(app, ["check", "smollm2/grpo", "--json", "training.max_steps=7"]).stdout)
    assert data["recipe"]["name"] == "smollm2-grpo"
    assert data["plan"]["steps"] == 7
    text = run("check", "smollm2/grpo", "--resolved", "seed=5").stdout
    (tmp_path / "again.yaml").write_text(text)
    assert run("check", str(tmp_path / "again.yaml"), "--resolved").stdout == text
    assert "seed: 5" in text
    assert "max_turns: 6" in text


def test_generate_writes_and_appends(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    assert "12 pairs" in run("data", "generate", "one_step", "--size", "12", "--out", str(out)).stdout
    run("data", "generate", "one_step", "--size", "5", "--seed", "1", "--append", "--out", str(out))
    assert len(read_pairs(str(out))) == 17
    twice = run(
        "data", "generate", "one_step", "--size", "5", "--seed", "1", "--append", "--out", str(out), code=2
    )
    assert "choose another seed" in twice.stderr
    run("data", "generate", "one_step", "--size", "3", "--templates", "bags,price", "--out", str(out))
    assert [p.provenance["template"] for p in read_pairs(str(out))] == ["bags", "price", "bags"]
    assert "no such generator" in run("data", "generate", "nothing", "--out", str(out), code=2).stderr


def test_the_shipped_set_is_what_its_card_says(tmp_path: Path) -> None:
    """The commands of the data card make the shipped pairs again, rates apart."""
    out = tmp_path / "pairs.jsonl"
    run("data", "generate", "one_step", "--size", "32", "--seed", "0", "--out", str(out))
    run(
        "data",
        "generate",
        "gsm_symbolic",
        "--easy",
        "--size",
        "8",
        "--seed",
        "0",
        "--append",
        "--out",
        str(out),
    )

    def bare(pairs: list[ProblemPair]) -> list[Any]:
        return [
            p.model_dump(exclude={"source": {"rates"}, "transfer": {"rates"}, "provenance": {"package"}})
            for p in pairs
        ]

    assert bare(read_pairs("gsm-symbolic-mini")) == bare(read_pairs(str(out)))


class Student:
    name = "scripted"
    key = StudentKey(model="smollm2-135m", prompt_hash="0" * 12, temperature=0.6, max_tokens=80)

    async def attempt(self, problem: Any, *, k: int, seed: int, **_: Any) -> list[str]:
        return [rf"\boxed{{{problem.answer}}}"] * (k - 1) + ["no idea"]


def test_measure_writes_rates_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    runtime = types.ModuleType("maieutic.runtime")
    runtime.build_students = lambda recipe: [Student()]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maieutic.runtime", runtime)
    out = tmp_path / "m.jsonl"
    result = run("data", "measure", "smollm2/dppo", "--k", "4", "--limit", "3", "--out", str(out))
    assert "6 problems (0 from an earlier run), mean solve rate 0.750" in result.stdout
    pairs = read_pairs(str(out))
    assert len(pairs) == 3
    assert all(p.source.rate(Student.key).rate == 0.75 for p in pairs)
    again = run("data", "measure", "smollm2/dppo", "--k", "4", "--limit", "4", "--out", str(out))
    assert "8 problems (6 from an earlier run)" in again.stdout


def test_measuring_held_out_pairs_and_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    def stop(coroutine: Any) -> None:
        coroutine.close()
        raise KeyboardInterrupt  # what asyncio.run does on Ctrl-C

    runtime = types.ModuleType("maieutic.runtime")
    runtime.build_students = lambda recipe: [Student()]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maieutic.runtime", runtime)
    out = str(tmp_path / "m.jsonl")
    assert (
        "problems.eval_source is not set"
        in run("data", "measure", "smollm2/dppo", "--held-out", "--out", out, code=2).stderr
    )
    with monkeypatch.context() as m:
        m.setattr("asyncio.run", stop)
        stopped = run("data", "measure", "smollm2/dppo", "--limit", "2", "--out", out, code=130)
    assert "the same command goes on from here" in stopped.stderr
    assert not (tmp_path / "m.jsonl").exists()
    where = ["problems.eval_source=generate:one_step", "problems.options={size: 2}"]
    run("data", "measure", "smollm2/dppo", *where, "--held-out", "--out", out)
    assert [p.id.partition("-")[0] for p in read_pairs(out)] == ["one_step", "one_step"]

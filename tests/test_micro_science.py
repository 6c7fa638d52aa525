"""The comparison of arms: intervals, claims, resuming, and a report that says what is missing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from maieutic import yaml12
from maieutic.errors import MaieuticError
from maieutic.micro import science
from maieutic.micro.build import check_target
from maieutic.micro.science import (
    CORE,
    REPORTING_SEEDS,
    build_overrides,
    build_record,
    curve,
    instruments,
    run_one,
    train,
)
from maieutic.micro.science_report import Arm, bootstrap, findings, write_report
from maieutic.training.sft_config import load_sft_recipe


def result(
    arm: str, seed: int, *, masked: float, own: float, leak: float, before: float = 0.2, n: int = 40
) -> dict:
    """A made-up result: the first ``leak`` share of the problems leaks."""

    def rows(gain: float, share: float) -> list[dict]:
        common = {
            "pre": 0.2,
            "post": 0.5,
            "wrong": False,
            "telling": 1,
            "tutor_turns": 4,
            "questions": 2,
            "excluded": None,
        }
        return [
            {"pair": f"p{i}", "gain": gain + (0.1 if i % 2 else -0.1), "leak": i < share * n, **common}
            for i in range(n)
        ]

    steps = [{"step": k, "rollout/reward": 0.1, "rollout/leak_rate": leak, "time/step": 1.0} for k in (1, 2)]
    setting = {
        "schema": 1,
        "arm": arm,
        "seed": seed,
        "problems": n,
        "overrides": [],
        "build": build_record(None),
    }
    return {
        "setting": setting,
        "train_seconds": 1.0,
        "before": rows(before, 0.5),
        "masked": rows(masked, leak),
        "own": rows(own, leak),
        "curve": steps,
    }


def arm(name: str, values: list[dict[str, float]]) -> Arm:
    return Arm(name, [result(name, REPORTING_SEEDS[i], **v) for i, v in enumerate(values)])


def test_bootstrap_knows_where_the_spread_is() -> None:
    rng = np.random.default_rng(0)
    between_seeds = np.repeat(np.array([[0.0], [0.5], [1.0]]), 50, axis=1)
    between_problems = np.repeat(rng.normal(0.5, 0.1, size=(1, 50)), 3, axis=0)
    wide, narrow = bootstrap(between_seeds), bootstrap(between_problems)
    assert wide.mean == pytest.approx(0.5) and (wide.low, wide.high) == (0.0, 1.0)
    assert narrow.low < narrow.mean < narrow.high and narrow.high - narrow.low < 0.08
    assert bootstrap(between_problems) == narrow
    holes = between_problems.copy()
    holes[0, :10] = np.nan
    assert np.isfinite([bootstrap(holes).mean, bootstrap(holes).low]).all()


def verdicts(arms: list[Arm]) -> list[bool | None]:
    return [f.holds for f in findings(arms)]


def test_claims_hold_or_fail_by_their_numbers() -> None:
    full = arm("full", [dict(masked=0.6, own=0.6, leak=0.0)] * 2)
    free = arm("no-gates", [dict(masked=0.6, own=0.6, leak=0.8)] * 2)
    seen = arm("leak-gate-only-no-mask", [dict(masked=0.3, own=0.9, leak=0.0)] * 2)
    same = arm("no-transfer", [dict(masked=0.3, own=0.9, leak=0.0)] * 2)
    assert verdicts([full, free, seen, same]) == [True] * 5 + [None]
    assert verdicts([full]) == [True, True, None, None, None, None]
    leaky = arm("full", [dict(masked=0.6, own=0.6, leak=0.0), dict(masked=0.25, own=0.6, leak=0.2)])
    tame = arm("no-gates", [dict(masked=0.6, own=0.6, leak=0.8), dict(masked=0.6, own=0.6, leak=0.4)])
    level = arm("leak-gate-only-no-mask", [dict(masked=0.6, own=0.7, leak=0.0)] * 2)
    assert verdicts([leaky, tame, level]) == [False, True, False, False, None, None]
    assert "1 of 2 seeds" in findings([leaky])[0].evidence


def test_report_says_what_is_missing_and_draws_readable_figures(tmp_path: Path) -> None:
    files = []
    for seed in (101, 7):
        file = tmp_path / f"full-{seed}.json"
        file.write_text(json.dumps(result("full", seed, masked=0.6, own=0.6, leak=0.0)))
        files.append(file)
    document = tmp_path / "docs" / "science.md"
    write_report([files], document)
    text = document.read_text()
    assert "Incomplete: 24 of 25 core runs are missing" in text
    assert "Seeds 7 are no reporting seeds" in text
    assert "| full | 2 | 0.50 [" in text and "not tested" in text
    for name in ("science-gains.svg", "science-leaks.svg"):
        assert name in text
        root = ElementTree.parse(document.with_name(name)).getroot()
        assert root.tag.endswith("svg") and len(root) > 10


def test_a_second_build_is_reported_and_compared(tmp_path: Path) -> None:
    gains = {"full": 0.6, "no-gates": 0.6, "leak-gate-only-no-mask": 0.3, "no-transfer": 0.6}
    folders = []
    for n, seen in enumerate((0.9, 0.9, 0.4)):
        (tmp_path / str(n)).mkdir()
        files = []
        for arm_name, masked in gains.items():
            own = seen if arm_name == "leak-gate-only-no-mask" else masked
            made = result(arm_name, 101, masked=masked, own=own, leak=0.9 if arm_name == "no-gates" else 0.0)
            made["setting"]["build"] = {"seed": 40 + n, "weights_sha256": {}}
            files.append(tmp_path / str(n) / f"{arm_name}.json")
            files[-1].write_text(json.dumps(made))
        folders.append(files)
    document = tmp_path / "science.md"
    write_report(folders[:2], document)
    assert "come out the same with every tutor and student" in document.read_text()
    assert "build --seed 40`" in document.read_text() and "build --seed 41`" in document.read_text()
    write_report([folders[0], folders[2]], document)
    assert "do not all come out the same" in document.read_text()


def test_a_folder_that_is_no_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MaieuticError, match=r"no overrides\.txt"):
        build_overrides(tmp_path)
    (tmp_path / "overrides.txt").write_text("a=1\nb=2\n")
    assert build_overrides(tmp_path) == ["a=1", "b=2"] and build_overrides(None) == []
    (tmp_path / "overrides.txt").write_text("tutor.model=/my folder/tutor\n")
    assert build_overrides(tmp_path) == ["tutor.model=/my folder/tutor"]


def test_a_build_is_not_written_over_and_a_stopped_one_is_named(tmp_path: Path) -> None:
    check_target(tmp_path / "new" / "build")
    assert (tmp_path / "new" / "build" / "models").is_dir()
    with pytest.raises(MaieuticError, match=r"was not finished .*delete .*build/models"):
        check_target(tmp_path / "new" / "build")
    (tmp_path / "new" / "build" / "overrides.txt").touch()
    with pytest.raises(MaieuticError, match="already holds a build"):
        check_target(tmp_path / "new" / "build")
    (tmp_path / "file").touch()
    with pytest.raises(MaieuticError, match=r"file: cannot write there \(Not a directory\)"):
        check_target(tmp_path / "file")


def stored_result(folder: Path, arm_name: str, seed: int, **setting: object) -> Path:
    made = result(arm_name, seed, masked=0.6, own=0.6, leak=0.0)
    made["setting"].update(setting)
    file = folder / "results" / f"{arm_name}-{seed}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made))
    return file


def test_what_would_spoil_the_report_is_an_error_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(science, "_in_process", lambda *a: pytest.fail("a run was started"))
    out, document = tmp_path / "out", tmp_path / "science.md"

    def refused(*arguments: object, match: str) -> None:
        with pytest.raises(MaieuticError, match=match):
            science.main(
                ["--out", str(out), "--doc", str(document), "--problems", "40", *map(str, arguments)]
            )
        assert not document.exists()

    refused("--report-only", match="no results to report in .*out/results")
    refused("--also", tmp_path / "empty", match="no results to report in .*empty/results")
    other = {"build": {"seed": 2, "weights_sha256": {}}}
    file = stored_result(out, "full", 101, **other)
    refused("--seeds", 102, match=r"full-101\.json is of another setting \(build differ\)")
    file.write_text(file.read_text()[:-30])
    refused("--seeds", 102, match=r"full-101\.json: cannot be read as a result .*delete it")
    refused("--report-only", match=r"full-101\.json: cannot be read as a result")
    file.write_text('{"setting": {}}')
    refused("--report-only", match=r"full-101\.json: no result of maieutic")
    file.unlink()
    stored_result(tmp_path / "also", "full", 101)
    stored_result(tmp_path / "also", "full", 102, **other)
    refused("--also", tmp_path / "also", match="different settings: .*full-101.* and .*full-102")
    (tmp_path / "file").touch()
    refused("--out", tmp_path / "file", match=r"file: cannot write there")


def test_a_run_that_fails_says_why_and_the_others_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arm_name: str, seed: int, out: Path, *more: object) -> int:
        (out / f"{arm_name}-{seed}.measure.log").write_text("Traceback\nMaieuticError: no space left\n\n")
        return 1

    monkeypatch.setattr(science, "_in_process", fails)
    arguments = ["--arms", "full", "--seeds", "102", "--problems", "40", "--out", str(tmp_path)]
    arguments += ["--doc", str(tmp_path / "science.md")]
    with pytest.raises(MaieuticError, match="no results to report"):
        science.main(arguments)
    stored_result(tmp_path, "full", 101)
    assert science.main(arguments) == 1
    said = capsys.readouterr().out
    assert f"full seed 102: FAILED (exit code 1): MaieuticError: no space left ({tmp_path}" in said
    assert "| full | 1 |" in (tmp_path / "science.md").read_text()


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    other = result("full", 102, masked=0.6, own=0.6, leak=0.0)
    other["setting"]["overrides"] = ["training.max_steps=2"]
    for seed, made in ((101, result("full", 101, masked=0.6, own=0.6, leak=0.0)), (102, other)):
        (tmp_path / f"full-{seed}.json").write_text(json.dumps(made))
    with pytest.raises(MaieuticError, match=r"different settings: .*full-101\.json and .*full-102\.json"):
        write_report([sorted(tmp_path.glob("*.json"))], tmp_path / "science.md")


def test_a_stored_result_is_not_run_again_and_not_mistaken(tmp_path: Path) -> None:
    made = result("full", 101, masked=0.6, own=0.6, leak=0.0)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "full-101.json").write_text(json.dumps(made))
    assert run_one("full", 101, tmp_path, 40, []) == made
    with pytest.raises(MaieuticError, match="another setting"):
        run_one("full", 101, tmp_path, 41, [])


def test_all_arms_share_one_instrument() -> None:
    for name in CORE:
        recipes = instruments(name, 101, 64, [])
        masked = recipes["masked"]
        assert masked == instruments("full", 102, 64, [])["masked"]
        assert (masked.env.transfer, masked.env.hide_tutor, masked.env.gates) == (True, True, "off")
    own = instruments("leak-gate-only-no-mask", 101, 64, [])["own"]
    assert (own.env.hide_tutor, own.env.gates) == (False, "off")


def test_sft_is_measured_as_an_arm_of_the_full_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert instruments("sft", 101, 64, [])["own"] == instruments("full", 101, 64, [])["own"]
    commands = []

    def finished(command: list[str], **kw: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", finished)
    run, weights = train("sft", 101, tmp_path, ["tutor.model=x", "problems.source=y"])
    assert (run, weights) == (tmp_path / "runs" / "sft-101", tmp_path / "runs" / "sft-101" / "model")
    assert commands[0][1:5] == ["-m", "maieutic", "sft", "micro/sft"]
    loaded = load_sft_recipe("micro/sft", [c for c in commands[0][5:]])
    assert loaded.experiment_overrides == ["tutor.model=x", "problems.source=y"] and loaded.seed == 101
    (run / "sft.json").parent.mkdir(parents=True)
    (run / "sft.json").write_text("{}")
    (run / "recipe.yaml").write_text(yaml12.dump(loaded.model_dump(mode="json")))
    train("sft", 101, tmp_path, ["tutor.model=x", "problems.source=y"])
    assert len(commands) == 1, "a finished run is not trained again"
    with pytest.raises(
        MaieuticError, match=r"sft-101 was trained with other overrides \(tutor\.model=x problems"
    ):
        train("sft", 101, tmp_path, ["tutor.model=z", "problems.source=y"])


def test_curve_keeps_training_rows_only(tmp_path: Path) -> None:
    rows = [
        {"train/step": 0, "eval/reward": 1.0},
        {"train/step": 1, "rollout/reward": 0.3, "time/step": 2.0, "x": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert curve(tmp_path / "metrics.jsonl") == [{"step": 1, "rollout/reward": 0.3, "time/step": 2.0}]

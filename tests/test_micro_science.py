"""The comparison of arms: intervals, claims, resuming, and a report that says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from maieutic.errors import MaieuticError
from maieutic.micro.science import CORE, REPORTING_SEEDS, curve, instruments, run_one
from maieutic.micro.science_report import Arm, bootstrap, findings, write_report


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
    setting = {"schema": 1, "arm": arm, "seed": seed, "problems": n, "overrides": []}
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
    assert verdicts([full, free, seen, same]) == [True] * 5
    assert verdicts([full]) == [True, True, None, None, None]
    leaky = arm("full", [dict(masked=0.6, own=0.6, leak=0.0), dict(masked=0.25, own=0.6, leak=0.2)])
    tame = arm("no-gates", [dict(masked=0.6, own=0.6, leak=0.8), dict(masked=0.6, own=0.6, leak=0.4)])
    level = arm("leak-gate-only-no-mask", [dict(masked=0.6, own=0.7, leak=0.0)] * 2)
    assert verdicts([leaky, tame, level]) == [False, True, False, False, None]
    assert "1 of 2 seeds" in findings([leaky])[0].evidence


def test_report_says_what_is_missing_and_draws_readable_figures(tmp_path: Path) -> None:
    files = []
    for seed in (101, 7):
        file = tmp_path / f"full-{seed}.json"
        file.write_text(json.dumps(result("full", seed, masked=0.6, own=0.6, leak=0.0)))
        files.append(file)
    document = tmp_path / "docs" / "science.md"
    write_report(files, document)
    text = document.read_text()
    assert "Incomplete: 24 of 25 core runs are missing" in text
    assert "Seeds 7 are no reporting seeds" in text
    assert "| full | 2 | 0.50 [" in text and "not tested" in text
    for name in ("science-gains.svg", "science-leaks.svg"):
        assert name in text
        root = ElementTree.parse(document.with_name(name)).getroot()
        assert root.tag.endswith("svg") and len(root) > 10


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    other = result("full", 102, masked=0.6, own=0.6, leak=0.0)
    other["setting"]["overrides"] = ["training.max_steps=2"]
    for seed, made in ((101, result("full", 101, masked=0.6, own=0.6, leak=0.0)), (102, other)):
        (tmp_path / f"full-{seed}.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match="different settings"):
        write_report(sorted(tmp_path.glob("*.json")), tmp_path / "science.md")


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


def test_curve_keeps_training_rows_only(tmp_path: Path) -> None:
    rows = [
        {"train/step": 0, "eval/reward": 1.0},
        {"train/step": 1, "rollout/reward": 0.3, "time/step": 2.0, "x": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert curve(tmp_path / "metrics.jsonl") == [{"step": 1, "rollout/reward": 0.3, "time/step": 2.0}]

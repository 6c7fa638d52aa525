"""Alerts fire once for each episode of trouble, are validated, survive a resume, and reach log, W&B and TensorBoard."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from maieutic.config import AlertsSpec, Recipe, ThresholdSpec
from maieutic.training.alerts import NAMES, AlertMonitor
from maieutic.training.run_folder import RunFolder
from maieutic.training.trackers import Trackers

METRIC = {
    "unknown": "rollout/unknown_share",
    "blank": "rollout/blank_turn_rate",
    "kl": "train/kl_mu_pi",
    "variance": "train/flat_group_share",
}
CALM = {"rollout/episodes": 8.0, "rollout/leak_rate": 0.2, **dict.fromkeys(METRIC.values(), 0.0)}


def played(
    values: list[Any], metric: str, spec: AlertsSpec | None = None
) -> tuple[list[int], dict[str, list[float]]]:
    """Steps at which something fired, and the flags of all alerts."""
    monitor, fired = AlertMonitor(spec or AlertsSpec()), []
    flags: dict[str, list[float]] = {f"alert/{n}": [] for n in NAMES}
    for step, value in enumerate(values, start=1):
        row, alerts = monitor.observe({**CALM, "train/step": step, metric: value})
        fired += [a.step for a in alerts]
        for name, flag in row.items():
            flags[name].append(flag)
    return fired, flags


@pytest.mark.parametrize("name", METRIC)
def test_an_alert_fires_once_per_episode_of_trouble(name: str) -> None:
    threshold: ThresholdSpec = getattr(AlertsSpec(), name)
    high, between, low = threshold.fire, (threshold.fire + threshold.clear) / 2, threshold.clear / 2
    #       once is not enough      fires        nothing new       over needs two in a row     again
    values = [high, low, high, high, high, between, high, low, between, low, low, high, high]
    fired, flags = played(values, METRIC[name])
    assert fired == [4, 13]
    assert flags.pop(f"alert/{name}") == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1]
    assert all(set(other) == {0.0} for other in flags.values())


def test_hovering_around_the_threshold_says_it_once() -> None:
    fired, flags = played([0.05, 0.05, 0.049, 0.051, 0.03, 0.06, 0.049, 0.05], "rollout/unknown_share")
    assert fired == [2]
    assert flags["alert/unknown"] == [0, 1, 1, 1, 1, 1, 1, 1]


def test_a_leak_rate_that_is_high_and_falls_is_no_alert_but_one_that_rises_is() -> None:
    assert played([1.0, 0.9, 0.8, 0.6, 0.5, 0.5, 0.5], "rollout/leak_rate")[0] == []
    # Means of three: .1 .1 .2 .3 .4: a rise of .2 and .3 in a row
    fired, _ = played([0.1, 0.1, 0.1, 0.1, 0.4, 0.4, 0.4], "rollout/leak_rate")
    assert fired == [7]
    assert (
        played([0.1, 0.1, 0.1, 0.1, 0.9, 0.1, 0.1, 0.1], "rollout/leak_rate", AlertsSpec(patience=4))[0] == []
    )


def test_what_is_absent_or_not_finite_changes_nothing() -> None:
    fired, flags = played([1.0, None, float("nan"), 1.0], "train/kl_mu_pi")
    assert fired == [4] and flags["alert/kl"] == [0, 0, 0, 1]
    assert AlertMonitor(AlertsSpec()).observe({"eval/episodes": 4.0, "eval/blank_turn_rate": 1.0}) == ({}, [])


def test_alerts_can_be_switched_off_and_set() -> None:
    off = AlertsSpec(kl=None, patience=1, blank=ThresholdSpec(fire=0.5, clear=0.1))
    fired, flags = played([9.0, 9.0], "train/kl_mu_pi", off)
    assert fired == [] and flags["alert/kl"] == []
    assert played([0.4, 0.5], "rollout/blank_turn_rate", off)[0] == [2]


@pytest.mark.parametrize(
    ("alerts", "said"),
    [
        ({"kl": {"fire": 0.1, "clear": 0.1}}, r"clear \(0.1\) is not below fire \(0.1\)"),
        ({"blank": {"fire": 1.5, "clear": 0.1}}, "a share is never above 1"),
        ({"patience": 0}, "greater than or equal to 1"),
        ({"leek": None}, "leek"),
    ],
)
def test_impossible_thresholds_are_refused(alerts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Recipe.model_validate(
            {
                "name": "r",
                "tutor": {"model": "m"},
                "students": [{"model": "m"}],
                "tracking": {"alerts": alerts},
            }
        )


def test_an_alert_is_in_the_log_in_the_trackers_and_in_the_row_and_a_resume_does_not_repeat_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Recipe.model_validate({"name": "r", "tutor": {"model": "m"}, "students": [{"model": "m"}]})
    seen: list[Any] = []
    wandb = SimpleNamespace(
        name="wandb",
        log=lambda values, step: None,
        run=SimpleNamespace(alert=lambda **kw: seen.append(kw), finish=lambda exit_code: None),
    )
    board = SimpleNamespace(
        name="tensorboard",
        log=lambda values, step: None,
        finish=lambda: None,
        writer=SimpleNamespace(add_text=lambda *a: seen.append(a)),
    )

    def trackers() -> Trackers:
        made = Trackers(SimpleNamespace(trackers=[]), recipe, RunFolder(tmp_path))
        made._accelerator.trackers = [wandb, board]
        return made

    trouble = {**CALM, "rollout/unknown_share": 0.5}
    first = trackers()
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            first.log(step, trouble)
        first.finish(85)
        again = trackers()  # stopped in the middle of an episode of trouble
        for step in (4, 5):
            again.log(step, trouble)
        again.finish(0)
    (alert, text) = seen
    assert alert["title"] == "Verdicts are missing" and alert["level"] == "WARN" and len(alert["title"]) < 64
    assert (
        "step 2: rollout/unknown_share: 0.5" in alert["text"] and "tracking.alerts.unknown" in alert["text"]
    )
    assert text[0] == "alerts/unknown" and text[2] == 2
    assert [m for m in caplog.messages if m.startswith("ALERT")] == [
        f"ALERT {alert['title']}: {alert['text']}"
    ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["alert/unknown"] for r in rows] == [0, 1, 1, 1, 1]
    assert [r["alert/kl"] for r in rows] == [0] * 5

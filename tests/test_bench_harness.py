"""The benchmark of the harness's own cost, at a tiny size: its checks hold, and each fails on a planted error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import harness
from harness import (
    LAG_S,
    TEST_TOKENS,
    TOKENS,
    Case,
    Played,
    fault,
    fingerprint,
    overdue,
    play,
    same_whatever_the_timing,
)
from support.classroom import STUDENT, TUTOR
from support.loopback import Loopback, Script, make_script

from maieutic.tiny import tiny_tokenizer

pytestmark = pytest.mark.integration
CASE = Case(4, 5, whole=True)


@pytest.fixture(scope="module")
def script() -> Script:
    return make_script(tiny_tokenizer(), TOKENS, tests={STUDENT: TEST_TOKENS})


@pytest.fixture(scope="module")
def server(script: Script) -> Iterator[Loopback]:
    with Loopback(script) as made:
        yield made


@pytest.fixture
def played(server: Loopback, tiny_model_dir: Path) -> Played:
    return play(CASE, server, str(tiny_model_dir))


def test_answers_have_the_scripted_tokens_and_are_the_tokenizers_own(script: Script) -> None:
    tokenizer = tiny_tokenizer()
    for key in range(200):
        said = script.said(TUTOR, key)
        assert len(said.ids) == len(said.logprobs) == TOKENS[TUTOR]
        assert tokenizer.encode(said.text, add_special_tokens=False) == said.ids[:-1]
        assert len(script.said(STUDENT, key, 16).ids) == TEST_TOKENS


@pytest.mark.parametrize("student", ["ids", "chat"])
def test_a_rollout_is_as_scripted_and_does_not_depend_on_timing(
    script: Script, tiny_model_dir: Path, student: str
) -> None:
    case = Case(4, 4, student=student, whole=True)  # type: ignore[arg-type]
    assert len(same_whatever_the_timing(script, str(tiny_model_dir), case)) == 16


def test_a_case_reports_what_it_cost(played: Played, script: Script) -> None:
    assert fault(played, script) == ""
    turns = 4 * 4
    assert played.ms_per_turn == pytest.approx(1e3 * played.cpu_s / turns)
    assert played.us_per_token == pytest.approx(
        1e6 * played.cpu_s / (8 * TOKENS[TUTOR] + 8 * TOKENS[STUDENT])
    )


def test_a_loop_that_stands_still_is_late_for_every_timer_meanwhile() -> None:
    assert overdue(1.0, 1.0 + 0.2 * LAG_S) == pytest.approx([0.2 * LAG_S])
    assert overdue(1.0, 1.0 + 3.5 * LAG_S) == pytest.approx([x * LAG_S for x in (3.5, 2.5, 1.5, 0.5)])
    assert overdue(1.0, 0.9999) == pytest.approx([-0.0001])  # a clock that is coarser than it reads


def test_planted_errors_are_found(played: Played, script: Script) -> None:
    first = fingerprint(played.episodes)
    segment = played.episodes[1].trajectory.segments[0]  # type: ignore[union-attr]
    place = segment.mask.index(True)

    segment.ids[place] += 1
    assert "not those that the server sent" in fault(played, script)
    assert fingerprint(played.episodes) != first
    segment.ids[place] -= 1
    assert fault(played, script) == ""

    segment.logprobs[place] -= 1e-9
    assert "not those that the server sent" in fault(played, script)
    segment.logprobs[place] += 1e-9

    played.usage[TUTOR]["retries"] = 1
    assert "retries" in fault(played, script)
    played.usage[TUTOR]["retries"] = 0

    played.episodes[2].dialogue.end = "end_token"
    assert "ended as end_token" in fault(played, script)
    played.episodes[2].dialogue.end = "max_turns"

    played.episodes.pop()
    assert "3 episodes of 4" in fault(played, script)


def test_rollouts_that_differ_end_the_benchmark(
    script: Script, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = iter(["one", "other"])
    monkeypatch.setattr(harness, "fingerprint", lambda episodes: next(prints))
    with pytest.raises(SystemExit, match="depend on the order of answers"):
        same_whatever_the_timing(script, str(tiny_model_dir), Case(4, 4))


def test_growth_is_computed_as_by_hand() -> None:
    """A cost of 2 µs a token plus 100 µs a dialogue: dearer a token when short, and every further token alike."""
    found = {}
    for name, case in harness.cases().items():
        cpu = case.rounds * case.dialogues * (2e-6 * case.tokens + 100e-6)
        found[name] = [harness.Played([], [], {}, cpu, 1.0, [0.001] * 200, case)]
    figures = harness.figures(found)
    by = {f.measure: f.runs for f in figures}
    assert len(by) == len(figures), "no figure twice"
    tokens = {t: Case(256, t).tokens for t in harness.LENGTHS}
    least, most = 2 + 100 / tokens[22], 2 + 100 / tokens[4]
    growth = next(runs for name, runs in by.items() if "of 4, 11, 22 turns" in name)
    assert growth[0] == pytest.approx(most / least - 1)
    assert by["harness CPU of a further sampled token, 4 to 11 turns"][0] == pytest.approx(2)
    assert by["the same, most ÷ least − 1"][0] == pytest.approx(0, abs=1e-9)
    assert {f.row for f in figures if f.target} == {"1", "1b", "10"}

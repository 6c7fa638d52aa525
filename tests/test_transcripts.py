"""The transcript format: what is written comes back equal, and a broken file says where it is broken."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from episodes import make_episode, make_pair
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, PostTest, RewardBreakdown, Verdict
from maieutic.errors import RunFolderError, TranscriptError
from maieutic.problems.schema import Problem, ProblemPair, SolveRate
from maieutic.training.trajectory import Segment, Trajectory
from maieutic.transcripts import (
    TranscriptWriter,
    episode_from_json,
    episode_to_json,
    read_episodes,
    read_transcripts,
    transcript_steps,
)

# Any code point, surrogates too, without a high surrogate directly before a low one (JSON joins such a pair).
texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=40).filter(
    lambda s: s == json.loads(json.dumps(s))
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
counts = st.integers(0, 2**40)
reals = st.floats(allow_nan=False)
shares = st.floats(0, 1)

turns = st.lists(
    st.builds(
        Turn,
        st.sampled_from(["tutor", "student"]),
        texts,
        texts,
        counts,
        counts,
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        texts,
        st.integers(1, 5),
    ),
    max_size=4,
)
problems = st.builds(
    Problem,
    text=names,
    answer=names,
    solution=st.none() | names,
    rates=st.dictionaries(names, st.builds(SolveRate, rate=shares, n=st.integers(1, 99)), max_size=2),
)
pairs = st.builds(
    ProblemPair,
    id=names,
    source=problems,
    transfer=st.none() | problems,
    provenance=st.dictionaries(
        names, st.none() | st.booleans() | st.integers() | names | st.lists(names), max_size=2
    ),
)
verdicts = st.builds(
    Verdict,
    st.sampled_from(["leakage", "correctness"]),
    st.sampled_from(["ok", "reject", "unknown"]),
    texts,
    texts,
    st.none() | counts,
    texts,
    st.dictionaries(st.sampled_from(["ok", "reject"]), counts),
)
post_tests = st.lists(
    st.tuples(texts, st.sampled_from(["right", "wrong", "no_answer", "error"])), max_size=4
).flatmap(
    lambda rows: st.builds(
        PostTest,
        st.sampled_from(["transfer", "source"]),
        st.booleans(),
        st.just([a for a, _ in rows]),
        st.just([g for _, g in rows]),
    )
)
rewards = st.builds(
    RewardBreakdown,
    reals,
    st.booleans(),
    shares,
    st.none() | shares,
    st.none() | reals,
    reals,
    reals,
    reals,
    reals,
    reals,
    st.dictionaries(names, reals, max_size=2),
)
segments = st.lists(st.tuples(counts, st.booleans(), reals), max_size=5).flatmap(
    lambda rows: st.builds(
        Segment,
        st.just([r[0] for r in rows]),
        st.just([r[1] for r in rows]),
        st.just([r[2] for r in rows]),
        counts,
    )
)
episodes = st.builds(
    Episode,
    id=texts,
    group_id=texts,
    pair=pairs,
    phase=st.sampled_from(["train", "eval"]),
    step=counts,
    index=counts,
    seed=st.integers(0, 2**64),
    student=texts,
    dialogue=st.builds(
        Dialogue,
        texts,
        texts,
        st.none() | texts,
        turns,
        st.none() | st.sampled_from(["end_token", "max_turns"]),
    ),
    verdicts=st.dictionaries(st.sampled_from(["leakage", "correctness"]), verdicts),
    post_test=st.none() | post_tests,
    reward=st.none() | rewards,
    exclusion=st.none() | texts,
    error=st.none() | texts,
    trajectory=st.none()
    | st.builds(
        Trajectory, texts, texts, st.lists(segments, max_size=2), st.floats(-9, 9), reals, st.booleans()
    ),
    policy_version=counts,
    timing=st.dictionaries(names, reals, max_size=2),
)


@given(episodes)
@settings(max_examples=60, deadline=None)
def test_an_episode_comes_back_equal(episode: Episode) -> None:
    line = json.dumps(episode_to_json(episode, arm="dppo", tokens=True), allow_nan=False)
    assert line.isascii() and "\n" not in line
    assert episode_from_json(json.loads(line)) == episode


def test_the_line_holds_what_the_record_needs() -> None:
    data = episode_to_json(make_episode(tokens=True, leak=True, unknown=False), arm="grpo")
    assert data["schema"] == 1 and data["arm"] == "grpo"
    assert "tokens" not in data and data["token_record"] == {"segments": 1, "tokens": 3, "sampled": 2}
    assert data["verdicts"]["leakage"]["quote"] == f"The answer is {make_pair(0).source.answer}"
    assert data["dialogue"]["turns"][1]["thinking"].startswith("The student mixes up")
    post = data["post_test"]
    assert post["rate"] == post["right"] / post["graded"] == data["reward"]["post"]


def test_numbers_without_json_spelling_survive() -> None:
    episode = make_episode(unknown=False)
    episode.reward = RewardBreakdown(math.inf, False, 0.5, None, -math.inf, extra={"x": math.nan})
    episode.timing = {"total": math.nan}
    back = episode_from_json(json.loads(json.dumps(episode_to_json(episode), allow_nan=False)))
    assert back.reward is not None and back.reward.reward == math.inf and back.reward.gain == -math.inf
    assert math.isnan(back.reward.extra["x"]) and math.isnan(back.timing["total"])


def test_awkward_text_survives_the_file(tmp_path: Path) -> None:
    text = "\ud800 lone \udfff \x00\x1b[31m\u2028\u2029\r\n\u202e </script> 👩‍🚀 \\boxed{\\frac{1}{2}}"
    episode = make_episode(turns=[Turn("student", text, thinking=text)])
    TranscriptWriter(tmp_path).write("eval", 0, [episode, make_episode(number=1)])
    back = list(read_episodes(tmp_path))
    assert back[0].dialogue.turns[0].visible == text and back[0].dialogue.turns[0].thinking == text
    assert back == [episode, make_episode(number=1)]


def test_files_are_read_in_order_and_by_phase_and_step(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path, arm="dppo")
    for step in (10, 0, 2):
        writer.write("train", step, [make_episode(step=step, phase="train", index=i) for i in range(2)])
    path = writer.write("eval", 2, [make_episode(step=2)])
    assert path == tmp_path / "transcripts" / "eval-step-000002.jsonl"
    seen = [(d["phase"], d["step"], d["index"]) for d in read_transcripts(tmp_path)]
    train = [("train", s, i) for s in (0, 2, 10) for i in range(2)]
    assert seen == [*train[:2], ("eval", 2, 0), *train[2:]]
    assert [d["step"] for d in read_transcripts(tmp_path, phase="train", steps=[10])] == [10, 10]
    assert transcript_steps(tmp_path) == [0, 2, 10] and transcript_steps(tmp_path, "eval") == [2]
    assert list(read_transcripts(tmp_path / "nothing")) == []


def test_reading_streams(tmp_path: Path) -> None:
    path = TranscriptWriter(tmp_path).write("eval", 0, [make_episode(), make_episode(number=1)])
    with open(path, "a") as file:
        file.write("broken")
    lines = read_transcripts(tmp_path)
    assert next(lines)["pair"]["id"] == "p-000"
    assert next(lines)["pair"]["id"] == "p-001"
    with pytest.raises(TranscriptError, match=r"eval-step-000000\.jsonl, line 3: not a line of JSON"):
        next(lines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "line 1: schema version 2: this release reads version 1"),
        ({"schema": None}, "line 1: schema version None"),
        ({"pair": {}}, "line 1: a field has the wrong type: .*id"),
        ({"dialogue": {"id": "x"}}, "line 1: dialogue has no field 'problem'"),
        ({"verdicts": {"leakage": {"gate": "leakage"}}}, "line 1: verdict 'leakage' has no field 'decision'"),
        ({"tokens": {"episode_id": "e"}}, "line 1: .*no field 'group_id'"),
        ({"timing": {"total": "soon"}}, "line 1: a field has the wrong type"),
    ],
)
def test_a_wrong_line_names_file_and_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = TranscriptWriter(tmp_path).write("eval", 0, [make_episode()])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TranscriptError, match=message) as caught:
        list(read_episodes(tmp_path))
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "transcripts" / "eval-step-000000.jsonl").mkdir(parents=True)
    with pytest.raises(TranscriptError, match=r"eval-step-000000\.jsonl cannot be read: Is a directory"):
        list(read_transcripts(tmp_path))


def test_unknown_keys_are_ignored_and_new_fields_take_their_default(tmp_path: Path) -> None:
    data = episode_to_json(make_episode())
    data["later"] = 1
    for turn in data["dialogue"]["turns"]:
        del turn["attempts"]
        turn["mood"] = "calm"
    assert episode_from_json(data) == make_episode()


def test_a_step_that_crashes_leaves_nothing_and_keeps_the_earlier_file(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path)
    path = writer.write("train", 3, [make_episode(step=3, phase="train")])
    before = path.read_bytes()

    def crash() -> Any:
        yield make_episode(step=3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write("train", 3, crash())
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_writing_a_step_again_replaces_it_and_later_steps_can_be_discarded(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write("train", step, [make_episode(step=step)] * 3)
    writer.write("train", 2, [make_episode(number=5, step=2)])
    assert [d["pair"]["id"] for d in read_transcripts(tmp_path, steps=[2])] == ["p-005"]
    assert [p.name for p in writer.discard_after(1)] == ["train-step-000002.jsonl", "train-step-000003.jsonl"]
    assert transcript_steps(tmp_path) == [1]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(
        RunFolderError, match=r"train-step-000001\.jsonl: No space left on device; free space"
    ):
        TranscriptWriter(tmp_path).write("train", 1, [make_episode()])
    assert os.listdir(tmp_path / "transcripts") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_truly_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "transcripts"
    folder.mkdir()
    (folder / f".eval-step-000000.jsonl.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match="No space left on device"):
        TranscriptWriter(tmp_path).write("eval", 0, [make_episode()])
    assert os.listdir(folder) == []

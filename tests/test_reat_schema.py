"""REAT's records: closed sets, caps, N/A, S on 0-100, ids of experiences."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from maieutic.reat.schema import (
    CAPS,
    DIMENSIONS,
    Critique,
    Emotion,
    ErrorType,
    Experience,
    Intent,
    Observation,
    Provenance,
    Scores,
    StateTags,
    Struggle,
    capped,
    score_100,
)

TAGS = StateTags(
    emotion=Emotion.CONFUSED,
    intent=Intent.DEBUGGING,
    error_type=ErrorType.CARELESS,
    struggle=Struggle.REGRESSION,
)
levels = st.integers(0, 4)
scores = st.builds(
    Scores,
    scaffolding=levels,
    attribution=levels,
    empathy=levels,
    focus=levels,
    adaptation=st.none() | levels,
)
failures = st.lists(st.sampled_from(list(CAPS)), unique=True).map(tuple)


def five(scaffolding: int, attribution: int, empathy: int, focus: int, adaptation: int | None) -> Scores:
    return Scores(
        scaffolding=scaffolding,
        attribution=attribution,
        empathy=empathy,
        focus=focus,
        adaptation=adaptation,
    )


def critique(given: Scores, *named: Any) -> Critique:
    return Critique(given=given, failures=named, quality="mediocre", reasons="r")


def experience(**changes: Any) -> Experience:
    origin = {
        "transcript": "eval-step-000000.jsonl",
        "episode_id": "e",
        "turn": 3,
        "revised": False,
        "rounds": 0,
        "scores": (90.0,),
        "rewrite": "rewritten",
    } | changes.pop("origin", {})
    content = {
        "tags": TAGS,
        "query": "q",
        "template": "t",
        "advice": "a",
        "pitfalls": "p",
        "struggle_handling": "s",
        "explanation": "e",
    } | changes
    utility = content.pop("utility", 90.0)
    return Experience.make(utility=utility, provenance=Provenance(**origin), **content)


def test_the_closed_sets_are_those_of_table_5() -> None:
    assert [len(k) for k in (Emotion, Intent, ErrorType, Struggle)] == [6, 8, 6, 6]
    assert {e.value for e in Emotion} == {
        "confused",
        "frustrated",
        "neutral",
        "confident",
        "curious",
        "relieved",
    }
    assert "not_applicable" in {e.value for e in ErrorType} & {s.value for s in Struggle}


def test_tags_are_hashable_and_their_key_is_stable_and_reversible() -> None:
    assert TAGS.key() == "confused|debugging|careless|regression"
    assert StateTags.from_key(TAGS.key()) == TAGS and len({TAGS, StateTags.from_key(TAGS.key())}) == 1
    keys = {
        StateTags(emotion=a, intent=b, error_type=c, struggle=d).key()
        for a in Emotion
        for b in Intent
        for c in ErrorType
        for d in Struggle
    }
    assert len(keys) == 6 * 8 * 6 * 6
    for bad in ("confused|debugging|careless", "ecstatic|debugging|careless|regression"):
        with pytest.raises(ValueError):
            StateTags.from_key(bad)


@pytest.mark.parametrize(
    ("given", "s", "lowest"),
    [
        (five(4, 4, 4, 4, 4), 100.0, 4),
        (five(0, 0, 0, 0, 0), 0.0, 0),
        (five(4, 3, 2, 1, 0), 50.0, 0),
        (five(4, 3, 2, 1, None), 62.5, 1),  # N/A is left out: neither 0 nor 4 stands in for it
        (five(4, 4, 4, 4, None), 100.0, 4),
        (five(3, 3, 3, 3, 4), 80.0, 3),
    ],
)
def test_score_is_the_mean_of_the_applicable_dimensions(given: Scores, s: float, lowest: int) -> None:
    assert critique(given).score == pytest.approx(s, abs=1e-12)
    assert critique(given).lowest == lowest


@pytest.mark.parametrize(
    ("failure", "dimension", "cap"),
    [
        ("answer_given", "scaffolding", 0),
        ("pseudo_scaffolding", "scaffolding", 2),
        ("misdiagnosis", "attribution", 1),
        ("fake_empathy", "empathy", 2),
    ],
)
def test_a_major_failure_caps_its_dimension_and_no_other(failure: Any, dimension: str, cap: int) -> None:
    found = critique(five(4, 4, 4, 4, 4), failure)
    assert found.scores.model_dump() == five(4, 4, 4, 4, 4).model_dump() | {dimension: cap}
    assert found.was_capped and found.score == pytest.approx(100 * (16 + cap) / 20) and found.lowest == cap
    below = critique(five(0, 0, 0, 0, 0), failure)
    assert below.scores == below.given and not below.was_capped, "a cap never raises a score"


def test_the_lower_of_two_caps_on_one_dimension_counts() -> None:
    both = critique(five(4, 4, 4, 4, None), "pseudo_scaffolding", "answer_given")
    assert both.scores.scaffolding == 0 and both.score == 75.0


@given(scores, failures)
def test_caps_only_lower_keep_na_and_bound_s(given_: Scores, named: tuple[Any, ...]) -> None:
    after = capped(given_, named)
    assert capped(after, named) == after
    for d in DIMENSIONS:
        a, b = getattr(given_, d), getattr(after, d)
        assert (a is None) == (b is None) and (a is None or b <= a)
    assert 0.0 <= score_100(after) <= score_100(given_) <= 100.0


@pytest.mark.parametrize("bad", [-1, 5, 2.5, None])
def test_scores_out_of_range_are_refused(bad: Any) -> None:
    with pytest.raises(ValidationError):
        five(bad, 4, 4, 4, 4)


def test_an_observation_has_no_defaults() -> None:
    whole = {
        "meaningful": True,
        "tags": TAGS,
        "error_detail": "x",
        "struggle_reason": "y",
        "teacher_evidence": "z",
        "interaction_summary": "w",
    }
    assert Observation(**whole).diagnosis == "x y"
    for name in whole:
        with pytest.raises(ValidationError):
            Observation(**{k: v for k, v in whole.items() if k != name})
    with pytest.raises(ValidationError):
        Observation(**whole, mood="sad")


def test_the_id_is_that_of_content_and_origin_and_not_of_use() -> None:
    first = experience()
    assert len(first.id) == 24 and experience().id == first.id
    assert experience(utility=10.0).id == first.id
    used = first.model_copy(update={"utility": 50.0, "uses": 3, "enabled": False})
    assert Experience.model_validate_json(used.model_dump_json()) == used
    others = [
        experience(query="other"),
        experience(advice="other"),
        experience(tags=TAGS.model_copy(update={"emotion": Emotion.CURIOUS})),
        experience(origin={"turn": 5}),
        experience(origin={"episode_id": "f"}),
        experience(origin={"parents": ("a", "b")}),
    ]
    assert len({first.id, *(o.id for o in others)}) == 7
    assert experience(origin={"scores": (91.0,)}).id == first.id


def test_changed_content_under_an_old_id_is_refused() -> None:
    data = experience().model_dump(mode="json") | {"advice": "tampered"}
    with pytest.raises(ValidationError, match="does not belong to this content"):
        Experience.model_validate(data)


def test_schema_and_config_import_no_torch() -> None:
    code = "import maieutic.reat.schema, maieutic.reat.distil_config, maieutic.reat.cli, sys; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    )

"""State-aware retrieval: the relation and its steps, the fallback query, thresholds, the reasons, and the ablations."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from maieutic.reat.related_states import (
    CODES,
    EMOTIONS,
    ERRORS,
    INTENTS,
    STATES,
    STRUGGLES,
    WIDENING,
    Step,
    admitted_codes,
    related,
)
from maieutic.reat.repository import Repository
from maieutic.reat.retrieval import Drop, Query, RetrievalSettings
from maieutic.reat.schema import Emotion, ErrorType, Intent, StateTags, Struggle
from reat_support import EXACT, BitEmbedder, admit, bits, cosine, experience, needs_faiss

needs_faiss()
HERE = StateTags(
    emotion=Emotion.CONFUSED,
    intent=Intent.GUESSING,
    error_type=ErrorType.LOGIC_ERROR,
    struggle=Struggle.REPEATED_ERROR,
)
AFFECT = HERE.model_copy(update={"emotion": Emotion.FRUSTRATED, "intent": Intent.ASK_ANSWER})
RELATED = HERE.model_copy(
    update={"error_type": ErrorType.CONCEPT_ERROR, "struggle": Struggle.PERSISTENT_CONFUSION}
)
CORE = HERE.model_copy(update={"emotion": Emotion.RELIEVED, "struggle": Struggle.REGRESSION})
FOREIGN = HERE.model_copy(update={"error_type": ErrorType.CALCULATION_ERROR})
EVERY = RetrievalSettings(threshold=-1, top_k=99)


@pytest.fixture
def repository(tmp_path: Path):
    settings = EXACT.model_copy(update={"tau_dup": 1.0, "tau_merge": 1.0, "no_merging": True})
    with Repository.open(tmp_path, embedder=BitEmbedder(), settings=settings) as made:
        yield made


# ---- the relation


def test_the_steps_as_the_table_has_them() -> None:
    first = {
        other: next((s for s in WIDENING if related(HERE, other, s)), None)
        for other in (HERE, AFFECT, RELATED, CORE, FOREIGN)
    }
    assert list(first.values()) == [Step.SAME, Step.AFFECT, Step.RELATED, Step.CORE, None]
    assert related(HERE, FOREIGN, Step.ANY)


def test_how_many_states_each_step_lets_through() -> None:
    sizes = {step: int(admitted_codes(HERE, step).sum()) for step in Step}
    # confused: 2 related emotions; guessing: 2 intents; logic: 1 error type; repeated: 2 struggle statuses
    assert sizes == {"same": 1, "affect": 9, "related": 54, "core": 288, "any": 1728}


def test_the_masks_are_the_relation_as_it_is_written_down() -> None:
    rng = np.random.default_rng(0)
    for state in [HERE, *(STATES[c] for c in rng.choice(len(STATES), 6, replace=False))]:
        for step in Step:
            assert admitted_codes(state, step).tolist() == [related(state, other, step) for other in STATES]


def test_the_relation_is_symmetric_and_each_step_holds_the_one_before() -> None:
    masks = {step: np.stack([admitted_codes(s, step) for s in STATES]) for step in Step}
    for step, mask in masks.items():
        assert (mask == mask.T).all(), step
        assert mask.diagonal().all(), step
    for narrow, wide in zip(Step, list(Step)[1:], strict=False):
        assert (masks[narrow] <= masks[wide]).all() and (masks[narrow] != masks[wide]).any(), wide


def test_every_pair_of_a_table_joins_two_values_of_its_field() -> None:
    for table, field in ((EMOTIONS, Emotion), (INTENTS, Intent), (ERRORS, ErrorType), (STRUGGLES, Struggle)):
        assert all(len(pair) == 2 and pair <= set(field) for pair in table)
    lonely = [
        v
        for table, field in (
            (EMOTIONS, Emotion),
            (INTENTS, Intent),
            (ERRORS, ErrorType),
            (STRUGGLES, Struggle),
        )
        for v in field
        if not any(v in pair for pair in table)
    ]
    assert lonely == [Intent.OFF_TOPIC]


def test_the_table_in_the_documentation_is_the_one_in_the_code() -> None:
    text = (Path(__file__).parents[1] / "docs" / "reat.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(" `"): {c.strip(" `") for c in cells[2].split(",")}
        for line in text.splitlines()
        if line.startswith("| `") and len(cells := line.split("|")) == 5
    }
    fields = {"emotion": Emotion, "intent": Intent, "error_type": ErrorType, "struggle": Struggle}
    for table, (label, field) in zip((EMOTIONS, INTENTS, ERRORS, STRUGGLES), fields.items(), strict=True):
        for value in field:
            mates = {o.value for o in field if frozenset((value, o)) in table}
            name = f"{label}: {value.value}"
            assert rows[name] == (mates or {"none"}), name


# ---- the query


@pytest.mark.parametrize(
    "rewritten, diagnosis, text, source",
    [
        ("mixes rate and total ", "adds 3 and 4", "mixes rate and total", "rewritten"),
        (None, " adds 3 and 4", "adds 3 and 4", "fallback"),
        ("  ", "adds 3 and 4", "adds 3 and 4", "fallback"),
        (None, " ", "", "none"),
    ],
)
def test_the_fallback_query(rewritten: str | None, diagnosis: str, text: str, source: str) -> None:
    assert Query.of(rewritten, diagnosis) == Query(text, source)  # type: ignore[arg-type]


def test_the_fallback_is_what_is_looked_up(repository: Repository) -> None:
    wanted, other = experience(bits(0xFF), HERE, 0), experience(bits(0), HERE, 1)
    admit(repository, wanted)
    admit(repository, other)
    found = repository.retrieve(HERE, Query.of(None, bits(0xFF)))
    assert [t.experience.id for t in found.taken] == [wanted.id]
    assert found.summary()["query_source"] == "fallback"


def test_nothing_to_look_for_finds_nothing(repository: Repository) -> None:
    admit(repository, experience(bits(0), HERE))
    for blank in (Query.of(None, ""), Query(" ", "rewritten"), ""):
        found = repository.retrieve(HERE, blank, EVERY)
        assert found.query == Query("", "none")
    assert (found.taken, len(found.dropped), found.step, found.tried) == ((), 0, None, ())


# ---- thresholds, ranking, reasons


def test_the_threshold_at_its_edge(repository: Repository) -> None:
    at, under = experience(bits(0b1111), HERE, 0), experience(bits(0b11111), HERE, 1)
    for e in (under, at):
        admit(repository, e)
    found = repository.retrieve(HERE, bits(0), RetrievalSettings(threshold=0.5, top_k=5))
    assert [(t.experience.id, t.similarity, t.reason) for t in found.taken] == [(at.id, 0.5, "similar")]
    assert list(found.dropped) == [Drop(under.id, 0.375, "below_threshold")]
    higher = float(np.nextafter(np.float32(0.5), np.float32(1)))
    assert repository.retrieve(HERE, bits(0), RetrievalSettings(threshold=higher)).taken == ()


def test_ranked_by_cosine_and_every_candidate_has_a_reason(repository: Repository) -> None:
    texts = [0b111111, 0b1, 0, 0b111, 0b11, 0b11 << 4]
    made = [experience(bits(t), HERE, n) for n, t in enumerate(texts)]
    off = experience(bits(0b1 << 9), HERE, 9)
    for e in [*made, off, experience(bits(0), FOREIGN, 10)]:
        admit(repository, e)
    repository.disable(off.id, "by hand")
    found = repository.retrieve(HERE, bits(0), RetrievalSettings(threshold=0.6, top_k=3))
    assert [t.experience.id for t in found.taken] == [
        made[2].id,
        made[1].id,
        made[4].id,
    ]  # the older of 4 and 5
    assert [t.similarity for t in found.taken] == [1.0, 0.875, 0.75]
    assert list(found.dropped) == [
        Drop(made[5].id, 0.75, "beyond_top_k"),
        Drop(made[3].id, 0.625, "beyond_top_k"),
        Drop(made[0].id, 0.25, "below_threshold"),
        Drop(off.id, None, "disabled"),
    ]
    assert found.dropped[-1] == found.dropped[3] and found.dropped[1:3] == list(found.dropped)[1:3]
    with pytest.raises(IndexError):
        found.dropped[4]
    assert found.dropped.counts() == {"beyond_top_k": 2, "below_threshold": 1, "disabled": 1}
    assert found.summary() == {
        "query": bits(0),
        "query_source": "rewritten",
        "step": "same",
        "tried": [{"step": "same", "enabled": 6, "disabled": 1}],
        "taken": [
            {"id": t.experience.id, "similarity": t.similarity, "reason": "similar"} for t in found.taken
        ],
        "dropped": {"beyond_top_k": 2, "below_threshold": 1, "disabled": 1},
    }


def test_what_is_taken_is_the_whole_experience(repository: Repository) -> None:
    admit(repository, experience(bits(0), HERE), 91)
    (taken,) = repository.retrieve(HERE, bits(0)).taken
    assert taken.experience == repository.get(taken.experience.id)
    assert taken.experience.utility == 91


# ---- widening


def test_the_order_of_widening(repository: Repository) -> None:
    made = {s: experience(bits(1 << n), tags, n) for n, (s, tags) in enumerate(
        ((Step.CORE, CORE), (Step.RELATED, RELATED), (Step.AFFECT, AFFECT), (Step.SAME, HERE))
    )}  # fmt: skip
    admit(repository, experience(bits(0), FOREIGN, 9))
    assert repository.retrieve(HERE, bits(0)).step is None
    for step, e in made.items():  # each one is nearer in state than those before
        admit(repository, e)
        found = repository.retrieve(HERE, bits(0), EVERY)
        assert found.step == step and e.id in [t.experience.id for t in found.taken]
        assert [t.step for t in found.tried] == list(WIDENING[: WIDENING.index(step) + 1])
        assert [t.enabled for t in found.tried[:-1]] == [0] * WIDENING.index(step)
    assert len(found.taken) == 1
    related_first = EVERY.model_copy(update={"first_step": Step.RELATED})
    found = repository.retrieve(HERE, bits(0), related_first)
    assert found.step == Step.RELATED and len(found.taken) == 3


def test_a_step_with_only_disabled_experiences_is_empty(repository: Repository) -> None:
    same, near = experience(bits(0), HERE, 0), experience(bits(1), AFFECT, 1)
    for e in (same, near):
        admit(repository, e)
    repository.disable(same.id, "by hand")
    found = repository.retrieve(HERE, bits(0))
    assert found.step == Step.AFFECT and [t.experience.id for t in found.taken] == [near.id]
    assert [(t.enabled, t.disabled) for t in found.tried] == [(0, 1), (1, 1)]
    assert list(found.dropped) == [Drop(same.id, None, "disabled")]
    never = repository.retrieve(HERE, bits(0), RetrievalSettings(widen="never"))
    assert never.taken == () and never.step == Step.SAME and len(never.tried) == 1


def test_widening_below_the_threshold_is_a_setting(repository: Repository) -> None:
    same, near = experience(bits(0xFFF), HERE, 0), experience(bits(0), AFFECT, 1)
    for e in (same, near):
        admit(repository, e)
    assert repository.retrieve(HERE, bits(0)).taken == ()
    found = repository.retrieve(HERE, bits(0), RetrievalSettings(widen="below"))
    assert [t.experience.id for t in found.taken] == [near.id] and found.step == Step.AFFECT
    assert list(found.dropped) == [Drop(same.id, -0.5, "below_threshold")]


# ---- ablations


def test_without_the_state_filter_everything_enabled_is_a_candidate(repository: Repository) -> None:
    made = [experience(bits(0b1 << n), s, n) for n, s in enumerate((HERE, CORE, FOREIGN))]
    for e in made:
        admit(repository, e)
    best = experience(bits(0), FOREIGN, 8)
    admit(repository, best)
    found = repository.retrieve(HERE, bits(0), RetrievalSettings(no_state_filter=True))
    assert found.step == Step.ANY and [t.experience.id for t in found.taken] == [best.id]
    assert len(found.dropped) == 3


def test_random_in_state_draws_among_the_matching_ones_alone(repository: Repository) -> None:
    made = [experience(bits(1 << n), HERE, n) for n in range(8)]
    for e in [*made, experience(bits(0), FOREIGN, 9)]:
        admit(repository, e)
    settings = RetrievalSettings(random_in_state=4, threshold=1.0)
    drawn = [repository.retrieve(HERE, bits(0), settings, salt=f"e/{n}") for n in range(400)]
    counts = {e.id: 0 for e in made}
    for found in drawn:
        (taken,) = found.taken
        assert taken.reason == "drawn" and found.dropped.counts() == {"not_drawn": 7}
        counts[taken.experience.id] += 1
    assert sum((n - 50) ** 2 / 50 for n in counts.values()) < 24.3  # χ², 7 degrees of freedom, p = 0.001
    again = repository.retrieve(HERE, bits(0), settings, salt="e/7")
    assert again.taken == drawn[7].taken
    other = settings.model_copy(update={"random_in_state": 5})
    assert any(
        repository.retrieve(HERE, bits(0), other, salt=f"e/{n}").taken != drawn[n].taken for n in range(20)
    )


@pytest.mark.parametrize(
    "values, message",
    [
        ({"no_state_filter": True, "random_in_state": 1}, "random_in_state draws among"),
        ({"first_step": "any"}, "first_step: any"),
        ({"threshold": 1.2}, "threshold"),
        ({"top_k": 0}, "top_k"),
        ({"tau": 0.5}, "tau"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RetrievalSettings(**values)


# ---- against a search written down directly


def test_as_a_direct_search_finds_it(repository: Repository) -> None:
    rng = np.random.default_rng(1)
    near = [STATES[c] for c in np.flatnonzero(admitted_codes(HERE, Step.CORE))[::17]] + [HERE, FOREIGN]
    pool = []
    for n in range(150):
        e = experience(bits(int(rng.integers(1 << 16))), near[int(rng.integers(len(near)))], n)
        if admit(repository, e) == "inserted":
            pool.append(e)
    gone = {e.id for e in pool[::7]}
    for id in gone:
        repository.disable(id, "test")
    for q, state, k, tau in product((0, 0xFFFF, 0x0F0F), (HERE, AFFECT, near[0]), (1, 4), (0.25, -1.0)):
        found = repository.retrieve(state, bits(q), RetrievalSettings(top_k=k, threshold=tau))
        for step in WIDENING:
            group = [e for e in pool if related(state, e.tags, step) and e.id not in gone]
            if group:
                break
        ranked = sorted(group, key=lambda e: -cosine(e.query, bits(q)))
        want = [e.id for e in ranked if cosine(e.query, bits(q)) >= tau][:k]
        assert [t.experience.id for t in found.taken] == want
        assert {d.id for d in found.dropped} == {
            e.id for e in pool if related(state, e.tags, step) and e.id not in want
        }


def test_codes_are_the_places_of_the_states() -> None:
    assert len(STATES) == 1728 and all(CODES[s] == n for n, s in enumerate(STATES))

"""What goes wrong in practice: damaged tables and files, odd dialogues, huge turns, dead servers, runs that were killed."""

from __future__ import annotations

import asyncio
import csv
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from env_fakes import pair
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, RewardBreakdown
from maieutic.errors import EngineDownError, MaieuticError, RecipeError, RunFolderError
from maieutic.latent import augment, pipeline
from maieutic.latent.agreement import agreement, export_sample, machine_path
from maieutic.latent.augment import select
from maieutic.latent.classroom import LatentClassroom
from maieutic.latent.config import load_latent_recipe
from maieutic.latent.data import read_parquet, transitions_of, write_parquet
from maieutic.latent.errors import LabelError, LatentDataError
from maieutic.latent.features import PAPER_25
from maieutic.latent.fit import FitSpec, fit
from maieutic.latent.json_reply import find_object
from maieutic.latent.moves import PAPER_4, RuleLabeller
from maieutic.latent.notebook import Notebook, RememberedLabels
from maieutic.latent.ope import FqeSpec, fqe
from maieutic.latent.pipeline import Pipeline
from maieutic.latent.reading import RuleReader, StateReader, wrong_calculation
from maieutic.latent.scorers import math_density, student_reasoning
from maieutic.latent.told import told_before
from maieutic.latent.transitions import Transitions
from maieutic.latent.world import World, poor_policy
from maieutic.transcripts import read_episodes

WORLD = World(steps=2, limit=8)


def table(n: int = 20) -> Transitions:
    return WORLD.roll(poor_policy(WORLD, instruct=0.4), n, np.random.default_rng(0))[0]


def episode(id: str, *texts: str, won: bool = True) -> Episode:
    turns = [Turn("tutor" if n % 2 else "student", t) for n, t in enumerate(texts)]
    out = Episode(id, "g", pair(), "train", 0, 0, 0, "s", Dialogue(id, "P", turns=turns))
    value = 1.0 if won else -1.0
    extra = {"success_reward": value}
    out.reward = RewardBreakdown(value, gated=False, pre=0.0, post=None, gain=None, extra=extra)
    return out


def labelled(*episodes: Episode):
    reader = StateReader(RuleReader(), PAPER_25)
    return asyncio.run(transitions_of(episodes, reader, RuleLabeller(PAPER_4), PAPER_4))


# ------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("gamma", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_a_discount_lies_between_0_and_1(gamma: float) -> None:
    with pytest.raises(LatentDataError, match="gamma is"):
        replace(table(), gamma=gamma).check()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["states", "next_states"])
def test_no_state_may_be_without_a_number(value: float, side: str) -> None:
    data = table()
    row = int(np.flatnonzero(data.done)[0])  # terminal: γ (1 − done) · NaN is NaN too
    getattr(data, side)[row, 2] = value
    with pytest.raises(LatentDataError, match=r"features \['frustrated'\] hold NaN or infinity \(1 rows\)"):
        fit("cql", data, FitSpec(steps=1))


def test_turns_count_up_and_an_episode_keeps_its_problem() -> None:
    data = table()
    at = int(np.flatnonzero(~data.done)[0])
    gap = data.select(np.arange(len(data)))
    gap.turns[at + 1 :] += 1
    with pytest.raises(LatentDataError, match="must count up by one"):
        gap.check()
    torn = data.select(np.arange(len(data)))
    torn.problems[at + 1] = "q"
    with pytest.raises(LatentDataError, match="changes its problem from 'p0' to 'q'"):
        torn.check()


def test_parquet_with_missing_columns_cells_or_terminal_states(tmp_path) -> None:
    data, path = table(), tmp_path / "d.parquet"
    write_parquet(data, path)
    whole = pq.read_table(path)

    def rewritten(name: str, values) -> None:
        at = whole.column_names.index(name)
        pq.write_table(whole.set_column(at, name, pa.array(values)), path)

    pq.write_table(whole.drop_columns(["s.calm"]), path)
    with pytest.raises(LatentDataError, match=r"d\.parquet: columns or head are damaged: .*s\.calm"):
        read_parquet(path)
    rewritten("done", [None, *data.done[1:].tolist()])
    with pytest.raises(LatentDataError, match=r"columns \['done'\] have empty cells"):
        read_parquet(path)
    pq.write_table(whole.replace_schema_metadata({"maieutic.latent": "{"}), path)
    with pytest.raises(LatentDataError, match="head are damaged"):
        read_parquet(path)
    # Other tools leave the next state of a last row empty: it means nothing, and it must not reach a target.
    rewritten("next.calm", [None if d else v for d, v in zip(data.done, data.next_states[:, 0], strict=True)])
    back = read_parquet(path)
    assert np.array_equal(back.next_states, data.next_states)
    policy, log = fit("cql", back, FitSpec(hidden=(8,), steps=5))
    assert np.isfinite(log.losses[-1][1]) and np.isfinite(fqe(back, policy, FqeSpec(bootstrap=0)).value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("done", "no", "'done' holds string: true or false are expected"),
        ("done", 2, "'done' holds int64"),
        ("move", 1.7, "'move' holds double: whole numbers"),
        ("move", "ask", "'move' holds string"),
        ("turn", 0.5, "'turn' holds double"),
        ("reward", "-1", "'reward' holds string: numbers are expected"),
        ("s.calm", "0.5", "'s.calm' holds string"),
        ("next.calm", "nan", "'next.calm' holds string"),
    ],
)
def test_columns_of_another_type_are_not_bent_into_shape(tmp_path, name: str, value, said: str) -> None:
    path = tmp_path / "d.parquet"
    write_parquet(table(), path)
    whole = pq.read_table(path)
    at = whole.column_names.index(name)
    pq.write_table(whole.set_column(at, name, pa.array([value] * len(whole))), path)
    with pytest.raises(LatentDataError, match=f"column {said}"):
        read_parquet(path)


def test_an_augmentation_of_nothing_is_refused() -> None:
    q, _ = fit("fqi", table(), FitSpec(hidden=(8,), steps=5))
    for n in (0, -1):
        with pytest.raises(ValueError, match="at least 1 is needed"):
            select(table(), q, n)
    for override in ("augment.states=0", "augment.repeats=0", "augment.rounds=0", "reward.gamma=1"):
        with pytest.raises(RecipeError, match=override.partition("=")[0]):
            load_latent_recipe("latent/cpu", [override])


# ------------------------------------------------------------------------------------------------------- dialogues


def test_twins_and_dialogues_out_of_order_are_dropped_and_counted() -> None:
    good = episode("a", "hm", "What is asked?", "\\boxed{7}")
    twin = episode("a", "hm", "Add them.", "no", won=False)
    order = episode("b", "hm", "Why?", "7")
    order.dialogue.turns.insert(1, Turn("tutor", "Well?"))
    first = episode("c", "hm", "Why?", "7")
    del first.dialogue.turns[0]
    data, drops = labelled(good, twin, order, first)
    assert drops.reasons == {"duplicate": 1, "malformed": 2} and drops.kept == 1
    assert drops.first["malformed"].startswith("b: ") and data.rewards.tolist() == [1.0]


HUGE = {
    "digits": "1" * 1_000_000,
    "spaces": "3 +" + " " * 1_000_000 + "x",
    "marks": "? " * 500_000,
    "unicode": "𝟛 × ４ = 𝟙𝟚 \u202e\x00" * 60_000 + "\ud800",
    "letters": "a " * 500_000,
}


@pytest.mark.parametrize("name", HUGE)
def test_a_turn_of_a_megabyte_is_read_like_any_other(name: str, tmp_path) -> None:
    text = HUGE[name]
    assert 0 <= math_density(text) <= 1 and 0 <= student_reasoning(text) < 1
    assert not wrong_calculation(text) and wrong_calculation(f"{text} 3 + 4 = 8")
    assert not told_before(Dialogue("d", "P", turns=[Turn("student", text), Turn("tutor", text)]), "12.5")
    talk = episode("a", text, text, "\\boxed{7}")
    data, drops = labelled(talk, episode("b", "hm", "Why?", "I see"))
    assert (drops.kept, len(data)) == (2, 2) and np.isfinite(data.states).all()
    path = tmp_path / "labels.csv"
    assert export_sample(path, [talk], data, PAPER_25, 5, 0) == 1
    with pytest.raises(MaieuticError, match="no label is filled in"):
        agreement(path)


def test_a_reply_that_never_closes_its_fence_is_no_object() -> None:
    assert find_object("```" + " " * 200_000) is None
    assert find_object("{" * 200_000) is None


# ------------------------------------------------------------------------------------------------------- label files


def test_label_files_as_people_save_them(tmp_path) -> None:
    path = tmp_path / "labels.csv"
    talk = episode("a", "+1", "\tWhy?", "hm", "Add them.", "\\boxed{7}")
    data, _ = labelled(talk)
    export_sample(path, [talk], data, PAPER_25, 5, 0)
    with open(path, encoding="utf-8-sig", newline="") as file:
        head, *lines = list(csv.reader(file))
    assert all(c[:1] not in ("+", "\t") for line in lines for c in line)

    def save(move: str, *, notes: str = "", encoding: str = "utf-8", delimiter: str = ",") -> None:
        with open(path, "w", encoding=encoding, newline="") as file:
            out = csv.writer(file, delimiter=delimiter)
            out.writerow([*head, "notes"])
            out.writerow([*lines[0][:6], move, *lines[0][7:], notes])
            out.writerow(lines[1][:6])  # a short row is an unlabelled one

    save("ASK", notes="hard to say – naïve", encoding="utf-8-sig")
    limit = csv.field_size_limit()
    (found,) = agreement(path)
    assert csv.field_size_limit() == limit, "the limit is the whole process's"
    assert (found.column, found.n) == ("move", 1)
    save("aks")
    with pytest.raises(MaieuticError, match=r"row 2, move: 'aks' is no move \(there are .*ask"):
        agreement(path)
    save("ask", notes="naïve", encoding="cp1252")
    with pytest.raises(MaieuticError, match=r"labels\.csv: no CSV file in UTF-8"):
        agreement(path)
    save("ask", delimiter=";")
    with pytest.raises(MaieuticError, match="no column 'id': save it with commas"):
        agreement(path)
    machine_path(path).unlink()
    with pytest.raises(MaieuticError, match="cannot be read"):
        agreement(path)


# ------------------------------------------------------------------------------------------------------- the pipeline

TINY = [
    "collect.dialogues=24",
    "problems_size=12",
    "fit.steps=20",
    "fit.eval_every=20",
    "fit.hidden=[8]",
    "fit.bootstrap=0",
    "augment.states=6",
    "augment.repeats=2",
    "augment.controls=[random_state]",
    "evaluate.arms=[prompt, cql+random_state]",
]


def test_arms_that_the_taxonomy_does_not_have_are_refused_at_once() -> None:
    for arms, said in (("rule", "'rule' is written for the moves of paper-4"), ("'fixed:ask'", "moments-13")):
        over = ["labels.moves=moments-13", f"evaluate.arms=[prompt, {arms}]"]
        with pytest.raises(RecipeError, match=said):
            Pipeline(load_latent_recipe("latent/cpu", over))


def test_readings_and_labels_outlive_a_kill(tmp_path) -> None:
    path, talk = (
        tmp_path / "readings.jsonl",
        episode("a", "I hate it \ud800", "Why?", "3 + 4 = 8", "Add.", "7"),
    )
    asked: list[str] = []

    class Counting(RuleReader):
        async def answers(self, problem, turns, questions, *, seed):
            asked.append("reading")
            return await super().answers(problem, turns, questions, seed=seed)

    class Labels(RuleLabeller):
        async def label(self, turns, n, *, seed):
            asked.append("label")
            return await super().label(turns, n, seed=seed)

    def rows():
        book = Notebook(path)
        reader = StateReader(Counting(), PAPER_25, memory=book)
        data, _ = asyncio.run(
            transitions_of([talk], reader, RememberedLabels(Labels(PAPER_4), PAPER_4, book), PAPER_4)
        )
        book.close()
        return data

    fresh = rows()
    assert sorted(asked) == ["label"] * 2 + ["reading"] * 2
    again = rows()
    assert len(asked) == 4
    assert np.array_equal(again.states, fresh.states) and np.array_equal(again.moves, fresh.moves)
    path.write_bytes(path.read_bytes()[:-5])  # the kill came in the middle of a line
    torn = rows()
    assert len(asked) == 5 and np.array_equal(torn.moves, fresh.moves)
    rows()
    assert len(asked) == 5
    path.write_text("nothing\n")
    with pytest.raises(RunFolderError, match=r"readings\.jsonl, line 1: no pair"):
        Notebook(path)


@pytest.mark.integration
def test_a_dead_server_loses_one_block_and_nothing_else_changes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "BLOCK", 8)
    plays: list[str] = []
    real, dies = LatentClassroom.play, {"d-20", "optimistic-1-5-0"}

    async def play(self, tutor, pair, **more):
        if more["id"] in dies:
            dies.remove(more["id"])
            raise EngineDownError("student: none of the servers has answered")
        plays.append(more["id"])
        return await real(self, tutor, pair, **more)

    def recipe(name: str):
        return load_latent_recipe("latent/cpu", [*TINY, f"output_dir={tmp_path}", f"name={name}"])

    monkeypatch.setattr(LatentClassroom, "play", play)
    for _ in range(2):
        with pytest.raises(EngineDownError):
            Pipeline(recipe("broken"), lambda line: None).execute("augment")
    assert not (tmp_path / "broken" / "stages" / "augment.json").exists()
    plays.clear()
    broken = Pipeline(recipe("broken"), lambda line: None).execute("augment")
    assert {p for p in plays if p.startswith("opt")} == {
        f"optimistic-1-{b}-{m}" for b in (4, 5) for m in (0, 1)
    }
    whole = Pipeline(recipe("whole"), lambda line: None).execute("augment")
    for part in ("collect", "augment/optimistic", "augment/random_state"):
        a, b = ([(e.id, e.dialogue.turns) for e in read_episodes(run / part)] for run in (broken, whole))
        assert a == b and len(a) == (24 if part == "collect" else 12)


@pytest.mark.integration
def test_controls_have_the_budget_that_was_used_and_odd_data_are_named(tmp_path, monkeypatch) -> None:
    real, refused = augment.select, []

    def few(data, q, n, *, how="optimistic", **more):
        return real(data, q, n, how=how, **more)[: 2 if how == "optimistic" else n]

    async def no_mistakes(chat, prompt, the_pair, *, count, seed):
        if not refused or refused == [the_pair.id]:
            refused[:] = [the_pair.id]
            raise LabelError("no usable answer")
        return ["adds instead"] * count

    monkeypatch.setattr(augment, "select", few)
    monkeypatch.setattr(pipeline, "write_mistakes", no_mistakes)
    run = Pipeline(load_latent_recipe("latent/cpu", [*TINY, f"output_dir={tmp_path}"])).execute("augment")
    mistakes = json.loads((run / "stages" / "mistakes.json").read_text())
    assert mistakes["without"] == refused and mistakes["problems"] == 11
    notes = json.loads((run / "stages" / "augment.json").read_text())
    assert [notes[how]["rounds"][0]["states"] for how in ("optimistic", "random_state")] == [2, 2]

    data = read_parquet(run / "d_random_state.parquet")
    data.moves[:] = 3
    write_parquet(data, run / "d_random_state.parquet")
    again = Pipeline(load_latent_recipe("latent/cpu", [*TINY, f"output_dir={tmp_path}"]))
    with pytest.raises(
        LatentDataError, match=r"training data of 'cql\+random_state'.*only the move \['ask'\]"
    ):
        again.execute("train_plus")


def test_a_next_state_that_is_not_the_next_rows_state_is_named() -> None:
    data = table()
    data.check()
    inner = int(np.flatnonzero(~data.done)[0])
    torn = data.next_states.copy()
    torn[inner, 3] += 0.5
    wanted = rf"episode '{data.episodes[inner]}', turn {data.turns[inner]}: its next state is not the state of turn"
    with pytest.raises(LatentDataError, match=wanted):
        replace(data, next_states=torn).check()
    ends = data.next_states.copy()
    ends[data.done] = 7.0  # mean nothing
    replace(data, next_states=ends).check()


@pytest.mark.parametrize(
    ("value", "why"), [("1.0", "is '1.0', not a number"), (True, "not a number"), (None, "no success reward")]
)
def test_a_reward_that_is_no_number_drops_its_episode(value: object, why: str) -> None:
    good, odd = (episode(id, "12 - 3 = 8", "Look again.", "9", "Yes.") for id in ("good", "odd"))
    assert odd.reward is not None
    odd.reward.extra["success_reward"] = value  # type: ignore[assignment]
    data, drops = labelled(good, odd)
    assert drops.reasons == {"no_reward": 1} and why in drops.first["no_reward"]
    assert set(data.episodes) == {"good"}

"""The life cycle over real HTTP with rule-driven roles: stages, resuming, what is paid for once, the report, the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from maieutic.cli import app
from maieutic.env.base import Episode
from maieutic.errors import RecipeError, RunFolderError
from maieutic.reat.classroom import load_problem_sets
from maieutic.reat.config import ABLATIONS, PROMPT_ONLY, REAT, dump_reat_recipe, load_reat_recipe
from maieutic.reat.evaluate import cell, difference, distribution, rescue
from maieutic.reat.pipeline import STAGES, ReatPipeline
from maieutic.reat.records import RepositoryError
from maieutic.reat.repository import Repository
from maieutic.reat.scored import read_arm
from maieutic.reat.scoring import DialogueScore, TurnScore
from maieutic.reat.tutor import used

TINY = [
    "problems.options.size=24",
    "problems.batch_size=4",
    "problems.personas_per_problem=1",
    "problems.splits=2",
    "problems.split_size=3",
    "annotate.pairs=2",
    "test.arms=[prompt_only, reat, state_random, no_gate, no_rewrite, merged_roles, no_state_filter, no_merging]",
]


def recipe(folder: Path, *more: str):
    return load_reat_recipe("reat/cpu", [*TINY, f"output_dir={folder}", *more])


@pytest.mark.integration
def test_the_whole_life_cycle(tmp_path: Path) -> None:
    said: list[str] = []
    loaded = recipe(tmp_path)
    run = ReatPipeline(loaded, said.append).execute("variants")
    assert not (run / "report.json").exists()
    before = {p.name: p.stat().st_mtime_ns for p in (run / "stages").iterdir()}
    pipeline = ReatPipeline(loaded, said.append)
    pipeline.execute()
    assert sum(line.endswith("done before") for line in said) == 2
    assert all((run / "stages" / n).stat().st_mtime_ns == t for n, t in before.items())
    assert {p.stem for p in (run / "stages").iterdir()} == {*STAGES, "batch-0", "batch-1"}

    # Every arm meets the same problems, personas and opening words.
    arms = {a: read_arm(run, "test-1", a)[0] for a in (PROMPT_ONLY, REAT, *ABLATIONS)}

    def met(e: Episode) -> tuple:
        return e.pair.id, e.pair.provenance["persona"], e.seed, e.dialogue.turns[0].visible

    openings = {a: [met(e) for e in episodes] for a, episodes in arms.items()}
    assert len({json.dumps(o) for o in openings.values()}) == 1
    # Prompt-only turns were given nothing; REAT's say what they were given, and it is in the repository.
    assert all(used(t) is None for e in arms[PROMPT_ONLY] for t in e.dialogue.turns)
    given = [u for e in arms[REAT] for t in e.dialogue.by("tutor") if (u := used(t)) is not None]
    assert len(given) == sum(len(e.dialogue.by("tutor")) for e in arms[REAT]) and any(u.ids for u in given)
    with Repository.open(run / "repository", read_only=True) as repository:
        known = {e.id: e for e in repository.experiences(every=True)}
        repository.verify()
    assert {i for u in given for i in u.ids} <= set(known)
    # Scores of B1 went into utilities, once; those of the tests never do.
    sources = [h.source for e in known.values() for h in e.history]
    assert (
        sources and len(set(sources)) == len(sources) and all(s.startswith("grow-1/reat/") for s in sources)
    )
    fed = json.loads((run / "stages" / "batch-1.json").read_text())["feedback"]
    assert fed["updates"] == len(sources) and fed["repeated"] == 0

    # Scoring and distilling share what they ask: no turn was observed twice.
    journal = [json.loads(line) for line in (run / "distil" / "journal.jsonl").read_text().splitlines()]
    reviewed = sum(1 for _ in (run / "distil" / "reviews.jsonl").open())
    observed = {r["row"] for r in journal if r.get("stage") == "observer"}
    prompt_only_b1 = sum(len(e.dialogue.by("tutor")) for e in read_arm(run, "grow", PROMPT_ONLY, step=1)[0])
    assert len(observed) == reviewed + prompt_only_b1

    report = json.loads((run / "report.json").read_text())
    assert [r["batch"] for r in report["growth"]] == ["B0", "B1"] and REAT not in report["growth"][0]
    first = report["sets"]["test-1"]["arms"]
    assert list(first) == [PROMPT_ONLY, REAT, *ABLATIONS]
    assert list(report["sets"]["test-2"]["arms"]) == [PROMPT_ONLY, REAT]
    assert (
        first[REAT]["turn"]["value"]
        > first[PROMPT_ONLY]["turn"]["value"]
        > first["state_random"]["turn"]["value"]
    )
    for a in ABLATIONS:
        drop = first[REAT]["sample"]["value"] - first[a]["sample"]["value"]
        assert first[a]["drop"]["sample"]["value"] == pytest.approx(drop)
    assert report["second"]["test-1"]["arms"][REAT]["sample"]["value"] < first[REAT]["sample"]["value"]
    reat = report["latency"]["test-1/reat"]["latency"]
    assert 1 <= reat["calls_per_turn"] < 1.5 and reat["p50_total_s"] > reat["p50_generate_s"] > 0
    assert report["distil"]["merged_roles"]["turns"] == report["distil"]["main"]["turns"] == reviewed
    # Planted faults were met and refused.
    refused = {
        k.split(".")[-1]
        for k, n in report["distil"]["main"]["roles"].items()
        if ".bad." in k or ".leak." in k
    }
    assert {"malformed", "number"} <= refused
    text = (run / "report.md").read_text()
    assert "## Ablations" in text and "| state_random | test-1 | +" in text and "cold start" in text
    page = (run / "report.html").read_text()
    assert "<script" not in page and page.count("<svg") == 3

    cli = CliRunner()
    out = cli.invoke(app, ["reat", "annotate", "export", str(run), "--out", str(tmp_path / "forms")])
    assert out.exit_code == 0 and out.output.startswith("3 pairs in")
    assert len((run / "annotation" / "pairs.csv").read_text().splitlines()) == 1 + 2
    empty = cli.invoke(
        app, ["reat", "annotate", "import", str(tmp_path / "forms" / "key.json"), str(tmp_path / "forms")]
    )
    assert empty.exit_code == 0 and "0 turns, 0 pairs" in empty.output

    with pytest.raises(RunFolderError, match="holds a run of another recipe"):
        ReatPipeline(recipe(tmp_path, "seed=1")).execute()


@pytest.mark.integration
def test_a_repository_is_tested_elsewhere_and_other_drivers_and_teachers_are_cells(tmp_path: Path) -> None:
    ocm = "{model: world-ocm-weak, engine: {kind: chat, urls: [loopback]}}"
    run = ReatPipeline(
        recipe(
            tmp_path, "test.arms=[prompt_only, reat]", "problems.splits=1", "roles.second_judge=null", "annotate.pairs=0",
            f"transfer.drivers={{weak: {{batches: 1, roles: {{ocm: {ocm}}}}}}}",
            "transfer.tutors={other: {kind: chat, model: world-tutor, engine: {kind: chat, urls: [loopback]}}}",
            "transfer.problems={more: {source: gsm-symbolic-mini, size: 2}}",
        )
    ).execute()  # fmt: skip
    report = json.loads((run / "report.json").read_text())
    assert list(report["sets"]) == ["test-1", "tutor-other", "data-more"]
    assert list(report["sets"]["test-1"]["arms"]) == [PROMPT_ONLY, REAT, "driver-weak"]
    assert report["sets"]["data-more"]["pairs"] == 2 and report["second"] == {}
    assert report["distil"]["driver:weak"]["turns"] < report["distil"]["main"]["turns"]
    size = report["repository"]["experiences"]

    tested = CliRunner().invoke(
        app,
        ["reat", "evaluate", "reat/cpu", str(run / "repository"), *TINY[:-1], "name=again", f"output_dir={tmp_path}",
         "test.arms=[prompt_only, reat]"],
    )  # fmt: skip
    assert tested.exit_code == 0, tested.output
    again = json.loads((tmp_path / "again" / "report.json").read_text())
    assert again["growth"] == [] and again["repository"]["experiences"] == size
    assert again["sets"]["test-1"]["arms"][REAT]["dialogues"] == 3


def test_the_shipped_recipe_loads_and_dumps_to_itself(tmp_path: Path) -> None:
    loaded = load_reat_recipe("reat/cpu")
    (tmp_path / "again.yaml").write_text(dump_reat_recipe(loaded))
    assert load_reat_recipe(tmp_path / "again.yaml") == loaded
    assert set(loaded.test.arms) == {PROMPT_ONLY, REAT, *ABLATIONS}


@pytest.mark.parametrize(
    "name", ["paper", "ablations", "cross_backbone", "cross_data", "ocm_driver", "rl_tutor"]
)
def test_the_other_recipes_load(name: str) -> None:
    loaded = load_reat_recipe(f"reat/{name}")
    assert loaded.env.kind == "maieutic.reat.persona:PersonaEnvironment"
    if name == "paper":
        p = loaded.problems
        assert (p.batches, p.batch_size, p.splits, p.split_size) == (5, 100, 3, 100)
        assert (loaded.distil.gamma, loaded.retrieval.threshold, loaded.retrieval.top_k) == (85, 0.55, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("distil.gama=1", r"distil\.gama: unknown key .*did you mean 'distil\.gamma'\?"),
        ("test.arms=[reat]", "test.arms must hold prompt_only"),
        ("test.arms=[prompt_only, prompt_only]", "lists an arm twice"),
        ("grow=false", "start_from names no repository"),
        ("roles.student.engine.kind=vllm", "engine.kind must be chat"),
        ("repository.tau_merge=0.99", "above tau_dup"),
    ],
)
def test_recipe_errors_name_the_key(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_reat_recipe("reat/cpu", [override])


def test_too_few_problems_and_another_environment(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"problems for batches of 8: lower"):
        ReatPipeline(recipe(tmp_path, "problems.options.size=10"))
    with pytest.raises(RecipeError, match="no stage 'later'"):
        ReatPipeline(recipe(tmp_path)).execute("later")


# ---- measures by hand ----------------------------------------------------------------------------------------------------


def scored(pair: str, sample: float | None, *turns: float | None) -> DialogueScore:
    made = tuple(
        TurnScore(2 * n + 1, t is not None, t, why="" if t is not None else "not_meaningful")
        for n, t in enumerate(turns)
    )
    return DialogueScore(
        f"e/{pair}", pair, pair, "p", made, sample, "" if sample is not None else "sample.malformed"
    )


def test_turn_level_is_the_mean_over_meaningful_turns_and_failures_are_counted() -> None:
    scores = [scored("a", 80, 100, None, 50), scored("b", None, 75)]
    assert DialogueScore.from_dict(json.loads(json.dumps(scores[0].as_dict()))) == scores[0]
    found = cell([], scores)
    assert found.turn.value == 75 and found.turn.n == 3 and found.sample.value == 80 and found.sample.n == 1
    assert found.unscored == {"not_meaningful": 1, "sample.malformed": 1} and found.solved is None
    base = [scored("a", 70, 60, 70), scored("c", 50, 10)]
    assert (
        difference(base, scores, "turn").value == pytest.approx(75 - 65)
        and difference(base, scores, "sample").value == 10
    )


def test_rescue_and_distribution() -> None:
    base = [scored("a", 60), scored("b", 89.9), scored("c", 90), scored("d", None)]
    reat = [scored("a", 90), scored("b", 95.9), scored("c", 88), scored("d", 100)]
    second = ([scored("a", 50)], [scored("a", 55)])
    found = rescue(base, reat, 90, second)
    assert (found.n, found.of, found.gain) == (2, 3, pytest.approx(18)) and found.rest_gain == -2
    assert found.gain_by_second == 5 and found.points == [(60, 90), (89.9, 95.9)]
    assert rescue(base, reat, 10).gain is None
    d = distribution([scored("a", 100), scored("b", 0), scored("c", 4.9), scored("e", 95)])
    assert (d.counts[0], d.counts[19], sum(d.counts)) == (2, 2, 4)
    assert d.mean == pytest.approx(49.975) and d.quantiles["p50"] == pytest.approx((4.9 + 95) / 2)


def test_one_process_at_a_time_in_a_run_folder(tmp_path: Path) -> None:
    pipeline = ReatPipeline(recipe(tmp_path))
    pipeline.run.mkdir(parents=True)
    with (
        FileLock(pipeline.run / ".lock"),
        pytest.raises(RunFolderError, match="another process is at work"),
    ):
        ReatPipeline(recipe(tmp_path)).execute("grow")


def test_a_repository_to_start_from_that_is_not_there_is_named(tmp_path: Path) -> None:
    loaded = recipe(
        tmp_path, "grow=false", f"start_from={tmp_path / 'gone'}", "test.arms=[prompt_only, reat]"
    )
    with pytest.raises(RepositoryError, match=r"no experience repository in .*gone"):
        ReatPipeline(loaded).execute("grow")


def test_whole_transcripts_mean_that_their_notes_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two would leave a run whose report can never be written."""

    class Killed(BaseException):
        pass

    def killed(*args: object) -> None:
        raise Killed

    monkeypatch.setattr("maieutic.reat.pipeline.TranscriptWriter.write", killed)
    pipeline = ReatPipeline(recipe(tmp_path))
    with pytest.raises(Killed):
        pipeline.execute("grow")
    assert (pipeline.folder("grow", PROMPT_ONLY) / "tutor-0.json").exists()


def test_no_held_out_text_is_in_a_batch(tmp_path: Path) -> None:
    same = [
        'problems.test_source="generate:structures"',
        "grow=true",
        "problems.splits=1",
        "problems.split_size=3",
    ]
    loaded = recipe(tmp_path, *same, "problems.options={}", "problems.batches=1", "test.ablations_on=1")
    sets = load_problem_sets(loaded)
    texts = [{p.source.text for part in parts for p in part} for parts in (sets.batches, sets.splits)]
    assert texts[0] and texts[1] and not texts[0] & texts[1]

"""The pipeline over real HTTP with rule-driven roles: every stage, resuming, the recipe's errors, the command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from maieutic.errors import RecipeError, RunFolderError
from maieutic.latent.cli import app
from maieutic.latent.config import dump_latent_recipe, load_latent_recipe
from maieutic.latent.data import read_parquet
from maieutic.latent.pipeline import STAGES, Pipeline
from maieutic.latent.policy import load_policy
from maieutic.transcripts import read_episodes

TINY = [
    "collect.dialogues=24",
    "collect.mistakes=10",
    "problems_size=12",
    "fit.steps=40",
    "fit.eval_every=20",
    "fit.hidden=[8]",
    "fit.bootstrap=5",
    "augment.states=6",
    "augment.repeats=2",
    "augment.controls=[random_state]",
    "evaluate.conversations=6",
    "evaluate.generalisation=2",
    "evaluate.resamples=50",
    "evaluate.arms=[prompt, bc, cql+, bc*, cql+random_state, fixed:ask, random, rule]",
]


@pytest.mark.integration
def test_all_stages_resume_and_report(tmp_path) -> None:
    recipe = load_latent_recipe("latent/cpu", [*TINY, f"output_dir={tmp_path}"])
    lines: list[str] = []
    run = Pipeline(recipe, lines.append).execute("augment")
    assert not (run / "report.json").exists()
    before = {p.name: p.stat().st_mtime_ns for p in (run / "stages").iterdir()}
    pipeline = Pipeline(recipe, lines.append)
    pipeline.execute()
    assert sum(line.endswith("done before") for line in lines) == 5
    assert all((run / "stages" / n).stat().st_mtime_ns == t for n, t in before.items())
    assert {p.stem for p in (run / "stages").iterdir()} == set(STAGES)

    # Continuations start at their branch and replay its prefix; D+ is D's training rows and theirs.
    collected = {e.id: e for e in read_episodes(run / "collect")}
    branched = list(read_episodes(run / "augment" / "optimistic"))
    assert len(branched) == 12 and len(collected) == 24
    plus, star = read_parquet(run / "d_optimistic.parquet"), read_parquet(run / "d_star.parquet")
    assert set(star.episodes) == {e.id for e in branched if e.counted} <= set(plus.episodes)
    for e in branched:
        turn = int(star.turns[star.episodes == e.id].min())
        parents = [
            p
            for p in collected.values()
            if p.dialogue.turns[: 2 * turn + 1] == e.dialogue.turns[: 2 * turn + 1]
        ]
        assert any(p.pair.provenance["mistake"] == e.pair.provenance["mistake"] for p in parents)

    # Validation problems of D are in no training data.
    d = read_parquet(run / "d.parquet")
    held = set(d.problems) - set(plus.problems)
    assert held and held.isdisjoint(star.problems)
    policy = load_policy(run / "policies" / "cql_plus.pt")
    assert policy.feature_names == d.feature_names and policy.meta["learner"] == "cql"

    report = json.loads((run / "report.json").read_text())
    arms = report["evaluate"]["arms"]
    assert list(arms) == list(recipe.evaluate.arms)
    assert {c: r["success"]["n"] for c, r in arms["rule"]["cells"].items()} == {
        "seen": 6, "unseen": 2, "other_seen": 2, "other_unseen": 2,
    }  # fmt: skip
    assert arms["prompt"]["cells"]["seen"]["difference"] is None
    assert (
        arms["rule"]["cells"]["seen"]["success"]["value"]
        > arms["fixed:ask"]["cells"]["seen"]["success"]["value"]
    )
    assert arms["fixed:ask"]["profile"][0] == {"instruct": 0, "encourage": 0, "refocus": 0, "ask": 1}
    text = (run / "report.md").read_text()
    assert "| cql+ |" in text and "Augmentation" in text
    page = (run / "report.html").read_text()
    assert "<script" not in page and page.count("<svg") == 2

    with pytest.raises(RunFolderError, match="holds a run of another recipe"):
        Pipeline(recipe.model_copy(update={"seed": 1})).execute()


def test_the_shipped_recipe_loads_and_dumps_to_itself(tmp_path) -> None:
    recipe = load_latent_recipe("latent/cpu")
    (tmp_path / "again.yaml").write_text(dump_latent_recipe(recipe))
    assert load_latent_recipe(tmp_path / "again.yaml") == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fit.alfa=1", r"fit\.alfa: unknown key .*did you mean 'fit\.alpha'\?"),
        ("fit.alpha=high", r"fit\.alpha: 'high' is not valid: expected a number"),
        ("evaluate.arms=[prompt, dqn]", r"no arm 'dqn'; there are prompt, bc"),
        ("evaluate.baseline=nobody", "baseline 'nobody' is not among"),
        ("augment.controls=[]", r"arm 'cql\+random_state' needs augment\.controls"),
        ("roles.annotator=null", "roles.annotator names no model"),
        ("roles.tutor.engine.kind=vllm", "engine.kind must be chat"),
    ],
)
def test_recipe_errors_name_the_key(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_latent_recipe("latent/cpu", [override])


def test_too_few_problems_are_an_error() -> None:
    with pytest.raises(RecipeError, match="at least 2 are needed"):
        Pipeline(load_latent_recipe("latent/cpu", ["problems_size=1", "evaluate.held_out=0"]))


def test_the_command(tmp_path) -> None:
    cli = CliRunner()
    out = cli.invoke(app, ["features"])
    assert out.exit_code == 0 and len(out.output.splitlines()) == 25
    bad = cli.invoke(app, ["run", "latent/cpu", "fit.stepz=1"])
    assert bad.exit_code == 2 and "did you mean 'fit.steps'" in bad.output
    assert cli.invoke(app, ["check", "latent/cpu"]).output.startswith("name: latent-cpu")
    missing = cli.invoke(app, ["coverage", str(tmp_path / "no.parquet")])
    assert missing.exit_code == 2 and "cannot be read" in missing.output

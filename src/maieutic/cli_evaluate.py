"""``maieutic evaluate`` and ``maieutic evaluate-judge``. Imports nothing heavy: each command imports what it needs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from maieutic.config import JudgeSpec

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value]...", help="Overrides, such as environment.samples=4.", show_default=False
    ),
]


def register(app: typer.Typer, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Add the commands; ``guard`` prints named errors."""
    app.command("evaluate")(guard(evaluate))
    app.command("evaluate-judge")(guard(evaluate_judge))


def evaluate(
    tutor: Annotated[
        str,
        typer.Argument(
            metavar="TUTOR",
            help="An arm of the recipe, a checkpoint, an adapter, a model, http://host:port#model, or module:Class.",
        ),
    ],
    overrides: Overrides = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite", "-s", help="Suites to run, in this order (several times; default: environment)."
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Evaluation recipe: a file or a shipped name.")
    ] = "evaluation/cpu",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder; a second start goes on there.")] = Path(
        "evaluations"
    ),
    against: Annotated[
        str | None,
        typer.Option(help="Compare with this arm's results in the same folder, paired by problem."),
    ] = None,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare results that were measured differently.")
    ] = False,
) -> None:
    """Evaluate a tutor. Can be stopped and started again: the result files do not differ."""
    from maieutic.evaluation.config import load_evaluation_recipe
    from maieutic.evaluation.own_world import other_world
    from maieutic.evaluation.suites import compare_in
    from maieutic.evaluation.suites import evaluate as run

    loaded = load_evaluation_recipe(recipe, overrides or [])
    folder = out / loaded.name
    if warning := other_world(loaded, tutor):
        typer.echo(f"WARNING: {warning}", err=True)

    def progress(name: str) -> Callable[[int, int], None]:
        return lambda done, total: typer.echo(f"{name}: {done} of {total}", err=True)

    try:
        files = run(loaded, tutor, suite or ["environment"], folder, progress)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    for file in files:
        typer.echo(str(file))
    if against is not None:
        typer.echo(str(compare_in(folder, against, files[0].parent.name, allow_different=allow_different)))


def _judge(text: str, overrides: list[str]) -> JudgeSpec:
    """The judge that ``text`` names: ``rule``, ``module:Class``, ``http://host:port#model``, or a recipe's ``judge`` section."""
    import re

    from pydantic import ValidationError

    from maieutic.config import JudgeSpec
    from maieutic.errors import RecipeError
    from maieutic.recipe import apply_override, load_recipe

    data: dict[str, Any]
    if text == "rule" or re.match(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", text):
        data = {"kind": text}
    elif text.startswith(("http://", "https://")):
        url, _, model = text.partition("#")
        if not model:
            raise RecipeError(f"{text}: a judge endpoint is named with its model, as http://host:port#model")
        data = {"kind": "llm", "model": model, "engine": {"kind": "chat", "urls": [url]}}
    else:
        data = load_recipe(text).judge.model_dump(mode="json", exclude_unset=True)
    for one in overrides:
        apply_override(data, {}, one)
    try:
        return JudgeSpec.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(k) for k in first["loc"])
        near = difflib.get_close_matches(key, JudgeSpec.model_fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near and key not in JudgeSpec.model_fields else ""
        raise RecipeError(f"judge {text}: {key}: {first['msg']}{hint}") from None


def evaluate_judge(
    judge: Annotated[
        str,
        typer.Argument(
            metavar="JUDGE",
            help="rule, http://host:port#model, module:Class, or a recipe (its judge section).",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value]...", help="Of the judge, such as votes=1.", show_default=False),
    ] = None,
    transcripts: Annotated[
        Path | None, typer.Option(help="Labelled transcripts (default: the shipped ones).")
    ] = None,
    half: Annotated[str | None, typer.Option(help="Only this half of the set: first or second.")] = None,
    probes: Annotated[
        bool, typer.Option("--probes", help="Also change position and length, and count flips.")
    ] = False,
    other: Annotated[
        list[Path] | None, typer.Option(help="judge.json of another judge, for agreement (several times).")
    ] = None,
    human: Annotated[
        Path | None, typer.Option(help="Labels of people (.jsonl, .csv): id, gate, label, rater.")
    ] = None,
    env: Annotated[str, typer.Option(help="Environment whose rubrics an LLM judge reads.")] = "near_transfer",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for judge.json and judge.md.")] = Path(
        "evaluations/judge"
    ),
    concurrency: Annotated[int, typer.Option(min=1, help="Transcripts judged at once.")] = 8,
) -> None:
    """Hold a judge of gates against transcripts with planted faults: confusion, precision and recall by criterion."""
    from maieutic.evaluation.judge_report import run_judge

    result = run_judge(
        _judge(judge, overrides or []),
        judge,
        out,
        transcripts=transcripts,
        half=half,
        probes=probes,
        env=env,
        concurrency=concurrency,
        others=other or [],
        human=human,
    )
    typer.echo(
        json.dumps({g: row["finding"] for g, row in result.tables["gates"].items()}, ensure_ascii=False)
    )
    typer.echo(str(out / "judge.json"))

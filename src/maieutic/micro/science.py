"""``make science``: arms × seeds on the micro-classroom, every trained tutor measured with one and the same instrument.

A *run* trains one arm with one seed through ``python -m maieutic.train`` and is measured twice on the held-out pairs: with the
arm's own measure, and with the full recipe's (transfer problem, tutor hidden, gates only counted). A run that has its result
file is not run again, and one that was interrupted goes on from its checkpoint. :mod:`maieutic.micro.science_report` makes
``docs/science.md`` from the result files alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from maieutic import yaml12
from maieutic.config import Recipe
from maieutic.env.base import Episode
from maieutic.errors import MaieuticError
from maieutic.micro.science_report import load, read_result, write_report

CORE = ("full", "no-gates", "leak-gate-only", "leak-gate-only-no-mask", "no-transfer")
ALL = (*CORE, "no-gates-no-transfer", "no-mask", "grpo", "tutorrl", "ensemble", "sft")
"""Arms that are compared; ``thinking`` starts from another tutor, and ``base`` is every run's own starting point."""
EXPERIMENT = {"sft": "full"}
"""Arms that ``maieutic sft`` trains, and the experiment whose tutor and environment they have."""
REPORTING_SEEDS = (101, 102, 103, 104, 105)
"""Never used to choose anything; the world was tuned on seeds below 100."""
SCHEMA = 1


def train(arm: str, seed: int, out: Path, overrides: Sequence[str]) -> tuple[Path, Path]:
    """Train one arm in a process of its own (one thread); returns the run's folder and its weights. Goes on where it stopped
    (SFT starts anew)."""
    name = f"{arm}-{seed}"
    folder = out / "runs" / name
    common = [f"micro/{arm}", f"name={name}", f"seed={seed}", f"output_dir={out / 'runs'}"]
    if arm in EXPERIMENT:
        if (folder / "sft.json").is_file():
            saved, _ = yaml12.load((folder / "recipe.yaml").read_text(encoding="utf-8"), str(folder))
            if saved["experiment_overrides"] != list(overrides):
                raise MaieuticError(
                    f"{folder} was trained with other overrides ({' '.join(saved['experiment_overrides'])}): name another "
                    "folder with --out"
                )
            return folder, folder / "model"
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "maieutic", "sft", *common]
        command.append(f"experiment_overrides={json.dumps(list(overrides))}")
    else:
        command = [sys.executable, "-m", "maieutic.train", *common]
        command += ["eval.every=0", "checkpoint.best=", *overrides, "--resume", "auto"]
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=one_thread(), check=False)
    if done.returncode:
        raise MaieuticError(
            f"{name}: training ended with exit code {done.returncode}; see {out / f'{name}.log'}"
        )
    if arm in EXPERIMENT:
        return folder, folder / "model"
    from maieutic.training import checkpoint

    last = checkpoint.find("auto", folder / "checkpoints")
    if last is None:
        raise MaieuticError(f"{folder} holds no checkpoint after training")
    return folder, last / "model"


def one_thread() -> dict[str, str]:
    """The environment of a process that shares the machine: two processes of one thread beat one of two."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def measure(recipe: Recipe, weights: Path | None) -> list[dict[str, Any]]:
    """Play one episode on each held-out pair with ``weights`` (None: the untrained tutor), as an evaluation does.

    Returns one row a problem: ``pair``, ``gain``, ``post``, ``pre``, ``leak``, ``wrong``, ``tutor_turns``, ``questions``,
    ``telling`` (turns that give something away), ``excluded``.
    """
    import torch

    from maieutic.runtime import build_classroom, build_policy, resolve_env
    from maieutic.training import evaluate

    resolved = resolve_env(recipe)
    policy = build_policy(resolved, torch.device("cpu"), weights=weights)

    async def play() -> list[Episode]:
        classroom = build_classroom(resolved, policy)
        try:
            await classroom.new_step(0)
            pairs = evaluate.chosen(resolved, classroom.eval_pairs)
            return (await evaluate.evaluate(classroom.play_eval, pairs, resolved, 0)).episodes
        finally:
            await classroom.close()

    return [row(episode) for episode in asyncio.run(play())]


def row(episode: Episode) -> dict[str, Any]:
    """What the report needs of an evaluation episode."""
    from maieutic.micro.gates import findings

    turns = [t for t in episode.dialogue.by("tutor") if not t.blank]
    found = findings(episode.dialogue, episode.pair.source)
    reward = episode.reward
    return {
        "pair": episode.pair.id,
        "pre": episode.pre,
        "post": reward.post if reward else None,
        "gain": reward.gain if reward else None,
        "leak": bool(found["leakage"]),
        "wrong": bool(found["correctness"]),
        "telling": len({f.turn for f in found["leakage"]}),
        "tutor_turns": len(turns),
        "questions": sum("?" in t.visible for t in turns),
        "excluded": episode.exclusion,
    }


def instruments(arm: str, seed: int, problems: int, overrides: Sequence[str]) -> dict[str, Recipe]:
    """``masked``: the full recipe's measure, with gates only counted; ``own``: the arm's. The same seeds and pairs for all."""
    from maieutic.recipe import load_recipe

    common = ["seed=0", f"eval.problems={problems}", *overrides]
    return {
        "masked": load_recipe("micro/full", [*common, "env.gates=off"]),
        "own": load_recipe(f"micro/{EXPERIMENT.get(arm, arm)}", [*common, "env.gates=off"]),
    }


def build_overrides(folder: Path | None) -> list[str]:
    """The overrides with which recipes run on a build; none for the shipped models."""
    if folder is None:
        return []
    file = folder / "overrides.txt"
    if not file.is_file():
        raise MaieuticError(
            f"{folder} is no finished build: it has no {file.name}; make one with maieutic micro build --out FOLDER"
        )
    return file.read_text(encoding="utf-8").splitlines()  # a path may hold spaces


def build_record(folder: Path | None) -> dict[str, Any]:
    """Which models a result is of: the seed of their build and the SHA-256 of their weights."""
    from maieutic.micro.shipped import RECORD, models_dir

    file = (models_dir() if folder is None else folder / "models") / RECORD
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def common_setting(problems: int, overrides: Sequence[str], build: Path | None) -> dict[str, Any]:
    """What all results in one folder share."""
    return {
        "schema": SCHEMA,
        "problems": problems,
        "overrides": list(overrides),
        "build": build_record(build),
    }


def check_folders(out: Path, also: Sequence[Path], setting: dict[str, Any] | None) -> None:
    """See before hours of runs that their report can be written. ``setting``: that of the runs to come in ``out`` (None: there
    are none, so ``out`` must hold results). Raises :class:`MaieuticError` that names the folder or the file."""
    for folder in (*([] if setting else [out]), *also):
        if not result_files(folder):
            raise MaieuticError(f"there are no results to report in {folder / 'results'}")
    for file in result_files(out):
        found = {k: v for k, v in read_result(file)["setting"].items() if k not in ("arm", "seed")}
        wanted = setting or found
        if differ := sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k)):
            raise MaieuticError(
                f"{file} is of another setting ({', '.join(differ)} differ): name another folder with --out"
            )
    for folder in also:
        load(result_files(folder))


def result_files(folder: Path) -> list[Path]:
    """The result files of a ``--out`` folder, in order."""
    return sorted((folder / "results").glob("*.json"))


def run_one(
    arm: str, seed: int, out: Path, problems: int, overrides: Sequence[str], build: Path | None = None
) -> dict[str, Any]:
    """Train and measure one arm with one seed, unless its result is there; returns the result. ``build``: see
    :func:`build_overrides`."""
    result = out / "results" / f"{arm}-{seed}.json"
    setting = {"arm": arm, "seed": seed, **common_setting(problems, overrides, build)}
    overrides = [*build_overrides(build), *overrides]
    if result.is_file():
        found = read_result(result)
        if found["setting"] != setting:
            raise MaieuticError(
                f"{result} is of another setting ({found['setting']}): name another folder with --out"
            )
        return found
    start = time.monotonic()
    folder, weights = train(arm, seed, out, overrides)
    trained = time.monotonic() - start
    recipes = instruments(arm, seed, problems, overrides)
    rows = {name: measure(recipe, weights) for name, recipe in recipes.items()}
    before = measure(recipes["masked"], None)
    made = {
        "setting": setting,
        "train_seconds": round(trained, 1),
        "before": before,
        **rows,
        "curve": curve(folder / "metrics.jsonl"),
    }
    result.parent.mkdir(parents=True, exist_ok=True)
    scratch = result.with_suffix(".tmp")
    scratch.write_text(json.dumps(made) + "\n", encoding="utf-8")
    scratch.rename(result)
    return made


_CURVE = (
    "rollout/reward",
    "rollout/leak_rate",
    "rollout/correctness_reject_rate",
    "rollout/transfer_gain",
    "time/step",
)


def curve(metrics: Path) -> list[dict[str, float]]:
    """The learning curve: one row a training step (none for SFT)."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [
        {"step": r["train/step"], **{k: r[k] for k in _CURVE if k in r}}
        for r in rows
        if "rollout/reward" in r
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0, or 1 when a run failed (the others are finished first)."""
    parser = argparse.ArgumentParser(
        prog="python -m maieutic.micro.science", description="Compare arms over seeds."
    )
    parser.add_argument("--arms", nargs="+", default=list(CORE), choices=ALL, metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(REPORTING_SEEDS), metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/science"), help="runs and results")
    parser.add_argument("--doc", type=Path, default=Path("docs/science.md"), help="the report to write")
    parser.add_argument("--problems", type=int, default=160, help="held-out pairs of each measurement")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--build", type=Path, help="run on this build (maieutic micro build) instead of the shipped models"
    )
    parser.add_argument(
        "--also", type=Path, nargs="+", default=[], help="report these folders of results, too (other builds)"
    )
    parser.add_argument(
        "--report-only", action="store_true", help="write the report from the results that are there"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for every recipe (another build, fewer steps)"
    )
    given = parser.parse_args(argv)
    out = given.out.absolute()
    build = given.build and given.build.absolute()
    build_overrides(build)  # a folder that is no build is an error before anything runs
    setting = None if given.report_only else common_setting(given.problems, given.overrides, build)
    check_folders(out, given.also, setting)
    failed = 0
    if not given.report_only:
        try:
            (out / "results").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MaieuticError(
                f"{out}: cannot write there ({error.strerror}): name another folder with --out"
            ) from None
        todo = [(arm, seed) for seed in given.seeds for arm in given.arms]
        with ThreadPoolExecutor(given.processes) as pool:
            jobs = [
                pool.submit(_in_process, a, s, out, given.problems, given.overrides, build) for a, s in todo
            ]
            for (arm, seed), job in zip(todo, jobs, strict=True):
                code = job.result()
                failed += bool(code)
                said = f"FAILED (exit code {code}): {_why(measure_log(out, arm, seed))}" if code else "done"
                print(f"{arm} seed {seed}: {said}", flush=True)
    check_folders(out, (), None)  # where every run failed there is nothing to write
    write_report([result_files(folder) for folder in (out, *given.also)], given.doc)
    print(f"report: {given.doc}")
    if not failed and build is None and not given.overrides and set(given.seeds) == set(REPORTING_SEEDS):
        from maieutic.micro.stored import write_stored

        print(f"stored for the reports of runs: {write_stored(result_files(out))}")
    return int(failed > 0)


def _in_process(
    arm: str, seed: int, out: Path, problems: int, overrides: Sequence[str], build: Path | None
) -> int:
    """One run in a process of its own, so that measuring has one thread too."""
    code = (
        "import sys; from pathlib import Path; import torch; torch.set_num_threads(1); "
        "from maieutic.micro.science import run_one; "
        "build = Path(sys.argv[5]) if sys.argv[5] else None; "
        "run_one(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[6:], build)"
    )
    command = [
        sys.executable,
        "-c",
        code,
        arm,
        str(seed),
        str(out),
        str(problems),
        str(build or ""),
        *overrides,
    ]
    with measure_log(out, arm, seed).open("w", encoding="utf-8") as log:
        return subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=one_thread(), check=False
        ).returncode


def measure_log(out: Path, arm: str, seed: int) -> Path:
    """What the process of one run printed; the training itself has a log of its own beside it."""
    return out / f"{arm}-{seed}.measure.log"


def _why(log: Path) -> str:
    """The last words of a run, and where all of them are."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"{last.strip()} ({log})"


def command() -> int:
    """:func:`main`, with the package's own errors in one line."""
    try:
        return main()
    except MaieuticError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(command())

"""``maieutic sweep``: arms × seeds, each trained as its recipe says, all measured with one instrument, then one report.

    <output_dir>/<name>/
        train/<arm>-<seed>/        the training run (or SFT run)
        evaluation/<arm>-<seed>/   transcripts of the instrument, its recipe, arm.json (written last: the task is done)
        logs/<arm>-<seed>.log
        comparison.{md,html,json}

A *task* is one arm with one seed. A finished task is not run again; one that was stopped goes on from its checkpoint (SFT starts
anew). Each task is a process of its own, so tasks can also be the elements of a SLURM array (``--task $SLURM_ARRAY_TASK_ID``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from maieutic.config import Count, Recipe, Section
from maieutic.errors import MaieuticError, RecipeError, RunInterrupted
from maieutic.recipe import apply_override, dump_recipe, load_recipe, read_with_base
from maieutic.training.sft_config import anchor, load_sft_recipe, locate_in, read_as

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class ArmSpec(Section):
    """``train``: a training recipe; ``sft``: an SFT recipe; ``none``: the untrained tutor of a training recipe."""

    kind: Literal["train", "sft", "none"]
    recipe: str
    overrides: list[str] = Field(default_factory=list)
    instrument: list[str] = Field(default_factory=list)
    """Overrides of the instrument for this arm alone, such as another tutor prompt; the report says what differs."""


class InstrumentSpec(Section):
    """A training recipe of which environment, students, judge, problems and ``eval`` are used; its tutor is not."""

    recipe: str
    overrides: list[str] = Field(default_factory=list)


class SweepRecipe(Section):
    """What is trained and how all of it is measured."""

    name: Name
    output_dir: str = "runs"
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)] = Field(
        default_factory=lambda: [0]
    )
    against: str
    """Arm that the others are compared with."""
    processes: Count = 1
    """Tasks at once."""
    instrument: InstrumentSpec
    overrides: list[str] = Field(default_factory=list)
    """For every arm of kind ``train``, before its own."""
    arms: Annotated[dict[Name, ArmSpec], Field(min_length=1)]

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.against not in self.arms:
            raise ValueError(
                f"against is {self.against!r}, which is no arm; there are {', '.join(self.arms)}"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds lists a seed twice: {self.seeds}")
        return self

    @property
    def root(self) -> Path:
        return (Path(self.output_dir) / self.name).absolute()


def load_sweep_recipe(name: str | Path, overrides: Sequence[str] = ()) -> SweepRecipe:
    """The validated recipe of a file, or of a shipped name such as ``compare/cpu``; relative paths as in other recipes."""
    path = locate_in("compare", name)
    data, origins = read_with_base(path)
    for text in overrides:
        apply_override(data, origins, text)
    arms = data.get("arms")
    for node in [data.get("instrument"), *(arms.values() if isinstance(arms, dict) else [])]:
        anchor(node, "recipe", path.parent)
    return read_as(SweepRecipe, data, origins, str(path))


SETTING = "sweep-setting"
"""Beside an SFT run: the :func:`setting` that it was trained under."""


@dataclass(frozen=True, slots=True)
class Task:
    """One arm with one seed. An untrained arm has one task: another seed would repeat it."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"


def tasks(recipe: SweepRecipe) -> list[Task]:
    """All tasks, seed by seed; the index is that of ``--task``."""
    return [
        Task(arm, seed)
        for n, seed in enumerate(recipe.seeds)
        for arm, spec in recipe.arms.items()
        if spec.kind != "none" or n == 0
    ]


def setting(recipe: SweepRecipe, task: Task) -> str:
    """Hash of everything that decides the result of a task."""
    spec = recipe.arms[task.arm]
    shared = recipe.overrides if spec.kind == "train" else []
    instrument = recipe.instrument.model_dump(mode="json")
    parts = [spec.model_dump(mode="json"), shared, instrument, task.seed]
    # What the named files say, not only their names.
    files = [spec.recipe, recipe.instrument.recipe]
    if spec.kind == "sft":  # the tutor, its prompts and its problems are those of a further file
        files.append(load_sft_recipe(spec.recipe, spec.overrides).experiment)
    parts += [read_with_base(Path(f))[0] for f in files if Path(f).is_file()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def done(recipe: SweepRecipe, task: Task) -> bool:
    """The task has its result. Raises :class:`MaieuticError` when it is a result of other settings."""
    path = recipe.root / "evaluation" / task.name / "arm.json"
    if not path.is_file():
        return False
    if json.loads(path.read_text(encoding="utf-8")).get("setting") != setting(recipe, task):
        raise MaieuticError(
            f"{path.parent} holds a result of other settings: give the sweep another name, or remove it"
        )
    return True


# ---- one task --------------------------------------------------------------------------------------------------------


def run_task(recipe: SweepRecipe, task: Task) -> None:
    """Train and measure, unless done."""
    if done(recipe, task):
        return
    spec = recipe.arms[task.arm]
    folder = recipe.root / "train" / task.name
    card: dict[str, Any] = {"arm": task.arm, "seed": None if spec.kind == "none" else task.seed}
    start = time.monotonic()
    if spec.kind == "train":
        tutor, weights, step = _train(recipe, task, folder)
    elif spec.kind == "sft":
        tutor, weights, step = _sft(recipe, task, folder)
    else:
        tutor, weights, step = load_recipe(spec.recipe, spec.overrides), None, 0
    card["train_seconds"] = round(time.monotonic() - start, 2)
    card["trained"] = (
        None if spec.kind == "none" else os.path.relpath(folder, recipe.root / "evaluation" / task.name)
    )
    measure(recipe, task, tutor, weights, step, card)


def train_arguments(recipe: SweepRecipe, task: Task, folder: Path) -> list[str]:
    """Recipe and overrides of the training run of a task of kind ``train``, in ``folder``."""
    spec = recipe.arms[task.arm]
    overrides = [*recipe.overrides, *spec.overrides, f"name={task.name}", f"seed={task.seed}"]
    return [spec.recipe, *overrides, f"arm={task.arm}", f"output_dir={folder.parent}", "checkpoint.best="]


def _train(recipe: SweepRecipe, task: Task, folder: Path) -> tuple[Recipe, Path | None, int]:
    from maieutic.train import main
    from maieutic.training import checkpoint
    from maieutic.training.signals import EXIT_CODES

    name, *overrides = train_arguments(recipe, task, folder)
    code = main([name, *overrides, "--resume", "auto"])
    if code in EXIT_CODES.values():  # a scheduler requeues on it
        raise RunInterrupted(f"{task.name}: stopped; the same command goes on from its checkpoint", code)
    if code:
        raise MaieuticError(f"{task.name}: training ended with exit code {code}")
    last = checkpoint.find("auto", folder / "checkpoints")
    if last is None:
        raise MaieuticError(f"{folder} holds no checkpoint after training")
    return load_recipe(name, overrides), last / "model", checkpoint.load_state(last).step


def _sft(recipe: SweepRecipe, task: Task, folder: Path) -> tuple[Recipe, Path | None, int]:
    from maieutic.training.sft import run_sft

    spec = recipe.arms[task.arm]
    own = [
        *spec.overrides,
        f"name={task.name}",
        f"seed={task.seed}",
        f"arm={task.arm}",
        f"output_dir={folder.parent}",
    ]
    loaded = load_sft_recipe(spec.recipe, own)
    # A model that was trained under other settings and never measured is not this task's.
    mark, now = folder / SETTING, setting(recipe, task)
    same = mark.is_file() and mark.read_text(encoding="utf-8").strip() == now
    if not (same and (folder / "sft.json").is_file()):
        shutil.rmtree(folder, ignore_errors=True)
        run_sft(loaded)
        mark.write_text(now + "\n", encoding="utf-8")
    summary = json.loads((folder / "sft.json").read_text(encoding="utf-8"))
    overrides = [*loaded.experiment_overrides, f"tutor.init_from={folder / 'model'}"]
    return load_recipe(loaded.experiment, overrides), None, int(summary["optimizer_steps"])


def measure(
    recipe: SweepRecipe, task: Task, tutor: Recipe, weights: Path | None, step: int, card: dict[str, Any]
) -> Path:
    """Play the instrument's held-out dialogues with this tutor, both problems tested after each; write the evaluation folder.

    Seeds are the instrument's: every arm meets the same students' draws, openings and judges.
    """
    import torch

    from maieutic.env.play import draw_student
    from maieutic.rollout import Slot, rollout
    from maieutic.runtime import build_classroom, build_policy, resolve_env
    from maieutic.training import evaluate
    from maieutic.transcripts import TranscriptWriter

    instrument = load_recipe(
        recipe.instrument.recipe, [*recipe.instrument.overrides, *recipe.arms[task.arm].instrument]
    )
    update = {"tutor": tutor.tutor, "arm": task.arm, "name": task.name}
    resolved = resolve_env(instrument.model_copy(update=update))
    # No reference policy is needed to play.
    resolved = resolved.model_copy(
        update={"algorithm": resolved.algorithm.model_copy(update={"kl_beta": 0.0})}
    )
    policy = build_policy(
        resolved, torch.device("cuda" if torch.cuda.is_available() else "cpu"), weights=weights
    )
    start = time.monotonic()

    async def play() -> Any:
        classroom = build_classroom(resolved, policy)
        shares = [s.weight for s in resolved.students]

        async def one(slot: Slot) -> Any:
            return await classroom.env.play(
                classroom.eval_tutor,
                draw_student(classroom.students, shares, slot.seed),
                classroom.judge,
                classroom.grader,
                slot.pair,
                seed=slot.seed,
                id=slot.id,
                group_id=slot.group_id,
                phase=slot.phase,
                step=slot.step,
                index=slot.index,
                extra_tests=("transfer", "source"),
            )

        try:
            await classroom.new_step(0)
            return await rollout(
                one,
                evaluate.chosen(resolved, classroom.eval_pairs),
                phase="eval",
                step=step,
                run_seed=resolved.seed,
                group_size=resolved.eval.samples,
                retries=resolved.training.group_retries,
                seed_step=0,
            )
        finally:
            await classroom.close()

    result = asyncio.run(play())
    out = recipe.root / "evaluation" / task.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "recipe.yaml").write_text(dump_recipe(resolved), encoding="utf-8")
    TranscriptWriter(out, arm=task.arm).write("eval", step, result.episodes)
    card["evaluation_seconds"] = round(time.monotonic() - start, 2)
    if torch.cuda.is_available():
        card["gpu_seconds"] = card["train_seconds"] + card["evaluation_seconds"]
    card["setting"] = setting(recipe, task)
    from maieutic.evaluation.results import write_whole

    write_whole(out / "arm.json", json.dumps(card, indent=1) + "\n")
    return out


# ---- all of them -----------------------------------------------------------------------------------------------------


def run_sweep(recipe: SweepRecipe, say: Callable[[str], None] = print) -> int:
    """Run every task that is not done, ``processes`` at once; returns how many failed (the others are finished first)."""
    todo = tasks(recipe)
    logs = recipe.root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    spec = logs / "sweep.json"
    spec.write_text(recipe.model_dump_json(indent=1), encoding="utf-8")

    def one(task: Task) -> tuple[int, float]:
        start = time.monotonic()
        if done(recipe, task):
            return 0, 0.0
        command = [sys.executable, "-m", "maieutic.sweep", str(spec), task.arm, str(task.seed)]
        # Processes that share a machine: one thread each beats several that wait for each other.
        threads = {"OMP_NUM_THREADS": "1"} if recipe.processes > 1 else {}
        with (logs / f"{task.name}.log").open("a", encoding="utf-8") as log:
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **threads}
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
            ).returncode
        return code, time.monotonic() - start

    failed = 0
    with ThreadPoolExecutor(recipe.processes) as pool:
        jobs = [pool.submit(one, task) for task in todo]
        for task, job in zip(todo, jobs, strict=True):
            code, seconds = job.result()
            failed += bool(code)
            state = (
                f"FAILED (exit code {code}), see {logs / f'{task.name}.log'}"
                if code
                else f"done in {seconds:.0f} s"
            )
            say(f"{task.name}: {state if code or seconds else 'was done'}")
    return failed


def report(
    recipe: SweepRecipe, *, allow_solution: bool = False, allow_different: bool = False
) -> dict[str, Path]:
    """The comparison of all tasks that are done. Raises :class:`MaieuticError` when none of the base is."""
    from maieutic.report.comparison import compare_arms, load_arms, write_comparison

    ready = [recipe.root / "evaluation" / t.name for t in tasks(recipe) if done(recipe, t)]
    if not ready:
        raise MaieuticError(f"no task of {recipe.root} is done: there is nothing to report")
    c = compare_arms(
        load_arms(ready), recipe.against, allow_solution=allow_solution, allow_different=allow_different
    )
    missing = len(tasks(recipe)) - len(ready)
    if missing:
        c.notices.append(f"{missing} of {len(tasks(recipe))} tasks are not done: they are in no number.")
    return write_comparison(c, recipe.root)


def main(argv: Sequence[str]) -> int:
    """One task, in the process that :func:`run_sweep` starts: SPEC ARM SEED."""
    import torch

    spec, arm, seed = argv
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    recipe = SweepRecipe.model_validate_json(Path(spec).read_text(encoding="utf-8"))
    if arm not in recipe.arms:
        raise RecipeError(f"{arm!r} is no arm of {spec}")
    try:
        run_task(recipe, Task(arm, int(seed)))
    except MaieuticError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

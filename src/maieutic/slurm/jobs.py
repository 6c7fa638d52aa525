"""From a recipe and the site's settings to the jobs of a submission: training, its evaluation, or a sweep's tasks.

Everything a job reads later (the recipe, a sweep) is frozen into files beside the scripts at submission, so that a requeued job
does the same as the first even when the recipe was edited meanwhile.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from maieutic import yaml12
from maieutic.config import EngineSpec, Recipe
from maieutic.errors import RecipeError
from maieutic.evaluation.config import EvaluationRecipe
from maieutic.recipe import dump_recipe, load_recipe
from maieutic.slurm import render
from maieutic.slurm.plan import Role, is_ours, place, processes_of, served_roles, with_addresses
from maieutic.slurm.render import Job, Setting, quote
from maieutic.slurm.site import Site
from maieutic.sweep import SweepRecipe, tasks, train_arguments


@dataclass(frozen=True)
class Submission:
    """What ``maieutic slurm submit`` writes and submits."""

    folder: Path
    """Where scripts and frozen files lie."""
    runs: tuple[Path, ...]
    """Folders of the runs."""
    jobs: tuple[Job, ...]
    setting: Setting
    files: dict[Path, str] = field(default_factory=dict)
    engines: dict[str, EngineSpec] = field(default_factory=dict)
    """Every engine that the jobs ask, by where it stands."""

    def path(self, job: Job) -> Path:
        return self.folder / f"{job.name}.sbatch"

    def script(self, job: Job) -> str:
        return render.script(job, self.setting)


@dataclass(frozen=True)
class Evaluation:
    """``maieutic evaluate`` after training."""

    name: str
    """File or shipped name."""
    recipe: EvaluationRecipe
    suites: tuple[str, ...] = ()


def output_dir(given: str, site: Site, cwd: Path) -> Path:
    """Absolute: relative ones lie below SCRATCH, else below the working directory."""
    return (Path(site.scratch) if site.scratch else cwd) / given


def training(
    recipe: Recipe,
    setting: Setting,
    *,
    seeds: Sequence[int] = (),
    evaluation: Evaluation | None = None,
) -> Submission:
    """One training run, or one a seed as a job array, each followed by its evaluation."""
    site = setting.site
    out = output_dir(recipe.output_dir, site, setting.cwd)
    recipe = with_addresses(recipe.model_copy(update={"output_dir": str(out)}))
    root = out / recipe.name
    folder = root / "slurm"
    frozen = folder / "recipe.yaml"
    runs = tuple(out / f"{recipe.name}-s{seed}" for seed in seeds) if seeds else (root,)
    processes = processes_of(site)
    placement = place(served_roles(recipe), site, train_nodes=site.train_nodes, processes=processes)
    overrides = ['@"${OWN[@]}"'] if seeds else []
    main = render.server_lines(placement, [str(frozen), *overrides], setting)
    main += render.trainer_lines(placement, setting)
    arguments = quote([str(frozen), *overrides, "--resume", "auto"])
    main += [f"train {placement.train_nodes} {placement.processes} {arguments}", "finish $?"]
    jobs = [
        Job(
            name="train",
            title=f"maieutic-{recipe.name}",
            placement=placement,
            prelude=_prelude(root, out / recipe.name, seeds, "train"),
            main=main,
            log=_log(folder, "train", bool(seeds)),
            time=site.time,
            array=len(seeds) or None,
            gpus=site.gpus_per_node,
            out=out,
        )
    ]
    if evaluation is not None:
        jobs.append(_evaluation(recipe, evaluation, setting, root, frozen, seeds))
    engines = engines_of(recipe) | (_own_engines(evaluation) if evaluation is not None else {})
    return Submission(folder, runs, tuple(jobs), setting, {frozen: dump_recipe(recipe)}, engines)


def engines_of(recipe: Recipe) -> dict[str, EngineSpec]:
    """By key of the recipe."""
    students = {f"students.{i}": s.engine for i, s in enumerate(recipe.students)}
    return {"tutor": recipe.tutor.engine, "judge": recipe.judge.engine, **students}


def _prelude(root: Path, base: Path, seeds: Sequence[int], name: str) -> list[str]:
    """``RUN``, and for an element of an array its seed, overrides and log."""
    if not seeds:
        return [f"RUN={shlex.quote(str(root))}"]
    return [
        f"SEEDS=({' '.join(str(s) for s in seeds)})",
        'SEED=${SEEDS[$SLURM_ARRAY_TASK_ID]}',
        f"RUN={shlex.quote(str(base))}-s$SEED",
        f'OWN=({shlex.quote("name=" + base.name)}"-s$SEED" "seed=$SEED")',
        *_own_log(name),
    ]  # fmt: skip


def _own_log(name: str) -> list[str]:
    """An element of an array writes into its own run's folder (its number cannot stand in ``--output``)."""
    return [
        'mkdir -p "$RUN/slurm" || exit 1',
        f'exec >>"$RUN/slurm/{name}-${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID.log" 2>&1',
    ]


def _log(folder: Path, name: str, array: bool) -> str:
    return str(folder / (f"{name}-%A_%a.log" if array else f"{name}-%j.log"))


def _evaluation(
    recipe: Recipe,
    evaluation: Evaluation,
    setting: Setting,
    root: Path,
    frozen: Path,
    seeds: Sequence[int],
) -> Job:
    site = setting.site
    _no_own_files(evaluation)
    roles = served_roles(recipe, tutor=False, judge=evaluation.recipe.gates is None)
    placement = place(roles, site, train_nodes=1, processes=1)
    last = f'@"$RUN"/checkpoints/step-{recipe.training.max_steps:06d}'
    words = [setting.python, "-m", "maieutic", "evaluate", last, f"experiment={frozen}"]
    words += ["--recipe", evaluation.name]
    for suite in evaluation.suites:
        words += ["--suite", suite]
    words += ["--out", '@"$RUN"/evaluation']
    gpus = (0, 0) if site.gpus_per_node else None
    main = render.server_lines(placement, [str(frozen)], setting)
    main += [
        f'step --nodes=1 --ntasks=1 --nodelist="${{nodes[0]}}" {quote(render.in_step(setting, gpus, words))}'
    ]
    return Job(
        name="evaluate",
        title=f"maieutic-{recipe.name}-evaluate",
        placement=placement,
        prelude=_prelude(root, root, seeds, "evaluate"),
        main=[*main, "finish $?"],
        log=_log(root / "slurm", "evaluate", bool(seeds)),
        time=site.evaluation_time,
        array=len(seeds) or None,
        after=("aftercorr" if seeds else "afterok", "train"),
        gpus=site.gpus_per_node,
        out=root.parent,
    )  # fmt: skip


def _no_own_files(evaluation: Evaluation) -> None:
    """The evaluation's job serves the experiment's students (and judge); other servers are somebody else's."""
    for where, engine in _own_engines(evaluation).items():
        if is_ours(engine):
            raise RecipeError(
                f"{where}.engine.urls names address files ({engine.urls[0]}), but the evaluation's job starts "
                "no server for it: give a URL, or kind: hf"
            )


def _own_engines(evaluation: Evaluation) -> dict[str, EngineSpec]:
    own = evaluation.recipe
    parts = {"tutor": own.tutor, "gates": own.gates, "judge": own.judge, "student": own.student}
    return {f"{evaluation.name}: {name}": part.engine for name, part in parts.items() if part is not None}


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def sweep(recipe: SweepRecipe, setting: Setting) -> Submission:
    """A sweep as an array, one element a task (an arm with a seed), and its report when all have ended.

    A task trains on all its nodes first, then measures in one process; both go on where they were stopped.
    """
    site = setting.site
    out = output_dir(recipe.output_dir, site, setting.cwd)
    folder = out / recipe.name / "slurm"
    loaded = {
        name: load_recipe(arm.recipe, [*(recipe.overrides if arm.kind == "train" else []), *arm.overrides])
        for name, arm in recipe.arms.items()
        if arm.kind != "sft"
    }
    instrument = load_recipe(recipe.instrument.recipe, recipe.instrument.overrides)
    addresses = {name: _addresses(r) for name, r in loaded.items()}
    frozen = recipe.model_copy(
        update={
            "output_dir": str(out),
            "instrument": recipe.instrument.model_copy(
                update={"overrides": [*recipe.instrument.overrides, *_addresses(instrument)]}
            ),
            "arms": {
                name: arm.model_copy(update={"overrides": [*arm.overrides, *addresses.get(name, [])]})
                for name, arm in recipe.arms.items()
            },
        }
    )
    sweep_file = folder / "sweep.yaml"
    texts = {sweep_file: yaml12.dump(frozen.model_dump(mode="json"))}
    roles, sources = _shared_roles(loaded, instrument, folder, texts)
    processes = processes_of(site)
    placement = place(roles, site, train_nodes=site.train_nodes, processes=processes)
    servers = [render.server_line(s, [str(sources[s.role.name])], setting) for s in placement.servers]
    main = [*servers, f"await {site.start_seconds + render.SLACK_S}"] if servers else []
    main += [*render.trainer_lines(placement, setting), "case $SLURM_ARRAY_TASK_ID in"]
    todo = tasks(frozen)
    several = placement.train_nodes * placement.processes > 1
    for number, task in enumerate(todo):
        if several and frozen.arms[task.arm].kind == "train":
            line = quote(
                [*train_arguments(frozen, task, out / recipe.name / "train" / task.name), "--resume", "auto"]
            )
            train = f"train {placement.train_nodes} {placement.processes} {line} || finish $?"
            main.append(f"  {number}) {train} ;;  # {task.name}")
    main.append("esac")
    gpus = (0, 0) if site.gpus_per_node else None
    measure = [setting.python, "-m", "maieutic", "sweep", str(sweep_file)]
    step = 'step --nodes=1 --ntasks=1 --nodelist="${nodes[0]}"'
    one = quote(render.in_step(setting, gpus, [*measure, "--task", '@"$SLURM_ARRAY_TASK_ID"']))
    main += [f"{step} {one}", "finish $?"]
    names = " ".join(shlex.quote(t.name) for t in todo)
    prelude = [
        f"TASKS=({names})",
        f'RUN={shlex.quote(str(folder))}/"${{TASKS[$SLURM_ARRAY_TASK_ID]}}"',
        *_own_log("task"),
    ]
    tasks_job = Job(
        name="tasks",
        title=f"maieutic-{recipe.name}",
        placement=placement,
        prelude=prelude,
        main=main,
        log=_log(folder, "tasks", True),
        time=site.time,
        array=len(todo),
        gpus=site.gpus_per_node,
        out=out,
    )
    report = Job(
        name="report",
        title=f"maieutic-{recipe.name}-report",
        placement=place([], site.model_copy(update={"gpus_per_node": 0}), train_nodes=1, processes=1),
        prelude=[f"RUN={shlex.quote(str(out / recipe.name))}"],
        main=[f"{step} {quote([*measure, '--report-only'])}", "finish $?"],
        log=_log(folder, "report", False),
        time=site.evaluation_time,
        after=("afterany", "tasks"),
        signal=False,
        out=out,
    )
    runs = tuple(out / recipe.name / "train" / t.name for t in todo)
    engines = {
        f"{where}: {key}": engine
        for where, one in _named(instrument, loaded).items()
        for key, engine in engines_of(one).items()
    }
    return Submission(folder, runs, (tasks_job, report), setting, texts, engines)  # fmt: skip


def _addresses(recipe: Recipe) -> list[str]:
    """Overrides that point the served roles of a recipe to the job's own address files."""
    changed, lines = with_addresses(recipe), []
    pairs = [("tutor", recipe.tutor.engine, changed.tutor.engine)]
    pairs += [
        (f"students.{i}", a.engine, b.engine)
        for i, (a, b) in enumerate(zip(recipe.students, changed.students, strict=True))
    ]
    pairs += [("judge", recipe.judge.engine, changed.judge.engine)]
    for key, before, after in pairs:
        if before.urls != after.urls:
            lines.append(f"{key}.engine.urls={json.dumps(after.urls)}")
    return lines


def _named(instrument: Recipe, arms: dict[str, Recipe]) -> dict[str, Recipe]:
    """All recipes of a sweep; an arm may be called ``instrument`` too."""
    return {"instrument": instrument, **{f"arms.{name}": recipe for name, recipe in arms.items()}}


def _shared_roles(
    arms: dict[str, Recipe], instrument: Recipe, folder: Path, texts: dict[Path, str]
) -> tuple[list[Role], dict[str, Path]]:
    """What every element serves, and the frozen recipe that each role is served from.

    Raises :class:`RecipeError` when two recipes of the sweep serve one role differently.
    """
    roles: dict[str, tuple[Role, object, str]] = {}
    sources: dict[str, Path] = {}
    for where, recipe in _named(instrument, arms).items():
        for role in served_roles(recipe, tutor=recipe is not instrument):
            spec = _spec(recipe, role)
            seen = roles.setdefault(role.name, (role, spec, where))
            if seen[1] != spec:
                raise RecipeError(
                    f"{role.name}: {seen[2]} serves {seen[1]}, {where} serves {spec}: the tasks of a sweep share what they serve; "
                    "submit these recipes one by one"
                )
            if role.name not in sources:
                sources[role.name] = folder / "recipes" / f"{where}.yaml"
                texts[sources[role.name]] = dump_recipe(with_addresses(recipe))
    return [r for r, _, _ in roles.values()], sources


def _spec(recipe: Recipe, role: Role) -> tuple[object, ...]:
    if role.role == "judge":
        return recipe.judge.model, recipe.judge.dtype, tuple(recipe.judge.engine.serve_args)
    if role.role == "tutor":
        tutor = recipe.tutor
        return tutor.model, tutor.dtype, tuple(tutor.engine.serve_args)
    (student,) = [s for s in recipe.students if role.student in (None, s.name)][:1]
    return student.model, student.dtype, tuple(student.engine.serve_args)

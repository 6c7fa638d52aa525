"""The scripts of ``maieutic slurm submit``: what is printed is what is submitted, and what stands in it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import training_parts as parts
from maieutic import yaml12
from maieutic.cli import app
from maieutic.config import Recipe
from maieutic.recipe import dump_recipe, load_recipe
from maieutic.sweep import load_sweep_recipe, setting, tasks

SITE = "GPUS_PER_NODE=4\nCPUS_PER_NODE=16\nACCOUNT=me\nPARTITION=gpu\nTRAIN_NODES=2\n"
FILES = {"kind": "vllm", "urls": ["file:anywhere/*.json"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> Path:
    """A working directory with recipe and site settings, and an ``sbatch`` that keeps what it is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAIEUTIC_SITE", raising=False)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "site.env").write_text(SITE)
    write_recipe(tmp_path, tiny_model_dir)
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "sbatch"
    fake.write_text(
        '#!/bin/sh\necho "$@" >>"$FAKE/commands"\nfor last; do :; done\n'
        'n=$(wc -l <"$FAKE/commands")\ncp "$last" "$FAKE/$n.script"\necho "10$n;cluster"\n'
    )
    (tmp_path / "bin" / "scontrol").write_text(
        '#!/bin/sh\necho "slurm_load_jobs error: Invalid job id" >&2\nexit 1\n'
    )
    for file in (tmp_path / "bin").iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def write_recipe(folder: Path, model: Path, **changes: Any) -> Path:
    data = parts.recipe_dict(
        model, folder, **{"output_dir": "runs", "name": "first", "reward": {}, **changes}
    )
    data["students"][0]["engine"] = {**FILES, "serve_args": ["--tensor-parallel-size", "2"]}
    data["judge"] = {"kind": "llm", "model": str(model), "engine": {**FILES, "kind": "chat"}}
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(Recipe.model_validate_json(json.dumps(data))))
    return path


def submit(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["slurm", "submit", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def printed(text: str) -> dict[str, str]:
    """What ``--dry-run`` printed, by heading."""
    parts_ = re.split(r"^#### (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts_[1::2], parts_[2::2], strict=True))


def script(text: str, name: str) -> str:
    (found,) = [
        v for k, v in printed(text).items() if k.endswith(f"/{name}.sbatch") and not k.startswith("sbatch")
    ]
    return found


@pytest.mark.parametrize(
    "extra", [[], ["--seeds", "3,1"], ["--evaluate", "evaluation/cpu", "-s", "environment"]]
)
def test_what_is_printed_is_what_is_submitted(extra: list[str], folder: Path) -> None:
    dry = submit("recipe.yaml", *extra, "--dry-run")
    assert not (folder / "runs").exists() and not (folder / "commands").exists()
    assert dry == submit("recipe.yaml", *extra, "--dry-run"), "the same bytes each time"
    submit("recipe.yaml", *extra)
    shown = printed(dry)
    commands = (folder / "commands").read_text().splitlines()
    wanted = [k.removeprefix("sbatch ") for k in shown if k.startswith("sbatch ")]
    assert commands == [w.replace("<train>", "101") for w in wanted] and len(commands) == 1 + (
        "--evaluate" in extra
    )
    for number, command in enumerate(commands, 1):
        path = command.split()[-1]
        assert (folder / f"{number}.script").read_bytes() == shown[path].encode() == Path(path).read_bytes()
    for path in (k for k in shown if k.endswith(".yaml")):
        assert Path(path).read_text() == shown[path]
    ids = json.loads((folder / "runs" / "first" / "slurm" / "jobs.json").read_text())
    assert ids["train"] == "101"


def test_the_training_job(folder: Path) -> None:
    dry = submit("recipe.yaml", "--dry-run")
    text, run = script(dry, "train"), folder / "runs" / "first"
    header = re.findall(r"^#SBATCH (.*)", text, re.MULTILINE)
    for flag in (
        *("--job-name=maieutic-first", "--nodes=3", "--gres=gpu:4", "--account=me", "--partition=gpu"),
        *("--requeue", "--open-mode=append", "--signal=B:USR1@300", f"--chdir={folder}"),
        f"--output={run}/slurm/train-%j.log",
    ):
        assert flag in header
    servers = re.findall(r"^server (\S+) (\d+) .*--gpus (\S+) -- (.*)", text, re.MULTILINE)
    # The student's server takes 2 GPUs of the third node, the judge's the next; trainers have the first two nodes.
    assert [(name, node, gpus) for name, node, gpus, _ in servers] == [
        ("student.0", "2", "0-1"),
        ("judge.0", "2", "2-2"),
    ]
    assert servers[0][3].startswith(
        f"{sys.executable} -m maieutic serve student {run}/slurm/recipe.yaml --host 0.0.0.0"
    )
    assert '--address-file "$MAIEUTIC_ENDPOINTS"/student.0.json' in servers[0][3]
    assert f"\ntrain 2 4 {run}/slurm/recipe.yaml --resume auto\nfinish $?\n" in text
    frozen = load_recipe_text(printed(dry)[f"{run}/slurm/recipe.yaml"], folder)
    assert frozen.students[0].engine.urls == ["file:$MAIEUTIC_ENDPOINTS/student.[0-9]*.json"]
    assert frozen.judge.engine.urls == ["file:$MAIEUTIC_ENDPOINTS/judge.[0-9]*.json"]
    assert frozen.output_dir == str(folder / "runs")


def load_recipe_text(text: str, folder: Path) -> Recipe:
    path = folder / "frozen.yaml"
    path.write_text(text)
    return load_recipe(path)


def test_a_site_that_refuses_mem(folder: Path) -> None:
    assert "#SBATCH --mem=0\n" in submit("recipe.yaml", "--dry-run")
    assert "--mem" not in submit("recipe.yaml", "--dry-run", "--set", "MEM_PER_NODE=none")


def test_no_port_is_fixed(folder: Path) -> None:
    text = script(submit("recipe.yaml", "--dry-run"), "train")
    assert "--port" not in text.replace("main_process_port", "") and "PORT=()" in text
    wanted = script(submit("recipe.yaml", "--dry-run", "--set", "WANTED_PORT=23456"), "train")
    assert (
        wanted.count("--port 23456") == 3
    )  # two servers and the trainers; each takes another one when it is taken


def test_keys_come_from_the_environment_and_stand_in_no_script(
    folder: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"kind": "chat", "urls": ["https://api.example"], "api_key_env": "MAIEUTIC_TEST_KEY"}
    path = folder / "recipe.yaml"
    data, _ = yaml12.load(path.read_text(), "r")
    data["judge"]["engine"] = engine
    path.write_text(yaml12.dump(data))
    assert "MAIEUTIC_TEST_KEY, which is not set" in submit("recipe.yaml", code=2)
    monkeypatch.setenv("MAIEUTIC_TEST_KEY", "sesame-open")
    dry = submit("recipe.yaml", "--dry-run")
    assert "sesame-open" not in dry and "server judge" not in dry and "MAIEUTIC_TEST_KEY" in dry


def test_keys_of_evaluations_and_of_a_sweeps_recipes_are_missed_at_submission_too(folder: Path) -> None:
    evaluation = "name: e\njudge: {model: m, engine: {kind: chat, urls: ['http://x'], api_key_env: MAIEUTIC_TEST_KEY}}\n"
    (folder / "evaluation.yaml").write_text(evaluation)
    answer = submit("recipe.yaml", "--evaluate", "evaluation.yaml", "--dry-run", code=2)
    assert "evaluation.yaml: judge: engine.api_key_env names MAIEUTIC_TEST_KEY, which is not set" in answer
    (folder / "sweep.yaml").write_text(
        "name: ablate\nseeds: [0]\nagainst: base\ninstrument: {recipe: recipe.yaml}\narms:\n"
        "  base: {kind: none, recipe: recipe.yaml}\n"
        "  instrument: {kind: train, recipe: recipe.yaml, overrides: [judge.engine.api_key_env=MAIEUTIC_TEST_KEY]}\n"
    )
    assert "arms.instrument: judge: engine.api_key_env" in submit("sweep.yaml", "--dry-run", code=2)


def test_an_argument_of_several_lines_stays_in_the_comment(folder: Path) -> None:
    text = script(submit("recipe.yaml", 'tracking.group="a\ntouch owned\nb"', "--dry-run"), "train")
    head = text.partition("set -uo pipefail")[0]
    assert "touch owned" in head and all(line.startswith("#") for line in head.splitlines())


def test_an_sbatch_that_says_more_than_a_number(folder: Path) -> None:
    fake = folder / "bin" / "sbatch"
    fake.write_text("#!/bin/sh\necho 'site: 3 checks'\necho '55;cluster'\necho 'site: bye'\n")
    assert submit("recipe.yaml") == "55\n"
    fake.write_text("#!/bin/sh\necho 'queued'\n")
    assert "sbatch gave no job number" in submit("recipe.yaml", code=1)


def ask(command: str, run: Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["slurm", command, str(run)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_status_of_a_run_that_is_being_written(folder: Path) -> None:
    run = folder / "runs" / "first"
    submit("recipe.yaml")
    (run / "endpoints" / "101-0").mkdir(parents=True)
    (run / "endpoints" / "101-0" / "student.0.json").write_text('{"url": "http://n')
    (run / "metrics.jsonl").write_text('{"train/step": 4}\n{"train/step": 5, "tra')
    assert f"step\t4\t{run / 'metrics.jsonl'}" in ask("status", run)
    (run / "slurm" / "jobs.json").write_text('{"train": ')
    assert "jobs.json cannot be read" in ask("status", run, code=1)


def test_only_what_is_not_over_is_cancelled(folder: Path) -> None:
    run = folder / "runs" / "first"
    submit("recipe.yaml", "--evaluate", "evaluation/cpu")
    (folder / "bin" / "scontrol").write_text(
        "#!/bin/sh\ncase $3 in 101) echo JobState=PREEMPTED;; *) echo JobState=PENDING;; esac\n"
    )
    (folder / "bin" / "scancel").write_text('#!/bin/sh\necho "$@" >>"$FAKE/cancelled"\n')
    (folder / "bin" / "scancel").chmod(0o755)
    assert ask("cancel", run) == "evaluate: job 102 cancelled\n"
    assert (folder / "cancelled").read_text() == "102\n"
    (folder / "bin" / "scontrol").write_text("#!/bin/sh\necho JobState=COMPLETED\n")
    assert ask("cancel", run) == "all its jobs are over: nothing to cancel\n"


def test_a_container_around_every_step(folder: Path) -> None:
    site = folder / "slurm" / "site.env"
    site.write_text(
        SITE
        + f"SCRATCH={folder}/scratch\nCONTAINER_IMAGE=/images/maieutic.sqsh\nCONTAINER_ARGS=--no-container-mount-home\n"
    )
    text = script(submit("recipe.yaml", "--dry-run"), "train")
    (flags,) = re.findall(r"^SRUN=\((.*)\)$", text, re.MULTILINE)
    assert flags.split() == [
        *("--overlap", "--cpus-per-task=16", "--container-image=/images/maieutic.sqsh"),
        f"--container-mounts={folder}/scratch:{folder}/scratch,{folder}:{folder}",
        *(f"--container-workdir={folder}", "--no-container-mount-home"),
    ]
    sruns = [line for line in text.splitlines() if re.match(r"\s*srun ", line)]
    assert len(sruns) == 2 and all('srun "${SRUN[@]}"' in line for line in sruns)
    assert f"train 2 4 {folder}/scratch/runs/first/slurm/recipe.yaml" in text
    # Python runs in the container only, by the container's own name.
    main = text.partition("# ---- this job")[2]
    assert sys.executable not in text and " python -m maieutic serve student" in main
    # What lies elsewhere is mounted too: models, and runs of an absolute output_dir.
    site.write_text(SITE + "CONTAINER_IMAGE=i.sqsh\nHF_HOME=/models/hf\n")
    text = script(submit("recipe.yaml", "--dry-run", "output_dir=/data/runs"), "train")
    assert f"--container-mounts={folder}:{folder},/data/runs:/data/runs,/models/hf:/models/hf " in text
    assert text.index("export HF_HOME=/models/hf") < text.index('mkdir -p "$HF_HOME"')
    site.write_text(SITE)
    assert "--container" not in submit("recipe.yaml", "--dry-run")


def test_seeds_are_an_array_with_a_run_each(folder: Path) -> None:
    dry = submit("recipe.yaml", "--dry-run", "--seeds", "3,1", "--evaluate", "evaluation/cpu")
    text = script(dry, "train")
    assert "#SBATCH --array=0-1\n" in text and "SEEDS=(3 1)\n" in text
    assert "train 2 4 " + f'{folder}/runs/first/slurm/recipe.yaml "${{OWN[@]}}" --resume auto' in text
    got = bash_values(text, "RUN OWN", SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="7")
    assert got == [f"{folder}/runs/first-s1", "name=first-s1", "seed=1"]
    assert any("--dependency=aftercorr:<train> --kill-on-invalid-dep=yes" in k for k in printed(dry))
    assert '"$RUN"/checkpoints/step-000006' in script(dry, "evaluate")
    for wrong in ("1,1", "²", "", "0,-1"):
        assert "write different whole numbers" in submit("recipe.yaml", "--seeds", wrong, code=2)


def bash_values(text: str, names: str, **env: str) -> list[str]:
    """Values that the lines before the common part give to variables."""
    head = text.partition("GRACE=")[0].replace("exec >>", ": >>")
    show = "".join(f'printf "%s\\n" "${{{n}[@]}}"\n' for n in names.split())
    done = subprocess.run(
        ["bash"], input=head + show, env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_sweep_is_an_array_of_its_tasks(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(
        "name: ablate\nseeds: [0, 7]\nagainst: base\ninstrument: {recipe: recipe.yaml}\noverrides: [training.max_steps=2]\n"
        "arms:\n  base: {kind: none, recipe: recipe.yaml}\n  full: {kind: train, recipe: recipe.yaml}\n"
        "  no-gates: {kind: train, recipe: recipe.yaml, overrides: [env.gates=off]}\n"
    )
    dry = submit("sweep.yaml", "--dry-run")
    text, root = script(dry, "tasks"), folder / "runs" / "ablate"
    assert "#SBATCH --array=0-4\n" in text
    assert "TASKS=(base-0 full-0 no-gates-0 full-7 no-gates-7)\n" in text
    lines = dict(re.findall(r"^  (\d)\) (train .*?) \|\| finish \$\? ;;", text, re.MULTILINE))
    assert sorted(lines) == ["1", "2", "3", "4"], "an untrained arm is only measured"
    assert "name=no-gates-7 seed=7 arm=no-gates" in lines["4"] and "env.gates=off" in lines["4"]
    assert f'-m maieutic sweep {root}/slurm/sweep.yaml --task "$SLURM_ARRAY_TASK_ID"\nfinish $?\n' in text
    assert [n for n, _ in re.findall(r"^server (\S+) (\d)", text, re.MULTILINE)] == ["student.0", "judge.0"]
    assert any("--dependency=afterany:<tasks>" in k for k in printed(dry))
    submit("sweep.yaml")
    frozen = load_sweep_recipe(root / "slurm" / "sweep.yaml")
    assert [t.name for t in tasks(frozen)] == ["base-0", "full-0", "no-gates-0", "full-7", "no-gates-7"]
    for task in tasks(frozen):  # every recipe of every task reads addresses of the job's own servers
        arm = frozen.arms[task.arm]
        recipe = load_recipe(arm.recipe, arm.overrides)
        assert recipe.students[0].engine.urls == ["file:$MAIEUTIC_ENDPOINTS/student.[0-9]*.json"]
        assert setting(frozen, task) == setting(load_sweep_recipe(root / "slurm" / "sweep.yaml"), task)
    assert "its seeds stand in the recipe" in submit("sweep.yaml", "--seeds", "1", code=2)


def test_a_run_is_not_mixed_with_another(folder: Path) -> None:
    run = folder / "runs" / "first"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    assert "already holds a run: --resume goes on with it" in submit("recipe.yaml", code=1)
    submit("recipe.yaml", "--resume")
    (folder / "bin" / "scontrol").write_text("#!/bin/sh\necho JobState=PENDING\n")
    assert "its job train is PENDING" in submit("recipe.yaml", "--resume", code=1)


def test_a_refused_script_leaves_no_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bin" / "sbatch").write_text(
        '#!/bin/sh\ncase "$*" in *evaluate*) echo "Invalid partition" >&2; exit 1;; esac\necho 55\n'
    )
    (folder / "bin" / "scancel").write_text('#!/bin/sh\necho "$@" >>"$FAKE/cancelled"\n')
    (folder / "bin" / "scancel").chmod(0o755)
    assert "Invalid partition" in submit("recipe.yaml", "--evaluate", "evaluation/cpu", code=1)
    assert (folder / "cancelled").read_text() == "55\n"
    monkeypatch.setenv("PATH", str(folder / "runs"))
    assert "no sbatch on PATH" in submit("recipe.yaml", code=1)


def test_an_evaluation_whose_servers_nobody_starts(folder: Path) -> None:
    answer = submit("recipe.yaml", "--dry-run", "--evaluate", "evaluation/eduardo", code=2)
    assert "evaluation/eduardo: tutor.engine.urls names address files" in answer
    assert "--suite nothing: there are environment" in submit(
        *("recipe.yaml", "--dry-run", "--evaluate", "evaluation/cpu", "--suite", "nothing"), code=2
    )


@pytest.mark.parametrize("name", ["train", "evaluate", "tasks", "report"])
def test_the_scripts_are_clean_bash(name: str, folder: Path) -> None:
    (folder / "slurm" / "site.env").write_text(
        SITE
        + "MODULES=cuda/12 gcc\nSETUP=\"source /x/activate && echo 'a b'\"\nHF_HOME=/models\nCONTAINER_IMAGE=i.sqsh\n"
    )
    if name in ("tasks", "report"):
        text = script(submit("compare/ablations", "--dry-run"), name)
    else:
        text = script(
            submit("recipe.yaml", "--dry-run", "--seeds", "0,1", "--evaluate", "evaluation/cpu"), name
        )
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("no shellcheck: bash -n passed")
    done = subprocess.run([checker, "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

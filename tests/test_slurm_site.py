"""The site's settings, and where a plan puts trainers and servers."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

from maieutic.config import Recipe
from maieutic.errors import RecipeError
from maieutic.slurm.errors import SiteError, SlurmError
from maieutic.slurm.plan import PlacedServer, place, processes_of, served_roles, with_addresses
from maieutic.slurm.site import Site, load_site, seconds_of
from maieutic.slurm.step import main as step_main
from maieutic.slurm.step import slice_gpus

EXAMPLE = Path(__file__).resolve().parents[1] / "slurm" / "site.env.example"


def site_of(tmp_path: Path, text: str, *changes: str) -> Site:
    file = tmp_path / "site.env"
    file.write_text(text)
    return load_site(file, changes)


def test_the_example_names_every_key_and_loads_as_it_stands() -> None:
    keys = re.findall(r"^([A-Z_]+)=", EXAMPLE.read_text(), re.MULTILINE)
    assert sorted(keys) == sorted(k.upper() for k in Site.model_fields)
    site = load_site(EXAMPLE)
    defaults = Site(gpus_per_node=4, cpus_per_node=64)
    assert site == defaults, "the example shows the defaults"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("PARTITON=x", r"site.env:3: unknown key PARTITON; did you mean PARTITION\?"),
        ("partition=x", r"site.env:3: unknown key partition; did you mean PARTITION\?"),
        ("WANDB_API_KEY=abc", r"site.env:3: unknown key WANDB_API_KEY"),
        ("nonsense", r"site.env:3: write KEY=value, this is 'nonsense'"),
        ("CPUS_PER_NODE=8", r"site.env:3: CPUS_PER_NODE is given twice \(line 2 too\)"),
        ("TRAIN_NODES=two", r"site.env:3: TRAIN_NODES: 'two'"),
        ("TRAIN_NODES=0", r"site.env:3: TRAIN_NODES: 0"),
        ("TIME=tomorrow", r"site.env:3: TIME: 'tomorrow'"),
        ("GPU_FLAG=gpus", r"site.env:3: GPU_FLAG: 'gpus'.*'gres' or 'gpus-per-node'"),
        ("TRAIN_PROCESSES=8", r"TRAIN_PROCESSES is 8, but a node has 4 GPUs"),
        ("CONTAINER_MOUNTS=/a:/a", r"need CONTAINER_IMAGE"),
        ("SCRATCH=/scratch/$NO_SUCH_USER", r"site.env:3: SCRATCH: \$NO_SUCH_USER is not set"),
        ("SCRATCH=scratch", r"SCRATCH is scratch: an absolute path is needed"),
        ("SCRATCH=~no.such.user/x", r"site.env:3: SCRATCH: ~no.such.user is no user here"),
        (
            "TIME=5",
            r"TIME is 5 \(300 s\), SIGNAL_SECONDS is 300: jobs would be told to stop as soon as they start",
        ),
        ("EVALUATION_TIME=4:59", r"EVALUATION_TIME is 4:59 \(299 s\)"),
        ("ACCELERATE_CONFIG=none.yaml", r"ACCELERATE_CONFIG: none.yaml is no file"),
        ("SBATCH_ARGS=--export=ALL,WANDB_API_KEY=abc", r"SBATCH_ARGS: WANDB_API_KEY=… looks like a secret"),
        ("SETUP=export A='x  y' && true", r"site.env:3: SETUP: put the whole line in quotes"),
        ('SETUP="export HF_TOKEN=abc"', r"HF_TOKEN=… looks like a secret"),
        ('SETUP="unclosed', r"site.env:3: SETUP: No closing quotation"),
    ],
)
def test_what_cannot_be_used_is_named(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=message) as caught:
        site_of(tmp_path, f"GPUS_PER_NODE=4\nCPUS_PER_NODE=64\n{line}\n")
    assert "abc" not in str(caught.value)


def test_values_are_read_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "ann")
    text = (
        "# comment\nexport GPUS_PER_NODE=8   # eight\nCPUS_PER_NODE=96\nSCRATCH=/scratch/$WHO\nACCOUNT=\n"
        "CONTAINER_IMAGE=docker://reg.example#team/image:1.2\nSETUP=\"echo $(id) 'a b' && true\"\n"
        "MODULES=cuda/12.8  gcc\nSBATCH_ARGS=--exclusive --mail-type=END\n"
    )
    site = site_of(tmp_path, text, "TRAIN_NODES=3", "ACCOUNT=other")
    assert (site.gpus_per_node, site.scratch, site.account, site.train_nodes) == (
        8,
        "/scratch/ann",
        "other",
        3,
    )
    assert site.container_image == "docker://reg.example#team/image:1.2"
    assert site.setup == "echo $(id) 'a b' && true"
    assert site.modules == ["cuda/12.8", "gcc"] and site.sbatch_args == ["--exclusive", "--mail-type=END"]
    with pytest.raises(SiteError, match=r"--set:1: unknown key TRAIN_NODE; did you mean TRAIN_NODES\?"):
        site_of(tmp_path, text, "TRAIN_NODE=3")


def test_what_only_looks_like_a_secret_is_taken(tmp_path: Path) -> None:
    line = "export TOKENIZERS_PARALLELISM=false"
    assert site_of(tmp_path, f'GPUS_PER_NODE=4\nCPUS_PER_NODE=64\nSETUP="{line}"\n').setup == line


def test_a_change_takes_a_value_away_and_owns_its_error(tmp_path: Path) -> None:
    text = "GPUS_PER_NODE=4\nCPUS_PER_NODE=64\nPARTITION=gpu\nTRAIN_NODES=2\n"
    assert site_of(tmp_path, text).partition == "gpu"
    assert site_of(tmp_path, text, "PARTITION=").partition is None
    assert site_of(tmp_path, text, "TRAIN_NODES=").train_nodes == 1
    with pytest.raises(SiteError, match="TRAIN_NODES: 'x'") as caught:
        site_of(tmp_path, text, "TRAIN_NODES=x")
    assert "site.env:4" not in str(caught.value)
    with pytest.raises(SiteError, match="--set: write KEY=value, this is ''"):
        site_of(tmp_path, text, "")


def test_files_of_other_editors(tmp_path: Path) -> None:
    file = tmp_path / "site.env"
    file.write_bytes(b"\xef\xbb\xbfGPUS_PER_NODE=4\r\nCPUS_PER_NODE=64\r\nACCOUNT=me\r\n")
    assert load_site(file).account == "me"
    file.write_bytes(b"GPUS_PER_NODE=4\nCPUS_PER_NODE=64\nACCOUNT=caf\xe9\n")
    with pytest.raises(SiteError, match=r"site\.env: not UTF-8"):
        load_site(file)


def test_home_folders_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    text = (
        "GPUS_PER_NODE=4\nCPUS_PER_NODE=64\nSCRATCH=~/s\nPYTHON=~/v/bin/python\nVLLM_PYTHON=~/w\nHF_HOME=~\n"
    )
    site = site_of(tmp_path, text)
    assert (site.scratch, site.python) == ("/home/ann/s", "/home/ann/v/bin/python")
    assert (site.vllm_python, site.hf_home) == ("/home/ann/w", "/home/ann")


def test_a_shipped_launcher_file_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "recipes/accelerate/fsdp2.yaml"
    text = f"GPUS_PER_NODE=4\nCPUS_PER_NODE=64\nACCELERATE_CONFIG={name}\n"
    found = site_of(tmp_path, text).accelerate_config
    assert found is not None and found.endswith(name) and Path(found).is_file() and Path(found).is_absolute()
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("{}")
    assert site_of(tmp_path, text).accelerate_config == name, "one's own comes first"
    inside = text.replace(name, "/in/the/image.yaml") + "CONTAINER_IMAGE=i.sqsh\n"
    assert site_of(tmp_path, inside).accelerate_config == "/in/the/image.yaml"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5_400),
        ("90:30", 5_430),
        ("24:00:00", 86_400),
        ("2-3", 183_600),
        ("2-3:04", 183_840),
        ("2-3:04:05", 183_845),
        ("0", 0),
    ],
)
def test_time_limits_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


def test_required_keys_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SiteError, match="CPUS_PER_NODE is required"):
        site_of(tmp_path, "GPUS_PER_NODE=1\n")
    monkeypatch.setenv("MAIEUTIC_SITE", str(tmp_path / "none.env"))
    with pytest.raises(SiteError, match=r"none\.env: No such file.*copy slurm/site.env.example"):
        load_site()


# ---- plan ------------------------------------------------------------------------------------------------------------


def served(urls: list[str], *args: str) -> dict[str, object]:
    return {"kind": "vllm", "urls": urls, "serve_args": list(args)}


FILES = ["file:somewhere/*.json"]


def recipe_of(tutor: object = None, student: object = None, judge: object = None) -> Recipe:
    hf = {"kind": "hf"}
    data = {
        "name": "r",
        "tutor": {"model": "org/tutor", "engine": tutor or hf},
        "students": [{"model": "org/student", "engine": student or hf}],
        "judge": {"kind": "llm", "model": "org/judge", "engine": judge or hf},
    }
    return Recipe.model_validate(data)


def test_only_servers_with_address_files_are_ours() -> None:
    recipe = recipe_of(served(FILES), served(["http://x:1"]), served([*FILES, "http://y:2"], "-tp", "2"))
    assert [(r.name, r.gpus) for r in served_roles(recipe)] == [("tutor", 1), ("judge", 2)]
    assert served_roles(recipe_of()) == []
    changed = with_addresses(recipe)
    assert changed.tutor.engine.urls == ["file:$MAIEUTIC_ENDPOINTS/tutor.[0-9]*.json"]
    assert changed.students == recipe.students
    assert changed.judge.engine.urls == ["file:$MAIEUTIC_ENDPOINTS/judge.[0-9]*.json", "http://y:2"]


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        (["--tensor-parallel-size", "2", "--data-parallel-size=3"], 6),
        (["-tp", "4", "-pp=2"], 8),
        (["--tensor_parallel_size=4"], 4),
        (["--tensor-parallel-size", "4", "-tp", "2"], 2),
        (["--max-num-seqs", "64"], 1),
    ],
)
def test_gpus_of_a_server_are_the_product_of_its_parallel_sizes(args: list[str], gpus: int) -> None:
    (role,) = served_roles(recipe_of(student=served(FILES, *args)))
    assert role.gpus == gpus


def students_of(*names: str, urls: dict[str, list[str]] | None = None) -> Recipe:
    students = [
        {"name": n, "model": f"org/{i}", "engine": served((urls or {}).get(n, FILES))}
        for i, n in enumerate(names)
    ]
    return Recipe.model_validate({"name": "r", "tutor": {"model": "org/tutor"}, "students": students})


def test_students_of_any_name_have_files_of_their_own() -> None:
    """The pattern of one must not take the servers of another, and no name may leave the folder or be a pattern."""
    names = ["qwen2", "qwen2.5", "../a [b]*", "学生", "-x"]
    recipe = with_addresses(students_of(*names))
    roles = served_roles(recipe)
    files = [f"{PlacedServer(role, number, 0, None).name}.json" for role in roles for number in (0, 11)]
    patterns = [s.engine.urls[0].removeprefix("file:$MAIEUTIC_ENDPOINTS/") for s in recipe.students]
    found = [[f for f in files if fnmatch.fnmatchcase(f, pattern)] for pattern in patterns]
    assert found == [files[i : i + 2] for i in range(0, len(files), 2)]
    assert all(re.fullmatch(r"[\w.-]+", f, re.ASCII) for f in files)
    assert [r.student for r in roles] == names


def test_students_whose_files_would_be_the_same() -> None:
    with pytest.raises(RecipeError, match=r"students \['a b', 'a/b'\]: .* would all be called student-a-b"):
        served_roles(students_of("a b", "c", "a/b"))
    there = ["http://x:1"]
    changed = with_addresses(students_of("a b", "a/b", urls={"a/b": there}))
    assert [s.engine.urls for s in changed.students] == [
        ["file:$MAIEUTIC_ENDPOINTS/student-a-b.[0-9]*.json"],
        there,
    ]


def test_a_parallel_size_that_is_none() -> None:
    with pytest.raises(RecipeError, match="student: engine.serve_args: --tensor-parallel-size 'two'"):
        served_roles(recipe_of(student=served(FILES, "--tensor-parallel-size", "two")))


def site(**changes: object) -> Site:
    return Site.model_validate({"gpus_per_node": 4, "cpus_per_node": 64, **changes})


def test_trainers_on_whole_nodes_servers_on_further_ones() -> None:
    roles = served_roles(recipe_of(served(FILES), served(FILES, "-tp", "2"), served(FILES, "-tp", "2")))
    p = place(roles, site(student_servers=2), train_nodes=2, processes=4)
    assert [(s.name, s.node, s.gpus) for s in p.servers] == [
        ("tutor.0", 2, (0, 0)),
        ("student.0", 2, (1, 2)),
        ("student.1", 3, (0, 1)),
        ("judge.0", 3, (2, 3)),
    ]
    assert (p.nodes, p.train_nodes) == (4, 2)


def test_servers_fill_what_trainers_leave() -> None:
    roles = served_roles(recipe_of(None, served(FILES), served(FILES, "-tp", "2")))
    one = site(train_processes=1)
    p = place(roles, one, train_nodes=1, processes=processes_of(one))
    assert [(s.name, s.node, s.gpus) for s in p.servers] == [("student.0", 0, (1, 1)), ("judge.0", 0, (2, 3))]
    assert p.nodes == 1


def test_without_gpus_each_server_has_a_node_of_its_own() -> None:
    roles = served_roles(recipe_of(None, served(FILES), served(FILES)))
    p = place(roles, site(gpus_per_node=0), train_nodes=2, processes=1)
    assert [(s.node, s.gpus) for s in p.servers] == [(2, None), (3, None)] and p.nodes == 4


def test_a_server_larger_than_a_node() -> None:
    with pytest.raises(RecipeError, match=r"judge: one server takes 8 GPUs .*, a node has 4"):
        place(served_roles(recipe_of(judge=served(FILES, "-tp", "8"))), site(), train_nodes=1, processes=4)


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="SlurmError: /no/python: No such file or directory: is PYTHON"):
        step_main(["--", "/no/python", "-m", "x"])


def test_a_step_sees_its_slice() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "2,3,5,7"}
    slice_gpus("1-2", environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,5"
    environment = {"ROCR_VISIBLE_DEVICES": "0,1"}
    slice_gpus("1-1", environment)
    assert environment == {"ROCR_VISIBLE_DEVICES": "1"}
    environment = {}
    slice_gpus("2-3", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    with pytest.raises(
        SlurmError, match="GPUs 0-3 of this node were planned, but CUDA_VISIBLE_DEVICES shows 2"
    ):
        slice_gpus("0-3", {"CUDA_VISIBLE_DEVICES": "0,1"})

"""The site's settings, and where a plan puts trainers and servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maieutic.config import Recipe
from maieutic.errors import RecipeError
from maieutic.slurm.errors import SiteError, SlurmError
from maieutic.slurm.plan import place, processes_of, served_roles, with_addresses
from maieutic.slurm.site import Site, load_site
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
        (["--max-num-seqs", "64"], 1),
    ],
)
def test_gpus_of_a_server_are_the_product_of_its_parallel_sizes(args: list[str], gpus: int) -> None:
    (role,) = served_roles(recipe_of(student=served(FILES, *args)))
    assert role.gpus == gpus


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

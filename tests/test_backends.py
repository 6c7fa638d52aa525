"""Two processes with DDP, ZeRO-2, ZeRO-3 and FSDP2 learn what one process learns, and go on bit for bit from a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import training_parts as parts
from loopback import InThread
from maieutic.errors import CheckpointError, MissingExtraError, RecipeError
from maieutic.tiny import make_tiny_model
from maieutic.training import checkpoint, sharding
from maieutic.training.sharding import Backend, Mirror, backend_of, before_prepare
from maieutic.training.step import accumulate_gradients
from token_server import TokenServer

BACKENDS = ("fsdp2", "zero3", "zero2", "ddp")
MODES = ("full", "lora")
STEPS = 2


def mode_changes(mode: str) -> dict[str, Any]:
    """Several micro-batches a rank and a KL term in both; gradient checkpointing where all weights are trained."""
    changes: dict[str, Any] = {
        "training.max_steps": STEPS,
        "training.mini_batch_problems": 2,
        "training.tokens_per_micro_batch": 128,
        "algorithm.kl_beta": 0.05,
        "eval.every": 0,
        "checkpoint.every": 1,
        "checkpoint.keep_last": STEPS,
    }
    if mode == "full":
        changes |= {
            "tutor.lora": None,
            "training.optimizer.lr": 1e-3,
            "training.gradient_checkpointing": True,
        }
    return changes


class Jobs:
    """Training runs for one call of ``backend_runs.py``."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.jobs: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        config: str | None,
        mode: str,
        *,
        resume_from: str | None = None,
        changes: dict[str, Any] | None = None,
        **job: Any,
    ) -> None:
        """A run, or (``resume_from``) what becomes of that one's first checkpoint."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        data = parts.recipe_dict(self.model, folder, **mode_changes(mode) | (changes or {}))
        (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
        argv = [str(folder / "recipe.yaml")]
        if resume_from is not None:
            data["problems"]["source"] = str(self.folder / resume_from / "pairs.jsonl")
            (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
            argv += ["--resume", str(self.run(resume_from) / "checkpoints" / "step-000001")]
        ranks = 1 if config is None else 2
        self.jobs.append(
            {"name": name, "config": config, "ranks": ranks, "argv": argv, "log": str(folder / "log"), **job}
        )

    def run(self, name: str) -> Path:
        return self.folder / name / "run"

    def start(self) -> None:
        """All of them, one after another; a run that fails fails here, with its log."""
        file = self.folder / "jobs.json"
        file.write_text(json.dumps(self.jobs))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        script = Path(__file__).with_name("backend_runs.py")
        done = subprocess.run(
            [sys.executable, str(script), str(file)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        codes = json.loads(file.with_suffix(".codes").read_text())
        for job in self.jobs:
            if any(codes[job["name"]]):
                logs = [Path(f"{job['log']}.{rank}").read_text()[-3000:] for rank in range(job["ranks"])]
                pytest.fail(
                    f"{job['name']} ended with {codes[job['name']]}\n" + "\n--- next rank\n".join(logs)
                )


def need_deepspeed() -> None:
    pytest.importorskip("deepspeed", reason="ZeRO needs the extra 'deepspeed'")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Every backend × mode, the same in one process, and each resumed from its first checkpoint."""
    need_deepspeed()
    folder = tmp_path_factory.mktemp("backends")
    jobs = Jobs(folder, make_tiny_model(folder / "model"))
    for mode in MODES:
        jobs.add(f"one-{mode}", None, mode)
        for backend in BACKENDS:
            jobs.add(f"{backend}-{mode}", backend, mode)
    nothing = {"reward": {"kind": "training_parts:constant"}, "algorithm.kl_beta": 0.0}
    jobs.add("zero3-flat", "zero3", "lora", changes=nothing)
    for mode in MODES:
        for backend in BACKENDS:
            jobs.add(f"{backend}-{mode}-again", backend, mode, resume_from=f"{backend}-{mode}")
    jobs.start()
    return jobs


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """The dividing backends in bf16, with optimizer states offloaded where DeepSpeed does it."""
    need_deepspeed()
    folder = tmp_path_factory.mktemp("bf16")
    jobs = Jobs(folder, make_tiny_model(folder / "model"))
    offload = {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
    for backend, env in (("zero2", {}), ("zero3", offload), ("fsdp2", {})):
        more = {"precision": "bf16", "environment": env}
        jobs.add(f"{backend}-full", backend, "full", **more)
        jobs.add(f"{backend}-full-again", backend, "full", resume_from=f"{backend}-full", **more)
    jobs.start()
    return jobs


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The backends that divide weights, with the tutor on a server that must be given whole ones."""
    need_deepspeed()
    folder = tmp_path_factory.mktemp("pushed")
    jobs = Jobs(folder, make_tiny_model(folder / "model"))
    with InThread(TokenServer(jobs.model)) as server:
        engine = {"tutor.engine": {"kind": "vllm", "urls": [server.url]}}
        for backend, mode in (("fsdp2", "lora"), ("zero3", "full")):
            jobs.add(f"{backend}-{mode}", backend, mode, changes=engine)
        jobs.start()
        yield jobs


matrix_of_runs = pytest.mark.parametrize(
    ("backend", "mode"), [(backend, mode) for mode in MODES for backend in BACKENDS]
)
slow = [pytest.mark.slow, pytest.mark.integration, pytest.mark.xdist_group("backends")]


def with_marks(function: Any) -> Any:
    for mark in slow:
        function = mark(function)
    return function


@with_marks
@matrix_of_runs
def test_two_processes_learn_what_one_does(matrix: Jobs, backend: str, mode: str) -> None:
    one = parts.metrics_of(matrix.run(f"one-{mode}"))
    two = parts.metrics_of(matrix.run(f"{backend}-{mode}"))
    assert len(one) == STEPS and [r.keys() for r in one] == [r.keys() for r in two]
    for a, b in zip(one, two, strict=True):
        assert a["train/grad_norm"] > 0 and a["train/updates"] == 1
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-4, abs=0)
        assert b == pytest.approx(a, rel=1e-3, abs=1e-4)


@with_marks
@matrix_of_runs
def test_a_checkpoint_goes_on_bit_for_bit(matrix: Jobs, backend: str, mode: str) -> None:
    same_end(matrix, f"{backend}-{mode}")


def same_end(jobs: Jobs, name: str) -> None:
    """The resumed run has the numbers, the weights and the optimizer states of the whole one."""
    whole, again = jobs.run(name), jobs.run(f"{name}-again")
    assert parts.metrics_of(again) == parts.metrics_of(whole)[1:]
    last = f"checkpoints/step-{STEPS:06d}"
    (weights,) = {p.name for p in (whole / last / "model").glob("*.safetensors")}
    assert (again / last / "model" / weights).read_bytes() == (whole / last / "model" / weights).read_bytes()
    first = whole / "checkpoints" / "step-000001" / "model" / weights
    assert first.read_bytes() != (whole / last / "model" / weights).read_bytes()
    files = sorted(p.relative_to(whole / last) for p in (whole / last).rglob("*.pt") if p.name != "rng.pt")
    assert [str(f) for f in files] == (
        ["optimizer.pt"] if name.startswith("ddp") else ["optimizer/rank-00000.pt", "optimizer/rank-00001.pt"]
    )
    for file in files:
        left, right = (torch.load(run / last / file, weights_only=True) for run in (whole, again))
        assert_equal(left, right)


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


@with_marks
def test_deepspeed_takes_no_step_for_advantages_of_zero(matrix: Jobs) -> None:
    """Its step cannot be looked at first, and would replay momentum."""
    run = matrix.run("zero3-flat")
    rows = parts.metrics_of(run)
    assert [(r["train/updates"], r["train/grad_norm"]) for r in rows] == [(0.0, 0.0)] * STEPS
    first, last = (load_weights(run / "checkpoints" / f"step-{n:06d}" / "model") for n in (1, STEPS))
    assert_equal(first, last)


@with_marks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["zero2", "zero3", "fsdp2"])
def test_states_are_divided_and_weights_are_whole(matrix: Jobs, backend: str, mode: str) -> None:
    last = matrix.run(f"{backend}-{mode}") / "checkpoints" / f"step-{STEPS:06d}"
    one = matrix.run(f"one-{mode}") / "checkpoints" / f"step-{STEPS:06d}"
    moments = torch.load(one / "optimizer.pt", weights_only=True)["optimizer"]["state"].values()
    whole = sum(m["exp_avg"].numel() for m in moments)
    sizes = []
    for rank in range(2):
        kept = torch.load(last / "optimizer" / f"rank-{rank:05d}.pt", weights_only=True)
        assert kept["divided"] == {"backend": backend, "ranks": 2, "rank": rank}
        sizes.append(sum(p["state"]["exp_avg"].numel() for p in kept["parts"]))
        assert all(p["state"]["exp_avg"].dtype == torch.float32 for p in kept["parts"])
    assert whole <= sum(sizes) < 1.2 * whole and max(sizes) < 0.6 * whole  # padding apart, a half each
    theirs, ours = (load_weights(folder / "model") for folder in (last, one))
    assert theirs.keys() == ours.keys()
    moved = load_weights(one.with_name("step-000001") / "model")
    for name, value in theirs.items():
        assert value.shape == ours[name].shape and value.dtype == ours[name].dtype
        # Adam's first steps have the size of the learning rate wherever a gradient is not exactly zero.
        assert (value - ours[name]).abs().mean() < 0.05 * (moved[name] - ours[name]).abs().mean() + 1e-7, name


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (file,) = folder.glob("*.safetensors")
    return load_file(file)


@with_marks
@matrix_of_runs
def test_what_was_trained_is_exported(matrix: Jobs, tmp_path: Path, backend: str, mode: str) -> None:
    from transformers import AutoModelForCausalLM

    from maieutic.config import Recipe
    from maieutic.export import export
    from maieutic.training.policy import build_policy

    run = matrix.run(f"{backend}-{mode}")
    done = export(run, tmp_path / "out")
    ids = torch.tensor([[5, 9, 11, 200, 7, 42]])
    recipe = Recipe.model_validate(yaml.safe_load((run / "recipe.yaml").read_text()))
    policy = build_policy(recipe, torch.device("cpu"), weights=done.source / "model")
    with torch.no_grad():
        ours = policy.model(input_ids=ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(done.folder, dtype="auto").eval()(input_ids=ids).logits
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


@with_marks
@pytest.mark.parametrize("backend", ["zero2", "zero3", "fsdp2"])
def test_in_bf16_the_optimizer_keeps_fp32_weights_and_goes_on_bit_for_bit(
    in_bf16: Jobs, backend: str
) -> None:
    same_end(in_bf16, f"{backend}-full")
    last = in_bf16.run(f"{backend}-full") / "checkpoints" / f"step-{STEPS:06d}"
    kept = torch.load(last / "optimizer" / "rank-00000.pt", weights_only=True)["parts"]
    if backend == "fsdp2":  # the divided weights themselves
        masters = list(load_weights(last / "model").values())
    else:
        masters = [part["master"] for part in kept]
    assert {m.dtype for m in masters} == {torch.float32}
    assert any((m != m.to(torch.bfloat16).float()).any() for m in masters)
    assert {v.dtype for p in kept for v in p["state"].values() if isinstance(v, torch.Tensor)} == {
        torch.float32
    }


@with_marks
@pytest.mark.parametrize(("backend", "mode"), [("fsdp2", "lora"), ("zero3", "full")])
def test_servers_get_the_divided_weights_whole(pushed: Jobs, tmp_path: Path, backend: str, mode: str) -> None:
    """What the server samples with in step 2 are the weights that all ranks have after step 1."""
    from maieutic.export import export

    run = pushed.run(f"{backend}-{mode}")
    first, second = parts.metrics_of(run)
    assert first["train/updates"] == second["train/updates"] == 1
    assert second["push/probe_gap"] < 1e-5 and second["train/logprob_gap"] < 1e-4
    sent = load_weights(run / "push")
    merged = load_weights(export(run / "checkpoints" / "step-000001", tmp_path / "out").folder)
    base = load_weights(pushed.model)
    for name, value in merged.items():
        torch.testing.assert_close(sent[name], value, atol=1e-6, rtol=1e-5)
    assert any((sent[name] - base[name]).abs().max() > 1e-4 for name in base)


# ---- what needs no second process ------------------------------------------------------------------------------------


def launched(kind: str, **parts_of_it: Any) -> Any:
    from accelerate.utils import DistributedType

    return SimpleNamespace(
        distributed_type=DistributedType(kind),
        mixed_precision=parts_of_it.pop("precision", "no"),
        **parts_of_it,
    )


def fsdp(**settings: Any) -> Any:
    plugin = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "activation_checkpointing": False}
    precision = settings.pop("precision", "no")
    plugin |= settings
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**plugin))
    return launched("FSDP", state=state, is_fsdp2=plugin["fsdp_version"] == 2, precision=precision)


def zero(stage: int, precision: str = "no", **settings: Any) -> Any:
    config = {"zero_optimization": {"stage": stage, **settings.pop("zero", {})}, **settings}
    return launched(
        "DEEPSPEED", deepspeed_plugin=SimpleNamespace(deepspeed_config=config), precision=precision
    )


def test_the_launchers_choice_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "_deepspeed_installed", lambda: True)
    found = [
        backend_of(a) for a in (launched("NO"), launched("MULTI_CPU"), fsdp(), zero(1), zero(2), zero(3))
    ]
    assert [b.name for b in found] == ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
    assert [b.divides_weights for b in found] == [False, False, True, False, False, True]
    assert [b.divides_optimizer for b in found] == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("launch", "setting"),
    [
        (fsdp(fsdp_version=1), "fsdp_version: 2"),
        (fsdp(cpu_ram_efficient_loading=True), "fsdp_cpu_ram_efficient_loading"),
        (
            fsdp(activation_checkpointing=True),
            "fsdp_activation_checkpointing.*training.gradient_checkpointing",
        ),
        (fsdp(precision="fp16"), "mixed_precision is fp16"),
        (zero(0), "zero_stage is 0"),
        (zero(3, zero={"offload_param": {"device": "nvme"}}), "offload_param_device is nvme"),
        (zero(2, gradient_accumulation_steps=4), "gradient_accumulation_steps is 4.*tokens_per_micro_batch"),
        (launched("MEGATRON_LM"), "distributed_type MEGATRON_LM"),
    ],
)
def test_what_cannot_work_names_its_setting(
    launch: Any, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_deepspeed_installed", lambda: True)
    with pytest.raises(RecipeError, match=setting):
        backend_of(launch)


def test_zero_without_deepspeed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "_deepspeed_installed", lambda: False)
    with pytest.raises(MissingExtraError, match="'deepspeed' extra"):
        backend_of(zero(2))


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_a_backend_that_accelerate_passed_by_is_not_taken_for_ddp(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(RecipeError, match=f"distributed_type {name} .* took MULTI_CPU.*ddp.yaml"):
        backend_of(launched("MULTI_CPU"))


def test_deepspeed_is_told_what_the_recipe_says() -> None:
    model = torch.nn.Linear(2, 2)
    launch = zero(3, gradient_clipping="auto")
    before_prepare(Backend("zero3"), launch, model, model, grad_clip=0.3)
    config = launch.deepspeed_plugin.deepspeed_config
    assert config["gradient_clipping"] == 0.3 and config["gradient_accumulation_steps"] == 1
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to(torch.bfloat16))
    with pytest.raises(RecipeError, match="weights in bfloat16, float32.*mixed_precision: bf16"):
        before_prepare(Backend("zero2"), zero(2), mixed, mixed, grad_clip=1.0)


def test_a_mirror_follows_one_weight_at_a_time() -> None:
    from gradient_checks import tiny_model
    from maieutic.training.logprobs import PolicyForward

    model = tiny_model("llama-lora")
    mirror = Mirror(model, Backend("ddp"), torch.device("cpu"), main=True)
    policy = PolicyForward(model)
    frozen = {n: p.clone() for n, p in mirror.model.named_parameters() if not p.requires_grad}
    for parameter in model.parameters():
        parameter.data += 1.0  # the frozen ones too: they are never sent
    mirror.refresh(policy, torch.device("cpu"))
    ours = dict(model.named_parameters())
    for name, parameter in mirror.model.named_parameters():
        assert torch.equal(parameter, ours[name] if ours[name].requires_grad else frozen[name]), name
        assert parameter.data_ptr() != ours[name].data_ptr()
    other = Mirror(model, Backend("ddp"), torch.device("cpu"), main=False)
    other.refresh(policy, torch.device("cpu"))
    assert other.model is None


def test_the_probe_of_a_push_is_scored_ahead() -> None:
    from accelerate import Accelerator

    from gradient_checks import tiny_model
    from maieutic.training.logprobs import PolicyForward
    from maieutic.training.push_probe import SharedScorer, make_scorer

    model = tiny_model("llama").eval()
    asked = [[5, 9, 11, 20], [7, 42]]
    scorer = SharedScorer(0.1)
    score = scorer.on(asked)
    before = make_scorer(model, 64)(asked)
    scorer.refresh(PolicyForward(model), Accelerator(cpu=True))
    assert score(asked) == before
    model.lm_head.weight.data *= 2.0
    assert score(asked) == before  # until the next refresh
    scorer.refresh(PolicyForward(model), Accelerator(cpu=True))
    assert score(asked) == make_scorer(model, 64)(asked) != before


def test_numbers_without_a_gradient_are_the_same() -> None:
    from accelerate import Accelerator

    import gradient_checks as checks
    from maieutic.algorithms.registry import get_loss
    from maieutic.training.logprobs import PolicyForward
    from maieutic.training.packing import make_micro_batches

    accelerator = Accelerator(cpu=True)
    rows, denominator = checks.rows()
    (batches,) = make_micro_batches(rows, checks.BUDGET, "packed", 1)
    policy = PolicyForward(checks.tiny_model("llama"))
    _, metrics = checks.gradient(policy, batches, denominator, accelerator)
    policy.zero_grad()
    again = accumulate_gradients(
        policy, batches, get_loss("dppo"), denominator=denominator, accelerator=accelerator, backward=False
    )
    assert again == metrics
    assert all(p.grad is None for p in policy.parameters())


def test_states_of_other_ranks_are_refused(tmp_path: Path) -> None:
    folder = checkpoint.open_parts(tmp_path)
    for rank in range(2):
        checkpoint.save_part(folder, rank, {"divided": {"rank": rank}, "parts": []})
    made = checkpoint.save(
        tmp_path,
        checkpoint.TrainState(step=1),
        save_model=lambda f: None,
        optimizer=folder,
        rng=[checkpoint.rng_state()],
    )
    assert sorted(p.name for p in made.iterdir()) == ["model", "optimizer", "rng.pt", "state.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001"]
    assert checkpoint.load_optimizer(made, 1, divided=True)["divided"] == {"rank": 1}
    with pytest.raises(CheckpointError, match="no optimizer states for rank 2: it holds those of 2 ranks"):
        checkpoint.load_optimizer(made, 2, divided=True)
    with pytest.raises(CheckpointError, match="output_dir must lie on a file system that all nodes share"):
        checkpoint.save_part(tmp_path / "elsewhere", 1, {})


def test_a_learner_refuses_states_of_another_backend(tiny_model_dir: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    from maieutic.training.learner import Learner
    from maieutic.training.policy import build_policy

    recipe = parts.make_recipe(tiny_model_dir, tmp_path)
    accelerator = Accelerator(cpu=True)
    policy = build_policy(recipe, accelerator.device)
    learner = Learner(recipe, policy.model, accelerator, None)
    assert learner.whole_model is policy.model
    state = {"divided": {"backend": "zero3", "ranks": 4, "rank": 0}, "parts": []}
    with pytest.raises(CheckpointError, match="kept by zero3, rank 0 of 4, and this run is one optimizer"):
        learner.load_optimizer_state(state)

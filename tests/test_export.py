"""`maieutic export`: the folder computes what the policy computed, and its card says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import training_parts as parts
from maieutic.cli import app
from maieutic.errors import CheckpointError, MaieuticError, ModelError
from maieutic.export import export
from maieutic.recipe import dump_recipe
from maieutic.runtime import resolve_env
from maieutic.training import checkpoint
from maieutic.training.checkpoint import TrainState
from maieutic.training.policy import Policy, build_policy

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 11, 200, 7, 42]])


def make_run(model: Path, folder: Path, **changes: Any) -> tuple[Path, Policy]:
    """The folder of a run with two checkpoints, and the policy of the second (weights that training might have left)."""
    recipe = resolve_env(parts.make_recipe(model, folder, **changes))
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    policy = build_policy(recipe, CPU)
    for step in (1, 2):
        torch.manual_seed(step)
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
        state = TrainState(
            step=step,
            optimizer_steps=2 * step,
            first_eval={"eval/transfer_gain": 0.125},
            last_eval={"eval/transfer_gain": 0.375},
            last_eval_step=step,
            recipe_hash=checkpoint.recipe_hash(recipe),
            recipe=checkpoint.frozen_recipe(recipe),
        )
        checkpoint.save(
            run / "checkpoints", state, save_model=policy.save, optimizer={}, rng=[checkpoint.rng_state()]
        )
    return run, policy


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits.float()


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def front_matter(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


@pytest.mark.parametrize("lora", [{"r": 2, "alpha": 4}, None], ids=["lora", "full"])
def test_the_merged_folder_computes_what_the_policy_computed(
    tiny_model_dir: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    run, policy = make_run(tiny_model_dir, tmp_path, **{"tutor.lora": lora})
    done = export(run)
    assert done.folder == run / "export" / "step-000002-merged" and done.dtype == "float32"
    assert done.url is None
    model = loaded(done.folder)
    assert not hasattr(model, "peft_config")
    ours, base = logits(policy.model), logits(loaded(tiny_model_dir))
    torch.testing.assert_close(logits(model), ours, atol=1e-5, rtol=1e-5)
    assert (ours - base).abs().max() > 0.05  # the training shows


def test_the_adapter_goes_beside_its_base_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    run, policy = make_run(tiny_model_dir, tmp_path)
    done = export(run / "checkpoints" / "step-000002", tmp_path / "out", kind="adapter")
    names = {p.name for p in done.folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    model = PeftModel.from_pretrained(loaded(tiny_model_dir), str(done.folder))
    assert torch.equal(logits(model), logits(policy.model))
    config = json.loads((done.folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_dir)
    assert front_matter(done.folder)["base_model_relation"] == "adapter"
    assert "--enable-lora --max-lora-rank 8 --lora-modules run=" in (done.folder / "README.md").read_text()


def test_an_adapter_on_other_whole_weights_names_these(tiny_model_dir: Path, tmp_path: Path) -> None:
    """``tutor.init_from``: beside ``tutor.model`` the adapter would compute something else."""
    from peft import PeftModel

    from maieutic.tiny import make_tiny_model

    other = make_tiny_model(tmp_path / "other", seed=3)
    run, policy = make_run(tiny_model_dir, tmp_path, **{"tutor.init_from": str(other)})
    done = export(run, kind="adapter")
    config = json.loads((done.folder / "adapter_config.json").read_text())
    named = config["base_model_name_or_path"]
    model = PeftModel.from_pretrained(loaded(Path(named)), str(done.folder))
    assert named == str(other) and torch.equal(logits(model), logits(policy.model))
    assert front_matter(done.folder)["base_model"] == "other"
    assert "vllm serve other " in (done.folder / "README.md").read_text()


def test_the_working_folder_is_a_folder_too(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tiny_model_dir, tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert export(run, Path(".")).folder == tmp_path / "here"
    assert (tmp_path / "here" / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_a_full_disk_is_named_and_leaves_nothing(
    kind: Any, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    run, _ = make_run(tiny_model_dir, tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    monkeypatch.setattr("peft.PeftModel.save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"cannot write the export .*No space left on device"):
        export(run, tmp_path / "out", kind=kind)
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == []


def test_a_checkpoint_is_named_or_the_newest_one_is_taken(tiny_model_dir: Path, tmp_path: Path) -> None:
    run, _ = make_run(tiny_model_dir, tmp_path)
    first = export(run / "checkpoints" / "step-000001")
    assert first.folder.name == "step-000001-merged"
    assert not torch.equal(logits(loaded(first.folder)), logits(loaded(export(run).folder)))


def test_sampling_settings_and_template_are_those_of_the_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = tmp_path / "own.jinja"
    template.write_text(
        "{%- for m in messages -%}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant: {%- endif -%}"
    )
    run, policy = make_run(tiny_model_dir, tmp_path, **{"tutor.chat_template": str(template)})
    folder = export(run).folder
    said = json.loads((folder / "generation_config.json").read_text())
    assert (said["temperature"], said["top_p"], said["max_new_tokens"]) == (0.6, 0.95, 8)
    ends = said["eos_token_id"]
    assert policy.tokenizer.eos_token_id in ([ends] if isinstance(ends, int) else ends)
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>user: Hi<|im_end|>")


def test_the_card_says_what_was_trained_and_nothing_of_the_machine(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    run, _ = make_run(tiny_model_dir, tmp_path, seed=7)
    folder = export(run).folder
    card = (folder / "README.md").read_text()
    assert front_matter(folder)["base_model"] == tiny_model_dir.name
    assert "| seed | 7 |" in card and "| steps | 2 (4 optimizer steps) |" in card
    assert "| `eval/transfer_gain` | 0.125 | 0.375 |" in card
    assert "LoRA, r 2, alpha 4" in card and "Not stated here" in card
    assert str(tmp_path) not in card and str(tiny_model_dir.parent) not in card
    assert "vllm serve FOLDER" in card


def test_the_licence_of_the_base_model_is_carried_over(tmp_path: Path) -> None:
    from maieutic.tiny import make_tiny_model

    model = make_tiny_model(tmp_path / "base")
    (model / "README.md").write_bytes(b"---\nauthor: Ren\xe9\nlicense: apache-2.0\n---\nA model.\n")
    run, _ = make_run(model, tmp_path)
    folder = export(run).folder
    assert front_matter(folder)["license"] == "apache-2.0"
    assert "`base` is under apache-2.0" in (folder / "README.md").read_text()


def test_a_dtype_can_be_asked_for(tiny_model_dir: Path, tmp_path: Path) -> None:
    run, policy = make_run(tiny_model_dir, tmp_path)
    done = export(run, dtype="bfloat16")
    model = loaded(done.folder)
    assert done.dtype == "bfloat16" and model.dtype == torch.bfloat16
    merged = policy.model.merge_and_unload().state_dict()
    for name, value in model.state_dict().items():  # rounded once
        assert torch.equal(value, merged[name].to(torch.bfloat16)), name


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    run, _ = make_run(tiny_model_dir, tmp_path, **{"tutor.lora": None})
    with pytest.raises(ModelError, match=r"tutor\.lora is not set"):
        export(run, kind="adapter")
    with pytest.raises(CheckpointError, match="neither a complete checkpoint"):
        export(tmp_path)
    lora, _ = make_run(tiny_model_dir, tmp_path / "lora")
    with pytest.raises(ModelError, match="dtype float16 is for a merged model"):
        export(lora, kind="adapter", dtype="float16")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"):
        export(run, out)
    assert [p.name for p in out.iterdir()] == ["mine"] and not (run / "export").exists()
    (run / "checkpoints" / "step-000002" / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        export(run, tmp_path / "other")
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob(".other*"))
    (run / "recipe.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"recipe\.yaml is not there"):
        export(run)


class Hub:
    """What `huggingface_hub.HfApi` is asked for."""

    def __init__(self, refuses: bool = False) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refuses = refuses

    def create_repo(self, repo: str, **options: Any) -> None:
        if self.refuses:
            raise PermissionError("403")
        self.calls.append(("create", {"repo": repo, **options}))

    def upload_folder(self, **options: Any) -> Any:
        names = {p.name for p in Path(options["folder_path"]).iterdir()}
        self.calls.append(("upload", {**options, "names": names}))
        return SimpleNamespace(commit_url="https://hub/me/tutor/commit/1")


def test_only_a_push_that_is_asked_for_reaches_the_hub(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tiny_model_dir, tmp_path)
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    export(run)
    assert hub.calls == []
    done = export(run, tmp_path / "out", push="me/tutor")
    assert done.url == "https://hub/me/tutor/commit/1"
    (_, created), (_, uploaded) = hub.calls
    assert created == {"repo": "me/tutor", "repo_type": "model", "private": True, "exist_ok": True}
    assert uploaded["repo_id"] == "me/tutor"
    assert {"README.md", "config.json", "model.safetensors", "generation_config.json"} <= uploaded["names"]
    assert "vllm serve me/tutor" in (done.folder / "README.md").read_text()
    for wrong in ("tutor", "me/", "/tutor", "me/a/b", "me/my tutor"):
        with pytest.raises(MaieuticError, match="write owner/name"):
            export(run, tmp_path / "no", push=wrong)
    with pytest.raises(MaieuticError, match=r"cannot be pushed \(PermissionError: 403\).*upload .*third"):
        export(run, tmp_path / "third", push="me/tutor", api=Hub(refuses=True))
    assert (tmp_path / "third" / "model.safetensors").is_file()  # the work is not lost


def test_the_command(tiny_model_dir: Path, tmp_path: Path) -> None:
    run, _ = make_run(tiny_model_dir, tmp_path)
    done = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "out"), "--adapter"])
    assert done.exit_code == 0, done.output
    assert "(adapter, float32, from step-000002)" in done.output
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    failed = CliRunner().invoke(app, ["export", str(tmp_path / "nothing")])
    assert failed.exit_code == 1 and "neither a complete checkpoint" in failed.output


PYTHON = Path(__file__).resolve().parents[1] / ".venv-vllm" / "bin" / "python"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.xdist_group("vllm")
@pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: scripts/setup_vllm.sh makes it")
def test_vllm_serves_the_folder_with_the_policys_log_probs(tmp_path: Path) -> None:
    import httpx

    from maieutic.serve import Server, plan
    from maieutic.tiny import make_tiny_model
    from maieutic.training.push_probe import make_scorer

    model = make_tiny_model(tmp_path / "base", head_dim=32)
    changes = {"tutor.dtype": "float32", "env.prompt_limit": 512, "env.conversation_limit": 512}
    run, policy = make_run(model, tmp_path, **changes)
    folder = export(run).folder
    recipe = parts.make_recipe(model, tmp_path / "serving", **changes)
    what = plan(recipe, "tutor", model_dir=str(folder), python=str(PYTHON))
    what.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    (ids,) = IDS.tolist()
    with Server(what, tmp_path / "address.json", tmp_path / "server.log", timeout_s=500.0) as server:
        name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        asked = {"model": name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        told = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=120).json()
        said = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
            timeout=120,
        ).json()
    rows = told["choices"][0]["prompt_logprobs"]
    theirs = [row[str(i)]["logprob"] for i, row in zip(ids[1:], rows[1:], strict=True)]
    (ours,) = make_scorer(policy.model, 64)([ids])
    assert theirs == pytest.approx(ours, abs=1e-3)
    assert said["usage"]["completion_tokens"] >= 1  # its chat template came along

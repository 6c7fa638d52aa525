"""From a recipe's engine section to a client: addresses, key, price, policy of calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from maieutic.config import EngineSpec
from maieutic.engines.chat import HttpChat
from maieutic.engines.http import HttpPolicy, HttpPool
from maieutic.engines.usage import Ledger, Price
from maieutic.engines.vllm import VllmEngine
from maieutic.errors import RecipeError
from maieutic.serve import resolve_urls

JUDGE_DEADLINE_S = 300.0
"""A judge's default deadline of one request: without it a dead judge would stop the run instead of making verdicts unknown."""


def connect_pool(spec: EngineSpec, *, role: str, ledger: Ledger, base: Path | None = None) -> HttpPool:
    """The pooled client of a role's servers. Waits for address files; the key is read from the environment.

    Raises:
        RecipeError: ``api_key_env`` names a variable that is not set.
        EngineError: an address file did not appear within ``start_timeout_s``.
    """
    headers = {}
    if spec.api_key_env is not None:
        key = os.environ.get(spec.api_key_env)
        if not key:
            raise RecipeError(
                f"{role}: engine.api_key_env names {spec.api_key_env}, which is not set in the environment"
            )
        headers["Authorization"] = f"Bearer {key}"
    http = spec.http.model_dump()
    if role == "judge":
        if "outage_limit_s" not in spec.http.model_fields_set:
            http["outage_limit_s"] = None
        if "deadline_s" not in spec.http.model_fields_set:
            http["deadline_s"] = JUDGE_DEADLINE_S
    urls = resolve_urls(spec.urls, timeout_s=spec.start_timeout_s, base=base)
    return HttpPool(urls, HttpPolicy(**http), role=role, ledger=ledger, headers=headers)


def connect_vllm(spec: EngineSpec, *, role: str, ledger: Ledger, base: Path | None = None) -> VllmEngine:
    """A vLLM engine by token ids; its :meth:`~VllmEngine.start` is still to be awaited."""
    pool = connect_pool(spec, role=role, ledger=ledger, base=base)
    return VllmEngine(
        pool,
        price=Price(**spec.price.model_dump()),
        model=spec.served_name,
        start_timeout_s=spec.start_timeout_s,
    )


def connect_chat(
    spec: EngineSpec, model: str, *, role: str, ledger: Ledger, base: Path | None = None
) -> HttpChat:
    """An OpenAI-compatible endpoint by messages."""
    options: dict[str, Any] = {
        "price": Price(**spec.price.model_dump()),
        "extra_body": spec.extra_body,
        "max_tokens_key": spec.max_tokens_key,
        "send_seed": spec.send_seed,
        "send_n": spec.send_n,
        "merge_turns": spec.merge_turns,
        "name": model,
    }
    pool = connect_pool(spec, role=role, ledger=ledger, base=base)
    return HttpChat(pool, spec.served_name or model, **options)

"""A recipe's own classroom around a scripted server: everything is built as a run builds it, only the models answer by script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from maieutic.config import Recipe
from maieutic.env.prompts import load_env
from maieutic.problems.schema import StudentKey
from maieutic.runtime import Classroom, build_classroom, resolve_env
from maieutic.training.policy import Policy

PAIRS = 32
"""Problem pairs of the rollouts: group sizes are what differs."""
TUTOR, STUDENT = "tutor", "student"
"""Names that the server knows the models by."""
_SHIPPED = Path(__file__).parents[2] / "data" / "gsm-symbolic-mini" / "pairs.jsonl"


def scripted_classroom(
    folder: Path,
    url: str,
    *,
    model: str,
    student: Literal["ids", "chat"],
    concurrency: int,
    **env: Any,
) -> Classroom:
    """A started classroom is one ``await classroom.start()`` away; its weights are random and never pushed.

    Args:
        folder: for the problems and the run's output.
        url: of the server that plays tutor and student.
        model: whose tokenizer both have: a folder or a packaged name.
        student: asked by token ids (engine ``vllm``) or by messages (engine ``chat``).
        concurrency: most requests in flight to each of the two.
        env: fields of the recipe's ``env`` section.
    """
    http = {"concurrency": concurrency, "timeout_s": 120.0}
    recipe = Recipe.model_validate(
        {
            "name": "bench",
            "arm": "dppo",
            "seed": 0,
            "output_dir": str(folder),
            "offline": True,
            "tutor": {
                "model": model,
                "engine": {"kind": "vllm", "urls": [url], "served_name": TUTOR, "http": http},
            },
            "students": [
                {
                    "name": STUDENT,
                    "model": model,
                    "sampling": {"temperature": 0.6, "max_tokens": 256},
                    "engine": {
                        "kind": "vllm" if student == "ids" else "chat",
                        "urls": [url],
                        "served_name": STUDENT,
                        "http": http,
                    },
                }
            ],
            "judge": {"kind": "rule"},
            "env": {"name": "near_transfer", "gates": "soft", **env},
            "problems": {"source": str(folder / "pairs.jsonl"), "eval_size": 4},
        }
    )
    recipe = resolve_env(recipe)
    _write_pairs(folder / "pairs.jsonl", recipe)
    return build_classroom(recipe, _policy(recipe))


def _write_pairs(path: Path, recipe: Recipe) -> None:
    """The shipped pairs, with a solve rate of this recipe's student."""
    sampling = recipe.students[0].sampling
    key = StudentKey(
        model=recipe.students[0].model,
        prompt_hash=load_env(recipe.env.name).cold_hash,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=recipe.env.post_test_max_tokens,
    )
    with path.open("w", encoding="utf-8") as file:
        for line in _SHIPPED.read_text(encoding="utf-8").splitlines():
            pair = json.loads(line)
            for problem in (pair["source"], pair["transfer"]):
                problem["rates"] = {str(key): {"rate": 0.5, "n": 8}}
            file.write(json.dumps(pair) + "\n")


def _policy(recipe: Recipe) -> Policy:
    """A model of one small layer: nothing asks it for anything."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from maieutic.training.policy import load_tokenizer

    tokenizer = load_tokenizer(recipe.tutor, offline=True)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return Policy(LlamaForCausalLM(config), tokenizer, None, base_is_pure=False)

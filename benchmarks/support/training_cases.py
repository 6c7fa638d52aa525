"""Recorded transcripts and the models that learn from them, for the benchmarks of the training step."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from maieutic.config import Recipe
from maieutic.models import resolve_model
from maieutic.recipe import load_recipe
from maieutic.training.logprobs import PolicyForward
from maieutic.training.packing import make_micro_batches, make_rows
from maieutic.training.step import compute_logprobs
from maieutic.training.trajectory import Segment, Trajectory

RECORDED = Path(__file__).parents[1] / "data" / "transcripts.json.gz"
"""Made by benchmarks/make_transcripts.py."""
SMALL_VOCABULARY = 8_192
Groups = list[list[Trajectory]]


@dataclass(frozen=True)
class Case:
    """A model and the part of the transcripts that one optimizer step of it learns from.

    ``groups`` and ``members``: the first ones in the file. ``full``: all weights are trained, else the recipe's adapter.
    """

    name: str
    model: str
    full: bool
    groups: int
    members: int


CASES = {
    case.name: case
    for case in (
        Case("smollm2-135m-lora", "smollm2-135m", False, 1, 4),
        Case("smollm2-135m-full", "smollm2-135m", True, 1, 4),
        Case("llama-10m", "llama-10m", True, 2, 8),
    )
}


def read_transcripts(path: Path = RECORDED) -> list[Trajectory]:
    """All recorded episodes, in the order of the rollout."""
    return [Trajectory.from_json(t) for t in json.loads(gzip.decompress(path.read_bytes()))["trajectories"]]


def choose(episodes: Sequence[Trajectory], case: Case) -> Groups:
    """The case's groups. Every second episode is rewarded, so that none is without a gradient; of time this changes nothing."""
    by_group: dict[str | int, list[Trajectory]] = {}
    for episode in episodes:
        by_group.setdefault(episode.group_id, []).append(episode)
    chosen = [members[: case.members] for members in list(by_group.values())[: case.groups]]
    return [
        [replace(t, reward=float(i % 2), excluded=False) for i, t in enumerate(members)] for members in chosen
    ]


def small_config() -> Any:
    """A Llama of 10 million parameters, embeddings included."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=SMALL_VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=10,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip


def make_model(case: Case, config: Any = None) -> nn.Module:
    """The case's model in fp32, with an adapter whose second matrix is not zero (so that all of it has a gradient)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    if config is not None or case.model == "llama-10m":
        model: Any = AutoModelForCausalLM.from_config(config or small_config()).float()
    else:
        model = AutoModelForCausalLM.from_pretrained(resolve_model(case.model), dtype=torch.float32)
    if case.full:
        return model.eval()
    lora = recipe_of(case).tutor.lora
    assert lora is not None
    settings = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules="all-linear")
    model = get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=1e-3)
    return model.eval()


def recipe_of(case: Case, *overrides: str) -> Recipe:
    """smollm2/grpo, whose optimizer step takes all groups of the case."""
    lora = ["tutor.lora=null"] if case.full else []
    return load_recipe(
        "smollm2/grpo",
        [*lora, f"training.mini_batch_problems={case.groups}", f"training.problems_per_step={case.groups}",
         f"training.group_size={case.members}", *overrides],
    )  # fmt: skip


def with_own_logprobs(groups: Groups, model: nn.Module, vocabulary: int) -> Groups:
    """The same episodes with μ = what ``model`` gives now, one sequence at a time: the step is on-policy.

    Ids are taken modulo ``vocabulary``, which leaves them alone for the model that they were recorded with.
    """
    accelerator = Accelerator(cpu=True)
    policy = PolicyForward(model).eval()
    out: Groups = []
    for group in groups:
        out.append([])
        for t in group:
            (segment,) = t.segments
            ids = [i % vocabulary for i in segment.ids]
            bare = replace(t, segments=[Segment(ids, segment.mask, [0.0] * len(ids), segment.policy_version)])
            (batch,) = make_micro_batches(make_rows([bare], [0.0]), len(ids), "padded")[0]
            (logprobs,) = compute_logprobs(policy, [batch], accelerator)
            mu = torch.zeros(len(ids))
            mu[torch.tensor(segment.mask)] = logprobs.clamp(max=0)
            bare.segments[0].logprobs = mu.tolist()
            out[-1].append(bare)
    return out


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies by the name of the parameter."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all parameters; infinite where they are not of the same ones."""
    if a.keys() != b.keys() or not a:
        return float("inf")
    off = sum(float((a[n] - b[n]).double().square().sum()) for n in b)
    size = sum(float(b[n].double().square().sum()) for n in b)
    return (off / size) ** 0.5


def twin(model: nn.Module) -> Any:
    """A copy for another contestant."""
    return copy.deepcopy(model)

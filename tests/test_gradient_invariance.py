"""The gradient of a batch does not depend on how it is cut, laid out, chunked or spread over ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import LlamaForCausalLM

from gradient_checks import BUDGET, KINDS, VOCAB, gradient, hard_batch, rows, tiny_model
from maieutic.algorithms.base import TokenLoss
from maieutic.algorithms.registry import get_loss
from maieutic.config import LOGITS_AT_ONCE, logit_positions
from maieutic.errors import NonFiniteLossError, RecipeError
from maieutic.recipe import load_recipe
from maieutic.training import logprobs as logprobs_module
from maieutic.training.logprobs import LogitTransform, PolicyForward, logit_transform
from maieutic.training.packing import MicroBatch, collate, make_micro_batches, make_rows
from maieutic.training.probes import isolates
from maieutic.training.step import accumulate_gradients, clip_gradients, compute_logprobs
from maieutic.training.trajectory import count_trained


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], limit: float = 1e-6) -> None:
    """Same names, no difference above ``limit`` of the largest entry of all gradients; and not all zero."""
    assert a.keys() == b.keys()
    size = max(float(g.abs().max()) for g in a.values())
    assert size > 1e-3
    worst = max((float((a[k] - b[k]).abs().max()), k) for k in a)
    assert worst[0] <= limit * max(1.0, size), worst


def textbook_gradient(kind: str) -> tuple[dict[str, torch.Tensor], float]:
    """The definition: each trajectory alone, whole logits, a loop over tokens; no code of the package but the loss."""
    model = tiny_model(kind)
    batch, advantages = hard_batch()
    total = torch.zeros(())
    count = 0
    for trajectory, advantage in zip(batch, advantages, strict=True):
        if trajectory.excluded:
            continue
        for segment in trajectory.segments:
            ids = torch.tensor([segment.ids])
            log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0] / 1.15, dim=-1)
            for i, sampled in enumerate(segment.mask):
                if sampled:
                    mu = torch.tensor([segment.logprobs[i]])
                    token = log_p[i - 1, segment.ids[i]][None]
                    total = total + get_loss("dppo")(token, mu, torch.tensor([advantage])).loss_T[0]
                    count += 1
    loss = total / count
    loss.backward()
    return {
        f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None
    }, loss.item()


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_global_token_mean_however_the_batch_is_cut(
    kind: str, accelerator: Accelerator
) -> None:
    expected, loss = textbook_gradient(kind)
    all_rows, denominator = rows()
    policy = PolicyForward(tiny_model(kind), chunk=5)
    cuts: dict[str, list[MicroBatch]] = {
        "1 x all, padded": [collate(all_rows, "padded")],
        "one row each": [collate([row], "padded") for row in all_rows],
        "by budget, padded": make_micro_batches(all_rows, BUDGET, "padded")[0],
        "with a dummy": [
            collate(all_rows[:3], "padded"),
            collate([], "padded"),
            collate(all_rows[3:], "padded"),
        ],
    }
    if kind.startswith("llama"):
        cuts["1 x all, packed"] = [collate(all_rows, "packed")]
        cuts["by budget, packed"] = make_micro_batches(all_rows, BUDGET, "packed")[0]
        assert len(cuts["by budget, packed"]) > 2
        cuts["several packed rows"] = make_micro_batches(all_rows, 3 * BUDGET, "packed", hidden_size=32)[0]
        assert any(b.input_ids.shape[0] > 1 for b in cuts["several packed rows"])
    metrics = {}
    for name, batches in cuts.items():
        grads, metrics[name] = gradient(policy, batches, denominator, accelerator)
        close(expected, grads)
        assert metrics[name].loss == pytest.approx(loss, abs=1e-6), name
    first = metrics["1 x all, padded"]
    assert first.tokens == denominator == 78
    assert 0 < first.means["kept"] < 1
    for other in metrics.values():
        assert other.flat() == pytest.approx(first.flat(), rel=1e-4, abs=1e-6)


def test_packing_a_hybrid_would_be_wrong_and_the_probe_says_so(accelerator: Accelerator) -> None:
    expected, _ = textbook_gradient("hybrid")
    all_rows, denominator = rows()
    policy = PolicyForward(tiny_model("hybrid"))
    grads, _ = gradient(policy, [collate(all_rows, "packed")], denominator, accelerator)
    with pytest.raises(AssertionError):
        close(expected, grads, limit=1e-3)
    assert not isolates(policy.causal_lm)
    assert isolates(tiny_model("llama"))


def test_a_head_that_must_be_called_gives_the_same(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_rows, denominator = rows()
    policy = PolicyForward(tiny_model("llama"), chunk=7)
    batches = [collate(all_rows, "packed"), collate([], "packed")]
    plain, _ = gradient(policy, batches, denominator, accelerator)
    assert not policy.calls_head
    monkeypatch.setattr(logprobs_module, "_weight_at_hand", lambda head: False)
    assert policy.calls_head
    called, _ = gradient(policy, batches, denominator, accelerator)
    close(plain, called)
    batches[0].head_chunks, batches[1].head_chunks = 3, 2
    close(plain, gradient(policy, batches, denominator, accelerator)[0])
    monkeypatch.setattr(policy, "transform", None)
    padded = [collate(all_rows, "padded"), collate([], "padded")]
    close(plain, gradient(policy, padded, denominator, accelerator)[0])


def test_gradient_checkpointing_changes_nothing(accelerator: Accelerator) -> None:
    all_rows, denominator = rows()
    policy = PolicyForward(tiny_model("llama"))
    plain, _ = gradient(policy, [collate(all_rows, "packed")], denominator, accelerator)
    policy.causal_lm.gradient_checkpointing_enable()
    again, _ = gradient(policy, [collate(all_rows, "packed")], denominator, accelerator)
    close(plain, again)


def test_skipping_zero_advantages_keeps_the_gradient(accelerator: Accelerator) -> None:
    batch, advantages = hard_batch()
    everything, fewer = make_rows(batch, advantages), make_rows(batch, advantages, skip_zero_advantage=True)
    assert len(fewer) == len(everything) - 1
    policy = PolicyForward(tiny_model("llama"))
    n = count_trained(batch)
    full, _ = gradient(policy, [collate(everything, "packed")], n, accelerator)
    skipped, metrics = gradient(policy, [collate(fewer, "packed")], n, accelerator)
    close(full, skipped)
    assert metrics.tokens < n


# --- heads


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.3), LogitTransform(1.5, 4.0)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_chunked_head_equals_autograd(transform: LogitTransform, frozen: bool, bias: bool) -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=g, dtype=torch.float32).requires_grad_()
    head = nn.Linear(8, 31, bias=bias).requires_grad_(not frozen)
    targets = torch.randint(0, 31, (23,), generator=g)
    inverse_temperature = torch.rand(23, generator=g) + 0.5
    up = torch.randn(23, generator=g)
    logp, entropy = logprobs_module._PlainHead.apply(
        hidden, head.weight, head.bias, targets, inverse_temperature, transform, 4
    )
    (logp * up).sum().backward()
    got = [hidden.grad, head.weight.grad, head.bias.grad if bias else None]
    hidden.grad = head.weight.grad = None
    if bias:
        head.bias.grad = None
    full = torch.log_softmax(transform(head(hidden)) * inverse_temperature[:, None], dim=-1)
    expected = full.gather(1, targets[:, None]).squeeze(1)
    (expected * up).sum().backward()
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))
    assert not entropy.requires_grad
    for a, b in zip(got, [hidden.grad, head.weight.grad, head.bias.grad if bias else None], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Squashed(LlamaForCausalLM):
    """A model that does to its logits what its config does not tell."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = torch.asinh(3.0 * out.logits)
        return out


@pytest.mark.parametrize("kind", ["llama", "llama-lora", "squashed", "squashed-lora"])
def test_logits_exist_only_a_chunk_at_a_time(kind: str, accelerator: Accelerator) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        """The most positions that any tensor over the vocabulary has; [32, 97] is the head's own weight."""

        positions = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() and out.shape[-1] == VOCAB:
                rows = out.numel() // VOCAB
                self.positions = max(self.positions, rows if rows != 32 else 0)
            return out

    all_rows, denominator = rows()
    model = tiny_model(kind.replace("squashed", "llama"))
    if "squashed" in kind:
        inner = model.get_base_model() if "lora" in kind else model
        inner.__class__ = Squashed
    policy = PolicyForward(model, chunk=6)
    assert policy.own_head == ("squashed" in kind)
    with Watch() as watch:
        grads, _ = gradient(policy, [collate(all_rows, "packed")], denominator, accelerator)
    assert watch.positions == 6
    policy.chunk = 10_000
    at_once, _ = gradient(policy, [collate(all_rows, "packed")], denominator, accelerator)
    assert grads.keys() == at_once.keys() and len(grads) > 10
    for name, grad in grads.items():
        torch.testing.assert_close(grad, at_once[name], rtol=1e-4, atol=1e-5)
    if policy.own_head:
        # The model's own forward over everything is the oracle: nothing is stubbed there.
        policy.own_head = False
        plain, _ = gradient(policy, [collate(all_rows, "packed")], denominator, accelerator)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, plain[name], rtol=1e-4, atol=1e-5)
        assert "forward" not in vars(policy.causal_lm.get_decoder())


def test_a_chunk_is_a_fixed_number_of_logits_unless_told_otherwise() -> None:
    for vocabulary in (97, 8_192, 49_152, 151_936):
        assert (
            (1 - 1 / 400) * LOGITS_AT_ONCE
            <= logit_positions("auto", vocabulary) * vocabulary
            <= LOGITS_AT_ONCE
        )
    assert logit_positions("auto", LOGITS_AT_ONCE + 1) == 1 and logit_positions(50, 151_936) == 50
    assert PolicyForward(tiny_model("llama")).chunk == LOGITS_AT_ONCE // VOCAB
    assert load_recipe("micro/full").training.logit_chunk == "auto"
    assert load_recipe("micro/full", ["training.logit_chunk=64"]).training.logit_chunk == 64
    for wrong in ("0", "all", "-3", "1.5"):
        with pytest.raises(RecipeError, match="logit_chunk"):
            load_recipe("micro/full", [f"training.logit_chunk={wrong}"])


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "llama-tied"])
def test_scaled_and_capped_logits_are_honoured(name: str, accelerator: Accelerator) -> None:
    from transformers import (
        AutoModelForCausalLM,
        CohereConfig,
        Gemma2Config,
        GraniteConfig,
        LlamaConfig,
    )

    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config: Any = {
        "gemma2": Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=0.5),
        "granite": GraniteConfig(**sizes, logits_scaling=0.25),
        "cohere": CohereConfig(**sizes, logit_scale=3.0),
        "llama-tied": LlamaConfig(**sizes, tie_word_embeddings=True),
    }[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    expected = {
        "gemma2": LogitTransform(1.0, 0.5),
        "granite": LogitTransform(4.0),
        "cohere": LogitTransform(3.0),
        "llama-tied": LogitTransform(),
    }[name]
    policy = PolicyForward(model, chunk=5)
    assert policy.transform == expected
    batch = collate(rows()[0], "padded")
    out = policy(batch)
    (grad,) = torch.autograd.grad(out.logprobs_T.sum(), model.get_input_embeddings().weight)
    full = model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)[batch.select_T]
    log_p = torch.log_softmax(full / 1.15, -1).gather(1, batch.targets_T[:, None]).squeeze(1)
    torch.testing.assert_close(out.logprobs_T, log_p, rtol=1e-5, atol=1e-5)
    (own,) = torch.autograd.grad(log_p.sum(), model.get_input_embeddings().weight)
    torch.testing.assert_close(grad, own, rtol=1e-4, atol=1e-4)


def test_an_unknown_transform_falls_back_to_the_models_own_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = logprobs_module.running_copy

    def with_a_twist(model: Any) -> Any:
        """A model whose forward does something to its logits that its config does not tell."""

        def twist(module: Any, args: Any, out: Any) -> Any:
            out.logits = out.logits + out.logits.square()
            return out

        tiny = real(model)
        tiny.register_forward_hook(twist)
        return tiny

    model = tiny_model("llama")
    assert logit_transform(model) == LogitTransform()
    monkeypatch.setattr(logprobs_module, "running_copy", with_a_twist)
    assert logit_transform(model) is None


def test_compute_logprobs_has_no_gradient_and_the_same_values(accelerator: Accelerator) -> None:
    policy = PolicyForward(tiny_model("llama"))
    batch = collate(rows()[0], "packed")
    (ref,) = compute_logprobs(policy, [batch], accelerator)
    assert not ref.requires_grad
    torch.testing.assert_close(ref, policy(batch).logprobs_T.detach())


# --- non-finite losses and gradients


def test_nan_loss_names_its_episode_and_leaves_no_trace(accelerator: Accelerator) -> None:
    policy = PolicyForward(tiny_model("llama"))
    before = [p.detach().clone() for p in policy.parameters()]
    all_rows, denominator = rows()
    batches = [collate([row], "padded") for row in all_rows]
    batches[2].mu_logprobs_T[1] = float("nan")
    with pytest.raises(NonFiniteLossError, match="1 tokens is NaN or infinite; episodes: e2") as caught:
        accumulate_gradients(
            policy, batches, get_loss("grpo"), denominator=denominator, accelerator=accelerator
        )
    assert caught.value.episode_ids == ("e2",)
    assert all(p.grad is None for p in policy.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_nan_gradient_is_refused_before_the_step(accelerator: Accelerator) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * float("nan")

    def loss(logp: Any, mu: Any, adv: Any, ref: Any = None) -> TokenLoss:
        return TokenLoss(Bad.apply(logp), {})

    policy = PolicyForward(tiny_model("llama"))
    all_rows, n = rows()
    accumulate_gradients(policy, [collate(all_rows, "packed")], loss, denominator=n, accelerator=accelerator)
    with pytest.raises(NonFiniteLossError, match="norm is nan.*e0") as caught:
        clip_gradients(policy, 1.0, accelerator, ["e0", "e1"])
    assert caught.value.episode_ids == ("e0", "e1")
    assert all(p.grad is None for p in policy.parameters())


def test_clipping_returns_the_norm_before(accelerator: Accelerator) -> None:
    policy = PolicyForward(tiny_model("llama"))
    all_rows, n = rows()
    grads, _ = gradient(policy, [collate(all_rows, "packed")], n, accelerator)
    norm = torch.sqrt(sum((g**2).sum() for g in grads.values()))  # type: ignore[arg-type]
    assert clip_gradients(policy, 0.01, accelerator) == pytest.approx(float(norm), rel=1e-5)
    after = torch.sqrt(sum((p.grad**2).sum() for p in policy.parameters() if p.grad is not None))  # type: ignore[arg-type]
    assert float(after) == pytest.approx(0.01, rel=1e-3)


def test_nothing_to_train_on_is_an_error(accelerator: Accelerator) -> None:
    policy = PolicyForward(tiny_model("llama"))
    with pytest.raises(ValueError, match="0 trained tokens"):
        accumulate_gradients(
            policy, [collate([], "packed")], get_loss("grpo"), denominator=0, accelerator=accelerator
        )


# --- two processes


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "layout"), [("llama", "packed"), ("llama-lora", "padded"), ("hybrid", "padded")]
)
def test_two_processes_give_the_gradient_of_one(
    kind: str, layout: Any, tmp_path: Path, accelerator: Accelerator
) -> None:
    output = tmp_path / "two.pt"
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here.parent / "src"), str(here)]),
    }
    launch = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", *launch.split(), "--main_process_port", "0"),
        *(str(here / "gradient_checks.py"), kind, layout, str(output)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    two = torch.load(output)
    assert two["ranks"] == 2
    assert two["n"] >= 2
    all_rows, denominator = rows()
    policy = PolicyForward(tiny_model(kind), chunk=50)
    one, metrics = gradient(policy, [collate(all_rows, layout)], denominator, accelerator)
    close(one, two["grads"])
    assert two["metrics"] == pytest.approx(metrics.flat(), rel=1e-4, abs=1e-6)

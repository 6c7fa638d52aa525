"""The in-process engine: right tokens, right log-probs, the same again, and nothing left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from maieutic.engines.base import Engine, Sample, Sampling
from maieutic.engines.hf import HfEngine
from maieutic.engines.hf_rows import draw, uniforms
from maieutic.errors import EngineError, ModelError

VOCAB = 64
STOPS = (3, 4)


def tiny(kind: str = "llama", seed: int = 0, **fields: Any) -> Any:
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "pad_token_id": 0,
    } | fields
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**common)).eval()
        if kind == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**common, head_dim=16)).eval()
        if kind == "mistral":
            return MistralForCausalLM(MistralConfig(**common, sliding_window=8)).eval()
        if kind == "hybrid":
            from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

            return Qwen3_5ForCausalLM(
                Qwen3_5TextConfig(
                    **common,
                    head_dim=16,
                    layer_types=["linear_attention", "full_attention"],
                    linear_num_key_heads=2,
                    linear_num_value_heads=2,
                    linear_key_head_dim=16,
                    linear_value_head_dim=16,
                )
            ).eval()
    raise ValueError(kind)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(5, VOCAB, length)]


def plain_logprobs(model: Any, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(ids) − 1]: log-prob of each token but the first, by one forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(list(ids)[1:])[:, None])[:, 0]


def close_to_plain(model: Any, given: Sequence[int], sample: Sample, temperature: float) -> None:
    expected = plain_logprobs(model, [*given, *sample.ids], temperature)[-len(sample.ids) :]
    assert torch.tensor(sample.logprobs) == pytest.approx(expected, abs=1e-4)


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


async def talk(
    engine: HfEngine, i: int, turns: int = 3, temperature: float = 1.15, k: int = 0
) -> list[tuple[list[int], Sample]]:
    """A growing dialogue with ragged prompts, replies and limits, and at its end one request for k samples."""
    ids, out = prompt(3 + 5 * i, seed=i), []
    for turn in range(turns):
        sampling = Sampling(temperature, 1.0, 4 + 3 * ((i + turn) % 4))
        (one,) = await engine.generate(ids, sampling, seed=100 * i + turn, stop_ids=STOPS, session=f"d{i}")
        out.append((list(ids), one))
        ids = ids + one.ids + prompt(1 + (i * 3 + turn) % 6, seed=50 * i + turn)
    if k:
        many = await engine.generate(
            ids, Sampling(temperature, 1.0, 9), seed=i, n=k, stop_ids=STOPS, session=f"d{i}"
        )
        out += [(list(ids), one) for one in many]
    return out


async def together(engine: HfEngine, n: int = 7, **options: Any) -> list[list[tuple[list[int], Sample]]]:
    return await asyncio.gather(*[talk(engine, i, **options) for i in range(n)])


KINDS = pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "hybrid"])


def test_it_is_an_engine() -> None:
    assert isinstance(HfEngine(tiny(), pad_id=0), Engine)


@KINDS
def test_log_probs_equal_one_plain_forward(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny(kind)
    engine = HfEngine(model, pad_id=0, max_batch_size=12)
    with caplog.at_level(logging.WARNING):
        talks = run(together(engine, k=5))
    assert bool(caplog.records) == (kind in ("mistral", "hybrid"))  # the fallback is announced
    for one in talks:
        assert len(one) == 8
        for given, sample in one:
            close_to_plain(model, given, sample, 1.15)
            assert 1 <= len(sample.ids) <= 13
            assert sample.finish_reason == ("stop" if sample.ids[-1] in STOPS else "length")
            assert not set(sample.ids[:-1]) & set(STOPS)
    reasons = {s.finish_reason for one in talks for _, s in one}
    assert reasons == {"stop", "length"}
    assert len({tuple(s.ids) for _, s in talks[0][3:]}) > 1  # the K samples are different draws


@KINDS
def test_greedy_equals_generate(kind: str) -> None:
    model = tiny(kind)
    prompts = [prompt(n, seed=n) for n in (2, 9, 30)]

    async def main(engine: HfEngine) -> list[list[Sample]]:
        calls = [
            engine.generate(p, Sampling(0.0, 1.0, 20), seed=0, n=1 + i, stop_ids=STOPS)
            for i, p in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    for given, samples in zip(prompts, run(main(HfEngine(model, pad_id=0))), strict=True):
        expected = model.generate(
            torch.tensor([given]),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=list(STOPS),
            pad_token_id=0,
        )[0, len(given) :].tolist()
        for sample in samples:
            assert sample.ids == expected
            assert sample.logprobs == [0.0] * len(expected)


@KINDS
def test_the_same_requests_give_the_same_bits(kind: str) -> None:
    model = tiny(kind)
    first, second = (run(together(HfEngine(model, pad_id=0, max_batch_size=10), k=3)) for _ in range(2))
    assert first == second
    engine = HfEngine(model, pad_id=0, max_batch_size=10)

    async def twice() -> Any:
        await engine.new_step(0)
        a = await together(engine, k=3)
        await engine.new_step(0)
        return a, await together(engine, k=3)

    a, b = run(twice())
    assert a == b == first


def test_a_second_step_equals_the_same_step_in_a_fresh_engine() -> None:
    """What a resumed run needs: nothing of an earlier step reaches into a later one."""
    model = tiny()

    async def long(engine: HfEngine) -> Any:
        await together(engine, n=5)
        await engine.new_step(1)
        return await together(engine, k=4)

    async def resumed(engine: HfEngine) -> Any:
        await engine.new_step(1)
        return await together(engine, k=4)

    assert run(long(HfEngine(model, pad_id=0))) == run(resumed(HfEngine(model, pad_id=0)))


def test_seeds_and_company() -> None:
    engine = HfEngine(tiny(), pad_id=0)

    async def one(seed: int, n: int = 1) -> list[list[int]]:
        samples = await engine.generate(prompt(6), Sampling(1.0, 1.0, 30), seed=seed, n=n)
        return [s.ids for s in samples]

    async def main() -> None:
        alone = await one(7)
        assert await one(7) == alone and await one(8) != alone
        many = await one(7, n=6)
        assert many[0] == alone[0]  # sample i has its own stream, whatever n
        assert len({tuple(ids) for ids in many}) == 6
        crowd = await asyncio.gather(one(7), *[one(s, n=2) for s in range(20, 40)])
        assert crowd[0] == alone

    run(main())


def test_uniforms_are_streams() -> None:
    assert (uniforms(3, 0, 5) == uniforms(3, 0, 9)[:5]).all()
    assert not np.isclose(uniforms(3, 0, 5), uniforms(3, 1, 5)).any()
    assert not np.isclose(uniforms(3, 0, 5), uniforms(4, 0, 5)).any()
    assert (uniforms(2**64 + 3, 0, 5) == uniforms(3, 0, 5)).all()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.3, 0.8), (0.7, 0.3)])
def test_frequencies_follow_the_stated_distribution(temperature: float, top_p: float) -> None:
    model = tiny()
    given, n = prompt(8), 20_000
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([given])).logits[0, -1].double()
    probs = torch.softmax(logits / temperature, -1).numpy()
    order = np.argsort(-probs, kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1] if top_p < 1 else order
    expected = np.zeros(VOCAB)
    expected[kept] = probs[kept] / probs[kept].sum()
    engine = HfEngine(model, pad_id=0, max_batch_size=n)
    samples = run(engine.generate(given, Sampling(temperature, top_p, 1), seed=11, n=n))
    counts = np.bincount([s.ids[0] for s in samples], minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    big = expected * n >= 5
    observed, wanted = counts[big], expected[big] * n
    chi2 = ((observed - wanted) ** 2 / wanted).sum()
    df = max(int(big.sum()) - 1, 1)
    # Wilson-Hilferty: the 99.9 % quantile of chi-square
    assert chi2 < df * (1 - 2 / (9 * df) + 3.1 * (2 / (9 * df)) ** 0.5) ** 3
    for sample in samples[:50]:
        assert sample.logprobs[0] == pytest.approx(np.log(expected[sample.ids[0]]), abs=1e-4)


def test_draw_at_the_edges() -> None:
    logits = torch.tensor([[0.0, -1e9, 1.0, -1e9]])
    ones = torch.ones(1)
    for u, token in ((0.0, 0), (1.0, 2), (0.9999999, 2)):
        got, logprob = draw(logits, torch.tensor([u]), ones, None)
        assert got.item() == token
        assert logprob.item() == pytest.approx(float(torch.log_softmax(logits, -1)[0, token]), abs=1e-6)
    got, logprob = draw(logits, torch.tensor([0.1]), ones, torch.tensor([0.5]))
    assert (got.item(), logprob.item()) == (2, 0.0)


def test_what_cannot_be_sampled_is_refused() -> None:
    engine = HfEngine(tiny(), pad_id=0)

    def refused(match: str, ids: list[int], sampling: Sampling | None = None, **kw: Any) -> None:
        with pytest.raises(EngineError, match=match):
            run(engine.generate(ids, sampling or Sampling(), seed=0, **kw))

    assert engine.context_limit == 256
    refused(
        r"200 prompt tokens and up to 57 new ones exceed the model's context of 256",
        [5] * 200,
        Sampling(max_tokens=57),
    )
    refused("nothing to sample", [])
    refused("nothing to sample", [5], n=0)
    refused("outside the vocabulary of 64", [5, 64], Sampling(max_tokens=2))
    refused("top_p", [5], Sampling(top_p=0.0, max_tokens=2))
    assert len(run(engine.generate([5] * 200, Sampling(max_tokens=56), seed=0))[0].ids) == 56
    with pytest.raises(ModelError, match="context_limit"):
        bare = tiny()
        object.__setattr__(bare.config, "max_position_embeddings", None)
        HfEngine(bare, pad_id=0)


def test_a_request_larger_than_the_batch_runs_alone() -> None:
    model = tiny()
    samples = run(
        HfEngine(model, pad_id=0, max_batch_size=2).generate(prompt(5), Sampling(1.0, 1.0, 6), seed=1, n=9)
    )
    assert len(samples) == 9
    for sample in samples:
        close_to_plain(model, prompt(5), sample, 1.0)


def test_new_weights_need_a_new_step_and_get_new_log_probs() -> None:
    model = tiny()
    engine = HfEngine(model, pad_id=0)
    ids = prompt(12)

    async def turn(given: list[int]) -> Sample:
        return (await engine.generate(given, Sampling(1.0, 1.0, 6), seed=5, session="d"))[0]

    async def main() -> None:
        await engine.new_step(1)
        first = await turn(ids)
        assert first.policy_version == engine.policy_version == 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05
                )
        grown = ids + first.ids + prompt(4)
        stale = await turn(
            grown
        )  # without new_step the old keys and values are still used: this is what must not be
        error = (
            (torch.tensor(stale.logprobs) - plain_logprobs(model, grown + stale.ids)[-len(stale.ids) :])
            .abs()
            .max()
        )
        assert error > 1e-3
        await engine.new_step(2)
        fresh = await turn(grown)
        close_to_plain(model, grown, fresh, 1.0)
        assert fresh.policy_version == 2

    run(main())


def test_sessions_feed_only_new_tokens_and_survive_eviction() -> None:
    model = tiny()

    def columns(cache_tokens: int) -> tuple[int, Any]:
        engine = HfEngine(model, pad_id=0, cache_tokens=cache_tokens)
        fed = 0
        forward = engine._forward

        def counting(**kwargs: Any) -> torch.Tensor:
            nonlocal fed
            fed += kwargs["input_ids"].numel()
            return forward(**kwargs)

        engine._forward = counting  # type: ignore[method-assign]
        talks = run(together(engine, k=2))
        assert engine._sessions.tokens <= cache_tokens
        assert engine._sessions.tokens == sum(len(ids) for ids, _ in engine._sessions.entries.values())
        return fed, talks

    (all_, kept), (none, alone), (some, evicted) = columns(10_000), columns(0), columns(150)
    assert all_ < some < none
    for talks in (kept, alone, evicted):
        for one in talks:
            for given, sample in one:
                close_to_plain(model, given, sample, 1.15)


def test_a_session_whose_history_changed_reuses_the_common_prefix_only() -> None:
    model = tiny()
    engine = HfEngine(model, pad_id=0)

    async def main() -> None:
        ids = prompt(20)
        sampling = Sampling(1.0, 1.0, 8)
        for given in (ids, ids[:11] + prompt(5, seed=9), ids[:3], ids[:3], prompt(9, seed=4)):
            (one,) = await engine.generate(given, sampling, seed=2, session="d")
            close_to_plain(model, given, one, 1.0)

    run(main())


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_a_cancelled_request_frees_its_row(kind: str) -> None:
    model = tiny(kind)
    engine = HfEngine(model, pad_id=0)

    async def main() -> None:
        sampling = Sampling(1.0, 1.0, 80)
        tasks = [asyncio.create_task(engine.generate(prompt(4 + i, i), sampling, seed=i)) for i in range(4)]
        tasks.append(asyncio.create_task(engine.generate(prompt(4), sampling, seed=9, n=3)))
        while not engine.running:
            await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[4].cancel()
        late = asyncio.create_task(engine.generate(prompt(3), sampling, seed=5))
        await asyncio.sleep(0)
        late.cancel()
        done = await asyncio.gather(*tasks, late, return_exceptions=True)
        assert [isinstance(d, asyncio.CancelledError) for d in done] == [
            False,
            True,
            False,
            False,
            True,
            True,
        ]
        for i in (0, 2, 3):
            close_to_plain(model, prompt(4 + i, i), done[i][0], 1.0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not engine.has_work and engine.running == 0
        # the last of all is cancelled: the scheduler must not go on for nobody
        alone = asyncio.create_task(engine.generate(prompt(4), sampling, seed=1))
        while not engine.running:
            await asyncio.sleep(0)
        alone.cancel()
        for _ in range(40):
            await asyncio.sleep(0)
        assert not engine.has_work
        await engine.new_step(1)

    run(main())


@pytest.mark.parametrize("whole", [True, False])
def test_training_mode_and_gradients_are_left_as_they_were(whole: bool) -> None:
    model = tiny(attention_dropout=0.5)
    if whole:
        model.train()
        model.model.layers[0].eval()
    else:
        model.model.layers[0].train()
    modes = [m.training for m in model.modules()]
    engine = HfEngine(model, pad_id=0)
    (one,) = run(engine.generate(prompt(5), Sampling(1.0, 1.0, 12), seed=0))
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    close_to_plain(model.eval(), prompt(5), one, 1.0)  # no dropout while sampling
    model.train()
    model(input_ids=torch.tensor([prompt(5)])).logits.sum().backward()
    assert all(p.grad is not None and not p.grad.isnan().any() for p in model.parameters())


def test_one_model_as_lora_tutor_and_frozen_student() -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny()
    ids = prompt(10)
    expected = plain_logprobs(base, ids)
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3, init_lora_weights=False)
    )
    assert not torch.allclose(plain_logprobs(model.eval(), ids), expected, atol=1e-2)
    model.train()
    flags = [p.requires_grad for p in model.parameters()]
    tutor, student = (HfEngine(model, pad_id=0, adapter=a) for a in ("on", "off"))  # type: ignore[arg-type]

    async def main() -> Any:
        return await asyncio.gather(together(tutor, k=2), together(student, k=2))

    a, b = run(main())
    assert [p.requires_grad for p in model.parameters()] == flags and model.training
    model.eval()
    for one in a:
        for given, sample in one:
            close_to_plain(model, given, sample, 1.15)
    with model.disable_adapter():
        assert torch.allclose(plain_logprobs(model, ids), expected, atol=1e-6)
        for one in b:
            for given, sample in one:
                close_to_plain(model, given, sample, 1.15)


def test_bf16_runs_and_stays_near_fp32() -> None:
    model = tiny().to(torch.bfloat16)
    talks = run(together(HfEngine(model, pad_id=0), k=3))
    for one in talks:
        for given, sample in one:
            expected = plain_logprobs(model, [*given, *sample.ids], 1.15)[-len(sample.ids) :]
            assert (torch.tensor(sample.logprobs) - expected).abs().max() < 0.3


def test_failures_reach_the_caller_and_spare_the_engine() -> None:
    model = tiny()
    engine = HfEngine(model, pad_id=0)
    weight = model.model.norm.weight
    with torch.no_grad():
        saved = weight.clone()
        run(engine.generate([5], Sampling(1.0, 1.0, 2), seed=0))
        weight.fill_(float("nan"))
        with pytest.raises(EngineError, match="not finite"):
            run(engine.generate([5], Sampling(1.0, 1.0, 2), seed=0))
        weight.copy_(saved)

    forward = engine._forward

    def broken(**kwargs: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    engine._forward = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        run(engine.generate([5], Sampling(1.0, 1.0, 2), seed=0))
    engine._forward = forward  # type: ignore[method-assign]
    assert len(run(engine.generate([5], Sampling(1.0, 1.0, 2), seed=0))[0].ids) <= 2

    async def closing() -> None:
        task = asyncio.create_task(engine.generate([5], Sampling(1.0, 1.0, 200), seed=0))
        while not engine.running:
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="being sampled"):
            await engine.new_step(3)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([5], Sampling(), seed=0)

    run(closing())


def test_fixture_model(tiny_model_dir: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    ids = [40, 50, 60, 70]
    (one,) = run(HfEngine(model, pad_id=0).generate(ids, Sampling(0.8, 1.0, 24), seed=3, stop_ids=[2]))
    close_to_plain(model, ids, one, 0.8)

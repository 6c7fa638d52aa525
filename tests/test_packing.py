"""Trajectories, micro-batches and plans, and the check of architectures."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch

from maieutic.errors import ModelError, TrajectoryError
from maieutic.training import probes
from maieutic.training.packing import (
    balance,
    best_width,
    collate,
    first_fit_decreasing,
    make_micro_batches,
    make_rows,
    pack,
    packed_cost,
    pad,
    padded_cost,
    plan_micro_batches,
)
from maieutic.training.probes import isolates, tiny_copy
from maieutic.training.trajectory import Segment, Trajectory, count_trained


def segment(mask: str, start: int = 10) -> Segment:
    """``.`` context, ``x`` sampled; ids count up from ``start``, log-probs are −0.01 · id."""
    ids = list(range(start, start + len(mask)))
    sampled = [c == "x" for c in mask]
    return Segment(ids, sampled, [-0.01 * i if s else 0.0 for i, s in zip(ids, sampled, strict=True)], 3)


def trajectory(*masks: str, name: str = "e", excluded: bool = False) -> Trajectory:
    return Trajectory(name, "g", [segment(m) for m in masks], 0.5, 1.15, excluded)


# --- trajectory


def test_json_round_trip_is_exact() -> None:
    t = trajectory("..xx.x", ".x", name="e1")
    t.segments[0].logprobs[2] = -0.1234567890123456789
    assert Trajectory.from_json(json.loads(json.dumps(t.to_json()))) == t
    lost = Trajectory("e2", 4, [], math.nan, 1.0, excluded=True)
    back = Trajectory.from_json(json.loads(json.dumps(lost.to_json(), allow_nan=False)))
    assert math.isnan(back.reward)
    assert back.excluded
    with pytest.raises(TrajectoryError, match="'e1' has no field 'temperature'"):
        Trajectory.from_json({k: v for k, v in t.to_json().items() if k != "temperature"})


def test_counts() -> None:
    t = trajectory("..xx.x", ".x")
    t.validate(n_sampled=4)
    assert (t.n_trained, t.n_tokens) == (4, 8)
    assert count_trained([t, trajectory("...xxx", excluded=True), trajectory("....")]) == 4


def _set(field: str, index: int, value: Any) -> Any:
    return lambda t: getattr(t.segments[0], field).__setitem__(index, value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.segments[0].logprobs.pop(), "4 ids, 4 mask entries and 3 log-probs"),
        (_set("logprobs", 2, math.nan), "token 2: nan is not the log of a probability"),
        (_set("logprobs", 2, 0.5), "token 2: 0.5 is not the log"),
        (_set("logprobs", 2, -math.inf), "token 2: -inf is not the log"),
        (_set("logprobs", 1, -0.5), "token 1: log-prob -0.5 of a token that was not sampled"),
        (_set("mask", 0, True), "begins with a sampled token"),
        (_set("ids", 1, -1), "id -1 is negative"),
        (lambda t: setattr(t, "reward", math.nan), "reward nan"),
        (lambda t: setattr(t, "temperature", 0.0), "temperature 0.0"),
    ],
)
def test_damage_is_named(damage: Any, message: str) -> None:
    t = trajectory("..xx")
    damage(t)
    with pytest.raises(TrajectoryError, match=message):
        t.validate()


def test_mask_must_count_what_the_engine_sampled() -> None:
    with pytest.raises(TrajectoryError, match="mark 2 tokens as sampled, the engine sampled 3"):
        trajectory("..xx").validate(n_sampled=3)


# --- rows and micro-batches


def test_rows_leave_out_what_trains_nothing() -> None:
    batch = [trajectory("..xx..x.."), trajectory("....", ".x", name="f"), trajectory(".xx", excluded=True)]
    rows = make_rows(batch, [0.5, 0.0, 9.0])
    assert [row.episode_id for row in rows] == ["e", "f"]
    # Token 6 is the last that is trained: nothing after token 5 is needed to predict it.
    assert rows[0].input_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert rows[0].select.tolist() == [1, 2, 5]
    assert rows[0].targets.tolist() == [12, 13, 16]
    assert rows[0].mu_logprobs.tolist() == pytest.approx([-0.12, -0.13, -0.16])
    assert [row.episode_id for row in make_rows(batch, [0.5, 0.0, 9.0], skip_zero_advantage=True)] == ["e"]


def test_packed_positions_restart_and_padded_ones_do_not() -> None:
    rows = make_rows([trajectory("..xx", name="a"), trajectory(".x.xx.", name="b")], [1.0, -1.0])
    packed, padded = collate(rows, "packed"), collate(rows, "padded")
    assert packed.input_ids.tolist() == [[10, 11, 12, 10, 11, 12, 13]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert packed.select_T.tolist() == [1, 2, 3, 5, 6]
    assert packed.boundaries is not None
    assert (packed.boundaries.tolist(), packed.max_length) == ([0, 3, 7], 4)
    assert padded.input_ids.tolist() == [[10, 11, 12, 0], [10, 11, 12, 13]]
    assert padded.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert padded.select_T.tolist() == [1, 2, 4, 6, 7]
    for batch in (packed, padded):
        assert batch.targets_T.tolist() == [12, 13, 11, 13, 14]
        assert batch.advantages_T.tolist() == [1, 1, -1, -1, -1]
        assert batch.episode_T.tolist() == [0, 0, 1, 1, 1]
        assert batch.episode_ids == ("a", "b")
        assert batch.temperatures_T.tolist() == pytest.approx([1.15] * 5)


def test_several_packed_rows_end_in_a_sequence_of_filler() -> None:
    rows = make_rows([trajectory("." + "x" * n, name=str(n)) for n in (4, 2, 3)], [1.0] * 3)
    batch = collate(rows, "packed", width=6)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 10, 11], [10, 11, 12, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert batch.select_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.targets_T.tolist() == [11, 12, 13, 14, 11, 12, 11, 12, 13]
    assert batch.boundaries is None


def test_best_width() -> None:
    # A narrow model spends most on attention: short rows. A wide one does not, and filler would cost more.
    assert best_width([500] * 8, 10_000, hidden_size=64) == 500
    assert best_width([500, 300, 300], 10_000, hidden_size=100_000) == 0
    assert best_width([600, 500, 400, 300, 200], 10_000, hidden_size=64) == 600  # 600 | 500 | 400 + 200 | 300
    # Two rows of 500 would not fit in the budget; nor is there a choice for one sequence, or without a size.
    assert best_width([500, 300], 900, hidden_size=8) == 0
    assert best_width([500], 900, hidden_size=8) == best_width([500] * 8, 10_000, hidden_size=0) == 0


def test_sequences_are_padded_where_that_is_cheaper_than_a_mask() -> None:
    def layouts(*lengths: int, budget: int, hidden: int) -> list[tuple[int, ...]]:
        rows = make_rows([trajectory("." + "x" * n) for n in lengths], [1.0] * len(lengths))
        return [tuple(b.input_ids.shape) for b in make_micro_batches(rows, budget, "packed", 1, hidden)[0]]

    # Equal lengths waste nothing, and a row of one sequence needs no mask, which would cost twice the pairs.
    assert layouts(300, 300, 300, budget=900, hidden=64) == [(3, 300)]
    assert packed_cost([300] * 3, 300, 64) == 900 * (1 + 300 / 384)
    assert padded_cost([300] * 3, 64) == 900 * (1 + 300 / 768)
    # Lengths of 30 to 300 would be two fifths padding; in a wide model no mask costs as much.
    assert layouts(300, 200, 40, budget=900, hidden=4096) == [(1, 540)]
    # Without a size (kernels with variable lengths) there is no choice, nor where the layout is padded already.
    assert layouts(300, 300, 300, budget=900, hidden=0) == [(1, 900)]
    # Sorted into micro-batches of neighbours: 300 + 290 | 100 + 90 + 80.
    assert layouts(100, 300, 90, 290, 80, budget=600, hidden=64) == [(2, 300), (3, 100)]


def test_every_token_is_trained_once_whatever_the_layout() -> None:
    rng = random.Random(0)
    batch = [
        trajectory("." + "".join(rng.choices(".x", k=rng.randint(1, 60))), name=str(i)) for i in range(40)
    ]
    rows = make_rows(batch, [1.0] * len(batch))
    expected = sorted((row.episode_id, t) for row in rows for t in row.targets.tolist())
    for budget in (1, 64, 200, 10_000):
        for layout in ("packed", "padded"):
            for n_ranks in (1, 2, 3):
                ranks = make_micro_batches(rows, budget, layout, n_ranks, hidden_size=40 * (n_ranks - 1))  # type: ignore[arg-type]
                assert len({len(rank) for rank in ranks}) == 1
                seen = [
                    (b.episode_ids[e], t)
                    for rank in ranks
                    for b in rank
                    for e, t in zip(b.episode_T.tolist(), b.targets_T.tolist(), strict=True)
                ]
                assert sorted(seen) == expected
                for b in (b for rank in ranks for b in rank):
                    assert b.input_ids.numel() <= budget or len(b.episode_ids) <= 1
                    # Each target stands right after the position that predicts it, unless it is the last.
                    flat = b.input_ids.flatten().tolist()
                    for s, t in zip(b.select_T.tolist(), b.targets_T.tolist(), strict=True):
                        assert flat[s] == t - 1


def test_pack_and_pad_are_the_one_rank_cases() -> None:
    rows = make_rows([trajectory("." + "x" * n) for n in (3, 9, 5)], [1.0] * 3)
    assert [b.input_ids.shape for b in pack(rows, 100)] == [(1, 17)]
    assert [b.input_ids.shape for b in pad(rows, 100)] == [(3, 9)]
    assert sorted(b.input_ids.numel() for b in pack(rows, 10)) == [8, 9]


def test_plan_is_deterministic_tight_and_balanced() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(50, 4000) for _ in range(128)]
    plan = plan_micro_batches(lengths, 16_384, "packed", 4)
    assert plan == plan_micro_batches(list(lengths), 16_384, "packed", 4)
    needed = len(first_fit_decreasing(lengths, 16_384))
    assert sum(len(rank) for rank in plan) <= needed + 4
    tokens = [sum(lengths[i] for micro in rank for i in micro) for rank in plan]
    assert max(tokens) / min(tokens) < 1.02
    for k in range(len(plan[0])):
        kth = [sum(lengths[i] for i in rank[k]) for rank in plan]
        assert max(kth) / min(kth) < 1.05


def test_ranks_without_rows_get_a_dummy() -> None:
    for layout in ("packed", "padded"):
        assert plan_micro_batches([5], 10, layout, 3) == [[[0]], [[]], [[]]]  # type: ignore[arg-type]
        assert plan_micro_batches([], 10, layout, 2) == [[[]], [[]]]  # type: ignore[arg-type]
        dummy = collate([], layout)  # type: ignore[arg-type]
        assert (dummy.n_trained, dummy.select_T.dtype, dummy.episode_ids) == (0, torch.int64, ())
        assert dummy.input_ids.shape == dummy.position_ids.shape == (1, 8)


def test_balance() -> None:
    assert balance([5, 9, 4, 4, 2], 2) == [[1, 3], [0, 2, 4]]  # 13 and 11
    assert balance([1, 1, 1], 2) == [[0, 2], [1]]


# --- architectures


def configs() -> dict[str, Any]:
    from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3_5TextConfig, Qwen3Config

    return {
        "llama": LlamaConfig(),
        "qwen3": Qwen3Config(),
        "mistral-window": MistralConfig(sliding_window=5),
        "gemma3-window": Gemma3TextConfig(sliding_window=5),
        "qwen3.5": Qwen3_5TextConfig(),
    }


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "gemma3-window"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dense_models_isolate_packed_sequences(name: str, attention: str) -> None:
    config = configs()[name]
    config._attn_implementation = attention
    result = isolates(config)
    assert result, result.reason
    assert result.several_rows
    assert "packing is on" in result.reason


def test_recurrent_layers_do_not() -> None:
    config = configs()["qwen3.5"]
    state = torch.get_rng_state()
    result = isolates(config)
    assert not result
    assert "linear_attention" in result.reason
    assert torch.equal(state, torch.get_rng_state())
    # The copy has one layer of each kind; a copy of linear layers only, or full ones only, would prove nothing.
    tiny: Any = tiny_copy(config)
    assert sorted(tiny.config.layer_types) == ["full_attention", "linear_attention"]
    assert sum(p.numel() for p in tiny.parameters()) < 1_000_000


def test_the_copy_keeps_windows_and_leaves_the_config_alone() -> None:
    config = configs()["gemma3-window"]
    before = config.to_dict()
    tiny: Any = tiny_copy(config)
    assert tiny.config.sliding_window == 5
    assert set(tiny.config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.to_dict() == before


def test_what_cannot_be_copied_is_not_packed() -> None:
    from transformers import JambaConfig

    result = isolates(JambaConfig())
    assert not result
    assert "packing is off" in result.reason


def test_a_model_that_looks_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = probes.running_copy

    def looking_ahead(model_or_config: Any) -> Any:
        tiny = real(model_or_config)
        for module in tiny.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
        return tiny

    monkeypatch.setattr(probes, "running_copy", looking_ahead)
    with pytest.raises(ModelError, match="not causal"):
        isolates(configs()["llama"])

"""The benchmarks of the training step and of the head's memory, at toy sizes: contestants agree, and the checks can fail."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradient_checks import VOCAB, tiny_model
from maieutic import config
from maieutic.recipe import load_recipe
from maieutic.training.trajectory import Segment, Trajectory

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import logit_memory
import training_step
from support.training_cases import (
    CASES,
    Case,
    choose,
    read_transcripts,
    relative_difference,
    with_own_logprobs,
)
from support.training_peers import Ours, Sft, Trl, TrlSetting, tokens_of


def episode(name: str, group: str, reward: float, draw: random.Random) -> Trajectory:
    """A prompt, then turns of tutor and student in turn, of ragged lengths, ending on a student's."""
    ids = [draw.randrange(4, VOCAB) for _ in range(draw.randint(5, 9))]
    mask = [False] * len(ids)
    for turn in range(draw.randint(3, 6)):
        n = draw.randint(1, 7)
        ids += [draw.randrange(4, VOCAB) for _ in range(n)]
        mask += [turn % 2 == 0] * n
    return Trajectory(name, group, [Segment(ids, mask, [0.0] * len(ids))], reward, 0.8)


@pytest.fixture(scope="module")
def groups() -> list[list[Trajectory]]:
    draw = random.Random(1)
    made = [[episode(f"{g}{i}", g, float(i % 2), draw) for i in range(4)] for g in "ab"]
    return with_own_logprobs(made, tiny_model("llama").eval(), VOCAB)


def recipe(*overrides: str) -> Any:
    return load_recipe(
        "smollm2/grpo",
        [
            "tutor.lora=null",
            "training.mini_batch_problems=2",
            "training.tokens_per_micro_batch=64",
            *overrides,
        ],
    )


@pytest.mark.parametrize(
    "setting",
    [
        TrlSetting(8, True, False),
        TrlSetting(2, True, True),
        TrlSetting(1, False, True),
        TrlSetting(4, False, False),
    ],
    ids=str,
)
def test_ours_and_trl_have_one_loss_and_one_gradient(
    setting: TrlSetting, groups: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    ours = Ours(recipe(), tiny_model("llama").eval(), groups)
    trl = Trl(recipe(), tiny_model("llama").eval(), tiny_tokenizer, groups, setting, tmp_path)
    tokens, padded, trained = trl.positions()
    assert tokens == tokens_of(groups) and trained == sum(t.n_trained for g in groups for t in g)
    assert padded > tokens
    loss, gradient = ours.gradient()
    other_loss, other = trl.gradient()
    same = loss == pytest.approx(other_loss, abs=1e-6) and relative_difference(gradient, other) < 1e-5
    # With a generation batch a group TRL divides each group's sum by the group's own tokens.
    assert same == setting.whole
    assert relative_difference(gradient, ours.gradient(ours.unpacked())[1]) < 2e-6
    assert trl.step() > 0 and ours.step() > 0
    if not same:
        return
    moved = {n: p.detach() for n, p in ours.learner.model.named_parameters()}
    still = dict(tiny_model("llama").named_parameters())
    assert any(not torch.equal(moved[n], still[n]) for n in moved)
    for name, parameter in trl.trainer.model.named_parameters():
        torch.testing.assert_close(parameter, moved[name], rtol=0, atol=1e-6)


def test_the_checks_hold_and_notice_a_planted_error(groups: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    ours = Ours(recipe(), tiny_model("llama").eval(), groups)
    trl = Trl(
        recipe(), tiny_model("llama").eval(), tiny_tokenizer, groups, TrlSetting(4, True, True), tmp_path
    )
    found = training_step.check_trl(ours, trl, groups)
    assert 0 < found["gradient_difference"] < 1e-5
    for rows, kept in ((ours.single_rows(), True), (ours.unpacked(), True), (ours.batches(), False)):
        training_step.check_sft(ours, Sft(recipe(), tiny_model("llama"), rows, kept=kept))
    # Another label, a weight that is off, and an episode that TRL does not see.
    rows = ours.single_rows()
    rows[0].targets_T[0] = (rows[0].targets_T[0] + 1) % VOCAB
    with pytest.raises(SystemExit, match="NLL"):
        training_step.check_sft(ours, Sft(recipe(), tiny_model("llama"), rows, kept=True))
    with torch.no_grad():
        trl.trainer.model.lm_head.weight[5] += 0.01
    with pytest.raises(SystemExit, match=r"loss|gradient"):
        training_step.check_trl(ours, trl, groups)
    with pytest.raises(SystemExit, match="tokens"):
        training_step.check_trl(ours, trl, [*groups, groups[0]])


def test_a_case_runs_to_its_figures(tiny_tokenizer: Any, groups: Any, tmp_path: Path) -> None:
    case = Case("toy", "toy", True, 2, 4)
    figures, checks, settings = training_step.run_case(
        case, groups, tiny_model("llama").eval(), tiny_tokenizer, 2, tmp_path
    )
    assert [f.row for f in figures] == ["6", "6b", "7", "7b"] and all(len(f.runs) == 2 for f in figures)
    assert all(min(f.runs) > 0 for f in figures)
    assert settings["tokens"] == tokens_of(groups) and len(settings["trl_seconds"]) == 4
    assert checks["unpacked_difference"] < 5e-6


def test_the_heads_memory_is_flat_and_its_results_are_those_of_full_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for path in logit_memory.PATHS:
        assert logit_memory.equality(path) < 1e-5
        assert logit_memory.equality(path, spoil=1e-3) > 1e-5
    monkeypatch.setattr(config, "LOGITS_AT_ONCE", 2**18)
    monkeypatch.setattr(logit_memory, "WIDTH", 8)
    for path in logit_memory.PATHS:
        few, more = logit_memory.peak(path, 512, 1_024), logit_memory.peak(path, 512, 8_192)
        # Beside the logits there are [T, H] numbers, few here.
        assert 2**18 * 4 < more < 1.15 * few, path
    full = [logit_memory.peak("plain", 512, v, full=True) for v in (1_024, 8_192)]
    assert full[1] > 7 * full[0]


def test_recorded_transcripts_are_ragged_dialogues_of_whole_groups() -> None:
    episodes = read_transcripts()
    lengths = [len(t.segments[0]) for t in episodes]
    assert all(len(t.segments) == 1 for t in episodes) and len(set(lengths)) > len(lengths) / 2
    for episode in episodes:
        episode.validate()
    for case in CASES.values():
        chosen = choose(episodes, case)
        assert [len(g) for g in chosen] == [case.members] * case.groups
        assert all(0 < sum(t.reward for t in g) < len(g) for g in chosen)

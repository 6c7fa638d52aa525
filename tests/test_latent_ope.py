"""Off-policy evaluation against exact values, and the augmentation's choice of states."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from maieutic.latent.augment import augmented, report, select
from maieutic.latent.errors import LatentDataError
from maieutic.latent.fit import FitSpec, fit
from maieutic.latent.ope import FqeSpec, fqe, scorer, wis
from maieutic.latent.policy import RandomPolicy, RulePolicy
from maieutic.latent.transitions import split_by_problem
from maieutic.latent.world import FITTING, MOODS, MOVES, World, poor_policy

WORLD = World(steps=2, limit=8)
FIT_RULE = RulePolicy(WORLD.feature_names, MOVES, {m: FITTING[m] for m in MOODS if m != "calm"}, "ask")
UNIFORM = np.full((WORLD.n_states, 4), 0.25)


def d(n: int, seed: int):
    return WORLD.roll(poor_policy(WORLD, instruct=0.4), n, np.random.default_rng(seed))[0]


def test_fqe_and_wis_of_the_optimal_policy() -> None:
    data, truth = d(600, 0), WORLD.value_of(WORLD.optimal)
    by_fqe = fqe(data, FIT_RULE, FqeSpec(bootstrap=40))
    assert by_fqe.low < truth < by_fqe.high and abs(by_fqe.value - truth) < 0.15
    behaviour, _ = fit("bc", data, FitSpec(hidden=(16,), steps=200))
    by_wis = wis(data, RandomPolicy(4), behaviour)
    assert by_wis.low < WORLD.value_of(UNIFORM) < by_wis.high
    assert 20 < by_wis.effective < 600


def test_fqe_of_the_behaviour_itself_is_the_mean_return() -> None:
    data = WORLD.roll(UNIFORM, 800, np.random.default_rng(1))[0]
    assert fqe(data, RandomPolicy(4), FqeSpec(bootstrap=0)).value == pytest.approx(
        data.returns().mean(), abs=0.06
    )


def coverage(runs: int, episodes: int) -> tuple[int, list[float]]:
    truth, hits, widths = WORLD.value_of(WORLD.optimal), 0, []
    for seed in range(runs):
        e = fqe(d(episodes, 1000 + seed), FIT_RULE, FqeSpec(bootstrap=60, seed=seed))
        hits += e.low <= truth <= e.high
        widths.append(e.high - e.low)
    return hits, widths


@pytest.mark.slow
def test_fqe_intervals_cover_the_truth_in_nine_of_ten_runs() -> None:
    hits, widths = coverage(50, 500)
    print(f"FQE: {hits} of 50 intervals cover the exact value; mean width {np.mean(widths):.3f}")
    assert hits >= 45
    assert np.mean(widths) < 0.5, "an interval that covers everything says nothing"


def test_wis_without_any_overlap_claims_nothing() -> None:
    data = d(100, 0)
    data = data.select(data.turns >= 0)
    behaviour, _ = fit("bc", data, FitSpec(hidden=(8,), steps=50))
    data.moves[data.moves == 2] = 1
    only_refocus = RulePolicy(WORLD.feature_names, MOVES, {}, "refocus")
    e = wis(data, only_refocus, behaviour)
    assert (e.effective, e.low, e.high) == (0.0, -1.0, 1.0)


def test_estimates_need_first_turns() -> None:
    data = d(40, 0)
    late = replace(data, turns=data.turns + 1)
    with pytest.raises(LatentDataError, match="begins at turn 0"):
        fqe(late, FIT_RULE, FqeSpec(bootstrap=0))


def test_the_scorer_ranks_a_good_policy_over_a_bad_one() -> None:
    score = scorer(d(400, 3))
    assert score(FIT_RULE) > score(RandomPolicy(4)) + 0.3


def test_problem_clusters_give_other_intervals_than_episodes() -> None:
    data = d(200, 5)
    one = fqe(data, FIT_RULE, FqeSpec(bootstrap=30))
    two = fqe(data, FIT_RULE, FqeSpec(bootstrap=30, cluster="problem"))
    assert one.value == pytest.approx(two.value, abs=1e-9) and (one.low, one.high) != (two.low, two.high)


# ------------------------------------------------------------------------------------------------------- augmentation


@pytest.fixture(scope="module")
def fitted():
    data = d(200, 7)
    return data, fit("fqi", data, FitSpec(hidden=(32, 32), steps=400))[0]


def test_optimistic_branches_differ_from_the_log_and_lead_by_gain(fitted) -> None:
    data, q = fitted
    values = q.scores(torch.from_numpy(data.states)).numpy()
    branches = select(data, q, 50, spread="none")
    assert [b.gain for b in branches] == sorted((b.gain for b in branches), reverse=True)
    for b in branches:
        assert b.logged == data.moves[b.row] != b.move == values[b.row].argmax()
        assert b.gain == pytest.approx(values[b.row].max() - values[b.row, b.logged], abs=1e-6)
        assert (b.episode, b.turn) == (data.episodes[b.row], data.turns[b.row])
    differs = values.argmax(1) != data.moves
    gains = values.max(1) - values[np.arange(len(data)), data.moves]
    assert branches[-1].gain == pytest.approx(np.sort(gains[differs])[-50], abs=1e-6)


def test_spreading_reaches_the_first_turns_that_plain_ranking_leaves_out(fitted) -> None:
    data, q = fitted
    plain = [b.turn for b in select(data, q, 100, spread="none")]
    spread = [b.turn for b in select(data, q, 100, spread="turn")]
    assert plain.count(0) < spread.count(0)
    values = q.scores(torch.from_numpy(data.states)).numpy()
    differs = values.argmax(1) != data.moves
    share = (data.turns[differs] == 0).mean()
    assert spread.count(0) == pytest.approx(100 * share, abs=2)


def test_controls_have_the_same_budget(fitted) -> None:
    data, q = fitted
    best = q.scores(torch.from_numpy(data.states)).argmax(1).numpy()
    chosen = {b.row for b in select(data, q, 60)}
    moves = select(data, q, 60, how="random_move")
    assert {b.row for b in moves} == chosen and all(b.move != b.logged for b in moves)
    assert any(b.move != best[b.row] for b in moves)
    states = select(data, q, 60, how="random_state")
    assert len(states) == 60 and all(b.move == best[b.row] for b in states)
    assert {b.row for b in states} != chosen


def test_rows_that_were_tried_are_left_out(fitted) -> None:
    data, q = fitted
    first = {b.row for b in select(data, q, 60)}
    for how in ("optimistic", "random_state", "random_move"):
        assert first.isdisjoint(b.row for b in select(data, q, 60, how=how, tried=first))


def test_a_limit_by_dialogue(fitted) -> None:
    data, q = fitted
    episodes = [b.episode for b in select(data, q, 80, per_episode=1)]
    assert len(set(episodes)) == len(episodes)


def test_no_disagreement_is_an_error_and_so_is_a_cloned_policy(fitted) -> None:
    data, q = fitted
    agreed = data.select(np.arange(len(data)))
    agreed.moves[:] = q.greedy(torch.from_numpy(data.states)).numpy()
    with pytest.raises(LatentDataError, match="nothing to explore"):
        select(agreed, q, 5)
    bc, _ = fit("bc", data, FitSpec(hidden=(4,), steps=2))
    with pytest.raises(ValueError, match="needs a Q-function"):
        select(data, bc, 5)


def test_report_counts_what_was_added(fitted) -> None:
    data, q = fitted
    branches = select(data, q, 10)
    new, _ = WORLD.roll(WORLD.optimal, 30, np.random.default_rng(0), prefix="n")
    summary = report("optimistic", data, branches, new, {f"n{i}": i // 3 for i in range(30)})
    assert (summary.states, summary.episodes, summary.rows) == (10, 30, len(new))
    ends = np.append(new.starts()[1:], len(new)) - 1
    assert summary.success_share == pytest.approx((new.rewards[ends] > 0).mean())
    assert summary.mean_gain == pytest.approx(np.mean([b.gain for b in branches]))
    joined = augmented(data, new)
    assert len(joined) == len(data) + len(new) and joined.n_episodes == 230
    with pytest.raises(LatentDataError, match="occurs in two places"):
        augmented(joined, new)


def test_splits_share_no_problem() -> None:
    train, validation = split_by_problem(d(100, 0), 0.3, 0)
    assert set(train.problems).isdisjoint(validation.problems)
    assert len(set(validation.problems)) == 3 and len(train) + len(validation) == len(d(100, 0))
    assert math.isclose(train.returns().shape[0] + validation.returns().shape[0], 100)

"""Advantages and losses against formulas written down a second time, and at the edges of floating point."""

from __future__ import annotations

import math

import pytest
import torch

from maieutic.algorithms.advantages import group_advantages
from maieutic.algorithms.base import TokenLoss, k3
from maieutic.algorithms.dppo import DPPO, binary_kl, log1mexp
from maieutic.algorithms.grpo import GRPO
from maieutic.algorithms.registry import get_loss
from maieutic.errors import RecipeError, RewardError


def random_tokens(n: int = 400, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log π (a leaf), log μ, A: moves of both signs, small and large, for advantages of both signs and zero."""
    g = torch.Generator().manual_seed(seed)
    mu = torch.rand(n, generator=g).clamp(1e-4, 1 - 1e-4)
    pi = (mu + 0.25 * torch.randn(n, generator=g)).clamp(1e-4, 1 - 1e-4)
    adv = torch.randn(n, generator=g)
    adv[::17] = 0.0
    return pi.log().requires_grad_(), mu.log(), adv


# --- advantages


def test_advantages_are_rewards_minus_the_mean_of_the_valid_ones_of_the_group() -> None:
    rewards = [1.0, 4.0, 0.0, float("nan"), 2.0, 6.0]
    result = group_advantages(rewards, ["b", "a", "b", "a", "b", "a"], [True, True, True, False, True, True])
    assert result.advantages_N.tolist() == [0.0, -1.0, -1.0, 0.0, 1.0, 1.0]
    assert (result.groups, result.flat_groups, result.flat_share) == (2, 0, 0.0)


def test_std_divides_by_the_sample_deviation() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.25])
    result = group_advantages(rewards, [7, 7, 7, 7], [True] * 4, scale="std")
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(result.advantages_N, expected)


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.2, 0.7 * 0.1, 1e6 / 7])
@pytest.mark.parametrize("size", [3, 6, 7, 8])
def test_equal_rewards_give_exactly_zero(scale: str, value: float, size: int) -> None:
    result = group_advantages([value] * size, ["g"] * size, [True] * size, scale=scale)  # type: ignore[arg-type]
    assert result.advantages_N.tolist() == [0.0] * size
    assert result.flat_groups == 1


def test_float_residue_is_not_signal() -> None:
    # 0.1 + 0.2 != 0.3: the deviation of this group would be ~1e-17, and dividing by it would make ±1 of nothing.
    result = group_advantages([0.1 + 0.2, 0.3, 0.3], ["g"] * 3, [True] * 3, scale="std")
    assert result.advantages_N.tolist() == [0.0, 0.0, 0.0]


def test_lone_and_lost_episodes_get_zero() -> None:
    result = group_advantages(
        [5.0, 9.0, float("inf"), 1.0], ["one", "one", "none", "lone"], [True, False, False, True]
    )
    assert result.advantages_N.tolist() == [0.0] * 4
    # "none" has no valid episode: it is no group at all.
    assert (result.groups, result.flat_groups, result.flat_share) == (2, 2, 1.0)
    assert group_advantages([], [], []).flat_share == 0.0


def test_bad_rewards_are_named() -> None:
    with pytest.raises(RewardError, match=r"\[1\].*'g'"):
        group_advantages([0.0, float("nan")], ["g", "g"], [True, True])
    with pytest.raises(RewardError, match="2 rewards, 1 group ids and 2 valid"):
        group_advantages([0.0, 1.0], ["g"], [True, True])


# --- GRPO


def test_grpo_value_and_gradient() -> None:
    logp, mu, adv = random_tokens()
    result = GRPO(clip_low=0.2, clip_high=0.3)(logp, mu, adv)
    result.loss_T.sum().backward()
    value, grad = [], []
    for p, m, a in zip(logp.tolist(), mu.tolist(), adv.tolist(), strict=True):
        r = math.exp(p - m)
        clipped = min(max(r, 0.8), 1.3)
        value.append(-min(r * a, clipped * a))
        grad.append(-a * r if r * a <= clipped * a else 0.0)
    torch.testing.assert_close(result.loss_T.detach(), torch.tensor(value))
    torch.testing.assert_close(logp.grad, torch.tensor(grad))
    kept = result.metrics["kept"].bool()
    moved = adv != 0
    assert torch.equal(kept[moved], (logp.grad != 0)[moved])
    assert result.metrics["clipped_low"].sum() > 10
    assert result.metrics["clipped_high"].sum() > 10


# --- DPPO


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dppo_matches_a_reference_in_plain_python(divergence: str, seed: int) -> None:
    logp, mu, adv = random_tokens(seed=seed)
    result = get_loss("dppo", divergence=divergence)(logp, mu, adv)
    result.loss_T.sum().backward()
    kept, value, grad = [], [], []
    for lp, lm, a in zip(logp.tolist(), mu.tolist(), adv.tolist(), strict=True):
        p, m = math.exp(lp), math.exp(lm)
        if divergence == "tv":
            keep = p - m <= 0.10 if a > 0 else p - m >= -0.10
        else:
            kl = m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p))
            keep = kl <= 0.05 or (p < m if a > 0 else p > m)
        weight = a * min(p / m, 10.0)
        kept.append(keep)
        value.append(-weight * lp if keep else 0.0)
        grad.append(-weight if keep else 0.0)
    assert result.metrics["kept"].bool().tolist() == kept
    torch.testing.assert_close(result.loss_T.detach(), torch.tensor(value), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor(grad), rtol=1e-5, atol=1e-6)
    # The mask fired on both sides, and the cap was in play.
    assert result.metrics["clipped_low"].sum() > 20
    assert result.metrics["clipped_high"].sum() > 20
    assert (result.metrics["ratio"] > 10).any()


def test_dppo_keeps_what_moves_back_and_drops_what_moves_on() -> None:
    pi, mu = torch.tensor([0.9, 0.9, 0.2, 0.2]).log(), torch.tensor([0.5, 0.5, 0.6, 0.6]).log()
    adv = torch.tensor([1.0, -1.0, 1.0, -1.0])
    for divergence in ("tv", "kl"):
        assert get_loss("dppo", divergence=divergence)(pi, mu, adv).metrics["kept"].tolist() == [0, 1, 1, 0]


def test_binary_kl_is_finite_and_right_at_the_ends() -> None:
    tiny = -(2.0**-24)
    cases = torch.tensor([0.0, tiny, -1e-5, -1e-3, -0.5, -5.0, -80.0, -1000.0])
    kl = binary_kl(cases[:, None], cases[None, :])
    assert kl.isfinite().all()
    assert (kl >= 0).all()
    assert kl.diagonal().tolist() == [0.0] * len(cases)
    p, q = math.exp(-1e-3), math.exp(-5.0)
    exact = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert kl[3, 5].item() == pytest.approx(exact, rel=1e-4)
    assert log1mexp(torch.tensor(-1e-6)).item() == pytest.approx(math.log(1e-6), rel=1e-5)


@pytest.mark.parametrize("loss", [GRPO(kl_beta=0.1), DPPO("tv", kl_beta=0.1), DPPO("kl", kl_beta=0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_log_probs_stay_finite_in_any_precision(loss: GRPO | DPPO, dtype: torch.dtype) -> None:
    ends = torch.tensor([0.0, -1e-3, -1e-8, -5.0, -300.0], dtype=dtype)
    logp = ends.repeat_interleave(5).clone().requires_grad_()
    mu = ends.repeat(5)
    for adv in (torch.ones(25), -torch.ones(25), torch.zeros(25)):
        result = loss(logp, mu, adv, mu)
        assert result.loss_T.dtype == torch.float32
        assert result.loss_T.isfinite().all()
        (grad,) = torch.autograd.grad(result.loss_T.sum(), logp)
        assert grad.isfinite().all()
        assert all(value.isfinite().all() for value in result.metrics.values())


# --- both


@pytest.mark.parametrize("name", ["grpo", "dppo"])
def test_reference_kl_is_k3_of_policy_against_reference(name: str) -> None:
    logp, mu, adv = random_tokens()
    ref = mu - 0.3
    plain = get_loss(name)(logp, mu, adv)
    result = get_loss(name, kl_beta=0.5)(logp, mu, adv, ref)
    d = ref - logp.detach()
    torch.testing.assert_close(
        result.loss_T.detach() - plain.loss_T.detach(), 0.5 * (d.exp() - d - 1), rtol=1e-4, atol=1e-5
    )
    (with_kl,) = torch.autograd.grad(result.loss_T.sum(), logp)
    (without,) = torch.autograd.grad(plain.loss_T.sum(), logp)
    torch.testing.assert_close(with_kl - without, 0.5 * (1 - d.exp()), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="needs reference log-probs"):
        get_loss(name, kl_beta=0.5)(logp, mu, adv)


@pytest.mark.parametrize("name", ["grpo", "dppo"])
def test_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    _, mu, adv = random_tokens()
    logp = mu.clone().requires_grad_()
    result = get_loss(name)(logp, mu, adv)
    result.loss_T.sum().backward()
    torch.testing.assert_close(logp.grad, -adv)
    assert result.metrics["kl_mu_pi"].abs().max() == 0
    assert result.metrics["kept"].min() == 1


def test_k3_estimates_kl() -> None:
    g = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    x = torch.multinomial(p, 200_000, replacement=True, generator=g)
    kl = (p * (p / q).log()).sum()
    assert k3((q / p).log()[x]).mean().item() == pytest.approx(kl.item(), rel=0.02)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        GRPO()(torch.zeros(3), torch.zeros(2), torch.zeros(3))


def make_custom(sign: float) -> object:
    """A user's factory."""
    return lambda logp, mu, adv, ref=None: TokenLoss(sign * logp, {})


def test_registry() -> None:
    assert get_loss("grpo", clip_high=0.28) == GRPO(clip_high=0.28)
    assert get_loss("dppo", divergence="kl") == DPPO("kl")
    assert (DPPO().threshold, DPPO("kl").threshold, DPPO(delta=0.15).threshold) == (0.10, 0.05, 0.15)
    custom = get_loss(f"{__name__}:make_custom", sign=-1.0)
    assert custom(torch.ones(2), torch.ones(2), torch.ones(2)).loss_T.tolist() == [-1.0, -1.0]
    with pytest.raises(RecipeError, match="did you mean 'dppo'"):
        get_loss("dpo")
    with pytest.raises(RecipeError, match="clip"):
        get_loss("dppo", clip=0.1)
    with pytest.raises(RecipeError, match="no_such_module"):
        get_loss("no_such_module:f")
    with pytest.raises(RecipeError, match="clip_low"):
        get_loss("grpo", clip_low=-1.0)

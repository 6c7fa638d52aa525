"""Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2; Eduardo, arXiv 2610.06446, without the scale)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from maieutic.errors import RewardError

# Rewards of one group that differ by less are equal: the difference is float residue of averaging, not signal, and
# dividing by the group's deviation would blow it up to the size of a real one.
TIE = 1e-6
# TRL's constant, so that `scale="std"` gives the numbers that users of other trainers know.
STD_EPS = 1e-4


@dataclass(frozen=True)
class GroupAdvantages:
    """``advantages_N`` fp32; the counts are over groups with at least one valid episode."""

    advantages_N: Tensor
    groups: int
    flat_groups: int
    """Groups whose valid rewards are all equal (single ones among them): they train nothing."""

    @property
    def flat_share(self) -> float:
        """Share of groups without variance; 0.0 when there is no group."""
        return self.flat_groups / self.groups if self.groups else 0.0


def group_advantages(
    rewards_N: Tensor | Sequence[float],
    group_ids_N: Sequence[str | int],
    valid_N: Tensor | Sequence[bool],
    scale: Literal["none", "std"] = "none",
) -> GroupAdvantages:
    """A_i = r_i − mean of the valid rewards of its group; ``std`` also divides by (their sample deviation + 1e-4).

    A group whose valid rewards are equal (within 1e-6), or that has one valid episode, gets exactly zero; so do invalid
    episodes, whose reward may be NaN and counts in no mean. Arithmetic is in fp64. Groups may come in any order.

    Raises :class:`~maieutic.errors.RewardError` when lengths differ or a valid reward is not finite.
    """
    rewards = torch.as_tensor(rewards_N, dtype=torch.float64).cpu()
    valid = torch.as_tensor(valid_N, dtype=torch.bool).cpu()
    if not len(rewards) == len(group_ids_N) == len(valid):
        raise RewardError(
            f"{len(rewards)} rewards, {len(group_ids_N)} group ids and {len(valid)} valid flags: one of each an episode"
        )
    if scale not in ("none", "std"):
        raise ValueError(f"scale is 'none' or 'std', not {scale!r}")
    bad = (valid & ~rewards.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"rewards of episodes {bad} (groups {[group_ids_N[i] for i in bad]}) are not finite; an episode without "
            "a reward must be marked as excluded"
        )
    index: dict[str | int, int] = {}
    group = torch.tensor([index.setdefault(g, len(index)) for g in group_ids_N], dtype=torch.int64)

    rewards = torch.where(valid, rewards, 0.0)
    zeros = torch.zeros(len(index), dtype=torch.float64)
    count = zeros.index_add(0, group, valid.double())
    mean = zeros.index_add(0, group, rewards) / count.clamp(min=1)
    centred = torch.where(valid, rewards - mean[group], 0.0)
    # The spread decides, not the deviation: equal rewards leave a residue in a float mean.
    low = zeros.scatter_reduce(0, group, torch.where(valid, rewards, torch.inf), "amin", include_self=False)
    high = zeros.scatter_reduce(0, group, torch.where(valid, rewards, -torch.inf), "amax", include_self=False)
    flat = high - low <= TIE
    if scale == "std":
        variance = zeros.index_add(0, group, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPS)[group]
    present = count > 0
    return GroupAdvantages(
        advantages_N=torch.where(flat[group] | ~valid, 0.0, centred).float(),
        groups=int(present.sum()),
        flat_groups=int((present & flat).sum()),
    )

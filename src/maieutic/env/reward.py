r"""The reward of an episode, as a pure function that returns all its terms.

With pre the student's cold solve rate of the tested problem and post the rate after the dialogue::

    Δ = (post − pre) / (1 − pre)   if post > pre,   else   post − pre            (−pre ≤ Δ ≤ 1)

    gates: hard, a gate rejects   R = −gate_penalty
    otherwise, Δ > 0              R = Δ · d_visible · d_thinking + eoc_bonus·[ended by token] + think_reward·(well-formed share)
    otherwise                     R = Δ + think_reward·(well-formed share)
    gates: soft, a gate rejects   soft_penalty is subtracted from the above

The decay d is a token-weighted mean over the tutor's turns, d = Σ tᵢdᵢ / Σ tᵢ, with dᵢ = 1 / (1 + ((tᵢ − T0)/T0)²) for
tᵢ > T0 and 1 otherwise; T0 is the visible or the thinking budget of a turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from maieutic.config import EnvSpec, RewardSpec
from maieutic.dialogue import Turn
from maieutic.env.base import Episode, RewardBreakdown
from maieutic.env.imports import load_object
from maieutic.errors import RewardError, RunInterrupted, RunStop

RewardFn = Callable[[Episode, RewardSpec], RewardBreakdown]
"""A user's own reward: raises, or returns a breakdown whose ``reward`` is finite."""


def normalised_gain(pre: float, post: float) -> float:
    """Δ: the share of the headroom that was won, or the plain loss. Both rates in [0, 1]; −pre ≤ Δ ≤ 1.

    At pre = 1 there is no headroom: Δ = post − 1.
    """
    for name, rate in (("pre", pre), ("post", post)):
        if not 0 <= rate <= 1:
            raise RewardError(f"{name} is {rate}: a solve rate lies in [0, 1]")
    return (post - pre) / (1 - pre) if post > pre else post - pre


def decay(tokens: Sequence[int], budget: int) -> float:
    """d in (0, 1]: 1 when no turn is over the budget T0, when there are no tokens, or when the budget is 0 (not rationed)."""
    total = sum(tokens)
    if total == 0 or budget == 0:
        return 1.0
    return sum(t / (1 + ((t - budget) / budget) ** 2) if t > budget else t for t in tokens) / total


def learning_gain(
    spec: RewardSpec,
    *,
    gates: Literal["hard", "soft", "off"],
    rejected: bool,
    pre: float,
    post: float | None,
    tutor_turns: Sequence[Turn],
    visible_budget: int,
    thinking_budget: int,
    ended_by_token: bool,
) -> RewardBreakdown:
    """The published reward (formula in the module's docstring).

    ``rejected``: at least one gate rejects. ``post`` may be None only where the gates skip the post-test (``hard`` and
    rejected). ``penalty`` of the result is what was subtracted, ``eoc_bonus`` and ``think_reward`` what was added.
    """
    d_visible = decay([t.visible_tokens for t in tutor_turns], visible_budget)
    d_thinking = decay([t.thinking_tokens for t in tutor_turns], thinking_budget)
    gain = None if post is None else normalised_gain(pre, post)
    if rejected and gates == "hard":
        return RewardBreakdown(
            reward=-spec.gate_penalty,
            gated=True,
            pre=pre,
            post=post,
            gain=gain,
            decay_visible=d_visible,
            decay_thinking=d_thinking,
            penalty=spec.gate_penalty,
        )
    if gain is None:
        raise RewardError("an episode that is not gated has no post-test rate: no gain can be computed")
    share = sum(t.well_formed for t in tutor_turns) / len(tutor_turns) if tutor_turns else 0.0
    think = spec.think_reward * share
    bonus = spec.eoc_bonus if gain > 0 and ended_by_token else 0.0
    penalty = spec.soft_penalty if rejected and gates == "soft" else 0.0
    base = gain * d_visible * d_thinking if gain > 0 else gain
    return RewardBreakdown(
        reward=base + bonus + think - penalty,
        gated=False,
        pre=pre,
        post=post,
        gain=gain,
        decay_visible=d_visible,
        decay_thinking=d_thinking,
        eoc_bonus=bonus,
        think_reward=think,
        penalty=penalty,
        extra={"well_formed_share": share},
    )


def compute_reward(episode: Episode, env: EnvSpec, spec: RewardSpec) -> RewardBreakdown:
    """The reward of a finished episode: ``learning_gain``, or the function that ``spec.kind`` names.

    Raises :class:`RewardError` when a user's function raises, does not return a breakdown, or the reward is not finite.
    """
    if spec.kind != "learning_gain":
        return _own_reward(episode, spec)
    if episode.pre is None:
        raise RewardError(f"episode {episode.id} has no solve rate `pre`")
    result = learning_gain(
        spec,
        gates=env.gates,
        rejected=any(v.decision == "reject" for v in episode.verdicts.values()),
        pre=episode.pre,
        post=episode.post_test.rate if episode.post_test is not None else None,
        tutor_turns=episode.dialogue.by("tutor"),
        visible_budget=env.visible_budget,
        thinking_budget=env.thinking_budget,
        ended_by_token=episode.dialogue.end == "end_token",
    )
    return _finite(result, episode, "learning_gain")


def _own_reward(episode: Episode, spec: RewardSpec) -> RewardBreakdown:
    function: RewardFn = load_object(spec.kind, "reward.kind")
    try:
        result = function(episode, spec)
    except (RunStop, RunInterrupted):
        raise
    except Exception as error:
        raise RewardError(
            f"reward {spec.kind} raised {type(error).__name__} on episode {episode.id}: {error}"
        ) from error
    if not isinstance(result, RewardBreakdown):
        raise RewardError(
            f"reward {spec.kind} returned {type(result).__name__} on episode {episode.id}: a RewardBreakdown is expected"
        )
    return _finite(result, episode, spec.kind)


def _finite(result: RewardBreakdown, episode: Episode, name: str) -> RewardBreakdown:
    value = result.reward
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(f"reward {name} of episode {episode.id} is {value!r}: a finite number is expected")
    return result

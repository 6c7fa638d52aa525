"""The token record of an episode for training (torch-free)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from maieutic.errors import TrajectoryError

# A log-prob this far above 0 is rounding of the sampler's arithmetic, not an error.
_ROUNDING = 1e-4


@dataclass(slots=True)
class Segment:
    """An append-only token sequence of length L, as sampled and as trained.

    ``mask[i]``: token i was sampled by the policy. ``logprobs[i]``: its log μ under the distribution that it was sampled
    from (temperature applied), 0.0 where ``mask`` is False.
    """

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    policy_version: int = 0

    @property
    def n_trained(self) -> int:
        """Number of sampled tokens."""
        return sum(self.mask)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class Trajectory:
    """One or more segments of one episode, with what turns them into a loss.

    ``temperature``: of the sampling; log π is computed with the same one. ``reward`` is NaN where ``excluded``.
    """

    episode_id: str
    group_id: str | int
    segments: list[Segment]
    reward: float
    temperature: float
    excluded: bool = False

    @property
    def n_trained(self) -> int:
        """Tokens that count in the loss's denominator: all sampled ones, none of an excluded episode."""
        return 0 if self.excluded else sum(s.n_trained for s in self.segments)

    @property
    def n_tokens(self) -> int:
        """All tokens of all segments."""
        return sum(len(s) for s in self.segments)

    def validate(self, n_sampled: int | None = None) -> None:
        """Raise :class:`~maieutic.errors.TrajectoryError` unless ids, mask and log-probs belong together.

        ``n_sampled``: number of tokens that the engine reports to have sampled, to be compared with the masks.
        """
        if not self.temperature > 0:
            self._fail(f"temperature {self.temperature}: log-probs of greedy decoding cannot be trained on")
        if not self.excluded and not math.isfinite(self.reward):
            self._fail(f"reward {self.reward} of an episode that is not excluded")
        for number, segment in enumerate(self.segments):
            self._validate_segment(number, segment)
        total = sum(s.n_trained for s in self.segments)
        if n_sampled is not None and total != n_sampled:
            self._fail(f"the masks mark {total} tokens as sampled, the engine sampled {n_sampled}")

    def _validate_segment(self, number: int, segment: Segment) -> None:
        where = f"segment {number}"
        lengths = (len(segment.ids), len(segment.mask), len(segment.logprobs))
        if len(set(lengths)) != 1:
            self._fail(f"{where} has {lengths[0]} ids, {lengths[1]} mask entries and {lengths[2]} log-probs")
        if segment.mask and segment.mask[0]:
            self._fail(f"{where} begins with a sampled token: nothing precedes it that could predict it")
        for i, (token, sampled, logprob) in enumerate(
            zip(segment.ids, segment.mask, segment.logprobs, strict=True)
        ):
            if token < 0:
                self._fail(f"{where}, token {i}: id {token} is negative")
            if sampled and not (math.isfinite(logprob) and logprob <= _ROUNDING):
                self._fail(f"{where}, token {i}: {logprob} is not the log of a probability")
            if not sampled and logprob != 0.0:
                self._fail(
                    f"{where}, token {i}: log-prob {logprob} of a token that was not sampled (must be 0.0)"
                )

    def _fail(self, what: str) -> None:
        raise TrajectoryError(f"trajectory of episode {self.episode_id!r} (group {self.group_id!r}): {what}")

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; masks as 0/1. Floats survive exactly (shortest round-trip notation); NaN reward as None."""
        return {
            "episode_id": self.episode_id,
            "group_id": self.group_id,
            "reward": self.reward if math.isfinite(self.reward) else None,
            "temperature": self.temperature,
            "excluded": self.excluded,
            "segments": [
                {
                    "ids": list(s.ids),
                    "mask": [int(m) for m in s.mask],
                    "logprobs": list(s.logprobs),
                    "policy_version": s.policy_version,
                }
                for s in self.segments
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trajectory:
        """Inverse of :meth:`to_json`; TrajectoryError names a field that is missing."""
        try:
            return cls(
                episode_id=data["episode_id"],
                group_id=data["group_id"],
                reward=math.nan if data["reward"] is None else data["reward"],
                temperature=data["temperature"],
                excluded=data["excluded"],
                segments=[
                    Segment(s["ids"], [bool(m) for m in s["mask"]], s["logprobs"], s["policy_version"])
                    for s in data["segments"]
                ],
            )
        except KeyError as error:
            raise TrajectoryError(
                f"trajectory record of episode {data.get('episode_id')!r} has no field {error}"
            ) from error


def count_trained(trajectories: Iterable[Trajectory]) -> int:
    """Denominator of the token-mean: trained tokens of all episodes that are not excluded."""
    return sum(t.n_trained for t in trajectories)

"""From the episodes of a rollout to what is trained: token records by group, of weights that are recent enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from maieutic.errors import EngineMismatchError, TrajectoryError
from maieutic.rollout import RolloutResult
from maieutic.training.trajectory import Trajectory


def training_groups(result: RolloutResult, policy_version: int, staleness: int = 0) -> list[list[Trajectory]]:
    """The token records of a rollout by group, with the reward and exclusion of their episodes (set in the episodes too).

    ``staleness``: by how many versions the weights that sampled them may be older than ``policy_version``.

    Raises :class:`~maieutic.errors.TrajectoryError` for a counted episode without a record (a tutor that is no policy), and
    :class:`~maieutic.errors.EngineMismatchError` for tokens that other weights sampled.
    """
    groups = []
    for episodes in result.groups:
        group = []
        for episode in episodes:
            record = episode.trajectory
            if record is None:
                if episode.counted:
                    raise TrajectoryError(
                        f"episode {episode.id} has a reward but no token record: only a policy tutor can be trained"
                    )
                continue
            versions = _versions([record])
            if (
                versions
                and not policy_version - staleness <= min(versions) <= max(versions) <= policy_version
            ):
                allowed = f" (training.staleness: {staleness})" if staleness else ""
                raise EngineMismatchError(
                    f"episode {episode.id} was sampled by policy version {sorted(versions)}, the policy is at "
                    f"{policy_version}{allowed}"
                )
            reward = episode.reward.reward if episode.counted and episode.reward else float("nan")
            trajectory = replace(
                record,
                episode_id=episode.id,
                group_id=episode.group_id,
                reward=reward,
                excluded=not episode.counted,
            )
            trajectory.validate()
            episode.trajectory = trajectory
            group.append(trajectory)
        groups.append(group)
    return groups


def staleness_of(groups: Sequence[Sequence[Trajectory]], policy_version: int) -> int:
    """How many versions older than the policy the oldest weights are that sampled a trained token (0 where there is none)."""
    versions = _versions([t for group in groups for t in group])
    return policy_version - min(versions) if versions else 0


def _versions(records: Sequence[Trajectory]) -> set[int]:
    return {s.policy_version for record in records for s in record.segments if s.n_trained}

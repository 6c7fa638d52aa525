"""Named errors. Each says what went wrong, where, and what to do; the exit code is what a launcher sees."""

from __future__ import annotations


class MaieuticError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code: int = 1


class RecipeError(MaieuticError):
    """A recipe that cannot be used: names the file, the key, the value and, where there is one, the nearest valid name."""

    exit_code = 2


class MissingExtraError(MaieuticError):
    """An optional dependency is absent; the message names the extra that brings it."""

    exit_code = 2

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed: it comes with the '{extra}' extra (pip install 'maieutic[{extra}]')"
        )


class ProblemDataError(MaieuticError):
    """Problem pairs that cannot be read or used: names the file, the row and the column."""

    exit_code = 2


class AbsentDataError(ProblemDataError):
    """A data set that cannot be had: not on this machine while offline, or not on the Hub."""


class SolveRateError(ProblemDataError):
    """A solve rate is absent or was measured for another student, prompt or sampling (see ``maieutic data measure``)."""


class ModelError(MaieuticError):
    """A model or tokenizer that cannot be found or used as asked."""

    exit_code = 2


class TemplateError(ModelError):
    """A chat template that cannot be rendered append-only."""


class EngineError(MaieuticError):
    """An engine could not turn a prompt into tokens (after its own retries)."""


class WeightPushError(EngineError):
    """A server that is up did not take the policy's weights, or not in the time that it was given."""


class EngineMismatchError(EngineError):
    """Engine and trainer disagree on log-probs or on the policy version beyond the stated tolerance."""


class GraderError(MaieuticError):
    """The grading workers cannot be started or do not answer."""


class TrajectoryError(MaieuticError):
    """A token record is inconsistent: ids, mask and log-probs do not belong together."""


class RewardError(MaieuticError):
    """A reward could not be computed, or a user's reward returned something that is not a finite number."""


class NonFiniteLossError(MaieuticError):
    """Loss or gradient is NaN or infinite; raised before the optimizer moves. ``episode_ids``: where it came from."""

    def __init__(self, message: str, episode_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.episode_ids = episode_ids


class ExclusionLimitError(MaieuticError):
    """Too many episodes stayed excluded (lost or unknown) for too many steps."""


class RunFolderError(MaieuticError):
    """The run folder cannot be created or written (permissions, full disk)."""


class TranscriptError(MaieuticError):
    """A transcript line that cannot be read (broken, or of an unknown schema version): names the file and the line."""


class CheckpointError(MaieuticError):
    """A checkpoint is incomplete, unreadable or belongs to another recipe."""


class RunInterrupted(MaieuticError):
    """A signal asked the run to stop; a checkpoint has been written. Exit codes: USR1 85, TERM 143, INT 130."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RunStop(MaieuticError):
    """An error that stops the whole run (with a checkpoint): it is never turned into an excluded episode."""


class SpendingLimitError(RunStop):
    """The recipe's spending limit is reached."""


class EngineDownError(EngineError, RunStop):
    """No server of a role has answered for the stated outage limit."""

"""Named errors of the latent-state tutor."""

from __future__ import annotations

from maieutic.errors import EngineError, MaieuticError


class LatentDataError(MaieuticError):
    """Transitions that cannot be trained on: names the check that failed, where, and what to do."""

    exit_code = 2


class FeatureError(ValueError):
    """A state that cannot be computed: a question without an answer, or a value that is not finite."""


class LabelError(EngineError):
    """A model gave no readable state or move after its bounded retries. A tutor that meets it ends the dialogue as
    ``tutor_failed``; in a data set the episode is dropped and counted."""


class DivergenceError(MaieuticError):
    """A loss, gradient or value estimate is not finite: names the learner, the step and the offending inputs."""

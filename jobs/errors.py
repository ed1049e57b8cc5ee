"""The errors of the reference job; each says what was expected, what was found and what to do."""

from __future__ import annotations

from shiftbook.ledger.errors import ShiftbookError


class JobError(ShiftbookError):
    """Base of every error that the reference job raises."""


class TaskError(JobError):
    """A question, transcript or token does not follow the task's format."""


class EpisodeError(JobError):
    """An episode was asked for a step that its state does not allow."""


class ModelError(JobError):
    """Weights do not fit the declared model."""


class EngineError(JobError):
    """An engine cannot serve what it was asked for."""


class ToolboxError(JobError):
    """A tool call is not valid, or the calculator's child process cannot be run."""


class TrainingError(JobError):
    """A training batch, gradient or optimizer state does not fit the policy."""

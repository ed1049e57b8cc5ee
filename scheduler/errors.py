"""Errors of the scheduler, under the book's one base.

ShiftbookError
└── SchedulerError
    ├── RequestError          a request queue was given a key twice, or asked for one it lacks
    ├── TelemetryError        samples that cannot be turned into a window
    ├── PlanningError         a topology, range or progress that cannot be planned with
    ├── ClusterError          the Ray cluster is not there, or does not answer in time
    ├── SlotBusy              a process of another job holds state on the device
    ├── WorkerError           a worker was asked for what it cannot do as it stands
    ├── WorkerLost            a worker's process ended, or did not answer in time
    │   └── LoopLost          the training loop did
    └── MoveFailed            a step of a move failed; it was or must be rolled back
"""

from __future__ import annotations

from shiftbook.ledger.errors import ShiftbookError


class SchedulerError(ShiftbookError):
    """Base of the scheduler's errors."""


class RequestError(SchedulerError):
    """A request queue was given a key twice, or asked for one that it does not hold."""


class TelemetryError(SchedulerError):
    """Samples that cannot be turned into a window."""


class PlanningError(SchedulerError):
    """A topology, an elastic range or a progress that the planner cannot work with."""


class ClusterError(SchedulerError):
    """The Ray cluster is not there, or does not answer in time."""


class SlotBusy(SchedulerError):
    """A process of another job holds state on the device."""


class WorkerError(SchedulerError):
    """A worker was asked for what it cannot do as it stands."""


class WorkerLost(SchedulerError):
    """A worker's process ended, or did not answer in time."""


class LoopLost(WorkerLost):
    """The training loop's process ended, or did not answer in time; its next attempt goes on."""


class MoveFailed(SchedulerError):
    """A step of a move failed; the move was or must be rolled back."""


def first_line(error: BaseException) -> str:
    """What an error says first, for a record of one line."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__

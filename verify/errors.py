"""The errors of the judge: what kept it from judging, and what to do about it.

ShiftbookError
└── VerifyError
    ├── NothingToJudge      the ledger, or the range asked for, holds no event of a job
    ├── UnreadableStore     the file cannot be opened as a ledger at all
    │   └── OutOfReach          the server does not answer; it may come back
    └── ReplayError         a job could not be run again, or not as asked
        ├── TargetNotFound      no module, attribute or ledger there, or no job
        ├── ReplayFailed        the job itself stopped with an error
        ├── NotRestorable       the job cannot begin at a bundle, or that bundle is not there
        ├── GoldenInvalid       a golden file is missing, edited, torn, newer or of another job
        ├── NothingRecorded     the ledger holds no training record to compare with
        └── NotComparable       a shadow and the live run cannot be held against each other
"""

from __future__ import annotations

from shiftbook.ledger.errors import ShiftbookError


class VerifyError(ShiftbookError):
    """Base of everything that the judge raises on purpose."""


class NothingToJudge(VerifyError):
    """There is no event to judge."""


class UnreadableStore(VerifyError):
    """The file is missing, is no database, or is damaged beyond its table of events."""


class OutOfReach(UnreadableStore):
    """The server that holds the ledger does not answer; it may come back."""


class ReplayError(VerifyError):
    """A job could not be run again, or not under the conditions asked for."""


class TargetNotFound(ReplayError):
    """The target names no module, file, attribute or ledger that is there, or no job."""


class ReplayFailed(ReplayError):
    """The job itself stopped with an error."""


class NotRestorable(ReplayError):
    """The job cannot begin at a bundle, or the bundle is not there any more, or is another."""


class GoldenInvalid(ReplayError):
    """A golden file is missing, edited, torn, of a newer form, or of another job."""


class NothingRecorded(ReplayError):
    """The ledger holds no training record to compare with."""


class NotComparable(ReplayError):
    """What a live run recorded of a window, and what its shadow shows, cannot be compared."""

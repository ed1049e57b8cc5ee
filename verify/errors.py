"""The errors of the judge: what kept it from judging, and what to do about it.

ShiftbookError
└── VerifyError
    ├── NothingToJudge      the ledger, or the range asked for, holds no event of a job
    └── UnreadableStore     the file cannot be opened as a ledger at all
"""

from __future__ import annotations

from shiftbook.ledger.errors import ShiftbookError


class VerifyError(ShiftbookError):
    """Base of everything that the judge raises on purpose."""


class NothingToJudge(VerifyError):
    """There is no event to judge."""


class UnreadableStore(VerifyError):
    """The file is missing, is no database, or is damaged beyond its table of events."""

"""Every error of the book, as a tree.

ShiftbookError                      base; the CLI prints its one line and exits with exit_code
├── LedgerError
│   ├── InvalidURL                  the URL names no store that this build knows
│   ├── NotALedger                  the file or database is something else, or damaged
│   ├── NewerLedger                 written by a newer schema than this build knows
│   ├── LedgerUnreachable           locked, unreachable, read-only or full; nothing was written
│   ├── AppendInDoubt               the commit failed; the events may or may not stand
│   ├── IdempotencyConflict         the key was used before, for other content
│   ├── VersionConflict             the job is not at the version the caller expected
│   ├── InvalidEvent                an event that cannot be written as it is
│   ├── UnknownJob / UnknownPosition / UnknownOperation
│   ├── EvidenceError               a segment is missing, torn or altered
│   │   └── EvidenceOutOfReach      where segments lie cannot be asked; it may come back
│   ├── InvalidKey                  text or file that is no key for signing or verifying
│   ├── InvalidNote                 bytes that are no signed note, or no signed head
│   ├── ProofInvalid                a proof or signature that does not hold
│   ├── NoSignedHead                nothing was signed that could be proved against
│   ├── SigningRefused              the ledger does not continue what was signed before
│   ├── SigningFailed               the signer could not keep its key or what it was to sign
│   ├── PublicationFailed           a signed head did not reach a place outside the database
│   ├── ArchiveError                an archive cannot be written, or is none, torn or altered
│   │   └── ArchiveMismatch         the ledger holds other events than the archive
│   └── SpoolError                  the local spool could not be written or read
├── GateError
│   ├── Rejected                    a rule refused the proposal (rule and reason are named)
│   ├── IllegalStep                 the event may not follow the one before
│   ├── StaleGrant                  the grant's epoch is not the operation's current one
│   ├── StepTimeout                 the step came after its time limit
│   ├── SyncMustWait                a move is past the point where a weight sync may end it
│   ├── TopologyChanged             the topology that a request was made on is not in force
│   ├── DeviceHeld                  another process holds the lock of a device
│   ├── RolledBack                  the operation was undone
│   └── Poisoned                    neither forward nor back was possible
├── RecoverLater                    a mover cannot act now; the move stays open
├── MissingExtra                    an optional dependency is not installed
└── InvalidQuery / InvalidInput     what the user typed cannot be done
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _revive(
    kind: type[ShiftbookError], args: tuple[Any, ...], fields: dict[str, Any]
) -> ShiftbookError:
    """Make an error again from its message and fields, past the constructor of its class."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class ShiftbookError(Exception):
    """Base of all errors: the message says what was expected, what was found and what to do."""

    exit_code = 2

    def __reduce__(
        self,
    ) -> tuple[Callable[..., ShiftbookError], tuple[Any, ...]]:
        # Errors cross process borders (the writer actor), and the default pickling would call
        # the constructors below with the finished message alone.
        return _revive, (type(self), self.args, self.__dict__)


class LedgerError(ShiftbookError):
    """Something about the store or its content."""


class InvalidURL(LedgerError):
    """The ledger URL names no store that this build knows."""


class NotALedger(LedgerError):
    """The file or database is not a ledger, or it is damaged."""


class NewerLedger(LedgerError):
    """The ledger was written by a newer storage schema than this build knows."""


class LedgerUnreachable(LedgerError):
    """The store could not be reached, locked or written in time; nothing was written."""


class AppendInDoubt(LedgerError):
    """The commit failed: the events may stand or not; retry with the same key to settle it."""


class IdempotencyConflict(LedgerError):
    """The idempotency key stands in the ledger already, with other content."""

    def __init__(self, job: str, key: str, stored: str, offered: str, position: int) -> None:
        self.job, self.key, self.position = job, key, position
        self.stored, self.offered = stored, offered
        super().__init__(
            f"key {key!r} of job {job!r} was used at position {position} for {stored}; "
            f"offered now: {offered}. Use a new key for new content."
        )


class VersionConflict(LedgerError):
    """The job moved on since the caller looked."""

    def __init__(self, job: str, expected: int, found: int) -> None:
        self.job, self.expected, self.found = job, expected, found
        super().__init__(
            f"job {job!r}: expected version {expected}, found {found}. "
            "Read the events in between, decide again, and append at the new version."
        )


class InvalidEvent(LedgerError):
    """An event that cannot be written as it is (too large, unknown, an integer too wide)."""


class UnknownJob(LedgerError):
    """No event of that job stands in the ledger."""

    def __init__(self, job: str, known: list[str]) -> None:
        listed = ", ".join(sorted(known)[:8]) or "none"
        super().__init__(f"no job {job!r} in this ledger; jobs here: {listed}")


class UnknownPosition(LedgerError):
    """No event stands at that position."""

    def __init__(self, position: int, size: int) -> None:
        last = f"0 to {size - 1}" if size else "none (the ledger is empty)"
        super().__init__(f"no event at position {position}; positions here: {last}")


class UnknownOperation(LedgerError):
    """No event carries that operation id."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"no operation {operation!r} in this ledger; "
            '`shiftbook sql "select operation from reallocations"` lists them'
        )


class EvidenceError(LedgerError):
    """An evidence segment is missing, torn or altered."""


class EvidenceOutOfReach(EvidenceError):
    """The place of the evidence does not answer, refuses us or does not keep what it is given:
    nothing is known of a segment."""


class InvalidKey(LedgerError):
    """A text or file that is no signing or verifier key of a signed note."""


class InvalidNote(LedgerError):
    """Bytes that are no signed note, or a note whose text is no head of a tree."""


class ProofInvalid(LedgerError):
    """A proof or a signature does not hold."""

    exit_code = 1


class NoSignedHead(LedgerError):
    """No signed head covers what was asked for."""


class SigningRefused(LedgerError):
    """The ledger is no continuation of what was signed before: rolled back, rewritten or forked."""

    exit_code = 1


class SigningFailed(LedgerError):
    """The signer could not keep its key, or what it was about to sign; nothing was signed."""


class PublicationFailed(LedgerError):
    """A signed head did not reach a place outside the database; it is offered again next time."""


class ArchiveError(LedgerError):
    """An archive cannot be written, or the file is none, or it is torn, altered or newer."""


class ArchiveMismatch(ArchiveError):
    """An archive and a ledger are not of one history, or not of one that meets."""


class SpoolError(LedgerError):
    """The local spool could not take a record, or what it holds cannot be read."""


class GateError(ShiftbookError):
    """The gate refused a command."""


class Rejected(GateError):
    """A rule refused a proposal; the rejection stands in the ledger."""

    def __init__(self, operation: str, rule: str, reason: str) -> None:
        self.operation, self.rule, self.reason = operation, rule, reason
        super().__init__(f"{operation} rejected by rule {rule}: {reason}")


class IllegalStep(GateError):
    """The event may not follow what stands in the ledger."""

    def __init__(self, rule: str, expected: str, found: str) -> None:
        self.rule, self.expected, self.found = rule, expected, found
        super().__init__(f"{rule}: expected {expected}, found {found}")


class StaleGrant(GateError):
    """The grant is missing, forged, foreign, expired, or a newer epoch has replaced it."""


class StepTimeout(GateError):
    """The step came after its time limit; roll the operation back, or let recover finish it."""


class SyncMustWait(GateError):
    """A move has quiesced: finish it or roll it back, then begin the weight sync."""

    def __init__(self, operation: str, status: str) -> None:
        self.operation, self.status = operation, status
        super().__init__(
            f"expected no move past quiesced before a weight sync, found {operation} {status}; "
            "finish it or roll it back, then begin the sync"
        )


class TopologyChanged(GateError):
    """What was asked for was made on a topology that is no longer in force."""

    def __init__(self, seen: str, found: str) -> None:
        self.seen, self.found = seen, found
        super().__init__(
            f"expected the topology {found}, which is in force, found a request made on {seen}; "
            "read the topology again and ask anew"
        )


class LossNotDeclared(GateError):
    """A weight sync loses more than the plan declares."""

    def __init__(self, version: int, objection: str) -> None:
        super().__init__(
            f"expected a sync of version {version} as the plan's syncs declare it, found "
            f"{objection}; send it without loss, or amend the plan's syncs before"
        )


class DeviceHeld(GateError):
    """Another process holds the lock of a device, so it may still use it."""


class Poisoned(GateError):
    """Neither finishing nor restoring was possible; the devices are in quarantine."""


class RolledBack(GateError):
    """The operation was undone; the topology before it is in force again."""


class RecoverLater(ShiftbookError):
    """A mover cannot act now, which says nothing about whether it can: the move stays open."""


class MissingExtra(ShiftbookError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, module: str) -> None:
        super().__init__(
            f"this needs {module}, which is not installed; "
            f"install it with: pip install 'shiftbook[{extra}]'"
        )


class InvalidQuery(ShiftbookError):
    """The SQL that was given cannot be run."""


class InvalidInput(ShiftbookError):
    """A value that was given cannot be used."""

"""What holds before an attempt is recorded: what earlier ones left spooled is in the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.evidence import WritablePlace
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.spool import drain_leftovers


def spool_writer(attempt: str) -> str:
    """Name of the writer whose spool holds what an outage kept from an attempt's record."""
    return f"recorder-{attempt}"


def append_leftovers(
    ledger: Ledger, evidence: WritablePlace, spool: Path, attempts: Iterable[str]
) -> None:
    """Append what processes that recorded these attempts left in a folder of spools.

    Raises LedgerUnreachable where some has to wait: the record of a later attempt comes after it.
    """
    writers = {spool_writer(attempt) for attempt in attempts}
    for writer, left in drain_leftovers(ledger.append, spool, evidence, writers=writers).items():
        if left.waiting:
            raise LedgerUnreachable(
                f"expected to append what {writer} left in {spool} before a new attempt, found "
                f"{left.waiting} records that have to wait: {left.cause}; try again when it is back"
            )

"""A job's records, in order, from a thread of their own, so that the training does not wait."""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import time_ns

from shiftbook.ledger.dialect import side_path
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.segment_place import WritablePlace
from shiftbook.ledger.spool import RETRY_S, SpoolingWriter, drain_leftovers
from shiftbook.scheduler.writer import WriterClient

log = logging.getLogger(__name__)

Drafts = Sequence[Draft] | Callable[[], Sequence[Draft]]

Entry = tuple[Drafts, str, int]
"""What is queued: records, their key, and when they were queued."""


class Recording:
    """Appends through the cluster's writer; spools to local disk while it cannot be reached.

    What is written to ``segments`` goes to ``evidence``, or waits beside the spool, and the events
    that name it with it, while that is out of reach.
    """

    def __init__(self, ledger_url: str, job: str, evidence: WritablePlace) -> None:
        """Raises LedgerUnreachable where what ended processes left has to go on waiting: what a
        new attempt records comes after it."""
        self._job = job
        self._client = WriterClient(ledger_url)
        folder = side_path(ledger_url, ".spool")
        folder.mkdir(parents=True, exist_ok=True)
        # What processes that ended left behind comes first.
        for writer, left in drain_leftovers(self._client.append, folder, evidence).items():
            for what in left.rejected:
                log.warning("a record that %s had spooled is not in the ledger: %s", writer, what)
            if left.waiting:
                raise LedgerUnreachable(
                    f"expected to append what {writer} left in {folder} first, found "
                    f"{left.waiting} records that have to wait: {left.cause}"
                )
        self._writer = SpoolingWriter(
            self._client.append, folder, retry_s=RETRY_S, evidence=evidence
        )
        self.segments: WritablePlace = self._writer.segments
        self._order = threading.Lock()
        self._queue: queue.SimpleQueue[Entry | threading.Event] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._write, daemon=True).start()

    @property
    def spooling(self) -> bool:
        """True while records go to the spool."""
        return self._writer.waiting > 0

    def later(self, drafts: Drafts, *, key: str | None = None) -> None:
        """Queue records; a callable makes them in the writing thread."""
        self._raise()
        with self._order:  # the order of the times is that of the queue
            self._queue.put((drafts, key or uuid.uuid4().hex, time_ns()))

    def now(self, drafts: Drafts, *, key: str | None = None) -> None:
        """Queue records and wait until they and all before them are durable."""
        self.later(drafts, key=key)
        self.flush()

    def flush(self) -> None:
        """Wait until everything queued so far is durable, in the ledger or in the spool."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        while True:
            entry = self._queue.get()
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            drafts, key, now_ns = entry
            try:
                made = drafts() if callable(drafts) else drafts
                self._writer.record(self._job, _dated(made, now_ns), key)
            except BaseException as error:  # told to the training thread at its next record
                self._error = error


def _dated(drafts: Sequence[Draft], now_ns: int) -> list[Draft]:
    """Records carry the time at which they happened, not that of the append."""
    return [d if d.occurred_ns is not None else replace(d, occurred_ns=now_ns) for d in drafts]

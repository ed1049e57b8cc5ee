"""Recording through an outage: what the ledger cannot take waits on local disk, in order, once.

So does what names a segment that the store of evidence cannot take, and the segment with it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from shiftbook.ledger.canonical import MAX_EVENT_BYTES, encode
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import (
    AppendInDoubt,
    EvidenceError,
    IdempotencyConflict,
    InvalidEvent,
    LedgerUnreachable,
    SpoolError,
)
from shiftbook.ledger.events import life
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.receipt import Receipt
from shiftbook.ledger.segment_place import WritablePlace
from shiftbook.ledger.segment_spool import SUFFIX as SEGMENTS_SUFFIX
from shiftbook.ledger.segment_spool import SpooledSegments
from shiftbook.ledger.spool_file import Record, SpoolFile

RETRY_S = 1.0
"""Pause of the background retry between two tries."""

ENVELOPE_BYTES = 2_000
"""Room that a spooled body leaves for its envelope."""

SUFFIX = ".spool"


class Append(Protocol):
    """``Ledger.append``, or whatever stands in for it in another process."""

    def __call__(
        self, job: str, events: Sequence[Event | Draft], *, key: str | None = None
    ) -> Receipt: ...


@dataclass(frozen=True)
class Drained:
    """What one try to empty the spool did."""

    appended: int = 0
    """Records that stand in the ledger now."""
    waiting: int = 0
    """Records that are still spooled."""
    cause: str | None = None
    """Why some still wait; None when none does."""
    rejected: tuple[str, ...] = field(default=())
    """Records that the ledger refuses for their content, which stand in ``<writer>.rejected``; and
    lines of the spool that are damaged, of which a copy stands in ``<writer>.spool.damaged``."""


class SpoolingWriter:
    """Records drafts in the ledger, or durably beside it while the ledger is out of reach.

    ``record`` never waits for an outage to end. While anything is spooled, everything is, so the
    order of this writer holds; the ledger numbers its events in that order. ``drain`` appends
    what waits, each record once by its idempotency key; with ``retry_s`` a thread calls it. Safe
    to share between threads.

    Segments that are written to ``segments`` go to the place ``evidence``, or wait beside the spool
    while that is out of reach; ``drain`` brings those of a record there before it appends it.
    """

    def __init__(
        self,
        append: Append,
        directory: Path,
        *,
        writer: str | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        retry_s: float | None = None,
        adopted: SpoolFile | None = None,
        evidence: WritablePlace | None = None,
    ) -> None:
        self.writer = writer or f"spool-{secrets.token_hex(8)}"
        self.directory = directory
        self._append = append
        self._now_ns = now_ns
        self._path = directory / f"{self.writer}{SUFFIX}"
        self._life = secrets.token_hex(4)
        self._count = 0
        self._waiting: deque[Record] = deque()
        self._cause = "the process that spooled these records ended before the ledger was back"
        self._since_ns = 0
        self._spooled_events = 0
        self._announced = False
        self._restored = False
        self._outage_job = ""
        self._rejected: list[str] = []
        self._lock = threading.Lock()
        self._drain_lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._spool = adopted
        self.segments = SpooledSegments(
            evidence,
            directory / f"{self.writer}{SEGMENTS_SUFFIX}",
            lock=self._lock,
            claim=self._claim,
        )
        if adopted is None and self._path.exists():  # a writer of this name ran before
            self._spool = SpoolFile.create(self._path)
        if self._spool is not None:
            try:
                self._resume(self._spool)
            except BaseException:
                self._spool.close()  # its lock would say that somebody looks after the file
                raise
        if retry_s is not None:
            self._thread = threading.Thread(
                target=self._retry, args=(retry_s,), name=f"spool {self.writer}", daemon=True
            )
            self._thread.start()

    @property
    def waiting(self) -> int:
        """Records that are spooled, those of the outage itself included."""
        return len(self._waiting)

    def record(
        self, job: str, drafts: Sequence[Event | Draft], key: str | None = None
    ) -> Receipt | None:
        """Append a batch; None when it was spooled, durably, instead.

        Raises InvalidEvent or IdempotencyConflict as ``append`` does, and SpoolError when the
        ledger is out of reach and the spool cannot take the record: then it is not kept.
        """
        with self._lock:
            if self._closed:
                raise SpoolError("expected an open spooling writer, found one that is closed")
            record = self._make(job, drafts, key)
            if record.segments:
                if not self._waiting:
                    self._cause = self.segments.cause
            elif not self._waiting:
                try:
                    return self._append(job, record.drafts, key=record.key)
                except (LedgerUnreachable, AppendInDoubt) as error:
                    self._cause = str(error)
            self._claim().add([record])
            self._take([record])
        return None

    def drain(self) -> Drained:
        """Append what waits, in order; stops, and says why, where the ledger, or the store of the
        segments that a record names, is still away.

        The outage itself is recorded: LedgerUnreachable before the records and LedgerRestored
        after them. A record that the ledger refuses for its content is set aside.
        """
        return self._drain(tell=True)

    def _drain(self, *, tell: bool) -> Drained:
        """Drain; what was rejected is kept for a later call where nobody is told."""
        with self._drain_lock:
            appended = 0
            while True:
                try:
                    if not self._waiting:
                        self.segments.bring_all()
                except EvidenceError as error:
                    return Drained(appended, self.waiting, str(error))
                with self._lock:
                    if self._closed and self._spool is None:
                        raise SpoolError("expected an open spooling writer, found a closed one")
                    if not self._waiting and self.segments.kept:
                        continue  # one that came meanwhile
                    record = self._next()
                    if record is None:
                        rejected = tuple(self._rejected)
                        if tell:
                            self._rejected.clear()
                        return Drained(appended, 0, None, rejected)
                try:
                    # No event that names a segment stands before the segment is where it belongs.
                    lost = self.segments.bring(record.segments)
                    if lost:
                        self._set_aside(record, "; ".join(lost))
                    else:
                        self._append(record.job, record.drafts, key=record.key)
                        appended += not _is_outage(record)
                except (LedgerUnreachable, AppendInDoubt, EvidenceError) as error:
                    return Drained(appended, self.waiting, str(error))
                except (IdempotencyConflict, InvalidEvent) as error:
                    self._set_aside(record, str(error))
                with self._lock:
                    self._waiting.popleft()

    def close(self) -> None:
        """Stop retrying. What is spooled stays on disk, for ``drain_leftovers``."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._drain_lock, self._lock:
            if self._spool is not None:
                self._spool.close()
                self._spool = None

    def _claim(self) -> SpoolFile:
        """This writer's spool file, made where there is none; under the lock."""
        if self._closed:
            raise SpoolError("expected an open spooling writer, found one that is closed")
        if self._spool is None:
            self._spool = SpoolFile.create(self._path)
        return self._spool

    def _make(self, job: str, drafts: Sequence[Event | Draft], key: str | None) -> Record:
        if not job or not drafts:
            raise InvalidEvent("expected a job and at least one event to record, found none")
        now_ns = self._now_ns()
        made = []
        for item in drafts:
            draft = Draft(item) if isinstance(item, Event) else item
            # What is spooled today must fit into the ledger later, envelope and all.
            size = len(encode(draft.event.plain()))
            if size > MAX_EVENT_BYTES - ENVELOPE_BYTES:
                raise InvalidEvent(
                    f"{draft.event.type_()} is {size} bytes, the limit is "
                    f"{MAX_EVENT_BYTES - ENVELOPE_BYTES}; put long lists into an evidence segment"
                )
            occurred_ns = now_ns if draft.occurred_ns is None else draft.occurred_ns
            made.append(replace(draft, occurred_ns=occurred_ns, writer=self.writer, sequence=None))
        if key is None:
            self._count += 1
            key = f"{self.writer}:{self._life}:{self._count}"
        return Record(job, key, tuple(made), self.segments.named(made))

    def _take(self, records: Sequence[Record]) -> None:
        for record in records:
            if not _is_outage(record):
                if not self._spooled_events:
                    self._since_ns = record.drafts[0].occurred_ns or self._now_ns()
                self._spooled_events += len(record.drafts)
            self._waiting.append(record)

    def _next(self) -> Record | None:
        """Record to append now; the events of the outage frame what was spooled."""
        if not self._waiting and (not self._announced or self._restored):
            if self._spool is not None:
                # In this order: segments without a spool file would belong to nobody.
                self.segments.clear()
                self._spool.remove()
                self._spool = None
            self._announced = self._restored = False
            self._spooled_events = 0
            return None
        if not self._announced:
            self._announced = True
            unreachable = life.LedgerUnreachable(
                since_ns=self._since_ns,
                spooled=self._spooled_events,
                cause=self._cause,
                evidence=next(
                    (r.segments[0].rpartition("/")[0] for r in self._waiting if r.segments), None
                ),
            )
            self._waiting.appendleft(self._outage(unreachable, "unreachable"))
        elif not self._waiting:
            self._restored = True
            now_ns = self._now_ns()
            restored = life.LedgerRestored(
                since_ns=self._since_ns,
                outage_s=max(0, now_ns - self._since_ns) / 1e9,
                spooled=self._spooled_events,
            )
            self._waiting.append(self._outage(restored, "restored"))
        return self._waiting[0]

    def _outage(self, event: Event, which: str) -> Record:
        job = self._waiting[0].job if self._waiting else self._outage_job
        self._outage_job = job
        draft = Draft(event, occurred_ns=self._now_ns(), writer=self.writer)
        record = Record(job, f"{self.writer}:outage:{self._since_ns}:{which}", (draft,))
        assert self._spool is not None
        # On disk before in the ledger: whoever has to finish this drain offers the same content.
        # Without space for it the drain goes on; at worst a second drain sets this record aside.
        with contextlib.suppress(SpoolError):
            self._spool.add([record])
        return record

    def _resume(self, spool: SpoolFile) -> None:
        records, faults = spool.read()
        self._rejected += faults
        # The event of the outage went first, although it was written to the file later.
        leading = [record for record in records if _is_outage(record, life.LedgerUnreachable)]
        self._announced = bool(leading)
        self._restored = any(_is_outage(record, life.LedgerRestored) for record in records)
        if leading:
            self._outage_job = leading[0].job
        self.segments.take_over(where for record in records for where in record.segments)
        self._take([*leading, *(record for record in records if record not in leading)])

    def _set_aside(self, record: Record, why: str) -> None:
        file = SpoolFile.create(self.directory / f"{self.writer}.rejected")
        try:
            _, faults = file.read()
            self._rejected += faults
            file.add([record])
        finally:
            file.close()
        self._rejected.append(why)

    def _retry(self, pause_s: float) -> None:
        while not self._wake.wait(pause_s):
            if self._waiting or self.segments.kept:
                try:
                    self._drain(tell=False)
                except SpoolError as error:
                    self._rejected.append(str(error))


def drain_leftovers(
    append: Append,
    directory: Path,
    evidence: WritablePlace | None = None,
    *,
    writers: Collection[str] | None = None,
) -> dict[str, Drained]:
    """Append what processes that ended left spooled in a folder; outcome by writer.

    ``evidence`` is where their segments belong: without it, and where it is another place than
    theirs, the records that wait for a segment go on waiting. ``writers`` are the only ones that
    are looked at, all without it. Files of living processes are left alone. Safe to call from
    several processes at once. Raises SpoolError for the first file that could not be read, copied
    or removed, once all others are drained.
    """
    outcome: dict[str, Drained] = {}
    faults: list[SpoolError] = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        if writers is not None and path.stem not in writers:
            continue
        try:
            file = SpoolFile.adopt(path)
            if file is None:
                continue
            writer = SpoolingWriter(
                append, directory, writer=path.stem, adopted=file, evidence=evidence
            )
            try:
                outcome[path.stem] = writer.drain()
            finally:
                writer.close()
        except SpoolError as error:
            faults.append(error)
    if faults:
        raise faults[0]
    return outcome


def _is_outage(record: Record, model: type[Event] | None = None) -> bool:
    models = (life.LedgerUnreachable, life.LedgerRestored) if model is None else (model,)
    first = record.drafts[0]
    return isinstance(first.event, models) and f"{first.writer}:outage:" in record.key

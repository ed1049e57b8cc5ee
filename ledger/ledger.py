"""The book: append, decide, read, follow and fold, over one store."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from shiftbook.ledger.dialect import open_dialect
from shiftbook.ledger.envelope import Draft, StoredEvent
from shiftbook.ledger.errors import InvalidEvent, LedgerError, UnknownPosition
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.folding import Folding
from shiftbook.ledger.group_commit import GroupCommit, Item, Request
from shiftbook.ledger.receipt import Decision, Head, Receipt
from shiftbook.ledger.snapshots import Snapshots
from shiftbook.ledger.state import LedgerState
from shiftbook.ledger.store import Store
from shiftbook.ledger.tables import StoredRow
from shiftbook.ledger.transaction import Transaction
from shiftbook.ledger.tree import Tree

__all__ = ["Decision", "Head", "Ledger", "Receipt"]

CLOCK_MARGIN_S = 60
"""Clocks of writers may differ by so much without an event being missed by its time."""

_MARGIN_NS = CLOCK_MARGIN_S * 1_000_000_000


def _default_writer() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _default_actor() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return f"uid-{os.getuid()}"


class Ledger:
    """A handle on a ledger; safe to share between threads, opened anew in each process."""

    def __init__(
        self, store: Store, *, lock_timeout_s: float, evidence: Path | str | None = None
    ) -> None:
        self._store = store
        self._group = GroupCommit(self._commit, lock_timeout_s)
        self._folded = threading.local()
        self._closing = threading.Event()
        self.url: str = store.dialect.url
        self.path: Path | None = store.dialect.path
        self.evidence: Path | str | None = evidence
        if evidence is None and self.path is None:
            self.evidence = self.beside(".evidence")
        self.writer: str = store.writer
        self.actor: str = store.actor
        self.read_only: bool = store.read_only

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = True,
        read_only: bool = False,
        writer: str | None = None,
        actor: str | None = None,
        evidence: Path | str | None = None,
        lock_timeout_s: float = 10.0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> Ledger:
        """Open a ledger by its URL, making it where there is none and ``create`` allows it.

        ``writer`` names this handle's events (default: a new name for each handle), ``actor``
        says who acts (self-claimed), ``evidence`` is the folder of the segments or its URL (any
        that fsspec knows; default: a folder beside the ledger's file), ``lock_timeout_s`` is the
        longest wait for the append lock, ``now_ns`` the clock of ``recorded_ns`` (UTC nanoseconds).

        Raises InvalidURL, NotALedger, NewerLedger or LedgerUnreachable.
        """
        store = Store(
            open_dialect(url, lock_timeout_s=lock_timeout_s),
            create=create,
            read_only=read_only,
            writer=writer or _default_writer(),
            actor=actor or _default_actor(),
            now_ns=now_ns,
        )
        return cls(store, lock_timeout_s=lock_timeout_s, evidence=evidence)

    def append(
        self,
        job: str,
        events: Event | Draft | Sequence[Event | Draft],
        *,
        key: str | None = None,
        expected_version: int | None = None,
        operation: str | None = None,
        cause: int | None = None,
        occurred_ns: int | None = None,
    ) -> Receipt:
        """Append one event or a batch, all or nothing; durable on return.

        ``key`` makes the append idempotent within the job, for ever: the same content again gives
        the first receipt (``repeated``), other content IdempotencyConflict. ``expected_version``
        is the version of the job's last event as the caller knows it, -1 for none.
        ``operation``, ``cause`` and ``occurred_ns`` hold for events whose draft has none.

        Raises InvalidEvent, IdempotencyConflict, VersionConflict, LedgerUnreachable (nothing was
        written) or AppendInDoubt (retry with the same key).
        """
        listed = [events] if isinstance(events, Event | Draft) else events
        items = [_item(event, operation, cause, occurred_ns) for event in listed]
        return self._group.submit(_request(job, items, key, expected_version))

    def decide(self, fn: Callable[[LedgerState], Decision | None]) -> Receipt | None:
        """Append what ``fn`` returns for the state at the head, with nobody appending in between.

        ``fn`` runs under the append lock of all processes: keep it short, and do not append in
        it. Where the connection to a server breaks, ``fn`` is called again, with the state of then.
        The events of its decision get the positions ``state.size``, ``state.size + 1``, ...
        The state is not to be changed. Legality is the gate's to check. Returns None where ``fn``
        decided nothing.
        """

        def work(transaction: Transaction) -> Receipt | None:
            state = self._fold(transaction.size)
            decision = fn(state)
            if decision is None or not decision.drafts:
                return None
            return transaction.append(
                _request(decision.job, [_item(d) for d in decision.drafts], decision.key, None)
            )

        with self._group.alone():
            # Most of the fold before the lock: nobody waits for a handle that reads a long book.
            self._fold(None)
            return self._store.transact(work)

    def restore(self, events: Sequence[StoredEvent]) -> None:
        """Append events of another copy of this ledger, with the bytes and positions they have.

        All or nothing, and durable on return. Raises InvalidEvent where they are not the next
        ones, LedgerUnreachable or AppendInDoubt.
        """
        with self._group.alone():
            self._store.transact(lambda transaction: transaction.restore(events))

    def _commit(self, group: Sequence[Request]) -> None:
        def work(transaction: Transaction) -> None:
            for request in group:
                request.receipt = request.error = None  # of a try whose connection broke
                try:
                    request.receipt = transaction.append(request)
                except LedgerError as error:
                    request.error = error

        self._store.transact(work)

    def read(
        self,
        after: int = -1,
        *,
        until: int | None = None,
        job: str | None = None,
        types: Collection[str] | None = None,
        operation: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[StoredEvent]:
        """Events with ``after < position <= until`` up to the head at the call, in order.

        ``reverse`` starts at the end. Raises InvalidEvent where stored bytes are no event;
        ``rows`` gives such bytes as they stand.
        """
        for row in self.rows(
            after,
            until=until,
            job=job,
            types=types,
            operation=operation,
            limit=limit,
            reverse=reverse,
        ):
            yield row.event()

    def rows(
        self,
        after: int = -1,
        *,
        until: int | None = None,
        job: str | None = None,
        types: Collection[str] | None = None,
        operation: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[StoredRow]:
        """Like ``read``, with bytes and stored leaf hash as the columns have them, unparsed."""
        last = self._store.head().size - 1
        return self._store.rows(
            after,
            last if until is None else min(until, last),
            job=job,
            types=types,
            operation=operation,
            limit=limit,
            reverse=reverse,
        )

    def pages(self, after: int = -1, *, until: int) -> Iterator[tuple[Sequence[int], bytes]]:
        """Stored bytes alone of a stretch of events, thousands at a time.

        A page is the sizes of its events in bytes, and their bytes one after the other. The stretch
        ends at ``until`` or at the head.
        """
        return self._store.pages(after, until)

    def event(self, position: int) -> StoredEvent:
        """Event at a position; raise UnknownPosition where there is none."""
        size = self._store.head().size
        if 0 <= position < size:  # no database is asked for a number that it cannot hold
            for row in self._store.rows(position - 1, position, limit=1):
                return row.event()
        raise UnknownPosition(position, size)

    def span(
        self, after: int, since_ns: int | None, until_ns: int | None
    ) -> tuple[int, int | None]:
        """Narrow a stretch of positions to those recorded in a time, without reading it.

        Returns ``(after, until)``. Positions are in the order of their recording, so a search by
        halves finds both ends; a margin of CLOCK_MARGIN_S at each leaves room for clocks that
        differ, so a filter by the exact time is still to follow. Where a clock was set back by
        more than that, events that it had dated ahead may be left out.
        """
        last = self._store.head().size - 1
        until: int | None = None
        if until_ns is not None:
            until = last = self._recorded_from(after, last, until_ns + _MARGIN_NS) - 1
        if since_ns is not None:
            after = max(after, self._recorded_from(after, last, since_ns - _MARGIN_NS) - 1)
        return after, until

    def _recorded_from(self, after: int, last: int, ns: int) -> int:
        """First position after ``after`` that was recorded at ``ns`` or later, else last + 1."""
        low, high = after + 1, last + 1
        while low < high:
            middle = (low + high) // 2
            if self.event(middle).recorded_ns < ns:
                low = middle + 1
            else:
                high = middle
        return low

    def follow(
        self,
        after: int = -1,
        *,
        poll_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[StoredEvent]:
        """Every event after a position, in order and once, and then each new one as it comes.

        Looks at the head every ``poll_s`` (default: 0.05 on SQLite; 0.5 on PostgreSQL, which
        tells of commits as well). Ends when ``stop`` is set or the handle is closed.
        """
        stop = stop or self._closing
        poll_s = self._store.dialect.poll_s if poll_s is None else poll_s
        waker = self._store.waker()
        while not self._closing.is_set():
            for stored in self.read(after):
                yield stored
                after = stored.position
                if stop.is_set() or self._closing.is_set():
                    return
            if waker is None:
                stop.wait(poll_s)
            else:
                waker.wait(poll_s, stop)
            if stop.is_set():
                return

    def head(self) -> Head:
        """Size and last leaf hash, as committed."""
        return self._store.head()

    def state(self) -> LedgerState:
        """State folded to the head; kept by handle and thread, and not to be changed.

        Jobs are folded when they are looked at, from their snapshots where these are sound.
        """
        return self._fold(None)

    def _fold(self, size: int | None) -> LedgerState:
        # Each thread folds its own state, so none changes while another looks at it.
        folding: Folding | None = getattr(self._folded, "folding", None)
        if folding is None:
            snapshots = Snapshots.beside(self._store.dialect)
            folding = Folding(self._store.rows, self._store.jobs, snapshots)
            self._folded.folding = folding
        size = self._store.head().size if size is None else size
        try:
            return folding.advance(size)
        except BaseException:
            # Half an event may have been taken in; the next call begins anew.
            self._folded.folding = None
            raise

    def require_keys(self) -> None:
        """Raise NotALedger where a table has lost its key, before all of it is read; see Store."""
        self._store.require_keys()

    def beside(self, suffix: str) -> Path:
        """A file or folder of this machine that belongs to this ledger, see ``Dialect.beside``."""
        return self._store.dialect.beside(suffix)

    def tree(self) -> Tree:
        """The Merkle tree over the events, as it is stored, and its signed heads."""
        return Tree(self._store)

    def jobs(self) -> list[str]:
        """Names of the jobs, in the order in which they came."""
        return self._store.jobs()

    def close(self) -> None:
        """Close the handle; calling it again does nothing."""
        if not self._closing.is_set():
            self._closing.set()
            with self._group.alone():
                self._store.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _item(
    event: Event | Draft,
    operation: str | None = None,
    cause: int | None = None,
    occurred_ns: int | None = None,
) -> Item:
    if isinstance(event, Event):
        return event, operation, cause, occurred_ns, None, None
    return (
        event.event,
        operation if event.operation is None else event.operation,
        cause if event.cause is None else event.cause,
        occurred_ns if event.occurred_ns is None else event.occurred_ns,
        event.writer,
        event.sequence,
    )


def _request(
    job: str, items: Sequence[Item], key: str | None, expected_version: int | None
) -> Request:
    if not job:
        raise InvalidEvent("expected the name of a job, found an empty one")
    if not items:
        raise InvalidEvent("expected at least one event to append, found none")
    if key is not None and not key:
        raise InvalidEvent("expected a key that is not empty, or None for no key")
    return Request(job, items, key, expected_version)

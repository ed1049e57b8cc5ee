"""One handle's connections to the tables: transactions under the lock, and reads beside them."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import weakref
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.connections import Connections, Patience
from shiftbook.ledger.derived import HEAD, revision_of, upgrade
from shiftbook.ledger.dialect import Connection, Dialect, Waker
from shiftbook.ledger.errors import (
    AppendInDoubt,
    LedgerError,
    LedgerUnreachable,
    NewerLedger,
    NotALedger,
)
from shiftbook.ledger.receipt import Head
from shiftbook.ledger.tables import (
    EVENTS,
    HEADS,
    NODES,
    STORAGE_SCHEMA,
    Statement,
    Statements,
    StoredRow,
    one,
    reading,
    whole,
)
from shiftbook.ledger.transaction import KnownHead, Transaction

READ_ROWS = 512
"""Rows of one read; each read is a short transaction, so none holds a checkpoint up."""

PAGE_ROWS = 4_096
"""Rows of one read of bytes alone: some 10 ms."""

COMMIT_BYTES = 20_000
"""What a commit of one event adds to the write-ahead log: some five pages of table and indexes."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Lost:
    """A commit whose answer did not come: what tells whether it stands, and its outcome."""

    position: int
    leaf: bytes
    size: int
    result: Any


class _Broken(Exception):
    """The connection is gone: ``lost`` in a commit, or ``away`` where none could be made."""

    def __init__(
        self, explained: LedgerError, lost: _Lost | None = None, *, away: bool = False
    ) -> None:
        super().__init__(str(explained))
        self.explained, self.lost, self.away = explained, lost, away


def _lost(transaction: Transaction, result: Any) -> _Lost:
    first = transaction.rows[0]
    return _Lost(first[0], first[-1], transaction.size, result)


class Store:
    """One handle's connections to the table, and what it knows of the head."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        create: bool,
        read_only: bool,
        writer: str,
        actor: str,
        now_ns: Callable[[], int],
    ) -> None:
        self.dialect = dialect
        self.read_only = read_only
        self.writer = writer
        self.actor = actor
        self.statements = Statements(dialect)
        self._known = KnownHead()
        self._now_ns = now_ns
        self._open = Connections(dialect)
        # Also when the handle is only dropped, or the program ends without closing it.
        weakref.finalize(self, self._open.close)
        self._pid = os.getpid()
        self._in_doubt = False
        self._reads: dict[tuple[bool, int, bool, bool], Statement] = {}
        self._closed = False
        self._revision: str | None = None
        try:
            self._connect(create)
        except BaseException:
            self.close()
            raise

    # -- opening and closing ---------------------------------------------------------------

    def _connect(self, create: bool) -> None:
        if not self.dialect.exists():
            if self.read_only or not create:
                raise LedgerUnreachable(
                    f"expected a ledger at {self.dialect.url}, found nothing; check the path"
                )
            self.dialect.create(self._build)
        # It is a ledger, and one that this build knows.
        whole(self._ask(self.statements.last)[0][0], self.dialect.url)
        if not self.read_only:
            self.dialect.lock()
            try:
                if self._revision != HEAD:
                    upgrade(self.dialect)
                self._open_writer()
            finally:
                self.dialect.unlock()

    def _build(self, connection: Connection) -> None:
        for text in Statements.create(self.dialect):
            connection.execute(text)
        connection.execute(self.statements.add_meta.text, ("storage_schema", str(STORAGE_SCHEMA)))
        connection.execute(self.statements.add_revision.text, (HEAD,))

    def _new_reader(self) -> Connection:
        connection = self.dialect.reader()
        try:
            self._check(connection)
        except self.dialect.errors as error:
            broken = self.dialect.broken(connection, error)
            connection.close()
            explained = self.dialect.explain(error)
            raise (_Broken(explained) if broken else explained) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: Connection) -> None:
        if not self.dialect.is_ledger(connection):
            raise NotALedger(
                f"expected a ledger at {self.dialect.url}, found another program's database; "
                "check the path"
            )
        row = one(connection, self.statements.schema)
        found = int(row[0]) if row and str(row[0]).isdigit() else -1
        if found < 1:
            raise NotALedger(
                f"expected a storage schema from 1 to {STORAGE_SCHEMA} in {self.dialect.url}, "
                f"found {row[0] if row else 'none'}; restore the ledger from a copy"
            )
        if found > STORAGE_SCHEMA:
            raise NewerLedger(
                f"expected storage schema {STORAGE_SCHEMA} or older in {self.dialect.url}, found "
                f"{found}; install a newer Shiftbook"
            )
        self._revision = revision_of(self.dialect, connection, self.statements.revision)

    def _open_writer(self) -> Connection:
        """Open for writing, under the lock; after a commit in doubt, settle and verify first."""
        connection = self.dialect.writer()
        try:
            if self._in_doubt:
                self.dialect.settle(connection)
                self._verify_head(connection)
                self._in_doubt = False
        except self.dialect.errors as error:
            broken = self.dialect.broken(connection, error)
            connection.close()
            explained = self.dialect.explain(error)
            raise (_Broken(explained) if broken else explained) from error
        except BaseException:
            connection.close()
            raise
        self._open.writer = connection
        return connection

    def _verify_head(self, connection: Connection) -> None:
        """What stood before still stands, and the last bytes are whole."""
        row = one(connection, self.statements.head)
        size = whole(row[0], self.dialect.url) + 1 if row else 0
        if size < self._known.size:
            raise NotALedger(
                f"expected at least {self._known.size} events in {self.dialect.url}, found {size}; "
                "events that were acknowledged are gone; stop writing and restore from a copy"
            )
        if row and leaf_hash(bytes(row[2])) != bytes(row[1]):
            raise NotALedger(
                f"expected event {size - 1} of {self.dialect.url} to match its hash, found other "
                "bytes; stop writing and restore from a copy"
            )

    def close(self) -> None:
        """Close all connections; the writing one under the lock, since closing checkpoints."""
        self._closed = True
        self._open.close()

    # -- writing ---------------------------------------------------------------------------

    def transact(self, work: Callable[[Transaction], T]) -> T:
        """Run ``work`` at the head under the append lock and commit what it staged.

        Threads of one handle must not call this at the same time (see group_commit.py). Raises
        LedgerUnreachable where nothing was written and AppendInDoubt where that is not known.
        """
        if self._closed:
            raise LedgerUnreachable("expected an open ledger, found one that is closed")
        if self.read_only:
            raise LedgerUnreachable(
                f"expected to write {self.dialect.url}, which was opened for reading only; "
                "open it again without read_only"
            )
        if os.getpid() != self._pid:
            raise LedgerUnreachable(
                "expected a ledger opened by this process, found one inherited by a fork; "
                "open it again after the fork"
            )
        patience = Patience(self.dialect.retry_s)
        first: LedgerError | None = None
        lost: _Lost | None = None
        while True:
            try:
                return self._attempt(work, lost)
            except _Broken as broken:
                lost = broken.lost or lost
                # A server that was not there to begin with is not waited for.
                waited = broken.lost is not None or first is not None or not broken.away
                first = first or broken.explained
                if not (waited and patience.again()):
                    raise self._given_up(lost, first) from first.__cause__
            except LedgerError as error:
                if lost is None or isinstance(error, NotALedger):
                    raise
                raise self._given_up(lost, error) from error

    def _given_up(self, lost: _Lost | None, error: LedgerError) -> LedgerError:
        if lost is None or isinstance(error, AppendInDoubt):
            return error
        return AppendInDoubt(
            f"expected to learn what became of a commit to {self.dialect.url}, found: {error}; "
            "the events may stand or not; retry with the same key to settle it"
        )

    def _attempt(self, work: Callable[[Transaction], T], lost: _Lost | None) -> T:
        self.dialect.lock()
        try:
            try:
                connection = self._open.writer or self._open_writer()
            except LedgerUnreachable as error:
                raise _Broken(error, away=True) from error
            self.dialect.check_log(connection)
            return self._transact(connection, work, lost)
        finally:
            self.dialect.unlock()

    def _transact(
        self, connection: Connection, work: Callable[[Transaction], T], lost: _Lost | None
    ) -> T:
        try:
            connection.execute(self.dialect.begin)
            if lost is not None and self._stands(connection, lost):
                self._roll_back(connection)
                self._known.moved_to(lost.size)
                return lost.result  # type: ignore[no-any-return]
            self._learn_head(connection)
            transaction = Transaction(
                self.dialect,
                connection,
                self.statements,
                self._known,
                writer=self.writer,
                actor=self.actor,
                recorded_ns=self._now_ns(),
            )
            result = work(transaction)
            written_bytes = transaction.write() if transaction.rows else 0
        except self.dialect.errors as error:
            broken = self.dialect.broken(connection, error)
            self._roll_back(connection)
            if broken:
                raise _Broken(self.dialect.explain(error)) from error
            raise self.dialect.explain(error) from error
        except BaseException:
            self._roll_back(connection)
            raise
        if not transaction.wrote:
            self._roll_back(connection)
            return result
        try:
            connection.execute("COMMIT")
        except BaseException as error:
            self._drop(connection)
            if not isinstance(error, self.dialect.errors):
                self._in_doubt = True
                raise
            explained = self.dialect.explain(error, committing=True)
            self._in_doubt = isinstance(explained, AppendInDoubt)
            if self._in_doubt and self.dialect.retry_s and transaction.rows:
                raise _Broken(explained, _lost(transaction, result)) from error
            raise explained from error
        transaction.keep()
        self.dialect.committed(connection, COMMIT_BYTES + 2 * written_bytes)
        return result

    def _stands(self, connection: Connection, lost: _Lost) -> bool:
        """Say whether a commit whose answer did not come was made.

        The lock is held, so the server has decided. The bytes behind the leaf name writer,
        sequence and time, so no other append has the same leaf at the same position.
        """
        row = one(connection, self.statements.leaf, of=lost.position)
        return row is not None and bytes(row[0]) == lost.leaf

    def _learn_head(self, connection: Connection) -> None:
        row = one(connection, self.statements.last)
        size = whole(row[0], self.dialect.url) + 1
        if size == self._known.size:
            return
        if size < self._known.size:
            raise NotALedger(
                f"expected at least {self._known.size} events in {self.dialect.url}, found {size}; "
                "events that were acknowledged are gone; stop writing and restore from a copy"
            )
        # Another handle appended: what was known of jobs and writers is old.
        self._known.moved_to(size)

    def _roll_back(self, connection: Connection) -> None:
        try:
            connection.execute("ROLLBACK")
        except self.dialect.errors:
            # The database rolled back by itself, or the connection is broken; a new one tells.
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Give up a connection that failed; called under the lock."""
        self._open.writer = None
        with contextlib.suppress(*self.dialect.errors):
            connection.close()

    # -- reading ---------------------------------------------------------------------------

    def waker(self) -> Waker | None:
        """What wakes followers, where the store has such a thing."""
        return self._open.waker()

    def ask(self, statement: Statement, **values: Any) -> list[Any]:
        """Rows of a query, as committed."""
        return self._ask(statement, **values)

    def _ask(self, statement: Statement, **values: Any) -> list[Any]:
        parameters = statement.bind(**values)
        return self._read(lambda c: list(c.execute(statement.text, parameters).fetchall()))

    def _read(self, act: Callable[[Connection], T]) -> T:
        """What ``act`` reads through a connection; again where a server had closed that."""
        patience = Patience(self.dialect.retry_s)
        broken = False
        while True:
            try:
                with self._open.reading(self._new_reader) as connection:
                    self.dialect.check_log(connection)
                    try:
                        return act(connection)
                    except self.dialect.errors as error:
                        broken = self.dialect.broken(connection, error)
                        raise
            except self.dialect.errors as error:
                if not (broken and patience.again()):
                    raise self.dialect.explain(error) from error
            except _Broken as error:
                broken = True
                if not patience.again():
                    raise error.explained from error.__cause__
            except LedgerUnreachable:
                # A server that was not there to begin with is not waited for.
                if not (broken and patience.again()):
                    raise

    def require_keys(self) -> None:
        """Raise NotALedger where a table that is read a page at a time has lost its key.

        Whoever owns the database can make a table anew without it. Each page is then a search of
        all rows, and reading all of them takes a time that grows with their square.
        """
        for table in (EVENTS, HEADS, NODES):
            columns = [column.name for column in table.primary_key]
            if self._read(partial(self._has_lost_key, table.name, columns)):
                raise NotALedger(
                    f"expected the table {table.name} of {self.dialect.url} with its key "
                    f"({', '.join(columns)}), found it without, so that each page would be a "
                    "search of all rows; `shiftbook verify` judges it all the same; restore the "
                    "ledger from a copy"
                )

    def _has_lost_key(self, table: str, columns: list[str], connection: Connection) -> bool:
        there = self.dialect.columns(connection, table)
        return bool(there) and not self.dialect.keyed(connection, table, columns)

    def head(self) -> Head:
        """Size and last leaf, as committed."""
        rows = self._ask(self.statements.head)
        return (
            Head(whole(rows[0][0], self.dialect.url) + 1, bytes(rows[0][1]))
            if rows
            else Head(0, None)
        )

    def jobs(self) -> list[str]:
        """Names of all jobs, in the order of their first events."""
        found: list[tuple[int, str]] = []
        name = ""
        while True:
            # One seek for each job, where DISTINCT would read the whole index.
            name = self._ask(self.statements.next_job, of=name)[0][0]
            if name is None:
                return [job for _, job in sorted(found)]
            found.append((self._ask(self.statements.first_of_job, of=name)[0][0], name))

    def rows(
        self,
        after: int,
        until: int,
        *,
        job: str | None = None,
        types: Collection[str] | None = None,
        operation: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[StoredRow]:
        """Rows with ``after < position <= until``, in order, read some at a time."""
        names = sorted(set(types)) if types is not None else []
        if types is not None and not names:
            return
        if len(names) > 1 and job is None and operation is None:
            # Each type in its own order through the index, where the store would sort them all.
            each = (self.rows(after, until, types=[n], limit=limit, reverse=reverse) for n in names)
            merged = heapq.merge(*each, key=lambda row: row.position, reverse=reverse)
            yield from itertools.islice(merged, limit)
            return
        statement = self._reading(job is not None, len(names), operation is not None, reverse)
        filters: dict[str, Any] = {"job": job, "operation": operation}
        filters |= {f"type_{index}": name for index, name in enumerate(names)}
        left = limit
        while left is None or left > 0:
            count = READ_ROWS if left is None else min(READ_ROWS, left)
            filters |= {"after": after, "until": until, "count": count}
            found = self._ask(statement, **filters)
            for position, of, version, data, leaf in found:
                whole(position, self.dialect.url)
                yield StoredRow(position, of, version, bytes(data), bytes(leaf))
            if len(found) < count:
                return
            if reverse:
                until = found[-1][0] - 1
            else:
                after = found[-1][0]
            left = None if left is None else left - len(found)

    def pages(self, after: int, until: int) -> Iterator[tuple[Sequence[int], bytes]]:
        """Sizes, and bytes in a row, of the events of ``after < position <= until``, page by page.

        What hands millions of events on pays neither for an object of each row nor for its other
        columns.
        """
        while after < until:
            (found,) = self._ask(self.statements.page, after=after, until=until, count=PAGE_ROWS)
            count, last, sizes, data = found
            if not count:
                return
            yield array("i", map(int, sizes.split(","))), data
            after = last

    def _reading(self, job: bool, types: int, operation: bool, reverse: bool) -> Statement:
        shape = (job, types, operation, reverse)
        known = self._reads.get(shape)
        if known is None:
            known = self._reads[shape] = reading(
                self.dialect, job=job, types=types, operation=operation, reverse=reverse
            )
        return known

"""Reads the rows of a ledger in a server as they are stored, in short reads that block nobody."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import ColumnElement, Table, bindparam, func, or_, select

from shiftbook.ledger.dialect import Connection, open_dialect
from shiftbook.ledger.errors import LedgerError, LedgerUnreachable
from shiftbook.ledger.state import SHARED_TYPES
from shiftbook.ledger.tables import (
    EVENTS,
    HEADS,
    META,
    NODES,
    REVISION,
    STORAGE_SCHEMA,
    Statement,
    Statements,
    one,
)
from shiftbook.verify.errors import OutOfReach, UnreadableStore
from shiftbook.verify.scan_block import COLUMNS, Block, Page
from shiftbook.verify.stored import (
    LARGEST_POSITION,
    READ_ROWS,
    DamagedPages,
    RawEvents,
    RawRow,
    in_order,
    one_line,
    raw_row,
    refuse_newer_tables,
)

SERVED = "postgresql"
"""How the URL of a ledger in a server begins."""

READ_LIMIT_S = 600.0
"""Longest wait for one answer: finding keys that are split looks at every keyed event."""


_KEYED = (
    "SELECT 1 FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0] "
    "WHERE indrelid = to_regclass('events') AND attname = 'position' AND indisvalid "
    "AND indpred IS NULL"
)
"""Whether rows can be found by their position."""


def open_raw(url: str) -> RawEvents | ServedEvents:
    """Open the table of events of a ledger; raise UnreadableStore where there is none."""
    return ServedEvents(url) if url.startswith(SERVED) else RawEvents(url)


class ServedEvents:
    """The table of events of a ledger in a server, opened for reading only.

    Raises UnreadableStore where there is no ledger; what is wrong inside the table shows as rows
    that do not fit, or as DamagedPages.
    """

    path = None
    """It has no file: evidence lies where ``evidence`` says."""

    def __init__(self, url: str) -> None:
        try:
            self._dialect = open_dialect(url, lock_timeout_s=READ_LIMIT_S)
            self.evidence = self._dialect.beside(".evidence")
            self._connection: Connection = self._dialect.reader()
        except LedgerError as error:
            raise _unreadable(error) from error
        try:
            self._refuse_others()
            self._keyed = bool(self._connection.execute(_KEYED, ()).fetchall())
        except self._dialect.errors as error:
            self._connection.close()
            raise _unreadable(self._dialect.explain(error)) from error
        except BaseException:
            self._connection.close()
            raise
        self._cursors = 0
        events = EVENTS.c
        columns = [events[name] for name in (*COLUMNS, "data", "leaf")]
        self._page = Statement(
            self._dialect,
            select(*columns)
            .where(events.position > bindparam("after"), events.position <= bindparam("until"))
            .order_by(events.position)
            .limit(bindparam("count")),
        )
        first, last = func.min(events.position), func.max(events.position)
        self._split = Statement(
            self._dialect,
            select(events.job, events.key, first, last, func.count())
            .where(events.key.is_not(None))
            .group_by(events.job, events.key)
            .having(last - first + 1 != func.count()),
        )

    def _refuse_others(self) -> None:
        where = self._dialect.url
        names = self._dialect.columns(self._connection, EVENTS.name)
        lacking = sorted({*COLUMNS, "data", "leaf"} - names)
        if lacking:
            what = f"a table without {', '.join(lacking[:3])}" if names else "no table of events"
            raise UnreadableStore(f"expected a ledger at {where}, found {what}; check the URL")
        if not self._dialect.is_ledger(self._connection):
            raise UnreadableStore(
                f"expected a ledger at {where}, found a table of events without a ledger's mark: "
                "another program made it, or it was edited; check the URL"
            )
        row = one(self._connection, Statements(self._dialect).schema)
        found = str(row[0]) if row else ""
        if found.isdecimal() and int(found[:9]) > STORAGE_SCHEMA:
            raise UnreadableStore(
                f"expected storage schema {STORAGE_SCHEMA} or older in {where}, found {found}; "
                "verify it with a newer Shiftbook"
            )
        try:
            refuse_newer_tables(self.revision(), where)
        except DamagedPages:
            return  # integrity says so

    def __enter__(self) -> ServedEvents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def blocks(
        self,
        until: int | None,
        sizes: Collection[int],
        evidence: Path | None = None,
        *,
        named: bool = True,
    ) -> Generator[Block]:
        """None: one process reads the server's answers as fast as they come."""
        yield from ()

    def pages(self, after: int = -1, until: int | None = None) -> Iterator[Page]:
        """The same rows as ``rows`` gives, as they stand, some at a time; raises DamagedPages."""
        limit = LARGEST_POSITION if until is None else min(until, LARGEST_POSITION)
        if not self._keyed:
            yield from self._sorted(after, limit)
            return
        while page := self._ask(self._page, after=after, until=limit, count=READ_ROWS):
            yield page
            if len(page) < READ_ROWS or type(page[-1][0]) is not int:
                return
            after = page[-1][0]

    def _sorted(self, after: int, limit: int) -> Iterator[Page]:
        """All pages of a table without its key, each of which would be a search of all rows, from
        one sort, which the server holds; raises DamagedPages."""
        self._cursors += 1
        name = f"sorted_{self._cursors}"
        listed = ", ".join(f'"{column}"' for column in (*COLUMNS, "data", "leaf"))
        self._told(
            f"DECLARE {name} NO SCROLL CURSOR WITH HOLD FOR SELECT {listed} FROM events "
            f"WHERE position > {after:d} AND position <= {limit:d} ORDER BY position",
            after,
        )
        try:
            while page := self._told(f"FETCH {READ_ROWS} FROM {name}", after).fetchall():
                yield page
        finally:
            with suppress(DamagedPages, OutOfReach):
                self._told(f"CLOSE {name}", after)

    def count(self, until: int | None = None) -> int:
        """Number of events up to a position, by the largest one; 0 where that cannot be told."""
        try:
            ((last,),) = self._ask(Statement(self._dialect, select(func.max(EVENTS.c.position))))
        except DamagedPages:
            return 0
        if type(last) is not int:
            return 0
        return (last if until is None else min(last, until)) + 1

    def some(self, jobs: Collection[str], last: int) -> Iterator[tuple[bytes, bytes]]:
        """(bytes, leaf) of the events of some jobs up to a position, and of all jobs those that
        change what jobs share; raises DamagedPages."""
        if not self._keyed:
            for row in self.rows(until=last):
                if row.columns["job"] in jobs or row.columns["type"] in SHARED_TYPES:
                    yield row.data, row.leaf
            return
        events = EVENTS.c
        wanted = or_(
            *(events.job == job for job in sorted(jobs)),
            *(events.type == type_ for type_ in sorted(SHARED_TYPES)),
        )
        page = Statement(
            self._dialect,
            select(events.position, events.data, events.leaf)
            .where(events.position > bindparam("after"), events.position <= last, wanted)
            .order_by(events.position)
            .limit(READ_ROWS),
        )
        after = -1
        while rows := self._ask(page, after=after):
            for _, data, leaf in rows:
                yield bytes(data), bytes(leaf)
            if len(rows) < READ_ROWS:
                return
            after = rows[-1][0]

    def rows(self, after: int = -1, until: int | None = None) -> Iterator[RawRow]:
        """Rows with ``after < position <= until`` in order; raises DamagedPages."""
        for page in self.pages(after, until):
            for values in page:
                yield in_order(raw_row([_plain(value) for value in values]), after)
                after = values[0]

    def hidden(self, last: int, seen: int) -> tuple[int, Any] | None:
        """(count, a position) of rows that ``rows`` up to ``last`` passed over, None for none.

        A column that was made to hold other numbers may have some beyond the largest position.
        """
        position = EVENTS.c.position
        nowhere = or_(position.is_(None), position < 0, position > LARGEST_POSITION)
        below = or_(nowhere, position <= bindparam("last"))
        count = Statement(self._dialect, select(func.count()).where(below))
        ((found,),) = self._ask(count, last=last)
        if found == seen:
            return None
        twice = Statement(
            self._dialect,
            select(position)
            .where(below)
            .group_by(position)
            .having(or_(func.count() > 1, nowhere))
            .limit(1),
        )
        rows = self._ask(twice, last=last)
        return found - seen, _plain(rows[0][0]) if rows else None

    def meta(self) -> list[tuple[Any, Any]]:
        """(name, value) of what the store says about itself; raises DamagedPages."""
        return self._all(META, META.c.name, META.c.value)

    def heads(self) -> list[tuple[Any, Any]]:
        """(size, note) of the table of heads, smallest first, none where there is no such table."""
        rows = self._all(HEADS, HEADS.c.size, HEADS.c.note)
        return sorted(((_plain(size), _plain(note)) for size, note in rows), key=_order)

    def nodes(self) -> Iterator[tuple[Any, Any, Any]]:
        """(level, number, hash) of the table of nodes in order; raises DamagedPages."""
        rows = self._all(NODES, NODES.c.level, NODES.c.number, NODES.c.hash)
        yield from sorted((tuple(map(_plain, row)) for row in rows), key=_order)

    def revision(self) -> list[Any]:
        """What the table of the derived tables' revision holds; raises DamagedPages."""
        return [row[0] for row in self._all(REVISION, REVISION.c.version_num)]

    def _all(self, table: Table, *columns: ColumnElement[Any]) -> list[tuple[Any, ...]]:
        try:
            names = self._dialect.columns(self._connection, table.name)
        except self._dialect.errors as error:
            raise _unreadable(self._dialect.explain(error)) from error
        if not names:
            return []
        return [tuple(row) for row in self._ask(Statement(self._dialect, select(*columns)))]

    def split_keys(self) -> Iterator[tuple[str, str, Any, Any, int]]:
        """(job, key, first, last, count) of keys whose events are no single batch."""
        yield from self._ask(self._split)

    def _ask(self, statement: Statement, **values: Any) -> list[Any]:
        after = values.get("after", -1)
        return list(self._told(statement.text, after, statement.bind(**values)).fetchall())

    def _told(self, text: str, after: int, parameters: tuple[Any, ...] = ()) -> Any:
        """What the server answers; raises OutOfReach, or DamagedPages after a position."""
        try:
            return self._connection.execute(text, parameters)
        except self._dialect.errors as error:
            explained = self._dialect.explain(error)
            if isinstance(explained, LedgerUnreachable):
                raise OutOfReach(one_line(explained)) from error
            raise DamagedPages(after, one_line(error)) from error


def _unreadable(error: LedgerError) -> UnreadableStore:
    kind = OutOfReach if isinstance(error, LedgerUnreachable) else UnreadableStore
    return kind(one_line(error))


def _plain(value: Any) -> Any:
    """Bytes as bytes; the driver may give them as a view."""
    return bytes(value) if isinstance(value, memoryview | bytearray) else value


def _order(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """By number, and what is none after all that are: a column may have been made to hold it."""
    return tuple((0, v, "") if type(v) is int else (1, 0, repr(v)) for v in row[:2])

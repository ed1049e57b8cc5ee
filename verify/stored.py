"""Reads a ledger's rows as they are stored, damaged ones too, in short reads that block nobody."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shiftbook.ledger.dialect import open_dialect
from shiftbook.ledger.errors import LedgerError, LedgerUnreachable
from shiftbook.ledger.state import SHARED_TYPES
from shiftbook.ledger.tables import KNOWN, REVISION, STORAGE_SCHEMA
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.scan import sound_blocks
from shiftbook.verify.scan_block import COLUMNS, SELECT, Block, Page

READ_ROWS = 512
LARGEST_POSITION = 2**63 - 1
"""No store holds a larger whole number."""

HEAD = KNOWN[-1]

# The driver decodes names of columns as UTF-8 whatever they hold, and a damaged length may ask for
# more memory or a larger number than there is.
_DAMAGE = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of the table of events, nothing parsed: columns by name, bytes and stored leaf."""

    position: int
    columns: dict[str, Any]
    data: bytes
    leaf: bytes
    misfit: str | None = None
    """Which of bytes and leaf is stored as something else than bytes."""


class DamagedPages(Exception):
    """The store gave up in the middle of the table; ``after`` is the last position it gave."""

    expected, found = "a readable table of events", "pages that cannot be read: "

    def __init__(self, after: int, reason: str) -> None:
        super().__init__(reason)
        self.after, self.reason = after, reason


def _text(stored: bytes) -> str:
    """Text as it is stored; what is no UTF-8 stays apart from every text that is."""
    return stored.decode("utf-8", "surrogateescape")


def _plain(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class RawEvents:
    """The table of events of an SQLite ledger, opened for reading only.

    Raises UnreadableStore where the file cannot be opened as a ledger at all. What is wrong inside
    the table shows as rows that do not fit, or as DamagedPages.
    """

    keyed: bool
    """Whether positions are the key of the table: else it was made anew, and each page of it would
    be a search of all rows. It is then sorted once instead, in one long read."""

    def __init__(self, url: str) -> None:
        try:
            dialect = open_dialect(url, lock_timeout_s=5.0)
            exists = dialect.exists()
        except LedgerError as error:
            raise UnreadableStore(one_line(error)) from error
        if not exists or dialect.path is None:
            raise UnreadableStore(
                f"expected a ledger at {dialect.url}, found nothing; check the path"
            )
        self.path: Path = dialect.path
        try:
            self._connection: sqlite3.Connection = dialect.reader()
            self._connection.text_factory = _text
            marked = dialect.is_ledger(self._connection)
            table = self._connection.execute("PRAGMA table_info(events)").fetchall()
            names = {_plain(row[1]) for row in table}
            self.keyed = any(_plain(row[1]) == "position" and row[5] == 1 for row in table)
        except (LedgerUnreachable, *_DAMAGE) as error:
            raise UnreadableStore(
                f"expected a ledger at {self.path}, found a file that cannot be read as one "
                f"({one_line(error)}); check the path, or restore it from a copy"
            ) from error
        except LedgerError as error:
            raise UnreadableStore(one_line(error)) from error
        self._refuse_newer()
        lacking = sorted({*COLUMNS, "data", "leaf"} - names)
        if lacking:
            self._connection.close()
            what = f"without {', '.join(lacking[:3])}" if names else "without a table of events"
            raise UnreadableStore(
                f"expected a ledger at {self.path}, found a database {what}; check the path"
            )
        if not marked:
            self._connection.close()
            raise UnreadableStore(
                f"expected a ledger at {self.path}, found its tables without the mark of a ledger "
                "in the file's header: the file was edited or damaged; restore it from a copy"
            )

    def _refuse_newer(self) -> None:
        """Raise UnreadableStore for tables of a newer schema; a damaged number says nothing."""
        try:
            row = self._connection.execute(
                "SELECT value FROM meta WHERE name = 'storage_schema'"
            ).fetchone()
        except _DAMAGE:
            return
        found = str(_plain(row[0])) if row else ""
        if found.isdecimal() and STORAGE_SCHEMA < int(found[:9]) < 1000:
            self._connection.close()
            raise UnreadableStore(
                f"expected storage schema {STORAGE_SCHEMA} or older in {self.path}, found {found}; "
                "verify it with a newer Shiftbook"
            )
        try:
            refuse_newer_tables(self.revision(), self.path)
        except UnreadableStore:
            self._connection.close()
            raise
        except DamagedPages:
            return  # integrity says so

    def __enter__(self) -> RawEvents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def count(self, until: int | None = None) -> int:
        """Number of events up to a position, by the largest one; 0 where that cannot be told."""
        try:
            ((last,),) = self._connection.execute("SELECT max(position) FROM events").fetchall()
        except _DAMAGE:
            return 0
        if type(last) is not int:
            return 0
        return (last if until is None else min(last, until)) + 1

    def some(self, jobs: Collection[str], last: int) -> Iterator[tuple[bytes, bytes]]:
        """(bytes, leaf) of the events of some jobs up to a position, and of all jobs those that
        change what jobs share, read in this process; raises DamagedPages."""
        for row in self.rows(until=last):
            if row.columns["job"] in jobs or row.columns["type"] in SHARED_TYPES:
                yield row.data, row.leaf

    def blocks(
        self,
        until: int | None,
        sizes: Collection[int],
        evidence: Path | None = None,
        *,
        named: bool = True,
    ) -> Generator[Block]:
        """Sound blocks from 0 on, checked by all cores, as ``scan.sound_blocks`` gives them."""
        if not self.keyed:
            return
        yield from sound_blocks(self.path, self.count(until), sizes, evidence, named=named)

    def pages(self, after: int = -1, until: int | None = None) -> Iterator[Page]:
        """The same rows as ``rows`` gives, as they stand, some at a time; raises DamagedPages."""
        limit = LARGEST_POSITION if until is None else min(until, LARGEST_POSITION)
        if not self.keyed:
            yield from self._sorted(after, limit)
            return
        while page := self._page(after, limit):
            yield page
            if len(page) < READ_ROWS or type(page[-1][0]) is not int:
                return
            after = page[-1][0]

    def _sorted(self, after: int, limit: int) -> Iterator[Page]:
        """All pages of a table without its key, from one sort; SQLite keeps it on disk."""
        try:
            with closing(self._connection.execute(SELECT, (after, limit, -1))) as cursor:
                while page := cursor.fetchmany(READ_ROWS):
                    yield page
        except _DAMAGE as error:
            raise DamagedPages(after, one_line(error)) from error

    def _page(self, after: int, limit: int) -> Page:
        try:
            return self._connection.execute(SELECT, (after, limit, READ_ROWS)).fetchall()
        except _DAMAGE as error:
            raise DamagedPages(after, one_line(error)) from error

    def rows(self, after: int = -1, until: int | None = None) -> Iterator[RawRow]:
        """Rows with ``after < position <= until`` in order; raises DamagedPages."""
        for page in self.pages(after, until):
            for values in page:
                row = in_order(raw_row(values), after)
                after = row.position
                yield row

    def hidden(self, last: int, seen: int) -> tuple[int, Any] | None:
        """(count, a position) of rows that ``rows`` up to ``last`` passed over, None for none.

        A table whose key was taken away may hold a position twice, a negative one, or what is no
        position: a real, a text, a blob or nothing, which stand below the first or above the last.
        Raises DamagedPages.
        """
        # What was appended since stands above the last one too, as a whole number. Never through
        # an index, which may lack rows of the table.
        clause = "FROM events NOT INDEXED WHERE typeof(position) <> 'integer' OR +position <= ?"
        try:
            ((count,),) = self._connection.execute(f"SELECT count(*) {clause}", (last,)).fetchall()
            if count == seen:
                return None
            found = self._connection.execute(
                f"SELECT position {clause} GROUP BY position "
                "HAVING count(*) > 1 OR typeof(position) <> 'integer' OR position < 0 LIMIT 1",
                (last,),
            ).fetchall()
        except _DAMAGE as error:
            raise DamagedPages(last, one_line(error)) from error
        return count - seen, found[0][0] if found else None

    def meta(self) -> list[tuple[Any, Any]]:
        """(name, value) of what the store says about itself; raises DamagedPages."""
        return [(row[0], row[1]) for row in self._all("SELECT name, value FROM meta")]

    def revision(self) -> list[Any]:
        """What the table of the derived tables' revision holds; raises DamagedPages."""
        if REVISION.name not in self._tables():
            return []
        return [row[0] for row in self._all(f"SELECT version_num FROM {REVISION.name}")]

    def heads(self) -> list[tuple[Any, Any]]:
        """(size, note) of the table of heads in its order, none where there is no such table."""
        if "heads" not in self._tables():
            return []
        return [(row[0], row[1]) for row in self._all("SELECT size, note FROM heads")]

    def nodes(self) -> Iterator[tuple[Any, Any, Any]]:
        """(level, number, hash) of the table of nodes in its order; raises DamagedPages."""
        if "nodes" in self._tables():
            yield from self._all("SELECT level, number, hash FROM nodes ORDER BY level, number")

    def _tables(self) -> set[str]:
        return {str(row[0]) for row in self._all("SELECT name FROM sqlite_master")}

    def _all(self, query: str) -> list[tuple[Any, ...]]:
        try:
            return list(self._connection.execute(query).fetchall())
        except _DAMAGE as error:
            raise DamagedPages(-1, one_line(error)) from error

    def split_keys(self) -> Iterator[tuple[str, str, Any, Any, int]]:
        """(job, key, first, last, count) of keys whose events are no single batch."""
        try:
            found = self._connection.execute(
                "SELECT job, key, min(position), max(position), count(*) FROM events "
                "WHERE key IS NOT NULL GROUP BY job, key "
                "HAVING max(position) - min(position) + 1 <> count(*)"
            )
            for job, key, first, last, count in found:
                yield str(_plain(job)), str(_plain(key)), first, last, count
        except _DAMAGE as error:
            raise DamagedPages(-1, one_line(error)) from error


def raw_row(values: Sequence[Any]) -> RawRow:
    """A row from its values in the order of ``SELECT``, whatever kinds they are of."""
    columns = dict(zip(COLUMNS, values, strict=False))
    data, leaf = values[-2], values[-1]
    misfit = next(
        (
            f"{name} stored as {type(value).__name__}"
            for name, value in (("data", data), ("leaf", leaf))
            if not isinstance(value, bytes)
        ),
        None,
    )
    return RawRow(columns["position"], columns, _bytes(data), _bytes(leaf), misfit)


def in_order(row: RawRow, after: int) -> RawRow:
    """The row, where it stands after a position; raises DamagedPages for any other."""
    if type(row.position) is not int:
        raise DamagedPages(after, f"position {row.position!r:.60}, which is no number")
    if row.position <= after:
        why = f"position {row.position} came after {after}"
        raise DamagedPages(row.position - 1, why)
    return row


def refuse_newer_tables(revisions: Sequence[Any], where: object) -> None:
    """Raise UnreadableStore for derived tables that a newer build made."""
    newer = [r for r in revisions if isinstance(r, str) and re.fullmatch(r"\d{4}", r) and r > HEAD]
    if newer:
        raise UnreadableStore(
            f"expected tables of revision {HEAD} or older in {where}, found {newer[0]}; verify it "
            "with a newer Shiftbook"
        )


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return str(value).encode("utf-8", "surrogateescape")


def one_line(error: BaseException) -> str:
    """What an error says, in one line of bounded length."""
    return " ".join(str(error).split())[:400]

"""Bringing the columnar copy up to the ledger: events in batches, and the tables made of them.

``events`` always holds all; every other table is brought up when somebody reads it. Each table is
made by a file of the folder ``sql``. One that is behind takes the stretch that it lacks from the
copy's events, and then goes along with the batches that come from the ledger.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from shiftbook.ledger.errors import NotALedger
from shiftbook.ledger.mirror_samples import load_segments

if TYPE_CHECKING:
    from shiftbook.ledger.ledger import Ledger

TABLES = (
    "events",
    "reallocations",
    "candidates",
    "weight_syncs",
    "weight_deliveries",
    "iterations",
    "windows",
    "leases",
    "checkpoints",
    "samples",
    "findings",
    "shadows",
)
"""Tables that are a contract; each is made by the ``.sql`` file of its name."""

STEPPED = frozenset({"reallocations", "weight_syncs", "weight_deliveries"})
"""Tables with a row for an operation, which is made again of all its events when it goes on."""

LAYOUT = 7
"""Version of the tables; a copy of another layout is built again from the first event."""

BATCH_EVENTS = 61_440
"""Events taken in at once: bounds the memory. Whole row groups of the file, see ROW_GROUP."""

ROW_GROUP = 20_480
"""Rows of a row group in the file. A batch is whole groups of events, which go straight to their
place; what does not fill one is written twice, to the log and by a checkpoint."""

ASIDE = "aside"
"""Name, within the connection that builds, of the place for events that are taken apart and in no
table yet."""

_EVENT_TYPE = re.compile(r"'([A-Z][A-Za-z]+)'")
"""A type of event as a projection names it."""


def refresh(connection: duckdb.DuckDBPyConnection, ledger: Ledger, wanted: Collection[str]) -> None:
    """Take in every event that the copy lacks, into ``events`` and the wanted tables.

    Each batch is a transaction. Raises NotALedger where something stored is no event.
    """
    size = ledger.head().size
    names = [name for name in TABLES if name == "events" or name in wanted]
    connection.execute(f"ATTACH ':memory:' AS {ASIDE}")
    try:
        reached = _reached(connection, ledger)
        if reached is None:
            _start_over(connection, ledger)
            reached = dict.fromkeys(TABLES, -1)
        after = reached["events"]
        _catch_up(connection, {name: reached[name] for name in names}, after)
        if after + 1 < size:
            for last, fresh in _fresh_batches(connection, ledger, names, after, size - 1):
                with _transaction(connection):
                    _name_fresh(connection, fresh)
                    _take_in(connection, names)
                    _note(connection, names, last)
                    leaf = ledger.event(last).leaf.hex()
                    connection.execute("UPDATE mirror_state SET leaf = ?", [leaf])
    except (duckdb.InvalidInputException, duckdb.ConversionException) as error:
        raise NotALedger(
            f"expected events in JSON in {ledger.url}, found one that is not "
            f"({str(error).splitlines()[0]}); `shiftbook verify` says which"
        ) from error
    for view in ("steps", "fresh_windows", "fresh"):
        connection.execute(f"DROP VIEW IF EXISTS temp.{view}")
    connection.execute(f"DETACH {ASIDE}")
    if "samples" in names:
        load_segments(connection, ledger)


@contextlib.contextmanager
def _transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    connection.execute("BEGIN")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _reached(connection: duckdb.DuckDBPyConnection, ledger: Ledger) -> dict[str, int] | None:
    """Last position in each table; None where the copy is empty, or of another ledger or layout."""
    try:
        state = connection.execute("SELECT layout, leaf FROM mirror_state").fetchone()
        if state is None or state[0] != LAYOUT:
            return None
        rows = connection.execute("SELECT name, position FROM mirror_tables").fetchall()
    except duckdb.CatalogException:
        return None
    reached = {str(name): int(position) for name, position in rows}
    last = reached.get("events", -1)
    if last >= ledger.head().size or reached.keys() != set(TABLES):
        return None
    return reached if last < 0 or ledger.event(last).leaf.hex() == state[1] else None


def _start_over(connection: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
    for kind, name in connection.execute(
        "SELECT CASE table_type WHEN 'VIEW' THEN 'VIEW' ELSE 'TABLE' END, table_name "
        "FROM information_schema.tables WHERE table_schema = 'main' AND table_catalog NOT IN "
        "('temp', 'system') ORDER BY table_type DESC"
    ).fetchall():
        connection.execute(f'DROP {kind} "{name}"')
    connection.execute("CREATE TABLE mirror_state (layout INTEGER, leaf VARCHAR)")
    connection.execute("INSERT INTO mirror_state VALUES (?, NULL)", [LAYOUT])
    connection.execute("CREATE TABLE mirror_tables (name VARCHAR, position BIGINT)")
    connection.execute("INSERT INTO mirror_tables SELECT unnest(?), -1", [list(TABLES)])
    connection.execute(projection("macros"))
    nothing = EventBatch(ledger, -1, -1)
    _name_fresh(connection, _fresh(connection, "0", nothing, TABLES))
    _take_in(connection, TABLES, make=True)


def _note(connection: duckdb.DuckDBPyConnection, names: Collection[str], position: int) -> None:
    connection.execute(
        "UPDATE mirror_tables SET position = ? WHERE name IN (SELECT unnest(?))",
        [position, list(names)],
    )


def _catch_up(connection: duckdb.DuckDBPyConnection, reached: dict[str, int], until: int) -> None:
    """Bring tables up to a position of ``events``, those that are furthest behind first."""
    while (low := min(reached.values())) < until:
        names = [name for name, position in reached.items() if position == low]
        ahead = [position for position in reached.values() if position > low]
        high = min(low + BATCH_EVENTS, *ahead)
        with _transaction(connection):
            _view(connection, "fresh", f"FROM events WHERE position > {low} AND position <= {high}")
            if "windows" in names:
                _view(connection, "fresh_windows", projection("fresh_windows"))
            _take_in(connection, names)
            _note(connection, names, high)
        reached.update(dict.fromkeys(names, high))


def _fresh_batches(
    connection: duckdb.DuckDBPyConnection,
    ledger: Ledger,
    names: Sequence[str],
    after: int,
    until: int,
) -> Iterator[tuple[int, dict[str, str]]]:
    """Batches of the events after a position, taken apart: the last position, and the tables.

    A thread reads and takes apart the next batch while the last one is used; so there are two
    sets of tables, in turn.
    """
    batches = enumerate(event_batches(ledger, after, until))
    with ThreadPoolExecutor(1) as pool, contextlib.closing(connection.cursor()) as cursor:

        def make() -> tuple[int, dict[str, str]] | None:
            number, batch = next(batches, (0, None))
            if batch is None:
                return None
            return batch.until, _fresh(cursor, str(number % 2), batch, names)

        coming = pool.submit(make)
        while (made := coming.result()) is not None:
            coming = pool.submit(make)
            yield made


def _fresh(
    connection: duckdb.DuckDBPyConnection, suffix: str, batch: EventBatch, names: Collection[str]
) -> dict[str, str]:
    """Take stored events apart into tables with that suffix; these by what they hold."""
    made = {"fresh": f"{ASIDE}.fresh_{suffix}"}
    batch.take_apart(
        connection, f"CREATE OR REPLACE TABLE {made['fresh']} AS {projection('fresh')}"
    )
    if "windows" in names:
        made["fresh_windows"] = f"{ASIDE}.fresh_windows_{suffix}"
        _view(connection, "fresh", f"FROM {made['fresh']}")
        select = projection("fresh_windows")
        connection.execute(f"CREATE OR REPLACE TABLE {made['fresh_windows']} AS {select}")
    return made


def _name_fresh(connection: duckdb.DuckDBPyConnection, made: dict[str, str]) -> None:
    for name, table in made.items():
        _view(connection, name, f"FROM {table}")


def _view(connection: duckdb.DuckDBPyConnection, name: str, select: str) -> None:
    connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {select}")


def _take_in(
    connection: duckdb.DuckDBPyConnection, names: Collection[str], *, make: bool = False
) -> None:
    """Project the fresh events into those of the tables that they concern.

    A projection concerns events of the types that it names; with ``make`` all run.
    """
    if "events" in names:
        connection.execute(projection("events"))
    present = {row[0] for row in connection.execute("SELECT DISTINCT type FROM fresh").fetchall()}
    concerned = [
        name
        for name in TABLES[1:]
        if name in names and (make or present.intersection(_EVENT_TYPE.findall(projection(name))))
    ]
    if STEPPED.intersection(concerned):
        connection.execute(projection("steps"))
    for name in concerned:
        connection.execute(projection(name))


@cache
def projection(name: str) -> str:
    """SQL that makes one table and takes the new events in."""
    return files("shiftbook.ledger.sql").joinpath(f"{name}.sql").read_text(encoding="utf-8")


class EventBatch:
    """Stored events of a stretch, read a page at a time as a query asks for them."""

    schema = pa.schema([("data", pa.string())])

    def __init__(self, ledger: Ledger, after: int, until: int) -> None:
        self.until = until
        self._ledger, self._after = ledger, after
        self._read = 0
        self._failed: BaseException | None = None

    def take_apart(self, connection: duckdb.DuckDBPyConnection, statement: str) -> None:
        """Run a statement that reads the events once, as ``incoming.data``.

        Raises NotALedger where some are missing, and what reading raises as it is.
        """
        reader = pa.RecordBatchReader.from_batches(self.schema, self._pages())
        connection.register("incoming", reader)
        try:
            connection.execute(statement)
        except duckdb.Error:
            if self._failed is not None:
                raise self._failed from None
            raise
        finally:
            connection.unregister("incoming")
        if self._read != self.until - self._after:
            raise NotALedger(
                f"expected {self.until - self._after} events after position {self._after}, found "
                f"{self._read}; run `shiftbook verify` on this ledger"
            )

    def _pages(self) -> Iterator[pa.RecordBatch]:
        try:
            for sizes, data in self._ledger.pages(self._after, until=self.until):
                self._read += len(sizes)
                yield pa.record_batch([_texts(sizes, data)], self.schema)
        except BaseException as error:
            # The query that asks would tell of it in words of its own.
            self._failed = error
            raise


def event_batches(ledger: Ledger, after: int, until: int) -> Iterator[EventBatch]:
    """Stored events after a position, up to and with another, in batches."""
    # Through the ledger's own connection: a second SQLite library in one process, such as a
    # columnar reader brings, drops the locks of the first when it closes the file.
    for start in range(after, until, BATCH_EVENTS):
        yield EventBatch(ledger, start, min(start + BATCH_EVENTS, until))


def _texts(sizes: Sequence[int], data: bytes) -> pa.Array:
    """An Arrow column of texts that stand one after the other."""
    ends = array("i", accumulate(sizes, initial=0))
    parts = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    try:
        texts = pa.Array.from_buffers(pa.string(), len(sizes), parts)
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise NotALedger(
            f"expected events in UTF-8, found one that is not ({error}); "
            "`shiftbook verify` says which"
        ) from error
    return texts

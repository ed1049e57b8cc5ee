"""A columnar copy of the ledger in DuckDB, made by position: what analytics and the report read.

The copy stands beside the ledger (``<ledger>.mirror.duckdb``), that of a server's ledger in the
user's cache folder, or in memory where such a folder cannot be written. It is built under a lock,
read through a read-only connection that can reach no file, and may be deleted at any time. The
tables are the ``.sql`` files beside this module.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from shiftbook.ledger.errors import NotALedger
from shiftbook.ledger.file_lock import FileLock
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

FRESH = ("fresh", "fresh_windows")
"""What is made of the events of a batch before any table takes them in, by the ``.sql`` file of
its name."""

LAYOUT = 6
"""Version of the tables; a mirror of another layout is built again from the first event."""

BATCH_EVENTS = 61_440
"""Events taken in at once: bounds the memory, about 60 MB at 1 kB an event, held twice while the
next batch is read."""

BUILT_WITH = {"memory_limit": "200MB", "checkpoint_threshold": "512MB"}
"""Settings while the file is built. What needs more memory is spilled beside it. Checkpoints are
rare, since each compresses the last row group of every table again."""

ROW_GROUP = 20_480
"""Rows of a row group in the file. A batch is whole groups of events, which go straight to their
place; what does not fill one is written twice, to the log and by a checkpoint."""

COPY, ASIDE = "copy", "aside"
"""Names, within the connection that builds it, of the file and of the place for events that are
taken apart and in no table yet."""

LOCK_TIMEOUT_S = 60.0
"""Longest wait for another process that builds the mirror."""

LOCKED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    # DuckDB would still let a query read the copy's own file, and spill beside it.
    "disabled_filesystems": "'LocalFileSystem'",
    "lock_configuration": "true",
}
"""Settings under which queries run, in the order in which they can be made: no file, no network,
and no way back. What does not fit into memory fails instead of being spilled."""

NO_PYTHON = {"python_enable_replacements": "false"}
"""Setting of every connection: a table's name never means a Python variable."""

_EVENT_TYPE = re.compile(r"'([A-Z][A-Za-z]+)'")
"""A type of event as a projection names it."""

_open_here: set[str] = set()
"""Mirror files that this process has open: DuckDB shares one instance of a file in a process."""


@dataclass
class Mirror:
    """An up-to-date, read-only, locked copy of a ledger."""

    connection: duckdb.DuckDBPyConnection
    path: Path | None
    """The file, or None for a copy in memory."""
    size: int
    """Events in the copy."""
    missing_segments: int
    """Evidence segments that could not be read; their samples are not in ``samples``."""

    @classmethod
    def open(cls, ledger: Ledger, *, in_memory: bool = False) -> Mirror:
        """Bring the copy of a ledger up to its head and open it for reading.

        Raises LedgerUnreachable where another process builds it for longer than a minute.
        """
        path = None if in_memory else _writable(ledger)
        if path is None or os.fspath(path) in _open_here:
            return cls._in_memory(ledger)
        with _locked(path):
            try:
                _refresh_file(path, ledger)
                connection = duckdb.connect(path, read_only=True, config=dict(NO_PYTHON))
            except (OSError, duckdb.IOException):
                # No room, or a file that is somebody else's: it is only a copy.
                return cls._in_memory(ledger)
        _open_here.add(os.fspath(path))
        return cls._finish(connection, path)

    @classmethod
    def _in_memory(cls, ledger: Ledger) -> Mirror:
        connection = duckdb.connect(":memory:", config=dict(NO_PYTHON))
        _refresh(connection, ledger)
        return cls._finish(connection, None)

    @classmethod
    def _finish(cls, connection: duckdb.DuckDBPyConnection, path: Path | None) -> Mirror:
        for name, value in LOCKED.items():
            connection.execute(f"SET {name} = {value}")
        size = _one(connection, "SELECT count(*) FROM events")
        missing = _one(connection, "SELECT count(*) FROM segments WHERE NOT loaded")
        return cls(connection, path, size, missing)

    def rows(self, sql: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
        """Run a trusted query; a dictionary for each row."""
        cursor = self.connection.cursor()
        cursor.execute(sql, list(parameters))
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def close(self) -> None:
        """Close the copy."""
        self.connection.close()
        if self.path is not None:
            _open_here.discard(os.fspath(self.path))

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _writable(ledger: Ledger) -> Path | None:
    """Where the copy of a ledger stands; None where nothing can be written there."""
    try:
        path = ledger.beside(".mirror.duckdb")
        if ledger.path is None:
            # In the user's cache, and like the ledger nobody else's to read.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no room, or a user without a home
        return None
    return path if os.access(path.parent, os.W_OK) else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path.with_name(path.name + ".lock"), LOCK_TIMEOUT_S)
    lock.acquire()
    try:
        yield
    finally:
        lock.close()


def _refresh_file(path: Path, ledger: Ledger) -> None:
    """Bring the file up to the ledger's head. The lock is held.

    A reader of another process keeps DuckDB from opening the file for writing. Then a copy is
    brought up and put in its place; that reader goes on with the file it has.
    """
    beside = path.with_name(path.name + ".new")
    _remove(beside)
    try:
        connection = _building(path)
    except duckdb.IOException:
        shutil.copyfile(path, beside)
        try:
            connection = _building(beside)
        except duckdb.Error:
            # Not a database, or of a newer DuckDB: it is only a copy, so it is made again.
            _remove(beside)
            connection = _building(beside)
        with contextlib.closing(connection):
            _refresh(connection, ledger)
        beside.replace(path)
        return
    with contextlib.closing(connection):
        _refresh(connection, ledger)


def _building(path: Path) -> duckdb.DuckDBPyConnection:
    """Open the file for writing, making it where there is none; raises IOException."""
    settings: dict[str, Any] = {**BUILT_WITH, "temp_directory": f"{path}.tmp"}
    connection = duckdb.connect(":memory:", config=settings)
    try:
        quoted = os.fspath(path).replace("'", "''")
        connection.execute(f"ATTACH '{quoted}' AS {COPY} (ROW_GROUP_SIZE {ROW_GROUP})")
        connection.execute(f"USE {COPY}")
    except BaseException:
        connection.close()
        raise
    return connection


def _remove(path: Path) -> None:
    for name in (path, path.with_name(path.name + ".wal")):
        name.unlink(missing_ok=True)


def _refresh(connection: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
    """Take in every event after the last one that the copy holds, each batch in a transaction."""
    after = _usable_position(connection, ledger)
    size = ledger.head().size
    connection.execute(f"ATTACH ':memory:' AS {ASIDE}")
    try:
        if after < 0:
            _start_over(connection)
        if after + 1 < size:
            for fresh in _fresh_batches(connection, ledger, after, size - 1):
                _take_in_batch(connection, ledger, fresh)
    except (duckdb.InvalidInputException, duckdb.ConversionException) as error:
        raise NotALedger(
            f"expected events in JSON in {ledger.url}, found one that is not "
            f"({str(error).splitlines()[0]}); `shiftbook verify` says which"
        ) from error
    for view in ("steps", *FRESH):
        connection.execute(f"DROP VIEW IF EXISTS {view}")
    connection.execute(f"DETACH {ASIDE}")
    load_segments(connection, ledger)


def _take_in_batch(connection: duckdb.DuckDBPyConnection, ledger: Ledger, fresh: str) -> None:
    """Take one batch into every table, in one transaction with the position that it reaches."""
    connection.execute("BEGIN")
    _take_in(connection, fresh)
    last = _one(connection, "SELECT max(position) FROM fresh")
    leaf = ledger.event(last).leaf.hex()
    connection.execute("DELETE FROM mirror_state")
    connection.execute("INSERT INTO mirror_state VALUES (?, ?, ?)", [LAYOUT, last, leaf])
    connection.execute("COMMIT")


def _fresh_batches(
    connection: duckdb.DuckDBPyConnection, ledger: Ledger, after: int, until: int
) -> Iterator[str]:
    """Names for sets of tables with the events after a position, taken apart, a batch each.

    A thread reads and takes apart the next batch while the last one is used; so there are two
    sets, in turn.
    """
    batches = enumerate(event_batches(ledger, after, until))
    with ThreadPoolExecutor(1) as pool, contextlib.closing(connection.cursor()) as cursor:

        def make() -> str | None:
            number, batch = next(batches, (0, None))
            return None if batch is None else _fresh(cursor, str(number % 2), batch)

        coming = pool.submit(make)
        while (name := coming.result()) is not None:
            coming = pool.submit(make)
            yield name


def _fresh(connection: duckdb.DuckDBPyConnection, name: str, batch: pa.Table) -> str:
    """Take stored events (column ``data``) apart into a set of tables of that name; the name."""
    connection.register("incoming", batch)
    for table in FRESH:
        select = projection(table)
        connection.execute(f"CREATE OR REPLACE TABLE {ASIDE}.{table}_{name} AS {select}")
        _name_fresh(connection, table, name)
    connection.unregister("incoming")
    return name


def _name_fresh(connection: duckdb.DuckDBPyConnection, table: str, name: str) -> None:
    connection.execute(
        f"CREATE OR REPLACE TEMP VIEW {table} AS SELECT * FROM {ASIDE}.{table}_{name}"
    )


def _usable_position(connection: duckdb.DuckDBPyConnection, ledger: Ledger) -> int:
    """Last position in the copy; -1 where it is empty, of another layout or another ledger."""
    try:
        row = connection.execute("SELECT layout, position, leaf FROM mirror_state").fetchone()
    except duckdb.CatalogException:
        return -1
    if row is None or row[0] != LAYOUT or row[1] >= ledger.head().size:
        return -1
    return int(row[1]) if ledger.event(row[1]).leaf.hex() == row[2] else -1


def _start_over(connection: duckdb.DuckDBPyConnection) -> None:
    for kind, name in connection.execute(
        "SELECT CASE table_type WHEN 'VIEW' THEN 'VIEW' ELSE 'TABLE' END, table_name "
        "FROM information_schema.tables WHERE table_schema = 'main' AND table_catalog NOT IN "
        "('temp', 'system') ORDER BY table_type DESC"
    ).fetchall():
        connection.execute(f'DROP {kind} "{name}"')
    connection.execute("CREATE TABLE mirror_state (layout INTEGER, position BIGINT, leaf VARCHAR)")
    connection.execute(projection("macros"))
    nothing = pa.table({"data": pa.array([], pa.string())})
    _take_in(connection, _fresh(connection, "0", nothing), make=True)


def _take_in(connection: duckdb.DuckDBPyConnection, fresh: str, *, make: bool = False) -> None:
    """Project one batch of events into the tables that it concerns.

    A projection concerns a batch that has an event of a type it names; with ``make`` all run.
    """
    for table in FRESH:
        _name_fresh(connection, table, fresh)
    connection.execute(projection("events"))
    present = {row[0] for row in connection.execute("SELECT DISTINCT type FROM fresh").fetchall()}
    for name in TABLES[1:]:
        sql = projection(name)
        if make or present.intersection(_EVENT_TYPE.findall(sql)):
            connection.execute(sql)


@cache
def projection(name: str) -> str:
    """SQL that makes one table and takes the new events in."""
    return files("shiftbook.ledger.sql").joinpath(f"{name}.sql").read_text(encoding="utf-8")


def event_batches(ledger: Ledger, after: int, until: int) -> Iterator[pa.Table]:
    """Stored events after a position, up to and with another, as tables with column ``data``."""
    # Through the ledger's own connection: a second SQLite library in one process, such as a
    # columnar reader brings, drops the locks of the first when it closes the file.
    for start in range(after, until, BATCH_EVENTS):
        yield _read_batch(ledger, start, until)


def _read_batch(ledger: Ledger, start: int, until: int) -> pa.Table:
    """One batch; each page of it is a chunk, so that DuckDB's threads share it."""
    stop = min(start + BATCH_EVENTS, until)
    chunks = [
        _texts([_bytes(data) for _, data in page]) for page in ledger.pages(start, until=stop)
    ]
    batch = pa.table({"data": pa.chunked_array(chunks, pa.string())})
    if batch.num_rows != stop - start:
        raise NotALedger(
            f"expected {stop - start} events after position {start}, found {batch.num_rows}; "
            "run `shiftbook verify` on this ledger"
        )
    return batch


def _bytes(data: Any) -> bytes:
    return data if isinstance(data, bytes) else str(data).encode()


def _texts(data: list[bytes]) -> pa.Array:
    """An Arrow column of texts, from its parts: three times as fast as from a list."""
    ends = array("i", accumulate(map(len, data), initial=0))
    parts = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(data))]
    try:
        texts = pa.Array.from_buffers(pa.string(), len(data), parts)
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise NotALedger(
            f"expected events in UTF-8, found one that is not ({error}); "
            "`shiftbook verify` says which"
        ) from error
    return texts


def _one(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    row = connection.execute(sql).fetchone()
    assert row is not None
    return row[0]

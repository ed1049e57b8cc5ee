"""A columnar copy of the ledger in DuckDB, made by position: what analytics and the report read.

The copy stands beside the ledger (``<ledger>.mirror.duckdb``), that of a server's ledger in the
user's cache folder, or in memory where such a folder cannot be written. It is built under a lock,
read through a read-only connection that can reach no file, and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from shiftbook.ledger.file_lock import FileLock
from shiftbook.ledger.mirror_build import ROW_GROUP, TABLES, refresh

if TYPE_CHECKING:
    from shiftbook.ledger.ledger import Ledger

BUILT_WITH = {"memory_limit": "250MB", "checkpoint_threshold": "512MB"}
"""Settings while the file is built. What needs more memory is spilled beside it. Checkpoints are
rare, since each compresses the last row group of every table again."""

COPY = "copy"
"""Name, within the connection that builds it, of the file."""

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
    """Evidence segments that could not be read; their samples are not in ``samples``. Only counted
    where that table was asked for."""

    @classmethod
    def open(
        cls, ledger: Ledger, tables: Collection[str] = TABLES, *, in_memory: bool = False
    ) -> Mirror:
        """Bring the copy of a ledger up to its head and open it for reading.

        ``events`` is always brought up, of the other tables those that are asked for: the rest stay
        as they were, and are not to be read. Raises LedgerUnreachable where another process builds
        the copy for longer than a minute.
        """
        unknown = sorted(set(tables).difference(TABLES))
        if unknown:
            raise ValueError(f"expected tables of {', '.join(TABLES)}, found {', '.join(unknown)}")
        path = None if in_memory else _writable(ledger)
        if path is None or os.fspath(path) in _open_here:
            return cls._in_memory(ledger, tables)
        with _locked(path):
            try:
                _refresh_file(path, ledger, tables)
                connection = duckdb.connect(path, read_only=True, config=dict(NO_PYTHON))
            except (OSError, duckdb.IOException):
                # No room, or a file that is somebody else's: it is only a copy.
                return cls._in_memory(ledger, tables)
        _open_here.add(os.fspath(path))
        return cls._finish(connection, path, tables)

    @classmethod
    def _in_memory(cls, ledger: Ledger, tables: Collection[str]) -> Mirror:
        connection = duckdb.connect(":memory:", config=dict(NO_PYTHON))
        refresh(connection, ledger, tables)
        return cls._finish(connection, None, tables)

    @classmethod
    def _finish(
        cls, connection: duckdb.DuckDBPyConnection, path: Path | None, tables: Collection[str]
    ) -> Mirror:
        for name, value in LOCKED.items():
            connection.execute(f"SET {name} = {value}")
        size = _one(connection, "SELECT count(*) FROM events")
        missing = 0
        if "samples" in tables:
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


def _refresh_file(path: Path, ledger: Ledger, tables: Collection[str]) -> None:
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
            refresh(connection, ledger, tables)
        beside.replace(path)
        return
    with contextlib.closing(connection):
        refresh(connection, ledger, tables)


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


def _one(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    row = connection.execute(sql).fetchone()
    assert row is not None
    return row[0]

"""The one layer that knows which database it is: URLs, locks, pragmas, triggers and error codes.

The stores of this build are in sqlite.py and postgres.py. Another database is another subclass of
``Dialect``; tables, queries and everything above are shared.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine import Dialect as SqlDialect
from sqlalchemy.exc import ArgumentError

from shiftbook.ledger.errors import (
    InvalidURL,
    LedgerError,
    MissingExtra,
)

if TYPE_CHECKING:
    from shiftbook.ledger.tables import Statements

KNOWN_URLS = (
    "sqlite:///FILE (relative), sqlite:////FILE (absolute) or postgresql+psycopg://HOST/DATABASE"
)

Connection = Any
"""A DBAPI connection; its cursor's ``execute`` takes positional parameters."""


class Waker(Protocol):
    """Tells followers that something may have been committed; they look by themselves as well."""

    def wait(self, timeout_s: float, stop: threading.Event) -> None:
        """Return at the next commit, or when ``stop`` is set, or after ``timeout_s`` at most."""

    def close(self) -> None:
        """Give back its connection."""


class Dialect(ABC):
    """What a store needs of a database."""

    url: str
    """Without credentials."""
    path: Path | None
    """File of the ledger, where it has one."""
    schema: str | None = None
    """Schema of the tables, where the database has such."""
    sql: SqlDialect
    """SQLAlchemy's dialect, which compiles the statements."""
    errors: tuple[type[Exception], ...]
    """Exceptions that the driver raises."""
    begin: str
    """Statement that opens a writing transaction, and takes the append lock if ``lock`` did not."""
    readers = 1
    """Most reading connections of one handle."""
    retry_s = 0.0
    """How long a call goes on trying after its connection broke; 0 where none can break."""
    poll_s = 0.05
    """Pause of ``follow`` between two looks at the head."""

    @abstractmethod
    def beside(self, suffix: str) -> Path:
        """A file or folder of this machine that belongs to the ledger, such as ``.mirror.duckdb``:
        beside its file, or in a folder of the user's where it has none. Need not exist."""

    @abstractmethod
    def columns(self, connection: Connection, table: str) -> set[str]:
        """Names of the columns of a table; empty where there is no such table."""

    @abstractmethod
    def keyed(self, connection: Connection, table: str, columns: Sequence[str]) -> bool:
        """Say whether rows of a table are found by these columns without a search of all."""

    def broken(self, connection: Connection, error: Exception) -> bool:
        """Say whether the connection itself is gone, so that another one may do."""
        return False

    def waker(self) -> Waker | None:
        """What wakes followers earlier than their next look, where there is such a thing."""
        return None

    def write(
        self, connection: Connection, statements: Statements, rows: Sequence[tuple[Any, ...]]
    ) -> None:
        """Insert rows of events, many in one statement."""
        statements.insert_rows(connection, rows)

    @abstractmethod
    def exists(self) -> bool:
        """Say whether there is something at the URL."""

    @abstractmethod
    def create(self, build: Callable[[Connection], None]) -> None:
        """Make a new store in one step: all of it is there afterwards, or nothing."""

    @abstractmethod
    def writer(self) -> Connection:
        """Open a connection for the one committer; called and closed under ``lock``."""

    @abstractmethod
    def reader(self) -> Connection:
        """Open a connection that cannot write."""

    @abstractmethod
    def check_log(self, connection: Connection) -> None:
        """Raise LedgerUnreachable where a connection no longer sees what others write."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the dialect itself holds."""

    @abstractmethod
    def is_ledger(self, connection: Connection) -> bool:
        """Say whether the database carries the ledger's mark."""

    @abstractmethod
    def lock(self) -> None:
        """Keep every other writer of every process out; raise LedgerUnreachable after the limit."""

    @abstractmethod
    def unlock(self) -> None:
        """Let them in again."""

    @abstractmethod
    def tree_triggers(self) -> Sequence[str]:
        """Statements that let the tables of heads and nodes grow in order, and in no other way."""

    @abstractmethod
    def triggers(self) -> Sequence[str]:
        """Statements that make the table ``events`` append-only and gapless."""

    @abstractmethod
    def explain(self, error: Exception, *, committing: bool = False) -> LedgerError:
        """Put the driver's error in words; ``committing`` says whether a commit had begun."""

    @abstractmethod
    def committed(self, connection: Connection, written_bytes: int) -> None:
        """Do what is due after a commit, under the lock; never raises: the commit stands."""

    @abstractmethod
    def settle(self, connection: Connection) -> None:
        """Make durable, by another way, what a failed sync may have left in memory only."""


def abandon(connection: Connection) -> None:
    """Keep a connection from ever being closed, since closing could touch what others write.

    Python closes what it collects, also at its exit, so the reference is given away for good.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def open_dialect(url: str, *, lock_timeout_s: float) -> Dialect:
    """Find the dialect of a URL; raise InvalidURL, without its credentials, where there is none."""
    try:
        parsed: URL = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise InvalidURL(
            f"expected a ledger URL, {KNOWN_URLS}, found text that is no database URL"
        ) from error
    shown = URL.create(
        parsed.drivername, host=parsed.host, port=parsed.port, database=parsed.database
    ).render_as_string()
    if parsed.drivername == "postgresql+psycopg":
        return _open_postgres(parsed, lock_timeout_s)
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise InvalidURL(f"this build knows {KNOWN_URLS}, found {shown}; use such a URL")
    if parsed.host or parsed.query or parsed.username:
        raise InvalidURL(
            f"expected {KNOWN_URLS} without host, user or options, found {shown}; "
            "a relative path takes three slashes, an absolute one four"
        )
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidURL(
            f"expected a file, {KNOWN_URLS}, found {shown}, which is kept in memory only; "
            "name a file"
        )
    from shiftbook.ledger.sqlite import SqliteDialect

    return SqliteDialect(Path(parsed.database), lock_timeout_s=lock_timeout_s)


def side_path(url: str, suffix: str) -> Path:
    """A file or folder of this machine that belongs to the ledger of a URL, see
    ``Dialect.beside``; connects to nothing. Raises InvalidURL where it names no store."""
    return open_dialect(url, lock_timeout_s=0.0).beside(suffix)


def public_url(url: str) -> str:
    """A ledger's URL as it may be stored and shown: without user, password and options.

    Raises InvalidURL where it names no store.
    """
    if url.startswith("sqlite:"):
        return url
    return open_dialect(url, lock_timeout_s=0.0).url


def _open_postgres(parsed: URL, lock_timeout_s: float) -> Dialect:
    try:
        from shiftbook.ledger.postgres import PostgresDialect
    except ImportError as error:  # also where psycopg is there and its library is not
        if "psycopg" not in f"{error.name} {error}":
            raise
        raise MissingExtra("postgres", "psycopg") from error
    return PostgresDialect(parsed, lock_timeout_s=lock_timeout_s)

"""SQLite as a store: a file, its write-ahead log, and the lock file that keeps both in order."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from shiftbook.ledger.dialect import Connection, Dialect
from shiftbook.ledger.durable import sync_path
from shiftbook.ledger.errors import (
    AppendInDoubt,
    InvalidEvent,
    LedgerError,
    LedgerUnreachable,
    NotALedger,
)
from shiftbook.ledger.file_lock import FileLock

APPLICATION_ID = 0x53484654
"""``SHFT`` in the header of the SQLite file, so that nobody else's file is taken for a ledger."""

CHECKPOINT_BYTES = 4 << 20
"""Bytes of write-ahead log after which its content is copied into the database file."""

_STALE: set[tuple[int, int]] = set()
"""Databases that this process must not touch any more, by device and inode."""


class SqliteDialect(Dialect):
    """A file, its write-ahead log, and a lock file beside it.

    The SQLite of many Pythons loses commits when two connections write and checkpoint at once
    (3.7.0 to 3.51.2), so every transaction, every checkpoint and every close of a writing
    connection stands under the file lock.
    """

    errors = (sqlite3.Error,)
    begin = "BEGIN IMMEDIATE"

    def __init__(self, path: Path, *, lock_timeout_s: float) -> None:
        self.path: Path = path
        self.url = f"sqlite:///{path}"
        self.sql = SQLiteDialect_pysqlite(paramstyle="qmark")
        self._timeout_s = lock_timeout_s
        self._lock = FileLock(path.with_name(path.name + ".lock"), lock_timeout_s)
        self._log = path.with_name(path.name + "-wal")
        self._inode: tuple[int, int] | None = None
        self._logs: dict[int, tuple[int, int] | None] = {}
        self._unchecked_bytes = 0
        self.checkpoint_error: str | None = None
        """Why the last checkpoint failed; it is tried again later and no event depends on it."""

    def exists(self) -> bool:
        """Say whether a file is there; raise NotALedger where it is something else."""
        if self.path.is_dir():
            inside = sorted(self.path.glob("*.db"))
            like = f", such as {inside[0]}" if inside else ""
            raise NotALedger(
                f"expected a ledger file at {self.path}, found a folder; name the file{like}"
            )
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return False
        except OSError as error:
            raise LedgerUnreachable(
                f"expected to reach {self.path}, found: {error.strerror}; check the path"
            ) from error
        if size == 0:
            # A new ledger appears under its name complete, so an empty file is never one.
            raise NotALedger(
                f"expected a ledger at {self.path}, found an empty file; "
                "remove it if it was never a ledger, else restore it from a copy"
            )
        return True

    def create(self, build: Callable[[Connection], None]) -> None:
        """Build the file under another name and link it into place."""
        folder = self.path.parent
        if not folder.is_dir():
            raise LedgerUnreachable(
                f"expected a folder {folder} for the ledger, found none; make it, or name another"
            )
        self._lock.acquire()
        draft = self.path.with_name(f"{self.path.name}.new-{os.getpid()}-{threading.get_ident()}")
        try:
            if self.exists():
                return
            try:
                with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
                    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                    connection.execute("PRAGMA journal_mode=wal").fetchone()
                    connection.execute("PRAGMA synchronous=FULL")
                    connection.execute("BEGIN IMMEDIATE")
                    build(connection)
                    connection.execute("COMMIT")
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                sync_path(draft)
                draft.replace(self.path)
                sync_path(folder)
            except sqlite3.Error as error:
                raise self.explain(error) from error
            except OSError as error:
                raise LedgerUnreachable(
                    f"expected to create {self.path}, found: {error.strerror}; "
                    "make the folder writable and give it space"
                ) from error
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                # A draft that cannot be removed is in nobody's way.
                with contextlib.suppress(OSError):
                    draft.with_name(draft.name + suffix).unlink()
            self._lock.release()

    def writer(self) -> Connection:
        """Open for writing, durable at each commit."""
        for needed in (self.path, self.path.parent):
            if not os.access(needed, os.W_OK):
                raise LedgerUnreachable(
                    f"expected {needed} to be writable, found it read-only; "
                    "change its permissions, or open the ledger for reading only"
                )
        connection = self._connect("mode=rw")
        try:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA wal_autocheckpoint=0")
            connection.execute("PRAGMA recursive_triggers=ON")
            # The error of this pragma shows only when its row is fetched.
            mode = connection.execute("PRAGMA journal_mode=wal").fetchone()[0]
            if mode != "wal":
                raise LedgerUnreachable(
                    f"expected {self.path} in write-ahead mode, found {mode}; "
                    "keep the ledger on a local file system"
                )
            self._unchecked_bytes = self._log_bytes()
            self._sync_folder()
        except BaseException:
            connection.close()
            raise
        return connection

    def _sync_folder(self) -> None:
        """Make the log's name durable: SQLite tries that too, and does not look what came of it.

        A log without a name would take every commit in it along in a power cut.
        """
        try:
            sync_path(self.path.parent)
        except OSError as error:
            raise LedgerUnreachable(
                f"expected to sync the folder {self.path.parent}, found: {error.strerror}; "
                "nothing was written; check the disk, and open the ledger again"
            ) from error

    def reader(self) -> Connection:
        """Open for reading only, also in a folder that cannot be written."""
        try:
            return self._connect("mode=ro")
        except LedgerUnreachable:
            # Where the folder can be written, the log's index could not be made for another reason,
            # such as a full disk; a reader that looks at the file alone would miss what follows.
            writable = os.access(self.path.parent, os.W_OK)
            if writable or self._log_bytes() or not self.path.is_file():
                raise
            # Without a log the file is all there is, and nobody can be writing here.
            return self._connect("immutable=1")

    def _connect(self, mode: str) -> Connection:
        inode = _identity(self.path)
        if inode in _STALE:
            raise self._log_removed()
        try:
            connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?{mode}",
                uri=True,
                timeout=self._timeout_s,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise self.explain(error) from error
        try:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
        except sqlite3.Error as error:
            connection.close()
            raise self.explain(error) from error
        # Without a log, all pages are in the file. SQLite would read a torn last page as zeros.
        size = 0 if self._log_bytes() else pages * page_bytes
        if self.path.stat().st_size < size:
            connection.close()
            raise NotALedger(
                f"expected {size} bytes in {self.path}, found {self.path.stat().st_size}; it was "
                "cut short; restore it from a copy"
            )
        self._inode = self._inode or inode
        self._logs[id(connection)] = _identity(self._log)
        return connection

    def check_log(self, connection: Connection) -> None:
        """Refuse to go on where the write-ahead log is not the file that was opened.

        It is, unless this process closed the database through another copy of the SQLite library
        as well (https://www.sqlite.org/howtocorrupt.html, 2.2): that drops the locks of this
        copy, and the next process to close removes the log under it. What is committed into that
        log is lost, and new connections of this process share its index, so the process must end.
        """
        log = _identity(self._log)
        opened = self._logs.get(id(connection))
        if opened is None:
            self._logs[id(connection)] = log  # the first commit makes it
        elif opened != log and self._inode is not None:
            _STALE.add(self._inode)
        if self._inode in _STALE:
            raise self._log_removed()

    def _log_removed(self) -> LedgerUnreachable:
        return LedgerUnreachable(
            f"expected {self._log} to be the log that this process opened, found it removed or "
            "replaced: another SQLite library in this process closed the file; nothing was "
            "written; end this process, and read the ledger through its handle alone"
        )

    def beside(self, suffix: str) -> Path:
        """Beside the ledger's file."""
        return self.path.with_name(self.path.name + suffix)

    def columns(self, connection: Connection, table: str) -> set[str]:
        """Ask SQLite, which gives no row for a table that is not there."""
        found = connection.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()
        # A damaged name need not be text.
        names = (row[0] for row in found)
        return {n.decode("utf-8", "replace") if isinstance(n, bytes) else str(n) for n in names}

    def keyed(self, connection: Connection, table: str, columns: Sequence[str]) -> bool:
        """Ask for the table's own key; an index beside it is no part of a ledger."""
        found = connection.execute(
            "SELECT name FROM pragma_table_info(?) WHERE pk > 0 ORDER BY pk", (table,)
        ).fetchall()
        return [row[0] for row in found] == list(columns)

    def is_ledger(self, connection: Connection) -> bool:
        """Look at the application id in the file's header."""
        return bool(connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID)

    def lock(self) -> None:
        """Take the file lock, and see that the file is still the one that is open."""
        self._lock.acquire()
        if self._inode is not None and self._inode != _identity(self.path):
            self._lock.release()
            raise LedgerUnreachable(
                f"expected the ledger {self.path} where it was opened, found it moved or "
                "replaced; put it back, or open it again"
            )

    def unlock(self) -> None:
        """Give the file lock back."""
        self._lock.release()

    def triggers(self) -> Sequence[str]:
        """UPDATE and DELETE fail; an INSERT must be next in position, version and sequence.

        ``INSERT OR REPLACE`` deletes without firing delete triggers, so the check of the insert
        is what stops it: a row that is next in all three conflicts with no other.
        """
        following = {
            "position": "",
            "version": "WHERE job = NEW.job",
            "sequence": "WHERE writer = NEW.writer",
        }
        checks = "\n".join(
            f"SELECT RAISE(ABORT, 'events: {name} is not the next one') WHERE NEW.{name} IS NOT "
            f"(SELECT coalesce(max({name}), -1) + 1 FROM events {scope});"
            for name, scope in following.items()
        )
        # Most rows follow the last one within the same job and writer; one look at that row then
        # stands for all three checks, at half of their cost.
        follows_last_row = (
            "(SELECT (position, job, version, writer, sequence) IS NOT "
            "(NEW.position - 1, NEW.job, NEW.version - 1, NEW.writer, NEW.sequence - 1) "
            "FROM events ORDER BY position DESC LIMIT 1) IS NOT 0"
        )
        return (
            f"CREATE TRIGGER events_insert BEFORE INSERT ON events WHEN {follows_last_row} "
            f"BEGIN\n{checks}\nEND",
            "CREATE TRIGGER events_update BEFORE UPDATE ON events BEGIN "
            "SELECT RAISE(ABORT, 'events: append only, no UPDATE'); END",
            "CREATE TRIGGER events_delete BEFORE DELETE ON events BEGIN "
            "SELECT RAISE(ABORT, 'events: append only, no DELETE'); END",
            *self.tree_triggers(),
        )

    def tree_triggers(self) -> Sequence[str]:
        """Heads grow and cover events that are there; nodes of a level follow each other."""
        refused = {
            "heads": "NEW.size <= (SELECT coalesce(max(size), 0) FROM heads) OR "
            "NEW.size > (SELECT coalesce(max(position), -1) + 1 FROM events)",
            "nodes": "NEW.level < 1 OR NEW.number IS NOT "
            "(SELECT coalesce(max(number), -1) + 1 FROM nodes WHERE level = NEW.level)",
        }
        return [
            text
            for table, wrong in refused.items()
            for text in (
                f"CREATE TRIGGER {table}_insert BEFORE INSERT ON {table} WHEN {wrong} "
                f"BEGIN SELECT RAISE(ABORT, '{table}: not the next one'); END",
                f"CREATE TRIGGER {table}_update BEFORE UPDATE ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table}: append only, no UPDATE'); END",
                f"CREATE TRIGGER {table}_delete BEFORE DELETE ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table}: append only, no DELETE'); END",
            )
        ]

    def explain(self, error: Exception, *, committing: bool = False) -> LedgerError:
        """Map SQLite's result codes; see https://www.sqlite.org/rescode.html."""
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            raise error  # the driver was used wrongly; that is no state of the ledger
        primary = code & 0xFF
        if primary == sqlite3.SQLITE_CONSTRAINT:
            return InvalidEvent(
                f"expected events that follow the head of {self.path}, found the store refusing "
                f"them ({error}); nothing was written; append through one of this build's handles"
            )
        if primary == sqlite3.SQLITE_FULL:
            return LedgerUnreachable(
                f"expected space for {self.path}, found the disk full; nothing was written; "
                "make space and try again"
            )
        if primary in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return NotALedger(
                f"expected a ledger at {self.path}, found a file that is none or is damaged "
                f"({error}); check the path, or restore it from a copy"
            )
        if committing:
            return AppendInDoubt(
                f"expected the commit to {self.path} to succeed, found: {error}; the events may "
                "stand or not; retry with the same key to settle it"
            )
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return LedgerUnreachable(
                f"expected to write {self.path} within {self._timeout_s:g} s, found it locked by "
                "another program; end that program's transaction and try again"
            )
        return LedgerUnreachable(
            f"expected to use {self.path}, found: {error}; nothing was written; "
            "check the disk and the permissions, and try again"
        )

    def close(self) -> None:
        """Close the lock file."""
        self._lock.close()

    def committed(self, connection: Connection, written_bytes: int) -> None:
        """Copy the log into the file when enough was written; short reads cannot block it."""
        if self._logs.get(id(connection)) is None:
            self._logs[id(connection)] = _identity(self._log)
        self._unchecked_bytes += written_bytes
        if self._unchecked_bytes < CHECKPOINT_BYTES:
            return
        self._unchecked_bytes = 0
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            self.checkpoint_error = None
        except sqlite3.Error as error:
            # The commit stands in the log. The next checkpoint tries again.
            self.checkpoint_error = str(error)

    def settle(self, connection: Connection) -> None:
        """Copy the whole log into the file and sync that.

        After a failed sync the kernel may hold pages that it believes are on disk; a later sync
        of the log would succeed without them.
        """
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            raise self.explain(error) from error

    def _log_bytes(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file, None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino

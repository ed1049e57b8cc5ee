"""PostgreSQL as a store: one advisory lock per ledger, triggers, and connections that may break."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import BigInteger, Column, Integer, LargeBinary, Text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine import URL

from shiftbook.ledger import postgres_url
from shiftbook.ledger.dialect import Connection, Dialect
from shiftbook.ledger.errors import (
    AppendInDoubt,
    InvalidEvent,
    LedgerError,
    LedgerUnreachable,
    NotALedger,
)
from shiftbook.ledger.postgres_session import AnswerLate, Session
from shiftbook.ledger.postgres_wake import Notified
from shiftbook.ledger.tables import EVENTS, Statements

LOCK_CLASS = 0x53484654
"""``SHFT``: first half of the advisory lock's key, so that other programs' locks are others."""

MARK = "shiftbook ledger"
"""Comment on the table of events, so that nobody else's table is taken for a ledger."""

HOLD_S = 10.0
"""Longest that a transaction waits for its client: a stopped process gives the lock back then."""

TRANSACTION_S = 60.0
"""Longest transaction (PostgreSQL 17 and newer): ends one that stopped while it was sending."""

ANSWER_MARGIN_S = 2.0
"""What the client waits for an answer beyond the longest wait for the lock."""

CONNECT_TRIES = 3
"""Sessions that are made before one that breaks at its first word is reported."""

_CACHED = ("XDG_CACHE_HOME", ".cache")
_KEPT = ("XDG_DATA_HOME", ".local/share")
_KEPT_SUFFIXES = (".evidence", ".spool")
"""What no ledger can give back."""

COPY_ROWS = 2
"""From this number of rows on COPY is faster than as many INSERTs, each with its trigger."""

READERS = 4
"""Most reading connections of one handle; with the writing and the listening one, six."""

_LATE = ("25P03", "25P04")
"""The transaction was ended because its client did nothing, or took too long."""
_CONTENT = ("22", "23", "54")
"""Classes of codes: data, constraints (the triggers use theirs), limits of the server."""


class PostgresDialect(Dialect):
    """A schema in a database of a PostgreSQL server.

    Every append holds an advisory transaction lock from before it reads the head until its commit
    is visible, so a position that can be read has no gap below it.
    """

    errors = (psycopg.Error,)
    path = None
    readers = READERS
    poll_s = 0.5

    def __init__(self, url: URL, *, lock_timeout_s: float) -> None:
        self.schema: str = postgres_url.schema_of(url)
        self.url = postgres_url.public(url)
        self.sql = PGDialect_psycopg(paramstyle="format")  # type: ignore[no-untyped-call]
        self.retry_s = lock_timeout_s
        self._timeout_s = lock_timeout_s
        self._parameters = postgres_url.parameters(url) | {
            "application_name": "shiftbook",
            # libpq takes whole seconds, and none below two.
            "connect_timeout": max(2, math.ceil(lock_timeout_s)),
            "tcp_user_timeout": int((lock_timeout_s + ANSWER_MARGIN_S) * 1000),
        }
        key = hashlib.sha256(self.schema.encode()).digest()[:4]
        self._lock = f"pg_advisory_xact_lock({LOCK_CLASS}, {int.from_bytes(key, signed=True)})"
        self.channel = f"shiftbook_{key.hex()}"
        self.begin = f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SELECT {self._lock}"

    # -- connections -----------------------------------------------------------------------

    def connect(self, *, read_only: bool, answer_s: float | None = None) -> Session:
        """Open a session; raise LedgerUnreachable where the server does not take it."""
        answer_s = self._timeout_s + ANSWER_MARGIN_S if answer_s is None else answer_s
        left = CONNECT_TRIES
        while True:
            left -= 1
            session: Session | None = None
            try:
                session = Session(self._parameters, answer_s=answer_s)
                session.execute("; ".join(self._settings(session, read_only)))
                return session
            except psycopg.Error as error:
                # One that broke as soon as it was made says nothing about the next.
                again = session is not None and left > 0 and self.broken(session, error)
                if session is not None:
                    session.close()
                if not again:
                    raise self.explain(error) from error

    def _settings(self, session: Session, read_only: bool) -> list[str]:
        settings = {
            "search_path": f'"{self.schema}"',
            "lock_timeout": f"'{max(1, int(self._timeout_s * 1000))}ms'",
            "idle_in_transaction_session_timeout": f"'{int(HOLD_S * 1000)}ms'",
            "default_transaction_read_only": "on" if read_only else "off",
        }
        if session.wire.info.server_version >= 170000:
            settings["transaction_timeout"] = f"'{int(TRANSACTION_S * 1000)}ms'"
        # Durable on return is promised, so a default of `off` does not hold here; the other
        # values wait for the local disk at least, and for replicas as the owner has chosen.
        durable = (
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
        return [*(f"SET {name} = {value}" for name, value in settings.items()), durable]

    def writer(self) -> Connection:
        """Open for writing, durable at each commit."""
        return self.connect(read_only=False)

    def reader(self) -> Connection:
        """Open for reading only."""
        return self.connect(read_only=True)

    def waker(self) -> Notified:
        """Listen to what the trigger sends at each commit."""
        return Notified(lambda: self.connect(read_only=True), self.channel)

    def broken(self, connection: Connection, error: Exception) -> bool:
        """Say whether the connection is gone; one that was ended for being slow is no such case."""
        assert isinstance(error, psycopg.Error)
        if error.sqlstate in _LATE:
            return False
        return bool(connection.gone) or (error.sqlstate or "").startswith(("08", "57P0"))

    def check_log(self, connection: Connection) -> None:
        """Nothing: the server keeps its log."""

    def settle(self, connection: Connection) -> None:
        """Nothing: a server whose sync failed stops, and recovers when it starts."""

    def committed(self, connection: Connection, written_bytes: int) -> None:
        """Nothing: the server makes its checkpoints itself."""

    def close(self) -> None:
        """Nothing is held beside the connections."""

    def lock(self) -> None:
        """Nothing: the lock belongs to the transaction, see ``begin``."""

    def unlock(self) -> None:
        """Nothing: the commit or its end gives the lock back."""

    # -- what there is ---------------------------------------------------------------------

    def beside(self, suffix: str) -> Path:
        """In a folder of the user's, by the hash of the URL without credentials.

        What can be made again from the ledger is cached; evidence and spools, which cannot, are
        among the user's data, where nobody clears up.
        """
        variable, usual = _KEPT if suffix in _KEPT_SUFFIXES else _CACHED
        folder = Path(os.environ.get(variable) or Path.home() / usual)
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return folder / "shiftbook" / f"{name}{suffix}"

    def exists(self) -> bool:
        """Say whether the schema has a table of the ledger's names."""
        session = self.connect(read_only=True)
        try:
            return self._exists(session)
        except psycopg.Error as error:
            raise self.explain(error) from error
        finally:
            session.close()

    def _exists(self, session: Session) -> bool:
        return bool(self.columns(session, "events") or self.columns(session, "meta"))

    def columns(self, connection: Connection, table: str) -> set[str]:
        """Ask the catalogue; a role sees also what it may not read."""
        found = connection.execute(
            "SELECT a.attname::text FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s "
            "AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped",
            (self.schema, table),
        )
        return {row[0] for row in found.fetchall()}

    def keyed(self, connection: Connection, table: str, columns: Sequence[str]) -> bool:
        """Look for any whole index that begins with the columns."""
        found = connection.execute(
            "SELECT array_agg(a.attname::text ORDER BY k.place) FROM pg_index i "
            "CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(number, place) "
            "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number "
            "WHERE i.indrelid = to_regclass(%s) AND i.indisvalid AND i.indpred IS NULL "
            "AND i.indexprs IS NULL GROUP BY i.indexrelid",
            (f'"{self.schema}"."{table}"',),
        ).fetchall()
        return any(row[0][: len(columns)] == list(columns) for row in found)

    def is_ledger(self, connection: Connection) -> bool:
        """Look at the comment on the table of events."""
        row = connection.execute(
            "SELECT obj_description(to_regclass(%s), 'pg_class')", (f'"{self.schema}".events',)
        ).fetchone()
        return row is not None and row[0] == MARK and bool(self.columns(connection, "meta"))

    def create(self, build: Callable[[Connection], None]) -> None:
        """Build schema, tables and triggers in one transaction, under the append lock."""
        session = self.connect(read_only=False)
        try:
            encoding = session.execute("SHOW server_encoding").fetchone()
            if encoding is None or encoding[0] != "UTF8":
                raise LedgerUnreachable(
                    f"expected a database in UTF8 at {self.url}, found {encoding}; "
                    "createdb --encoding=UTF8 --template=template0 NAME"
                )
            session.execute(self.begin)
            if not self._exists(session):
                known = session.execute(
                    "SELECT 1 FROM pg_namespace WHERE nspname = %s", (self.schema,)
                )
                if known.fetchone() is None:
                    session.execute(f'CREATE SCHEMA "{self.schema}"')
                build(session)
            session.execute("COMMIT")
        except psycopg.Error as error:
            raise self.explain(error) from error
        finally:
            session.close()

    def triggers(self) -> Sequence[str]:
        """UPDATE, DELETE and TRUNCATE fail; what is inserted must follow in all three counts.

        One look at all rows of a statement, after it. Positions of the table are 0..n-1 and each
        once, so rows that lie side by side and begin above the highest one below them are the
        next. The function's own search path keeps a writer's from changing what its words mean.
        """
        events = f'"{self.schema}".events'

        def follows(count: str, of: str) -> str:
            return (
                f"SELECT 1 FROM (SELECT a.{count} - coalesce("
                f"lag(a.{count}) OVER (PARTITION BY a.{of} ORDER BY a.position), "
                f"(SELECT max(e.{count}) FROM {events} e WHERE e.{of} = a.{of} "
                f"AND e.{count} < a.{count}), -1) AS step FROM added a) s WHERE step <> 1"
            )

        refuse = "RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', MESSAGE ="
        return (
            f"""CREATE FUNCTION "{self.schema}".events_follow() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE low bigint; high bigint; total bigint;
BEGIN
SELECT min(position), max(position), count(*) INTO low, high, total FROM added;
IF total = 0 THEN RETURN NULL; END IF;
IF high - low + 1 <> total OR low <>
(SELECT coalesce(max(e.position), -1) + 1 FROM {events} e WHERE e.position < low)
THEN {refuse} 'events: position is not the next one'; END IF;
IF EXISTS ({follows("version", "job")})
THEN {refuse} 'events: version is not the next one'; END IF;
IF EXISTS ({follows("sequence", "writer")})
THEN {refuse} 'events: sequence is not the next one'; END IF;
PERFORM pg_notify('{self.channel}', '');
RETURN NULL;
END $$""",
            f"CREATE TRIGGER events_insert AFTER INSERT ON {events} REFERENCING NEW TABLE AS added "
            f'FOR EACH STATEMENT EXECUTE FUNCTION "{self.schema}".events_follow()',
            f"""CREATE FUNCTION "{self.schema}".events_refuse() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
{refuse} 'events: append only, no ' || TG_OP;
END $$""",
            f"CREATE TRIGGER events_change BEFORE UPDATE OR DELETE OR TRUNCATE ON {events} "
            f'FOR EACH STATEMENT EXECUTE FUNCTION "{self.schema}".events_refuse()',
            # Also in a session that poses as a replica.
            f"ALTER TABLE {events} ENABLE ALWAYS TRIGGER events_insert",
            f"ALTER TABLE {events} ENABLE ALWAYS TRIGGER events_change",
            f"COMMENT ON TABLE {events} IS '{MARK}'",
            *self.tree_triggers(),
        )

    def tree_triggers(self) -> Sequence[str]:
        """Heads grow and cover events that are there; nodes of a level follow each other."""
        schema = f'"{self.schema}"'
        refuse = "RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', MESSAGE ="
        refused = {
            "heads": f"NEW.size <= (SELECT coalesce(max(size), 0) FROM {schema}.heads) OR "
            f"NEW.size > (SELECT coalesce(max(position), -1) + 1 FROM {schema}.events)",
            "nodes": "NEW.level < 1 OR NEW.number <> (SELECT coalesce(max(number), -1) + 1 "
            f"FROM {schema}.nodes WHERE level = NEW.level)",
        }
        return [
            text
            for table, wrong in refused.items()
            for text in (
                f"""CREATE FUNCTION {schema}.{table}_follow() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
IF {wrong} THEN {refuse} '{table}: not the next one'; END IF;
RETURN NEW;
END $$""",
                f"CREATE TRIGGER {table}_insert BEFORE INSERT ON {schema}.{table} "
                f"FOR EACH ROW EXECUTE FUNCTION {schema}.{table}_follow()",
                f"""CREATE FUNCTION {schema}.{table}_refuse() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
{refuse} '{table}: append only, no ' || TG_OP;
END $$""",
                f"CREATE TRIGGER {table}_change BEFORE UPDATE OR DELETE OR TRUNCATE "
                f"ON {schema}.{table} "
                f"FOR EACH STATEMENT EXECUTE FUNCTION {schema}.{table}_refuse()",
                f"ALTER TABLE {schema}.{table} ENABLE ALWAYS TRIGGER {table}_insert",
                f"ALTER TABLE {schema}.{table} ENABLE ALWAYS TRIGGER {table}_change",
            )
        ]

    def write(
        self, connection: Connection, statements: Statements, rows: Sequence[tuple[Any, ...]]
    ) -> None:
        """Insert a few rows, or copy many; the trigger looks at them once either way."""
        if len(rows) < COPY_ROWS:
            statements.insert_rows(connection, rows)
        else:
            connection.copy(_COPY, _COPY_TYPES, rows)

    # -- errors ----------------------------------------------------------------------------

    def explain(self, error: Exception, *, committing: bool = False) -> LedgerError:
        """Map SQLSTATE codes; see https://www.postgresql.org/docs/current/errcodes-appendix.html."""
        assert isinstance(error, psycopg.Error)
        code = error.sqlstate or ""
        said = " ".join(str(error).split())
        if code in _LATE:
            return LedgerUnreachable(
                f"expected an append to {self.url} to go on within {HOLD_S:g} s, found it idle "
                f"for longer, so the server ended it ({said}); nothing was written; decide again"
            )
        if code.startswith(_CONTENT) or isinstance(error, psycopg.DataError):
            return InvalidEvent(
                f"expected events that follow the head of {self.url}, found the store refusing "
                f"them ({said}); nothing was written; append through one of this build's handles"
            )
        if committing and not code.startswith(("40", "25", "53")):
            return AppendInDoubt(
                f"expected the commit to {self.url} to succeed, found: {said}; the events may "
                "stand or not; retry with the same key to settle it"
            )
        if code in ("42P01", "42703", "3F000", "XX001", "XX002"):
            return NotALedger(
                f"expected a ledger at {self.url}, found tables that are none or are damaged "
                f"({said}); check the URL, or restore it from a copy"
            )
        if code in ("55P03", "40P01"):
            return LedgerUnreachable(
                f"expected to write {self.url} within {self._timeout_s:g} s, found it locked by "
                "another program; end that program's transaction and try again"
            )
        if code == "42501":
            return LedgerUnreachable(
                f"expected a role that may do this at {self.url}, found: {said}; nothing was "
                "written; as the owner run: shiftbook doctor --ledger URL --grant ROLE"
            )
        what = "no answer in time" if isinstance(error, AnswerLate) else said
        return LedgerUnreachable(
            f"expected to use {self.url}, found: {what}; nothing was written; "
            "check that the server runs and takes this user, and try again"
        )


def _postgres_type(column: Column[Any]) -> str:
    """Name of a column's type, as COPY wants it."""
    kinds = {LargeBinary: "bytea", BigInteger: "int8", Integer: "int4", Text: "text"}
    return next(name for kind, name in kinds.items() if isinstance(column.type, kind))


_COPY_TYPES = [_postgres_type(column) for column in EVENTS.columns]
_COPY = (
    f"COPY events ({', '.join(column.name for column in EVENTS.columns)}) "
    "FROM STDIN (FORMAT BINARY)"
)

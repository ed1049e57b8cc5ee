"""The stores that tests run on, for fixtures and for state machines, which know no fixtures."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

from shiftbook.ledger.ledger import Ledger
from tests.postgres_server import PostgresServer, running_server

STORES = ("sqlite", "postgresql")
SQLITE = "sqlite:///"

_session: list[PostgresServer] = []


def postgres_of_the_session() -> PostgresServer:
    """One server for all tests of this process, started by the first that wants it.

    Without syncs: no test takes the power away, and a killed server loses nothing by that.
    """
    if not _session:
        stack = contextlib.ExitStack()
        _session.append(stack.enter_context(running_server(fsync="off")))
        atexit.register(stack.close)
    return _session[0]


def new_url(store: str, folder: Path, name: str = "ledger") -> str:
    """URL of a ledger that is not there yet; one in a file stands in the folder."""
    if store == "sqlite":
        return f"{SQLITE}{folder}/{name}.db"
    os.environ.setdefault("PGUSER", "postgres")  # URLs of ledgers carry no user
    return postgres_of_the_session().url(f"m_{secrets.token_hex(6)}")


def fetch(url: str, query: str) -> list[tuple[Any, ...]]:
    """Rows of a query past the ledger, alike on both stores; no handle on a file may be open."""
    if (file := _file(url)) is not None:
        with contextlib.closing(sqlite3.connect(file)) as connection:
            return connection.execute(query).fetchall()
    with psycopg.connect(**postgres_of_the_session().parameters) as connection:
        connection.execute(f"SET search_path = {_schema(url)}")  # type: ignore[call-overload]
        return connection.execute(query).fetchall()  # type: ignore[call-overload,no-any-return]


def copy_ledger(url: str, to: str) -> None:
    """Put the rows of a ledger that no handle has open under another URL of the same store."""
    if (file := _file(url)) is not None:
        shutil.copyfile(file, to.removeprefix(SQLITE))
        return
    Ledger.open(to).close()
    tables = {"events": "position", "nodes": "level, number", "heads": "size"}
    source, target = _schema(url), _schema(to)
    copies = [
        f"INSERT INTO {target}.{table} SELECT * FROM {source}.{table} ORDER BY {order}"
        for table, order in tables.items()
    ]
    assert run_sql(to, *copies) is None


def attack(url: str, *statements: str) -> None:
    """What the owner of a database can do: drop every trigger, then anything."""
    file = _file(url) is not None
    dropped = [
        f"DROP TRIGGER IF EXISTS {table}_{act}" + ("" if file else f" ON {table}")
        for table in ("events", "heads", "nodes")
        for act in ("insert", *(("update", "delete") if file else ("change",)))
    ]
    assert run_sql(url, *dropped, *statements) is None


def literal(url: str, data: bytes) -> str:
    """Bytes in the store's SQL."""
    return f"x'{data.hex()}'" if _file(url) is not None else f"'\\x{data.hex()}'::bytea"


def _file(url: str) -> str | None:
    return url.removeprefix(SQLITE) if url.startswith(SQLITE) else None


def _schema(url: str) -> str:
    return url.rpartition("schema=")[2]


def run_sql(url: str, *statements: str) -> str | None:
    """Do what an owner of the store can do past the ledger; its error where there is one.

    SQLite runs in a process of its own: closing the file here would drop the ledger's locks.
    """
    if (file := _file(url)) is not None:
        done = subprocess.run(
            [sys.executable, "-c", _SQLITE, file, *statements],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip() or None
    try:
        with psycopg.connect(**postgres_of_the_session().parameters) as connection:
            connection.execute(f"SET search_path = {_schema(url)}")  # type: ignore[call-overload]
            for statement in statements:
                connection.execute(statement)  # type: ignore[call-overload]
    except psycopg.Error as error:
        return f"{error.sqlstate} {error}"
    return None


_SQLITE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
try:
    for statement in sys.argv[2:]:
        connection.execute(statement)
    connection.commit()
except sqlite3.Error as error:
    print(error)
"""

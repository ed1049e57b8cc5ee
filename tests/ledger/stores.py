"""The stores that tests run on, for fixtures and for state machines, which know no fixtures."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path

import psycopg

from tests.postgres_server import PostgresServer, running_server

STORES = ("sqlite", "postgresql")

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


def new_url(store: str, folder: Path) -> str:
    """URL of a ledger that is not there yet; one in a file stands in the folder."""
    if store == "sqlite":
        return f"sqlite:///{folder}/ledger.db"
    os.environ.setdefault("PGUSER", "postgres")  # URLs of ledgers carry no user
    return postgres_of_the_session().url(f"m_{secrets.token_hex(6)}")


def run_sql(url: str, *statements: str) -> str | None:
    """Do what an owner of the store can do past the ledger; its error where there is one.

    SQLite runs in a process of its own: closing the file here would drop the ledger's locks.
    """
    if url.startswith("sqlite:///"):
        done = subprocess.run(
            [sys.executable, "-c", _SQLITE, url.removeprefix("sqlite:///"), *statements],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip() or None
    server = postgres_of_the_session()
    try:
        with psycopg.connect(**server.parameters) as connection:
            connection.execute(f"SET search_path = {url.rpartition('schema=')[2]}")  # type: ignore[call-overload]
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

"""Times the ledger on PostgreSQL beside its own single transactions and beside bare psycopg.

A server with fsync, from the wheel of the tests, on a Unix socket. Eight clients append events of
their own: as threads that share a handle, whose appends share commits; as eight handles, each with
a transaction of its own under the same advisory lock; and as eight bare psycopg connections that
take such a lock, read the head, insert finished rows into the same table without triggers, and
commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
from sqlalchemy.engine import make_url

from benchmarks.result import Result, iteration
from shiftbook.ledger import postgres_url
from shiftbook.ledger.ledger import Ledger
from tests.postgres_server import PostgresServer, running_server

CLIENTS = 8
TURN = 40
"""Appends of a client before the other way has its turn."""

LOCK = "SELECT pg_advisory_xact_lock(1397245524, 1)"


def _together(work: Sequence[Callable[[], None]]) -> float:
    """Run all at once; seconds until the last is done."""
    ready = threading.Barrier(len(work) + 1)

    def begin(own: Callable[[], None]) -> None:
        ready.wait()
        own()

    threads = [threading.Thread(target=begin, args=(own,)) for own in work]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


class Bare:
    """The least that a program could do with psycopg for the same durability and order."""

    def __init__(self, server: PostgresServer, like: str, schema: str) -> None:
        self._parameters = postgres_url.parameters(make_url(server.url()))
        self.schema = schema
        with self.connect() as connection:
            connection.execute(f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]
            connection.execute(
                f"CREATE TABLE {schema}.events (LIKE {like}.events INCLUDING ALL)"  # type: ignore[arg-type]
            )

    def connect(self) -> psycopg.Connection[Any]:
        """A connection of one client."""
        return psycopg.connect(**self._parameters, autocommit=True)

    def append(self, connection: psycopg.Connection[Any], rows: list[list[Any]]) -> None:
        """Lock, read the head, insert rows at it, commit."""
        marks = ", ".join(["%s"] * len(rows[0]))
        connection.execute(f"BEGIN; {LOCK}")  # type: ignore[arg-type]
        found = connection.execute(f"SELECT max(position) FROM {self.schema}.events")  # type: ignore[arg-type]
        row = found.fetchone()
        head = -1 if row is None or row[0] is None else row[0]
        for number, values in enumerate(rows):
            # Position, version and sequence, so that every index gets an entry.
            values[0] = values[2] = values[8] = head + 1 + number
        insert = f"INSERT INTO {self.schema}.events VALUES ({marks})"
        if len(rows) == 1:
            connection.execute(insert, rows[0], binary=True)  # type: ignore[call-overload]
        else:
            with connection.cursor(binary=True) as cursor:
                cursor.executemany(insert, rows)  # type: ignore[arg-type]
        connection.execute("COMMIT")


def _rows(server: PostgresServer, schema: str, count: int) -> list[list[Any]]:
    with psycopg.connect(**postgres_url.parameters(make_url(server.url()))) as connection:
        cursor = connection.execute(
            f"SELECT * FROM {schema}.events ORDER BY position LIMIT {count}"  # type: ignore[arg-type]
        )
        return [list(row) for row in cursor.fetchall()]


def group_commit(folder: Path, rounds: int) -> Result:
    """Eight clients that share commits, against a transaction for each append."""
    del folder  # the server has one of its own
    times: dict[str, list[float]] = {"group": [], "single": [], "bare": []}
    with ExitStack() as stack:
        server = stack.enter_context(running_server())
        url = server.url("grouped")
        shared = stack.enter_context(Ledger.open(url))
        other = server.url("single")
        own = [stack.enter_context(Ledger.open(other)) for _ in range(CLIENTS)]
        shared.append("job", iteration(0))
        sample = _rows(server, "grouped", 1)[0]
        bare = Bare(server, "grouped", "bare")
        connections = [stack.enter_context(bare.connect()) for _ in range(CLIENTS)]

        def ledger_turn(handle: Ledger, client: int) -> Callable[[], None]:
            def turn() -> None:
                for number in range(TURN):
                    handle.append(f"job-{client}", iteration(number))

            return turn

        def bare_turn(connection: psycopg.Connection[Any]) -> Callable[[], None]:
            def turn() -> None:
                for _ in range(TURN):
                    bare.append(connection, [list(sample)])

            return turn

        for round_ in range(max(3, rounds // 5)):
            took = {
                "group": _together([ledger_turn(shared, n) for n in range(CLIENTS)]),
                "single": _together([ledger_turn(own[n], n) for n in range(CLIENTS)]),
                "bare": _together([bare_turn(connection) for connection in connections]),
            }
            if round_:  # the first round warms up
                for way, elapsed_s in took.items():
                    times[way].append(elapsed_s)
    rate = {way: CLIENTS * TURN / median(values) for way, values in times.items()}
    return Result(
        "PostgreSQL, 8 clients, group commit",
        rate["group"] / rate["single"],
        2.0,
        True,
        "x",
        f"{rate['group']:.0f} events/s against {rate['single']:.0f} with a transaction each; bare "
        f"psycopg with a transaction each {rate['bare']:.0f}, {rate['group'] / rate['bare']:.2f} x",
    )


def batched(folder: Path, rounds: int) -> Result:
    """A hundred events in one commit, against bare executemany of the finished rows."""
    del folder
    ours: list[float] = []
    theirs: list[float] = []
    batch = 100
    with running_server() as server, Ledger.open(server.url("batches")) as ledger:
        ledger.append("job", [iteration(n) for n in range(batch)])
        sample = _rows(server, "batches", batch)
        bare = Bare(server, "batches", "bare")
        with bare.connect() as connection:
            for number in range(max(20, rounds * 2)):
                events = [iteration(number * batch + n) for n in range(batch)]
                start = time.perf_counter()
                ledger.append("job", events)
                ours.append(time.perf_counter() - start)
                rows = [list(row) for row in sample]
                start = time.perf_counter()
                bare.append(connection, rows)
                theirs.append(time.perf_counter() - start)
    ours_s, theirs_s = median(ours[2:]), median(theirs[2:])
    return Result(
        "PostgreSQL batch of 100 / executemany",
        theirs_s / ours_s,
        0.5,
        True,
        "x",
        f"{ours_s * 1e3:.2f} ms against {theirs_s * 1e3:.2f} ms; the ledger validates, serialises, "
        "hashes and checks the order, and copies",
    )

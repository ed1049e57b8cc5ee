"""Goal: the commands say the same of a ledger in a server as of the same ledger in a file.

Method: every row of a ledger with operations in every status is copied into PostgreSQL, bytes and
leaves included; each command runs on both and its output is compared; damage that an owner can do
past the triggers is found on both.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result

from shiftbook.ledger.cli import main
from shiftbook.ledger.dialect import open_dialect, side_path
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.evidence import write_segment
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.spool import SUFFIX as SPOOL
from shiftbook.ledger.tables import EVENTS
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.verdict import verify
from tests.ledger.sample_ledger import write_every_status
from tests.ledger.stores import run_sql
from tests.postgres_server import PostgresServer

DEADLINE_S = 30.0


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def urls(tmp_path: Path, postgres: PostgresServer, postgres_url: str) -> tuple[str, str]:
    """The same ledger in a file and in a server."""
    with write_every_status(tmp_path / "ledger.db") as ledger:
        file_url = ledger.url
    Ledger.open(postgres_url).close()
    dialect = open_dialect(file_url, lock_timeout_s=5.0)
    reader = dialect.reader()
    rows = reader.execute("SELECT * FROM events ORDER BY position").fetchall()
    reader.close()
    schema = postgres_url.rpartition("schema=")[2]
    marks = ", ".join(["%s"] * len(EVENTS.columns))
    with psycopg.connect(**postgres.parameters) as connection, connection.cursor() as cursor:
        cursor.executemany(f"INSERT INTO {schema}.events VALUES ({marks})", rows)  # type: ignore[arg-type]
    return file_url, postgres_url


COMMANDS = {
    "jobs": ["jobs"],
    "log": ["log"],
    "log of a job": ["log", "--job", "job-committed", "--limit", "5"],
    "log of types": ["log", "--type", "ReallocationGranted", "--type", "LeaseGranted"],
    "log of an operation": ["log", "--operation", "{operation}"],
    "show": ["show", "{operation}"],
    "show a position": ["show", "5"],
    "state": ["state", "job-committed"],
    "sql": ["sql", "SELECT * FROM events ORDER BY position"],
    "sql of moves": ["sql", "SELECT * FROM reallocations ORDER BY operation"],
    "verify": ["verify"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_the_same_of_both(name: str, urls: tuple[str, str]) -> None:
    with Ledger.open(urls[0], read_only=True) as ledger:
        operation = next(e.operation for e in ledger.read(types=["ReallocationCommitted"]))
    told = []
    for url in urls:
        arguments = [text.format(operation=operation) for text in COMMANDS[name]]
        result = run(*arguments, "--ledger", url, "--format", "json")
        assert result.exit_code in (0, 1, 2)
        assert "Traceback" not in result.output
        document = json.loads(result.stdout)
        if isinstance(document, dict):
            assert document.pop("ledger", None) != ""
        told.append((result.exit_code, document, result.stderr))
    assert told[0] == told[1]
    assert told[0][1], "there was something to compare"


def test_follow_prints_what_comes(urls: tuple[str, str]) -> None:
    with Ledger.open(urls[1]) as ledger:
        size = ledger.head().size
        with subprocess.Popen(
            [sys.executable, "-c", "from shiftbook.ledger.cli import main; main()", "follow",
             "--ledger", urls[1], "--after", str(size - 1), "--format", "jsonl"],
            stdout=subprocess.PIPE, text=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            watchdog = threading.Timer(DEADLINE_S, child.kill)
            watchdog.start()
            for number in range(3):
                ledger.append("live", ExperimentForked(parent="p", reason=str(number)))
                assert json.loads(child.stdout.readline())["position"] == size + number
            child.send_signal(signal.SIGINT)
            child.wait(DEADLINE_S)
            watchdog.cancel()


def test_verify_records_its_verdict_and_shows_no_credentials(urls: tuple[str, str]) -> None:
    url = urls[1].replace("postgres@", "postgres:secret-word@")
    with Ledger.open(url) as ledger:
        size = ledger.head().size
    result = run("verify", "--ledger", url, "--record", "--format", "json")
    assert "secret" not in result.output
    assert "postgres@" not in result.output
    with Ledger.open(url) as ledger:
        assert ledger.head().size > size


# ---- damage ------------------------------------------------------------------------------------

DAMAGE = {
    "bytes": (r"UPDATE events SET data = '{}' WHERE position = 7", 7),
    "leaf": (r"UPDATE events SET leaf = '\x00' WHERE position = 9", 9),
    "column": ("UPDATE events SET job = 'other' WHERE position = 4", 4),
    "cut out": ("DELETE FROM events WHERE position = 11", 11),
    "moved": ("UPDATE events SET position = -3 WHERE position = 2", 2),
    "version": ("UPDATE events SET version = 900 WHERE position = 5", 5),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_past_the_triggers_is_found_where_it_is(name: str, urls: tuple[str, str]) -> None:
    statement, position = DAMAGE[name]
    off = "ALTER TABLE events DISABLE TRIGGER ALL"
    assert run_sql(urls[1], off, statement) is None
    verdict = verify(urls[1])
    assert verdict.exit_code == 1
    assert verdict.integrity_broken
    broken = [f.position for f in verdict.findings if f.invariant == "integrity"]
    assert min(broken) == position
    assert verdict.judged_until == position - 1


def test_what_is_no_ledger_cannot_be_verified(postgres: PostgresServer) -> None:
    with psycopg.connect(**postgres.parameters) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS odd")
        connection.execute("CREATE TABLE IF NOT EXISTS odd.events (position int)")
    for url, told in (
        (postgres.url("odd"), "without data"),
        (postgres.url("nothing_here"), "no table of events"),
        (postgres.url(database="nowhere"), "does not exist"),
    ):
        with pytest.raises(UnreadableStore, match=told):
            verify(url)


def test_a_newer_ledger_is_not_verified(urls: tuple[str, str]) -> None:
    assert run_sql(urls[1], "UPDATE meta SET value = '99' WHERE name = 'storage_schema'") is None
    with pytest.raises(UnreadableStore, match="found 99"):
        verify(urls[1])


# ---- the columnar copy ---------------------------------------------------------------------------


def test_the_copy_stands_in_the_cache_and_catches_up(urls: tuple[str, str], tmp_path: Path) -> None:
    with Ledger.open(urls[1]) as ledger:
        with Mirror.open(ledger) as mirror:
            assert mirror.path is not None
            assert mirror.path.parent == tmp_path / "cache" / "shiftbook"
            assert mirror.path.parent.stat().st_mode & 0o777 == 0o700
            assert mirror.size == ledger.head().size
        ledger.append("late", ExperimentForked(parent="p", reason="late"))
        with Mirror.open(ledger) as mirror:
            assert mirror.rows("SELECT job FROM events ORDER BY position DESC LIMIT 1") == [
                {"job": "late"}
            ]


def test_a_new_ledger_at_an_old_url_gets_a_new_copy(urls: tuple[str, str]) -> None:
    with Ledger.open(urls[1]) as ledger, Mirror.open(ledger) as mirror:
        assert mirror.size > 50
    schema = urls[1].rpartition("schema=")[2]
    assert run_sql(urls[1], f"DROP SCHEMA {schema} CASCADE") is None
    with Ledger.open(urls[1]) as ledger:
        ledger.append("fresh", ExperimentForked(parent="p", reason="fresh"))
        with Mirror.open(ledger) as mirror:
            assert mirror.rows("SELECT job FROM events") == [{"job": "fresh"}]


def test_without_a_cache_folder_the_copy_is_in_memory(
    urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with Ledger.open(urls[1], read_only=True) as ledger, Mirror.open(ledger) as mirror:
        assert mirror.path is None
        assert mirror.size == ledger.head().size
    assert not os.path.exists("/proc/none")  # noqa: PTH110


def test_what_cannot_be_made_again_lies_in_no_cache(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evidence and spools are kept among the user's data, copies and snapshots in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with Ledger.open(postgres_url) as ledger:
        segment = write_segment(ledger, {"a": [1, 2]})
        assert [path.stem for path in (tmp_path / "data").rglob("*.parquet")] == [segment.sha256]
        assert side_path(postgres_url, SPOOL).parent == tmp_path / "data" / "shiftbook"
        for suffix in (".mirror.duckdb", ".snapshots"):
            assert ledger.beside(suffix).parent == tmp_path / "cache" / "shiftbook"

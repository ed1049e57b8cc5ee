"""Goal: what PostgreSQL itself has to refuse or end: changes, gaps, and clients that hold the lock.

Method: raw SQL as the owner and as a writer role against a real server; processes that stop, die or
hang while they hold the append lock; a server that is away. What both stores promise is tested
beside SQLite in the other modules.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from shiftbook.ledger import postgres as dialect
from shiftbook.ledger import postgres_url
from shiftbook.ledger.dialect import open_dialect
from shiftbook.ledger.errors import (
    InvalidEvent,
    InvalidURL,
    LedgerUnreachable,
    MissingExtra,
    NotALedger,
)
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.postgres import COPY_ROWS
from tests.ledger.gate_cases import await_
from tests.ledger.stores import run_sql
from tests.postgres_server import PostgresServer

DEADLINE_S = 30.0


def fork(reason: object = "r") -> Event:
    return ExperimentForked(parent="p", reason=str(reason))


@pytest.fixture
def book(postgres_url: str) -> str:
    """URL of a ledger with five events: four of job a, one of b, all by writer w."""
    with Ledger.open(postgres_url, writer="w") as ledger:
        for number in range(4):
            ledger.append("a", fork(number), key=f"k{number}")
        ledger.append("b", fork("other"))
    return postgres_url


def contents(url: str) -> list[tuple[int, bytes, bytes]]:
    with Ledger.open(url, read_only=True) as ledger:
        return [(row.position, row.data, row.leaf) for row in ledger.rows()]


def values(position: object, job: str, version: int, writer: str, sequence: int) -> str:
    return (
        f"({position}, '{job}', {version}, 'T', 1, NULL, NULL, '{writer}', {sequence}, 1, "
        r"'{}', '\x00')"
    )


def insert(*rows: str) -> str:
    return f"INSERT INTO events VALUES {', '.join(rows)}"


# ---- append only, gapless ------------------------------------------------------------------

REFUSED = {
    "update": r"UPDATE events SET data = '\x00' WHERE position = 1",
    "update of nothing": "UPDATE events SET key = NULL WHERE false",
    "delete": "DELETE FROM events WHERE position = 4",
    "delete all": "DELETE FROM events",
    "truncate": "TRUNCATE events",
    "truncate cascade": "TRUNCATE events CASCADE",
    "gap": insert(values(6, "a", 4, "w", 5)),
    "far gap": insert(values(2**62, "a", 4, "w", 5)),
    "negative": insert(values(-1, "a", 4, "w", 5)),
    "no position": insert(values("NULL", "a", 4, "w", 5)),
    "taken position": insert(values(2, "a", 4, "w", 5)),
    "upsert": insert(values(2, "a", 2, "w", 2))
    + r" ON CONFLICT (position) DO UPDATE SET data = '\x00'",
    "merge": r"MERGE INTO events USING (VALUES (2)) AS n(p) ON position = p "
    r"WHEN MATCHED THEN UPDATE SET data = '\x00'",
    "merge delete": "MERGE INTO events USING (VALUES (2)) AS n(p) ON position = p "
    "WHEN MATCHED THEN DELETE",
    "version gap": insert(values(5, "a", 5, "w", 5)),
    "version again": insert(values(5, "a", 3, "w", 5)),
    "new job not from 0": insert(values(5, "c", 1, "w", 5)),
    "sequence gap": insert(values(5, "a", 4, "w", 6)),
    "new writer not from 0": insert(values(5, "a", 4, "x", 1)),
    "second row of two": insert(values(5, "a", 4, "w", 5), values(7, "a", 5, "w", 6)),
    "versions the wrong way round": insert(values(5, "a", 5, "w", 5), values(6, "a", 4, "w", 6)),
    "sequences the wrong way round": insert(values(5, "a", 4, "w", 6), values(6, "a", 5, "w", 5)),
    "from a query": "INSERT INTO events SELECT position + 6, job, version + 5, type, schema, "
    "operation, key, writer, sequence + 5, recorded_ns, data, leaf FROM events WHERE job = 'a'",
    "as a replica": "SET session_replication_role = replica; DELETE FROM events",
    "gap as a replica": "SET session_replication_role = replica; "
    + insert(values(6, "a", 4, "w", 5)),
    "through an evil operator": "CREATE FUNCTION lies(bigint, bigint) RETURNS boolean LANGUAGE sql "
    "AS 'SELECT false'; CREATE OPERATOR <> (FUNCTION = lies, LEFTARG = bigint, RIGHTARG = bigint); "
    "SELECT set_config('search_path', current_schema() || ', pg_catalog', true); "
    + insert(values(9, "a", 4, "w", 5)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_changed(name: str, book: str) -> None:
    before = contents(book)
    answer = run_sql(book, REFUSED[name])
    assert answer is not None, name
    assert answer.startswith("23"), answer
    assert contents(book) == before


def test_copy_meets_the_trigger_too(book: str, postgres: PostgresServer) -> None:
    schema = book.rpartition("schema=")[2]
    with psycopg.connect(**postgres.parameters) as connection, connection.cursor() as cursor:
        with (
            pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="position"),
            cursor.copy(f"COPY {schema}.events FROM STDIN") as copy,  # type: ignore[call-overload]
        ):
            copy.write("7\ta\t4\tT\t1\t\\N\t\\N\tw\t5\t1\t\\\\x00\t\\\\x00\n")
        connection.rollback()
    assert len(contents(book)) == 5


def test_what_follows_in_everything_is_allowed(book: str) -> None:
    """The control: the triggers refuse what is wrong, not everything."""
    assert run_sql(book, insert(values(5, "a", 4, "w", 5))) is None
    two = insert(values(6, "a", 5, "w", 6), values(7, "new", 0, "new", 0))
    assert run_sql(book, two) is None
    assert [row[0] for row in contents(book)] == list(range(8))


def test_the_first_event_must_be_at_0(postgres_url: str) -> None:
    Ledger.open(postgres_url).close()
    assert run_sql(postgres_url, insert(values(1, "a", 0, "w", 0))) is not None
    assert run_sql(postgres_url, insert(values(0, "a", 0, "w", 0))) is None


def test_a_row_that_another_program_slipped_in_confuses_nobody(book: str) -> None:
    with Ledger.open(book, writer="w") as ledger:
        ledger.append("a", fork("mine"))
        assert run_sql(book, insert(values(6, "a", 5, "w", 6))) is None
        receipt = ledger.append("a", fork("next"))
        assert (receipt.first, receipt.first_version) == (7, 6)
        assert ledger.event(7).sequence == 7


def test_small_and_large_batches_are_written_the_same(postgres_url: str) -> None:
    """Few rows go in by INSERT, many by COPY: every column must come back alike."""
    with Ledger.open(postgres_url) as ledger:
        for count in (1, COPY_ROWS, 7, 200):
            ledger.append("ä", [fork("ж\\ \t\n\"'")] * count, key=f"k{count}", operation="o")
    with psycopg.connect(**_parameters(postgres_url)) as connection:
        schema = postgres_url.rpartition("schema=")[2]
        found = connection.execute(
            "SELECT count(*), count(DISTINCT (job, type, schema, operation, writer)) "
            f"FROM {schema}.events"  # type: ignore[arg-type]
        ).fetchone()
    assert found == (208 + COPY_ROWS, 1)


def _parameters(url: str) -> dict[str, object]:
    made = open_dialect(url, lock_timeout_s=5.0)
    assert isinstance(made, dialect.PostgresDialect)
    return {**postgres_url.parameters(_parsed(url))}


def _parsed(url: str):
    from sqlalchemy.engine import make_url

    return make_url(url)


# ---- names and places ----------------------------------------------------------------------


def test_urls_are_shown_without_credentials_and_work_without_them(
    book: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_password = book.replace("postgres@", "postgres:secret-word@")
    with Ledger.open(with_password) as ledger:
        assert "secret" not in ledger.url
        assert "postgres@" not in ledger.url
        shown = ledger.url
    with Ledger.open(shown, read_only=True) as again:
        assert again.head().size == 5
    monkeypatch.setenv("PGUSER", "nobody-of-this-name")
    with pytest.raises(LedgerUnreachable) as caught:
        Ledger.open(shown)
    assert "secret" not in str(caught.value)


def test_two_schemas_are_two_ledgers(postgres: PostgresServer) -> None:
    with (
        Ledger.open(postgres.url("one_of_two")) as one,
        Ledger.open(postgres.url("two_of_two")) as two,
    ):
        one.append("a", fork())
        assert (one.head().size, two.head().size) == (1, 0)
        # Each has a lock of its own: one does not wait for the other.
        one.decide(lambda state: two.append("b", fork()) and None)
        assert two.head().size == 1


def test_another_programs_tables_are_no_ledger(postgres: PostgresServer) -> None:
    url = postgres.url("foreign_tables")
    with psycopg.connect(**postgres.parameters) as connection:
        connection.execute("CREATE SCHEMA foreign_tables")
        connection.execute("CREATE TABLE foreign_tables.events (position int)")
    for read_only in (False, True):
        with pytest.raises(NotALedger, match="another program"):
            Ledger.open(url, read_only=read_only)


def test_a_database_that_is_not_there(postgres: PostgresServer) -> None:
    with pytest.raises(LedgerUnreachable, match="does not exist"):
        Ledger.open(postgres.url(database="nowhere"))
    with pytest.raises(LedgerUnreachable, match="found nothing"):
        Ledger.open(postgres.url("not_made"), create=False)


@pytest.mark.parametrize("name", ["job\0", "j" * 1001, "ж" * 501])
def test_a_name_that_a_store_cannot_hold_fails_alone(store_url: str, name: str) -> None:
    with Ledger.open(store_url) as ledger:
        with pytest.raises(InvalidEvent, match="1000 bytes"):
            ledger.append(name, fork())
        assert ledger.append("j" * 1000, fork(), key="k" * 1000).first == 0
        assert ledger.append("j" * 1000, fork(), key="k" * 1000).repeated


def test_without_psycopg_one_line_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'psycopg':\n"
        "            raise ModuleNotFoundError('no psycopg', name='psycopg')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from shiftbook.ledger.cli import main\n"
        "sys.argv = ['shiftbook', 'jobs', '--ledger', 'postgresql+psycopg://h/d']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "pip install 'shiftbook[postgres]'" in done.stderr
    assert MissingExtra("postgres", "psycopg").exit_code == 2


@pytest.mark.parametrize("option", ["options=-cfsync%3Doff", "password=x", "schema=pg_mine"])
def test_options_that_could_change_what_is_promised_are_refused(option: str) -> None:
    with pytest.raises(InvalidURL):
        open_dialect(f"postgresql+psycopg://h/d?{option}", lock_timeout_s=1.0)


# ---- who holds the lock --------------------------------------------------------------------

HOLDER = """
import sys, time
from shiftbook.ledger import postgres
postgres.HOLD_S = float(sys.argv[2])
from shiftbook.ledger.errors import LedgerError
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Decision, Ledger
ledger = Ledger.open(sys.argv[1])

def fn(state):
    print("holds", flush=True)
    sys.stdin.readline()
    return Decision("held", [Draft(ExperimentForked(parent="p", reason="held"))])

try:
    print(ledger.decide(fn).first, flush=True)
except LedgerError as error:
    print(type(error).__name__, error, flush=True)
print(ledger.append("held", ExperimentForked(parent="p", reason="later")).first, flush=True)
"""


@contextmanager
def holder(url: str, hold_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process inside ``decide``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url, str(hold_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "holds\n"
            yield child
        finally:
            child.kill()


def test_a_lock_that_stays_taken_ends_in_the_error_of_every_store(book: str) -> None:
    with holder(book, 60.0), Ledger.open(book, lock_timeout_s=0.2) as ledger:
        with pytest.raises(LedgerUnreachable, match=r"within 0\.2 s, found it locked"):
            ledger.append("a", fork())
        assert ledger.head().size == 5, "reading waits for nobody"


def test_a_holder_that_dies_gives_the_lock_back_at_once(book: str) -> None:
    with holder(book, 60.0) as child, Ledger.open(book) as ledger:
        os.kill(child.pid, signal.SIGKILL)
        assert ledger.append("a", fork()).first == 5


def test_a_holder_that_is_stopped_gives_the_lock_back_and_can_do_nothing(book: str) -> None:
    """The server ends it after HOLD_S; when it goes on, it learns so, and may decide again."""
    with holder(book, 0.5) as child, Ledger.open(book) as ledger:
        assert child.stdin is not None
        assert child.stdout is not None
        os.kill(child.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        assert ledger.append("a", fork()).first == 5
        assert 0.1 < time.monotonic() - began_s < 8.0
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        told = child.stdout.readline()
        assert told.startswith("LedgerUnreachable"), told
        assert "nothing was written" in told
        assert child.stdout.readline() == "6\n"
        assert [e.job for e in ledger.read(4)] == ["a", "held"]


def test_defaults_of_a_role_that_would_break_promises_do_not_hold(postgres: PostgresServer) -> None:
    url = postgres.url("bad_defaults", user="careless")
    with psycopg.connect(**postgres.parameters, autocommit=True) as connection:
        connection.execute("CREATE ROLE careless LOGIN SUPERUSER")
        for setting in (
            "synchronous_commit = off",
            "default_transaction_isolation = serializable",
            "default_transaction_read_only = on",
            "search_path = elsewhere",
            "idle_in_transaction_session_timeout = 0",
            "lock_timeout = 0",
        ):
            connection.execute(f"ALTER ROLE careless SET {setting}")  # type: ignore[arg-type]
    with Ledger.open(url) as ledger:
        assert ledger.append("a", fork()).first == 0
        session = ledger._store.dialect.writer()
        try:
            shown = {
                name: session.execute(f"SHOW {name}").fetchone()[0]
                for name in ("synchronous_commit", "idle_in_transaction_session_timeout")
            }
            session.execute(ledger._store.dialect.begin)
            isolation = session.execute("SHOW transaction_isolation").fetchone()[0]
        finally:
            session.close()
        assert shown == {
            "synchronous_commit": "on",
            "idle_in_transaction_session_timeout": f"{dialect.HOLD_S:g}s",
        }
        assert isolation == "read committed"


# ---- following -----------------------------------------------------------------------------


def test_a_commit_wakes_a_follower_long_before_its_next_look(book: str) -> None:
    seen: list[float] = []
    stop = threading.Event()
    with Ledger.open(book) as reader, Ledger.open(book) as writer:

        def follow() -> None:
            for event in reader.follow(4, poll_s=20.0, stop=stop):
                seen.append(time.monotonic() - float(event.body["reason"]))

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            listening = (
                "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN shiftbook%' "
                "AND application_name = 'shiftbook'"
            )
            probe = writer._store.dialect.reader()
            await_(lambda: probe.execute(listening).fetchone() is not None, DEADLINE_S)
            probe.close()
            for _ in range(5):
                count = len(seen)
                writer.append("a", fork(time.monotonic()))
                await_(lambda count=count: len(seen) > count, DEADLINE_S)
        finally:
            stop.set()
            thread.join(DEADLINE_S)
    print("woken after", seen)
    assert len(seen) == 5
    assert max(seen) < 5.0, "well before the next look"


def test_followers_of_one_handle_share_few_connections(book: str) -> None:
    """A bounded number for a handle, however many threads read and follow."""
    stop = threading.Event()
    counts = [0] * 12
    with Ledger.open(book) as ledger:

        def follow(number: int) -> None:
            for _ in ledger.follow(stop=stop):
                counts[number] += 1

        def connections() -> int:
            with psycopg.connect(**_parameters(book)) as probe:  # type: ignore[arg-type]
                row = probe.execute(
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE application_name = 'shiftbook' AND query NOT LIKE '%pg_stat%'"
                ).fetchone()
            assert row is not None
            return int(row[0])

        others = connections()
        threads = [threading.Thread(target=follow, args=(n,)) for n in range(len(counts))]
        for thread in threads:
            thread.start()
        most = 0
        for number in range(40):
            ledger.append("a", fork(number))
            most = max(most, connections() - others)
        await_(lambda: counts == [45] * len(counts), DEADLINE_S)
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    print("most connections beyond the first two:", most)
    assert most <= dialect.READERS

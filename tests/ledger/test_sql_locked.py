"""SQL that a user types can read the ledger's copy and nothing else.

Method: queries that try to reach files, the network, settings, extensions and Python are run
through the door that users have, which must refuse all but a single SELECT, and on the bare
connection behind it, whose configuration alone must keep them from files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from shiftbook.ledger.errors import InvalidQuery
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.mirror_build import TABLES
from shiftbook.ledger.query import run_query, tables_of
from tests.ledger.sample_ledger import write_sample

SECRET = "hunter2"

READS = (
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM read_csv_auto('{secret}')",
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM read_blob('{secret}')",
    "SELECT * FROM read_json('{secret}')",
    "SELECT * FROM read_parquet('{secret}')",
    "SELECT * FROM parquet_metadata('{secret}')",
    "SELECT * FROM sniff_csv('{secret}')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM '{secret}'",
    "FROM '{folder}/*.csv'",
    "SELECT * FROM read_csv('https://example.invalid/a.csv')",
    "SELECT * FROM read_parquet('s3://bucket/a.parquet')",
    "SELECT * FROM query('FROM read_text(''{secret}'')')",
    "SELECT (SELECT content FROM read_text('{secret}'))",
    "SELECT getenv('HOME')",
    "SELECT * FROM python_rows",
)
STATEMENTS = (
    "COPY events TO '{target}'",
    "COPY (SELECT 1) TO '{target}' (FORMAT parquet)",
    "COPY events FROM '{secret}'",
    "EXPORT DATABASE '{target}'",
    "IMPORT DATABASE '{folder}'",
    "ATTACH '{target}' AS other",
    "ATTACH '{secret}' AS other (TYPE sqlite)",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{secret}'",
    "SET enable_external_access = true",
    "RESET enable_external_access",
    "SET GLOBAL lock_configuration = false",
    "PRAGMA enable_profiling = 'json'",
    "SET profiling_output = '{target}'",
    "SET log_query_path = '{target}'",
    "SET temp_directory = '{target}'",
    "SET allowed_directories = ['/']",
    "CREATE SECRET (TYPE s3)",
    "CREATE PERSISTENT SECRET (TYPE http)",
    "EXPLAIN ANALYZE COPY events TO '{target}'",
)
CHANGES = (
    "DELETE FROM events",
    "INSERT INTO events SELECT * FROM events",
    "UPDATE events SET job = 'other'",
    "DROP TABLE events",
    "DROP VIEW samples",
    "CREATE TABLE mine AS SELECT 1",
    "CREATE TEMP TABLE mine AS SELECT 1",
    "CREATE MACRO mine() AS 1",
    "BEGIN",
    "COMMIT",
    "CHECKPOINT",
    "DETACH ledger",
    "USE memory",
    "CALL duckdb_settings()",
    "PREPARE p AS SELECT 1",
)

python_rows = pa.table({"secret": [SECRET]})
"""What a replacement scan would find if it looked at Python's variables."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "secret.csv").write_text(f"name\n{SECRET}\n", encoding="utf-8")
    write_sample(folder / "ledger.db", schedules=("dynamic",), iterations=1).close()
    return folder


@pytest.fixture(scope="module", params=["file", "memory"])
def mirror(request: pytest.FixtureRequest, folder: Path) -> Iterator[Mirror]:
    with (
        Ledger.open(f"sqlite:///{folder / 'ledger.db'}", read_only=True) as ledger,
        Mirror.open(ledger, in_memory=request.param == "memory") as mirror,
    ):
        assert (mirror.path is None) == (request.param == "memory")
        yield mirror


def placed(sql: str, folder: Path) -> str:
    """The query with the paths that it is after."""
    return sql.format(
        secret=folder / "secret.csv", folder=folder, target=folder / "written" / "out"
    )


@pytest.mark.parametrize("sql", READS + STATEMENTS + CHANGES)
def test_the_users_door_refuses(mirror: Mirror, folder: Path, sql: str) -> None:
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(InvalidQuery) as caught:
        list(run_query(mirror, placed(sql, folder)).rows)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert all(name in str(caught.value) for name in TABLES)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("sql", READS + STATEMENTS)
def test_the_connection_alone_reaches_no_file(mirror: Mirror, folder: Path, sql: str) -> None:
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises((duckdb.Error, NotImplementedError)):
        mirror.connection.cursor().execute(placed(sql, folder)).fetchall()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_not_even_its_own_file(mirror: Mirror, folder: Path) -> None:
    """The copy's own file and the ledger beside it are files like any other."""
    for name in ("ledger.db", "ledger.db.mirror.duckdb"):
        with pytest.raises(InvalidQuery):
            list(run_query(mirror, f"SELECT size FROM read_blob('{folder / name}')").rows)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT 1; SELECT 2", "expected one statement, found 2"),
        ("SELECT 1; DROP TABLE events", "expected one statement, found 2"),
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM moves", "moves does not exist"),
        ("SELECT nothing FROM events", "nothing"),
        ("-- only a comment", "expected one statement, found 0"),
        ("SELECT job::INTEGER FROM events", "Conversion Error"),
    ],
)
def test_a_bad_query_is_one_line_that_names_the_tables(mirror: Mirror, sql: str, said: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        list(run_query(mirror, sql).rows)
    text = str(caught.value)
    assert said in text
    assert "\n" not in text
    assert "reallocations" in text


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM events",
        "FROM iterations",
        "WITH a AS (SELECT 1 AS x) SELECT x FROM a",
        "DESCRIBE reallocations",
        "SHOW TABLES",
        "SUMMARIZE iterations",
        "VALUES (1), (2)",
        "SELECT 1 -- a comment at the end",
        "SELECT 1;",
    ],
)
def test_what_reads_the_tables_runs(mirror: Mirror, sql: str) -> None:
    answer = run_query(mirror, sql)
    assert answer.columns
    assert list(answer.rows)


@pytest.mark.parametrize(
    ("sql", "read"),
    [
        ("SELECT count(*) FROM events", ("events",)),
        ('FROM "Iterations" JOIN main.windows USING (job)', ("iterations", "windows")),
        ("describe reallocations", ("reallocations",)),
        ("SELECT problem FROM segments", ("samples",)),
        ("FROM sample_rows", ("samples",)),
        ("WITH leases AS (FROM events) FROM leases", ("events", "leases")),
        ("SELECT 1", TABLES),
        ("SHOW TABLES", TABLES),
        ("FROM query_table('re' || 'allocations'), events", TABLES),
        ("FROM query('from re' || 'allocations'), events", TABLES),
        ("SELECT estimated_size FROM duckdb_tables() WHERE table_name <> 'events'", TABLES),
    ],
)
def test_the_tables_that_a_query_may_read(sql: str, read: tuple[str, ...]) -> None:
    assert tables_of(sql) == read


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("spelled", [True, False], ids=["by its name", "by a name put together"])
def test_a_query_never_reads_a_table_that_is_behind(name: str, spelled: bool, folder: Path) -> None:
    """Goal: a table that the copy keeps behind is brought up before a query can see it.

    Method: a copy that has but the events, and then each table by its name and by a name that the
    query puts together, against a copy of everything in memory.
    """
    sql = f"FROM {name}" if spelled else f"FROM query_table('{name[:2]}' || '{name[2:]}')"
    with Ledger.open(f"sqlite:///{folder / 'ledger.db'}", read_only=True) as ledger:
        ledger.beside(".mirror.duckdb").unlink(missing_ok=True)
        Mirror.open(ledger, ["events"]).close()
        with Mirror.open(ledger, in_memory=True) as whole:
            expected = sorted(map(str, run_query(whole, f"FROM {name}").rows))
        with Mirror.open(ledger, tables_of(sql)) as mirror:
            assert sorted(map(str, run_query(mirror, sql).rows)) == expected


def test_columns_of_one_name_are_told_apart(mirror: Mirror) -> None:
    answer = run_query(mirror, "SELECT 1 AS n, 2 AS n, 3 AS n")
    assert answer.columns == ("n", "n_2", "n_3")
    assert list(answer.rows) == [(1, 2, 3)]


def test_a_body_is_a_value_and_not_its_text(mirror: Mirror) -> None:
    answer = run_query(mirror, "SELECT body FROM events WHERE type = 'LeaseGranted'")
    assert answer.types == ("JSON",)
    assert list(answer.rows) == [({"devices": ["n/0", "n/1"], "holder": "a1"},)]

"""Goal: on either store no table and no column is left out of what an attacker's change shows.

Method: tables and columns are those of the schema, so a new one is attacked without a line here.
The owner of a database rebuilds each table without triggers, keys and types, then changes, empties
and retypes one column, or moves rows; an auditor with the key and the heads outside must find it
where it is, and no change may end in anything but a verdict or one line. SQLite's own spellings of
more attacks stand in test_tampering.py.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy import BigInteger, Column, Integer, LargeBinary, String, Table, Text

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.cli import main
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.merkle import CompactRange
from shiftbook.ledger.publication import FileOutlet
from shiftbook.ledger.signed_note import SignedHead
from shiftbook.ledger.signing_keys import Ed25519Signer
from shiftbook.ledger.tables import METADATA
from shiftbook.verify import grouped, scan_block, served, sources, stored
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.heads import Outside
from shiftbook.verify.served import open_raw
from shiftbook.verify.verdict import Verdict, verify
from tests.ledger.stores import STORES, new_url, postgres_of_the_session, run_sql
from tests.verify.signed_run import EVENTS, KEY, SIZES, THIEF, Signed, long_run, write_signed
from tests.verify.test_tampering import EVENT_ROWS, own

ROWS = {
    "events": "position = 70",
    "heads": "size = 120",
    "nodes": "level = 1 and number = 0",
    "meta": "name = 'storage_schema'",
    "derived_revision": "version_num <> ''",
}
"""The row of each table that is attacked."""

COLUMNS = [column for table in METADATA.tables.values() for column in table.columns]
NAMES = [f"{column.table.name}.{column.name}" for column in COLUMNS]


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    """The signed run, and one more event under its heads, which has an idempotency key."""
    signed = write_signed(tmp_path_factory.mktemp("signed"))
    with Ledger.open(f"sqlite:///{signed.path}") as ledger:
        ledger.append("demo", long_run().entries[150].event, key="once")
        HeadSigner(ledger, KEY, [FileOutlet(signed.heads)]).sign()
    with closing(sqlite3.connect(signed.path)) as connection:
        connection.execute("pragma journal_mode=delete")
    return signed


class Attacked:
    """A copy of the signed ledger on one of the stores, whose owner is the attacker."""

    def __init__(self, store: str, signed: Signed, folder: Path) -> None:
        self.store, self.heads = store, signed.heads
        self.evidence = str(signed.evidence)
        if store == "sqlite":
            copy = signed.copy(folder)
            self.path, self.url = copy.path, f"sqlite:///{copy.path}"
            return
        self.url = new_url(store, folder)
        Ledger.open(self.url).close()
        self.do()  # without triggers and keys, so that rows come in as they stand in the file
        with (
            closing(sqlite3.connect(signed.path)) as file,
            psycopg.connect(**postgres_of_the_session().parameters) as connection,
            connection.cursor() as cursor,
        ):
            for table in METADATA.tables.values():
                rows = (
                    file.execute(f"select * from {table.name} order by 1, 2").fetchall()
                    if (len(table.columns) > 1)
                    else file.execute(f"select * from {table.name}").fetchall()
                )
                marks = ", ".join(["%s"] * len(table.columns))
                where = f"{self.url.rpartition('schema=')[2]}.{table.name}"
                cursor.execute(f"DELETE FROM {where}")  # type: ignore[arg-type]
                cursor.executemany(f"INSERT INTO {where} VALUES ({marks})", rows)  # type: ignore[arg-type]

    def do(self, *statements: str) -> None:
        """Rebuild every table without triggers, keys and types, and run the statements."""
        if self.store == "sqlite":
            own(self.path, *statements)
            return
        mark = "(select obj_description('events'::regclass))"
        rebuilt = [
            text
            for name in METADATA.tables
            for text in (
                f"CREATE TABLE free AS SELECT * FROM {name}",
                f"DROP TABLE {name}",
                f"ALTER TABLE free RENAME TO {name}",
            )
        ]
        keep = f"CREATE TEMP TABLE kept AS SELECT {mark} AS mark"
        again = (
            "DO $$ BEGIN EXECUTE format('COMMENT ON TABLE events IS %L', (SELECT mark FROM kept));"
            " END $$"
        )
        assert run_sql(self.url, keep, *rebuilt, again, *statements) is None

    def verdict(self) -> Verdict:
        outside = Outside.read([str(self.heads)], [KEY.verifier.text()])
        # The event after the job's end is no lawful one, so the stored bytes alone are judged.
        return verify(
            self.url,
            outside=outside,
            evidence=self.evidence,
            require_signed=True,
            integrity_only=True,
        )

    def first(self, column: Column[object], start: int = 70) -> int:
        """Position of the first event from there on that has a value in the column."""
        with closing(sqlite3.connect(self.heads.with_name("ledger.db"))) as connection:
            ((at,),) = connection.execute(
                f'select min(position) from events where position >= {start} and "{column.name}" '
                "is not null"
            )
        return int(at)


@pytest.fixture(params=STORES)
def attacked(
    request: pytest.FixtureRequest,
    signed: Signed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Attacked:
    monkeypatch.setenv("PGUSER", "postgres")
    return Attacked(request.param, signed, tmp_path / "copy")


def retyped(column: Column[object], store: str, at: int) -> str:
    """A statement after which a column holds another kind of value: in a file in one row, in a
    server, where a column has one kind, in all."""
    table, name = column.table.name, f'"{column.name}"'
    binary = isinstance(column.type, LargeBinary)
    if store == "sqlite":
        to = "text" if binary else "blob"
        where = f"position = {at}" if table == "events" else ROWS[table]
        return f"update {table} set {name} = cast({name} as {to}) where {where}"
    if binary:
        kind, value = "text", f"encode({name}, 'hex')"
    elif isinstance(column.type, Text | String):
        kind, value = "bytea", f"convert_to({name}::text, 'UTF8')"
    else:
        kind, value = "text", f"{name}::text"
    return f"ALTER TABLE {table} ALTER COLUMN {name} TYPE {kind} USING {value}"


def changed(column: Column[object], store: str) -> str:
    """A statement after which a column of one row holds another value of its kind."""
    name = f'"{column.name}"'
    if isinstance(column.type, LargeBinary):
        one = "x'41'" if store == "sqlite" else "'\\x41'::bytea"
        value = f"{one} || {name}"
        value = f"cast({value} as blob)" if store == "sqlite" else value
    elif column.name in ("position", "version", "schema", "sequence", "recorded_ns") or (
        column.table.name in ("heads", "nodes")
    ):
        value = f"{name} + 5000"
    else:
        value = f"coalesce({name}, '') || 'x'"
    return f"update {column.table.name} set {name} = {value} where {ROWS[column.table.name]}"


PLACES = {"heads": 119, "nodes": 0, "meta": 0, "derived_revision": 0}
"""Where a change of the row in ROWS shows."""


def found(attacked: Attacked, table: Table, at: int, first_at: int | None = None) -> None:
    """A finding of that table's check, at the place where it can be known.

    ``first_at`` is where the first of all is, if not there: a row of the table of heads that does
    not say its number of events points at no place.
    """
    verdict = attacked.verdict()
    assert verdict.exit_code == 1
    first = verdict.findings[0]
    assert all((first.expected, first.found, first.cause, first.action))
    wanted = "heads" if table.name in ("heads", "nodes") else "integrity"
    told = [(f.invariant, f.position) for f in verdict.findings]
    assert (wanted, at) in told
    assert told[0] == (wanted, at if first_at is None else first_at)
    if table.name == "events":
        assert verdict.judged_until == at - 1


# -- the schema ------------------------------------------------------------------------------


def test_the_tables_are_those_of_the_schema(attacked: Attacked) -> None:
    """What a ledger holds is what is attacked below: nothing stands beside it."""
    if attacked.store == "sqlite":
        with closing(sqlite3.connect(attacked.path)) as connection:
            names = connection.execute("select name from sqlite_master where type = 'table'")
            there = {name for (name,) in names}
            listed = {
                name: [row[1] for row in connection.execute(f"pragma table_info({name})")]
                for name in there
            }
    else:
        with psycopg.connect(**postgres_of_the_session().parameters) as connection:
            rows = connection.execute(
                "SELECT table_name, column_name FROM information_schema.columns WHERE "
                "table_schema = %s ORDER BY ordinal_position",
                (attacked.url.rpartition("schema=")[2],),
            ).fetchall()
        listed = {}
        for table, column in rows:
            listed.setdefault(table, []).append(column)
    assert listed == {t.name: [c.name for c in t.columns] for t in METADATA.tables.values()}
    assert set(ROWS) == set(METADATA.tables)


def test_rebuilt_tables_with_the_same_rows_are_no_change(attacked: Attacked) -> None:
    attacked.do()
    verdict = attacked.verdict()
    assert (verdict.exit_code, verdict.findings) == (0, ())
    assert verdict.protected_until == EVENTS


# -- columns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("column", COLUMNS, ids=NAMES)
def test_a_column_changed(attacked: Attacked, column: Column[object]) -> None:
    attacked.do(changed(column, attacked.store))
    found(attacked, column.table, PLACES.get(column.table.name, 70))


@pytest.mark.parametrize("column", COLUMNS, ids=NAMES)
def test_a_column_emptied(attacked: Attacked, column: Column[object]) -> None:
    table = column.table.name
    at = attacked.first(column) if table == "events" else PLACES[table]
    where = f"position = {at}" if table == "events" else ROWS[table]
    attacked.do(f'update {table} set "{column.name}" = null where {where}')
    found(attacked, column.table, at, 0 if table == "heads" else None)


@pytest.mark.parametrize("column", COLUMNS, ids=NAMES)
def test_a_column_of_another_kind(attacked: Attacked, column: Column[object]) -> None:
    start = 70 if attacked.store == "sqlite" else 0
    table = column.table.name
    at = attacked.first(column, start) if table == "events" else PLACES[table]
    if table == "heads" and attacked.store == "postgresql":
        at = 59  # of all heads
    attacked.do(retyped(column, attacked.store, at))
    refused: UnreadableStore | None = None
    try:
        found(attacked, column.table, at, 0 if table == "heads" else None)
    except UnreadableStore as error:
        refused = error
    # A server refuses to compare what a column may no longer hold: said in one line.
    assert refused is None or (attacked.store == "postgresql" and "\n" not in str(refused))


WHOLE = [column for column in COLUMNS if isinstance(column.type, Integer | BigInteger)]


@pytest.mark.parametrize("kind", ["numeric", "double precision"])
@pytest.mark.parametrize("column", WHOLE, ids=[f"{c.table.name}.{c.name}" for c in WHOLE])
def test_whole_numbers_of_another_kind(
    signed: Signed, tmp_path: Path, column: Column[object], kind: str
) -> None:
    """They equal the numbers that they were; in SQLite see ``test_a_number_stored_as_a_real``."""
    attacked = Attacked("postgresql", signed, tmp_path)
    attacked.do(f'ALTER TABLE {column.table.name} ALTER COLUMN "{column.name}" TYPE {kind}')
    heads = column.table.name == "heads"
    found(attacked, column.table, 59 if heads else 0, 0 if heads else None)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(kind, value) for kind in ("numeric", "double precision")
     for value in ("1e30", "'NaN'", "'Infinity'", "'-Infinity'", "70.5")]
    + [("text", "'abc'"), ("bytea", "'\\x41'")],
)  # fmt: skip
def test_a_row_at_no_position_of_a_server(
    signed: Signed, tmp_path: Path, kind: str, value: str
) -> None:
    """With the column's kind changed; nothing but a verdict or one line, and no clean one."""
    attacked = Attacked("postgresql", signed, tmp_path)
    using = "convert_to(position::text, 'UTF8')" if kind == "bytea" else f"position::{kind}"
    attacked.do(
        f"ALTER TABLE events ALTER COLUMN position TYPE {kind} USING {using}",
        f"INSERT INTO events SELECT {value}, job, version, type, schema, operation, key, writer, "
        "sequence, recorded_ns, data, leaf FROM events LIMIT 1",
    )
    if kind in ("text", "bytea"):
        with contextlib.suppress(UnreadableStore):
            assert attacked.verdict().exit_code == 1
    else:
        found(attacked, METADATA.tables["events"], 0)
    for words in (["log", "--limit", "3"], ["jobs"], ["state"], ["show", "3"]):
        result = CliRunner().invoke(main, [*words, "--ledger", attacked.url])
        assert result.exit_code == 2, (words, result.output)
        assert result.output.count("\n") == 1
        assert "unexpected" not in result.output


@pytest.mark.parametrize("beyond", ["1e30", "'Infinity'", "'-Infinity'", "'NaN'"])
def test_all_rows_of_a_server_beyond_every_position(
    signed: Signed, tmp_path: Path, beyond: str
) -> None:
    attacked = Attacked("postgresql", signed, tmp_path)
    attacked.do(
        "ALTER TABLE events ALTER COLUMN position TYPE numeric",
        f"UPDATE events SET position = {beyond}",
    )
    found(attacked, METADATA.tables["events"], 0)
    assert any("320 rows too many" in f.found for f in attacked.verdict().findings)


# -- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVENT_ROWS)
def test_rows_of_events(attacked: Attacked, name: str) -> None:
    statements, at = EVENT_ROWS[name]
    attacked.do(*statements)
    verdict = attacked.verdict()
    assert verdict.exit_code == 1
    assert verdict.findings[0].position == at, verdict.findings


# -- whole histories -------------------------------------------------------------------------

ALL_SIZES = (*SIZES, EVENTS + 1)


def bytes_of(attacked: Attacked, value: bytes) -> str:
    """How the store spells bytes."""
    hexadecimal = value.hex()
    return f"x'{hexadecimal}'" if attacked.store == "sqlite" else f"'\\x{hexadecimal}'::bytea"


def another_history(
    attacked: Attacked, changed_at: Collection[int], sizes: Sequence[int], signer: Ed25519Signer
) -> None:
    """Rewrite some events with all hashes above them, up to the last size, and sign each size."""
    with closing(sqlite3.connect(attacked.heads.with_name("ledger.db"))) as connection:
        rows = connection.execute("select position, data from events order by position").fetchall()
    nodes: list[tuple[int, int, bytes]] = []
    tree = CompactRange(on_node=lambda *node: nodes.append(node))
    statements = ["delete from heads", "delete from nodes"]
    if sizes[-1] < len(rows):
        statements.append(f"delete from events where position >= {sizes[-1]}")
    for position, data in rows[: sizes[-1]]:
        if position in changed_at:
            data = data.replace(b'"actor":"tester"', b'"actor":"nobody"')
            leaf = bytes_of(attacked, leaf_hash(data))
            statements.append(
                f"update events set data = {bytes_of(attacked, data)}, leaf = {leaf} "
                f"where position = {position}"
            )
        tree.append(leaf_hash(data))
        if tree.size in sizes:
            signed = bytes_of(attacked, SignedHead.sign(tree.size, tree.root(), signer).data())
            statements.append(f"insert into heads values ({tree.size}, {signed})")
    statements += [
        f"insert into nodes values ({level}, {number}, {bytes_of(attacked, value)})"
        for level, number, value in nodes
    ]
    attacked.do(*statements)


@pytest.mark.parametrize(("at", "proved"), [(0, 0), (70, 60), (200, 180)])
def test_a_rewritten_history_signed_by_the_signers_key(
    attacked: Attacked, at: int, proved: int
) -> None:
    another_history(attacked, {at}, ALL_SIZES, KEY)
    verdict = attacked.verdict()
    assert verdict.exit_code == 1
    assert verdict.judged_until == proved - 1
    finding = next(f for f in verdict.findings if f.invariant == "outside")
    assert finding.position == proved <= at <= finding.positions[-1]
    assert "was not signed" in finding.found
    assert not [f for f in verdict.findings if f.invariant == "integrity"]


def test_a_rewritten_history_signed_by_a_thief(attacked: Attacked) -> None:
    another_history(attacked, {70}, ALL_SIZES, THIEF)
    verdict = attacked.verdict()
    assert verdict.judged_until == 59
    assert ("outside", 60) in {(f.invariant, f.position) for f in verdict.findings}
    forged = next(f for f in verdict.findings if "signed by the ledger's signer" in f.expected)
    assert (forged.invariant, forged.position) == ("heads", 59)


def test_a_rollback_to_an_old_copy(attacked: Attacked) -> None:
    another_history(attacked, (), (60, 120), KEY)
    verdict = attacked.verdict()
    (finding,) = [f for f in verdict.findings if f.invariant == "outside"]
    assert (finding.position, verdict.judged_until) == (120, 119)
    assert "at least 180 events" in finding.expected
    assert "rolled back to an older copy" in finding.cause


def test_a_fork_that_the_signer_was_made_to_sign(attacked: Attacked) -> None:
    another_history(attacked, range(120, 190), (60, 120, 190), KEY)
    verdict = attacked.verdict()
    (finding,) = [f for f in verdict.findings if f.invariant == "outside"]
    assert (finding.position, verdict.judged_until) == (120, 119)
    assert "signed two histories" in finding.cause
    assert verdict.protected_until == 119


def test_two_heads_of_one_size(attacked: Attacked) -> None:
    other = bytes_of(attacked, SignedHead.sign(180, bytes(32), KEY).data())
    attacked.do(f"update heads set note = {other} where size = 180")
    verdict = attacked.verdict()
    assert [(f.invariant, f.position) for f in verdict.findings] == [("heads", 179)]
    assert "signed two histories" in verdict.findings[0].cause


# -- rows of the tree ------------------------------------------------------------------------

TREE_ROWS = {
    "head deleted": ("delete from heads where size = 180", 179),
    "heads swapped": (
        "update heads set note = (select note from heads h where h.size = 180 - heads.size) "
        "where size in (60, 120)", 59),
    "head duplicated": ("insert into heads select * from heads where size = 60", 59),
    "head inserted": ("insert into heads select 100, note from heads where size = 60", 99),
    "heads truncated": ("delete from heads where size > 60", 119),
    "heads emptied": ("delete from heads", 59),
    "node deleted": ("delete from nodes", 0),
    "node duplicated": ("insert into nodes select * from nodes", 0),
    "node inserted": ("insert into nodes select 1, 1, hash from nodes", 256),
    "node inserted without a hash": ("insert into nodes values (1, 1, null)", 256),
    "node inserted far away without a hash": (
        "insert into nodes values (9, 99999999999, null)", 0),
    "node moved": ("update nodes set level = 2", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TREE_ROWS)
def test_rows_of_heads_and_nodes(attacked: Attacked, name: str) -> None:
    statement, at = TREE_ROWS[name]
    attacked.do(statement)
    verdict = attacked.verdict()
    assert verdict.exit_code == 1
    assert ("heads", at) in {(f.invariant, f.position) for f in verdict.findings}


# -- cost ------------------------------------------------------------------------------------


@pytest.mark.parametrize("integrity_only", [True, False])
def test_a_table_without_its_key_costs_no_search_of_all_rows_for_each_page(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch, integrity_only: bool
) -> None:
    """An attacker must not make a large ledger too slow to be judged. Pages are made small, and the
    rows that the store visits are counted: by its own steps in a file, by statements in a server,
    where each that names the table is a search of it."""
    monkeypatch.setattr(stored, "READ_ROWS", 4)
    monkeypatch.setattr(served, "READ_ROWS", 4)
    monkeypatch.setattr(scan_block, "PAGE_ROWS", 4)
    monkeypatch.setattr(grouped, "ALONE_EVENTS", 10)
    texts: list[str] = []
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    connect = sqlite3.connect

    def counted(*given: Any, **named: Any) -> sqlite3.Connection:
        connection = connect(*given, **named)
        connection.set_progress_handler(step, 100)
        return connection

    def opened(url: str) -> Any:
        raw = open_raw(url)
        if isinstance(raw, served.ServedEvents):
            told = raw._told

            def listed(text: str, *rest: Any) -> Any:
                texts.append(text)
                return told(text, *rest)

            monkeypatch.setattr(raw, "_told", listed)
        return raw

    monkeypatch.setattr(sources, "open_raw", opened)
    attacked.do()
    monkeypatch.setattr(sqlite3, "connect", counted)
    verdict = verify(attacked.url, evidence=attacked.evidence, integrity_only=integrity_only)
    assert not verdict.integrity_broken
    assert verdict.last == EVENTS
    if attacked.store == "sqlite":
        # Measured 50 and 90 for each event; with a search for each page it was 600.
        assert 0 < steps * 100 < EVENTS * 200
    else:
        searches = [text for text in texts if "FROM events" in text]
        assert 1 <= len(searches) <= 8
        assert sum(text.startswith("FETCH") for text in texts) > EVENTS / 4

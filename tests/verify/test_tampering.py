"""Goal: what stands before the last head outside the database cannot be changed, cut or forked.

Method: an attacker who owns the database rebuilds its tables without triggers, keys and indexes,
and then changes, swaps, deletes, inserts, reorders, duplicates and truncates: each column of each
table, the heads outside and the evidence, one at a time; rewrites the whole history with a tree
that fits; rolls it back; forks it; signs with another key. Each must be found, at the first
position that it can be known from, with a message that says what it means. The controls say what is
no change, and what stands after the last head outside: anybody may add there, and it is counted.
"""

from __future__ import annotations

import resource
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import PublicationFailed
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.merkle import CompactRange
from shiftbook.ledger.publication import FileOutlet, UrlOutlet
from shiftbook.ledger.signed_note import SignedHead, split_heads
from shiftbook.ledger.tables import EVENTS as EVENT_TABLE
from shiftbook.ledger.tables import METADATA
from shiftbook.verify import stored
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.heads import Outside
from shiftbook.verify.verdict import Verdict, follow, verify
from tests.verify.honest_run import Run
from tests.verify.signed_run import EVENTS, KEY, SIZES, THIEF, Signed, long_run, write_signed

TABLES = tuple(METADATA.tables)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return write_signed(tmp_path_factory.mktemp("signed"))


@pytest.fixture
def copy(original: Signed, tmp_path: Path) -> Signed:
    return original.copy(tmp_path / "copy")


def own(path: Path, *statements: str | tuple[str, tuple[object, ...]]) -> None:
    """Rebuild every table without its triggers, keys and indexes, then run the statements."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma synchronous=off")
        for (name,) in connection.execute(
            "select name from sqlite_master where type = 'trigger'"
        ).fetchall():
            connection.execute(f'drop trigger "{name}"')
        for table in TABLES:
            connection.execute(f"create table free as select * from {table} order by rowid")
            connection.execute(f"drop table {table}")
            connection.execute(f"alter table free rename to {table}")
        for statement in statements:
            text, values = (statement, ()) if isinstance(statement, str) else statement
            assert connection.execute(text, values).rowcount != 0, text


def told(verdict: Verdict) -> list[tuple[str, int]]:
    return [(finding.invariant, finding.position) for finding in verdict.findings]


# -- controls --------------------------------------------------------------------------------


def test_an_untouched_ledger_is_clean_and_every_event_protected(copy: Signed) -> None:
    verdict = copy.verify(require_signed=True)
    assert (verdict.exit_code, verdict.findings) == (0, ())
    assert verdict.protected_until == EVENTS - 1
    assert verdict.plain()["unprotected"] == 0
    for name in ("integrity", "evidence", "heads", "outside"):
        assert verdict.coverage.row(name).status == "checked", name
    assert "every event stands under a head outside" in verdict.notes[0]


def test_tables_rebuilt_with_the_same_rows_are_no_change(copy: Signed) -> None:
    own(copy.path, "create table e2 as select * from events order by position desc",
        "drop table events", "alter table e2 rename to events")  # fmt: skip
    assert copy.verify().exit_code == 0


def test_without_heads_or_key_the_verdict_says_what_it_did_not_see(copy: Signed) -> None:
    verdict = copy.verify(heads=False)
    assert verdict.coverage.row("outside").status == "not checked"
    assert "no event is protected by what was seen" in verdict.notes[0]
    assert verdict.plain()["unprotected"] == EVENTS
    assert copy.verify(heads=False, require_signed=True).exit_code == 2
    verdict = copy.verify(key=False)
    assert verdict.coverage.row("heads").status == "partly"
    assert "signatures were not checked" in verdict.notes[1]


def test_a_prefix_is_held_against_the_heads_that_it_covers(copy: Signed) -> None:
    verdict = copy.verify(until=150)
    assert (verdict.exit_code, verdict.protected_until) == (0, 119)
    assert verdict.coverage.row("outside").checks == 2
    assert copy.verify(until=150, require_signed=True).exit_code == 2


def test_heads_are_required_of_the_stored_bytes_alone_too(copy: Signed) -> None:
    assert copy.verify(integrity_only=True, require_signed=True).exit_code == 0
    verdict = copy.verify(integrity_only=True, require_signed=True, heads=False)
    assert (verdict.exit_code, verdict.findings) == (2, ())
    assert f"{EVENTS} events from position 0 on" in verdict.could_not[0]


def test_a_followed_ledger_is_held_against_its_heads_at_the_end(copy: Signed) -> None:
    def outside() -> Outside:
        return Outside.read([str(copy.heads)], [KEY.verifier.text()])

    url = f"sqlite:///{copy.path}"
    verdict = follow(url, stop=threading.Event(), outside=outside, require_signed=True)
    assert verdict.plain() == copy.verify(require_signed=True).plain()
    rewrite(copy, 70, KEY)
    verdict = follow(url, stop=threading.Event(), outside=outside)
    assert [f.position for f in verdict.findings if f.invariant == "outside"] == [60]
    assert verdict.judged_until == 59


def test_the_command_line(copy: Signed) -> None:
    def call(*arguments: str) -> tuple[int, str]:
        words = ["verify", str(copy.path), *arguments]
        result = CliRunner().invoke(main, words)
        return result.exit_code, result.output

    key, heads = KEY.verifier.text(), str(copy.heads)
    code, out = call("--heads", heads, "--key", key, "--require-signed")
    assert code == 0, out
    assert "every event stands under a head outside the database" in out
    assert call("--require-signed")[0] == 2
    assert call("--heads", heads, "--key", "nonsense")[0] == 2
    assert call("--heads", heads + ".none", "--key", key)[0] == 2
    code, out = call("--heads", heads, "--key", THIEF.verifier.text())
    assert code == 1
    assert "a head signed by the ledger's signer" in out


def test_what_was_added_after_the_last_head_is_counted(copy: Signed) -> None:
    Run(long_run().entries[150:157]).write(copy.path)
    verdict = copy.verify()
    assert verdict.protected_until == EVENTS - 1
    assert f"7 events from position {EVENTS} on stand after the last head" in verdict.notes[0]
    assert verdict.plain()["unprotected"] == 7
    verdict = copy.verify(require_signed=True)
    assert f"7 events from position {EVENTS} on" in verdict.could_not[0]
    assert verdict.exit_code in (1, 2)


# -- the table of events ---------------------------------------------------------------------

EVENT_COLUMNS = {
    "position": "position + 5000", "job": "'another'", "version": "version + 1", "type": "'Other'",
    "schema": "7", "operation": "'x'", "key": "'x'", "writer": "'w'", "sequence": "sequence + 1",
    "recorded_ns": "recorded_ns + 1", "data": "cast('{' || substr(data, 3) as blob)",
    "leaf": "zeroblob(32)",
}  # fmt: skip


def test_no_column_of_events_is_forgotten() -> None:
    assert set(EVENT_COLUMNS) == {column.name for column in EVENT_TABLE.columns}


@pytest.mark.parametrize("at", [0, 70, 301])
@pytest.mark.parametrize("column", EVENT_COLUMNS)
def test_each_column_of_an_event_changed(copy: Signed, column: str, at: int) -> None:
    own(copy.path, f'update events set "{column}" = {EVENT_COLUMNS[column]} where position = {at}')
    verdict = copy.verify()
    assert verdict.exit_code == 1
    assert told(verdict)[0] == ("integrity", at)
    assert verdict.judged_until == at - 1


@pytest.mark.parametrize("column", EVENT_COLUMNS)
def test_each_column_of_an_event_stored_as_another_type(copy: Signed, column: str) -> None:
    to = "text" if column in ("data", "leaf") else "blob"
    value = f'cast(coalesce("{column}", 0) as {to})'
    own(copy.path, f'update events set "{column}" = {value} where position = 70')
    assert told(copy.verify())[0] == ("integrity", 70)


@pytest.mark.parametrize("column", [name for name in EVENT_COLUMNS if name != "key"])
def test_each_column_of_an_event_emptied(copy: Signed, column: str) -> None:
    with closing(sqlite3.connect(copy.path)) as connection:
        (at,) = connection.execute(
            f"select min(position) from events where position >= 17 and {column} is not null"
        ).fetchone()
    own(copy.path, f'update events set "{column}" = null where position = {at}')
    verdict = copy.verify()
    # A row without a position is seen by no reader; the gap that it leaves is.
    assert told(verdict)[0] == ("integrity", at)


def test_the_key_of_an_event_emptied(copy: Signed) -> None:
    with Ledger.open(f"sqlite:///{copy.path}", writer="writer-1") as ledger:
        ledger.append("demo", long_run().entries[150].event, key="once")
    own(copy.path, f"update events set key = null where position = {EVENTS}")
    assert ("integrity", EVENTS) in told(copy.verify())


EVENT_ROWS: dict[str, tuple[tuple[str, ...], int]] = {
    "swap the bytes of two": (
        ("update events set (data, leaf) = (select data, leaf from events e where e.position = "
         "160 - events.position) where position in (70, 90)",), 70),
    "swap the places of two": (
        ("update events set position = 160 - position where position in (70, 90)",), 70),
    "swap two neighbours": (
        ("update events set position = 141 - position where position in (70, 71)",), 70),
    "delete the first": (("delete from events where position = 0",), 0),
    "delete one": (("delete from events where position = 70",), 70),
    "delete the last": (("delete from events where position = 301",), 301),
    "delete one and close the gap": (
        ("delete from events where position = 70",
         "update events set position = position - 1 where position > 70"), 70),
    "insert one and open a gap": (
        ("update events set position = position + 1 where position >= 70",
         "insert into events select 70, job, version, type, schema, operation, key, writer, "
         "sequence, recorded_ns, data, leaf from events where position = 60"), 70),
    "duplicate one": (("insert into events select * from events where position = 70",), 70),
    "insert before the first": (
        ("insert into events select -1, job, version, type, schema, operation, key, writer, "
         "sequence, recorded_ns, data, leaf from events where position = 60",), 0),
    "insert without a position": (
        ("insert into events select null, job, version, type, schema, operation, key, writer, "
         "sequence, recorded_ns, data, leaf from events where position = 60",), 0),
    "insert between two": (
        ("insert into events select 70.5, job, version, type, schema, operation, key, writer, "
         "sequence, recorded_ns, data, leaf from events where position = 60",), 71),
    "reverse all": (("update events set position = 301 - position",), 0),
    "truncate": (("delete from events where position >= 200",), 200),
    "truncate to a head": (("delete from events where position >= 180",), 180),
    "truncate with heads and nodes": (
        ("delete from events where position >= 180", "delete from heads where size > 180",
         "delete from nodes"), 180),
    "empty": (("delete from events", "delete from heads", "delete from nodes"), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", EVENT_ROWS)
def test_rows_of_events(copy: Signed, name: str) -> None:
    statements, at = EVENT_ROWS[name]
    own(copy.path, *statements)
    verdict = copy.verify()
    assert verdict.exit_code == 1
    first = verdict.findings[0]
    assert first.position == at, told(verdict)
    assert all((first.expected, first.found, first.cause, first.action))


def test_a_row_that_a_reader_of_pages_passes_over(
    copy: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader goes on after the last position of a page, so a second one of it is not seen."""
    monkeypatch.setattr(stored, "READ_ROWS", 71)
    own(copy.path, "insert into events select * from events where position = 70")
    (finding,) = copy.verify().findings
    assert (finding.invariant, finding.position) == ("integrity", 70)
    assert "1 rows too many" in finding.found


def inserted_at(position: str) -> str:
    """A statement that puts a copy of an event at what may be no position."""
    return (
        f"insert into events select {position}, job, version, type, schema, operation, key, "
        "writer, sequence, recorded_ns, data, leaf from events where position = 60"
    )


NO_POSITIONS = ("x'41'", "x''", "'abc'", "''", "1e30", "9e999", "-9e999")
"""What a column without its key may hold and no comparison with a whole number finds."""


@pytest.mark.parametrize("position", NO_POSITIONS)
def test_a_row_inserted_at_no_position(copy: Signed, position: str) -> None:
    own(copy.path, inserted_at(position))
    for options in ({}, {"integrity_only": True}, {"until": 150}):
        verdict = copy.verify(**options)
        assert verdict.exit_code == 1, options
        assert told(verdict) == [("integrity", 0)]
        assert "1 rows too many" in verdict.findings[0].found


@pytest.mark.parametrize("position", NO_POSITIONS)
def test_rows_of_one_key_at_no_position(copy: Signed, position: str) -> None:
    """Two of them, since positions that are no numbers say nothing of what lies between them."""
    keyed = inserted_at(position).replace(" key,", " 'k',")
    again = inserted_at("x'42'").replace(" key,", " 'k',")
    own(copy.path, keyed, again)
    for options in ({}, {"until": 150}):
        verdict = copy.verify(**options)
        assert verdict.exit_code == 1
        assert {at for _, at in told(verdict)} == {0}


@pytest.mark.parametrize("position", NO_POSITIONS)
def test_commands_refuse_a_ledger_with_such_a_row(copy: Signed, position: str) -> None:
    """They go by the largest position; what sorts below all events is in no command's way."""
    own(copy.path, inserted_at(position))
    for words in (["log", "--limit", "3"], ["log", "--newest"], ["log", "--since", "10m"],
                  ["jobs"], ["show", "3"], ["state"], ["export", "-o", f"{copy.path}.sbk"],
                  ["sql", "select count(*) from events"]):  # fmt: skip
        result = CliRunner().invoke(main, [*words, "--ledger", f"sqlite:///{copy.path}"])
        if position == "-9e999" and words[0] != "export":
            assert result.exit_code == 0, (words, result.output)
            continue
        assert result.exit_code == 2, (words, result.output)
        assert result.output.count("\n") == 1
        if position == "-9e999":  # such a row fits no table that has its key
            assert "with its key (position), found it without" in result.output
            continue
        assert "expected whole numbers as the positions in" in result.output
        assert "restore the ledger from a copy" in result.output


@pytest.mark.timeout(60)
def test_a_row_at_the_largest_position(copy: Signed) -> None:
    """Goal: what is read, and the memory for it, is bounded by the rows and not by a position."""
    own(copy.path, inserted_at("9223372036854775807"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for options in ({}, {"integrity_only": True}):
        verdict = copy.verify(**options)
        assert verdict.exit_code == 1
        assert told(verdict)[0] == ("integrity", EVENTS)
        assert verdict.judged_until == EVENTS - 1
    for words, code in ((["log"], 0), (["log", "--newest"], 0), (["log", "--since", "10m"], 2),
                        (["jobs"], 0), (["state"], 0), (["show", "3"], 0), (["report"], 2),
                        (["export", "-o", f"{copy.path}.sbk"], 2), (["sql", "select 1"], 2),
                        (["export", "--tiles", f"{copy.path}.tiles"], 2)):  # fmt: skip
        result = CliRunner().invoke(main, [*words, "--ledger", f"sqlite:///{copy.path}"])
        assert result.exit_code == code, (words, result.output)
        assert "unexpected" not in result.output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10  # KiB


@pytest.mark.parametrize("column", ["position", "version", "schema", "sequence", "recorded_ns"])
def test_a_number_stored_as_a_real(copy: Signed, column: str) -> None:
    """It equals the whole number that it was, and is none."""
    names = ", ".join(f'"{column.name}"' for column in EVENT_TABLE.columns)
    own(copy.path, f"create table e2 ({names})", "insert into e2 select * from events",
        "drop table events", "alter table e2 rename to events",
        f'update events set "{column}" = cast("{column}" as real) where position = 70')  # fmt: skip
    assert told(copy.verify())[0] == ("integrity", 70)


# -- the table of heads ----------------------------------------------------------------------


def note(size: int, root: bytes = bytes(32), signer: object = KEY) -> bytes:
    return SignedHead.sign(size, root, signer).data()  # type: ignore[arg-type]


def head_gone(size: int) -> str:
    return f"the head of {size} events in the table"


HEAD_ROWS: dict[str, tuple[tuple[str | tuple[str, tuple[object, ...]], ...], int, str]] = {
    "size changed": (("update heads set size = 61 where size = 60",), 60, "a head of 61 events"),
    "size as blob": (
        ("update heads set size = cast(size as blob) where size = 60",), 0, "a number"),
    "size emptied": (("update heads set size = null where size = 60",), 0, "a number"),
    "note changed": (
        ("update heads set note = cast(substr(note, 1, 40) as blob) where size = 120",), 119,
        "a signed head"),
    "note as text": (
        ("update heads set note = cast(note as text) where size = 60",), 0, "a number"),
    "note emptied": (("update heads set note = null where size = 60",), 0, "a number"),
    "root of another history": (
        (("update heads set note = ? where size = 120", (note(120),)),), 119, "a later head"),
    "signed by a thief": (
        (("update heads set note = ? where size = 120", (note(120, signer=THIEF),)),), 119,
        "a head signed by"),
    "notes swapped": (
        ("update heads set note = (select note from heads h where h.size = 180 - heads.size) "
         "where size in (60, 120)",), 59, "a head of 60 events"),
    "deleted first": (("delete from heads where size = 60",), 59, "the head of 60 events"),
    "deleted": (("delete from heads where size = 180",), 179, "the head of 180 events"),
    "deleted last": (
        (f"delete from heads where size = {EVENTS}",), EVENTS - 1, head_gone(EVENTS)),
    "truncated": (("delete from heads where size > 60",), 119, "the head of 120 events"),
    "deleted all": (("delete from heads",), 59, "the head of 60 events"),
    "inserted": ((("insert into heads values (100, ?)", (note(100),)),), 99, "a later head"),
    "inserted at the end, of more events": (
        (("insert into heads values (400, ?)", (note(400),)),), EVENTS, "at least 400 events"),
    "inserted by a thief": (
        (("insert into heads values (100, ?)", (note(100, signer=THIEF),)),), 99, "signed by"),
    "inserted nonsense": (("insert into heads values (100, x'00')",), 99, "a signed head"),
    "a negative size": (("insert into heads values (-5, x'00')",), 0, "a signed head"),
    "duplicated": (("insert into heads select * from heads where size = 60",), 59, "heads that"),
    "reordered": (
        ("create table h2 as select * from heads order by size desc", "drop table heads",
         "alter table h2 rename to heads"), 59, "heads that grow"),
    "dropped": (("drop table heads",), 59, "the head of 60 events"),
}  # fmt: skip


HEAD_FIRST = {
    # The head that the place outside still has is the one of the row as it was.
    "size changed": 59,
    # Nodes that no head in the table covers any more begin at the first event.
    "truncated": 0,
    "deleted all": 0,
    "dropped": 0,
}
"""Where the first finding is not the one that the change itself gives."""


@pytest.mark.parametrize("name", HEAD_ROWS)
def test_rows_of_heads(copy: Signed, name: str) -> None:
    statements, at, words = HEAD_ROWS[name]
    own(copy.path, *statements)
    verdict = copy.verify()
    assert verdict.exit_code == 1
    assert {finding.invariant for finding in verdict.findings} == {"heads"}
    found = [(f.position, f.expected, f.found) for f in verdict.findings]
    assert any(f.position == at and words in f.expected for f in verdict.findings), found
    assert verdict.findings[0].position == HEAD_FIRST.get(name, at), found


# -- the table of nodes and the table meta ---------------------------------------------------

NODE_ROWS: dict[str, tuple[str, int, str]] = {
    "hash changed": ("update nodes set hash = zeroblob(32)", 0, "node 0 of level 1 to be "),
    "hash as text": (
        "update nodes set hash = cast(hash as text)", 0, "node 0 of level 1 to be "),
    "hash emptied": ("update nodes set hash = null", 0, "node 0 of level 1 to be "),
    "level changed": ("update nodes set level = 2", 0, "node 0 of level 1 to be "),
    "level as blob": (
        "update nodes set level = cast(level as blob)", 0, "node 0 of level 1 to be "),
    "number changed": ("update nodes set number = 7", 0, "node 0 of level 1 to be "),
    "number emptied": ("update nodes set number = null", 0, "node 0 of level 1 to be "),
    "deleted": ("delete from nodes", 0, "node 0 of level 1 to be "),
    "inserted": (
        "insert into nodes values (1, 1, zeroblob(32))", 256, "node 1 of level 1 to be absent"),
    "inserted far away": (
        "insert into nodes values (9, 99999999999, zeroblob(32))", 0,
        "node 99999999999 of level 9 to be absent"),
    "inserted without a hash": (
        "insert into nodes values (1, 1, null)", 256, "node 1 of level 1 to be absent"),
    "inserted far away without a hash": (
        "insert into nodes values (9, 99999999999, null)", 0,
        "node 99999999999 of level 9 to be absent"),
    "inserted without anything": ("insert into nodes values (null, null, null)", 0, "numbers in"),
    "duplicated": (
        "insert into nodes select * from nodes", 0, "node 0 of level 1 to be there once"),
    "dropped": ("drop table nodes", 0, "node 0 of level 1 to be "),
}  # fmt: skip


@pytest.mark.parametrize("name", NODE_ROWS)
def test_rows_of_nodes(copy: Signed, name: str) -> None:
    """The table has one node here; test_tampering_nodes.py attacks one that has more."""
    statement, at, words = NODE_ROWS[name]
    own(copy.path, statement)
    verdict = copy.verify()
    assert verdict.exit_code == 1
    assert told(verdict) == [("heads", at)]
    assert verdict.findings[0].expected.startswith(words)
    # A node is not an event: those are what they were.
    assert verdict.protected_until == EVENTS - 1


META_ROWS = {
    "value changed": "update meta set value = '0'",
    "value as blob": "update meta set value = cast(value as blob)",
    "value emptied": "update meta set value = null",
    "name changed": "update meta set name = 'storage_schemb'",
    "name as blob": "update meta set name = cast(name as blob)",
    "deleted": "delete from meta",
    "inserted": "insert into meta values ('x', 'y')",
    "duplicated": "insert into meta select * from meta",
    "dropped": "drop table meta",
}


@pytest.mark.parametrize("name", META_ROWS)
def test_rows_of_meta(copy: Signed, name: str) -> None:
    own(copy.path, META_ROWS[name])
    verdict = copy.verify()
    assert verdict.exit_code == 1
    assert told(verdict)[0] == ("integrity", 0)
    assert "meta" in verdict.findings[0].expected
    # What it says of itself is wrong; its events still fit every head.
    assert verdict.protected_until == EVENTS - 1


REVISION_ROWS = {
    "changed": "update derived_revision set version_num = '0001x'",
    "as blob": "update derived_revision set version_num = cast(version_num as blob)",
    "emptied": "update derived_revision set version_num = null",
    "inserted": "insert into derived_revision values ('0001')",
    "duplicated": "insert into derived_revision select * from derived_revision",
}


@pytest.mark.parametrize("name", REVISION_ROWS)
def test_rows_of_the_revision(copy: Signed, name: str) -> None:
    own(copy.path, REVISION_ROWS[name])
    verdict = copy.verify()
    assert told(verdict) == [("integrity", 0)]
    assert "one revision of" in verdict.findings[0].expected


def test_a_newer_revision_wants_a_newer_build(copy: Signed) -> None:
    own(copy.path, "update derived_revision set version_num = '9001'")
    with pytest.raises(UnreadableStore, match="newer Shiftbook"):
        copy.verify()


def test_an_older_revision_is_brought_up_by_the_next_writer(copy: Signed) -> None:
    """It says what a build made beside the events, so an older one is no lie about an event."""
    own(copy.path, "update derived_revision set version_num = '0001'")
    assert copy.verify().exit_code == 0
    own(copy.path, "delete from derived_revision")
    assert copy.verify().exit_code == 0


# -- the heads outside -----------------------------------------------------------------------

Notes = list[bytes]


def other_ledger(size: int) -> bytes:
    signer = type(KEY)("example.com/walks", bytes(range(32)))
    return SignedHead.sign(size, bytes(32), signer).data()


OUTSIDE: dict[str, tuple[Callable[[Notes], Notes], int, str]] = {
    "root changed": (lambda n: [n[0], n[1].replace(b"\n", b"\nA", 2), *n[2:]], 0, "a signed head"),
    "signature changed": (
        lambda n: [n[0], n[1][:-10] + b"A" + n[1][-9:], *n[2:]], 119, "a head signed by"),
    "another signed root": (lambda n: [n[0], note(120), *n[2:]], 119, "a later head confirms"),
    "signed by a thief": (
        lambda n: [n[0], note(120, signer=THIEF), *n[2:]], 119, "a head signed by"),
    "of another ledger": (lambda n: [n[0], other_ledger(120), *n[2:]], 119, "a head signed by"),
    "swapped": (lambda n: [n[1], n[0], *n[2:]], 59, "heads that grow"),
    "reversed": (lambda n: n[::-1], 259, "heads that grow"),
    "deleted": (lambda n: [n[0], *n[2:]], 119, "the head of 120 events in"),
    "inserted": (lambda n: [n[0], note(100), *n[1:]], 99, "a later head confirms"),
    "inserted at the end": (lambda n: [*n, note(400)], EVENTS, "at least 400 events"),
    "inserted nonsense": (lambda n: [n[0], b"x\n\n", *n[1:]], 0, "a signed head"),
    "duplicated": (lambda n: [n[0], n[0], *n[1:]], 59, "heads that grow"),
    "two heads of one size": (lambda n: [n[0], note(60), *n[1:]], 59, "heads that grow"),
    "cut in a head": (lambda n: [*n[:-1], n[-1][:30]], 0, "a signed head"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_file_outside(copy: Signed, name: str) -> None:
    change, at, words = OUTSIDE[name]
    notes = [chunk.rstrip(b"\n") + b"\n" for _, chunk in split_heads(copy.heads.read_bytes())]
    assert len(notes) == len(SIZES)
    copy.heads.write_bytes(b"\n".join(change(notes)))
    verdict = copy.verify()
    assert verdict.exit_code == 1
    found = [(f.invariant, f.position, f.expected) for f in verdict.findings]
    assert any(p == at and words in text for _, p, text in found), found


def test_a_file_outside_that_lost_its_end_protects_less_and_says_so(copy: Signed) -> None:
    notes = [chunk for _, chunk in split_heads(copy.heads.read_bytes())]
    copy.heads.write_bytes(b"".join(notes[:3]))
    verdict = copy.verify()
    assert verdict.protected_until == 179
    assert f"{EVENTS - 180} events from position 180 on" in verdict.notes[0]
    row = verdict.coverage.row("outside")
    assert row.status == "partly"
    assert "heads of the ledger after 180 events stand in no place" in row.reason
    assert copy.verify(require_signed=True).exit_code == 2
    copy.heads.write_bytes(b"")
    with pytest.raises(PublicationFailed, match="an empty file"):
        copy.verify()


FOREIGN = {
    "a text": b"# Notes of the team\n\nThe heads are in the other file.\n",
    "a table": b"60 120 180\n",
    "other bytes": bytes(range(256)) * 9,
    "a hash of another length": b"q83vEjRWeJA=\n",
    "a blank line": b" \n\n",
}
"""Files in which nothing can be left of a head: what came of a wrong path, or of a deletion."""

REMAINS = {
    "the name alone": lambda data: data[: data.index(b"\n") + 1],
    "a part of the name": lambda data: data[:9],
    "without signatures": lambda data: data[: data.index("—".encode())],
    "the roots": lambda data: b"\n".join(line for line in data.splitlines() if len(line) == 44),
    "a torn signature": lambda data: data[data.index("—".encode()) :][:5],
    "a text before it": lambda data: b"# Notes\n" * 40 + data[-150:],
    "the last line": lambda data: data.strip().splitlines()[-1],
}
"""What an attacker may leave of a file of heads."""


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_holds_nothing_of_a_head_is_no_place_of_heads(copy: Signed, name: str) -> None:
    """As one that is missing or empty: exit code 2, and never a clean verdict."""
    copy.heads.write_bytes(FOREIGN[name])
    with pytest.raises(PublicationFailed, match=r"check the path|an empty file") as refused:
        copy.verify()
    assert refused.value.exit_code == 2
    with pytest.raises(PublicationFailed):
        copy.verify(key=False)


@pytest.mark.parametrize("name", REMAINS)
def test_what_is_left_of_heads_is_a_finding(copy: Signed, name: str) -> None:
    copy.heads.write_bytes(REMAINS[name](copy.heads.read_bytes()))
    verdict = copy.verify()
    assert verdict.exit_code == 1
    assert "outside" in {finding.invariant for finding in verdict.findings}


def test_a_place_that_began_late_is_no_gap(copy: Signed) -> None:
    notes = [chunk for _, chunk in split_heads(copy.heads.read_bytes())]
    copy.heads.write_bytes(b"".join(notes[2:]))
    assert copy.verify(require_signed=True).exit_code == 0


def test_heads_at_a_url(copy: Signed, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    place = UrlOutlet(url)
    for _, chunk in split_heads(copy.heads.read_bytes()):
        place.publish(SignedHead.parse(chunk.rstrip(b"\n") + b"\n"))
    outside = Outside.read([url, str(copy.heads)], [KEY.verifier.text()])
    verdict = verify(f"sqlite:///{copy.path}", outside=outside, require_signed=True)
    assert verdict.exit_code == 0
    assert verdict.coverage.row("outside").checks == 10


def object_of(folder: Path, number: int) -> Path:
    return sorted(folder.iterdir())[number]


OBJECTS: dict[str, tuple[Callable[[Path], object], int]] = {
    "changed": (lambda f: flip(object_of(f, 1)), 119),
    "truncated": (lambda f: object_of(f, 1).write_bytes(object_of(f, 1).read_bytes()[:50]), 119),
    "emptied": (lambda f: object_of(f, 1).write_bytes(b""), 119),
    "swapped": (lambda f: swap(object_of(f, 1), object_of(f, 2)), 119),
    "deleted": (lambda f: object_of(f, 1).unlink(), 119),
    "renamed": (lambda f: object_of(f, 1).rename(f / f"{130:020d}"), 129),
    "duplicated": (lambda f: shutil.copy(object_of(f, 1), f / f"{130:020d}"), 129),
    "inserted": (lambda f: (f / f"{130:020d}").write_bytes(note(130)), 129),
    "of a thief": (lambda f: object_of(f, 1).write_bytes(note(120, signer=THIEF)), 119),
    "another root": (lambda f: object_of(f, 1).write_bytes(note(120)), 119),
}
"""What is done to a folder of heads at a URL, and where it shows."""


def test_a_url_that_lost_its_last_object_protects_less_and_says_so(
    copy: Signed, tmp_path: Path
) -> None:
    folder = tmp_path / "heads-at-url"
    place = UrlOutlet(f"file://{folder}")
    for _, chunk in split_heads(copy.heads.read_bytes()):
        place.publish(SignedHead.parse(chunk.rstrip(b"\n") + b"\n"))
    for protected in (260, 180):
        object_of(folder, -1).unlink()
        outside = Outside.read([f"file://{folder}"], [KEY.verifier.text()])
        verdict = verify(f"sqlite:///{copy.path}", outside=outside, require_signed=True)
        assert (verdict.exit_code, verdict.findings) == (2, ())
        assert verdict.protected_until == protected - 1
        assert f"{EVENTS - protected} events from position {protected} on" in verdict.notes[0]
        row = verdict.coverage.row("outside")
        assert row.status == "partly"
        assert f"heads of the ledger after {protected} events stand in no place" in row.reason


def test_a_url_whose_last_object_was_cut_short(copy: Signed, tmp_path: Path) -> None:
    folder = tmp_path / "heads-at-url"
    place = UrlOutlet(f"file://{folder}")
    for _, chunk in split_heads(copy.heads.read_bytes()):
        place.publish(SignedHead.parse(chunk.rstrip(b"\n") + b"\n"))
    last = object_of(folder, -1)
    last.write_bytes(last.read_bytes()[:-20])
    outside = Outside.read([f"file://{folder}"], [KEY.verifier.text()])
    verdict = verify(f"sqlite:///{copy.path}", outside=outside)
    assert told(verdict) == [("outside", EVENTS - 1)]
    assert verdict.protected_until == 259


@pytest.mark.parametrize("name", OBJECTS)
def test_heads_at_a_url_changed(copy: Signed, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "heads-at-url"
    place = UrlOutlet(f"file://{folder}")
    for _, chunk in split_heads(copy.heads.read_bytes()):
        place.publish(SignedHead.parse(chunk.rstrip(b"\n") + b"\n"))
    change, at = OBJECTS[name]
    change(folder)
    outside = Outside.read([f"file://{folder}"], [KEY.verifier.text()])
    verdict = verify(f"sqlite:///{copy.path}", outside=outside)
    assert verdict.exit_code == 1
    assert ("outside", at) in told(verdict), [f.plain() for f in verdict.findings]


# -- evidence --------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


EVIDENCE: dict[str, Callable[[list[Path]], object]] = {
    "changed": lambda files: flip(files[0]),
    "swapped": lambda files: swap(files[0], files[1]),
    "deleted": lambda files: files[0].unlink(),
    "renamed": lambda files: files[0].rename(files[0].with_name("0" * 64 + ".parquet")),
    "truncated": lambda files: files[0].write_bytes(files[0].read_bytes()[:-20]),
    "emptied": lambda files: files[0].write_bytes(b""),
    "a copy of another": lambda files: shutil.copy(files[1], files[0]),
    "appended to": lambda files: files[0].write_bytes(files[0].read_bytes() + b"x"),
}


@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence(copy: Signed, name: str) -> None:
    files = sorted(copy.evidence.iterdir())
    for file in files:
        file.chmod(0o644)
    EVIDENCE[name](files)
    verdict = copy.verify()
    assert verdict.exit_code == 1
    assert {finding.invariant for finding in verdict.findings} == {"evidence"}
    with closing(sqlite3.connect(copy.path)) as connection:
        (at,) = connection.execute(
            "select min(position) from events where cast(data as text) like ?",
            (f"%{files[0].stem}%",),
        ).fetchone()
    assert at in [position for _, position in told(verdict)]


def test_a_file_that_no_event_binds_is_no_evidence(copy: Signed) -> None:
    files = sorted(copy.evidence.iterdir())
    shutil.copy(files[0], files[0].with_name("1" * 64 + ".parquet"))
    assert copy.verify().exit_code == 0


# -- whole histories -------------------------------------------------------------------------


def rewritten(path: Path, at: int) -> Iterator[tuple[int, bytes]]:
    """(position, bytes) of a history in which one event says something else, well formed."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("select position, data from events order by position").fetchall()
    for position, data in rows:
        yield (
            position,
            data.replace(b'"actor":"tester"', b'"actor":"nobody"') if (position == at) else data,
        )


def rewrite(copy: Signed, at: int, signer: object | None) -> None:
    """Change an event with every hash above it, as who owns the database and knows the format.

    With a signer the heads are signed anew; without one they are taken away.
    """
    nodes: list[tuple[int, int, bytes]] = []
    tree = CompactRange(on_node=lambda *node: nodes.append(node))
    statements: list[tuple[str, tuple[object, ...]]] = []
    heads = []
    for position, data in rewritten(copy.path, at):
        tree.append(leaf_hash(data))
        if position == at:
            statements.append(("update events set data = ?, leaf = ? where position = ?",
                               (data, leaf_hash(data), at)))  # fmt: skip
        if tree.size in SIZES and signer is not None:
            heads.append((tree.size, note(tree.size, tree.root(), signer)))
    own(copy.path, "delete from nodes", "delete from heads", *statements,
        *(("insert into nodes values (?, ?, ?)", node) for node in nodes),
        *(("insert into heads values (?, ?)", head) for head in heads))  # fmt: skip


@pytest.mark.parametrize(("at", "proved"), [(0, 0), (70, 60), (200, 180), (301, 260)])
@pytest.mark.parametrize("by", ["nobody", "a thief", "the signer"])
def test_a_rewritten_history_does_not_fit_the_heads_outside(
    copy: Signed, at: int, proved: int, by: str
) -> None:
    rewrite(copy, at, {"nobody": None, "a thief": THIEF, "the signer": KEY}[by])
    verdict = copy.verify()
    assert verdict.exit_code == 1
    assert verdict.judged_until == proved - 1
    assert verdict.integrity_broken
    finding = next(f for f in verdict.findings if f.invariant == "outside")
    # The last head that fits ends at `proved`, so the first bad position is that one or later.
    assert finding.position == proved <= at <= finding.positions[-1]
    assert "was not signed" in finding.found
    # Nobody outside knows: then it is clean in itself, and not one event is called protected.
    blind = copy.verify(heads=False, key=by != "a thief")
    assert blind.plain()["unprotected"] == EVENTS
    if by != "nobody":
        assert not [f for f in blind.findings if f.invariant in ("integrity", "heads")]


def test_a_rewritten_history_under_its_old_heads_does_not_fit_them(copy: Signed) -> None:
    """Here the heads inside are enough, as long as the attacker leaves them."""
    data = dict(rewritten(copy.path, 70))[70]
    own(copy.path, ("update events set data = ?, leaf = ? where position = 70",
                    (data, leaf_hash(data))))  # fmt: skip
    verdict = copy.verify(heads=False)
    assert told(verdict)[0] == ("heads", 60)
    assert verdict.judged_until == 59


def test_a_rollback_to_an_old_copy(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    entries = long_run().entries
    old = write_signed(folder, (60, 120), Run(entries[:120])).copy(tmp_path / "old")
    for start, stop in ((120, 180), (180, EVENTS)):
        Run(entries[start:stop]).write(folder / "ledger.db")
        with Ledger.open(f"sqlite:///{folder}/ledger.db") as ledger:
            HeadSigner(ledger, KEY, [FileOutlet(folder / "heads")]).sign()
    shutil.copy(folder / "heads", old.heads)
    verdict = old.verify()
    assert verdict.exit_code == 1
    (finding,) = [f for f in verdict.findings if f.invariant == "outside"]
    assert finding.position == 120
    assert "at least 180 events" in finding.expected
    assert "rolled back to an older copy" in finding.cause
    # Without the heads outside an old copy is a whole ledger.
    assert not old.verify(heads=False).integrity_broken


def test_a_fork_that_the_signer_was_made_to_sign(copy: Signed, tmp_path: Path) -> None:
    """The signer's memory is lost with the places, and it is given an old copy that grew anew."""
    entries = long_run().entries
    for entry in entries[120:190]:
        entry.change(start_ns=2)
    fork = write_signed(tmp_path, (60, 120, 190), Run(entries[:190]))
    shutil.copy(copy.heads, fork.heads)
    shutil.copytree(copy.evidence, fork.evidence, dirs_exist_ok=True)
    verdict = fork.verify()
    (finding,) = [f for f in verdict.findings if f.invariant == "outside"]
    assert finding.position == 120
    assert "signed two histories" in finding.cause
    assert verdict.judged_until == 119
    assert verdict.protected_until == 119


def test_two_heads_of_one_size(copy: Signed) -> None:
    own(copy.path, ("update heads set note = ? where size = 180", (note(180),)))
    verdict = copy.verify()
    assert told(verdict) == [("heads", 179)]
    assert "signed two histories" in verdict.findings[0].cause
    assert f"root {bytes(8).hex()}" in verdict.findings[0].found

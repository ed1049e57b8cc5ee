"""Goal: no stored node of the tree can be changed, moved, cut or put in, whatever its level.

Method: a signed run that fills three tiles, on both stores, and one of a whole tile of tiles, so
that there is a node of the second level. Whoever owns the database rebuilds the table without
triggers and keys and changes its rows; an auditor with the key and the heads outside must be told
the first event under the first node that is wrong, and that every event still stands as signed.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.publication import FileOutlet
from shiftbook.verify.heads import Outside
from shiftbook.verify.verdict import verify
from tests.ledger.stores import STORES
from tests.verify.signed_run import KEY, Signed, long_run, write_signed
from tests.verify.test_tampering_stores import Attacked

TILE = 256
THREE_TILES = 3 * TILE + 32
SECOND_LEVEL = TILE * TILE + 40


def longer(signed: Signed, events: int) -> None:
    """Append windows of the run until there are so many events, and sign them."""
    window = long_run().entries[150].event
    with Ledger.open(f"sqlite:///{signed.path}", writer="writer-1") as ledger:
        while (size := ledger.head().size) < events:
            ledger.append("demo", [window] * min(4_000, events - size))
        HeadSigner(ledger, KEY, [FileOutlet(signed.heads)]).sign()
    with closing(sqlite3.connect(signed.path)) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
        connection.execute("pragma journal_mode=delete")


@pytest.fixture(scope="module")
def three_tiles(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    signed = write_signed(tmp_path_factory.mktemp("three"))
    longer(signed, THREE_TILES)
    return signed


@pytest.fixture(params=STORES)
def attacked(
    request: pytest.FixtureRequest,
    three_tiles: Signed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Attacked:
    monkeypatch.setenv("PGUSER", "postgres")
    return Attacked(request.param, three_tiles, tmp_path / "copy")


def of_hash(number: str, where: str) -> str:
    """A statement that gives nodes the hash of another one."""
    other = f"select hash from nodes n where n.level = nodes.level and n.number = {number}"
    return f"update nodes set hash = ({other}) where {where}"


NODES: dict[str, tuple[tuple[str, ...], int]] = {
    "hashes of the first two swapped": ((of_hash("1 - nodes.number", "number < 2"),), 0),
    "hashes of the last two swapped": ((of_hash("3 - nodes.number", "number > 0"),), TILE),
    "places of the first and the last swapped": (("update nodes set number = 2 - number",), 0),
    "moved up by one": (("update nodes set number = number + 1",), 0),
    "the middle one a copy of the first": ((of_hash("0", "number = 1"),), TILE),
    "the last one a copy of the first": ((of_hash("0", "number = 2"),), 2 * TILE),
    "the first deleted": (("delete from nodes where number = 0",), 0),
    "the middle one deleted": (("delete from nodes where number = 1",), TILE),
    "deleted and the gap closed": (
        ("delete from nodes where number = 1", "update nodes set number = 1 where number = 2"),
        TILE),
    "cut to two": (("delete from nodes where number >= 2",), 2 * TILE),
    "cut to one": (("delete from nodes where number >= 1",), TILE),
    "cut to none": (("delete from nodes",), 0),
    "the middle one on another level": (("update nodes set level = 2 where number = 1",), TILE),
    "the last one on another level": (("update nodes set level = 0 where number = 2",), 2 * TILE),
    "the middle one twice": (("insert into nodes select * from nodes where number = 1",), TILE),
    "the middle one twice, once without a hash": (
        ("insert into nodes select level, number, null from nodes where number = 1",), TILE),
    "one more at the end": (("insert into nodes select 1, 3, hash from nodes where number = 2",),
                            3 * TILE),
    "one more below the first": (("insert into nodes select 1, -1, hash from nodes",), 0),
    "one of the second level": (("insert into nodes select 2, 0, hash from nodes",), 0),
}  # fmt: skip
"""What is done to the table, and the first event under the first node that is wrong."""


@pytest.mark.parametrize("name", NODES)
def test_nodes_of_the_first_level(attacked: Attacked, name: str) -> None:
    statements, at = NODES[name]
    attacked.do(*statements)
    verdict = attacked.verdict()
    assert verdict.exit_code == 1
    (finding,) = verdict.findings
    assert (finding.invariant, finding.position) == ("heads", at), finding
    assert finding.expected.startswith(f"node {at // TILE} of level ") or at == 0
    assert verdict.protected_until == THREE_TILES - 1


def test_the_order_of_the_rows_says_nothing(attacked: Attacked) -> None:
    """A table has none of its own: each row names its place."""
    attacked.do(
        "create table n2 as select * from nodes order by number desc",
        "drop table nodes",
        "alter table n2 rename to nodes",
    )
    verdict = attacked.verdict()
    assert (verdict.exit_code, verdict.findings) == (0, ())


@pytest.fixture(scope="module")
def second_level(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    signed = write_signed(tmp_path_factory.mktemp("second"))
    longer(signed, SECOND_LEVEL)
    return signed


SECOND: dict[str, tuple[tuple[str, ...], int, str]] = {
    "hash changed": (
        ("update nodes set hash = zeroblob(32) where level = 2",), 0, "node 0 of level 2"),
    "hash emptied": (("update nodes set hash = null where level = 2",), 0, "node 0 of level 2"),
    "hash of one below": (
        ("update nodes set hash = (select hash from nodes where level = 1 and number = 0) "
         "where level = 2",), 0, "node 0 of level 2"),
    "deleted": (("delete from nodes where level = 2",), 0, "node 0 of level 2"),
    "moved": (("update nodes set number = 1 where level = 2",), 0, "node 0 of level 2"),
    "on a third level": (("update nodes set level = 3 where level = 2",), 0, "node 0 of level 2"),
    "twice": (("insert into nodes select * from nodes where level = 2",), 0,
              "node 0 of level 2 to be there once"),
    "a second one": (("insert into nodes select 2, 1, hash from nodes where level = 2",), 65_536,
                     "node 1 of level 2 to be absent"),
    "its last one below swapped with the one before": (
        ("create table n2 as select level, case when level = 1 and number in (254, 255) then "
         "509 - number else number end as number, hash from nodes", "drop table nodes",
         "alter table n2 rename to nodes"), 254 * TILE, "node 254 of level 1"),
    "its last one below deleted": (
        ("delete from nodes where level = 1 and number = 255",), 255 * TILE,
        "node 255 of level 1"),
    "levels swapped": (("update nodes set level = 3 - level",), 0, "node 0 of level 1"),
}  # fmt: skip


@pytest.mark.slow
def test_nodes_of_the_second_level(second_level: Signed, tmp_path: Path) -> None:
    """One copy for all, since each has 65,576 events; the table is put back in between.

    The table of events keeps its key: without one each page of it is looked for in all of it.
    """
    copy = second_level.copy(tmp_path / "copy")
    with closing(sqlite3.connect(copy.path, isolation_level=None)) as connection:
        connection.execute("create table kept as select * from nodes")
    outside = Outside.read([str(copy.heads)], [KEY.verifier.text()])
    for name, (statements, at, words) in {"nothing": ((), 0, ""), **SECOND}.items():
        with closing(sqlite3.connect(copy.path, isolation_level=None)) as connection:
            connection.execute("drop table nodes")  # and its triggers
            connection.execute("create table nodes as select * from kept")
            for statement in statements:
                assert connection.execute(statement).rowcount != 0, statement
        verdict = verify(
            f"sqlite:///{copy.path}", outside=outside, integrity_only=True, require_signed=True
        )
        found = [(f.invariant, f.position) for f in verdict.findings]
        assert found == ([("heads", at)] if statements else []), (name, verdict.findings)
        assert verdict.findings[:1] == () or verdict.findings[0].expected.startswith(words), name
        assert verdict.protected_until == SECOND_LEVEL - 1

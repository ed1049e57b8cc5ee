"""The fast look accepts nothing that the pass that goes row by row refuses, and tells the same.

Method: honest ledgers are changed through SQL by somebody who owns the file (the triggers dropped):
every column of a row, bytes with and without a new hash, rows cut out, swapped and repeated. Each
is verified three times: by blocks, by pages and row by row, and the reports must be equal. Roots
are compared with a tree built leaf by leaf, over blocks of one event up to all.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.events.safety import SafeModeLeft
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify import scan as scan_module
from shiftbook.verify import scan_block
from shiftbook.verify.evidence import EvidenceFolder
from shiftbook.verify.heads import HeadCheck, Outside
from shiftbook.verify.integrity import Integrity, check_stored
from shiftbook.verify.scan import sound_blocks
from shiftbook.verify.scan_block import Block, Stretches
from shiftbook.verify.stored import RawEvents
from tests.verify.honest_run import Run

Attack = Callable[[sqlite3.Connection], None]


@pytest.fixture
def honest(tmp_path: Path, run: Run) -> Path:
    path = tmp_path / "book.db"
    run.write(path)
    with Ledger.open(f"sqlite:///{path}", writer="writer-2") as ledger:
        event = SafeModeLeft(by="operator", reason="true")
        ledger.append("other", [event, event], key="k1", cause=3)
        ledger.append("other", event, key="k2", operation="op")
    return path


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few events, so that one ledger has many of them."""
    monkeypatch.setattr(scan_module, "BLOCK_EVENTS", 16)


def attack(path: Path, *how: Attack) -> None:
    """Change a ledger as its owner can."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        for act in how:
            act(connection)


def size(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT max(position) + 1 FROM events").fetchone()[0])


Report = tuple[Any, ...]


def told(path: Path, how: str) -> Report:
    """What the first pass says, by blocks, by pages or row by row."""
    with RawEvents(f"sqlite:///{path}") as raw, pytest.MonkeyPatch.context() as patch:
        if how != "blocks":
            patch.setattr(raw, "blocks", lambda *_, **__: (b for b in ()))
        if how == "rows":
            patch.setattr("shiftbook.verify.integrity.check_page", lambda *_: False)
        heads = HeadCheck(Outside())
        heads.load(raw)
        integrity = Integrity(EvidenceFolder(raw), heads)
        check_stored(raw, integrity, None)
        report = integrity.finish()
        signed = heads.finish(raw, None, integrity.tree_damage)
        return (
            report.findings.sorted(),
            [row.plain() for row in (*report.rows, *signed.rows)],
            (report.events, report.sound_until, report.head, integrity.tree_damage),
            signed.findings,
            (signed.sound, signed.protected, signed.signed, signed.stored),
        )


def sound(path: Path) -> bool:
    """Whether the first pass finds nothing; however it is done, it says the same."""
    by_rows = told(path, "rows")
    assert told(path, "pages") == by_rows
    assert told(path, "blocks") == by_rows
    return not any(finding.invariant == "integrity" for finding in by_rows[0])


def blocks(path: Path, processes: int = 1) -> list[Block]:
    return list(sound_blocks(path, size(path), processes=processes))


def test_an_honest_ledger_is_sound(honest: Path) -> None:
    assert sound(honest)
    seen = blocks(honest)
    assert seen[-1].last == size(honest) - 1
    with Ledger.open(f"sqlite:///{honest}", read_only=True) as ledger:
        events = list(ledger.read())
    assert seen[-1].head == events[-1].leaf
    named = [segment[0] for block in seen for segment in block.segments]
    assert named == [e.position for e in events if "segment" in e.body]


def test_stretches_are_made_as_they_are_asked_for() -> None:
    """A forged last position names more of them than any memory holds."""
    length = 1 << 16
    stretches = Stretches(range(0, 2**63, length), length, 2**63, [5, 70_000, 2**63])
    assert len(stretches) == 1 << 47
    assert stretches[0] == (0, 65_535, [5])
    assert stretches[1::2][0] == (65_536, 131_071, [70_000])
    assert stretches[-1] == (2**63 - length, 2**63 - 1, [2**63])
    assert pickle.loads(pickle.dumps(stretches[1::2])) == stretches[1::2]
    assert list(Stretches(range(0, 20, 8), 8, 20, [])) == [(0, 7, []), (8, 15, []), (16, 19, [])]


def test_in_processes_of_its_own(honest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = blocks(honest)
    monkeypatch.setattr(scan_module, "ALONE_EVENTS", 0)
    assert blocks(honest, 2) == alone
    assert sound(honest)
    attack(honest, lambda c: c.execute("DELETE FROM events WHERE position = 40"))
    assert blocks(honest, 2)[-1].last == 31
    assert not sound(honest)


class Torn(io.RawIOBase):
    """A pipe to whose writer something always comes in between."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.taken += bytes(data)[:1000]
        return min(1000, len(data))


def test_what_a_stopped_process_writes_in_parts_comes_whole() -> None:
    """Under PYTHONUNBUFFERED stdout takes what the system takes, and pickle does not look."""
    orders = io.BytesIO(pickle.dumps(Answers([list(range(n)) for n in (5, 50_000, 7)])))
    pipe = Torn()
    scan_block.work(orders, pipe)
    found = io.BytesIO(pipe.taken)
    assert [len(pickle.load(found)) for _ in range(3)] == [5, 50_000, 7]
    assert not found.read()


@dataclass
class Answers:
    """Orders whose answers are given."""

    listed: list[list[int]]

    def blocks(self) -> Iterator[list[int]]:
        yield from self.listed


def test_a_process_that_cannot_work_costs_only_time(
    honest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_module, "ALONE_EVENTS", 0)
    for code in ("raise SystemExit(1)", "print('no block')", "import nothing_of_the_sort"):
        monkeypatch.setattr(scan_module, "_WORK", code)
        assert blocks(honest, 2) == []
        assert sound(honest)


COLUMNS: dict[str, list[Any]] = {
    "position": [1_000_000],
    "job": ["x", b"demo"],
    "version": [7_000, -1],
    "type": ["x"],
    "schema": [3, 1.5],
    "operation": ["x", None],
    "key": ["x", None],
    "writer": ["x", b"\xff\xfe"],
    "sequence": [7_000],
    "recorded_ns": [0, 2**62],
    "data": [b"", b"{}", b"[]", b"null", b"\xff", "text"],
    "leaf": [b"", b"\0" * 32],
}


@pytest.mark.parametrize("column", COLUMNS)
def test_each_column_changed(column: str, honest: Path, tmp_path: Path) -> None:
    last = size(honest) - 1
    for at in (0, 15, 16, last):
        for value in COLUMNS[column]:
            copy = tmp_path / "copy.db"
            shutil.copyfile(honest, copy)
            with closing(sqlite3.connect(copy)) as connection:
                before = connection.execute(
                    f'SELECT "{column}" FROM events WHERE position = ?', (at,)
                ).fetchone()[0]
            if value == before:
                continue
            attack(
                copy,
                lambda c, v=value, p=at: c.execute(  # type: ignore[misc]
                    f'UPDATE OR REPLACE events SET "{column}" = ? WHERE position = ?', (v, p)
                ),
            )
            assert not sound(copy), (column, at, value)


def rewrite(change: Callable[[dict[str, Any]], object], at: int) -> Attack:
    """Change an event's bytes, and its hash to match."""

    def act(connection: sqlite3.Connection) -> None:
        data = connection.execute("SELECT data FROM events WHERE position = ?", (at,)).fetchone()[0]
        value = orjson.loads(data)
        change(value)
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        connection.execute(
            "UPDATE events SET data = ?, leaf = ? WHERE position = ?", (data, leaf_hash(data), at)
        )

    return act


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(position=v["position"] + 0.0),
        lambda v: v.update(version=True),
        lambda v: v.update(schema=True),
        lambda v: v.update(schema=1.0),
        lambda v: v.update(occurred_ns="now"),
        lambda v: v.update(occurred_ns=True),
        lambda v: v.update(actor=None),
        lambda v: v.update(body=[]),
        lambda v: v.update(more=1),
        lambda v: v.update(cause=10**6),
        lambda v: v.update(cause=-1),
        lambda v: v.update(cause=True),
        lambda v: v.update(key=5),
        lambda v: v.update(operation="x"),
        lambda v: v.pop("actor"),
        lambda v: v.pop("body"),
        lambda v: v.pop("occurred_ns"),
        lambda v: v.pop("job"),
    ],
)
def test_bytes_changed_with_their_hash(
    change: Callable[[dict[str, Any]], object], honest: Path, tmp_path: Path
) -> None:
    for at in (1, size(honest) - 3, size(honest) - 1):
        copy = tmp_path / "copy.db"
        shutil.copyfile(honest, copy)
        attack(copy, rewrite(change, at))
        assert not sound(copy)


def test_a_body_changed_with_its_hash_is_sound_and_has_another_root(
    honest: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    shutil.copyfile(honest, copy)
    attack(copy, rewrite(lambda v: v["body"].update(reason="other"), size(honest) - 1))
    assert sound(copy)  # only a signed head tells
    assert blocks(copy)[-1].edge != blocks(honest)[-1].edge


@pytest.mark.parametrize("at", [0, 15, 16, 17, 40])
def test_an_event_cut_out_and_the_rest_moved_up(at: int, honest: Path) -> None:
    def cut(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM events WHERE position = ?", (at,))
        for (position,) in connection.execute(
            "SELECT position FROM events WHERE position > ? ORDER BY position", (at,)
        ).fetchall():
            rewrite(lambda v, p=position: v.update(position=p - 1), position)(connection)  # type: ignore[misc]
            connection.execute(
                "UPDATE events SET position = position - 1 WHERE position = ?", (position,)
            )

    attack(honest, cut)
    assert not sound(honest)


def test_a_key_whose_events_are_apart(honest: Path) -> None:
    last = size(honest) - 1

    def split(connection: sqlite3.Connection) -> None:
        rewrite(lambda v: v.update(key="far"), 2)(connection)
        rewrite(lambda v: v.update(key="far"), last)(connection)
        connection.execute("UPDATE events SET key = 'far' WHERE position IN (2, ?)", (last,))
        connection.execute("UPDATE events SET job = job")

    attack(honest, split)
    sound(honest)  # of two jobs: no batch is split

    def same_job(connection: sqlite3.Connection) -> None:
        at = last - 2
        rewrite(lambda v: v.update(key="near"), at)(connection)
        rewrite(lambda v: v.update(key="near"), last)(connection)
        connection.execute("UPDATE events SET key = 'near' WHERE position IN (?, ?)", (at, last))

    attack(honest, same_job)
    assert not sound(honest)


def leaf_by_leaf(leaves: list[bytes]) -> bytes:
    """MTH of RFC 9162, 2.1.1, as it is written there."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    split = 1 << ((len(leaves) - 1).bit_length() - 1)
    left, right = leaf_by_leaf(leaves[:split]), leaf_by_leaf(leaves[split:])
    return hashlib.sha256(b"\x01" + left + right).digest()


@given(st.integers(1, 700), st.sampled_from([1, 2, 8, 64, 256, 512]), st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_blocks_give_roots_and_nodes_of_the_tree(
    count: int, block_events: int, data: st.DataObject
) -> None:
    leaves = [hashlib.sha256(b"%d" % index).digest() for index in range(count)]
    sizes = data.draw(st.sets(st.integers(1, count), max_size=8))
    by_leaves, by_blocks = HeadCheck(Outside()), HeadCheck(Outside())
    for heads in (by_leaves, by_blocks):
        heads._wanted = set(sizes)
    for leaf in leaves:
        by_leaves.feed(leaf)
    for first in range(0, count, block_events):
        part = leaves[first : first + block_events]
        block = Block(first, first + len(part) - 1)
        scan_block._grow(block, part, sizes)
        by_blocks.take(block)
    assert by_blocks._tree.root() == by_leaves._tree.root() == leaf_by_leaf(leaves)
    assert by_blocks._roots == by_leaves._roots
    assert by_blocks._roots == {size: leaf_by_leaf(leaves[:size]) for size in sizes}
    assert by_blocks._nodes == by_leaves._nodes


@given(at=st.integers(0, 10**9), bit=st.integers(0, 7))
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_flipped_bit_is_never_a_traceback(
    at: int, bit: int, honest: Path, tmp_path: Path
) -> None:
    whole = bytearray(honest.read_bytes())
    copy = tmp_path / "copy.db"
    events = size(honest)
    whole[at % len(whole)] ^= 1 << bit
    copy.write_bytes(whole)
    for beside in ("copy.db-wal", "copy.db-shm"):
        (tmp_path / beside).unlink(missing_ok=True)
    found = list(sound_blocks(copy, events))
    assert found == blocks(honest)[: len(found)]

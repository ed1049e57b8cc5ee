"""Goal: an outage of the ledger stops nobody: records wait on disk, in order, and stand once.

Method: a real ledger behind an append that is switched off and on; the process that spools is
killed with SIGKILL; the drain is cut at every record; the spool's own disk is full, torn or rotten.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import (
    AppendInDoubt,
    IdempotencyConflict,
    InvalidEvent,
    LedgerUnreachable,
    SpoolError,
)
from shiftbook.ledger.events import life
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.receipt import Receipt
from shiftbook.ledger.spool import SpoolingWriter, drain_leftovers
from shiftbook.ledger.spool_file import Record, SpoolFile

DEADLINE_S = 30.0


def fork(reason: object) -> Event:
    return ExperimentForked(parent="p", reason=str(reason))


def waiting_draft(number: int) -> Draft:
    return Draft(fork(f"é{number}"), operation="op", occurred_ns=number, writer="w")


class Door:
    """``Ledger.append`` that can be out of reach, or fail after the append took effect."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.open = True
        self.left: int | None = None
        """Appends until the door closes by itself."""
        self.doubt = False

    def __call__(self, job: str, events: Any, *, key: str | None = None) -> Receipt:
        if self.left is not None:
            if self.left == 0:
                self.open = False
            self.left -= 1
        if not self.open:
            raise LedgerUnreachable("the ledger is out of reach; nothing was written")
        receipt = self.ledger.append(job, events, key=key)
        if self.doubt:
            raise AppendInDoubt("the commit failed; retry with the same key")
        return receipt


@pytest.fixture
def door(store_url: str) -> Iterator[Door]:
    with Ledger.open(store_url) as ledger:
        yield Door(ledger)


def story(door: Door) -> list[tuple[str, str]]:
    """Type and reason of every event."""
    return [(e.type, e.body.get("reason", "")) for e in door.ledger.read()]


def reasons(door: Door) -> list[str]:
    return [e.body["reason"] for e in door.ledger.read(types=["ExperimentForked"])]


def test_with_the_ledger_there_nothing_is_spooled(door: Door, tmp_path: Path) -> None:
    writer = SpoolingWriter(door, tmp_path / "spool")
    receipt = writer.record("job", [fork(1), fork(2)], key="k")
    assert receipt is not None
    assert list(receipt.positions) == [0, 1]
    again = writer.record("job", [fork(1), fork(2)], key="k")
    assert again is not None
    assert again.repeated
    assert not (tmp_path / "spool").exists()
    assert writer.drain().appended == 0
    writer.close()


def test_an_outage_keeps_order_times_and_writer(door: Door, tmp_path: Path) -> None:
    clock = itertools.count(1_000_000_000, 1_000_000_000).__next__
    writer = SpoolingWriter(door, tmp_path / "spool", writer="w", now_ns=clock)
    writer.record("job", [fork("before")])
    door.open = False
    for number in range(3):
        assert writer.record("job", [fork(f"{number}a"), fork(f"{number}b")]) is None
    assert writer.waiting == 3
    failed = writer.drain()
    assert (failed.appended, failed.cause is None) == (0, False)
    door.open = True
    assert writer.record("job", [fork("behind the others")]) is None, "order before speed"
    drained = writer.drain()
    assert (drained.appended, drained.waiting, drained.cause) == (4, 0, None)
    writer.record("job", [fork("after")])

    assert story(door) == [
        ("ExperimentForked", "before"),
        ("LedgerUnreachable", ""),
        ("ExperimentForked", "0a"),
        ("ExperimentForked", "0b"),
        ("ExperimentForked", "1a"),
        ("ExperimentForked", "1b"),
        ("ExperimentForked", "2a"),
        ("ExperimentForked", "2b"),
        ("ExperimentForked", "behind the others"),
        ("LedgerRestored", ""),
        ("ExperimentForked", "after"),
    ]
    stored = list(door.ledger.read())
    assert {event.writer for event in stored} == {"w"}
    assert [event.sequence for event in stored] == list(range(11))
    assert [event.occurred_ns // 10**9 for event in stored if event.type == "ExperimentForked"] == [
        1, 2, 2, 3, 3, 4, 4, 6, 9
    ]  # fmt: skip
    unreachable, restored = stored[1].parsed(), stored[9].parsed()
    assert isinstance(unreachable, life.LedgerUnreachable)
    assert isinstance(restored, life.LedgerRestored)
    assert (unreachable.since_ns, unreachable.spooled) == (2 * 10**9, 6)
    assert "out of reach" in unreachable.cause
    assert (restored.since_ns, restored.spooled, restored.outage_s) == (2 * 10**9, 7, 5.0)
    assert list((tmp_path / "spool").iterdir()) == []
    writer.close()


def test_an_append_in_doubt_is_spooled_and_stands_once(door: Door, tmp_path: Path) -> None:
    writer = SpoolingWriter(door, tmp_path / "spool")
    door.doubt = True
    assert writer.record("job", [fork("in doubt")]) is None
    door.doubt = False
    assert writer.record("job", [fork("next")]) is None
    assert writer.drain().appended == 2
    assert reasons(door) == ["in doubt", "next"]
    writer.close()


def test_a_drain_that_is_cut_anywhere_goes_on(door: Door, tmp_path: Path) -> None:
    for cut in range(6):
        writer = SpoolingWriter(door, tmp_path / "spool", writer=f"w{cut}")
        door.open = False
        for number in range(4):
            writer.record(f"job-{cut}", [fork(number)])
        door.open, door.left = True, cut
        first = writer.drain()
        assert first.waiting
        door.open, door.left = True, None
        second = writer.drain()
        assert first.appended + second.appended == 4
        writer.close()
        types = [e.type for e in door.ledger.read(job=f"job-{cut}")]
        assert types == ["LedgerUnreachable", *["ExperimentForked"] * 4, "LedgerRestored"]


KILLED = """
import os, signal, sys
from pathlib import Path
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.spool import SpoolingWriter

def away(job, events, *, key=None):
    raise LedgerUnreachable("away")

writer = SpoolingWriter(away, Path(sys.argv[1]), writer=sys.argv[2])
for number in range(int(sys.argv[3])):
    writer.record("job", [ExperimentForked(parent="p", reason=f"{sys.argv[2]}:{number}")])
print("spooled", flush=True)
if sys.argv[4] == "drain":
    count = 0
    with Ledger.open(sys.argv[5]) as ledger:
        def append(job, events, *, key=None):
            global count
            if count == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return ledger.append(job, events, key=key)
        writer._append = append
        writer.drain()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["spooled", "drain"])
def test_another_process_drains_what_a_killed_one_left(
    door: Door, tmp_path: Path, moment: str
) -> None:
    folder = tmp_path / "spool"
    for name in ("a", "b"):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), name, "5", moment, door.ledger.url],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["a.spool", "b.spool"]
    outcome = drain_leftovers(door, folder)
    assert {name: found.appended for name, found in outcome.items()} == {"a": 5, "b": 5}
    assert drain_leftovers(door, folder) == {}
    for name in ("a", "b"):
        stored = [e for e in door.ledger.read() if e.writer == name]
        assert [e.sequence for e in stored] == list(range(7))
        assert [e.type for e in stored] == [
            "LedgerUnreachable", *["ExperimentForked"] * 5, "LedgerRestored"
        ]  # fmt: skip
        assert [e.body["reason"] for e in stored[1:-1]] == [f"{name}:{n}" for n in range(5)]


def test_the_spool_of_a_living_writer_is_left_alone(door: Door, tmp_path: Path) -> None:
    writer = SpoolingWriter(door, tmp_path / "spool", writer="w")
    door.open = False
    writer.record("job", [fork(1)])
    door.open = True
    assert drain_leftovers(door, tmp_path / "spool") == {}
    with pytest.raises(SpoolError, match="in use"):
        SpoolingWriter(door, tmp_path / "spool", writer="w")
    assert writer.drain().appended == 1
    writer.close()
    assert drain_leftovers(door, tmp_path / "none") == {}


def test_a_writer_of_the_same_name_goes_on_after_a_restart(door: Door, tmp_path: Path) -> None:
    writer = SpoolingWriter(door, tmp_path / "spool", writer="w")
    door.open = False
    writer.record("job", [fork(1)])
    writer.close()
    door.open = True
    writer = SpoolingWriter(door, tmp_path / "spool", writer="w")
    assert writer.waiting == 1
    assert writer.record("job", [fork(2)]) is None
    assert writer.drain().appended == 2
    assert reasons(door) == ["1", "2"]
    writer.close()


def test_a_torn_tail_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    records = [Record("job", f"k{n}", (waiting_draft(n),)) for n in range(2)]
    first, second = (record.line() for record in records)
    path = tmp_path / "w.spool"
    for cut in range(len(second)):
        path.write_bytes(first + second[:cut])
        file = SpoolFile.create(path)
        found, faults = file.read()
        whole = cut == len(second) - 1  # all but the end of the line: nothing of it is lost
        assert (found, faults) == (records[: 1 + whole], ()), cut
        file.add([records[1]])
        assert file.read() == ([*found, records[1]], ())
        file.close()


def test_a_rotten_line_is_reported_and_kept(door: Door, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    writer = SpoolingWriter(door, folder, writer="w")
    door.open = False
    for number in range(3):
        writer.record("job", [fork(number)])
    writer.close()
    path = folder / "w.spool"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"reason":"1"', b'"reason":"9"')
    path.write_bytes(b"".join(lines))
    door.open = True
    outcome = drain_leftovers(door, folder)["w"]
    assert outcome.appended == 2
    assert len(outcome.rejected) == 1
    assert "line 2" in outcome.rejected[0]
    assert "w.spool.damaged" in outcome.rejected[0]
    assert (folder / "w.spool.damaged").read_bytes() == b"".join(lines)
    assert reasons(door) == ["0", "2"]
    assert not path.exists()


def test_a_record_that_the_ledger_refuses_is_set_aside(door: Door, tmp_path: Path) -> None:
    door.ledger.append("job", fork("other content"), key="k")
    writer = SpoolingWriter(door, tmp_path / "spool", writer="w")
    with pytest.raises(IdempotencyConflict):
        writer.record("job", [fork(0)], key="k")
    door.open = False
    writer.record("job", [fork(1)])
    writer.record("job", [fork(2)], key="k")
    writer.record("job", [fork(3)])
    door.open = True
    drained = writer.drain()
    assert (drained.appended, len(drained.rejected)) == (2, 1)
    assert "'k'" in drained.rejected[0]
    assert reasons(door) == ["other content", "1", "3"]
    assert b'"reason":"2"' in (tmp_path / "spool" / "w.rejected").read_bytes()
    writer.close()


def test_a_full_spool_is_told_to_the_training(door: Door, tmp_path: Path) -> None:
    writer = SpoolingWriter(door, tmp_path / "spool", writer="w")
    door.open = False
    writer.record("job", [fork("kept")])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(SpoolError, match="make space"):
            writer.record("job", [fork("x" * 1000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert writer.record("job", [fork("kept too")]) is None
    door.open = True
    assert writer.drain().appended == 2
    assert reasons(door) == ["kept", "kept too"]
    writer.close()


def test_a_disk_that_is_really_full_loses_nothing_acknowledged(door: Door, tmp_path: Path) -> None:
    """On a file system of 64 kB: every record is refused loudly or stands in the ledger, in order,
    also where the process that spooled is gone and the disk is still full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        writer = SpoolingWriter(door, disk / "spool", writer="w")
        writer.record("job", [fork("before")])
        door.open = False
        kept: list[int] = []
        refused: list[str] = []
        for number in range(200):
            try:
                assert writer.record("job", [fork(f"{number} {'x' * 500}")]) is None
                kept.append(number)
            except SpoolError as error:
                refused.append(str(error))
        assert kept
        assert refused
        for told in ("No space left on device", "the record is not kept; make space"):
            assert all(told in message for message in refused)
        assert writer.waiting == len(kept)
        writer.close()  # as good as killed: nothing more is written
        door.open = True
        outcome = drain_leftovers(door, disk / "spool")["w"]
        assert outcome.waiting == 0
        assert not outcome.rejected
        assert [r.split()[0] for r in reasons(door)] == ["before", *map(str, kept)]
        types = [e.type for e in door.ledger.read()]
        assert types.count("LedgerUnreachable") == types.count("LedgerRestored") == 1
        writer = SpoolingWriter(door, disk / "spool", writer="w")
        door.open = False
        assert writer.record("job", [fork("room again")]) is None
        writer.close()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_spool_that_cannot_be_made(door: Door, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    writer = SpoolingWriter(door, tmp_path / "file" / "spool")
    assert writer.record("job", [fork(1)]) is not None
    door.open = False
    with pytest.raises(SpoolError, match="not kept"):
        writer.record("job", [fork(2)])
    writer.close()
    with pytest.raises(SpoolError, match="closed"):
        writer.record("job", [fork(3)])


def test_what_could_never_be_appended_is_refused_at_once(door: Door, tmp_path: Path) -> None:
    writer = SpoolingWriter(door, tmp_path / "spool")
    door.open = False
    for drafts in ([], [fork("x" * 70_000)]):
        with pytest.raises(InvalidEvent):
            writer.record("job", drafts)
    assert writer.waiting == 0
    writer.close()


def test_the_background_retry_empties_the_spool(door: Door, tmp_path: Path) -> None:
    restored = threading.Event()
    append = door.__call__

    def watched(job: str, events: Any, *, key: str | None = None) -> Receipt:
        receipt = append(job, events, key=key)
        if isinstance(events[0].event, life.LedgerRestored):
            restored.set()
        return receipt

    writer = SpoolingWriter(watched, tmp_path / "spool", retry_s=0.01)
    door.open = False
    for number in range(3):
        writer.record("job", [fork(number)])
    door.open = True
    assert restored.wait(DEADLINE_S)
    writer.close()
    assert reasons(door) == ["0", "1", "2"]


def test_threads_record_while_the_ledger_comes_and_goes(door: Door, tmp_path: Path) -> None:
    writer = SpoolingWriter(door, tmp_path / "spool", writer="w", retry_s=0.001)

    def work(thread: int) -> None:
        for number in range(20):
            door.open = (thread + number) % 5 != 0
            writer.record("job", [fork(f"{thread}:{number}")])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    door.open = True
    writer.close()
    drain_leftovers(door, tmp_path / "spool")
    found = reasons(door)
    assert sorted(found) == sorted(f"{t}:{n}" for t in range(3) for n in range(20))
    for thread in range(3):
        own = [int(reason.split(":")[1]) for reason in found if reason.startswith(f"{thread}:")]
        assert own == sorted(own), "the order of each thread holds"
    assert [e.sequence for e in door.ledger.read()] == list(range(door.ledger.head().size))
    assert os.listdir(tmp_path / "spool") == []  # noqa: PTH208


HOLDER = """
import sys
from shiftbook.ledger.ledger import Ledger

def hold(state):
    print("held", flush=True)
    sys.stdin.readline()

with Ledger.open(sys.argv[1]) as ledger:
    ledger.decide(hold)
"""


def test_a_locked_ledger_does_not_stop_the_training(store_url: str, tmp_path: Path) -> None:
    """The real thing: another process holds the ledger's lock, then gives it back."""
    with Ledger.open(store_url, lock_timeout_s=0.05) as ledger:
        writer = SpoolingWriter(ledger.append, tmp_path / "spool")
        with subprocess.Popen(
            [sys.executable, "-c", HOLDER, store_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            assert writer.record("job", [fork(1)]) is None
            assert writer.record("job", [fork(2)]) is None
            child.communicate("\n", timeout=DEADLINE_S)
        assert writer.drain().appended == 2
        assert writer.record("job", [fork(3)]) is not None
        writer.close()
        assert ledger.state().job("job").version == 4

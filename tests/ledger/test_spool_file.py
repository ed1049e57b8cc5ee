"""Goal: whatever byte of a spool rots, and whatever call fails, no other record is lost, and what
is lost is named.

Method: every byte of a file of records is changed, by a bit and into ends of a line, and the ends
of lines into every other byte; lines have the right checksum and say what no writer wrote; system
calls fail one after the other.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from shiftbook.ledger import spool_file
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerUnreachable, SpoolError
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.receipt import Receipt
from shiftbook.ledger.spool import SpoolingWriter, drain_leftovers
from shiftbook.ledger.spool_file import Record, SpoolFile
from shiftbook.verify.verdict import verify

TEXTS = ("plain", "a\rb\x0bc\x85d\u2028e", "é", "0123456789abcdef {", "last")
"""Reasons with what other programs take for the end of a line, and with what begins one here."""


def record(number: int) -> Record:
    event = ExperimentForked(parent="p", reason=TEXTS[number])
    return Record("job", f"k{number}", (Draft(event, occurred_ns=number + 1, writer="w"),))


RECORDS = [record(number) for number in range(len(TEXTS))]
LINES = [record.line() for record in RECORDS]


def changed(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of files of which one byte is another."""
    for at, byte in enumerate(data):
        others = {byte ^ 1 << at % 8, ord("\n"), ord("\r")}
        if byte == ord("\n"):
            others = set(range(256))
        for other in sorted(others - {byte}):
            yield at, data[:at] + bytes([other]) + data[at + 1 :]


def read(path: Path) -> tuple[list[Record], tuple[str, ...]]:
    file = SpoolFile.adopt(path)
    assert file is not None
    try:
        return file.read()
    finally:
        file.close()


def test_whatever_byte_rots_every_other_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_file, "sync_path", lambda path: None)  # of thousands of copies
    path, data = tmp_path / "w.spool", b"".join(LINES)
    kept = tmp_path / "w.spool.damaged"
    ends = [sum(len(line) for line in LINES[: n + 1]) for n in range(len(LINES))]
    for at, rotten in changed(data):
        path.write_bytes(rotten)
        found, faults = read(path)
        hit = next(number for number, end in enumerate(ends) if at < end)
        lost = [] if at == ends[hit] - 1 else [RECORDS[hit]]
        assert found == [one for one in RECORDS if one not in lost], (at, rotten[at])
        assert faults, (at, rotten[at])
        assert all(str(path) in fault and str(kept) in fault for fault in faults)
        lines = {fault.partition(" of ")[0] for fault in faults}
        assert lines & {f"line {hit + 1}", f"line {hit + 2}"}, (at, lines)
        assert kept.read_bytes() == rotten
        kept.unlink()
        assert path.read_bytes() == rotten, "reading changes nothing"


def test_a_record_after_a_rotten_end_of_the_file_is_whole(tmp_path: Path) -> None:
    """Whatever the last byte is now, and whatever a torn append left behind it."""
    path = tmp_path / "w.spool"
    for torn in (b"", b"x", LINES[4][:1], LINES[4][:40], LINES[4][:-1] + b"\r"):
        for end in (b"\x0b", b"\n") if torn else (b"", b"\x0b", b"\n"):
            path.write_bytes(b"".join(LINES[:3]) + LINES[3][:-1] + end + torn)
            file = SpoolFile.adopt(path)
            assert file is not None
            before, _ = file.read()
            assert before[:4] == RECORDS[:4]
            file.add(RECORDS[:1])
            assert file.read()[0] == [*before, RECORDS[0]], (end, torn)
            file.close()


def test_copies_of_damaged_files_never_replace_each_other(tmp_path: Path) -> None:
    path = tmp_path / "w.spool"
    contents = [LINES[0][:-4] + bytes([byte]) + LINES[0][-3:] for byte in b"abc"]
    for content in (*contents, *contents):
        path.write_bytes(content)
        assert read(path)[0] == []
    kept = sorted(p.name for p in tmp_path.iterdir() if p != path)
    assert kept == ["w.spool.damaged", "w.spool.damaged-2", "w.spool.damaged-3"]
    assert [(tmp_path / name).read_bytes() for name in kept] == contents


@pytest.mark.parametrize(
    ("rot", "numbers", "line"),
    [
        (lambda data: data.replace(b"\\r", b"\\n", 1), [0, 2, 3, 4], "line 2"),
        (lambda data: data[:30] + b"\r" + data[31:], [1, 2, 3, 4], "line 1"),
        (lambda data: data[:-1] + b"\x8a", [0, 1, 2, 3, 4], "line 5"),
    ],
    ids=["a text", "a line break inside", "the last byte"],
)
def test_the_rest_of_a_rotten_spool_arrives(
    tmp_path: Path, rot: Callable[[bytes], bytes], numbers: list[int], line: str
) -> None:
    """Through the ledger: what can be read stands there, what cannot is named and kept."""
    folder = tmp_path / "spool"
    folder.mkdir()
    data = rot(b"".join(LINES))
    assert data != b"".join(LINES)
    (folder / "w.spool").write_bytes(data)
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        outcome = drain_leftovers(ledger.append, folder)["w"]
        found = [e.body["reason"] for e in ledger.read() if e.type == "ExperimentForked"]
    assert found == [TEXTS[number] for number in numbers]
    assert outcome.appended == len(found)
    assert line in outcome.rejected[0]
    assert [p.name for p in folder.iterdir()] == ["w.spool.damaged"]
    assert (folder / "w.spool.damaged").read_bytes() == data


# -- calls that fail -------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let calls of the operating system fail from now on."""

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in names:
        monkeypatch.setattr(os, name, fail)


def test_an_append_that_can_neither_be_written_nor_cut_is_a_spool_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SpoolFile.create(tmp_path / "w.spool")
    file.add(RECORDS[:1])
    with monkeypatch.context() as patch:
        failing(patch, "fdatasync", "ftruncate")
        for _ in range(2):
            with pytest.raises(SpoolError, match="the record is not kept"):
                file.add(RECORDS[1:3])
    file.add(RECORDS[3:4])  # what was left is cut off before
    assert file.read() == ([RECORDS[0], RECORDS[3]], ())
    file.close()


HONEST: dict[str, Any] = {
    "job": "job",
    "key": "k",
    "drafts": [
        {
            "type": "ExperimentForked", "schema": 1, "body": {"parent": "p", "reason": "r"},
            "operation": None, "cause": None, "occurred_ns": 1, "writer": "w",
        }
    ],
}  # fmt: skip


def lie(**changes: Any) -> dict[str, Any]:
    """The honest record with other values in its only draft."""
    return {**HONEST, "drafts": [{**HONEST["drafts"][0], **changes}]}


LIES: dict[str, Any] = {
    **{f"job {value!r}": {**HONEST, "job": value} for value in (5, None, "", [])},
    **{f"key {value!r}": {**HONEST, "key": value} for value in (5, None, "", [])},
    **{f"drafts {value!r}": {**HONEST, "drafts": value} for value in ([], {}, None, "x", ["x"])},
    **{f"segments {value!r}": {**HONEST, "segments": value} for value in (5, "x", None, [5])},
    **{f"type {value!r}": lie(type=value) for value in (5, None, [])},
    **{f"schema {value!r}": lie(schema=value) for value in ("1", True, None, [])},
    **{f"body {value!r}": lie(body=value) for value in (5, None, [], {"more": 1})},
    **{f"operation {value!r}": lie(operation=value) for value in (5, [])},
    **{f"writer {value!r}": lie(writer=value) for value in (5, [])},
    **{f"cause {value!r}": lie(cause=value) for value in ("x", -1, True, 1.5, 2**63)},
    **{f"occurred_ns {value!r}": lie(occurred_ns=value) for value in ("x", -1, 1.5, 2**63)},
    "no field": {},
    "a list": [1],
    "a number": 5,
}


@pytest.mark.parametrize("name", LIES)
def test_a_line_that_no_writer_wrote_is_set_aside_alone(tmp_path: Path, name: str) -> None:
    """Its checksum is right: anybody can compute it. Other records and writers do not wait."""
    folder = tmp_path / "spool"
    folder.mkdir()
    data = orjson.dumps(LIES[name])
    check = hashlib.sha256(data).hexdigest()[: spool_file.CHECK_DIGITS].encode()
    (folder / "w.spool").write_bytes(LINES[0] + check + b" " + data + b"\n" + LINES[1])
    (folder / "x.spool").write_bytes(LINES[2])
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Ledger.open(url) as ledger:
        done = drain_leftovers(ledger.append, folder)
        keys = [event.key for event in ledger.read(types=["ExperimentForked"])]
    assert keys == ["k0", "k1", "k2"]
    assert [left.waiting for left in done.values()] == [0, 0]
    (told,) = done["w"].rejected
    assert told.startswith(f"line 2 of {folder / 'w.spool'}: ")
    assert [path.name for path in folder.iterdir()] == ["w.spool.damaged"]
    assert verify(url, integrity_only=True).exit_code == 0


def test_a_cause_that_is_no_earlier_event_is_set_aside(tmp_path: Path) -> None:
    """Only the ledger knows that: it refuses the event as any other."""
    folder = tmp_path / "spool"
    folder.mkdir()
    draft = Draft(ExperimentForked(parent="p", reason="r"), occurred_ns=1, writer="w", cause=99)
    (folder / "w.spool").write_bytes(Record("job", "k", (draft,)).line() + LINES[0])
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        (told,) = drain_leftovers(ledger.append, folder)["w"].rejected
        assert [event.key for event in ledger.read(types=["ExperimentForked"])] == ["k0"]
    assert "expected as its cause" in told


def test_a_spool_that_cannot_be_read_keeps_no_other_waiting(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    (folder / "a.spool").mkdir(parents=True)
    (folder / "w.spool").write_bytes(LINES[0])
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        for _ in range(2):
            with pytest.raises(SpoolError, match=r"read the spool .*a\.spool"):
                drain_leftovers(ledger.append, folder)
            assert [e.key for e in ledger.read(types=["ExperimentForked"])] == ["k0"]


def test_a_spool_that_could_not_be_read_once_is_drained_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that failed gives the spool back, so it is not taken for somebody's."""
    folder = tmp_path / "spool"
    folder.mkdir()
    (folder / "w.spool").write_bytes(LINES[0] + b"rotten\n")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(spool_file, "sync_path", full)
            with pytest.raises(SpoolError, match="No space left"):
                drain_leftovers(ledger.append, folder)
            with pytest.raises(SpoolError, match="No space left"):
                SpoolingWriter(ledger.append, folder, writer="w")
        done = drain_leftovers(ledger.append, folder)
        assert (done["w"].appended, done["w"].waiting) == (1, 0)


def test_a_line_of_beginnings_and_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever can write the folder keeps all writers from their ledger for hours."""
    path = tmp_path / "w.spool"
    path.write_bytes(LINES[0] + b"0123456789abcdef {}" * 500 + b"\n" + LINES[1])
    monkeypatch.setattr(spool_file, "MAX_TRIES", 300)
    tried: list[int] = []
    parse = Record.parse

    def counted(line: bytes) -> Record:
        tried.append(len(line))
        return parse(line)

    monkeypatch.setattr(Record, "parse", counted)
    found, faults = read(path)
    assert found == [RECORDS[0], RECORDS[1]]
    (fault,) = faults
    assert "no more than 300 pieces" in fault
    assert len(tried) <= 300 + 3


def test_a_spool_that_cannot_be_read_copied_or_removed_is_a_spool_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.spool"
    for name, content, message in (
        ("pread", LINES[0], "to read"),
        ("fsync", LINES[0].replace(b"plain", b"plane"), "to write .*damaged"),
    ):
        path.write_bytes(content)
        file = SpoolFile.adopt(path)
        assert file is not None
        with monkeypatch.context() as patch:
            failing(patch, name)
            with pytest.raises(SpoolError, match=message):
                file.read()
        assert path.read_bytes() == content
        file.close()
    file = SpoolFile.create(path)
    with monkeypatch.context() as patch:
        failing(patch, "unlink")
        with pytest.raises(SpoolError, match="remove"):
            file.remove()
    file.remove()
    assert not path.exists()


def test_the_background_retry_keeps_what_it_was_told(tmp_path: Path) -> None:
    """A record that is refused while nobody looks is still named to whoever drains next."""
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        away = True

        def append(job: str, events: Any, *, key: str | None = None) -> Receipt:
            if away:
                raise LedgerUnreachable("away")
            return ledger.append(job, events, key=key)

        ledger.append("job", ExperimentForked(parent="p", reason="other content"), key="k")
        writer = SpoolingWriter(append, tmp_path / "spool", writer="w", retry_s=0.01)
        writer.record("job", [ExperimentForked(parent="p", reason="refused")], key="k")
        away = False
        next(e for e in ledger.follow() if e.type == "LedgerRestored")
        rejected = writer.drain().rejected
        assert len(rejected) == 1
        assert "'k'" in rejected[0]
        assert writer.drain().rejected == ()
        writer.close()

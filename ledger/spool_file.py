"""A spool file: records on local disk, each synced and checksummed, and read past what is damaged.

A record is a line. Whatever single byte rots, every other record is read: the checksum tells which
lines are whole, and where the end of a line is what rotted, where the next one begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shiftbook.ledger.canonical import decode, encode
from shiftbook.ledger.durable import sync_path
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import InvalidEvent, SpoolError
from shiftbook.ledger.events.base import parse

T = TypeVar("T")

CHECK_DIGITS = 16
"""Hex digits of the SHA-256 before each record: enough against torn and rotten bytes."""

MAX_TRIES = 50_000
"""Pieces of a damaged line that are tried as a record. Two records whose break has rotted take as
many as they have braces; a line of beginnings and ends alone would take the square of them."""

LINE_START = re.compile(rb"(?=[0-9a-f]{%d} \{)" % CHECK_DIGITS)
"""Where a record may begin inside a line, once the byte that ended the one before it has rotted."""


@dataclass(frozen=True, slots=True)
class Record:
    """One append that waits."""

    job: str
    key: str
    drafts: tuple[Draft, ...]
    segments: tuple[str, ...] = ()
    """Where the store is to have those of their segments that waited beside the spool."""

    def line(self) -> bytes:
        """One line: checksum, blank, JSON."""
        waiting = {"segments": list(self.segments)} if self.segments else {}
        data = encode(
            {
                **waiting,
                "job": self.job,
                "key": self.key,
                "drafts": [
                    {
                        "type": draft.event.type_(),
                        "schema": draft.event.schema_,
                        "body": draft.event.plain(),
                        "operation": draft.operation,
                        "cause": draft.cause,
                        "occurred_ns": draft.occurred_ns,
                        "writer": draft.writer,
                    }
                    for draft in self.drafts
                ],
            }
        )
        return _check(data) + b" " + data + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Record:
        """Read a line; raise InvalidEvent where checksum or content are wrong."""
        check, _, data = line.removesuffix(b"\n").partition(b" ")
        if check != _check(data):
            raise InvalidEvent("expected a line that matches its checksum")
        value = decode(data)
        try:
            segments = value.get("segments", [])
            if not all(isinstance(where, str) for where in _kind(segments, list)):
                raise TypeError("segments")
            drafts = tuple(_draft(item) for item in _kind(value["drafts"], list))
            record = cls(
                _kind(value["job"], str), _kind(value["key"], str), drafts, tuple(segments)
            )
        except (KeyError, TypeError) as error:
            raise InvalidEvent(f"expected the fields of a record ({error})") from error
        if not record.drafts or not record.job or not record.key:
            raise InvalidEvent("expected a record with a job, a key and an event")
        return record


def _draft(item: dict[str, Any]) -> Draft:
    """A draft as it was spooled; its checksum is no proof that a writer of ours did."""
    numbers = [None if item[name] is None else _kind(item[name], int) for name in _NUMBERS]
    if not all(number is None or 0 <= number < 1 << 63 for number in numbers):
        raise TypeError(f"{' and '.join(_NUMBERS)} of at most 63 bits")
    return Draft(
        event=parse(_kind(item["type"], str), _kind(item["schema"], int), item["body"]),
        operation=None if item["operation"] is None else _kind(item["operation"], str),
        cause=numbers[0],
        occurred_ns=numbers[1],
        writer=None if item["writer"] is None else _kind(item["writer"], str),
    )


_NUMBERS = ("cause", "occurred_ns")


def _kind(value: Any, wanted: type[T]) -> T:
    """A value of exactly that type; raise TypeError."""
    if type(value) is not wanted:
        raise TypeError(f"{value!r:.60} is no {wanted.__name__}")
    return value


def _check(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest()[:CHECK_DIGITS].encode()


def _records(line: bytes) -> tuple[list[tuple[Record, int]], str | None]:
    """Records of a line, each with where it ends, and what is wrong with the line.

    A line is one record, unless the byte that ended it has rotted: then another one follows.
    """
    if not line:
        return [], None
    try:
        return [(Record.parse(line), len(line))], None
    except InvalidEvent as error:
        wrong = str(error)
    found: list[tuple[Record, int]] = []
    starts = sorted({0, *(match.start() for match in LINE_START.finditer(line))})
    ends = [match.end() for match in re.finditer(rb"\}", line)]
    tries = 0
    for start in starts:
        if found and start <= found[-1][1]:
            continue  # text inside of the record before
        for end in ends[bisect_right(ends, start) :]:
            tries += 1
            if tries > MAX_TRIES:
                return found, f"{wrong}; no more than {MAX_TRIES} pieces of it were tried"
            with contextlib.suppress(InvalidEvent):
                found.append((Record.parse(line[start:end]), end))
                break
    return found, wrong


class SpoolFile:
    """The open spool of one writer; its lock says that somebody looks after it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._end = os.fstat(fd).st_size
        self._torn = False
        """True where something follows the last record that has to be cut off first."""
        self._unended = False
        """True where the last record lacks the end of its line."""

    @classmethod
    def create(cls, path: Path) -> SpoolFile:
        """Make a new spool, or open this writer's own; raise SpoolError where that fails."""
        fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            sync_path(path.parent)
            # Whoever made the folder may have died before its name was durable.
            sync_path(path.parent.parent)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise _cannot("write", path, error) from error
        if not _lock(fd):
            os.close(fd)
            raise SpoolError(
                f"expected the spool {path} for this writer alone, found it in use; "
                "give each process a writer name of its own"
            )
        return cls(path, fd)

    @classmethod
    def adopt(cls, path: Path) -> SpoolFile | None:
        """Open a spool that another process left; None where its owner lives, or it is gone."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _cannot("read", path, error) from error
        if not _lock(fd) or not path.exists():
            os.close(fd)
            return None
        return cls(path, fd)

    def read(self) -> tuple[list[Record], tuple[str, ...]]:
        """Records in order, and what is wrong with each line that is not whole.

        A file with such lines is copied to another name first, and the rest of it goes on. A torn
        last line is no fault: its append never returned. Raises SpoolError where the file cannot be
        read or copied.
        """
        try:
            data = self._content()
        except OSError as error:
            raise _cannot("read", self.path, error) from error
        records: list[Record] = []
        faults: list[str] = []
        *lines, tail = data.split(b"\n")
        for number, line in enumerate(lines, start=1):
            found, damaged = _records(line)
            records += (record for record, _ in found)
            if damaged is not None:
                faults.append(f"line {number} of {self.path}: {damaged}")
        found, damaged = _records(tail)
        records += (record for record, _ in found)
        if found and damaged is not None:
            faults.append(f"line {len(lines) + 1} of {self.path}: {damaged}")
        if faults:
            kept = self._keep(data)
            faults = [f"{fault}; the file is kept as {kept}" for fault in faults]
        self._unended = bool(found)
        self._end = len(data) - len(tail) + (found[-1][1] if found else 0)
        self._torn = self._end < len(data)
        return records, tuple(faults)

    def add(self, records: Sequence[Record]) -> None:
        """Add records, durable on return; raise SpoolError, having added none, on failure."""
        data = b"".join(record.line() for record in records)
        if self._unended:
            data = b"\n" + data
        try:
            if self._torn:
                self._cut()
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._end + done)
            os.fdatasync(self._fd)
        except OSError as error:
            self._torn = True
            # Where that fails too it is cut before the next record, or by whoever reads the file.
            with contextlib.suppress(OSError):
                self._cut()
            raise _cannot("write", self.path, error) from error
        self._end += len(data)
        self._unended = False

    def _cut(self) -> None:
        os.ftruncate(self._fd, self._end)
        self._torn = False

    def _content(self) -> bytes:
        size = os.fstat(self._fd).st_size
        pieces: list[bytes] = []
        done = 0
        while done < size and (piece := os.pread(self._fd, size - done, done)):
            pieces.append(piece)
            done += len(piece)
        return b"".join(pieces)

    def _keep(self, data: bytes) -> Path:
        """Keep a damaged file's content under a name that holds nothing else."""
        kept, number = self.path.with_name(f"{self.path.name}.damaged"), 1
        try:
            while kept.exists() and kept.read_bytes() != data:
                number += 1
                kept = self.path.with_name(f"{self.path.name}.damaged-{number}")
            kept.write_bytes(data)
            sync_path(kept)
            sync_path(kept.parent)
        except OSError as error:
            raise _cannot("write", kept, error) from error
        return kept

    def remove(self) -> None:
        """Delete the file: everything in it stands in the ledger. Raises SpoolError."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise _cannot("remove", self.path, error) from error
        self.close()

    def close(self) -> None:
        """Close the file and give its lock back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _cannot(what: str, path: Path, error: OSError) -> SpoolError:
    return SpoolError(
        f"expected to {what} the spool {path}, found: {error.strerror}; {_ADVICE[what]}"
    )


_ADVICE = {
    "write": "the record is not kept; make space there, or name another folder",
    "read": "no record is lost by that; check the disk and the permissions",
    "remove": "its records stand in the ledger; check the permissions of its folder",
}
"""What to do, by what could not be done."""

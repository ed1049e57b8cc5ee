"""A spool file: records on local disk, each synced and checksummed, read up to a torn tail."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiftbook.ledger.canonical import decode, encode
from shiftbook.ledger.dialect import sync_path
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import InvalidEvent, SpoolError
from shiftbook.ledger.events.base import parse

CHECK_DIGITS = 16
"""Hex digits of the SHA-256 before each record: enough against torn and rotten bytes."""


@dataclass(frozen=True, slots=True)
class Record:
    """One append that waits."""

    job: str
    key: str
    drafts: tuple[Draft, ...]

    def line(self) -> bytes:
        """One line: checksum, blank, JSON."""
        data = encode(
            {
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
        check, _, data = line.rstrip(b"\n").partition(b" ")
        if check != _check(data):
            raise InvalidEvent("expected a line that matches its checksum")
        value = decode(data)
        try:
            drafts = tuple(_draft(item) for item in value["drafts"])
            return cls(value["job"], value["key"], drafts)
        except (KeyError, TypeError) as error:
            raise InvalidEvent(f"expected the fields of a record ({error})") from error


def _draft(item: dict[str, Any]) -> Draft:
    return Draft(
        event=parse(item["type"], item["schema"], item["body"]),
        operation=item["operation"],
        cause=item["cause"],
        occurred_ns=item["occurred_ns"],
        writer=item["writer"],
    )


def _check(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest()[:CHECK_DIGITS].encode()


class SpoolFile:
    """The open spool of one writer; its lock says that somebody looks after it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._end = os.fstat(fd).st_size

    @classmethod
    def create(cls, path: Path) -> SpoolFile:
        """Make a new spool, or open this writer's own; raise SpoolError where that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            sync_path(path.parent)
        except OSError as error:
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

    def read(self) -> tuple[list[Record], str | None]:
        """Records in order, and what is wrong with the first line that cannot be read.

        A torn last line is no fault: its append never returned. It is cut off.
        """
        data = os.pread(self._fd, self._end, 0)
        records: list[Record] = []
        self._end = 0
        fault = None
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                os.ftruncate(self._fd, self._end)
                break
            try:
                records.append(Record.parse(line))
            except InvalidEvent as error:
                fault = f"line {number} of {self.path}: {error}"
                break
            self._end += len(line)
        return records, fault

    def add(self, records: Sequence[Record]) -> None:
        """Add records, durable on return; raise SpoolError, having added none, on failure."""
        data = b"".join(record.line() for record in records)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._end + done)
            os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise _cannot("write", self.path, error) from error
        self._end += len(data)

    def set_aside(self, suffix: str) -> Path:
        """Keep a damaged file under another name; this spool keeps what could be read."""
        kept = self.path.with_name(self.path.name + suffix)
        try:
            kept.write_bytes(os.pread(self._fd, os.fstat(self._fd).st_size, 0))
            sync_path(kept)
            sync_path(kept.parent)
        except OSError as error:
            raise _cannot("write", kept, error) from error
        os.ftruncate(self._fd, self._end)
        return kept

    def remove(self) -> None:
        """Delete the file: everything in it stands in the ledger."""
        self.path.unlink(missing_ok=True)
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
        f"expected to {what} the spool {path} while the ledger is out of reach, found: "
        f"{error.strerror}; the record is not kept; make space there, or name another folder"
    )

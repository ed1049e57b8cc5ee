"""Writes an archive: beside its final name, synced, and given that name when it is whole."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from shiftbook.ledger.archive_format import (
    CHUNK_BYTES,
    END,
    SECTION,
    START,
    TAIL,
    Range,
    header,
    is_archive,
    note_bytes,
    padding,
    sealed,
)
from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.durable import sync_path
from shiftbook.ledger.errors import ArchiveError
from shiftbook.ledger.segment_place import segment_name


class ArchiveWriter:
    """Writes an archive beside its final name; it appears there whole, by ``finish``, or never."""

    def __init__(self, path: Path, range_: Range) -> None:
        self.path = path
        self._draft = path.with_name(f".{path.name}.draft")
        self._range = range_
        self._digest = hashlib.sha256()
        self._chunk: list[bytes] = []
        self._chunk_bytes = 0
        self._chunk_first = self._next = range_.first
        self._last = b""
        self.segments = 0
        self.segment_bytes = 0
        self._sections: list[str] = []
        if is_other_file(path):
            raise ArchiveError(
                f"expected a new file or an archive at {path}, found something else, which is "
                "not replaced; give another name"
            )
        self._file = _open_draft(self._draft)
        try:
            self._member(START, note_bytes(range_.plain()))
        except BaseException:
            self.abandon()
            raise

    def segment(self, sha256: str, data: bytes) -> None:
        """Add a segment's file, before the first event that binds it."""
        self._member(f"evidence/{segment_name(sha256)}", data)
        self.segments += 1
        self.segment_bytes += len(data)

    def event(self, data: bytes) -> None:
        """Add the stored bytes of the next event."""
        if b"\n" in data:
            raise ArchiveError(
                f"expected event {self._next} in one line, found a line break in its bytes; "
                "`shiftbook verify` says what is wrong with it"
            )
        self._last = data
        self._chunk += (data, b"\n")
        self._chunk_bytes += len(data) + 1
        self._next += 1
        if self._chunk_bytes >= CHUNK_BYTES:
            self._end_chunk()

    def section(self, name: str, data: bytes) -> None:
        """Add a named section, such as heads and proofs, after all events."""
        if not SECTION.fullmatch(f"sections/{name}"):
            raise ArchiveError(
                f"expected a section's name of small letters, digits, . _ - and /, found {name!r}"
            )
        self._end_chunk()
        self._member(f"sections/{name}", data)
        self._sections.append(name)

    def finish(self, missing_segments: int) -> int:
        """End, sync and name the file; its size in bytes."""
        self._end_chunk()
        assert self._next == self._range.last + 1, (self._next, self._range)
        note = {
            "events": self._next - self._range.first,
            "head": leaf_hash(self._last).hex(),
            "segments": self.segments,
            "segment_bytes": self.segment_bytes,
            "missing_segments": missing_segments,
            "sections": self._sections,
        }
        self._member(END, note_bytes({**note, "sha256": sealed(self._digest, note)}))
        self._write(TAIL)
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._draft.replace(self.path)
        self._file.close()
        sync_path(self.path.parent)
        return size

    def abandon(self) -> None:
        """Leave nothing behind; nothing happens after ``finish``."""
        if not self._file.closed:
            try:
                self._draft.unlink(missing_ok=True)
            finally:
                self._file.close()

    def _end_chunk(self) -> None:
        if self._chunk:
            packed = pa.Codec("zstd", 3).compress(b"".join(self._chunk), asbytes=True)
            sha256 = hashlib.sha256(packed).hexdigest()
            self._member(f"events/{self._chunk_first:012d}-{sha256}.jsonl.zst", packed)
        self._chunk, self._chunk_bytes, self._chunk_first = [], 0, self._next

    def _member(self, name: str, data: bytes) -> None:
        self._write(header(name, len(data)))
        self._write(data)
        self._write(padding(len(data)))

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)


def is_other_file(path: Path) -> bool:
    """True where something stands at the path that is no archive."""
    return path.exists() and not is_archive(path)


def _open_draft(draft: Path) -> BinaryIO:
    """The draft, locked and empty; one that a killed writer left is taken over."""
    while True:
        file = draft.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ArchiveError(
                f"expected to be the only one that writes {draft}, found another process at it; "
                "wait for its end, or give another name"
            ) from error
        here = os.fstat(file.fileno())
        # Whoever had the lock before may have given the draft its final name meanwhile.
        if draft.exists() and draft.stat().st_ino == here.st_ino:
            file.truncate(0)
            return file
        file.close()

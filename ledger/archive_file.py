"""Reads an archive: one pass that hashes every byte and indexes members, then each as it is asked.

Nothing is kept in memory but the index, so an archive may be larger than memory.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow as pa

from shiftbook.ledger.archive_format import (
    ARCHIVE_VERSION,
    BLOCK,
    END,
    EVENTS,
    EVIDENCE,
    MAX_CHUNK_BYTES,
    MAX_NOTE_BYTES,
    READ_BYTES,
    SECTION,
    START,
    TAIL,
    Digest,
    Range,
    header,
    is_archive,
    note_bytes,
    plausible,
    sealed,
)
from shiftbook.ledger.errors import ArchiveError
from shiftbook.ledger.segment_place import segment_name


@dataclass(frozen=True, slots=True)
class Chunk:
    """A member with events: where it lies, and what it should hold."""

    first: int
    offset: int
    size: int
    sound: bool
    """False where its bytes are not those that its name says."""


@dataclass
class ArchiveFile:
    """An archive that was read once from end to end; holds its index, and no event.

    ``damage`` says what is wrong with it, None where every byte is as it was written. Use
    ``ArchiveFile.open`` and close it.
    """

    path: Path
    file: BinaryIO
    range: Range
    chunks: list[Chunk] = field(default_factory=list)
    damage: str | None = None
    end: dict[str, Any] = field(default_factory=dict)
    """What the last member says; empty where there is none."""
    history: bool = False
    """True once it was held against itself, see archive_history."""
    _segments: list[bytes] = field(default_factory=list)
    """SHA-256, offset and size of each segment in 48 bytes, sorted: a million take 100 MB."""
    _sections: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> ArchiveFile:
        """Open and index a file; raise ArchiveError where it is no archive that can be read."""
        # To open a FIFO waits for whoever writes to it; that a folder is none is said below.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ArchiveError(
                f"expected an archive at {path}, found no regular file; archives are read in any "
                "order, so write a pipe to a file first"
            )
        try:
            file = path.open("rb")
        except OSError as error:
            raise ArchiveError(
                f"expected an archive at {path}, found: {error.strerror}; check the path"
            ) from error
        try:
            scan = _Scan(path, file)
            found = cls(path, file, scan.start())
            scan.index(found)
        except OSError as error:
            file.close()
            raise ArchiveError(
                f"expected to read {path}, found: {error.strerror or error}; restore it from a copy"
            ) from error
        except BaseException:
            file.close()
            raise
        found._segments.sort()
        return found

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> ArchiveFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_sound(self) -> None:
        """Raise ArchiveError where anything is not as it was written."""
        if self.damage is not None:
            raise ArchiveError(
                f"expected a whole archive at {self.path}, found {self.damage}; `shiftbook verify` "
                "says which events it still holds; restore it from a copy"
            )

    def lines(self, chunk: Chunk) -> list[bytes]:
        """Stored bytes of the events of a member; raise ArchiveError where it is damaged."""
        if not chunk.sound:
            raise ArchiveError(f"the events from position {chunk.first} on are not as written")
        packed = self._read(chunk.offset, chunk.size)
        try:
            with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
                text = stream.read(MAX_CHUNK_BYTES + 1)
        except (pa.ArrowException, OSError) as error:
            said = " ".join(str(error).split())[:120]
            raise ArchiveError(
                f"the events from position {chunk.first} on cannot be unpacked ({said})"
            ) from error
        if len(text) > MAX_CHUNK_BYTES or not text.endswith(b"\n"):
            raise ArchiveError(
                f"the events from position {chunk.first} on end in no line of at most "
                f"{MAX_CHUNK_BYTES} bytes in all"
            )
        return bytes(text[:-1]).split(b"\n")

    def events(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """(position, stored bytes) from a position on, by their place in the archive.

        Raises ArchiveError where a member is damaged or holds other positions than it should.
        """
        expected = self.range.first
        for index, chunk in enumerate(self.chunks):
            ends = index + 1 == len(self.chunks)
            following = self.range.last + 1 if ends else self.chunks[index + 1].first
            if chunk.first != expected:
                break
            expected = following
            if following <= first:
                continue
            lines = self.lines(chunk)
            for position, data in enumerate(lines, chunk.first):
                if position >= first:
                    yield position, data
            expected = chunk.first + len(lines)
            if expected != following:
                break
        if expected != self.range.last + 1:
            raise ArchiveError(
                f"expected events to position {self.range.last}, found them to end or jump after "
                f"{expected - 1}"
            )

    def segments(self) -> Iterator[tuple[str, bytes]]:
        """(SHA-256, bytes) of every segment's file."""
        for record in self._segments:
            yield record[:32].hex(), self._read(*_place(record))

    def where(self, sha256: str) -> str:
        """Name of a segment's file for people."""
        return f"{self.path}:evidence/{segment_name(sha256)}"

    def get(self, sha256: str) -> bytes | None:
        """Bytes of a segment's file, None where the archive has none of that name."""
        wanted = bytes.fromhex(sha256)
        at = bisect_left(self._segments, wanted)
        if at == len(self._segments) or self._segments[at][:32] != wanted:
            return None
        return self._read(*_place(self._segments[at]))

    @property
    def section_names(self) -> tuple[str, ...]:
        """Names of the sections, in order."""
        return tuple(self._sections)

    def section(self, name: str) -> bytes:
        """Bytes of a section; KeyError where there is none."""
        return self._read(*self._sections[name])

    def _read(self, offset: int, size: int) -> bytes:
        self.file.seek(offset)
        data = self.file.read(size)
        if len(data) != size:
            raise ArchiveError(
                f"expected {size} bytes at {offset} in {self.path}, found {len(data)}; it was cut "
                "while it was read"
            )
        return data


def _place(record: bytes) -> tuple[int, int]:
    return int.from_bytes(record[32:40]), int.from_bytes(record[40:48])


class _Damaged(Exception):
    """The scan can go no further."""


class _Scan:
    """One pass over a file: hashes every byte, and remembers where each member lies."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._digest = hashlib.sha256()
        self._size = os.fstat(file.fileno()).st_size
        self._offset = 0

    def start(self) -> Range:
        """The first member; raise ArchiveError where it is not that of an archive."""
        if not is_archive(self._path):
            raise ArchiveError(
                f"expected an archive at {self._path}, found another kind of file; check the path"
            )
        try:
            name, size = self._next_header()
            value = orjson.loads(self._note(name, size, START))
            version = value["archive"]
            if type(version) is int and ARCHIVE_VERSION < version < 1000:
                raise ArchiveError(
                    f"expected an archive of version {ARCHIVE_VERSION} or older at {self._path}, "
                    f"found {version}; install a newer Shiftbook"
                )
            found = Range(value["first"], value["last"], value["before"], value["by"])
            if version != ARCHIVE_VERSION or not plausible(found):
                raise _Damaged("a first member that no version writes")
            return found
        except (_Damaged, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ArchiveError(
                f"expected an archive at {self._path}, found its first member damaged "
                f"({' '.join(str(error).split())[:100]}); restore it from a copy"
            ) from error

    def index(self, found: ArchiveFile) -> None:
        """Walk to the end, filling the index; what is wrong stands in ``found.damage``."""
        try:
            while self._member(found):
                pass
        except _Damaged as damage:
            found.damage = str(damage)
        if found.damage is None and not all(chunk.sound for chunk in found.chunks):
            found.damage = "events that are not those that their member's name says"

    def _member(self, found: ArchiveFile) -> bool:
        so_far = self._digest.copy()
        name, size = self._next_header()
        offset = self._offset
        if name == END:
            self._end(found, self._note(name, size, END), so_far)
            return False
        events, evidence, section = (r.fullmatch(name) for r in (EVENTS, EVIDENCE, SECTION))
        digest = self._skip(size, hashlib.sha256() if events else None)
        if events:
            first, sha256 = int(events[1]), events[2]
            found.chunks.append(Chunk(first, offset, size, digest == sha256))
        elif evidence:
            numbers = offset.to_bytes(8) + size.to_bytes(8)
            found._segments.append(bytes.fromhex(evidence[1]) + numbers)
        elif section:
            found._sections[section[1]] = (offset, size)
        else:
            raise _Damaged(f"a member named {name[:100]!r} at byte {offset - BLOCK}")
        return True

    def _end(self, found: ArchiveFile, note: bytes, so_far: Digest) -> None:
        rest = self._file.read(len(TAIL) + 1)
        try:
            value = orjson.loads(note)
        except orjson.JSONDecodeError as error:
            raise _Damaged("a last member that is damaged") from error
        if not isinstance(value, dict) or note_bytes(value) != note or rest != TAIL:
            raise _Damaged("other bytes at its end than an archive ends with")
        found_sha256 = sealed(so_far, value)
        if value.get("sha256") != found_sha256:
            raise _Damaged(
                f"SHA-256 {found_sha256[:16]}… over its content where its end says "
                f"{str(value.get('sha256'))[:16]}…: bytes were changed"
            )
        found.end = value

    def _next_header(self) -> tuple[str, int]:
        block = self._take(BLOCK)
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
            expected = header(info.name, info.size)
        except (tarfile.HeaderError, ValueError, UnicodeError) as error:
            raise _Damaged(f"no header of a member at byte {self._offset - BLOCK}") from error
        if expected != block:
            raise _Damaged(f"a header that was changed at byte {self._offset - BLOCK}")
        return info.name, info.size

    def _note(self, name: str, size: int, expected: str) -> bytes:
        if name != expected or size > MAX_NOTE_BYTES:
            raise _Damaged(f"{name[:100]!r} of {size} bytes where {expected} should be")
        data = self._take(size)
        self._pad(size)
        return data

    def _skip(self, size: int, digest: Any) -> str | None:
        left = size
        while left:
            data = self._take(min(left, READ_BYTES))
            if digest is not None:
                digest.update(data)
            left -= len(data)
        self._pad(size)
        return None if digest is None else str(digest.hexdigest())

    def _pad(self, size: int) -> None:
        if any(self._take(-size % BLOCK)):
            raise _Damaged(f"bytes that should be zero before byte {self._offset}")

    def _take(self, count: int) -> bytes:
        if self._offset + count > self._size:
            raise _Damaged(f"that it was cut short: it ends at byte {self._size} without its end")
        data = self._file.read(count)
        if len(data) != count:
            raise _Damaged(f"that it was cut while it was read, at byte {self._offset + len(data)}")
        self._offset += count
        self._digest.update(data)
        return data

"""The file format of an archive: a tar file whose members are named by their content, and its end.

Members, in order: ``shiftbook-archive.json`` (version, range), then for each stretch of events the
segments that they are the first to bind, ``evidence/SHA-256.parquet``, and the events themselves,
``events/FIRST-SHA-256.jsonl.zst`` (stored bytes, a line each), then ``sections/NAME``, and
``end.json`` with a SHA-256 over everything before it and its own other fields. Every header is
written in one way, so a reader knows what each byte must be. docs/archive.md has it in full.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

ARCHIVE_VERSION = 1
"""Version of the format; an archive with a higher one is refused."""

START, END = "shiftbook-archive.json", "end.json"

BLOCK = 512
"""Bytes of a tar block (POSIX ustar)."""

TAIL = bytes(2 * BLOCK)
"""What ends a tar file."""

CHUNK_BYTES = 4 << 20
"""Bytes of events after which a member ends; one more event may stand in it."""

MAX_CHUNK_BYTES = CHUNK_BYTES + (1 << 20)
"""Bytes of events in a member that a reader takes: bounds its memory."""

MAX_NOTE_BYTES = 1 << 20
"""Largest first and last member that a reader takes."""

READ_BYTES = 1 << 20

EVENTS = re.compile(r"events/(\d{12})-([0-9a-f]{64})\.jsonl\.zst")
EVIDENCE = re.compile(r"evidence/([0-9a-f]{64})\.parquet")
SECTION = re.compile(r"sections/([a-z0-9][a-z0-9._/-]{0,79})")


class Digest(Protocol):
    """A hash that is being computed."""

    def copy(self) -> Digest: ...

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Range:
    """What the first member says: the range of positions, and the leaf before it."""

    first: int
    last: int
    before: str | None
    """Leaf of the event before the first one, hex; None where the range begins at 0."""
    by: str = ""
    """Program that wrote the archive."""

    def plain(self) -> dict[str, Any]:
        """As the member holds it."""
        return {
            "archive": ARCHIVE_VERSION,
            "by": self.by,
            "first": self.first,
            "last": self.last,
            "before": self.before,
        }


def header(name: str, size: int) -> bytes:
    """The one header that a member of this name and size has."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def padding(size: int) -> bytes:
    """Zeros that fill the last block of a member."""
    return bytes(-size % BLOCK)


def note_bytes(value: Mapping[str, Any]) -> bytes:
    """The one serialisation of the first and the last member."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS) + b"\n"


def sealed(before: Digest, note: Mapping[str, Any]) -> str:
    """What the last member says: SHA-256 over all before it and its own other fields, hex."""
    digest = before.copy()
    digest.update(note_bytes({key: value for key, value in note.items() if key != "sha256"}))
    return digest.hexdigest()


def is_archive(path: Path) -> bool:
    """True for a file that begins as an archive does, whole or not."""
    if not path.is_file():  # to open a FIFO waits for whoever writes to it
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(START) + 1) == START.encode() + b"\0"
    except OSError:
        return False


def plausible(found: Range) -> bool:
    """True where every field is one that a version may have written."""
    before = found.before
    return (
        all(type(n) is int and 0 <= n < 10**12 for n in (found.first, found.last))
        and found.first <= found.last
        and (before is None if found.first == 0 else isinstance(before, str) and len(before) == 64)
        and isinstance(found.by, str)
    )

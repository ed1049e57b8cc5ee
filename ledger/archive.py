"""Exports a ledger, or a range of it, into one file, and imports such a file bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.archive_format import Range
from shiftbook.ledger.archive_heads import HEADS_SECTION, new_heads
from shiftbook.ledger.archive_history import checked_event, require_history
from shiftbook.ledger.archive_writer import ArchiveWriter
from shiftbook.ledger.canonical import decode, leaf_hash
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.errors import (
    ArchiveError,
    ArchiveMismatch,
    EvidenceError,
    EvidenceOutOfReach,
    InvalidEvent,
    InvalidInput,
    LedgerError,
    LedgerUnreachable,
    NotALedger,
    UnknownPosition,
)
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.evidence import Place, segment_place, segment_sha256, writable_place
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.segment_place import SegmentPlace

BATCH_EVENTS, BATCH_BYTES = 1000, 4 << 20
"""Events, and bytes of them, that an import commits at a time."""

LISTED_SEGMENTS = 20
"""Missing segments that are named; the others are counted."""

Sections = Mapping[str, bytes]
"""What else belongs to a ledger, such as heads and proofs, by name; read one at a time."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What stands in an archive that was written."""

    path: Path
    first: int
    last: int
    head: str
    """Leaf of the last event, hex."""
    segments: int
    missing_segments: int
    missing: tuple[str, ...]
    """What is wrong with the first segments that could not be taken in."""
    bytes: int

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        return {
            "file": str(self.path),
            "first": self.first,
            "last": self.last,
            "events": self.last - self.first + 1,
            "head": self.head,
            "segments": self.segments,
            "missing_segments": self.missing_segments,
            "bytes": self.bytes,
        }


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did."""

    first: int
    last: int
    already: int
    """Events of the archive that stood in the ledger before, bit for bit."""
    imported: int
    segments: int
    sections: tuple[str, ...]
    """Sections that nobody took over."""

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        return {
            "first": self.first,
            "last": self.last,
            "already": self.already,
            "imported": self.imported,
            "segments": self.segments,
            "sections_left": list(self.sections),
        }


def export_archive(
    ledger: Ledger,
    path: Path,
    *,
    first: int = 0,
    last: int | None = None,
    sections: Sections | None = None,
    on_event: Progress | None = None,
) -> Exported:
    """Write the events from ``first`` to ``last`` (the head at the call) with their evidence.

    The file appears under its name whole and synced, or not at all, and replaces nothing but an
    archive. ``sections`` are written after the events, as they are. The same range of the same
    ledger gives the same bytes. Raises UnknownPosition, NotALedger where the ledger is damaged,
    EvidenceOutOfReach, ArchiveError where the file cannot be written.
    """
    ledger.require_keys()
    size = ledger.head().size
    last = size - 1 if last is None else last
    for position in (first, last):
        if not 0 <= position < size:
            raise UnknownPosition(position, size)
    if first > last:
        raise InvalidInput(
            f"expected a range of positions, found {first} to {last}; give --since a position "
            "that is not above --until"
        )
    before = ledger.event(first - 1).leaf.hex() if first else None
    by = f"shiftbook {version('shiftbook')}"
    try:
        writer = ArchiveWriter(path, Range(first, last, before, by))
        try:
            return _export(writer, ledger, sections or {}, first, last, on_event)
        finally:
            writer.abandon()
    except OSError as error:
        raise ArchiveError(
            f"expected to write {path}, found: {error.strerror or error}; make its folder "
            "writable and give it space, and export again"
        ) from error


def _export(
    writer: ArchiveWriter,
    ledger: Ledger,
    sections: Sections,
    first: int,
    last: int,
    on_event: Progress | None,
) -> Exported:
    shelf = _Shelf(ledger)
    leaf, position = b"", first - 1
    for row in ledger.rows(first - 1, until=last):
        position += 1
        leaf = leaf_hash(row.data)
        if row.position != position or leaf != row.leaf:
            raise NotALedger(
                f"expected event {position} with the leaf of its bytes, found that the ledger is "
                "damaged there; `shiftbook verify` says how; restore it from a copy"
            )
        for sha256, data in shelf.new_segments(row.data):
            writer.segment(sha256, data)
        writer.event(row.data)
        if on_event is not None:
            on_event(position)
    if position != last:
        raise NotALedger(
            f"expected events to position {last}, found {position} the last; `shiftbook verify` "
            "says more; restore the ledger from a copy"
        )
    for name in sections:
        writer.section(name, sections[name])
    size = writer.finish(shelf.missing_count)
    return Exported(
        writer.path,
        first,
        last,
        leaf.hex(),
        writer.segments,
        shelf.missing_count,
        tuple(shelf.missing),
        size,
    )


class _Shelf:
    """Gives each segment that events bind once, at its first event."""

    def __init__(self, place: Place) -> None:
        self._seen: set[bytes] = set()
        self._of = place
        self._place: SegmentPlace | None = None
        self.missing: list[str] = []
        self.missing_count = 0

    def new_segments(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """(SHA-256, bytes) of the segment that an event binds, where it was not given yet."""
        segment = _bound_segment(data)
        if segment is None or (key := bytes.fromhex(segment.sha256)) in self._seen:
            return
        self._seen.add(key)
        try:
            self._place = self._place or segment_place(self._of)
            found = self._place.get(segment.sha256)
            where = self._place.where(segment.sha256)
        except EvidenceOutOfReach:
            raise  # of a place that does not answer nothing can be said, and nothing exported
        except EvidenceError as error:
            self._miss(str(error))
            return
        if found is None:
            self._miss(f"{where} is missing")
        elif segment_sha256(found) != segment.sha256:
            self._miss(f"{where} was altered")
        else:
            yield segment.sha256, found

    def _miss(self, what: str) -> None:
        self.missing_count += 1
        if len(self.missing) < LISTED_SEGMENTS:
            self.missing.append(what)


def _bound_segment(data: bytes) -> Segment | None:
    """The segment that an event binds, whatever its type."""
    if b'"segment"' not in data:
        return None
    try:
        body = decode(data).get("body")
        named = body.get("segment") if isinstance(body, dict) else None
        return Segment.model_validate(named) if isinstance(named, dict) else None
    except (InvalidEvent, ValidationError):
        return None  # an event of another shape, which is kept as it stands


def import_archive(
    archive: ArchiveFile,
    ledger: Ledger,
    *,
    restore_section: Callable[[str, bytes], bool] | None = None,
    on_event: Progress | None = None,
) -> Imported:
    """Bring the events and the evidence of an archive into a ledger, bytes and positions kept.

    What the ledger holds already must be the same bytes; the rest is appended in batches, each
    durable, so that an import that was interrupted goes on where it ended. A range is taken only
    where the ledger holds the event before it; heads of one size must be the same.
    ``restore_section`` is given each section and says whether it took it over. Raises ArchiveError
    for a file that is not whole or holds what no ledger held, ArchiveMismatch where the ledger has
    other events or heads, both having written nothing, and what an append raises.
    """
    archive.require_sound()
    ledger.require_keys()
    require_history(archive)
    already = _refuse_other_events(archive, ledger)
    if HEADS_SECTION in archive.section_names:
        new_heads(ledger, archive.section(HEADS_SECTION))  # raises before anything is written
    place = writable_place(ledger) if archive.end["segments"] else None
    segments = 0
    for sha256, data in archive.segments():
        assert place is not None
        place.put(sha256, data)
        segments += 1
    if place is not None:
        place.settle()
    imported = 0
    for batch in _batches(archive, archive.range.first + already):
        _restore(archive, ledger, batch)
        imported += len(batch)
        if on_event is not None:
            on_event(batch[-1].position)
    left = tuple(
        name
        for name in archive.section_names
        if restore_section is None or not restore_section(name, archive.section(name))
    )
    return Imported(archive.range.first, archive.range.last, already, imported, segments, left)


def _refuse_other_events(archive: ArchiveFile, ledger: Ledger) -> int:
    """How many events of the archive stand in the ledger; raise ArchiveMismatch for others."""
    size, range_ = ledger.head().size, archive.range
    if range_.first > size:
        raise ArchiveMismatch(
            f"expected a ledger that ends at position {range_.first - 1} or later, found "
            f"{size} events in {ledger.url}; import the archive of what stands before first"
        )
    if range_.first and ledger.event(range_.first - 1).leaf.hex() != range_.before:
        raise ArchiveMismatch(
            f"expected the event at position {range_.first - 1} that the archive follows, found "
            f"another in {ledger.url}; import into the ledger of this archive, or a new one"
        )
    already = 0
    rows = ledger.rows(range_.first - 1, until=range_.last)
    for row, (position, data) in zip(rows, archive.events(), strict=False):
        if row.position != position or row.data != data or row.leaf != leaf_hash(data):
            raise ArchiveMismatch(
                f"expected the archive's event at position {position}, found another in "
                f"{ledger.url}; import into a new ledger"
            )
        already += 1
    return already


def _batches(archive: ArchiveFile, first: int) -> Iterator[list[StoredEvent]]:
    batch: list[StoredEvent] = []
    size = 0
    for position, data in archive.events(first):
        batch.append(checked_event(position, data))
        size += len(data)
        if len(batch) >= BATCH_EVENTS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _restore(archive: ArchiveFile, ledger: Ledger, batch: list[StoredEvent]) -> None:
    try:
        ledger.restore(batch)
    except LedgerUnreachable:
        raise
    except LedgerError as error:
        raise type(error)(
            f"import of {archive.path} stopped before position {batch[0].position}: {error}; "
            "import again to go on from there"
        ) from error

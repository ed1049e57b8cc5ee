"""Reads an archive's events for the judge as if they were rows of a ledger, damaged ones too."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Generator, Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.archive_heads import HEADS_SECTION, read_heads
from shiftbook.ledger.canonical import decode, leaf_hash
from shiftbook.ledger.errors import ArchiveError, InvalidEvent
from shiftbook.ledger.tables import STORAGE_SCHEMA
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.scan_block import COLUMNS, Block, Page
from shiftbook.verify.stored import DamagedPages, RawRow


class DamagedArchive(DamagedPages):
    """The file is not as it was written; ``after`` is the last position that it still gave."""

    expected, found = "an archive as it was written", ""


class ArchivedEvents:
    """The events of an archive, from one position to another.

    An archive has no columns and no leaves beside the bytes: both are made from them. Raises
    UnreadableStore where the file is no archive; what is wrong inside shows as DamagedArchive.
    """

    path: Path | None = None
    """No folder lies beside an archive: its evidence is inside."""

    def __init__(self, path: Path) -> None:
        try:
            self.archive = ArchiveFile.open(path)
        except ArchiveError as error:
            raise UnreadableStore(str(error)) from error
        self.first = self.archive.range.first
        self._batches = array("Q")
        """A hash of (job, key) for each run of events that have them: 8 bytes each."""

    def __enter__(self) -> ArchivedEvents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.archive.close()

    def blocks(
        self,
        until: int | None,
        sizes: Collection[int],
        evidence: Path | None = None,
        *,
        named: bool = True,
    ) -> Generator[Block]:
        """None: the file is unpacked as one stream."""
        yield from ()

    def pages(self, after: int = -1, until: int | None = None) -> Iterator[Page]:
        """None: what would be compared with the bytes is made from them."""
        return iter(())

    def rows(self, after: int = -1, until: int | None = None) -> Iterator[RawRow]:
        """Rows with ``after < position <= until`` in order; raises DamagedArchive."""
        last_batch: tuple[Any, Any] = (None, None)
        position = max(after, self.first - 1)
        leaf = b""
        try:
            for at, data in self.archive.events(position + 1):
                if until is not None and at > until:
                    break
                columns = _columns(at, data)
                job, key = batch = (columns.get("job"), columns.get("key"))
                if batch != last_batch and isinstance(key, str):
                    self._batches.append(_hashed(job, key))
                last_batch, position = batch, at
                leaf = leaf_hash(data)
                yield RawRow(columns["position"], columns, data, leaf)
        except (ArchiveError, OSError) as error:
            reason = " ".join(str(error).split())
            if self.archive.damage is not None:
                reason = f"{self.archive.damage}; {reason}"
            raise DamagedArchive(position, reason) from error
        if self.archive.damage is not None:
            raise DamagedArchive(position, self.archive.damage)
        said = self.archive.end.get("head")
        if position == self.archive.range.last and leaf and said != leaf.hex():
            raise DamagedArchive(
                position, f"leaf {leaf.hex()[:16]}… of its last event where its end says {said!r}"
            )

    def split_keys(self) -> Iterator[tuple[str, str, int, int, int]]:
        """(job, key, first, last, count) of keys whose events are no single batch."""
        hashes = pa.array(self._batches, pa.uint64())
        counts = pc.value_counts(hashes)
        twice = set(
            counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
        )
        if not twice:
            return
        found: dict[tuple[str, str], list[int]] = {}
        for position, data in self.archive.events(self.first):
            columns = _columns(position, data)
            job, key = columns.get("job"), columns.get("key")
            if isinstance(key, str) and _hashed(job, key) in twice:
                first_last_count = found.setdefault((str(job), key), [position, position, 0])
                first_last_count[1] = position
                first_last_count[2] += 1
        for (job, key), (first, last, count) in found.items():
            if last - first + 1 != count:
                yield job, key, first, last, count

    def hidden(self, last: int, seen: int) -> tuple[int, Any] | None:
        """None: members hold one run of events, and ``rows`` reads it whole."""
        return None

    def meta(self) -> list[tuple[Any, Any]]:
        """What a ledger with these events says about itself."""
        return [("storage_schema", str(STORAGE_SCHEMA))]

    def heads(self) -> list[tuple[Any, Any]]:
        """(size, note) of the signed heads that the archive carries; raises DamagedArchive."""
        try:
            if HEADS_SECTION not in self.archive.section_names:
                return []
            return list(read_heads(self.archive.section(HEADS_SECTION)))
        except (ArchiveError, OSError) as error:
            raise DamagedArchive(-1, " ".join(str(error).split())) from error

    def nodes(self) -> None:
        """None: the tree's nodes are made from the events."""


def _columns(position: int, data: bytes) -> dict[str, Any]:
    """Columns as a ledger would have them for these bytes; the position alone for no event."""
    try:
        value = decode(data)
    except InvalidEvent:
        return {"position": position}
    columns = {name: value.get(name) for name in COLUMNS}
    if type(columns["position"]) is not int:
        columns["position"] = position
    return columns


def _hashed(job: Any, key: str) -> int:
    text = f"{len(str(job))} {job} {key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest())

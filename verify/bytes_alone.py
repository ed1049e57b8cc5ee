"""What sources share that hold the bytes of events and no columns: archives, folders of tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Generator, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shiftbook.ledger.canonical import decode, leaf_hash
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.state import SHARED_TYPES
from shiftbook.ledger.tables import STORAGE_SCHEMA
from shiftbook.verify.scan_block import COLUMNS, Block, Page


class BytesAlone(ABC):
    """A source whose columns are made from the bytes of its events."""

    first = 0
    """Position at which it begins."""

    def __init__(self) -> None:
        self._batches = array("Q")
        """A hash of (job, key) for each run of events that have them: 8 bytes each."""
        self._last_batch: tuple[Any, Any] = (None, None)

    @abstractmethod
    def events(self, first: int) -> Iterator[tuple[int, bytes]]:
        """(position, bytes) of the events from a position on."""

    @abstractmethod
    def count(self, until: int | None = None) -> int:
        """Number of events up to a position."""

    def some(self, jobs: Collection[str], last: int) -> Iterator[tuple[bytes, bytes]]:
        """(bytes, leaf) of the events of some jobs up to a position, and of all jobs those that
        change what jobs share."""
        for position, data in self.events(self.first):
            if position > last:
                return
            value = decode(data)
            if value["job"] in jobs or value["type"] in SHARED_TYPES:
                yield data, leaf_hash(data)

    def columns(self, position: int, data: bytes) -> dict[str, Any]:
        """Columns of the next event, whose key is kept in mind for ``split_keys``."""
        columns = _columns(position, data)
        job, key = batch = (columns.get("job"), columns.get("key"))
        if batch != self._last_batch and isinstance(key, str):
            self._batches.append(_hashed(job, key))
        self._last_batch = batch
        return columns

    def blocks(
        self,
        until: int | None,
        sizes: Collection[int],
        evidence: Path | None = None,
        *,
        named: bool = True,
    ) -> Generator[Block]:
        """None: it is read as one stream."""
        yield from ()

    def pages(self, after: int = -1, until: int | None = None) -> Iterator[Page]:
        """None: what would be compared with the bytes is made from them."""
        return iter(())

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
        for position, data in self.events(self.first):
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
        """None: it holds one run of events, and ``rows`` reads it whole."""
        return None

    def meta(self) -> list[tuple[Any, Any]]:
        """What a ledger with these events says about itself."""
        return [("storage_schema", str(STORAGE_SCHEMA))]

    def revision(self) -> list[Any]:
        """None: what was exported has no tables."""
        return []


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

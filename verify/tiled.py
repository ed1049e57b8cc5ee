"""Reads a folder of C2SP tlog-tiles for the judge as if it were a ledger, damaged ones too.

Bundles hold the events, tiles of level 0 their leaf hashes, those above the nodes, and
``checkpoint`` the one signed head. What lies beyond that head is left alone: a reader does not see
it, and an export that was killed leaves such files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from shiftbook.ledger.errors import InvalidNote
from shiftbook.ledger.merkle import TILE_HEIGHT, TILE_WIDTH
from shiftbook.ledger.signed_note import SignedHead
from shiftbook.ledger.tiles import CHECKPOINT, tile_path
from shiftbook.verify.bytes_alone import BytesAlone
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.stored import DamagedPages, RawRow

HASH_BYTES = 32
BUNDLE = "entries"


class DamagedTiles(DamagedPages):
    """A file is not as it was written; ``after`` is the last position that the files still gave."""

    expected, found = "a folder of tiles as it was written", ""


class TiledEvents(BytesAlone):
    """The events under the head of a folder of tiles; its evidence lies in ``FOLDER.evidence``.

    Raises UnreadableStore where the checkpoint is no head: nothing then says how much there is.
    """

    one_head = "the checkpoint of the tiles"
    """Where its head stands; those before it stand nowhere in the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder
        try:
            self._note = (folder / CHECKPOINT).read_bytes()
            self.size = SignedHead.parse(self._note).size
        except (OSError, InvalidNote) as error:
            said = getattr(error, "strerror", None) or error
            raise UnreadableStore(
                f"expected a signed head in {folder / CHECKPOINT}, found none ({said}); restore "
                "the folder from a copy, or export it again"
            ) from error

    def __enter__(self) -> TiledEvents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is kept open."""

    def events(self, first: int) -> Iterator[tuple[int, bytes]]:
        """(position, bytes) of the events from a position on; raises DamagedTiles."""
        for row in self._stored(first, self.size):
            yield row[:2]

    def count(self, until: int | None = None) -> int:
        """Number of events up to a position, under the head."""
        return self.size if until is None else min(self.size, until + 1)

    def rows(self, after: int = -1, until: int | None = None) -> Iterator[RawRow]:
        """Rows with ``after < position <= until`` in order; raises DamagedTiles."""
        stop = self.size if until is None else min(self.size, until + 1)
        for position, data, leaf in self._stored(after + 1, stop):
            # Where it stands says its position: bytes that name another one stand wrong.
            columns = {**self.columns(position, data), "position": position}
            yield RawRow(position, columns, data, leaf)

    def _stored(self, first: int, stop: int) -> Iterator[tuple[int, bytes, bytes]]:
        for number in range(first // TILE_WIDTH, -(-stop // TILE_WIDTH)):
            start = number * TILE_WIDTH
            width = min(TILE_WIDTH, self.size - start)
            try:
                events = self._tile(BUNDLE, number, width)
                leaves = self._tile(0, number, width)
            except ValueError as error:
                raise DamagedTiles(max(first, start) - 1, str(error)) from error
            for at, (data, leaf) in enumerate(zip(events, leaves, strict=True), start):
                if first <= at < stop:
                    yield at, data, leaf

    def heads(self) -> list[tuple[Any, Any]]:
        """(size, note) of the checkpoint."""
        return [(self.size, self._note)]

    def nodes(self) -> Iterator[tuple[Any, Any, Any]]:
        """(level, number, hash) of the tiles above the leaves, in order; raises DamagedTiles."""
        level = 1
        while total := self.size >> level * TILE_HEIGHT:
            for number in range(-(-total // TILE_WIDTH)):
                start = number * TILE_WIDTH
                try:
                    hashes = self._tile(level, number, min(TILE_WIDTH, total - start))
                except ValueError as error:
                    raise DamagedTiles(-1, str(error)) from error
                for at, value in enumerate(hashes, start):
                    yield level, at, value
            level += 1

    def _tile(self, level: int | str, number: int, width: int) -> list[bytes]:
        """The first entries of a tile, after its files of all widths were found to agree.

        Raises ValueError where one has another number of entries than its name says, where two
        differ, and where none is wide enough.
        """
        full = self.path / tile_path(level, number)
        partial = full.with_name(full.name + ".p")
        widths = {TILE_WIDTH: full} if full.is_file() else {}
        if partial.is_dir():
            for file in partial.iterdir():
                if file.name.isdecimal() and 0 < (w := int(file.name[:4])) < TILE_WIDTH:
                    widths[w] = file
        longest: list[bytes] = []
        for count in sorted(widths, reverse=True):
            found = _split(widths[count], level)
            if len(found) != count:
                raise ValueError(
                    f"{count} entries expected in {self._name(widths[count])}, {len(found)} there"
                )
            longest = longest or found
            if longest[:count] != found:
                raise ValueError(
                    f"{self._name(widths[count])} differs from {self._name(widths[max(widths)])}"
                )
        if len(longest) < width:
            wanted = self.path / tile_path(level, number, width)
            raise ValueError(f"{self._name(wanted)} is missing")
        return longest[:width]

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.path))


def _split(file: Path, level: int | str) -> list[bytes]:
    """Entries of a bundle, or hashes of a tile; raises ValueError for bytes that are none."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read: {error.strerror or error}") from error
    if level != BUNDLE:
        return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
    entries, at = [], 0
    while at < len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2])
        if at + 2 > len(data) or end > len(data):
            raise ValueError(f"{file.parent.name}/{file.name} ends in the middle of an event")
        entries.append(data[at + 2 : end])
        at = end
    return entries

"""Reads an archive's events for the judge as if they were rows of a ledger, damaged ones too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.archive_heads import HEADS_SECTION, read_heads
from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.errors import ArchiveError
from shiftbook.verify.bytes_alone import BytesAlone
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.stored import DamagedPages, RawRow


class DamagedArchive(DamagedPages):
    """The file is not as it was written; ``after`` is the last position that it still gave."""

    expected, found = "an archive as it was written", ""


class ArchivedEvents(BytesAlone):
    """The events of an archive, from one position to another.

    An archive has no columns and no leaves beside the bytes: both are made from them. Raises
    UnreadableStore where the file is no archive; what is wrong inside shows as DamagedArchive.
    """

    path: Path | None = None
    """No folder lies beside an archive: its evidence is inside."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            self.archive = ArchiveFile.open(path)
        except ArchiveError as error:
            raise UnreadableStore(str(error)) from error
        self.first = self.archive.range.first

    def __enter__(self) -> ArchivedEvents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.archive.close()

    def events(self, first: int) -> Iterator[tuple[int, bytes]]:
        """(position, bytes) of the events from a position on; raises ArchiveError."""
        return self.archive.events(first)

    def count(self, until: int | None = None) -> int:
        """Number of events up to a position, by what the archive says of itself."""
        last = self.archive.range.last
        return (last if until is None else min(last, until)) + 1 - self.first

    def rows(self, after: int = -1, until: int | None = None) -> Iterator[RawRow]:
        """Rows with ``after < position <= until`` in order; raises DamagedArchive."""
        position = max(after, self.first - 1)
        leaf = b""
        try:
            for at, data in self.events(position + 1):
                if until is not None and at > until:
                    break
                columns = self.columns(at, data)
                position = at
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

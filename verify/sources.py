"""What the judge reads events from: a ledger, an archive of one, or a folder of its tiles."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from shiftbook.ledger.archive_format import is_archive
from shiftbook.ledger.dialect import public_url
from shiftbook.ledger.segment_place import open_place
from shiftbook.ledger.tiles import is_tiles
from shiftbook.verify.evidence import EvidenceFolder
from shiftbook.verify.scan_block import Block, Page
from shiftbook.verify.served import open_raw
from shiftbook.verify.stored import RawRow

SQLITE = "sqlite:///"


class TableSource(Protocol):
    """Rows as they are stored, and what the store says about itself."""

    def rows(self, after: int = -1, until: int | None = None) -> Iterator[RawRow]:
        """Rows with ``after < position <= until`` in order; raises DamagedPages."""

    def split_keys(self) -> Iterator[tuple[str, str, Any, Any, int]]:
        """(job, key, first, last, count) of keys whose events are no single batch."""

    def hidden(self, last: int, seen: int) -> tuple[int, Any] | None:
        """(count, a position) of rows that ``rows`` up to ``last`` passed over, None for none."""

    def meta(self) -> list[tuple[Any, Any]]:
        """(name, value) of what the store says about itself; raises DamagedPages."""

    def revision(self) -> list[Any]:
        """What says which revision the derived tables have; empty from before there was one;
        raises DamagedPages."""

    def heads(self) -> list[tuple[Any, Any]]:
        """(size, note) of the signed heads in their order; raises DamagedPages."""

    def nodes(self) -> Iterator[tuple[Any, Any, Any]] | None:
        """(level, number, hash) of the stored nodes in order, None where none are stored; raises
        DamagedPages."""


class EventSource(TableSource, Protocol):
    """Rows as they are stored, and the evidence that they bind."""

    @property
    def path(self) -> Path | None:
        """File of the ledger, where segments lie beside it."""

    def __enter__(self) -> EventSource: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def count(self, until: int | None = None) -> int:
        """Number of events up to a position, by the largest one; 0 where that cannot be told."""

    def pages(self, after: int = -1, until: int | None = None) -> Iterator[Page]:
        """The same rows, unread, a page at a time where that is faster, else nothing; raises
        DamagedPages."""

    def blocks(
        self,
        until: int | None,
        sizes: Collection[int],
        evidence: Path | None = None,
        *,
        named: bool = True,
    ) -> Generator[Block]:
        """Stretches from 0 on that were found sound by several processes, in order, where that is
        faster; ends before the first that is not. ``sizes`` are those of heads, ``evidence`` the
        folder of segments that are to be looked at too; with ``keep`` they hold their events."""

    def some(self, jobs: Collection[str], last: int) -> Iterator[tuple[bytes, bytes]]:
        """(bytes, leaf) of the events of some jobs up to a position that was found sound, and of
        all jobs those that change what jobs share, in order; raises DamagedPages."""


def archive_path(url: str) -> Path | None:
    """The file, where a URL or path names an archive; None where it names anything else."""
    path = Path(url.removeprefix(SQLITE))
    return path if ("://" not in url or url.startswith(SQLITE)) and is_archive(path) else None


def tiles_path(url: str) -> Path | None:
    """The folder, where a URL or path names one of tiles; None where it names anything else."""
    path = Path(url.removeprefix(SQLITE))
    return path if ("://" not in url or url.startswith(SQLITE)) and is_tiles(path) else None


def exported_path(url: str) -> Path | None:
    """Where a URL or path names what was exported and does not grow: an archive, or tiles."""
    return archive_path(url) or tiles_path(url)


def shown(url: str) -> str:
    """A ledger's URL without credentials, or the path of an archive or of a folder of tiles."""
    path = exported_path(url)
    return public_url(url) if path is None else str(path)


def open_events(url: str) -> EventSource:
    """Open what a URL or path names for reading; raise UnreadableStore where it is nothing such."""
    # Readers of what was exported need pyarrow, which takes a while: only where one is wanted.
    if (path := archive_path(url)) is not None:
        from shiftbook.verify.archived import ArchivedEvents

        return ArchivedEvents(path)
    if (path := tiles_path(url)) is not None:
        from shiftbook.verify.tiled import TiledEvents

        return TiledEvents(path)
    return open_raw(url)


def first_position(source: EventSource) -> int:
    """Position at which a source begins: 0 but for an archive of a range."""
    return int(getattr(source, "first", 0))


def evidence_of(source: EventSource, evidence: str | None) -> EvidenceFolder:
    """Where the rows of a source lie: inside an archive, else where ``evidence`` says or beside.

    Raises EvidenceOutOfReach where ``evidence`` is a URL that fsspec does not know.
    """
    within = getattr(source, "archive", None)
    # Opened now: a URL that fsspec does not know is said before anything is read.
    return EvidenceFolder(within or (open_place(evidence) if evidence else source))

"""Reads what the judge will look at, ahead of it and in processes of their own.

Each takes pages of the ledger in turn: the events of some jobs, in order, with those of all jobs
that change what jobs share, and the rows of their evidence. That they are sound was found before;
here it is looked that they still are what was hashed.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orjson import loads

from shiftbook.ledger.state import SHARED_TYPES
from shiftbook.verify.evidence import EvidenceFolder, Rows
from shiftbook.verify.scan import ledger_uri, shared

PAGE_EVENTS = 1 << 10
"""Events of one page, some 2 MB with the rows of their evidence."""

MOST_PROCESSES = 2
"""One judges more slowly than two read."""

ALONE_EVENTS = 1 << 14
"""Up to so many events the judge has read himself before others have started."""


@dataclass
class Page:
    """Events of some jobs, in order, as they are stored."""

    data: list[bytes] = field(default_factory=list)
    leaves: list[bytes] = field(default_factory=list)
    rows: dict[int, Rows] = field(default_factory=dict)
    """Evidence rows by the position of the event that names them."""
    whole: bool = True
    """Whether all could be read, and are what was hashed."""


@dataclass(frozen=True)
class Wanted:
    """What of a ledger is wanted."""

    uri: str
    """Opened by sqlite3 as it stands."""
    jobs: frozenset[str]
    stretches: Sequence[tuple[int, int]]
    """First and last position of each page."""
    evidence: Path | None = None
    """Folder of the segments, where they are to be read as well."""

    def blocks(self) -> Iterator[Page]:
        """The pages, one after the other."""
        folder = None if self.evidence is None else EvidenceFolder(self.evidence)
        with closing(sqlite3.connect(self.uri, uri=True, isolation_level=None)) as connection:
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("CREATE TEMP TABLE wanted (job TEXT PRIMARY KEY) WITHOUT ROWID")
            connection.executemany("INSERT INTO wanted VALUES (?)", [(job,) for job in self.jobs])
            for first, last in self.stretches:
                yield self._page(connection, first, last, folder)

    def _page(
        self, connection: sqlite3.Connection, first: int, last: int, folder: EvidenceFolder | None
    ) -> Page:
        page, sha256 = Page(), hashlib.sha256
        try:
            found = connection.execute(_SELECT, (first, last)).fetchall()
            for position, job, data, leaf in found:
                if sha256(b"\x00" + data).digest() != leaf:
                    page.whole = False
                    break
                page.data.append(data)
                page.leaves.append(leaf)
                if folder is not None and b'"segment"' in data and job in self.jobs:
                    rows = _rows(folder, loads(data))
                    if rows is not None:
                        page.rows[position] = rows
        except (sqlite3.Error, ValueError, TypeError, OverflowError, MemoryError):
            page.whole = False
        return page


# The pluses keep SQLite from going by an index instead of by position.
_SELECT = (
    "SELECT position, job, data, leaf FROM events WHERE position >= ? AND position <= ? AND "
    "(+job IN (SELECT job FROM temp.wanted) OR +type IN "
    f"({', '.join(repr(name) for name in sorted(SHARED_TYPES))})) ORDER BY position"
)


def _rows(folder: EvidenceFolder, value: dict[str, Any]) -> Rows | None:
    named = value["body"].get("segment")
    return folder.named(value["type"], named) if isinstance(named, dict) else None


def read_ahead(
    path: Path,
    jobs: frozenset[str],
    last: int,
    evidence: Path | None = None,
    *,
    share: float = 1.0,
    processes: int | None = None,
) -> Generator[Page]:
    """Pages with the events of some jobs up to a position, in order.

    ``share`` is the part of all events that these are, so that pages are of one size; ``evidence``
    the folder of the segments, None where they cannot be read by other processes. At most
    ``processes`` pages are in memory at once (default: one for each usable core, at most two).
    """
    listed = stretches_of(last, share)
    wanted = Wanted(ledger_uri(path), jobs, listed, evidence)
    done = 0
    for page in shared(
        wanted, processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES), Page
    ):
        done += 1
        yield page
    # Where a process died, the rest is read here.
    yield from replace(wanted, stretches=listed[done:]).blocks()


def stretches_of(last: int, share: float) -> list[tuple[int, int]]:
    """First and last position of each page, where ``share`` of all events up to one are wanted."""
    length = int(PAGE_EVENTS / max(share, 1e-3))
    return [(first, min(first + length - 1, last)) for first in range(0, last + 1, length)]


def wanted_pages(
    path: Path,
    jobs: frozenset[str],
    stretches: Sequence[tuple[int, int]],
    evidence: Path | None = None,
) -> Generator[Page]:
    """As ``read_ahead``, of given stretches and when they are asked for."""
    yield from Wanted(ledger_uri(path), jobs, stretches, evidence).blocks()

"""Judges one group of jobs of a large ledger, in this process or in one of its own.

A group has its own events, from pages that are in order, and those of other jobs that change what
jobs share. The ledger was found sound before; here it is looked that it still is.
"""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from orjson import loads

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.errors import LedgerError
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.evidence import EvidenceFolder, Rows
from shiftbook.verify.findings import Finding
from shiftbook.verify.judge import Judge, Judgement
from shiftbook.verify.read_ahead import Page, stretches_of, wanted_pages
from shiftbook.verify.scan_block import Named
from shiftbook.verify.stored import DamagedPages, one_line

REPORT_EVENTS = 1 << 12
"""Events after which a process of its own says how far it is."""

Group = Mapping[str, int]
"""Jobs that are judged together, with the number of events of each."""


@dataclass
class Judged:
    """What was said of a group, and of the evidence that its events name."""

    judgement: Judgement
    events: int = 0
    """Events of its jobs."""
    segments: int = 0
    """Segments that were looked at."""
    problems: list[tuple[Named, Rows]] = field(default_factory=list)
    """What of them is not as it should be."""


@dataclass(frozen=True)
class Reached:
    """How many events of a group were judged; what a process says on its way to ``Judged``."""

    events: int


class GroupJudge:
    """Judges groups of one ledger, one after the other; a group is forgotten before the next."""

    def __init__(
        self,
        where: Path | str,
        last: int,
        rows: EvidenceFolder,
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        """``where`` names the ledger in errors; ``last`` is the last position that is judged."""
        self._where = where
        self._last = last
        self._rows = rows
        self._on_finding = on_finding

    def judge(self, group: Group, pages: Generator[Page]) -> Iterator[Reached | Judged]:
        """Say after each event of the group how far it is, and at the end what it is.

        Raises UnreadableStore where a page is not what was found sound.
        """
        told = Judged(Judgement())
        judge = Judge(self._rows, jobs=frozenset(group), on_finding=self._on_finding)
        for stored in self._events(group, pages, told):
            judge.state.position = stored.position - 1  # events of other jobs were left out
            judge.feed(stored)
            if stored.job in group:
                told.events += 1
                yield Reached(told.events)
        judge.state.position = self._last
        told.judgement = judge.judgement()
        yield told
        del judge
        gc.collect()  # a judge and its invariants refer to each other

    def _events(self, group: Group, pages: Generator[Page], told: Judged) -> Iterator[StoredEvent]:
        versions = dict.fromkeys(group, -1)
        at = -1
        try:
            with closing(pages):
                for page in pages:
                    for stored in self._opened(page, group, told):
                        before = versions.get(stored.job)
                        if stored.position <= at or before not in (None, stored.version - 1):
                            raise _changed(self._where, stored.position)
                        at = stored.position
                        if before is not None:  # of other jobs there is only a part
                            versions[stored.job] = stored.version
                        yield stored
                    if not page.whole:
                        raise _changed(self._where, at + 1)
        except (sqlite3.Error, DamagedPages, LedgerError) as error:
            raise UnreadableStore(
                f"expected to read {self._where} on, found: {one_line(error)}; verify it again"
            ) from error

    def _opened(self, page: Page, group: Group, told: Judged) -> Iterator[StoredEvent]:
        """Events of a page; the judge finds the rows of their evidence read."""
        for data, leaf in zip(page.data, page.leaves, strict=True):
            value = loads(data)
            body = value.pop("body")
            for name in ("operation", "cause", "key"):
                value.setdefault(name, None)
            named = body.get("segment")
            if isinstance(named, dict) and value["job"] in group:
                self._evidence((value["position"], value["type"], named), page.rows, told)
            yield StoredEvent(**value, body=body, data=data, leaf=leaf)

    def _evidence(self, named: Named, read: Mapping[int, Rows], told: Judged) -> None:
        position, type_, segment = named
        told.segments += 1
        rows = self._rows.keep(type_, segment, read.get(position))
        if rows is not None and rows.problem is not None:
            told.problems.append((named, rows))


def _changed(where: Path | str, position: int) -> UnreadableStore:
    return UnreadableStore(
        f"expected the events of {where} as they were a moment before, found others from position "
        f"{position} on: somebody changed the file meanwhile; verify it again"
    )


@dataclass(frozen=True)
class GroupOrders:
    """Groups that a process of its own is to judge, reading an SQLite file itself.

    Whatever it cannot do it leaves: the process ends, and who ordered does the rest, and says why.
    """

    path: Path
    last: int
    stretches: Sequence[Group]
    evidence: Path
    """Folder of the segments."""

    def blocks(self) -> Iterator[Reached | Judged]:
        """For each group how far it is, now and then, and what was said of it."""
        judge = GroupJudge(self.path, self.last, EvidenceFolder(self.evidence))
        for group in self.stretches:
            for said in judge.judge(group, self._pages(group)):
                if isinstance(said, Judged) or said.events % REPORT_EVENTS == 0:
                    yield said

    def _pages(self, group: Group) -> Generator[Page]:
        listed = stretches_of(self.last, share_of(group, self.last))
        # Evidence is read when its event is judged: here nobody else has time for it.
        yield from wanted_pages(self.path, frozenset(group), listed, None)


def share_of(group: Group, last: int) -> float:
    """Part of the events up to a position that are a group's."""
    return min(1.0, sum(group.values()) / (last + 1))

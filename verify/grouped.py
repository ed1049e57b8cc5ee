"""Judges a ledger: as it is read where it is small, else one group of jobs after the other.

What the judge remembers grows with the events that it has seen. So the stored bytes of a large
ledger are looked at first, all of them on all cores; then the jobs are judged in groups, each with
its own events and those that change what jobs share, and a group is forgotten before the next one
begins. Other processes read events and evidence of an SQLite file ahead; archives, tiles and
ledgers in a server are read here, once for each group. Whatever is found is found either way.
"""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from orjson import loads

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.envelope import SYSTEM_JOB, StoredEvent
from shiftbook.ledger.errors import LedgerError
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.evidence import EvidenceFolder, Rows
from shiftbook.verify.findings import Finding
from shiftbook.verify.integrity import Integrity, check_rows, check_whole, sound_events
from shiftbook.verify.judge import Judge, Judgement
from shiftbook.verify.read_ahead import ALONE_EVENTS, PAGE_EVENTS, Page, read_ahead
from shiftbook.verify.scan_block import Named
from shiftbook.verify.sources import EventSource
from shiftbook.verify.stored import DamagedPages, RawEvents, one_line

GROUP_EVENTS = 200_000
"""Events of the jobs that are judged together, at most, but for a job that has more: the judge
remembers some 0.5 kB of each."""

RARELY = 50_000
"""Objects made between two looks of Python's collector, while a judge remembers ever more: it
would walk all of that over and over, and there is nothing in it for it to collect."""


def judge_all(
    raw: EventSource,
    integrity: Integrity,
    rows: EvidenceFolder,
    job: str | None,
    until: int | None,
    on_finding: Callable[[Finding], None] | None = None,
    on_event: Callable[[int], None] | None = None,
) -> Judgement:
    """Send the range through the first pass and judge what is sound of it: all jobs, or one.

    ``on_finding`` is called with each finding of the judgement as it is made, ``on_event`` with
    the number of events that were judged, less one. Raises UnreadableStore.
    """
    with _rare_collections():
        if raw.count(until) > ALONE_EVENTS:
            return _Grouped(raw, integrity, rows, on_finding, on_event).judge(job, until)
        judge = Judge(rows, jobs=None if job is None else (job,), on_finding=on_finding)
        for stored in sound_events(raw, integrity, until):
            judge.feed(stored)
            if on_event is not None:
                on_event(stored.position)
        return judge.judgement()


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(max(RARELY, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _groups(versions: Mapping[str, int], job: str | None) -> list[dict[str, int]]:
    """Jobs that are judged together, with the number of events of each."""
    groups: list[dict[str, int]] = []
    room = 0
    for name, version in versions.items():
        if job not in (None, name):
            continue
        events = max(1, version + 1)
        if events > room:
            groups.append({})
            room = GROUP_EVENTS
        groups[-1][name] = events
        room -= events
    return groups


class _Grouped:
    """One verification of a large ledger, on its way."""

    def __init__(
        self,
        raw: EventSource,
        integrity: Integrity,
        rows: EvidenceFolder,
        on_finding: Callable[[Finding], None] | None,
        on_event: Callable[[int], None] | None,
    ) -> None:
        self._raw = raw
        self._integrity = integrity
        self._rows = rows
        self._on_finding = on_finding
        self._on_event = on_event
        self._judged = 0
        self._segments = 0
        self._problems: list[tuple[Named, Rows]] = []

    def judge(self, job: str | None, until: int | None) -> Judgement:
        """Look at all stored bytes, then judge."""
        integrity = self._integrity
        # Where one job is judged, the evidence of the others is looked at as well.
        integrity.evidence_apart = job is None
        check_rows(self._raw, integrity, until)
        last = integrity.report.sound_until
        judgement = Judgement()
        for group in _groups(integrity.versions, job) if last >= 0 else ():
            judgement.add(self._judge_group(group, last))
            gc.collect()  # a judge and its invariants refer to each other
        order = [name for name in integrity.versions if name in judgement.jobs]
        judgement.jobs = {name: judgement.jobs[name] for name in order}
        judgement.seen = [name for name in integrity.versions if name != SYSTEM_JOB]
        if integrity.evidence_apart:
            integrity.evidence_apart = False
            self._problems.sort(key=lambda problem: problem[0][0])
            integrity.take_segments(self._segments, self._problems)
        check_whole(self._raw, integrity, until)
        return judgement

    def _judge_group(self, group: Mapping[str, int], last: int) -> Judgement:
        judge = Judge(self._rows, jobs=frozenset(group), on_finding=self._on_finding)
        share = sum(group.values()) / (last + 1)
        for stored in self._events(group, last, min(1.0, share)):
            judge.state.position = stored.position - 1  # events of other jobs were left out
            judge.feed(stored)
            if stored.job in group:
                self._judged += 1
                if self._on_event is not None:
                    self._on_event(self._judged - 1)
        judge.state.position = last
        return judge.judgement()

    def _events(self, jobs: Collection[str], last: int, share: float) -> Iterator[StoredEvent]:
        versions = dict.fromkeys(jobs, -1)
        at = -1
        raw, names = self._raw, frozenset(jobs)
        path = getattr(raw, "path", None) or "what is verified"
        try:
            with closing(self._pages(raw, names, last, share)) as pages:
                for page in pages:
                    for stored in self._opened(page, names):
                        before = versions.get(stored.job)
                        if stored.position <= at or before not in (None, stored.version - 1):
                            raise _changed(path, stored.position)
                        at = stored.position
                        if before is not None:  # of other jobs there is only a part
                            versions[stored.job] = stored.version
                        yield stored
                    if not page.whole:
                        raise _changed(path, at + 1)
        except (sqlite3.Error, DamagedPages, LedgerError) as error:
            raise UnreadableStore(
                f"expected to read {path} on, found: {one_line(error)}; verify it again"
            ) from error

    def _pages(
        self, raw: EventSource, jobs: frozenset[str], last: int, share: float
    ) -> Generator[Page]:
        """The events of some jobs, read ahead by others where they can open the file too."""
        if isinstance(raw, RawEvents) and raw.keyed:
            yield from read_ahead(raw.path, jobs, last, self._integrity.folder, share=share)
            return
        page = Page()
        for data, leaf in raw.some(jobs, last):
            if leaf_hash(data) != leaf:
                page.whole = False
                break
            page.data.append(data)
            page.leaves.append(leaf)
            if len(page.data) == PAGE_EVENTS:
                yield page
                page = Page()
        yield page

    def _opened(self, page: Page, jobs: Collection[str]) -> Iterator[StoredEvent]:
        """Events of a page; the judge finds the rows of their evidence read."""
        for data, leaf in zip(page.data, page.leaves, strict=True):
            value = loads(data)
            body = value.pop("body")
            for name in ("operation", "cause", "key"):
                value.setdefault(name, None)
            named = body.get("segment")
            if isinstance(named, dict) and value["job"] in jobs:
                self._evidence((value["position"], value["type"], named), page.rows)
            yield StoredEvent(**value, body=body, data=data, leaf=leaf)

    def _evidence(self, named: Named, read: Mapping[int, Rows]) -> None:
        position, type_, segment = named
        self._segments += 1
        rows = self._rows.keep(type_, segment, read.get(position))
        if rows is not None and rows.problem is not None:
            self._problems.append((named, rows))


def _changed(path: Path | str, position: int) -> UnreadableStore:
    return UnreadableStore(
        f"expected the events of {path} as they were a moment before, found others from position "
        f"{position} on: somebody changed the file meanwhile; verify it again"
    )

"""Judges a ledger: as it is read where it is small, else one group of jobs after the other.

What the judge remembers grows with the events that it has seen. So the stored bytes of a large
ledger are looked at first, all of them on all cores; then the jobs are judged in groups, each with
its own events and those that change what jobs share, and a group is forgotten before the next one
begins. Of an SQLite file each core judges groups of its own, in a process of its own; where there
is one group alone, other processes read its events and evidence ahead. Archives, tiles and ledgers
in a server are read here, once for each group. Whatever is found is found either way.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.envelope import SYSTEM_JOB
from shiftbook.verify.evidence import EvidenceFolder, Rows
from shiftbook.verify.findings import Finding
from shiftbook.verify.group_judge import (
    Group,
    GroupJudge,
    GroupOrders,
    Judged,
    Reached,
    share_of,
)
from shiftbook.verify.integrity import Integrity, check_rows, check_whole, sound_events
from shiftbook.verify.judge import Judge, Judgement
from shiftbook.verify.read_ahead import ALONE_EVENTS, PAGE_EVENTS, Page, read_ahead
from shiftbook.verify.scan import shared
from shiftbook.verify.scan_block import Named
from shiftbook.verify.sources import EventSource
from shiftbook.verify.stored import RawEvents

GROUP_EVENTS = 200_000
"""Events of the jobs that are judged at one time, in all processes, but for a job that has more:
the judge remembers some 0.5 kB of each."""

MOST_PROCESSES = 4
"""Processes that judge at one time: each has some 80 MB of its own beside what it remembers."""

UNEVEN = 1.5
"""How many times its share of all events the largest group may have for groups to be judged by
processes of their own: above that one would judge alone, and nobody would read ahead for it."""

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


def _groups(
    versions: Mapping[str, int], job: str | None, processes: int = 1
) -> list[dict[str, int]]:
    """Jobs that are judged together, with the number of events of each.

    For ``processes`` there are smaller ones, and nearly as many for each.
    """
    events = {
        name: max(1, version + 1) for name, version in versions.items() if job in (None, name)
    }
    most = GROUP_EVENTS
    if processes > 1:
        total = sum(events.values())
        rounds = max(1, -(-total // GROUP_EVENTS))
        most = max(1, -(-total // (rounds * processes)))
    groups: list[dict[str, int]] = []
    room = 0
    for name, count in events.items():
        # Half a job more is as near to the size that was meant as half a job less.
        if room <= 0 or count > (room if processes == 1 else 2 * room):
            groups.append({})
            room = most
        groups[-1][name] = count
        room -= count
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
        if last >= 0:
            for told in self._judged(job, last):
                judgement.add(told.judgement)
                self._segments += told.segments
                self._problems += told.problems
        order = [name for name in integrity.versions if name in judgement.jobs]
        judgement.jobs = {name: judgement.jobs[name] for name in order}
        judgement.seen = [name for name in integrity.versions if name != SYSTEM_JOB]
        if integrity.evidence_apart:
            integrity.evidence_apart = False
            self._problems.sort(key=lambda problem: problem[0][0])
            integrity.take_segments(self._segments, self._problems)
        check_whole(self._raw, integrity, until)
        return judgement

    def _judged(self, job: str | None, last: int) -> Iterator[Judged]:
        """What is said of each group, in order."""
        versions = self._integrity.versions
        done = 0
        judged: set[str] = set()
        for group, told in self._judged_apart(job, last):
            for finding in told.judgement.findings if self._on_finding is not None else ():
                self._on_finding(finding)  # type: ignore[misc]
            done += told.events
            judged |= group.keys()
            yield told
        # What no other process could judge, or none should.
        left = {name: version for name, version in versions.items() if name not in judged}
        where = getattr(self._raw, "path", None) or "what is verified"
        judge = GroupJudge(where, last, self._rows, self._on_finding)
        for group in _groups(left, job):
            for said in judge.judge(group, self._pages(group, last)):
                if isinstance(said, Judged):
                    done += said.events
                    yield said
                else:
                    self._reached(done + said.events)

    def _judged_apart(self, job: str | None, last: int) -> Iterator[tuple[Group, Judged]]:
        """Groups that processes of their own judge; ends early where one cannot."""
        raw, folder = self._raw, self._integrity.folder
        processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        if not isinstance(raw, RawEvents) or not raw.keyed or folder is None or processes == 1:
            return
        groups = _groups(self._integrity.versions, job, processes)
        sizes = [sum(group.values()) for group in groups]
        if len(groups) < processes or max(sizes) * processes > UNEVEN * sum(sizes):
            return
        done = number = 0
        orders = GroupOrders(raw.path, last, groups, folder)
        for said in shared(orders, processes, Judged, Reached):
            if isinstance(said, Judged):
                done += said.events
                self._reached(done)
                yield groups[number], said
                number += 1
            else:
                self._reached(done + said.events)

    def _reached(self, events: int) -> None:
        if self._on_event is not None:
            self._on_event(events - 1)

    def _pages(self, group: Group, last: int) -> Generator[Page]:
        """The events of some jobs, read ahead by others where they can open the file too."""
        raw, jobs = self._raw, frozenset(group)
        if isinstance(raw, RawEvents) and raw.keyed:
            share = share_of(group, last)
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

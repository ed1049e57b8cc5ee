"""The state of a ledger without reading all of it: what is asked for is folded when it is asked.

A job's state depends on that job's events alone, and what jobs share (leases, quarantine) on a few
types of event alone. So the shared part is folded at once, from the events of these types, and a
job when somebody looks at it, from its snapshot or its first event on. The result is the state
that a fold over all events gives.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Protocol

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.snapshots import SHARED, Shared, Snapshot, Snapshots
from shiftbook.ledger.state import FOLDED_TYPES, SHARED_TYPES, LedgerState
from shiftbook.ledger.tables import StoredRow

KEPT_JOBS = 64
"""Jobs in memory at most; the one that was looked at longest ago is folded again when needed."""

SNAPSHOT_EVENTS = 512
"""Events of a job after its snapshot before a new one is written: some 5 ms of folding."""

SNAPSHOT_SHARE = 16
"""And at least this part of all its events, so that a long job is not written over and over."""

SHARED_EVENTS = 8_192
"""Events of the ledger after the shared snapshot before a new one is written."""

WALK_EVENTS = 1_024
"""A step forward of so many events is read as it stands; for a longer one, each job's own."""


class Rows(Protocol):
    """How events are read: by position, of one job or of some types, in order."""

    def __call__(
        self,
        after: int,
        until: int,
        *,
        job: str | None = None,
        types: Collection[str] | None = None,
        limit: int | None = None,
    ) -> Iterator[StoredRow]: ...


@dataclass
class _Known:
    """A job in memory: its state, its last event, and how much its snapshot on disk lacks."""

    state: JobState
    position: int
    leaf: bytes
    unsaved: int = 0
    aside: LedgerState = field(init=False)
    """A ledger of this job alone, whose leases and quarantine nobody looks at."""

    def __post_init__(self) -> None:
        self.aside = LedgerState(jobs={self.state.name: self.state})


class FoldedJobs(MutableMapping[str, JobState]):
    """The jobs of a state, each folded when it is looked at."""

    def __init__(self, folding: Folding) -> None:
        self._folding = folding

    def __getitem__(self, name: str) -> JobState:
        return self._folding.job(name)

    def __setitem__(self, name: str, job: JobState) -> None:
        raise TypeError("the state of a ledger is not to be changed; copy it first")

    def __delitem__(self, name: str) -> None:
        raise TypeError("the state of a ledger is not to be changed; copy it first")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._folding.has(name)

    def __iter__(self) -> Iterator[str]:
        return self._folding.names()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[type[dict[str, JobState]], tuple[dict[str, JobState]]]:
        # Sent to another process or copied, they are all folded, and stand on their own.
        return dict, (dict(self.items()),)

    def __repr__(self) -> str:
        return f"FoldedJobs({', '.join(self)})"


class Folding:
    """Folds a ledger forward, as far as it is looked at. Not to be shared between threads."""

    def __init__(self, rows: Rows, names: Callable[[], list[str]], snapshots: Snapshots) -> None:
        self._rows = rows
        self._names = names
        self._snapshots = snapshots
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._shared_at = -1
        """Position up to which the shared part on disk was folded."""
        self.state = LedgerState(jobs=FoldedJobs(self))

    def advance(self, size: int) -> LedgerState:
        """Fold to a size; the same state object each time. An error leaves it unusable."""
        last = size - 1
        if last <= self.state.position:
            return self.state
        if self.state.position < 0:
            self._start(last)
        elif last - self.state.position <= WALK_EVENTS:
            self._walk(last)
        else:
            self._jump(last)
        self.state.position = last
        self._keep(last)
        return self.state

    # -- one job ---------------------------------------------------------------------------

    def job(self, name: str) -> JobState:
        """State of a job at the position; raise KeyError where it has no event yet."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._load(name)
            self._keep_job(name, known)
            if len(self._known) > KEPT_JOBS:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        return known.state

    def has(self, name: str) -> bool:
        """Say whether a job has an event up to the position."""
        return name in self._known or bool(
            list(self._rows(-1, self.state.position, job=name, limit=1))
        )

    def names(self) -> Iterator[str]:
        """Jobs with an event up to the position, in the order of their first ones."""
        return (name for name in self._names() if self.has(name))

    def _load(self, name: str) -> _Known:
        snapshot = self._snapshots.job(name)
        if snapshot is not None and self._stands(snapshot, name):
            known = _Known(snapshot.state, snapshot.position, snapshot.leaf)
        else:
            known = _Known(JobState(name), -1, b"")
        for row in self._rows(known.position, self.state.position, job=name):
            _take(known, row)
        if known.position < 0:
            raise KeyError(name)
        return known

    def _stands(self, snapshot: Snapshot[JobState] | Snapshot[Shared], job: str = "") -> bool:
        at = snapshot.position
        if not 0 <= at <= self.state.position:
            return False
        row = next(self._rows(at - 1, at, limit=1), None)
        return snapshot.stands(row) and (not job or (row is not None and row.job == job))

    # -- forward ---------------------------------------------------------------------------

    def _start(self, last: int) -> None:
        self.state.position = last
        snapshot = self._snapshots.shared()
        if snapshot is not None and self._stands(snapshot):
            self._shared_at = snapshot.position
            self.state.leases = snapshot.state.leases
            self.state.quarantine = snapshot.state.quarantine
            self.state.newer = snapshot.state.newer
        self._share(self._shared_at, last)

    def _share(self, after: int, last: int) -> None:
        for row in self._rows(after, last, types=SHARED_TYPES):
            self._apply_shared(row.event())

    def _apply_shared(self, stored: StoredEvent) -> None:
        aside = LedgerState(leases=self.state.leases, quarantine=self.state.quarantine)
        aside.apply(stored)
        self.state.newer = self.state.newer or aside.newer

    def _walk(self, last: int) -> None:
        for row in self._rows(self.state.position, last):
            known = self._known.get(row.job)
            if known is not None:
                _take(known, row)
            if any(name in row.data for name in _SHARED_NAMES):
                stored = row.event()
                if stored.type in SHARED_TYPES:
                    self._apply_shared(stored)

    def _jump(self, last: int) -> None:
        before = self.state.position
        for name, known in self._known.items():
            for row in self._rows(before, last, job=name):
                _take(known, row)
        self._share(before, last)

    # -- snapshots -------------------------------------------------------------------------

    def _keep(self, last: int) -> None:
        for name, known in self._known.items():
            self._keep_job(name, known)
        if last - self._shared_at < SHARED_EVENTS:
            return
        row = next(self._rows(last - 1, last, limit=1), None)
        if row is not None:
            state = Shared(self.state.leases, self.state.quarantine, self.state.newer)
            self._snapshots.keep(SHARED, Snapshot(last, row.leaf, state))
        self._shared_at = last

    def _keep_job(self, name: str, known: _Known) -> None:
        if known.unsaved >= max(SNAPSHOT_EVENTS, known.state.version // SNAPSHOT_SHARE):
            self._snapshots.keep(name, Snapshot(known.position, known.leaf, known.state))
            known.unsaved = 0


_SHARED_NAMES = tuple(name.encode() for name in SHARED_TYPES)


_NAMES_END = re.compile(
    rb'"recorded_ns":(\d+),"schema":\d+,"sequence":\d+,"type":"(\w+)","version":\d+,'
    rb'"writer":"[^"\\]*"\}\Z'
)
"""The end of an envelope as it is serialised: sorted keys, the body before these."""

_FOLDED = frozenset(name.encode() for name in FOLDED_TYPES)


def _take(known: _Known, row: StoredRow) -> None:
    """Take an event of a job into its state; what jobs share is left to others."""
    # Half of a job's events change its counts alone, and to parse one takes longer than this look.
    end = _NAMES_END.match(row.data, max(0, row.data.rfind(b'"recorded_ns":')))
    if end is not None and end[2] not in _FOLDED:
        known.state.version = row.version
        known.state.last_event_ns = int(end[1])
    else:
        known.aside.apply(row.event())
    known.position, known.leaf = row.position, row.leaf
    known.unsaved += 1

"""The judgement: folds a stream of events and shows each, with the state before, to invariants."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cache

from pydantic import ValidationError

from shiftbook.ledger.envelope import SYSTEM_JOB, StoredEvent
from shiftbook.ledger.errors import InvalidEvent, ShiftbookError
from shiftbook.ledger.events.base import REGISTRY, Event, Segment, UnknownEvent
from shiftbook.ledger.events.job import JobOpened
from shiftbook.ledger.events.lease import LeaseGranted
from shiftbook.ledger.events.training import BatchConsumed, SamplesDrawn, UpdateApplied
from shiftbook.ledger.long_fields import LONG, brought_back
from shiftbook.ledger.state import SHARED_TYPES, LedgerState
from shiftbook.verify.coverage import Coverage, Row
from shiftbook.verify.evidence import RowSource
from shiftbook.verify.findings import Finding, FindingList
from shiftbook.verify.invariants import INVARIANTS, NOT_JUDGED
from shiftbook.verify.invariants.base import End, Invariant, Step
from shiftbook.verify.invariants.operations import open_operations
from shiftbook.verify.lineage import Mark, Track, mark_of_save

MAX_UNKNOWN = 64
"""Unknown types that are named for a job."""

_TRAINING = (SamplesDrawn, BatchConsumed, UpdateApplied)

NEVER_OPENED = "the job has no JobOpened"

FIRST_PASS = frozenset({"integrity", "evidence", "heads", "outside"})
"""Rows of the coverage table that the first pass fills, for all jobs together."""


@dataclass
class Unknown:
    """Events of one unknown type in a job."""

    first: int
    """Position of the first one."""
    count: int = 0


@dataclass
class Bench:
    """One job before the judge: its lineage and its invariants."""

    track: Track
    invariants: list[Invariant]
    first: int
    """Position of its first event."""
    events: int = 0
    trained: bool = False
    """True once something of the training record was seen."""
    unknown: dict[str, Unknown] = field(default_factory=dict)
    """What there is of each unknown type."""
    halted: str = ""
    """Why the judgement ended before the range did; empty where it did not."""
    holding: bool = False
    """Whether findings that are made now are held back."""
    held: FindingList = field(default_factory=FindingList)
    """Findings from before a JobOpened: they count once it comes, and without it mean nothing."""
    _looking: dict[type[Event], list[Invariant]] = field(default_factory=dict)

    def note_unknown(self, name: str, position: int) -> None:
        """Count an event of an unknown type."""
        if name in self.unknown or len(self.unknown) < MAX_UNKNOWN:
            self.unknown.setdefault(name, Unknown(position)).count += 1

    def looking_at(self, kind: type[Event]) -> list[Invariant]:
        """The invariants that look at events of a type."""
        known = self._looking.get(kind)
        if known is None:
            known = self._looking[kind] = [
                i for i in self.invariants if i.sees is None or issubclass(kind, i.sees)
            ]
        return known


@dataclass(frozen=True)
class JudgedJob:
    """What was said of one job, at the end of the range."""

    rows: list[Row]
    """Its part of the coverage table."""
    required: frozenset[str]
    """Invariants that its plan requires."""
    planned: bool
    begun: bool
    """False where nothing stands but bundles that were registered for it."""
    active: bool
    """Whether it recorded a training step or an operation."""
    unknown: dict[str, Unknown]
    """What there is of each unknown type."""
    open_operations: list[str]
    """What is open at the head of a job that is not closed, in words."""
    closed: bool = True
    """Whether the job was closed within the range."""
    halted: str = ""
    """Why the judgement ended before the range did; empty where it did not."""
    events: int = 0
    first: int = 0
    """Position of its first event."""


@dataclass
class Judgement:
    """What was said of all jobs that were judged."""

    jobs: dict[str, JudgedJob] = field(default_factory=dict)
    findings: FindingList = field(default_factory=FindingList)
    seen: list[str] = field(default_factory=list)
    """All jobs of the ledger, judged or not, in the order in which they began."""

    @property
    def open_operations(self) -> dict[str, list[str]]:
        """What is open at the head, in words, by job."""
        return {name: job.open_operations for name, job in self.jobs.items() if job.open_operations}

    def add(self, other: Judgement) -> None:
        """Take in what was said of other jobs."""
        self.jobs |= other.jobs
        self.findings.extend(other.findings)


class Judge:
    """Feed events in the order of their positions, then ``close``. Holds no event and no row.

    ``jobs`` limits whose events are judged; the fold takes in all of them, since leases are shared.
    ``on_finding`` is called as each finding is made.
    """

    def __init__(
        self,
        rows: RowSource,
        *,
        jobs: Collection[str] | None = None,
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        self.state = LedgerState()
        self.findings = FindingList()
        self.benches: dict[str, Bench] = {}
        self._rows = rows
        self._jobs = jobs
        self._on_finding = on_finding
        self._closed: Coverage | None = None
        self._at: int | None = None
        """Position of the event that is looked at, or of the last one."""
        self._halted = ""
        """Why nothing can be judged any more; empty while it can."""

    def feed(self, stored: StoredEvent) -> None:
        """Judge the next event and take it into the fold."""
        self._at = stored.position
        event, problem = _read(stored)
        bench = self._bench(stored)
        newer = _newer(stored) if type(event) is UnknownEvent and problem is None else ""
        if newer and stored.type in SHARED_TYPES:
            self._halted = self._halted or newer  # what other jobs may use is not known any more
        if bench is not None:
            bench.halted = bench.halted or newer or self._halted
            bench.events += 1
            if not bench.halted:
                self._judge(bench, stored, event, problem)
        self._fold(stored, event, bench, problem)

    def close(self) -> Coverage:
        """Judge what is left at the end of the range; the coverage table. Call it once."""
        if self._closed is None:
            self._closed = Coverage(
                [row for name, bench in self.benches.items() for row in self._close(name, bench)]
            )
        return self._closed

    def judgement(self) -> Judgement:
        """What is said of the jobs, after ``close``."""
        rows: dict[str, list[Row]] = {name: [] for name in self.benches}
        for row in self.close().rows:
            rows[row.job].append(row)
        jobs = {name: self._judged(name, bench, rows[name]) for name, bench in self.benches.items()}
        seen = [name for name in self.state.jobs if name != SYSTEM_JOB]
        return Judgement(jobs, self.findings, seen)

    def _judged(self, name: str, bench: Bench, rows: list[Row]) -> JudgedJob:
        job = self.state.job(name)
        return JudgedJob(
            rows=rows,
            required=frozenset(job.plan.required_invariants if job.plan else ()),
            planned=job.plan is not None,
            begun=job.status != "unopened" or bench.events > len(job.registered),
            active=bool(bench.trained or job.operations or job.syncs),
            unknown=bench.unknown,
            open_operations=[] if job.status == "closed" or bench.halted else open_operations(job),
            closed=job.status == "closed",
            halted=bench.halted,
            events=bench.events,
            first=bench.first,
        )

    def settled(self, job: str) -> bool:
        """Whether nothing that is still to come changes what is said of a job."""
        return self.state.job(job).status == "closed" or bool(self.benches[job].halted)

    def report(self, finding: Finding) -> None:
        """Keep a finding, with where it was found."""
        self._keep(replace(finding, found_at=self._at))

    def _keep(self, finding: Finding) -> None:
        if self.findings.add(finding) and self._on_finding is not None:
            self._on_finding(finding)

    def _bench(self, stored: StoredEvent) -> Bench | None:
        job = stored.job
        if job == SYSTEM_JOB or (self._jobs is not None and job not in self._jobs):
            return None
        if job not in self.benches:
            invariants = [make(job, self._report_of(job)) for make in INVARIANTS]
            self.benches[job] = Bench(Track(self._mark_of), invariants, stored.position)
        return self.benches[job]

    def _report_of(self, job: str) -> Callable[[Finding], None]:
        def report(finding: Finding) -> None:
            bench = self.benches[job]
            if not bench.holding:
                self.report(finding)
            else:
                bench.held.add(replace(finding, found_at=self._at))

        return report

    def _mark_of(self, job: str, bundle: str) -> Mark | None:
        """Where a bundle of another job stood in its lineage, or what its save alone says."""
        if job in self.benches:
            return self.benches[job].track.marks.get(bundle)
        saved = self.state.jobs[job].bundles.get(bundle) if job in self.state.jobs else None
        return None if saved is None else mark_of_save(saved)

    def _judge(self, bench: Bench, stored: StoredEvent, event: Event, problem: str | None) -> None:
        kind = type(event)
        if kind in _TRAINING:
            bench.trained = True
        elif kind is UnknownEvent and problem is None:
            bench.note_unknown(f"{stored.type} (schema {stored.schema})", stored.position)
        # Rows are read once for all invariants and dropped with the event.
        segment = getattr(event, "segment", None) if _may_bind(kind) else None
        rows = self._rows(stored.type, segment) if isinstance(segment, Segment) else None
        job = self.state.job(stored.job)
        if kind is JobOpened:
            for finding in bench.held:
                self._keep(finding)
            bench.held = FindingList()
        # Devices are shared, so who is given one is judged whoever asks; and a body that nobody
        # can read is wrong in itself.
        told = kind in (JobOpened, LeaseGranted) or problem is not None
        bench.holding = job.opened is None and not told
        # Only the invariants see its long lists: neither the track nor the fold holds them.
        listed = kind in LONG and rows is not None and rows.problem is None
        whole = brought_back(event, rows.columns) if listed and rows is not None else event
        step = Step(self.state, job, bench.track, stored, whole, rows, problem)
        for invariant in bench.looking_at(kind):
            invariant.feed(step)
        bench.track.apply(stored, event, job.plan, rows)

    def _fold(
        self, stored: StoredEvent, event: Event, bench: Bench | None, problem: str | None
    ) -> None:
        if problem is None:
            try:
                self.state.apply(stored, event)
                return
            except (ShiftbookError, ValidationError) as error:
                # An amendment that makes the plan invalid; the plan stays as it was.
                if bench is not None and not bench.halted:
                    legality = bench.invariants[0]
                    legality.flag(
                        stored.position,
                        expected=f"a {stored.type} that leaves a valid state",
                        found=" ".join(str(error).split())[:200],
                        cause="the event names a field or value that the plan cannot hold",
                        action="Amend the plan with a value that its model accepts.",
                    )
        self.state.position = stored.position
        if stored.job in self.state.jobs:
            self.state.jobs[stored.job].version = stored.version

    def _close(self, name: str, bench: Bench) -> list[Row]:
        job = self.state.job(name)
        end = End(self.state, job, bench.track, self.state.position)
        required = set(job.plan.required_invariants) if job.plan else set()
        rows = []
        unjudged = bench.halted or (NEVER_OPENED if job.opened is None else "")
        for invariant in bench.invariants:
            if not unjudged:
                invariant.close(end)
            for row in invariant.rows(end):
                if unjudged:
                    row.missing[unjudged] = 1
                if job.opened is None:
                    # What was compared without a plan, and did not fit it, says nothing about it.
                    row.checks, row.findings = 0, self.findings.count(name, row.invariant)
                row.required = row.invariant in required
                rows.append(row)
        for id_, (title, why) in NOT_JUDGED.items():
            rows.append(Row(name, id_, title, required=id_ in required, missing={why: 1}))
        known = {row.invariant for row in rows}
        for id_ in sorted(required - known - FIRST_PASS):
            why = "this build knows no invariant of that name"
            rows.append(Row(name, id_, "", required=True, missing={why: 1}))
        return rows


@cache
def _may_bind(kind: type[Event]) -> bool:
    """Whether events of a type have a field for a segment; a model is slow to say no itself."""
    return "segment" in kind.model_fields


def _read(stored: StoredEvent) -> tuple[Event, str | None]:
    try:
        return stored.parsed(), None
    except (InvalidEvent, ValidationError) as error:
        # ValidationError: a body that is not even an UnknownEvent, such as one that is no object.
        problem = " ".join(str(error).split())[:200]
        return UnknownEvent(), problem


def _newer(stored: StoredEvent) -> str:
    """Why nothing after an event can be judged that a newer version wrote; empty for others."""
    model = REGISTRY.get(stored.type)
    if model is None or model is UnknownEvent:
        return ""
    return (
        f"{stored.type} at position {stored.position} has schema {stored.schema}, which a newer "
        f"version wrote (this build reads up to {model.schema_})"
    )

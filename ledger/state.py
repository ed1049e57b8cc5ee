"""The fold: events to the state of every job and of the ledger, one for gate, CLI and judge."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field

# Imported for their rules, which they register.
from shiftbook.ledger import fold_jobs, fold_moves, fold_syncs  # noqa: F401
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.fold_rules import RULES
from shiftbook.ledger.job_state import JobState, LeaseState

SHARED_TYPES = frozenset(
    {
        "LeaseGranted",
        "LeaseReleased",
        "LeaseExpired",
        "ReallocationPoisoned",
        "QuarantineLifted",
    }
)
"""Types of event that change what jobs share; all others change the state of their job alone."""

FOLDED_TYPES = frozenset(RULES)
"""Types that change more than a job's counts."""


@dataclass
class LedgerState:
    """All jobs, all leases, up to and with ``position``."""

    position: int = -1
    jobs: MutableMapping[str, JobState] = field(default_factory=dict)
    leases: dict[str, LeaseState] = field(default_factory=dict)
    quarantine: dict[str, str] = field(default_factory=dict)
    """Device to the operation that poisoned it."""
    newer: str | None = None
    """The first event about what jobs share that a newer version wrote, in words."""

    @property
    def size(self) -> int:
        """Number of events folded, and the position of the next one."""
        return self.position + 1

    def job(self, name: str) -> JobState:
        """State of a job; an unopened one where no event names it."""
        return self.jobs.get(name) or JobState(name)

    def apply(self, stored: StoredEvent, event: Event | None = None) -> None:
        """Take in the next event. Events of unknown type change nothing but the counts; one of
        a known type in a newer schema is noted, since what follows from it is not known.

        ``event`` is its body as parsed, where the caller has parsed it already.
        """
        job = self.jobs.get(stored.job)
        if job is None:
            job = self.jobs[stored.job] = JobState(stored.job)
        rule = RULES.get(stored.type)
        if rule is not None:
            event = event or stored.parsed()
            if type(event).__name__ == stored.type:
                rule(self, job, stored, event)
            else:
                self._note_newer(job, stored)
        self.position = stored.position
        job.version = stored.version
        job.last_event_ns = stored.recorded_ns

    def _note_newer(self, job: JobState, stored: StoredEvent) -> None:
        words = f"{stored.type} at position {stored.position} in schema {stored.schema}"
        job.newer = job.newer or words
        if stored.type in SHARED_TYPES:
            self.newer = self.newer or words


def fold(events: Iterable[StoredEvent], state: LedgerState | None = None) -> LedgerState:
    """Fold events, in order, onto a state (a new one where none is given)."""
    state = state or LedgerState()
    for stored in events:
        state.apply(stored)
    return state

"""Which events concern a component: by its name, its replicas, or because its devices changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.state import LedgerState

NAMED = ("component", "bottleneck_before", "bottleneck_after", "source", "target")
LISTED = ("components", "stalls")
REPLICAS = ("replica", "target", "receiver")
REPLICA_LISTS = ("targets", "custody", "outcomes", "edges")


@dataclass(frozen=True, slots=True)
class Concerns:
    """A component, and the names of its replicas in every topology that it ever had."""

    component: str
    replicas: frozenset[str]
    operations: frozenset[str]
    """Reallocations that change the component's devices."""
    known: bool
    """False for a component that no topology ever named, with or without devices."""

    @classmethod
    def of(cls, state: LedgerState, component: str, job: str | None = None) -> Concerns:
        """Collect the component's replicas over one job, or over all jobs of a ledger."""
        names: set[str] = set()
        moves: set[str] = set()
        jobs = state.jobs.values() if job is None else [state.job(job)]
        # All of them, whichever is the first to know it.
        known = [cls._collect(job_state, component, names, moves) for job_state in jobs]
        return cls(component, frozenset(names), frozenset(moves), any(known))

    @staticmethod
    def _collect(job: JobState, component: str, names: set[str], moves: set[str]) -> bool:
        topologies = [job.topology]
        if job.opened is not None:
            topologies.append(job.opened.topology)
        for operation in job.operations.values():
            before, after = operation.before, operation.after
            topologies += [before, after]
            if before.replicas(component) != after.replicas(component):
                moves.add(operation.operation)
        for topology in topologies:
            names.update(replica.name for replica in topology.replicas(component))
        names.update(
            name for name, replica in job.replicas.items() if replica.component == component
        )
        return bool(names) or any(component in topology.components for topology in topologies)

    def event(self, event: StoredEvent) -> bool:
        """Say whether an event names the component or a replica, or belongs to a move of it."""
        return event.operation in self.operations or self._names(event.body)

    def _names(self, body: dict[str, Any]) -> bool:
        if any(body.get(name) == self.component for name in NAMED):
            return True
        if any(self.component in (body.get(name) or ()) for name in LISTED):
            return True
        if any(body.get(name) in self.replicas for name in REPLICAS if body.get(name)):
            return True
        for name in REPLICA_LISTS:
            for item in body.get(name) or ():
                if item in self.replicas if isinstance(item, str) else self._names(item):
                    return True
        return False

"""Which events concern a component: by its name, its replicas, or because its devices changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.state import LedgerState
from shiftbook.ledger.topology import Topology

NAMED = ("component", "bottleneck_before", "bottleneck_after", "source", "target")
LISTED = ("components", "stalls")
REPLICAS = ("replica", "target", "receiver")
REPLICA_LISTS = ("targets", "custody", "outcomes", "edges")


@dataclass(frozen=True, slots=True)
class Concerns:
    """A component, and the names of its replicas in every topology that it ever had."""

    component: str
    replicas: frozenset[str]

    @classmethod
    def of(cls, state: LedgerState, component: str) -> Concerns:
        """Collect the component's replicas over all jobs of a ledger."""
        names: set[str] = set()
        for job in state.jobs.values():
            topologies = [job.topology]
            if job.opened is not None:
                topologies.append(job.opened.topology)
            for operation in job.operations.values():
                topologies += [operation.before, operation.after]
            for topology in topologies:
                names.update(replica.name for replica in topology.replicas(component))
            names.update(
                name for name, replica in job.replicas.items() if replica.component == component
            )
        return cls(component, frozenset(names))

    def event(self, event: StoredEvent) -> bool:
        """Say whether an event names the component or a replica, or changes its devices."""
        body = event.body
        before, after = self._devices(body.get("before")), self._devices(body.get("after"))
        return before != after or self._names(body)

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

    def _devices(self, topology: Any) -> Any:
        if not isinstance(topology, dict) or "components" not in topology:
            return None
        return Topology.model_validate(topology).placement().get(self.component, [])

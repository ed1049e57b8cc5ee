"""Events of processes and of the ledger's own reachability."""

from __future__ import annotations

from shiftbook.ledger.events.base import Count, Event


class ReplicaStarted(Event):
    """A process serves a replica."""

    attempt: str
    component: str
    replica: str
    incarnation: str
    devices: tuple[str, ...]
    pid: Count
    node: str
    start_s: float | None = None


class ReplicaLost(Event):
    """A replica's process is gone, or is no longer counted on."""

    attempt: str
    component: str
    replica: str
    incarnation: str
    cause: str
    owed: tuple[str, ...] = ()
    """Requests it owed, ``uid#turn``; they are handed to another replica."""


class NodeLost(Event):
    """A node no longer answers; its processes may still run until their device locks are free."""

    node: str
    devices: tuple[str, ...]
    cause: str


class LedgerUnreachable(Event):
    """The ledger, or the store of its evidence, could not be reached; records were spooled.
    Written when it is back."""

    since_ns: Count
    spooled: Count
    cause: str
    evidence: str | None = None
    """Folder of the store that segments of the records waited for, without credentials; absent
    where none did."""


class LedgerRestored(Event):
    """The spool of a writer has been appended, in order."""

    since_ns: Count
    outage_s: float
    spooled: Count

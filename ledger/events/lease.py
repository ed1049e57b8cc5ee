"""Events of leases: who owns which devices."""

from __future__ import annotations

from shiftbook.ledger.events.base import Event


class LeaseGranted(Event):
    """Devices belong to the job from here; this event's position is the lease's epoch."""

    devices: tuple[str, ...]
    holder: str


class LeaseReleased(Event):
    """The job gives devices back."""

    devices: tuple[str, ...]
    holder: str
    reason: str


class LeaseExpired(Event):
    """The holder's death was confirmed (its device locks were free); the devices are free."""

    devices: tuple[str, ...]
    holder: str
    evidence: str

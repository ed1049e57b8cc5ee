"""Events of safe mode and of verdicts."""

from __future__ import annotations

from typing import Literal

from shiftbook.ledger.events.base import Count, Event, Sha256
from shiftbook.ledger.topology import Topology


class SafeModeEntered(Event):
    """Moves stop: the last valid topology is frozen and the training goes on."""

    reason: str
    by: str
    topology: Topology


class SafeModeLeft(Event):
    """Moves are allowed again."""

    by: str
    reason: str


class QuarantineLifted(Event):
    """An operator looked at devices that a move had poisoned; they may be used again."""

    devices: tuple[str, ...]
    by: str
    reason: str


class DivergenceFlagged(Event):
    """The verifier holds something against this ledger.

    Schema 2 says how grave it is; schema 1 is lifted as the graver, ``stop``.
    """

    schema_ = 2

    severity: Literal["stop", "warn"]
    """``stop``: the policy may be another than was meant; ``warn``: the record is untidy."""
    invariant: str
    at: Count
    expected: str
    found: str
    positions: tuple[Count, ...]


class VerificationPassed(Event):
    """A verdict without findings over a range of positions."""

    first: Count
    last: Count
    head: Sha256
    """Hash of the last event's leaf."""
    checked: tuple[str, ...]
    not_checked: tuple[str, ...]

"""Events of safe mode and of verdicts."""

from __future__ import annotations

from typing import Literal

from shiftbook.ledger.events.base import Count, Event, Part, Segment, Sha256
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


class ShadowDifference(Part):
    """The first thing that came out otherwise in a shadow."""

    iteration: Count
    component: str
    kind: str
    """``sample``, ``number``, ``tensor``, ``root``, or ``test`` where the test raised the alarm."""
    name: str
    what: str
    live: str
    shadow: str
    position: Count | None = None
    """Of the live run's event."""


class ShadowMean(Part):
    """Mean of a measure over a window, on both sides."""

    live: float
    shadow: float


class ShadowCompared(Event):
    """A static schedule ran a window of iterations again, from the live run's bundle.

    Where bits are promised both sides must be equal. Elsewhere ``measures`` and the rows uid,
    live and shadow (rewards of the first iteration) of the segment are what the test took in.
    """

    bundle: Sha256
    iteration: Count
    """First iteration of the window."""
    iterations: Count
    last_update: Count
    """Position of the UpdateApplied of its last iteration: the record that was compared."""
    method: Literal["bits", "test"]
    agreed: bool
    observations: Count
    """What was compared: samples, numbers, tensors and roots."""
    target: str
    """Python path of the program that ran."""
    conditions: str
    stack: str
    wall_s: float
    difference: ShadowDifference | None = None
    alpha: float | None = None
    """Bound on the probability that the test ever raises a false alarm."""
    measures: dict[str, ShadowMean] | None = None
    log_evidence: dict[str, float] | None = None
    """Natural logarithm of the evidence against equal laws, by measure, this window included."""
    segment: Segment | None = None

"""Events of a reallocation, from the proposal to the realised gain."""

from __future__ import annotations

from typing import Literal

from shiftbook.ledger.events.base import Count, Event, Hex128, Part
from shiftbook.ledger.plan import TrainingView
from shiftbook.ledger.topology import Topology

Strategy = Literal["pause", "reshard", "reboot"]


class Interval(Part):
    """Closed interval, in the unit of the value it belongs to."""

    low: float
    high: float


class Candidate(Part):
    """A topology that the planner weighed."""

    after: Topology
    strategy: Strategy
    predicted_end_s: float
    """Predicted time to the end of the iteration with this move, its cost included."""
    predicted_gain_s: float
    predicted_cost_s: float
    probability: float
    """Probability that the move beats staying, 0 to 1."""
    chosen: bool = False
    rejected_because: str | None = None


class ReallocationProposed(Event):
    """A move is proposed, with everything that speaks for and against it."""

    attempt: str
    before: Topology
    after: Topology
    strategy: Strategy
    sees: TrainingView
    candidates: tuple[Candidate, ...]
    bottleneck_before: str
    bottleneck_after: str
    predicted_throughput: float
    """Verified samples a second after the move."""
    predicted_gain_s: float
    gain_interval: Interval
    predicted_cost_s: float
    horizon_s: float
    model_version: Count
    since_last_move_s: float | None = None
    owed: dict[str, Count] = {}
    """Units that each component owes or expects at this moment."""
    restoring: bool = False
    """True for a move back to the last valid topology; safe mode allows only these."""
    window: Count | None = None
    """Position of the WindowObserved event that the decision used."""
    proposer: Literal["scheduler", "operator"] = "scheduler"
    """An operator's move owes no predicted gain and waits for no cooldown."""


class ReallocationRejected(Event):
    """A rule refused the proposal."""

    by: str
    rule: str
    reason: str


class ReallocationAbandoned(Event):
    """The move was given up before anything was quiesced."""

    reason: str


class ReallocationGranted(Event):
    """Permission to run the operation; this event's position is the fencing epoch."""

    devices: tuple[str, ...]
    step_limit_s: float
    controller: str = ""
    """Who holds the grant: name, host and pid, as the controller claims them."""
    mover: str | None = None
    """Entry point of ``shiftbook.movers``, or ``module:function``: how recovery finds the mover
    of a controller that died."""


class OperationTakenOver(Event):
    """Recovery takes an operation from a controller presumed dead: a new fencing epoch.

    This event's position is the operation's epoch from now on, so every earlier grant is stale.
    """

    devices: tuple[str, ...]
    previous_epoch: Count
    reason: str
    controller: str = ""


class Custody(Part):
    """What one replica handed over."""

    replica: str
    incarnation: str
    requests: tuple[str, ...]
    """``uid#turn`` of each request it owed."""
    partial_tokens: Count
    receiver: str
    """Replica or queue that owes them now."""


class ReallocationQuiesced(Event):
    """The sources stopped taking work and handed over what they owed."""

    custody: tuple[Custody, ...]
    kv_tokens_lost: Count
    quiesce_s: float


class ReallocationTransferred(Event):
    """State arrived at its new place; the source still holds its own."""

    moved_bytes: Count
    transfer_s: float
    strategy: Strategy
    parts: dict[str, Count] = {}
    """Bytes by what they were (weights, requests, snapshot)."""


class ReallocationVerified(Event):
    """Fingerprints of the state before and after agree: the point of no return."""

    before: dict[str, Hex128]
    after: dict[str, Hex128]


class ReallocationCommitted(Event):
    """The new topology is in force."""

    after: Topology
    moved_bytes: Count
    stall_s: float
    kv_tokens_lost: Count
    stalls: dict[str, float] = {}
    """Seconds by component, from its last unit of work before the move to its first after."""


class ReallocationRolledBack(Event):
    """The move was undone; written only after the processes were seen in the old topology."""

    cause: str
    restored: Topology
    stall_s: float | None = None


class ReallocationPoisoned(Event):
    """Neither forward nor back was possible; the devices are in quarantine."""

    devices: tuple[str, ...]
    cause: str


class GainRealized(Event):
    """What a committed move brought, against a stated counterfactual."""

    baseline_window_s: float
    observed_window_s: float
    raw_gain_s: float
    counterfactual: str
    """How the time without the move was made, in words."""
    counterfactual_end_s: float
    observed_end_s: float
    adjusted_gain_s: float
    interval: Interval
    device_s_before: float
    device_s_after: float
    predicted_gain_s: float

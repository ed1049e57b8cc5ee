"""What the ledger knows of a job: its attempts, moves, syncs, replicas, bundles and safety."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shiftbook.ledger.engines import EngineState
from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import reallocation
from shiftbook.ledger.events import state as state_events
from shiftbook.ledger.plan import Plan
from shiftbook.ledger.topology import Topology

OperationStatus = Literal[
    "proposed",
    "rejected",
    "abandoned",
    "granted",
    "quiesced",
    "transferred",
    "verified",
    "committed",
    "rolled_back",
    "poisoned",
]
CLOSED = frozenset({"rejected", "abandoned", "committed", "rolled_back", "poisoned"})


@dataclass(slots=True)
class OperationState:
    """One reallocation, as far as it has come."""

    operation: str
    job: str
    attempt: str
    status: OperationStatus
    strategy: reallocation.Strategy
    before: Topology
    after: Topology
    proposed_position: int
    proposed_ns: int
    predicted_gain_s: float
    predicted_cost_s: float
    gain_interval: reallocation.Interval
    restoring: bool = False
    epoch: int = -1
    """Position of the event that gave the grant now in force."""
    granted_position: int = -1
    devices: tuple[str, ...] = ()
    step_limit_s: float = 0.0
    controller: str = ""
    mover: str | None = None
    last_position: int = -1
    last_ns: int = 0
    adjusted_gain_s: float | None = None
    gain_position: int = -1

    @property
    def taken_over(self) -> bool:
        """True once recovery holds the operation instead of the controller it was granted to."""
        return self.epoch != self.granted_position

    @property
    def open(self) -> bool:
        """True until the operation is closed one way or another."""
        return self.status not in CLOSED


@dataclass(slots=True)
class SyncState:
    """One weight sync, as far as it has come."""

    operation: str
    version: int
    source_root: str
    targets: tuple[str, ...]
    status: Literal["started", "committed", "failed"] = "started"
    delivered: dict[str, str] = field(default_factory=dict)
    """Target to the root it read."""
    started_position: int = -1
    ended_position: int = -1
    lossy_root: str | None = None
    """What a target reads after a lossy patch of this sync; None where there is none."""
    lossy_whole: bool = False
    """True where whole weights of this sync are what its patches lead to."""


@dataclass(slots=True)
class ReplicaState:
    """A replica's present process."""

    component: str
    replica: str
    incarnation: str
    devices: tuple[str, ...]
    pid: int
    node: str
    version: int | None = None
    """Policy version it holds, as verified at first use; None before the first sync."""


@dataclass(slots=True)
class LeaseState:
    """Who owns a device."""

    job: str
    holder: str
    epoch: int


@dataclass(slots=True)
class AttemptState:
    """One process life of a job."""

    attempt: str
    parent: str | None
    epoch: int
    iteration: int
    position: int
    topology: Topology


@dataclass
class JobState:
    """A job as the ledger knows it."""

    name: str
    version: int = -1
    status: Literal["unopened", "open", "closed"] = "unopened"
    closed_position: int = -1
    opened: job_events.JobOpened | None = None
    plan: Plan | None = None
    topology: Topology = field(default_factory=Topology)
    attempts: dict[str, AttemptState] = field(default_factory=dict)
    attempt: str | None = None
    operations: dict[str, OperationState] = field(default_factory=dict)
    open_operation: str | None = None
    """The one reallocation that is granted and not closed."""
    epochs: dict[str, int] = field(default_factory=dict)
    """Device to the newest epoch of a move that covers it."""
    syncs: dict[str, SyncState] = field(default_factory=dict)
    open_sync: str | None = None
    replicas: dict[str, ReplicaState] = field(default_factory=dict)
    engines: dict[str, EngineState] = field(default_factory=dict)
    """Targets of weight syncs in this attempt, with the version that each holds."""
    synced_components: set[str] = field(default_factory=set)
    """Components whose replicas were targets of weight syncs: what a move brings up in them is one
    before it takes part in a sync."""
    safe_mode: str | None = None
    """Why the job is in safe mode; None when it is not."""
    frozen: Topology | None = None
    """The topology that safe mode froze."""
    previous_topology: Topology | None = None
    """The topology before the last committed move of this attempt."""
    iteration: int = 0
    """Iterations completed in the effective lineage."""
    policy_version: int = 0
    policy_fingerprint: str | None = None
    last_bundle: state_events.CheckpointSaved | None = None
    """Newest bundle of the effective lineage."""
    bundles: dict[str, state_events.CheckpointSaved] = field(default_factory=dict)
    """Every bundle that any attempt saved, by its digest."""
    registered: dict[str, state_events.CheckpointRegistered] = field(default_factory=dict)
    """Bundles of states that other programs saved, by their digests."""
    last_move_ns: int | None = None
    last_move_position: int = -1
    last_event_ns: int = 0
    losing_moves: int = 0
    """Committed moves in a row whose adjusted gain was negative."""
    missed_predictions: int = 0
    """Committed moves in a row whose adjusted gain lay outside its predicted interval."""
    newer: str | None = None
    """The first event that a newer version wrote and the fold could not take in, in words."""
    pending_amendments: set[str] = field(default_factory=set)
    shadows: dict[int, int] = field(default_factory=dict)
    """First iteration of a window that a shadow ran again to the update up to which it did."""

    def current_attempt(self) -> AttemptState | None:
        """The attempt that runs or ran last."""
        return self.attempts.get(self.attempt) if self.attempt else None

    def operation_running(self) -> OperationState | None:
        """The granted and unclosed reallocation, if there is one."""
        return self.operations.get(self.open_operation) if self.open_operation else None

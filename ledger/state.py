"""The fold: events to the state of every job and of the ledger, one for gate, CLI and judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import ValidationError

from shiftbook.ledger import engines
from shiftbook.ledger.engines import EngineState
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import lease, life, observation, reallocation, safety, sync, training
from shiftbook.ledger.events import state as state_events
from shiftbook.ledger.events.base import Event
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
RUNNING = frozenset({"granted", "quiesced", "transferred", "verified"})

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
    pending_amendments: set[str] = field(default_factory=set)
    shadows: dict[int, int] = field(default_factory=dict)
    """First iteration of a window that a shadow ran again to the update up to which it did."""

    def current_attempt(self) -> AttemptState | None:
        """The attempt that runs or ran last."""
        return self.attempts.get(self.attempt) if self.attempt else None

    def quarantined(self, state: LedgerState) -> tuple[str, ...]:
        """Devices that the job declared and that are in quarantine, sorted."""
        declared = {device.name for device in self.opened.devices} if self.opened else set()
        return tuple(sorted(declared & set(state.quarantine)))

    def operation_running(self) -> OperationState | None:
        """The granted and unclosed reallocation, if there is one."""
        return self.operations.get(self.open_operation) if self.open_operation else None


@dataclass
class LedgerState:
    """All jobs, all leases, up to and with ``position``."""

    position: int = -1
    jobs: MutableMapping[str, JobState] = field(default_factory=dict)
    leases: dict[str, LeaseState] = field(default_factory=dict)
    quarantine: dict[str, str] = field(default_factory=dict)
    """Device to the operation that poisoned it."""

    @property
    def size(self) -> int:
        """Number of events folded, and the position of the next one."""
        return self.position + 1

    def job(self, name: str) -> JobState:
        """State of a job; an unopened one where no event names it."""
        return self.jobs.get(name) or JobState(name)

    def apply(self, stored: StoredEvent, event: Event | None = None) -> None:
        """Take in the next event. Events of unknown type change nothing but the counts.

        ``event`` is its body as parsed, where the caller has parsed it already.
        """
        job = self.jobs.get(stored.job)
        if job is None:
            job = self.jobs[stored.job] = JobState(stored.job)
        handler = _HANDLERS.get(stored.type)
        if handler is not None:
            event = event or stored.parsed()
            if type(event).__name__ == stored.type:
                handler(self, job, stored, event)
        self.position = stored.position
        job.version = stored.version
        job.last_event_ns = stored.recorded_ns


def fold(events: Iterable[StoredEvent], state: LedgerState | None = None) -> LedgerState:
    """Fold events, in order, onto a state (a new one where none is given)."""
    state = state or LedgerState()
    for stored in events:
        state.apply(stored)
    return state


Handler = Callable[[LedgerState, JobState, StoredEvent, Event], None]
_HANDLERS: dict[str, Handler] = {}


def _on(model: type[Event]) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS[model.__name__] = handler
        return handler

    return register


# Each handler narrows the event to its model by the assert; the registry guarantees it.


@_on(job_events.JobOpened)
def _job_opened(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, job_events.JobOpened)
    job.status = "open"
    job.opened = event
    job.plan = event.plan
    job.topology = event.topology


@_on(job_events.AttemptStarted)
def _attempt_started(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, job_events.AttemptStarted)
    job.attempt = event.attempt
    job.attempts[event.attempt] = AttemptState(
        event.attempt,
        event.parent,
        event.epoch,
        event.iteration,
        stored.position,
        event.topology,
    )
    job.topology = event.topology
    job.previous_topology = None
    job.iteration = event.iteration
    job.policy_version = event.policy_version
    job.policy_fingerprint = event.policy_fingerprint
    # The processes of the attempt before are not counted on; those that live report again.
    job.replicas.clear()
    job.engines.clear()
    job.open_sync = None
    # A bundle that a branch of the lineage left behind says nothing about this attempt's state.
    job.last_bundle = job.bundles.get(event.bundle or "")


@_on(job_events.PlanAmended)
def _plan_amended(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, job_events.PlanAmended)
    if job.plan is None:
        return
    try:
        job.plan = amended(job.plan, event.field, event.after)
    except InvalidInput:
        return  # an amendment of no field, or to no valid value, changes nothing: a finding


def planned(plan: Plan, path: str) -> object:
    """Value of a field of the plan by its dotted path; InvalidInput where there is none."""
    value: object = plan.model_dump(mode="json")
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(value) if isinstance(value, dict) else "no further fields"
            raise InvalidInput(f"the plan has no field {path!r}: at {name!r}, found {known}")
        value = value[name]
    return value


def amended(plan: Plan, path: str, value: object) -> Plan:
    """A plan with one field changed; InvalidInput where the field or the value is none."""
    planned(plan, path)
    fields = plan.model_dump(mode="json")
    *parents, last = path.split(".")
    target = fields
    for name in parents:
        target = target[name]
    target[last] = value
    try:
        return Plan.model_validate(fields)
    except ValidationError as error:
        raise InvalidInput(
            f"expected a valid value for the plan's {path}, found {value!r} "
            f"({error.errors()[0]['msg']})"
        ) from error


@_on(job_events.JobClosed)
def _job_closed(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    job.status = "closed"
    job.closed_position = stored.position
    job.replicas.clear()
    job.engines.clear()


@_on(life.ReplicaStarted)
def _replica_started(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, life.ReplicaStarted)
    job.replicas[event.replica] = ReplicaState(
        event.component, event.replica, event.incarnation, event.devices, event.pid, event.node
    )
    engines.started(job.engines, event.replica, event.incarnation, stored.position)


@_on(life.ReplicaLost)
def _replica_lost(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, life.ReplicaLost)
    known = job.replicas.get(event.replica)
    if known is not None and known.incarnation == event.incarnation:
        del job.replicas[event.replica]
        engines.lost(job.engines, event.replica, event.cause, stored.position)


@_on(lease.LeaseGranted)
def _lease_granted(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, lease.LeaseGranted)
    for device in event.devices:
        state.leases[device] = LeaseState(stored.job, event.holder, stored.position)


def _free(state: LedgerState, job: str, devices: tuple[str, ...]) -> None:
    for device in devices:
        held = state.leases.get(device)
        if held is not None and held.job == job:
            del state.leases[device]


@_on(lease.LeaseReleased)
def _lease_released(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, lease.LeaseReleased)
    _free(state, stored.job, event.devices)


@_on(lease.LeaseExpired)
def _lease_expired(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, lease.LeaseExpired)
    _free(state, stored.job, event.devices)


@_on(reallocation.ReallocationProposed)
def _proposed(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.ReallocationProposed)
    if stored.operation is None:
        return
    before = _shared(event.before, job.topology, job.previous_topology)
    job.operations[stored.operation] = OperationState(
        operation=stored.operation,
        job=stored.job,
        attempt=event.attempt,
        status="proposed",
        strategy=event.strategy,
        before=before,
        after=_shared(event.after, before, job.previous_topology, job.topology),
        proposed_position=stored.position,
        proposed_ns=stored.recorded_ns,
        predicted_gain_s=event.predicted_gain_s,
        predicted_cost_s=event.predicted_cost_s,
        gain_interval=event.gain_interval,
        restoring=event.restoring,
        last_position=stored.position,
        last_ns=stored.recorded_ns,
    )


def _shared(topology: Topology, *known: Topology | None) -> Topology:
    """One of the known topologies where it is the same: a job goes to and fro between a few."""
    for other in known:
        # Equal dictionaries may differ in their order, which is the declared one.
        if other == topology and list(other.components) == list(topology.components):
            return other
    return topology


def _advance(job: JobState, stored: StoredEvent, status: OperationStatus) -> OperationState | None:
    operation = job.operations.get(stored.operation or "")
    if operation is None:
        return None
    operation.status = status
    operation.last_position = stored.position
    operation.last_ns = stored.recorded_ns
    if status in CLOSED and job.open_operation == operation.operation:
        job.open_operation = None
    return operation


def _step(model: type[Event], status: OperationStatus) -> None:
    @_on(model)
    def _apply(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
        _advance(job, stored, status)


_step(reallocation.ReallocationRejected, "rejected")
_step(reallocation.ReallocationAbandoned, "abandoned")
_step(reallocation.ReallocationQuiesced, "quiesced")
_step(reallocation.ReallocationTransferred, "transferred")
_step(reallocation.ReallocationVerified, "verified")


@_on(reallocation.ReallocationGranted)
def _granted(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.ReallocationGranted)
    operation = _advance(job, stored, "granted")
    if operation is not None:
        operation.epoch = operation.granted_position = stored.position
        operation.devices = event.devices
        operation.step_limit_s = event.step_limit_s
        operation.controller = event.controller
        operation.mover = event.mover
        job.epochs.update(dict.fromkeys(event.devices, stored.position))
        job.open_operation = operation.operation


@_on(reallocation.OperationTakenOver)
def _taken_over(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.OperationTakenOver)
    operation = job.operations.get(stored.operation or "")
    if operation is not None:
        operation.epoch = stored.position
        operation.controller = event.controller
        job.epochs.update(dict.fromkeys(operation.devices, stored.position))
        operation.last_position = stored.position
        operation.last_ns = stored.recorded_ns


@_on(reallocation.ReallocationCommitted)
def _committed(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.ReallocationCommitted)
    operation = _advance(job, stored, "committed")
    if operation is not None:
        job.previous_topology = operation.before
        job.topology = _shared(event.after, operation.after)
        placed = {replica.name for _, replica in event.after.walk()}
        gone = {n for n, r in job.replicas.items() if n not in placed and r.devices}
        job.replicas = {n: r for n, r in job.replicas.items() if n not in gone}
        job.engines = {n: e for n, e in job.engines.items() if n not in gone}
        job.last_move_ns = stored.recorded_ns
        job.last_move_position = stored.position


@_on(reallocation.ReallocationRolledBack)
def _rolled_back(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.ReallocationRolledBack)
    if _advance(job, stored, "rolled_back") is not None:
        job.topology = event.restored
        job.last_move_ns = stored.recorded_ns
        job.last_move_position = stored.position


@_on(reallocation.ReallocationPoisoned)
def _poisoned(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.ReallocationPoisoned)
    _advance(job, stored, "poisoned")
    for device in event.devices:
        state.quarantine[device] = stored.operation or ""


@_on(reallocation.GainRealized)
def _gain(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.GainRealized)
    operation = job.operations.get(stored.operation or "")
    if operation is None:
        return
    gain_s = event.adjusted_gain_s
    operation.adjusted_gain_s = gain_s
    operation.gain_position = stored.position
    job.losing_moves = job.losing_moves + 1 if gain_s < 0 else 0
    within = operation.gain_interval.low <= gain_s <= operation.gain_interval.high
    job.missed_predictions = 0 if within else job.missed_predictions + 1


@_on(sync.WeightSyncStarted)
def _sync_started(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, sync.WeightSyncStarted)
    if stored.operation is None:
        return
    job.syncs[stored.operation] = SyncState(
        stored.operation,
        event.version,
        event.source_root,
        event.targets,
        started_position=stored.position,
    )
    job.open_sync = stored.operation
    engines.begun(job.engines, event, stored.position)


@_on(sync.WeightSyncDelivered)
def _sync_delivered(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, sync.WeightSyncDelivered)
    current = job.syncs.get(stored.operation or "")
    if current is not None:
        same = event.root == current.source_root
        current.delivered[event.target] = current.source_root if same else event.root
    engines.delivered(job.engines, event, stored.position)
    replica = job.replicas.get(event.target)
    if replica is not None and replica.incarnation == event.incarnation and not event.differing:
        replica.version = event.version


def _close_sync(job: JobState, stored: StoredEvent, status: Literal["committed", "failed"]) -> None:
    current = job.syncs.get(stored.operation or "")
    if current is not None:
        current.status = status
        current.ended_position = stored.position
    if job.open_sync == stored.operation:
        job.open_sync = None


@_on(sync.WeightSyncCommitted)
def _sync_committed(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, sync.WeightSyncCommitted)
    engines.committed(job.engines, event, stored.position)
    _close_sync(job, stored, "committed")


@_on(sync.WeightSyncFailed)
def _sync_failed(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, sync.WeightSyncFailed)
    current = job.syncs.get(stored.operation or "")
    if current is not None:
        engines.failed(job.engines, event, current.targets, stored.position)
    _close_sync(job, stored, "failed")


@_on(state_events.CheckpointSaved)
def _saved(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, state_events.CheckpointSaved)
    job.bundles[event.bundle] = event
    if event.attempt == job.attempt:
        job.last_bundle = event


@_on(state_events.CheckpointRegistered)
def _registered(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, state_events.CheckpointRegistered)
    job.registered[event.bundle] = event


@_on(training.UpdateApplied)
def _updated(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, training.UpdateApplied)
    job.policy_version = event.policy_version
    job.policy_fingerprint = event.params_after


@_on(observation.IterationCompleted)
def _iterated(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, observation.IterationCompleted)
    job.iteration = event.iteration + 1


@_on(safety.SafeModeEntered)
def _safe_mode(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, safety.SafeModeEntered)
    job.safe_mode = event.reason
    job.frozen = event.topology


@_on(safety.ShadowCompared)
def _shadowed(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, safety.ShadowCompared)
    job.shadows[event.iteration] = event.last_update


@_on(safety.QuarantineLifted)
def _lifted(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, safety.QuarantineLifted)
    for device in event.devices:
        state.quarantine.pop(device, None)


@_on(safety.SafeModeLeft)
def _thawed(state: LedgerState, job: JobState, stored: StoredEvent, event: Event) -> None:
    job.safe_mode = None
    job.frozen = None
    job.losing_moves = 0
    job.missed_predictions = 0


FOLDED_TYPES = frozenset(_HANDLERS)
"""Types that change more than a job's counts."""

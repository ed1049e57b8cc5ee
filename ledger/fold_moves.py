"""Rules of the fold for reallocations."""

from __future__ import annotations

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.events import reallocation
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.fold_rules import Shared, on
from shiftbook.ledger.job_state import CLOSED, JobState, OperationState, OperationStatus
from shiftbook.ledger.topology import Topology


@on(reallocation.ReallocationProposed)
def _proposed(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
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
    @on(model)
    def _apply(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
        _advance(job, stored, status)


_step(reallocation.ReallocationRejected, "rejected")
_step(reallocation.ReallocationAbandoned, "abandoned")
_step(reallocation.ReallocationQuiesced, "quiesced")
_step(reallocation.ReallocationTransferred, "transferred")
_step(reallocation.ReallocationVerified, "verified")


@on(reallocation.ReallocationGranted)
def _granted(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
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


@on(reallocation.OperationTakenOver)
def _taken_over(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.OperationTakenOver)
    operation = job.operations.get(stored.operation or "")
    if operation is not None:
        operation.epoch = stored.position
        operation.controller = event.controller
        job.epochs.update(dict.fromkeys(operation.devices, stored.position))
        operation.last_position = stored.position
        operation.last_ns = stored.recorded_ns


@on(reallocation.ReallocationCommitted)
def _committed(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
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


@on(reallocation.ReallocationRolledBack)
def _rolled_back(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.ReallocationRolledBack)
    if _advance(job, stored, "rolled_back") is not None:
        job.topology = event.restored
        job.last_move_ns = stored.recorded_ns
        job.last_move_position = stored.position


@on(reallocation.ReallocationPoisoned)
def _poisoned(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, reallocation.ReallocationPoisoned)
    _advance(job, stored, "poisoned")
    for device in event.devices:
        state.quarantine[device] = stored.operation or ""


@on(reallocation.GainRealized)
def _gain(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
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

"""Rules of the fold for jobs: attempts, plan, replicas, leases, bundles, updates and safety."""

from __future__ import annotations

from shiftbook.ledger import engines
from shiftbook.ledger.amendment import amended
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import lease, life, observation, safety, training
from shiftbook.ledger.events import state as state_events
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.fold_rules import Shared, on
from shiftbook.ledger.job_state import AttemptState, JobState, LeaseState, ReplicaState


@on(job_events.JobOpened)
def _job_opened(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, job_events.JobOpened)
    job.status = "open"
    job.opened = event
    job.plan = event.plan
    job.topology = event.topology


@on(job_events.AttemptStarted)
def _attempt_started(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
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


@on(job_events.PlanAmended)
def _plan_amended(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, job_events.PlanAmended)
    if job.plan is None:
        return
    try:
        job.plan = amended(job.plan, event.field, event.after)
    except InvalidInput:
        return  # an amendment of no field, or to no valid value, changes nothing: a finding


@on(job_events.JobClosed)
def _job_closed(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    job.status = "closed"
    job.closed_position = stored.position
    job.replicas.clear()
    job.engines.clear()


@on(life.ReplicaStarted)
def _replica_started(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, life.ReplicaStarted)
    job.replicas[event.replica] = ReplicaState(
        event.component, event.replica, event.incarnation, event.devices, event.pid, event.node
    )
    engines.started(
        job.engines, event, stored.position, synced=event.component in job.synced_components
    )


@on(life.ReplicaLost)
def _replica_lost(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, life.ReplicaLost)
    known = job.replicas.get(event.replica)
    if known is not None and known.incarnation == event.incarnation:
        del job.replicas[event.replica]
        engines.lost(job.engines, event.replica, event.cause, stored.position)


@on(lease.LeaseGranted)
def _lease_granted(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, lease.LeaseGranted)
    for device in event.devices:
        state.leases[device] = LeaseState(stored.job, event.holder, stored.position)


def _free(state: Shared, job: str, devices: tuple[str, ...]) -> None:
    for device in devices:
        held = state.leases.get(device)
        if held is not None and held.job == job:
            del state.leases[device]


@on(lease.LeaseReleased)
def _lease_released(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, lease.LeaseReleased)
    _free(state, stored.job, event.devices)


@on(lease.LeaseExpired)
def _lease_expired(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, lease.LeaseExpired)
    _free(state, stored.job, event.devices)


@on(state_events.CheckpointSaved)
def _saved(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, state_events.CheckpointSaved)
    job.bundles[event.bundle] = event
    if event.attempt == job.attempt:
        job.last_bundle = event


@on(state_events.CheckpointRegistered)
def _registered(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, state_events.CheckpointRegistered)
    job.registered[event.bundle] = event


@on(state_events.CheckpointRestored)
def _restored(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    """A loop may go back to an older bundle without a new attempt: the policy is the bundle's."""
    assert isinstance(event, state_events.CheckpointRestored)
    if event.attempt == job.attempt:
        job.iteration = event.iteration
        job.policy_version = event.policy_version
        job.policy_fingerprint = event.parts.get("model", job.policy_fingerprint)


@on(training.UpdateApplied)
def _updated(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, training.UpdateApplied)
    job.policy_version = event.policy_version
    job.policy_fingerprint = event.params_after


@on(observation.IterationCompleted)
def _iterated(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, observation.IterationCompleted)
    job.iteration = event.iteration + 1


@on(safety.SafeModeEntered)
def _safe_mode(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, safety.SafeModeEntered)
    job.safe_mode = event.reason
    job.frozen = event.topology


@on(safety.ShadowCompared)
def _shadowed(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, safety.ShadowCompared)
    job.shadows[event.iteration] = event.last_update


@on(safety.QuarantineLifted)
def _lifted(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, safety.QuarantineLifted)
    for device in event.devices:
        state.quarantine.pop(device, None)


@on(safety.SafeModeLeft)
def _thawed(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    job.safe_mode = None
    job.frozen = None
    job.losing_moves = 0
    job.missed_predictions = 0

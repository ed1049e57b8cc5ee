"""Rules of the fold for weight syncs: the operation, its targets, and the version each holds."""

from __future__ import annotations

from typing import Literal

from shiftbook.ledger import engines
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.events import state as state_events
from shiftbook.ledger.events import sync
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.fold_rules import Shared, on
from shiftbook.ledger.job_state import JobState, SyncState


@on(sync.WeightSyncStarted)
def _sync_started(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, sync.WeightSyncStarted)
    if stored.operation is None:
        return
    job.syncs[stored.operation] = SyncState(
        stored.operation,
        event.version,
        event.source_root,
        event.targets,
        started_position=stored.position,
        lossy_root=None if event.lossy is None else event.lossy.root,
        lossy_whole=event.lossy is not None and event.lossy.whole == "decoded",
    )
    job.open_sync = stored.operation
    new = set(event.targets) - job.engines.keys()
    if new:
        named = {component for component, replica in job.topology.walk() if replica.name in new}
        job.synced_components |= named
    engines.begun(job.engines, event, stored.position)


@on(sync.WeightSyncDelivered)
def _sync_delivered(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
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


@on(sync.WeightSyncCommitted)
def _sync_committed(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, sync.WeightSyncCommitted)
    engines.committed(job.engines, event, stored.position)
    _close_sync(job, stored, "committed")


@on(sync.WeightSyncFailed)
def _sync_failed(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, sync.WeightSyncFailed)
    current = job.syncs.get(stored.operation or "")
    if current is not None:
        engines.failed(job.engines, event, current.targets, stored.position)
    _close_sync(job, stored, "failed")


@on(state_events.StateFirstUsed)
def _first_used(state: Shared, job: JobState, stored: StoredEvent, event: Event) -> None:
    assert isinstance(event, state_events.StateFirstUsed)
    replica = job.replicas.get(event.replica)
    if replica is not None and replica.incarnation != event.incarnation:
        return  # told late, of a process that was replaced
    synced = event.component in job.synced_components
    engines.used(job.engines, event, stored.position, synced=synced)
    if replica is not None and event.replica in job.engines:
        replica.version = job.engines[event.replica].version
